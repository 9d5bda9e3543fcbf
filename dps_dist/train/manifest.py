"""What a checkpoint's folder holds, and which of them are whole; `checkpoint.py` writes and reads.

    <run>/checkpoints/<step>-<attempt>/    state.pt          by rank 0
                                           targets/          one Arrow file a rank, targets.json
                                           manifest.json     written last: name, size, CRC-32 of all

Without a manifest a folder is what a killed save left, and not a checkpoint.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from dps_dist.errors import InputError, PeerFailedError
from dps_dist.targets.checksums import sealed, unsealed
from dps_dist.train.peers import Peers
from dps_dist.train.storage import Storage

VERSION = 1
FOLDER, MANIFEST, STATE, TARGETS = "checkpoints", "manifest.json", "state.pt", "targets"
NAME = re.compile(r"(\d{8,})-([A-Za-z0-9]+)(\.\d+)?")


@dataclass(frozen=True)
class Moment:
    """Where training is: epochs done, samples visited in the current one, optimizer steps done."""

    epoch: int
    position: int
    step: int


@dataclass(frozen=True)
class File:
    """One file as the manifest describes it; its name is relative to the checkpoint."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Found:
    """A checkpoint by its manifest, which vouches for `files`."""

    name: str
    moment: Moment
    world_size: int
    accuracy: float | None
    time: float
    files: tuple[File, ...]


class DamagedError(Exception):
    """Says which file and how, as in «file state.pt: its CRC-32 differs»."""


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for what else may lie in the folder."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def attempt_of(name: str) -> str:
    match = NAME.fullmatch(name)
    return match[2] if match else ""


def encode(moment: Moment, world_size: int, accuracy: float | None, files: Sequence[File]) -> bytes:
    """The manifest of a checkpoint that is being written now."""
    known = accuracy is not None and math.isfinite(accuracy)
    return sealed(
        {
            "version": VERSION,
            **asdict(moment),
            "world_size": world_size,
            "accuracy": accuracy if known else None,
            "time": time.time(),
            "files": [asdict(file) for file in files],
        }
    )


def read(checkpoints: Storage, name: str) -> Found | None:
    """What the manifest says; None if there is none, DamagedError if it is not as it was."""
    try:
        with _damage_told(checkpoints, MANIFEST):
            data = checkpoints.read(f"{name}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = unsealed(data)
        if content["version"] != VERSION:  # what else it holds is for that release to say
            raise InputError(
                f"{checkpoints / name} has version {content['version']}: this release reads "
                f"version {VERSION}, use the one that wrote it"
            )
        files = [File(**entry) for entry in content["files"]]
        moment = Moment(content["epoch"], content["position"], content["step"])
        found = Found(
            name,
            moment,
            content["world_size"],
            content["accuracy"],
            content["time"],
            tuple(files),
        )
    except InputError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"file {MANIFEST}: {error}") from error
    if not any(file.name == STATE for file in files):
        raise DamagedError(f"file {MANIFEST}: it names no {STATE}")
    return found


def verify(checkpoints: Storage, name: str, files: Sequence[File]) -> None:
    """Read the files and compare; DamagedError for the first that is not as it was written."""
    for file in files:
        try:
            with _damage_told(checkpoints, file.name):
                size, crc32 = checkpoints.sum_of(f"{name}/{file.name}")
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedError(f"file {file.name}: it is missing") from None
        if size != file.size:
            raise DamagedError(f"file {file.name}: it has {size} bytes instead of {file.size}")
        if crc32 != file.crc32:
            raise DamagedError(f"file {file.name}: its CRC-32 differs")


def listed(checkpoints: Storage) -> list[tuple[str, Found | DamagedError | InputError]]:
    """All that have a manifest, newest first, with what it says or what is wrong with it."""
    found: list[tuple[str, Found | DamagedError | InputError]] = []
    for name in checkpoints.names():
        if step_of(name) is None:
            continue
        try:
            one = read(checkpoints, name)
            if one is not None:
                found.append((name, one))
        except (DamagedError, InputError) as error:
            found.append((name, error))
    return sorted(found, key=lambda entry: _age(*entry), reverse=True)


def complete(storage: Storage) -> list[Found]:
    """The run's checkpoints, newest first, by their manifests only; damaged ones are left out."""
    return [one for _, one in listed(storage / FOLDER) if isinstance(one, Found)]


def best_first(found: Iterable[Found]) -> list[Found]:
    """Those whose accuracy was measured; of equal ones the earlier is the better."""
    measured = [one for one in found if one.accuracy is not None]
    return sorted(measured, key=lambda one: (-(one.accuracy or 0.0), one.moment.step))


def newest_whole(
    storage: Storage, say: Callable[[str], None], peers: Peers | None = None
) -> Found | None:
    """The newest checkpoint of which every byte is as it was written; None if there is none.

    A damaged one is said and passed over. Only manifests and files are read, nothing is loaded.
    peers: all ranks call this, each reads its share of the files, and all find the same.
    """
    checkpoints, damaged = storage / FOLDER, 0
    for name in _newest_first(checkpoints, peers):
        try:
            return _whole(checkpoints, name, peers)
        except DamagedError as error:
            damaged += 1
            say(f"checkpoint {name} is damaged ({error}): going back to the one before")
    if damaged:
        raise InputError(
            f"{checkpoints} holds {damaged} checkpoints and all are damaged: "
            "restore the folder from a copy, or start a new run"
        )
    return None


def _newest_first(checkpoints: Storage, peers: Peers | None) -> list[str]:
    """As rank 0 sees them: another start of the run may still be removing some."""
    if peers is None:
        return [name for name, _ in listed(checkpoints)]
    names = [name for name, _ in listed(checkpoints)] if peers.rank == 0 else []
    return (peers.tell("\n".join(names)) or "").split()


def _whole(checkpoints: Storage, name: str, peers: Peers | None) -> Found:
    """The checkpoint, if its files are whole; a DamagedError on all ranks if one finds damage."""
    if peers is None:
        return _looked_at(checkpoints, name, 0, 1)
    failure: Exception | None = None
    try:
        found = _looked_at(checkpoints, name, peers.rank, peers.world_size)
    except Exception as error:  # the other ranks must hear of it
        failure = error
    damaged = isinstance(failure, DamagedError)
    heard = peers.gather([damaged, failure is not None and not damaged]).astype(bool)
    if failure is not None and not damaged:
        raise failure
    if heard[:, 1].any():
        raise PeerFailedError(
            f"rank {heard[:, 1].argmax()} could not read {checkpoints / name}: see its own message"
        )
    if heard[:, 0].any():
        raise DamagedError(peers.tell(str(failure), source=int(heard[:, 0].argmax())))
    return found


def _looked_at(checkpoints: Storage, name: str, rank: int, world_size: int) -> Found:
    """What its manifest says, when this rank's share of the files is as that says."""
    found = read(checkpoints, name)
    if found is None:
        raise DamagedError(f"file {MANIFEST}: it is missing")
    verify(checkpoints, name, found.files[rank::world_size])
    return found


def _age(name: str, one: Found | Exception) -> tuple[int, float, str]:
    return step_of(name) or 0, one.time if isinstance(one, Found) else math.inf, name


@contextmanager
def _damage_told(checkpoints: Storage, file: str) -> Iterator[None]:
    """A disk's read error is damage; what a network or a missing right makes of a file is not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise
    except OSError as error:
        if checkpoints.local is None:
            raise
        raise DamagedError(f"file {file}: {error}") from error
