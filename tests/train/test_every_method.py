"""What every method does in training: it learns, resumes exactly, and ends where it diverges."""

import time
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from dps_dist import methods
from dps_dist.data.order import EpochOrder
from dps_dist.train import loop
from dps_dist.train.checkpoint import open_checkpoint
from dps_dist.train.manifest import complete
from dps_dist.train.state import _load
from dps_dist.train.storage import Storage
from dps_dist.train.watch import NonFiniteLossError
from tests.train.runs import (
    ALL_KEPT,
    METHODS,
    ROWS,
    STORES,
    assert_same_end,
    final_state,
    ignore,
    killed_after,
    metrics,
    start,
    trained,
)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_learns(ranks, settings, own, tmp_path, method, world_size):
    config = settings(*own(method), "train.epochs=6")
    summary = trained(ranks, config, tmp_path, world_size)
    assert summary["accuracy"] > 0.9
    rows = metrics(tmp_path)
    assert rows[-1]["train_loss"] < 0.7 * rows[0]["train_loss"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("baseline", "dps")])
def test_every_method_resumes_exactly(ranks, settings, own, tmp_path, method, world_size):
    """With several parts a step, and mixed images where the method knows them."""
    mix = "mixup" if methods.build(ROWS[method]()).mixes != "none" else "none"
    every = ["train.checkpoint.every_steps=5", ALL_KEPT, f"augment.mix={mix}"]
    config = settings(*own(method), *every, "data.max_per_worker=20", "data.drop_last=false")
    whole = tmp_path / "whole"
    trained(ranks, config, whole, world_size)
    end_of_epoch = metrics(whole)[0]["step"]
    number = end_of_epoch if world_size == 1 else end_of_epoch + 5 - end_of_epoch % 5
    killed = killed_after(whole, number, tmp_path / "killed")
    trained(ranks, config, killed, world_size)
    assert_same_end(killed, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_the_step_before_is_found_again_by_other_ranks(ranks, settings, tmp_path, before, after):
    """DLB: the same samples and logits, in other hands."""
    config = settings("method.name=dlb", "train.checkpoint.every_steps=5", ALL_KEPT)
    folder = tmp_path / "run"
    trained(ranks, config, folder, before)
    killed = killed_after(folder, 25, tmp_path / "killed")
    saved = final_state(killed)["recall"]
    found = ranks.run(recalled, config, str(killed), world_size=after)
    index = torch.cat([index for index, _ in found])
    logits = torch.cat([logits for _, logits in found])
    assert len(index) == 64 and torch.equal(index.sort().values, saved["index"].sort().values)
    assert torch.equal(logits[index.argsort()], saved["logits"][saved["index"].argsort()])


def recalled(config, folder):
    parts = start(config, folder).recall.parts
    return torch.cat([part.index for part in parts]), torch.cat([part.logits for part in parts])


def diverged(config, folder, after):
    """What ends a run whose learning rate jumps after so many steps, and whose disk is slow."""
    training = start(config, folder)
    training.schedule = LambdaLR(training.optimizer, lambda step: 1e30 if step >= after else 1.0)
    write = training.writer._write

    def slowly(save):
        time.sleep(0.5 if save.moment.step > after else 0)
        return write(save)

    training.writer._write = slowly
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", lambda *_, **__: training)
        patch.setattr(loop, "restore", ignore)
        try:
            loop.run(config, training.storage, ignore)
        except NonFiniteLossError as error:
            return str(error)
    return "nothing was said"


@pytest.mark.parametrize("method", ["baseline", *STORES])
def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(
    ranks, settings, own, tmp_path, method
):
    """And what was saved before, after every single step, is there and finite."""
    config = settings(*own(method), "train.checkpoint.every_steps=1", ALL_KEPT)
    said = ranks.run(diverged, config, str(tmp_path), 9, world_size=2)
    assert said[0] == said[1] and said[0].startswith("the loss is not finite at step 11, samples ")
    samples = said[0].removeprefix("the loss is not finite at step 11, samples ").split(":")[0]
    order = EpochOrder.of_batch(1200, 64, 2)
    assert {int(sample) for sample in samples.split(", ")} <= {
        *order.batch(10, 0).tolist(),
        *order.batch(10, 1).tolist(),
    }
    saved = [found.moment.step for found in complete(Storage(tmp_path))]
    assert saved == list(range(10, 0, -1))
    assert all(value.isfinite().all() for value in final_state(tmp_path)["model"].values())


def test_dlb_forgets_the_step_before_when_images_grow(ranks, settings, tmp_path):
    grows = ["data.progressive={resolution: 4, start_epoch: 0, end_epoch: 2}", "train.epochs=3"]
    config = settings("method.name=dlb", *grows)
    assert trained(ranks, config, tmp_path, 2)["epochs"] == 3


@pytest.mark.parametrize("setting", ["augment.mix=cutmix", "data.shuffle=shard"])
def test_dlb_forgets_the_step_before_when_it_is_dealt_anew(ranks, settings, tmp_path, setting):
    config = settings("method.name=dlb", setting, "train.epochs=1", "data.hold_out=4")
    trained(ranks, config, tmp_path, 2)
    assert ranks.run(how_many_recalled, config, str(tmp_path), world_size=2) == [1, 1]
    assert ranks.run(how_many_recalled, config, str(tmp_path), world_size=1) == [0]


def how_many_recalled(config, folder):
    return len(start(config, folder).recall.parts)


def test_checkpoints_from_before_steps_were_recalled_are_read(ranks, settings, tmp_path):
    config = settings("train.epochs=1")
    trained(ranks, config, tmp_path)
    ranks.run(resumed_without, config, str(tmp_path), world_size=1)


def resumed_without(config, folder):
    """What `restore` does with an older state."""
    training = start(config, folder)
    storage = training.storage
    found = complete(storage)[0]
    state = open_checkpoint(storage, found.name, Path("unused")).state
    del state["recall"], state["data"]["sum of class names"]
    _load(training, state)
