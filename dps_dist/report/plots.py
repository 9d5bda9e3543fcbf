"""Runs → curves over the epochs: panels for the page, or one figure as a file, in which runs that
differ in nothing but seeds are one line with a band."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.report.drawing import STYLE, Drawing, look, saved
from dps_dist.report.tables import Run, group_labels, labels, repeats, same_data
from dps_dist.report.values import Array, finite, number

SEEDS = ": {} seeds"


class Panel(NamedTuple):
    key: str
    title: str
    percent: bool
    better: str


PANELS = (
    Panel("accuracy", "accuracy", True, "higher is better"),
    Panel("ece", "ECE", True, "lower is better"),
    Panel("nll", "NLL", False, "lower is better"),
    Panel("train_loss", "training loss", False, "against the method's own targets"),
)
TARGETS = (
    Panel("target_entropy", "target entropy", False, "mean, in nats"),
    Panel("label_agreement", "label agreement", True, "evidence greatest at the given label"),
    Panel("recovered", "wrong labels righted", True, "higher is better"),
)


def drawable(runs: Sequence[Run], panels: Sequence[Panel] = PANELS) -> list[Panel]:
    """The panels for which some run has a figure."""

    def has(key: str) -> bool:
        return any(finite(number(row, key)) for run in runs for row in run.epochs)

    return [panel for panel in panels if has(panel.key)]


def drawings(runs: Sequence[Run], panels: Sequence[Panel] = PANELS) -> list[Drawing]:
    """The panels for the page."""
    return [
        Drawing(
            panel.key,
            panel.title,
            panel.better,
            partial(_draw_panel, runs=runs, panel=panel),
            alt=f"{panel.title} over the epochs",
        )
        for panel in drawable(runs, panels)
    ]


def save(runs: Sequence[Run], out: Path) -> Path:
    """All panels and a legend in one figure: a .png, or an .svg. Seeds are drawn as one."""
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise InputError(f"--out is {out}: give a picture's name that ends in .png or .svg")
    same_data(runs)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "dps"}):
        panels, bundles = drawable(runs), bundled(runs)
        rows = max(1, (len(panels) + 1) // 2)
        figure = Figure(figsize=(8, 2.5 * rows + 0.4), layout="constrained")
        for k, panel in enumerate(panels):
            axes = figure.add_subplot(rows, 2, k + 1)
            axes.set_title(panel.title)
            _draw_bundles(axes, bundles, panel)
        _add_legend(figure, list(bundles))
        return write_whole(out, saved(figure, kind))


def lines(axes: Axes, curves: Sequence[tuple[Array, Array] | None], along: str) -> None:
    """A curve a run, in its look; what is not finite is a gap."""
    for k, curve in enumerate(curves):
        if curve is not None and len(curve[0]):
            x, y = curve
            marker = "o" if len(x) < 3 else ""
            shown = np.where(np.isfinite(y), y, np.nan)
            axes.plot(x, shown, **look(k), marker=marker, markersize=3)
    axes.set_xlabel(along)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.02)


def in_percent(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def _draw_panel(figure: Figure, runs: Sequence[Run], panel: Panel) -> None:
    _draw(figure.add_subplot(), runs, panel)


def _draw(axes: Axes, runs: Sequence[Run], panel: Panel) -> None:
    lines(axes, [_curve(run, panel.key) for run in runs], "epoch")
    if panel.percent:
        in_percent(axes)


def bundled(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Label → the runs of one line: those that differ in nothing but seeds, or one by itself."""
    groups = repeats(runs)
    named = dict(zip(labels(runs), ([run] for run in runs), strict=True))
    found = dict(enumerate(named.items()))
    for title, group in zip(group_labels(runs, groups, SEEDS), groups, strict=True):
        found |= {group[0]: (title, [runs[k] for k in group])}
        found = {k: one for k, one in found.items() if k not in group[1:]}
    return _without_common_begin(dict(found.values()))


def _without_common_begin(named: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """`te`, `dps` for `cifar10-te`, `cifar10-dps`: a legend has little room."""
    common = os.path.commonprefix(list(named)) if len(named) > 1 else ""  # noqa: RUF071  # no paths
    begin = common.partition(" (")[0].rfind("-") + 1  # a folder stays whole
    return {label[begin:]: members for label, members in named.items()}


def _draw_bundles(axes: Axes, bundles: Mapping[str, list[Run]], panel: Panel) -> None:
    curves = []
    for k, members in enumerate(bundles.values()):
        found = [_curve(run, panel.key) for run in members]
        epochs = np.unique(np.concatenate([x for x, _ in found]))
        values = np.full((len(found), len(epochs)), np.nan)  # a gap where a seed has no figure
        for seed, (x, y) in zip(values, found, strict=True):
            seed[np.searchsorted(epochs, x)] = y
        curves.append((epochs, values.mean(axis=0)))
        if len(found) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(epochs, low, high, color=look(k)["color"], alpha=0.15, lw=0)
    lines(axes, curves, "epoch")
    if panel.percent:
        in_percent(axes)


def _curve(run: Run, key: str) -> tuple[Array, Array]:
    rows = [(row["epoch"], number(row, key)) for row in run.epochs]
    points = [(epoch, value) for epoch, value in rows if value is not None]
    x, y = np.array(points, float).reshape(-1, 2).T
    return x, y


def _add_legend(figure: Figure, labels: Sequence[str]) -> None:
    lines = [Line2D([], [], **look(k)) for k in range(len(labels))]
    names = [label if len(label) <= 60 else f"{label[:59]}…" for label in labels]
    columns = max(1, min(len(names), 110 // (max(map(len, names)) + 6)))
    places = [str(k) for k in range(len(labels))]
    legend = figure.legend(lines, places, loc="outside lower center", ncols=columns)
    # Written afterwards: a legend leaves out names that begin with _, and reads $ as mathematics.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)
