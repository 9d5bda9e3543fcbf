"""ACLS, adaptive and conditional label smoothing (Park et al., 2023): L = CE +
0.1·[max(0, z_max−m)² + 0.1·(1/(K−1))Σ_{j≠max} max(0, sg(z_max)−z_j−m)²].
"""

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy


class ACLS(LabelMethod):
    def __init__(self, weight: float, others: float, margin: float) -> None:
        self.weight, self.others, self.margin = weight, others, margin

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        z = logits.float()
        largest = z.max(-1, keepdim=True)
        high = (largest.values.squeeze(-1) - self.margin).relu().square()
        below = (largest.values.detach() - z - self.margin).relu().square()
        low = below.scatter(-1, largest.indices, 0.0).sum(-1) / (z.shape[-1] - 1)
        return cross_entropy(logits, labels) + self.weight * (high + self.others * low)


def build(settings: config.ACLS) -> ACLS:
    return ACLS(settings.weight, settings.others, settings.margin)
