"""Knowledge distillation (Hinton et al., 2015) from one or several trained runs:
L = (1−λ)·L_task + λ·T²·KL(p̄ ‖ softmax(z/T)), where p̄ is the teachers' mean softmax at temperature T
and L_task the loss of any method that is a loss of logits and labels: cross-entropy, or AdaFocal,
CPC, MDCA, MMCE, … Teachers see the images that the student sees, mixed ones too. λ is our reading.
"""

from typing import Any

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Forward, Method, Samples, Targets
from dps_dist.methods.losses import kl_divergence


class KD(Method):
    def __init__(self, task: Method, teachers: tuple[str, ...], T: float, lam: float) -> None:
        self.task, self.teachers, self.T, self.lam = task, teachers, T, lam
        self.mixes, self.adapts = task.mixes, task.adapts

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        self.task.begin_epoch(epoch, epochs)

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert self.teacher is not None
        own, logits = self.task.loss(forward, batch, targets)
        taught = (self.teacher(batch.images).float() / self.T).softmax(-1).mean(0)
        distilled = self.T**2 * kl_divergence(taught, logits, self.T)
        return (1 - self.lam) * own + self.lam * distilled, logits

    def adapt(self, logits: Tensor, labels: Tensor) -> None:
        self.task.adapt(logits, labels)

    def state_dict(self) -> dict[str, Any]:
        return self.task.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.task.load_state_dict(state)


def build(settings: config.KD) -> KD:
    from dps_dist.methods import build as build_method  # which finds this file by its name

    return KD(build_method(settings.task), settings.teachers, settings.T, settings.lam)
