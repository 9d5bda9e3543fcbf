"""The loader: the same pixels for any threads, ranks and restarts; right crops; a clean end."""

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from ffcv.reader import Reader
from ffcv.transforms import ToTensor
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import v2

from dps_dist import recipes
from dps_dist.data import manifest as manifests
from dps_dist.data.decode import Crop, KeyedDecoder
from dps_dist.data.loader import Loader, eval_loader, noisy_labels, resolution_at, train_loader
from dps_dist.data.mapped import MappedBeton, MappedLoader
from dps_dist.data.order import EpochOrder
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # images come out as bytes
CROPS = {
    "pad": Crop("pad", flip=True, pad=2),
    "resized": Crop("resized", flip=True),
    "center": Crop("center", keep=0.875),
}


def loader_of(manifest, crop, size=None, **options):
    size = size or (8 if crop.kind == "pad" else 32)
    return Loader(manifest.beton, manifest.labels, crop, size, **{**PLAIN, **options})


def by_sample(loader, orders, ranks=(0,), view=0):
    """{sample: its pixels} over some orders and ranks."""
    found = {}
    for order in orders:
        for rank in ranks:
            for batch in loader.epoch(order, rank):
                images = (batch.images, *batch.other_views)[view]
                found.update(zip(batch.index.tolist(), images.clone(), strict=True))
    return found


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for sample in ours:
        assert torch.equal(ours[sample], theirs[sample]), f"sample {sample} differs"


@pytest.fixture(scope="module")
def loaders(train_digits, train_photos):
    """One loader for each crop and number of threads: compiling one takes seconds."""
    made = {}

    def get(kind, threads=1, views=1):
        if (kind, threads, views) not in made:
            manifest = train_digits if kind == "pad" else train_photos
            made[kind, threads, views] = loader_of(
                manifest, CROPS[kind], threads=threads, views=views, seed=5
            )
        return made[kind, threads, views]

    return get


@pytest.mark.parametrize("kind", CROPS)
class TestPixelsDependOnlyOnSeedEpochSample:
    def test_threads(self, loaders, kind):
        one, two = loaders(kind), loaders(kind, threads=2)
        order = EpochOrder(len(one), 10, epoch=3)
        assert_same(by_sample(one, [order]), by_sample(two, [order]))

    def test_ranks(self, loaders, kind):
        loader = loaders(kind)
        alone = EpochOrder(len(loader), 10, epoch=2)
        pair = EpochOrder(len(loader), 5, 2, epoch=2)
        assert_same(by_sample(loader, [alone]), by_sample(loader, [pair], ranks=(0, 1)))

    def test_restart_in_mid_epoch(self, loaders, kind):
        loader, again = loaders(kind), loaders(kind, threads=2)
        order = EpochOrder(len(loader), 7, epoch=4, drop_last=False)
        rest = replace(order, position=order.position_after(2))
        begun = {}
        for batch in loader.epoch(order):
            begun.update(zip(batch.index.tolist(), batch.clone().images, strict=True))
            if len(begun) == 14:
                break
        whole = by_sample(loader, [order])
        assert_same({**begun, **by_sample(again, [rest])}, whole)

    def test_clones_may_be_kept(self, loaders, kind):
        """FFCV reuses its buffers."""
        loader = loaders(kind)
        order = EpochOrder(len(loader), 5, epoch=1)
        kept = [batch.clone() for batch in loader.epoch(order)]
        for batch, fresh in zip(kept, loader.epoch(order), strict=True):
            assert torch.equal(batch.images, fresh.images)


@pytest.mark.parametrize("kind", ["pad", "resized"])
def test_epochs_and_views_differ_seeds_differ(loaders, kind, train_digits, train_photos):
    loader = loaders(kind, threads=2, views=2)
    orders = [EpochOrder(len(loader), 10, epoch=e, drop_last=False) for e in (0, 1)]
    first, second = (by_sample(loader, [order]) for order in orders)
    other_view = by_sample(loader, orders[:1], view=1)
    manifest = train_digits if kind == "pad" else train_photos
    other_seed = by_sample(loader_of(manifest, CROPS[kind], seed=6), orders[:1])
    for other in (second, other_view, other_seed):
        same = sum(torch.equal(first[i], other[i]) for i in range(len(loader)))
        assert same < 0.1 * len(loader)
    # The first view does not depend on whether a second is asked for.
    assert_same(first, by_sample(loaders(kind), orders[:1]))


def test_pad_crop_is_a_shift_over_black_and_maybe_a_mirror(loaders):
    """Every image is among the shifts of its original, and each shift is used equally often."""
    source = open_source("digits", None, "train")
    loader, pad = loaders("pad"), 2
    used = np.zeros((2, 5, 5))
    for sample, image in by_sample(loader, [EpochOrder(1200, 100, epoch=9)]).items():
        padded = np.pad(source.read(sample), ((pad, pad), (pad, pad), (0, 0)))
        pixels = image.permute(1, 2, 0).round().to(torch.uint8).numpy()
        matches = [
            (flip, y, x)
            for flip in (0, 1)
            for y in range(5)
            for x in range(5)
            if np.array_equal(pixels[:, ::-1] if flip else pixels, padded[y : y + 8, x : x + 8])
        ]
        assert matches, f"sample {sample} is no crop of its original"
        for match in matches:
            used[match] += 1 / len(matches)
    assert chisquare(used.sum((1, 2))).pvalue > 1e-3
    assert chisquare(used.sum(0).ravel()).pvalue > 1e-3


class Gradient:
    """Images whose red and green channels tell the column and the row, so a crop shows its box."""

    class_names = ("a", "b")
    size = 250

    def __init__(self, count=400):
        self.labels = np.arange(count) % 2

    def __len__(self):
        return len(self.labels)

    def path(self, i):
        return str(i)

    def read(self, i):
        ramp = np.arange(self.size, dtype=np.uint8)
        across = np.broadcast_to(ramp, (self.size, self.size))
        return np.stack([across, across.T, across], axis=2)


@pytest.fixture(scope="module")
def gradient(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradient")
    write_split(Gradient(), folder, "train", {}, ImageOptions("raw"), workers=1)
    return manifests.read(folder, "train")


def test_resized_crop_has_torchvisions_distribution(gradient):
    """Boxes of ours against as many of torchvision's: area, shape and place."""
    loader = loader_of(gradient, Crop("resized", flip=True), size=64, threads=2)
    ours, mirrored = [], 0
    orders = [EpochOrder(400, 50, epoch=e) for e in range(3)]
    for image in (i for o in orders for b in loader.epoch(o) for i in b.images):
        left, right = image[0, :, 0].mean(), image[0, :, -1].mean()
        mirrored += int(left > right)
        top, bottom = image[1, 0].mean(), image[1, -1].mean()
        # The middle of the first and last cell, from which the box's edges follow.
        width, height = abs(right - left) * 64 / 63, abs(bottom - top) * 64 / 63
        ours.append((width * height, width / height, min(left, right), top))
    picture = torch.zeros(3, 250, 250)
    theirs = []
    torch.manual_seed(0)
    for _ in range(1200):
        top, left, h, w = v2.RandomResizedCrop.make_params(
            v2.RandomResizedCrop(64), [picture]
        ).values()
        theirs.append((w * h, w / h, left + w / 128, top + h / 128))
    for k, what in enumerate(("area", "ratio", "left", "top")):
        p = ks_2samp([float(o[k]) for o in ours], [float(t[k]) for t in theirs]).pvalue
        assert p > 1e-3, what
    assert abs(mirrored - 600) < 60


def test_center_crop_keeps_the_middle(gradient):
    loader = loader_of(gradient, Crop("center", keep=0.8), size=200)
    batch = next(loader.epoch(EpochOrder(400, 2, shuffle="none")))
    expected = Gradient().read(0)[25:225, 25:225]
    np.testing.assert_array_equal(batch.images[0].permute(1, 2, 0).numpy(), expected)


def test_jpeg_and_raw_pixels_are_those_of_the_file(tmp_path, photos):
    """As written and as read back, each at its own size: raw exactly, JPEG closely."""
    source = open_source("imagefolder", photos, "val")
    for mode, worst in (("raw", 0), ("jpeg", 12)):
        options = ImageOptions(mode, max_side=0, quality=95)
        write_split(source, tmp_path / mode, "val", {}, options, workers=2)
        loader = loader_of(manifests.read(tmp_path / mode, "val"), Crop("center"), size=100)
        for sample in (0, 7, 31, 49):
            stored = torch.from_numpy(source.read(sample)).permute(2, 0, 1)
            side = min(stored.shape[1:])
            top, left = (stored.shape[1] - side) // 2, (stored.shape[2] - side) // 2
            square = stored[:, top : top + side, left : left + side]
            order = EpochOrder(len(source), 1, shuffle="none", position=sample)
            (image,) = next(loader.epoch(order, resolution=side)).images
            off = (image - square).abs()
            assert off.max() <= 6 * worst and off.mean() <= worst / 3


def test_batch_is_normalised_channels_last_and_padded(digits):
    config = recipes.load("digits", [f"data.path={digits}"])
    manifest = manifests.read(digits, "val")
    loader = eval_loader(config, manifest, threads=1)
    order = EpochOrder(597, 64, 2, shuffle="none", drop_last=False)
    source = open_source("digits", None, "val")
    normalize = v2.Normalize(config.data.mean, config.data.std)
    total = 0
    for rank in (0, 1):
        batches = [batch.clone() for batch in loader.epoch(order, rank)]
        assert len(batches) == order.steps == 5
        for batch in batches:
            assert batch.images.shape == (64, 3, 8, 8)
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            assert batch.images.dtype == batch.weight.dtype == torch.float32
            assert batch.labels.dtype == batch.index.dtype == torch.int64
            real = batch.index >= 0
            assert torch.equal(batch.weight, real.float())
            assert torch.equal(
                batch.labels[real], torch.from_numpy(manifest.labels)[batch.index[real]]
            )
            total += int(real.sum())
        index = int(batches[0].index[1])
        pixels = torch.from_numpy(source.read(index)).permute(2, 0, 1)
        torch.testing.assert_close(batches[0].images[1], normalize(pixels / 255))
    assert total == 597


def test_a_rank_may_have_nothing_but_padding(train_digits):
    loader = loader_of(train_digits, Crop("pad"))
    order = EpochOrder(1200, 1, 7, drop_last=False)  # 1200 = 171 · 7 + 3
    *_, last = loader.epoch(order, rank=6)
    assert last.index.tolist() == [-1] and last.weight.tolist() == [0]
    assert not last.images.any()


def test_small_stored_images_are_resized_last(train_digits):
    loader = loader_of(train_digits, Crop("pad"), size=32)
    batch = next(loader.epoch(EpochOrder(1200, 4)))
    assert batch.images.shape == (4, 3, 32, 32)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_resolution_may_change_between_epochs(loaders):
    loader = loaders("resized")
    for epoch, size in enumerate((16, 48, 32)):
        order = EpochOrder(len(loader), 5, epoch=epoch)
        sizes = {b.images.shape[-1] for b in loader.epoch(order, resolution=size)}
        assert sizes == {size}


def test_progressive_resolution():
    ramp = "data.progressive={resolution: 160, start_epoch: 2, end_epoch: 6}"
    data = recipes.load("imagenet-resnet152", [ramp]).data
    assert [resolution_at(data, e) for e in range(8)] == [160, 160, 160, 192, 192, 192, 224, 224]
    assert resolution_at(recipes.load("imagenet-resnet152").data, 0) == 224
    ramp = "data.progressive={resolution: 8, end_epoch: 4}"
    small = recipes.load("cifar10-resnet18", [ramp]).data
    assert [resolution_at(small, e) for e in range(6)] == [8, 16, 20, 24, 32, 32]
    settings = ["data.resolution=250", "data.progressive={resolution: 160, end_epoch: 4}"]
    odd = recipes.load("imagenet-resnet152", settings).data
    assert [resolution_at(odd, e) for e in range(5)] == [160, 192, 192, 224, 250]
    settings = ["data.resolution=250", "data.progressive={resolution: 230, end_epoch: 4}"]
    odd = recipes.load("imagenet-resnet152", settings).data
    assert [resolution_at(odd, e) for e in range(5)] == [230, 230, 250, 250, 250]


def test_noise_is_in_the_training_labels_only(digits):
    noise = "data.noise={kind: symmetric, rate: .4, seed: 1}"
    config = recipes.load("digits", [f"data.path={digits}", noise])
    manifest = manifests.read(digits, "train")
    labels = noisy_labels(config.data, manifest)
    assert 0.3 < (labels != manifest.clean_labels).mean() < 0.4
    train, evaluate = train_loader(config, manifest), eval_loader(config, manifest)
    order = EpochOrder(1200, 1200)
    (batch,), (clean,) = train.epoch(order), evaluate.epoch(order)
    np.testing.assert_array_equal(batch.labels, labels[batch.index])
    np.testing.assert_array_equal(clean.labels, manifest.clean_labels[clean.index])


def test_leaving_early_stops_the_thread(loaders):
    loader = loaders("resized")
    order = EpochOrder(len(loader), 2)
    before = threading.active_count()
    for _ in range(3):
        for _batch in loader.epoch(order):
            break
    assert threading.active_count() == before
    assert len(list(loader.epoch(order))) == order.steps


def test_an_exception_while_training_stops_the_thread(loaders):
    loader = loaders("resized")
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        for _ in loader.epoch(EpochOrder(len(loader), 2)):
            1 / 0  # noqa: B018
    assert threading.active_count() == before


def test_two_epochs_at_once_are_refused(loaders):
    loader = loaders("resized")
    order = EpochOrder(len(loader), 2)
    running = loader.epoch(order)
    next(running)
    with pytest.raises(RuntimeError, match="still being read"):
        next(loader.epoch(order))
    running.close()


def test_torchs_threads_are_left_alone(train_digits, monkeypatch):
    """By the reading thread too: what it set would hold for the whole process."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    loader = loader_of(train_digits, Crop("pad"), threads=1)
    assert sum(1 for _ in loader.epoch(EpochOrder(1200, 100))) == 12
    assert not asked


def test_torchs_threads_are_left_alone_on_import():
    code = "import torch; torch.set_num_threads(3); import dps_dist.data.ffcv; "
    subprocess.run([sys.executable, "-c", code + "assert torch.get_num_threads() == 3"], check=True)


def test_pad_crop_refuses_images_of_many_sizes(train_photos):
    with pytest.raises(InputError, match=r"augment.crop is pad.*set augment.crop=resized"):
        loader_of(train_photos, Crop("pad", pad=4))


def test_an_order_of_another_data_set_is_refused(loaders):
    with pytest.raises(ValueError, match="the order has 7 samples"):
        next(loaders("pad").epoch(EpochOrder(7, 1)))


def test_bytes_for_a_gpu_are_the_same_pixels(train_photos):
    """On a GPU the decoder hands over bytes, which are normalised there."""
    crop, order = Crop("resized", flip=True), EpochOrder(50, 10)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    normalised = loader_of(train_photos, crop, mean=mean, std=std)
    decoder = KeyedDecoder(crop, seed=0)
    as_bytes = loader_of(train_photos, crop, mean=mean, std=std)
    as_bytes._decoder = decoder
    as_bytes._ffcv = MappedLoader(
        str(train_photos.beton),
        batch_size=1,
        num_workers=1,
        pipelines={"image": [decoder, ToTensor()], "label": None, "index": None},
        drop_last=False,
    )
    for ours, theirs in zip(normalised.epoch(order), as_bytes.epoch(order), strict=True):
        torch.testing.assert_close(ours.images, theirs.images, atol=1e-5, rtol=1e-5)
        assert theirs.images.is_contiguous(memory_format=torch.channels_last)


def test_more_threads_than_cores_are_no_error(train_digits):
    loader = loader_of(train_digits, Crop("pad"), threads=1000)
    assert len(list(loader.epoch(EpochOrder(1200, 100)))) == 12


def test_ffcvs_own_loader_is_left_alone(loaders):
    import ffcv.loader.loader
    from ffcv.memory_managers.os_cache import OSCacheManager

    assert isinstance(loaders("pad")._ffcv.memory_manager, MappedBeton)
    assert ffcv.loader.loader.OSCacheManager is OSCacheManager


def test_a_damaged_jpeg_is_named(tmp_path, photos):
    source = open_source("imagefolder", photos, "train")
    write_split(source, tmp_path, "train", {}, ImageOptions("jpeg"), workers=1)
    manifest = manifests.read(tmp_path, "train")
    table = Reader(str(manifest.beton)).metadata["f0"]
    with manifest.beton.open("r+b") as file:
        file.seek(int(table["data_ptr"][17]))
        file.write(bytes(200))
    loader = loader_of(manifest, Crop("resized"))
    with pytest.raises(InputError, match="the JPEG of sample 17 is damaged"):
        list(loader.epoch(EpochOrder(50, 5)))
