"""Sweeps as users start them: killed and resumed, with trials that fail or are stopped early."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.launch.training import (
    DPS,
    OWN_RAY,
    PATIENCE_S,
    Training,
    differences,
    kill,
    processes_of,
    rows_of,
    short_home,
    uninterrupted,
)

TUNE = Path(__file__).parents[2] / "tune"


class Sweeping:
    """A script of tune/ on its own Ray, in a session of its own."""

    def __init__(self, home: Path, script: str, *arguments: str) -> None:
        self.folder, self.log = home / "sweeps" / "s", home / "sweep.log"
        self.command = [sys.executable, str(TUNE / script), *arguments]
        self.command += ["--out", "sweeps", "--name", "s"]
        self.home = home
        self.env = Training(home, ()).env | OWN_RAY
        self.processes: list[subprocess.Popen] = []

    def start(self, *more: str) -> subprocess.Popen:
        with self.log.open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*self.command, *more],
                    stdout=log,
                    stderr=log,
                    env=self.env,
                    cwd=self.home,
                    start_new_session=True,
                )
            )
        return self.processes[-1]

    def run(self, *more: str) -> int:
        return self.start(*more).wait(2 * PATIENCE_S)

    def until(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.statuses()):
            assert self.processes[-1].poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def statuses(self) -> dict[str, str]:
        file = self.folder / "trials.json"
        if not file.exists():
            return {}
        return {name: trial["status"] for name, trial in json.loads(file.read_text()).items()}

    def table(self) -> dict[str, dict]:
        return {
            row["trial"]: row for row in pq.read_table(self.folder / "results.parquet").to_pylist()
        }

    def __enter__(self) -> "Sweeping":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for process in self.processes:
            kill(processes_of(process.pid))
            process.wait()
        if error and self.log.exists():
            print(self.log.read_text())


@pytest.mark.timeout(600)
def test_a_sweep_is_killed_and_resumed_and_trials_may_fail(digits, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: [.01, 1e+30]\nmethod.c: [20, 500]\n")
    settings = (f"data.path={digits}", "train.epochs=12", "data.noise={kind: symmetric, rate: .4}")
    given = [word for one in settings for word in ("--set", one)]
    with (
        short_home() as home,
        Sweeping(home, "sweep.py", "digits", "--space", str(space), *given) as sweep,
    ):
        driver = sweep.start("--concurrent", "1")
        runs, second = sweep.folder / "runs", "lr0.01-c500-seed0"

        def is_under_way(statuses: dict[str, str]) -> bool:
            return statuses.get(second) == "running" and len(rows_of(runs / second)) >= 3

        sweep.until(is_under_way)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        first = "lr0.01-c20-seed0"
        assert sweep.statuses()[first] == "finished" and sweep.statuses()[second] == "running"
        assert not (runs / second / "summary.json").exists()
        done = {path: path.stat().st_mtime_ns for path in (runs / first).rglob("*")}

        assert sweep.run("--resume") == 1  # two of the trials fail
        assert {path: path.stat().st_mtime_ns for path in (runs / first).rglob("*")} == done
        found = sweep.table()
        assert {name: row["status"] for name, row in found.items()} == {
            first: "finished",
            second: "finished",
            "lr1e+30-c20-seed0": "failed",
            "lr1e+30-c500-seed0": "failed",
        }
        assert found["lr1e+30-c20-seed0"]["reason"].startswith("the loss is not finite at step ")
        assert "2 of 4 trials failed: the page says why" in sweep.log.read_text()
        # Both are what one process computes that nobody kills, to the last bit
        for name, c in ((first, 20), (second, 500)):
            chosen = ("data.hold_out=120", "evaluate.split=hold_out", f"method.c={c}")
            alone = uninterrupted(home / name, (*settings, *chosen, "optim.lr=.01"), workers=1)
            assert differences(runs / name, alone) == []
            assert found[name]["accuracy"] == rows_of(alone)[-1]["accuracy"]
        page = (sweep.folder / "index.html").read_text()
        assert "the loss is not finite" in page and "held out of the training set" in page
        assert not (sweep.folder / "tune").exists()
        # A trial is a run like any other
        report = subprocess.run([DPS, "report", runs / first], capture_output=True, text=True)
        assert report.returncode == 0, report.stderr


@pytest.mark.timeout(600)
def test_asha_stops_trials_of_several_workers_and_frees_what_they_held(digits, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: [.01, 1e-7, .009]\n")
    settings = (f"data.path={digits}", "train.epochs=4")
    given = [word for one in settings for word in ("--set", one)]
    options = ["--space", str(space), "--scheduler", "asha", "--workers-per-trial", "2"]
    with short_home() as home, Sweeping(home, "sweep.py", "digits", *given, *options) as sweep:
        assert sweep.run() == 0
        found = sweep.table()
        assert found["lr1e-07-seed0"]["status"] == "stopped"
        assert found["lr1e-07-seed0"]["epoch"] < 4
        assert found["lr0.009-seed0"]["status"] in ("finished", "stopped")  # it had its turn
        # Who runs to the end has the same figures as without a scheduler
        assert found["lr0.01-seed0"]["status"] == "finished"
        chosen = ("data.hold_out=120", "evaluate.split=hold_out", "optim.lr=.01")
        alone = uninterrupted(home / "alone", (*settings, *chosen), workers=2)
        assert found["lr0.01-seed0"]["accuracy"] == rows_of(alone)[-1]["accuracy"]
        assert differences(sweep.folder / "runs" / "lr0.01-seed0", alone) == []


@pytest.mark.timeout(600)
def test_optuna_goes_on_with_what_it_tried_before_and_paths_are_ours(digits, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: {loguniform: [1e-3, 1e-1]}\nmethod.c: {randint: [5, 50]}\n")
    options = ["--space", str(space), "--search", "optuna", "--trials", "3"]
    with short_home() as home, Sweeping(home, "sweep.py", "my.yaml", *options) as sweep:
        (home / "digits").symlink_to(digits)  # trials run in other folders than the command
        (home / "my.yaml").write_text("extends: digits\ndata: {path: digits}\ntrain: {epochs: 2}\n")
        driver = sweep.start("--concurrent", "1")
        sweep.until(lambda statuses: "finished" in statuses.values())
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        before = [name for name, status in sweep.statuses().items() if status == "finished"]
        assert sweep.run("--resume") == 0
        found = sweep.table()
        assert len(found) == 3 and set(before) <= found.keys()
        assert {row["status"] for row in found.values()} == {"finished"}
        assert all(1e-3 <= row["optim.lr"] <= 1e-1 for row in found.values())


@pytest.mark.timeout(600)
def test_trials_that_optuna_chose_may_fail(digits, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: {loguniform: [1e+20, 1e+30]}\n")
    options = ["--space", str(space), "--search", "optuna", "--trials", "2"]
    given = ["--set", f"data.path={digits}", "--set", "train.epochs=1"]
    with short_home() as home, Sweeping(home, "sweep.py", "digits", *given, *options) as sweep:
        assert sweep.run() == 1
        found = sweep.table()
        assert len(found) == 2
        assert all(row["status"] == "failed" for row in found.values())
        assert all("not finite" in row["reason"] for row in found.values())
