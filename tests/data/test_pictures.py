"""Pictures are the stored pixels, enlarged or shrunk but not otherwise changed."""

import io

import numpy as np
import pytest
from PIL import Image

from dps_dist.config import Data
from dps_dist.data.pictures import pictures
from dps_dist.data.sources import open_source
from dps_dist.data.write import shrunk
from dps_dist.errors import InputError


def opened(png):
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG" and image.mode == "RGB"
    return np.asarray(image)


def test_small_images_are_enlarged_without_blur(digits):
    source = open_source("digits", None, "train")
    samples = [7, 0, 1199, 7]
    for sample, png in zip(
        samples, pictures(Data(path=str(digits)), "train", samples), strict=True
    ):
        enlarged = np.kron(source.read(sample), np.ones((8, 8, 1), np.uint8))
        assert np.array_equal(opened(png), enlarged)


def test_photographs_are_as_stored_or_shrunk(photos):
    source, data = open_source("imagefolder", photos, "train"), Data(path=str(photos))
    samples = range(len(source))  # half of them are stored as JPEG
    whole, small = pictures(data, "train", samples), pictures(data, "train", samples, side=80)
    away = []
    for sample in samples:
        stored, image = shrunk(source.read(sample), 160), opened(whole[sample])
        assert image.shape == stored.shape
        away.append(np.abs(image.astype(int) - stored).mean())
        assert max(opened(small[sample]).shape) <= 80
        ratio = np.divide(*opened(small[sample]).shape[:2]) / np.divide(*stored.shape[:2])
        assert ratio == pytest.approx(1, abs=0.03)
    assert min(away) == 0 and 0 < max(away) < 6


def test_what_is_not_there_is_said(digits, tmp_path):
    with pytest.raises(InputError, match=r"sample 1200 is not in .*train.beton: give 0 to 1199"):
        pictures(Data(path=str(digits)), "train", [3, 1200])
    with pytest.raises(InputError, match=r"train.beton does not exist: run `dps prepare"):
        pictures(Data(path=str(tmp_path)), "train", [0])


def test_a_damaged_jpeg_is_said(photos, tmp_path):
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.reader import Reader

    beton = tmp_path / "train.beton"
    content = bytearray((photos / "train.beton").read_bytes())
    table = Reader(str(photos / "train.beton")).metadata["f0"]
    sample = int(np.flatnonzero(table["mode"] == IMAGE_MODES["jpg"])[0])
    at = int(table["data_ptr"][sample])
    content[at : at + 200] = bytes(200)
    beton.write_bytes(content)
    with pytest.raises(InputError, match=rf"sample {sample} is a damaged JPEG"):
        pictures(Data(path=str(tmp_path)), "train", [sample])
