"""Batch-level augmentation: CutMix, CutOut, MixUp and strong views.

Pure functions of their inputs and a generator that `generator(seed, epoch, …)` makes; the loader
has done the crops and flips before. Shapes: images [B, C, H, W], normalised.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.random import SeedSequence
from torch import Tensor
from torchvision.transforms import v2

Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Mixed:
    """Row b shows sample b with weight `lam` and sample `partner[b]` with weight 1 − lam."""

    images: Tensor
    partner: Tensor
    lam: float


def generator(*key: int) -> torch.Generator:
    """Randomness of one step, on the CPU: the same after a restart, on any device.

    key: what the step is known by, such as seed, epoch and its number.
    """
    state = SeedSequence(key).generate_state(1, "uint64")[0]
    return torch.Generator().manual_seed(int(state >> 1))


def mixup(images: Tensor, alpha: float, random: torch.Generator) -> Mixed:
    """λ·x + (1−λ)·x[partner], λ ~ Beta(alpha, alpha)."""
    lam = beta(alpha, random)
    partner = _partner(images, random)
    return Mixed(images * lam + images[partner] * (1 - lam), partner, lam)


def cutmix(images: Tensor, alpha: float, random: torch.Generator) -> Mixed:
    """A box of 1−λ of the area comes from the partner; λ ~ Beta(alpha, alpha), then the area left.

    The box is centred anywhere and cut off at the border, so λ is counted again from its pixels.
    """
    height, width = images.shape[-2:]
    side = math.sqrt(1 - beta(alpha, random))
    rows = _interval(height, round(side * height), random)
    columns = _interval(width, round(side * width), random)
    partner = _partner(images, random)
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[..., rows, columns] = images[partner][..., rows, columns]
    covered = (rows.stop - rows.start) * (columns.stop - columns.start)
    return Mixed(mixed, partner, 1 - covered / (height * width))


def cutout(images: Tensor, size: int, random: torch.Generator) -> Tensor:
    """One zero square of `size` pixels in each image, centred anywhere, cut off at the border."""
    sides = images.shape[-2:]
    centres = [[int(torch.randint(n, (), generator=random)) for n in sides] for _ in images]
    # Only these numbers travel: a mask of 224 x 224 pixels for each image takes a GPU longer
    start = torch.tensor(centres).view(-1, 2).sub_(size // 2).to(images.device, non_blocking=True)
    rows, columns = (_outside(n, start[:, k, None], size) for k, n in enumerate(sides))
    return images * (rows[:, None, :, None] | columns[:, None, None, :])


def strong_view(
    images: Tensor,
    mean: Channels,
    std: Channels,
    random: torch.Generator,
    erase: float = 0.5,
) -> Tensor:
    """TrivialAugmentWide, then RandomErasing with probability `erase`, drawn for each image.

    Both work on bytes: the normalisation is undone, which is exact, and done again.
    """
    transform = v2.Compose([v2.TrivialAugmentWide(), v2.RandomErasing(p=erase)])
    pixels = denormalized(images, mean, std)
    with torch.random.fork_rng(devices=[]):  # torchvision draws from the global state
        torch.default_generator.manual_seed(_seed(random))  # not the GPU's, as manual_seed would
        strong = torch.stack([transform(image) for image in pixels])
    return normalized(strong, mean, std)


def normalized(pixels: Tensor, mean: Channels, std: Channels) -> Tensor:
    """uint8 [B, 3, H, W] → float32 with about zero mean and unit deviation, channels_last."""
    center, spread = _center_and_spread(mean, std, pixels.device)
    images = pixels.to(torch.float32, memory_format=torch.channels_last)
    return images.sub_(center).div_(spread)


def denormalized(images: Tensor, mean: Channels, std: Channels) -> Tensor:
    """Normalised images back to uint8, exactly."""
    center, spread = _center_and_spread(mean, std, images.device)
    return (images * spread).add_(center).round_().clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=8)
def _center_and_spread(
    mean: Channels, std: Channels, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of bytes, [3, 1, 1] each. Kept: the host waits for a GPU whenever numbers go there."""
    center, spread = ((255 * torch.tensor(v)).view(3, 1, 1).to(device) for v in (mean, std))
    return center, spread


def beta(alpha: float, random: torch.Generator) -> float:
    """One draw from Beta(alpha, alpha)."""
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}: give more than 0, such as 1")
    return float(np.random.default_rng(_seed(random)).beta(alpha, alpha))


def _seed(random: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=random))


def _partner(images: Tensor, random: torch.Generator) -> Tensor:
    return torch.randperm(len(images), generator=random).to(images.device, non_blocking=True)


def _interval(length: int, size: int, random: torch.Generator) -> slice:
    """`size` positions around a random centre, those inside 0..length."""
    start = int(torch.randint(length, (), generator=random)) - size // 2
    return slice(max(start, 0), min(start + size, length))


def _outside(length: int, start: Tensor, size: int) -> Tensor:
    """start [B, 1] → bool [B, length], false for `size` positions from each start."""
    position = torch.arange(length, device=start.device)
    return (position < start) | (position >= start + size)
