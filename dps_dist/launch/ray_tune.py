"""Ray Tune: runs the trials of a sweep, several at once; `trial.py` is what runs in each.

A trial of one worker trains in its own process, which Tune then gives the next trial, so that
imports and compiling are paid once; a trial of several workers starts them by Ray Train. Either way
a trial is a run's folder: one that is begun again goes on from its last checkpoint, one that ended
only tells Tune again what it measured. So Tune's own state, which is pickled, is never read back.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.air._internal import usage
from ray.exceptions import RayError
from ray.tune import TuneError
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.util.queue import Queue

from dps_dist import recipes
from dps_dist.config import Launch
from dps_dist.config.sweep import BETTER, RUNS
from dps_dist.errors import FailedError, InputError
from dps_dist.launch import ray_train
from dps_dist.launch import space as spaces
from dps_dist.launch.cluster import (
    connect,
    needs_of,
    nodes,
    placement,
    queue,
    reason_of,
    runs_at_once,
)
from dps_dist.launch.ray_train import for_workers
from dps_dist.launch.runs import Run
from dps_dist.launch.space import Point
from dps_dist.launch.sweeps import Folder, Sweep, Trial, create
from dps_dist.launch.trial import NOTES
from dps_dist.launch.trial import trial as train_trial
from dps_dist.train.files import CONFIG, SUMMARY
from dps_dist.train.storage import Storage

WORKERS = "--workers-per-trial"
HEARD_S = 2.0  # between two words of a trial, where nobody schedules by them

Changed = Callable[[Folder], None]


def sweep(folder: Folder, concurrent: int | None, changed: Changed) -> None:
    """Run all trials that are not finished; `changed` is called whenever one's state does."""
    config = folder.sweep.config(spaces.ends(folder.sweep.space)[0])
    ray_train.check(config, WORKERS)
    search = _searcher(folder)
    ours = connect()
    try:
        most = concurrency(config.launch, nodes(), concurrent)
        create(folder)
        with folder.locked():
            try:
                _fit(folder, config.launch, most, search, changed)
            finally:
                with suppress(OSError):  # of a full disk, what was met first tells
                    folder.put_back()
    except (TuneError, RayError) as error:  # Tune's own holds what our listener met, a full disk
        raise FailedError(
            f"the sweep cannot go on ({reason_of(error)}): when that is mended, the same command "
            f"with --name {folder.storage.name} --resume does"
        ) from None
    finally:
        if ours:
            ray.shutdown()


def concurrency(launch: Launch, found: list[dict[str, float]], asked: int | None) -> int:
    """How many trials run at once: all that fit, or as many as are asked for."""
    placement(launch, found, WORKERS)
    most = runs_at_once(launch, found)
    if asked is not None and not 1 <= asked <= most:
        raise InputError(
            f"--concurrent is {asked}: the cluster holds {most} trials of {launch.workers} "
            f"worker(s) at once; give 1 to {most}"
        )
    return most if asked is None else asked


def _fit(folder: Folder, launch: Launch, most: int, search: Any, changed: Changed) -> None:
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the runs have their own
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new one prints, however quiet it is told
    os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # of a refused trial
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # it speaks of restoring its own way
    # To tell its own callbacks from ours it imports wandb and MLflow where they are, for seconds
    usage.tag_callbacks = lambda callbacks: False
    asked, alone = folder.sweep, launch.worker_range == (1, 1)
    points = [] if search else _to_run(folder)
    if not points and not search:
        changed(folder)
        return
    url = folder.storage.url
    stopped = {name for name, trial in folder.trials.items() if trial.status == "stopped"}
    placed = None if alone else queue()
    fields, here = recipes.fields_of(asked.recipe), str(Path().absolute())
    every_s = HEARD_S if asked.scheduler == "none" else 0.0

    def one(tried: dict[str, Any]) -> None:
        point = tried.get("point", tried)
        config = for_workers(asked.config(point, fields), here)
        storage = Storage(url) / RUNS / spaces.name(point)
        run = Run(config, storage, not storage.exists(CONFIG), asked.recipe)
        train_trial(run, stopped, placed, every_s)

    filesystem, root = folder.storage.filesystem
    tuner = tune.Tuner(
        tune.with_resources(one, _resources(launch, alone)),
        param_space=_domains(asked) if search else {"point": tune.grid_search(points)},
        tune_config=tune.TuneConfig(
            metric=asked.metric,
            mode=BETTER[asked.metric],
            search_alg=search,
            scheduler=_scheduler(asked),
            num_samples=asked.trials if search else 1,
            max_concurrent_trials=most,
            reuse_actors=alone,
        ),
        run_config=tune.RunConfig(
            name=f"{time.time_ns()}",
            storage_path=f"{root}/tune",
            storage_filesystem=filesystem,
            failure_config=tune.FailureConfig(max_failures=launch.max_failures),
            callbacks=[_Listener(folder, changed, placed)],
            verbose=0,
        ),
    )
    tuner.fit()
    folder.storage.remove("tune")


def _to_run(folder: Folder) -> list[Point]:
    """What is not finished; for a scheduler, which compares, everything: who ended tells again."""
    left = []
    for name, point in {spaces.name(point): point for point in folder.sweep.points()}.items():
        finished = folder.run(name).exists(SUMMARY)
        if finished:
            folder.trials[name] = _finished(folder, point)
        elif folder.trials.get(name, Trial(point)).status != "stopped":
            folder.trials[name] = Trial(point)
        if not finished or folder.sweep.scheduler != "none":
            left.append(point)
    folder.keep()  # also where nothing is left, which nobody else would say
    return left


def _finished(folder: Folder, point: Point) -> Trial:
    """With what went wrong beside it, as with a logger."""
    run = folder.run(spaces.name(point))
    notes = run.read(NOTES).decode().splitlines() if run.exists(NOTES) else []
    return Trial(point, "finished", "; ".join(dict.fromkeys(notes)))


def _resources(launch: Launch, alone: bool) -> dict[str, float]:
    """One worker is the trial itself. Else it only waits for its workers, and must not take from
    them: a sliver of what every head has is no CPU."""
    return needs_of(launch, nodes()) if alone else {"CPU": 0, "node:__internal_head__": 0.001}


def _scheduler(asked: Sweep) -> TrialScheduler | None:
    if asked.scheduler == "none":
        return None
    epochs = max(asked.config(point).train.epochs for point in spaces.ends(asked.space))
    # On our epochs: Tune's own count begins anew when a trial goes on
    return ASHAScheduler(
        time_attr="epoch", max_t=epochs + 1, grace_period=max(1, epochs // 9), reduction_factor=3
    )


def _searcher(folder: Folder) -> Any:
    """Optuna's, which is told first of the points that it chose before."""
    if folder.sweep.search != "optuna":
        return None
    try:
        from dps_dist.launch.distinct import DistinctOptuna
    except ImportError:
        raise InputError(
            "--search is optuna, which is not installed: pip install 'dps_dist[optuna]'"
        ) from None
    known = [trial.point for trial in folder.trials.values()]
    drawn = spaces.draw(folder.sweep.space, folder.sweep.trials)
    return DistinctOptuna(drawn, points_to_evaluate=known or None, seed=len(known))  # draws others


def _domains(asked: Sweep) -> dict[str, Any]:
    kinds = {"uniform": tune.uniform, "loguniform": tune.loguniform}
    domains: dict[str, Any] = {}
    for field, values in asked.space.items():
        if isinstance(values, list):
            domains[field] = tune.choice(values)
        else:
            ((kind, (low, high)),) = values.items()
            domains[field] = (
                tune.randint(low, high + 1) if kind == "randint" else kinds[kind](low, high)
            )
    return domains


class _Listener(tune.Callback):
    """Keeps the sweep's record of its trials, and frees what those held that are gone."""

    def __init__(self, folder: Folder, changed: Changed, placed: Queue | None) -> None:
        self._folder, self._changed, self._placed = folder, changed, placed
        self._held: dict[str, list[dict[str, Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles what it is given into its folder; that copy is never read

    def on_trial_start(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        self._note(trial, Trial(self._point(trial), "running"))

    def on_trial_result(
        self,
        iteration: int,
        trials: list[TuneTrial],
        trial: TuneTrial,
        result: dict[Any, Any],
        **info: Any,
    ) -> None:
        self._changed(self._folder)

    def on_trial_complete(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        point = self._point(trial)
        if refused := (trial.last_result or {}).get("refused"):
            self._note(trial, Trial(point, "failed", refused))
        elif self._folder.run(spaces.name(point)).exists(SUMMARY):
            self._note(trial, _finished(self._folder, point))
        else:
            self._note(trial, Trial(point, "stopped"))

    def on_trial_error(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any
    ) -> None:
        error = trial.get_error()
        reason = reason_of(error) if error is not None else "it ended without a word"
        self._note(trial, Trial(self._point(trial), "failed", reason))

    def _note(self, trial: TuneTrial, state: Trial) -> None:
        name = spaces.name(state.point)
        self._free(trial.trial_id)
        before = self._folder.trials.get(name)
        if before is not None and before.status in ("finished", "stopped"):
            state = replace(before)  # only told again
        self._folder.note(name, state)
        self._changed(self._folder)

    def _free(self, trial_id: str) -> None:
        """Of a trial that ended or begins again: if Tune killed it, its workers are still there."""
        if self._placed is None:
            return
        with suppress(RayError):  # its node may be gone, and then so are theirs
            for of, event in self._placed.get_nowait_batch(self._placed.qsize()):
                self._held.setdefault(of, []).append(event)
        for event in self._held.pop(trial_id, []):
            ray_train.free(event)

    @staticmethod
    def _point(trial: TuneTrial) -> Point:
        point: Point = trial.config.get("point", trial.config)
        return point
