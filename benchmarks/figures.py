"""What a benchmark found: printed, and kept for the table that `python benchmarks` makes."""

import json
import os
import sys
from pathlib import Path

KEPT = "DPS_BENCHMARK_FIGURES"  # a file, one line of JSON a figure


def found(
    what: str,
    value: float,
    form: str = "{:.2f}×",
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str = "",
) -> None:
    """A figure, whether it is good enough, and what else is to be known of it."""
    goals = [(at_most, "≤", value <= (at_most or 0)), (at_least, "≥", value >= (at_least or 0))]
    goal, met = next(
        (
            (f"{sign} {form.format(limit)}", good)
            for limit, sign, good in goals
            if limit is not None
        ),
        ("", True),
    )
    row = {
        "what": what,
        "measured": form.format(value) + (f" ({note})" if note else ""),
        "goal": goal,
        "met": met,
        "script": Path(sys.argv[0]).name,
    }
    said = f" (goal {goal}, {'met' if met else 'MISSED'})" if goal else ""
    print(f"{what}: {row['measured']}{said}", flush=True)
    if file := os.environ.get(KEPT):
        with Path(file).open("a") as kept:
            kept.write(json.dumps(row) + "\n")
