"""What comes of a run: report, evaluate, audit, export."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from dps_dist.cli.base import app, console, examples, say
from dps_dist.errors import InputError

Checkpoint = Annotated[
    Literal["newest", "best"],
    typer.Option(help="best: of those that the run kept, that with the best accuracy in training."),
]


@app.command(
    epilog=examples(
        "dps report runs/digits-dps",
        "dps report runs/digits-dps runs/digits-baseline",
        "dps report runs/* --out curves.png",
        "dps report runs/* --out table.md",
    )
)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders that `dps train` wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page, .html, or only its curves, .png or .svg, or its table, .md. "
            "Default: RUN/report/index.html; of several runs, report.html beside them."
        ),
    ] = None,
) -> None:
    """Compare runs: a table here, and a page with curves and what differs between them."""
    from dps_dist.report import html, markdown, plots, tables

    found = [tables.read(folder) for folder in _runs_among(list(dict.fromkeys(runs)))]
    out = out or html.default_out(found)
    kinds = {".png": plots.save, ".svg": plots.save, ".md": markdown.save}
    written = kinds.get(out.suffix.lower(), html.write)(found, out)
    console.print(tables.compare(found, console.width))
    say(f"written to {written}")


def _runs_among(given: list[Path]) -> list[Path]:
    """`dps report runs/*` names also sweeps, folders of runs, and what it wrote there before."""
    others = [one for one in given if one.exists() and not (one / "config.yaml").is_file()]
    if len(others) == len(given):
        return given  # to be refused
    for other in others:
        if other.is_dir() and other.suffix != ".figures":
            say(f"note: {other} is no run, it has no config.yaml: left out", to=sys.stderr)
    return [one for one in given if one not in others]


@app.command(
    epilog=examples(
        "dps evaluate runs/a",
        "dps evaluate runs/seed0 runs/seed1 runs/seed2",
        "dps evaluate runs/a --on c=/data/CIFAR-10-C --on p=/data/CIFAR-10-P --ood svhn=data/svhn",
    )
)
def evaluate(
    runs: Annotated[list[str], typer.Argument(help="Folders of runs on the same data.")],
    split: Annotated[
        str | None,
        typer.Option(help="val, …, or hold_out: what data.hold_out kept. Default: the runs' own."),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Also on a prepared folder with the same classes, or on the .npy files of "
            "CIFAR-10-C or -P; may be repeated.",
        ),
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Tell images from those of a prepared folder with other classes (AUROC).",
        ),
    ] = None,
    checkpoint: Checkpoint = "newest",
    out: Annotated[
        Path | None, typer.Option(help="Also write all of the table there, as JSON.")
    ] = None,
) -> None:
    """Every figure of trained runs, into RUN/evaluation.json (of the best checkpoint
    evaluation-best.json); of several also their ensemble's, and mean ± deviation if they differ
    only in seeds."""
    import torch

    from dps_dist.report import terminal, write_whole
    from dps_dist.train import evaluation
    from dps_dist.train.state import as_json

    with console.status("evaluating") as status:
        found = evaluation.evaluate(
            runs,
            split=split,
            on=_pairs("--on", on),
            ood=_pairs("--ood", ood),
            checkpoint=checkpoint,
            device="cuda" if torch.cuda.is_available() else "cpu",
            progress=lambda done, of: status.update(f"evaluating, batch {done} of {of}"),
        )
    together = evaluation.ensemble(found) if len(found) > 1 else None
    rows = {one.run.folder: one.report for one in found}
    spread = evaluation.over_seeds(found)
    for table in terminal.tables(rows, together, spread, width=console.width):
        console.print(table)
    for line in (*terminal.elsewhere(rows, spread), *terminal.notes(rows)):
        say(line)
    if out is not None:
        of_all = {"ensemble": together} if together else {}
        of_all |= spread._asdict() if spread else {}
        write_whole(out, as_json({"runs": rows, **of_all}))
    # Last, as another's run may not be ours to write to
    written = [f"{one.run.folder}/{one.write()}" for one in found] + ([str(out)] if out else [])
    say(f"written to {', '.join(written)}")


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} is {one}: write it as NAME=PATH, such as svhn=data/svhn")
        if name in pairs:
            raise InputError(f"{option} has {name} twice: give each a name of its own")
        pairs[name] = path
    return pairs


@app.command(
    epilog=examples(
        "dps audit runs/dps",
        "dps audit runs/dps --html wrong-labels.html --top 200",
        "dps audit runs/dps --fix --threshold .5",
    )
)
def audit(
    run: Annotated[str, typer.Argument(help="Folder of a run whose method keeps evidence.")],
    out: Annotated[Path | None, typer.Option(help="Default: RUN/audit.parquet.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Also a page that shows the most suspect samples.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="--html: how many.")] = 100,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a corrected manifest beside the data's own.")
    ] = False,
    threshold: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="--html, --fix: only where the suggested class has more evidence than the label "
            "by more than this.",
        ),
    ] = 0.0,
) -> None:
    """Which labels are wrong? Rank the training samples by what the model came to predict."""
    from dps_dist.report import audit as audits
    from dps_dist.report import audit_page

    with console.status("reading the evidence"):
        out = out or audits.beside(run)
        if html is not None:
            audit_page.check(html)
        if fix:
            audits.corrected(run)
        table = audits.rank(run)
        written = audits.write(table, out)
    found = audits.agreement(table)
    suggested = found["suggested"]
    strong = ", ".join(f"{count:,} by more than {least:g}" for least, count in suggested.items())
    say(f"{found['samples']:,} samples: the evidence has another label for {strong}")
    say(f"written to {written}")
    if html is not None:
        with console.status("drawing"):
            say(f"written to {audit_page.write(run, table, html, top, threshold)}")
    if fix:
        fixed = audits.fix(run, table, threshold=threshold)
        say(f"written to {fixed}: docs/audit.md says how to train on it")


@app.command(
    epilog=examples(
        "dps export runs/dps exported",
        "dps export runs/dps exported --onnx --targets top --top-k 5",
    )
)
def export(
    run: Annotated[str, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    checkpoint: Checkpoint = "newest",
    onnx: Annotated[bool, typer.Option("--onnx", help="Also model.onnx.")] = False,
    targets: Annotated[
        Literal["none", "probabilities", "top"],
        typer.Option(help="Also the targets, as Parquet: all probabilities, or the largest."),
    ] = "none",
    top_k: Annotated[int, typer.Option(min=1, help="--targets top: how many.")] = 10,
) -> None:
    """Weights as safetensors for plain torchvision, with a model card; ONNX if asked, and targets,
    which are always the newest."""
    from dps_dist.train.export import export as export_run

    with console.status("exporting"):
        written = export_run(
            run, out, checkpoint=checkpoint, onnx=onnx, targets=targets, top_k=top_k
        )
    say(f"written to {written}: " + ", ".join(sorted(file.name for file in written.iterdir())))
