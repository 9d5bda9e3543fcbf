"""`dps plan` against what real stores hold, send and save, and what a real run leaves."""

import inspect
import io

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console

from dps_dist import recipes
from dps_dist.data.loader import Loader
from dps_dist.data.order import EpochOrder
from dps_dist.errors import InputError
from dps_dist.launch import plan as plans
from dps_dist.launch.plan import Cluster
from dps_dist.launch.plan_data import KNOWN, data_set
from dps_dist.launch.plan_table import notes, sections, table
from dps_dist.targets import Dirichlet, ShardedTargets, migrate
from dps_dist.train.loop import run as run_loop
from dps_dist.train.manifest import FOLDER, STATE
from dps_dist.train.storage import Storage
from tests.spawn import Ranks

N, K, EPOCHS = 4001, 50, 8


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, timeout=120) as ranks:
        yield ranks


def measured(folder):
    """What a store of this rank holds at first, at its peak, sends an epoch, and saves."""
    store = ShardedTargets(N, Dirichlet(K, 0.9, 10.0), chunk_rows=plans.CHUNK_ROWS)
    at_first, peak = store.nbytes, store.nbytes
    unpack = store._unpack

    def watched(flight):
        nonlocal peak
        peak = max(peak, store.nbytes)
        unpack(flight)

    store._unpack = watched
    for epoch in range(EPOCHS):
        store.begin_epoch(EpochOrder(N, 5, dist.get_world_size(), epoch=epoch))
    store.save(folder)
    return at_first, peak, store.sent_bytes / EPOCHS, len(store.held())


@pytest.mark.parametrize("W", [1, 2, 3, 4])
def test_a_real_store_has_the_planned_bytes(ranks, tmp_path, W):
    found = ranks.run(measured, str(tmp_path), world_size=W)
    planned = plans.held_bytes(N, K, W)
    assert found[0][0] == planned
    # a rank with a row less has a free slot more, in 4 bytes
    assert all(planned <= at_first <= planned + 4 for at_first, *_ in found)
    assert all(peak <= planned + plans.exchange_room(N, K, W) + 4 for _, peak, *_ in found)
    if W > 1:  # and the room is not far too large
        room = max(peak for _, peak, *_ in found) - planned
        assert room > plans.exchange_room(N, K, W) / 4
    sent = np.mean([sent for *_, sent, _ in found])
    assert sent == pytest.approx(plans.moved_bytes(N - N % (5 * W), K, W), rel=0.02)
    assert sum(rows for *_, rows in found) * plans.row_bytes(K) == plans.store_bytes(N, K)
    saved = sum(file.stat().st_size for file in tmp_path.glob("*.arrow"))
    planned = plans.saved_targets_bytes(N, K)
    assert planned <= saved <= planned + 6000 * W  # what the files say of themselves


def test_rows_that_leave_a_node():
    """Counted in the plans that the ranks make, with four ranks on each of two nodes."""
    W, cluster = 8, Cluster(nodes=2, gpus_per_node=4)
    holder = np.arange(40_000, dtype=np.int64) % W
    order = EpochOrder(40_000, 50, W, epoch=3)
    counts = migrate.plan(order, holder.astype(np.int16), 0).counts
    across = counts[:4, 4:].sum() * plans.row_bytes(K)
    assert across == pytest.approx(plans.leaving_bytes(40_000, K, cluster), rel=0.03)


@pytest.mark.parametrize(
    "settings", [["optim.name=adam"], ["optim.name=sgd", "optim.ema=0.9", "method.name=baseline"]]
)
def test_a_real_run_leaves_the_planned_bytes(ranks, digits, tmp_path, settings):
    more = [f"data.path={digits}", "train.epochs=5", "optim.schedule=constant", *settings]
    config = recipes.load("digits", more)
    planned = plans.plan(config, Cluster(1, 2), data_set(config))
    ranks.run(trained, config, str(tmp_path), world_size=2)
    checkpoints = [path for path in (tmp_path / FOLDER).iterdir() if path.is_dir()]
    assert planned.kept - 2 <= len(checkpoints) <= planned.kept
    for folder in checkpoints:
        state = (folder / STATE).stat().st_size
        assert planned.state <= state <= 1.03 * planned.state + 30_000  # names, history
        targets = bytes_in(folder / "targets")
        assert planned.saved_targets <= targets <= planned.saved_targets + 12_000
    assert planned.final_targets <= bytes_in(tmp_path / "targets") <= planned.final_targets + 12_000
    assert bytes_in(tmp_path) <= planned.storage + planned.kept * 60_000
    assert planned.visited == 18 * 64 and planned.evaluated == 597
    assert planned.data.beton[0] == sum(file.stat().st_size for file in digits.glob("*.beton"))


def trained(config, folder):
    run_loop(config, Storage(folder), lambda event: None, threads=1)


def bytes_in(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_what_it_takes_from_others_is_theirs():
    def of(call, name):
        return inspect.signature(call).parameters[name].default

    assert of(ShardedTargets.__init__, "chunk_rows") == plans.CHUNK_ROWS
    assert of(Loader.__init__, "batches_ahead") + 2 == plans.BATCHES_HELD


def test_batches_are_counted_as_the_loader_holds_them():
    """All views of a worker's share, however small the passes that it is cut into."""
    one = imagenet(1).batch_bytes
    assert one == plans.BATCHES_HELD * 128 * 3 * 224**2
    assert imagenet(1, "data.max_per_worker=32").batch_bytes == one
    assert imagenet(1, "method={name: dlb}").batch_bytes == 2 * one


def imagenet(nodes=8, *settings, **rates):
    config = recipes.load("imagenet-resnet152", ["data.path=none/imagenet", *settings])
    return plans.plan(config, Cluster(nodes, 8, **rates), data_set(config))


def test_imagenet_by_hand():
    """N=1,281,167, K=1000; ResNet-152 of torchvision has 60,192,808 parameters."""
    plan = imagenet(bandwidth=100.0, images_per_s=500.0)
    assert plans.store_bytes(plan.data.samples, plan.row) == 2 * 1281167 * 1001
    assert plan.model.parameters == 4 * 60_192_808
    assert plan.steps == 1251 and plan.visited == 1251 * 1024
    gradients = 1251 * 2 * 4 * 60_192_808 * 7 / 8 / 12.5e9
    assert plan.over_link_s(plan.gradients) == pytest.approx(gradients)
    exchange = 8 * (1281024 / 64) * (56 / 64) * 2002 / 12.5e9
    computing, evaluation = 1281024 / 32000, 50000 / 32000
    assert gradients > computing  # then they are what an epoch waits for
    assert plan.epoch_s == pytest.approx(gradients + exchange + evaluation)
    assert plan.run_s == pytest.approx(200 * plan.epoch_s)
    slower = imagenet(bandwidth=1000.0, images_per_s=500.0)
    assert slower.epoch_s == pytest.approx(computing + exchange / 10 + evaluation)
    assert any("larger data.batch_size" in note for note in notes(plan))


def test_times_are_not_made_up():
    plan = imagenet()
    assert plan.epoch_s is None and plan.run_s is None
    said = list(notes(plan))
    assert any("--images-per-s" in note and "1,281,024 / (64 ×" in note for note in said)
    assert any("--bandwidth" in note for note in said)
    shown = {name: figure for _, rows in sections(plan) for name, figure, _ in rows}
    assert shown["an epoch"] == shown["the run"] == "–"


def test_less_is_moved_where_less_is_to_move():
    assert imagenet(1).leaving == 0 and imagenet(1).gradients == 0 and imagenet(1).moved > 0
    assert imagenet(8, "data.shuffle=shard").moved == 0
    none = imagenet(8, "method.name=baseline")
    assert (none.row, none.held, none.moved, none.saved_targets, none.final_targets) == (0,) * 5
    assert "targets" not in dict(sections(none))
    crl = imagenet(8, "method={name: crl}")
    assert crl.row == 2  # keeps a count, not a number a class


def test_the_size_is_prepared_known_or_given(digits):
    prepared = recipes.load("digits", [f"data.path={digits}"])
    assert data_set(prepared).samples == KNOWN["digits"].samples == 1200
    given = data_set(prepared, samples=2400)
    assert (given.samples, given.classes, given.known) == (2400, 10, "as given")
    train = (digits / "train.beton").stat().st_size
    assert given.beton == tuple(size + train for size in data_set(prepared).beton)
    larger = recipes.load("imagenet-resnet152", ["data.path=none/imagenet-21k"])
    assert (data_set(larger).samples, data_set(larger).classes) == (14_197_122, 21_841)
    other = recipes.load("imagenet-resnet152", ["data.path=none/birds"])
    assert data_set(other, 30_000, 500).samples == 30_000
    with pytest.raises(InputError, match=r"none/birds.*--samples and --classes"):
        data_set(other)
    with pytest.raises(InputError, match="--samples is 0"):
        data_set(other, 0, 500)


def test_a_path_is_no_markup(digits, tmp_path):
    (tmp_path / "x[").mkdir()
    path = tmp_path / "x[" / "b]"
    path.symlink_to(digits)
    config = recipes.load("digits", [f"data.path={path}"])
    shown = Console(width=400, file=io.StringIO())
    shown.print(table(plans.plan(config, Cluster(1, 1), data_set(config))))
    assert f"prepared in {path}" in shown.file.getvalue()


def test_what_is_held_out_is_no_batch(digits):
    config = recipes.load("digits", [f"data.path={digits}", "data.hold_out=1190"])
    with pytest.raises(InputError, match=r"data\.batch_size is \d+: give at most the 10 samples"):
        plans.plan(config, Cluster(1, 1), data_set(config))
