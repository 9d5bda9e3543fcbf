"""FFCV pipelines → Batch(images, labels, index, weight), in the order that an EpochOrder gives.

One Loader serves all epochs of a split: `for batch in loader.epoch(order, rank)`.
"""

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba.core.config import NUMBA_NUM_THREADS
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.config import Config, Data
from dps_dist.data import noise
from dps_dist.data.augment import Channels, normalized
from dps_dist.data.decode import Crop, KeyedDecoder
from dps_dist.data.ffcv import OrderOption, Reader, ToDevice, ToTensor
from dps_dist.data.manifest import Manifest
from dps_dist.data.mapped import MappedLoader
from dps_dist.data.order import PADDING, EpochOrder
from dps_dist.data.reading import EpochThread
from dps_dist.errors import InputError


@dataclass(frozen=True)
class Batch:
    """What a rank visits in one step. The next batch may overwrite its images: `clone` to keep it.

    images: float32 [B, 3, H, W], normalised, channels_last; labels, index: int64 [B];
    weight: float32 [B], 1, or 0 for padding (whose index is −1);
    other_views: further random views of the same samples, each like images;
    padding: how many of the last rows are padding.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    weight: Tensor
    other_views: tuple[Tensor, ...] = ()
    padding: int = 0

    def clone(self) -> "Batch":
        views = tuple(view.clone() for view in self.other_views)
        return replace(self, images=self.images.clone(), other_views=views)

    def rows(self, start: int, stop: int) -> "Batch":
        """A part of the batch, without copying."""
        cut = slice(start, stop)
        views = tuple(view[cut] for view in self.other_views)
        tensors = (self.images[cut], self.labels[cut], self.index[cut], self.weight[cut])
        padding = min(max(stop - (len(self.images) - self.padding), 0), stop - start)
        return Batch(*tensors, views, padding)

    def parts(self, limit: int) -> "list[Batch]":
        """The batch in parts of about equal size, at most `limit`.

        As many on every rank, since synchronised batch norm waits in each. Padding is left out, so
        that batch norm does not see it, but for the two rows a part that it needs.
        """
        size = len(self.index)
        parts = -(-size // limit)
        rows = max(size - self.padding, min(2 * parts, size))
        return [self.rows(k * rows // parts, (k + 1) * rows // parts) for k in range(parts)]


class Loader:
    """Reads one prepared split. `epoch` yields the same pixels for any number of threads and ranks.

    labels: [N] what each sample is called here, noise included.
    resolution: side of the images; stored images of one size are read as they are and resized last.
    views: independent random crops of each image; the first is Batch.images.
    """

    def __init__(
        self,
        beton: Path,
        labels: NDArray[np.int64],
        crop: Crop,
        resolution: int,
        *,
        mean: Channels,
        std: Channels,
        seed: int = 0,
        views: int = 1,
        threads: int = 1,
        batches_ahead: int = 3,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.crop, self.resolution = crop, resolution
        self._mean, self._std = mean, std
        self._labels = torch.from_numpy(np.asarray(labels, np.int64)).to(self.device)
        self._running: EpochThread | None = None
        on_gpu = self.device.type == "cuda"  # bytes travel, and are normalised there
        as_bytes = ([255 * m for m in mean], [255 * s for s in std])
        self._decoder = KeyedDecoder(crop, seed, views, None if on_gpu else as_bytes)
        pipeline: list[Any] = [self._decoder, ToTensor()]
        if on_gpu:
            pipeline.append(ToDevice(self.device, non_blocking=True))
        self._ffcv = MappedLoader(
            str(beton),
            batch_size=1,  # each epoch's order brings its own
            num_workers=min(threads, NUMBA_NUM_THREADS),  # a recipe may come from a larger machine
            os_cache=True,
            order=OrderOption.SEQUENTIAL,
            seed=0,
            pipelines={"image": pipeline, "label": None, "index": None},
            drop_last=False,
            batches_ahead=batches_ahead,
        )
        if len(labels) != len(self):
            raise ValueError(f"labels has {len(labels)} entries: {beton} holds {len(self)} images")
        self._stored_size = _one_size(self._ffcv.reader, beton) if crop.kind == "pad" else None

    def __len__(self) -> int:
        """Images in the split."""
        return int(self._ffcv.reader.num_samples)

    def epoch(
        self, order: EpochOrder, rank: int = 0, resolution: int | None = None
    ) -> Generator[Batch]:
        """The batches of `rank`, one a step of `order`; leaving early stops the reading thread."""
        if order.num_samples != len(self):
            raise ValueError(
                f"the order has {order.num_samples} samples: {self._ffcv.fname} holds {len(self)}"
            )
        if self._running is not None:
            raise RuntimeError("this loader's last epoch is still being read: close it first")
        resolution = resolution or self.resolution
        self._decoder.start_epoch(order.epoch, self._stored_size or resolution)
        self._ffcv.batch_size = order.batch_size
        by_step = order.assignment[:, rank].reshape(order.steps, order.batch_size)
        with self._current_gpu():  # on which FFCV makes its streams
            self._running = EpochThread(self._ffcv, by_step)
        try:
            for step in range(order.steps):
                index = order.batch(step, rank)
                real = int((index != PADDING).sum())
                pixels = next(self._running)[0] if real else None
                self._refuse_broken()
                yield self._batch(index, pixels, resolution)
        finally:
            self._running.stop()
            self._running = None

    def _current_gpu(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _batch(self, index: NDArray[np.int32], pixels: Tensor | None, resolution: int) -> Batch:
        where = torch.from_numpy(index.astype(np.int64)).to(self.device, non_blocking=True)
        weight = (where != PADDING).to(torch.float32)
        views = [
            self._images(None if pixels is None else pixels[:, view], len(index), resolution)
            for view in range(self._decoder.views)
        ]
        labels = torch.where(where != PADDING, self._labels[where.clamp(min=0)], 0)
        padding = int((index == PADDING).sum())
        return Batch(views[0], labels, where, weight, tuple(views[1:]), padding)

    def _images(self, pixels: Tensor | None, rows: int, resolution: int) -> Tensor:
        """[≤rows, H, W, 3] → normalised float32 [rows, 3, resolution, resolution]."""
        shape = (rows, 3, resolution, resolution)
        if pixels is None:
            nothing = torch.zeros(shape, dtype=torch.float32, device=self.device)
            return nothing.to(memory_format=torch.channels_last)
        images = pixels.permute(0, 3, 1, 2)
        if images.dtype == torch.uint8:
            images = normalized(images, self._mean, self._std)
        if images.shape[-1] != resolution:
            images = F.interpolate(images, resolution, mode="bilinear", antialias=True)
        if len(images) < rows:
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, rows - len(images)))
        return images.contiguous(memory_format=torch.channels_last)

    def _refuse_broken(self) -> None:
        if (sample := self._decoder.broken_sample) is not None:
            raise InputError(
                f"{self._ffcv.fname}: the JPEG of sample {sample} is damaged: "
                "run `dps prepare` again with --force"
            )


def train_loader(
    config: Config,
    manifest: Manifest,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    views: int = 1,
) -> Loader:
    """The training split as the configuration asks for it: noise, crops, flips."""
    data, augment = config.data, config.augment
    crop = Crop(
        kind=augment.crop if augment.crop != "none" else "center",
        flip=augment.flip,
        pad=augment.pad,
        scale=augment.scale,
        ratio=augment.ratio,
    )
    return Loader(
        manifest.beton,
        noisy_labels(data, manifest),
        crop,
        data.resolution,
        mean=data.mean,
        std=data.std,
        seed=config.train.seed,
        views=views,
        threads=threads or loader_threads(data),
        device=device,
    )


def check(config: Config, manifest: Manifest) -> None:
    """Refuse what `train_loader` would, without building one."""
    noisy_labels(config.data, manifest)
    if config.augment.crop == "pad":
        _one_size(Reader(str(manifest.beton)), manifest.beton)


def eval_loader(
    config: Config,
    manifest: Manifest,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
) -> Loader:
    """A split for evaluation: clean labels, centre crop, no randomness."""
    data = config.data
    # Other data than the run's may have images of any size, and are cut to squares
    as_stored = shows_whole(config) and len(_sides(Reader(str(manifest.beton)))) == 1
    return Loader(
        manifest.beton,
        manifest.clean_labels,
        Crop("pad") if as_stored else Crop("center", keep=data.eval_crop),
        data.eval_resolution or data.resolution,
        mean=data.mean,
        std=data.std,
        threads=threads or loader_threads(data),
        device=device,
    )


def shows_whole(config: Config) -> bool:
    """Whether evaluation takes the images as they are stored, if these are squares of one size."""
    return config.augment.crop == "pad" and config.data.eval_crop == 1


def noisy_labels(data: Data, manifest: Manifest) -> NDArray[np.int64]:
    """The training labels with the configured noise; the manifest keeps the clean ones."""
    asked = data.noise
    return noise.apply(
        manifest.labels,
        manifest.num_classes,
        asked.kind,
        asked.rate,
        asked.seed,
        asked.mapping,
        manifest.class_names,
    )


def resolution_at(data: Data, epoch: int) -> int:
    """Progressive resizing: data.resolution, or less in early epochs, as ffcv-imagenet does."""
    ramp = data.progressive
    if ramp is None or epoch >= ramp.end_epoch:
        return data.resolution
    if epoch <= ramp.start_epoch:
        return ramp.resolution
    grown = np.interp(epoch, [ramp.start_epoch, ramp.end_epoch], [ramp.resolution, data.resolution])
    unit = 32 if data.resolution >= 128 else 4  # what networks halve evenly
    return int(np.clip(np.round(grown / unit) * unit, ramp.resolution, data.resolution))


def loader_threads(data: Data) -> int:
    return data.threads or len(os.sched_getaffinity(0))


def _sides(reader: Any) -> NDArray[Any]:
    """The heights and widths of the stored images, each once."""
    table = reader.metadata[f"f{reader.field_names.index('image')}"]
    return np.unique(np.stack([table["height"], table["width"]]))


def _one_size(reader: Any, beton: Path) -> int:
    """The side of the stored images, which must be squares of one size."""
    sides = _sides(reader)
    if len(sides) > 1:
        raise InputError(
            f"augment.crop is pad: the images of {beton} have sides of {sides[0]} to {sides[-1]} "
            "pixels, not one size; set augment.crop=resized"
        )
    return int(sides[0])
