"""Figures of an evaluation, before and after temperature scaling, and reliability diagrams."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dps_dist.evaluate.seeds import spread
from dps_dist.report.drawing import Album, Drawing, slug
from dps_dist.report.evaluation import Bins
from dps_dist.report.figures import reliability
from dps_dist.report.markup import details, heading, paragraph, section, table
from dps_dist.report.tables import ABOUT_MEANS, Run, group_labels, labels, repeats
from dps_dist.report.values import (
    ABSENT,
    MEASURES,
    Cell,
    Measure,
    cells,
    finite,
    number,
    percent,
)

MOST_COLUMNS = 6  # then rather long than wide
ABOUT = (
    "ECE and ACE: how far confidence is from accuracy, in 15 bins of equal width and of equal "
    "mass. SCE: the same over all classes. Brier score: squared distance of the prediction from "
    "the true class."
)
ABOUT_TS = "TS: temperature scaling, fitted on held-out samples."


@dataclass(frozen=True)
class Entry:
    """A column of figures, of a run or of several; `std` of several, T of one."""

    name: str
    figures: dict[str, Any]
    temperature: float | None = None
    std: dict[str, float] = field(default_factory=dict)
    kind: str = "run"  # of those with which it is compared


def calibration(runs: Sequence[Run], album: Album) -> str:
    named = [
        Entry(label, run.evaluation.figures, run.evaluation.temperature)
        for run, label in zip(runs, labels(runs), strict=True)
        if run.evaluation
    ]
    means = _means(runs)
    figures = figures_table([*named, *means])
    diagrams = _diagrams(runs, album)
    if not figures and not diagrams:
        return ""
    said = [_on_what(runs), *([ABOUT] if figures else [])]
    said += mixed_precision(runs)
    said += [ABOUT_TS] if "after TS" in figures else []
    said += [ABOUT_MEANS] if means else []
    notes = paragraph(" ".join(said))
    return section("Calibration", figures, notes, diagrams)


def _means(runs: Sequence[Run]) -> list[Entry]:
    """Of runs that differ in nothing but seeds, where all were evaluated on the same split."""
    entries, groups = [], repeats(runs)
    for name, group in zip(group_labels(runs, groups), groups, strict=True):
        found = [runs[k].evaluation for k in group]
        held = [one for one in found if one is not None]
        if len(held) == len(found) and len({str(one.facts.get("split")) for one in held}) == 1:
            keys = dict.fromkeys(key for one in held for key in one.figures)
            over = spread([{key: number(one.figures, key) for key in keys} for one in held])
            known = {key: value for key, value in over.mean.items() if finite(value)}
            entries.append(Entry(name, known, std=over.std, kind="mean"))
    return entries


def figures_table(named: Sequence[Entry]) -> str:
    """What is after temperature scaling is in a column of its own."""
    entries = []
    for one in named:
        entries.append(one)
        scaled, std = (_scaled(figures) for figures in (one.figures, one.std))
        if scaled:
            t = one.temperature
            after = f"{one.name}, after TS" + (f" (T = {t:.3f})" if t is not None else "")
            entries.append(Entry(after, scaled, std=std, kind=f"{one.kind}, scaled"))
    rows = [_row(measure, entries) for measure in MEASURES]
    shown = [
        (measure.title, row)
        for measure, row in zip(MEASURES, rows, strict=True)
        if any(cell.text != ABSENT for cell in row)
    ]
    if not shown:
        return ""
    names = [entry.name for entry in entries]
    if len(entries) <= MOST_COLUMNS:
        return table(["", *names], [[Cell(title), *row] for title, row in shown], 1)
    turned = zip(*(row for _, row in shown), strict=True)
    body = [[Cell(name), *cells_] for name, cells_ in zip(names, turned, strict=True)]
    return table(["run", *(title for title, _ in shown)], body, 1)


def _scaled(figures: dict[str, Any]) -> dict[str, Any]:
    return {key.removesuffix("_ts"): v for key, v in figures.items() if key.endswith("_ts")}


def _row(measure: Measure, entries: Sequence[Entry]) -> list[Cell]:
    """A cell an entry; the best of each kind is marked."""
    row = [Cell(ABSENT)] * len(entries)
    for kind in dict.fromkeys(entry.kind for entry in entries):
        places = [k for k, entry in enumerate(entries) if entry.kind == kind]
        values = [number(entries[k].figures, measure.key) for k in places]
        for k, cell in zip(places, cells(values, measure.text, measure.better), strict=True):
            std = entries[k].std.get(measure.key)
            if std is not None and cell.text != ABSENT:
                cell = Cell(f"{cell.text} ± {measure.text(std)}", cell.best)
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


def mixed_precision(runs: Sequence[Run]) -> list[str]:
    """Of evaluated runs that computed otherwise in training: one run, two accuracies."""
    said = [
        f"`dps evaluate` computed in {run.evaluation.facts.get('precision', 'float32')}, and "
        f"training, of which the figures under Results are, in {amp} (train.amp): they may differ "
        "in the last digits."
        for run in runs
        if run.evaluation and (amp := run.field("train.amp")) not in (None, "none")
    ]
    return list(dict.fromkeys(said))


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
