"""A sweep's folder: what is tried (`sweep.yaml`), how far it is (`trials.json`), a run a trial.

    OUT/NAME/sweep.yaml      recipe, space, seeds, scheduler: what --resume must be asked with
             trials.json     trial → its point, status and, of a failed one, the reason
             runs/TRIAL/     a run's folder, as `dps train` writes it
             results.parquet, index.html, figures/

The runs themselves hold the figures; nothing here is needed to read one of them.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import yaml

from dps_dist import recipes
from dps_dist.config import Config
from dps_dist.config.sweep import BETTER, RUNS, SEED, SWEEP, TRIALS
from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import HOLD_OUT
from dps_dist.errors import InputError
from dps_dist.launch import runs
from dps_dist.launch import space as spaces
from dps_dist.launch.space import Point, Space
from dps_dist.train.storage import Storage

Status = Literal["waiting", "running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Sweep:
    """What is tried and how; every trial is scored on samples held out of the training set."""

    recipe: str
    space: Space
    settings: tuple[str, ...] = ()
    seeds: int = 1
    hold_out: int = 0  # 0: the recipe's, or a tenth of the training set
    workers: str = "1"  # of a trial
    search: Literal["grid", "random", "optuna"] = "grid"
    trials: int = 0  # of random and optuna
    scheduler: Literal["none", "asha"] = "none"
    metric: str = "accuracy"

    def config(self, point: Point, fields: dict[str, Any] | None = None) -> Config:
        """Of a trial. fields: the recipe's, where its file is not."""
        asked = [*self.settings, f"launch.workers={self.workers}", *spaces.settings(point)]
        held_out = [f"data.hold_out={self.hold_out}"] if self.hold_out else []
        settings = [*asked, *held_out, f"evaluate.split={HOLD_OUT}"]
        fields = recipes.fields_of(self.recipe) if fields is None else fields
        return recipes.resolve(fields, settings, where=f"recipe {self.recipe}")

    def points(self) -> list[Point]:
        """All trials of a grid or a random search: seeds run slowest, so that a sweep that is cut
        short has every cell."""
        cells = (
            spaces.grid(self.space)
            if self.search == "grid"
            else spaces.draw(self.space, self.trials)
        )
        if SEED in self.space:
            return cells
        return [{**cell, SEED: seed} for seed in range(self.seeds) for cell in cells]


def checked(sweep: Sweep) -> Sweep:
    """With the held-out samples settled; refused if any trial would be."""
    spaces.check(sweep.space, "the space")
    for name in sweep.space:
        if name.startswith("launch.") or name in ("data.hold_out", "evaluate.split"):
            raise InputError(f"the space: {name} is the same for all trials; leave it out")
    if any(one.startswith("launch.workers=") for one in sweep.settings):
        raise InputError("--set launch.workers: give --workers-per-trial instead")
    if sweep.metric not in BETTER:
        raise InputError(f"--metric is {sweep.metric}: give one of {', '.join(BETTER)}")
    if sweep.search != "grid" and sweep.trials < 1:
        raise InputError(f"--trials is {sweep.trials}: --search {sweep.search} needs at least 1")
    if sweep.seeds < 1:
        raise InputError(f"--seeds is {sweep.seeds}: give at least 1")
    if SEED in sweep.space and sweep.seeds > 1:
        raise InputError(f"--seeds is {sweep.seeds} and {SEED} is in the space: give one of them")
    if sweep.search == "optuna" and sweep.seeds > 1:
        raise InputError(f"--seeds is {sweep.seeds}: --search optuna tries each point once")
    tried = spaces.grid(sweep.space) if sweep.search == "grid" else _drawn(sweep)
    first = replace(sweep, hold_out=1).config(spaces.ends(sweep.space)[0])
    hold_out = sweep.hold_out or recipes.load(sweep.recipe, sweep.settings).data.hold_out
    if not hold_out:
        hold_out = len(manifests.read(first.data.path, "train")) // 10
    settled = replace(sweep, hold_out=hold_out)
    fields = recipes.fields_of(sweep.recipe)
    for point in tried:
        settled.config(point, fields)
    return settled


def _drawn(sweep: Sweep) -> list[Point]:
    """Both ends of every range and what a random search draws, as far as anybody can look ahead;
    there must be so many."""
    known = dict(runs.flat(recipes.load(sweep.recipe, sweep.settings)))
    for name, values in sweep.space.items():
        if isinstance(values, dict) and type(known.get(name)) is int and "randint" not in values:
            raise InputError(
                f"the space: {name} is {values}: it is a whole number; give a list of them, or "
                f"{{randint: {next(iter(values.values()))}}}"
            )
    return [*spaces.ends(sweep.space), *spaces.draw(sweep.space, sweep.trials)]


@dataclass
class Trial:
    point: Point
    status: Status = "waiting"
    reason: str = ""


@dataclass
class Folder:
    """A sweep's folder, and the trials as they stand."""

    sweep: Sweep
    storage: Storage
    trials: dict[str, Trial] = field(default_factory=dict)

    def run(self, name: str) -> Storage:
        return self.storage / RUNS / name

    def note(self, name: str, trial: Trial) -> None:
        """Keep a trial's new state, at once."""
        self.trials[name] = trial
        self.keep()

    def put_back(self) -> None:
        """What was running when the sweep was stopped waits again."""
        for trial in self.trials.values():
            if trial.status == "running":
                trial.status = "waiting"
        self.keep()

    def keep(self) -> None:
        text = json.dumps({name: asdict(one) for name, one in self.trials.items()}, indent=1)
        self.storage.write(TRIALS, text.encode())

    def count(self, *statuses: Status) -> int:
        return sum(trial.status in statuses for trial in self.trials.values())

    def locked(self) -> AbstractContextManager[None]:
        return runs.locked(self.storage, SWEEP, "run")


def open_folder(sweep: Sweep, out: str, name: str, resume: bool) -> Folder:
    """A new sweep's folder, or with `resume` the one that it was begun in."""
    storage = runs.folder(out, name)
    if not resume:
        if storage.names():
            raise InputError(
                f"{storage} exists: choose another --name, or continue it with --resume"
            )
        return Folder(sweep, storage)
    if not storage.exists(SWEEP):
        raise InputError(f"{storage} is not a sweep, it has no {SWEEP}: check --out and --name")
    before = _held(storage, SWEEP, yaml.safe_load)
    kept = _held(storage, TRIALS, json.loads) if storage.exists(TRIALS) else {}
    now = _plain(sweep)
    differ = [
        "the recipe has changed" if key == "fields" else f"{key} is {now[key]!r} and was {was!r}"
        for key in now
        if now[key] != (was := before.get(key))
    ]
    if differ:
        raise InputError(
            f"{storage} is another sweep ({'; '.join(differ)}): repeat the command that began it "
            "with --resume, or choose another --name"
        )
    try:
        trials = {name: Trial(**trial) for name, trial in kept.items()}
    except TypeError:
        raise _damaged(storage, TRIALS) from None
    return Folder(sweep, storage, trials)


def _held(storage: Storage, file: str, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """The mapping in a file of the sweep."""
    try:
        content = parse(storage.read(file))
    except (yaml.YAMLError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(storage, file)
    return content


def _damaged(storage: Storage, file: str) -> InputError:
    return InputError(
        f"{storage / file} is damaged: restore it, or begin the sweep with another --name"
    )


def create(folder: Folder) -> None:
    if folder.storage.local is not None:
        folder.storage.local.mkdir(parents=True, exist_ok=True)
    if not folder.storage.exists(SWEEP):
        text = yaml.safe_dump(_plain(folder.sweep), sort_keys=False, allow_unicode=True)
        folder.storage.write(SWEEP, text.encode())


def _plain(sweep: Sweep) -> dict[str, Any]:
    """As it is kept: with what the recipe was, which is a file that may change."""
    known = {**asdict(sweep), "fields": recipes.fields_of(sweep.recipe)}
    plain: dict[str, Any] = json.loads(json.dumps(known, default=str))
    return plain
