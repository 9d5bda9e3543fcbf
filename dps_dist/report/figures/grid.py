"""A figure of a sweep over two fields, as coloured cells with the number in each."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dps_dist.report.drawing import Drawing

STRETCH = 3.0  # below the median: so many times what the best is above it; all worse looks alike


def drawing(
    key: str,
    title: str,
    about: str,
    names: tuple[str, str],
    values: tuple[Sequence[Any], Sequence[Any]],
    cells: Mapping[tuple[Any, Any], float],
    *,
    percent: bool,
    higher_is_better: bool,
) -> Drawing:
    """`names` and `values`: of the rows, then of the columns; a missing cell stays empty."""
    size = (max(3.2, 0.45 * len(values[1]) + 0.9), max(1.8, 0.3 * len(values[0]) + 0.7))
    draw = partial(
        _draw,
        names=names,
        values=values,
        cells=cells,
        factor=100.0 if percent else 1.0,
        sign=1.0 if higher_is_better else -1.0,
    )
    return Drawing(key, title, about, draw, size, f"{title} by {names[0]} and {names[1]}")


def _draw(
    figure: Figure,
    names: tuple[str, str],
    values: tuple[Sequence[Any], Sequence[Any]],
    cells: Mapping[tuple[Any, Any], float],
    factor: float,
    sign: float,
) -> None:
    rows, columns = values
    grid = np.array([[cells.get((r, c), np.nan) for c in columns] for r in rows]) * factor
    axes = figure.add_subplot()
    axes.grid(visible=False)
    goodness = sign * grid
    known = goodness[np.isfinite(goodness)]
    top = known.max() if known.size else 1.0
    middle = float(np.median(known)) if known.size else 0.0
    least = max(known.min(), middle - STRETCH * max(top - middle, 1e-9)) if known.size else 0.0
    axes.imshow(
        goodness,
        cmap="viridis",
        vmin=least,
        vmax=max(top, least + 1e-9),
        aspect="auto",
        interpolation="none",
    )
    digits = 1 if factor > 1 else 2
    for (r, c), value in np.ndenumerate(grid):
        if np.isfinite(value):
            light = (goodness[r, c] - least) / max(top - least, 1e-9) > 0.6
            axes.text(
                c, r, f"{value:.{digits}f}", ha="center", va="center", fontsize=7.5,
                color="#000000" if light else "#ffffff",
                fontweight="bold" if goodness[r, c] == top else "normal",
            )  # fmt: skip
    axes.set_xticks(range(len(columns)), [_text(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_text(value) for value in rows])
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set(xlabel=names[1], ylabel=names[0])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
