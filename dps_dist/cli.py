"""`dps`: the command line. A command says what it does and hands over; heavy imports wait."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dps_dist import recipes
from dps_dist.errors import FailedError, InputError

app = typer.Typer(
    name="dps",
    help="Train image classifiers whose targets are learned per sample.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False)


def _say(line: str) -> None:
    """A plain line: paths may hold anything, also what rich takes for markup."""
    console.print(line, soft_wrap=True, markup=False)


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a field of the recipe; may be repeated."),
]


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


@app.command(
    epilog=_examples(
        "dps prepare digits data/digits",
        "dps prepare cifar10 data/cifar10 --from downloads",
        "dps prepare imagefolder data/imagenet --from /datasets/imagenet",
    )
)
def prepare(
    source: Annotated[str, typer.Argument(help="The kind of data set; `dps sources` lists them.")],
    out: Annotated[Path, typer.Argument(help="Folder for the .beton files and their manifests.")],
    root: Annotated[
        Path | None, typer.Option("--from", help="Folder that holds the original data set.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; may be repeated. Default: all.")
    ] = None,
    mode: Annotated[
        Literal["auto", "raw", "jpeg", "mixed"],
        typer.Option(help="Pixels, JPEG or some of each. auto: mixed for folders, else raw."),
    ] = "auto",
    max_side: Annotated[int, typer.Option(help="Shrink larger images to this; 0: never.")] = 500,
    jpeg_share: Annotated[float, typer.Option(help="mixed: share of images kept as JPEG.")] = 0.5,
    quality: Annotated[int, typer.Option(help="JPEG quality.")] = 90,
    skip_bad: Annotated[bool, typer.Option(help="Leave unreadable images out.")] = False,
    force: Annotated[bool, typer.Option(help="Write again what is there.")] = False,
    workers: Annotated[int, typer.Option(help="Writing processes; 0: one a core.")] = 0,
) -> None:
    """Turn a data set into .beton files, once, for all later runs."""
    from dps_dist.data.sources import SOURCES, open_source, source_splits
    from dps_dist.data.write import ImageOptions, already_prepared, write_split

    photographs = source in SOURCES and SOURCES[source].photographs
    stored = mode if mode != "auto" else "mixed" if photographs else "raw"
    options = ImageOptions(stored, max_side, jpeg_share, quality)
    prepared = {"source": source, "root": str(root.absolute()) if root else None}
    there = tuple(sorted(file.stem for file in out.glob("*.beton")))
    try:
        splits = tuple(split or source_splits(source, root))
    except InputError:
        if force or not there:
            raise
        splits = there  # the original may be gone when all is prepared
    missing = []
    for name in splits:
        if not force and (manifest := already_prepared(out, name, prepared, options)):
            _say(f"{manifest.beton}: already prepared, {len(manifest):,} images (--force: again)")
        else:
            missing.append((name, open_source(source, root, name)))
    for name, images in missing:
        write_split(
            images, out, name, prepared, options, skip_bad=skip_bad, workers=workers, say=_say
        )


@app.command()
def sources() -> None:
    """List the kinds of data set that `dps prepare` reads."""
    from dps_dist.data.sources import SOURCES

    table = Table("source", "what it reads", box=None, header_style="bold")
    for name, spec in SOURCES.items():
        table.add_row(name, spec.description)
    console.print(table)


@app.command(epilog=_examples("dps preview digits", "dps preview my.yaml --set augment.pad=8"))
def preview(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")] = recipes.DEFAULT,
    settings: Settings = None,
    epoch: Annotated[
        int, typer.Option(min=0, max=2**31, help="As the images look in this epoch.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("preview.png"),
) -> None:
    """Draw the first training batch as the model will be shown it: crops, flips, noisy labels."""
    from dps_dist.data import manifest as manifests
    from dps_dist.data.hold_out import split
    from dps_dist.data.loader import resolution_at, train_loader
    from dps_dist.data.order import EpochOrder
    from dps_dist.data.preview import sheet

    if out.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise InputError(f"--out is {out}: give a picture's name, such as preview.png")
    config = recipes.load(recipe, settings or ())
    manifest = manifests.read(config.data.path, "train")
    loader = train_loader(config, manifest)
    data = config.data
    trained = split(len(manifest), data.hold_out, data.hold_out_seed).trained
    shown = min(data.batch_size, 64, len(manifest) if trained is None else len(trained))
    order = EpochOrder(
        len(manifest),
        shown,
        seed=config.train.seed,
        epoch=epoch,
        shuffle=data.shuffle,
        only=trained,
    )
    batches = loader.epoch(order, resolution=resolution_at(config.data, epoch))
    batch = next(batches)
    batches.close()
    sheet(batch, config.data, manifest).save(out)
    side = batch.images.shape[-1]
    _say(
        f"{manifest.beton}: {len(manifest):,} images, {manifest.num_classes} classes; "
        f"the first {shown} of epoch {epoch} at {side}×{side} are drawn in {out}"
    )


@app.command(
    epilog=_examples(
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
        _say(f"{run.storage} is finished: `dps report {run.storage}` shows it")
        return
    display = Display(console)
    try:
        start(run, display)
    finally:
        display.close()


@app.command(
    epilog=_examples(
        "dps report runs/digits-dps",
        "dps report runs/digits-dps runs/digits-baseline",
        "dps report runs/* --out curves.png",
    )
)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders that `dps train` wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page, .html, or only its curves, .png or .svg. "
            "Default: RUN/report/index.html; of several runs, report.html beside them."
        ),
    ] = None,
) -> None:
    """Compare runs: a table here, and a page with curves and what differs between them."""
    from dps_dist.report import html, plots, tables

    # `dps report runs/*` names also the page and the figures that it wrote there before.
    others = (".html", ".figures")
    folders = [folder for folder in dict.fromkeys(runs) if folder.suffix not in others] or runs
    found = [tables.read(folder) for folder in folders]
    out = out or html.default_out(found)
    write = plots.save if out.suffix.lower() in (".png", ".svg") else html.write
    written = write(found, out)
    console.print(tables.compare(found, console.width))
    _say(f"written to {written}")


@app.command(
    epilog=_examples(
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
    out: Annotated[Path | None, typer.Option(help="Also write the table there, as JSON.")] = None,
) -> None:
    """Every figure of trained runs, into RUN/evaluation.json; of several, mean ± deviation and the
    ensemble's."""
    import json

    import torch

    from dps_dist.report import terminal
    from dps_dist.train import evaluation

    with console.status("evaluating") as status:
        found = evaluation.evaluate(
            runs,
            split=split,
            on=_pairs("--on", on),
            ood=_pairs("--ood", ood),
            device="cuda" if torch.cuda.is_available() else "cpu",
            progress=lambda done, of: status.update(f"evaluating, batch {done} of {of}"),
        )
    for one in found:
        one.write()
    together = evaluation.ensemble(found) if len(found) > 1 else None
    rows = {one.run.folder: one.report for one in found}
    console.print(terminal.table(rows, together))
    for line in terminal.elsewhere(rows):
        _say(line)
    if out is not None:
        both = {"runs": rows, **({"ensemble": together} if together else {})}
        out.write_text(json.dumps(both, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _say(f"written to {', '.join(f'{folder}/{evaluation.JSON}' for folder in rows)}")


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise InputError(f"{option} is {one}: write it as NAME=PATH, such as svhn=data/svhn")
        pairs[name] = path
    return pairs


@app.command(
    epilog=_examples(
        "dps audit runs/dps",
        "dps audit runs/dps --html wrong-labels.html --top 200",
        "dps audit runs/dps --fix",
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
) -> None:
    """Which labels are wrong? Rank the training samples by what the model came to predict."""
    from dps_dist.report import audit as audits
    from dps_dist.report import audit_page

    with console.status("reading the evidence"):
        out = out or audits.beside(run)
        table = audits.rank(run)
        written = audits.write(table, out)
    found = audits.agreement(table)
    suggested = found["suggested"]
    strong = ", ".join(f"{count:,} by more than {least:g}" for least, count in suggested.items())
    _say(f"{found['samples']:,} samples: the evidence has another label for {strong}")
    _say(f"written to {written}")
    if html is not None:
        with console.status("drawing"):
            _say(f"written to {audit_page.write(run, table, html, top)}")
    if fix:
        _say(f"written to {audits.fix(run)}: docs/audit.md says how to train on it")


@app.command(
    epilog=_examples(
        "dps export runs/dps exported",
        "dps export runs/dps exported --onnx --targets top --top-k 5",
    )
)
def export(
    run: Annotated[str, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Also model.onnx.")] = False,
    targets: Annotated[
        Literal["none", "probabilities", "top"],
        typer.Option(help="Also the targets, as Parquet: all probabilities, or the largest."),
    ] = "none",
    top_k: Annotated[int, typer.Option(min=1, help="--targets top: how many.")] = 10,
) -> None:
    """Weights as safetensors for plain torchvision, with a model card; ONNX, targets if asked."""
    from dps_dist.train.export import export as export_run

    with console.status("exporting"):
        written = export_run(run, out, onnx=onnx, targets=targets, top_k=top_k)
    _say(f"written to {written}: " + ", ".join(sorted(file.name for file in written.iterdir())))


@app.command(
    name="recipes",
    epilog=_examples(
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
        _say("\nParts follow, joined by -, in any order: cifar10-resnet18-te-sym20\n")
        console.print(parts)


def _recipes_of_the_paper() -> None:
    from dps_dist.recipes.paper import in_braces, tables

    for shown in tables():
        heads = [f"{c.column} ({c.note})" if c.note else c.column for c in shown.rows[0].cells]
        console.print(f"[bold]{shown.title}[/]: {', '.join(heads)}", soft_wrap=True)
        width = max(len(row.name) for row in shown.rows)
        for row in shown.rows:
            _say(f"  {row.name:{width}}  {in_braces(row.recipes) or 'only cited'}")


@app.command(epilog=_examples("dps doctor", "dps doctor --data data/imagenet"))
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
        raise InputError(f"{folder} holds no .beton: run `dps prepare SOURCE {folder}` first")
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
    _say(f"{folder}: {len(betons)} files whole")


def main() -> None:
    """The `dps` command: a user's mistake is one sentence and exit code 2, never a traceback."""
    try:
        app()
    except InputError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(2)
    except FailedError as error:
        print(f"dps: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == 130:  # typer's for Ctrl-C
            print("dps: stopped", file=sys.stderr)
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"dps: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
