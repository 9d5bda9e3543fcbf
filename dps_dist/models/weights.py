"""Weights for a freshly built model: torchvision's published ones by name, or a local file.

Files are read with `weights_only=True`: no pickled code runs.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.models.base import Classifier

logger = logging.getLogger(__name__)


def load_weights(model: Classifier, weights: str | Path, published: Any = None) -> None:
    """Fill `model` from a name in torchvision's enum `published`, or else from a file.

    A head for another number of classes is left out, and the model keeps its fresh one.
    """
    names: list[str] = [] if published is None else list(published.__members__)
    content = _download(published[weights]) if weights in names else _read(Path(weights), names)
    _fill(model, _as_state_dict(content, weights), weights)


def _download(entry: Any) -> Any:
    try:
        return entry.get_state_dict(check_hash=True, map_location="cpu", weights_only=True)
    # Anything can go wrong between here and the server or in the cache, and the remedy is the same.
    except Exception as error:
        raise InputError(
            f"model.weights is {entry.name}: it could not be had from {entry.url} "
            f"({_first_line(error)}); download that file on another machine and give its path"
        ) from error


def _read(path: Path, names: list[str]) -> Any:
    if not path.is_file():
        by_name = f", nor one of torchvision's ({', '.join(names)})" if names else ""
        raise InputError(
            f"model.weights is {path}: it is not a file{by_name}; give the path of a state dict "
            "that torch.save wrote"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # A file of arbitrary bytes makes the unpickler raise almost anything.
    except Exception as error:
        raise InputError(
            f"model.weights is {path}: it cannot be read as tensors ({_first_line(error)}); write "
            "the file with torch.save(model.state_dict(), path)"
        ) from error


def _as_state_dict(content: Any, source: str | Path) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        found = type(content).__name__
    elif strange := [key for key, value in content.items() if not isinstance(value, Tensor)]:
        found = f"something other than tensors under {_some(strange)}"
    elif content:
        return {str(key): value for key, value in content.items()}
    else:
        found = "no tensors"
    raise InputError(
        f"model.weights is {source}: it holds {found} and is no state dict; write the file with "
        "torch.save(model.state_dict(), path)"
    )


def _fill(model: Classifier, state: dict[str, Tensor], source: str | Path) -> None:
    state = model.adapt(state)
    own = model.state_dict()
    weight, bias = f"{model.head_name}.weight", f"{model.head_name}.bias"
    fresh_head = (
        weight in state
        and state[weight].shape[1:] == own[weight].shape[1:]
        and len(state[weight]) != len(own[weight])
    )
    if fresh_head:
        logger.info("%s has %d classes; the head starts afresh", source, len(state[weight]))
        state |= {weight: own[weight], bias: own[bias]}
    misfits = [
        f"{key} is {list(value.shape)} instead of {list(own[key].shape)}"
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]
    if not misfits:
        # strict=False still fills in the batch counters that old BatchNorm checkpoints lack.
        missing, unexpected = model.load_state_dict(state, strict=False)
        misfits += [f"{key} is missing" for key in missing]
        misfits += [f"{key} is unknown" for key in unexpected]
    if misfits:
        raise InputError(
            f"model.weights is {source}: it does not fit the model, {_some(misfits)}; give weights "
            "of the same model with the same stem"
        )


def _some(items: list[Any], limit: int = 3) -> str:
    rest = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(str(item) for item in items[:limit]) + rest


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
