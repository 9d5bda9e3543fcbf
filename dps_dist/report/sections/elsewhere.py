"""Further data sets that runs were evaluated on: corrupted, perturbed, another's, out of range."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dps_dist.report.drawing import Album, slug
from dps_dist.report.figures import lines
from dps_dist.report.markup import details, heading, legend, paragraph, section, table
from dps_dist.report.sections.calibration import Entry, figures_table
from dps_dist.report.tables import Better, Run, group_labels, labels, repeats
from dps_dist.report.values import (
    ABSENT,
    Array,
    Cell,
    array,
    cells,
    mapping,
    number,
    percent,
    spreads,
)

SEVERITIES = 5
Held = Sequence[dict[str, Any]]  # what each run found on one data set; empty where nothing
Groups = Sequence[tuple[str, list[int]]]  # runs that differ in nothing but seeds, with a name


def elsewhere(runs: Sequence[Run], album: Album) -> str:
    found = [run.evaluation.on if run.evaluation else {} for run in runs]
    wanted = dict.fromkeys((name, held.get("kind")) for on in found for name, held in on.items())
    names = labels(runs)
    found_groups = repeats(runs)
    groups = list(zip(group_labels(runs, found_groups), found_groups, strict=True))
    parts = []
    for k, (name, kind) in enumerate(wanted):
        held = [_of_kind(on.get(name, {}), kind) for on in found]
        show = KINDS.get(str(kind))
        key = f"{k}-{slug(name)}"  # other names may come to the same
        measured = [(name, group) for name, group in groups if all(held[k] for k in group)]
        text = show(key, names, measured, held, album) if show else ""
        parts.append(heading(name) + text if text else "")
    return section("Other data", *parts)


def _of_kind(held: dict[str, Any], kind: Any) -> dict[str, Any]:
    return held if held.get("kind") == kind else {}


def _labelled(key: str, names: Sequence[str], groups: Groups, held: Held, album: Album) -> str:
    shown = [
        Entry(label, mapping(own.get("figures")))
        for label, own in zip(names, held, strict=True)
        if own
    ]
    return figures_table(shown) + paragraph(_samples(held))


def _ood(key: str, names: Sequence[str], groups: Groups, held: Held, album: Album) -> str:
    scores = _with_means([number(own, "auroc") for own in held], groups, max)
    all_names = _all_names(names, groups)
    rows = [[Cell(label), score] for label, score in zip(all_names, scores, strict=True)]
    note = f"AUROC: how well confidence tells these samples from the run's own. {_samples(held)}"
    return table(["run", "AUROC"], rows, 1) + paragraph(note)


def _perturbations(key: str, names: Sequence[str], groups: Groups, held: Held, album: Album) -> str:
    kinds = dict.fromkeys(key for own in held for key in mapping(own.get("by_perturbation")))
    means = _with_means([number(own, "mfp") for own in held], groups, min)
    rows = [[Cell("mean (mFP)"), *means]]
    for kind in kinds:
        values = [number(mapping(own.get("by_perturbation")), kind) for own in held]
        rows.append([_named(kind), *_with_means(values, groups, min)])
    titles = ["perturbation", *_all_names(names, groups)]
    note = "How often the prediction flips from frame to frame; lower is better."
    return table(titles, rows, 1) + paragraph(note) + _missing(names, held)


def _corruptions(key: str, names: Sequence[str], groups: Groups, held: Held, album: Album) -> str:
    severity = np.arange(1.0, SEVERITIES + 1)
    accuracy = [_by_severity(own) for own in held]
    ece = [array(own.get("ece_by_severity"), SEVERITIES) for own in held]
    panels = [
        lines.drawing(
            f"corruptions-{figure}-{key}",
            title,
            about,
            [None if value is None else (severity, value) for value in values],
            "severity",
            percent=True,
        )
        for figure, title, about, values in (
            ("accuracy", "accuracy", "mean of the corruptions", accuracy),
            ("ece", "ECE", "of all corruptions", ece),
        )
        if any(value is not None for value in values)
    ]
    drawn = (legend(names) + album.panels(panels)) if panels else ""
    means = _with_means([number(own, "accuracy") for own in held], groups, max)
    rows = [[Cell("mean of all"), *means]]
    for kind in dict.fromkeys(key for own in held for key in mapping(own.get("by_corruption"))):
        values = [_five(own, kind) for own in held]
        average = [None if five is None else float(np.nanmean(five)) for five in values]
        rows.append([_named(kind), *_with_means(average, groups, max)])
    by_run = "".join(
        heading(label) + _severities(own)
        for label, own in zip(names, held, strict=True)
        if mapping(own.get("by_corruption"))
    )
    return (
        drawn
        + table(["accuracy", *_all_names(names, groups)], rows, 1)
        + _missing(names, held)
        + (details("each severity", by_run) if by_run else "")
    )


def _with_means(values: Sequence[float | None], groups: Groups, better: Better) -> list[Cell]:
    """A cell a run, then mean ± deviation of each group."""
    members = [group for _, group in groups]
    return [*cells(values, percent, better), *spreads(values, members, percent, better)]


def _all_names(names: Sequence[str], groups: Groups) -> list[str]:
    return [*names, *(name for name, _ in groups)]


def _five(own: dict[str, Any], kind: str) -> Array | None:
    five = array(mapping(own.get("by_corruption")).get(kind), SEVERITIES)
    return five if five is not None and np.isfinite(five).any() else None


def _by_severity(own: dict[str, Any]) -> Array | None:
    rows = [
        five for kind in mapping(own.get("by_corruption")) if (five := _five(own, kind)) is not None
    ]
    if not rows:
        return None
    known = np.isfinite(rows)
    total = np.where(known, rows, 0.0).sum(axis=0)
    means: Array = np.divide(
        total, known.sum(axis=0), out=np.full(SEVERITIES, np.nan), where=known.any(axis=0)
    )
    return means


def _severities(own: dict[str, Any]) -> str:
    rows = []
    for kind in mapping(own.get("by_corruption")):
        five = _five(own, kind)
        shown = (
            [ABSENT] * SEVERITIES
            if five is None
            else [percent(value) if np.isfinite(value) else ABSENT for value in five]
        )
        rows.append([_named(kind), *map(Cell, shown)])
    return table(["accuracy at severity", *map(str, range(1, SEVERITIES + 1))], rows, 1)


def _named(kind: str) -> Cell:
    return Cell(kind.replace("_", " "))


def _missing(names: Sequence[str], held: Held) -> str:
    """Which files were not there; without them the mean is not what papers state."""
    said = [
        f"{label}: the mean is without {', '.join(map(str, missing)).replace('_', ' ')}."
        for label, own in zip(names, held, strict=True)
        if isinstance(missing := own.get("missing"), list) and missing
    ]
    return paragraph(" ".join(said)) if said else ""


def _samples(held: Held) -> str:
    counts = {f"{n:,.0f}" for own in held if (n := number(own, "samples")) is not None}
    return f"{' or '.join(sorted(counts))} samples." if counts else ""


KINDS: dict[str, Callable[[str, Sequence[str], Groups, Held, Album], str]] = {
    "labelled": _labelled,
    "corruptions": _corruptions,
    "perturbations": _perturbations,
    "ood": _ood,
}
