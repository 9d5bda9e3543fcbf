"""Self-distillation from the last mini-batch (Shen et al., 2022). A step sees its samples, and
those of the step before once more in their second view. L = ½(mean CE + mean CE′) +
α·T²·mean KL(softmax(z_before/T) ‖ softmax(z′/T)), where z_before is what the model said of the
first view in the step before, and z′ what it says of the second view now.

Both go through the model together, as DDP wants it, so that batch norm sees them as one batch; the
authors' code makes two passes. With CutMix or MixUp both views of a sample are mixed alike.
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Forward, Method, Samples, Targets, by_label
from dps_dist.methods.losses import cross_entropy, kl_divergence, mean_of


class DLB(Method):
    mixes = "all"
    views = 2
    recalls = True

    def __init__(self, T: float, alpha: float) -> None:
        self.T, self.alpha = T, alpha

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        before = batch.before
        if before is None:
            logits = forward(batch.images)
            return by_label(cross_entropy, logits, batch.labels, batch.mix), logits
        assert before.logits is not None
        again = before.other_views[0]
        both = forward(torch.cat([batch.images, again.images]))
        logits, now = both[: len(batch.images)], both[len(batch.images) :]
        ce = by_label(cross_entropy, logits, batch.labels, batch.mix)
        ce_again = by_label(cross_entropy, now, before.labels, again.mix)
        then = (before.logits.detach().float() / self.T).softmax(-1)
        distilled = self.alpha * self.T**2 * kl_divergence(then, now, self.T)
        return (ce + mean_of(ce_again, before.real)) / 2 + mean_of(distilled, before.real), logits


def build(settings: config.DLB) -> DLB:
    return DLB(settings.T, settings.alpha)
