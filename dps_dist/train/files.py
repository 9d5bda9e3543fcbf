"""The files of a run's folder by name, and metrics.jsonl as everybody reads it: the report, too,
which does without torch.
"""

import json
from typing import TYPE_CHECKING, Any

from dps_dist.errors import InputError

if TYPE_CHECKING:  # it imports torch
    from dps_dist.train.storage import Storage

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"

Row = dict[str, Any]


def read_metrics(storage: "Storage") -> list[Row]:
    """The rows that a run has written so far."""
    if not storage.exists(METRICS):
        return []
    return rows_of(storage.read(METRICS), str(storage / METRICS))


def rows_of(data: bytes, file: str) -> list[Row]:
    """A row an epoch, in order; of one that was run again after a restart, the later."""
    rows = {}
    lines = data.decode(errors="replace").split("\n")
    for k, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            rows[row["epoch"]] = row
        elif line.strip() and k < len(lines) - 1:  # the last one, without its end, is being written
            raise InputError(f"{file} is damaged in line {k + 1}: remove that line")
    return [rows[epoch] for epoch in sorted(rows)]
