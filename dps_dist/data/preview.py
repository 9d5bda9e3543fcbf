"""A batch as people look at it: a sheet of what the model is shown, for `dps preview`."""

import numpy as np
from PIL import Image, ImageDraw

from dps_dist.config import Data
from dps_dist.data.augment import denormalized
from dps_dist.data.loader import Batch
from dps_dist.data.manifest import Manifest

TILE, CAPTION, GAP = 96, 32, 6
INK, WRONG, PAPER = (40, 40, 40), (200, 30, 30), (250, 250, 250)


def sheet(batch: Batch, data: Data, manifest: Manifest, columns: int = 8) -> Image.Image:
    """The images over their labels; a label that noise changed is red, with the true one."""
    rows = -(-len(batch.index) // columns)
    page = Image.new(
        "RGB", (columns * (TILE + GAP) + GAP, rows * (TILE + CAPTION + GAP) + GAP), PAPER
    )
    draw = ImageDraw.Draw(page)
    pixels = denormalized(batch.images, data.mean, data.std).permute(0, 2, 3, 1).cpu().numpy()
    for k, (index, label) in enumerate(
        zip(batch.index.tolist(), batch.labels.tolist(), strict=True)
    ):
        if index < 0:
            continue
        x, y = GAP + k % columns * (TILE + GAP), GAP + k // columns * (TILE + CAPTION + GAP)
        tile = Image.fromarray(np.ascontiguousarray(pixels[k]))
        page.paste(tile.resize((TILE, TILE), Image.Resampling.NEAREST), (x, y))
        clean = int(manifest.clean_labels[index])
        names = [manifest.class_names[label][:15]]
        if label != clean:
            names.append(f"is {manifest.class_names[clean]}"[:15])
        draw.text((x, y + TILE + 2), "\n".join(names), WRONG if label != clean else INK)
    return page
