"""Training on real processes: a run learns, and ends with the same bits if it is killed between.

One set of three processes serves all tests, the first one or two of them where a run has fewer.
"""

import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, top_k_accuracy_score
from torch.nn import functional as F

from dps_dist import models
from dps_dist.data import hold_out
from dps_dist.data.loader import Batch, noisy_labels
from dps_dist.data.order import EpochOrder
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError
from dps_dist.targets import Dirichlet, LocalTargets
from dps_dist.train.files import read_metrics
from dps_dist.train.loop import epoch, run, step
from dps_dist.train.manifest import complete, newest_whole
from dps_dist.train.measure import evaluate, target_figures
from dps_dist.train.setup import build, fewest_at_once, images_at_once
from dps_dist.train.state import save
from dps_dist.train.storage import Storage
from dps_dist.train.vitals import PARTS, Clock
from tests.spawn import RankError, Ranks
from tests.train.runs import (
    ALL_KEPT,
    assert_same_end,
    final_state,
    ignore,
    killed_after,
    metrics,
    saved_targets,
    start,
    train,
    trained,
    without_times,
)

EVERYTHING = [
    "augment.mix=cutmix",
    "data.max_per_worker=9",
    "data.drop_last=false",
    "optim.name=sgd",
    "optim.schedule=cosine",
    "optim.warmup_epochs=0.5",
    "optim.lr=0.1",
    "optim.clip_norm=1.0",
    "optim.ema=0.9",
]


# ---- learning


def by_hand(config, labels, folder):
    """Two epochs of plain torch in one process; DPS's targets as the paper's recursion, float64."""
    loader = start(config, folder).loader
    torch.manual_seed(config.train.seed)
    model = models.build("small_cnn", 10).to(memory_format=torch.channels_last)
    chosen = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    dps = config.method.name == "dps"
    y = np.eye(10)[labels]
    total = np.full(len(labels), config.method.c if dps else 1.0)
    losses, right = [], []
    for number in range(2):
        order = EpochOrder(len(labels), 64, seed=config.train.seed, epoch=number)
        losses.append([])
        right.append([])
        for batch in loader.epoch(order):
            index = batch.index.numpy()
            logits = model(batch.images)
            target = torch.tensor(y[index], dtype=torch.float32)
            loss = -(target * F.log_softmax(logits, -1)).sum(-1)
            if dps:
                p = torch.softmax(logits.detach().double(), -1).numpy()
                w = 1 / (config.method.gamma * total[index, None] + 1)
                y[index] = (1 - w) * y[index] + w * p
                total[index] = config.method.gamma * total[index] + 1
            chosen.zero_grad()
            loss.mean().backward()
            chosen.step()
            losses[-1] += loss.tolist()
            right[-1] += (logits.argmax(-1).numpy() == labels[index]).tolist()
    return [np.mean(of) for of in losses], [np.mean(of) for of in right], y, model.state_dict()


@pytest.mark.parametrize("method", ["baseline", "dps"])
def test_is_what_a_loop_by_hand_is(ranks, settings, train_digits, tmp_path, method):
    """train_loss, train_accuracy, weights and targets; c=2 lets the evidence count. The steps are
    small: large ones make much of the last bit, on each CPU in another way."""
    own = ["method.gamma=0.9", "method.c=2"] if method == "dps" else []
    sgd = ["optim.name=sgd", "optim.lr=0.002", "optim.schedule=constant", "launch.workers=1"]
    config = settings(f"method.name={method}", *own, *sgd)
    trained(ranks, config, tmp_path)
    hand = ranks.run(by_hand, config, train_digits.labels, str(tmp_path / "hand"), world_size=1)
    losses, right, y, weights = hand[0]
    rows = metrics(tmp_path)
    np.testing.assert_allclose([row["train_loss"] for row in rows], losses, rtol=1e-5)
    np.testing.assert_allclose([row["train_accuracy"] for row in rows], right, atol=2e-3)
    found = final_state(tmp_path)["model"]
    atol = 1e-4 if method == "dps" else 1e-5  # evidence is kept in 16 bits
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=atol, atol=atol, msg=name)
    if method == "dps":
        store = LocalTargets(len(train_digits), Dirichlet(10, 0.9, 2.0))
        store.load(tmp_path / "targets")
        everyone = torch.arange(len(train_digits))
        targets = store.read(everyone, torch.from_numpy(train_digits.labels))
        np.testing.assert_allclose(targets.numpy(), y, atol=1e-3)


# ---- killed and resumed


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("more", "steps", "kills"),
    [([], 18, (18, 25, 36)), (EVERYTHING, 19, (25,))],
    ids=["plain", "everything"],
)
@pytest.mark.parametrize("method", ["baseline", "dps"])
def test_a_resumed_run_ends_as_one_that_was_not_killed(
    ranks, settings, tmp_path, method, more, steps, kills, world_size
):
    """From a checkpoint at an epoch's end, from one in mid-epoch, from the very last one."""
    every = ["train.checkpoint.every_steps=5", ALL_KEPT]
    config = settings(f"method.name={method}", *more, *every)
    whole = tmp_path / "whole"
    trained(ranks, config, whole, world_size)
    saved = {found.moment.step for found in complete(Storage(whole))}
    assert saved == {*range(5, 2 * steps, 5), steps, 2 * steps}
    for number in kills:
        killed = killed_after(whole, number, tmp_path / f"killed after {number}")
        summary = trained(ranks, config, killed, world_size)
        assert_same_end(killed, whole)
        assert json.loads((killed / "summary.json").read_text()) == summary


def test_steps_ask_for_a_checkpoint_at_an_epochs_end_too(ranks, settings, tmp_path):
    """18 steps an epoch: the first epoch's end is due by its steps, by its number it is not."""
    every = ["train.checkpoint.every_steps=18", "train.checkpoint.every_epochs=10", ALL_KEPT]
    trained(ranks, settings("train.epochs=3", *every), tmp_path, 1)
    saved = [(found.moment.step, found.moment.epoch) for found in complete(Storage(tmp_path))]
    assert sorted(saved) == [(18, 1), (36, 2), (54, 3)]


def killed_in(config, folder, after):
    """`run`, until rank 0 hears of a step behind `after` and is killed."""

    def tell(event):
        if event["kind"] == "progress" and event["step"] > after:
            os.kill(os.getpid(), signal.SIGKILL)

    run(config, Storage(folder), tell, threads=1)


def run_through(config, folder):
    return run(config, Storage(folder), ignore, threads=1)


def test_a_run_that_the_kernel_killed_ends_as_one_that_was_not(ranks, settings, tmp_path):
    """By SIGKILL, in processes of its own, while the writer and the streamed targets are busy."""
    every = ["train.checkpoint.every_steps=3", "data.batch_size=16", "train.epochs=1"]
    config = settings("method.exchange=stream", *every)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with Ranks(2, timeout=200) as two, pytest.raises(RankError):
        two.run(killed_in, config, str(killed), 30)
    left = newest_whole(Storage(killed), pytest.fail)
    assert left is not None and 0 < left.moment.position <= 16 * 33
    ranks.run(run_through, config, str(killed), world_size=2)
    trained(ranks, config, whole, 2)
    assert_same_end(killed, whole)


def begun(config, folder):
    """A run that is left after an epoch."""
    training = start(config, folder)
    epoch(training)
    training.writer.wait()


def test_other_ranks_go_on_in_an_object_store_as_on_a_disk(ranks, settings, s3, tmp_path):
    """There each brings what it loads: the targets that it takes lie in two files of three."""
    rows = []
    for folder in (str(tmp_path), s3("goes-on")):
        ranks.run(begun, settings(), folder, world_size=3)
        ranks.run(train, settings(), folder, world_size=2)
        rows.append([without_times(row) for row in read_metrics(Storage(folder))])
    assert len(rows[0]) == 2 and rows[0] == rows[1]


def order_of_a_save(config, folder):
    """What a save does, in order."""
    training, done = start(config, folder), []
    epoch(training)
    for owner, name in ((training.writer, "wait"), (training.targets, "snapshot")):
        method = getattr(owner, name)
        setattr(owner, name, lambda name=name, method=method: (done.append(name), method())[1])
    save(training)
    training.writer.wait()
    return done


def test_a_save_waits_for_the_one_before_and_then_copies(ranks, settings, tmp_path):
    """Or slow storage would have memory hold two copies."""
    (done,) = ranks.run(order_of_a_save, settings("train.epochs=1"), str(tmp_path), world_size=1)
    assert done[:2] == ["wait", "snapshot"]


def test_saves_by_minutes_too(ranks, settings, tmp_path):
    """Every look then finds one due."""
    config = settings("train.checkpoint.every_minutes=1e-6", ALL_KEPT, "train.epochs=1")
    trained(ranks, config, tmp_path, 2)
    moments = [found.moment for found in complete(Storage(tmp_path))]
    assert any(moment.position for moment in moments)
    assert all(moment.position == 64 * moment.step for moment in moments if moment.epoch == 0)


def test_saves_by_minutes_where_an_epoch_is_one_step(ranks, settings, tmp_path):
    minutes = ["train.checkpoint.every_minutes=1e-6", "train.checkpoint.every_epochs=10", ALL_KEPT]
    trained(ranks, settings("data.batch_size=1200", "train.epochs=3", *minutes), tmp_path)
    assert [found.moment.epoch for found in complete(Storage(tmp_path))] == [3, 2, 1]


# ---- visits


def resumed_elsewhere(ranks, config, folder, legs):
    """Train with one number of ranks up to a step, then with another. legs: (ranks, step)."""
    for number, (world_size, until) in enumerate(legs):
        trained(ranks, config, folder, world_size)
        if until is not None:
            killed = folder.with_name(f"{folder.name} {number}")
            folder = killed_after(folder, until, killed)
    return folder


@pytest.mark.parametrize("drop_last", ["true", "false"])
@pytest.mark.parametrize(
    "legs",
    [[(2, None)], [(1, 10), (3, 25), (2, None)], [(3, 15), (1, None)]],
    ids=["2", "1 3 2", "3 1"],
)
def test_every_sample_is_visited_once_an_epoch(ranks, settings, tmp_path, legs, drop_last):
    """Also if the number of ranks changes in mid-epoch."""
    every = ["train.checkpoint.every_steps=5", ALL_KEPT, f"data.drop_last={drop_last}"]
    folder = resumed_elsewhere(ranks, settings(*every), tmp_path / "run", legs)
    visits = saved_targets(folder)["visits"]
    if drop_last == "false":
        assert (visits == 2).all()
    else:
        assert visits.sum() == 2 * 18 * 64 and visits.max() == 2
    row = metrics(folder)[-1]
    assert (row["epoch"], row["step"]) == (2, 36 if drop_last == "true" else 38)
    samples = 1152 if drop_last == "true" else 1200
    right = row["train_accuracy"] * samples  # sums of the ranks before are in it
    assert right == pytest.approx(round(right), abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulation_does_not_change_the_visits(ranks, settings, tmp_path, world_size):
    config = settings("data.max_per_worker=5", "data.drop_last=false", "train.epochs=1")
    trained(ranks, config, tmp_path, world_size)
    assert (saved_targets(tmp_path)["visits"] == 1).all()


def test_half_of_a_mixed_batch_is_visited(ranks, settings, tmp_path):
    trained(ranks, settings("augment.mix=cutmix", "train.epochs=1"), tmp_path, 2)
    saved = saved_targets(tmp_path)
    assert saved["visits"].sum() == 18 * 2 * 16
    agrees = decoded(saved["evidence"]).argmax(1) == saved["label"]
    assert metrics(tmp_path)[-1]["label_agreement"] == np.mean(agrees[saved["visits"] > 0])


def test_streamed_targets_are_the_same(ranks, settings, tmp_path):
    every = ["train.checkpoint.every_steps=7", "train.epochs=3", "data.drop_last=false"]
    for exchange in ("bulk", "stream"):
        config = settings(f"method.exchange={exchange}", *every)
        trained(ranks, config, tmp_path / exchange, 2)
    assert_same_end(tmp_path / "stream", tmp_path / "bulk")


# ---- a step


def batch_of(rows, padding=0):
    index = torch.arange(rows)
    index[rows - padding :] = -1
    images = torch.arange(rows, dtype=torch.float32).view(-1, 1, 1, 1)
    weight = (index >= 0).float()
    return Batch(images, torch.arange(rows), index, weight, (images + 100,), padding)


@pytest.mark.parametrize(
    ("rows", "padding", "limit", "sizes"),
    [
        (10, 0, 10, [10]),
        (10, 0, 4, [3, 3, 4]),
        (10, 0, 1, [1] * 10),
        (10, 3, 10, [7]),
        (10, 3, 5, [3, 4]),
        (10, 8, 10, [2]),
        (10, 9, 10, [2]),
        (10, 10, 4, [2, 2, 2]),  # as many parts on every rank, with two rows each
        (10, 8, 4, [2, 2, 2]),
        (10, 5, 4, [2, 2, 2]),
        (10, 10, 10, [2]),
        (10, 10, 1, [1] * 10),
        (1, 0, 9, [1]),
        (1, 1, 9, [1]),
    ],
)
def test_a_batch_in_parts(rows, padding, limit, sizes):
    batch = batch_of(rows, padding)
    parts = batch.parts(limit)
    assert [len(part.index) for part in parts] == sizes
    for field in ("images", "labels", "index", "weight"):
        joined = torch.cat([getattr(part, field) for part in parts])
        assert torch.equal(joined, getattr(batch, field)[: sum(sizes)])
    views = torch.cat([part.other_views[0] for part in parts])
    assert torch.equal(views, batch.other_views[0][: sum(sizes)])
    assert sum(part.padding for part in parts) == max(0, sum(sizes) - (rows - padding))
    assert all(len(part.index) - part.padding <= 1 for part in parts if part.padding)


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 5])
def test_the_fewest_images_at_once(settings, limit):
    """What the smallest part of any step has, in each number of workers of a range."""
    config = settings()
    for batch_size, (least, most) in itertools.product(range(5, 14), [(1, 1), (1, 5), (3, 4)]):
        data = config.data.model_copy(update={"batch_size": batch_size, "max_per_worker": limit})
        launch = config.launch.model_copy(update={"workers": f"{least}:{most}"})
        asked = config.model_copy(update={"data": data, "launch": launch})
        sizes = []
        for workers in range(least, most + 1):
            order = EpochOrder.of_batch(40, batch_size, workers, drop_last=False)
            for index in order.assignment.reshape(order.steps, -1, workers).swapaxes(1, 2):
                padding = (index == -1).sum(1)
                batches = [batch_of(order.batch_size, int(count)) for count in padding]
                parts = [part for batch in batches for part in batch.parts(images_at_once(asked))]
                sizes += [len(part.index) for part in parts]
        # Of a part with padding batch norm sees two rows or more
        assert min(fewest_at_once(asked), 2) == min(*sizes, 2)


STEPS = {  # batch size, which step of the epoch, images at once
    "22, 21 and 21 samples": (64, 0, 64),
    "in parts": (64, 1, 6),
    "the last one with 16 each": (64, 18, 64),
    "the last one with 1, 0 and 0": (109, 11, 109),
    "the last one in parts": (109, 11, 5),
}


def after_single_steps(config, folder):
    """Weights and sums after each step of STEPS from the first weights, with fixed batch norm."""
    training = start(config, folder)
    training.method.begin_epoch(1, 2)
    peers, model = training.peers, training.model.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    results = {}
    for name, (batch_size, which, limit) in STEPS.items():
        model.load_state_dict(weights)
        training.watch.sums.zero_()
        at_once = limit if peers.world_size > 1 else batch_size
        data = config.data.model_copy(update={"max_per_worker": at_once})
        training.config = config.model_copy(update={"data": data})
        order = EpochOrder.of_batch(1200, batch_size, peers.world_size, drop_last=False)
        if training.targets is not None:
            training.targets.begin_epoch(order)
        batches = training.loader.epoch(order, peers.rank)
        batch = next(batch for number, batch in enumerate(batches) if number == which).clone()
        batches.close()
        step(training, batch, order.position_after(which + 1) - order.position_after(which))
        after = {name: value.clone() for name, value in model.state_dict().items()}
        results[name] = after, peers.sum(training.watch.sums)
    return results


@pytest.mark.parametrize("method", ["baseline", "dps", "te", "pskd", "elr", "kd", "cpc"])
def test_a_step_is_the_same_on_any_number_of_ranks(ranks, settings, own, tmp_path, method):
    """The gradient is that of the mean over the step's samples, wherever they are."""
    sgd = ["optim.name=sgd", "optim.lr=1", "optim.schedule=constant", "optim.momentum=0"]
    of_kd = ["data.hold_out=0", "method.task.name=sl"] if method == "kd" else []
    config = settings(*own(method), *of_kd, *sgd)
    (alone,) = ranks.run(after_single_steps, config, str(tmp_path / "1"), world_size=1)
    for world_size in (2, 3):
        folder = str(tmp_path / str(world_size))
        for own in ranks.run(after_single_steps, config, folder, world_size=world_size):
            for name, (weights, sums) in own.items():
                torch.testing.assert_close(sums, alone[name][1], rtol=1e-6, atol=1e-6, msg=name)
                for key, value in weights.items():
                    expected = alone[name][0][key]
                    where = f"{key}, {name}, {world_size} ranks"
                    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=where)


# ---- figures


def measured(config, folder, batch_sizes):
    """The figures of the last checkpoint, evaluated in batches of several sizes."""
    training = start(config, folder)
    results = []
    for batch_size in batch_sizes:
        section = config.evaluate.model_copy(update={"batch_size": batch_size})
        training.config = config.model_copy(update={"evaluate": section})
        results.append({**evaluate(training), **target_figures(training)})
    return results


@pytest.fixture(scope="module")
def noisy_run(ranks, settings, tmp_path_factory):
    """A run of two ranks with a moving average, on labels of which two in five are redrawn."""
    noise = ["data.noise.kind=symmetric", "data.noise.rate=0.4", "method.c=1", "method.gamma=0.5"]
    config = settings(*noise, "optim.ema=0.9", "evaluate.batch_size=100", "train.epochs=4")
    folder = tmp_path_factory.mktemp("noisy")
    trained(ranks, config, folder, 2)
    return config, folder


def test_figures_do_not_depend_on_the_number_of_ranks(ranks, noisy_run):
    """597 images in batches that no number of ranks divides; they are those that training told."""
    config, folder = noisy_run
    told = metrics(folder)[-1]
    for world_size in (1, 2, 3):
        sizes = [100, 64, 2, 10**12]
        everyone = ranks.run(measured, config, str(folder), sizes, world_size=world_size)
        for figures in (one for own in everyone for one in own):
            assert {"accuracy", "top5", "nll", "ece", "target_entropy", "recovered"} < {*figures}
            for key, value in figures.items():
                assert told[key] == pytest.approx(value, abs=1e-6), (world_size, key)


def all_logits(config, folder):
    """Of the averaged weights that the last checkpoint holds, in one batch."""
    training = start(config, folder)
    average = final_state(Path(folder))["ema"]
    training.model.load_state_dict({**average["parameters"], **average["buffers"]})
    training.model.eval()
    (batch,) = training.eval_loader.epoch(EpochOrder(len(training.eval_set), 597, shuffle="none"))
    with torch.no_grad():
        return training.model(batch.images).double().numpy(), batch.labels.numpy()


def test_figures_of_the_evaluation(ranks, noisy_run):
    """Against scikit-learn, and the definition of ECE."""
    config, folder = noisy_run
    logits, labels = ranks.run(all_logits, config, str(folder), world_size=1)[0]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    told = metrics(folder)[-1]
    right, confidence = p.argmax(1) == labels, p.max(1)
    bins = np.minimum(np.ceil(confidence * 15) - 1, 14).astype(int)
    gaps = [abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(15)]
    assert told["accuracy"] == pytest.approx(right.mean())
    assert told["top5"] == pytest.approx(top_k_accuracy_score(labels, p, k=5))
    assert told["nll"] == pytest.approx(log_loss(labels, p), rel=1e-5)
    assert told["ece"] == pytest.approx(sum(gaps) / len(labels), abs=1e-5)


def decoded(evidence):
    v = evidence.astype(np.float64)
    return np.where(v >= 0, v / 2**15, 1 + v / 2**15)


def test_figures_of_the_targets(noisy_run, train_digits):
    """From the files that a run leaves, by the formulas that they state."""
    config, folder = noisy_run
    saved = saved_targets(folder)
    assert (saved["label"] == noisy_labels(config.data, train_digits)).all()
    evidence = decoded(saved["evidence"])
    gamma, c, t = config.method.gamma, config.method.c, saved["visits"][:, None].astype(float)
    prior, weight = gamma**t * c * np.eye(10)[saved["label"]], (1 - gamma**t) / (1 - gamma)
    y = (prior + weight * evidence) / (gamma**t * c + weight)
    true = np.asarray(train_digits.clean_labels)
    wrong = saved["label"] != true
    told = metrics(folder)[-1]
    assert told["target_entropy"] == pytest.approx(-(y * np.log(y + 1e-300)).sum(1).mean(), 1e-4)
    assert told["label_agreement"] == np.mean(evidence.argmax(1) == saved["label"])
    assert told["prior_weight"] == pytest.approx(np.mean(gamma**t * c / (gamma**t * c + weight)))
    assert told["recovered"] == pytest.approx(np.mean(y.argmax(1)[wrong] == true[wrong]), abs=2e-3)
    assert 0.3 < wrong.mean() < 0.4 and told["recovered"] > 0.3


def test_without_a_prior_what_was_not_visited_has_no_target(
    ranks, settings, train_digits, tmp_path
):
    """ELR in its first epoch, which leaves out the last 48 samples."""
    noise = ["data.noise.kind=symmetric", "data.noise.rate=0.4", "train.epochs=1"]
    config = settings("method.name=elr", *noise)
    trained(ranks, config, tmp_path, 2)
    saved = saved_targets(tmp_path)
    seen = saved["visits"] > 0
    p, given = decoded(saved["evidence"])[seen], saved["label"][seen]
    true = np.asarray(train_digits.clean_labels)[seen]
    told = metrics(tmp_path)[-1]
    assert seen.sum() == 18 * 64
    assert told["target_entropy"] == pytest.approx(-(p * np.log(p + 1e-300)).sum(1).mean(), 1e-4)
    assert told["label_agreement"] == np.mean(p.argmax(1) == given)
    assert told["recovered"] == np.mean(p.argmax(1)[given != true] == true[given != true])


def figures_of_one_sample(config, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dps_dist.train.measure.SAMPLED_TARGETS", 1)
        return target_figures(start(config, folder))


def test_the_part_that_is_measured_is_of_trained_samples(ranks, settings, tmp_path):
    config = settings("data.hold_out=1100")
    assert 0 in hold_out.split(1200, 1100, config.data.hold_out_seed).held_out
    for found in ranks.run(figures_of_one_sample, config, str(tmp_path), world_size=2):
        assert found == {"target_entropy": 0, "prior_weight": 1}


def test_clean_labels_have_none_to_recover(ranks, settings, tmp_path):
    summary = trained(ranks, settings("train.epochs=1"), tmp_path)
    assert "recovered" not in summary and summary["label_agreement"] > 0.5


# ---- files and events


def heard(config, folder):
    """What `tell` hears on this rank."""
    events = []
    train(config, folder, events.append)
    return events


def test_what_is_told_and_written(ranks, settings, tmp_path):
    config = settings("train.epochs=3", "evaluate.every_epochs=2", "data.drop_last=false")
    events, nothing = ranks.run(heard, config, str(tmp_path / "run"), world_size=2)
    assert nothing == []
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "start" and kinds[-1] == "end" and kinds.count("epoch") == 3
    assert kinds.index("progress") < kinds.index("epoch")
    begun, ended = events[0], events[-1]
    assert begun["samples"] == 1200 and begun["steps"] == 19 and begun["workers"] == 2
    assert begun["parameters"] == sum(p.numel() for p in models.build("small_cnn", 10).parameters())
    for event in events:
        if event["kind"] == "progress":
            assert 0 <= event["epoch"] < 3 and 1 <= event["step"] <= event["steps"] == 19
            assert math.isfinite(event["loss"]) and event["images_per_s"] > 0

    rows = metrics(tmp_path / "run")
    assert rows == [
        {key: value for key, value in event.items() if key != "kind"}
        for event in events
        if event["kind"] == "epoch"
    ]
    assert [(row["epoch"], row["step"], row["workers"]) for row in rows] == [
        *((1, 19, 2), (2, 38, 2), (3, 57, 2))
    ]
    assert ["accuracy" in row for row in rows] == [False, True, True]
    assert ["target_entropy" in row for row in rows] == [False, True, True]

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {**summary, "kind": "end"} == ended
    best = max(rows[1:], key=lambda row: row["accuracy"])
    assert (summary["best_accuracy"], summary["best_epoch"]) == (best["accuracy"], best["epoch"])
    assert (summary["run"], summary["epochs"], summary["steps"]) == ("run", 3, 57)
    for key in ("accuracy", "top5", "nll", "ece", "target_entropy", "label_agreement"):
        assert summary[key] == rows[-1][key]
    assert summary["train_loss"] == rows[-1]["train_loss"]
    assert summary["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    assert summary["images_per_s"] == median(row["images_per_s"] for row in rows)


def monitored(config, folder):
    """What a monitor sees of this rank in two epochs, and how long they took."""
    training, seen = start(config, folder), []
    training.monitor = seen.append
    training.clock, began = Clock(), time.perf_counter()
    for _ in range(2):
        epoch(training)
    took = time.perf_counter() - began
    training.writer.wait()
    return seen, took, time.time() - training.writer.saved_at


def test_a_monitor_sees_each_rank(ranks, settings, tmp_path):
    config = settings("data.drop_last=false", "data.batch_size=32")
    everyone = ranks.run(monitored, config, str(tmp_path / "run"), world_size=2)
    assert sum(seen[-1].images for seen, *_ in everyone) == 2 * 1200
    for seen, took, saved_ago in everyone:
        assert [vitals.epoch for vitals in seen] == sorted({vitals.epoch for vitals in seen})
        last = seen[-1]
        assert (last.epoch, last.epochs, last.steps) == (2, config.train.epochs, 2 * 38)
        assert math.isfinite(last.loss) and last.store_bytes > 1200 * 22 / 2
        # All of its time is in some part, and some of it in each
        assert sum(last.seconds.values()) == pytest.approx(took, abs=0.1)
        assert min(last.seconds.values()) > 0 and {*last.seconds} == {*PARTS}
        assert 0 <= saved_ago < took + 60


# ---- what is refused, and what is not


def refusal(config, folder):
    try:
        run(config, Storage(folder), ignore, threads=1)
    except InputError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.amp=float16", "train.amp is float16: cpu has no arithmetic for it; set bfloat16"),
        ("train.sync_batchnorm=true", "train.sync_batchnorm is true: torch has it on GPUs only"),
        ("method.device=cuda", "method.device is cuda: this worker has no GPU; set auto or cpu"),
        ("data.batch_size=1201", "holds 1200 images; give at most that many"),
        ("data.path=/nowhere", "/nowhere/train.beton does not exist: run `dps prepare"),
        ("evaluate.split=test", "test.beton does not exist: run `dps prepare"),
        ("optim.warmup_epochs=2", "optim.warmup_epochs is 2: give less than train.epochs, 2"),
        ("data.hold_out=1200", "data.hold_out is 1200: "),
        ("evaluate.split=hold_out", "evaluate.split is hold_out and data.hold_out 0: set"),
        ("evaluate.temperature=true", "data.hold_out is 0: evaluate.temperature needs held-out"),
        ("method.name=adafocal", "data.hold_out is 0: the method adafocal needs held-out"),
        ("method.name=kd", "method.teachers is empty: give the folders of trained runs"),
    ],
)
def test_refuses_with_a_reason(ranks, settings, tmp_path, setting, said):
    everyone = ranks.run(refusal, settings(setting), str(tmp_path), world_size=2)
    assert said in everyone[0] and everyone[0] == everyone[1]
    assert not list(tmp_path.iterdir())


class OtherDigits:
    """Three images of three classes."""

    class_names = ("0", "1", "two")
    labels = np.arange(3)

    def __len__(self):
        return 3

    def read(self, i):
        return np.full((8, 8, 3), 10 * i, np.uint8)

    def path(self, i):
        return str(i)


def test_refuses_a_single_class(ranks, settings, tmp_path):
    alike = OtherDigits()
    alike.class_names, alike.labels = ("zero",), np.zeros(3, int)
    for split in ("train", "val"):
        write_split(alike, tmp_path, split, {"source": "x"}, ImageOptions("raw"), workers=1)
    config = settings(f"data.path={tmp_path}")
    (said,) = ranks.run(refusal, config, str(tmp_path / "run"), world_size=1)
    assert "train.beton has one class, zero: " in said and "data.path" in said


def test_refuses_splits_of_different_classes(ranks, settings, digits, tmp_path):
    for name in ("train.beton", "train.parquet"):
        shutil.copy(digits / name, tmp_path / name)
    write_split(OtherDigits(), tmp_path, "val", {"source": "x"}, ImageOptions("raw"), workers=1)
    config = settings(f"data.path={tmp_path}")
    (said,) = ranks.run(refusal, config, str(tmp_path / "run"), world_size=1)
    assert "val.beton has 3 classes and " in said and "train.beton 10" in said


def test_a_shard_epoch_goes_on_with_as_many_ranks_only(ranks, settings, tmp_path):
    every = ["train.checkpoint.every_steps=5", ALL_KEPT, "train.epochs=1"]
    config = settings("data.shuffle=shard", *every)
    trained(ranks, config, tmp_path / "whole", 2)
    killed = killed_after(tmp_path / "whole", 10, tmp_path / "killed")
    (said,) = ranks.run(refusal, config, str(killed), world_size=1)
    assert said.endswith("was saved in mid-epoch by 2 workers: resume with --workers 2")
    trained(ranks, config, killed, 2)
    assert_same_end(killed, tmp_path / "whole")


def test_a_batch_larger_than_the_data_set_is_one_step(ranks, settings, tmp_path):
    config = settings("data.batch_size=1000000000000", "data.drop_last=false")
    assert trained(ranks, config, tmp_path, 3)["steps"] == 2
    assert (saved_targets(tmp_path)["visits"] == 2).all()


def test_trains_in_bfloat16(ranks, settings, tmp_path):
    summary = trained(ranks, settings("train.amp=bfloat16"), tmp_path, 2)
    assert summary["accuracy"] > 0.8
    assert all(w.dtype != torch.bfloat16 for w in final_state(tmp_path)["model"].values())


def notes(config, folder, has_bfloat16):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dps_dist.train.setup.cpu_has_bfloat16", lambda: has_bfloat16)
        build(config, Storage(folder), said.append, threads=1)
    return [event["text"] for event in said if event["kind"] == "note"]


def test_a_cpu_that_only_imitates_bfloat16_is_told_of(ranks, settings, tmp_path):
    """It is ten and more times slower than float32 there."""

    def told(amp, has):
        return ranks.run(notes, settings(f"train.amp={amp}"), str(tmp_path), has, world_size=2)

    (note,), nothing = told("bfloat16", False)
    assert "train.amp is bfloat16" in note and "--set train.amp=none" in note
    assert nothing == []  # of the other rank
    assert told("bfloat16", True) == told("none", False) == [[], []]


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_trains_compiled_and_goes_on_without(ranks, settings, tmp_path):
    """The names of the weights stay."""
    summary = trained(ranks, settings("train.compile=true", "train.epochs=1"), tmp_path)
    assert summary["accuracy"] > 0.5
    assert (
        final_state(tmp_path)["model"].keys() == models.build("small_cnn", 10).state_dict().keys()
    )
    assert trained(ranks, settings("train.epochs=1"), tmp_path)["steps"] == summary["steps"]
