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


def read_manifest(
    folder: Path, num_samples: int, prior: Dirichlet
) -> tuple[list[tuple[Path, Saved]], int]:
    """The folder's files, if they are all there and were saved by a store like this one.

    And a number that tells this save from every other.
    """
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
    for field, own in _facts(num_samples, prior).items():
        if content[field] != own:
            raise InputError(
                f"{path} was saved with {field} {content[field]} and this store has {own}: "
                f"make the store with {field} {content[field]}, or load another folder"
            )
    files = [(folder / entry["name"], Saved(**entry)) for entry in content["files"]]
    for file, saved in files:
        if not file.is_file():
            raise InputError(f"{file} is missing: the folder must hold all {len(files)} files")
        if file.stat().st_size != saved.size:
            raise InputError(
                f"{file} has {file.stat().st_size} bytes instead of {saved.size}: "
                "use another copy of the folder"
            )
    return files, content["crc32"]


def verify(files: Iterable[tuple[Path, Saved]]) -> None:
    """Compare each file's bytes with their checksum."""
    for path, saved in files:
        with path.open("rb") as file:
            _, crc32 = sum_of(file)
        if crc32 != saved.crc32:
            raise InputError(f"{path} is damaged (its CRC-32 differs): use another copy of it")


class Part:
    """The samples i with i % world_size == rank out of a folder's memory-mapped files."""

    def __init__(self, files: Iterable[tuple[Path, Saved]], rank: int, world_size: int) -> None:
        self.files, self.rank, self.world_size = list(files), rank, world_size

    def check_complete(self, num_samples: int) -> None:
        """Every sample of this part must be there exactly once."""
        found = np.zeros(len(range(self.rank, num_samples, self.world_size)), bool)
        for path, batch in self._batches(["index"]):
            samples = self._mine(batch)[0]
            if len(samples) and not 0 <= samples.min() <= samples.max() < num_samples:
                raise InputError(f"{path} holds samples beyond {num_samples - 1}: save again")
            slots = samples // self.world_size
            if found[slots].any() or len(np.unique(slots)) < len(slots):
                raise InputError(f"{path} holds a sample that is there already: save again")
            found[slots] = True
        if not found.all():
            sample = int(np.flatnonzero(~found)[0]) * self.world_size + self.rank
            raise InputError(f"{self.files[0][0].parent} has no row of sample {sample}: save again")

    def __iter__(self) -> Iterator[Chunk]:
        for _, batch in self._batches(None):
            samples, mine = self._mine(batch)
            if len(samples):
                evidence = batch.column("evidence")
                coded = evidence.flatten().to_numpy().reshape(len(batch), -1)
                yield samples, coded[mine], batch.column("visits").to_numpy()[mine]

    def _mine(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        samples = batch.column("index").to_numpy()
        mine = samples % self.world_size == self.rank
        return samples[mine], mine

    def _batches(self, columns: list[str] | None) -> Iterator[tuple[Path, Any]]:
        for path, _ in self.files:
            with pa.memory_map(str(path)) as mapped:
                try:
                    names = pa.ipc.open_file(mapped).schema.names
                    fields = [names.index(name) for name in columns or names]
                    options = pa.ipc.IpcReadOptions(included_fields=fields)
                    reader = pa.ipc.open_file(mapped, options=options)
                    for number in range(reader.num_record_batches):
                        yield path, reader.get_batch(number)
                except (pa.ArrowException, ValueError, KeyError) as error:
                    raise InputError(f"{path} is not a file of targets: {error}") from error


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
