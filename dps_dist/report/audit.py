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

from dps_dist.data.hold_out import split
from dps_dist.data.manifest import manifest_path
from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.train.evidence import Kept, evidence_of
from dps_dist.train.storage import Storage

AUDIT, CORRECTED = "audit.parquet", "train.corrected.parquet"
SCORE = "max of the evidence for other classes - evidence for the label"
THRESHOLD = 0.0  # above it another class has more evidence than the label
THRESHOLDS = (THRESHOLD, 0.25, 0.5, 0.75, 0.9)


def rank(run: str | Path) -> pa.Table:
    """All visited training samples, by falling score.

        score = max_{j≠label} e_j − e_label        in [−1, 1]

    Above 0 another class has more evidence than the label, and is `suggested`; else the label is.
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
    labels = torch.from_numpy(kept.labels[samples]).unsqueeze(-1)
    own = evidence.gather(-1, labels)
    most, other = evidence.scatter(-1, labels, -1.0).max(-1)
    entropy = torch.special.entr(evidence.double()).sum(-1)
    own, labels = own.squeeze(-1), labels.squeeze(-1)
    leaves = most > own
    return {
        "index": samples,
        "label": labels.int().numpy(),
        "suggested": torch.where(leaves, other, labels).int().numpy(),
        "label_evidence": own.numpy(),
        "suggested_evidence": torch.where(leaves, most, own).numpy(),
        "entropy": entropy.float().numpy(),
        "visits": visits.astype(np.int32),
        "score": (most - own).numpy(),
    }


def audit(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the ranking as Parquet, by default to RUN/audit.parquet."""
    return write(rank(run), beside(run) if out is None else Path(out))


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
    """The rows with another class to suggest: score above the threshold, which is 0 or more."""
    if not 0 <= threshold < 1:
        raise InputError(f"threshold is {threshold}: give a number from 0, all of them, to below 1")
    return table.filter(table["score"].to_numpy() > threshold)


def agreement(table: pa.Table, thresholds: Sequence[float] = THRESHOLDS) -> dict[str, Any]:
    """How many labels the evidence agrees with, and above which score how many it does not.

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
    from sklearn.metrics import average_precision_score, roc_auc_score

    true = np.asarray(true_labels)[table["index"].to_numpy()]
    wrong, score = table["label"].to_numpy() != true, table["score"].to_numpy()
    if wrong.all() or not wrong.any():
        raise InputError(
            f"{wrong.sum()} of {len(wrong)} labels are wrong: give a run on some wrong and some "
            "right ones, such as digits-sym40"
        )
    found = score > THRESHOLD
    right = (table["suggested"].to_numpy() == true) & wrong
    return {
        "wrong": int(wrong.sum()),
        "auroc": float(roc_auc_score(wrong, score)),
        "average_precision": float(average_precision_score(wrong, score)),
        "precision": float((found & wrong).sum() / max(1, found.sum())),
        "recall": float((found & wrong).sum() / wrong.sum()),
        "righted": float(right.sum() / wrong.sum()),
    }


def fix(run: str | Path, out: str | Path | None = None, threshold: float = THRESHOLD) -> Path:
    """A manifest with the suggested labels, by default train.corrected.parquet beside the old one.

    Its `label` is what the run was given, injected noise included, but for the samples whose score
    is above the threshold; `clean_label` stays. Nothing that is there is overwritten.
    """
    with evidence_of(run) as kept:
        table = suggestions(_ranked(kept), threshold)
        old, labels = manifest_path(kept.data.beton), kept.labels.copy()
    out = Path(out) if out is not None else old.with_name(CORRECTED)
    if out.exists():
        raise InputError(f"{out} is there already: remove it, or give another --out")
    labels[table["index"].to_numpy()] = table["suggested"].to_numpy()
    manifest = pq.read_table(old)
    column = manifest.schema.get_field_index("label")
    manifest = manifest.set_column(
        column, manifest.schema.field(column), pa.array(labels, manifest.schema.field(column).type)
    )
    corrected = {
        "corrected_by": kept.run,
        "corrected_labels": str(table.num_rows),
        "corrected_above": str(threshold),
    }
    return write(manifest.replace_schema_metadata({**manifest.schema.metadata, **corrected}), out)
