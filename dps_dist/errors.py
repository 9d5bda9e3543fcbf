"""What went wrong, said in one sentence; the command line prints it, exit code 2 or `code`."""


class FailedError(Exception):
    """Work that came to no end though nothing was wrong with what was asked: one sentence."""

    code = 1


class LostError(FailedError):
    """A job that can no longer be seen: nothing says that it failed."""

    code = 75  # as sysexits.h names it: try again later


class InputError(ValueError):
    """Names the field or file, the value received and the remedy. Never a bug of ours."""


class PeerFailedError(InputError):
    """Another rank failed; its own message says how, and whether starting again may help."""
