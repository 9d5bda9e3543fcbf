"""`dps prepare`'s core: what is written, what is refused, what an interruption leaves behind."""

import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.rgb_image import resizer
from ffcv.reader import Reader
from ffcv.writer import DatasetWriter

from dps_dist.data import beton
from dps_dist.data import manifest as manifests
from dps_dist.data.sources import open_source
from dps_dist.data.sources.part import Part
from dps_dist.data.write import ImageOptions, already_prepared, shrunk, write_split
from dps_dist.errors import InputError
from tests.conftest import write_photos

PREPARED = {"source": "test"}


def prepare(source, folder, split="train", said=None, **options):
    images = options.pop("images", ImageOptions("raw"))
    say = (said if said is not None else []).append
    return write_split(source, folder, split, PREPARED, images, say=say, **options)


class Pictures:
    """A source of given pictures, all of one class or the other."""

    class_names = ("a", "b")

    def __init__(self, *pictures):
        self.pictures, self.labels = pictures, np.arange(len(pictures)) % 2

    def __len__(self):
        return len(self.pictures)

    def path(self, i):
        return f"{i}.png"

    def read(self, i):
        return self.pictures[i]


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


def test_what_is_there_is_known_without_the_source(tmp_path):
    assert already_prepared(tmp_path, "train", PREPARED, ImageOptions("raw")) is None
    prepare(open_source("digits", None, "val"), tmp_path)
    there = already_prepared(tmp_path, "train", PREPARED, ImageOptions("raw"))
    assert there is not None and len(there) == 597
    for source, options, said in (
        (PREPARED, ImageOptions("jpeg"), "with --mode raw, now it is asked for with --mode jpeg"),
        ({"source": "other"}, ImageOptions("raw"), "with source test, .* for with source other"),
        (
            PREPARED | {"train_images": 5},
            ImageOptions("raw"),
            "without --train-images, now it is asked for with --train-images 5: .*pass --force",
        ),
    ):
        with pytest.raises(InputError, match=f"train.beton was prepared {said}"):
            already_prepared(tmp_path, "train", source, options)


def test_what_is_there_with_an_option_that_is_now_left_out(tmp_path):
    val = open_source("digits", None, "val")
    given = PREPARED | {"root": "/there", "train_images": 9}
    write_split(Part(val, 9), tmp_path, "train", given, ImageOptions("raw"), workers=1)
    for left_out, said in (
        ({"root": "/there"}, "with --train-images 9, now it is asked for without --train-images:"),
        ({"root": None, "train_images": 9}, "with --from /there, now it is asked for without"),
    ):
        with pytest.raises(InputError, match=f"train.beton was prepared {said}"):
            already_prepared(tmp_path, "train", PREPARED | left_out, ImageOptions("raw"))
    assert already_prepared(tmp_path, "train", given | {"later": None}, ImageOptions("raw"))


def test_a_part_is_random_nested_and_the_same_each_time(tmp_path):
    whole = open_source("digits", None, "train")
    some = prepare(Part(whole, 300), tmp_path)
    assert len(some) == 300 and some.class_names == tuple(whole.class_names)
    paths = [whole.path(i) for i in range(len(whole))]
    positions = [paths.index(path) for path in some.paths]
    assert positions == sorted(set(positions)) and np.std(positions) > len(whole) / 5
    np.testing.assert_array_equal(some.labels, whole.labels[positions])
    fewer = Part(whole, 30)
    assert {fewer.path(i) for i in range(30)} < set(some.paths)
    np.testing.assert_array_equal(fewer.read(7), whole.read(paths.index(fewer.path(7))))
    for count in (0, len(whole) + 1):
        with pytest.raises(InputError, match=rf"--train-images is {count}: give 1 to 1200"):
            Part(whole, count)


def test_a_lost_beton_is_written_again_and_a_foreign_one_left_alone(tmp_path):
    prepare(open_source("digits", None, "val"), tmp_path)
    (tmp_path / "train.parquet").rename(tmp_path / "kept")
    with pytest.raises(InputError, match=r"train.beton is there without a manifest.*--force"):
        already_prepared(tmp_path, "train", PREPARED, ImageOptions("raw"))
    (tmp_path / "kept").rename(tmp_path / "train.parquet")
    (tmp_path / "train.beton").unlink()
    assert already_prepared(tmp_path, "train", PREPARED, ImageOptions("raw")) is None


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
    said, huge = [], np.zeros((5000, 5000, 3), np.uint8)
    with pytest.raises(InputError, match="1 of 1 images"):
        prepare(Pictures(huge), tmp_path, images=ImageOptions("raw", max_side=0), said=said)
    assert "0.png" in said[0] and "75 MB" in said[0] and "--max-side" in said[0]
    manifest = prepare(Pictures(huge), tmp_path, images=ImageOptions("raw", max_side=2000))
    assert Reader(str(manifest.beton)).metadata["f0"]["width"].tolist() == [2000]


@pytest.mark.parametrize("mode", ["raw", "jpeg"])
def test_an_image_longer_than_a_side_can_be_is_named(tmp_path, mode):
    options, said = ImageOptions(mode, max_side=0), []
    for long in ((65_501, 1, 3), (1, 70_000, 3)):
        with pytest.raises(InputError, match="1 of 1 images"):
            prepare(Pictures(np.zeros(long, np.uint8)), tmp_path, images=options, said=said)
    assert "0.png" in said[1] and "70,000 pixels long" in said[1] and "--max-side" in said[1]
    manifest = prepare(Pictures(np.zeros((65_500, 1, 3), np.uint8)), tmp_path, images=options)
    assert Reader(str(manifest.beton)).metadata["f0"]["height"].tolist() == [65_500]


@pytest.mark.parametrize(
    ("height", "width", "shrunk_to"),
    [(1, 1, (1, 1)), (1, 2000, (1, 500)), (2000, 1, (500, 1)), (300, 600, (250, 500))],
)
def test_images_of_any_shape_are_shrunk(tmp_path, height, width, shrunk_to):
    picture = np.full((height, width, 3), 100, np.uint8)
    table = Reader(str(prepare(Pictures(picture), tmp_path).beton)).metadata["f0"]
    assert (table["height"][0], table["width"][0]) == shrunk_to


def test_shrinking_is_ffcvs(tree):
    """But for its rounding, by which a side of 50 may come out as 49."""
    source, compared = open_source("imagefolder", tree, "train"), 0
    for i in range(len(source)):
        for side in (50, 100, 1000):
            ours, theirs = shrunk(source.read(i), side), resizer(source.read(i), side)
            assert max(ours.shape) == min(side, max(source.read(i).shape))
            assert np.abs(np.subtract(ours.shape, theirs.shape)).max() <= 1
            if ours.shape == theirs.shape:
                np.testing.assert_array_equal(ours, theirs)
                compared += 1
    assert compared > 20


def test_a_name_that_is_no_text_is_kept_as_one(tmp_path):
    class Odd(Pictures):
        class_names = (os.fsdecode(b"class\xff"), "Käfer")

        def path(self, i):
            return os.fsdecode(b"bad\xff.png")

    prepare(Odd(np.zeros((4, 4, 3), np.uint8)), tmp_path)
    manifest = manifests.read(tmp_path, "train")
    assert list(manifest.paths) == ["bad\\xff.png"]
    assert manifest.class_names == ("class\\xff", "Käfer")


@pytest.mark.parametrize("folder", ["data:v2", os.fsdecode(b"data\xff")])
def test_a_folder_of_any_name(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    prepare(Pictures(np.zeros((4, 4, 3), np.uint8)), Path(folder))
    assert len(manifests.read(folder, "train")) == 1


def test_a_page_that_is_written_in_part_is_noticed(tmp_path):
    class Filling(Pictures):
        """A limit on the size of files stands in for a disk that is full for a while."""

        def read(self, i):
            if i in (0, 1000):  # before and after the first page
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard if i else 12 << 20, hard))
            return super().read(i)

    pictures = [np.zeros((64, 64, 3), np.uint8)] * 1500
    with pytest.raises(OSError, match=r"No space left on device: '.*/train.beton'"):
        prepare(Filling(*pictures), tmp_path, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["4k", "56k"])  # for less than the table, and for no more
def test_shared_memory_without_room_is_named(tmp_path, size):
    alone = ["unshare", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    if subprocess.run([*alone, mount], capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    run = "from dps_dist.cli import main; main()"
    words = [sys.executable, "-c", run, "prepare", "digits", tmp_path, "--split", "train"]
    done = subprocess.run([*alone, f'{mount}; exec "$@"', "_", *words], capture_output=True)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]  # joblib warns before
    assert said.startswith(b"dps: /dev/shm has no room for what the writing processes share")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_table_is_written_is_not_lost(tmp_path, monkeypatch):
    class Interrupting(list):
        def __iter__(self):
            os.kill(os.getpid(), signal.SIGINT)
            return super().__iter__()

    run = beton._run
    monkeypatch.setattr(beton, "_run", lambda *about: Interrupting(run(*about)))
    with pytest.raises(KeyboardInterrupt):
        prepare(Pictures(np.zeros((4, 4, 3), np.uint8)), tmp_path)
    assert list(tmp_path.iterdir()) == []


SLOW = """
import signal, sys, time
import numpy as np
from pathlib import Path
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError

class Slow:  # so large that it would fill any pipe, and never done
    class_names = ("a", "b")
    labels = np.zeros(200_000, np.int64)
    def __len__(self): return len(self.labels)
    def path(self, i): return str(i)
    def read(self, i):
        if i > 2000:
            Path(sys.argv[1], "reading").touch()
            time.sleep(.01)
        return np.zeros((64, 64, 3), np.uint8)

def interrupt(*_): raise KeyboardInterrupt  # as `dps` has it

signal.signal(signal.SIGTERM, interrupt)
try:
    write_split(Slow(), Path(sys.argv[1]), "train", {}, ImageOptions("raw"), workers=2)
except InputError as error:
    print(error); sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_slow(folder):
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_writer_ends_the_run_with_a_sentence(tmp_path, number):
    process = start_slow(tmp_path)
    os.kill(writers_of(process.pid)[0], number)
    said, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert b"ended early (it was killed, likely for want of memory)" in said
    assert err == b""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reading"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whom", ["the process", "its group"])
def test_ctrl_c_ends_the_run_at_once(tmp_path, whom, number):
    process = start_slow(tmp_path)
    writers = writers_of(process.pid)
    (os.kill if whom == "the process" else os.killpg)(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == b""
    assert all(gone(pid) for pid in writers)
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
    assert b"ended early (File too large): make room" in limited.stdout
    assert limited.stderr == b""
    assert sorted(p.name for p in tmp_path.iterdir()) in ([], ["reading"])


def test_an_interrupted_rewrite_keeps_the_old_data(tmp_path):
    prepare(open_source("digits", None, "val"), tmp_path)
    process = start_slow(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(manifests.read(tmp_path, "train")) == 597


def test_a_disk_without_locks_is_written_to(tmp_path, monkeypatch):
    """NFS gives none on a folder."""

    def refuse(held, how):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    prepare(open_source("digits", None, "val"), tmp_path)
    assert len(manifests.read(tmp_path, "train")) == 597


def test_a_second_writer_in_the_same_folder_is_refused(tmp_path):
    process = start_slow(tmp_path)
    with pytest.raises(InputError, match="another dps prepare is writing to"):
        prepare(open_source("digits", None, "val"), tmp_path)
    assert process.poll() is None
    process.kill()
    process.wait()


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

    @pytest.mark.parametrize(
        ("place", "value", "said"),
        [
            (2, 255, "has fields of no type that FFCV knows"),  # the number of fields
            (15, 255, "does not match val.beton"),  # the number of samples
            (24, 161, "has fields of no type that FFCV knows"),  # the first field's type
            (25, 255, "has no field 'image'"),  # its name
        ],
    )
    def test_damaged_header(self, folder, place, value, said):
        with (folder / "val.beton").open("r+b") as file:
            file.seek(place)
            file.write(bytes([value]))
        with pytest.raises(InputError, match=f"{said}.*dps prepare"):
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

    @pytest.mark.parametrize(
        ("edit", "said"),
        [
            (lambda t: t.slice(0, 500), "does not list the samples of val.beton in their order"),
            (lambda t: t.take(list(range(596, -1, -1))), "in their order"),
            (
                lambda t: t.set_column(1, "label", pa.array([77] * 597)),
                "labels from 77 to 77 for 10 classes",
            ),
        ],
    )
    def test_edited_manifest(self, folder, edit, said):
        table = pq.read_table(folder / "val.parquet")
        pq.write_table(edit(table), folder / "val.parquet")
        with pytest.raises(InputError, match=said):
            manifests.read(folder, "val")

    def test_damaged_allocation_table(self, folder):
        beton = folder / "val.beton"
        content = bytearray(beton.read_bytes())
        content[-100:] = bytes(100)
        beton.write_bytes(content)
        with pytest.raises(InputError, match="does not match"):
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
