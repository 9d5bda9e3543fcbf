"""Storage: the same on a disk, in S3 and through fsspec; whole or not at all; what it refuses."""

import errno
import itertools
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from dps_dist.errors import InputError
from dps_dist.train.setup import _check_shared
from dps_dist.train.storage import Storage

numbers = itertools.count()


@pytest.fixture(params=["disk", "s3", "memory"])
def storage(request, tmp_path):
    if request.param == "disk":
        return Storage(tmp_path / "a run")
    if request.param == "memory":
        return Storage(f"memory://runs/{next(numbers)}")
    return Storage(request.getfixturevalue("s3")(f"runs/{next(numbers)}"))


def test_files(storage):
    assert not storage.exists() and not storage.exists("a") and storage.names() == []
    storage.write("config.yaml", b"one")
    storage.write("deep/er/file", b"two")
    assert storage.read("config.yaml") == b"one"
    assert storage.sum_of("deep/er/file") == (3, zlib.crc32(b"two"))
    assert storage.exists() and storage.exists("deep/er") and storage.exists("deep/er/file")
    assert storage.names() == ["config.yaml", "deep"] and storage.names("deep") == ["er"]
    storage.write("config.yaml", b"")
    assert storage.read("config.yaml") == b""
    for absent in ("deep/none", "config.yaml/x", "none/none"):
        assert not storage.exists(absent) and storage.names(absent) == []
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            storage.read(absent)
    assert storage.names("config.yaml") == []


def test_removing(storage):
    storage.write("a/b/c", b"1")
    storage.write("a/d", b"2")
    storage.remove("none")
    storage.remove("a/d")
    assert storage.names("a") == ["b"]
    storage.remove("a")
    assert not storage.exists("a") and not storage.exists("a/b/c")
    storage.write("e", b"3")
    storage.remove("")
    assert not storage.exists("e") and storage.names() == []


def test_a_folder_in_it_is_a_storage_too(storage):
    (storage / "checkpoints" / "one").write("file", b"1")
    assert storage.read("checkpoints/one/file") == b"1"
    within = storage / "checkpoints/one"
    assert within.name == "one" and within.parent.name == "checkpoints"
    assert within.parent.names() == ["one"]
    assert str(within) == f"{storage}/checkpoints/one"
    if "memory" not in within.url:  # what another process is told
        assert Storage(within.url).read("file") == b"1"
        assert Storage(within.parent.url).names() == ["one"]


def test_folders_go_up_and_come_back(storage, tmp_path):
    folder = tmp_path / "to send"
    (folder / "targets").mkdir(parents=True)
    (folder / "state").write_bytes(os.urandom(100_000))
    (folder / "targets" / "rank 0").write_bytes(b"rows")
    (folder / "targets" / "empty").write_bytes(b"")
    storage.upload(folder, "checkpoints/7")
    assert storage.names("checkpoints/7/targets") == ["empty", "rank 0"]
    fetched = storage.fetch("checkpoints/7", tmp_path / "fetched")
    assert (fetched == tmp_path / "fetched") == (storage.local is None)
    assert contents(fetched) == contents(folder)
    (storage / "checkpoints/7").download("targets/rank 0", tmp_path / "one")
    assert contents(tmp_path / "one") == {Path("targets/rank 0"): b"rows"}


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_paths_and_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative, uri = Storage("runs/x"), Storage(f"file://{tmp_path}/runs/x/")
    for storage in (relative, uri, Storage(tmp_path / "runs" / "x")):
        assert storage.local == tmp_path / "runs" / "x"
        assert storage.url == str(storage) == f"{tmp_path}/runs/x"
        assert storage.parent.local == tmp_path / "runs"
    assert Storage("what? a folder").local == tmp_path / "what? a folder"
    assert (Storage("what?") / "x").local == tmp_path / "what?" / "x"
    assert Storage("~/runs").local == Path.home() / "runs"
    assert Storage("memory://runs/x").local is None


def test_a_password_is_not_shown():
    storage = Storage("s3://me:password@bucket/x?region=eu-west-1") / "y"
    assert storage.url == "s3://me:password@bucket/x/y?region=eu-west-1"
    assert str(storage) == "s3://bucket/x/y" and "password" not in repr(storage)
    with pytest.raises(InputError, match="s3://bucket/a b cannot be opened") as told:
        Storage("s3://me:password@bucket/a b")
    assert "password" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("ftpx://host/x", "ftpx://host/x cannot be opened .Protocol not known: ftpx.: give a f"),
        ("s3://bucket/x?colour=red", "Unexpected query parameter"),
        ("s3://", "s3:// names no folder: give one, such as s3://bucket/runs"),
        ("file://relative/x", "cannot be opened"),
        ("", "the storage folder is ''"),
    ],
)
def test_refused(url, sentence):
    with pytest.raises(InputError, match=sentence):
        Storage(url)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_changes_nothing(tmp_path, monkeypatch, fails):
    storage = Storage(tmp_path)
    storage.write("a", b"before")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), full)
    with pytest.raises(OSError) as told:
        storage.write("a", b"after")
    monkeypatch.undo()
    assert told.value.errno == errno.ENOSPC and told.value.filename == str(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and storage.read("a") == b"before"


def test_a_full_disk(small_disk):
    storage = Storage(small_disk)
    storage.write("a", b"before")
    with pytest.raises(OSError) as told:
        storage.write("a", bytes(3 << 20))
    assert told.value.errno == errno.ENOSPC and told.value.filename == str(small_disk / "a")
    assert [path.name for path in small_disk.iterdir()] == ["a"] and storage.read("a") == b"before"


def test_a_read_only_disk_is_told_by_the_name_of_the_file(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError) as told:
        Storage(small_disk).write("a", b"new")
    assert told.value.errno == errno.EROFS and told.value.filename == str(small_disk / "a")


def test_a_kill_while_the_folder_is_looked_for_leaves_nothing_for_good(tmp_path):
    class Dying:
        rank = 0

        def barrier(self):
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError):
        _check_shared(Storage(tmp_path), Dying(), "ab12")
    Storage(tmp_path).tidy()
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_are_not_listed(tmp_path):
    """A kill between writing and renaming leaves one."""
    (tmp_path / "a.01ab23cd.unfinished").write_bytes(b"half")
    assert Storage(tmp_path).names() == []
