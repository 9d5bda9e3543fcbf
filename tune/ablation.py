"""The paper's ablation: a grid over γ and c on Ray Tune, scored on held-out training samples."""

from typing import Annotated

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
from dps_dist.errors import InputError
from dps_dist.launch.sweeps import Sweep

GAMMA = ".9,.93,.95,.96,.97,.98,.99,1"
C = "50,250,500,1000,2000,4000"
app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(
    epilog=examples(
        "python tune/ablation.py digits-sym40 --seeds 2",
        "python tune/ablation.py cifar100-resnet50 --gamma .95,.97 --c 1000,2000 "
        "--workers-per-trial 4",
        "python tune/ablation.py digits-sym40 --seeds 2 --name first --resume",
    )
)
def ablation(
    recipe: Recipe,
    gamma: Annotated[str, typer.Option(help="Discounts to try, in [0, 1].")] = GAMMA,
    c: Annotated[str, typer.Option(help="Weights of the prior to try, above 0.")] = C,
    settings: Settings = None,
    seeds: Seeds = 3,
    hold_out: HoldOut = 0,
    workers: Workers = "1",
    concurrent: Concurrent = None,
    scheduler: Scheduler = "none",
    metric: Metric = "accuracy",
    out: Out = "sweeps",
    name: Name = None,
    resume: Resume = False,
) -> None:
    """Accuracy, ECE and NLL for each γ and c, mean ± deviation over seeds: Parquet, and a page with
    the heatmaps of the paper's ablation and the Pareto front, written anew while it runs."""
    sweep = Sweep(
        recipe,
        {"method.gamma": numbers("--gamma", gamma), "method.c": numbers("--c", c)},
        tuple(settings or ()),
        seeds=seeds,
        hold_out=hold_out,
        workers=workers,
        scheduler=scheduler,
        metric=metric,
    )
    start(sweep, out, name, resume, concurrent)


def numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"{option} is {text}: give numbers with commas, such as .9,.95") from None


if __name__ == "__main__":
    run(app)
