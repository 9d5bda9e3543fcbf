"""A sweep's cells as points: accuracy against ECE with the Pareto front, or a figure by a field."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from dps_dist.report.drawing import COLOURS, INK, Drawing, short
from dps_dist.report.sweep import Cell

MOST_NAMED = 6


def pareto(found: Sequence[Cell], front: Sequence[Cell], names: Sequence[str]) -> Drawing:
    """`names`: of the cells on the front, written beside them."""
    draw = partial(_draw_pareto, found=found, front=front, names=names)
    about = "up and to the left is better; the line joins cells that none beats in both"
    return Drawing("pareto", "accuracy against ECE", about, draw, (4.6, 2.8))


def _draw_pareto(
    figure: Figure, found: Sequence[Cell], front: Sequence[Cell], names: Sequence[str]
) -> None:
    axes = figure.add_subplot()
    rest = [cell for cell in found if cell not in front]
    axes.plot(*_places(rest), "o", color=INK, alpha=0.6, markersize=3, linestyle="none")
    axes.plot(*_places(front), "o-", color=COLOURS[0], markersize=4.5)
    for cell, name in list(zip(front, names, strict=True))[:MOST_NAMED]:
        (x,), (y,) = _places([cell])
        axes.annotate(
            short(name, 40), (x, y), xytext=(5, -3), textcoords="offset points", fontsize=6.5,
            va="top", color=INK,
        )  # fmt: skip
    axes.set(xlabel="ECE %", ylabel="accuracy %")
    axes.margins(0.08)


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
