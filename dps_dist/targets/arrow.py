"""Rows ↔ Arrow files, from any world size to any other; the stores' `save` and `load` call it.

A folder holds one Arrow IPC file a rank and `targets.json`, written last, which names the files
with their sizes and CRC-32 and has a CRC-32 of its own. Without it, or when a byte of what it
names has changed, nothing is loaded. There is no pickle.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dps_dist.errors import InputError
from dps_dist.targets.checksums import sealed, sum_of, summed, unsealed
from dps_dist.targets.codec import FORMULA
from dps_dist.targets.dirichlet import Dirichlet

VERSION = 1
MANIFEST = "targets.json"
CHUNK_BYTES = 8 << 20

# samples int64 [n], coded evidence float16 [n, K], visits uint16 [n]
Chunk = tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.uint16]]


@dataclass(frozen=True)
class Saved:
    """One rank's file as the manifest describes it."""

    name: str
    rows: int
    size: int
    crc32: int


File = tuple[Path, Saved]


def file_name(rank: int, world_size: int) -> str:
    return f"targets-{rank:05d}-of-{world_size:05d}.arrow"


def chunk_rows(num_classes: int) -> int:
    return max(1, CHUNK_BYTES // (2 * num_classes))


@dataclass(frozen=True)
class Snapshot:
    """One rank's rows and what its file says of them. To write it is file work only."""

    rank: int
    world_size: int
    num_samples: int
    prior: Dirichlet
    chunks: Iterable[Chunk]

    def write(self, folder: Path, labels: NDArray[np.integer[Any]] | None = None) -> Saved:
        """Write the rows; they get their name only when they are complete. labels: [N]."""
        if (folder / MANIFEST).exists():  # a kill in mid-save would cost what it vouches for
            raise InputError(
                f"{folder} holds saved targets already: give a folder of its own to each"
            )
        if labels is not None:
            labels = _smallest(labels, self.num_samples, self.prior.num_classes)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file_name(self.rank, self.world_size)
        unfinished = path.with_suffix(".unfinished")
        schema = _schema(self.num_samples, self.prior, labels)
        rows = 0
        try:
            with (
                summed(unfinished) as sink,
                pa.ipc.new_file(pa.PythonFile(sink, "w"), schema) as writer,
            ):
                for samples, coded, visits in self.chunks:
                    values = _column(coded.reshape(-1))
                    evidence = pa.FixedSizeListArray.from_arrays(values, self.prior.num_classes)
                    columns = [_column(samples), _column(visits), evidence]
                    if labels is not None:
                        columns.append(_column(labels[samples]))
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                    rows += len(samples)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return Saved(path.name, rows, sink.size, sink.crc32)


def manifest(num_samples: int, prior: Dirichlet, ranks: Sequence[Sequence[int]]) -> bytes:
    """`targets.json` for every rank's file, given its (rows, size, crc32)."""
    files = [
        asdict(Saved(file_name(rank, len(ranks)), *numbers)) for rank, numbers in enumerate(ranks)
    ]
    return sealed({"version": VERSION, **_facts(num_samples, prior), "files": files})


def write_manifest(
    folder: Path, num_samples: int, prior: Dirichlet, ranks: Sequence[Sequence[int]]
) -> None:
    """The folder counts from now on."""
    unfinished = folder / f"{MANIFEST}.unfinished"
    with unfinished.open("wb") as file:
        file.write(manifest(num_samples, prior, ranks))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> tuple[list[File], dict[str, Any]]:
    """The files that `targets.json` names, whether they are there or not, and all that it says."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{path} is missing: give a folder in which a save has finished")
    try:
        content = unsealed(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is damaged: use another copy of the folder") from error
    if content["version"] != VERSION:
        raise InputError(
            f"{path} has version {content['version']}: this release reads version {VERSION}"
        )
    return [(folder / entry["name"], Saved(**entry)) for entry in content["files"]], content


def files_of(folder: Path, num_samples: int, prior: Dirichlet) -> tuple[list[File], int]:
    """The folder's files, if they were saved by a store like this one.

    And a number that tells this save from every other.
    """
    files, content = read_manifest(folder)
    for field, own in _facts(num_samples, prior).items():
        if content[field] != own:
            raise InputError(
                f"{folder / MANIFEST} was saved with {field} {content[field]} and this store has "
                f"{own}: make the store with {field} {content[field]}, or load another folder"
            )
    return files, content["crc32"]


def verify(files: Iterable[File]) -> None:
    """Compare each file's bytes with their checksum."""
    for path, saved in files:
        if not path.is_file():
            raise InputError(f"{path} is missing: the folder must hold all that {MANIFEST} names")
        with path.open("rb") as file:
            size, crc32 = sum_of(file)
        if size != saved.size:
            raise InputError(
                f"{path} has {size} bytes instead of {saved.size}: use another copy of the folder"
            )
        if crc32 != saved.crc32:
            raise InputError(f"{path} is damaged (its CRC-32 differs): use another copy of it")


def shares(files: Sequence[File], world_size: int) -> list[range]:
    """The rows for each rank to read, counted from file to file; at most ⌈rows/W⌉ each.

    A file each where there are as many as ranks; otherwise stretches of the same length.
    """
    counts = [saved.rows for _, saved in files]
    rows = sum(counts)
    if len(counts) != world_size or max(counts) > -(-rows // world_size):
        counts = [len(range(rank, rows, world_size)) for rank in range(world_size)]
    return [range(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(world_size)]


class Part:
    """Some of a folder's rows, out of memory-mapped files; of no others is anything read.

    rows: counted from file to file. stretches: the files that they are in, and where in each.
    """

    def __init__(self, files: Iterable[File], rows: range) -> None:
        self.stretches: list[tuple[Path, range]] = []
        first = 0
        for path, saved in files:
            own = _overlap(rows, first, saved.rows)
            if len(own):
                self.stretches.append((path, own))
            first += saved.rows

    def samples(self, num_samples: int) -> NDArray[np.int64]:
        """The samples that the rows are of, in their order."""
        found = [np.zeros(0, np.int64)]
        for path, batch in self._batches(["index"]):
            samples = batch.column("index").to_numpy()
            if not 0 <= samples.min() <= samples.max() < num_samples:
                raise InputError(f"{path} holds samples beyond {num_samples - 1}: save again")
            found.append(samples.copy())
        return np.concatenate(found)

    def __iter__(self) -> Iterator[Chunk]:
        """The rows, copied: the files go when the next ones come."""
        for _, batch in self._batches(None):
            coded = batch.column("evidence").flatten().to_numpy().reshape(len(batch), -1)
            samples, visits = (batch.column(name).to_numpy() for name in ("index", "visits"))
            yield samples.copy(), coded.copy(), visits.copy()

    def _batches(self, columns: list[str] | None) -> Iterator[tuple[Path, Any]]:
        for path, rows in self.stretches:
            with pa.memory_map(str(path)) as mapped:
                try:
                    names = pa.ipc.open_file(mapped).schema.names
                    fields = [names.index(name) for name in columns or names]
                    options = pa.ipc.IpcReadOptions(included_fields=fields)
                    reader = pa.ipc.open_file(mapped, options=options)
                    first = 0
                    for number in range(reader.num_record_batches):
                        if first >= rows.stop:
                            break
                        batch = reader.get_batch(number)  # maps it: bytes are read when looked at
                        own = _overlap(rows, first, len(batch))
                        if len(own):
                            yield path, batch.slice(own.start, len(own))
                        first += len(batch)
                except (pa.ArrowException, ValueError, KeyError) as error:
                    raise InputError(f"{path} is not a file of targets: {error}") from error
            if first < rows.stop:
                raise InputError(f"{path} has fewer rows than {MANIFEST} says: save again")


def read_by(rank: int, world_size: int, folder: Path) -> list[Path]:
    """The files that this rank reads when so many load the folder."""
    files, _ = read_manifest(folder)
    return [path for path, _ in Part(files, shares(files, world_size)[rank]).stretches]


def check_complete(folder: Path, found: NDArray[np.bool_], rows: int) -> None:
    """Every sample must be there exactly once. found: bool [N], of which there is any row."""
    if not found.all():
        raise InputError(f"{folder} has no row of sample {found.argmin()}: save again")
    if rows > len(found):
        raise InputError(f"{folder} has a row of a sample that is there already: save again")


def _overlap(rows: range, first: int, count: int) -> range:
    """Which of `count` rows from `first` on are asked for, counted from there."""
    return range(max(rows.start - first, 0), min(rows.stop - first, count))


def _facts(num_samples: int, prior: Dirichlet) -> dict[str, int | float]:
    """What two stores must have in common to read each other's rows."""
    return {"num_samples": num_samples, **asdict(prior)}


def _column(values: NDArray[Any]) -> Any:
    """The values as they lie in memory. pa.array does the same, but first imports pandas: 1 s."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _smallest(
    labels: NDArray[np.integer[Any]], num_samples: int, num_classes: int
) -> NDArray[np.integer[Any]]:
    """The labels, a class each, in the smallest unsigned type that has room for all classes."""
    if labels.shape != (num_samples,) or labels.dtype.kind not in "iu":
        raise InputError(
            f"labels is {labels.dtype} of shape {list(labels.shape)}: give integers [{num_samples}]"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise InputError(
            f"the label of sample {wrong[0]} is {labels[wrong[0]]}: give 0 to {num_classes - 1}"
        )
    return labels.astype(np.min_scalar_type(num_classes - 1))


def _schema(num_samples: int, prior: Dirichlet, labels: NDArray[np.integer[Any]] | None) -> Any:
    """Columns and, for readers without this package, what the numbers in them mean."""
    meaning = {
        "format": f"dps_dist targets, version {VERSION}",
        **{field: json.dumps(value) for field, value in _facts(num_samples, prior).items()},
        "index": "number of the sample in its data set",
        "visits": "t, how often the sample was updated; stays at 65535",
        "evidence": f"discounted mean m of the predictions, coded per value v: {FORMULA}",
        "target": "y = (gamma**t * alpha0 + B * m) / (gamma**t * A0 + B), B = (1 - gamma**t) / "
        "(1 - gamma) or t if gamma is 1, alpha0 = c at the label and epsilon elsewhere, "
        "A0 = c + (num_classes - 1) * epsilon",
    }
    columns = [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("visits", pa.uint16(), nullable=False),
        pa.field("evidence", pa.list_(pa.float16(), prior.num_classes), nullable=False),
    ]
    if labels is not None:
        meaning["label"] = "number of the class that the sample was trained with"
        columns.append(pa.field("label", pa.from_numpy_dtype(labels.dtype), nullable=False))
    return pa.schema(columns, metadata=meaning)
