"""A source → split.beton + split.parquet, written beside and renamed when whole (`dps prepare`)."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dps_dist.config.flat import flatten
from dps_dist.data import manifest as manifests
from dps_dist.data.beton import write_beton
from dps_dist.data.ffcv import RGBImageField
from dps_dist.data.manifest import Manifest, manifest_path
from dps_dist.data.sources import BadImage, Source
from dps_dist.errors import InputError, naming
from dps_dist.locks import lock

# FFCV's unit of writing, which an image must fit in: its own size, or more for larger images.
PAGE, LARGEST_PAGE = 1 << 23, 1 << 26
LARGEST_SIDE = 65_500  # of a JPEG; FFCV notes sides in 16 bits


@dataclass(frozen=True)
class ImageOptions:
    """How images are stored; the defaults are ffcv-imagenet's, raw is for small images.

    max_side: larger images are shrunk to it (0: never).
    mode: `raw` pixels, `jpeg`, or `mixed`: a share of `jpeg_share` as JPEG, the others raw.
    """

    mode: Literal["raw", "jpeg", "mixed"] = "mixed"
    max_side: int = 500
    jpeg_share: float = 0.5
    quality: int = 90

    def __post_init__(self) -> None:
        if not 0 <= self.jpeg_share <= 1:
            raise InputError(f"--jpeg-share is {self.jpeg_share}: give a share from 0 to 1")
        if not 1 <= self.quality <= 100:
            raise InputError(f"--quality is {self.quality}: give 1 to 100")
        if self.max_side < 0:
            raise InputError(f"--max-side is {self.max_side}: give pixels, or 0 for no limit")


def already_prepared(
    folder: Path, split: str, prepared: dict[str, Any], options: ImageOptions
) -> Manifest | None:
    """The manifest of a split that is there and was written the same way; None if it is not there.

    prepared: what tells this data from other data (source, root, which part), kept in the manifest.
    """
    beton = folder / f"{split}.beton"
    if not beton.exists():
        return None
    remedy = "choose another folder, or pass --force to replace it"
    if not manifest_path(beton).exists():
        raise InputError(
            f"{beton} is there without a manifest, so it was not written by dps prepare: {remedy}"
        )
    manifest = manifests.read(folder, split)
    then, now = dict(flatten(manifest.prepared)), dict(flatten(_prepared(prepared, options)))
    for key in now | then:
        if then.get(key) != now.get(key):
            old, new = (_option(key, how.get(key)) for how in (then, now))
            raise InputError(f"{beton} was prepared {old}, now it is asked for {new}: {remedy}")
    return manifest


def write_split(
    source: Source,
    folder: Path,
    split: str,
    prepared: dict[str, Any],
    options: ImageOptions,
    *,
    skip_bad: bool = False,
    workers: int = 0,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Write one split, replacing what is there; an interruption leaves nothing half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    beton = folder / f"{split}.beton"
    partial, partial_manifest = (folder / f".{split}.{end}.partial" for end in ("beton", "parquet"))
    with naming(beton, partial), _alone_in(folder):
        try:
            chosen = _write_readable(source, partial, options, skip_bad, workers, say)
            labels = source.labels[chosen]
            manifest = Manifest(
                beton=beton,
                labels=labels,
                clean_labels=labels,
                paths=[source.path(int(i)) for i in chosen],
                class_names=tuple(source.class_names),
                prepared=_prepared(prepared, options),
                checksum=manifests.checksum(partial),
            )
            manifests.write(manifest, partial_manifest, partial)
            # The manifest vouches for the beton: the old one goes first, the new one comes last.
            manifest_path(beton).unlink(missing_ok=True)
            _replace(partial, beton)
            _replace(partial_manifest, manifest_path(beton))
        finally:
            partial.unlink(missing_ok=True)
            partial_manifest.unlink(missing_ok=True)
    say(f"{beton}: {len(manifest):,} images, {beton.stat().st_size / 1e6:,.1f} MB")
    return manifest


def _prepared(prepared: dict[str, Any], options: ImageOptions) -> dict[str, Any]:
    return {**prepared, "images": asdict(options)}


def _option(key: str, value: Any) -> str:
    """What the manifest keeps under a key, as it is said to `dps prepare`."""
    option = "--" + key.rpartition(".")[2].replace("_", "-")
    name = {"source": "source", "root": "--from"}.get(key, option)
    return f"without {name}" if value is None else f"with {name} {value}"


def _replace(partial: Path, final: Path) -> None:
    """Make `partial` appear as `final`, whole, even if the machine stops right after."""
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two writers in one folder would take each other's files; the lock goes with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle):
            raise InputError(
                f"another dps prepare is writing to {folder}: wait for it, or choose another folder"
            )
        yield
    finally:
        os.close(handle)


def _write_readable(
    source: Source,
    target: Path,
    options: ImageOptions,
    skip_bad: bool,
    workers: int,
    say: Callable[[str], None],
) -> NDArray[np.int64]:
    """Write the source's readable images to `target`; → which they are."""
    chosen = np.arange(len(source))
    bad = _write_all(source, chosen, target, options, workers)
    if bad:
        for i in sorted(bad):
            say(f"unreadable: {bad[i]}")
        if not skip_bad:
            raise InputError(
                f"{len(bad)} of {len(source):,} images cannot be read (listed above): "
                "mend them, or pass --skip-bad to leave them out"
            )
        # Sample numbers are positions in the beton, so it is written again without the bad ones.
        chosen = np.setdiff1d(chosen, sorted(bad))
        if not len(chosen):
            raise InputError("no image can be read: look at the first reason listed above")
        _write_all(source, chosen, target, options, workers)
        say(f"left out {len(bad)} unreadable images")
    return chosen


def _write_all(
    source: Source, chosen: NDArray[np.int64], target: Path, options: ImageOptions, workers: int
) -> dict[int, str]:
    """Write the chosen images with a stand-in for each unreadable one; → the reasons by number."""
    image = RGBImageField(
        write_mode={"raw": "raw", "jpeg": "jpg", "mixed": "proportion"}[options.mode],
        jpeg_quality=options.quality,
        compress_probability=options.jpeg_share,
    )
    page = PAGE
    while page < (options.max_side**2 * 3 or LARGEST_PAGE) and page < LARGEST_PAGE:
        page *= 2
    samples = _Samples(source, chosen, options.max_side, page)
    workers = min(workers or len(os.sched_getaffinity(0)), len(chosen))
    columns = (TextColumn(target.name.strip(".").removesuffix(".partial")), BarColumn())
    with Progress(*columns, MofNCompleteColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=len(chosen))
        write_beton(
            target, samples, image, page, workers, lambda n: progress.update(task, completed=n)
        )
    return samples.bad()


class _Samples:
    """What the writer processes read: (image, label, index)."""

    def __init__(
        self, source: Source, chosen: NDArray[np.int64], max_side: int, most_bytes: int
    ) -> None:
        self._source, self._chosen, self._labels = source, chosen, source.labels
        self._max_side, self._most_bytes = max_side, most_bytes
        # Shared by the forked writers: the kernel keeps their lines apart.
        self._bad = tempfile.TemporaryFile()  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, position: int) -> tuple[NDArray[np.uint8], int, int]:
        i = int(self._chosen[position])
        # FFCV draws next which images become JPEG: seeded, the same ones do each time.
        np.random.seed(i % 2**32)  # noqa: NPY002
        try:
            pixels = shrunk(self._source.read(i), self._max_side)
            if (side := max(pixels.shape)) > LARGEST_SIDE:
                raise BadImage(
                    self._source.path(i),
                    f"it is {side:,} pixels long and {LARGEST_SIDE:,} fit; "
                    "give a smaller --max-side",
                )
            if pixels.nbytes > self._most_bytes:
                size, most = pixels.nbytes / 1e6, self._most_bytes / 1e6
                raise BadImage(
                    self._source.path(i),
                    f"it has {size:.0f} MB of pixels and {most:.0f} fit; give a smaller --max-side",
                )
        except Exception as error:  # whatever it is, a writer process must not die of one image
            known = isinstance(error, BadImage)
            reason = str(error) if known else f"{self._source.path(i)}: {error!r}"
            os.write(self._bad.fileno(), json.dumps([i, reason]).encode() + b"\n")
            pixels = np.zeros((1, 1, 3), np.uint8)
        return pixels, int(self._labels[i]), position

    def bad(self) -> dict[int, str]:
        """The reasons why images could not be read, by their number in the source."""
        self._bad.seek(0)
        return dict(json.loads(line) for line in self._bad)


def shrunk(pixels: NDArray[np.uint8], max_side: int) -> NDArray[np.uint8]:
    """The image with its longer side at most max_side (0: as it is), as ffcv-imagenet shrinks."""
    longer = max(pixels.shape[:2])
    if not 0 < max_side < longer:
        return pixels
    height, width = (max(1, side * max_side // longer) for side in pixels.shape[:2])
    small = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(small, np.uint8)
