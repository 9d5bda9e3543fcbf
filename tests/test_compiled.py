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
    names = {}
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
    names = {}
    exec(compile(TWICE, source, "exec"), names)
    function = kept("int64(int64)")(names["twice"])
    assert found(function) == (0, 1) and function(3) == 6
    with pytest.raises(TypeError):
        function("3")


def test_other_options_are_other_code(source, folder):
    for options in ({}, {"fastmath": True}, {"error_model": "numpy"}):
        function = compiled(source, **options)
        assert function(1) == 2 and found(function) == (0, 1)
    assert len(files(folder)) == 3


def test_a_changed_source_is_compiled_again(source, folder):
    compiled(source)(1)
    thrice = compiled(source, TWICE.replace("2", "3"))
    assert thrice(1) == 3 and found(thrice) == (0, 1)
    assert len(files(folder)) == 1  # what it replaces is gone


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_file_is_as_good_as_none(source, folder, damage):
    compiled(source)(1)
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    again, last = compiled(source), compiled(source)
    assert again(2) == 4 and found(again) == (0, 1)
    assert last(2) == 4 and found(last) == (1, 0)


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


def test_without_a_folder_it_compiles(source, monkeypatch):
    monkeypatch.setattr("dps_dist.compiled._Kept", no_folder)
    assert compiled(source)(2) == 4


def no_folder(*_):
    raise RuntimeError("cannot cache function 'twice': no locator available")


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
    said = [
        subprocess.run(call, capture_output=True, text=True, env=env, check=True).stdout
        for _ in range(2)
    ]
    (first, pixels), (second, same) = (line.rsplit(" [", 1) for line in said)
    assert first == "[0, 0, 0] [1, 1, 1]" and second == "[1, 1, 1] [0, 0, 0]"
    assert pixels == same and len(set(eval(f"[{pixels}"))) == 1
