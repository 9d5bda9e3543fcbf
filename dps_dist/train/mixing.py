"""The randomness of a step, and what it does to whole batches: CutMix, CutOut, MixUp, strong views.

Everything drawn depends on the seed, on where training is and on the rank, never on what was drawn
before: a resumed run draws what it would have drawn.
"""

import torch
from torch import Tensor

from dps_dist.config import Config
from dps_dist.data.augment import cutmix, cutout, generator, mixup, strong_view
from dps_dist.data.loader import Batch
from dps_dist.methods import Method, Mix, Samples, Strong, View
from dps_dist.train.manifest import Moment


def seeded(seed: int, at: Moment, rank: int) -> torch.Generator:
    """The generator of this step; torch's own, which dropout uses, are set from it too."""
    random = generator(seed, at.epoch, at.position, rank)
    chosen = int(torch.randint(2**62, (), generator=random))
    # Not torch.manual_seed: it asks after every kind of device, for 0.2 ms where there is none
    torch.default_generator.manual_seed(chosen)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(chosen)
    return random


def mixed(batch: Batch, config: Config, method: Method, random: torch.Generator) -> Samples:
    """The batch as a method sees it, with `augment.mix` done to all of it or to its second half.

    Not to one with padding, which has one sample at most: a black image has no class to mix in.
    """
    images, others = batch.images, batch.other_views
    if method.strong is not None:
        views = tuple(
            _strong(view, method.strong, config, random, batch.padding) for view in others
        )
        return Samples(images, batch.labels, batch.index, other_views=views)
    augment, mix = config.augment, None
    chosen = float(torch.rand((), generator=random)) < augment.mix_probability
    first = -(-len(images) // 2) if method.mixes == "half" else 0
    if augment.mix != "none" and chosen and first < len(images) and not batch.padding:
        rows = [view[first:] for view in (images, *others)]
        if augment.mix == "cutout":
            changed = [cutout(view, augment.cutout_size, random) for view in rows]
            mix = Mix(first, torch.arange(len(rows[0]), device=images.device), 1.0)
        else:  # all views of a sample have the same partner, and the same box
            how = cutmix if augment.mix == "cutmix" else mixup
            result = how(torch.cat(rows, 1), augment.mix_alpha, random)
            changed = list(torch.split(result.images, 3, 1))
            mix = Mix(first, result.partner, result.lam)
        images, *rest = (
            _channels_last(torch.cat([view[:first], new]))
            for view, new in zip((images, *others), changed, strict=True)
        )
        others = tuple(rest)
    views = tuple(View(view, mix) for view in others)
    return Samples(images, batch.labels, batch.index, mix, views)


def _strong(
    images: Tensor, strong: Strong, config: Config, random: torch.Generator, padding: int
) -> View:
    data = config.data
    images = strong_view(images, data.mean, data.std, random, strong.erase)
    if padding:
        return View(_channels_last(images))
    result = cutmix(images, 1.0, random)
    return View(_channels_last(result.images), Mix(0, result.partner, result.lam))


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)
