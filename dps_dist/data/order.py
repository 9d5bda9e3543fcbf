"""Who visits which sample when: the one object that the loader and the target store both read.

It depends on nothing but its own fields, so every rank knows every rank's epoch without a message.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

PADDING = -1
Shuffle = Literal["global", "shard", "none"]


@dataclass(frozen=True)
class EpochOrder:
    """One epoch's assignment of samples to (step, rank).

    `global` deals a permutation of all samples round-robin to the ranks, so that the global batch
    of a step is the same set of samples for every world size with the same product
    `world_size * batch_size`::

        num_samples=8, world_size=2, batch_size=2, permutation 5 2 7 0 3 6 1 4

              step 0    step 1
        rank 0  5 7       3 1
        rank 1  2 0       6 4

    `shard` permutes only inside each rank's partition {i : i % world_size == rank}, so that no
    sample ever changes its rank; `none` visits the samples as they are stored, with the same
    partitions.

    batch_size: samples a rank visits in a step.
    global_batch: samples of a step over all ranks, if it is not world_size * batch_size. The deal
        goes on from step to step, so that no rank gets more than its share of an epoch, and a rank
        with a sample less has PADDING in the last place of its batch::

            num_samples=8, world_size=3, batch_size=2, global_batch=4, the same permutation

                  step 0    step 1
            rank 0  5 0       1 -
            rank 1  2 -       3 4
            rank 2  7 -       6 -

    drop_last: leave out the last incomplete global batch; otherwise it is filled with PADDING.
    only: the samples to visit, if not all of num_samples.
    position: how many samples of this epoch were visited before an interruption. The order
        continues there with any world size (`shard`: with the same one, which its partitions
        depend on).
    """

    num_samples: int
    batch_size: int
    world_size: int = 1
    seed: int = 0
    epoch: int = 0
    shuffle: Shuffle = "global"
    drop_last: bool = True
    position: int = 0
    global_batch: int | None = None
    only: NDArray[np.int32] | None = field(default=None, compare=False)

    @classmethod
    def of_batch(cls, num_samples: int, global_batch: int, world_size: int, **fields: Any) -> Self:
        """The order whose steps visit `global_batch` samples, on any number of ranks."""
        share = -(-global_batch // world_size)
        return cls(num_samples, share, world_size, global_batch=global_batch, **fields)

    def __post_init__(self) -> None:
        for name, least in (
            ("num_samples", 1),
            ("batch_size", 1),
            ("world_size", 1),
            ("seed", 0),
            ("epoch", 0),
            ("position", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: give {least} or more")
        if self.shuffle not in ("global", "shard", "none"):
            raise ValueError(f"shuffle is {self.shuffle!r}: give global, shard or none")
        if self.position > self.visits:
            what = "num_samples" if self.only is None else "the number of samples to visit"
            raise ValueError(f"position is {self.position}: give at most {what}, {self.visits}")
        room = self.world_size * self.batch_size
        if not room - self.world_size < self.global_batch_size <= room:
            raise ValueError(
                f"global_batch is {self.global_batch}: give {room - self.world_size + 1} to "
                f"{room}, which {self.world_size} ranks with batch_size {self.batch_size} share"
            )
        even = self.global_batch_size == room
        between_ranks = even and self.position % self.world_size
        between_ranks = between_ranks and self.position < self.visits
        if self.shuffle == "shard" and between_ranks:
            raise ValueError(
                f"position is {self.position}: with shuffle='shard' it must be a multiple of "
                f"world_size, {self.world_size}; resume with the world size that was interrupted"
            )

    @property
    def visits(self) -> int:
        """How many samples are visited in the whole epoch, but for those that drop_last drops."""
        return self.num_samples if self.only is None else len(self.only)

    @property
    def steps(self) -> int:
        """Steps left in the epoch; the same on every rank."""
        left, batch = self.visits - self.position, self.global_batch_size
        return left // batch if self.drop_last else -(-left // batch)

    @property
    def global_batch_size(self) -> int:
        return self.global_batch or self.world_size * self.batch_size

    @cached_property
    def assignment(self) -> NDArray[np.int32]:
        """The whole epoch [steps * batch_size, world_size]: column r is what rank r visits."""
        W, G = self.world_size, self.global_batch_size
        dealt = np.full((self.steps, self.batch_size * W), PADDING, np.int32)
        visits = self._visits()[self.position : self.position + self.steps * G]
        if W * self.batch_size == G:
            dealt.reshape(-1)[: len(visits)] = visits
        else:
            step, place = np.divmod(np.arange(len(visits)), G)
            rank = (self.position + np.arange(len(visits))) % W
            dealt[step, place // W * W + rank] = visits
        dealt = dealt.reshape(-1, W)
        dealt.flags.writeable = False  # shared by the loader and the store
        return dealt

    def batch(self, step: int, rank: int) -> NDArray[np.int32]:
        """The samples [batch_size] of one rank in one step, PADDING where there is none."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step is {step}: this order has {self.steps} steps")
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank is {rank}: this order has {self.world_size} ranks")
        return self.assignment[step * self.batch_size : (step + 1) * self.batch_size, rank]

    def position_after(self, steps: int) -> int:
        """Where to resume when `steps` steps of this order are done."""
        return min(self.position + steps * self.global_batch_size, self.visits)

    def _visits(self) -> NDArray[np.integer]:
        """All samples in the order of visits: entry k belongs to rank k % world_size."""
        places = self._places()
        return places if self.only is None else self.only[places]

    def _places(self) -> NDArray[np.integer]:
        """The order of visits, as places among the samples to visit."""
        if self.shuffle == "none":
            return np.arange(self.visits, dtype=np.int32)
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.visits)
        if self.shuffle == "shard":
            by_rank = np.empty(self.visits, permutation.dtype)
            for rank in range(self.world_size):
                by_rank[rank :: self.world_size] = permutation[
                    permutation % self.world_size == rank
                ]
            return by_rank
        return permutation
