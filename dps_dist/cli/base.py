"""What every command shares: the application, how lines are said, `--set`."""

import sys
from typing import Annotated, TextIO

import typer
from rich.console import Console

from dps_dist.errors import FailedError, InputError

app = typer.Typer(
    name="dps",
    help="Train image classifiers whose targets are learned per sample.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False)


def say(line: str, to: TextIO | None = None) -> None:
    """A plain line: paths may hold anything, also what rich takes for markup."""
    said = console if to is None else Console(file=to, highlight=False)
    said.print(line, soft_wrap=True, markup=False)


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a field of the recipe; may be repeated."),
]


def examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def run(app: typer.Typer) -> None:
    """A user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except InputError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(2)
    except FailedError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(error.code)
    except SystemExit as ended:
        if ended.code == 130:  # typer's for Ctrl-C
            print("dps: stopped", file=sys.stderr)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"dps: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
