"""Machine code that outlives its process: found again, never the wrong one, never in the way."""

import os
import subprocess
import sys

import pytest
from numba.core import config

from dps_dist.compiled import kept
from tests.shown import ROOT

TWICE = "def twice(x):\n    return 2 * x\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def source(tmp_path):
    return tmp_path / "twice.py"


def compiled(source, text=TWICE, **options):
    """The function of a file, as a process that has just started would have it."""
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    names = {"__name__": __name__}  # numba imports it where it finds the code again
    exec(compile(text, source, "exec"), names)
    return kept(**options)(names["twice"])


def found(function):
    return sum(function.stats.cache_hits.values()), sum(function.stats.cache_misses.values())


def files(folder):
    return sorted(folder.rglob("*.nbc"))


def test_is_found_again_for_the_same_types(source, folder):
    first, second = compiled(source), compiled(source)
    assert first(3) == 6 and found(first) == (0, 1)
    assert second(4) == 8 and found(second) == (1, 0)
    assert second(1.5) == 3 and found(second) == (1, 1)
    assert len(files(folder)) == 2 == len([path for path in folder.rglob("*") if path.is_file()])


def test_is_compiled_at_once_if_its_types_are_given(tmp_path, source):
    source.write_text(TWICE)
    names = {"__name__": __name__}
    exec(compile(TWICE, source, "exec"), names)
    function = kept("int64(int64)")(names["twice"])
    assert found(function) == (0, 1) and function(3) == 6
    with pytest.raises(TypeError):
        function("3")


def test_other_options_are_other_code(source, folder):
    flags = {"nsz", "reassoc", "contract"}
    for options in ({}, {"fastmath": True}, {"fastmath": flags}, {"error_model": "numpy"}):
        function = compiled(source, **options)
        assert function(1) == 2 and found(function) == (0, 1)
    assert len(files(folder)) == 4


def test_a_file_in_anothers_place_is_as_good_as_none(source, folder):
    compiled(source)(3)
    (of_int,) = files(folder)
    compiled(source)(1.5)
    (of_float,) = set(files(folder)) - {of_int}
    of_float.write_bytes(of_int.read_bytes())
    again = compiled(source)
    assert again(1.5) == 3 and found(again) == (0, 1)


def test_a_changed_source_is_compiled_again(source, folder):
    compiled(source)(1)
    thrice = compiled(source, TWICE.replace("2", "3"))
    assert thrice(1) == 3 and found(thrice) == (0, 1)
    longer = compiled(source, TWICE.replace("2 * x", "2 * x + x * x"))
    assert longer(3) == 15 and found(longer) == (0, 1)
    assert len(files(folder)) == 1  # what they replace is gone


def test_other_versions_of_what_it_calls_are_other_code(source, folder):
    for version in ("ffcv 1", "ffcv 2"):
        function = compiled(source, made_with=version)
        assert function(1) == 2 and found(function) == (0, 1)
    assert len(files(folder)) == 1


def without_end(whole):
    return whole[: len(whole) // 2]


def zeroed_inside(whole):
    """Where LLVM would find its object, and end the process over it."""
    at = whole.index(b"\x7fELF")
    return whole[:at] + bytes(2048) + whole[at + 2048 :]


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda _: b"nonsense", without_end, zeroed_inside]
)
def test_a_damaged_file_is_as_good_as_none(source, folder, damage):
    compiled(source)(1)
    (file,) = files(folder)
    file.write_bytes(damage(file.read_bytes()))
    again, last = compiled(source), compiled(source)
    assert again(2) == 4 and found(again) == (0, 1)
    assert last(2) == 4 and found(last) == (1, 0)


@pytest.mark.parametrize(
    "taint", [lambda file: file.chmod(0o622), lambda file: os.chown(file, 1, -1)]
)
def test_a_file_that_others_can_write_is_as_good_as_none(source, folder, taint):
    compiled(source)(1)
    (file,) = files(folder)
    assert file.stat().st_mode & 0o777 == 0o600
    try:
        taint(file)
    except PermissionError:
        pytest.skip("only root gives files away")
    again, last = compiled(source), compiled(source)
    assert again(2) == 4 and found(again) == (0, 1)
    assert last(2) == 4 and found(last) == (1, 0)


def test_what_another_kind_of_cpu_keeps_stands_beside_ours(source, folder, monkeypatch):
    compiled(source)(1)
    call = [sys.executable, "-c", OF_A_FILE, str(source)]
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder), "NUMBA_CPU_NAME": "generic"}
    said = subprocess.run(call, capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert said.stdout == "(0, 1)\n" and len(files(folder)) == 2
    assert found_after_a_call(compiled(source)) == (1, 0)


OF_A_FILE = """
import sys
from pathlib import Path
from tests.test_compiled import compiled, found_after_a_call
print(found_after_a_call(compiled(Path(sys.argv[1]))))
"""


def found_after_a_call(function):
    function(1)
    return found(function)


def test_processes_that_write_at_once_leave_one_whole_file(source, folder):
    source.write_text(TWICE)
    call = [sys.executable, "-c", OF_A_FILE, str(source)]
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    started = [subprocess.Popen(call, env=env, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert found_after_a_call(compiled(source)) == (1, 0)
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 1


def test_a_full_disk_costs_time_only(source, small_disk, monkeypatch):
    monkeypatch.setattr(config, "CACHE_DIR", str(small_disk / "kept"))
    compiled(source)(1)
    with (small_disk / "rest").open("wb", buffering=0) as rest:
        while True:
            try:
                rest.write(bytes(4096))
            except OSError:
                break
    function = compiled(source)
    assert function(1.5) == 3 and found(function) == (0, 1)
    assert not list(small_disk.rglob("*.tmp"))


def test_without_a_folder_it_compiles(source, tmp_path, monkeypatch):
    """Neither beside the source nor in the home, where files are in the folders' places."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", os.devnull)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "__pycache__").touch()
    function = compiled(source)
    assert function(2) == 4
    assert (tmp_path / "__pycache__").is_file()


STEP = """
import sys
import torch
from pathlib import Path
from dps_dist.data import decode, manifest
from dps_dist.data.loader import Loader
from dps_dist.data.order import EpochOrder
from dps_dist.targets import fused_cpu

split = manifest.read(Path(sys.argv[1]), "train")
colours = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
sums = []
for threads in (1, 2):
    loader = Loader(split.beton, split.labels, decode.Crop("resized", flip=True), 32,
                    threads=threads, **colours)
    batches = loader.epoch(EpochOrder(len(split.labels), batch_size=10))
    sums.append(sum(batch.images.double().sum().item() for batch in batches))
functions = decode._compiled(False), decode._compiled(True), fused_cpu.many_rows
hits, misses = (
    [sum(getattr(one.stats, kind).values()) for one in functions]
    for kind in ("cache_hits", "cache_misses")
)
print(hits, misses, sums)
"""


def test_a_second_process_compiles_neither_loader_nor_step(photos, folder):
    """FFCV's library is at another address there, too."""
    call = [sys.executable, "-c", STEP, str(photos)]
    env = os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    env["NUMBA_NUM_THREADS"] = "2"  # one would make both loaders serial
    said = [
        subprocess.run(call, capture_output=True, text=True, env=env, check=True).stdout
        for _ in range(2)
    ]
    (first, pixels), (second, same) = (line.rsplit(" [", 1) for line in said)
    assert first == "[0, 0, 0] [1, 1, 1]" and second == "[1, 1, 1] [0, 0, 0]"
    assert pixels == same and len(set(eval(f"[{pixels}"))) == 1
