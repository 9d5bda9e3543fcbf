"""`state.pt` of a checkpoint: tensors and plain values, checked when written and when read."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.targets.checksums import summed
from dps_dist.train.manifest import File

PLAIN = (int, float, bool, str, bytes, type(None))


def write_state(path: Path, state: dict[str, Any]) -> File:
    _expect_plain(state, "state")
    with summed(path) as file:
        torch.save(state, file)  # type: ignore[arg-type]  # it asks for no more than Summed has
    return File(path.name, file.size, file.crc32)


def read_state(path: Path) -> dict[str, Any]:
    """The state, on the CPU. A pickle that would call anything is refused before it does."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch says it in many ways
        raise InputError(
            f"{path} holds more than tensors and plain values, which is not loaded because it "
            "could run code: use another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise InputError(
            f"{path} holds a {type(state).__name__} and no state: use another checkpoint"
        )
    return state


def _expect_plain(value: Any, where: str) -> None:
    """What would not be loaded again is not saved."""
    if type(value) in (dict, OrderedDict):
        for key, entry in value.items():
            _expect_plain(key, f"a key of {where}")
            _expect_plain(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, entry in enumerate(value):
            _expect_plain(entry, f"{where}[{number}]")
    elif type(value) not in PLAIN and not isinstance(value, Tensor):
        raise InputError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: "
            "give tensors, numbers, text, and lists and dicts of them"
        )
