"""`dps train` from the command line to the run's folder, and what it says when it must stop."""

import json
import re
import subprocess

import pytest
import yaml

from dps_dist.errors import InputError
from dps_dist.launch import loggers, tokens
from dps_dist.train.storage import Storage
from tests.launch.test_loggers import scalars
from tests.launch.training import DPS, Training, processes_of, rows_of, short_home, targets_of


@pytest.fixture
def training(digits):
    with short_home() as home, Training(home, (f"data.path={digits}", "train.epochs=2")) as run:
        yield run


@pytest.mark.timeout(600)
def test_a_run_leaves_its_folder(training, monkeypatch, s3):
    training.settings = (*training.settings, "data.noise={kind: symmetric, rate: .4}")
    training.start("--workers", "2")
    strangers_are_refused(training.until("Ray is up", lambda: gcs_of(training)), monkeypatch)
    assert training.end() == 0, training.terminal()
    assert training.unexpected() == []
    folder = training.run
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoints", "targets"} <= {
        path.name for path in folder.iterdir()
    }
    assert [row["epoch"] for row in rows_of(folder)] == [1, 2]
    logged = scalars(folder / "tensorboard")
    assert set(logged) == {row["step"] for row in rows_of(folder)}
    for row in rows_of(folder):
        assert logged[row["step"]] == pytest.approx(dict(loggers.finite(row)), rel=1e-6)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] == rows_of(folder)[-1]["accuracy"] and summary["workers"] == 2
    targets = targets_of(folder / "targets")
    assert set(targets) == {"index", "label", "visits", "evidence"}
    assert targets["visits"].sum() == 2 * 18 * 64  # drop_last leaves out 48 of 1200
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["name"] == "run"
    again = [DPS, "train", "--name", "run", "--out", folder.parent, "--resume"]
    done = subprocess.run(again, capture_output=True, text=True, env=training.env)
    assert done.returncode == 0 and "is finished" in done.stdout
    done = subprocess.run([DPS, "report", folder], capture_output=True, text=True)
    assert done.returncode == 0 and (folder / "report" / "index.html").exists()
    its_configuration_is_a_recipe(training, s3("runs"), summary["accuracy"])


def its_configuration_is_a_recipe(training, out, accuracy):
    """The same run, in an object store this time, and finished when it is resumed there."""
    given = ["--name", "again", "--out", out]
    for more, said in (
        ([training.run / "config.yaml"], "again finished"),
        (["--resume"], "is fin"),
    ):
        train = [DPS, "train", *given, *more]
        done = subprocess.run(train, capture_output=True, text=True, env=training.env)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    summary = json.loads((Storage(out) / "again").read("summary.json"))
    assert summary["accuracy"] == accuracy


def gcs_of(training):
    """Where the Ray that `dps train` started by itself listens; none before its raylet runs."""
    lines = [" ".join(process.cmdline()) for process in processes_of(training.process.pid)]
    found = [re.search(r"--gcs-address=(\S+)", line) for line in lines if "raylet/raylet" in line]
    return next((one[1] for one in found if one), None)


def strangers_are_refused(address, monkeypatch):
    """docs/security.md says so; Ray turns it on by itself."""
    with monkeypatch.context() as changed:
        changed.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        changed.setenv("RAY_AUTH_TOKEN", "0" * 32)
        with pytest.raises(InputError, match="the token is wrong"):
            tokens.check(address)


@pytest.mark.timeout(600)
def test_a_loss_that_is_not_finite_stops_the_run_at_once(training):
    training.settings = (*training.settings, "optim.lr=1e30")
    training.start("--workers", "2")
    assert training.end() == 2
    last = training.terminal().splitlines()[-1]
    assert last.startswith("dps: the loss is not finite at step ") and "samples " in last
    assert "restarted" not in training.terminal()  # starting again would not mend it
    assert not training.run.exists() or training.saves().committed
