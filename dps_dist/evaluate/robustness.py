"""CIFAR-10-C and CIFAR-10-P (Hendrycks & Dietterich, 2019): what predictions on them come to."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.evaluate.metrics import Tally

SEVERITIES = 5
# The files of CIFAR-10-C
CORRUPTIONS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    *("snow", "frost", "fog", "brightness", "spatter"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
)
# Of the files of CIFAR-10-P, those that make up the mFP
PERTURBATIONS = (
    "gaussian_noise",
    "shot_noise",
    "motion_blur",
    "zoom_blur",
    "spatter",
    "brightness",
    "translate",
    "rotate",
    "tilt",
    "scale",
)


class Corruptions(TypedDict):
    """Accuracy over all, of each corruption at severities 1 to 5, and ECE of each severity.

    `missing` are those of the 19 not given, over which the accuracy is then no mean.
    """

    accuracy: float
    by_corruption: dict[str, list[float]]
    ece_by_severity: list[float]
    missing: NotRequired[list[str]]


class Perturbations(TypedDict):
    """mFP, absent if not one of the ten was given; `missing` are those of the ten not given."""

    mfp: NotRequired[float]
    by_perturbation: dict[str, float]
    missing: NotRequired[list[str]]


def by_severity(logits: Tensor, labels: Tensor) -> list[Tally]:
    """A tally for each severity of logits [5n, K], labels [5n]: n rows of each, 1 to 5 in turn."""
    if not len(labels) or len(labels) % SEVERITIES:
        raise InputError(
            f"{len(labels)} images of a corruption: give as many for each of 5 severities"
        )
    tallies = [Tally(device=logits.device) for _ in range(SEVERITIES)]
    parts = zip(tallies, logits.chunk(SEVERITIES), labels.chunk(SEVERITIES), strict=True)
    for tally, z, y in parts:
        tally.add(z, y, torch.ones(len(y), device=logits.device))
    return tallies


def corruptions(tallies: Mapping[str, Sequence[Tally]]) -> Corruptions:
    """The summary of CIFAR-10-C; of each corruption, tallies of severities 1 to 5.

    accuracy: the mean over corruptions × severities, each of weight 1. The ECE of a severity is
    that of the samples of all corruptions together, not a mean of theirs.
    """
    if not tallies:
        raise InputError("no corruption was given: give at least one")
    accuracies = {
        name: [tally.figures()["accuracy"] for tally in of_severity]
        for name, of_severity in tallies.items()
    }
    each = [value for values in accuracies.values() for value in values]
    found: Corruptions = {
        "accuracy": sum(each) / len(each),
        "by_corruption": accuracies,
        "ece_by_severity": [_ece(group) for group in zip(*tallies.values(), strict=True)],
    }
    if missing := [name for name in CORRUPTIONS if name not in tallies]:
        found["missing"] = missing
    return found


def flip_probability(predicted: NDArray[Any], perturbation: str) -> float:
    """Σ_v Σ_{t ≥ 2} [class_vt ≠ class_v,before] / (V·(F − 1)) of predicted classes [V, F].

    `before` is the frame t − 1 or, where the perturbation is a noise ("noise" in its name), frame
    1: noise is drawn anew for each frame, none of which is closer to the last than to another.
    """
    if predicted.ndim != 2 or not len(predicted) or predicted.shape[1] < 2:
        raise InputError(
            f"{perturbation} has predictions of shape {predicted.shape}: "
            "give [videos, frames] with at least 2 frames"
        )
    before = predicted[:, :1] if "noise" in perturbation else predicted[:, :-1]
    return float((predicted[:, 1:] != before).mean())


def perturbations(flips: Mapping[str, float]) -> Perturbations:
    """The summary of CIFAR-10-P; of each perturbation, the flip probability.

    mFP is the mean of those that are of the ten PERTURBATIONS; the release holds more files.
    """
    found: Perturbations = {"by_perturbation": dict(flips)}
    of_the_ten = [flips[name] for name in PERTURBATIONS if name in flips]
    if of_the_ten:
        found["mfp"] = sum(of_the_ten) / len(of_the_ten)
    if missing := [name for name in PERTURBATIONS if name not in flips]:
        found["missing"] = missing
    return found


def _ece(tallies: Sequence[Tally]) -> float:
    together = Tally(device=tallies[0].sums.device)
    for tally in tallies:
        together.sums += tally.sums
    return together.figures()["ece"]
