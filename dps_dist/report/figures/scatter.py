"""A sweep's cells as points: accuracy against ECE with the Pareto front, or a figure by a field."""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from dps_dist.report.drawing import COLOURS, INK, Drawing, short
from dps_dist.report.sweep import Cell

STRETCH = 4.0  # below the median: so many times what the best is above it


def pareto(found: Sequence[Cell], front: Sequence[Cell], names: Sequence[str]) -> Drawing:
    """`names`: of the cells on the front, in its order."""
    shown = _worth_showing(found)
    left_out = len(found) - len(shown)
    drawn = [name for cell, name in zip(front, names, strict=True) if cell in shown]
    about = "; ".join(f"{k}: {name}" for k, name in enumerate(drawn, start=1))
    about += f"; {left_out} cells of far less accuracy are left out" if left_out else ""
    draw = partial(_draw_pareto, found=shown, front=front)
    return Drawing("pareto", "accuracy against ECE", about, draw, (4.6, 2.8))


def _worth_showing(found: Sequence[Cell]) -> list[Cell]:
    """Without those that collapsed: they would leave no room for the others."""
    accuracies = [cell.mean["accuracy"] for cell in found if isfinite(cell.mean["accuracy"])]
    middle = median(accuracies)
    least = middle - STRETCH * max(max(accuracies) - middle, 0.005)
    return [cell for cell in found if cell.mean["accuracy"] >= least]


def _draw_pareto(figure: Figure, found: Sequence[Cell], front: Sequence[Cell]) -> None:
    axes = figure.add_subplot()
    rest = [cell for cell in found if cell not in front]
    line = [cell for cell in front if cell in found]
    axes.plot(*_places(rest), "o", color=INK, alpha=0.6, markersize=3, linestyle="none")
    axes.plot(*_places(line), "o-", color=COLOURS[0], markersize=4.5)
    for k, cell in enumerate(line, start=1):
        (x,), (y,) = _places([cell])
        axes.annotate(
            str(k), (x, y), xytext=(-2, 5), textcoords="offset points", ha="center", color=INK
        )
    axes.set(xlabel="ECE %", ylabel="accuracy %")
    axes.margins(0.1)


def _places(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    return [100 * cell.mean["ece"] for cell in cells], [100 * c.mean["accuracy"] for c in cells]


def by_field(key: str, field: str, found: Sequence[Cell], at: int, metric: str) -> Drawing:
    """`at`: the field's place among the values of a cell."""
    draw = partial(_draw_field, found=found, at=at, metric=metric, field=field)
    return Drawing(key, f"{metric} by {field}", "", draw)


def _draw_field(figure: Figure, found: Sequence[Cell], at: int, metric: str, field: str) -> None:
    axes = figure.add_subplot()
    values: list[Any] = [cell.values[at] for cell in found]
    numbers = all(isinstance(value, int | float) for value in values)
    places = values if numbers else [short(str(value), 12) for value in values]
    shown = [cell.mean[metric] * (1 if metric == "nll" else 100) for cell in found]
    axes.plot(places, shown, "o", color=COLOURS[0], markersize=3.5, alpha=0.8)
    if numbers and min(values) > 0 and max(values) / min(values) > 50:
        axes.set_xscale("log")
    axes.set(xlabel=field, ylabel=metric if metric == "nll" else f"{metric} %")
