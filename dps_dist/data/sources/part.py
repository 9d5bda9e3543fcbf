"""A random part of another source, for experiments that are to be small."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dps_dist.data.sources import Source
from dps_dist.errors import InputError


class Part:
    """`count` of its images in their order; the same for the same count, and a smaller part is
    inside a larger one."""

    def __init__(self, source: Source, count: int) -> None:
        if not 1 <= count <= len(source):
            raise InputError(
                f"--train-images is {count}: give 1 to {len(source)}, as many as there are"
            )
        self._source = source
        self._chosen = np.sort(np.random.default_rng(0).permutation(len(source))[:count])

    @property
    def class_names(self) -> Sequence[str]:
        return self._source.class_names

    @property
    def labels(self) -> NDArray[np.int64]:
        return self._source.labels[self._chosen]

    def __len__(self) -> int:
        return len(self._chosen)

    def read(self, i: int) -> NDArray[np.uint8]:
        return self._source.read(int(self._chosen[i]))

    def path(self, i: int) -> str:
        return self._source.path(int(self._chosen[i]))
