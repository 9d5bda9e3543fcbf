"""What the paper says, beside what a run of one of its rows has: the paper's, never ours."""

from collections.abc import Sequence
from typing import Any

from dps_dist import recipes
from dps_dist.config.flat import flatten
from dps_dist.errors import InputError
from dps_dist.recipes import paper
from dps_dist.report.markup import heading, paragraph, section, table
from dps_dist.report.sections.calibration import mixed_precision
from dps_dist.report.tables import Run, labels
from dps_dist.report.values import ABSENT, Cell, finite, number, percent, plain

# With another of these it is not the paper's row; with another of FREE it still is.
OF_THE_ROW = (
    *("method.name", "method.task.name", "model.", "data.source", "data.noise."),
    "evaluate.split",
)
FREE = ("launch.", "train.checkpoint.", "train.seed", "data.path", "data.threads", "run.")
TITLES = {
    "accuracy": "accuracy",
    "best_accuracy": "best accuracy of all epochs",
    "accuracy_c": "accuracy on CIFAR-10-C",
    "mfp": "mFP on CIFAR-10-P",
    "auroc": "AUROC against SVHN",
    "ece": "ECE",
    "sce": "SCE",
    "ace": "ACE",
    "nll": "NLL",
}


def paper_says(runs: Sequence[Run]) -> str:
    shown = ""
    for run, label in zip(runs, labels(runs), strict=True):
        recipe = run.field("run.recipe")
        found, differ = _of_the_paper(run, recipe) if isinstance(recipe, str) else ([], [])
        rows = [_row(run, *held) for held in found if _shown(held[2])]
        if not rows:
            continue
        shown += heading(label) if len(runs) > 1 else ""
        shown += table(["", "this run", "the paper says"], rows, 1, marked=2)
        if differ:
            shown += paragraph(f"{label} differs from the recipe {recipe}: {', '.join(differ)}.")
    if not shown:
        return ""
    about = "The boxed column holds the paper's figures, not ours; ± is the deviation of its runs."
    said = " ".join([about, *mixed_precision(runs)])
    return section("Beside the paper", shown, paragraph(said))


def _shown(cell: paper.Cell) -> bool:
    """An ensemble has no run's folder that could hold its figure."""
    return cell.value is not None and cell.metric != "ensemble_accuracy"


def _row(run: Run, held: paper.Table, row: paper.Row, cell: paper.Cell) -> list[Cell]:
    theirs = f"{cell.value:g}" if cell.std is None else f"{cell.value:g} ± {cell.std:.2f}"
    unit = "" if cell.metric.startswith("nll") else "%"
    where = f"{held.title}: {row.name}, {cell.column}" + (f" ({cell.note})" if cell.note else "")
    ours = Cell(_ours(run, cell.metric))
    return [Cell(_title(cell.metric), note=where), ours, Cell(f"{theirs}{unit}")]


def _of_the_paper(
    run: Run, recipe: str
) -> tuple[list[tuple[paper.Table, paper.Row, paper.Cell]], list[str]]:
    """The paper's cells for the recipe, and in what the run departs from it."""
    try:
        found = paper.rows_of(recipe)
        asked = recipes.load(recipe).model_dump(mode="json") if found else {}
    except InputError:  # a recipe of another version, or of the user's own
        return [], []
    own, theirs = dict(flatten(run.config)), dict(flatten(asked))
    differ = [
        key for key in theirs if key in own and own[key] != theirs[key] and not key.startswith(FREE)
    ]
    if any(key.startswith(OF_THE_ROW) for key in differ):
        return [], []
    return found, [f"{key} is {own[key]} instead of {theirs[key]}" for key in differ]


def _title(metric: str) -> str:
    scaled = metric.endswith("_ts")
    name = TITLES.get(metric.removesuffix("_ts"), metric)
    return f"{name} after temperature scaling" if scaled else name


def _ours(run: Run, metric: str) -> str:
    value = _figure(run, metric)
    if value is None or not finite(value):
        return ABSENT
    return plain(value) if metric.startswith("nll") else percent(value)


def _figure(run: Run, metric: str) -> float | None:
    """The run's own; of an evaluation of its split if there is one, else of its last epoch.

    A mean over some of the corruptions or perturbations is not the paper's figure.
    """
    if metric == "best_accuracy":
        best = run.best()
        return best[0] if best else None
    kinds = {
        "accuracy_c": ("corruptions", "accuracy"),
        "mfp": ("perturbations", "mfp"),
        "auroc": ("ood", "auroc"),
    }
    if metric in kinds:
        kind, key = kinds[metric]
        on: dict[str, Any] = run.evaluation.on if run.evaluation else {}
        whole = {name: own for name, own in on.items() if not own.get("missing")}
        held = [own for own in whole.values() if own.get("kind") == kind]
        if metric == "auroc":
            held = [own for name, own in whole.items() if "svhn" in name.lower() and own in held]
        return number(held[0], key) if held else None
    found, split = run.evaluation, run.field("evaluate.split")
    evaluated = found.figures if found and found.facts.get("split") == split else {}
    value = number(evaluated, metric)
    return value if value is not None else run.last(metric)
