"""What `dps evaluate` prints: tables of figures, and a line for each further data set."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from rich.markup import escape
from rich.table import Table

from dps_dist.evaluate.seeds import Spread
from dps_dist.report.values import ABSENT, MEASURES, percent, plain

Report = Mapping[str, Any]

PERCENT = {one.key: f"{one.title} %" for one in MEASURES if one.text is percent}
PERCENT["ece_ts"] = "ECE after TS %"
PLAIN = {one.key: one.title for one in MEASURES if one.text is plain}
PLAIN["nll_ts"] = "NLL after TS"
NAME_WIDTH = 16  # at which the name of a run is broken
OF_OTHER_DATA = {"accuracy": "accuracy", "mfp": "mFP", "auroc": "AUROC"}  # all in percent
ORDER = (*(one.key for one in MEASURES), "nll_ts", "ece_ts")


def tables(
    reports: Mapping[str, Report],
    ensemble: Mapping[str, float] | None = None,
    spread: Spread | None = None,
    *,
    width: int = 80,
) -> Iterator[Table]:
    """A row a figure, a column a run and the ensemble; below each other what has no room beside.

    spread: mean and deviation of runs that are the same but for their seeds.
    """
    figures = [report["figures"] for report in reports.values()]
    keys = [key for key in ORDER if any(key in own for own in figures)]
    titles = [PERCENT.get(key) or PLAIN[key] for key in keys]
    named = [(_name(run, reports), reports[run]["figures"]) for run in reports]
    named += [("ensemble", ensemble)] if ensemble is not None else []
    columns = [(name, [_number(key, own.get(key)) for key in keys]) for name, own in named]
    if spread is not None:
        means = "mean ± deviation", [_spread(key, spread) for key in keys]
        columns.insert(len(figures), means)
    while columns:
        made = Table("", box=None, header_style="bold", pad_edge=False)
        room, block = width - max(map(len, titles)), list[list[str]]()
        while columns:
            name, cells = columns[0]
            wide = max(min(len(name), NAME_WIDTH), *map(len, cells))
            room -= 2 + wide
            if block and room < 0:
                break
            made.add_column(escape(name), justify="right", overflow="fold", width=wide)
            block.append(columns.pop(0)[1])
        for row in zip(titles, *block, strict=True):
            made.add_row(*row)
        yield made


def _name(run: str, reports: Mapping[str, Report]) -> str:
    """The run's name, or its folder where others have the same."""
    name = str(reports[run]["run"])
    return name if [report["run"] for report in reports.values()].count(name) == 1 else run


def elsewhere(reports: Mapping[str, Report], spread: Spread | None = None) -> Iterator[str]:
    """Figures on further data, a line for each run and name; then their mean ± deviation."""
    for run, report in reports.items():
        for name, found in report.get("on", {}).items():
            yield f"{run} on {name}: {_said(found)}"
    for name in dict.fromkeys(name for report in reports.values() for name in report.get("on", {})):
        for key, title in OF_OTHER_DATA.items():
            if spread is not None and (own := f"{key} on {name}") in spread.mean:
                yield f"mean ± deviation on {name}: {title} {_spread(own, spread)}%"


def notes(reports: Mapping[str, Report]) -> Iterator[str]:
    """Which epoch the best checkpoint is of; what an evaluation had to do without, once where it is
    the same of several."""
    for folder, report in reports.items():
        if report.get("checkpoint") == "best":
            yield f"note: the best checkpoint of {folder} is that of epoch {report['epoch']}"
    for said in dict.fromkeys(report.get("left_out") for report in reports.values()):
        if said:
            yield f"note: {said}"


def _said(found: Mapping[str, Any]) -> str:
    if found["kind"] == "corruptions":
        ece = found["ece_by_severity"]
        by_severity = ", ".join(f"{100 * e:.1f}" if isfinite(e) else ABSENT for e in ece)
        accuracy = f"{100 * found['accuracy']:.2f}%{_missing(found)}"
        return f"accuracy {accuracy}; ECE by severity {by_severity}%"
    if found["kind"] == "perturbations":
        rates = found["by_perturbation"]
        each = ", ".join(f"{name} {100 * rate:.2f}" for name, rate in rates.items())
        return f"mFP {_number('mfp', found.get('mfp'))}%{_missing(found)} ({each})"
    if found["kind"] == "ood":
        return f"AUROC {_number('auroc', found['auroc'])}% against {found['samples']:,} images"
    figures = found["figures"]
    shown = (
        f"{PERCENT.get(key) or PLAIN[key]} {_number(key, figures[key])}"
        for key in ORDER[: len(MEASURES)]
    )
    return ", ".join(shown)


def _missing(found: Mapping[str, Any]) -> str:
    """Which files were not there; without them the mean is not what papers state."""
    missing = found.get("missing", [])
    few = ", ".join(missing[:3]) + (f", … ({len(missing)})" if len(missing) > 3 else "")
    return f" without {few}" if missing else ""


def _number(key: str, value: float | None) -> str:
    if value is None or not isfinite(value):
        return ABSENT
    return f"{100 * value:.2f}" if key in PERCENT or key in ("mfp", "auroc") else f"{value:.3f}"


def _spread(key: str, spread: Spread) -> str:
    """`key` may be that on further data, such as `auroc on svhn`."""
    plain = key.partition(" on ")[0]
    found = [_number(plain, values.get(key)) for values in spread]
    return ABSENT if ABSENT in found else " ± ".join(found)
