"""μ: the mean prediction for each class, on a logarithmic scale."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dps_dist.report.drawing import Drawing, short

LEAST = 1e-6  # of a colour; darker is not told apart
MOST_CELLS = 250  # a side: more are neither seen nor worth their bytes
MOST_NAMES = 20


def least(maps: Sequence[npt.NDArray[Any]]) -> float:
    """Where the colours begin, the same for all that are compared: a power of ten."""
    lowest = min(float(np.nan_to_num(mu, nan=1.0).min()) for mu in maps)
    return min(0.1, float(10.0 ** np.floor(np.log10(max(lowest, LEAST)))))


def drawing(
    key: str, title: str, mu: npt.NDArray[Any], names: Sequence[str], lowest: float
) -> Drawing:
    """`lowest`: where the colours begin, `least`'s of all that stand beside it."""
    block = -(-len(mu) // MOST_CELLS)
    about = f"a cell is the greatest of {block}×{block} classes" if block > 1 else ""
    draw = partial(_draw, mu=mu, names=names, block=block, lowest=lowest)
    return Drawing(key, title, about, draw, (3.5, 3.1), f"mean prediction for each class, {title}")


def coarse(mu: npt.NDArray[Any], block: int) -> npt.NDArray[Any]:
    """The greatest of each block × block, so that a lone confusion stays visible."""
    side = -(-len(mu) // block)
    padded = np.full((side * block, side * block), -np.inf, mu.dtype)
    padded[: len(mu), : len(mu)] = mu
    blocks: npt.NDArray[Any] = padded.reshape(side, block, side, block).max(axis=(1, 3))
    return blocks


def _draw(
    figure: Figure, mu: npt.NDArray[Any], names: Sequence[str], block: int, lowest: float
) -> None:
    figure.set_layout_engine("compressed")
    axes = figure.add_subplot()
    axes.grid(visible=False)
    cells = np.clip(coarse(np.nan_to_num(mu, nan=0.0), block), lowest, 1.0)
    classes = len(mu)
    image = axes.imshow(
        cells,
        cmap="viridis",
        norm=LogNorm(lowest, 1.0),
        interpolation="none",
        extent=(-0.5, classes - 0.5, classes - 0.5, -0.5),
    )
    bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    assert bar.solids
    bar.solids.set_rasterized(True)  # else it is 256 paths
    bar.outline.set_visible(False)
    bar.ax.minorticks_off()
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}"))
    axes.set(xlabel="predicted", ylabel="true class")
    if len(names) == classes <= MOST_NAMES:
        shown = [short(name, 10) for name in names]
        flat = max(map(len, shown)) <= 2
        axes.set_xticks(range(classes), shown, rotation=0 if flat else 90)
        axes.set_yticks(range(classes), shown)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))
