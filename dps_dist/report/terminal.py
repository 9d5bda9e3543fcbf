"""What `dps evaluate` prints: a table of figures, and a line for each further data set."""

from collections.abc import Iterator, Mapping
from statistics import mean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

Report = Mapping[str, Any]

PERCENT = {
    "accuracy": "accuracy %",
    "top5": "top-5 %",
    "ece": "ECE %",
    "ece_10": "ECE, 10 bins %",
    "sce": "SCE %",
    "ace": "ACE %",
    "ece_ts": "ECE after TS %",
}
PLAIN = {"nll": "NLL", "brier": "Brier", "nll_ts": "NLL after TS"}
ORDER = ("accuracy", "top5", "nll", "brier", "ece", "ece_10", "sce", "ace", "nll_ts", "ece_ts")


def table(reports: Mapping[str, Report], ensemble: Mapping[str, float] | None = None) -> Table:
    """A row a run; of several, their mean ± deviation and the ensemble."""
    rows = {run: report["figures"] for run, report in reports.items()}
    keys = [key for key in ORDER if any(key in figures for figures in rows.values())]
    names = {**PERCENT, **PLAIN}
    made = Table("run", box=None, header_style="bold")
    for key in keys:
        made.add_column(names[key], justify="right")
    for run, figures in rows.items():
        made.add_row(escape(run), *(_number(key, figures.get(key)) for key in keys))
    if len(rows) > 1:
        made.add_row("mean ± deviation", *(_spread(key, list(rows.values())) for key in keys))
    if ensemble is not None:
        made.add_row("ensemble", *(_number(key, ensemble.get(key)) for key in keys))
    return made


def elsewhere(reports: Mapping[str, Report]) -> Iterator[str]:
    """Figures on further data, a line for each run and name."""
    for run, report in reports.items():
        for name, found in report.get("on", {}).items():
            yield f"{run} on {name}: {_said(found)}"


def _said(found: Mapping[str, Any]) -> str:
    if found["kind"] == "corruptions":
        by_severity = ", ".join(f"{100 * ece:.1f}" for ece in found["ece_by_severity"])
        return f"accuracy {100 * found['accuracy']:.2f}%; ECE by severity {by_severity}%"
    if found["kind"] == "perturbations":
        rates = found["by_perturbation"]
        each = ", ".join(f"{name} {100 * rate:.2f}" for name, rate in rates.items())
        return f"mFP {_number('mfp', found.get('mfp'))}% ({each})"
    if found["kind"] == "ood":
        return f"AUROC {100 * found['auroc']:.2f}% against {found['samples']:,} images"
    figures = found["figures"]
    shown = (f"{PERCENT.get(key) or PLAIN[key]} {_number(key, figures[key])}" for key in ORDER[:8])
    return ", ".join(shown)


def _number(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.2f}" if key in PERCENT or key == "mfp" else f"{value:.3f}"


def _spread(key: str, rows: list[Mapping[str, float]]) -> str:
    values = [figures[key] for figures in rows if key in figures]
    if len(values) < 2:
        return "–"
    return f"{_number(key, mean(values))} ± {_number(key, stdev(values))}"
