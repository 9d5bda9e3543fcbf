"""Early-learning regularisation (Liu et al., 2020): t ← β·t + (1−β)·p at each visit, and then
L = CE + λ·log(1 − ⟨t, p⟩): the gradient of what was learnt early stays alive, that of wrong labels
is kept down. 1 − ⟨t, p⟩ counts as 1e-4 where it is less.

t is (1−βⁿ) times the store's evidence with γ = β, after n visits.
"""

from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Targets, remember
from dps_dist.methods.losses import cross_entropy

LEAST = 1e-4


class ELR(Method):
    def __init__(self, beta: float, lam: float) -> None:
        self.beta, self.lam = beta, lam
        self.evidence = Evidence(gamma=beta)

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        logits = forward(batch.images)
        p = logits.float().softmax(-1)
        remember(targets, batch.index, p)
        average, visits = targets.evidence_and_visits(batch.index)
        t = (1 - self.beta ** visits.float()).unsqueeze(-1) * average
        apart = (1 - (t * p).sum(-1)).clamp(min=LEAST)
        return cross_entropy(logits, batch.labels) + self.lam * apart.log(), logits


def build(settings: config.ELR) -> ELR:
    return ELR(settings.beta, settings.lam)
