"""The machine, and the cluster: doctor, plan."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dps_dist import recipes
from dps_dist.cli.base import Settings, app, console, examples, say
from dps_dist.errors import InputError


@app.command(epilog=examples("dps doctor", "dps doctor --data data/imagenet"))
def doctor(
    data: Annotated[
        Path | None, typer.Option(help="Also check every byte of this prepared folder.")
    ] = None,
) -> None:
    """Say whether this machine is fit to run, and what to do where it is not."""
    from dps_dist.launch.doctor import examine

    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}
    table = Table("", "what", "found", "what to do", box=None, header_style="bold")
    findings = []
    with console.status("looking"):
        for finding in examine(data or Path()):
            findings.append(finding)
            texts = (finding.what, finding.found, finding.remedy)
            table.add_row(marks[finding.state], *map(escape, texts))
    console.print(table)
    if data is not None:
        _check_bytes(data)
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _check_bytes(folder: Path) -> None:
    from rich.progress import Progress

    from dps_dist.data import manifest as manifests

    betons = sorted(folder.glob("*.beton"))
    if not betons:
        raise InputError(
            f"{folder} holds no .beton: run `dps prepare SOURCE {folder}` first; "
            "`dps sources` lists what can be read"
        )
    with Progress(console=console) as progress:
        for beton in betons:
            expected = manifests.read(folder, beton.stem).checksum
            task = progress.add_task(beton.name, total=beton.stat().st_size)
            found = manifests.checksum(beton, partial(progress.advance, task))
            if found != expected:
                raise InputError(
                    f"{beton} is damaged, its checksum differs from its manifest's: "
                    "run `dps prepare` again with --force"
                )
    say(f"{folder}: {len(betons)} files whole")


@app.command(
    epilog=examples(
        "dps plan imagenet-resnet152 --nodes 8 --gpus-per-node 8 --bandwidth 100",
        "dps plan imagenet-resnet152 --nodes 1 --gpus-per-node 8 --images-per-s 900",
        "dps plan my.yaml --nodes 2 --gpus-per-node 4 --samples 3000000 --classes 5000",
    )
)
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")],
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs, each with a worker.")] = 8,
    bandwidth: Annotated[
        float | None, typer.Option(help="Of a node's link to the others, Gb/s.")
    ] = None,
    images_per_s: Annotated[
        float | None, typer.Option(help="What one GPU trains of this recipe, as measured.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Training samples, where they cannot be known.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Classes, likewise.")] = None,
    settings: Settings = None,
) -> None:
    """Say what a run needs of a cluster: memory, network, storage, time. Starts nothing."""
    from dps_dist.launch import plan as plans
    from dps_dist.launch import plan_table
    from dps_dist.launch.plan_data import data_set

    cluster = plans.Cluster(nodes, gpus_per_node, bandwidth, images_per_s)
    config = recipes.load(recipe, settings or ())
    made = plans.plan(config, cluster, data_set(config, samples, classes))
    console.print(plan_table.table(made))
    for note in plan_table.notes(made):
        say(f"note: {note}")
