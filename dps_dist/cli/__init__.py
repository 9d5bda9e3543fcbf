"""`dps`: the command line. A command says what it does and hands over; heavy imports wait."""

import sys

from dps_dist.cli.base import app
from dps_dist.errors import FailedError, InputError

# They add their commands, in the order of the help.
# isort: off
from dps_dist.cli import data, runs, results, machine  # noqa: F401


def main() -> None:
    """The `dps` command: a user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except InputError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(2)
    except FailedError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == 130:  # typer's for Ctrl-C
            print("dps: stopped", file=sys.stderr)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"dps: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
