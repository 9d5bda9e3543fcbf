"""What the model knows beyond the labels: μ, δ, TA-KL; and the penultimate layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dps_dist.report.drawing import Album, Drawing, slug
from dps_dist.report.evaluation import Evaluation
from dps_dist.report.figures import heatmap, histogram, lines, projection
from dps_dist.report.markup import details, heading, legend, paragraph, section, table
from dps_dist.report.tables import Run, labels
from dps_dist.report.values import Cell, percent

PAIRS = 8  # confusions that are named


def dark_knowledge(runs: Sequence[Run], album: Album) -> str:
    names = labels(runs)
    found = [
        (k, run.evaluation, mu)
        for k, run in enumerate(runs)
        if run.evaluation and (mu := run.evaluation.mu()) is not None
    ]
    lowest = heatmap.least([mu for _, _, mu in found]) if found else 1.0
    maps, pairs = [], ""
    for k, evaluation, mu in found:
        key = f"mu-{k}-{slug(runs[k].name)}"
        maps.append(heatmap.drawing(key, names[k], mu, evaluation.classes, lowest))
        pairs += (heading(names[k]) if len(runs) > 1 else "") + _pairs(evaluation, mu)
    squares = ""
    if maps:
        note = "μ: the mean prediction for the samples of each class, on a logarithmic scale."
        squares = paragraph(note) + album.squares(maps)
        squares += details(f"the {PAIRS} greatest confusions", pairs) if pairs else ""
    left_out = dict.fromkeys(
        f"{said[:1].upper()}{said[1:]}."
        for run in runs
        if run.evaluation and isinstance(said := run.evaluation.facts.get("left_out"), str)
    )
    squares += "".join(map(paragraph, left_out))
    panels = _delta_and_ta_kl(runs)
    below = (legend(names) + album.panels(panels) + _of_how_many(runs)) if panels else ""
    return section("Dark knowledge", squares, below)


def _pairs(evaluation: Evaluation, mu: npt.NDArray[Any]) -> str:
    if len(mu) < 2:
        return ""
    others = np.nan_to_num(mu, nan=0.0).astype(float)
    np.fill_diagonal(others, -1)
    first = np.argsort(-others, axis=None, kind="stable")[: min(PAIRS, len(mu) * (len(mu) - 1))]
    rows = []
    for true, predicted in zip(*np.unravel_index(first, mu.shape), strict=True):
        name = evaluation.class_name
        share = percent(others[true, predicted])
        rows.append([Cell(name(int(true))), Cell(name(int(predicted))), Cell(share)])
    return table(["true class", "taken for", "mean probability"], rows, 2)


def _delta_and_ta_kl(runs: Sequence[Run]) -> list[Drawing]:
    panels = []
    deltas = [run.evaluation.delta() if run.evaluation else None for run in runs]
    if any(delta is not None for delta in deltas):
        panels.append(histogram.drawing(deltas))
    curves = [run.evaluation.ta_kl() if run.evaluation else None for run in runs]
    if any(curve is not None for curve in curves):
        about = "of each checkpoint's predictions and the last one's"
        panels.append(lines.drawing("ta_kl", "TA-KL", about, curves, "epoch", percent=False))
    return panels


def _of_how_many(runs: Sequence[Run]) -> str:
    """From how many checkpoints TA-KL comes: by default few are kept."""
    curves = [run.evaluation.ta_kl() for run in runs if run.evaluation]
    counts = sorted({len(curve[0]) for curve in curves if curve is not None})
    if not counts:
        return ""
    said = " or ".join(map(str, counts))
    return paragraph(
        f"TA-KL is of {said} earlier checkpoint{'' if counts == [1] else 's'} that the run kept: "
        "`train.checkpoint.keep_last` keeps more."
    )


KINDS = {
    "similar": "Two classes that are alike, and another",
    "dissimilar": "Three that are unlike",
}


def penultimate(runs: Sequence[Run], album: Album) -> str:
    """The runs side by side, for each kind; of one run, the kinds."""
    names, shown = labels(runs), []
    for kind, title in KINDS.items():
        drawings = [
            projection.drawing(
                f"{kind}-{k}-{slug(run.name)}",
                names[k] if len(runs) > 1 else title,
                kind,
                run.evaluation,
            )
            for k, run in enumerate(runs)
            if run.evaluation
        ]
        shown.append((title, [drawing for drawing in drawings if drawing is not None]))
    if not any(found for _, found in shown):
        return ""
    note = paragraph(
        "The penultimate layer's activations of three classes, on the plane through the classes' "
        "templates (rows of the last layer's weights)."
    )
    if len(runs) == 1:
        return section("Penultimate layer", note, album.squares([d for _, f in shown for d in f]))
    parts = [heading(title) + album.squares(found) for title, found in shown if found]
    return section("Penultimate layer", note, *parts)
