"""Label smoothing (Szegedy et al., 2016): L = −Σ_j ((1−s)·onehot_j + s/K)·log p_j."""

from torch import Tensor
from torch.nn import functional as F

from dps_dist import config
from dps_dist.methods.base import LabelMethod


class LS(LabelMethod):
    def __init__(self, s: float) -> None:
        self.s = s

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=self.s)


def build(settings: config.LS) -> LS:
    return LS(settings.s)
