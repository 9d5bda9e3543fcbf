"""All figures of trained runs, and of their ensemble: what `dps evaluate` prints and writes.

RUN/evaluation.json holds the figures, RUN/evaluation.npz the arrays that the report draws; those of
the best checkpoint are beside them, in files that the report does not read.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dps_dist.data.hold_out import HOLD_OUT
from dps_dist.errors import InputError
from dps_dist.evaluate import dark_knowledge, seeds
from dps_dist.evaluate.calibration import fit_temperature
from dps_dist.evaluate.metrics import all_figures, measured
from dps_dist.train import elsewhere
from dps_dist.train.manifest import complete
from dps_dist.train.predict import Predicted, Progress, Shown, on_split, split_of
from dps_dist.train.state import as_json
from dps_dist.train.storage import Storage
from dps_dist.train.trained import Trained, check_classes, load

JSON, ARRAYS = "evaluation.json", "evaluation.npz"
JSON_OF_BEST, ARRAYS_OF_BEST = "evaluation-best.json", "evaluation-best.npz"
PRECISION = "float32"  # of the models here, whatever train.amp was while they were trained
OF_TEMPERATURE = ("nll", "brier", "ece", "ece_10", "sce", "ace")  # what it changes

Figures = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """report: what evaluation.json holds; arrays: what evaluation.npz holds."""

    run: Trained
    predicted: Predicted
    report: dict[str, Any]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def figures(self) -> Figures:
        figures: Figures = self.report["figures"]
        return figures

    def write(self) -> str:
        """Into the run's folder, each file whole or not there; the name of the figures' file."""
        held = io.BytesIO()
        np.savez_compressed(held, allow_pickle=False, **self.arrays)
        best = self.run.checkpoint == "best"
        name, arrays = (JSON_OF_BEST, ARRAYS_OF_BEST) if best else (JSON, ARRAYS)
        self.run.storage.write(arrays, held.getvalue())
        self.run.storage.write(name, as_json(self.report))
        return name


def evaluate(
    folders: Sequence[str],
    *,
    split: str | None = None,
    on: Mapping[str, str] | None = None,
    ood: Mapping[str, str] | None = None,
    checkpoint: Literal["newest", "best"] = "newest",
    device: torch.device | str = "cpu",
    progress: Progress = lambda done, of: None,
) -> list[Evaluation]:
    """Each run on its evaluation split (or another), and on further data.

    checkpoint: "best" is the one with the best accuracy in training of those that the run kept.
    on: name → folder with the same classes, or with the .npy files of CIFAR-10-C or CIFAR-10-P.
    ood: name → prepared folder of images that belong to none of the classes.
    """
    once: dict[str, str] = {}
    for folder in folders:
        once.setdefault(Storage(folder).url, folder)
    runs = [load(folder, device, checkpoint) for folder in once.values()]
    shown = split_of(runs[0], split)
    for run in runs[1:]:
        _check_alike(runs[0], run, of_held_out=shown.only is not None)
        check_classes(run, shown.manifest)
    elsewhere.check(runs[0], shown, on or {}, ood or {})
    held_out = [split_of(run, HOLD_OUT) if run.config.data.hold_out else None for run in runs]
    return [
        _of_run(run, shown, split, kept, on or {}, ood or {}, progress)
        for run, kept in zip(runs, held_out, strict=True)
    ]


def ensemble(evaluations: Sequence[Evaluation]) -> Figures:
    """Of the mean softmax of the runs."""
    together = torch.stack([one.predicted.logits.double().softmax(-1) for one in evaluations])
    # The logarithm of a probability has it for its softmax
    return all_figures(together.mean(0).log(), evaluations[0].predicted.labels)


def over_seeds(evaluations: Sequence[Evaluation]) -> seeds.Spread | None:
    """Mean ± deviation of all figures, if these are several runs of one thing with other seeds."""
    groups = seeds.groups([one.run.config.model_dump() for one in evaluations])
    if groups != [list(range(len(evaluations)))]:
        return None
    return seeds.spread([every_figure(one.report) for one in evaluations])


def every_figure(report: Mapping[str, Any]) -> Figures:
    """The figures of a report, and those on further data, such as `auroc on svhn`."""
    found = numbers(report.get("figures")) | numbers({"temperature": report.get("temperature")})
    for name, held in _mapping(report.get("on")).items():
        own = _mapping(held)
        further = numbers({**own, **_mapping(own.get("figures")), "samples": None})
        found |= {f"{key} on {name}": value for key, value in further.items()}
    return found


def numbers(content: Any) -> Figures:
    return {
        key: value
        for key, value in _mapping(content).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _mapping(content: Any) -> Mapping[str, Any]:
    """{} of what else a file that was edited may hold."""
    return content if isinstance(content, Mapping) else {}


def _of_run(
    run: Trained,
    shown: Shown,
    split: str | None,
    held_out: Shown | None,
    on: Mapping[str, str],
    ood: Mapping[str, str],
    progress: Progress,
) -> Evaluation:
    predicted = on_split(run, shown, progress=progress)
    counted = measured(*predicted)
    report: dict[str, Any] = {
        "run": run.name,
        "checkpoint": run.checkpoint,
        "epoch": run.moment.epoch,
        "position": run.moment.position,
        "split": split or run.config.evaluate.split,
        "precision": PRECISION,
        "samples": len(predicted.labels),
        "class_names": list(shown.manifest.class_names),
        "figures": counted.figures(),
        "reliability": counted.reliability(),
    }
    if held_out is not None:
        _with_temperature(report, predicted, on_split(run, held_out))
        report |= _ta_kl(run, predicted, held_out, shown, report["temperature"])
    arrays = _dark_knowledge(report, run, shown, predicted)
    further = {name: elsewhere.labelled(run, folder) for name, folder in on.items()}
    further |= {name: elsewhere.foreign(run, folder, predicted) for name, folder in ood.items()}
    if further:
        report["on"] = further
    return Evaluation(run, predicted, report, arrays)


def _with_temperature(report: dict[str, Any], predicted: Predicted, held_out: Predicted) -> None:
    temperature = fit_temperature(*held_out)
    scaled = measured(predicted.logits / temperature, predicted.labels)
    figures = scaled.figures()
    report["temperature"] = temperature
    report["figures"] |= {f"{key}_ts": figures[key] for key in OF_TEMPERATURE}
    report["reliability_ts"] = scaled.reliability()


def _ta_kl(
    run: Trained, final: Predicted, held_out: Shown, shown: Shown, temperature: float
) -> dict[str, Any]:
    """How far the predictions of earlier epochs are from the last, each at its own temperature.

    What diverged has no temperature, and is left out.
    """
    if not isfinite(temperature):
        return {}
    found = [one for one in complete(run.storage) if one.moment.position == 0]
    earlier = sorted({one.moment.epoch: one.name for one in found}.items())
    values = {}
    for epoch, name in earlier:
        if epoch >= run.moment.epoch:
            continue
        try:
            before = load(run.storage.url, next(run.model.parameters()).device, name)
        except (InputError, FileNotFoundError):  # damaged, or removed since it was listed
            continue
        own = fit_temperature(*on_split(before, held_out))
        logits = on_split(before, shown).logits
        value = dark_knowledge.ta_kl(final.logits, logits, temperature, own)
        if isfinite(value):
            values[epoch] = value
    if not values:
        return {}
    return {"ta_kl": {"epochs": list(values), "value": list(values.values())}}


def _dark_knowledge(
    report: dict[str, Any], run: Trained, shown: Shown, predicted: Predicted
) -> dict[str, NDArray[Any]]:
    """μ and δ, and the penultimate features of three similar and of three dissimilar classes."""
    classes, most = shown.manifest.num_classes, dark_knowledge.MOST_CLASSES
    if classes > most:
        report["left_out"] = (
            f"the mean predictions μ, δ and the projections are left out: they take a number for "
            f"every two of the {classes:,} classes, and are made of at most {most:,}"
        )
        return {}
    p = predicted.logits.softmax(-1)
    mu = dark_knowledge.mean_predictions(p, predicted.labels)
    report["delta"] = dict(dark_knowledge.deviations(p, predicted.labels, mu))
    arrays: dict[str, NDArray[Any]] = {"mu": mu.float().numpy()}
    if int(mu.isfinite().all(1).sum()) < 3:  # classes that there are samples of
        return arrays
    report["projection"] = {}
    templates = run.model.head.weight.detach().float().cpu()
    labels = np.asarray(shown.manifest.clean_labels)
    for name, three in zip(
        ("similar", "dissimilar"), dark_knowledge.similar_and_dissimilar(mu), strict=True
    ):
        samples = np.flatnonzero(np.isin(labels, three)).astype(np.int32)
        if shown.only is not None:
            samples = np.intersect1d(samples, shown.only)
        if not len(samples):
            continue
        features, of_class = on_split(run, Shown(shown.manifest, samples), run.model.embed)
        plane = dark_knowledge.projection(features, templates[list(three)])
        report["projection"][name] = {"classes": [int(k) for k in three]}
        arrays[name] = plane.float().numpy()
        arrays[f"{name}_class"] = of_class.numpy()
    return arrays


def _check_alike(first: Trained, other: Trained, of_held_out: bool) -> None:
    """Refuse runs that cannot be shown the same images."""
    one, two = (_seen(run, of_held_out) for run in (first, other))
    for what in one:
        if one[what] != two[what]:
            raise InputError(
                f"{other.folder} has {what} {two[what]} and {first.folder} {one[what]}: "
                "evaluate runs on the same data together"
            )


def _seen(run: Trained, of_held_out: bool) -> dict[str, Any]:
    """What decides which images evaluation shows; the same data may lie in several places."""
    data = run.config.data
    seen = {
        "data.source": data.source,
        "samples": run.data["samples"],
        "data.mean": data.mean,
        "data.std": data.std,
        "data.eval_crop": data.eval_crop,
        "data.eval_resolution": data.eval_resolution or data.resolution,
    }
    if of_held_out:
        seen |= {"data.hold_out": data.hold_out, "data.hold_out_seed": data.hold_out_seed}
    return seen
