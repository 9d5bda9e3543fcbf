"""A run whose processes are killed at every moment ends as if nothing had happened."""

import os
import signal

import pytest

from dps_dist.train.checkpoint import newest_whole
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
        interrupt_and_resume(training)
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


def interrupt_and_resume(training):
    """Ctrl-C: the terminal sends it to all processes of the group."""
    thaw(training.catch(in_a_step).values())
    started = processes_of(training.process.pid)
    os.killpg(training.process.pid, signal.SIGINT)
    assert training.end() == 130
    assert training.terminal().splitlines()[-1] == "dps: stopped"
    wait_gone(started, 60)
    damaged = []
    newest = newest_whole(Storage(training.run), damaged.append)
    assert not damaged and newest.name == training.saves().newest
    training.start("--resume", "--workers", str(WORKERS))
    training.goes_on()
