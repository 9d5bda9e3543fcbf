"""Which rows go where before an epoch, and in which rounds: derived alike by every rank.

`sharded.py` carries the rounds out. Nothing here communicates.
"""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dps_dist.errors import InputError
from dps_dist.targets.checks import Order

BLOCK = 1 << 16  # samples looked at in one go: planning needs no further array of size N
Samples = NDArray[np.int32]


def slack_rows(world_size: int) -> int:
    """Rows that a rank must have room for beyond its share ⌈N/W⌉, whatever the orders are.

    After x of a plan's rounds every pair of ranks has moved the same fraction of its rows, rounded
    down. A rank thus holds at most max(before, after) plus what W−1 roundings withhold, and both
    before and after an epoch it holds at most ⌈N/W⌉, as it does after a load.
    """
    return world_size - 1


@dataclass(frozen=True)
class Round:
    """What one rank sends and receives in one all-to-all; splits are rows per peer."""

    leaving: Samples
    arriving: Samples
    send_splits: list[int]
    receive_splits: list[int]


@dataclass(frozen=True)
class Plan:
    """The moves of one epoch, as one rank sees them.

    leaving: the samples it sends, ordered by (destination, sample), or by (destination, visit).
    arriving: the samples it receives, ordered by (source, sample), or by (source, visit).
    counts: rows [source, destination] between all ranks.
    holder: int16 [N], the rank of every row when all moves are done.
    head_start: by visit, the rounds that must be done before step 0 so that, with one more before
        each further step, every row is here for its visit, if there are as many rounds as steps.
    """

    rank: int
    leaving: Samples
    arriving: Samples
    counts: NDArray[np.int64]
    holder: NDArray[np.int16]
    head_start: int

    @property
    def nbytes(self) -> int:
        return self.leaving.nbytes + self.arriving.nbytes + self.counts.nbytes

    def rounds(self, chunk_rows: int) -> int:
        """How many rounds it takes if no rank sends or receives more than chunk_rows in one."""
        busiest = int(max(self.counts.sum(0).max(), self.counts.sum(1).max()))
        return -(-busiest // max(1, chunk_rows - len(self.counts)))  # each pair may round up

    def between(self, start: int, stop: int, rounds: int) -> Round:
        """What remains to move so that `stop` of the rounds are done, when `start` are."""
        # Moving the same fraction of every pair's rows keeps each rank's total level; going by
        # visits alone it would wander by √N, 370 rows for ImageNet on 8 ranks (and 4 so).
        sent, received = self.counts[self.rank], self.counts[:, self.rank]
        sent_before, received_before = sent * start // rounds, received * start // rounds
        sends = sent * stop // rounds - sent_before
        receives = received * stop // rounds - received_before
        return Round(
            _pick(self.leaving, sent, sent_before, sends),
            _pick(self.arriving, received, received_before, receives),
            sends.tolist(),
            receives.tolist(),
        )


def plan(order: Order, holder: NDArray[np.int16], rank: int, by_visit: bool = False) -> Plan:
    """Bring every row to the rank that visits it; a row without a visit stays, if there is room.

    by_visit: rows come in the order of their visits, as streaming needs. Otherwise in that of
        the samples: a round then leaves from and arrives in one stretch of the table, where rows
        of neighbouring samples took each other's places before, and copies twice as fast.
    """
    W, N = order.world_size, order.num_samples
    after = np.full(N, -1, np.int16)  # -1: no visit
    counts, entries = np.zeros(W * W, np.int64), 0
    leaving: list[tuple[Samples, NDArray[np.int16]]] = []
    arriving: list[tuple[Samples, NDArray[np.int16]]] = []
    visit: list[NDArray[np.int64]] = []  # step in which an arriving row is needed
    for first in range(0, len(order.assignment), block := max(1, BLOCK // W)):
        table = order.assignment[first : first + block]
        samples, destination = table.reshape(-1), np.tile(np.arange(W, dtype=np.int16), len(table))
        present = np.flatnonzero(samples >= 0) if samples.min() < 0 else None
        if present is not None:
            samples, destination = samples[present], destination[present]
        source = holder[samples]
        counts += np.bincount(source.astype(np.int64) * W + destination, minlength=W * W)
        after[samples] = destination
        if by_visit:
            out = np.flatnonzero((source == rank) & (destination != rank))
            into = np.flatnonzero((destination == rank) & (source != rank))
            leaving.append((samples[out], destination[out]))
            arriving.append((samples[into], source[into]))
            into = into if present is None else present[into]
            visit.append((first + into // W) // order.batch_size)
        entries += len(samples)
    idle = after < 0
    if entries != N - np.count_nonzero(idle):
        raise InputError("the order visits a sample twice in one epoch: give an EpochOrder")
    np.copyto(after, holder, where=idle)
    samples, source, destination = _excess(after, idle, W)
    after[samples] = destination
    np.add.at(counts, source.astype(np.int64) * W + destination, 1)
    between = counts.reshape(W, W)
    np.fill_diagonal(between, 0)
    if not by_visit:
        leave = _moving(holder == rank, after, rank)
        arrive = _moving(after == rank, holder, rank)
        return Plan(rank, leave, arrive, between, after, head_start=0)
    leaving.append((samples[source == rank], destination[source == rank]))
    arriving.append((samples[destination == rank], source[destination == rank]))
    visit.append(np.full(len(arriving[-1][0]), order.steps))  # not needed in this epoch
    leave, _ = _by_peer(leaving)
    arrive, by_peer = _by_peer(arriving)
    head_start = _head_start(between[:, rank], np.concatenate(visit)[by_peer], order.steps)
    return Plan(rank, leave, arrive, between, after, head_start)


def digest(order: Order, holder: NDArray[np.int16]) -> list[int]:
    """Numbers that are equal on two ranks only if both make the same plan of these."""
    shape = [order.num_samples, order.world_size, order.batch_size, order.steps]
    return [*shape, zlib.crc32(order.assignment.data), zlib.crc32(holder.data)]


def _excess(
    holder: NDArray[np.int16], idle: NDArray[np.bool_], W: int
) -> tuple[Samples, NDArray[np.int16], NDArray[np.int16]]:
    """Moves (samples, source, destination) of idle rows off ranks with more than ⌈N/W⌉ rows.

    Rows without a visit (left out by drop_last, or visited before an interruption) lie where they
    are, and by chance a rank may have too many of them to fit its share as well.
    """
    share = -(-len(holder) // W)
    room = share - np.bincount(holder, minlength=W)
    crowded = np.flatnonzero(room < 0)
    moved = [np.flatnonzero(idle & (holder == rank))[room[rank] :] for rank in crowded]
    samples = np.concatenate([np.zeros(0, np.int64), *moved]).astype(np.int32)
    assert len(samples) == -room[crowded].sum(), "an order gives no rank more than its share"
    vacant = np.repeat(np.arange(W, dtype=np.int16), room.clip(0))
    return samples, holder[samples], vacant[: len(samples)]


def _moving(here: NDArray[np.bool_], peer: NDArray[np.int16], rank: int) -> Samples:
    """The samples that are here and have another peer than this rank, by (peer, sample)."""
    samples: Samples = np.flatnonzero(here & (peer != rank)).astype(np.int32)
    return samples[np.argsort(peer[samples], kind="stable")]


def _by_peer(
    pieces: list[tuple[Samples, NDArray[np.int16]]],
) -> tuple[Samples, NDArray[np.int64]]:
    """The samples ordered by peer, and among a peer's as they come; and that permutation."""
    by_peer = np.argsort(np.concatenate([peers for _, peers in pieces]), kind="stable")
    return np.concatenate([samples for samples, _ in pieces])[by_peer], by_peer


def _pick(
    samples: Samples,
    totals: NDArray[np.int64],
    before: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> Samples:
    """From each peer's part of the samples the `taken` ones that follow the first `before`."""
    starts = np.cumsum(totals) - totals + before
    ranges = zip(starts.tolist(), taken.tolist(), strict=True)
    return np.concatenate([samples[start : start + count] for start, count in ranges])


def _head_start(received: NDArray[np.int64], steps: NDArray[np.int64], rounds: int) -> int:
    """The least h so that s + h rounds have brought all rows with a visit in step ≤ s, for every s.

    The p-th of a peer's T rows (p from 1) has come after ⌈p·rounds/T⌉ rounds.
    """
    if not len(steps):
        return 0
    totals = np.repeat(received, received)
    p = 1 + np.arange(len(steps)) - np.repeat(np.cumsum(received) - received, received)
    return int(np.clip(-(-p * rounds // totals) - steps, 0, rounds).max())
