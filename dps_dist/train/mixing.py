"""The randomness of a step, and what it does to whole batches: CutMix, CutOut, MixUp.

Everything drawn depends on the seed, on where training is and on the rank, never on what was drawn
before: a resumed run draws what it would have drawn.
"""

import torch

from dps_dist.config import Augment
from dps_dist.data.augment import cutmix, cutout, generator, half_split, mixup
from dps_dist.data.loader import Batch
from dps_dist.methods import Mix, Samples
from dps_dist.train.checkpoint import Moment


def seeded(seed: int, at: Moment, rank: int) -> torch.Generator:
    """The generator of this step; torch's own, which dropout uses, is set from it too."""
    random = generator(seed, at.epoch, at.position, rank)
    torch.manual_seed(int(torch.randint(2**62, (), generator=random)))
    return random


def mixed(batch: Batch, augment: Augment, part: str, random: torch.Generator) -> Samples:
    """The batch as a method sees it, with `augment.mix` done to all of it or to its second half.

    Not to one with padding, which has one sample at most: a black image has no class to mix in.
    """
    images, mix = batch.images, None
    chosen = float(torch.rand((), generator=random)) < augment.mix_probability
    first = half_split(len(images))[0].stop if part == "half" else 0
    if augment.mix != "none" and chosen and first < len(images) and not batch.padding:
        rows = images[first:]
        if augment.mix == "cutout":
            changed = cutout(rows, augment.cutout_size, random)
            mix = Mix(first, torch.arange(len(rows), device=rows.device), 1.0)
        else:
            how = cutmix if augment.mix == "cutmix" else mixup
            result = how(rows, augment.mix_alpha, random)
            changed, mix = result.images, Mix(first, result.partner, result.lam)
        images = torch.cat([images[:first], changed])
        images = images.contiguous(memory_format=torch.channels_last)
    return Samples(images, batch.labels, batch.index, batch.other_views, mix)
