"""Locks on files and folders, which go with the process that took them."""

import errno
import fcntl
from typing import IO, Any

NONE = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # what a disk without them answers


def lock(held: IO[Any] | int) -> bool:
    """Whether it is ours, or on a disk that knows no locks; False if another process has it.

    NFS locks only what was opened for writing.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NONE:
            raise
    return True
