"""Loggers hear the same rows under the same keys; each is read back by its own means."""

import json
import struct
import time
from contextlib import suppress

import pytest

from dps_dist import recipes
from dps_dist.errors import InputError
from dps_dist.launch import loggers
from dps_dist.launch.loggers import Loggers
from dps_dist.launch.runs import Run, flat
from dps_dist.train.storage import Storage

ROWS = [
    {"epoch": 1, "step": 18, "train_loss": 1.5, "accuracy": 0.5, "nll": float("nan"), "workers": 2},
    {"epoch": 2, "step": 36, "train_loss": 0.75, "accuracy": 0.75, "nll": 0.5, "workers": 2},
]
START = {"kind": "start", "step": 0, "run": "run"}


def run_with(folder, *names):
    config = recipes.load("digits", [f"launch.loggers=[{', '.join(names)}]"])
    return Run(config, Storage(folder / "run"), is_new=True)


def told(run, *events, note=pytest.fail):
    with Loggers(run, note) as heard:
        for event in events:
            heard.hear(event)


def epoch(row):
    return {"kind": "epoch", **row}


def numbers(row):
    return {key: value for key, value in row.items() if key != "step" and value == value}


def scalars(folder):
    """{step: {key: value}} of event files: length, its sum, event, its sum; and so on."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for file in sorted(folder.glob("events.out.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            if event.session_log.status == 1:  # a restart: what came at this step and later is gone
                found = {step: row for step, row in found.items() if step < event.step}
            for value in event.summary.value:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
            data = data[16 + length :]
    return found


def history(file):
    """{step: {key: value}} of a file that W&B will upload."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, found = DataStore(), {}
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        items = Record.FromString(data).history.item
        row = {item.nested_key[0]: json.loads(item.value_json) for item in items}
        if row:
            own = {key: value for key, value in row.items() if not key.startswith("_")}
            found[row["_step"]] = own
    return found


def test_tensorboard_holds_every_number(tmp_path):
    told(run_with(tmp_path), START, *map(epoch, ROWS), {"kind": "progress", "loss": 1.0})
    assert scalars(tmp_path / "run/tensorboard") == {row["step"]: numbers(row) for row in ROWS}


def test_tensorboard_forgets_what_a_restart_makes_anew(tmp_path):
    run = run_with(tmp_path)
    again = {**ROWS[1], "accuracy": 0.875}
    told(run, START, *map(epoch, ROWS), {**START, "step": 18}, epoch(again))
    assert scalars(tmp_path / "run/tensorboard") == {18: numbers(ROWS[0]), 36: numbers(again)}


def test_a_full_disk_ends_tensorboard_and_not_the_run(small_disk):
    row, notes = {f"figure {n}": 0.5 for n in range(400)}, []
    with Loggers(run_with(small_disk), notes.append) as heard:
        heard.hear(START)
        heard.hear(epoch({**row, "step": 18}))
        with suppress(OSError), (small_disk / "others").open("wb", buffering=0) as others:
            while True:
                others.write(bytes(4096))
        for step in (36, 54):  # the first may find room on the file's last page
            heard.hear(epoch({**row, "step": step}))
    assert notes == [
        "tensorboard cannot log this run ([Errno 28] No space left on device): it goes on without"
    ]


def test_a_logger_that_is_not_installed_is_refused(monkeypatch):
    config = recipes.load("digits", ["launch.loggers=[wandb]"])
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(InputError, match=r"launch.loggers holds wandb: .* 'dps_dist\[wandb\]'"):
        loggers.check(config)
    loggers.check(recipes.load("digits"))


class Unreachable(loggers.Logger):
    def start(self, run, step):
        raise ConnectionError("no answer from http://me:secret@mlflow\nand more")

    def log(self, step, figures):
        raise ConnectionError("still no answer")

    def close(self, failed=False):
        raise ConnectionError("not even now")


def test_a_run_outlives_a_logger_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setitem(loggers.LOGGERS, "mlflow", (Unreachable, "mlflow"))
    notes = []
    told(run_with(tmp_path, "mlflow"), START, *map(epoch, ROWS), note=notes.append)
    said = "mlflow cannot log this run (no answer from http://***@mlflow): it goes on without"
    assert notes == [said]
    assert len(scalars(tmp_path / "run/tensorboard")) == 2
    with pytest.raises(ZeroDivisionError), Loggers(run_with(tmp_path, "mlflow"), notes.append):
        raise ZeroDivisionError  # of the run; what closing makes of it hides nothing


def test_runs_of_one_name_in_two_folders_are_two(tmp_path):
    one, other = (run_with(tmp_path / name) for name in ("a", "b"))
    assert loggers.identity(one) != loggers.identity(other)
    assert loggers.identity(one) == loggers.identity(run_with(tmp_path / "a"))
    assert loggers.identity(one).startswith("run-")


def test_the_configuration_is_flat(tmp_path):
    fields = dict(flat(run_with(tmp_path).config))
    assert fields["method.gamma"] == 0.85 and fields["train.checkpoint.keep_last"] == 2


def test_mlflow(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = run_with(tmp_path / "it's", "mlflow")
    told(run, START, epoch(ROWS[0]))
    told(run, {**START, "step": 18}, epoch(ROWS[1]))  # resumed: the same run
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("dps_dist")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["method.gamma"] == "0.85" and found.info.status == "FINISHED"
    with pytest.raises(ZeroDivisionError), Loggers(run, pytest.fail) as heard:
        heard.hear({**START, "step": 36})
        raise ZeroDivisionError
    assert client.get_run(found.info.run_id).info.status == "FAILED"
    for row in ROWS:
        for key, value in numbers(row).items():
            history = {m.step: m.value for m in client.get_metric_history(found.info.run_id, key)}
            assert history[row["step"]] == value


def test_mlflow_is_asked_once_an_epoch(tmp_path, monkeypatch):
    """Each request makes whoever feeds the display wait; a server takes 100 parameters at once."""
    import mlflow
    from mlflow.store.tracking.file_store import FileStore

    asked = []
    for name in ("log_batch", "log_metric", "log_param"):
        real = getattr(FileStore, name)

        def counted(store, *given, _name=name, _real=real, **more):
            asked.append((_name, given))
            return _real(store, *given, **more)

        monkeypatch.setattr(FileStore, name, counted)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    run = run_with(tmp_path, "mlflow")
    with Loggers(run, pytest.fail) as heard:
        heard.hear(START)
        assert {name for name, _ in asked} == {"log_batch"}
        assert len(asked) == -(-len(dict(flat(run.config))) // 100)
        asked.clear()
        heard.hear(epoch(ROWS[1]))
        assert [name for name, _ in asked] == ["log_batch"]


def test_wandb(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = run_with(tmp_path, "wandb")
    (tmp_path / "run").mkdir()
    told(run, START, epoch(ROWS[0]))
    time.sleep(1)  # its folders are named by the second
    told(run, {**START, "step": 18}, epoch(ROWS[1]))  # resumed: the same run
    wandb.teardown()  # as at the end of the process: now its service has written everything
    first, second = sorted((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))
    assert {first.stem, second.stem} == {f"run-{loggers.identity(run)}"}
    assert history(first) == {18: numbers(ROWS[0])} and history(second) == {36: numbers(ROWS[1])}
