"""A sweep's folder → a row for each trial, and for each cell the mean over its seeds."""

import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dps_dist.config.sweep import BETTER, RUNS, SEED, SWEEP, TRIALS
from dps_dist.train.files import read_metrics
from dps_dist.train.storage import Storage

RESULTS = "results.parquet"
METRICS = tuple(BETTER)

TYPES = {  # also where no trial has one yet
    **dict.fromkeys(("reason", "status", "trial", "run"), pa.string()),
    **dict.fromkeys((*METRICS, "seconds"), pa.float64()),
    "epoch": pa.int64(),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    sweep: dict[str, Any]  # sweep.yaml
    rows: list[Row]  # one a trial

    @property
    def fields(self) -> list[str]:
        """What was tried, the seed apart."""
        return [field for field in self.sweep["space"] if field != SEED]

    def count(self, *statuses: str) -> int:
        return sum(row["status"] in statuses for row in self.rows)


@dataclass(frozen=True)
class Cell:
    """One choice of the fields; figures are means over its finished trials."""

    values: tuple[Any, ...]
    seeds: int
    mean: dict[str, float]
    deviation: dict[str, float]  # NaN of a single one


def read(folder: Storage) -> Results:
    """The figures are those of the last epoch that was measured, on the held-out samples."""
    sweep = yaml.safe_load(folder.read(SWEEP))
    trials = json.loads(folder.read(TRIALS)) if folder.exists(TRIALS) else {}
    rows = [_row(folder, name, trial) for name, trial in trials.items()]
    return Results(sweep, rows)


def _row(folder: Storage, name: str, trial: dict[str, Any]) -> Row:
    epochs = read_metrics(folder / RUNS / name)
    measured = [row for row in epochs if "accuracy" in row]
    last = measured[-1] if measured else {}
    return {
        "trial": name,
        **trial["point"],
        "status": trial["status"],
        "reason": trial["reason"] or None,
        "epoch": last.get("epoch"),
        **{key: last.get(key) for key in METRICS},
        "seconds": sum(row.get("seconds", 0) for row in epochs) if epochs else None,
        "run": f"{RUNS}/{name}",
    }


def write(folder: Storage, results: Results) -> None:
    """results.parquet, for pandas, DuckDB or Polars."""
    names = ["trial", *results.fields, SEED, "status", "reason", "epoch", *METRICS, "seconds"]
    columns = {name: [row.get(name) for row in results.rows] for name in [*names, "run"]}
    as_text = {name: values for name, values in columns.items() if _mixed(values)}
    columns |= {name: [json.dumps(value) for value in values] for name, values in as_text.items()}
    arrays = {name: pa.array(values, TYPES.get(name)) for name, values in columns.items()}
    stream = io.BytesIO()
    pq.write_table(pa.table(arrays), stream)
    folder.write(RESULTS, stream.getvalue())


def _mixed(values: Iterable[Any]) -> bool:
    """Values of several kinds, or lists, which a column cannot hold as they are."""
    kinds = {type(value) for value in values if value is not None}
    return not (len(kinds) <= 1 or kinds <= {int, float}) or bool(kinds & {list, dict})


def cells(results: Results) -> list[Cell]:
    """Of the trials that ran to the end; in the order in which they were tried."""
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        if row["status"] == "finished":
            key = json.dumps([row.get(field) for field in results.fields])
            groups.setdefault(key, []).append(row)
    return [_cell(json.loads(key), rows) for key, rows in groups.items()]


def _cell(values: list[Any], rows: Sequence[Row]) -> Cell:
    figures = {key: [_number(row[key]) for row in rows] for key in METRICS}
    return Cell(
        tuple(map(_hashable, values)),
        len(rows),
        {key: mean(numbers) for key, numbers in figures.items()},
        {key: _deviation(numbers) for key, numbers in figures.items()},
    )


def _deviation(numbers: Sequence[float]) -> float:
    return stdev(numbers) if len(numbers) > 1 and all(map(math.isfinite, numbers)) else math.nan


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _hashable(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def best(found: Sequence[Cell], key: str) -> Cell | None:
    """The cell with the highest accuracy, or the lowest ECE or NLL."""
    measured = [cell for cell in found if math.isfinite(cell.mean[key])]
    sign = -1 if BETTER[key] == "max" else 1
    return min(measured, key=lambda cell: sign * cell.mean[key], default=None)


def pareto(found: Sequence[Cell]) -> list[Cell]:
    """Cells that no other beats in accuracy and ECE together, by falling accuracy."""
    measured = [cell for cell in found if all(map(math.isfinite, cell.mean.values()))]
    front: list[Cell] = []
    for cell in sorted(measured, key=lambda c: (-c.mean["accuracy"], c.mean["ece"])):
        if not front or cell.mean["ece"] < front[-1].mean["ece"]:
            front.append(cell)
    return front
