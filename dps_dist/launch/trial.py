"""What runs in a trial's process: a run that tells Ray Tune of its epochs.

A run of one worker trains right here; one of several has Ray Train start them.
"""

import math
import os
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray import tune
from ray.util.queue import Queue

from dps_dist.config.sweep import BETTER
from dps_dist.errors import FailedError, InputError
from dps_dist.launch import ray_train
from dps_dist.launch.loggers import Loggers
from dps_dist.launch.ray_train import ERRORS
from dps_dist.launch.runs import Run
from dps_dist.launch.telemetry import RankTelemetry
from dps_dist.launch.worker import is_hopeless, sentence
from dps_dist.train.files import CONFIG, SUMMARY, read_metrics
from dps_dist.train.loop import run as run_loop

NOTES = "notes.log"
LOCK_S = 60.0  # for a process that is killed to let go of its trial


def trial(run: Run, stopped: set[str], placed: Queue | None, every_s: float) -> None:
    """Train, telling Tune of the epochs that were measured, and the driver of the workers.

    every_s: between two of the epochs that are told; whoever schedules by them wants all, 0.
    """
    told = _Told(run.config.train.epochs, every_s)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"  # a trial that is stopped may be saving
    try:
        if run.is_new and not run.storage.exists(CONFIG):
            run.storage.remove("")  # of a process that was killed before it began
            run.create()
        with ExitStack() as stack:
            _lock(run, stack)
            for row in read_metrics(run.storage):
                told.hear({"kind": "epoch", **row})
            if run.storage.name in stopped or run.storage.exists(SUMMARY):
                return
            if placed is None:
                _train(run, told, stack)
                return
        ray_train.train(replace(run, is_new=False), _Teller(run, told, placed))
    except Exception as error:
        if is_hopeless(error):
            tune.report({"refused": sentence(error), **dict.fromkeys(BETTER, math.nan)})
            return
        if run.storage.exists(CONFIG):
            run.storage.write(ERRORS, traceback.format_exc().encode())
        raise


class _Told:
    """What Tune hears: each time it does, the trial waits for it (10 ms or so)."""

    def __init__(self, epochs: int, every_s: float) -> None:
        self._epochs, self._every_s, self._at = epochs, every_s, -math.inf

    def hear(self, event: dict[str, Any]) -> None:
        """Of the last epoch without its number: a scheduler, which goes by it, is not to stop a
        trial that has but to write its summary."""
        if event["kind"] != "epoch" or "accuracy" not in event:
            return
        figures = {key: _number(event[key]) for key in BETTER}
        if event["epoch"] >= self._epochs:
            tune.report(figures)
        elif time.monotonic() >= self._at + self._every_s:
            tune.report({"epoch": event["epoch"], **figures})
            self._at = time.monotonic()


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # as files hold what is not finite


def _train(run: Run, told: _Told, stack: ExitStack) -> None:
    """With one worker, which is this process."""
    gpu = bool(ray.get_gpu_ids())
    threads = max(1, int(run.config.launch.cpus_per_worker))
    torch.set_num_threads(threads)
    telemetry = RankTelemetry(run.storage.name, rank=0)
    stack.callback(telemetry.close)
    logged = stack.enter_context(Loggers(run, lambda text: _note(run, text)))
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)

    def tell(event: dict[str, Any]) -> None:
        telemetry.hear(event)
        logged.hear(event)
        told.hear(event)

    run_loop(
        run.config,
        run.storage,
        tell,
        device="cuda" if gpu else "cpu",
        threads=threads,
        monitor=telemetry.see,
    )


def _lock(run: Run, stack: ExitStack) -> None:
    """The run is ours; who had it before may take a moment to die."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            stack.enter_context(run.locked())
            return
        except InputError:
            if time.monotonic() > until:
                raise FailedError(f"{run.storage} is still being trained") from None
            time.sleep(1)


def _note(run: Run, text: str) -> None:
    """For who looks at the trial: no terminal shows it."""
    before = run.storage.read(NOTES) if run.storage.exists(NOTES) else b""
    run.storage.write(NOTES, before + f"{text}\n".encode())


class _Teller:
    """Stands where the terminal does: epochs go to Tune, places to the driver, notes to a file."""

    def __init__(self, run: Run, told: _Told, placed: Queue) -> None:
        self._run, self._told, self._placed = run, told, placed
        self._id = tune.get_context().get_trial_id()

    def show(self, event: dict[str, Any]) -> None:
        if event["kind"] == "placed":
            self._placed.put((self._id, event))
        if event["kind"] == "note":
            _note(self._run, event["text"])
        self._told.hear(event)

    def tick(self) -> None:
        pass
