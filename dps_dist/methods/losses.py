"""Pure functions that several methods share."""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log p_label, float32 [B]."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_j y_j log p_j, float32 [B]."""
    return -(targets * logits.float().log_softmax(-1)).sum(-1)


def sharpened(targets: Tensor, tau: float) -> Tensor:
    """y^{1/τ}/‖y^{1/τ}‖₁ row by row; 0 stays 0."""
    return targets if tau == 1 else (targets.log() / tau).softmax(-1)
