"""Where a run's figures go beside its folder: TensorBoard always, MLflow and W&B if asked.

All hear the same rows, under the keys of metrics.jsonl, at the step that they belong to.
"""

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from math import isfinite
from typing import Any, Self

from dps_dist.config import Config
from dps_dist.errors import InputError
from dps_dist.launch.runs import Run, flat
from dps_dist.train.storage import without_secrets

MOST_SAID = 200  # characters of an error
MOST_PARAMS = 100  # that MLflow takes at once; of metrics, 1000
PROJECT, TAG = "dps_dist", "dps_dist_run"


class Logger(ABC):
    """Hears of a run's start (or restart, at a step), of each epoch, and of its end."""

    @abstractmethod
    def start(self, run: Run, step: int) -> None: ...

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    @abstractmethod
    def close(self, failed: bool = False) -> None: ...


class TensorBoard(Logger):
    """Event files in RUN/tensorboard, of runs on a disk; what came after `step` is replaced.

    By the file's writer and not `SummaryWriter`, whose thread dies of a full disk without a word:
    then nobody empties its queue, and who puts into it waits for ever.
    """

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, run: Run, step: int) -> None:
        self.close()
        if run.storage.local is not None:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import SessionLog

            folder = run.storage.local / "tensorboard"
            folder.mkdir(parents=True, exist_ok=True)
            # A file of its own, also where two starts fall into one second
            self._writer = EventsWriter(str(folder / "events"), f".{step:08d}")
            self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._writer is not None:
            from tensorboardX.proto.summary_pb2 import Summary

            values = [Summary.Value(tag=key, simple_value=figures[key]) for key in figures]
            self._write(step, summary=Summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Logger):
    """A run of the experiment `dps_dist`, where MLFLOW_TRACKING_URI says; resumed by its tag.

    One request for many values: whoever feeds the display waits for each.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def start(self, run: Run, step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient()
        found = client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else client.create_experiment(PROJECT)
        own = identity(run)
        runs = client.search_runs([experiment], f"tags.{TAG} = '{own}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        tags = {TAG: own, "folder": str(run.storage)}
        made = client.create_run(experiment, run_name=run.storage.name, tags=tags)
        self._id = made.info.run_id
        params = [Param(key, str(value)) for key, value in flat(run.config)]
        for k in range(0, len(params), MOST_PARAMS):
            client.log_batch(self._id, params=params[k : k + MOST_PARAMS])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(key, value, now, step) for key, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, failed: bool = False) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
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
            id=identity(run),
            dir=str(run.storage.local) if run.storage.local else None,
            config=dict(flat(run.config)),
            resume="allow",
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


LOGGERS: Mapping[str, tuple[type[Logger], str]] = {  # and the package that each needs
    "tensorboard": (TensorBoard, "tensorboardX"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (WandB, "wandb"),
}


class Loggers:
    """All loggers of a run, fed with the events that the display shows, too.

    The run outlives them: one that fails is noted and left out. It has tried for long enough, as
    MLflow does for minutes, in which nobody hears what the workers tell.
    """

    def __init__(self, run: Run, note: Callable[[str], None]) -> None:
        self._run, self._note = run, note
        self._all = {name: LOGGERS[name][0]() for name in names(run.config)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._each(lambda logger: logger.close(failed=kind is not None))

    def hear(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "start":
            self._each(lambda logger: logger.start(self._run, event["step"]))
        elif event["kind"] == "epoch":
            figures = dict(finite(event))
            self._each(lambda logger: logger.log(event["step"], figures))

    def _each(self, do: Callable[[Logger], None]) -> None:
        for name, logger in list(self._all.items()):
            try:
                do(logger)
            except Exception as error:  # of a server, a network, another package: any
                del self._all[name]
                self._note(f"{name} cannot log this run ({_said(error)}): it goes on without")


def _said(error: Exception) -> str:
    """The first line, or what there is room for, without the password of a server's address."""
    line = (str(error).splitlines() or [repr(error)])[0]
    return without_secrets(line)[:MOST_SAID]


def identity(run: Run) -> str:
    """Its name, and a number that tells its folder from others with a run of that name."""
    return f"{run.storage.name}-{zlib.crc32(run.storage.url.encode()):08x}"


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
