"""The target store over the ranks of a process group: `ShardedTargets`, equal to `LocalTargets`.

Before an epoch the rows move to the ranks that will visit them; the steps touch local memory only.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.targets import migrate
from dps_dist.targets.checks import Order, check_order
from dps_dist.targets.dirichlet import Dirichlet
from dps_dist.targets.local import Targets


class ShardedTargets(Targets):
    """Each row on one rank, the one that visits it; `begin_epoch` moves rows where they are needed.

        N=8, W=2        rank 0 holds     rank 1 holds
        at first        0 2 4 6          1 3 5 7            sample i on rank i % W
        begin_epoch     5 7 3 1          2 0 6 4            rank r: order.assignment[:, r]
        load            as they lie in the files, a W-th of the rows each

    All ranks make the same calls in the same order, and the same steps. A rank has room for
    ⌈N/W⌉ + W − 1 rows, always enough, and keeps 6 bytes a sample to find them, or at most
    6 + 16/W while it streams.

    exchange: "bulk" moves all rows in `begin_epoch`, at most chunk_rows at a time. "stream" moves
        there only what the first steps need; reading or updating the rows of a step then waits for
        those that were sent for at the step before, and sends for those of the next one. Steps
        are to be visited in order, by all ranks alike; `evidence` and `visits` count as visits.
    device: where the rows live. They travel through the GPU if the group has NCCL only, and through
        the CPU if it has gloo only.
    """

    def __init__(
        self,
        num_samples: int,
        prior: Dirichlet,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        exchange: Literal["bulk", "stream"] = "bulk",
        chunk_rows: int = 4096,
    ) -> None:
        if not dist.is_initialized():
            raise InputError(
                "there is no process group: call torch.distributed.init_process_group, "
                "or use LocalTargets in a single process"
            )
        if exchange not in ("bulk", "stream"):
            raise InputError(f"exchange is {exchange!r}: give 'bulk' or 'stream'")
        if chunk_rows < 1:
            raise InputError(f"chunk_rows is {chunk_rows}: give 1 or more")
        self.group, self.exchange, self.chunk_rows = group, exchange, chunk_rows
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not in the group: make the store on its members only")
        share = -(-num_samples // self.world_size)
        super().__init__(num_samples, prior, share + migrate.slack_rows(self.world_size), device)
        self.sent_bytes = 0  # by this rank, in all exchanges so far
        self._wire = _wire_device(group, self.device)
        self._slot = torch.empty(num_samples, dtype=torch.int32, device=device)  # -1: not here
        self._free: Tensor  # slots without a row
        self._holder: NDArray[np.int16]  # the rank of every row, when no move is under way
        self._moves: _Moves | None = None
        self._visiting: _Visiting | None = None
        self._flights: deque[_Flight] = deque()
        self._parcels: dict[str, Tensor] = {}
        home = np.arange(num_samples) % self.world_size
        self._settle(np.flatnonzero(home == self.rank), home.astype(np.int16))

    @property
    def _rows_a_round(self) -> int:
        """Two rounds are under way at once, and together take chunk_rows."""
        return max(1, self.chunk_rows // 2)

    @property
    def nbytes(self) -> int:
        held = super().nbytes + self._slot.nbytes + self._free.nbytes + self._holder.nbytes
        under_way = (self._moves, self._visiting, *self._parcels.values())
        return held + sum(part.nbytes for part in under_way if part is not None)

    def begin_epoch(self, order: Order) -> None:
        """Bring the rows that this rank will visit here, from wherever the last epoch left them."""
        failure: Exception | None = None
        try:
            check_order(order, self.num_samples, self.world_size)
        except InputError as error:
            failure = error
        self._all_or_none(failure)
        self._finish()
        try:
            plan = migrate.plan(order, self._holder, self.rank, by_visit=self.exchange == "stream")
        except InputError as error:
            failure = error
        self._all_or_none(failure)
        head_start = self._agree(plan, order)
        self._holder = plan.holder
        if not plan.counts.any():
            return
        if self.exchange == "bulk":
            self._moves = _Moves(plan, plan.rounds(self._rows_a_round))
            self._finish()
        else:
            self._moves = _Moves(plan, order.steps)
            self._visiting = _Visiting.of(order, self.rank)
            # One at least: in the last step, where a rank may have padding only and ask for
            # nothing, all has then been sent for.
            self._run(max(1, head_start))
            self._send_for_next()

    # The exchange

    def _agree(self, plan: migrate.Plan, order: Order) -> int:
        """The head start that all ranks need, if they all have made the same plan.

        The backends do not notice splits that disagree: they would mix up rows without a word.
        """
        prior = zlib.crc32(repr(self.prior).encode())
        own = [prior, self.exchange == "bulk", self.chunk_rows]
        facts = [*migrate.digest(order, self._holder), *own]
        everyone = self._gather([*facts, plan.head_start])
        differ = np.flatnonzero((everyone[:, :-1] != everyone[0, :-1]).any(1))
        if len(differ):
            raise InputError(
                f"rank {differ[0]} has another order, or another store, than rank 0: "
                "begin the epoch with the same order on every rank"
            )
        return int(everyone[:, -1].max())

    def _run(self, stop: int) -> None:
        """Carry out the rounds up to `stop`, several in one if chunk_rows allows it."""
        assert self._moves is not None
        moves = self._moves
        at_once = max(1, moves.rounds // moves.plan.rounds(self._rows_a_round))
        while moves.done < stop:
            self._launch(moves, min(moves.done + at_once, stop))
            self._land(keep=1)  # the next round is packed while this one travels
        self._land()
        self._parcels.clear()

    def _send_for_next(self) -> None:
        if self._moves is not None and self._moves.done < self._moves.rounds:
            self._launch(self._moves, self._moves.done + 1)

    def _finish(self) -> None:
        """End the epoch's exchange, also that of an epoch which was left before its last step."""
        self._land()
        if self._moves is not None:
            self._run(self._moves.rounds)
        self._moves = self._visiting = None

    def _launch(self, moves: "_Moves", stop: int) -> None:
        """Send the rows of the rounds up to `stop` and free their slots."""
        turn = moves.plan.between(moves.done, stop, moves.rounds)
        K, n = self.prior.num_classes, len(turn.leaving)
        assert n == sum(turn.send_splits) and len(turn.arriving) == sum(turn.receive_splits)
        samples = torch.from_numpy(turn.leaving).to(self.device, torch.int64)
        slots = self._slot[samples]
        assert not (slots < 0).any(), "the plan sends a row that is not here"
        # visits travel as one more column of float16, which unlike uint16 every backend carries
        side = 1 - self._flights[-1].side if self._flights else 0
        parcel = self._parcel(f"sent {side}", n, self.device)
        torch.index_select(self._rows, 0, slots, out=parcel[:, :K])
        visits = self._visits.index_select(0, slots).view(torch.int16)
        parcel.view(torch.int16)[:, K] = visits
        self._slot[samples] = -1
        self._free = torch.cat([self._free, slots])
        sent = parcel.to(self._wire)
        received = self._parcel(f"received {side}", len(turn.arriving), self._wire)
        work = dist.all_to_all_single(
            received, sent, turn.receive_splits, turn.send_splits, self.group, async_op=True
        )
        self._flights.append(_Flight(work, sent, received, turn.arriving, side))
        self.sent_bytes += sent.nbytes
        moves.done = stop

    def _parcel(self, name: str, rows: int, device: torch.device) -> Tensor:
        """Room to send or receive rows with their visits, reused from round to round."""
        # New memory for every round takes longer than filling it
        if name not in self._parcels or len(self._parcels[name]) < rows:
            self._parcels.pop(name, None)
            # A later round may have a row more for each peer
            shape = rows + self.world_size, self.prior.num_classes + 1
            self._parcels[name] = torch.empty(shape, dtype=torch.float16, device=device)
        return self._parcels[name][:rows]

    def _land(self, keep: int = 0) -> None:
        """Wait for the rows under way, but for the last `keep` rounds, and give them slots."""
        while len(self._flights) > keep:
            self._unpack(self._flights.popleft())

    def _unpack(self, flight: "_Flight") -> None:
        flight.work.wait()
        K, n = self.prior.num_classes, len(flight.arriving)
        left = len(self._free) - n
        assert left >= 0, "the plan brings more rows than there is room for"
        # in order of memory, which is written 15% faster so
        self._free, slots = self._free[:left].clone(), self._free[left:].sort().values
        visits = flight.received.view(torch.int16)[:, K].contiguous().view(torch.uint16)
        self._put(slots.long(), flight.received[:, :K], visits)
        samples = torch.from_numpy(flight.arriving).to(self.device, torch.int64)
        self._slot[samples] = slots

    # What the base asks

    def _arrive(self, samples: Tensor) -> None:
        """While streaming: the rows of these samples' step are here, the next ones are sent for."""
        if self._visiting is None:
            return
        step = self._visiting.step_of(samples.cpu().numpy())
        if step <= self._visiting.step:
            return
        if step > self._visiting.step + 1:
            raise InputError(
                f"these samples belong to step {step} and the last step was {self._visiting.step}: "
                "visit the steps in order, or use exchange='bulk'"
            )
        self._visiting.step = step
        self._land()
        self._send_for_next()

    def _slots(self, samples: Tensor) -> Tensor:
        return self._slot.index_select(0, samples).long()

    def held(self) -> Tensor:
        self._land()
        return (self._slot >= 0).nonzero().squeeze(1)

    def _absent(self, sample: int) -> str:
        return (
            f"sample {sample} is not on rank {self.rank}: call begin_epoch with an order in which "
            "this rank visits it"
        )

    def _settle(self, samples: NDArray[np.int64], holder: NDArray[np.int16]) -> None:
        for flight in self._flights:
            flight.work.wait()
        self._flights.clear()
        self._moves = self._visiting = None
        self._parcels.clear()
        slots = torch.arange(len(self._rows), dtype=torch.int32, device=self.device)
        self._slot.fill_(-1)
        self._slot[torch.from_numpy(samples).to(self.device)] = slots[: len(samples)]
        self._free, self._holder = slots[len(samples) :].clone(), holder

    def _gather(self, values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        own = torch.as_tensor(values, dtype=torch.int64, device=self._wire)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self.group)
        gathered: NDArray[np.int64] = torch.stack(everyone).cpu().numpy()
        return gathered


@dataclass
class _Moves:
    """A plan and how many of its rounds are done."""

    plan: migrate.Plan
    rounds: int
    done: int = 0

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes


@dataclass
class _Visiting:
    """Which step this rank is in, by the samples it visits: ascending, and the step of each."""

    samples: NDArray[np.int32]
    steps: NDArray[np.int32]
    step: int = 0

    @classmethod
    def of(cls, order: Order, rank: int) -> "_Visiting":
        visits = order.assignment[:, rank]
        by_sample = np.argsort(visits, kind="stable").astype(np.int32)
        return cls(visits[by_sample], by_sample // np.int32(order.batch_size))

    def step_of(self, samples: NDArray[np.int64]) -> int:
        """The last step that visits one of the samples; -1 if none does."""
        places = np.searchsorted(self.samples, samples).clip(max=len(self.samples) - 1)
        visited = (self.samples[places] == samples) & (samples >= 0)
        return int(self.steps[places[visited]].max(initial=-1))

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes + self.steps.nbytes


@dataclass
class _Flight:
    """An all-to-all under way; what it sends must live until it is done."""

    work: Any
    sent: Tensor
    received: Tensor
    arriving: migrate.Samples
    side: int  # which of the two pairs of parcels


def _wire_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where the group can exchange rows: on their own device, or on the one that it knows."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if device.type == "cuda" and backends.get("cuda", "gloo") != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
