"""Baseline: cross-entropy with the labels, L = −log p_label.

With CutMix, CutOut or MixUp the loss is mixed as the images are: λ·L(a) + (1−λ)·L(b).
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Forward, Method, Samples, Targets
from dps_dist.methods.losses import cross_entropy


class Baseline(Method):
    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        logits = forward(batch.images)
        loss = cross_entropy(logits, batch.labels)
        if batch.mix is not None:
            first, partner, lam = batch.mix.first, batch.mix.partner, batch.mix.lam
            other = cross_entropy(logits[first:], batch.labels[first:][partner])
            loss = torch.cat([loss[:first], lam * loss[first:] + (1 - lam) * other])
        return loss, logits


def build(settings: config.Baseline) -> Baseline:
    return Baseline()
