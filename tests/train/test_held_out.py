"""Held-out samples in training: never visited, evaluated alike on any number of ranks."""

import numpy as np
import pytest
import torch

from dps_dist.data.hold_out import split
from dps_dist.evaluate.calibration import fit_temperature
from dps_dist.train.loop import epoch
from dps_dist.train.measure import evaluate, held_out_logits
from tests.evaluate.samples import figures_of
from tests.train.runs import saved_targets, start, trained

H = 150


def test_held_out_samples_are_never_visited(ranks, settings, tmp_path):
    config = settings(f"data.hold_out={H}", "data.drop_last=false", "evaluate.split=hold_out")
    trained(ranks, config, tmp_path, 2)
    visits = saved_targets(tmp_path)["visits"]
    held_out = split(1200, H, 0).held_out
    assert (visits[held_out] == 0).all() and (np.delete(visits, held_out) == 2).all()


def after_an_epoch(config, folder):
    training = start(config, folder)
    epoch(training)
    logits, labels = held_out_logits(training)
    return evaluate(training), logits, labels, training.model.state_dict()


def test_held_out_figures_do_not_depend_on_the_ranks(ranks, settings, tmp_path, digits):
    """Nor on how they are divided: they are those of all logits at once."""
    more = [f"data.hold_out={H}", "evaluate.split=hold_out", "evaluate.temperature=true"]
    config = settings(*more, "method.name=baseline", "train.epochs=1", "launch.workers=1")
    weights = None
    for world_size in (1, 2, 3):
        folder = str(tmp_path / str(world_size))
        for found in ranks.run(at_weights, config, folder, weights, world_size=world_size):
            figures, logits, labels, weights = found
            assert logits.shape == (H, 10)
            whole = figures_of(logits, labels)
            scaled = figures_of(logits / figures["temperature"], labels)
            assert figures["temperature"] == pytest.approx(fit_temperature(logits, labels))
            for key in ("accuracy", "nll", "ece"):
                assert figures[key] == pytest.approx(whole[key], rel=1e-6)
            assert figures["nll_ts"] == pytest.approx(scaled["nll"], rel=1e-6)
            assert figures["ece_ts"] == pytest.approx(scaled["ece"], rel=1e-6)
            assert figures["nll_ts"] <= figures["nll"] + 1e-9


def at_weights(config, folder, weights):
    """The figures after an epoch, or at the weights that others reached."""
    if weights is None:
        return after_an_epoch(config, folder)
    training = start(config, folder)
    training.model.load_state_dict(weights)
    logits, labels = held_out_logits(training)
    return evaluate(training), logits, labels, weights


def test_held_out_labels_are_clean(ranks, settings, tmp_path, train_digits):
    noise = ["data.noise.kind=symmetric", "data.noise.rate=0.9"]
    config = settings(f"data.hold_out={H}", *noise, "method.name=adafocal", "train.epochs=1")
    labels = ranks.run(after_an_epoch, config, str(tmp_path), world_size=1)[0][2]
    held_out = split(1200, H, 0).held_out
    assert torch.equal(labels, torch.from_numpy(train_digits.clean_labels[held_out]))
