"""MMCE, weighted (Kumar et al., 2018): L = CE + λ·√M, M the kernel's measure of miscalibration of
the samples that a worker passes at once. With r = max p, m right and n wrong predictions among
them, M = Σ_ij a_i a_j k(r_i, r_j), a = (1−r)/m where right, −r/n where wrong, k = exp(−|r−r′|/0.4).
"""

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Forward, Method, Samples, Targets
from dps_dist.methods.losses import cross_entropy

LEAST = 1e-12  # of M, whose root has no slope at 0


class MMCE(Method):
    def __init__(self, lam: float, width: float) -> None:
        self.lam, self.width = lam, width

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        logits = forward(batch.images)
        r, predicted = logits.float().softmax(-1).max(-1)
        right = (predicted == batch.labels) & batch.real
        wrong = (predicted != batch.labels) & batch.real
        a = right * (1 - r) / right.sum().clamp(min=1) - wrong * r / wrong.sum().clamp(min=1)
        kernel = (-(r.unsqueeze(0) - r.unsqueeze(1)).abs() / self.width).exp()
        M = (a.unsqueeze(0) * a.unsqueeze(1) * kernel).sum()  # autocast would round a product @
        root = M.clamp(min=LEAST).sqrt()
        return cross_entropy(logits, batch.labels) + self.lam * root, logits


def build(settings: config.MMCE) -> MMCE:
    return MMCE(settings.lam, settings.width)
