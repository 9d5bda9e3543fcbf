"""Runs that have been trained, as models: teachers of others, members of an ensemble."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dps_dist import models, recipes
from dps_dist.config import Config
from dps_dist.errors import InputError
from dps_dist.methods.base import Teacher
from dps_dist.train.checkpoint import newest_whole, open_checkpoint
from dps_dist.train.storage import Storage

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Trained:
    """A run's configuration, and its (averaged) model after so many epochs, ready to predict."""

    folder: str
    config: Config
    model: models.Classifier
    num_classes: int
    epochs: int


def load(folder: str | Path, device: torch.device | str = "cpu") -> Trained:
    """The model of the run's newest whole checkpoint."""
    storage = Storage(folder)
    try:
        text = storage.read(CONFIG).decode()
    except FileNotFoundError:
        raise InputError(
            f"{folder} is not the folder of a run, it has no {CONFIG}: give one that `dps train` "
            "made"
        ) from None
    config = recipes.resolve(recipes.parse(text, str(folder)), where=f"{folder}/{CONFIG}")
    skipped: list[str] = []
    found = newest_whole(storage, skipped.append)
    if found is None:
        why = f" ({skipped[0]})" if skipped else ""
        raise InputError(f"{folder} has no checkpoint{why}: train it for an epoch first")
    with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
        state = open_checkpoint(storage, found.name, Path(scratch)).state
    weights = dict(state["model"])
    if state["ema"] is not None:
        weights |= {**state["ema"]["parameters"], **state["ema"]["buffers"]}
    num_classes = state["data"]["classes"]
    own = config.model
    side = config.data.resolution
    model = models.build(own.name, num_classes, stem=own.stem, weights=None, image_size=side)
    model.load_state_dict(weights)
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    model = model.to(device, memory_format=layout).eval()  # type: ignore[call-overload]
    return Trained(
        str(folder), config, model.requires_grad_(False), num_classes, found.moment.epoch
    )


def teacher(
    folders: Iterable[str], config: Config, num_classes: int, device: torch.device
) -> Teacher:
    """Trained runs as one teacher of a run with this configuration."""
    runs = [load(folder, device) for folder in folders]
    for run in runs:
        if run.num_classes != num_classes:
            raise InputError(
                f"method.teachers: {run.folder} knows {run.num_classes} classes and "
                f"{config.data.path} has {num_classes}: give runs on the same data"
            )
        if (run.config.data.mean, run.config.data.std) != (config.data.mean, config.data.std):
            raise InputError(
                f"method.teachers: {run.folder} was trained with another data.mean or data.std: "
                "set those of the teachers"
            )

    def taught(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([run.model(images) for run in runs])

    return taught
