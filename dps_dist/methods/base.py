"""What a method is: tensors in, a loss for each sample out. The training loop does the rest.

A method lives in one file, methods/<name>.py, with its settings as a row of `config.Method`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""images [B, 3, H, W] → logits [B, K]; to be called once a step."""


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
class Samples:
    """What a method sees of a step: images [B, 3, H, W], labels, index int64 [B].

    other_views: further random views of the same samples, as many as the method asked for.
    mix: which rows were mixed, and how; None if none were.
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    other_views: tuple[Tensor, ...] = ()
    mix: Mix | None = None


@dataclass(frozen=True)
class Evidence:
    """What a method keeps of each sample: the discounted mean of its predictions, and a prior."""

    gamma: float
    c: float = 1.0
    epsilon: float = 0.0


class Targets(Protocol):
    """What a method may ask of the target store; `dps_dist.targets` says more."""

    def read(self, index: Tensor, labels: Tensor) -> Tensor: ...
    def update(self, index: Tensor, probs: Tensor) -> None: ...
    def step(self, logits: Tensor, labels: Tensor, index: Tensor, tau: float = 1.0) -> Tensor: ...
    def evidence(self, index: Tensor) -> Tensor: ...
    def visits(self, index: Tensor) -> Tensor: ...


class Method(ABC):
    """How a batch becomes losses. What it keeps beyond the target store goes into `state_dict`."""

    mixes: ClassVar[Literal["all", "half"]] = "all"
    """Which part of a batch CutMix, CutOut or MixUp may change: all, or the second half."""

    views: int = 1
    """Random views of each image that the loader is to bring."""

    evidence: Evidence | None = None
    """What the target store keeps for it, if anything."""

    def begin_epoch(self, epoch: int, epochs: int) -> None:  # noqa: B027  (most do nothing)
        """Called before epoch `epoch` (from 0) of `epochs`, and when one is resumed."""

    @abstractmethod
    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each sample, float32 [B], and its logits [B, K]."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, "this method keeps nothing"
