"""`dps`: the command line. A command says what it does and hands over; heavy imports wait."""

from dps_dist.cli.base import app, run

# They add their commands, in the order of the help.
# isort: off
from dps_dist.cli import data, runs, results, machine  # noqa: F401


def main() -> None:
    """The `dps` command."""
    run(app)
