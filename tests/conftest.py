"""What several tests share: the digits, a small ImageNet of photographs, a bucket, a full disk."""

import signal
import subprocess
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

# Whoever starts pytest in the background has it ignore Ctrl-C, which tests send to what they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def s3():
    """The URL of a new folder in a bucket, of a server in this process that speaks S3."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    host, port = server.get_host_and_port()
    account = {"aws_access_key_id": "me", "aws_secret_access_key": "password"}
    client = boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **account
    )
    client.create_bucket(Bucket="bucket")
    query = f"endpoint_override=http%3A%2F%2F{host}%3A{port}&scheme=http&region=us-east-1"
    yield lambda name: f"s3://me:password@bucket/{name}?{query}"
    server.stop()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
