"""What a data set's folder must hold, and the sentence a user reads where it does not.

The sources call this while they open; `sources.open_source` adds where the data set is had.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dps_dist.errors import InputError


class BadFiles(InputError):  # noqa: N818
    """A data set's files are missing or are not what its official release holds."""


def require_folder(folder: Path, expected: str) -> Path:
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        raise BadFiles(f"{folder} {state}: expected {expected}")
    return folder


def require_file(file: Path, expected: str) -> Path:
    if not file.is_file():
        raise BadFiles(f"{file} is missing: expected {expected}")
    return file


def read_bytes(file: Path, expected: str) -> bytes:
    try:
        return require_file(file, expected).read_bytes()
    except OSError as error:
        raise BadFiles(f"{file} cannot be read ({error.strerror}): expected {expected}") from error


def read_lines(file: Path, expected: str) -> list[str]:
    """The lines of a text file that hold anything."""
    try:
        text = read_bytes(file, expected).decode()
    except UnicodeDecodeError as error:
        raise BadFiles(f"{file} is not a text file: expected {expected}") from error
    return [line for line in text.splitlines() if line.strip()]


def folder_holding(root: Path, folder: str, files: Sequence[str]) -> Path | None:
    """`root/folder` or `root` itself, whichever has any of the files."""
    for candidate in (root / folder, root):
        if any((candidate / name).is_file() for name in files):
            return candidate
    return None


def some(names: Iterable[str], most: int = 5) -> str:
    """The first few names for a message: «a, b, c and 17 more»."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
