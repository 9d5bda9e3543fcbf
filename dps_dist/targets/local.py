"""The target store in one process, `LocalTargets`: the reference that the sharded one must equal.

Its base, `Targets`, is what both have in common: row arithmetic, saving and loading.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.errors import InputError, PeerFailedError
from dps_dist.targets import arrow
from dps_dist.targets.checks import (
    PADDING,
    Batch,
    Order,
    all_below,
    check_order,
    expect_integers,
    expect_shape,
)
from dps_dist.targets.codec import decode, encode
from dps_dist.targets.dirichlet import MAX_VISITS, Dirichlet

GATHERED = 1 << 20  # numbers of samples that travel in one go: 8 MB
T = TypeVar("T")


class Targets:
    """Evidence and visits of the samples that this rank holds: two bytes a class, two a sample.

    The store keeps the discounted mean of each sample's predictions, so other methods with one
    K-vector a sample use it as it is, through `evidence`, `visits` and `update`:

        Temporal Ensembling   γ = a    Z/(1−aᵗ)  is  evidence(index)
        PS-KD                 γ = 0    p_prev    is  evidence(index)
        ELR                   γ = β    t         is  (1−βⁿ)·evidence(index), n = visits(index)

    Results come on the device of the index (`read`: of the labels), whatever the store's own.
    """

    rank = 0
    world_size = 1

    def __init__(
        self, num_samples: int, prior: Dirichlet, capacity: int, device: torch.device | str
    ) -> None:
        if not 1 <= num_samples < 2**31:
            raise InputError(f"num_samples is {num_samples}: give 1 to {2**31 - 1}")
        self.num_samples, self.prior = num_samples, prior
        self._rows = torch.zeros(capacity, prior.num_classes, dtype=torch.float16, device=device)
        self._visits = torch.zeros(capacity, dtype=torch.uint16, device=device)
        self.device = self._rows.device  # with its number, as tensors have it

    # What a subclass says about its rows

    def _arrive(self, samples: Tensor) -> None:
        """Called before samples are looked up."""

    def _slots(self, samples: Tensor) -> Tensor:
        """The row number, int64 [B], of each sample in [0, num_samples); -1 if it is not here."""
        raise NotImplementedError

    def held(self) -> Tensor:
        """The samples that are here, int64, ascending."""
        raise NotImplementedError

    def _settle(self, samples: NDArray[np.int64], holder: NDArray[np.int16]) -> None:
        """Make room for rows of these samples and no others. holder: [N], the rank of every one."""
        raise NotImplementedError

    def _absent(self, sample: int) -> str:
        raise NotImplementedError

    def _gather(self, values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Every rank's values [world_size, len(values)]."""
        raise NotImplementedError

    # What a training loop calls

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds, bookkeeping included."""
        return self._rows.nbytes + self._visits.nbytes

    def read(self, index: Tensor, labels: Tensor) -> Tensor:
        """The targets float32 [B, K]: y = (γᵗα⁰ + B_t·m)/A_t. Padding reads as the prior."""
        slots, padded = self._check(index, labels=labels)
        evidence, visits = self._fetch(slots, padded, labels.device)
        if padded:  # their labels mean nothing
            labels = labels.clamp(0, self.prior.num_classes - 1)
        return self.prior.posterior(evidence, visits, labels.long())

    def update(self, index: Tensor, probs: Tensor, where: Tensor | None = None) -> None:
        """One more visit each, with the predictions probs [B, K]. Padding is left alone.

        where: bool [B], which samples to update if not all; the others' probs may be anything.
        """
        slots, padded = self._check(index, probs=probs, writes=True, where=where)
        if padded:
            updated = slots >= 0
            slots, probs = slots[updated], probs[updated.to(probs.device)]
        evidence, visits = self._fetch(slots, False, probs.device)
        coded = encode(self.prior.updated(evidence, visits, probs.detach()))
        self._put(slots, coded, (visits + 1).clamp_(max=MAX_VISITS).to(torch.uint16))

    def step(self, logits: Tensor, labels: Tensor, index: Tensor, tau: float = 1.0) -> Tensor:
        """`read`, the loss −Σ_j q_j log p_j with q = y^{1/τ}/‖y^{1/τ}‖₁, and `update`: in one pass.

        Returns the loss float32 [B], differentiable in the logits; the rows are updated already. A
        sample with logits that are not finite gets loss NaN and no update, and no error is raised:
        what to do about it is the caller's. Padding gets loss 0. Each call is a
        visit: keep it out of what `torch.utils.checkpoint` runs again.
        """
        from dps_dist.targets.fused import fused_step

        if not 1e-3 <= tau <= 1e3:
            raise InputError(f"tau is {tau}: give a number from 0.001 to 1000, 1 for no sharpening")
        expect_shape("logits", logits, (index.numel(), self.prior.num_classes))
        slots, _ = self._check(index, labels=labels, writes=True)
        labels = labels.to(logits.device, torch.int64)
        if logits.device == self.device:
            return fused_step(logits, labels, slots, self._rows, self._visits, self.prior, tau)
        rows, visits = self._take(slots.clamp(min=0), logits.device)
        places = torch.arange(len(slots), device=logits.device)
        places = places.where(slots.to(logits.device) >= 0, -1)
        loss = fused_step(logits, labels, places, rows, visits, self.prior, tau)
        here = slots >= 0
        self._put(slots[here], rows.to(self.device)[here], visits.to(self.device)[here])
        return loss

    def evidence(self, index: Tensor) -> Tensor:
        """The discounted mean of the predictions, float32 [B, K]; 0 before the first visit."""
        return self._fetch(*self._check(index), index.device)[0]

    def visits(self, index: Tensor) -> Tensor:
        """How often each sample was updated, int32 [B]; stays at 65535."""
        slots, padded = self._check(index)
        counts = self._visits.index_select(0, slots.clamp(min=0)).to(torch.int32)
        if padded:
            counts.masked_fill_(slots < 0, 0)
        return counts.to(index.device)

    def evidence_and_visits(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one look, for which the host waits once."""
        return self._fetch(*self._check(index), index.device)

    def snapshot(self) -> arrow.Snapshot:
        """A copy of this rank's rows on the CPU, for a thread to write while training goes on."""
        return self._as_files(list(self._chunks()))

    def save(
        self, folder: str | Path, labels: Tensor | NDArray[np.integer[Any]] | None = None
    ) -> None:
        """Write this rank's rows into the folder, and a manifest when all ranks have written.

        A folder that holds saved targets is refused, so that no kill can cost what was saved.
        labels: [N], written beside the rows for readers.
        """
        given = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
        rows = self._as_files(self._chunks())
        saved = self._together(lambda: rows.write(Path(folder), given))
        everyone = self._gather((saved.rows, saved.size, saved.crc32)).tolist()

        def vouch() -> None:
            if self.rank == 0:
                arrow.write_manifest(Path(folder), self.num_samples, self.prior, everyone)

        self._together(vouch)

    def load(self, folder: str | Path, *, verified: bool = False) -> None:
        """Take the rows that any number of ranks saved there. Refused files leave all as it was.

        Each rank reads a share of the rows as they lie and keeps them until `begin_epoch`.
        verified: whether every byte was just found as it was saved; otherwise the ranks share that.
        Only if reading fails after every file was found whole must the store be loaded again.
        """
        folder = Path(folder)

        def looked_at() -> tuple[list[arrow.File], int]:
            files, digest = arrow.files_of(folder, self.num_samples, self.prior)
            if not verified:
                arrow.verify(files[self.rank :: self.world_size])
            return files, digest

        files, digest = self._together(looked_at)
        if len(set(self._gather([digest]).ravel())) > 1:
            raise InputError(f"{folder} is not what other ranks load: give all the same folder")
        shares = arrow.shares(files, self.world_size)
        mine = arrow.Part(files, shares[self.rank])
        samples = self._together(lambda: mine.samples(self.num_samples))
        holder = self._holders(samples, most=max(len(share) for share in shares))
        arrow.check_complete(folder, holder >= 0, rows=sum(len(share) for share in shares))
        self._settle(samples, holder)
        self._together(lambda: self._fill(mine))

    def _holders(self, samples: NDArray[np.int64], most: int) -> NDArray[np.int16]:
        """The rank of every row, int16 [N], if this one has these samples; -1: none has it.

        most: how many a rank has at most. No other step of loading grows with the data set.
        """
        holder = np.full(self.num_samples, -1, np.int16)
        at_once = max(1, GATHERED // self.world_size)
        for first in range(0, most, at_once):
            own = np.full(min(at_once, most - first), -1, np.int64)
            part = samples[first : first + at_once]
            own[: len(part)] = part
            for rank, theirs in enumerate(self._gather(own)):
                holder[theirs[theirs >= 0]] = rank
        return holder

    def _fill(self, rows: arrow.Part) -> None:
        for samples, coded, visits in rows:
            slots = self._slots(torch.from_numpy(samples).to(self.device))
            self._put(slots, torch.from_numpy(coded), torch.from_numpy(visits))

    # Rows by slot

    def _take(self, slots: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Coded evidence float16 [B, K] and visits uint16 [B] of the slots."""
        # Through pinned memory, so that the host need not wait for the copy to the GPU
        pin = device.type == "cuda" and self.device.type == "cpu"
        shape = len(slots), self.prior.num_classes
        coded = torch.empty(shape, dtype=torch.float16, device=self.device, pin_memory=pin)
        torch.index_select(self._rows, 0, slots, out=coded)
        visits = torch.empty(len(slots), dtype=torch.uint16, device=self.device, pin_memory=pin)
        torch.index_select(self._visits, 0, slots, out=visits)
        return coded.to(device, non_blocking=pin), visits.to(device, non_blocking=pin)

    def _fetch(self, slots: Tensor, padded: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Evidence float32 [B, K] and visits int32 [B] of the slots; 0 for slot -1."""
        coded, counts = self._take(slots.clamp(min=0) if padded else slots, device)
        evidence, visits = decode(coded), counts.to(torch.int32)
        if padded:
            padding = slots.to(device) < 0
            evidence.masked_fill_(padding.unsqueeze(-1), 0.0)
            visits.masked_fill_(padding, 0)
        return evidence, visits

    def _put(self, slots: Tensor, coded: Tensor, visits: Tensor) -> None:
        """Write coded evidence float16 [B, K] and visits uint16 [B] into the slots."""
        if self.device.type == "cpu":  # numpy scatters float16 three times as fast as torch
            places = slots.numpy()
            self._rows.numpy()[places] = coded.cpu().numpy()
            self._visits.numpy()[places] = visits.cpu().numpy()
        else:  # torch has no scatter for uint16, only for int16 of the same bits
            self._rows.index_copy_(0, slots, coded.to(self.device))
            bits = visits.to(self.device).view(torch.int16)
            self._visits.view(torch.int16).index_copy_(0, slots, bits)

    def _chunks(self) -> Iterator[arrow.Chunk]:
        """The rows that are here, in order of samples, a few megabytes at a time."""
        for samples in torch.split(self.held(), arrow.chunk_rows(self.prior.num_classes)):
            slots = self._slots(samples)
            coded, visits = self._take(slots, torch.device("cpu"))
            yield samples.cpu().numpy(), coded.numpy(), visits.numpy()

    def _as_files(self, chunks: Iterable[arrow.Chunk]) -> arrow.Snapshot:
        return arrow.Snapshot(self.rank, self.world_size, self.num_samples, self.prior, chunks)

    # Checks

    def _check(
        self,
        index: Tensor,
        labels: Tensor | None = None,
        probs: Tensor | None = None,
        writes: bool = False,
        where: Tensor | None = None,
    ) -> tuple[Tensor, bool]:
        """The slots of the index (-1: padding) and whether there is padding; or an InputError.

        What is not `where` counts as padding, but for the step that its samples belong to.
        """
        expect_shape("index", index, (index.numel(),))
        expect_integers("index", index)
        samples = index.to(self.device, torch.int64)
        self._arrive(samples)
        if where is not None:
            expect_shape("where", where, tuple(index.shape))
            samples = samples.where(where.to(self.device), PADDING)
        slots = self._slots_of_any(samples)
        batch = Batch(samples, slots, labels, probs, writes)
        padded = batch.check(self.num_samples, self.prior.num_classes, self._absent)
        return slots, padded

    def _slots_of_any(self, samples: Tensor) -> Tensor:
        """The row number of each sample; -1 for what is no sample."""
        if samples.device.type == "cpu" and all_below(self.num_samples, samples):
            return self._slots(samples)
        known = (samples >= 0) & (samples < self.num_samples)
        return self._slots(samples.clamp(0, self.num_samples - 1)).where(known, -1)

    def _together(self, work: Callable[[], T]) -> T:
        """What the work gives; raises on every rank when it fails on one."""
        failure = None
        try:
            result = work()
        except Exception as error:  # the other ranks must hear of it
            failure = error
        self._all_or_none(failure)
        return result

    def _all_or_none(self, failure: Exception | None) -> None:
        """Raise on every rank when one has failed, so that none is left waiting for it."""
        failed = np.flatnonzero(self._gather([failure is not None]).ravel())
        if failure is not None:
            raise failure
        if len(failed):
            raise PeerFailedError(f"rank {failed[0]} could not: see its own message")


class LocalTargets(Targets):
    """All rows in this process; sample i is row i."""

    def __init__(
        self, num_samples: int, prior: Dirichlet, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(num_samples, prior, num_samples, device)

    def begin_epoch(self, order: Order) -> None:
        """All rows are here already: only checks that the order fits."""
        check_order(order, self.num_samples, self.world_size)

    def _slots(self, samples: Tensor) -> Tensor:
        return samples

    def held(self) -> Tensor:
        return torch.arange(self.num_samples, device=self.device)

    def _settle(self, samples: NDArray[np.int64], holder: NDArray[np.int16]) -> None:
        pass  # all have their place

    def _absent(self, sample: int) -> str:
        raise AssertionError(f"sample {sample} has no row")

    def _gather(self, values: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([values], np.int64)
