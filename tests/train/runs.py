"""Real training runs for tests: what the ranks run, what they leave, and whether it is the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from dps_dist import config
from dps_dist.train.checkpoint import Writer, open_checkpoint
from dps_dist.train.loop import epoch
from dps_dist.train.manifest import FOLDER, complete, newest_whole
from dps_dist.train.setup import build
from dps_dist.train.state import finish, restore
from dps_dist.train.storage import Storage

ROWS = {row.model_fields["name"].default: row for row in config.METHODS}
METHODS = list(ROWS)
STORES = [name for name in METHODS if issubclass(ROWS[name], config.Stored)]
ALL_KEPT = "train.checkpoint.keep_last=1000"
TIMES = ("seconds", "images_per_s")  # what differs from run to run


# ---- what the ranks run

_loaders = {}


def ignore(event):
    pass


def start(config, folder, tell=ignore):
    """A run as `run` starts it, but that loaders are used again: each compiles for seconds."""
    training = build(config, Storage(folder), tell, threads=1)
    crop, views = training.loader.crop, training.method.views
    kind = crop, views, config.data.path, repr(config.data.noise), config.train.seed
    training.loader = _loaders.setdefault(kind, training.loader)
    of_eval = config.data.path, config.evaluate.split
    training.eval_loader = _loaders.setdefault(of_eval, training.eval_loader)
    if training.held_out_loader is not None:
        of_train = config.data.path, "hold_out"
        training.held_out_loader = _loaders.setdefault(of_train, training.held_out_loader)
    restore(training)
    return training


def train(config, folder, tell=ignore):
    """`run` with loaders that were used before."""
    training = start(config, folder, tell)
    while training.at.epoch < config.train.epochs:
        epoch(training)
    return finish(training)


# ---- what they leave


def trained(ranks, config, folder, world_size=1):
    return ranks.run(train, config, str(folder), world_size=world_size)[0]


def final_state(folder):
    """All of the newest checkpoint but its targets; rows of figures without their times."""
    storage = Storage(folder)
    opened = open_checkpoint(storage, newest_whole(storage, pytest.fail).name, Path("unused"))
    rows = [without_times(row) for row in opened.state["history"]]
    return {**opened.state, "history": rows, "moment": vars(opened.moment)}


def without_times(row):
    return {key: value for key, value in row.items() if key not in TIMES}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved_targets(folder):
    """The final targets by sample: columns of the Arrow files, in order."""
    tables = []
    for path in sorted((folder / "targets").glob("*.arrow")):
        with pa.memory_map(str(path)) as file:
            tables.append(pa.ipc.open_file(file).read_all())
    table = pa.concat_tables(tables).sort_by("index")
    evidence = np.array(table["evidence"].combine_chunks().values).reshape(len(table), -1)
    kept = [name for name in ("index", "visits", "label") if name in table.column_names]
    columns = {name: table[name].to_numpy() for name in kept}
    return {**columns, "evidence": evidence}


def assert_same(one, other, where="state"):
    """The same to the last bit, in whatever it is nested."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert one.tobytes() == other.tobytes(), where
    else:
        assert one == other, where


def assert_same_end(one, other):
    assert_same(final_state(one), final_state(other))
    rows = [[without_times(row) for row in metrics(folder)] for folder in (one, other)]
    assert rows[0] == rows[1]
    assert (one / "targets").exists() == (other / "targets").exists()
    if (one / "targets").exists():
        assert_same(saved_targets(one), saved_targets(other), "targets")


def went_on(folder, copy, moment, kept=True):
    """A copy of a run that saved its last state once more, at another moment; or that alone."""
    storage = Storage(folder)
    newest = complete(storage)[0]
    opened = open_checkpoint(storage, newest.name, Path("unused"))
    shutil.copytree(folder, copy)
    if not kept:
        shutil.rmtree(copy / FOLDER)
    writer = Writer(Storage(copy), config.Checkpoint(keep_last=9), "later", None)
    writer.save(moment, opened.state, None)
    writer.wait()
    return copy


def killed_after(folder, step, copy):
    """What a run leaves that is killed when its checkpoint of that step has been committed.

    After the last one the targets are there already, and only the summary is missing.
    """
    shutil.copytree(folder, copy)
    (copy / "summary.json").unlink()
    for found in complete(Storage(copy)):
        if found.moment.step > step:
            shutil.rmtree(copy / FOLDER / found.name)
            shutil.rmtree(copy / "targets", ignore_errors=True)
    assert newest_whole(Storage(copy), pytest.fail).moment.step == step
    return copy
