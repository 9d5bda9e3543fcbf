"""A run whose processes are killed at every moment ends as if nothing had happened."""

import os
import signal

import pytest

from dps_dist.train.manifest import newest_whole
from dps_dist.train.storage import Storage
from tests.launch.training import (
    Reader,
    Training,
    after_a_save,
    before_the_first_save,
    differences,
    in_a_step,
    processes_of,
    short_home,
    thaw,
    uninterrupted,
    wait_gone,
    while_saving,
)

WORKERS = 2
SETTINGS = (
    "data.batch_size=16",  # 75 steps an epoch
    "data.drop_last=false",
    "train.epochs=10",
    "train.checkpoint.every_steps=25",
    "launch.max_failures=20",
)


@pytest.mark.timeout(1800)
def test_a_run_that_was_killed_at_every_moment_ends_like_one_that_was_not(digits, tmp_path):
    settings = (*SETTINGS, f"data.path={digits}")
    with short_home() as home, Training(home, settings) as training, Reader(training.run) as reader:
        training.start("--workers", str(WORKERS))
        training.goes_on()
        training.lose(before_the_first_save, ranks=[1])
        training.lose(while_saving, ranks=[0])
        training.lose(after_a_save, ranks=[0])
        training.lose(in_a_step, ranks=[0, 1])
        left = kill_driver_and_resume(training)
        # Ctrl-C: the terminal sends it to all processes of the group
        stop_and_resume(training, lambda pid: os.killpg(pid, signal.SIGINT), code=130)
        stop_and_resume(training, lambda pid: os.kill(pid, signal.SIGTERM), code=143)
        assert training.end() == 0
        wait_gone(left, 60)
        assert reader.problems == [] and reader.reads > 100
        assert training.unexpected() == []
        assert not list(training.run.rglob("*.unfinished"))
        expected = uninterrupted(tmp_path / "uninterrupted", settings, WORKERS)
        assert differences(training.run, expected) == []


def kill_driver_and_resume(training):
    """What it leaves behind: the workers go at once, two of Ray's agents after a minute."""
    workers = training.catch(in_a_step)
    left = training.kill_driver()
    thaw(workers.values())
    training.start("--resume", "--workers", str(WORKERS))  # while the workers are still dying
    wait_gone(workers.values(), 60)
    training.goes_on()
    return left


def stop_and_resume(training, stop, code):
    thaw(training.catch(in_a_step).values())
    started = processes_of(training.process.pid)
    stop(training.process.pid)
    assert training.end() == code
    *_, what_next, last = training.terminal().splitlines()
    assert last == "dps: stopped"
    assert what_next.startswith(f"`dps train --name {training.run.name} --out ")
    assert what_next.endswith(" --resume` goes on where it was")
    wait_gone(started, 60)
    damaged = []
    newest = newest_whole(Storage(training.run), damaged.append)
    assert not damaged and newest.name == training.saves().newest
    training.start("--resume", "--workers", str(WORKERS))
    training.goes_on()
