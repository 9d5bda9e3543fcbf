"""Sweeps as users start them: killed and resumed, with trials that fail or are stopped early."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pyarrow.parquet as pq
import pytest

from dps_dist.train.manifest import newest_whole, step_of
from dps_dist.train.storage import Storage
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
    wait_gone,
)

T = TypeVar("T")

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

    def until(self, condition: Callable[[dict[str, str]], T]) -> T:
        """What the condition gives when it holds at last."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition(self.statuses())):
            assert self.processes[-1].poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found

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
def test_an_ablation_goes_on_from_checkpoints_when_a_trial_or_the_driver_is_killed(digits):
    settings = (f"data.path={digits}", "train.epochs=30", "data.noise={kind: symmetric, rate: .4}")
    given = [word for one in settings for word in ("--set", one)]
    grid = ["--gamma", ".9", "--c", "20,500,2000", "--seeds", "1", "--hold-out", "120"]
    with short_home() as home, Sweeping(home, "ablation.py", "digits", *grid, *given) as sweep:
        driver = sweep.start("--concurrent", "1")
        runs, page = sweep.folder / "runs", sweep.folder / "index.html"

        def under_way(statuses: dict[str, str]) -> list[str]:
            running = [name for name, status in statuses.items() if status == "running"]
            return [name for name in running if len(rows_of(runs / name)) >= 4]

        (first,) = sweep.until(under_way)
        kill(holders_of(runs / first / "config.yaml", driver.pid))
        assert not (runs / first / "summary.json").exists()
        before = {first: saved_rows(runs / first)}

        sweep.until(lambda statuses: statuses[first] == "finished")
        (second,) = sweep.until(lambda statuses: page.exists() and under_way(statuses))
        started = processes_of(driver.pid)
        # Ray's agents stay for a minute more
        ours = [process for process in started if "Agent" not in process.cmdline()[0]]
        driver.kill()
        driver.wait()
        assert 'http-equiv="refresh"' in page.read_text()
        assert sweep.table()[first]["status"] in ("running", "finished")
        wait_gone(ours, PATIENCE_S)
        assert sweep.statuses()[first] == "finished" and sweep.statuses()[second] == "running"
        assert not (runs / second / "summary.json").exists()
        before[second] = saved_rows(runs / second)
        done = {path: path.stat().st_mtime_ns for path in (runs / first).rglob("*")}

        # A logger that cannot write is no reason to stop, but is told
        shutil.rmtree(runs / second / "tensorboard")
        (runs / second / "tensorboard").touch()
        assert sweep.run("--resume") == 0
        assert {path: path.stat().st_mtime_ns for path in (runs / first).rglob("*")} == done
        found = sweep.table()
        assert len(found) == 3 and {row["status"] for row in found.values()} == {"finished"}
        told = found.pop(second)["reason"]
        assert told.startswith("tensorboard cannot log this run (")
        assert f"{second} finished: tensorboard cannot" in sweep.log.read_text()
        assert {row["reason"] for row in found.values()} == {None}
        found = sweep.table()
        for name in (first, second):
            # Not begun anew: the rows of before, to the time that they took
            assert rows_of(runs / name)[: len(before[name])] == before[name] != []
            # And what one process computes that nobody kills, to the last bit
            cell = [f"method.{key}={found[name][f'method.{key}']}" for key in ("gamma", "c")]
            chosen = (*settings, "data.hold_out=120", "evaluate.split=hold_out", *cell)
            alone = uninterrupted(home / name, chosen, workers=1)
            assert differences(runs / name, alone) == []
            assert found[name]["accuracy"] == rows_of(alone)[-1]["accuracy"]
        assert "held out of the training set" in page.read_text()
        assert 'http-equiv="refresh"' not in page.read_text()
        assert not (sweep.folder / "tune").exists()
        # A trial is a run like any other
        report = subprocess.run([DPS, "report", runs / first], capture_output=True, text=True)
        assert report.returncode == 0, report.stderr


def holders_of(file: Path, session: int) -> list[psutil.Process]:
    """Who has it open: of a run's configuration, who trains."""
    return [
        process
        for process in processes_of(session)
        if str(file) in [opened.path for opened in process.open_files()]
    ]


def saved_rows(run: Path) -> list[dict]:
    """Of the epochs that are in a checkpoint: they are not computed again."""
    found = newest_whole(Storage(run), lambda text: None)
    return [row for row in rows_of(run) if found and row["step"] <= step_of(found.name)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
def test_asha_stops_trials_and_frees_what_they_held(digits, tmp_path, workers):
    space, last = tmp_path / "space.yaml", "1e+30" if workers == 1 else ".009"
    space.write_text(f"optim.lr: [.01, 1e-7, {last}]\n")
    settings = (f"data.path={digits}", "train.epochs=30")
    given = [word for one in settings for word in ("--set", one)]
    options = ["--space", str(space), "--scheduler", "asha", "--workers-per-trial", str(workers)]
    options += ["--concurrent", "1"]  # who comes first is not compared, on any number of cores
    best, slow, last = (f"lr{lr:g}-seed0" for lr in (0.01, 1e-7, float(last)))
    with short_home() as home, Sweeping(home, "sweep.py", "digits", *given, *options) as sweep:
        assert sweep.run() == (1 if workers == 1 else 0)
        found = sweep.table()
        assert found[slow]["status"] == "stopped" and 3 <= found[slow]["epoch"] < 30
        if workers == 1:
            assert found[last]["reason"].startswith("the loss is not finite at step ")
            assert "1 of 3 trials failed: the page says why" in sweep.log.read_text()
            assert "the loss is not finite" in (sweep.folder / "index.html").read_text()
        else:
            assert found[last]["status"] in ("finished", "stopped")  # it had its turn
        # Who runs to the end has the same figures as without a scheduler
        assert found[best]["status"] == "finished"
        chosen = ("data.hold_out=120", "evaluate.split=hold_out", "optim.lr=.01")
        alone = uninterrupted(home / "alone", (*settings, *chosen), workers=workers)
        assert found[best]["accuracy"] == rows_of(alone)[-1]["accuracy"]
        assert differences(sweep.folder / "runs" / best, alone) == []
        if workers == 1:  # who was stopped is not begun again, who failed is
            runs = sweep.folder / "runs"
            ended = [path for name in (best, slow) for path in (runs / name).rglob("*")]
            done = {path: path.stat().st_mtime_ns for path in ended}
            assert sweep.run("--resume") == 1
            assert {path: path.stat().st_mtime_ns for path in ended} == done
            assert sweep.log.read_text().count(f"{last} failed: ") == 2
            assert sweep.table().keys() == found.keys()
            assert all(sweep.table()[name] == found[name] for name in (best, slow))


@pytest.mark.timeout(600)
def test_optuna_goes_on_after_ctrl_c_with_what_it_tried_before_and_paths_are_ours(digits, tmp_path):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: {loguniform: [1e-3, 1e-1]}\nmethod.c: {randint: [5, 50]}\n")
    options = ["--space", str(space), "--search", "optuna", "--trials", "3"]
    with short_home() as home, Sweeping(home, "sweep.py", "my.yaml", *options) as sweep:
        (home / "digits").symlink_to(digits)  # trials run in other folders than the command
        (home / "my.yaml").write_text("extends: digits\ndata: {path: digits}\ntrain: {epochs: 9}\n")
        driver = sweep.start("--concurrent", "1")
        sweep.until(lambda statuses: {"finished", "running"} <= set(statuses.values()))
        driver.send_signal(signal.SIGINT)
        assert driver.wait(PATIENCE_S) == 130
        assert "stopped" in sweep.log.read_text() and "--resume" in sweep.log.read_text()
        assert "Traceback" not in sweep.log.read_text()
        assert "running" not in sweep.statuses().values()
        page = (sweep.folder / "index.html").read_text()
        assert "running" not in page and 'http-equiv="refresh"' not in page
        before = [name for name, status in sweep.statuses().items() if status == "finished"]
        assert sweep.run("--resume") == 0
        found = sweep.table()
        assert len(found) == 3 and set(before) <= found.keys()
        assert {row["status"] for row in found.values()} == {"finished"}
        assert all(1e-3 <= row["optim.lr"] <= 1e-1 for row in found.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("search", ["optuna", "random"])
def test_trials_that_were_chosen_may_fail(digits, tmp_path, search):
    space = tmp_path / "space.yaml"
    space.write_text("optim.lr: [1e+20, 1e+25, 1e+30]\n")  # each once, also of a few
    options = ["--space", str(space), "--search", search, "--trials", "3"]
    options += ["--scheduler", "asha"] if search == "random" else []
    given = ["--set", f"data.path={digits}", "--set", "train.epochs=1"]
    with short_home() as home, Sweeping(home, "sweep.py", "digits", *given, *options) as sweep:
        assert sweep.run() == 1
        found = sweep.table()
        assert len(found) == 3
        assert all(row["status"] == "failed" for row in found.values())
        assert all("not finite" in row["reason"] for row in found.values())
