"""What of a run is not in the process that started it: `work` on each worker, `Placed` in Ray
Train's controller, which imports this file and so not what only training needs.
"""

import errno
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.util.queue import Queue

from dps_dist.config import Config
from dps_dist.errors import FailedError, InputError, LostRunError, PeerFailedError
from dps_dist.train.storage import Storage

# What starting again does not mend: no room, no right to write
HOPELESS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


@dataclass(frozen=True)
class Job:
    """What travels to the workers."""

    config: str  # JSON
    storage: str
    events: Queue


def work(settings: dict[str, Any]) -> None:
    """What runs on each worker."""
    from dps_dist.launch.telemetry import RankTelemetry
    from dps_dist.train.loop import run

    job: Job = settings["job"]
    config, storage = Config.model_validate_json(job.config), Storage(job.storage)
    rank = ray.train.get_context().get_world_rank()
    telemetry = RankTelemetry(storage.name, rank)

    def tell(event: dict[str, Any]) -> None:
        telemetry.hear(event)
        told = job.events.actor.put_nowait.remote(event)  # type: ignore[attr-defined]
        if event["kind"] in ("end", "refused"):  # after these Ray ends this process
            ray.get(told)

    if rank == 0:
        tell({"kind": "phase", "text": "loading"})
    threads = max(1, int(config.launch.cpus_per_worker))
    torch.set_num_threads(threads)
    try:
        device = ray.train.torch.get_device()
        run(config, storage, tell, device=device, threads=threads, monitor=telemetry.see)
    except Exception as error:
        if is_hopeless(error):
            why = type(error).__name__
            tell({"kind": "refused", "text": sentence(error), "error": why})
        raise
    finally:
        telemetry.close()


class Placed(WorkerGroupCallback):
    """Tells, from the controller, where the workers are: who stops a run must free that."""

    def __init__(self, events: Queue) -> None:
        self._events = events

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        controller = ray.get_runtime_context().current_actor
        state = worker_group.get_worker_group_state()
        group = state.placement_group_handle.placement_group
        told = {"kind": "placed", "controller": controller, "group": group}
        self._events.actor.put_nowait.remote(told)  # type: ignore[attr-defined]


def is_hopeless(error: Exception) -> bool:
    """Whether starting again would end the same way."""
    if isinstance(error, OSError):
        return error.errno in HOPELESS
    if isinstance(error, PeerFailedError | LostRunError):  # a peer's own error tells
        return False
    return isinstance(error, InputError | FailedError)


def sentence(error: Exception) -> str:
    """What is said of a hopeless one."""
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror}; make room or choose another --out; "
        "what was saved before is kept, and --resume continues from there"
    )
