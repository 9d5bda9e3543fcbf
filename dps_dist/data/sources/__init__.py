"""Where images and labels come from: one row for each data set, opened by `open_source`.

`write.py` turns a source into a .beton; the classes are in `folders.py`, `cifar.py`,
`corrupted.py` and `arrays.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dps_dist.data.sources.arrays import EmbeddedDigits, Idx, Svhn
from dps_dist.data.sources.cifar import Cifar10, Cifar100
from dps_dist.data.sources.corrupted import Cifar10C, Cifar10P
from dps_dist.data.sources.folders import BadImage, ImageFolder, TinyImageNet
from dps_dist.data.sources.layout import BadFiles
from dps_dist.errors import InputError

__all__ = [
    "SOURCES",
    "BadFiles",
    "BadImage",
    "Source",
    "SourceSpec",
    "open_source",
    "source_spec",
    "source_splits",
]


class Source(Protocol):
    """Labelled images by position, in an order that never changes."""

    @property
    def class_names(self) -> Sequence[str]: ...

    @property
    def labels(self) -> NDArray[np.int64]:
        """[N], each 0 to K−1; −1 throughout where the data set has none (CIFAR-10-P)."""
        ...

    def __len__(self) -> int: ...

    def read(self, i: int) -> NDArray[np.uint8]:
        """The image as RGB [H, W, 3]; `BadImage` where it cannot be read."""
        ...

    def path(self, i: int) -> str:
        """Relative to the root; `file#position` inside an archive."""
        ...


class SourceClass(Protocol):
    def __call__(self, root: Path, split: str) -> Source: ...

    def splits(self, root: Path) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class SourceSpec:
    """description: one line for `dps sources`.
    home: where the data set is officially had.
    embedded: it comes with an installed package and needs no root.
    photographs: its images are large and of many sizes, so that `dps prepare` keeps some as JPEG.
    """

    opens: SourceClass
    description: str
    home: str
    embedded: bool = False
    photographs: bool = False


CORRUPTED = "https://zenodo.org/records/2535967"
SOURCES: dict[str, SourceSpec] = {
    "imagefolder": SourceSpec(
        ImageFolder,
        "class folders of images, as ImageNet: train/<class>/*, val/<class>/*",
        "https://image-net.org/download.php (ImageNet)",
        photographs=True,
    ),
    "tinyimagenet": SourceSpec(
        TinyImageNet,
        "TinyImageNet, 200 classes at 64×64, in its own layout",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        photographs=True,
    ),
    "cifar10": SourceSpec(
        Cifar10,
        "CIFAR-10, binary or Python version",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cifar100": SourceSpec(
        Cifar100,
        "CIFAR-100 with its fine labels, binary or Python version",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "svhn": SourceSpec(
        Svhn,
        "Street View House Numbers, cropped digits (.mat)",
        "http://ufldl.stanford.edu/housenumbers/",
    ),
    "cifar10-c": SourceSpec(
        Cifar10C,
        "CIFAR-10-C: the test set corrupted at five severities (.npy); a split is a corruption",
        CORRUPTED,
    ),
    "cifar10-p": SourceSpec(
        Cifar10P,
        "CIFAR-10-P: the test set as perturbation sequences (.npy); a split is a perturbation",
        CORRUPTED,
    ),
    "idx": SourceSpec(
        Idx,
        "MNIST, Fashion-MNIST and others in idx files, plain or .gz",
        "http://yann.lecun.com/exdb/mnist/ (MNIST) and "
        "https://github.com/zalandoresearch/fashion-mnist (Fashion-MNIST)",
    ),
    "digits": SourceSpec(
        EmbeddedDigits,
        "scikit-learn's embedded handwritten digits, 8×8; nothing to download",
        "https://scikit-learn.org (installed with it)",
        embedded=True,
    ),
}


def open_source(name: str, root: Path | str | None, split: str) -> Source:
    """A split of the data set under root: `train` or `val`, or a corruption's name."""
    spec, folder = _lookup(name, root)
    splits = source_splits(name, root)
    with _saying_where(spec):
        # A usual split whose files are absent goes on, for the source to name the file.
        if split not in splits and not {split, *splits} <= {"train", "val"}:
            raise BadFiles(
                f"split {split!r} is not in {name}{f' at {root}' if root else ''}: it has "
                f"{', '.join(splits)}"
            )
        return spec.opens(folder, split)


def source_splits(name: str, root: Path | str | None) -> tuple[str, ...]:
    """The splits that are there to be opened."""
    spec, folder = _lookup(name, root)
    with _saying_where(spec):
        return spec.opens.splits(folder)


def source_spec(name: str) -> SourceSpec:
    if name not in SOURCES:
        raise InputError(f"source {name!r} is not known: choose one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _lookup(name: str, root: Path | str | None) -> tuple[SourceSpec, Path]:
    spec = source_spec(name)
    if root is None and not spec.embedded:
        raise InputError(
            f"source {name} needs the folder that holds it: give it with --from; it is had at "
            f"{spec.home}"
        )
    return spec, Path(root or ".").expanduser()


@contextmanager
def _saying_where(spec: SourceSpec) -> Iterator[None]:
    try:
        yield
    except BadFiles as error:
        raise BadFiles(f"{error}; the data set is had at {spec.home}") from error
