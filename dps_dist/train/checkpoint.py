"""Checkpoints that survive a kill at any time: `Writer` saves them, `open_checkpoint` reads them.

`manifest.py` says what a checkpoint is and finds the newest. Nothing that is loaded is code.
"""

import json
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dps_dist import config
from dps_dist.errors import InputError, PeerFailedError
from dps_dist.targets import arrow
from dps_dist.train import manifest
from dps_dist.train.manifest import FOLDER, MANIFEST, STATE, TARGETS, DamagedError, File, Moment
from dps_dist.train.prune import Pruning, remove
from dps_dist.train.state_file import read_state, write_state
from dps_dist.train.storage import Storage, make_folder, sync

__all__ = ["Opened", "Writer", "open_checkpoint"]

MESSAGE_BYTES, MESSAGE_CHARACTERS = 8192, 600  # what a character takes in JSON, at most, is 12


@dataclass(frozen=True)
class _Save:
    name: str
    moment: Moment
    state: dict[str, Any] | None
    targets: arrow.Snapshot | None
    accuracy: float | None


class Writer:
    """Saves in the background: `save` hands over and returns, a thread writes while steps go on.

        rank 0                       rank 1
        state.pt, its targets        its targets          each tells how it went
        targets.json, manifest.json                       now the checkpoint counts, and all hear it
        removes what is not kept

    All ranks make one and call it alike. When a rank fails, all do, and what was written goes.

    attempt: letters and digits, new at every start of the run and the same on its ranks, so that
        what an earlier start left, or is still writing, never mixes with ours.
    group: on gloo, of this writer alone, because its thread uses it; None in a single process.
    """

    def __init__(
        self,
        storage: Storage,
        keep: config.Checkpoint,
        attempt: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        assert attempt.isascii() and attempt.isalnum(), f"attempt is {attempt!r}"
        self.checkpoints, self.attempt, self.group = storage / FOLDER, attempt, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self._pruning = Pruning(self.checkpoints, keep, attempt) if self.rank == 0 else None
        self.saved_at = time.time()  # or started: what was done since then would be lost
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._step, self._times = -1, 0

    def save(
        self,
        moment: Moment,
        state: dict[str, Any] | None,
        targets: arrow.Snapshot | None,
        accuracy: float | None = None,
    ) -> None:
        """Begin to save, when the save before has ended; raises what went wrong in that one.

        state: on rank 0, copies that training does not change: tensors and plain values.
        """
        assert (state is not None) == (self.rank == 0), "rank 0 saves the state, and only rank 0"
        self.wait()
        self._times = self._times + 1 if moment.step == self._step else 0
        self._step = moment.step
        again = f".{self._times}" if self._times else ""
        name = f"{moment.step:08d}-{self.attempt}{again}"
        save = _Save(name, moment, state, targets, accuracy)
        # A process that is to end does not wait for its peers: nothing is lost that counts
        self._thread = threading.Thread(target=self._run, args=(save,), name=name, daemon=True)
        self._thread.start()

    def vouch(self, name: str) -> None:
        """A former start's checkpoint was just read and found whole: pruning need not read it."""
        if self._pruning is not None:
            self._pruning.whole[name] = True

    def wait(self) -> None:
        """Until all that was handed over is committed; raises what went wrong, on every rank."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    # In the thread

    def _run(self, save: _Save) -> None:
        handed_over = time.time()
        try:
            try:
                written = self._together(lambda: self._write(save), undo=save.name)
            except Exception:
                self._discard(save.name)  # also if no peer answers
                raise
            self._together(lambda: self._commit(save, written), undo=save.name)
            self.saved_at = handed_over
            if self._pruning is not None:
                self._pruning.after(save.name)
        except Exception as error:  # for the thread that asked
            self._failure = error

    def _write(self, save: _Save) -> dict[str, Any]:
        """This rank's files; what the manifests say of them."""
        state, saved = None, None
        with self._folder(save.name) as folder:
            make_folder(folder)
            if save.state is not None:
                state = asdict(write_state(folder / STATE, save.state))
            if save.targets is not None:
                make_folder(folder / TARGETS)
                saved = asdict(save.targets.write(folder / TARGETS))
                sync(folder / TARGETS)
        return {"state": state, "targets": saved}

    @contextmanager
    def _folder(self, name: str) -> Iterator[Path]:
        """Where to write: the checkpoint itself, or a folder that is then uploaded."""
        if self.checkpoints.local is not None:
            yield self.checkpoints.local / name
            return
        with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
            yield Path(scratch)
            self.checkpoints.upload(Path(scratch), name)

    def _commit(self, save: _Save, written: list[dict[str, Any]]) -> None:
        """Rank 0: vouch for what all ranks have written."""
        if self.rank:
            return
        files = [File(**written[0]["state"])]
        if save.targets is not None:
            shards = [rank["targets"] for rank in written]
            for shard in shards:
                name = f"{TARGETS}/{shard['name']}"
                files.append(File(name, shard["size"], shard["crc32"]))
            numbers = [(shard["rows"], shard["size"], shard["crc32"]) for shard in shards]
            data = arrow.manifest(save.targets.num_samples, save.targets.prior, numbers)
            name = f"{TARGETS}/{arrow.MANIFEST}"
            self.checkpoints.write(f"{save.name}/{name}", data)
            files.append(File(name, len(data), zlib.crc32(data)))
        if self.checkpoints.local is not None:
            sync(self.checkpoints.local / save.name)
        data = manifest.encode(save.moment, self.world_size, save.accuracy, files)
        self.checkpoints.write(f"{save.name}/{MANIFEST}", data)

    def _discard(self, name: str) -> None:
        """What a failed save has written; a full disk is not to stay full."""
        if self.rank == 0:
            remove(self.checkpoints, name)

    def _together(self, work: Callable[[], Any], undo: str) -> list[Any]:
        """What the work gave on each rank; raises on all of them when it failed on one.

        undo: the checkpoint that then goes, before any rank can begin the next.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        told = None if failure is None else str(failure) or repr(failure)
        own = {"result": result, "failure": told and told[:MESSAGE_CHARACTERS]}
        everyone = self._gather(own)
        if any(one["failure"] is not None for one in everyone):
            self._discard(undo)
            self._gather({})
        if failure is not None:
            raise failure
        for rank, one in enumerate(everyone):
            if one["failure"] is not None:
                raise PeerFailedError(f"rank {rank} could not save: {one['failure']}")
        return [one["result"] for one in everyone]

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's own, as JSON: torch would pickle it."""
        if self.group is None:
            return [own]
        data = json.dumps(own).encode().ljust(MESSAGE_BYTES)
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = [torch.empty_like(message) for _ in range(self.world_size)]
        dist.all_gather(everyone, message, group=self.group)
        return [json.loads(bytes(one.numpy())) for one in everyone]


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was read; its targets, if it has any, are in folder/targets."""

    folder: Path
    state: dict[str, Any]
    moment: Moment
    world_size: int


def open_checkpoint(
    storage: Storage,
    name: str,
    into: Path,
    targets: bool = True,
    share: tuple[int, int] | None = None,
) -> Opened:
    """Read the state. The files are where they are, or below `into` if the storage is remote.

    What is brought from there is verified here; else the state is, and `Targets.load` verifies the
    targets, each rank its share of them. Without `targets` those of a remote storage stay there.
    share: rank and number of ranks, to bring from there only the targets that this one reads.
    """
    checkpoints = storage / FOLDER
    try:
        found = manifest.read(checkpoints, name)
        if found is None:
            raise InputError(
                f"{checkpoints / name} is not a checkpoint, it has no {MANIFEST}: "
                f"give the name of one in {checkpoints}"
            )
        folder, looked_at = (checkpoints.local or into) / name, {STATE}
        if checkpoints.local is None:
            looked_at = _bring(checkpoints / name, found, folder, targets, share)
        files = [file for file in found.files if file.name in looked_at]
        manifest.verify(Storage(folder.parent), folder.name, files)
    except (DamagedError, FileNotFoundError) as error:
        raise InputError(
            f"{checkpoints / name} is damaged ({error}): use another checkpoint"
        ) from error
    state = read_state(folder / STATE)
    return Opened(folder, state, found.moment, found.world_size)


def _bring(
    remote: Storage,
    found: manifest.Found,
    folder: Path,
    targets: bool,
    share: tuple[int, int] | None,
) -> set[str]:
    """Copy a remote checkpoint's state into a folder, and the targets that are asked for."""
    wanted = {file.name for file in found.files if targets or file.name == STATE}
    index = f"{TARGETS}/{arrow.MANIFEST}"
    if share is not None and index in wanted:
        remote.download(index, folder)
        own = arrow.read_by(*share, folder / TARGETS)
        wanted = {STATE, *(f"{TARGETS}/{path.name}" for path in own)}
    for name in wanted:
        remote.download(name, folder)
    return wanted
