"""Data sets that are folders of image files: ImageNet's class folders and TinyImageNet's layout.

Opening one lists its files; an image is decoded only when `read` asks for it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from dps_dist.data.sources.layout import BadFiles, read_lines, require_folder, some
from dps_dist.errors import InputError

# torchvision's list, so that a folder means the same here and there.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class BadImage(InputError):  # noqa: N818
    """One image cannot be read; `path` is the file."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} cannot be read as an image: {reason}")
        self.path = path


class ImageFiles:
    """Images in files of their own. paths are relative to root, one for each label."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: NDArray[np.int64],
        class_names: Sequence[str],
    ) -> None:
        assert len(paths) == len(labels)
        self.root = root
        self.paths = paths
        self.labels = labels
        self.class_names = tuple(class_names)

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, i: int) -> str:
        return self.paths[i]

    def read(self, i: int) -> NDArray[np.uint8]:
        """The image as RGB [H, W, 3], as stored: an EXIF orientation is not applied, which is how
        ImageNet is read everywhere."""
        file = self.root / self.paths[i]
        try:
            data = file.read_bytes()
        except OSError as error:
            raise BadImage(str(file), error.strerror or str(error)) from error
        return decode(data, str(file))


def decode(data: bytes, name: str) -> NDArray[np.uint8]:
    """An encoded image as RGB [H, W, 3]; grey, palette, CMYK and transparent ones are converted."""
    if not data:
        raise BadImage(name, "the file is empty")
    try:
        with Image.open(BytesIO(data)) as image:
            image.load()  # the whole of it, as a truncated file opens without complaint
            mode = image.mode
            pixels = np.array(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise BadImage(name, "its contents are no known image format") from error
    except Exception as error:  # Pillow's decoders raise a dozen kinds for damaged files
        raise BadImage(name, str(error) or type(error).__name__) from error
    if mode == "F" or mode.startswith("I"):
        # Pillow would clip these to 255 and give a white picture.
        raise BadImage(name, f"mode {mode} has more than 8 bits a channel; convert it to 8 bits")
    return pixels


class ImageFolder(ImageFiles):
    """`train/<class>/*` and `val/<class>/*`, as ImageNet is kept; classes are sorted by name."""

    SPLITS = ("train", "val")

    def __init__(self, root: Path, split: str) -> None:
        class_names = class_folders(root / split)
        for other in self.splits(root):
            if other != split:
                same_classes(root / split, class_names, root / other, class_folders(root / other))
        paths, labels = class_files(root, [f"{split}/{name}" for name in class_names])
        super().__init__(root, paths, labels, class_names)

    @classmethod
    def splits(cls, root: Path) -> tuple[str, ...]:
        require_folder(root, "a folder that holds train/<class>/ and val/<class>/")
        found = tuple(split for split in cls.SPLITS if (root / split).is_dir())
        if not found:
            raise BadFiles(
                f"{root} holds neither train/ nor val/: expected <class>/ folders in those"
            )
        return found


class TinyImageNet(ImageFiles):
    """`train/<wnid>/images/*.JPEG`, and `val/images/*` labelled by `val/val_annotations.txt`.

    Classes are the wnids of `wnids.txt`, sorted, and are named by `words.txt` where it has them.
    """

    FOLDER = "tiny-imagenet-200"

    def __init__(self, root: Path, split: str) -> None:
        require_folder(root, f"the folder that holds {self.FOLDER}/")
        folder = f"{self.FOLDER}/" if (root / self.FOLDER).is_dir() else ""
        wnids = sorted(
            line.strip() for line in read_lines(root / folder / "wnids.txt", "the class ids")
        )
        if split == "train":
            train = root / folder / "train"
            same_classes(train, class_folders(train), root / folder / "wnids.txt", wnids)
            paths, labels = class_files(root, [f"{folder}train/{wnid}" for wnid in wnids])
        else:
            paths, labels = annotated_files(root, f"{folder}val", wnids)
        super().__init__(root, paths, labels, self._words(root / folder, wnids))

    @staticmethod
    def splits(root: Path) -> tuple[str, ...]:
        return ("train", "val")

    @staticmethod
    def _words(folder: Path, wnids: Sequence[str]) -> list[str]:
        lines = read_lines(folder / "words.txt", "class names, one «wnid<tab>words» a line")
        words = dict(line.strip().split("\t", 1) for line in lines if "\t" in line.strip())
        return [words.get(wnid, wnid) for wnid in wnids]


def is_image(name: str) -> bool:
    # macOS leaves «._x.jpg» files, which hold no image, beside the real ones.
    return name.lower().endswith(EXTENSIONS) and not name.startswith("._")


def class_folders(folder: Path) -> list[str]:
    """The names of the class folders in it, sorted."""
    require_folder(folder, "a folder with one folder for each class")
    with os.scandir(folder) as listing:
        entries = list(listing)
    loose = [entry.name for entry in entries if is_image(entry.name) and entry.is_file()]
    if loose:
        raise BadFiles(
            f"{folder} holds images outside class folders ({some(loose, 1)}): move each into the "
            f"folder of its class, {folder.name}/<class>/{min(loose)}; for ImageNet's validation "
            "images the development kit's ground truth says which"
        )
    names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    if not names:
        raise BadFiles(f"{folder} holds no class folder: expected one folder for each class")
    return names


def same_classes(
    folder: Path, names: Sequence[str], other: Path, other_names: Sequence[str]
) -> None:
    differing = set(names) ^ set(other_names)
    if differing:
        raise BadFiles(
            f"{folder} and {other} differ in their classes: {some(differing)} in only one of them"
        )


def class_files(root: Path, folders: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """All images under each folder (sorted, as torchvision's), labelled by the folder's position.

    os.walk learns from the listing what is a file, without a look at each: 1.28 million of
    those would take minutes on a network disk.
    """

    def refuse(error: OSError) -> None:
        raise BadFiles(f"{error.filename} cannot be listed: {error.strerror}") from error

    paths: list[str] = []
    counts: list[int] = []
    for folder in folders:
        before = len(paths)
        top = str(root / folder)
        for place, names in sorted(_walk(top, refuse)):
            prefix = folder + place[len(top) :].replace(os.sep, "/")
            paths += [f"{prefix}/{name}" for name in sorted(names) if is_image(name)]
        counts.append(len(paths) - before)
        if counts[-1] == 0:
            raise BadFiles(
                f"{top} holds no image: expected files that end in {' '.join(EXTENSIONS)}, or no "
                "such folder at all"
            )
    return paths, np.repeat(np.arange(len(folders)), counts)


def _walk(top: str, refuse: Callable[[OSError], None]) -> Iterator[tuple[str, list[str]]]:
    """(folder, names of its files) for all folders below, linked ones too, but none twice."""
    seen = set()
    for place, folders, names in os.walk(top, onerror=refuse, followlinks=True):
        seen.add(os.path.realpath(place))
        folders[:] = [f for f in folders if os.path.realpath(f"{place}/{f}") not in seen]
        yield place, names


def annotated_files(
    root: Path, folder: str, wnids: Sequence[str]
) -> tuple[list[str], NDArray[np.int64]]:
    """TinyImageNet's validation images, in the order of the lines that label them."""
    annotations = root / folder / "val_annotations.txt"
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[str, int] = {}
    for number, line in enumerate(read_lines(annotations, "«image<tab>wnid<tab>box» lines"), 1):
        name, wnid = (*line.split("\t"), "", "")[:2]
        if wnid not in label_of:
            raise BadFiles(f"{annotations} line {number}: {wnid!r} is not a class of wnids.txt")
        labels[name] = label_of[wnid]
    images = require_folder(root / folder / "images", "the validation images")
    with os.scandir(images) as listing:
        present = {entry.name for entry in listing if is_image(entry.name)}
    if absent := labels.keys() - present:
        raise BadFiles(f"{images} lacks images that {annotations.name} lists: {some(absent)}")
    if unlisted := present - labels.keys():
        raise BadFiles(f"{annotations} has no line for {some(unlisted)}")
    if not labels:
        raise BadFiles(f"{annotations} lists no image")
    return [f"{folder}/images/{name}" for name in labels], np.array([*labels.values()], np.int64)
