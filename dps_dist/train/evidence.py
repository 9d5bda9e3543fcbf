"""The evidence that a run has gathered on its training samples, for the audit and the export."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist import config as configs
from dps_dist import methods
from dps_dist.config import Config
from dps_dist.data import manifest as manifests
from dps_dist.data.loader import noisy_labels
from dps_dist.data.manifest import Manifest, manifest_path, read_table
from dps_dist.errors import InputError
from dps_dist.targets import Dirichlet, arrow
from dps_dist.targets.checksums import unsealed
from dps_dist.targets.codec import decode
from dps_dist.train.checkpoint import open_checkpoint
from dps_dist.train.files import SUMMARY
from dps_dist.train.manifest import TARGETS, newest_whole
from dps_dist.train.storage import Storage
from dps_dist.train.trained import check_data, labels_sum, names_sum, read_config, unfinished


@dataclass(frozen=True)
class Kept:
    """The evidence of a run, and the data that it is about.

    labels: [N], what training saw, noise included.
    prior: of the targets; of a method without targets of its own only γ means something.
    """

    run: str
    config: Config
    data: Manifest
    labels: NDArray[np.int64]
    prior: Dirichlet
    has_targets: bool
    rows: arrow.Part

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], Tensor, NDArray[np.uint16]]]:
        """Visited samples [n], evidence float32 [n, K], visits [n], some megabytes at a time."""
        for samples, coded, visits in self.rows:
            seen = visits > 0
            if seen.any():
                yield samples[seen], decode(torch.from_numpy(coded[seen])), visits[seen]

    def paths(self) -> Any:
        """Arrow's column of the samples' paths, [N]."""
        return read_table(manifest_path(self.data.beton), ["path"])["path"]


@contextmanager
def evidence_of(run: str | Path) -> Iterator[Kept]:
    """What a finished run has gathered, or another one up to its newest checkpoint."""
    storage = Storage(run)
    config = read_config(storage)
    method = methods.build(config.method).evidence
    if method is None or method.classes is not None:
        raise InputError(
            f"method.name of {storage} is {config.method.name}, which keeps no evidence of "
            f"classes: give a run of {', '.join(_keepers())}"
        )
    with tempfile.TemporaryDirectory(prefix="dps-") as scratch:
        folder, then = _saved(storage, Path(scratch))
        data = manifests.read(config.data.path, "train")
        labels = noisy_labels(config.data, data)
        sizes = {"samples": len(data), "classes": data.num_classes}
        check_data(storage, data, then, sizes)
        prior = Dirichlet(data.num_classes, method.gamma, method.c or 1.0, method.epsilon)
        files, _ = arrow.files_of(folder, len(data), prior)
        arrow.verify(files)
        rows = arrow.Part(files, *arrow.shares(files, world_size=1))
        samples = rows.samples(len(data))
        arrow.check_complete(folder, np.bincount(samples, minlength=len(data)) > 0, len(samples))
        if "sum of labels" not in then:
            then["sum of labels"] = labels_sum(_given(rows))
        own = {"sum of labels": labels_sum(labels), "sum of class names": names_sum(data)}
        check_data(storage, data, then, own)
        yield Kept(str(storage), config, data, labels, prior, method.c is not None, rows)


def _keepers() -> list[str]:
    """The methods that keep evidence of classes."""
    rows = [row() for row in configs.METHODS if issubclass(row, configs.Stored)]  # type: ignore[call-arg]
    kept = {row.name: methods.build(row).evidence for row in rows}
    return [name for name, own in kept.items() if own is not None and own.classes is None]


def _saved(storage: Storage, scratch: Path) -> tuple[Path, dict[str, int]]:
    """The folder of the newest targets, and what is known of the data that they are of."""
    if storage.exists(SUMMARY) and storage.exists(f"{TARGETS}/{arrow.MANIFEST}"):
        folder = storage.fetch(TARGETS, scratch / TARGETS)
        file = folder / arrow.MANIFEST
        try:
            content = unsealed(file.read_bytes())
        except ValueError:
            raise InputError(f"{file} is damaged: use another copy of the folder") from None
        return folder, {"samples": content["num_samples"], "classes": content["num_classes"]}
    found = newest_whole(storage, lambda _: None)
    if found is None or found.moment.epoch < 1:
        raise unfinished(storage)
    opened = open_checkpoint(storage, found.name, scratch)
    return opened.folder / TARGETS, opened.state["data"]


def _given(rows: arrow.Part) -> NDArray[np.int64]:
    """The labels in the files of a finished run, which are those that it was given."""
    columns: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for path, _ in rows.stretches:
        with pa.memory_map(str(path)) as mapped:
            names = pa.ipc.open_file(mapped).schema.names
            fields = [names.index("index"), names.index("label")]
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            table = pa.ipc.open_file(mapped, options=options).read_all()
            columns.append((table["index"].to_numpy(), table["label"].to_numpy()))
    index, labels = (np.concatenate(column) for column in zip(*columns, strict=True))
    return labels[index.argsort()].astype(np.int64)
