"""A source → split.beton + split.parquet, written beside and renamed when whole (`dps prepare`)."""

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dps_dist.data import manifest as manifests
from dps_dist.data.manifest import FIELDS, Manifest, manifest_path, replace_file
from dps_dist.data.sources import BadImage, Source
from dps_dist.errors import InputError

_PAGE = 1 << 23  # FFCV's unit of writing, which an image must fit in
_PR_SET_PDEATHSIG = 1


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


def write_split(
    source: Source,
    folder: Path,
    split: str,
    prepared: dict[str, Any],
    options: ImageOptions,
    *,
    skip_bad: bool = False,
    force: bool = False,
    workers: int = 0,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Write one split unless it is there already; an interruption leaves nothing half-written.

    prepared: what tells this data from other data (source and root), kept in the manifest.
    """
    prepared = {**prepared, "images": asdict(options)}
    beton = folder / f"{split}.beton"
    if manifest_path(beton).is_file() and not force:
        return _already_there(folder, split, prepared, say)

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{split}.beton.partial"
    partial_manifest = folder / f".{split}.parquet.partial"
    try:
        chosen = _write_beton(source, partial, options, skip_bad, workers, say)
        labels = source.labels[chosen]
        manifest = Manifest(
            beton=beton,
            labels=labels,
            clean_labels=labels,
            paths=[source.path(int(i)) for i in chosen],
            class_names=tuple(source.class_names),
            prepared=prepared,
            checksum=manifests.checksum(partial),
        )
        manifests.write(manifest, partial_manifest, partial)
        # The manifest vouches for the beton: the old one goes first, the new one comes last.
        manifest_path(beton).unlink(missing_ok=True)
        replace_file(partial, beton)
        replace_file(partial_manifest, manifest_path(beton))
    finally:
        partial.unlink(missing_ok=True)
        partial_manifest.unlink(missing_ok=True)
    say(f"{beton}: {len(manifest):,} images, {beton.stat().st_size / 1e6:,.1f} MB")
    return manifest


def _already_there(
    folder: Path, split: str, prepared: dict[str, Any], say: Callable[[str], None]
) -> Manifest:
    manifest = manifests.read(folder, split)
    if manifest.prepared != prepared:
        differing = [k for k in prepared if manifest.prepared.get(k) != prepared[k]]
        raise InputError(
            f"{manifest.beton} was prepared otherwise ({differing[0]}: "
            f"{manifest.prepared.get(differing[0])}, now {prepared[differing[0]]}): "
            "choose another folder, or pass --force to replace it"
        )
    say(f"{manifest.beton}: already prepared ({len(manifest):,} images); --force writes it again")
    return manifest


def _write_beton(
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
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    image = RGBImageField(
        write_mode={"raw": "raw", "jpeg": "jpg", "mixed": "proportion"}[options.mode],
        max_resolution=options.max_side or None,
        jpeg_quality=options.quality,
        compress_probability=options.jpeg_share,
    )
    fields = dict(zip(FIELDS, (image, IntField(), IntField()), strict=True))
    fits = 0 < options.max_side**2 * 3 <= _PAGE
    samples = _Samples(source, chosen, most_bytes=None if fits else _PAGE)
    workers = workers or len(os.sched_getaffinity(0))
    writer = DatasetWriter(str(target), fields, page_size=_PAGE, num_workers=workers)
    with _forked_writers(target.parent):
        writer.from_indexed_dataset(samples, chunksize=max(1, min(100, len(chosen) // 8)))
    return samples.bad()


class _Samples:
    """What FFCV's writer processes read: (image, label, index)."""

    def __init__(self, source: Source, chosen: NDArray[np.int64], most_bytes: int | None) -> None:
        self._source, self._chosen, self._labels = source, chosen, source.labels
        self._most_bytes = most_bytes
        self._parent = self._writer = os.getpid()
        # Shared by the forked writers: the kernel keeps their lines apart.
        self._bad = tempfile.TemporaryFile()  # noqa: SIM115

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, position: int) -> tuple[NDArray[np.uint8], int, int]:
        if os.getpid() != self._writer:
            self._writer = os.getpid()
            _end_with(self._parent)
        i = int(self._chosen[position])
        # FFCV draws next which images become JPEG: seeded, the same ones do each time.
        np.random.seed(i % 2**32)  # noqa: NPY002
        try:
            pixels = self._source.read(i)
            if self._most_bytes and pixels.nbytes > self._most_bytes:
                size, most = pixels.nbytes / 1e6, self._most_bytes / 1e6
                raise BadImage(
                    self._source.path(i), f"{size:.0f} MB of pixels, of {most:.0f}; give --max-side"
                )
        except Exception as error:  # whatever it is, a writer process must not die of one image
            reason = (
                str(error) if isinstance(error, BadImage) else f"{self._source.path(i)}: {error!r}"
            )
            os.write(self._bad.fileno(), json.dumps([i, reason]).encode() + b"\n")
            pixels = np.zeros((1, 1, 3), np.uint8)
        return pixels, int(self._labels[i]), position

    def bad(self) -> dict[int, str]:
        """The reasons why images could not be read, by their number in the source."""
        self._bad.seek(0)
        return dict(json.loads(line) for line in self._bad)


def _end_with(parent: int) -> None:
    """In a writer process: end when the parent is killed, which FFCV's would outlive for ever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  the parent says what went wrong


@contextmanager
def _forked_writers(folder: Path) -> Iterator[None]:
    """FFCV waits for ever for a writer process that died; this interrupts the wait."""
    done, died = threading.Event(), threading.Event()
    main = threading.main_thread().ident

    def watch() -> None:
        seen: set[Any] = set()
        while not done.wait(0.2):
            seen.update(multiprocessing.active_children())
            if any(child.exitcode not in (None, 0) for child in seen):
                died.set()
                signal.pthread_kill(main or 0, signal.SIGINT)
                return

    method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)  # the source is shared, not pickled
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        if not died.is_set():
            raise
        free = shutil.disk_usage(folder).free / 1e9
        raise InputError(
            f"a writer process ended early, for want of disk ({free:.1f} GB free at {folder}) "
            "or memory: make room, or run again with fewer --workers"
        ) from None
    finally:
        done.set()
        watcher.join()
        for child in multiprocessing.active_children():
            child.kill()
        multiprocessing.set_start_method(method, force=True)
