"""What every command shares: the application, how lines are said, `--set`."""

import errno
import io
import signal
import sys
import threading
from importlib.metadata import version
from typing import Annotated, TextIO

import typer
from rich.console import Console

from dps_dist.errors import FailedError, InputError

app = typer.Typer(
    name="dps",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False, emoji=False)


def _say_version(asked: bool) -> None:
    if asked:
        say(f"dps_dist {version('dps_dist')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say it, and end."),
    ] = False,
) -> None:
    """Train image classifiers whose targets are learned per sample."""


NO_RIGHT = "choose another place, or have its rights changed"
FULL = "make room there or choose another place, then run this again"
REMEDIES = {
    errno.EACCES: NO_RIGHT,
    errno.EPERM: NO_RIGHT,
    errno.EROFS: NO_RIGHT,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.ENOENT: "make its folder first, or correct the path",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR, errno.EISDIR), "choose another path"),
}


def say(line: str, to: TextIO | None = None) -> None:
    """A plain line: paths may hold anything, also what rich takes for markup."""
    said = console if to is None else Console(file=to, highlight=False, emoji=False)
    said.print(line, soft_wrap=True, markup=False)


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a field of the recipe; may be repeated."),
]


def examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def _end_as_on_ctrl_c() -> threading.Event:
    """SIGTERM, which Slurm, Kubernetes and `timeout` send, sets the event and acts as a SIGINT.

    What a script puts into the background ignores SIGINT, and is still to be ended.
    """
    terminated = threading.Event()

    def interrupt(*_: object) -> None:
        terminated.set()
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    return terminated


def run(app: typer.Typer) -> None:
    """A user's mistake is one sentence and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # γ on a terminal that has none becomes a ?
            stream.reconfigure(errors="replace")
    terminated = _end_as_on_ctrl_c()
    try:
        app()
    except InputError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(2)
    except FailedError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(error.code)
    except SystemExit as ended:
        if ended.code != 130:  # typer's for Ctrl-C
            raise
        print("dps: stopped", file=sys.stderr)
        sys.exit(143 if terminated.is_set() else 130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = f": {REMEDIES[error.errno]}" if error.errno in REMEDIES else ""
        print(f"dps: {where}{error.strerror or error}{remedy}", file=sys.stderr)
        sys.exit(2)
