"""Prepared data that several tests read: the digits, and a small ImageNet of real photographs."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image
from sklearn.datasets import load_sample_images

from dps_dist.data import manifest as manifests
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split

# The machine's speed is not what is tested; the same examples each time keep CI repeatable.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")


def write_photos(root: Path, per_class: int, sizes: tuple[int, int] = (60, 200)) -> Path:
    """An ImageNet-shaped tree: JPEG cut-outs of scikit-learn's two photographs, in many sizes."""
    rng = np.random.default_rng(0)
    for photo, wnid in zip(load_sample_images().images, ("n01", "n02"), strict=True):
        for split in ("train", "val"):
            folder = root / split / wnid
            folder.mkdir(parents=True)
            for k in range(per_class):
                h, w = rng.integers(*sizes, 2)
                y, x = rng.integers(photo.shape[0] - h), rng.integers(photo.shape[1] - w)
                cut = Image.fromarray(photo[y : y + h, x : x + w])
                cut.save(folder / f"{k:03}.JPEG", quality=95)
    return root


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    for split in ("train", "val"):
        source = open_source("digits", None, split)
        write_split(source, folder, split, {"source": "digits"}, ImageOptions("raw"), workers=1)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    root = write_photos(tmp_path_factory.mktemp("photos"), per_class=25)
    for split in ("train", "val"):
        source = open_source("imagefolder", root, split)
        write_split(source, root, split, {"source": "imagefolder"}, ImageOptions(max_side=160))
    return root


@pytest.fixture(scope="session")
def train_digits(digits) -> manifests.Manifest:
    return manifests.read(digits, "train")


@pytest.fixture(scope="session")
def train_photos(photos) -> manifests.Manifest:
    return manifests.read(photos, "train")
