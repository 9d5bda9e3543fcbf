"""Correctness ranking loss (Moon et al., 2020): who was predicted right more often is to be more
confident. L = CE + λ·mean max(0, −s·(κ_i−κ_j) + |c_i−c_j|), s = sign(c_i−c_j), κ = max p, j the
next sample of those that a worker passes at once, and c the share of the earlier epochs in which
the sample was predicted right.

Public code of the method also takes the least count of all samples off, which is 0 until every one
was right once; here c is the share itself. The counts live in the sharded store: a right prediction
is a visit there.
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Targets
from dps_dist.methods.losses import cross_entropy, mean_of


class CRL(Method):
    evidence = Evidence(gamma=1.0, classes=2)  # the least that a row can be: its visits count

    def __init__(self, lam: float) -> None:
        self.lam, self.epochs_before = lam, 1

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        self.epochs_before = max(1, epoch)

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        logits = forward(batch.images)
        kappa, predicted = logits.float().softmax(-1).max(-1)
        c = targets.visits(batch.index).float() / self.epochs_before
        apart, more_sure = c - c.roll(-1), kappa - kappa.roll(-1)
        ranking = (apart.abs() - apart.sign() * more_sure).relu()
        pairs = batch.real & batch.real.roll(-1)
        loss = cross_entropy(logits, batch.labels) + self.lam * mean_of(ranking, pairs)
        even = torch.full((len(c), 2), 0.5, device=logits.device)
        targets.update(batch.index, even, where=predicted == batch.labels)
        return loss, logits


def build(settings: config.CRL) -> CRL:
    return CRL(settings.lam)
