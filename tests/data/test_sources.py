"""Every source on small files in its official layout, against torchvision's own readers."""

import gzip
import os
import pickle
import shutil
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits
from torchvision import datasets

from dps_dist.data.sources import SOURCES, BadImage, open_source, source_splits
from dps_dist.data.sources.cifar import CIFAR10_CLASSES
from dps_dist.errors import InputError

RNG = np.random.default_rng(0)


def random_images(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = random_images(size[1], size[0], channels).squeeze()
    return encode(
        Image.fromarray(pixels).convert(mode) if channels == 1 else fromarray(pixels, mode)
    )


def fromarray(pixels: np.ndarray, mode: str) -> Image.Image:
    return Image.frombytes(mode, (pixels.shape[1], pixels.shape[0]), pixels.tobytes())


def encode(image: Image.Image, format: str = "JPEG") -> bytes:
    data = BytesIO()
    image.save(data, format)
    return data.getvalue()


def write(file: Path, data: bytes | str = b"") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


def check_source(source, num_images: int) -> None:
    """What holds for all of them."""
    assert len(source) == len(source.labels) == num_images
    assert source.labels.dtype == np.int64 and source.labels.max() < len(source.class_names)
    assert len({source.path(i) for i in range(num_images)}) == num_images
    for i in range(num_images):
        image = source.read(i)
        assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        assert image.flags.c_contiguous and image.flags.writeable


# ---- folders of image files ----


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for wnid in ("n02", "n01", "n10"):
            for k in range(3):
                write(tmp_path / split / wnid / f"{wnid}_{k}.JPEG", jpeg())
    return tmp_path


def test_imagefolder_equals_torchvisions(imagenet):
    write(imagenet / "train/n01/b.PNG", encode(Image.new("RGB", (5, 4)), "PNG"))
    write(imagenet / "train/n01/deeper/a.jpg", jpeg())
    write(imagenet / "train/n01/._b.PNG", "what macOS leaves")
    write(imagenet / "train/n01/notes.txt", "no image")
    source = open_source("imagefolder", imagenet, "train")
    (imagenet / "train/n01/._b.PNG").unlink()  # torchvision takes it for an image
    theirs = datasets.ImageFolder(str(imagenet / "train"))
    check_source(source, 11)
    assert list(source.class_names) == theirs.classes
    assert source.labels.tolist() == theirs.targets
    assert [str(imagenet / source.path(i)) for i in range(11)] == [p for p, _ in theirs.samples]
    for i in range(11):
        np.testing.assert_array_equal(source.read(i), np.asarray(theirs[i][0]))
    assert source_splits("imagefolder", imagenet) == ("train", "val")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rgb.JPEG", jpeg("RGB")),
        ("grey.JPEG", jpeg("L")),
        ("cmyk.JPEG", jpeg("CMYK")),
        ("a_png.JPEG", encode(Image.new("RGB", (5, 4)), "PNG")),
        ("alpha.png", encode(fromarray(random_images(4, 5, 4), "RGBA"), "PNG")),
        ("palette.png", encode(Image.new("P", (5, 4)), "PNG")),
        ("bits.png", encode(Image.new("1", (5, 4)), "PNG")),
    ],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, name, data):
    file = write(tmp_path / "train/a" / name, data)
    source = open_source("imagefolder", tmp_path, "train")
    np.testing.assert_array_equal(source.read(0), np.asarray(Image.open(file).convert("RGB")))


def test_a_linked_folder_is_read_once(tmp_path):
    write(tmp_path / "train/a/x.jpg", jpeg("RGB"))
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere/y.jpg", jpeg("RGB"))
    (tmp_path / "train/a/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "train/a/loop").symlink_to(tmp_path / "train/a")
    source = open_source("imagefolder", tmp_path, "train")
    assert [source.path(i) for i in range(len(source))] == [
        "train/a/x.jpg",
        "train/a/linked/y.jpg",
    ]


def test_exif_orientation_is_left_alone(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "train/a").mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(tmp_path / "train/a/x.jpg", exif=exif)
    assert open_source("imagefolder", tmp_path, "train").read(0).shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (jpeg()[:-300], "truncated"),
        (jpeg()[:30], "Truncated"),
        (encode(fromarray(random_images(40, 50, 3), "RGB"), "PNG")[:-2000], "truncated"),
        ("this is a text file", "no known image format"),
        (b"", "is empty"),
        (encode(Image.new("I;16", (5, 4)), "PNG"), "8 bits"),
    ],
)
def test_a_bad_image_is_named_with_its_reason(tmp_path, data, reason):
    file = write(tmp_path / "train/a/x.jpg", data)
    source = open_source("imagefolder", tmp_path, "train")
    with pytest.raises(BadImage, match=reason) as caught:
        source.read(0)
    assert str(file) in str(caught.value)
    assert caught.value.path == str(file)


def test_an_image_that_vanished_is_a_bad_image(imagenet):
    source = open_source("imagefolder", imagenet, "val")
    (imagenet / source.path(4)).unlink()
    with pytest.raises(BadImage, match=r"n02_1\.JPEG.*No such file"):
        source.read(4)


def test_imagefolder_refuses_what_is_not_arranged(imagenet):
    def refused(split: str, *said: str) -> None:
        with pytest.raises(InputError) as caught:
            open_source("imagefolder", imagenet, split)
        for words in (*said, "image-net.org"):
            assert words in str(caught.value)

    write(imagenet / "train/n99/x.JPEG", jpeg())
    refused("train", "train", "val", "n99 in only one of them")
    refused("val", "train", "val", "n99 in only one of them")
    (imagenet / "val/n99").mkdir()
    refused("val", str(imagenet / "val/n99"), "holds no image")
    assert len(open_source("imagefolder", imagenet, "train")) == 10
    write(imagenet / "val/ILSVRC2012_val_00000001.JPEG", jpeg())
    refused("val", "outside class folders", "val/<class>/ILSVRC2012_val_00000001.JPEG")
    shutil.rmtree(imagenet / "val")
    assert source_splits("imagefolder", imagenet) == ("train",)
    refused("val", str(imagenet / "val"), "does not exist")
    shutil.rmtree(imagenet / "train")
    refused("train", "neither train/ nor val/")
    (imagenet / "train").mkdir()
    refused("train", "holds no class folder")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    write(root / "wnids.txt", "n03\nn01\n")
    write(root / "words.txt", "n00\tentity\nn01\tgoldfish, Carassius auratus\nn03\ttailed frog\n")
    for wnid in ("n03", "n01"):
        for k in range(2):
            write(root / f"train/{wnid}/images/{wnid}_{k}.JPEG", jpeg())
        write(root / f"train/{wnid}/{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    for k in range(3):
        write(root / f"val/images/val_{k}.JPEG", jpeg())
    lines = [
        "val_2.JPEG\tn01\t0\t0\t9\t9",
        "val_0.JPEG\tn03\t0\t0\t9\t9",
        "val_1.JPEG\tn03\t1\t1\t2\t2",
    ]
    write(root / "val/val_annotations.txt", "\n".join(lines) + "\n")
    return tmp_path


def test_tinyimagenet(tiny):
    for root in (tiny, tiny / "tiny-imagenet-200"):
        train, val = (open_source("tinyimagenet", root, split) for split in ("train", "val"))
        check_source(train, 4)
        check_source(val, 3)
        assert (
            train.class_names == val.class_names == ("goldfish, Carassius auratus", "tailed frog")
        )
        assert [Path(val.path(i)).name for i in range(3)] == [f"val_{k}.JPEG" for k in (2, 0, 1)]
        assert val.labels.tolist() == [0, 1, 1]
        theirs = datasets.ImageFolder(str(tiny / "tiny-imagenet-200/train"))
        assert [str(root / train.path(i)) for i in range(4)] == [path for path, _ in theirs.samples]
        assert train.labels.tolist() == theirs.targets


@pytest.mark.parametrize(
    ("break_it", "split", "said"),
    [
        (lambda root: (root / "wnids.txt").unlink(), "train", r"wnids\.txt is missing"),
        (lambda root: shutil.rmtree(root / "train/n03"), "train", "n03 in only one"),
        (lambda root: shutil.rmtree(root / "train/n03/images"), "train", "n03 holds no image"),
        (lambda root: (root / "val/images/val_1.JPEG").unlink(), "val", r"lists: val_1\.JPEG"),
        (lambda root: write(root / "val/images/y.JPEG"), "val", r"no line for y\.JPEG"),
        (
            lambda root: write(root / "val/val_annotations.txt", "val_0.JPEG n01\n"),
            "val",
            "line 1: '' is not a class",
        ),
        (
            lambda root: write(root / "val/val_annotations.txt", b"\xff\xfe"),
            "val",
            "not a text file",
        ),
        (lambda root: write(root / "val/val_annotations.txt", ""), "val", "no line for val_0"),
    ],
)
def test_tinyimagenet_refuses(tiny, break_it, split, said):
    break_it(tiny / "tiny-imagenet-200")
    with pytest.raises(InputError, match=f"{said}.*tiny-imagenet-200.zip"):
        open_source("tinyimagenet", tiny, split)


# ---- CIFAR ----


def python2_batch(pixels: np.ndarray, labels: list[int], label_key: str) -> bytes:
    """The pickle that Python 2 wrote, opcode by opcode; today's Python cannot write one."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\0K\1\x87R(K\3" + string(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + string(b"b") + b"\x87R"
    )
    array += b"(K\1J" + struct.pack("<i", len(pixels)) + b"M" + struct.pack("<H", pixels.shape[1])
    array += b"\x86" + dtype + b"\x89T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return (
        b"\x80\2}" + string(b"data") + array + b"s" + string(label_key.encode()) + numbers + b"s."
    )


CIFAR = {
    "cifar10": ([f"data_batch_{k}" for k in range(1, 6)], "test_batch", "labels", 1),
    "cifar100": (["train"], "test", "fine_labels", 2),
}
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar10", "python3"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
    ("cifar100", "python3"): "cifar-100-python",
}


def write_cifar(root: Path, name: str, version: str) -> dict[str, tuple[np.ndarray, list[int]]]:
    """An archive of 4 images a batch; → what each batch holds."""
    train, val, label_key, label_bytes = CIFAR[name]
    folder = root / FOLDERS[name, version]
    num_classes = 10 if name == "cifar10" else 100
    names = list(CIFAR10_CLASSES) if name == "cifar10" else [f"class {k}" for k in range(100)]
    contents = {}
    for batch in [*train, val]:
        pixels, labels = random_images(4, 3072), RNG.integers(0, num_classes, 4).tolist()
        contents[batch] = pixels, labels
        if version == "binary":
            coarse = np.full((4, label_bytes - 1), 255, np.uint8)
            column = np.array(labels, np.uint8)[:, None]
            write(folder / f"{batch}.bin", np.hstack([coarse, column, pixels]).tobytes())
        elif version == "python":
            write(folder / batch, python2_batch(pixels, labels, label_key))
        else:
            write(folder / batch, pickle.dumps({"data": pixels, label_key: labels}, protocol=2))
    if version == "binary":
        file = "batches.meta.txt" if name == "cifar10" else "fine_label_names.txt"
        write(folder / file, "\n".join(names) + "\n\n")
    else:
        file = "batches.meta" if name == "cifar10" else "meta"
        key = "label_names" if name == "cifar10" else "fine_label_names"
        write(folder / file, pickle.dumps({key: names}, protocol=2))
    return contents


@pytest.mark.parametrize(("name", "version"), FOLDERS)
def test_cifar_in_both_official_versions(tmp_path, name, version):
    contents = write_cifar(tmp_path, name, version)
    train, val, _, _ = CIFAR[name]
    for root in (tmp_path, tmp_path / FOLDERS[name, version]):
        for split, batches in (("train", train), ("val", [val])):
            source = open_source(name, root, split)
            check_source(source, 4 * len(batches))
            assert len(source.class_names) == (10 if name == "cifar10" else 100)
            for i in range(len(source)):
                pixels, labels = contents[batches[i // 4]]
                planes = pixels[i % 4].reshape(3, 32, 32)
                for channel in range(3):
                    np.testing.assert_array_equal(source.read(i)[:, :, channel], planes[channel])
                assert source.labels[i] == labels[i % 4]
                file, place = source.path(i).split("#")
                assert (root / file).is_file() and int(place) == i % 4


@pytest.mark.parametrize("version", ["python", "python3"])
@pytest.mark.parametrize("name", CIFAR)
def test_cifar_equals_torchvisions(tmp_path, name, version):
    write_cifar(tmp_path, name, version)
    base = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100

    class Unchecked(base):  # the checksums are those of the whole data set
        train_list = [[file, None] for file, _ in base.train_list]  # noqa: RUF012
        test_list = [[file, None] for file, _ in base.test_list]  # noqa: RUF012
        meta = base.meta | {"md5": None}

    for split in ("train", "val"):
        source, theirs = open_source(name, tmp_path, split), Unchecked(tmp_path, split == "train")
        assert source.labels.tolist() == theirs.targets
        assert list(source.class_names) == theirs.classes
        np.testing.assert_array_equal([source.read(i) for i in range(len(source))], theirs.data)


class Malicious:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def test_a_malicious_pickle_has_no_effect(tmp_path):
    write_cifar(tmp_path, "cifar10", "python")
    canary = tmp_path / "canary"
    attack = pickle.dumps({"data": Malicious(canary)})
    write(tmp_path / "cifar-10-batches-py/data_batch_2", attack)
    with pytest.raises(InputError, match=r"data_batch_2 .*asks for posix\.system.*kriz/cifar"):
        open_source("cifar10", tmp_path, "train")
    assert not canary.exists()
    pickle.loads(attack)  # it would have worked
    assert canary.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy\nndarray.tofile\n.",
        b"\x80\4\x8c\5numpy\x8c\x0andarray.__class__\x93.",
        b"cnumpy\nndarray\n(dS'shape'\nS'x'\nsb.",  # set an attribute of the stand-in's class
        b"i\n",
        b"\x80\2]q\0.",
    ],
)
def test_other_pickles_are_refused(tmp_path, opcodes):
    write_cifar(tmp_path, "cifar10", "python")
    write(tmp_path / "cifar-10-batches-py/test_batch", opcodes)
    with pytest.raises(InputError, match="test_batch"):
        open_source("cifar10", tmp_path, "val")
    assert len(open_source("cifar10", tmp_path, "train")) == 20


@pytest.mark.parametrize(
    ("version", "file", "data", "said"),
    [
        ("binary", "data_batch_3.bin", None, "data_batch_3.bin is missing"),
        ("binary", "data_batch_3.bin", b"\1" * 5000, "multiple of 3073"),
        ("binary", "data_batch_3.bin", b"", "has 0 bytes"),
        ("binary", "data_batch_3.bin", b"\1" * 3073, "holds 1 images: expected 4"),
        ("binary", "data_batch_3.bin", b"\x0a" * 3073 * 4, "label 10: expected 0 to 9"),
        ("binary", "batches.meta.txt", None, "batches.meta.txt is missing"),
        ("binary", "batches.meta.txt", "cat\ndog\n", "names 2 classes: expected 10"),
        ("python", "data_batch_3", None, "data_batch_3 is missing"),
        (
            "python",
            "data_batch_3",
            python2_batch(random_images(4, 3072), [1] * 4, "labels")[:900],
            "not a CIFAR pickle",
        ),
        (
            "python",
            "data_batch_3",
            python2_batch(random_images(4, 3072), [1] * 3, "labels"),
            "expected 4 integers",
        ),
        (
            "python",
            "data_batch_3",
            python2_batch(random_images(4, 3071), [1] * 4, "labels"),
            "3072",
        ),
        ("python", "data_batch_3", python2_batch(random_images(4, 3072), [1] * 4, "x"), "'labels'"),
        ("python", "batches.meta", None, "batches.meta is missing"),
        ("python", "batches.meta", pickle.dumps({"x": 1}), "'label_names'"),
    ],
)
def test_cifar_refuses(tmp_path, version, file, data, said):
    write_cifar(tmp_path, "cifar10", version)
    path = tmp_path / FOLDERS["cifar10", version] / file
    path.unlink() if data is None else write(path, data)
    with pytest.raises(InputError, match=f"{said}.*kriz/cifar") as caught:
        open_source("cifar10", tmp_path, "train")
    assert file in str(caught.value) or path.parent.name in str(caught.value)


def test_cifar_not_extracted(tmp_path):
    write(tmp_path / "cifar-10-python.tar.gz", b"")
    with pytest.raises(InputError, match="extract the archive there"):
        open_source("cifar10", tmp_path, "train")


# ---- arrays ----


def test_svhn_equals_torchvisions(tmp_path):
    y = np.array([[10], [1], [9], [2]], np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": random_images(32, 32, 3, 4), "y": y})

    class Unchecked(datasets.SVHN):
        split_list = {"test": [None, "test_32x32.mat", None]}  # noqa: RUF012

    source, theirs = open_source("svhn", tmp_path, "val"), Unchecked(str(tmp_path), "test")
    check_source(source, 4)
    assert source.labels.tolist() == theirs.labels.tolist() == [0, 1, 9, 2]
    for i in range(4):
        np.testing.assert_array_equal(source.read(i), np.asarray(theirs[i][0]))
    assert source.path(2) == "test_32x32.mat#2"
    assert source_splits("svhn", tmp_path) == ("val",)
    with pytest.raises(InputError, match=r"train_32x32\.mat is missing.*housenumbers"):
        open_source("svhn", tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"y": np.ones(4, np.uint8)}, "has no X"),
        ({"X": random_images(32, 32, 3, 4)}, "has no y"),
        ({"X": random_images(4, 32, 32, 3), "y": np.ones(4, np.uint8)}, r"\(4, 32, 32, 3\)"),
        ({"X": random_images(32, 32, 3, 4), "y": np.ones(3, np.uint8)}, "expected 4 integers"),
        ({"X": random_images(32, 32, 3, 4), "y": np.full(4, 11, np.uint8)}, "label 11"),
        (None, "not a whole MATLAB file"),
    ],
)
def test_svhn_refuses(tmp_path, content, said):
    file = write(tmp_path / "train_32x32.mat", b"a text, not MATLAB's format" * 20)
    if content is not None:
        savemat(file, content)
    with pytest.raises(InputError, match=rf"train_32x32\.mat .*{said}.*housenumbers"):
        open_source("svhn", tmp_path, "train")


def write_idx(file: Path, array: np.ndarray, magic: int | None = None) -> bytes:
    header = struct.pack(f">{1 + array.ndim}i", magic or 0x800 + array.ndim, *array.shape)
    data = header + array.tobytes()
    write(file, gzip.compress(data) if file.suffix == ".gz" else data)
    return data


@pytest.mark.parametrize(
    "pattern", ["{}-{}-idx{}-ubyte", "{}-{}.idx{}-ubyte", "{}-{}-idx{}-ubyte.gz"]
)
def test_idx_equals_torchvisions(tmp_path, pattern):
    labels = {"train": [0, 4, 1], "t10k": [2, 2]}
    for prefix, values in labels.items():
        images = random_images(len(values), 9, 7)
        image_data = write_idx(tmp_path / pattern.format(prefix, "images", 3), images)
        label_data = write_idx(
            tmp_path / pattern.format(prefix, "labels", 1), np.array(values, np.uint8)
        )
        source = open_source("idx", tmp_path, "train" if prefix == "train" else "val")
        check_source(source, len(values))
        theirs = datasets.mnist.read_image_file(str(write(tmp_path / "i", image_data))).numpy()
        for i, image in enumerate(theirs):
            np.testing.assert_array_equal(source.read(i), np.stack([image] * 3, axis=2))
        theirs = datasets.mnist.read_label_file(str(write(tmp_path / "l", label_data))).numpy()
        np.testing.assert_array_equal(source.labels, theirs)
        assert source.class_names == tuple("01234")  # in val too, though it has only 2s
    assert source_splits("idx", tmp_path) == ("train", "val")


def test_idx_refuses(tmp_path):
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"

    def refused(said: str) -> None:
        with pytest.raises(InputError, match=f"{said}.*fashion-mnist"):
            open_source("idx", tmp_path, "train")

    refused("holds no idx files")
    write_idx(images, random_images(3, 9, 7))
    refused("train-labels-idx1-ubyte is missing")
    write_idx(labels, np.zeros(2, np.uint8))
    refused("expected 3 integers")
    write_idx(labels, np.zeros(3, np.uint8))
    assert len(open_source("idx", tmp_path, "train")) == 3
    write_idx(images, random_images(3, 9, 7), magic=2049)
    refused("images.* magic number 2049: expected 2051")
    write(images, b"\0\0")
    refused("magic number 0")
    write(images, write_idx(images, random_images(3, 9, 7))[:-1])
    refused("has 204 bytes: its header announces 205")
    images.unlink()
    data = write_idx(Path(f"{images}.gz"), random_images(3, 9, 7))
    write(Path(f"{images}.gz"), gzip.compress(data)[:-20])
    refused("not a whole gzip file")


def test_cifar10_c(tmp_path):
    images, labels = random_images(10, 32, 32, 3), np.tile([3, 7], 5).astype(np.uint8)
    for root in (tmp_path / "CIFAR-10-C", tmp_path / "renamed"):
        root.mkdir()
        np.save(root / "labels.npy", labels)
        np.save(root / "fog.npy", images)
        np.save(root / "gaussian_noise.npy", 255 - images)
    for root in (tmp_path, tmp_path / "renamed"):
        assert source_splits("cifar10-c", root) == ("fog", "gaussian_noise")
        source = open_source("cifar10-c", root, "fog")
        check_source(source, 10)
        np.testing.assert_array_equal([source.read(i) for i in range(10)], images)
        np.testing.assert_array_equal(source.labels, labels)
        assert (root / source.path(3).removesuffix("#3")).is_file()
        with pytest.raises(
            InputError, match=r"'train' is not in cifar10-c .*fog, gaussian_noise;.*zenodo"
        ):
            open_source("cifar10-c", root, "train")


@pytest.mark.parametrize("with_labels", [False, True])
def test_cifar10_p(tmp_path, with_labels):
    images = random_images(2, 3, 32, 32, 3)
    np.save(tmp_path / "tilt.npy", images)
    if with_labels:
        np.save(tmp_path / "labels.npy", np.array([4, 9]))
    source = open_source("cifar10-p", tmp_path, "tilt")
    check_source(source, 6)
    assert source.frames == 3
    np.testing.assert_array_equal(source.read(5), images[1, 2])
    assert source.path(5) == "tilt.npy#1/2"
    assert source.labels.tolist() == ([4] * 3 + [9] * 3 if with_labels else [-1] * 6)


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        ("cifar10-c", random_images(10, 32, 32), r"\(10, 32, 32\).*50000, 32, 32, 3"),
        ("cifar10-c", random_images(11, 32, 32, 3), "11 images"),
        ("cifar10-c", random_images(5, 32, 32, 3), r"labels\.npy .*expected 5 integers"),
        ("cifar10-c", np.zeros((10, 32, 32, 3), np.float32), "float32"),
        ("cifar10-p", random_images(10, 32, 32, 3), r"frames"),
        ("cifar10-c", np.array([{}]), "not a whole .npy"),
        ("cifar10-c", None, "not a whole .npy"),
    ],
)
def test_corrupted_refuses(tmp_path, name, array, said):
    np.save(tmp_path / "labels.npy", np.zeros(10, np.uint8))
    if array is None:
        np.save(tmp_path / "fog.npy", random_images(10, 32, 32, 3))
        write(tmp_path / "fog.npy", (tmp_path / "fog.npy").read_bytes()[:-1])
    else:
        np.save(tmp_path / "fog.npy", array)
    with pytest.raises(InputError, match=f"{said}.*zenodo"):
        open_source(name, tmp_path, "fog")


def test_cifar10_c_needs_its_labels(tmp_path):
    np.save(tmp_path / "fog.npy", random_images(5, 32, 32, 3))
    with pytest.raises(InputError, match=r"labels\.npy is missing.*zenodo"):
        open_source("cifar10-c", tmp_path, "fog")


def test_digits():
    train, val = (open_source("digits", None, split) for split in ("train", "val"))
    check_source(train, 1200)
    check_source(val, 597)
    digits = load_digits()
    seen = []
    for source in (train, val):
        for i in range(len(source)):
            original = int(source.path(i).removeprefix("digits#"))
            seen.append(original)
            assert source.labels[i] == digits.target[original]
            expected = np.round(digits.images[original] / 16 * 255)
            np.testing.assert_array_equal(source.read(i), np.stack([expected] * 3, axis=2))
        # Each class has its share, to within one image.
        share = np.bincount(digits.target) * len(source) / 1797
        assert np.abs(np.bincount(source.labels) - share).max() <= 1
    assert sorted(seen) == list(range(1797))
    # The split is part of every figure made with it.
    assert [val.path(i) for i in range(4)] == ["digits#4", "digits#8", "digits#9", "digits#13"]
    assert sum(int(val.path(i).removeprefix("digits#")) for i in range(597)) == 533_515


# ---- the table ----


@pytest.mark.parametrize("name", [name for name, spec in SOURCES.items() if not spec.embedded])
def test_every_source_says_what_is_missing_and_where_it_is_had(tmp_path, name):
    for root in (tmp_path / "nowhere", tmp_path, write(tmp_path / "a_file")):
        with pytest.raises(InputError, match="had at http") as caught:
            open_source(name, root, "train")
        assert str(root) in str(caught.value)
    with pytest.raises(InputError, match="needs the folder"):
        open_source(name, None, "train")


def test_unknown_names(tmp_path):
    with pytest.raises(InputError, match="'mnist' is not known: choose one of imagefolder"):
        open_source("mnist", tmp_path, "train")
    with pytest.raises(InputError, match="'test' is not in digits: it has train, val"):
        open_source("digits", None, "test")
