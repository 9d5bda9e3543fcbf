"""Data sets that are arrays in a file: SVHN, MNIST-style idx, and the digits.

`ArrayImages` is what they share with CIFAR (`cifar.py`) and its corruptions (`corrupted.py`).
"""

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dps_dist.data.sources.layout import BadFiles, read_bytes, require_file, require_folder

DIGITS = tuple("0123456789")


class ArrayImages:
    """Images [N, H, W, 3], or [N, H, W] in grey, from files that hold equally many each."""

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        class_names: Sequence[str],
        files: Sequence[str],
    ) -> None:
        assert len(images) == len(labels)
        self.images = images
        self.labels = labels
        self.class_names = tuple(class_names)
        self.files = files

    def __len__(self) -> int:
        return len(self.images)

    def path(self, i: int) -> str:
        file, place = divmod(i, len(self) // len(self.files))
        return f"{self.files[file]}#{place}"

    def read(self, i: int) -> NDArray[np.uint8]:
        """The image as RGB [H, W, 3]: a copy, as the array may be a file mapped into memory."""
        image = np.array(self.images[i], order="C")
        return image if image.ndim == 3 else np.repeat(image[:, :, None], 3, axis=2)


def checked_labels(
    raw: ArrayLike, num_classes: int, num_images: int, file: Path
) -> NDArray[np.int64]:
    """The labels of a file's images, refused unless each is a class."""
    labels = np.asarray(raw)
    if labels.shape != (num_images,) or labels.dtype.kind not in "iu":
        raise BadFiles(
            f"{file} has labels of shape {labels.shape} and type {labels.dtype}: expected "
            f"{num_images} integers, one for each image"
        )
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise BadFiles(f"{file} has the label {wrong[0]}: expected 0 to {num_classes - 1}")
    return labels.astype(np.int64)


class Svhn(ArrayImages):
    """`train_32x32.mat` and `test_32x32.mat`: X [32, 32, 3, N], and y with 10 for the digit 0."""

    FILES: ClassVar = {"train": "train_32x32.mat", "val": "test_32x32.mat"}

    def __init__(self, root: Path, split: str) -> None:
        file = require_file(root / self.FILES[split], "a MATLAB file with X and y")
        X, y = self._arrays(file)
        if X.shape[:3] != (32, 32, 3) or X.ndim != 4 or X.dtype != np.uint8 or not X.size:
            raise BadFiles(
                f"{file} has X of shape {X.shape} and type {X.dtype}: expected [32, 32, 3, N] uint8"
            )
        labels = checked_labels(y.reshape(-1), 11, X.shape[3], file) % 10
        super().__init__(X.transpose(3, 0, 1, 2), labels, DIGITS, [file.name])

    @classmethod
    def splits(cls, root: Path) -> tuple[str, ...]:
        require_folder(root, f"the folder that holds {' and '.join(cls.FILES.values())}")
        found = tuple(split for split, file in cls.FILES.items() if (root / file).is_file())
        if not found:
            raise BadFiles(f"{root} holds neither of {' and '.join(cls.FILES.values())}")
        return found

    @staticmethod
    def _arrays(file: Path) -> tuple[NDArray[Any], NDArray[Any]]:
        from scipy.io import loadmat  # half a second, for this source alone

        try:
            content = loadmat(file, variable_names=["X", "y"])
        except Exception as error:  # scipy raises a dozen kinds for a damaged file
            raise BadFiles(
                f"{file} is not a whole MATLAB file ({error}): fetch it again"
            ) from error
        if absent := {"X", "y"} - content.keys():
            raise BadFiles(
                f"{file} has no {' and no '.join(sorted(absent))}: expected the cropped-digits "
                "format (format 2), with X and y"
            )
        return content["X"], content["y"]


class Idx(ArrayImages):
    """MNIST's four files, and those of the data sets that took over its format.

    They hold no class names, so the classes are called 0, 1, 2, … up to the highest label.
    """

    PREFIXES: ClassVar = {"train": "train", "val": "t10k"}

    def __init__(self, root: Path, split: str) -> None:
        prefix = self.PREFIXES[split]
        image_file = self._require(root, f"{prefix}-images-idx3-ubyte")
        label_file = self._require(root, f"{prefix}-labels-idx1-ubyte")
        images = read_idx(image_file, ndim=3)
        # Both splits' labels count the classes: a small one may lack the highest.
        highest = max(
            int(read_idx(file, ndim=1).max())
            for name in self.PREFIXES.values()
            if (file := self._find(root, f"{name}-labels-idx1-ubyte"))
        )
        labels = checked_labels(read_idx(label_file, ndim=1), highest + 1, len(images), label_file)
        names = [str(label) for label in range(highest + 1)]
        super().__init__(images, labels, names, [image_file.name])

    @classmethod
    def splits(cls, root: Path) -> tuple[str, ...]:
        require_folder(root, "the folder that holds train-images-idx3-ubyte and the like")
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        found = tuple(
            split
            for split, prefix in cls.PREFIXES.items()
            if any(cls._find(root, f"{prefix}-{kind}") for kind in kinds)
        )
        if not found:
            raise BadFiles(f"{root} holds no idx files: expected train-images-idx3-ubyte[.gz] etc.")
        return found

    @staticmethod
    def _find(root: Path, name: str) -> Path | None:
        dotted = name.replace("-idx", ".idx")  # a renaming that is about
        for candidate in (name, dotted, f"{name}.gz", f"{dotted}.gz"):
            if (root / candidate).is_file():
                return root / candidate
        return None

    @classmethod
    def _require(cls, root: Path, name: str) -> Path:
        return cls._find(root, name) or require_file(root / name, f"{name} or {name}.gz")


def read_idx(file: Path, ndim: int) -> NDArray[np.uint8]:
    """An idx file of bytes: 0 0 8 ndim, each dimension as a big-endian int32, then the data."""
    data = read_bytes(file, "an idx file")
    if file.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except Exception as error:  # OSError, EOFError, zlib.error
            raise BadFiles(f"{file} is not a whole gzip file ({error}): fetch it again") from error
    magic, expected = int.from_bytes(data[:4], "big"), 0x800 + ndim
    if magic != expected:
        raise BadFiles(f"{file} begins with the magic number {magic}: expected {expected}")
    header = 4 + 4 * ndim
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, header, 4)]
    size = int(np.prod(shape, dtype=object))
    if len(data) != header + size or not size:
        raise BadFiles(
            f"{file} has {len(data)} bytes: its header announces {header + size}, of shape {shape} "
            "(it is cut off or empty; fetch it again)"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


class EmbeddedDigits(ArrayImages):
    """scikit-learn's 1797 handwritten digits, 8×8 in 17 shades; nothing to download.

    A third of each class is for validation, drawn once and for all: 1200 and 597 images.
    """

    NUM_VAL = 597

    def __init__(self, root: Path, split: str) -> None:
        from sklearn.datasets import load_digits  # a second, for this source alone

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        # Shuffled, then sorted by class: taking every third of the whole row is stratified.
        shuffled = np.random.default_rng(0).permutation(len(labels))
        row = shuffled[np.argsort(labels[shuffled], kind="stable")]
        share = np.arange(len(row) + 1) * self.NUM_VAL // len(row)
        is_val = np.diff(share).astype(bool)
        self.chosen = np.sort(row[is_val if split == "val" else ~is_val])
        grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
        super().__init__(grey[self.chosen], labels[self.chosen], DIGITS, ["digits"])

    @staticmethod
    def splits(root: Path) -> tuple[str, ...]:
        return ("train", "val")

    def path(self, i: int) -> str:
        """`digits#17` is scikit-learn's image 17."""
        return f"digits#{self.chosen[i]}"
