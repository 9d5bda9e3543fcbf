"""Runs → curves over the epochs: panels for the page, or one figure as a file.

The page's panels take their colours from its CSS, so that they suit light and dark; the figure has
no background and axes of a grey that is read on both.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.report.tables import Run, finite, labels, number

INK = "#767676"
# Okabe and Ito's, which the colour-blind tell apart; then their likes for dark paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
ON_DARK = ("#4aa8e0", "#ff8b3d", "#2fc79b", "#e39fc5", "#f2bb4e", "#94d2f7")
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
STYLE: dict[Any, Any] = {  # its keys are a Literal of 300 in matplotlib's types
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.titlesize": 9,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.5,
    "legend.frameon": False,
}


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


def drawable(runs: Sequence[Run]) -> list[Panel]:
    """The panels for which some run has a figure."""

    def has(key: str) -> bool:
        return any(finite(number(row, key)) for run in runs for row in run.epochs)

    return [panel for panel in PANELS if has(panel.key)]


def colour(k: int) -> str:
    """The CSS colour of run `k` on the page."""
    return f"var(--run{k % len(COLOURS)})"


def dash(k: int) -> str | tuple[int, tuple[float, ...]]:
    return DASHES[k // len(COLOURS) % len(DASHES)]


def panel_svg(runs: Sequence[Run], panel: Panel) -> str:
    """One panel as an <svg> to stand in the page."""
    style = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": panel.key}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.0, 2.4), layout="constrained")
        _draw(figure.add_subplot(), runs, panel)
        text = _saved(figure, "svg").decode()
    return _for_page(text, panel)


def save(runs: Sequence[Run], out: Path) -> Path:
    """All panels and a legend in one figure: a .png, or an .svg."""
    kind = out.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg"):
        raise InputError(f"--out is {out}: give a picture's name that ends in .png or .svg")
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "dps"}):
        panels = drawable(runs)
        rows = max(1, (len(panels) + 1) // 2)
        figure = Figure(figsize=(8, 2.5 * rows + 0.4), layout="constrained")
        for k, panel in enumerate(panels):
            axes = figure.add_subplot(rows, 2, k + 1)
            axes.set_title(panel.title)
            _draw(axes, runs, panel)
        _add_legend(figure, runs)
        return write_whole(out, _saved(figure, kind))


def _draw(axes: Axes, runs: Sequence[Run], panel: Panel) -> None:
    for k, run in enumerate(runs):
        rows = [(row["epoch"], number(row, panel.key)) for row in run.epochs]
        points = [
            (epoch, value if finite(value) else np.nan)
            for epoch, value in rows
            if value is not None
        ]
        if points:
            marker = "o" if len(points) < 3 else ""
            axes.plot(*np.array(points, float).T, **_look(k), marker=marker, markersize=3)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.margins(x=0.02)
    if panel.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
    lines = [Line2D([], [], **_look(k)) for k in range(len(runs))]
    names = [label if len(label) <= 60 else f"{label[:59]}…" for label in labels(runs)]
    columns = max(1, min(len(names), 110 // (max(map(len, names)) + 6)))
    places = [str(k) for k in range(len(runs))]
    legend = figure.legend(lines, places, loc="outside lower center", ncols=columns)
    # Written afterwards: a legend leaves out names that begin with _, and reads $ as mathematics.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _look(k: int) -> dict[str, Any]:
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": dash(k)}


def _for_page(text: str, panel: Panel) -> str:
    """Without the file's head, with ids of its own, in the colours of the page."""
    opening, svg = text[text.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{panel.key}-", svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "var(--soft)")
    for k, plain in enumerate(COLOURS):
        svg = svg.replace(plain, colour(k))
    return f'<svg {box[0]} role="img" aria-label="{panel.title} over the epochs">{svg}'


def _saved(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    figure.savefig(stream, format=kind, transparent=True, dpi=200, metadata=nothing)
    return stream.getvalue()
