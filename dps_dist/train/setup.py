"""Everything that a run needs, built from its configuration; `loop.py` then runs it."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dps_dist import methods, models
from dps_dist.config import KD, Config
from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import HOLD_OUT, Split, split
from dps_dist.data.loader import Loader, eval_loader, noisy_labels, train_loader
from dps_dist.data.manifest import Manifest
from dps_dist.data.order import EpochOrder
from dps_dist.errors import InputError
from dps_dist.targets import Dirichlet, ShardedTargets
from dps_dist.train import optim
from dps_dist.train.checkpoint import Writer
from dps_dist.train.manifest import Moment
from dps_dist.train.peers import Peers
from dps_dist.train.recall import Recall
from dps_dist.train.storage import UNFINISHED, Storage
from dps_dist.train.trained import placed, teacher
from dps_dist.train.vitals import Clock, Monitor, nobody
from dps_dist.train.watch import Watch

STORE_SHARE = 0.25  # of a GPU's free memory that the targets may take, if device is auto


Tell = Callable[[dict[str, Any]], None]
"""Hears on rank 0 what happens: {"kind": "start" | "progress" | "epoch" | "note" | "end", …}."""


@dataclass
class Training:
    """A run: its parts, where it is, and what it has measured so far."""

    config: Config
    peers: Peers
    storage: Storage
    tell: Tell
    train_set: Manifest
    labels: NDArray[np.int64]  # of the training samples, noise included
    loader: Loader
    split: Split  # of the training samples, into trained and held out
    eval_set: Manifest
    eval_loader: Loader
    held_out_loader: Loader | None  # of the held-out samples, where a method or TS needs them
    model: models.Classifier
    forward: nn.Module  # the model, or the DDP around it
    method: methods.Method
    targets: ShardedTargets | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    ema: optim.Ema | None
    watch: Watch
    writer: Writer
    at: Moment = field(default_factory=lambda: Moment(epoch=0, position=0, step=0))
    history: list[dict[str, Any]] = field(default_factory=list)  # a row an epoch
    recall: Recall = field(default_factory=Recall)  # the step before
    clock: Clock = field(default_factory=Clock)
    monitor: Monitor = nobody

    def order(self, at: Moment) -> EpochOrder:
        """Who visits which sample when, from that moment to its epoch's end."""
        data, trained = self.config.data, len(self.train_set) - self.config.data.hold_out
        return EpochOrder.of_batch(
            len(self.train_set),
            min(data.batch_size, trained),
            self.peers.world_size,
            seed=self.config.train.seed,
            epoch=at.epoch,
            shuffle=data.shuffle,
            drop_last=data.drop_last,
            position=at.position,
            only=self.split.trained,
        )

    @property
    def images_at_once(self) -> int:
        return images_at_once(self.config)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self.config, len(self.train_set))

    def autocast(self) -> AbstractContextManager[None]:
        if self.config.train.amp == "none":
            return nullcontext()
        dtype = getattr(torch, self.config.train.amp)
        return torch.autocast(self.peers.device.type, dtype)

    def note(self, text: str) -> None:
        if self.peers.rank == 0:
            self.tell({"kind": "note", "text": text})


def build(
    config: Config,
    storage: Storage,
    tell: Tell,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
) -> Training:
    """All parts at the start of training, on every rank; `restore` moves them on. threads: of the
    loader."""
    peers = Peers(device, config.launch.timeout_s)
    check_device(config, peers.device)
    train_set, eval_set = read_sets(config)
    threads = config.data.threads or threads
    method = methods.build(config.method)
    check_method(config, method)
    loader = train_loader(
        config, train_set, device=peers.device, threads=threads, views=method.views
    )
    torch.manual_seed(config.train.seed)
    model = build_model(config, train_set.num_classes, peers.device)
    steps = steps_per_epoch(config, len(train_set))
    attempt = peers.tell(secrets.token_hex(4)) or ""  # names this start of the run
    _check_shared(storage, peers, attempt)
    optimizer = optim.optimizer(config.optim, model)
    if method.teachers:
        method.teacher = teacher(method.teachers, config, train_set, peers.device)
    evaluated = eval_loader(config, eval_set, device=peers.device, threads=threads)
    held_out = None
    if method.adapts or config.evaluate.temperature:
        held_out = evaluated
        if eval_set is not train_set:
            held_out = eval_loader(config, train_set, device=peers.device, threads=threads)
    training = Training(
        config=config,
        peers=peers,
        storage=storage,
        tell=tell,
        train_set=train_set,
        labels=noisy_labels(config.data, train_set),
        loader=loader,
        split=split(len(train_set), config.data.hold_out, config.data.hold_out_seed),
        eval_set=eval_set,
        eval_loader=evaluated,
        held_out_loader=held_out,
        model=model,
        forward=_distributed(model, config, peers),
        method=method,
        targets=_targets(config, method, len(train_set), train_set.num_classes, peers),
        optimizer=optimizer,
        schedule=optim.schedule(config.optim, optimizer, steps, config.train.epochs),
        scaler=torch.amp.GradScaler(peers.device.type, enabled=config.train.amp == "float16"),
        ema=optim.Ema(model, config.optim.ema) if config.optim.ema else None,
        watch=Watch(peers, config.train.checkpoint.every_minutes),
        writer=Writer(storage, config.train.checkpoint, attempt, peers.new_group()),
    )
    if config.train.amp == "bfloat16" and peers.device.type == "cpu" and not cpu_has_bfloat16():
        training.note(
            "train.amp is bfloat16, which this CPU can only imitate, many times slower than "
            "float32: --set train.amp=none is faster here"
        )
    return training


def cpu_has_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 here (x86 needs AVX-512); else torch's own loops do."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _check_shared(storage: Storage, peers: Peers, attempt: str) -> None:
    """Refuse a folder that is another one on each node: what one saved the others would miss."""
    mark = f".{attempt}{UNFINISHED}"  # what a kill leaves of it goes at the next start
    if peers.rank == 0:
        storage.write(mark, b"")
    peers.barrier()
    seen = peers.gather([storage.exists(mark)]).ravel()
    if peers.rank == 0:
        storage.remove(mark)
    if not seen.all():
        raise InputError(
            f"--out: {storage} of rank 0 is not seen by rank {int((seen == 0).argmax())}: give a "
            "folder that all nodes share, or a URL such as s3://bucket/runs"
        )


def read_sets(config: Config) -> tuple[Manifest, Manifest]:
    """The manifests of the training and the evaluation split, if they fit each other."""
    train_set = manifests.read(config.data.path, "train")
    if config.evaluate.split == HOLD_OUT:
        eval_set = train_set
    else:
        eval_set = manifests.read(config.data.path, config.evaluate.split)
    if train_set.class_names != eval_set.class_names:
        raise InputError(
            f"{eval_set.beton} has {eval_set.num_classes} classes and {train_set.beton} "
            f"{train_set.num_classes}, or other names for them: prepare both from one data set"
        )
    manifests.check_labelled(train_set, train_set.labels, f"data.path is {config.data.path}")
    if eval_set is not train_set:
        given = f"evaluate.split is {config.evaluate.split}"
        manifests.check_labelled(eval_set, eval_set.clean_labels, given)
    if config.data.hold_out:  # of these the true labels are asked for
        given = f"data.hold_out is {config.data.hold_out}"
        manifests.check_labelled(train_set, train_set.clean_labels, given)
    if train_set.num_classes < 2:
        raise InputError(
            f"{train_set.beton} has one class, {train_set.class_names[0]}: there is nothing to "
            "learn; give data.path with at least two"
        )
    held_out = config.data.hold_out
    if held_out >= len(train_set):
        raise InputError(
            f"data.hold_out is {held_out}: {train_set.beton} holds {len(train_set)} images; "
            "give less"
        )
    if steps_per_epoch(config, len(train_set)) < 1:
        kept_out = f", {held_out} of them held out" if held_out else ""
        raise InputError(
            f"data.batch_size is {config.data.batch_size}: {train_set.beton} holds "
            f"{len(train_set)} images{kept_out}; give at most that many, or set "
            "data.drop_last=false"
        )
    return train_set, eval_set


def check_method(config: Config, method: methods.Method) -> None:
    """Refuse what the method cannot do, or lacks."""
    name, held_out = config.method.name, config.data.hold_out
    if config.augment.mix != "none" and method.mixes == "none":
        raise InputError(
            f"augment.mix is {config.augment.mix}: the method {name} has no rule for mixed images; "
            "set it to none"
        )
    if not held_out and (method.adapts or config.evaluate.temperature):
        why = f"the method {name}" if method.adapts else "evaluate.temperature"
        raise InputError(
            f"data.hold_out is 0: {why} needs held-out samples; set it, to 5000 for CIFAR"
        )
    if not held_out and config.evaluate.split == HOLD_OUT:
        raise InputError("evaluate.split is hold_out and data.hold_out 0: set data.hold_out")
    if isinstance(config.method, KD) and not method.teachers:
        raise InputError(
            "method.teachers is empty: give the folders of trained runs, as in "
            "--set 'method.teachers=[runs/a, runs/b, runs/c]'"
        )


def steps_per_epoch(config: Config, num_samples: int) -> int:
    num_samples -= config.data.hold_out
    whole, rest = divmod(num_samples, config.data.batch_size)
    return whole if config.data.drop_last or not rest else whole + 1


def images_at_once(config: Config) -> int:
    """What a worker passes through the model at a time: its share when none is missing."""
    most = config.launch.worker_range[1]
    return config.data.max_per_worker or -(-config.data.batch_size // most)


def fewest_at_once(config: Config) -> int:
    """The fewest images that batch norm sees in a pass, with any number of workers that may run.

    `Batch.parts` divides a worker's share; synchronised batch norm sees a part of every worker.
    """
    least, most = config.launch.worker_range
    found = []
    for workers in range(least, most + 1):
        share = -(-config.data.batch_size // workers)
        part = share // -(-share // images_at_once(config))
        found.append(part * workers if config.train.sync_batchnorm else part)
    return min(found)


def check_device(config: Config, device: torch.device) -> None:
    """Refuse what this device cannot do."""
    amp, on_gpu = config.train.amp, device.type == "cuda"
    if amp == "float16" and not on_gpu:
        raise InputError(
            f"train.amp is float16: {device.type} has no arithmetic for it; set bfloat16 or none"
        )
    if amp == "bfloat16" and on_gpu and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise InputError(f"train.amp is bfloat16: {name} lacks it; set train.amp=float16")
    if config.train.sync_batchnorm and not on_gpu:
        raise InputError("train.sync_batchnorm is true: torch has it on GPUs only; set it to false")
    if getattr(config.method, "device", "auto") == "cuda" and not on_gpu:
        raise InputError("method.device is cuda: this worker has no GPU; set auto or cpu")


def build_model(config: Config, num_classes: int, device: torch.device) -> models.Classifier:
    model = models.build(
        config.model.name,
        num_classes,
        stem=config.model.stem,
        weights=config.model.weights,
        image_size=config.data.resolution,
    )
    model = placed(model, config, device)
    if config.train.sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    if config.train.compile:
        model.compile()  # in place: the names in its state stay
    return model


def _distributed(model: models.Classifier, config: Config, peers: Peers) -> nn.Module:
    """The model whose gradients are averaged over the ranks."""
    if peers.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[peers.device] if peers.device.type == "cuda" else None,
        # Training does not read the running statistics of batch norm: rank 0's are the model's,
        # and evaluation hands them out
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )
    # DDP sorts its buckets anew after the first step, and with them the order in which three or
    # more ranks are added up. That step is made here, so that a resumed run adds like any other.
    with _buffers_kept(model), torch.compiler.set_stance("force_eager"):
        side = config.data.resolution
        nothing = torch.zeros(2, 3, side, side, device=peers.device)
        wrapped(nothing).sum().backward()
    model.zero_grad()
    return wrapped


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    kept = [buffer.clone() for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)


def _targets(
    config: Config, method: methods.Method, num_samples: int, num_classes: int, peers: Peers
) -> ShardedTargets | None:
    if method.evidence is None:
        return None
    kept = method.evidence
    prior = Dirichlet(kept.classes or num_classes, kept.gamma, kept.c or 1.0, kept.epsilon)
    device = store_device(getattr(config.method, "device", "auto"), num_samples, prior, peers)
    exchange: Literal["bulk", "stream"] = getattr(config.method, "exchange", "bulk")
    group = peers.new_group(device)
    return ShardedTargets(num_samples, prior, group, device=device, exchange=exchange)


def store_device(asked: str, num_samples: int, prior: Dirichlet, peers: Peers) -> torch.device:
    """Where this rank's targets live: all ranks decide alike."""
    if asked == "cpu" or peers.device.type != "cuda":
        return torch.device("cpu")
    share = 2 * (prior.num_classes + 1) * -(-num_samples // peers.world_size)
    fits = share <= STORE_SHARE * torch.cuda.mem_get_info(peers.device)[0]
    everywhere = bool(peers.gather([fits]).all())
    return peers.device if asked == "cuda" or everywhere else torch.device("cpu")
