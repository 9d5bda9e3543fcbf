"""Training: train, submit, recipes."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from dps_dist import recipes
from dps_dist.cli.base import Settings, app, console, examples, say

Recipe = Annotated[str | None, typer.Argument(help="A recipe's name or file. \\[default: digits]")]
Workers = Annotated[
    str | None, typer.Option(metavar="N | MIN:MAX", help="Worker processes, fixed or elastic.")
]
Out = Annotated[str, typer.Option(help="Where run folders are: a folder, s3://, gs://.")]
Name = Annotated[str | None, typer.Option(help="The run's folder in --out.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run --name from its last checkpoint.")
]


@app.command(
    epilog=examples(
        "dps train digits --workers 2 --name first",
        "dps train cifar10-resnet18 --set method.gamma=.97 --set method.c=2000",
        "dps train imagenet-resnet152 --workers 8:64 --out s3://bucket/runs --name imagenet",
        "dps train --name imagenet --out s3://bucket/runs --resume",
    )
)
def train(
    recipe: Recipe = None,
    settings: Settings = None,
    workers: Workers = None,
    out: Out = "runs",
    name: Name = None,
    resume: Resume = False,
) -> None:
    """Train a model on a Ray cluster, or on this machine where there is none."""
    from dps_dist.launch import runs
    from dps_dist.train.files import CONFIG
    from dps_dist.train.storage import without_secrets

    asked = [*(settings or ()), *([] if workers is None else [f"launch.workers={workers}"])]
    run = runs.open_run(recipe, asked, out, name, resume)
    if run.is_finished:
        remote = run.storage.local is None  # which `dps report` cannot read
        what_next = "" if remote else f": `dps report {shlex.quote(str(run.storage))}` shows it"
        say(f"{run.storage} is finished{what_next}")
        return
    from dps_dist.launch.display import Display
    from dps_dist.launch.ray_train import train as start  # Ray, seconds after a refusal

    display = Display(console)
    try:
        start(run, display)
    except KeyboardInterrupt:
        if not run.storage.exists(CONFIG):
            raise  # there is nothing yet to go on with
        place = without_secrets(out)
        again = shlex.join(["dps", "train", "--name", run.storage.name, "--out", place, "--resume"])
        say(f"`{again}` goes on where it was", to=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        display.close()


@app.command(
    epilog=examples(
        "dps submit imagenet-resnet152 --address http://head:8265 --workers 64 "
        "--set data.path=/data/imagenet --out s3://bucket/runs --name imagenet",
        "dps submit --address http://head:8265 --out s3://bucket/runs --name imagenet --resume",
        "dps submit digits --address http://head:8265 --token-file token --no-wait "
        "--set data.path=/data/digits --out /shared/runs",
    )
)
def submit(
    recipe: Recipe = None,
    settings: Settings = None,
    workers: Workers = None,
    out: Out = "runs",
    name: Name = None,
    resume: Resume = False,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard.")
    ] = "http://127.0.0.1:8265",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's token. \\[default: Ray's settings]")
    ] = None,
    working_dir: Annotated[
        Path, typer.Option(help="What travels with the job; data, runs and .gitignore's do not.")
    ] = Path(),
    exclude: Annotated[
        list[str] | None, typer.Option(help="Also leave this out; may be repeated.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Follow the log, and end as the job ends.")] = True,
) -> None:
    """`dps train` as a job of a Ray cluster: hand it in, follow it, return its exit code."""
    from dps_dist.launch import jobs, tokens

    given = {"--workers": workers, "--out": out, "--name": name}
    options = [word for key, value in given.items() if value for word in (key, value)]
    command = jobs.entrypoint(
        recipe if recipe or resume else recipes.DEFAULT,
        settings or (),
        [*options, *(["--resume"] if resume else [])],
        out,
        working_dir,
    )
    cluster = jobs.client(address, tokens.find(token_file))
    job = jobs.submit(cluster, command, working_dir, exclude or ())
    say(f"{job}: {command}")
    if not wait:
        say(f"`ray job logs --address {address} {job}` shows its log")
        return
    try:
        code = jobs.follow(cluster, job, lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        say(f"{job} goes on: `ray job stop --address {address} {job}` ends it", to=sys.stderr)
        raise typer.Exit(130) from None
    ended = "succeeded" if code == 0 else "was stopped" if code == jobs.STOPPED else "failed"
    say(f"{job} {ended}")
    raise typer.Exit(code)


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
