"""Runs → one page that needs nothing but itself: no network, no script, light and dark."""

import json
import os
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from dps_dist.config.flat import flatten
from dps_dist.errors import InputError
from dps_dist.report import plots, write_whole
from dps_dist.report.drawing import Album
from dps_dist.report.markup import document, heading, legend, paragraph, section, table, tiles
from dps_dist.report.sections.calibration import calibration
from dps_dist.report.sections.elsewhere import elsewhere
from dps_dist.report.sections.knowledge import dark_knowledge, penultimate
from dps_dist.report.sections.paper import paper_says
from dps_dist.report.sections.samples import most_changed
from dps_dist.report.tables import (
    ABOUT_MEANS,
    Run,
    comparison,
    labels,
    progress,
    repeats,
    same_data,
)
from dps_dist.report.values import ABSENT, Cell, number

NO_BREAK = "\N{NO-BREAK SPACE}"
VERSIONS = ("dps_dist", "revision", "python", "torch", "ray", "ffcv", "numpy")


def default_out(runs: Sequence[Run]) -> Path:
    """`RUN/report/index.html`; of several runs, `report.html` in the folder that holds them all."""
    if len(runs) == 1:
        return runs[0].folder / "report" / "index.html"
    parent = Path(os.path.commonpath([run.folder.absolute().parent for run in runs]))
    here = Path.cwd()
    return (parent.relative_to(here) if parent.is_relative_to(here) else parent) / "report.html"


def write(runs: Sequence[Run], out: Path) -> Path:
    """The page, at `out`, and its figures as files beside it."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out is {out}: give a page's name, such as report.html")
    album = Album()
    text = page(runs, album)
    album.save(figures_folder(out))
    # A file's name need not be UTF-8; then the page shows its bytes.
    return write_whole(out, text.encode("utf-8", "backslashreplace"))


def figures_folder(out: Path) -> Path:
    """`figures` beside index.html; pages of other names may be several in a folder."""
    return out.parent / "figures" if out.stem == "index" else out.with_suffix(".figures")


def page(runs: Sequence[Run], album: Album | None = None) -> str:
    same_data(runs)
    album = album or Album()
    one = runs[0] if len(runs) == 1 else None
    title = one.name if one else f"{len(runs)} runs compared"
    sections = [
        _results(runs),
        paper_says(runs),
        calibration(runs, album),
        _curves("Curves", runs, plots.PANELS, album),
        _curves("Targets", runs, plots.TARGETS, album),
        dark_knowledge(runs, album),
        penultimate(runs, album),
        elsewhere(runs, album),
        most_changed(runs),
        "" if one else _differences(runs),
        _runs(runs),
    ]
    return document(title, "".join(sections), about=_about(runs))


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Field → its value in each run, of the fields and versions in which the runs differ."""
    flat = []
    for run in runs:
        fields = dict(flatten({key: value for key, value in run.config.items() if key != "run"}))
        versions = {f"run.{key}": run.field(f"run.{key}") for key in VERSIONS}
        flat.append(fields | {key: value for key, value in versions.items() if value is not None})
    sections = list(dict.fromkeys(key.split(".")[0] for fields in flat for key in fields))
    keys = dict.fromkeys(key for fields in flat for key in fields)
    ordered = sorted(keys, key=lambda key: sections.index(key.split(".")[0]))
    values = {key: [_shown(f[key]) if key in f else ABSENT for f in flat] for key in ordered}
    return {key: row for key, row in values.items() if len(set(row)) > 1}


def _about(runs: Sequence[Run]) -> str:
    """What the runs have in common, and how far they are."""
    words = []
    for key in ("method.name", "model.name", "data.source", "train.epochs"):
        values = {run.field(key) for run in runs if not isinstance(run.field(key), dict | list)}
        if len(values) == 1 and None not in values:
            words.append(str(values.pop()) + (" epochs" if key == "train.epochs" else ""))
    if len(runs) == 1 and (under_way := progress(runs[0])):
        words.append(f"not finished: {under_way}")
    return " · ".join(words)


def _results(runs: Sequence[Run]) -> str:
    titles, rows = comparison(runs)
    split = str(runs[0].field("evaluate.split") or "val")
    notes = [f"Accuracy, ECE and NLL are those of the last evaluation on {split}."]
    notes.append(
        "ECE: how far confidence is from accuracy. NLL: mean −log probability of the true class."
    )
    if "wrong labels righted" in titles:
        notes.append(
            "Wrong labels righted: of the training labels that noise made wrong, those whose "
            "learned target favours the true class."
        )
    if len(runs) > 1:
        notes.append("Bold: the best of its column.")
    if repeats(runs):
        notes.append(f"{ABOUT_MEANS} Bold among these: the best mean.")
    shown = tiles(titles[1:], rows[0][1:]) if len(runs) == 1 else table(titles, rows, 2)
    return section("Results", shown, paragraph(" ".join(notes)), _not_evaluated(runs))


def _not_evaluated(runs: Sequence[Run]) -> str:
    """Which command shows more, of runs that were not evaluated, or were before they went on."""
    never = [str(run.folder) for run in runs if run.evaluation is None]
    early = [
        (run, int(epoch))
        for run in runs
        if run.evaluation
        and (epoch := number(run.evaluation.facts, "epoch")) is not None
        and epoch < run.epochs[-1]["epoch"]
    ]
    said = ""
    if never:
        said += paragraph(
            f"{'Not evaluated yet' if len(never) == len(runs) else 'Some are not evaluated yet'}: "
            f"`{shlex.join(['dps', 'evaluate', *never])}` adds calibration, reliability diagrams "
            "and what the model knows of the classes."
        )
    for run, epoch in early:
        said += paragraph(
            f"{run.name} was evaluated {_moment(run, epoch)} and went on to "
            f"{run.epochs[-1]['epoch']}: `{shlex.join(['dps', 'evaluate', str(run.folder)])}`"
        )
    return said


def _moment(run: Run, epoch: int) -> str:
    within = run.evaluation and number(run.evaluation.facts, "position")
    return f"in epoch {epoch + 1}" if within else f"after epoch {epoch}"


def _curves(title: str, runs: Sequence[Run], panels: Sequence[plots.Panel], album: Album) -> str:
    drawn = album.panels(plots.drawings(runs, panels))
    return section(title, legend(labels(runs)), drawn) if drawn else ""


def _differences(runs: Sequence[Run]) -> str:
    found = differences(runs)
    if not found:
        return section("Configuration", paragraph("The runs have the same configuration."))
    rows = [["field", *labels(runs)], *([key, *values] for key, values in found.items())]
    if len(runs) > len(found):  # rather long than wide
        rows = [["run", *found], *map(list, list(zip(*rows, strict=True))[1:])]
    cells = [[Cell(text) for text in row] for row in rows[1:]]
    return section("Configuration: what differs", table(rows[0], cells, len(rows[0])))


def _runs(runs: Sequence[Run]) -> str:
    parts = []
    for run, label in zip(runs, labels(runs), strict=True):
        command = run.field("run.command")
        versions = [
            f"{key} {run.field(f'run.{key}')}" for key in VERSIONS if run.field(f"run.{key}")
        ]
        created = run.field("run.created")
        facts = ([f"made {created}"] if created else []) + versions
        config = {key: value for key, value in run.config.items() if key != "run"}
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=80)
        parts.append(
            "<article>\n"
            + (heading(label) if len(runs) > 1 else "")
            + (f'<pre class="command">{escape(str(command))}</pre>\n' if command else "")
            + paragraph(str(run.folder))
            + paragraph(" · ".join(fact.replace(" ", NO_BREAK) for fact in facts))
            + f"<details><summary>full configuration</summary><pre>{escape(text)}</pre></details>"
            + "</article>\n"
        )
    return section("How it was run" if len(runs) == 1 else "How they were run", *parts)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
