"""Numbers that files may hold in any state: read, checked, written out."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dps_dist.evaluate.seeds import mean_std

ABSENT = "–"
Array = npt.NDArray[np.float64]


class Cell(NamedTuple):
    text: str
    best: bool = False
    note: str = ""  # below it, softly


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def plain(value: float) -> str:
    return f"{value:.3f}"


class Measure(NamedTuple):
    """A figure of an evaluation, as tables show it."""

    key: str
    title: str
    text: Callable[[float], str]
    better: Callable[[Iterable[float]], float]


MEASURES = (
    Measure("accuracy", "accuracy", percent, max),
    Measure("top5", "top-5 accuracy", percent, max),
    Measure("nll", "NLL", plain, min),
    Measure("brier", "Brier score", plain, min),
    Measure("ece", "ECE", percent, min),
    Measure("ece_10", "ECE, 10 bins", percent, min),
    Measure("sce", "SCE", percent, min),
    Measure("ace", "ACE", percent, min),
)


def number(row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def array(value: Any, length: int | None = None) -> Array | None:
    """A list of numbers, NaN for null; none where it is no such list, or not of `length`."""
    if not isinstance(value, list) or length not in (None, len(value)) or not value:
        return None
    if not all(isinstance(x, int | float | None) for x in value):
        return None
    return np.array([math.nan if x is None else x for x in value], float)


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def cells(
    values: Sequence[float | None],
    text: Callable[[float], str],
    better: Callable[[Iterable[float]], float],
) -> list[Cell]:
    """Written out; where several are measured, the best is marked, as shown: ties are all best."""
    texts = [ABSENT if value is None else text(value) for value in values]
    measured = [value for value in values if value is not None and math.isfinite(value)]
    best = text(better(measured)) if len(measured) > 1 else None
    return [Cell(text, text == best) for text in texts]


def spreads(
    values: Sequence[float | None],
    groups: Sequence[Sequence[int]],
    text: Callable[[float], str],
    better: Callable[[Iterable[float]], float],
) -> list[Cell]:
    """Mean ± deviation of each group's values; of several groups, the best mean is marked."""
    found = [mean_std([values[k] for k in group]) for group in groups]
    means = cells([mean if finite(mean) else None for mean, _ in found], text, better)
    return [
        cell if cell.text == ABSENT else Cell(f"{cell.text} ± {text(std)}", cell.best)
        for cell, (_, std) in zip(means, found, strict=True)
    ]
