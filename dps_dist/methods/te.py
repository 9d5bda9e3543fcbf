"""Temporal Ensembling (Laine & Aila, 2017): predictions are to stay near their own moving average,
Z ← a·Z + (1−a)·p at each visit, z̃ = Z/(1−aᵗ). L = CE + w(e)·(1/K)Σ_j (p_j − z̃_j)², with
w(e) = w_max·exp(−5(1−e/e_r)²), 0 in the first epoch and for a sample that was not visited yet.
Adam's β1 is annealed over the last epochs: r·β1 + (1−r)·β_end, r = exp(−12.5u²), u from 0 to 1.

z̃ is the store's evidence with γ = a. w_max is our reading of the DPS paper.
"""

from math import exp

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Targets, remember
from dps_dist.methods.losses import cross_entropy


class TE(Method):
    def __init__(self, settings: config.TE) -> None:
        self.settings = settings
        self.evidence = Evidence(settings.a)
        self.weight, self.kept = 0.0, 1.0

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        own = self.settings
        left = 1 - epoch / own.rampup_epochs if epoch < own.rampup_epochs else 0.0
        self.weight = own.w_max * exp(-5 * left**2) if epoch else 0.0
        last = epoch - (epochs - own.rampdown_epochs)
        self.kept = exp(-12.5 * (last / own.rampdown_epochs) ** 2) if last > 0 else 1.0

    def momentum(self, usual: float, optimizer: str) -> float:
        if optimizer == "sgd" and not self.settings.anneal_sgd:
            return usual
        return self.kept * usual + (1 - self.kept) * self.settings.beta1_end

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        logits = forward(batch.images)
        p = logits.float().softmax(-1)
        loss = cross_entropy(logits, batch.labels)
        if self.weight:
            average, visits = targets.evidence_and_visits(batch.index)
            away = (p - average).square().mean(-1)
            loss = loss + self.weight * torch.where(visits > 0, away, 0.0)
        remember(targets, batch.index, p)
        return loss, logits


def build(settings: config.TE) -> TE:
    return TE(settings)
