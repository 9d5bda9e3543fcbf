"""δ: how far a sample's prediction lies from the mean prediction of its class."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure

from dps_dist.report.drawing import Drawing, look
from dps_dist.report.plots import in_percent
from dps_dist.report.values import Array, finite

Delta = tuple[Array, Array, float | None]


def drawing(deltas: Sequence[Delta | None]) -> Drawing:
    """Of all runs, in their looks; a dot stands at the mean."""
    return Drawing(
        "delta",
        "distance from the class's mean, δ",
        "share of the samples; the dot is their mean",
        partial(_draw, deltas=deltas),
        alt="histogram of Σ|f(x) − μ| over the samples",
    )


def _draw(figure: Figure, deltas: Sequence[Delta | None]) -> None:
    axes = figure.add_subplot()
    for k, delta in enumerate(deltas):
        if delta is None:
            continue
        edges, count, mean = delta
        style = look(k)
        axes.stairs(count / count.sum(), edges, linewidth=1.3, **style)
        if mean is not None and finite(mean):
            axes.plot([mean], [0], "o", color=style["color"], markersize=5, clip_on=False, zorder=9)
    axes.set(xlabel="Σ |f(x) − μ|", xlim=(0, 2))
    axes.set_ylim(bottom=0)
    in_percent(axes)
