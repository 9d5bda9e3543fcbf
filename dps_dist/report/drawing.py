"""How every figure looks: colours and lines, and from a matplotlib figure to the page or to a file.

The page's figures take their colours from its CSS, so that they suit light and dark; those in files
have no background and axes of a grey that is read on both.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dps_dist.report import write_whole

INK = "#767676"
# Okabe and Ito's, which the colour-blind tell apart; then their likes for dark paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
ON_DARK = ("#4aa8e0", "#ff8b3d", "#2fc79b", "#e39fc5", "#f2bb4e", "#94d2f7")
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))
STYLE: dict[Any, Any] = {  # its keys are a Literal of 300 in matplotlib's types
    "font.size": 8,
    "text.color": INK,
    "text.parse_math": False,
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


@dataclass(frozen=True)
class Drawing:
    """A figure that is yet to be drawn.

    key: its file's name, and what its ids on the page begin with. about: said softly beside title.
    size: in inches. alt: for those who do not see it; else the title.
    """

    key: str
    title: str
    about: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (3.6, 2.2)
    alt: str = ""


class Album:
    """The drawings of a page, each drawn once, to be written also as files."""

    def __init__(self) -> None:
        self._drawn: dict[str, Figure] = {}

    def figure(self, drawing: Drawing) -> str:
        """A drawing as a <figure> of the page."""
        assert drawing.key not in self._drawn, drawing.key
        self._drawn[drawing.key] = figure = drawn(drawing)
        about = f' <span class="soft">{escape(drawing.about)}</span>' if drawing.about else ""
        return (
            f"<figure><figcaption>{escape(drawing.title)}{about}</figcaption>\n"
            f"{for_page(figure, drawing.key, drawing.alt or drawing.title)}</figure>\n"
        )

    def panels(self, drawings: Sequence[Drawing]) -> str:
        """Two abreast where there is room."""
        shown = "".join(map(self.figure, drawings))
        return f'<div class="panels">\n{shown}</div>\n' if drawings else ""

    def squares(self, drawings: Sequence[Drawing]) -> str:
        """Up to three abreast."""
        shown, abreast = "".join(map(self.figure, drawings)), min(3, len(drawings))
        style = f'class="squares" style="--abreast: {abreast}"'
        return f"<div {style}>\n{shown}</div>\n" if drawings else ""

    def save(self, folder: Path) -> None:
        for key, figure in self._drawn.items():
            for kind in ("png", "svg"):
                with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
                    write_whole(folder / f"{key}.{kind}", saved(figure, kind))


def colour(k: int) -> str:
    """The CSS colour of run `k` on the page."""
    return f"var(--run{k % len(COLOURS)})"


def dash(k: int) -> str | tuple[int, tuple[float, ...]]:
    return DASHES[k // len(COLOURS) % len(DASHES)]


def look(k: int) -> dict[str, Any]:
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": dash(k)}


def drawn(drawing: Drawing) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=drawing.size, layout="constrained")
        drawing.draw(figure)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, not anew for each file
    return figure


def for_page(figure: Figure, key: str, alt: str) -> str:
    """An <svg> without the file's head, with ids of its own, in the colours of the page."""
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": key}):
        text = saved(figure, "svg").decode()
    opening, svg = text[text.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{key}-", svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "var(--soft)")
    for k, plain in enumerate(COLOURS):
        svg = svg.replace(plain, colour(k))
    return f'<svg {box[0]} role="img" aria-label="{escape(alt)}">{svg}'


def saved(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a class may be named in any script
        figure.savefig(stream, format=kind, transparent=True, dpi=200, metadata=nothing)
    return stream.getvalue()


def short(text: str, most: int = 24) -> str:
    """For labels in a figure, where lines are not broken."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def slug(text: str) -> str:
    """A part of a file's name and of an id."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_.")[:60] or "run"
