"""What a run trains on: prepare, sources, preview."""

import io
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from dps_dist import recipes
from dps_dist.cli.base import Settings, app, console, examples, say
from dps_dist.errors import InputError


@app.command(
    epilog=examples(
        "dps prepare digits data/digits",
        "dps prepare cifar10 data/cifar10 --from downloads",
        "dps prepare cifar10 data/cifar10-2000 --from downloads --train-images 2000",
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
    train_images: Annotated[
        int | None,
        typer.Option(help="Only so many training images, a random part that is always the same."),
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
    workers: Annotated[int, typer.Option(min=0, help="Writing processes; 0: one a core.")] = 0,
) -> None:
    """Turn a data set into .beton files, once, for all later runs."""
    from dps_dist.data.sources import open_source, source_spec, source_splits
    from dps_dist.data.sources.part import Part
    from dps_dist.data.write import ImageOptions, already_prepared, write_split

    stored = mode if mode != "auto" else "mixed" if source_spec(source).photographs else "raw"
    options = ImageOptions(stored, max_side, jpeg_share, quality)
    prepared = {"source": source, "root": str(root.absolute()) if root else None}
    there = tuple(sorted(file.stem for file in out.glob("*.beton")))
    try:
        splits = tuple(split or source_splits(source, root))
    except InputError:
        if force or not there:
            raise
        splits = there  # the original may be gone when all is prepared
    if train_images is not None and "train" not in splits:
        raise InputError(
            f"--train-images is {train_images}, of the split train, and only {', '.join(splits)} "
            "is prepared: leave it out"
        )
    missing = []
    for name in splits:
        part = train_images if name == "train" else None
        how = prepared if part is None else prepared | {"train_images": part}
        if not force and (manifest := already_prepared(out, name, how, options)):
            say(f"{manifest.beton}: already prepared, {len(manifest):,} images (--force: again)")
        else:
            images = open_source(source, root, name)
            missing.append((name, images if part is None else Part(images, part), how))
    for name, images, how in missing:
        write_split(images, out, name, how, options, skip_bad=skip_bad, workers=workers, say=say)


@app.command()
def sources() -> None:
    """List the kinds of data set that `dps prepare` reads."""
    from dps_dist.data.sources import SOURCES

    table = Table("source", "what it reads", box=None, header_style="bold")
    for name, spec in SOURCES.items():
        table.add_row(name, spec.description)
    console.print(table)


@app.command(epilog=examples("dps preview digits", "dps preview my.yaml --set augment.pad=8"))
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
    from dps_dist.report import write_whole

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
    picture = io.BytesIO()
    kind = out.suffix.lower().removeprefix(".").replace("jpg", "jpeg")
    sheet(batch, config.data, manifest).save(picture, kind)
    write_whole(out, picture.getvalue())
    side = batch.images.shape[-1]
    say(
        f"{manifest.beton}: {len(manifest):,} images, {manifest.num_classes} classes; "
        f"the first {shown} of epoch {epoch} at {side}×{side} are drawn in {out}"
    )
