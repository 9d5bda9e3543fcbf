"""ShardedTargets on real processes: the same bits as LocalTargets, whatever the ranks meet with."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dps_dist.data.hold_out import split
from dps_dist.data.order import EpochOrder
from dps_dist.methods.base import remember
from dps_dist.targets import Dirichlet, LocalTargets, ShardedTargets, arrow
from tests.spawn import RankError, Ranks

MOST = 4
_groups = {}


@pytest.fixture(scope="module")
def ranks():
    with Ranks(MOST, timeout=60) as ranks:
        yield ranks


def group_of(world_size):
    """The first world_size of the processes as a group; None on the others."""
    if not _groups:
        _groups.update({W: dist.new_group(list(range(W))) for W in range(1, MOST + 1)})
    return _groups[world_size] if dist.get_rank() < world_size else None


# ---- the invariant


@dataclass(frozen=True)
class Leg:
    """Part of a run: an epoch, or the rest of one, with a number of ranks; perhaps cut short."""

    world_size: int
    beyond: int  # samples of a step, beyond one a rank
    exchange: str
    chunk_rows: int
    drop_last: bool
    shuffle: str
    most_steps: int  # then interrupted
    through_files: bool  # a new store that loads, even if the number of ranks stays
    fused: bool


@dataclass(frozen=True)
class Run:
    num_samples: int
    held_out: float  # a share, never visited
    prior: Dirichlet
    seed: int
    legs: tuple[Leg, ...]


legs = st.builds(
    Leg,
    world_size=st.integers(1, MOST),
    beyond=st.integers(0, 20),
    exchange=st.sampled_from(["bulk", "stream"]),
    chunk_rows=st.sampled_from([1, 3, 8, 4096]),
    drop_last=st.booleans(),
    shuffle=st.sampled_from(["global", "global", "global", "shard", "none"]),
    most_steps=st.sampled_from([0, 1, 2, 5, 10**6]),
    through_files=st.booleans(),
    fused=st.booleans(),
)
runs = st.builds(
    Run,
    num_samples=st.integers(1, 90),
    held_out=st.sampled_from([0.0, 0.1, 0.5]),
    prior=st.builds(
        Dirichlet,
        num_classes=st.integers(2, 9),
        gamma=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]),
        c=st.just(10.0),
        epsilon=st.sampled_from([0.0, 0.05]),
    ),
    seed=st.integers(0, 100),
    legs=st.lists(legs, min_size=1, max_size=6).map(tuple),
)


def orders(run):
    """Each leg with its order: an interrupted epoch goes on, another number of ranks or not."""
    epoch, position = 0, 0
    only = split(run.num_samples, int(run.held_out * run.num_samples), run.seed).trained
    for leg in run.legs:
        shuffle = leg.shuffle
        if shuffle == "shard" and position % leg.world_size:
            shuffle = "global"  # a shard epoch can only go on with as many ranks
        order = EpochOrder.of_batch(
            run.num_samples,
            leg.world_size + leg.beyond,
            leg.world_size,
            seed=run.seed,
            epoch=epoch,
            shuffle=shuffle,
            drop_last=leg.drop_last,
            position=position,
            only=only,
        )
        steps = min(order.steps, leg.most_steps)
        yield leg, order, steps
        done = steps == order.steps
        epoch, position = (epoch + 1, 0) if done else (epoch, order.position_after(steps))


def logits_of(run, leg_number, index):
    """What the model says of a sample: the same wherever it is asked."""
    everyone = torch.Generator().manual_seed(1000 * run.seed + leg_number)
    shape = run.num_samples, run.prior.num_classes
    return 4 * torch.randn(shape, generator=everyone)[index.clamp(min=0)]


def train(store, run, leg_number, order, steps, rank, fused):
    for step in range(steps):
        index = torch.from_numpy(order.batch(step, rank).copy()).long()
        labels = index % run.prior.num_classes
        logits = logits_of(run, leg_number, index)
        if fused:
            store.step(logits, labels, index)
        else:
            y = store.read(index, labels)
            assert bool((y.sum(1) - 1).abs().max() < 1e-2)
            store.update(index, torch.softmax(logits, -1))


def reference(run):
    """LocalTargets over the same visits, and its bits by sample."""
    local = LocalTargets(run.num_samples, run.prior)
    for number, (leg, order, steps) in enumerate(orders(run)):
        for rank in range(leg.world_size):
            train(local, run, number, order, steps, rank, leg.fused)
    return local


def sharded_bits(run, folder):
    """What this rank holds at the end: samples, coded rows, visits."""
    store, ranks_before = None, 0
    for number, (leg, order, steps) in enumerate(orders(run)):
        group = group_of(leg.world_size)
        path = Path(folder) / str(number)
        if number and (leg.through_files or leg.world_size != ranks_before):
            if store is not None:
                store.save(path)
            dist.barrier()  # another set of ranks will read it
            store = None
        if group is not None:
            if store is None:
                store = ShardedTargets(run.num_samples, run.prior, group)
                if number:
                    store.load(path)
            store.exchange, store.chunk_rows = leg.exchange, leg.chunk_rows
            store.begin_epoch(order)
            train(store, run, number, order, steps, dist.get_rank(), leg.fused)
            check_room(store)
        ranks_before = leg.world_size
    if store is None:
        return np.zeros(0, np.int64), np.zeros((0, 0), np.int16), np.zeros(0, np.int16)
    samples = store.held()
    slots = store._slots(samples)
    rows, visits = store._rows.view(torch.int16)[slots], store._visits.view(torch.int16)[slots]
    return samples.numpy(), rows.numpy(), visits.numpy()


def check_room(store):
    """Every slot is either free or holds one row."""
    slots = store._slot[store._slot >= 0].tolist() + store._free.tolist()
    in_flight = sum(len(flight.arriving) for flight in store._flights)
    assert sorted(slots) == list(range(len(store._rows)))
    assert len(store._free) >= in_flight


# Failures are not shrunk: each attempt would start four processes again
@settings(
    max_examples=120,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(run=runs)
def test_contents_are_those_of_the_local_store_bit_for_bit(ranks, tmp_path_factory, run):
    local = reference(run)
    parts = ranks.run(sharded_bits, run, str(tmp_path_factory.mktemp("run")))
    samples = np.concatenate([part[0] for part in parts])
    assert sorted(samples.tolist()) == list(range(run.num_samples))
    for held, rows, visits in parts:
        if len(held):
            assert (local._rows.view(torch.int16).numpy()[held] == rows).all()
            assert (local._visits.view(torch.int16).numpy()[held] == visits).all()


# ---- files


def looked_into(module, name, path_of):
    """The names of the files that the function is given from now on."""
    function, names = getattr(module, name), []

    def watched(given):
        names.append(Path(path_of(given)).name)
        return function(given)

    setattr(module, name, watched)
    return names, lambda: setattr(module, name, function)


SAVED = Run(61, 0.0, Dirichlet(5, 0.9, 5.0), 3, ())


def reloaded(folder, saved_by, loaded_by, verified):
    """In mid-epoch: what the ranks that load hold, which files they read, what they then send."""
    run = SAVED
    if (group := group_of(saved_by)) is not None:
        store = ShardedTargets(run.num_samples, run.prior, group)
        order = EpochOrder.of_batch(run.num_samples, 7, saved_by, epoch=4)
        store.begin_epoch(order)
        train(store, run, 0, order, 5, store.rank, False)
        store.save(folder)
    dist.barrier()
    if (group := group_of(loaded_by)) is None:
        return None
    store = ShardedTargets(run.num_samples, run.prior, group)
    mapped, unmap = looked_into(arrow.pa, "memory_map", str)
    summed, unsum = looked_into(arrow, "sum_of", lambda file: file.name)
    store.load(folder, verified=verified)
    unmap(), unsum()
    check_room(store)
    held = store.held()
    bits = held, store.evidence(held), store.visits(held)
    sent = []
    for epoch in range(2):
        order = EpochOrder(61, 3, loaded_by, epoch=epoch, shuffle="shard", drop_last=False)
        before = store.sent_bytes
        store.begin_epoch(order)
        train(store, run, 1 + epoch, order, order.steps, store.rank, True)
        sent.append(store.sent_bytes - before)
    return bits, set(mapped), summed, sent


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("loaded_by", [1, 2, 3])
@pytest.mark.parametrize("saved_by", [1, 2, 3])
def test_a_rank_reads_its_share_of_what_others_saved(
    ranks, tmp_path, saved_by, loaded_by, verified
):
    run, local = SAVED, LocalTargets(SAVED.num_samples, SAVED.prior)
    order = EpochOrder.of_batch(61, 7, saved_by, epoch=4)
    for rank in range(saved_by):
        train(local, run, 0, order, 5, rank, False)
    found = ranks.run(reloaded, str(tmp_path), saved_by, loaded_by, verified)[:loaded_by]
    names = [f"targets-{rank:05d}-of-{saved_by:05d}.arrow" for rank in range(saved_by)]
    everyone = []
    for rank, ((held, evidence, visits), mapped, summed, sent) in enumerate(found):
        assert len(held) <= -(-61 // loaded_by)
        assert torch.equal(evidence, local.evidence(held))
        assert torch.equal(visits, local.visits(held))
        assert summed == ([] if verified else names[rank::loaded_by])
        assert saved_by != loaded_by or mapped == {names[rank]}
        assert sent[1] == 0  # its shuffle keeps rows where the first exchange has brought them
        everyone += held.tolist()
    assert sorted(everyone) == list(range(61))
    assert sum(len(mapped) for _, mapped, _, _ in found) <= saved_by + loaded_by - 1


# ---- what else must hold


def exchanged(shuffle, exchange, epochs, num_samples=57):
    store = ShardedTargets(num_samples, Dirichlet(5, 0.9, 5.0), exchange=exchange, chunk_rows=7)
    for epoch in range(epochs):
        order = EpochOrder(num_samples, 4, MOST, epoch=epoch, shuffle=shuffle)
        store.begin_epoch(order)
        for step in range(order.steps):
            index = torch.from_numpy(order.batch(step, dist.get_rank()).copy())
            store.update(index, torch.full((4, 5), 0.2))
    return store.sent_bytes


@pytest.mark.parametrize("exchange", ["bulk", "stream"])
def test_only_a_global_shuffle_exchanges(ranks, exchange):
    assert sum(ranks.run(exchanged, "shard", exchange, 3)) == 0
    assert sum(ranks.run(exchanged, "none", exchange, 3)) == 0
    sent = sum(ranks.run(exchanged, "global", exchange, 3))
    assert 0 < sent <= 3 * 57 * 2 * (5 + 1)


def rounds_by_step(num_samples, batch_size):
    """How many exchanges a streaming rank has launched when it is in each step."""
    store = ShardedTargets(num_samples, Dirichlet(5, 0.9, 5.0), exchange="stream")
    order = EpochOrder(num_samples, batch_size, MOST, epoch=1, drop_last=False)
    store.begin_epoch(order)
    rounds = []
    for step in range(order.steps):
        index = torch.from_numpy(order.batch(step, dist.get_rank()).copy())
        store.read(index, torch.zeros(batch_size, dtype=torch.int64))
        rounds.append(store._moves.done)
    return rounds


@pytest.mark.parametrize(("num_samples", "batch_size"), [(17, 1), (42, 2), (57, 4), (9, 8)])
def test_streaming_ranks_exchange_in_the_same_steps(ranks, num_samples, batch_size):
    """Also those that have only padding left: other collectives run between the steps."""
    rounds = ranks.run(rounds_by_step, num_samples, batch_size)
    assert all(own == rounds[0] for own in rounds)


def remembered(epochs, num_samples=42):
    """Streaming with predictions that overflow, on a rank and a step for its whole batch."""
    prior = Dirichlet(5, 0.9, 5.0)
    group, local = group_of(2), LocalTargets(num_samples, prior)
    if group is None:
        return True
    store = ShardedTargets(num_samples, prior, group, exchange="stream")
    for epoch in range(epochs):
        order = EpochOrder(num_samples, 3, 2, epoch=epoch)
        store.begin_epoch(order)
        for step in range(order.steps):
            for rank in range(2):
                index = torch.from_numpy(order.batch(step, rank).copy()).long()
                p = logits_of(Run(num_samples, 0.0, prior, 1, ()), epoch, index).softmax(-1)
                p[: 3 if rank == step % 2 else 1] = torch.nan
                remember(local, index, p)
                if rank == store.rank:
                    remember(store, index, p)
        assert store._visiting.step == order.steps - 1
    held = store.held()
    assert torch.equal(store.visits(held), local.visits(held))
    return torch.equal(store._rows[store._slots(held)], local._rows[held])


def test_a_batch_without_finite_predictions_still_arrives(ranks):
    assert all(ranks.run(remembered, 3))


def bytes_held(num_samples, num_classes, exchange):
    store = ShardedTargets(
        num_samples, Dirichlet(num_classes, 0.9, 5.0), exchange=exchange, chunk_rows=16
    )
    rows = [store._rows.nbytes + store._visits.nbytes]
    held = [store.nbytes]
    for epoch in range(3):
        order = EpochOrder(num_samples, 8, MOST, epoch=epoch)
        store.begin_epoch(order)
        held.append(store.nbytes - sum(parcel.nbytes for parcel in store._parcels.values()))
        rows.append(store._rows.nbytes + store._visits.nbytes)
    return rows, held


@pytest.mark.parametrize("exchange", ["bulk", "stream"])
def test_bytes(ranks, exchange):
    N, K = 4003, 50
    results = ranks.run(bytes_held, N, K, exchange)
    exact = 2 * N * K + 2 * N
    slack = (MOST * (MOST - 1) + MOST) * (2 * K + 2)  # W − 1 rows a rank, and ⌈N/W⌉
    for moment in range(4):
        assert exact <= sum(rows[moment] for rows, _ in results) <= exact + slack
    assert slack <= 0.01 * exact  # from N = 100·W² on
    for rows, held in results:
        assert all(total - row <= 16 * N for row, total in zip(rows, held, strict=True))


def messages():
    """What a rank is told when it asks for the wrong thing; and that nothing has changed by it."""
    rank, N, prior = dist.get_rank(), 30, Dirichlet(5, 0.9, 5.0)
    store, said = ShardedTargets(N, prior, exchange="stream"), {}
    order = EpochOrder(N, 2, MOST, epoch=3)
    store.begin_epoch(order)
    probs = torch.full((2, 5), 0.2)
    store.update(torch.from_numpy(order.batch(0, rank).copy()), probs)
    elsewhere = torch.from_numpy(order.batch(0, (rank + 1) % MOST).copy())
    jump = torch.from_numpy(order.batch(2, rank).copy())
    before = store._rows.clone(), store._visits.clone()
    calls = {
        "elsewhere": lambda: store.read(elsewhere, torch.zeros(2, dtype=torch.int64)),
        "update": lambda: store.update(elsewhere, probs),
        "step": lambda: store.step(probs, torch.zeros(2, dtype=torch.int64), elsewhere),
        "jump": lambda: store.update(jump, probs),
        "world_size": lambda: store.begin_epoch(replace(order, world_size=3)),
        "num_samples": lambda: store.begin_epoch(replace(order, num_samples=31)),
        "exchange": lambda: ShardedTargets(N, prior, exchange="fast"),
        "chunk_rows": lambda: ShardedTargets(N, prior, chunk_rows=0),
        # every rank another seed: without the check, rows would be mixed up
        "seed": lambda: store.begin_epoch(replace(order, seed=rank)),
    }
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
        if name != "seed":  # which first ends the exchange of the epoch that was left
            assert torch.equal(before[0], store._rows) and torch.equal(before[1], store._visits)
    return said


def test_refuses_with_a_reason(ranks):
    for rank, said in enumerate(ranks.run(messages)):
        assert f"is not on rank {rank}: call begin_epoch" in said["elsewhere"]
        assert said["update"] == said["step"] == said["elsewhere"]
        assert "belong to step 2 and the last step was 0" in said["jump"]
        assert said["world_size"] == "the order's world_size is 3: give an order with 4"
        assert said["num_samples"] == "the order's num_samples is 31: give an order with 30"
        assert said["exchange"].startswith("exchange is 'fast'")
        assert said["chunk_rows"].startswith("chunk_rows is 0")
        assert "rank 1 has another order" in said["seed"]


def wrong_on_one_rank(case, folders):
    """Ranks that do not agree must all be told, none left waiting; → what each was told."""
    rank, N, prior = dist.get_rank(), 40, Dirichlet(5, 0.9, 5.0)
    odd = rank == 1
    try:
        if case == "prior":
            store = ShardedTargets(N, Dirichlet(5, 0.95, 5.0) if odd else prior)
            store.begin_epoch(EpochOrder(N, 2, MOST))
        elif case == "order":
            store = ShardedTargets(N, prior)
            store.begin_epoch(EpochOrder(N + odd, 2, MOST))
        else:
            store = ShardedTargets(N, prior)
            store.save(folders[0])
            store.update(torch.tensor([rank]), torch.full((1, 5), 0.2))
            store.save(folders[1])
            store.load(folders[odd])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "told"), [("prior", "another store"), ("order", "num_samples is 41"), ("load", "same")]
)
def test_ranks_that_disagree_are_all_told(ranks, tmp_path, case, told):
    said = ranks.run(wrong_on_one_rank, case, (str(tmp_path / "a"), str(tmp_path / "b")))
    assert told in said[1] and "nothing" not in said


def largest_parcels(chunk_rows):
    store = ShardedTargets(4003, Dirichlet(50, 0.9, 5.0), chunk_rows=chunk_rows)
    most, put = 0, store._put

    def watched(*args):
        nonlocal most
        most = max(most, sum(parcel.nbytes for parcel in store._parcels.values()))
        put(*args)

    store._put = watched
    for epoch in range(3):
        store.begin_epoch(EpochOrder(4003, 8, MOST, epoch=epoch))
    return most


def test_an_exchange_takes_two_chunks_of_memory(ranks):
    """What is sent and what is received, and a row a peer for each of the four parcels."""
    for most in ranks.run(largest_parcels, 256):
        assert 0 < most <= (2 * 256 + 4 * MOST) * 2 * (50 + 1)


def load_damaged(folder):
    store = ShardedTargets(40, Dirichlet(5, 0.9, 5.0))
    own = torch.arange(dist.get_rank(), 40, MOST)
    store.update(own, torch.full((len(own), 5), 0.2))
    store.save(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(folder) / "targets-00002-of-00004.arrow"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    dist.barrier()
    before = store._rows.clone()
    try:
        store.load(folder)
    except ValueError as error:
        assert torch.equal(before, store._rows)
        return str(error)
    return "loaded"


def test_every_rank_refuses_a_folder_that_one_finds_damaged(ranks, tmp_path):
    said = ranks.run(load_damaged, str(tmp_path))
    assert "targets-00002-of-00004.arrow is damaged" in said[2]  # each file is read by one rank
    assert all(said[rank] == "rank 2 could not: see its own message" for rank in (0, 1, 3))


def test_needs_a_process_group():
    with pytest.raises(ValueError, match="there is no process group"):
        ShardedTargets(10, Dirichlet(5, 0.9, 5.0))


# ---- the harness itself


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def wait_for_ever():
    if dist.get_rank() == 1:
        dist.barrier()


def test_the_harness_reports_the_failing_rank_and_recovers():
    with Ranks(2, timeout=30) as two:
        with pytest.raises(
            RankError, match=r"(?s)rank 1 of 2 failed.*ZeroDivisionError: on purpose"
        ):
            two.run(fail_on, 1)
        assert two.run(dist.get_world_size) == [2, 2]
        with pytest.raises(RankError, match=r"ranks \[1\] of 2 did not finish in time"):
            two.run(wait_for_ever, timeout=1)
