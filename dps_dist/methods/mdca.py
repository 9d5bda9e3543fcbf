"""MDCA (Hebbalaguppe et al., 2022): L = CE + β·(1/K)Σ_k |mean p_k − mean onehot_k|, the means over
the samples that a worker passes at once.
"""

from torch import Tensor
from torch.nn import functional as F

from dps_dist import config
from dps_dist.methods.base import Forward, Method, Samples, Targets
from dps_dist.methods.losses import cross_entropy


class MDCA(Method):
    def __init__(self, beta: float) -> None:
        self.beta = beta

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        logits = forward(batch.images)
        p = logits.float().softmax(-1)
        apart = (p - F.one_hot(batch.labels, p.shape[-1])) * batch.real.unsqueeze(-1)
        difference = (apart.sum(0) / batch.real.sum().clamp(min=1)).abs().mean()
        return cross_entropy(logits, batch.labels) + self.beta * difference, logits


def build(settings: config.MDCA) -> MDCA:
    return MDCA(settings.beta)
