"""Which labels are wrong? A run's evidence → its training samples, the most doubtful label first.

The evidence is the discounted mean of the model's own predictions for a sample, with the prior, and
so the label as such, taken out: the target itself may never leave the label (ImageNet: γ=.99).
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import split
from dps_dist.data.loader import noisy_labels
from dps_dist.data.manifest import manifest_path
from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.train.evidence import Kept, evidence_of
from dps_dist.train.storage import Storage
from dps_dist.train.trained import read_config

AUDIT, CORRECTED = "audit.parquet", "train.corrected.parquet"
SCORE = "1 - evidence for the label"
THRESHOLD = 0.0  # of the margin: another class has more evidence than the label
THRESHOLDS = (THRESHOLD, 0.25, 0.5, 0.75, 0.9)


def score(evidence: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """1 − e_label of evidence [n, K] and labels [n]: how much of it leaves the label.

    cleanlab's self-confidence is the same of predictions. The margin to the next class ranks worse:
    where evidence is spread over many classes it is small, however little the label has.
    """
    return 1 - evidence.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def rank(run: str | Path) -> pa.Table:
    """All visited training samples, by falling `score`.

    `suggested` is the class with the most evidence, if it has more than the label; else the label.
    index, path, label, label_name, suggested, suggested_name, label_evidence, suggested_evidence,
    entropy (−Σ e log e, nats), visits, score. Samples that were held out are not among them.
    """
    with evidence_of(run) as kept:
        return _ranked(kept)


def _ranked(kept: Kept) -> pa.Table:
    chunks = [_scored(kept, *chunk) for chunk in kept]
    if not chunks:
        raise InputError(f"{kept.run} has not visited a sample yet: try again after an epoch")
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = np.lexsort((columns["index"], -columns["score"]))
    data = kept.config.data
    held_out = split(len(kept.labels), data.hold_out, data.hold_out_seed).held_out
    if held_out is not None:
        order = order[~np.isin(columns["index"][order], held_out)]
    columns = {name: values[order] for name, values in columns.items()}
    names = pa.array(kept.data.class_names)
    named = {
        "index": columns["index"],
        "path": kept.paths().take(pa.array(columns["index"])),
        "label": columns["label"],
        "label_name": names.take(pa.array(columns["label"])),
        "suggested": columns["suggested"],
        "suggested_name": names.take(pa.array(columns["suggested"])),
    }
    rest = {name: values for name, values in columns.items() if name not in named}
    return pa.table(named | rest).replace_schema_metadata({"run": kept.run, "score": SCORE})


def _scored(
    kept: Kept, samples: NDArray[np.int64], evidence: torch.Tensor, visits: NDArray[np.uint16]
) -> dict[str, NDArray[Any]]:
    """The columns that are numbers, for evidence [n, K]."""
    labels = torch.from_numpy(kept.labels[samples])
    own = evidence.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    most, other = evidence.max(-1)
    entropy = torch.special.entr(evidence.double()).sum(-1)
    leaves = most > own
    return {
        "index": samples,
        "label": labels.int().numpy(),
        "suggested": torch.where(leaves, other, labels).int().numpy(),
        "label_evidence": own.numpy(),
        "suggested_evidence": torch.where(leaves, most, own).numpy(),
        "entropy": entropy.float().numpy(),
        "visits": visits.astype(np.int32),
        "score": score(evidence, labels).numpy(),
    }


def beside(run: str | Path) -> Path:
    """Where the ranking goes if nobody says."""
    folder = Storage(run).local
    if folder is None:
        raise InputError(f"{Storage(run)} is no folder on this machine: give --out")
    return folder / AUDIT


def write(table: pa.Table, out: Path) -> Path:
    """A table as Parquet: whoever looks sees it whole, or what was there before."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return write_whole(out, buffer.getvalue())


def suggestions(table: pa.Table, threshold: float = THRESHOLD) -> pa.Table:
    """The rows where a class has more evidence than the label, by more than the threshold."""
    if not 0 <= threshold <= 1:
        raise InputError(f"threshold is {threshold}: give a number from 0, all of them, to 1, none")
    margin = table["suggested_evidence"].to_numpy() - table["label_evidence"].to_numpy()
    return table.filter(margin > threshold)


def agreement(table: pa.Table, thresholds: Sequence[float] = THRESHOLDS) -> dict[str, Any]:
    """How many labels the evidence agrees with, and by which margin how many it does not.

    samples; agree: the share whose label has the most evidence; suggested: threshold → count.
    """
    counts = {threshold: suggestions(table, threshold).num_rows for threshold in thresholds}
    agree = table.num_rows - suggestions(table).num_rows
    return {"samples": table.num_rows, "agree": agree / table.num_rows, "suggested": counts}


def quality(table: pa.Table, true_labels: NDArray[np.integer[Any]]) -> dict[str, float]:
    """How well the score finds wrong labels, where the true ones [N] are known: injected noise.

    auroc, average_precision: of the score. precision, recall: of the suggestions. righted: the
    share of the wrong labels for which the true class is suggested.
    """
    true = np.asarray(true_labels)[table["index"].to_numpy()]
    given, suggested = table["label"].to_numpy(), table["suggested"].to_numpy()
    wrong, scores = given != true, table["score"].to_numpy()
    if wrong.all() or not wrong.any():
        raise InputError(
            f"{wrong.sum()} of {len(wrong)} labels are wrong: give a run on some wrong and some "
            "right ones, such as digits-sym40"
        )
    found, right = suggested != given, (suggested == true) & wrong
    auroc, average_precision = ranking_quality(wrong, scores)
    return {
        "wrong": int(wrong.sum()),
        "auroc": auroc,
        "average_precision": average_precision,
        "precision": float((found & wrong).sum() / max(1, found.sum())),
        "recall": float((found & wrong).sum() / wrong.sum()),
        "righted": float(right.sum() / wrong.sum()),
    }


def ranking_quality(
    wrong: NDArray[np.bool_], scores: NDArray[np.floating[Any]]
) -> tuple[float, float]:
    """AUROC and average precision of scores [n] that are to find the wrong labels [n]."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    return float(roc_auc_score(wrong, scores)), float(average_precision_score(wrong, scores))


def corrected(run: str | Path) -> Path:
    """Where the corrected manifest goes if nobody says; refused if one is there."""
    out = Path(read_config(Storage(run)).data.path) / CORRECTED
    _check_absent(out)
    return out


def _check_absent(out: Path) -> None:
    if out.exists():
        raise InputError(f"{out} is there already: remove it, or move it to another place")


def fix(
    run: str | Path, table: pa.Table, out: str | Path | None = None, threshold: float = THRESHOLD
) -> Path:
    """A manifest with the labels that a ranking of the run suggests, by default `corrected`.

    Its `label` is what the run was given, injected noise included, but for the samples whose
    suggestion has more evidence than the label by more than the threshold. Nothing that is there is
    overwritten.
    """
    out = corrected(run) if out is None else Path(out)
    _check_absent(out)
    data, better = read_config(Storage(run)).data, suggestions(table, threshold)
    old = manifests.read(data.path, "train")
    labels = noisy_labels(data, old).copy()
    labels[better["index"].to_numpy()] = better["suggested"].to_numpy()
    columns = ["label"]
    if data.noise.kind == "none" and np.array_equal(old.labels, old.clean_labels):
        # No label is known to be wrong; if these stayed, the corrected ones would seem to be
        columns.append("clean_label")
    manifest = manifests.read_table(manifest_path(old.beton))
    for name in columns:
        place = manifest.schema.get_field_index(name)
        field = manifest.schema.field(place)
        manifest = manifest.set_column(place, field, pa.array(labels, field.type))
    about = {
        "corrected_by": str(Storage(run)),
        "corrected_labels": str(better.num_rows),
        "corrected_above": str(threshold),
    }
    return write(manifest.replace_schema_metadata({**manifest.schema.metadata, **about}), out)
