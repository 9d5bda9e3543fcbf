"""Machine code that numba makes once for a machine, not once for each process.

`@kept(…)` is numba's `@njit(cache=True, …)` with three differences: two nodes that share a disk, of
whatever CPUs, cannot take each other's code for their own; a folder that cannot be written, or has
no room, costs seconds and no run; a damaged file is as good as none. The files are where numba puts
them: in `__pycache__` beside the source or, if that is read-only, in the user's cache;
`NUMBA_CACHE_DIR` names another place.
"""

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps


def kept(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`njit` with these options; with a signature the function is compiled, or found, at once.

    What it calls that is compiled must stand in its own file: only that one is seen to change.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        with suppress(RuntimeError):  # no folder to write to
            dispatcher._cache = _Kept(function, options)
        if signature:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return decorate


class _Kept(FunctionCache):  # type: ignore[misc]
    """Numba's, on files of our own; no failure of theirs is one of the function's."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function)
        source = self._impl.locator.get_source_stamp(), sorted(options.items())
        self._cache_file = _Files(Path(self.cache_path), self._impl.filename_base, source)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with suppress(Exception):  # unpickling what is damaged may raise anything
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


class _Files:
    """One file a signature, CPU and set of options, of which numba forgets the last. It numbers its
    files and keeps an index, which two processes that write at once can leave wrong.
    """

    def __init__(self, folder: Path, base: str, source: tuple[Any, Any]) -> None:
        self.folder, self.base = folder, base
        self.stamp, self.options = source

    def load(self, key: Any) -> Any:
        path = self._path(key)
        if not path.exists():
            return None
        stamp, data = pickle.loads(path.read_bytes())  # as trusted as the .pyc beside it
        return data if stamp == self.stamp else None

    def save(self, key: Any, data: Any) -> None:
        path = self._path(key)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(dumps((self.stamp, data)))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        made_for = repr((numba.__version__, self.options, key)).encode()
        return self.folder / f"{self.base}.{hashlib.sha256(made_for).hexdigest()[:16]}.nbc"
