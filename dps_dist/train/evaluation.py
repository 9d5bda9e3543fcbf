"""Figures of trained runs on their evaluation split, each by itself and as an ensemble."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import torch

from dps_dist.config import Config
from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import HOLD_OUT, Samples
from dps_dist.data.hold_out import split as split_samples
from dps_dist.data.loader import eval_loader
from dps_dist.data.manifest import Manifest
from dps_dist.data.order import EpochOrder
from dps_dist.errors import InputError
from dps_dist.evaluate.metrics import Tally
from dps_dist.train.trained import Trained, load

ENSEMBLE = "ensemble"
Figures = dict[str, float]


@torch.no_grad()
def evaluate(
    folders: Sequence[str],
    *,
    split: str | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], Any] = lambda done, of: None,
) -> dict[str, Figures]:
    """Accuracy, top-5, NLL, ECE of each run and, of several, of their mean softmax ("ensemble")."""
    runs = [load(folder, device) for folder in dict.fromkeys(folders)]
    first = runs[0].config
    shown, only = _split(first, split or first.evaluate.split)
    for run in runs[1:]:
        _check_alike(runs[0], run, of_held_out=only is not None)
    loader = eval_loader(first, shown, device=device)
    order = EpochOrder(
        len(shown), first.data.batch_size, shuffle="none", drop_last=False, only=only
    )
    tallies = {run.folder: Tally(device=device) for run in runs}
    together = Tally(device=device)
    for number, batch in enumerate(loader.epoch(order), start=1):
        logits = [run.model(batch.images) for run in runs]
        for tally, own in zip(tallies.values(), logits, strict=True):
            tally.add(own, batch.labels, batch.weight)
        mean = torch.stack(logits).double().softmax(-1).mean(0)
        together.add(mean.log(), batch.labels, batch.weight)  # whose softmax it is again
        progress(number, order.steps)
    figures = {folder: tally.figures() for folder, tally in tallies.items()}
    return figures if len(runs) == 1 else {**figures, ENSEMBLE: together.figures()}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the sample's standard deviation; NaN of a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, nan
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


def _split(config: Config, name: str) -> tuple[Manifest, Samples | None]:
    """A prepared split and which of its samples: all, or those that were held out of training."""
    if name != HOLD_OUT:
        return manifests.read(config.data.path, name), None
    train_set = manifests.read(config.data.path, "train")
    data = config.data
    held_out = split_samples(len(train_set), data.hold_out, data.hold_out_seed).held_out
    if held_out is None:
        raise InputError("--split is hold_out: the runs held nothing out; give val")
    return train_set, held_out


def _check_alike(first: Trained, other: Trained, of_held_out: bool) -> None:
    """Refuse runs that cannot be shown the same images."""
    one, two = (_seen(run.config, of_held_out) for run in (first, other))
    for field in one:
        if one[field] != two[field]:
            raise InputError(
                f"{other.folder} has {field} {two[field]} and {first.folder} {one[field]}: "
                "evaluate runs on the same data together"
            )


def _seen(config: Config, of_held_out: bool) -> dict[str, Any]:
    """What decides which images evaluation shows."""
    data = config.data
    seen = {
        "data.path": data.path,
        "data.mean": data.mean,
        "data.std": data.std,
        "data.eval_crop": data.eval_crop,
        "data.eval_resolution": data.eval_resolution or data.resolution,
    }
    if of_held_out:
        seen |= {"data.hold_out": data.hold_out, "data.hold_out_seed": data.hold_out_seed}
    return seen
