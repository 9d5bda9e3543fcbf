"""What an epoch ends with: figures of the evaluation split, and of the targets."""

from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from dps_dist.data.hold_out import Samples
from dps_dist.data.loader import Batch, Loader
from dps_dist.data.order import EpochOrder
from dps_dist.evaluate.calibration import fit_temperature
from dps_dist.evaluate.metrics import Tally
from dps_dist.train.setup import Training

SAMPLED_TARGETS = 65_536  # enough for figures to 0.2%; reading all of ImageNet's takes seconds
CHUNK_ENTRIES = 1 << 22  # of target rows that are read at once
UNITS = 1 << 30  # a nat, or a weight of 1; sums over SAMPLED_TARGETS stay exact in float64


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """Accuracy, top-5, NLL and ECE, the same on any number of ranks: padding weighs nothing.

    With evaluate.temperature also NLL and ECE of the logits divided by the temperature that fits
    the held-out samples best.
    """
    config, peers = training.config, training.peers
    temperature = _temperature(training) if config.evaluate.temperature else None
    tally, scaled = Tally(device=peers.device), Tally(device=peers.device)
    only = training.split.held_out if training.eval_set is training.train_set else None
    for batch, logits in _predictions(training, training.eval_loader, only):
        tally.add(logits, batch.labels, batch.weight)
        if temperature is not None:
            scaled.add(logits.float() / temperature, batch.labels, batch.weight)
    tally.sums = peers.sum(tally.sums)
    if temperature is None:
        return tally.figures()
    scaled.sums = peers.sum(scaled.sums)
    after = scaled.figures()
    own = {"temperature": temperature, "nll_ts": after["nll"], "ece_ts": after["ece"]}
    return {**tally.figures(), **own}


def _temperature(training: Training) -> float:
    """That fits the held-out samples: found by rank 0, which tells the others."""
    peers = training.peers
    logits, labels = held_out_logits(training, everywhere=False)
    found = fit_temperature(logits, labels) if peers.rank == 0 else 0.0
    return float(peers.gather([found])[0, 0])


@torch.no_grad()
def held_out_logits(training: Training, everywhere: bool = True) -> tuple[Tensor, Tensor]:
    """The logits float32 [H, K] of all held-out samples, and their labels, on every rank; or on
    rank 0 alone, and none on the others."""
    assert training.held_out_loader is not None
    held_out, rows, samples = training.split.held_out, [], []
    for batch, logits in _predictions(training, training.held_out_loader, held_out):
        real = len(batch.index) - batch.padding
        rows.append(logits[:real].float())
        samples.append(batch.index[:real])
    index = training.peers.rows(torch.cat(samples), everywhere)
    logits = training.peers.rows(torch.cat(rows), everywhere)
    order = index.argsort()  # the same on any number of ranks
    labels = np.asarray(training.train_set.clean_labels)[index[order].numpy()]
    return logits[order], torch.from_numpy(labels)


def _predictions(
    training: Training, loader: Loader, only: Samples | None
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's share of a split in batches, and the logits of the (averaged) model."""
    config, peers, model = training.config, training.peers, training.model
    peers.follow(model.buffers())
    if training.ema is not None:  # which has copied them after each step
        peers.follow(training.ema.buffers.values())
    batch_size = config.evaluate.batch_size or training.images_at_once * peers.world_size
    order = EpochOrder.of_batch(
        len(loader),
        min(batch_size, len(loader) if only is None else len(only)),
        peers.world_size,
        shuffle="none",
        drop_last=False,
        only=only,
    )
    model.eval()
    averaged = training.ema.applied(model) if training.ema is not None else nullcontext()
    try:
        with averaged:
            for batch in loader.epoch(order, peers.rank):
                with training.autocast():
                    logits = model(batch.images)
                yield batch, logits
    finally:
        model.train()


@torch.no_grad()
def target_figures(training: Training) -> dict[str, float]:
    """What the targets have become, over all trained samples or a fixed part of many.

    target_entropy: mean entropy of the targets, in nats. label_agreement: share of visited samples
    whose evidence is greatest at their label. prior_weight: mean share of the prior in the targets,
    where they have one. recovered: share of the mislabelled samples (known where noise was
    injected) whose target is greatest at the true class.

    Before its first visit a sample has no evidence, and no target where there is no prior.
    """
    targets, kept = training.targets, training.method.evidence
    if targets is None or kept is None or kept.classes is not None:
        return {}
    trained = training.split.trained
    if trained is None:
        trained = np.arange(targets.num_samples, dtype=np.int32)
    sampled = trained[:: -(-len(trained) // SAMPLED_TARGETS)]
    held = targets.held().cpu()
    held = held[torch.isin(held, torch.tensor(sampled))]
    sums = torch.zeros(7, dtype=torch.float64)
    for samples in torch.split(held, max(1, CHUNK_ENTRIES // targets.prior.num_classes)):
        given = torch.from_numpy(training.labels[samples.numpy()])
        true = torch.from_numpy(np.asarray(training.train_set.clean_labels)[samples.numpy()])
        index, labels = samples.to(targets.device), given.to(targets.device)
        evidence, visits = targets.evidence_and_visits(index)
        seen = visits > 0
        agrees = ((evidence.argmax(-1) == labels) & seen).sum()
        target, there = evidence, seen
        if kept.c is not None:
            target, there = targets.read(index, labels), torch.ones_like(seen)
        # Whole numbers add up to the same wherever each sample is; a resumed run moves some
        entropy = torch.special.entr(target.double()).sum(-1).mul(UNITS).round().sum()
        prior = targets.prior.prior_weight(visits).mul(UNITS).round().sum()
        wrong = (given != true) & there.cpu()
        right = (target.argmax(-1).cpu() == true) & wrong
        counts = there.sum(), seen.sum(), wrong.sum()
        added = (*counts, entropy, agrees, prior, right.sum())
        sums += torch.tensor([float(value) for value in added], dtype=torch.float64)
    count, visited, mislabelled, *found = training.peers.sum(sums).tolist()
    entropies, agree, priors, righted = found
    figures = {}
    if count:
        figures["target_entropy"] = entropies / UNITS / count
    if visited:
        figures["label_agreement"] = agree / visited
    if kept.c is not None:
        figures["prior_weight"] = priors / UNITS / count
    if mislabelled:
        figures["recovered"] = righted / mislabelled
    return figures
