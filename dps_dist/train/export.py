"""A run's model and targets for other programs: what `dps export` writes."""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from dps_dist.errors import InputError, naming
from dps_dist.train.card import card
from dps_dist.train.evidence import evidence_of
from dps_dist.train.files import CONFIG
from dps_dist.train.storage import Storage
from dps_dist.train.trained import Trained, load

Kind = Literal["none", "probabilities", "top"]


def export(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: Literal["newest", "best"] = "newest",
    onnx: bool = False,
    targets: Kind = "none",
    top_k: int = 10,
) -> Path:
    """The run's (averaged) model in a new folder `out`, which is there whole or not at all.

    model.safetensors  weights by the names of `models`, which are torchvision's where it has them
    model.onnx         with `onnx`: normalised images [batch, 3, H, W] → logits [batch, K]
    targets.parquet    with `targets`: the target of each sample that was trained on
    config.yaml, README.md: the run's configuration, and a card

    targets: "probabilities", all K of them; "top", the `top_k` largest with their classes. They are
    always the newest that the run has.
    """
    from safetensors.torch import save  # not its save_file: a full disk is no OSError there

    out = Path(out).absolute()
    _check_asked(out, onnx, targets, top_k)
    trained, storage = load(run, checkpoint=checkpoint), Storage(run)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with naming(out, made_as=partial):
            partial.mkdir(parents=True)
            state = {name: value.contiguous() for name, value in trained.model.state_dict().items()}
            about = {"format": "pt", "model": trained.config.model.name, "run": storage.name}
            (partial / "model.safetensors").write_bytes(save(state, about))
            if onnx:
                _write_onnx(trained, partial / "model.onnx")
            if targets != "none":
                write_targets(run, partial / "targets.parquet", top_k if targets == "top" else None)
            (partial / CONFIG).write_bytes(storage.read(CONFIG))
            (partial / "README.md").write_text(card(trained, storage), encoding="utf-8")
            partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _check_asked(out: Path, onnx: bool, targets: str, top_k: int) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} is there and not empty: give a new folder")
    if targets not in get_args(Kind):
        raise InputError(f"targets is {targets!r}: give {', '.join(get_args(Kind))}")
    if targets == "top" and top_k < 1:
        raise InputError(f"top_k is {top_k}: give 1 or more")
    missing = [name for name in ("onnx", "onnxscript") if onnx and find_spec(name) is None]
    if missing:
        raise InputError(
            f"ONNX needs the package {missing[0]}, which is not installed: "
            "pip install 'dps_dist[onnx]'"
        )


def _write_onnx(trained: Trained, file: Path) -> None:
    side = trained.config.data.eval_resolution or trained.config.data.resolution
    model = trained.model.to(memory_format=torch.contiguous_format)
    torch.onnx.export(
        model,
        (torch.zeros(2, 3, side, side),),
        file,
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        dynamo=True,
        verbose=False,
    )


def write_targets(run: str | Path, file: Path, top_k: int | None = None) -> None:
    """Parquet of a row a visited sample: index, path, label, visits and its target y.

    `probabilities` has all K of y or, with top_k, the largest in falling order beside `classes`.
    y is the posterior; of a method that has no prior (TE, PS-KD, ELR) the evidence.
    """
    with evidence_of(run) as kept:
        paths, classes = kept.paths(), kept.data.num_classes
        columns = {"index": pa.int64(), "path": pa.string(), "label": pa.int32()}
        columns |= {"visits": pa.int32(), **({"classes": pa.list_(pa.int32())} if top_k else {})}
        columns["probabilities"] = pa.list_(pa.float32())
        names = json.dumps(kept.data.class_names)
        schema = pa.schema(columns, metadata={"run": kept.run, "class_names": names})
        with (
            file.open("wb") as opened,  # pyarrow takes names for URLs
            pq.ParquetWriter(opened, schema, compression="zstd") as writer,
        ):
            for samples, y, visits in kept:
                labels = kept.labels[samples]
                if kept.has_targets:
                    t = torch.from_numpy(visits.astype(np.int64))
                    y = kept.prior.posterior(y, t, torch.from_numpy(labels))
                cells = [pa.array(samples), paths.take(pa.array(samples)).combine_chunks()]
                cells += [pa.array(labels, pa.int32()), pa.array(visits, pa.int32())]
                if top_k:
                    y, top = y.topk(min(top_k, classes))
                    cells.append(_lists(top.int().numpy()))
                writer.write_table(pa.table([*cells, _lists(y.numpy())], schema=schema))


def _lists(values: NDArray[Any]) -> Any:
    """[n, k] as Arrow's n lists."""
    rows, length = values.shape
    offsets = np.arange(0, (rows + 1) * length, length, dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))
