"""A run folder → Run; runs → the table that compares them, for the terminal and for the page."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.table import Table
from rich.text import Text

from dps_dist.errors import InputError
from dps_dist.evaluate import seeds
from dps_dist.report import evaluation
from dps_dist.report.evaluation import Evaluation
from dps_dist.report.values import ABSENT, Cell, cells, finite, number, percent, plain, spreads
from dps_dist.train.files import CONFIG, METRICS, SUMMARY, rows_of

Metrics = dict[str, Any]
Better = Callable[[Iterable[float]], float]
Column = tuple[str, list[float | None], Callable[[float], str], Better]
HOLD_ANYTHING = ("imagefolder", "idx")  # sources of which each folder is another data set
OF_THE_DATA = ("samples", "classes", "sum of class names")  # in the summary of a finished run
MEAN = ", mean ± std of {} seeds"
NAME_WIDTH = 16  # of a run's name that is broken, where the terminal is narrow
ABOUT_MEANS = "Mean ± std: of finished runs that differ in nothing but seeds; std divides by n − 1."
LEAST_FIRST = ("images/s", "best accuracy", "method", "NLL")  # what is left out there


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    name: str
    config: dict[str, Any]
    epochs: list[Metrics]  # one a finished epoch, in order
    summary: Metrics | None  # none while it runs
    evaluation: Evaluation | None = None  # what `dps evaluate` found

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


def read(folder: Path) -> Run:
    """The run in `folder`, finished or not."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give a run's, such as runs/digits-dps")
    file = folder / CONFIG
    if not file.is_file():
        raise InputError(f"{folder} is no run, it has no {CONFIG}: give one that `dps train` wrote")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise InputError(f"{file} is damaged, it holds no YAML mapping: leave this run out")
    metrics = folder / METRICS
    epochs = rows_of(metrics.read_bytes(), str(metrics)) if metrics.is_file() else []
    if not epochs:
        raise InputError(
            f"{folder} has not finished an epoch: try again when it has, or leave it out"
        )
    summary = _read_summary(folder / SUMMARY)
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    name = str(name or _shown(folder.absolute().name))
    return Run(folder, name, config, epochs, summary, evaluation.read(folder))


def same_data(runs: Sequence[Run]) -> None:
    """Runs on different data sets have nothing to compare: refused."""

    def differ(one: Run, other: Run) -> bool:
        sources = [run.field("data.source") for run in (one, other)]
        if sources[0] != sources[1]:
            return True
        known = [[(run.summary or {}).get(what) for what in OF_THE_DATA] for run in (one, other)]
        if None not in (*known[0], *known[1]):
            return known[0] != known[1]
        classes = [run.evaluation.classes if run.evaluation else [] for run in (one, other)]
        if all(classes) and classes[0] != classes[1]:
            return True
        if sources[0] not in HOLD_ANYTHING or (sources[0] == "imagefolder" and all(classes)):
            return False
        # Known by their folder's name alone, which may be elsewhere on another machine.
        paths = [str(run.field("data.path") or "") for run in (one, other)]
        return Path(paths[0]).name != Path(paths[1]).name

    for run in runs[1:]:
        if differ(runs[0], run):
            shown = " but ".join(f"{one.folder} is of {_data(one)}" for one in (runs[0], run))
            raise InputError(
                f"runs of different data sets are not compared, and {shown}: report each by itself"
            )


def _data(run: Run) -> str:
    summary = run.summary or {}
    counts = [f"{summary[what]} {what}" for what in OF_THE_DATA if what in summary]
    where = f"{run.field('data.source')} in {run.field('data.path')}"
    return f"{where} ({', '.join(counts)})" if counts else where


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' names, with their folders where names are alike."""
    times = Counter(run.name for run in runs)
    return [
        run.name if times[run.name] == 1 else f"{run.name} ({_shown(run.folder)})" for run in runs
    ]


def _shown(path: Path | str) -> str:
    """A file's name need not be UTF-8; then its bytes are shown."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def progress(run: Run) -> str | None:
    """`12 of 40 epochs` of a run that has not finished."""
    if run.summary is not None:
        return None
    done, epochs = run.epochs[-1]["epoch"], run.field("train.epochs")
    return f"{done} of {epochs} epochs" if isinstance(epochs, int) else f"{done} epochs"


def repeats(runs: Sequence[Run]) -> list[list[int]]:
    """Which of the finished runs differ in nothing but seeds, in groups."""
    done = [k for k, run in enumerate(runs) if run.summary is not None]
    found = seeds.groups([runs[k].config for k in done])
    return [[done[k] for k in group] for group in found]


def name_of(group: Sequence[Run]) -> str:
    """`dps-seed…`, of dps-seed0, dps-seed1 and dps-seed2."""
    names = [run.name for run in group]
    common = os.path.commonprefix(names)  # noqa: RUF071  # they are no paths
    common += "…" if set(names) != {common} else ""
    return common if common != "…" else ", ".join(names)


def group_labels(
    runs: Sequence[Run], groups: Sequence[Sequence[int]], note: str = MEAN
) -> list[str]:
    """The groups' names and the note; where these are alike, with the folder that they are in or,
    if it is the same one, that of their first run."""
    members = [[runs[k] for k in group] for group in groups]
    names = [name_of(group) + note.format(len(group)) for group in members]
    first = [group[0].folder for group in members]
    beside = list(zip(names, (folder.parent for folder in first), strict=True))
    where = [
        folder.parent if beside.count(pair) == 1 else folder
        for folder, pair in zip(first, beside, strict=True)
    ]
    return [
        f"{name} ({_shown(folder)})" if names.count(name) > 1 else name
        for name, folder in zip(names, where, strict=True)
    ]


def comparison(runs: Sequence[Run]) -> tuple[list[str], list[list[Cell]]]:
    """Titles and a row a run, then one for each group that differs in nothing but seeds.

    Where there are several, the best of each column is marked, of the runs and of the means.
    """
    best, groups = [run.best() for run in runs], repeats(runs)
    columns: list[Column] = [
        ("accuracy", [run.last("accuracy") for run in runs], percent, max),
        ("best accuracy", [b and b[0] for b in best], percent, max),
        ("ECE", [run.last("ece") for run in runs], percent, min),
        ("NLL", [run.last("nll") for run in runs], plain, min),
        ("wrong labels righted", [run.last("recovered") for run in runs], percent, max),
        ("images/s", [run.last("images_per_s") for run in runs], "{:,.0f}".format, max),
    ]
    shown = {title: cells(values, text, better) for title, values, text, better in columns}
    means = {
        title: spreads(values, groups, text, better) for title, values, text, better in columns
    }
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
        rows.append([Cell(name), _method(run), *(column[k] for column in shown.values())])
    for k, (name, group) in enumerate(zip(group_labels(runs, groups), groups, strict=True)):
        rows.append([Cell(name), _method(runs[group[0]]), *(means[title][k] for title in shown)])
    return ["run", "method", *shown], rows


def _method(run: Run) -> Cell:
    return Cell(str(run.field("method.name") or ABSENT))


def compare(runs: Sequence[Run], width: int = 80) -> Table:
    """The comparison for a terminal of `width` columns, without what has no room there."""
    titles, rows = comparison(runs)
    widths = {}
    for title, column in zip(titles, zip(*rows, strict=True), strict=True):
        widths[title] = max(*map(len, title.split()), *(len(cell.text) for cell in column))
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


def _room(widths: dict[str, int], width: int) -> int:
    return width - sum(widths.values()) - 2 * (len(widths) - 1)


def _read_summary(file: Path) -> Metrics | None:
    if not file.is_file():
        return None
    try:
        summary = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        summary = None
    if not isinstance(summary, dict):
        raise InputError(f"{file} is damaged, it holds no JSON object: remove it")
    return summary
