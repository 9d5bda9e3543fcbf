"""Baseline: cross-entropy with the labels, L = −log p_y.

With CutMix, CutOut or MixUp the loss is mixed as the images are: λ·L(a) + (1−λ)·L(b). MixUp's row
of the paper is this method with `augment.mix=mixup`.
"""

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy


class Baseline(LabelMethod):
    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)


def build(settings: config.Baseline) -> Baseline:
    return Baseline()
