"""`dps`: the command line. A command says what it does and hands over; heavy imports wait."""

import sys

try:
    from dps_dist.cli.base import app, run

    # They add their commands, in the order of the help.
    # isort: off
    from dps_dist.cli import data, runs, results, machine  # noqa: F401
except KeyboardInterrupt:  # it takes half a second
    print("dps: stopped", file=sys.stderr)
    sys.exit(130)


def main() -> None:
    """The `dps` command."""
    run(app)
