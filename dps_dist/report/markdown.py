"""The comparison of runs as a Markdown table, for a README or a pull request."""

from collections.abc import Sequence
from pathlib import Path

from dps_dist.report import write_whole
from dps_dist.report.tables import ABOUT_MEANS, Run, comparison, repeats, same_data
from dps_dist.report.values import Cell


def save(runs: Sequence[Run], out: Path) -> Path:
    """Without images/s, which says more of the machine than of the runs."""
    same_data(runs)
    titles, rows = comparison(runs)
    shown = [k for k, title in enumerate(titles) if title != "images/s"]
    lines = ["| " + " | ".join(titles[k] for k in shown) + " |", "|---" * len(shown) + "|"]
    lines += ["| " + " | ".join(_text(row[k]) for k in shown) + " |" for row in rows]
    if repeats(runs):
        lines += ["", ABOUT_MEANS]
    return write_whole(out, ("\n".join(lines) + "\n").encode())


def _text(cell: Cell) -> str:
    plain = "".join(f"\\{sign}" if sign in r"\|*_<`[" else sign for sign in cell.text)
    return f"**{plain}**" if cell.best else plain
