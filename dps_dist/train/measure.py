"""What an epoch ends with: figures of the evaluation split, and of the targets."""

from contextlib import nullcontext

import numpy as np
import torch

from dps_dist.data.order import EpochOrder
from dps_dist.evaluate.metrics import Tally
from dps_dist.train.setup import Training

SAMPLED_TARGETS = 65_536  # enough for figures to 0.2%; reading all of ImageNet's takes seconds
CHUNK_ENTRIES = 1 << 22  # of target rows that are read at once
ENTROPY_UNITS = 1 << 30  # a nat; the sum over SAMPLED_TARGETS stays exact in float64


@torch.no_grad()
def evaluate(training: Training) -> dict[str, float]:
    """Accuracy, top-5, NLL and ECE, the same on any number of ranks: padding weighs nothing."""
    config, peers, model = training.config, training.peers, training.model
    peers.follow(model.buffers())
    if training.ema is not None:  # which has copied them after each step
        peers.follow(training.ema.buffers.values())
    order = EpochOrder.of_batch(
        len(training.eval_set),
        config.evaluate.batch_size or training.images_at_once * peers.world_size,
        peers.world_size,
        shuffle="none",
        drop_last=False,
    )
    tally = Tally(device=peers.device)
    model.eval()
    averaged = training.ema.applied(model) if training.ema is not None else nullcontext()
    with averaged, training.autocast():
        for batch in training.eval_loader.epoch(order, peers.rank):
            tally.add(model(batch.images), batch.labels, batch.weight)
    model.train()
    tally.sums = peers.sum(tally.sums)
    return tally.figures()


@torch.no_grad()
def target_figures(training: Training) -> dict[str, float]:
    """What the targets have become, over all samples or a fixed part of many.

    target_entropy: mean entropy of the targets, in nats. label_agreement: share of samples whose
    evidence is greatest at their label. recovered: share of the mislabelled samples (known where
    noise was injected) whose target is greatest at the true class.
    """
    targets = training.targets
    if targets is None:
        return {}
    stride = -(-targets.num_samples // SAMPLED_TARGETS)
    held = targets.held().cpu()
    held = held[held % stride == 0]
    sums = torch.zeros(5, dtype=torch.float64)
    for samples in torch.split(held, max(1, CHUNK_ENTRIES // targets.prior.num_classes)):
        given = torch.from_numpy(training.labels[samples.numpy()])
        true = torch.from_numpy(np.asarray(training.train_set.clean_labels)[samples.numpy()])
        index, labels = samples.to(targets.device), given.to(targets.device)
        target = targets.read(index, labels)
        agrees = (targets.evidence(index).argmax(-1) == labels).sum()
        # Whole numbers add up to the same wherever each sample is; a resumed run moves some
        entropy = torch.special.entr(target.double()).sum(-1).mul(ENTROPY_UNITS).round().sum()
        wrong = given != true
        right = (target.argmax(-1).cpu() == true) & wrong
        counts = (len(samples), float(entropy), float(agrees), int(wrong.sum()), int(right.sum()))
        sums += torch.tensor(counts, dtype=torch.float64)
    count, entropy_sum, agree, wrong_count, righted = training.peers.sum(sums).tolist()
    entropy = entropy_sum / ENTROPY_UNITS / count
    figures = {"target_entropy": entropy, "label_agreement": agree / count}
    if wrong_count:
        figures["recovered"] = righted / wrong_count
    return figures
