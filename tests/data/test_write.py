"""`dps prepare`'s core: what is written, what is refused, what an interruption leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from ffcv.fields import IntField, RGBImageField
from ffcv.reader import Reader
from ffcv.writer import DatasetWriter

from dps_dist.data import manifest as manifests
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError
from tests.conftest import write_photos


def prepare(source, folder, split="train", said=None, **options):
    images = options.pop("images", ImageOptions("raw"))
    say = (said if said is not None else []).append
    return write_split(source, folder, split, {"source": "test"}, images, say=say, **options)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("tree"), per_class=6)


def test_beton_and_manifest_hold_the_source(digits):
    source = open_source("digits", None, "train")
    reader = Reader(str(digits / "train.beton"))
    assert reader.field_names == ["image", "label", "index"]
    np.testing.assert_array_equal(reader.metadata["f1"], source.labels)
    np.testing.assert_array_equal(reader.metadata["f2"], np.arange(1200))

    table = pq.read_table(digits / "train.parquet")
    assert table.column_names == ["index", "label", "clean_label", "path"]
    np.testing.assert_array_equal(table["index"], np.arange(1200))
    np.testing.assert_array_equal(table["label"], source.labels)
    np.testing.assert_array_equal(table["clean_label"], source.labels)
    assert table["path"].to_pylist() == [source.path(i) for i in range(1200)]
    assert json.loads(table.schema.metadata[b"class_names"]) == list("0123456789")

    manifest = manifests.read(digits, "train")
    assert manifest.checksum == manifests.checksum(digits / "train.beton")
    assert (len(manifest), manifest.num_classes) == (1200, 10)
    assert manifest.paths[17] == source.path(17)


def test_mixed_writes_a_share_as_jpeg_the_same_each_time(tree, tmp_path):
    source = open_source("imagefolder", tree, "train")
    options = ImageOptions("mixed", max_side=100, jpeg_share=0.5)
    modes = []
    for name, workers in (("a", 1), ("b", 2)):
        manifest = prepare(source, tmp_path / name, images=options, workers=workers)
        table = Reader(str(manifest.beton)).metadata["f0"]
        modes.append(table["mode"].tolist())
        assert max(table["height"].max(), table["width"].max()) <= 100
    assert modes[0] == modes[1]
    assert 0 < sum(modes[0]) < len(source)


def test_running_again_does_nothing(tmp_path):
    source = open_source("digits", None, "val")
    prepare(source, tmp_path)
    before = (tmp_path / "train.beton").stat()
    said = []
    prepare(source, tmp_path, said=said)
    after = (tmp_path / "train.beton").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert "already prepared" in said[0]
    prepare(source, tmp_path, force=True)
    assert (tmp_path / "train.beton").stat().st_ino != before.st_ino


def test_other_options_are_refused_without_force(tmp_path):
    source = open_source("digits", None, "val")
    prepare(source, tmp_path)
    with pytest.raises(InputError, match=r"prepared otherwise \(images: .*pass --force"):
        prepare(source, tmp_path, images=ImageOptions("jpeg"))
    prepare(source, tmp_path, images=ImageOptions("jpeg"), force=True)


@pytest.fixture
def damaged(tree, tmp_path):
    """A copy of the tree with three images that cannot be read."""
    root = write_photos(tmp_path / "damaged", per_class=6)
    cut = root / "train/n01/002.JPEG"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (root / "train/n02/000.JPEG").write_text("this is a text file")
    (root / "train/n02/005.JPEG").write_bytes(b"")
    return root


def test_every_unreadable_image_is_listed(damaged, tmp_path):
    said = []
    with pytest.raises(InputError, match="3 of 12 images cannot be read"):
        prepare(open_source("imagefolder", damaged, "train"), tmp_path / "out", said=said)
    listed = " ".join(said)
    for path in ("n01/002.JPEG", "n02/000.JPEG", "n02/005.JPEG"):
        assert path in listed
    assert list((tmp_path / "out").iterdir()) == []


def test_skip_bad_leaves_them_out(damaged, tmp_path):
    source = open_source("imagefolder", damaged, "train")
    manifest = prepare(source, tmp_path / "out", skip_bad=True)
    reader = Reader(str(manifest.beton))
    assert reader.num_samples == len(manifest) == 9
    np.testing.assert_array_equal(reader.metadata["f2"], np.arange(9))
    np.testing.assert_array_equal(reader.metadata["f1"], manifest.labels)
    assert "train/n02/005.JPEG" not in list(manifest.paths)
    stored = reader.metadata["f0"]
    sizes = [source.read(i).shape[:2] for i in range(12) if source.path(i) in set(manifest.paths)]
    assert list(zip(stored["height"], stored["width"], strict=True)) == sizes


def test_nothing_readable_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "in/train" / name).mkdir(parents=True)
        (tmp_path / "in/train" / name / "x.jpg").write_text("no image")
    source = open_source("imagefolder", tmp_path / "in", "train")
    with pytest.raises(InputError, match="no image can be read"):
        prepare(source, tmp_path / "out", skip_bad=True)


def test_an_image_larger_than_a_page_is_named(tmp_path):
    class Huge:
        class_names = ("a", "b")
        labels = np.array([0])

        def __len__(self):
            return 1

        def path(self, i):
            return "huge.png"

        def read(self, i):
            return np.zeros((2000, 2000, 3), np.uint8)

    said = []
    with pytest.raises(InputError, match="1 of 1 images"):
        prepare(Huge(), tmp_path, images=ImageOptions("raw", max_side=0), said=said)
    assert "huge.png" in said[0] and "--max-side" in said[0]


SLOW = """
import sys, time
from pathlib import Path
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError

class Slow:
    def __init__(self, source): self.source = source
    def __getattr__(self, name): return getattr(self.source, name)
    def __len__(self): return len(self.source)
    def read(self, i):
        if i > 500:
            Path(sys.argv[1], "reading").touch()
            time.sleep(.02)
        return self.source.read(i)

source = Slow(open_source("digits", None, "train"))
try:
    write_split(source, Path(sys.argv[1]), "train", {}, ImageOptions("raw"), force=True, workers=2)
except InputError as error:
    print(error); sys.exit(2)
"""


def start_slow(folder):
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    deadline = time.time() + 60
    while not (folder / "reading").exists():
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


def writers_of(pid):
    """The forked writer processes, without multiprocessing's own resource tracker."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(c) for c in found if b"resource_tracker" not in Path(f"/proc/{c}/cmdline").read_bytes()
    ]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds=20):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path):
    process = start_slow(tmp_path)
    writers = writers_of(process.pid)
    assert len(writers) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("*.beton")) and not list(tmp_path.glob("*.parquet"))
    wait_until(lambda: all(gone(pid) for pid in writers))
    prepare(open_source("digits", None, "val"), tmp_path)  # and the next run is not disturbed
    assert len(manifests.read(tmp_path, "train")) == 597


def test_a_killed_writer_ends_the_run_with_a_sentence(tmp_path):
    process = start_slow(tmp_path)
    os.kill(writers_of(process.pid)[0], signal.SIGKILL)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert b"a writer process ended early" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reading"]


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path):
    """A limit on the size of files stands in for the disk's end."""
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 9000; exec "$@"', "_", sys.executable, "-c", SLOW, tmp_path],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert limited.returncode == 2
    assert b"a writer process ended early, for want of disk" in limited.stdout
    assert b"Traceback" not in limited.stderr
    assert not list(tmp_path.glob("*.beton")) and not list(tmp_path.glob(".*"))


def test_an_interrupted_rewrite_keeps_the_old_data(tmp_path):
    prepare(open_source("digits", None, "val"), tmp_path)
    process = start_slow(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(manifests.read(tmp_path, "train")) == 597


class TestRead:
    @pytest.fixture
    def folder(self, digits, tmp_path):
        for name in ("val.beton", "val.parquet"):
            (tmp_path / name).write_bytes((digits / name).read_bytes())
        return tmp_path

    def test_missing(self, tmp_path):
        with pytest.raises(InputError, match=r"val.beton does not exist: run `dps prepare"):
            manifests.read(tmp_path, "val")

    @pytest.mark.parametrize("left", [0, 10, 5000, 3_000_000, -1])
    def test_truncated(self, folder, left):
        beton = folder / "val.beton"
        os.truncate(beton, left if left >= 0 else beton.stat().st_size - 1)
        with pytest.raises(InputError, match=r"val.beton is truncated"):
            manifests.read(folder, "val")

    def test_not_a_beton(self, folder):
        (folder / "val.beton").write_bytes(b"\xff" * 10_000)
        with pytest.raises(InputError, match="not an FFCV file"):
            manifests.read(folder, "val")

    def test_without_index(self, tmp_path):
        fields = {"image": RGBImageField(), "label": IntField()}
        pixels = np.zeros((4, 4, 3), np.uint8)
        DatasetWriter(str(tmp_path / "val.beton"), fields, num_workers=1).from_indexed_dataset(
            [(pixels, 0)] * 4
        )
        with pytest.raises(InputError, match=r"no field 'index' \(only image, label\)"):
            manifests.read(tmp_path, "val")

    def test_without_manifest(self, folder):
        (folder / "val.parquet").unlink()
        with pytest.raises(InputError, match=r"val.parquet is missing beside val.beton"):
            manifests.read(folder, "val")

    @pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"x" * 1000])
    def test_broken_manifest(self, folder, content):
        (folder / "val.parquet").write_bytes(content)
        with pytest.raises(InputError, match=r"val.parquet is not a manifest"):
            manifests.read(folder, "val")

    def test_foreign_parquet(self, folder):
        pq.write_table(
            pq.read_table(folder / "val.parquet").replace_schema_metadata(), folder / "val.parquet"
        )
        with pytest.raises(InputError, match=r"val.parquet is not a manifest"):
            manifests.read(folder, "val")

    def test_manifest_of_another_beton(self, folder, tmp_path_factory):
        class Relabelled:
            """The same pixels under other labels: a file of the same size."""

            def __init__(self, source):
                self.source, self.labels = source, (source.labels + 1) % 10

            def __getattr__(self, name):
                return getattr(self.source, name)

            def __len__(self):
                return len(self.source)

        other = tmp_path_factory.mktemp("other")
        prepare(Relabelled(open_source("digits", None, "val")), other, "val", workers=1)
        (folder / "val.parquet").write_bytes((other / "val.parquet").read_bytes())
        with pytest.raises(InputError, match=r"val.parquet does not match val.beton"):
            manifests.read(folder, "val")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jpeg_share": 1.5}, "--jpeg-share is 1.5"),
        ({"quality": 0}, "--quality is 0"),
        ({"max_side": -1}, "--max-side is -1"),
    ],
)
def test_image_options_out_of_range(options, said):
    with pytest.raises(InputError, match=said):
        ImageOptions(**options)
