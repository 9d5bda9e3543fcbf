"""The Ray cluster that a run is on: joined, or started here; and what its nodes can hold."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.train.v2.api.config import ScalingConfig
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dps_dist.config import Launch
from dps_dist.errors import FailedError, InputError
from dps_dist.launch import tokens


def connect() -> bool:
    """Join the cluster of this job or machine, or start Ray here; False if that was done before."""
    _quiet()
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    # `log_to_driver` does not stop the raylet's paragraph on every worker that dies
    ray._private.worker._worker_logs_enabled = False
    at = address()
    if at is None:
        try:
            with _our_sigterm():
                ray.init(address="local", include_dashboard=False, **quiet)
        except Exception as error:  # Ray's own is a plain one where it has waited in vain
            raise FailedError(
                f"Ray does not start on this machine ({reason_of(error)}): is it very busy, or is "
                f"{tempfile.gettempdir()} full or not to be written to? `dps doctor` looks"
            ) from None
        return True
    tokens.check(at.removeprefix("ray://"))
    try:
        with _our_sigterm():
            ray.init(address=at, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"the Ray cluster at {at} refuses ({reason_of(error)}): see its logs, "
            "or train on this machine with RAY_ADDRESS=local"
        ) from None
    return True


@contextmanager
def _our_sigterm() -> Iterator[None]:
    """Ray puts its own handler in place of this process's, and aborts with a dump of the stack."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def address() -> str | None:
    """Where the cluster is: of this job, or the one that `ray start` made on this machine."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address == "local":
        return None
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
        noted = Path(folder, "ray", "ray_current_cluster")  # by `ray start`
        address = noted.read_text().strip() if noted.exists() else ""
        return address if address and _answers(address) else None
    if not _answers(address):
        raise InputError(
            f"RAY_ADDRESS is {address}: nothing answers there; start the cluster, "
            "or train on this machine with RAY_ADDRESS=local"
        )
    return address


def _answers(address: str) -> bool:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


def nodes() -> list[dict[str, float]]:
    """The resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def queue() -> Queue:
    """On this process's node: elsewhere it would be lost with that node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})


def placement(
    launch: Launch, nodes: list[dict[str, float]], option: str = "--workers"
) -> ScalingConfig:
    """How Ray is to place the workers; refused at once if the nodes cannot hold the least.
    option: what gives their number."""
    least, most = launch.worker_range
    needs, found = needs_of(launch, nodes), room(launch, nodes)
    if found < least:
        wanted = " and ".join(f"{need:g} {kind}" for kind, need in needs.items())
        have = ", ".join(f"{sum(node.get(kind, 0) for node in nodes):g} {kind}" for kind in needs)
        raise InputError(
            f"{option} is {launch.workers}: {len(nodes)} node(s) with {have} can place {found} "
            f"workers of {wanted}; give at most {found}, or change launch.cpus_per_worker, "
            "launch.gpus_per_worker, launch.placement"
        )
    return ScalingConfig(
        num_workers=least if least == most else (least, most),
        use_gpu="GPU" in needs,
        resources_per_worker=needs,
        placement_strategy=launch.placement,
        elastic_resize_monitor_interval_s=launch.resize_interval_s,
    )


def needs_of(launch: Launch, nodes: list[dict[str, float]]) -> dict[str, float]:
    """What a worker takes: of GPUs, what is asked for, else one where there are any."""
    gpus = launch.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
    return {"CPU": launch.cpus_per_worker, **({"GPU": gpus} if gpus else {})}


def room(launch: Launch, nodes: list[dict[str, float]]) -> int:
    """How many workers of one run the nodes can hold."""
    each = _each(launch, nodes)
    if launch.placement == "STRICT_SPREAD":
        return sum(min(count, 1) for count in each)
    if launch.placement == "STRICT_PACK":
        return max(each, default=0)
    return sum(each)


def runs_at_once(launch: Launch, nodes: list[dict[str, float]]) -> int:
    """How many runs of `launch.workers` the nodes can hold, of a range with the most; one fits."""
    each, workers = _each(launch, nodes), launch.worker_range[1]
    if launch.placement == "STRICT_PACK":
        return sum(count // workers for count in each) or 1
    if launch.placement == "STRICT_SPREAD":  # a node takes at most one worker of each run
        fits = (n for n in range(1, sum(each) + 1) if sum(min(c, n) for c in each) >= n * workers)
        return max(fits, default=1)
    return sum(each) // workers or 1


def _each(launch: Launch, nodes: list[dict[str, float]]) -> list[int]:
    """How many workers each node can hold."""
    needs = needs_of(launch, nodes).items()
    return [int(min(node.get(kind, 0) // need for kind, need in needs)) for node in nodes]


def reason_of(error: BaseException) -> str:
    """The last line that says something: of a traceback, what was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _quiet() -> None:
    """Ray's own messages stay in its log files; its settings stay the user's where given."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
