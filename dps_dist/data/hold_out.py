"""Which samples of the training set are trained on, and which are held out of it."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dps_dist.errors import InputError

HOLD_OUT = "hold_out"  # as a split of evaluation, which is not a file
Samples = NDArray[np.int32]


class Split(NamedTuple):
    """Both ascending; None stands for all samples, and for none."""

    trained: Samples | None
    held_out: Samples | None


def split(num_samples: int, count: int, seed: int) -> Split:
    """`count` samples, drawn by the seed alone, are held out."""
    if count == 0:
        return Split(None, None)
    if count >= num_samples:
        raise InputError(f"data.hold_out is {count}: there are {num_samples} images; give less")
    drawn = np.random.default_rng([seed, num_samples]).permutation(num_samples).astype(np.int32)
    return Split(np.sort(drawn[count:]), np.sort(drawn[:count]))
