"""Images a second of our loader, of FFCV's stock pipeline and of torch's DataLoader, in one run.

All three give normalised float32 [B, 3, 224, 224] after a random resized crop and a flip, from the
same JPEG photographs (cut-outs of scikit-learn's two sample photographs, 500 pixels wide, so that
decoding costs what ImageNet's does), with the same number of threads or processes. They take turns;
medians are compared. Run: python benchmarks/loader.py [--quick]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader as FFCVLoader
from ffcv.loader import OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dps_dist.data import manifest as manifests
from dps_dist.data.decode import Crop
from dps_dist.data.loader import Loader
from dps_dist.data.order import EpochOrder
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from figures import found

MEAN, STD, SIZE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224


def write_photographs(root: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for name, photo in zip(("n01", "n02"), load_sample_images().images, strict=True):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for k in range(count // 2):
            height = int(rng.integers(330, 380))
            y, x = rng.integers(photo.shape[0] - height), rng.integers(photo.shape[1] - 500)
            cut = Image.fromarray(photo[y : y + height, x : x + 500])
            cut.save(folder / f"{k:05}.JPEG", quality=90)


def ours(beton_folder: Path, batch: int, threads: int) -> Callable[[int], Iterator[torch.Tensor]]:
    manifest = manifests.read(beton_folder, "train")
    crop = Crop("resized", flip=True)
    loader = Loader(
        manifest.beton, manifest.labels, crop, SIZE, mean=MEAN, std=STD, threads=threads
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for b in loader.epoch(EpochOrder(len(manifest), batch, epoch=number)):
            yield b.images

    return epoch


def stock(beton_folder: Path, batch: int, threads: int) -> Callable[[int], Iterator[torch.Tensor]]:
    loader = FFCVLoader(
        str(beton_folder / "train.beton"),
        batch_size=batch,
        num_workers=threads,
        order=OrderOption.RANDOM,
        seed=0,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
                RandomHorizontalFlip(),
                NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": None,
            "index": None,
        },
    )
    return lambda number: (images for (images,) in loader)


def torchs(root: Path, batch: int, processes: int) -> Callable[[int], Iterator[torch.Tensor]]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    loader = DataLoader(
        ImageFolder(str(root / "train"), transform),
        batch,
        shuffle=True,
        num_workers=processes,
        drop_last=True,
        persistent_workers=True,
    )
    return lambda number: (images for images, _ in loader)


def timed(epoch: Iterator[torch.Tensor]) -> tuple[float, float, float]:
    """→ images a second; cores in use; the longest wait, beyond the usual one, of the epoch."""
    start, used = time.perf_counter(), time.process_time()
    last, waits, images = start, [], 0
    for batch in epoch:
        now = time.perf_counter()
        waits.append(now - last)
        last, images = now, images + len(batch)
    wall = time.perf_counter() - start
    busy = (time.process_time() - used) / wall
    return images / wall, busy, (max(waits[1:]) - statistics.median(waits[1:])) / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer images and repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    count, repeats = (512, 3) if options.quick else (2048, 7)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_photographs(root, count)
        source = open_source("imagefolder", root, "train")
        write_split(source, root, "train", {}, ImageOptions("jpeg"))
        torch.set_num_threads(options.threads)
        contestants = {
            "ours": ours(root, options.batch, options.threads),
            "FFCV's stock pipeline": stock(root, options.batch, options.threads),
            "torch DataLoader + torchvision": torchs(root, options.batch, options.threads),
        }
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
        for number in range(repeats + 1):
            for name, epoch in contestants.items():
                torch.set_num_threads(options.threads)
                result = timed(epoch(number))
                if number:  # the first epoch compiles or starts processes
                    results[name].append(result)
    speed = {name: statistics.median(r[0] for r in rows) for name, rows in results.items()}
    for name, goal in (("FFCV's stock pipeline", 0.95), ("torch DataLoader + torchvision", 2.0)):
        found(
            f"loader's images/s against {name}, {count} JPEGs, {options.threads} threads",
            speed["ours"] / speed[name],
            at_least=goal,
            note=f"{speed['ours']:,.0f} against {speed[name]:,.0f}",
        )
    busy = statistics.median(r[1] for r in results["ours"])
    stall = statistics.median(r[2] for r in results["ours"])
    found(
        "… longest stall between batches, of an epoch",
        stall,
        "{:.1%}",
        at_most=0.05,
        note=f"{busy:.2f} of {options.threads} cores busy",
    )


if __name__ == "__main__":
    main()
