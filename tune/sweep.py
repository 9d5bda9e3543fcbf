"""A sweep over any fields of the configuration, on Ray Tune."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dps_dist.cli.base import Settings, examples, run
from dps_dist.cli.sweeps import (
    Concurrent,
    HoldOut,
    Metric,
    Name,
    Out,
    Recipe,
    Resume,
    Scheduler,
    Seeds,
    Workers,
    start,
)
from dps_dist.launch import space as spaces
from dps_dist.launch.sweeps import Sweep

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "python tune/sweep.py digits-sym40 --space tune/space.yaml",
        "python tune/sweep.py digits-sym40 --space tune/space.yaml --search random --trials 20 "
        "--scheduler asha",
        "python tune/sweep.py digits-sym40 --space tune/space.yaml --search optuna --trials 20",
    )
)
def sweep(
    recipe: Recipe,
    space: Annotated[
        Path,
        typer.Option(
            help="A YAML file: fields and the lists of their values, or ranges to draw from."
        ),
    ],
    search: Annotated[
        Literal["grid", "random", "optuna"],
        typer.Option(help="All combinations, some at random, or those that Optuna chooses."),
    ] = "grid",
    trials: Annotated[int, typer.Option(help="random, optuna: how many points.")] = 0,
    settings: Settings = None,
    seeds: Seeds = 1,
    hold_out: HoldOut = 0,
    workers: Workers = "1",
    concurrent: Concurrent = None,
    scheduler: Scheduler = "none",
    metric: Metric = "accuracy",
    out: Out = "sweeps",
    name: Name = None,
    resume: Resume = False,
) -> None:
    """Accuracy, ECE and NLL for each point of a space: Parquet and a page, written anew while it
    runs. docs/sweeps.md shows a space."""
    asked = Sweep(
        recipe,
        spaces.read(space),
        tuple(settings or ()),
        seeds=seeds,
        hold_out=hold_out,
        workers=workers,
        search=search,
        trials=0 if search == "grid" else trials,
        scheduler=scheduler,
        metric=metric,
    )
    start(asked, out, name, resume, concurrent)


if __name__ == "__main__":
    run(app)
