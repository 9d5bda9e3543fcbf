"""Runs that have been trained, as models: teachers of others, members of an ensemble."""

import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist import models, recipes
from dps_dist.config import Config
from dps_dist.data.loader import resolution_at
from dps_dist.data.manifest import Manifest
from dps_dist.errors import InputError
from dps_dist.methods.base import Teacher
from dps_dist.train.checkpoint import Opened, open_checkpoint
from dps_dist.train.files import CONFIG
from dps_dist.train.manifest import Moment, best_first, complete
from dps_dist.train.storage import Storage


@dataclass(frozen=True)
class Trained:
    """A run's configuration, and its (averaged) model, ready to predict.

    folder: as it was given, a URL without its secrets.
    checkpoint: as it was asked for, "newest", "best" or its name.
    data: what is known of the data that it was trained on, as `state.py` saves it.
    """

    storage: Storage
    folder: str
    config: Config
    model: models.Classifier
    data: dict[str, int]
    moment: Moment
    checkpoint: str

    @property
    def name(self) -> str:
        return self.storage.name


def read_config(storage: Storage) -> Config:
    """The configuration in a run's folder."""
    try:
        fields = read_fields(storage)
    except FileNotFoundError:
        raise InputError(
            f"{storage} is not the folder of a run, it has no {CONFIG}: give one that `dps train` "
            "made"
        ) from None
    return recipes.resolve(fields, where=str(storage / CONFIG))


def read_fields(storage: Storage) -> dict[str, Any]:
    """What its file holds, before it is resolved."""
    file = str(storage / CONFIG)
    try:
        return recipes.parse(storage.read(CONFIG).decode(), file)
    except UnicodeDecodeError:
        raise InputError(f"{file} is damaged, it is no text: restore it from a copy") from None


def load(
    folder: str | Path, device: torch.device | str = "cpu", checkpoint: str = "newest"
) -> Trained:
    """The model of the run's newest checkpoint, of the best of those that it kept ("best"), or of
    one that is named; its targets are not read."""
    storage = Storage(folder)
    config = read_config(storage)
    if checkpoint in ("newest", "best"):
        opened = _whole(storage, best=checkpoint == "best")
    else:
        opened = _open(storage, checkpoint)
    state = opened.state
    weights = dict(state["model"])
    if state["ema"] is not None:
        weights |= {**state["ema"]["parameters"], **state["ema"]["buffers"]}
    own = config.model
    model = models.build(
        own.name, state["data"]["classes"], stem=own.stem, image_size=config.data.resolution
    )
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise InputError(
            f"{storage / CONFIG}: model.name is {own.name}, model.stem {own.stem} and "
            f"data.resolution {config.data.resolution}: the weights are of another model; set "
            "these as they were trained"
        ) from None
    model = placed(model, config, device).eval().requires_grad_(False)
    shown = str(folder if storage.local else storage)
    return Trained(storage, shown, config, model, state["data"], opened.moment, checkpoint)


def placed(
    model: models.Classifier, config: Config, device: torch.device | str
) -> models.Classifier:
    """The model on the device, in the memory format of the configuration."""
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    return model.to(device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def _whole(storage: Storage, best: bool) -> Opened:
    """The newest checkpoint whose state is whole, or the best, of a run that has finished an epoch.

    There is but one best: if it is damaged, no other one stands for it.
    """
    checkpoints = complete(storage)
    failure = InputError(f"{storage} has no checkpoint: train it for an epoch first")
    if best and checkpoints:
        checkpoints = best_first(checkpoints)[:1]
        failure = InputError(f"{storage} has no checkpoint that was evaluated: take the newest one")
    for found in checkpoints:
        if found.moment.epoch < 1:
            raise unfinished(storage)
        try:
            return _open(storage, found.name)
        except InputError as error:
            failure = error
    raise failure


def unfinished(storage: Storage) -> InputError:
    """What is said of a run in its first epoch, of which nothing can be told yet."""
    return InputError(f"{storage} has not finished an epoch: try again when it has")


def _open(storage: Storage, name: str) -> Opened:
    with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
        return open_checkpoint(storage, name, Path(scratch), targets=False)


def names_sum(data: Manifest) -> int:
    """A number that tells class names from others."""
    return zlib.crc32("\n".join(data.class_names).encode())


def labels_sum(labels: NDArray[np.int64]) -> int:
    """A number that tells labels from others."""
    return zlib.crc32(labels.astype("<i8").tobytes())


def check_classes(run: Trained, data: Manifest) -> None:
    """Refuse data of other classes than the run knows."""
    check_data(run.folder, data, run.data, _classes(data))


def _classes(data: Manifest) -> dict[str, int]:
    """What tells the classes from others, as in `Trained.data`."""
    return {"classes": data.num_classes, "sum of class names": names_sum(data)}


def check_data(
    run: Storage | str, data: Manifest, then: Mapping[str, int], own: Mapping[str, int]
) -> None:
    """Refuse other data than those of the run, of which `then` tells what is known."""
    for what, count in own.items():
        if then.get(what, count) != count:
            raise InputError(
                f"{data.beton} is not what {run} was trained on ({what} {count}, then "
                f"{then[what]}): set data.path in its {CONFIG} to that data"
            )


def teacher(
    folders: Iterable[str], config: Config, data: Manifest, device: torch.device
) -> Teacher:
    """Trained runs as one teacher of a run with this configuration, on these data."""
    runs = [load(folder, device) for folder in folders]
    for run in runs:
        _check_teacher(run, config, data)

    def taught(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([run.model(images) for run in runs])

    return taught


def _check_teacher(run: Trained, config: Config, data: Manifest) -> None:
    """Refuse one that knows other classes, or cannot be shown the student's images."""
    if any(run.data.get(what, value) != value for what, value in _classes(data).items()):
        raise InputError(
            f"method.teachers: {run.folder} knows {run.data['classes']} classes and {data.beton} "
            f"has {data.num_classes}, or other names for them: give runs on the same data"
        )
    if (run.config.data.mean, run.config.data.std) != (config.data.mean, config.data.std):
        raise InputError(
            f"method.teachers: {run.folder} was trained with another data.mean or data.std: give "
            "teachers that see images as this run does"
        )
    for side in {resolution_at(config.data, epoch) for epoch in range(config.train.epochs)}:
        device = next(run.model.parameters()).device
        try:
            with torch.no_grad():
                run.model(torch.zeros(1, 3, side, side, device=device))
        except (AssertionError, RuntimeError) as error:
            raise InputError(
                f"method.teachers: {run.folder} cannot see images of {side}×{side} pixels "
                f"({str(error).splitlines()[0]}): give teachers that can"
            ) from None
