"""Deep Probabilistic Supervision: the target of a sample is inferred from its label and the
model's own predictions, y ← (1−w)·y + w·p with w = 1/(γA+1), A ← γA + 1, from the prior α⁰ (c at
the label, ε elsewhere). L = −Σ_j q_j log p_j with q = y^{1/τ}/‖y^{1/τ}‖₁ of the target before the
update; the stored y stays unsharpened.

With CutMix or CutOut half of every batch is augmented and the other half distils: the augmented
half has a loss against the (mixed) stored targets, but no update and no visit.
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Targets
from dps_dist.methods.losses import sharpened, soft_cross_entropy


class DPS(Method):
    mixes = "half"

    def __init__(self, gamma: float, c: float, epsilon: float = 0.0, tau: float = 1.0) -> None:
        self.evidence = Evidence(gamma, c, epsilon)
        self.tau = tau

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        logits = forward(batch.images)
        labels, index = batch.labels, batch.index
        if batch.mix is None:
            return targets.step(logits, labels, index, self.tau), logits
        plain = batch.mix.first
        loss = targets.step(logits[:plain], labels[:plain], index[:plain], self.tau)
        stored = sharpened(targets.read(index[plain:], labels[plain:]), self.tau)
        mixed = soft_cross_entropy(logits[plain:], batch.mix.of(stored))
        loss = torch.cat([loss, mixed])
        return loss, logits


def build(settings: config.DPS) -> DPS:
    return DPS(settings.gamma, settings.c, settings.epsilon, settings.tau)
