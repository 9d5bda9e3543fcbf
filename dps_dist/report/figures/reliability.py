"""Accuracy against confidence, bin by bin, with the gap between them; how many samples, below."""

from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dps_dist.report.drawing import COLOURS, INK, Drawing
from dps_dist.report.evaluation import Bins


def drawing(key: str, title: str, about: str, bins: Bins, k: int) -> Drawing:
    """Of run `k`, in its colour."""
    draw = partial(_draw, bins=bins, colour=COLOURS[k % len(COLOURS)])
    return Drawing(key, title, about, draw, (3.3, 3.4), f"reliability diagram of {title}, {about}")


def _draw(figure: Figure, bins: Bins, colour: str) -> None:
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    left, width = bins.edges[:-1], np.diff(bins.edges)
    shown = np.isfinite(bins.accuracy) & np.isfinite(bins.confidence)
    accuracy, confidence = bins.accuracy[shown], bins.confidence[shown]
    left_shown, width_shown = left[shown], width[shown]
    lower, upper = np.minimum(accuracy, confidence), np.maximum(accuracy, confidence)
    bars = {"align": "edge", "linewidth": 0}
    top.bar(left_shown, lower, width_shown, color=colour, **bars)
    gap = top.bar(
        left_shown,
        upper - lower,
        width_shown,
        lower,
        color=colour,
        alpha=0.3,
        hatch="/////",
        **bars,
    )
    level = top.hlines(accuracy, left_shown, left_shown + width_shown, color=INK, linewidth=1.6)
    top.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    top.set(xlim=(0, 1), ylim=(0, 1.01), ylabel="accuracy")
    figure.legend(
        [level, gap], ["accuracy", "gap to confidence"], loc="outside upper left", ncols=2
    )
    below.bar(left, np.nan_to_num(bins.count), width, align="edge", color=INK, linewidth=0)
    below.set(xlabel="confidence", ylabel="samples")
    below.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    below.yaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
    for axis in (top.xaxis, top.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f}%"))
