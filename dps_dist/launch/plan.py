"""What a run needs before a cluster is rented: bytes, seconds, memory. `dps plan` prints it.

Arithmetic only; docs/plan.md has the formulas in words. N samples, K numbers a row, W workers.
"""

from dataclasses import dataclass

import torch

from dps_dist import methods, models
from dps_dist.config import Config
from dps_dist.data.hold_out import HOLD_OUT
from dps_dist.errors import InputError
from dps_dist.launch.plan_data import DataSet
from dps_dist.targets import migrate
from dps_dist.train.setup import STORE_SHARE, steps_per_epoch

CHUNK_ROWS = 4096  # ShardedTargets' own
BATCHES_HELD = 5  # FFCV's slots: three batches ahead, the one in use, the one being filled


@dataclass(frozen=True)
class Cluster:
    """bandwidth: Gb/s of a node's link to the others. images_per_s: what one GPU trains."""

    nodes: int
    gpus_per_node: int
    bandwidth: float | None = None
    images_per_s: float | None = None

    def __post_init__(self) -> None:
        for option, count in (("--nodes", self.nodes), ("--gpus-per-node", self.gpus_per_node)):
            if count < 1:
                raise InputError(f"{option} is {count}: give 1 or more")
        for option, rate in (
            ("--bandwidth", self.bandwidth),
            ("--images-per-s", self.images_per_s),
        ):
            if rate is not None and not 0 < rate < float("inf"):
                raise InputError(f"{option} is {rate:g}: give a number above 0")

    @property
    def workers(self) -> int:
        return self.nodes * self.gpus_per_node


# The target store


def row_bytes(K: int) -> int:
    """A float16 a class, and the visits."""
    return 2 * K + 2


def store_bytes(N: int, K: int) -> int:
    """Over the cluster: 2NK + 2N."""
    return N * row_bytes(K)


def capacity(N: int, W: int) -> int:
    """Rows that a worker has room for: its share and the slack."""
    return -(-N // W) + migrate.slack_rows(W)


def held_bytes(N: int, K: int, W: int) -> int:
    """Of a worker: its rows, and 6 bytes a sample and 4 a free row to find them."""
    return capacity(N, W) * row_bytes(K) + 6 * N + 4 * migrate.slack_rows(W)


def exchange_room(N: int, K: int, W: int) -> int:
    """Of a worker while rows move, at most: two rounds, sent and received, and the moves' lists."""
    share = -(-N // W)
    rows_a_round = min(CHUNK_ROWS // 2, share) + W
    return 4 * rows_a_round * row_bytes(K) + 8 * share + 8 * W**2


def moved_bytes(visited: int, K: int, W: int) -> float:
    """That a worker sends an epoch: of the rows it will not visit next, W−1 in W."""
    return visited / W * (1 - 1 / W) * row_bytes(K)


def leaving_bytes(visited: int, K: int, cluster: Cluster) -> float:
    """Of these, what all workers of a node send to other nodes."""
    W, G = cluster.workers, cluster.gpus_per_node
    return G * visited / W * (1 - G / W) * row_bytes(K)


# The model and what is saved of it


@dataclass(frozen=True)
class Weights:
    """Bytes of the parameters, and of the model's state: these and its buffers."""

    parameters: int
    state: int


def weights(config: Config, classes: int) -> Weights:
    """Of the model, built without memory."""
    with torch.device("meta"):
        model = models.build(
            config.model.name, classes, stem=config.model.stem, image_size=config.data.resolution
        )
    parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Weights(parameters, sum(tensor.nbytes for tensor in model.state_dict().values()))


def state_bytes(config: Config, model: Weights) -> int:
    """`state.pt`: the model, a moment or two a weight, and averaged weights."""
    sgd = config.optim.name == "sgd"
    moments = (1 if config.optim.momentum else 0) if sgd else 2
    averaged = model.state if config.optim.ema is not None else 0
    return model.state + moments * model.parameters + averaged


def saved_targets_bytes(N: int, K: int) -> int:
    """In a checkpoint: a row, and the sample's number in 8 bytes."""
    return N * (row_bytes(K) + 8)


def gradient_bytes(model: Weights, nodes: int) -> float:
    """Over a node's link and step: a ring's all-reduce sends all of them twice but for its own."""
    return 2 * model.parameters * (nodes - 1) / nodes


# All together


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds; a second is None where its rate was not given."""

    cluster: Cluster
    data: DataSet
    config: Config
    row: int  # numbers that the method keeps of a sample; 0: none
    model: Weights
    steps: int

    @property
    def visited(self) -> int:
        """Samples an epoch."""
        return min(self.steps * self.config.data.batch_size, self.trained)

    @property
    def trained(self) -> int:
        return self.data.samples - self.config.data.hold_out

    @property
    def evaluated(self) -> int:
        held_out = self.config.evaluate.split == HOLD_OUT
        return self.config.data.hold_out if held_out else self.data.evaluated

    @property
    def held(self) -> int:
        """A worker's part of the store."""
        return held_bytes(self.data.samples, self.row, self.cluster.workers) if self.row else 0

    @property
    def free_gpu_memory(self) -> float:
        """Free bytes from which on the store lives on the GPU (`method.device=auto`)."""
        W = self.cluster.workers
        return -(-self.data.samples // W) * row_bytes(self.row) / STORE_SHARE if self.row else 0

    @property
    def exchanges(self) -> bool:
        return bool(self.row) and self.config.data.shuffle == "global" and self.cluster.workers > 1

    @property
    def moved(self) -> float:
        return moved_bytes(self.visited, self.row, self.cluster.workers) if self.exchanges else 0.0

    @property
    def leaving(self) -> float:
        return leaving_bytes(self.visited, self.row, self.cluster) if self.exchanges else 0.0

    @property
    def gradients(self) -> float:
        """Over a node's link in an epoch."""
        return self.steps * gradient_bytes(self.model, self.cluster.nodes)

    def over_link_s(self, size: float) -> float | None:
        gigabits = self.cluster.bandwidth
        return None if gigabits is None else size / (gigabits * 1e9 / 8)

    @property
    def state(self) -> int:
        return state_bytes(self.config, self.model)

    @property
    def saved_targets(self) -> int:
        return saved_targets_bytes(self.data.samples, self.row) if self.row else 0

    @property
    def checkpoint(self) -> int:
        return self.state + self.saved_targets

    @property
    def kept(self) -> int:
        """Checkpoints that lie on the storage at once: those kept, and one being written."""
        keep = self.config.train.checkpoint
        return keep.keep_last + keep.keep_best + 1

    @property
    def final_targets(self) -> int:
        """With the label, in the smallest type that holds it."""
        label = 1 if self.data.classes <= 256 else 2 if self.data.classes <= 65536 else 4
        return self.saved_targets + (self.data.samples * label if self.row else 0)

    @property
    def storage(self) -> int:
        return self.kept * self.checkpoint + self.final_targets

    @property
    def batch_bytes(self) -> int:
        """Images that a worker's loader holds, a byte a colour."""
        data, views = self.config.data, methods.build(self.config.method).views
        share = -(-data.batch_size // self.cluster.workers)
        return BATCHES_HELD * share * views * 3 * data.resolution**2

    @property
    def host_memory(self) -> int:
        """Of a node, beside its processes and the mapped data: what is copied to be saved, the
        state once, who visits and who holds what, and batches."""
        N, G = self.data.samples, self.cluster.gpus_per_node
        copied = self.saved_targets // self.cluster.workers
        return G * (copied + 6 * N + self.batch_bytes) + self.state

    @property
    def computing_s(self) -> float | None:
        """Of an epoch, if nothing holds the GPUs back."""
        rate = self.cluster.images_per_s
        return None if rate is None else self.visited / (rate * self.cluster.workers)

    @property
    def epoch_s(self) -> float | None:
        """Training, no faster than its gradients travel; the exchange; evaluation."""
        if self.computing_s is None:
            return None
        training = max(self.computing_s, self.over_link_s(self.gradients) or 0.0)
        # A forward pass alone takes less than training does
        evaluation = self.computing_s * self.evaluated / self.visited
        exchange = self.over_link_s(self.leaving) or 0.0
        return training + exchange + evaluation / self.config.evaluate.every_epochs

    @property
    def run_s(self) -> float | None:
        return None if self.epoch_s is None else self.epoch_s * self.config.train.epochs


def plan(config: Config, cluster: Cluster, data: DataSet) -> Plan:
    batch, W = config.data.batch_size, cluster.workers
    if batch < W:
        raise InputError(
            f"--nodes × --gpus-per-node is {W} workers: data.batch_size is only {batch}; "
            "give fewer, or a larger batch"
        )
    if not 0 <= config.data.hold_out < data.samples:
        raise InputError(f"data.hold_out is {config.data.hold_out}: there are {data.samples}")
    steps = steps_per_epoch(config, data.samples)
    if steps < 1:
        trained = data.samples - config.data.hold_out
        raise InputError(
            f"data.batch_size is {batch}: give at most the {trained} samples that are trained on"
        )
    kept = methods.build(config.method).evidence
    row = 0 if kept is None else kept.classes or data.classes
    return Plan(cluster, data, config, row, weights(config, data.classes), steps)
