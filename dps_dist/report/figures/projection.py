"""The penultimate layer of three classes, on the plane through their templates."""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from dps_dist.report.drawing import COLOURS, Drawing, short
from dps_dist.report.evaluation import Evaluation

MOST = 200  # samples of a class that are drawn
MARKERS = ("o", "^", "s")


def drawing(key: str, title: str, kind: str, evaluation: Evaluation) -> Drawing | None:
    """kind: similar or dissimilar."""
    found = evaluation.projection(kind)
    if found is None:
        return None
    points, of_class = found
    drawn = evaluation.projected(kind) or np.unique(of_class)[:3].tolist()
    names = {k: evaluation.class_name(k) for k in drawn}
    fewer = any((of_class == k).sum() > MOST for k in names)
    about = f"{MOST} samples a class are drawn" if fewer else ""
    draw = partial(_draw, points=points, of_class=of_class, names=names)
    alt = f"penultimate layer of the classes {', '.join(names.values())}, {title}"
    return Drawing(key, title, about, draw, (3.3, 2.9), alt)


def _draw(
    figure: Figure,
    points: npt.NDArray[Any],
    of_class: npt.NDArray[Any],
    names: dict[int, str],
) -> None:
    axes = figure.add_subplot()
    drawn = []
    for place, k in enumerate(names):
        own = points[(of_class == k) & np.isfinite(points).all(axis=1)]
        own = own[:: -(-len(own) // MOST) or 1]
        style: dict[str, Any] = {"color": COLOURS[place], "marker": MARKERS[place]}
        axes.plot(*own.T, linestyle="", markersize=2.6, markeredgewidth=0, alpha=0.75, **style)
        drawn += axes.plot([], [], linestyle="", markersize=5, **style)
    axes.set_aspect("equal", adjustable="datalim")
    legend = figure.legend(
        drawn,
        [str(place) for place in range(len(drawn))],
        loc="outside upper left",
        ncols=3,
        handletextpad=0.1,
        columnspacing=1.0,
    )
    for text, name in zip(legend.get_texts(), names.values(), strict=True):
        text.set_text(short(name, 14))
