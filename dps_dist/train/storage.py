"""A run's folder, on a disk that all workers share or in an object store: `Storage`.

What is written is whole or not there. On a disk it outlasts a power cut, too.
"""

import copy
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
from pyarrow import fs

from dps_dist.errors import InputError, naming
from dps_dist.targets.checksums import BLOCK_BYTES, sum_of

URL = re.compile(r"([a-z][a-z0-9+.-]*):/")
KNOWN_TO_PYARROW = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
OBJECT_STORES = ("s3", "gcs", "abfs")  # have no folders: a name with slashes is all it takes
UNFINISHED = ".unfinished"


class Storage:
    """A folder by its path or URL: "runs/x", "s3://bucket/x?region=eu-central-1", "memory://x".

    Names are relative to it, with slashes; "" is the folder itself. As text it has neither query
    nor password; `url` is all of it, absolute, for other processes.
    """

    def __init__(self, url: str | Path) -> None:
        text = str(url)
        if not text:
            raise InputError("the storage folder is '': give a folder, such as runs, or a URL")
        self._system: Any
        if scheme := URL.match(text):
            self._system, self._root = _open(text, scheme[1])
        else:
            self._system, self._root = fs.LocalFileSystem(), str(Path(text).expanduser().absolute())
        self._root = self._root.rstrip("/") or "/"
        self.local = Path(self._root) if self._system.type_name == "local" else None
        self.url = text if self.local is None else self._root

    def __truediv__(self, name: str) -> "Storage":
        within = copy.copy(self)
        base, mark, query = self._parts()
        within._root, within.url = self._at(name), f"{base.rstrip('/')}/{name}{mark}{query}"
        within.local = self.local and self.local / name
        return within

    def __str__(self) -> str:
        return self.url if self.local else _shown(self.url)

    def __repr__(self) -> str:
        return f"Storage({str(self)!r})"

    @property
    def filesystem(self) -> tuple[Any, str]:
        """Arrow's file system, and the folder's path in it."""
        return self._system, self._root

    @property
    def name(self) -> str:
        return self._root.rpartition("/")[2]

    @property
    def parent(self) -> "Storage":
        above = copy.copy(self)
        base, mark, query = self._parts()
        above._root = self._root.rpartition("/")[0] or "/"
        above.url = (base.rstrip("/").rpartition("/")[0] or "/") + mark + query
        above.local = self.local and self.local.parent
        return above

    # Files

    def write(self, name: str, data: bytes) -> None:
        """The file is there with all of the data, or as it was before."""
        if self.local is None:
            self._make_room(name)
            with self._system.open_output_stream(self._at(name)) as stream:
                stream.write(data)
            return
        path = self.local / name
        make_folder(path.parent)
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        try:
            with naming(path, made_as=unfinished):
                with unfinished.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
        finally:
            with suppress(OSError):  # of a read-only disk: the first error is the one to tell
                unfinished.unlink(missing_ok=True)
        sync(path.parent)

    def read(self, name: str) -> bytes:
        """All of the file; a FileNotFoundError if it is not there."""
        with self._system.open_input_stream(self._at(name)) as stream:
            data: bytes = stream.read()
        return data

    def sum_of(self, name: str) -> tuple[int, int]:
        """Size and CRC-32 of the file."""
        with self._system.open_input_stream(self._at(name)) as stream:
            return sum_of(stream)

    def exists(self, name: str = "") -> bool:
        return bool(self._type(name) != fs.FileType.NotFound)

    def names(self, name: str = "") -> list[str]:
        """What is in the folder, sorted, without files that were never finished; [] if absent."""
        selector = fs.FileSelector(self._at(name), allow_not_found=True)
        try:
            found = [info.base_name for info in self._system.get_file_info(selector)]
        except (FileNotFoundError, NotADirectoryError):  # made, or removed, while it was looked at
            return []
        return sorted(base for base in found if not base.endswith(UNFINISHED))

    def remove(self, name: str) -> None:
        """Remove the file, or the folder with all that is in it; nothing if it is not there."""
        kind = self._type(name)
        try:
            if kind == fs.FileType.Directory:
                self._system.delete_dir(self._at(name))
            elif kind != fs.FileType.NotFound:
                self._system.delete_file(self._at(name))
        except FileNotFoundError:
            if self.exists(name):  # somebody else is removing it, too
                self.remove(name)

    def tidy(self) -> None:
        """Remove what kills left of files that were being written."""
        if self.local is not None:
            for path in self.local.glob(f"*{UNFINISHED}"):
                path.unlink(missing_ok=True)

    # Folders

    def upload(self, folder: Path, name: str) -> None:
        """Copy a local folder's files, in order of their names."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            target = f"{name}/{path.relative_to(folder).as_posix()}"
            self._make_room(target)
            with path.open("rb") as file, self._system.open_output_stream(self._at(target)) as out:
                shutil.copyfileobj(file, out, BLOCK_BYTES)

    def download(self, name: str, folder: Path) -> None:
        """Copy a file into a local folder, where it has the same name."""
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._system.open_input_stream(self._at(name)) as file, path.open("wb") as out:
            shutil.copyfileobj(file, out, BLOCK_BYTES)

    def fetch(self, name: str, into: Path) -> Path:
        """A local folder with what is in it: its own, or `into` with a copy."""
        if self.local is not None:
            return self.local / name
        into.mkdir(parents=True, exist_ok=True)
        fs.copy_files(
            self._at(name),
            str(into),
            source_filesystem=self._system,
            destination_filesystem=fs.LocalFileSystem(),
        )
        return into

    # Inside

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _type(self, name: str) -> Any:
        return self._system.get_file_info(self._at(name)).type

    def _parts(self) -> tuple[str, str, str]:
        return (self.url, "", "") if self.local else self.url.partition("?")

    def _make_room(self, name: str) -> None:
        if self._system.type_name not in OBJECT_STORES:
            self._system.create_dir(self._at(name).rpartition("/")[0], recursive=True)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk itself."""
    number = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(number)
    finally:
        os.close(number)


def make_folder(path: Path) -> None:
    """The folder and all above it, on the disk itself."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def _open(url: str, scheme: str) -> tuple[Any, str]:
    shown = _shown(url)
    try:
        if scheme in KNOWN_TO_PYARROW:
            system, root = fs.FileSystem.from_uri(url)
        else:
            other, root = fsspec.core.url_to_fs(url)
            system = fs.PyFileSystem(fs.FSSpecHandler(other))
    except (pa.ArrowException, ValueError, ImportError, OSError) as error:
        reason = str(error).replace(url, shown)  # which may hold a password
        raise InputError(
            f"{shown} cannot be opened ({reason}): give a folder, or a URL such as s3://bucket/runs"
        ) from None
    if not root.strip("/"):
        raise InputError(f"{shown} names no folder: give one, such as {scheme}://bucket/runs")
    return system, root


def _shown(url: str) -> str:
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0])


def without_secrets(text: str) -> str:
    """A text in which URLs may stand, without their passwords and queries."""
    without_queries = re.sub(r"(://[^\s?'\"]*\?)[^\s'\"]*", r"\1***", text)
    return re.sub(r"://[^/@\s]*@", "://***@", without_queries)
