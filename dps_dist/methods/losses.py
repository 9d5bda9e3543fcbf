"""Pure functions that several methods share."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p_label, float32 [B]."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_j y_j log p_j, float32 [B]."""
    return -(targets * logits.float().log_softmax(-1)).sum(-1)


def kl_divergence(targets: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(y ‖ softmax(z/T)) = Σ_j y_j (log y_j − log p_j), float32 [B]; 0·log 0 is 0."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    return F.kl_div(log_p, targets, reduction="none").sum(-1)


def sharpened(targets: Tensor, tau: float) -> Tensor:
    """y^{1/τ}/‖y^{1/τ}‖₁ row by row; 0 stays 0."""
    return targets if tau == 1 else (targets.log() / tau).softmax(-1)


def mean_of(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of values [B] where counted [B] is true, 0 of none; the host need not look."""
    return torch.where(counted, values, 0.0).sum() / counted.sum().clamp(min=1)
