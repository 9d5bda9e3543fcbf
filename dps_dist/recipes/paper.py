"""The paper's tables: which recipe stands for each cell, and the figure that the paper gives.

The figures are the paper's, to be compared with; they are never to be shown as ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from dps_dist.recipes import compose, files

FILE = files.FOLDER / "tables" / "paper.yaml"


@dataclass(frozen=True)
class Cell:
    """One figure of the paper.

    column: its heading. metric: accuracy, best_accuracy (of all epochs), accuracy_c (CIFAR-10-C),
    ensemble_accuracy, mfp (CIFAR-10-P), auroc (against SVHN), ece, sce, ace (…_ts: after
    temperature scaling), all in percent, or nll.
    recipe: None where the paper only cites. value, std: None where it says nothing.
    note: what is to be known of it, such as that it is the mean of 3 runs.
    """

    column: str
    metric: str
    recipe: str | None
    value: float | None
    std: float | None
    note: str


@dataclass(frozen=True)
class Row:
    name: str
    cells: tuple[Cell, ...]

    @property
    def recipes(self) -> list[str]:
        """Of its cells, each once."""
        return list(dict.fromkeys(cell.recipe for cell in self.cells if cell.recipe is not None))


@dataclass(frozen=True)
class Table:
    id: str
    title: str
    rows: tuple[Row, ...]


@cache
def tables() -> tuple[Table, ...]:
    """The paper's tables, in its order."""
    held = files.value(FILE.read_text(encoding="utf-8"), str(FILE))
    return tuple(
        Table(
            table["id"],
            table["title"],
            tuple(Row(row["name"], _cells(table["columns"], row)) for row in table["rows"]),
        )
        for table in held
    )


def recipes() -> list[str]:
    """The recipes of all cells, each once."""
    every = (name for table in tables() for row in table.rows for name in row.recipes)
    return list(dict.fromkeys(every))


def rows_of(recipe: str) -> list[tuple[Table, Row, Cell]]:
    """Where the paper has figures for a recipe, in whatever order its parts are named."""
    if files.is_path(recipe):
        return []
    asked = _identity(recipe)
    return [
        (table, row, cell)
        for table in tables()
        for row in table.rows
        for cell in row.cells
        if cell.recipe is not None and _identity(cell.recipe) == asked
    ]


def in_braces(names: list[str]) -> str:
    """Recipes as a shell expands them: cifar10-resnet18-{baseline,te}."""
    if len(names) < 2:
        return "".join(names)
    words = [name.split("-") for name in names]
    same = 0
    while len({word[same] for word in words}) == 1:
        same += 1
    begin = "".join(f"{word}-" for word in words[0][:same])
    return f"{begin}{{{','.join(name.removeprefix(begin) for name in names)}}}"


@cache
def _identity(recipe: str) -> tuple[str, frozenset[str]]:
    """Base and parts; `dps` is the method of every base, named or not."""
    base, parts = compose.split(recipe)
    return base, frozenset(parts) - {"dps"}


def _cells(columns: list[dict[str, Any]], row: dict[str, Any]) -> tuple[Cell, ...]:
    return tuple(
        _cell(column, row, figure) for column, figure in zip(columns, row["figures"], strict=True)
    )


def _cell(column: dict[str, Any], row: dict[str, Any], figure: float | str | None) -> Cell:
    base, parts = row["recipe"], column.get("parts")
    recipe = f"{base}-{parts}" if base and parts else base
    numbers = list(_numbers(figure))
    note = "; ".join(held["note"] for held in (column, row) if "note" in held)
    metric = row.get("metric") or column["metric"]
    metric = row.get("metrics", {}).get(metric, metric)
    return Cell(column["name"], metric, recipe, numbers[0], numbers[1], note)


def _numbers(figure: float | str | None) -> Iterator[float | None]:
    """94.39 ± 0.18 → 94.39, 0.18; what is missing is None."""
    given = [] if figure is None else str(figure).split("±")
    yield from (float(number) for number in given)
    yield from [None] * (2 - len(given))
