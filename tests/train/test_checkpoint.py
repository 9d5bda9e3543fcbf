"""Checkpoints on real processes: kills, damage, full disks, failing ranks, what is kept, S3."""

import errno
import os
import random
import re
import shutil
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_dist import config
from dps_dist.errors import InputError
from dps_dist.targets import Dirichlet, LocalTargets, ShardedTargets
from dps_dist.targets.arrow import Snapshot
from dps_dist.targets.checksums import sealed, sum_of, unsealed
from dps_dist.train import manifest, prune
from dps_dist.train.checkpoint import Writer, open_checkpoint
from dps_dist.train.manifest import Moment, complete, newest_whole
from dps_dist.train.peers import Peers
from dps_dist.train.storage import Storage
from tests.spawn import Ranks

N, K = 60, 5
PRIOR = Dirichlet(K, 0.9, 5.0)
_groups = {}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=60) as ranks:
        yield ranks


def group_of(world_size):
    """The first world_size of the processes as a group; None on the others."""
    if not _groups:
        _groups.update({W: dist.new_group(list(range(W)), backend="gloo") for W in (1, 2)})
    return _groups[world_size] if dist.get_rank() < world_size else None


def moment_at(step):
    return Moment(step // 10, step % 10, step)


def state_at(step, size=100):
    weights = torch.arange(size, dtype=torch.float32) + step
    return {"model": {"weights": weights}, "step": step, "history": [{"accuracy": 0.5}, None]}


def targets_at(store, step):
    """The store as it is at that step, whatever it held before."""
    store._rows.zero_()
    store._visits.zero_()
    probs = torch.rand(store.num_samples, K, generator=torch.Generator().manual_seed(step))
    store.update(store.held(), (probs / probs.sum(-1, keepdim=True))[store.held()])
    return store


def is_right(storage, found, tmp_path, num_samples=N, size=100):
    """Whether the checkpoint loads, in one process, as what was saved at its step."""
    opened = open_checkpoint(storage, found.name, tmp_path / "into")
    step = opened.moment.step
    assert opened.moment == found.moment == moment_at(step)
    assert opened.world_size == found.world_size
    expected = state_at(step, size)
    assert torch.equal(opened.state["model"].pop("weights"), expected["model"].pop("weights"))
    assert opened.state == expected
    loaded = LocalTargets(num_samples, PRIOR)
    loaded.load(opened.folder / "targets")
    saved = targets_at(LocalTargets(num_samples, PRIOR), step)
    assert torch.equal(loaded._rows.view(torch.int16), saved._rows.view(torch.int16))
    return torch.equal(loaded._visits.view(torch.int16), saved._visits.view(torch.int16))


def never(sentence):
    raise AssertionError(f"said: {sentence}")


def save_steps(url, world_size, steps, attempt, slow_pruning=False):
    """Save at every step as the ranks of a run do."""
    group = group_of(world_size)
    if group is None:
        return
    writer = Writer(Storage(url), config.Checkpoint(), attempt, group)
    store = ShardedTargets(N, PRIOR, group)
    if slow_pruning and writer.rank == 0:
        at_once = writer._pruning.after
        writer._pruning.after = lambda newest: (time.sleep(0.2), at_once(newest))
    for step in steps:
        state = state_at(step) if writer.rank == 0 else None
        writer.save(moment_at(step), state, targets_at(store, step).snapshot(), step / 100)
        targets_at(store, 999)  # training goes on
    writer.wait()


@pytest.mark.parametrize("world_size", [1, 2])
def test_round_trip(ranks, tmp_path, world_size):
    storage = Storage(tmp_path / "run")
    assert newest_whole(storage, never) is None and complete(storage) == []
    ranks.run(save_steps, storage.url, world_size, [5, 12, 20], "ab12")
    assert [found.name for found in complete(storage)] == ["00000020-ab12", "00000012-ab12"]
    found = newest_whole(storage, never)
    assert (found.name, found.world_size, found.accuracy) == ("00000020-ab12", world_size, 0.2)
    assert is_right(storage, found, tmp_path)
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.*")}
    assert {Path(name).suffix for name in files} == {".pt", ".json", ".arrow"}
    assert {file.name for file in found.files} == {
        "state.pt",
        "targets/targets.json",
        *(f"targets/targets-{rank:05d}-of-{world_size:05d}.arrow" for rank in range(world_size)),
    }


def test_pruning_spares_what_a_faster_rank_writes_already(ranks, tmp_path):
    storage = Storage(tmp_path)
    ranks.run(save_steps, storage.url, 2, [5, 12, 20], "ab12", True)
    assert [found.name for found in complete(storage)] == ["00000020-ab12", "00000012-ab12"]
    for found in complete(storage):
        manifest.verify(storage / "checkpoints", found.name, found.files)
        assert is_right(storage, found, tmp_path)


def test_in_an_object_store(ranks, s3, tmp_path):
    storage = Storage(s3("run"))
    assert newest_whole(storage, never) is None
    ranks.run(save_steps, storage.url, 2, [5, 12], "ab12")
    ranks.run(save_steps, storage.url, 2, [20], "cd34")
    assert storage.names("checkpoints") == ["00000012-ab12", "00000020-cd34"]
    assert is_right(storage, newest_whole(storage, never), tmp_path)
    assert not list(tmp_path.rglob("*.unfinished"))
    storage.write("checkpoints/00000020-cd34/state.pt", b"something else")
    said = []
    found = newest_whole(storage, said.append)
    assert found.name == "00000012-ab12" and "file state.pt: it has 14 bytes" in said[0]
    with pytest.raises(InputError, match=r"00000020-cd34 is damaged .file state.pt"):
        open_checkpoint(storage, "00000020-cd34", tmp_path / "damaged")
    results = ranks.run(fail, storage.url, "targets")
    assert "rank 1 could not save: a broken disk" in results[0]
    assert storage.names("checkpoints") == ["00000012-ab12", "00000020-cd34"]


# ---- damage


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Two checkpoints of two ranks, as files."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(save_steps, str(folder), 2, [5, 12], "ab12")
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def restored(saved, folder, damage):
    """A run with the checkpoints, in which damage(name, content) has changed the newer one."""
    for name, content in saved.items():
        if "00000012-ab12" in name.parts:
            content = damage("/".join(name.parts[2:]), content)
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return Storage(folder)


FILES = [
    "manifest.json",
    "state.pt",
    "targets/targets-00000-of-00002.arrow",
    "targets/targets-00001-of-00002.arrow",
    "targets/targets.json",
]


@settings(max_examples=80, deadline=None)
@given(file=st.sampled_from(FILES), data=st.data())
def test_a_changed_byte_sends_back_to_the_one_before(saved, tmp_path_factory, file, data):
    folder, said = tmp_path_factory.mktemp("changed"), []
    size = len(saved[Path("checkpoints/00000012-ab12") / file])
    place, change = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 255))

    def damage(name, content):
        changed = bytearray(content)
        changed[place % len(content)] ^= change
        return bytes(changed) if name == file else content

    storage = restored(saved, folder, damage)
    assert newest_whole(storage, said.append).name == "00000005-ab12"
    expected = f"checkpoint 00000012-ab12 is damaged (file {file}: "
    assert len(said) == 1 and said[0].startswith(expected)
    assert said[0].endswith("): going back to the one before")
    shutil.rmtree(folder)


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file(saved, tmp_path, file):
    said = []
    storage = restored(saved, tmp_path, lambda name, c: c[: len(c) // 2] if name == file else c)
    assert newest_whole(storage, said.append).name == "00000005-ab12"
    assert f"file {file}: " in said[0]
    if file != "manifest.json":
        assert re.search(r"it has \d+ bytes instead of \d+", said[0])


@pytest.mark.parametrize("file", FILES[1:])
def test_a_missing_file(saved, tmp_path, file):
    said = []
    storage = restored(saved, tmp_path, lambda name, c: None if name == file else c)
    found = newest_whole(storage, said.append)
    assert found.name == "00000005-ab12" and f"file {file}: it is missing" in said[0]
    assert is_right(storage, found, tmp_path)


def test_without_its_manifest_it_does_not_count(saved, tmp_path):
    storage = restored(saved, tmp_path, lambda name, c: None if name == "manifest.json" else c)
    assert newest_whole(storage, never).name == "00000005-ab12"
    assert [found.name for found in complete(storage)] == ["00000005-ab12"]
    with pytest.raises(InputError, match=r"00000012-ab12 is not a checkpoint, it has no manifest"):
        open_checkpoint(storage, "00000012-ab12", tmp_path)


def test_all_damaged(saved, tmp_path):
    storage, said = restored(saved, tmp_path, lambda _, content: content[1:]), []
    storage.write("checkpoints/00000005-ab12/state.pt", b"")
    with pytest.raises(InputError, match=f"{tmp_path}/checkpoints holds 2 checkpoints and all"):
        newest_whole(storage, said.append)
    assert len(said) == 2


def test_what_is_no_checkpoint_does_not_matter(saved, tmp_path):
    storage = restored(saved, tmp_path, lambda _, content: content)
    for stray in ("a note", "manifest.json", "copy of 5/manifest.json", "00000030-ab12", "_/x/y"):
        storage.write(f"checkpoints/{stray}", b"not a checkpoint")
    (tmp_path / "checkpoints" / "00000040-ab12").mkdir()
    before = storage.names("checkpoints")
    assert newest_whole(storage, never).name == "00000012-ab12"
    assert len(complete(storage)) == 2
    for name in ("a note", "copy of 5", "00000030-ab12", "00000040-ab12", "none", "../x"):
        with pytest.raises(InputError, match=r"is not a checkpoint|is damaged"):
            open_checkpoint(storage, name, tmp_path / "into")
    alone(storage, "cd34").save(moment_at(15), state_at(15), None).wait()
    gone = {"00000005-ab12", "00000030-ab12", "00000040-ab12"}  # what looks like leftovers goes
    assert {*storage.names("checkpoints")} == {*before, "00000015-cd34"} - gone

    storage.write("checkpoints/00000099-zz/manifest.json", b"text")
    (tmp_path / "checkpoints" / "00000098-zz" / "manifest.json").mkdir(parents=True)
    said = []
    assert newest_whole(storage, said.append).name == "00000015-cd34" and len(said) == 2


def test_one_of_another_release_is_told(saved, tmp_path):
    storage = restored(saved, tmp_path, lambda _, content: content)
    name = "checkpoints/00000012-ab12/manifest.json"
    content = unsealed(storage.read(name))
    del content["crc32"]
    files = [{**file, "mode": "r"} for file in content["files"]]  # what we do not know
    storage.write(name, sealed({**content, "version": 2, "files": files}))
    for call in (
        lambda: newest_whole(storage, never),
        lambda: open_checkpoint(storage, "00000012-ab12", tmp_path),
    ):
        with pytest.raises(InputError, match="00000012-ab12 has version 2: this release reads"):
            call()
    run = alone(storage, "cd34", keep_last=1, keep_best=False)
    run.save(moment_at(15), state_at(15), None).wait()
    assert storage.names("checkpoints") == ["00000012-ab12", "00000015-cd34"]


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("legacy", [False, True])
def test_no_pickled_code_is_run(tmp_path, legacy):
    storage = Storage(tmp_path / "run")
    alone(storage, "ab12").save(moment_at(5), state_at(5), None).wait()
    folder, touched = tmp_path / "run" / "checkpoints" / "00000005-ab12", tmp_path / "touched"
    state = {**state_at(5), "extra": Malicious(str(touched))}
    torch.save(state, folder / "state.pt", _use_new_zipfile_serialization=not legacy)
    with (folder / "state.pt").open("rb") as file:
        files = [manifest.File("state.pt", *sum_of(file))]
    storage.write(
        "checkpoints/00000005-ab12/manifest.json", manifest.encode(moment_at(5), 1, None, files)
    )
    found = newest_whole(storage, never)
    with pytest.raises(InputError, match=r"state.pt holds more than tensors and plain values"):
        open_checkpoint(storage, found.name, tmp_path)
    assert not touched.exists()
    torch.load(folder / "state.pt", weights_only=False)
    assert touched.exists()  # it was armed


# ---- all ranks together


def looked_for(url, broken=None):
    """What this rank finds, is told and has read; rank 1 may not read the file that is `broken`."""
    read, sum_of, said = [], Storage.sum_of, []

    def watched(self, name):
        read.append(name.partition("/")[2])
        if dist.get_rank() == 1 and name.endswith(str(broken)):
            raise PermissionError(name)
        return sum_of(self, name)

    Storage.sum_of = watched
    try:
        found = newest_whole(Storage(url), said.append, Peers())
        return found and found.name, said, read
    except (InputError, PermissionError) as error:
        return repr(error), said, read
    finally:
        Storage.sum_of = sum_of


def test_ranks_share_the_files_to_verify(ranks, saved, tmp_path):
    storage = restored(saved, tmp_path, lambda _, content: content)
    (first, _, own), (second, _, others) = ranks.run(looked_for, storage.url)
    assert first == second == "00000012-ab12"
    assert sorted([*own, *others]) == sorted(FILES[1:]) and len(own) == len(others) == 2
    assert ranks.run(looked_for, str(tmp_path / "new")) == [(None, [], [])] * 2


@pytest.mark.parametrize("file", FILES)
def test_damage_that_one_rank_finds_sends_all_back(ranks, saved, tmp_path, file):
    storage = restored(saved, tmp_path, lambda name, c: c[:-1] if name == file else c)
    alone_said = []
    assert newest_whole(storage, alone_said.append).name == "00000005-ab12"
    for found, said, _ in ranks.run(looked_for, storage.url):
        assert found == "00000005-ab12" and said == alone_said
    storage.write("checkpoints/00000005-ab12/state.pt", b"")
    for told, said, _ in ranks.run(looked_for, storage.url):
        assert "holds 2 checkpoints and all are damaged" in told and len(said) == 2


def test_a_rank_that_cannot_read_is_no_damage(ranks, saved, tmp_path):
    storage = restored(saved, tmp_path, lambda _, content: content)
    own, peer = ranks.run(looked_for, storage.url, "targets-00000-of-00002.arrow")[::-1]
    assert own[0].startswith("PermissionError") and own[1] == peer[1] == []
    assert peer[0].startswith("PeerFailedError('rank 1 could not read")


def test_a_rank_brings_what_it_loads(ranks, s3, tmp_path, monkeypatch):
    storage, brought = Storage(s3("shared")), []
    ranks.run(save_steps, storage.url, 2, [5], "ab12")
    download = Storage.download
    monkeypatch.setattr(
        Storage, "download", lambda *args: (brought.append(args[1]), download(*args))
    )
    for share, shards in (((0, 2), [0]), ((1, 2), [1]), ((0, 3), [0]), ((1, 3), [0, 1])):
        opened = open_checkpoint(storage, "00000005-ab12", tmp_path / str(share), share=share)
        files = {path.name for path in (opened.folder / "targets").glob("*.arrow")}
        assert files == {f"targets-{rank:05d}-of-00002.arrow" for rank in shards}
        assert len(brought) == 2 + len(shards)
        brought.clear()


def test_what_is_damaged_on_the_way_is_not_loaded(ranks, s3, tmp_path, monkeypatch):
    storage, download = Storage(s3("shared")), Storage.download
    ranks.run(save_steps, storage.url, 2, [5], "ab12")

    def damaging(remote, name, folder):
        download(remote, name, folder)
        if name.endswith(".arrow"):
            content = bytearray((folder / name).read_bytes())
            content[len(content) // 2] ^= 1
            (folder / name).write_bytes(content)

    monkeypatch.setattr(Storage, "download", damaging)
    with pytest.raises(InputError, match=r"damaged .file targets/targets-00001.*CRC-32 differs"):
        open_checkpoint(storage, "00000005-ab12", tmp_path / "a", share=(1, 2))


# ---- what is kept


class Alone:
    """A writer in this process, of which each save can be waited for."""

    def __init__(self, storage, attempt, **keep):
        self.writer = Writer(storage, config.Checkpoint(**keep), attempt, None)

    def save(self, *args):
        self.writer.save(*args)
        return self.writer


def alone(storage, attempt, **keep):
    return Alone(storage, attempt, **keep)


def steps_in(storage):
    return [int(name.partition("-")[0]) for name in storage.names("checkpoints")]


accuracies = st.lists(st.sampled_from([None, 0.1, 0.5, 0.9, float("nan")]), min_size=1, max_size=7)


@settings(max_examples=25, deadline=None)
@given(accuracies, st.integers(1, 3), st.booleans())
def test_the_last_and_the_best_are_kept(tmp_path_factory, accuracies, keep_last, keep_best):
    storage = Storage(tmp_path_factory.mktemp("kept"))
    run = alone(storage, "ab12", keep_last=keep_last, keep_best=keep_best)
    best, highest = None, -1.0
    for step, accuracy in enumerate(accuracies):
        run.save(moment_at(step), state_at(step, 1), None, accuracy).wait()
        if accuracy is not None and accuracy > highest:
            best, highest = step, accuracy
        expected = set(range(max(0, step + 1 - keep_last), step + 1))
        if keep_best and best is not None:
            expected.add(best)
        assert set(steps_in(storage)) == expected


def test_leftovers_of_former_attempts_go_and_those_of_later_ones_stay(tmp_path):
    storage = Storage(tmp_path)
    for name in ("00000003-old", "00000050-old", "00000004-other"):  # killed in mid-save
        storage.write(f"checkpoints/{name}/state.pt", b"half")
    storage.write("checkpoints/00000010-ab12/targets/rows", b"half")  # a rank of ours, that is fast
    run = alone(storage, "ab12")
    assert storage.names("checkpoints") == ["00000010-ab12"]
    storage.write("checkpoints/00000002-later/state.pt", b"half")  # whoever comes after us
    storage.write("checkpoints/00000006-old/state.pt", b"half")  # still dying
    run.save(moment_at(10), state_at(10), None).wait()
    assert storage.names("checkpoints") == ["00000002-later", "00000010-ab12"]


def test_one_that_is_ahead_stays_until_it_is_passed(tmp_path):
    """Of an attempt that was still dying when we started: it is whole, and the newest."""
    storage = Storage(tmp_path)
    run = alone(storage, "ab12", keep_last=1)
    alone(storage, "old", keep_last=1).save(moment_at(20), state_at(20), None).wait()
    for step, expected in ((10, [10, 20]), (15, [15, 20]), (25, [25])):
        run.save(moment_at(step), state_at(step), None).wait()
        assert steps_in(storage) == expected


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_damaged_one_takes_no_place(tmp_path, file):
    """It was the best and is damaged; going back must not cost what is whole."""
    storage = Storage(tmp_path)
    old = alone(storage, "old", keep_last=3)
    for step in (5, 10, 20):
        old.save(moment_at(step), state_at(step), None, step / 100).wait()
    path = tmp_path / "checkpoints" / "00000020-old" / file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert newest_whole(storage, lambda _: None).moment.step == 10
    run = alone(storage, "ab12", keep_last=2)
    for step, expected in ((12, [10, 12, 20]), (19, [12, 19, 20]), (30, [19, 30])):
        run.save(moment_at(step), state_at(step), None, 0.01).wait()
        assert steps_in(storage) == sorted({*expected, 10})  # 10 is the best that is whole


def test_what_was_found_whole_is_not_read_again(tmp_path, monkeypatch):
    storage, read = Storage(tmp_path), []
    old = alone(storage, "old", keep_last=3)
    for step in (5, 10):
        old.save(moment_at(step), state_at(step), None).wait()
    run = alone(storage, "ab12", keep_last=3)
    monkeypatch.setattr(prune, "verify", lambda _, name, files: read.append(name))
    run.writer.vouch("00000010-old")
    run.save(moment_at(12), state_at(12), None).wait()
    assert read == ["00000005-old"] and steps_in(storage) == [5, 10, 12]


def test_a_removal_that_is_cut_short_leaves_no_damage(saved, tmp_path, monkeypatch):
    storage, removed = restored(saved, tmp_path, lambda _, content: content), Storage.remove

    def cut_short(self, name):
        removed(self, name if "." in name else f"{name}/state.pt")
        if "." not in name:
            raise OSError("killed")

    monkeypatch.setattr(Storage, "remove", cut_short)
    prune.remove(storage / "checkpoints", "00000012-ab12")
    assert not storage.exists("checkpoints/00000012-ab12/state.pt")
    assert newest_whole(storage, never).name == "00000005-ab12"


def test_two_saves_at_one_step(tmp_path):
    """As at an epoch's end that is due by its steps, too."""
    storage = Storage(tmp_path)
    run = alone(storage, "ab12")
    for accuracy in (None, 0.5):
        run.save(moment_at(10), state_at(10), None, accuracy).wait()
    assert storage.names("checkpoints") == ["00000010-ab12", "00000010-ab12.1"]
    assert newest_whole(storage, never).accuracy == 0.5


# ---- failures


def told(writer):
    """What the rank hears of its last save."""
    try:
        writer.wait()
    except (OSError, InputError) as error:
        assert writer.wait() is None  # once
        return f"{type(error).__name__}: {error}"
    return None


class Broken:
    def __iter__(self):
        raise OSError("a broken disk")


def fail(url, what):
    """A save in which one rank fails: what each rank hears of it."""
    writer = Writer(Storage(url), config.Checkpoint(), what, group_of(2))
    targets = targets_at(ShardedTargets(N, PRIOR, group_of(2)), 30).snapshot()
    state = state_at(30) if writer.rank == 0 else None
    write = writer.checkpoints.write

    def broken(name, data):
        write(name, data)
        if name.endswith("manifest.json"):
            raise OSError("a broken disk")

    if what == "targets" and writer.rank == 1:
        targets = Snapshot(1, 2, N, PRIOR, Broken())
    if what == "state" and writer.rank == 0:
        state["model"]["seed"] = [torch.Generator()]
    if what == "manifest" and writer.rank == 0:
        writer.checkpoints.write = broken
    writer.save(moment_at(30), state, targets)
    return told(writer)


@pytest.mark.parametrize(
    ("what", "rank", "message"),
    [
        ("targets", 1, "OSError: a broken disk"),
        ("manifest", 0, "OSError: a broken disk"),
        ("state", 0, "InputError: state['model']['seed'][0] is a torch._C.Generator: give tensors"),
    ],
)
def test_all_ranks_hear_when_one_fails(ranks, tmp_path, what, rank, message):
    storage = Storage(tmp_path)
    ranks.run(save_steps, storage.url, 2, [5], "ab12")
    heard = ranks.run(fail, storage.url, what)
    assert heard[rank].startswith(message)
    reason = message.partition(": ")[2]
    assert heard[1 - rank].startswith(f"PeerFailedError: rank {rank} could not save: {reason}")
    assert storage.names("checkpoints") == ["00000005-ab12"]
    assert newest_whole(storage, never).name == "00000005-ab12"
    ranks.run(save_steps, storage.url, 2, [30], "cd34")
    assert is_right(storage, newest_whole(storage, never), tmp_path)


def fill_up(url, rank_at_fault):
    """A save that has more than fits, one that fits again, and what each rank hears of them."""
    writer = Writer(Storage(url), config.Checkpoint(), "full", group_of(2))
    store = targets_at(ShardedTargets(N, PRIOR, group_of(2)), 12)
    state, targets = None, store.snapshot()
    if writer.rank == 0:
        state = state_at(12)
        if rank_at_fault == 0:
            state["large"] = torch.zeros(600_000)
    elif rank_at_fault == 1:
        targets = ShardedTargets(600_000, PRIOR, group_of(2)).snapshot()
    writer.save(moment_at(12), state, targets)
    first = told(writer)
    writer.save(moment_at(12), state_at(12) if writer.rank == 0 else None, store.snapshot())
    return first, told(writer)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(ranks, small_disk, tmp_path, rank):
    storage = Storage(small_disk / "run")
    ranks.run(save_steps, storage.url, 2, [5], "ab12")
    heard = ranks.run(fill_up, storage.url, rank)
    full = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: '{storage}/checkpoints/00000012-"
    assert heard[rank][0].startswith(f"OSError: {full}")
    other = heard[1 - rank][0]  # whose own file may have met the full disk, too
    assert other.startswith(
        (f"PeerFailedError: rank {rank} could not save: {full}", f"OSError: {full}")
    )
    assert [again for _, again in heard] == [None, None]
    assert storage.names("checkpoints") == ["00000005-ab12", "00000012-full.1"]
    for found in complete(storage):
        assert is_right(storage, found, tmp_path)


def test_training_goes_on_while_it_is_written(tmp_path):
    may_write = threading.Event()
    rows = targets_at(LocalTargets(N, PRIOR), 5).snapshot()

    class Slow:
        def __iter__(self):
            assert may_write.wait(30)
            return iter(rows.chunks)

    storage = Storage(tmp_path)
    writer = Writer(storage, config.Checkpoint(), "ab12", None)
    writer.save(moment_at(5), state_at(5), Snapshot(0, 1, N, PRIOR, Slow()))
    assert newest_whole(storage, never) is None
    may_write.set()
    writer.wait()
    assert is_right(storage, newest_whole(storage, never), tmp_path)


def test_a_failed_save_is_told_at_the_next(tmp_path):
    storage = Storage(tmp_path)
    writer = Writer(storage, config.Checkpoint(), "ab12", None)
    writer.save(moment_at(5), state_at(5), Snapshot(0, 1, N, PRIOR, Broken()))
    with pytest.raises(OSError, match="a broken disk"):
        writer.save(moment_at(6), state_at(6), None)
    writer.save(moment_at(6), state_at(6), None)
    writer.wait()
    assert newest_whole(storage, never).name == "00000006-ab12"


# ---- kills

LARGE = 400_000


def live(rank, world_size, port, url, attempt, pipe):
    """Go on from the newest checkpoint, saving all the time and telling what is committed."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group, storage = dist.new_group(), Storage(url)
    found = newest_whole(storage, never) if rank == 0 else None
    step = torch.tensor(found.moment.step if found else 0)
    dist.broadcast(step, 0)
    writer = Writer(storage, config.Checkpoint(), attempt, group)
    targets, step = ShardedTargets(N, PRIOR, group=dist.new_group()), int(step)
    pipe.send(step)
    before = step
    while True:
        step += 1
        state = state_at(step, LARGE) if rank == 0 else None
        writer.save(moment_at(step), state, targets_at(targets, step).snapshot(), step / 1e6)
        if step - 1 > before:
            pipe.send(step - 1)  # which this save has waited for


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_costs_nothing_that_was_committed(tmp_path, world_size):
    context = get_context("forkserver")  # torch is imported once, not once in every life
    context.set_forkserver_preload([__name__])
    storage, rng, announced, unfinished = Storage(tmp_path / "run"), random.Random(0), 0, 0
    for attempt in range(8):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, world_size, server.port, storage.url, f"life{attempt}", theirs)
            processes.append(context.Process(target=live, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        assert all(pipe.poll(30) and pipe.recv() >= announced for pipe in pipes)
        if attempt % 2:  # at any moment, or not before there is something to lose
            assert pipes[0].poll(30)
        time.sleep(rng.uniform(0, 0.4))
        rng.shuffle(processes)
        for process in processes:  # by SIGKILL, one after the other
            process.kill()
            time.sleep(rng.uniform(0, 0.05))
        for process in processes:
            process.join()
        for pipe in pipes:
            announced = max([announced, *drained(pipe)])
        names = storage.names("checkpoints")
        unfinished += any(not storage.exists(f"checkpoints/{name}/manifest.json") for name in names)
        found = newest_whole(storage, never)
        assert (found.moment.step if found else 0) >= announced
        assert found is None or is_right(storage, found, tmp_path, size=LARGE)
        assert len(names) <= 5
    assert announced >= 4 and unfinished  # there was something to lose, and kills hit saves


def drained(pipe):
    try:
        while pipe.poll():
            yield pipe.recv()
    except EOFError:
        return
