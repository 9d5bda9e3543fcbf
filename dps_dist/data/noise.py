"""Label noise, symmetric and asymmetric, drawn from a seed when labels are loaded.

Every function returns new labels; the clean ones stay beside them, for evaluation only.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dps_dist.data.sources.cifar import CIFAR10_CLASSES
from dps_dist.errors import InputError

Kind = Literal["none", "symmetric", "asymmetric"]
Labels = NDArray[np.int64]

# Classes that look alike: truck → automobile, bird → airplane, cat ↔ dog, deer → horse.
CIFAR10_FLIPS: Mapping[int, int] = {9: 1, 2: 0, 3: 5, 5: 3, 4: 7}


def apply(
    labels: Labels,
    num_classes: int,
    kind: Kind,
    rate: float,
    seed: int,
    mapping: Mapping[int, int] | None = None,
    class_names: Sequence[str] = (),
) -> Labels:
    """The labels [N] with the noise asked for.

    mapping: for asymmetric noise, which class turns into which. It can be left out where
        class_names are CIFAR-10's; its flips mean nothing for ten other classes.
    """
    if kind == "none":
        return labels.copy()
    if len(labels) and not (labels.min() >= 0 and labels.max() < num_classes):
        raise InputError(
            f"labels run from {labels.min()} to {labels.max()}: {kind} noise needs all of them "
            f"in 0 to {num_classes - 1}"
        )
    if kind == "symmetric":
        return symmetric(labels, num_classes, rate, seed)
    if mapping is None and tuple(class_names) == CIFAR10_CLASSES:
        mapping = CIFAR10_FLIPS
    if not mapping:
        raise InputError(
            "noise mapping is missing: asymmetric noise on other data than CIFAR-10 must be told "
            "which class turns into which, as {from: to}"
        )
    for source, target in mapping.items():
        if not (0 <= source < num_classes and 0 <= target < num_classes) or source == target:
            raise InputError(
                f"noise mapping has {source}: {target}: give two different classes of 0 to "
                f"{num_classes - 1}"
            )
    return asymmetric(labels, rate, seed, mapping)


def symmetric(labels: Labels, num_classes: int, rate: float, seed: int) -> Labels:
    """round(rate·N) labels, chosen at random, redrawn uniformly over all K classes.

    A redrawn label can come out as it was, so rate·(K−1)/K of all labels are wrong on average.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(labels), size=round(rate * len(labels)), replace=False)
    noisy = labels.copy()
    noisy[chosen] = rng.integers(num_classes, size=len(chosen))
    return noisy


def asymmetric(labels: Labels, rate: float, seed: int, mapping: Mapping[int, int]) -> Labels:
    """round(rate·n_c) labels of each source class c, chosen at random, become mapping[c]."""
    rng = np.random.default_rng(seed)
    noisy = labels.copy()
    for source in sorted(mapping):  # whichever way the mapping was written down
        members = np.flatnonzero(labels == source)
        chosen = rng.choice(members, size=round(rate * len(members)), replace=False)
        noisy[chosen] = mapping[source]
    return noisy
