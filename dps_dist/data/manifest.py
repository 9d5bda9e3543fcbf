"""The Parquet manifest beside a .beton: labels, source paths, class names, checksum.

`write.py` writes it last, so a beton with a matching manifest is whole. Everyone who opens prepared
data comes through `read`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dps_dist.errors import InputError

FIELDS = ("image", "label", "index")
_REMEDY = "run `dps prepare` again with --force"


@dataclass(frozen=True)
class Manifest:
    """What is known of one prepared split.

    labels: what training sees; clean_labels: the true ones, as far as known. Both [N].
    prepared: how the beton was written (source, root, image options).
    """

    beton: Path
    labels: NDArray[np.int64]
    clean_labels: NDArray[np.int64]
    paths: Sequence[str] = field(repr=False)
    class_names: tuple[str, ...]
    prepared: dict[str, Any]
    checksum: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


def manifest_path(beton: Path) -> Path:
    return beton.with_suffix(".parquet")


def write(manifest: Manifest, target: Path, beton: Path) -> None:
    """Write to `target` the manifest of the finished file `beton`."""
    columns = {
        "index": pa.array(np.arange(len(manifest))),
        "label": pa.array(manifest.labels),
        "clean_label": pa.array(manifest.clean_labels),
        "path": pa.array(map(_as_text, manifest.paths), pa.string()),
    }
    metadata = {
        "class_names": json.dumps([*map(_as_text, manifest.class_names)]),
        "prepared": json.dumps(manifest.prepared),
        "beton_bytes": str(beton.stat().st_size),
        "beton_checksum": manifest.checksum,
        "beton_table": _table_digest(beton, *_header(beton)),
    }
    with target.open("wb") as stream:  # Arrow takes a path with a colon for an address
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), stream)


def _as_text(name: str) -> str:
    """A file's name need not be valid text; what is not is written as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read(folder: Path | str, split: str) -> Manifest:
    """The manifest of `folder/split.beton`; an InputError when the two do not belong together."""
    beton = Path(folder) / f"{split}.beton"
    header, descriptors = _header(beton)
    fields = _names(descriptors)
    missing = [name for name in FIELDS if name not in fields]
    if missing:
        raise InputError(
            f"{beton} has no field {missing[0]!r} (only {', '.join(fields)}): "
            "write it with `dps prepare`, which adds what DPS needs"
        )
    file = manifest_path(beton)
    if not file.is_file():
        raise InputError(f"{file} is missing beside {beton.name}: {_REMEDY}")
    try:
        table = read_table(file)
        metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        manifest = Manifest(
            beton=beton,
            labels=table["label"].to_numpy().astype(np.int64),
            clean_labels=table["clean_label"].to_numpy().astype(np.int64),
            paths=_Paths(table["path"]),
            class_names=tuple(json.loads(metadata["class_names"])),
            prepared=json.loads(metadata["prepared"]),
            checksum=metadata["beton_checksum"],
        )
        recorded_bytes, recorded_table = int(metadata["beton_bytes"]), metadata["beton_table"]
        index = table["index"].to_numpy()
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        raise InputError(f"{file} is not a manifest of dps prepare ({error}): {_REMEDY}") from None
    size = beton.stat().st_size
    if size < recorded_bytes:
        raise InputError(f"{beton} is truncated ({size:,} of {recorded_bytes:,} bytes): {_REMEDY}")
    if size != recorded_bytes or recorded_table != _table_digest(beton, header, descriptors):
        raise InputError(
            f"{file} does not match {beton.name}, it describes another file: {_REMEDY}"
        )
    if not np.array_equal(index, np.arange(header["num_samples"])):
        raise InputError(
            f"{file} does not list the samples of {beton.name} in their order: {_REMEDY}"
        )
    for labels in (manifest.labels, manifest.clean_labels):
        if not -1 <= labels.min() <= labels.max() < manifest.num_classes:  # -1: has none
            raise InputError(
                f"{file} has labels from {labels.min()} to {labels.max()} for "
                f"{manifest.num_classes} classes: {_REMEDY}"
            )
    return manifest


def check_labelled(manifest: Manifest, labels: NDArray[np.int64], given: str) -> None:
    """Refuse a split with samples that have no label. labels: those of it that are needed.
    given: which field or option named it, and as what."""
    without = int((labels < 0).sum())
    if without:
        raise InputError(
            f"{given}: {manifest.beton} has {without:,} of {len(labels):,} samples without a "
            "label; give a split whose samples all have one, and CIFAR-10-P to `dps evaluate --on` "
            "as its .npy files"
        )


def beton_fields(beton: Path) -> list[str]:
    """The field names of a .beton; an InputError when it is not a whole one."""
    return _names(_header(beton)[1])


def read_table(file: Path, columns: list[str] | None = None) -> pa.Table:
    """A Parquet file, whatever its name: Arrow takes a path with a colon for an address."""
    with file.open("rb") as stream:
        return pq.read_table(stream, columns=columns)


def checksum(file: Path, progress: Callable[[int], None] = lambda _: None) -> str:
    """blake2b over the whole file (half a GB/s or more)."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _header(beton: Path) -> tuple[Any, Any]:
    from dps_dist.data.ffcv import CURRENT_VERSION, FieldDescType, HeaderType

    if not beton.is_file():
        raise InputError(
            f"{beton} does not exist: run `dps prepare SOURCE {beton.parent}` first; "
            "`dps sources` lists what can be read"
        )
    size = beton.stat().st_size
    if size < HeaderType.itemsize:
        raise InputError(f"{beton} is truncated ({size:,} bytes): {_REMEDY}")
    header = np.fromfile(beton, HeaderType, 1)[0]
    if header["version"] != CURRENT_VERSION:
        raise InputError(f"{beton} is not an FFCV file of version {CURRENT_VERSION}: {_REMEDY}")
    if not 0 < header["alloc_table_ptr"] < size:
        raise InputError(f"{beton} is truncated ({size:,} bytes): {_REMEDY}")
    return header, np.fromfile(
        beton, FieldDescType, header["num_fields"], offset=HeaderType.itemsize
    )


def _names(descriptors: Any) -> list[str]:
    return [bytes(name).rstrip(b"\0").decode(errors="replace") for name in descriptors["name"]]


def _table_digest(beton: Path, header: Any, descriptors: Any) -> str:
    """Digest of the tables that say where each image lies, how long it is and what its label is.

    It differs for any other data set and is read in a moment; the checksum covers the pixels.
    """
    from dps_dist.data.ffcv import HeaderType, get_handlers, get_metadata_type

    try:
        row = get_metadata_type(get_handlers(descriptors)).itemsize
    except (KeyError, AttributeError):
        raise InputError(f"{beton} has fields of no type that FFCV knows: {_REMEDY}") from None
    rows = min(row * int(header["num_samples"]), beton.stat().st_size)  # a damaged count is huge
    with beton.open("rb") as stream:
        stream.seek(HeaderType.itemsize + descriptors.nbytes)
        digest = hashlib.blake2b(stream.read(rows), digest_size=16)
        stream.seek(int(header["alloc_table_ptr"]))
        digest.update(stream.read())
    return digest.hexdigest()


class _Paths(Sequence[str]):
    """Arrow's strings, made into Python's one at a time: ImageNet has 1.3 million."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, i: Any) -> Any:
        return self._column[i].as_py()
