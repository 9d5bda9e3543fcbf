"""CIFAR-10-C and CIFAR-10-P: the test set of CIFAR-10, corrupted or perturbed, in .npy files.

They are for evaluation only; a split is one corruption.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dps_dist.data.sources.arrays import ArrayImages, checked_labels
from dps_dist.data.sources.cifar import CIFAR10_CLASSES
from dps_dist.data.sources.layout import BadFiles, require_file, require_folder

UNLABELLED = -1


class Corrupted(ArrayImages):
    """What the two share: a split is a corruption, `<split>.npy`."""

    FOLDER: ClassVar[str]

    @classmethod
    def splits(cls, root: Path) -> tuple[str, ...]:
        folder = cls._folder(root)
        names = sorted(file.stem for file in folder.glob("*.npy") if file.stem != "labels")
        if not names:
            raise BadFiles(f"{folder} holds no .npy file: extract {cls.FOLDER}.tar")
        return tuple(names)

    @classmethod
    def _folder(cls, root: Path) -> Path:
        require_folder(root, f"the folder that holds {cls.FOLDER}/")
        return root / cls.FOLDER if (root / cls.FOLDER).is_dir() else root

    @classmethod
    def _images(cls, root: Path, split: str, ndim: int, expected: str) -> tuple[Path, Any]:
        file = cls._folder(root) / f"{split}.npy"
        images = load_npy(file, f"the images, {expected}", mapped=True)
        whole = images.ndim == ndim and images.shape[-3:] == (32, 32, 3) and images.size
        if not whole or images.dtype != np.uint8:
            raise BadFiles(
                f"{file} is {images.dtype} of shape {images.shape}: expected uint8 {expected}"
            )
        return file, images


class Cifar10C(Corrupted):
    """A corruption of the test set at five severities, one after the other; `labels.npy`."""

    FOLDER = "CIFAR-10-C"
    SEVERITIES = 5

    def __init__(self, root: Path, split: str) -> None:
        file, images = self._images(root, split, ndim=4, expected="[50000, 32, 32, 3]")
        if len(images) % self.SEVERITIES:
            raise BadFiles(
                f"{file} has {len(images)} images: expected as many for each of 5 severities"
            )
        labels_file = file.with_name("labels.npy")
        raw = load_npy(labels_file, "one label for each image")
        labels = checked_labels(raw, len(CIFAR10_CLASSES), len(images), labels_file)
        super().__init__(images, labels, CIFAR10_CLASSES, [file.relative_to(root).as_posix()])


class Cifar10P(Corrupted):
    """Sequences of `frames` images each, one for each test image; image i is a frame of sequence
    i // frames.

    The release has no labels, as the flip probability needs none: they are UNLABELLED, unless
    a `labels.npy` (one for each sequence) was put beside the images.
    """

    FOLDER = "CIFAR-10-P"

    def __init__(self, root: Path, split: str) -> None:
        file, images = self._images(root, split, ndim=5, expected="[10000, frames, 32, 32, 3]")
        self.frames: int = images.shape[1]
        if self.frames < 2:
            raise BadFiles(f"{file} has sequences of one frame: expected at least 2")
        labels = np.full(len(images), UNLABELLED, np.int64)
        labels_file = file.with_name("labels.npy")
        if labels_file.exists():
            raw = load_npy(labels_file, "one label for each sequence")
            labels = checked_labels(raw, len(CIFAR10_CLASSES), len(images), labels_file)
        super().__init__(
            images.reshape(-1, 32, 32, 3),
            np.repeat(labels, self.frames),
            CIFAR10_CLASSES,
            [file.relative_to(root).as_posix()],
        )

    def path(self, i: int) -> str:
        """`gaussian_noise.npy#17/3` is frame 3 of sequence 17."""
        sequence, frame = divmod(i, self.frames)
        return f"{self.files[0]}#{sequence}/{frame}"


def load_npy(file: Path, expected: str, mapped: bool = False) -> NDArray[Any]:
    require_file(file, expected)
    try:
        array = np.load(file, mmap_mode="r" if mapped else None, allow_pickle=False)
    except Exception as error:  # ValueError, EOFError, OSError, tokenize.TokenError
        raise BadFiles(f"{file} is not a whole .npy file ({error}): expected {expected}") from error
    if not isinstance(array, np.ndarray):
        raise BadFiles(f"{file} is an archive of several arrays: expected {expected}")
    return array
