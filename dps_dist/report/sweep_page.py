"""A sweep → one page: heatmaps where two fields were tried, the Pareto front, every cell."""

import datetime
import math
from collections.abc import Sequence
from typing import Any

from dps_dist.config.sweep import BETTER
from dps_dist.report import sweep as sweeps
from dps_dist.report.drawing import Album, Drawing
from dps_dist.report.figures import grid, scatter
from dps_dist.report.markup import document, paragraph, section, table, tiles
from dps_dist.report.sweep import METRICS, Cell, Results
from dps_dist.report.values import ABSENT
from dps_dist.report.values import Cell as Shown
from dps_dist.train.storage import Storage

PAGE, FIGURES = "index.html", "figures"
REFRESH_S = 10  # while trials run
TITLES = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL"}
SYMBOLS = {"method.gamma": "γ", "method.c": "c"}
MOST_LISTED = 200


def publish(folder: Storage, ended: bool = False) -> Results:
    """Write results.parquet and the page anew, whole at any moment.

    ended: nothing runs any more, whatever is left to do.
    """
    results = sweeps.read(folder)
    sweeps.write(folder, results)
    album, going = Album(), not ended and bool(results.count("waiting", "running"))
    text = page(results, album, folder.name, going)
    folder.write(PAGE, text.encode("utf-8", "backslashreplace"))
    if folder.local is not None and not going:
        album.save(folder.local / FIGURES)
    return results


def page(results: Results, album: Album, name: str, going: bool) -> str:
    found = sweeps.cells(results)
    sections = [
        _best(results, found),
        section("What was found", album.panels(_drawings(results, found))),
        section("Every cell", _table(results, found)),
        _ended_early(results),
        section("What was run", paragraph(_asked(results))),
    ]
    return document(name, "".join(sections), about=_about(results), refresh=REFRESH_S * going)


def _about(results: Results) -> str:
    """How far it is."""
    counts = [
        f"{count} {status}"
        for status in ("finished", "running", "waiting", "stopped", "failed")
        if (count := results.count(status))
    ]
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{len(results.rows)} trials: {', '.join(counts)} · written {now}"


def _best(results: Results, found: Sequence[Cell]) -> str:
    shown = [(key, sweeps.best(found, key)) for key in METRICS]
    there = [(key, cell) for key, cell in shown if cell is not None]
    if not there:
        return section("Best", paragraph("No trial is finished yet."))
    titles = [f"best {TITLES[key]}, at {_name(results, cell)}" for key, cell in there]
    return section("Best", tiles(titles, [Shown(_spread(cell, key)) for key, cell in there]))


def _drawings(results: Results, found: Sequence[Cell]) -> list[Drawing]:
    """Heatmaps of two fields, else each field by itself; then the Pareto front."""
    if not found:
        return []
    fields, front = results.fields, sweeps.pareto(found)
    of_fields = _heatmaps(fields, found) if len(fields) == 2 else _by_field(fields, found)
    named = [_name(results, cell) for cell in front]
    return [*of_fields, *([scatter.pareto(found, front, named)] if front else [])]


def _heatmaps(fields: Sequence[str], found: Sequence[Cell]) -> list[Drawing]:
    rows, columns = (_sorted({cell.values[k] for cell in found}) for k in (0, 1))
    seeds = max(cell.seeds for cell in found)
    of = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    return [
        grid.drawing(
            f"{key}-grid",
            TITLES[key] + ("" if key == "nll" else " %"),
            f"{'higher' if BETTER[key] == 'max' else 'lower'} is better; {of}",
            (symbol(fields[0]), symbol(fields[1])),
            (rows, columns),
            {(cell.values[0], cell.values[1]): cell.mean[key] for cell in found},
            percent=key != "nll",
            higher_is_better=BETTER[key] == "max",
        )
        for key in METRICS
    ]


def _by_field(fields: Sequence[str], found: Sequence[Cell]) -> list[Drawing]:
    return [
        scatter.by_field(f"{metric}-{at}", symbol(field), found, at, metric)
        for at, field in enumerate(fields)
        for metric in ("accuracy", "ece")
    ]


def ranked(results: Results) -> list[tuple[str, ...]]:
    """Cells, the best first by the sweep's metric: name, figures, seeds."""
    return [
        (_name(results, cell), *(_spread(cell, key) for key in METRICS), str(cell.seeds))
        for cell in _by_metric(results, sweeps.cells(results))
    ]


def _by_metric(results: Results, found: Sequence[Cell]) -> list[Cell]:
    metric = results.sweep["metric"]
    sign = -1 if BETTER[metric] == "max" else 1
    return sorted(found, key=lambda cell: (math.isnan(cell.mean[metric]), sign * cell.mean[metric]))


def _table(results: Results, found: Sequence[Cell]) -> str:
    if not found:
        return ""
    bests = {key: sweeps.best(found, key) for key in METRICS}
    rows = [
        [
            Shown(_name(results, cell)),
            *(Shown(_spread(cell, key), cell is bests[key]) for key in METRICS),
            Shown(str(cell.seeds)),
        ]
        for cell in _by_metric(results, found)[:MOST_LISTED]
    ]
    more = len(found) - len(rows)
    note = paragraph(f"{more} more are in `{sweeps.RESULTS}`.") if more else ""
    titles = ["cell", *(TITLES[key] for key in METRICS), "seeds"]
    return table(titles, rows, text_columns=1) + note


def _ended_early(results: Results) -> str:
    rows = [
        [Shown(row["trial"]), Shown(row["status"]), Shown(_why(row))]
        for row in results.rows
        if row["status"] in ("failed", "stopped")
    ]
    told = table(["trial", "", "why"], rows[:MOST_LISTED], text_columns=3) if rows else ""
    return section("Trials that did not run to the end", told)


def _why(row: dict[str, Any]) -> str:
    if row["status"] == "failed":
        return row["reason"] or ABSENT
    at = f"after epoch {row['epoch']}" if row["epoch"] else "before its first epoch"
    return f"by the scheduler, {at}"


def _asked(results: Results) -> str:
    sweep = results.sweep
    settings = " ".join(f"--set {one}" for one in sweep["settings"])
    tried = "; ".join(f"{field} in {values}" for field, values in sweep["space"].items())
    return (
        f"Recipe `{sweep['recipe']} {settings}`, {sweep['search']} search over {tried}, "
        f"{sweep['seeds']} seed(s), scheduler {sweep['scheduler']}. Figures are of the last epoch "
        f"on {sweep['hold_out']:,} samples that were held out of the training set, with clean "
        "labels; the test set was not used. Deviations are over the seeds."
    )


def symbol(field: str) -> str:
    return SYMBOLS.get(field, field)


def _name(results: Results, cell: Cell) -> str:
    pairs = zip(results.fields, cell.values, strict=True)
    return ", ".join(f"{symbol(f)}={f'{v:g}' if isinstance(v, float) else v}" for f, v in pairs)


def _spread(cell: Cell, key: str) -> str:
    factor, digits = (1, 3) if key == "nll" else (100, 2)
    shown = f"{factor * cell.mean[key]:.{digits}f}"
    deviation = cell.deviation[key]
    shown += f" ± {factor * deviation:.{digits}f}" if math.isfinite(deviation) else ""
    return shown + ("" if key == "nll" else "%")


def _sorted(values: set[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=str)
