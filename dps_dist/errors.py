"""What went wrong, said in one sentence; the command line prints it, exit code 2 or `code`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FailedError(Exception):
    """Work that came to no end though nothing was wrong with what was asked: one sentence."""

    code = 1


class LostError(FailedError):
    """A job that can no longer be seen: nothing says that it failed."""

    code = 75  # as sysexits.h names it: try again later


class LostRunError(FailedError):
    """What led the run is gone, as a process that the kernel killed: it may be started again."""


class InputError(ValueError):
    """Names the field or file, the value received and the remedy. Never a bug of ours."""


class PeerFailedError(InputError):
    """Another rank failed; its own message says how, and whether starting again may help."""


@contextmanager
def naming(path: Path, made_as: Path | None = None) -> Iterator[None]:
    """Failed writes do not say by themselves which file, and so which disk, they were about.

    made_as: what is renamed to `path` when it is whole, and is nothing to the user.
    """
    try:
        yield
    except OSError as error:
        ours = made_as is not None and str(error.filename).startswith(str(made_as))
        if error.errno is not None and (error.filename is None or ours):
            error.filename, error.filename2 = str(path), None
        raise
