"""What `dps evaluate` left in a run's folder: evaluation.json and evaluation.npz."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps_dist.errors import InputError
from dps_dist.report.values import Array, array, finite, mapping, number

AGAIN = "run `dps evaluate` on this run again"


@dataclass(frozen=True)
class Bins:
    """A reliability diagram: edges [n + 1]; count, accuracy, confidence [n], NaN in empty bins."""

    edges: Array
    count: Array
    accuracy: Array
    confidence: Array


@dataclass(frozen=True)
class Evaluation:
    facts: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]

    @property
    def classes(self) -> list[str]:
        names = self.facts.get("class_names")
        return [str(name) for name in names] if isinstance(names, list) else []

    @property
    def temperature(self) -> float | None:
        value = number(self.facts, "temperature")
        return value if finite(value) else None

    @property
    def figures(self) -> dict[str, Any]:
        return mapping(self.facts.get("figures"))

    @property
    def on(self) -> dict[str, dict[str, Any]]:
        """Further data sets, by name."""
        return {name: mapping(held) for name, held in mapping(self.facts.get("on")).items()}

    def bins(self, key: str) -> Bins | None:
        held = mapping(self.facts.get(key))
        edges = array(held.get("edges"))
        if edges is None:
            return None
        count, accuracy, confidence = (
            array(held.get(part), len(edges) - 1) for part in ("count", "accuracy", "confidence")
        )
        if count is None or accuracy is None or confidence is None:
            return None
        return Bins(edges, count, accuracy, confidence)

    def delta(self) -> tuple[Array, Array, float | None] | None:
        """Edges, counts and the mean of Σ_j |f(x)_j − μ_kj|."""
        held = mapping(self.facts.get("delta"))
        edges = array(held.get("edges"))
        count = None if edges is None else array(held.get("count"), len(edges) - 1)
        if edges is None or count is None or not count.sum() > 0:
            return None
        return edges, count, number(held, "mean")

    def ta_kl(self) -> tuple[Array, Array] | None:
        held = mapping(self.facts.get("ta_kl"))
        epochs = array(held.get("epochs"))
        value = None if epochs is None else array(held.get("value"), len(epochs))
        if epochs is None or value is None or not np.isfinite(value).any():
            return None
        return epochs, value

    def mu(self) -> npt.NDArray[Any] | None:
        """[K, K]; row k: the mean prediction for class k."""
        mu = self.arrays.get("mu")
        if mu is None or mu.ndim != 2 or mu.shape[0] != mu.shape[1] or not mu.size:
            return None
        return mu

    def projection(self, kind: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Points [n, 2] and the class of each; kind: similar or dissimilar."""
        points, of_class = self.arrays.get(kind), self.arrays.get(f"{kind}_class")
        if points is None or of_class is None or not len(points):
            return None
        return (points, of_class) if points.shape == (len(of_class), 2) else None

    def projected(self, kind: str) -> list[int]:
        """The three classes, those that are alike first."""
        held = mapping(mapping(self.facts.get("projection")).get(kind)).get("classes")
        known = isinstance(held, list) and len(held) == 3 and all(type(k) is int for k in held)
        return list(held) if known and isinstance(held, list) else []

    def class_name(self, k: int) -> str:
        return self.classes[k] if 0 <= k < len(self.classes) else f"class {k}"


def read(folder: Path) -> Evaluation | None:
    """None where the run was not evaluated."""
    file = folder / "evaluation.json"
    if not file.is_file():
        return None
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise InputError(f"{file} is damaged, it holds no JSON object: {AGAIN}")
    return Evaluation(facts, _arrays(folder / "evaluation.npz"))


def _arrays(file: Path) -> dict[str, npt.NDArray[Any]]:
    if not file.is_file():
        return {}
    try:
        with np.load(file, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise InputError(f"{file} is damaged, it holds no numpy arrays: {AGAIN}") from None
