"""Runs that differ in nothing but seeds: which they are, and mean ± deviation of their figures.

`dps evaluate` and `dps report` both take them from here.
"""

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from statistics import mean, stdev
from typing import Any, NamedTuple

from dps_dist.config.flat import flatten

SEEDS = ("train.seed", "data.noise.seed", "data.hold_out_seed")
WHERE = ("data.path", "launch.", "run.")  # where and how a run is computed, and by whom

Figures = Mapping[str, float | None]


class Spread(NamedTuple):
    """Of each figure its mean, and the sample standard deviation; NaN where a run has none."""

    mean: dict[str, float]
    std: dict[str, float]


def spread(rows: Sequence[Figures]) -> Spread:
    """Over the figures of several runs, a row a run."""
    keys = dict.fromkeys(key for row in rows for key in row)
    found = {key: mean_std([row.get(key) for row in rows]) for key in keys}
    return Spread(*({key: pair[k] for key, pair in found.items()} for k in (0, 1)))


def mean_std(values: Sequence[float | None]) -> tuple[float, float]:
    """x̄ = Σ x / n and √(Σ (x − x̄)² / (n − 1)).

    NaN if there are fewer than two, or one of them is not finite: a mean that leaves out the run
    that diverged would be too good.
    """
    known = [value for value in values if value is not None and isfinite(value)]
    if len(known) < max(2, len(values)):
        return nan, nan
    return mean(known), stdev(known)


def groups(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Which of the configurations are one thing with several seeds, no two with the same ones."""
    found: list[tuple[dict[str, Any], list[int], list[list[Any]]]] = []
    for k, config in enumerate(configs):
        fields = dict(flatten(dict(config)))
        own = [fields.pop(key, None) for key in SEEDS]
        fields = {key: value for key, value in fields.items() if not key.startswith(WHERE)}
        for others, members, drawn in found:
            if fields == others:
                members.append(k)
                drawn.append(own)
                break
        else:
            found.append((fields, [k], [own]))
    return [
        members
        for _, members, drawn in found
        if len(members) > 1 and all(drawn.count(own) == 1 for own in drawn)
    ]
