"""Ray Train, as whoever starts a run sees it: checks, places the workers, on each of which
`worker.py` calls `train.loop.run`, and brings what they tell to the terminal.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import ScalingConfig
from ray.util.placement_group import remove_placement_group
from ray.util.queue import Empty, Queue

from dps_dist import methods, models
from dps_dist.config import KD, Config
from dps_dist.data import loader
from dps_dist.errors import FailedError, InputError, LostRunError
from dps_dist.launch import cluster, loggers
from dps_dist.launch.cluster import reason_of
from dps_dist.launch.loggers import Loggers
from dps_dist.launch.runs import Run
from dps_dist.launch.telemetry import RunTelemetry
from dps_dist.launch.worker import Job, Placed, work
from dps_dist.train.setup import check_device, check_method, fewest_at_once, read_sets
from dps_dist.train.storage import Storage
from dps_dist.train.trained import read_config

POLL_S = 0.1
ENDING_S = 5.0
SILENCE_S = 120.0  # then it is said that nothing is heard
ERRORS = "errors.log"

Listener = Callable[[dict[str, Any]], None]


class Display(Protocol):
    """Where events are shown."""

    def show(self, event: dict[str, Any], /) -> None: ...

    def tick(self) -> None: ...


def train(run: Run, display: Display) -> dict[str, Any]:
    """Run to the end on the cluster, or on this machine where there is none; the summary."""
    check(run.config)
    display.show({"kind": "phase", "text": "starting Ray"})
    ours, created = cluster.connect(), False
    try:
        scaling = cluster.placement(run.config.launch, cluster.nodes())
        if not scaling.use_gpu:
            check_device(run.config, torch.device("cpu"))
        if run.is_new:
            run.create()
            created = True
        with run.locked():
            display.show({"kind": "phase", "text": f"placing {run.config.launch.workers} workers"})
            return _fit(run, scaling, display)
    except InputError:
        if ours:
            ray.shutdown()  # before the folder goes, those who write there
        if created:
            run.forget()
        raise
    except TrainingFailedError as error:
        run.storage.write(ERRORS, str(error).encode())
        raise FailedError(
            f"the run failed too often, at last with {reason_of(error)}: {run.storage / ERRORS} "
            "has it all; --resume continues from the last checkpoint"
        ) from None
    except RayError as error:
        raise LostRunError(
            f"Ray lost the run ({reason_of(error)}): --resume continues from the last checkpoint"
        ) from None
    finally:
        if ours:
            ray.shutdown()


def check(config: Config, option: str = "--workers") -> None:
    """Refuse, before anything is started, what can be seen from here to be wrong.
    option: what gives the number of workers."""
    least, most = config.launch.worker_range
    batch = config.data.batch_size
    if most > batch:
        raise InputError(f"{option} is {config.launch.workers}: data.batch_size is only {batch}")
    if least == most and batch % most:
        fit = [n for n in range(1, min(batch, 4 * most) + 1) if batch % n == 0]
        raise InputError(
            f"{option} is {most}: data.batch_size, {batch}, is not a multiple of it; "
            f"give one of {', '.join(map(str, fit))}, or a range such as 1:{most}"
        )
    gpus = config.launch.gpus_per_worker
    if gpus is not None and gpus > 1 and gpus % 1:
        raise InputError(
            f"launch.gpus_per_worker is {gpus:g}: Ray gives out whole GPUs, or a part of one; give "
            f"{int(gpus)} or {int(gpus) + 1}"
        )
    if gpus is not None and 0 < gpus < 1 < most:
        raise InputError(
            f"launch.gpus_per_worker is {gpus:g} and {option} {config.launch.workers}: workers of "
            "one run cannot share a GPU, as NCCL refuses; give launch.gpus_per_worker=1 or "
            f"{option} 1"
        )
    if config.data.shuffle == "shard" and least != most:
        raise InputError(
            f"{option} is {config.launch.workers} and data.shuffle is shard, which ties samples "
            "to workers: give one number of workers, or set data.shuffle=global"
        )
    check_method(config, methods.build(config.method))
    loggers.check(config)
    if isinstance(config.method, KD) and not cluster.address():
        for folder in config.method.teachers:
            read_config(Storage(folder))
    if Path(config.data.path).exists() or not cluster.address():
        train_set, _ = read_sets(config)  # on a cluster the data may be on the workers only
        loader.check(config, train_set)
        _try_model(config, train_set.num_classes, option)


def _try_model(config: Config, num_classes: int, option: str) -> None:
    """Build it, and show it an image of every size that it will see: shapes without memory."""
    data = config.data
    smallest = data.progressive.resolution if data.progressive else data.resolution
    sizes = {data.resolution, data.eval_resolution or data.resolution, smallest}
    with torch.device("meta"):
        model = models.build(
            config.model.name, num_classes, stem=config.model.stem, image_size=data.resolution
        ).eval()
        for side in sizes:
            try:
                model(torch.empty(1, 3, side, side))
            except (AssertionError, RuntimeError) as error:
                raise InputError(
                    f"model.name is {config.model.name}: it cannot take images of {side}×{side} "
                    f"pixels ({reason_of(error)}); change data.resolution, data.eval_resolution or "
                    "data.progressive"
                ) from None
        if fewest_at_once(config) == 1:
            try:
                model.train()(torch.empty(1, 3, smallest, smallest))
            except ValueError:  # of batch norm, which has one value a channel to normalise
                raise InputError(
                    f"model.name is {config.model.name}: its batch norm cannot learn from a single "
                    f"image, which is what data.batch_size {data.batch_size}, data.max_per_worker "
                    f"{data.max_per_worker or 'none'} and {option} {config.launch.workers} leave "
                    "at a time; give larger batches or fewer workers"
                ) from None


def for_workers(config: Config, here: str | None = None) -> Config:
    """With absolute paths, from `here` or the current folder: workers run in another one."""

    def absolute(path: str) -> str:
        return path if "://" in path else str(Path(here or "", path).absolute())

    data = config.data.model_copy(update={"path": absolute(config.data.path)})
    model, method = config.model, config.method
    if model.weights is not None and Path(absolute(model.weights)).is_file():
        model = model.model_copy(update={"weights": absolute(model.weights)})
    if isinstance(method, KD):
        folders = tuple(absolute(folder) for folder in method.teachers)
        method = method.model_copy(update={"teachers": folders})
    return config.model_copy(update={"data": data, "model": model, "method": method})


def _fit(run: Run, scaling: ScalingConfig, display: Display) -> dict[str, Any]:
    events = cluster.queue()
    config = for_workers(run.config)
    filesystem, root = run.storage.parent.filesystem
    trainer = TorchTrainer(
        work,
        train_loop_config={"job": Job(config.model_dump_json(), run.storage.url, events)},
        torch_config=TorchConfig(timeout_s=math.ceil(config.launch.timeout_s)),
        scaling_config=scaling,
        run_config=RunConfig(
            name=run.storage.name,
            storage_path=root,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=config.launch.max_failures),
            callbacks=[Placed(events)],  # type: ignore[list-item]  # internal ones may be given
        ),
    )

    def note(text: str) -> None:
        display.show({"kind": "note", "text": text})

    with Loggers(run, note) as listeners, RunTelemetry(run.storage.name) as telemetry:
        return _follow(trainer, events, display, (listeners.hear, telemetry.hear))


def free(placed: dict[str, Any]) -> None:
    """End a run's controller and workers, also if the process that started them is gone."""
    ray.kill(placed["controller"])
    remove_placement_group(placed["group"])


def _follow(
    trainer: TorchTrainer, events: Queue, display: Display, listeners: Sequence[Listener]
) -> dict[str, Any]:
    """Show and log events until the run ends."""
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    # In a thread of its own, so that Ctrl-C and a refusal end this process at once: Ray then ends
    # the workers, and whatever they had committed is whole.
    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    summary: dict[str, Any] | None = None
    placed: dict[str, Any] | None = None
    heard = time.monotonic()
    try:
        while True:
            running = thread.is_alive()
            found = _waiting(events)
            heard = time.monotonic() if found else heard
            if time.monotonic() - heard > SILENCE_S:
                text = "nothing heard for two minutes: are workers placed? `ray status` says"
                display.show({"kind": "note", "text": text})
                heard = math.inf
            for event in found:
                display.show(event)
                for hear in listeners:
                    hear(event)
                if event["kind"] == "refused":
                    raise InputError(event["text"])
                if event["kind"] == "placed":
                    placed = event
                if event["kind"] == "end":
                    summary = {key: value for key, value in event.items() if key != "kind"}
            display.tick()
            if not running:
                break
            thread.join(POLL_S)
    except BaseException:
        if placed is not None:  # Ray's threads are not to be found at work when the process ends
            free(placed)
            thread.join(ENDING_S)
        raise
    if failure:
        raise failure[0]
    assert summary is not None, "a run that ends says so"
    return summary


def _waiting(events: Queue) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        count = events.qsize()
        if count:
            found = events.get_nowait_batch(count)
    except (Empty, RayError):
        pass
    return found
