"""PS-KD (Kim et al., 2021): L = −Σ_j ((1−α_e)·onehot_j + α_e·p_prev,j)·log p_j, where p_prev is the
sample's prediction of the epoch before and α_e = α_T·e/E in epoch e of E. A sample that was not
visited yet has its label only.

p_prev is the store's evidence with γ = 0.
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Targets, remember
from dps_dist.methods.losses import cross_entropy, soft_cross_entropy


class PSKD(Method):
    evidence = Evidence(gamma=0.0)

    def __init__(self, alpha_T: float) -> None:
        self.alpha_T = alpha_T
        self.alpha = 0.0

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        self.alpha = self.alpha_T * (epoch + 1) / epochs

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        logits = forward(batch.images)
        hard = cross_entropy(logits, batch.labels)
        p_prev, visits = targets.evidence_and_visits(batch.index)
        soft = soft_cross_entropy(logits, p_prev)
        loss = torch.where(visits > 0, (1 - self.alpha) * hard + self.alpha * soft, hard)
        remember(targets, batch.index, logits.float().softmax(-1))
        return loss, logits


def build(settings: config.PSKD) -> PSKD:
    return PSKD(settings.alpha_T)
