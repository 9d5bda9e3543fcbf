"""Trained models on other data: corrupted or perturbed images, other test sets, foreign images."""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

import torch

from dps_dist.data import manifest as manifests
from dps_dist.data.sources.corrupted import Cifar10C, Cifar10P, load_npy
from dps_dist.errors import InputError
from dps_dist.evaluate import ood, robustness
from dps_dist.evaluate.metrics import all_figures
from dps_dist.train.predict import Predicted, Shown, on_arrays, on_split
from dps_dist.train.trained import Trained


def check(run: Trained, shown: Shown, on: Mapping[str, str], ood: Mapping[str, str]) -> None:
    """Refuse before anything is computed what is not there, or has other classes."""
    for name, folder in on.items():
        released = _released(folder)
        if released is not None:
            files = [released(Path(folder), split) for split in released.splits(Path(folder))]
            names = files[0].class_names
        else:
            names = _prepared(folder, f"--on {name}").manifest.class_names
        if names != shown.manifest.class_names:
            raise InputError(
                f"--on {name}={folder} has the classes {_few(names)} and {run.folder} was trained "
                f"on {_few(shown.manifest.class_names)}: give data of the same classes, or use "
                "--ood for images of others"
            )
    for name, folder in ood.items():
        _prepared(folder, f"--ood {name}")


def labelled(run: Trained, folder: str) -> dict[str, Any]:
    """Figures on a prepared folder, on CIFAR-10-C or on CIFAR-10-P."""
    released = _released(folder)
    if released is Cifar10C:
        return _corruptions(run, Path(folder))
    if released is Cifar10P:
        return _perturbations(run, Path(folder))
    predicted = on_split(run, _prepared(folder, "--on"))
    samples = len(predicted.labels)
    return {"kind": "labelled", "samples": samples, "figures": all_figures(*predicted)}


def foreign(run: Trained, folder: str, own: Predicted) -> dict[str, Any]:
    """How well confidence tells the run's own images from those of other classes."""
    others = on_split(run, _prepared(folder, "--ood"))
    diverged = not all(of.logits.isfinite().all() for of in (own, others))
    auroc = nan if diverged else ood.auroc(own.logits, others.logits)
    return {"kind": "ood", "samples": len(others.labels), "auroc": auroc}


def _corruptions(run: Trained, folder: Path) -> dict[str, Any]:
    tallies = {}
    for corruption in Cifar10C.splits(folder):
        source = Cifar10C(folder, corruption)
        logits = on_arrays(run, source.images)
        tallies[corruption] = robustness.by_severity(logits, torch.from_numpy(source.labels))
    return {"kind": "corruptions", **robustness.corruptions(tallies)}


def _perturbations(run: Trained, folder: Path) -> dict[str, Any]:
    flips = {}
    for perturbation in Cifar10P.splits(folder):
        source = Cifar10P(folder, perturbation)
        predicted = on_arrays(run, source.images).argmax(-1).reshape(-1, source.frames)
        flips[perturbation] = robustness.flip_probability(predicted.numpy(), perturbation)
    return {"kind": "perturbations", **robustness.perturbations(flips)}


def _released(folder: str) -> type[Cifar10C] | type[Cifar10P] | None:
    """The class of the official .npy files in the folder, if it holds them."""
    root = Path(folder)
    below = [kind for kind in (Cifar10C, Cifar10P) if any((root / kind.FOLDER).glob("*.npy"))]
    if len(below) > 1:
        raise InputError(
            f"--on is {folder}: it holds CIFAR-10-C and CIFAR-10-P; give each by itself, as "
            f"--on c={root / Cifar10C.FOLDER} --on p={root / Cifar10P.FOLDER}"
        )
    if below:
        return below[0]
    files = [file for file in sorted(root.glob("*.npy")) if file.stem != "labels"]
    if not files:
        return None
    return Cifar10P if load_npy(files[0], "images", mapped=True).ndim == 5 else Cifar10C


def _prepared(folder: str, option: str) -> Shown:
    """The evaluation split of a prepared folder: val, test, or the only one."""
    there = sorted(file.stem for file in Path(folder).glob("*.beton"))
    split = next((name for name in ("val", "test", *there[:1]) if name in there), None)
    labelled = option.startswith("--on")
    released = ", or give CIFAR-10-C's or -P's .npy files" if labelled else ""
    if split is None:
        raise InputError(
            f"{option} is {folder}: there is no .beton file; prepare it with `dps prepare`"
            f"{released}"
        )
    if split not in ("val", "test") and len(there) > 1:
        raise InputError(
            f"{option} is {folder}: it holds {_few(there)} and neither val nor test: give a folder "
            f"with one split{released}"
        )
    shown = manifests.read(folder, split)
    if labelled:
        manifests.check_labelled(shown, shown.clean_labels, f"{option} is {folder}")
    return Shown(shown, None)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", … ({len(names)})" if len(names) > 3 else "")
