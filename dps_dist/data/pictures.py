"""Stored images as people look at them: PNGs for the pages of `dps audit` and `dps report`."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dps_dist.config import Data
from dps_dist.data.ffcv import IMAGE_MODES, Reader
from dps_dist.data.manifest import beton_fields
from dps_dist.errors import InputError

LEAST_SIDE = 64  # pixels; below, an 8×8 digit is a dot


def pictures(
    data: Data, split: str, samples: Sequence[int], side: int | None = None
) -> list[bytes]:
    """A PNG of each sample as it is stored in `split.beton`: before crops, flips, normalisation.

    Images smaller than 64 pixels are enlarged by a whole factor, without blur.
    side: larger ones are shrunk, so that no side is longer than this.
    """
    beton = Path(data.path) / f"{split}.beton"
    fields = beton_fields(beton)
    if "image" not in fields:
        raise InputError(
            f"{beton} has no field 'image' (only {', '.join(fields)}): write it with `dps prepare`"
        )
    reader = Reader(str(beton))
    table = reader.metadata[f"f{reader.field_names.index('image')}"]
    outside = [sample for sample in samples if not 0 <= sample < len(table)]
    if outside:
        raise InputError(f"sample {outside[0]} is not in {beton}: give 0 to {len(table) - 1}")
    places = reader.alloc_table  # of 1.3 million images, to show a few
    places = places[np.isin(places["ptr"], table["data_ptr"][list(samples)])]
    sizes = dict(zip(places["ptr"].tolist(), places["size"].tolist(), strict=True))
    with beton.open("rb") as file:
        found = []
        for sample in samples:
            row = table[sample]
            file.seek(int(row["data_ptr"]))
            stored = file.read(sizes[int(row["data_ptr"])])
            found.append(_png(_decoded(row, stored, f"{beton}: sample {sample}"), side))
    return found


def _decoded(row: Any, stored: bytes, where: str) -> Image.Image:
    height, width = int(row["height"]), int(row["width"])
    if row["mode"] != IMAGE_MODES["jpg"]:
        return Image.fromarray(np.frombuffer(stored, np.uint8).reshape(height, width, 3))
    try:
        return Image.open(io.BytesIO(stored)).convert("RGB")
    except OSError as error:
        raise InputError(
            f"{where} is a damaged JPEG ({error}): run `dps prepare` again with --force"
        ) from None


def _png(image: Image.Image, side: int | None) -> bytes:
    factor = -(-LEAST_SIDE // max(image.size))
    if factor > 1:
        size = (image.width * factor, image.height * factor)
        image = image.resize(size, Image.Resampling.NEAREST)
    if side is not None and max(image.size) > max(side, LEAST_SIDE):
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
