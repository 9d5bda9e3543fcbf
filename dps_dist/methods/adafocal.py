"""AdaFocal (Ghosh et al., 2022): a focal loss whose γ follows the calibration on held-out samples.
L = −(1−p_y)^γ·log p_y where γ > 0, −(1+p_y)^|γ|·log p_y where γ < 0, γ that of the bin that p_y is
in. After each epoch the held-out samples are sorted by their confidence max p into bins of equal
mass, and in each γ ← γ·exp(sign(γ)·λ·(confidence − accuracy)); where |γ| falls below 0.2, it
becomes 0.2 with the other sign; it stays within [−2, 20].
"""

from math import inf
from typing import Any

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy

LEAST = 1e-12  # of 1 − p_y, whose powers below 1 have no slope at 0


class AdaFocal(LabelMethod):
    adapts = True

    def __init__(self, settings: config.AdaFocal) -> None:
        self.settings = settings
        self.gamma = torch.full((settings.bins,), settings.gamma_start)
        self.edges = torch.arange(1, settings.bins) / settings.bins  # between the bins

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        ce = cross_entropy(logits, labels)
        p = (-ce).exp()
        self.edges, self.gamma = self.edges.to(p.device), self.gamma.to(p.device)
        gamma = self.gamma[torch.bucketize(p.detach(), self.edges, right=True)]
        factor = torch.where(gamma > 0, -(-ce).expm1(), 1 + p).clamp(min=LEAST)
        return factor ** gamma.abs() * ce

    def adapt(self, logits: Tensor, labels: Tensor) -> None:
        own = self.settings
        confidence, predicted = logits.cpu().float().softmax(-1).max(-1)
        right = (predicted == labels.cpu()).float()
        confidence, order = confidence.sort(stable=True)
        parts = (x.tensor_split(own.bins) for x in (confidence, right[order]))
        bins = list(zip(*parts, strict=True))
        gap = torch.stack([(c - a).mean() if len(c) else c.sum() for c, a in bins])
        gamma = self.gamma.cpu()
        gamma = gamma * (gamma.sign() * own.lam * gap).exp()
        gamma = torch.where(gamma.abs() < own.switch, -own.switch * gamma.sign(), gamma)
        self.gamma = gamma.clamp(own.gamma_min, own.gamma_max)
        starts = [c[:1] if len(c) else c.new_tensor([inf]) for c, _ in bins[1:]]
        self.edges = torch.cat([confidence[:0], *starts])

    def state_dict(self) -> dict[str, Any]:
        return {"gamma": self.gamma, "edges": self.edges}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gamma, self.edges = state["gamma"], state["edges"]


def build(settings: config.AdaFocal) -> AdaFocal:
    return AdaFocal(settings)
