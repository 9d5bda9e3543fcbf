"""Training: train, recipes."""

from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from dps_dist import recipes
from dps_dist.cli.base import Settings, app, console, examples, say


@app.command(
    epilog=examples(
        "dps train digits --workers 2 --name first",
        "dps train cifar10-resnet18 --set method.gamma=.97 --set method.c=2000",
        "dps train imagenet-resnet152 --workers 8:64 --out s3://bucket/runs --name imagenet",
        "dps train --name imagenet --out s3://bucket/runs --resume",
    )
)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe's name or file. [default: digits]")
    ] = None,
    settings: Settings = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N | MIN:MAX", help="Worker processes, fixed or elastic."),
    ] = None,
    out: Annotated[
        str, typer.Option(help="Where run folders are: a folder, s3://, gs://.")
    ] = "runs",
    name: Annotated[str | None, typer.Option(help="The run's folder in --out.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run --name from its last checkpoint.")
    ] = False,
) -> None:
    """Train a model on a Ray cluster, or on this machine where there is none."""
    from dps_dist.launch import runs
    from dps_dist.launch.display import Display
    from dps_dist.launch.ray_train import train as start

    asked = [*(settings or ()), *([f"launch.workers={workers}"] if workers else [])]
    run = runs.open_run(recipe, asked, out, name, resume)
    if run.is_finished:
        say(f"{run.storage} is finished: `dps report {run.storage}` shows it")
        return
    display = Display(console)
    try:
        start(run, display)
    finally:
        display.close()


@app.command(
    name="recipes",
    epilog=examples(
        "dps recipes",
        "dps recipes show cifar10-resnet18-te-sym20",
        "dps recipes show digits --set data.batch_size=128",
        "dps recipes --table",
    ),
)
def recipes_(
    action: Annotated[Literal["list", "show"], typer.Argument(help="What to do.")] = "list",
    name: Annotated[str, typer.Argument(help="show: the recipe's name or file.")] = recipes.DEFAULT,
    settings: Settings = None,
    table: Annotated[
        bool, typer.Option("--table", help="list: name the recipes of the paper's tables.")
    ] = False,
) -> None:
    """List the recipes and their parts, or show one with every field resolved."""
    if action == "show":
        typer.echo(recipes.as_yaml(recipes.load(name, settings or ())), nl=False)
    elif table:
        _recipes_of_the_paper()
    else:
        known = Table("recipe", "what it is", box=None, header_style="bold")
        for recipe in recipes.names():
            known.add_row(recipe, recipes.description(recipe))
        parts = Table("part", "what it adds", box=None, header_style="bold")
        for part in recipes.parts():
            parts.add_row(part, escape(recipes.part_description(part)))
        console.print(known)
        say("\nParts follow, joined by -, in any order: cifar10-resnet18-te-sym20\n")
        console.print(parts)


def _recipes_of_the_paper() -> None:
    from dps_dist.recipes.paper import in_braces, tables

    for shown in tables():
        heads = [f"{c.column} ({c.note})" if c.note else c.column for c in shown.rows[0].cells]
        console.print(f"[bold]{shown.title}[/]: {', '.join(heads)}", soft_wrap=True)
        width = max(len(row.name) for row in shown.rows)
        for row in shown.rows:
            say(f"  {row.name:{width}}  {in_braces(row.recipes) or 'only cited'}")
