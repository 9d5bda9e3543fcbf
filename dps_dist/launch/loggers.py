"""Where a run's figures go beside its folder: TensorBoard always, MLflow and W&B if asked.

All hear the same rows, under the keys of metrics.jsonl, at the step that they belong to.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from math import isfinite
from typing import Any

from dps_dist.config import Config
from dps_dist.errors import InputError
from dps_dist.launch.runs import Run, flat

PROJECT = "dps_dist"


class Logger(ABC):
    """Hears of a run's start (or restart, at a step), of each epoch, and of its end."""

    @abstractmethod
    def start(self, run: Run, step: int) -> None: ...

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Logger):
    """Event files in RUN/tensorboard, of runs on a disk; what came after `step` is replaced."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: Run, step: int) -> None:
        self.close()
        if run.storage.local is not None:
            from tensorboardX import SummaryWriter

            folder = run.storage.local / "tensorboard"
            # A file of its own, also where two starts fall into one second
            own = f".{step:08d}"
            self._writer = SummaryWriter(str(folder), purge_step=step + 1, filename_suffix=own)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writer is not None:
            for key, value in figures.items():
                self._writer.add_scalar(key, value, step)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Logger):
    """A run of the experiment `dps_dist`, where MLFLOW_TRACKING_URI says; resumed by its name."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def start(self, run: Run, step: int) -> None:
        from mlflow import MlflowClient

        client = self._client = MlflowClient()
        found = client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else client.create_experiment(PROJECT)
        name = run.storage.name
        same = f"attributes.run_name = '{name}' and tags.folder = '{run.storage}'"
        runs = client.search_runs([experiment], same, max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        tags = {"folder": str(run.storage)}
        self._id = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        for key, value in flat(run.config):
            client.log_param(self._id, key, value)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for key, value in figures.items():
            self._client.log_metric(self._id, key, value, step=step)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)
            self._client = None


class WandB(Logger):
    """A run of the project `dps_dist`, as WANDB_MODE and its like say; resumed by its id."""

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: Run, step: int) -> None:
        import wandb

        self.close()
        self._run = wandb.init(
            project=PROJECT,
            name=run.storage.name,
            id=run.storage.name,
            dir=str(run.storage.local) if run.storage.local else None,
            config=dict(flat(run.config)),
            resume="allow",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


LOGGERS: Mapping[str, tuple[type[Logger], str]] = {  # and the package that each needs
    "tensorboard": (TensorBoard, "tensorboardX"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


class Loggers:
    """All loggers of a run, fed with the events that the display shows, too."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._all = [LOGGERS[name][0]() for name in dict.fromkeys(names(run.config))]

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "start":
            for logger in self._all:
                logger.start(self._run, event["step"])
        elif event["kind"] == "epoch":
            figures = dict(finite(event))
            for logger in self._all:
                logger.log(event["step"], figures)

    def close(self) -> None:
        for logger in self._all:
            logger.close()


def names(config: Config) -> tuple[str, ...]:
    return ("tensorboard", *config.launch.loggers)


def check(config: Config) -> None:
    """Refuse loggers whose package is not there."""
    for name in names(config):
        package = LOGGERS[name][1]
        if find_spec(package) is None:
            raise InputError(
                f"launch.loggers holds {name}: its package is not installed; "
                f"`pip install 'dps_dist[{name}]'`"
            )


def finite(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is a finite number in an epoch's row, but for the step itself."""
    for key, value in event.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and isfinite(value) and key != "step":
            yield key, value
