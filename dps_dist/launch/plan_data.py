"""How much data a plan is for: as prepared, as given, or as the data set is known to be."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dps_dist.config import Config
from dps_dist.data import manifest as manifests
from dps_dist.errors import InputError


@dataclass(frozen=True)
class DataSet:
    """How much there is. known: where that is known from. beton: bytes, from least to most."""

    samples: int
    classes: int
    evaluated: int
    known: str
    beton: tuple[float, float]


class Known(NamedTuple):
    """image: bytes that one takes in a .beton, from least to most."""

    samples: int
    classes: int
    evaluated: int
    image: tuple[float, float]


def _pixels(side: int) -> tuple[float, float]:
    return 3.0 * side**2, 3.0 * side**2


# Photographs, by what FFCV's authors say: all as JPEG; half of them as pixels, as `prepare` does.
KNOWN = {
    "imagenet": Known(1_281_167, 1000, 50_000, (50e3, 275e3)),
    "imagenet21k": Known(14_197_122, 21_841, 0, (50e3, 275e3)),
    "tinyimagenet": Known(100_000, 200, 10_000, (3e3, 12.3e3)),
    "cifar10": Known(50_000, 10, 10_000, _pixels(32)),
    "cifar100": Known(50_000, 100, 10_000, _pixels(32)),
    "svhn": Known(73_257, 10, 26_032, _pixels(32)),
    "digits": Known(1_200, 10, 597, _pixels(8)),
}


def data_set(config: Config, samples: int | None = None, classes: int | None = None) -> DataSet:
    """As prepared at data.path, else as the source is known to be; what is given goes first."""
    for option, value in (("--samples", samples), ("--classes", classes)):
        if value is not None and value < 2:
            raise InputError(f"{option} is {value}: give 2 or more")
    folder, source = Path(config.data.path), config.data.source
    if (folder / "train.beton").exists():
        there = _prepared(folder, config.evaluate.split)
        if samples is None and classes is None:
            return there
        N, K = samples or there.samples, classes or there.classes
        more = (N / there.samples - 1) * (folder / "train.beton").stat().st_size
        least, most = (bytes_ + more for bytes_ in there.beton)
        return DataSet(N, K, there.evaluated, "as given", (least, most))
    # Class folders may hold anything: ImageNet is what lies in a folder of that name.
    name = re.sub(r"[-_]", "", folder.name.lower()) if source == "imagefolder" else source
    known = KNOWN.get(name)
    if known is None:
        if samples is None or classes is None:
            raise InputError(
                f"data.path is {folder}: it is not prepared and how much {name} holds is not "
                f"known; prepare it, or give --samples and --classes (known: {', '.join(KNOWN)})"
            )
        known = KNOWN["imagenet"]._replace(evaluated=0)  # as large as its images are
    where = f"known of {name}" if samples is None and classes is None else "as given"
    N, K = samples or known.samples, classes or known.classes
    least, most = ((N + known.evaluated) * size for size in known.image)
    return DataSet(N, K, known.evaluated, where, (least, most))


def _prepared(folder: Path, evaluated: str) -> DataSet:
    train_set = manifests.read(folder, "train")
    others = sorted(file.stem for file in folder.glob("*.beton") if file.stem != "train")
    held = [train_set, *(manifests.read(folder, split) for split in others)]
    size = float(sum(one.beton.stat().st_size for one in held))
    count = {one.beton.stem: len(one) for one in held}.get(evaluated, 0)
    known = f"prepared in {folder}"
    return DataSet(len(train_set), train_set.num_classes, count, known, (size, size))
