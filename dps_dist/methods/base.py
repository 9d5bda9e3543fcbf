"""What a method is: tensors in, a loss for each sample out. The training loop does the rest.

A method lives in one file, methods/<name>.py, with its settings as a row of `config.Method`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional, Protocol

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""images [B, 3, H, W] → logits [B, K]; to be called once a step."""

Teacher = Callable[[Tensor], Tensor]
"""images [B, 3, H, W] → the logits of each teacher, [M, B, K], without gradient."""


@dataclass(frozen=True)
class Mix:
    """The rows from `first` on show sample b with weight lam, and partner[b] with 1 − lam.

    partner: int64 [B − first], counted from `first`. CutOut has each row itself for a partner.
    """

    first: int
    partner: Tensor
    lam: float

    def of(self, values: Tensor) -> Tensor:
        """What belongs to the mixed rows (targets [n, K], losses [n]), mixed as their images."""
        return self.lam * values + (1 - self.lam) * values[self.partner]


@dataclass(frozen=True)
class View:
    """Further random views of a batch's samples, images [B, 3, H, W], and how they were mixed."""

    images: Tensor
    mix: Mix | None = None


@dataclass(frozen=True)
class Samples:
    """What a method sees of a step: images [B, 3, H, W], labels, index int64 [B].

    mix: which rows were mixed, and how; None if none were.
    other_views: further random views of the same samples, as many as the method asked for.
    before: the samples of the step before, for a method that recalls them, with the logits
        [B', K] of their images; None in the first step.
    Padding has index −1, and may have any label; what it loses weighs nothing.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    mix: Mix | None = None
    other_views: tuple[View, ...] = ()
    before: Optional["Samples"] = None
    logits: Tensor | None = None

    @property
    def real(self) -> Tensor:
        """bool [B]: what is not padding."""
        return self.index >= 0


@dataclass(frozen=True)
class Evidence:
    """What a method keeps of each sample: the discounted mean of its predictions.

    c, epsilon: the prior of the targets that are read from it; without c it is used as it is.
    classes: its length; None stands for the number of classes.
    """

    gamma: float
    c: float | None = None
    epsilon: float = 0.0
    classes: int | None = None


@dataclass(frozen=True)
class Strong:
    """That further views are strong ones: TrivialAugmentWide, RandomErasing, then CutMix.

    erase: share of the views with a piece erased. CutMix has λ ~ Beta(1, 1).
    """

    erase: float = 0.5


class Targets(Protocol):
    """What a method may ask of the target store; `dps_dist.targets` says more."""

    def read(self, index: Tensor, labels: Tensor) -> Tensor: ...
    def update(self, index: Tensor, probs: Tensor, where: Tensor | None = None) -> None: ...
    def step(self, logits: Tensor, labels: Tensor, index: Tensor, tau: float = 1.0) -> Tensor: ...
    def visits(self, index: Tensor) -> Tensor: ...
    def evidence_and_visits(self, index: Tensor) -> tuple[Tensor, Tensor]: ...


class Method(ABC):
    """How a batch becomes losses. What it keeps beyond the target store goes into `state_dict`."""

    mixes: Literal["all", "half", "none"] = "none"
    """Which part of a batch CutMix, CutOut or MixUp may change: all, its second half, or none."""

    views: int = 1
    """Random views of each image that the loader is to bring."""

    strong: Strong | None = None
    """How the views after the first are changed further."""

    recalls: bool = False
    """Whether it is shown the step before again."""

    evidence: Evidence | None = None
    """What the target store keeps for it, if anything."""

    teachers: tuple[str, ...] = ()
    """Folders of the runs that teach it; `teacher` is set before the first step."""

    teacher: Teacher | None = None

    adapts: bool = False
    """Whether it is shown the predictions for the held-out samples after each epoch."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:  # noqa: B027  (most do nothing)
        """Called before epoch `epoch` (from 0) of `epochs`, and when one is resumed."""

    @abstractmethod
    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each sample, float32 [B], and its logits [B, K].

        A loss of the whole batch is added to that of each sample, of which the mean is taken.
        """

    def adapt(self, logits: Tensor, labels: Tensor) -> None:  # noqa: B027
        """Called after an epoch with the logits [H, K] of all held-out samples, on each rank."""

    def momentum(self, usual: float, optimizer: str) -> float:
        """What SGD's momentum or Adam's β1 is to be at this step, where it would be `usual`."""
        return usual

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "this method keeps nothing"


def remember(targets: Targets, index: Tensor, p: Tensor) -> None:
    """One more visit with the predictions p [B, K]; none where they are not finite.

    Such a loss ends the run, in float16 too: no smaller scale would mend what overflowed before it.
    """
    targets.update(index, p.detach(), where=p.isfinite().all(-1))


LabelLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, K], labels [B]) → the loss of each row, float32 [B]."""


def by_label(loss: LabelLoss, logits: Tensor, labels: Tensor, mix: Mix | None) -> Tensor:
    """loss(logits, labels) [B], mixed as the images were: λ·L(a) + (1−λ)·L(b)."""
    own = loss(logits, labels)
    if mix is None:
        return own
    other = loss(logits[mix.first :], labels[mix.first :][mix.partner])
    return torch.cat([own[: mix.first], mix.lam * own[mix.first :] + (1 - mix.lam) * other])


class LabelMethod(Method):
    """A method that is a loss of logits and label alone; it may be mixed, and be KD's task."""

    mixes = "all"

    @abstractmethod
    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row, float32 [B]."""

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        logits = forward(batch.images)
        return by_label(self.of_labels, logits, batch.labels, batch.mix), logits
