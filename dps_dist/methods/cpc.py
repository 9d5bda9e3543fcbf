"""CPC, calibration by pairwise constraints (Cheng & Vasconcelos, 2022):
L = CE − λ₁/(K−1)·Σ_{j≠y} log σ(z_y−z_j) − λ₂/((K−1)(K−2))·Σ_{i≠j; i,j≠y} ½·log σ(z_i−z_j).

Holds K² numbers a sample while it is computed.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dps_dist import config
from dps_dist.methods.base import LabelMethod
from dps_dist.methods.losses import cross_entropy


class CPC(LabelMethod):
    def __init__(self, lambda_1: float, lambda_2: float) -> None:
        self.lambda_1, self.lambda_2 = lambda_1, lambda_2

    def of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        z, K = logits.float(), logits.shape[-1]
        other = ~F.one_hot(labels, K).bool()
        against = F.logsigmoid(z.gather(-1, labels.unsqueeze(-1)) - z)
        against = torch.where(other, against, 0.0).sum(-1) / (K - 1)
        pairs = F.logsigmoid(z.unsqueeze(-1) - z.unsqueeze(-2))
        counted = other.unsqueeze(-1) & other.unsqueeze(-2)
        counted = counted & ~torch.eye(K, dtype=torch.bool, device=z.device)
        among = torch.where(counted, pairs, 0.0).sum((-1, -2)) / 2 / max(1, (K - 1) * (K - 2))
        return cross_entropy(logits, labels) - self.lambda_1 * against - self.lambda_2 * among


def build(settings: config.CPC) -> CPC:
    return CPC(settings.lambda_1, settings.lambda_2)
