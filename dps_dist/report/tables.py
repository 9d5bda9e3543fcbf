"""A run folder → Run; runs → the table that compares them, for the terminal and for the page."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from rich.table import Table
from rich.text import Text

from dps_dist.errors import InputError

Metrics = dict[str, Any]
ABSENT = "–"
NAME_WIDTH = 16  # of a run's name that is broken, where the terminal is narrow
LEAST_FIRST = ("images/s", "best accuracy", "method", "NLL")  # what is left out there


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    name: str
    config: dict[str, Any]
    epochs: list[Metrics]  # one a finished epoch, in order
    summary: Metrics | None  # none while it runs

    def field(self, path: str) -> Any:
        """A field of its configuration such as `method.name`, or none."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def last(self, key: str) -> float | None:
        """The run's figure: the summary's, or that of the last epoch that has one."""
        rows = [*self.epochs, self.summary or {}]
        return next(
            (value for row in reversed(rows) if (value := number(row, key)) is not None), None
        )

    def best(self) -> tuple[float, int] | None:
        """The best accuracy, and its epoch."""
        summary = self.summary or {}
        if finite(number(summary, "best_accuracy")) and finite(number(summary, "best_epoch")):
            return summary["best_accuracy"], int(summary["best_epoch"])
        rows = [row for row in self.epochs if finite(number(row, "accuracy"))]
        if not rows:
            return None
        first = max(rows, key=lambda row: row["accuracy"])
        return first["accuracy"], first["epoch"]


class Cell(NamedTuple):
    text: str
    best: bool = False


def read(folder: Path) -> Run:
    """The run in `folder`, finished or not."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give a run's, such as runs/digits-dps")
    file = folder / "config.yaml"
    if not file.is_file():
        raise InputError(
            f"{folder} is no run, it has no config.yaml: give one that `dps train` wrote"
        )
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{file} is damaged, it holds no YAML mapping: leave this run out")
    epochs = _read_epochs(folder / "metrics.jsonl")
    if not epochs:
        raise InputError(
            f"{folder} has not finished an epoch: try again when it has, or leave it out"
        )
    summary = _read_summary(folder / "summary.json")
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    return Run(folder, str(name or folder.absolute().name), config, epochs, summary)


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names, with their folders where names are alike."""
    times = Counter(run.name for run in runs)
    return [run.name if times[run.name] == 1 else f"{run.name} ({run.folder})" for run in runs]


def progress(run: Run) -> str | None:
    """`12 of 40 epochs` of a run that has not finished."""
    if run.summary is not None:
        return None
    done, epochs = run.epochs[-1]["epoch"], run.field("train.epochs")
    return f"{done} of {epochs} epochs" if isinstance(epochs, int) else f"{done} epochs"


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Titles and a row a run; where there are several, the best of each column is marked."""
    best = [run.best() for run in runs]
    columns = [
        ("accuracy", _cells([run.last("accuracy") for run in runs], percent, max)),
        ("best accuracy", _cells([b and b[0] for b in best], percent, max)),
        ("ECE", _cells([run.last("ece") for run in runs], percent, min)),
        ("NLL", _cells([run.last("nll") for run in runs], "{:.3f}".format, min)),
        ("wrong labels righted", _cells([run.last("recovered") for run in runs], percent, max)),
        ("images/s", _cells([run.last("images_per_s") for run in runs], "{:,.0f}".format, max)),
    ]
    shown = dict(columns)
    if all(cell.text == ABSENT for cell in shown["wrong labels righted"]):
        del shown["wrong labels righted"]
    shown["best accuracy"] = [
        Cell(f"{cell.text} (epoch {b[1]})" if b else cell.text, cell.best)
        for cell, b in zip(shown["best accuracy"], best, strict=True)
    ]
    rows = []
    for k, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        under_way = progress(run)
        name = f"{label}, {under_way}" if under_way else label
        method = str(run.field("method.name") or ABSENT)
        rows.append([Cell(name), Cell(method), *(cells[k] for cells in shown.values())])
    return ["run", "method", *shown], rows


def compare(runs: Sequence[Run], width: int = 80) -> Table:
    """The comparison for a terminal of `width` columns, without what has no room there."""
    titles, rows = comparison(runs)
    widths = {}
    for title, cells in zip(titles, zip(*rows, strict=True), strict=True):
        widths[title] = max(*map(len, title.split()), *(len(cell.text) for cell in cells))
    whole_name = widths["run"]
    widths["run"] = min(whole_name, NAME_WIDTH)
    for title in LEAST_FIRST:
        if _room(widths, width) < 0:
            del widths[title]
    widths["run"] = max(1, min(whole_name, widths["run"] + _room(widths, width)))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title, wide in widths.items():
        side: Literal["left", "right"] = "left" if title in ("run", "method") else "right"
        table.add_column(title, justify=side, overflow="fold", width=wide)
    for row in rows:
        shown = [cell for title, cell in zip(titles, row, strict=True) if title in widths]
        table.add_row(*(Text(cell.text, "bold" if cell.best else "") for cell in shown))
    return table


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def number(row: Metrics, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _room(widths: dict[str, int], width: int) -> int:
    return width - sum(widths.values()) - 2 * (len(widths) - 1)


def _cells(
    values: Sequence[float | None],
    text: Callable[[float], str],
    better: Callable[[Iterable[float]], float],
) -> list[Cell]:
    texts = [ABSENT if value is None else text(value) for value in values]
    measured = [value for value in values if value is not None and math.isfinite(value)]
    best = text(better(measured)) if len(measured) > 1 else None  # as shown: ties are all best
    return [Cell(text, text == best) for text in texts]


def _read_epochs(file: Path) -> list[Metrics]:
    """A row an epoch; of one that was run again after a restart, the later."""
    if not file.is_file():
        return []
    rows = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for k, line in enumerate(lines):
        row = _parse(line)
        if isinstance(row, dict) and isinstance(row.get("epoch"), int):
            rows[row["epoch"]] = row
        elif line.strip() and line.endswith("\n"):  # else it is being written
            raise InputError(f"{file} is damaged in line {k + 1}: remove that line")
    return [rows[epoch] for epoch in sorted(rows)]


def _read_summary(file: Path) -> Metrics | None:
    if not file.is_file():
        return None
    summary = _parse(file.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(summary, dict):
        raise InputError(f"{file} is damaged, it holds no JSON object: remove it")
    return summary


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
