"""DPS+: Deep Probabilistic Supervision of a weak view, and m strong views that are to be predicted
alike: L = L_DPS(x) + λ_c·(1/m)Σ_j KL(sg(p) ‖ softmax(f(T_j x))), p the prediction for the weak
view. Strong views are crops of their own with TrivialAugmentWide, RandomErasing and CutMix, which
mixes the predictions p of the two images that it joins. The KL's direction and the erased share
are our readings.
"""

import torch
from torch import Tensor

from dps_dist import config
from dps_dist.methods.base import Evidence, Forward, Method, Samples, Strong, Targets
from dps_dist.methods.losses import kl_divergence


class DPSPlus(Method):
    def __init__(self, settings: config.DPSPlus) -> None:
        self.evidence = Evidence(settings.gamma, settings.c, settings.epsilon)
        self.tau, self.lambda_c = settings.tau, settings.lambda_c
        self.views, self.strong = 1 + settings.strong_views, Strong(settings.erase)

    def loss(
        self, forward: Forward, batch: Samples, targets: Targets | None
    ) -> tuple[Tensor, Tensor]:
        assert targets is not None
        images = [batch.images, *(view.images for view in batch.other_views)]
        weak, *strong = torch.split(forward(torch.cat(images)), len(batch.images))
        loss = targets.step(weak, batch.labels, batch.index, self.tau)
        p = weak.detach().float().softmax(-1)
        for view, logits in zip(batch.other_views, strong, strict=True):
            shown = view.mix.of(p) if view.mix is not None else p
            loss = loss + self.lambda_c / len(strong) * kl_divergence(shown, logits)
        return loss, weak


def build(settings: config.DPSPlus) -> DPSPlus:
    return DPSPlus(settings)
