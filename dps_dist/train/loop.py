"""The whole of training: run → epoch → step, to be read from top to bottom.

`launch/ray_train.py` calls `run` on every worker; so may anyone under torchrun.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dps_dist.config import Config
from dps_dist.data.loader import Batch, resolution_at
from dps_dist.train import optim
from dps_dist.train.manifest import Moment
from dps_dist.train.measure import evaluate, held_out_logits, target_figures
from dps_dist.train.recall import Recall, shown, to_recall
from dps_dist.train.setup import Tell, Training, build
from dps_dist.train.state import finish, record, restore, save
from dps_dist.train.storage import Storage
from dps_dist.train.vitals import Monitor, TimedTargets, nobody, vitals
from dps_dist.train.watch import NonFiniteLossError


def run(
    config: Config,
    storage: Storage,
    tell: Tell,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    monitor: Monitor = nobody,
) -> dict[str, Any]:
    """Train from the newest checkpoint in the storage, or from the start; the summary's figures.

    A call of all ranks of the default process group. threads: of the loader. monitor: hears of
    this rank at every look, and after every epoch.
    """
    training = build(config, storage, tell, device=device, threads=threads)
    training.monitor = monitor
    restore(training)
    try:
        while training.at.epoch < config.train.epochs:
            epoch(training)
    except NonFiniteLossError:
        training.writer.wait()  # what it saves is from before, and to be kept
        raise
    return finish(training)


def epoch(training: Training) -> None:
    """From where training is to the epoch's end: steps, a row of figures, a checkpoint."""
    config, peers, at, clock = training.config, training.peers, training.at, training.clock
    order = training.order(at)
    started = time.monotonic()
    training.method.begin_epoch(at.epoch, config.train.epochs)
    clock.lap("other")
    if training.targets is not None:
        training.targets.begin_epoch(order)
    clock.lap("exchange")
    training.model.train()
    resolution = resolution_at(config.data, at.epoch)
    if not training.recall.fits(resolution):
        training.recall = Recall()
    batches = training.loader.epoch(order, peers.rank, resolution)
    for number, batch in enumerate(batches, start=1):
        clock.lap("data")
        after = order.position_after(number)
        step(training, batch, samples=after - training.at.position)
        training.at = Moment(at.epoch, after, at.step + number)
        save_is_due = _save_is_due(training)
        look = training.watch.step_done(now=save_is_due)  # what is not finite is not saved
        clock.count(len(batch.index) - batch.padding)
        clock.lap("compute")
        if look is not None:
            _tell_progress(
                training, look.loss, (after - at.position) / (time.monotonic() - started)
            )
            if number < order.steps and (save_is_due or look.save_is_due):
                save(training)
                clock.lap("checkpoint")
    last = training.watch.look()
    seconds = time.monotonic() - started
    clock.lap("compute")
    if training.method.adapts:
        training.method.adapt(*held_out_logits(training))

    visited = training.at.position - at.position
    training.at = Moment(at.epoch + 1, 0, training.at.step)
    figures = {
        "epoch": training.at.epoch,
        "step": training.at.step,
        "lr": training.schedule.get_last_lr()[0],
        **training.watch.end_epoch(),
        **_measured(training),
        "images_per_s": visited / seconds,
        "seconds": seconds,
        "workers": peers.world_size,
    }
    record(training, figures)
    clock.lap("evaluate")
    by_epochs = training.at.epoch % config.train.checkpoint.every_epochs == 0
    if by_epochs or _save_is_due(training) or last.save_is_due or _is_last(training):
        save(training)
        clock.lap("checkpoint")
    training.monitor(vitals(training, last.loss))


def step(training: Training, batch: Batch, samples: int) -> None:
    """Forward, loss and targets, backward, optimizer. samples: of this step, over all ranks."""
    config, at = training.config, training.at
    parts = shown(training, batch, at)
    recall = Recall(at)
    targets = TimedTargets.of(training)
    for number, (part, seen) in enumerate(parts, start=1):
        with _gradients_stay_here(training.forward, is_last=number == len(parts)):
            with training.autocast():
                losses, logits = training.method.loss(training.forward, seen, targets)
            # DDP takes the mean over the ranks; the loss is that over the step's samples
            loss = (losses * part.weight).sum() * (training.peers.world_size / samples)
            torch.autograd.backward(training.scaler.scale(loss))
        training.watch.add(at.step + 1, part, losses.detach(), logits.detach())
        if training.method.recalls:
            recall.parts.append(to_recall(seen, logits))
    training.recall = recall
    training.scaler.unscale_(training.optimizer)
    optim.clip(training.model.parameters(), config.optim.clip_norm)
    optim.set_momentum(config.optim, training.optimizer, training.method.momentum)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.optimizer.zero_grad()
    training.schedule.step()
    if training.ema is not None:
        training.ema.update(training.model)


def _gradients_stay_here(forward: torch.nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Before the last part of a step the ranks add up their own gradients."""
    if is_last or not isinstance(forward, DistributedDataParallel):
        return nullcontext()
    return forward.no_sync()


def _save_is_due(training: Training) -> bool:
    """By its steps; by its minutes, a look says."""
    every = training.config.train.checkpoint.every_steps
    return every > 0 and training.at.step % every == 0


def _is_last(training: Training) -> bool:
    return training.at.epoch == training.config.train.epochs


def _measured(training: Training) -> dict[str, float]:
    every = training.config.evaluate.every_epochs
    if training.at.epoch % every == 0 or _is_last(training):
        return {**evaluate(training), **target_figures(training)}
    return {}


def _tell_progress(training: Training, loss: float, images_per_s: float) -> None:
    training.monitor(vitals(training, loss))
    if training.peers.rank == 0:
        batch_size = training.config.data.batch_size
        training.tell(
            {
                "kind": "progress",
                "epoch": training.at.epoch,
                "step": -(-training.at.position // batch_size),
                "steps": training.steps_per_epoch,
                "loss": loss,
                "images_per_s": images_per_s,
            }
        )
