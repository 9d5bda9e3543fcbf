"""How a rank is doing, and where its time goes; told at every look and epoch to a monitor.

The clock only reads the host's time. A GPU runs behind the host, which waits for it where it needs
a value: mostly in a look, which counts as compute. Then the sum of compute and targets is right,
and how it is split is what the host sees.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, TypeVarTuple, get_args

from torch import Tensor

from dps_dist.methods.base import Targets

if TYPE_CHECKING:
    from dps_dist.train.setup import Training

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Part = Literal["data", "compute", "targets", "exchange", "evaluate", "checkpoint", "other"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Vitals:
    """How a rank is doing; counts and seconds are since it was started."""

    epoch: float  # that are done, of `epochs`
    epochs: int
    loss: float  # of its steps since the last look; NaN if there were none
    steps: int
    images: int
    seconds: Mapping[Part, float]  # waited for data, computed, …
    store_bytes: int  # of its targets
    saved_at: float  # what was done since then (time.time) would be lost


Monitor = Callable[[Vitals], None]
"""Hears of a rank's vitals, on that rank."""


def nobody(vitals: Vitals) -> None:
    """No monitor."""


def vitals(training: "Training", loss: float) -> Vitals:
    at, clock = training.at, training.clock
    step = -(-at.position // training.config.data.batch_size)
    return Vitals(
        epoch=at.epoch + step / training.steps_per_epoch,
        epochs=training.config.train.epochs,
        loss=loss,
        steps=clock.steps,
        images=clock.images,
        seconds=dict(clock.seconds),
        store_bytes=training.targets.nbytes if training.targets is not None else 0,
        saved_at=training.writer.saved_at,
    )


class Clock:
    """Every second of a rank belongs to one part; steps and images are counted beside it."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.steps = self.images = 0
        self._since = time.perf_counter()

    def lap(self, part: Part) -> None:
        """The time since the last lap was spent on that part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now

    def count(self, images: int) -> None:
        """One more step, of so many images."""
        self.steps += 1
        self.images += images


class TimedTargets:
    """The target store as a method sees it in a step: what it does there counts as targets."""

    def __init__(self, targets: Targets, clock: Clock) -> None:
        self._targets, self._clock = targets, clock

    @classmethod
    def of(cls, training: "Training") -> "TimedTargets | None":
        return cls(training.targets, training.clock) if training.targets is not None else None

    def read(self, index: Tensor, labels: Tensor) -> Tensor:
        return self._timed(self._targets.read, index, labels)

    def update(self, index: Tensor, probs: Tensor, where: Tensor | None = None) -> None:
        self._timed(self._targets.update, index, probs, where)

    def step(self, logits: Tensor, labels: Tensor, index: Tensor, tau: float = 1.0) -> Tensor:
        return self._timed(self._targets.step, logits, labels, index, tau)

    def visits(self, index: Tensor) -> Tensor:
        return self._timed(self._targets.visits, index)

    def evidence_and_visits(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self._timed(self._targets.evidence_and_visits, index)

    def _timed(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        self._clock.lap("compute")
        result = call(*args)
        self._clock.lap("targets")
        return result
