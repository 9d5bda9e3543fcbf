"""Symmetric cross-entropy learning (Wang et al., 2019): L = α·CE + β·RCE, where the reverse
cross-entropy RCE = −Σ_j p_j log(clip(onehot_j, 1e-4, 1)) is −log(1e-4)·(1−p_y).
"""

from math import log

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy

LOG_ZERO = log(1e-4)  # what stands for log 0


class SL(LabelMethod):
    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        ce = cross_entropy(logits, labels)
        others = -(-ce).expm1()  # 1 − p_y
        return self.alpha * ce - self.beta * LOG_ZERO * others


def build(settings: config.SL) -> SL:
    return SL(settings.alpha, settings.beta)
