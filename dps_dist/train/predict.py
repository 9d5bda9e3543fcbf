"""What a trained model says of data: of a prepared split, or of images in an array."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.data import manifest as manifests
from dps_dist.data.augment import normalized
from dps_dist.data.decode import centered
from dps_dist.data.hold_out import HOLD_OUT, Samples, split
from dps_dist.data.loader import Loader, eval_loader, shows_whole
from dps_dist.data.manifest import Manifest
from dps_dist.data.order import EpochOrder
from dps_dist.errors import InputError
from dps_dist.train.trained import Trained, check_classes, check_data

Progress = Callable[[int, int], Any]
BATCH = 256
MOST_LOADERS = 4
_loaders: dict[tuple[Any, ...], Loader] = {}


class Predicted(NamedTuple):
    """logits float32 [N, K] and labels int64 [N], on the CPU."""

    logits: Tensor
    labels: Tensor


class Shown(NamedTuple):
    """A prepared split, and which of its samples; None stands for all."""

    manifest: Manifest
    only: Samples | None


def split_of(run: Trained, name: str | None = None) -> Shown:
    """The split that a run is evaluated on, or the samples that it held out of training."""
    data = run.config.data
    given = f"--split is {name}" if name else f"evaluate.split is {run.config.evaluate.split}"
    name = name or run.config.evaluate.split
    if name != HOLD_OUT:
        shown = manifests.read(data.path, name)
        check_classes(run, shown)
        manifests.check_labelled(shown, shown.clean_labels, given)
        return Shown(shown, None)
    train_set = manifests.read(data.path, "train")
    check_classes(run, train_set)
    check_data(run.folder, train_set, run.data, {"samples": len(train_set)})
    held_out = split(len(train_set), data.hold_out, data.hold_out_seed).held_out
    if held_out is None:
        raise InputError(f"--split is hold_out: {run.folder} held nothing out; give val")
    manifests.check_labelled(train_set, train_set.clean_labels[held_out], given)
    return Shown(train_set, held_out)


@torch.no_grad()
def on_split(
    run: Trained,
    shown: Shown,
    forward: Callable[[Tensor], Tensor] | None = None,
    *,
    progress: Progress = lambda done, of: None,
) -> Predicted:
    """The model's logits for every sample of a split in order. forward: what is to be called
    instead of the model, such as its `embed`, whose features [N, D] then stand for the logits."""
    forward = forward or run.model
    loader = _loader(run, shown.manifest)
    order = EpochOrder(len(shown.manifest), BATCH, shuffle="none", drop_last=False, only=shown.only)
    rows, labels = [], []
    for number, batch in enumerate(loader.epoch(order), start=1):
        real = len(batch.index) - batch.padding
        rows.append(forward(batch.images[:real]).float().cpu())
        labels.append(batch.labels[:real].cpu())
        progress(number, order.steps)
    return Predicted(torch.cat(rows), torch.cat(labels))


def _loader(run: Trained, shown: Manifest) -> Loader:
    """One serves all that look at a file in the same way: numba compiles seconds for each."""
    device = next(run.model.parameters()).device
    config = run.config
    key = (str(shown.beton), device, config.data.model_dump_json(), config.augment.crop)
    if key not in _loaders:
        if len(_loaders) == MOST_LOADERS:
            _loaders.clear()
        _loaders[key] = eval_loader(config, shown, device=device)
    return _loaders[key]


@torch.no_grad()
def on_arrays(run: Trained, images: NDArray[np.uint8]) -> Tensor:
    """The logits of images uint8 [N, H, W, 3], cut, sized and normalised as prepared ones are."""
    data, whole = run.config.data, shows_whole(run.config)
    device = next(run.model.parameters()).device
    side = data.eval_resolution or data.resolution
    rows = []
    for start in range(0, len(images), BATCH):
        part = np.array(images[start : start + BATCH])
        shown = part if whole else centered(part, data.eval_crop, side)
        pixels = torch.from_numpy(shown).permute(0, 3, 1, 2)
        batch = normalized(pixels.to(device), data.mean, data.std)
        if batch.shape[-1] != side:
            batch = F.interpolate(batch, side, mode="bilinear", antialias=True)
        batch = batch.contiguous(memory_format=torch.channels_last)
        rows.append(run.model(batch).float().cpu())
    return torch.cat(rows)
