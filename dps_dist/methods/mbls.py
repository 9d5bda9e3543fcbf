"""Margin-based label smoothing (Liu et al., 2022): L = CE + α·(1/K)Σ_j max(0, max z − z_j − m)."""

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy


class MbLS(LabelMethod):
    def __init__(self, alpha: float, margin: float) -> None:
        self.alpha, self.margin = alpha, margin

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        z = logits.float()
        beyond = (z.amax(-1, keepdim=True) - z - self.margin).relu().mean(-1)
        return cross_entropy(logits, labels) + self.alpha * beyond


def build(settings: config.MbLS) -> MbLS:
    return MbLS(settings.alpha, settings.margin)
