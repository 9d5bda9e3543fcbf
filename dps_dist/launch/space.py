"""What a sweep tries: fields of the configuration and their values → points, one a trial.

A space is a mapping, from the command line or a YAML file:

    method.gamma: [.9, .95, 1]               a list: each of them
    optim.lr: {loguniform: [1e-4, 1e-1]}     a range to draw from: uniform, loguniform, randint
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dps_dist.errors import InputError
from dps_dist.recipes import files

Point = dict[str, Any]  # field → value
Space = dict[str, Any]  # field → list of values, or {kind: [low, high]}

KINDS = ("uniform", "loguniform", "randint")
TRIES = 100  # a point: so many that none is missed, also where all of a space are drawn
EXAMPLE = "write a list of values or, to draw from, {uniform: [low, high]}, loguniform or randint"


def read(file: Path) -> Space:
    if not file.exists():
        raise InputError(f"--space is {file}: there is no such file")
    space: Space = json.loads(json.dumps(files.read(file), default=str))  # dates are text
    check(space, str(file))
    return space


def check(space: Space, where: str) -> None:
    """Refuse what no trial can be made of."""
    if not space:
        raise InputError(f"{where}: nothing to try; give at least one field and its values")
    for field, values in space.items():
        if isinstance(values, list):
            if not values:
                raise InputError(f"{where}: {field} has no values; give at least one")
        elif not _is_range(values):
            raise InputError(f"{where}: {field} is {values!r}: {EXAMPLE}")


def _is_range(values: Any) -> bool:
    if not isinstance(values, dict) or len(values) != 1:
        return False
    ((kind, ends),) = values.items()
    if kind not in KINDS or not isinstance(ends, list) or len(ends) != 2:
        return False
    kinds = int if kind == "randint" else int | float
    if not all(isinstance(end, kinds) and not isinstance(end, bool) for end in ends):
        return False
    low, high = ends
    return math.isfinite(low) and math.isfinite(high) and low < high and (kind[0] != "l" or low > 0)


def grid(space: Space) -> list[Point]:
    """Every combination; the last field runs fastest."""
    for field, values in space.items():
        if not isinstance(values, list):
            raise InputError(f"{field} is a range: give a list of values, or --search random")
    each = [dict.fromkeys(map(json.dumps, values)) for values in space.values()]
    chosen = itertools.product(*([json.loads(value) for value in values] for values in each))
    return [dict(zip(space, values, strict=True)) for values in chosen]


def draw(space: Space, count: int, seed: int = 0) -> list[Point]:
    """So many points at random, no two of them one, the same for the same seed."""
    rng = np.random.default_rng(seed)
    found: dict[str, Point] = {}
    for _ in range(TRIES * count):
        point = {field: _drawn(values, rng) for field, values in space.items()}
        found.setdefault(name(point), point)
        if len(found) == count:
            return list(found.values())
    raise InputError(
        f"--trials is {count}: the space has only {len(found)} point(s); give at most {len(found)}"
    )


def _drawn(values: Any, rng: np.random.Generator) -> Any:
    if isinstance(values, list):
        return values[int(rng.integers(len(values)))]
    ((kind, (low, high)),) = values.items()
    if kind == "randint":
        return int(rng.integers(low, high, endpoint=True))
    if kind == "loguniform":
        return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.6g}")
    return float(f"{rng.uniform(low, high):.6g}")


def ends(space: Space) -> list[Point]:
    """Points that hold every listed value and both ends of every range: all that can be wrong."""
    columns = [
        values if isinstance(values, list) else next(iter(values.values()))
        for values in space.values()
    ]
    longest = max(map(len, columns))
    return [
        dict(zip(space, (column[k % len(column)] for column in columns), strict=True))
        for k in range(longest)
    ]


def settings(point: Mapping[str, Any]) -> list[str]:
    """As `--set` takes them."""
    return [f"{field}={json.dumps(value)}" for field, value in point.items()]


def name(point: Mapping[str, Any]) -> str:
    """The trial's folder, other for every other point: gamma0.95-c1000-seed0."""
    leaves = [field.rpartition(".")[2] for field in point]
    joined = "-".join(map("{}{}".format, leaves, map(_text, point.values())))
    told_apart = len(set(leaves)) == len(leaves) and all(map(_is_exact, point.values()))
    if told_apart and len(joined) <= 100:
        return joined
    known = hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', joined)[:80]}-{known}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_exact(value: Any) -> bool:
    """Whether its text stands for this value alone."""
    if isinstance(value, str):
        return re.fullmatch(r"[a-z][a-z0-9_]*", value) is not None
    return isinstance(value, int) or (isinstance(value, float) and float(f"{value:g}") == value)
