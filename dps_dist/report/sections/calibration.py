"""Figures of an evaluation, before and after temperature scaling, and reliability diagrams."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps_dist.report.drawing import Album, Drawing, slug
from dps_dist.report.evaluation import Bins
from dps_dist.report.figures import reliability
from dps_dist.report.markup import details, heading, paragraph, section, table
from dps_dist.report.tables import Run, labels
from dps_dist.report.values import ABSENT, Cell, cells, number, percent, plain

MOST_COLUMNS = 6  # then rather long than wide


class Measure(NamedTuple):
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
ABOUT = (
    "ECE and ACE: how far confidence is from accuracy, in 15 bins of equal width and of equal "
    "mass. SCE: the same over all classes. Brier score: squared distance of the prediction from "
    "the true class."
)
ABOUT_TS = "TS: temperature scaling, fitted on held-out samples."


def calibration(runs: Sequence[Run], album: Album) -> str:
    named = [
        (label, run.evaluation.figures, run.evaluation.temperature)
        for run, label in zip(runs, labels(runs), strict=True)
        if run.evaluation
    ]
    figures = figures_table(named)
    diagrams = _diagrams(runs, album)
    if not figures and not diagrams:
        return ""
    said = [_on_what(runs), *([ABOUT] if figures else [])]
    said += [ABOUT_TS] if "after TS" in figures else []
    notes = paragraph(" ".join(said))
    return section("Calibration", figures, notes, diagrams)


def figures_table(named: Sequence[tuple[str, dict[str, Any], float | None]]) -> str:
    """Of (name, figures, temperature); what is after temperature scaling in a column of its own."""
    entries = []  # (which of the groups that are compared, name, figures)
    for name, figures, t in named:
        entries.append(("as trained", name, figures))
        scaled = {key.removesuffix("_ts"): v for key, v in figures.items() if key.endswith("_ts")}
        if scaled:
            after = f"{name}, after TS" + (f" (T = {t:.3f})" if t is not None else "")
            entries.append(("scaled", after, scaled))
    rows = [_row(measure, entries) for measure in MEASURES]
    shown = [
        (measure.title, row)
        for measure, row in zip(MEASURES, rows, strict=True)
        if any(cell.text != ABSENT for cell in row)
    ]
    if not shown:
        return ""
    names = [name for _, name, _ in entries]
    if len(entries) <= MOST_COLUMNS:
        return table(["", *names], [[Cell(title), *row] for title, row in shown], 1)
    turned = zip(*(row for _, row in shown), strict=True)
    body = [[Cell(name), *cells_] for name, cells_ in zip(names, turned, strict=True)]
    return table(["run", *(title for title, _ in shown)], body, 1)


def _row(measure: Measure, entries: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Cell]:
    """A cell an entry; the best as trained and the best after scaling are marked."""
    row = [Cell(ABSENT)] * len(entries)
    for group in ("as trained", "scaled"):
        places = [k for k, entry in enumerate(entries) if entry[0] == group]
        values = [number(entries[k][2], measure.key) for k in places]
        for k, cell in zip(places, cells(values, measure.text, measure.better), strict=True):
            row[k] = cell
    return row


def _on_what(runs: Sequence[Run]) -> str:
    """Split, samples and epoch of each evaluation; once, where they are the same."""
    said: dict[str, list[str]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        if run.evaluation:
            facts = run.evaluation.facts
            samples, epoch = number(facts, "samples"), number(facts, "epoch")
            about = f"on {facts.get('split', 'val')}"
            about += f", {samples:,.0f} samples" if samples is not None else ""
            about += f", after epoch {epoch:.0f}" if epoch is not None else ""
            said.setdefault(about, []).append(label)
    if len(said) == 1:
        return f"Measured {next(iter(said))}."
    return " ".join(f"{', '.join(names)}: measured {about}." for about, names in said.items())


def _diagrams(runs: Sequence[Run], album: Album) -> str:
    """The runs side by side, as trained and, below, after temperature scaling."""
    drawings: dict[str, list[Drawing]] = {"reliability": [], "reliability_ts": []}
    numbers = ""
    for k, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        for key, group in drawings.items():
            bins = run.evaluation.bins(key) if run.evaluation else None
            if bins is None or run.evaluation is None:
                continue
            t = run.evaluation.temperature
            after = f"after temperature scaling{'' if t is None else f', T = {t:.3f}'}"
            about = "as trained" if key == "reliability" else after
            name = f"{key}-{k}-{slug(run.name)}".replace("_ts", "-scaled")
            group.append(reliability.drawing(name, label, about, bins, k))
            numbers += heading(f"{label}, {about}") + _in_numbers(bins)
    trained, scaled = drawings.values()
    rows = [trained, scaled] if len(runs) > 1 else [[*trained, *scaled]]
    shown = "".join(album.squares(row) for row in rows)
    if not shown:
        return ""
    return heading("Reliability diagrams") + shown + details("the bins in numbers", numbers)


def _in_numbers(bins: Bins) -> str:
    def share(value: float) -> Cell:
        return Cell(percent(value) if np.isfinite(value) else ABSENT)

    rows = [
        [
            Cell(f"{100 * low:.1f} – {100 * high:.1f}%"),
            Cell(f"{0 if np.isnan(count) else count:,.0f}"),
            share(accuracy),
            share(confidence),
        ]
        for low, high, count, accuracy, confidence in zip(
            bins.edges[:-1], bins.edges[1:], bins.count, bins.accuracy, bins.confidence, strict=True
        )
    ]
    return table(["bin", "samples", "accuracy", "confidence"], rows, 1)
