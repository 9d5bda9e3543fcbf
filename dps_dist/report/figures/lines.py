"""A line a run over something other than the run's own epochs: checkpoints, severities."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from dps_dist.report.drawing import Drawing
from dps_dist.report.plots import in_percent, lines
from dps_dist.report.values import Array

Curve = tuple[Array, Array]


def drawing(
    key: str, title: str, about: str, curves: Sequence[Curve | None], along: str, percent: bool
) -> Drawing:
    draw = partial(_draw, curves=curves, along=along, percent=percent)
    return Drawing(key, title, about, draw, alt=f"{title} over {along}")


def _draw(figure: Figure, curves: Sequence[Curve | None], along: str, percent: bool) -> None:
    axes = figure.add_subplot()
    lines(axes, curves, along)
    if percent:
        in_percent(axes)
