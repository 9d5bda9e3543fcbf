"""Runs → one page that needs nothing but itself: no network, no script, light and dark."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from dps_dist.errors import InputError
from dps_dist.report import write_whole
from dps_dist.report.plots import COLOURS, ON_DARK, colour, dash, drawable, panel_svg
from dps_dist.report.tables import ABSENT, Cell, Run, comparison, labels, progress

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
    """The page, at `out`."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out is {out}: give a page's name, such as report.html")
    # A file's name need not be UTF-8; then the page shows its bytes.
    return write_whole(out, page(runs).encode("utf-8", "backslashreplace"))


def page(runs: Sequence[Run]) -> str:
    one = runs[0] if len(runs) == 1 else None
    title = one.name if one else f"{len(runs)} runs compared"
    sections = [_results(runs), _curves(runs)]
    if not one:
        sections.append(_differences(runs))
    sections.append(_runs(runs))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{_css()}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(_about(runs))}</p>
</header>
<main>
{"".join(sections)}
</main>
</body>
</html>
"""


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Field → its value in each run, of the fields and versions in which the runs differ."""
    flat = []
    for run in runs:
        fields = dict(_flatten({key: value for key, value in run.config.items() if key != "run"}))
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
    table = _tiles(titles[1:], rows[0][1:]) if len(runs) == 1 else _table(titles, rows, 2)
    return _section("Results", table, _paragraph(" ".join(notes)))


def _curves(runs: Sequence[Run]) -> str:
    legend = ""
    if len(runs) > 1:
        entries = [f"<li>{_swatch(k)}{escape(label)}</li>" for k, label in enumerate(labels(runs))]
        legend = f'<ul class="legend">{"".join(entries)}</ul>\n'
    figures = [
        f"<figure><figcaption>{escape(panel.title)} "
        f'<span class="soft">{escape(panel.better)}</span></figcaption>\n'
        f"{panel_svg(runs, panel)}</figure>\n"
        for panel in drawable(runs)
    ]
    return _section("Curves", legend, f'<div class="panels">\n{"".join(figures)}</div>\n')


def _differences(runs: Sequence[Run]) -> str:
    found = differences(runs)
    if not found:
        return _section("Configuration", _paragraph("The runs have the same configuration."))
    rows = [["field", *labels(runs)], *([key, *values] for key, values in found.items())]
    if len(runs) > len(found):  # rather long than wide
        rows = [["run", *found], *map(list, list(zip(*rows, strict=True))[1:])]
    cells = [[Cell(text) for text in row] for row in rows[1:]]
    return _section("Configuration: what differs", _table(rows[0], cells, len(rows[0])))


def _runs(runs: Sequence[Run]) -> str:
    parts = []
    for run, label in zip(runs, labels(runs), strict=True):
        command = run.field("run.command")
        command = shlex.join(map(str, command)) if isinstance(command, list) else command
        versions = [
            f"{key} {run.field(f'run.{key}')}" for key in VERSIONS if run.field(f"run.{key}")
        ]
        created = run.field("run.created")
        facts = ([f"made {created}"] if created else []) + versions
        config = {key: value for key, value in run.config.items() if key != "run"}
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=80)
        parts.append(
            "<article>\n"
            + (f"<h3>{escape(label)}</h3>\n" if len(runs) > 1 else "")
            + (f'<pre class="command">{escape(str(command))}</pre>\n' if command else "")
            + _paragraph(str(run.folder))
            + _paragraph(" · ".join(fact.replace(" ", NO_BREAK) for fact in facts))
            + f"<details><summary>full configuration</summary><pre>{escape(text)}</pre></details>"
            + "</article>\n"
        )
    return _section("How it was run" if len(runs) == 1 else "How they were run", *parts)


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def _paragraph(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>\n'


def _tiles(titles: Sequence[str], cells: Sequence[Cell]) -> str:
    """One run's figures: there is nothing to compare, so they need not stand in columns."""
    pairs = [
        f"<div><dt>{escape(title)}</dt><dd>{escape(cell.text)}</dd></div>\n"
        for title, cell in zip(titles, cells, strict=True)
    ]
    return f'<dl class="tiles">\n{"".join(pairs)}</dl>\n'


def _table(titles: Sequence[str], rows: Sequence[Sequence[Cell]], text_columns: int) -> str:
    """`text_columns`: how many stand left; the others are numbers."""

    def row(tag: str, cells: Sequence[Cell]) -> str:
        written = []
        for k, cell in enumerate(cells):
            name = "th" if k == 0 or tag == "th" else "td"
            scope = ' scope="col"' if tag == "th" else ' scope="row"' if k == 0 else ""
            number = "" if k < text_columns else ' class="number"'
            text = re.sub(r"\.(?=[a-z])", ".<wbr>", escape(cell.text))  # fields may be broken there
            text = f"<b>{text}</b>" if cell.best else text
            written.append(f"<{name}{scope}{number}>{text}</{name}>")
        return f"<tr>{''.join(written)}</tr>\n"

    head, body = row("th", [Cell(title) for title in titles]), "".join(row("td", r) for r in rows)
    return (
        '<div class="scroll" tabindex="0"><table>\n'
        f"<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
    )


def _swatch(k: int) -> str:
    style = dash(k)
    dashes = "" if isinstance(style, str) else " ".join(str(2 * length) for length in style[1])
    return (
        '<svg class="swatch" viewBox="0 0 28 8" aria-hidden="true"><line x1="0" y1="4" x2="28" '
        f'y2="4" stroke-width="3" stroke-dasharray="{dashes}" style="stroke:{colour(k)}"/></svg>'
    )


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _css() -> str:
    light = "".join(f"--run{k}: {colour}; " for k, colour in enumerate(COLOURS))
    dark = "".join(f"--run{k}: {colour}; " for k, colour in enumerate(ON_DARK))
    return f"""\
:root {{ --ink: #1b1f24; --soft: #5f6772; --line: #d9dde2; --paper: #ffffff; --box: #f4f6f8;
  {light}}}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ed; --soft: #9aa4b0; --line: #343b44; --paper: #14181d; --box: #1d232a;
    {dark}}}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 72rem; padding: 2rem clamp(1rem, 4vw, 2.5rem) 4rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }}
h1 {{ margin: 0; font-size: clamp(1.5rem, 5vw, 2rem); line-height: 1.2; }}
h2 {{ margin: 2.5rem 0 .75rem; font-size: 1.2rem; }}
h3 {{ margin: 1.5rem 0 .5rem; font-size: 1rem; }}
p {{ margin: .5rem 0; max-width: 48rem; }}
.soft {{ color: var(--soft); font-size: .875rem; font-weight: normal; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }}
th, td {{ padding: .45rem .9rem; border-bottom: 1px solid var(--line); text-align: left;
  font-weight: normal; vertical-align: top; overflow-wrap: normal; }}
thead th {{ color: var(--soft); font-size: .875rem; vertical-align: bottom; }}
tbody th {{ overflow-wrap: anywhere; min-width: 8.5rem; width: 30%; }}
tr > :first-child {{ padding-left: 0; position: sticky; left: 0; background: var(--paper); }}
tr > :last-child {{ padding-right: 0; }}
.number {{ text-align: right; white-space: nowrap; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 0 0 1rem; }}
dt {{ color: var(--soft); font-size: .875rem; }}
dd {{ margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 0 0 1rem; padding: 0;
  list-style: none; font-size: .9rem; }}
.legend li {{ display: flex; align-items: baseline; }}
.swatch {{ flex: none; width: 1.75rem; height: .5rem; margin-right: .5rem; }}
.panels {{ display: grid; gap: 1.5rem 2rem; grid-template-columns: 1fr; }}
@media (min-width: 44rem) {{ .panels {{ grid-template-columns: 1fr 1fr; }} }}
@media (max-width: 44rem) {{ th, td {{ padding: .4rem .5rem; font-size: .9rem; }} }}
figure {{ margin: 0; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figure svg text {{ font-family: system-ui, sans-serif !important; }}
figcaption {{ font-weight: 600; }}
pre {{ margin: .5rem 0; padding: .75rem 1rem; overflow-x: auto; background: var(--box);
  border-radius: 6px; font: .85rem/1.5 ui-monospace, monospace; }}
.command {{ white-space: pre-wrap; }}
summary {{ cursor: pointer; color: var(--soft); font-size: .875rem; }}
@media print {{ .scroll, pre {{ overflow: visible; white-space: pre-wrap; }} }}"""
