"""Machine code that numba makes once for a machine, not once for each process.

`@kept(…)` is numba's `@njit(cache=True, …)` with three differences: two nodes that share a disk, of
whatever CPUs, cannot take each other's code for their own; a folder that cannot be written, or has
no room, costs seconds and no run; a file that is damaged, or not this user's own, is as good as
none. The files are where numba puts them: in `__pycache__` beside the source or, if that is
read-only, in the user's cache; `NUMBA_CACHE_DIR` names another place.
"""

import hashlib
import os
import pickle
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

WRITABLE_BY_OTHERS = 0o022


def kept(signature: str | None = None, made_with: str = "", **options: Any) -> Any:
    """`njit` with these options; with a signature the function is compiled, or found, at once.

    made_with: the versions of libraries that it calls. What else it calls that is compiled must
    stand in its own file: only that one is seen to change.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        with suppress(RuntimeError):  # no folder to write to
            dispatcher._cache = _Kept(function, made_with, options)
        if signature:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return decorate


class _Kept(FunctionCache):  # type: ignore[misc]
    """Numba's, on files of our own; no failure of theirs is one of the function's."""

    def __init__(
        self, function: Callable[..., Any], made_with: str, options: dict[str, Any]
    ) -> None:
        super().__init__(function)
        source = self._impl.locator.get_source_stamp(), numba.__version__, made_with
        named = {key: sorted(v) if isinstance(v, set) else v for key, v in options.items()}
        base = self._impl.filename_base
        self._cache_file = _Files(Path(self.cache_path), base, source, sorted(named.items()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):  # unpickling what another numba wrote may raise anything
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


class _Files:
    """One file for each signature, CPU and set of options, of which numba forgets the last. It
    numbers its files and keeps an index, which two processes that write at once can leave wrong.

    A file begins with the SHA-256 of the rest: LLVM ends the process over damaged machine code.
    """

    def __init__(self, folder: Path, base: str, source: Any, options: Any) -> None:
        self.folder, self.base, self.source, self.options = folder, base, source, options

    def load(self, key: Any) -> Any:
        *where, code = key
        try:
            with self._path(where).open("rb") as file:
                status, whole = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            return None
        digest, rest = whole[:32], whole[32:]
        ours = status.st_uid == os.geteuid() and not status.st_mode & WRITABLE_BY_OTHERS
        if not ours or hashlib.sha256(rest).digest() != digest:
            return None
        stamp, data = pickle.loads(rest)
        return data if stamp == (self.source, self._made_for(where), code) else None

    def save(self, key: Any, data: Any) -> None:
        *where, code = key
        stamp = self.source, self._made_for(where), code
        path, rest = self._path(where), dumps((stamp, data))
        unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")  # nodes have the same pids
        try:
            unfinished.touch(0o600)
            unfinished.write_bytes(hashlib.sha256(rest).digest() + rest)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _made_for(self, where: Any) -> str:
        return repr((self.options, *where))

    def _path(self, where: Any) -> Path:
        named = hashlib.sha256(self._made_for(where).encode()).hexdigest()[:16]
        return self.folder / f"{self.base}.{named}.nbc"
