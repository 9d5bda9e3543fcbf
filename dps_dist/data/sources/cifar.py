"""CIFAR-10 and CIFAR-100 in both official archives, «binary version» and «Python version».

The Python version is pickles: they are read without letting them name any code.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dps_dist.data.sources.arrays import ArrayImages, checked_labels
from dps_dist.data.sources.layout import (
    BadFiles,
    folder_holding,
    read_bytes,
    read_lines,
    require_folder,
)

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
PIXELS = 3 * 32 * 32
Batch = tuple[NDArray[np.uint8], Any]  # [n, PIXELS] as red, green and blue planes; n labels


class Cifar(ArrayImages):
    """What the two share: batches of 32×32 images, each batch a file with the labels in it."""

    NUM_CLASSES: ClassVar[int]
    BINARY_FOLDER: ClassVar[str]
    PYTHON_FOLDER: ClassVar[str]
    FILES: ClassVar[dict[str, tuple[str, ...]]]  # split → batches; «.bin» is added for binary
    NAMES_BINARY: ClassVar[str]
    NAMES_PYTHON: ClassVar[tuple[str, str]]  # file and key
    LABEL_BYTES: ClassVar[int]  # before the pixels of a binary record; the last is the label
    LABEL_KEY: ClassVar[str]

    def __init__(self, root: Path, split: str) -> None:
        folder, binary = self._locate(root)
        names = self._binary_names(folder) if binary else self._python_names(folder)
        if len(names) != self.NUM_CLASSES:
            raise BadFiles(f"{folder} names {len(names)} classes: expected {self.NUM_CLASSES}")
        files = [folder / (f"{name}.bin" if binary else name) for name in self.FILES[split]]
        batches = [
            self._binary_batch(file) if binary else self._python_batch(file) for file in files
        ]
        counts = [len(pixels) for pixels, _ in batches]
        for file, count in zip(files, counts, strict=True):
            # A batch cut off between two records has nothing else that gives it away.
            if count != max(counts):
                raise BadFiles(
                    f"{file} holds {count} images: expected {max(counts)} as in the others"
                )
        planes = np.concatenate([pixels for pixels, _ in batches]).reshape(-1, 3, 32, 32)
        super().__init__(
            images=planes.transpose(0, 2, 3, 1),
            labels=np.concatenate(
                [
                    checked_labels(labels, len(names), len(pixels), file)
                    for file, (pixels, labels) in zip(files, batches, strict=True)
                ]
            ),
            class_names=names,
            files=[file.relative_to(root).as_posix() for file in files],
        )

    @staticmethod
    def splits(root: Path) -> tuple[str, ...]:
        return ("train", "val")

    @classmethod
    def _locate(cls, root: Path) -> tuple[Path, bool]:
        """The folder with the batches, and whether they are binary."""
        require_folder(root, f"the folder that holds {cls.BINARY_FOLDER}/ or {cls.PYTHON_FOLDER}/")
        batches = [name for names in cls.FILES.values() for name in names]
        if binary := folder_holding(root, cls.BINARY_FOLDER, [f"{name}.bin" for name in batches]):
            return binary, True
        if python := folder_holding(root, cls.PYTHON_FOLDER, batches):
            return python, False
        raise BadFiles(
            f"{root} holds no batches in {cls.BINARY_FOLDER}/ or {cls.PYTHON_FOLDER}/: extract the "
            "archive there"
        )

    @classmethod
    def _binary_names(cls, folder: Path) -> list[str]:
        return [line.strip() for line in read_lines(folder / cls.NAMES_BINARY, "the class names")]

    @classmethod
    def _python_names(cls, folder: Path) -> list[str]:
        file, key = cls.NAMES_PYTHON
        names = unpickle(folder / file, "the class names").get(key)
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise BadFiles(f"{folder / file} has no list of names under {key!r}")
        return names

    @classmethod
    def _binary_batch(cls, file: Path) -> Batch:
        data = read_bytes(file, "a batch of the archive; extract it again")
        record = cls.LABEL_BYTES + PIXELS
        if not data or len(data) % record:
            raise BadFiles(
                f"{file} has {len(data)} bytes: expected a multiple of {record} (cut off, or of "
                "another data set: extract the archive again)"
            )
        records = np.frombuffer(data, np.uint8).reshape(-1, record)
        return records[:, cls.LABEL_BYTES :], records[:, cls.LABEL_BYTES - 1]

    @classmethod
    def _python_batch(cls, file: Path) -> Batch:
        batch = unpickle(file, "a batch of the archive; extract it again")
        pixels, labels = batch.get("data"), batch.get(cls.LABEL_KEY)
        if not isinstance(pixels, PickledArray) or not isinstance(labels, list):
            raise BadFiles(f"{file} lacks 'data' or {cls.LABEL_KEY!r}: extract the archive again")
        return pixels.as_uint8(file, width=PIXELS), labels


class Cifar10(Cifar):
    NUM_CLASSES = 10
    BINARY_FOLDER = "cifar-10-batches-bin"
    PYTHON_FOLDER = "cifar-10-batches-py"
    FILES: ClassVar = {
        "train": tuple(f"data_batch_{k}" for k in range(1, 6)),
        "val": ("test_batch",),
    }
    NAMES_BINARY = "batches.meta.txt"
    NAMES_PYTHON = ("batches.meta", "label_names")
    LABEL_BYTES = 1
    LABEL_KEY = "labels"


class Cifar100(Cifar):
    """The 100 fine classes; the 20 coarse ones are not used."""

    NUM_CLASSES = 100
    BINARY_FOLDER = "cifar-100-binary"
    PYTHON_FOLDER = "cifar-100-python"
    FILES: ClassVar = {"train": ("train",), "val": ("test",)}
    NAMES_BINARY = "fine_label_names.txt"
    NAMES_PYTHON = ("meta", "fine_label_names")
    LABEL_BYTES = 2  # coarse, fine
    LABEL_KEY = "fine_labels"


class PickledDtype:
    """Stands in for numpy.dtype while a pickle is read: keeps the type's name."""

    def __init__(self, name: str = "", *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: bytes have none."""


class PickledArray:
    """Stands in for numpy.ndarray while a pickle is read: keeps what the array is made of."""

    def __init__(self, *_: object) -> None:
        self.shape: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, self.shape, self.dtype, self.fortran, self.data = state

    def as_uint8(self, file: Path, width: int) -> NDArray[np.uint8]:
        """The array [n, width] of bytes that a batch's pixels are."""
        try:
            assert self.dtype.name.lstrip("|") == "u1"
            data = self.data.encode("latin1") if isinstance(self.data, str) else self.data
            rows, columns = self.shape
            assert rows > 0 and columns == width
            flat = np.frombuffer(data, np.uint8)
            return flat.reshape((rows, columns), order="F" if self.fortran else "C")
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            raise BadFiles(
                f"{file}: 'data' of shape {self.shape} is not n × {width} bytes; extract the "
                "archive again"
            ) from error


class PickledBytes:
    """Stands in for codecs.encode, which Python 3 names where Python 2 had a string."""

    def __new__(cls, text: str, _encoding: str) -> bytes:  # type: ignore[misc]
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("it changes a type, which no CIFAR file does")


# All that a CIFAR pickle may name: the pieces of an array (numpy 2 says _core), and what Python 3
# puts for bytes when it writes the old protocol. None of it is the real thing.
ADMITTED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledDtype,
    ("_codecs", "encode"): PickledBytes,
}


class RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no CIFAR file does"
            ) from None


def unpickle(file: Path, expected: str) -> dict[str, Any]:
    """The dict in a pickle of Python 2 (latin1 keeps its byte strings) or 3."""
    data = BytesIO(read_bytes(file, expected))
    try:
        content = RestrictedUnpickler(data, encoding="latin1").load()
    except Exception as error:  # pickle raises almost any kind for damaged data
        raise BadFiles(
            f"{file} is not a CIFAR pickle ({error or type(error).__name__}): extract the official "
            "archive again"
        ) from error
    if not isinstance(content, dict):
        raise BadFiles(f"{file} holds a {type(content).__name__}: expected {expected}")
    return content
