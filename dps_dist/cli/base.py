"""What every command shares: the application, how lines are said, `--set`."""

from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="dps",
    help="Train image classifiers whose targets are learned per sample.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False)


def say(line: str) -> None:
    """A plain line: paths may hold anything, also what rich takes for markup."""
    console.print(line, soft_wrap=True, markup=False)


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a field of the recipe; may be repeated."),
]


def examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)
