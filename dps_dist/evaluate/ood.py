"""Out-of-distribution detection by the maximum softmax probability (Hendrycks & Gimpel, 2017)."""

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.evaluate.chunks import chunks


@torch.no_grad()
def max_softmax(logits: Tensor) -> Tensor:
    """max_j softmax(logits)_j, float64 [N] on the CPU."""
    return torch.cat([z.softmax(1).amax(1) for (z,) in chunks(logits)])


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(s > s') + P(s = s')/2 of maximum softmax s of logits inside [N, K] and s' outside [M, K].

    In-distribution is the positive class: 1 where every known image is the more confident.
    """
    known, foreign = max_softmax(inside), max_softmax(outside)
    for name, scores in (("in-distribution", known), ("out-of-distribution", foreign)):
        if not len(scores) or bool(scores.isnan().any()):
            raise InputError(
                f"the {name} images are none or a logit of theirs is NaN: give others, or a run "
                "that did not diverge"
            )
    positive = torch.arange(len(known) + len(foreign)) < len(known)
    return float(roc_auc_score(positive.numpy(), torch.cat([known, foreign]).numpy()))
