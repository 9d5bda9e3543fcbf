"""What the stores refuse, and the sentences that say why; `local.py` asks before it writes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.errors import InputError

PADDING = -1
MAX_PROBABILITY = 1.001  # a softmax in half precision may exceed 1 by its rounding


class Order(Protocol):
    """What the stores need of an `EpochOrder`; `targets` and `data` do not import each other."""

    @property
    def num_samples(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def assignment(self) -> NDArray[np.int32]: ...


def check_order(order: Order, num_samples: int, world_size: int) -> None:
    """Refuse an order that was made for another data set or another number of ranks."""
    for field, own in (("num_samples", num_samples), ("world_size", world_size)):
        if getattr(order, field) != own:
            raise InputError(
                f"the order's {field} is {getattr(order, field)}: give an order with {own}"
            )


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}: give {list(shape)}")


def expect_integers(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} has type {tensor.dtype}: give integers, such as torch.int64")


@dataclass(frozen=True)
class Batch:
    """What a caller asks of a store.

    samples: int64 [B], any number that was given; slots: int64 [B], -1 where there is no row.
    writes: whether the rows will change, so that none may come twice.
    """

    samples: Tensor
    slots: Tensor
    labels: Tensor | None
    probs: Tensor | None
    writes: bool

    def check(self, num_samples: int, num_classes: int, absent: Callable[[int], str]) -> bool:
        """Whether there is padding; an InputError if a row cannot be served.

        Every question is asked on the device and all are answered in one transfer, because each
        transfer makes the host wait for the GPU.
        """
        samples, B = self.samples, len(self.samples)
        if self.labels is not None:
            expect_shape("labels", self.labels, (B,))
            expect_integers("labels", self.labels)
        if self.probs is not None:
            expect_shape("probs", self.probs, (B, num_classes))
        if not B:
            return False
        on_cpu = samples.device.type == "cpu" and (
            self.labels is None or self.labels.device.type == "cpu"
        )
        asked = self._asked_on_cpu(num_classes) if on_cpu else self._asked(num_classes)
        padded, *doubts = asked
        if any(doubts):  # perhaps about padding only, which may carry anything
            self._explain(num_samples, num_classes, absent)
        return bool(padded)

    def _asked(self, num_classes: int) -> list[bool]:
        """Whether there is padding, and then whether there may be something wrong."""
        samples = self.samples
        padding = samples == PADDING
        asked = [padding.any(), ((self.slots < 0) & ~padding).any()]
        if self.writes:
            ordered = samples.sort().values
            asked.append(((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).any())
        if self.labels is not None:
            asked.append(((self.labels < 0) | (self.labels >= num_classes)).any())
        if self.probs is not None:
            asked.append(~_probable(*self.probs.detach().aminmax()))
        answers: list[bool] = torch.stack([one.to(samples.device) for one in asked]).tolist()
        return answers

    def _asked_on_cpu(self, num_classes: int) -> list[bool]:
        """The same by numpy, which takes a fifth of torch's time for so few numbers."""
        samples, slots = self.samples.numpy(), self.slots.numpy()
        asked = [False, False]
        if slots.min() < 0:
            padding = samples == PADDING
            asked = [padding.any(), ((slots < 0) & ~padding).any()]
        if self.writes:
            ordered = np.sort(samples)
            twice = ordered[1:] == ordered[:-1]
            asked.append(twice.any() and (twice & (ordered[1:] >= 0)).any())
        if self.labels is not None:
            asked.append(not all_below(num_classes, self.labels))
        if self.probs is not None:
            asked.append(not _probable(*self.probs.detach().aminmax()))
        return [bool(answer) for answer in asked]

    def _explain(self, num_samples: int, num_classes: int, absent: Callable[[int], str]) -> None:
        """Raise for the first row at fault, saying which and why."""
        seen = set()
        for row, sample in enumerate(self.samples.tolist()):
            if sample == PADDING:
                continue
            if not 0 <= sample < num_samples:
                raise InputError(
                    f"index holds {sample}: give 0 to {num_samples - 1}, or {PADDING} for padding"
                )
            if self.slots[row] < 0:
                raise InputError(absent(sample))
            if self.writes and sample in seen:
                raise InputError(f"sample {sample} is twice in one update: give it once")
            seen.add(sample)
            if self.labels is not None and not 0 <= self.labels[row] < num_classes:
                raise InputError(
                    f"the label of sample {sample} is {int(self.labels[row])}: "
                    f"give 0 to {num_classes - 1}"
                )
            if self.probs is not None:
                low, high = self.probs[row].detach().aminmax()
                if not _probable(low, high):
                    raise InputError(
                        f"the probs of sample {sample} range from {low:g} to {high:g}: "
                        "give probabilities from 0 to 1, as softmax does"
                    )


def all_below(limit: int, numbers: Tensor) -> bool:
    """Whether all are in 0 … limit − 1; on the CPU. As unsigned, negative ones are the largest."""
    if numbers.dtype != torch.int64:
        numbers = numbers.long()
    return not len(numbers) or bool(numbers.numpy().view(np.uint64).max() < limit)


def _probable(low: Tensor, high: Tensor) -> Tensor:
    """Whether the least and the greatest are probabilities; one NaN makes both NaN and fails."""
    return (low >= 0) & (high <= MAX_PROBABILITY)
