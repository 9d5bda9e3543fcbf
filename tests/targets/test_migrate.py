"""The plan of an epoch's moves, carried out on sets: both sides agree, all fits, all is in time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_dist.data.order import EpochOrder
from dps_dist.targets import migrate


class Simulated:
    """W ranks as sets of samples; raises where real ranks would mix up rows or run out of room."""

    def __init__(self, num_samples, world_size):
        self.N, self.W = num_samples, world_size
        self.holder = (np.arange(num_samples) % world_size).astype(np.int16)
        self.ranks = [set(range(rank, num_samples, world_size)) for rank in range(world_size)]
        self.capacity = -(-num_samples // world_size) + migrate.slack_rows(world_size)
        self.largest = 0

    def plans(self, order, by_visit=False):
        plans = [migrate.plan(order, self.holder, rank, by_visit) for rank in range(self.W)]
        for rank, plan in enumerate(plans):
            assert (plan.counts == plans[0].counts).all()
            assert (plan.holder == plans[0].holder).all()
            other = migrate.plan(
                order, self.holder, rank, not by_visit
            )  # the same in another order
            assert (plan.counts == other.counts).all() and (plan.holder == other.holder).all()
            assert sorted(plan.leaving) == sorted(other.leaving)
            assert sorted(plan.arriving) == sorted(other.arriving)
        return plans

    def run(self, plans, start, stop, rounds):
        turns = [plan.between(start, stop, rounds) for plan in plans]
        parcels = {}
        for source, turn in enumerate(turns):
            parts = np.split(turn.leaving, np.cumsum(turn.send_splits)[:-1])
            parcels.update({(source, to): part for to, part in enumerate(parts)})
            for sample in turn.leaving.tolist():
                self.ranks[source].remove(sample)
        for to, turn in enumerate(turns):
            parts = np.split(turn.arriving, np.cumsum(turn.receive_splits)[:-1])
            for source, part in enumerate(parts):
                assert part.tolist() == parcels[source, to].tolist()
            self.ranks[to].update(turn.arriving.tolist())
            self.largest = max(self.largest, len(turn.leaving), len(turn.arriving))
            assert len(self.ranks[to]) <= self.capacity

    def finish(self, plans):
        self.holder = plans[0].holder
        for rank in range(self.W):
            assert self.ranks[rank] == set(np.flatnonzero(self.holder == rank).tolist())
        share = -(-self.N // self.W)
        assert max(len(samples) for samples in self.ranks) <= share


@st.composite
def runs(draw):
    world_size, num_samples = draw(st.integers(1, 9)), draw(st.integers(1, 200))
    global_batch = draw(st.integers(world_size, 12 * world_size))
    some = st.sets(st.integers(0, num_samples - 1), min_size=1)
    only = draw(st.none() | some.map(lambda samples: np.array(sorted(samples), np.int32)))
    visits = num_samples if only is None else len(only)
    orders = []
    for epoch in range(draw(st.integers(1, 4))):
        shuffle = draw(st.sampled_from(["global", "global", "global", "shard", "none"]))
        position = draw(st.one_of(st.just(0), st.integers(0, visits)))
        if shuffle == "shard":
            position -= position % world_size
        orders.append(
            EpochOrder.of_batch(
                num_samples,
                global_batch,
                world_size,
                seed=draw(st.integers(0, 5)),
                epoch=epoch,
                shuffle=shuffle,
                drop_last=draw(st.booleans()),
                position=position,
                only=only,
            )
        )
    return orders


def needed(order, step, rank):
    return {sample for sample in order.batch(step, rank).tolist() if sample >= 0}


@settings(max_examples=150, deadline=None)
@given(orders=runs(), chunk_rows=st.integers(1, 60))
def test_bulk_brings_every_row_to_its_visit(orders, chunk_rows):
    ranks = Simulated(orders[0].num_samples, orders[0].world_size)
    for order in orders:
        plans = ranks.plans(order)
        rounds = plans[0].rounds(chunk_rows)
        for done in range(rounds):
            ranks.run(plans, done, done + 1, rounds)
        ranks.finish(plans)
        for rank in range(order.world_size):
            for step in range(order.steps):
                assert needed(order, step, rank) <= ranks.ranks[rank]
    assert ranks.largest <= max(chunk_rows, 2 * order.world_size)


@settings(max_examples=150, deadline=None)
@given(orders=runs(), stop=st.integers(0, 30))
def test_streaming_has_every_row_in_time(orders, stop):
    ranks = Simulated(orders[0].num_samples, orders[0].world_size)
    for order in orders:
        plans = ranks.plans(order, by_visit=True)
        rounds, done = order.steps, 0
        if plans[0].counts.any() and rounds:
            head_start = max(plan.head_start for plan in plans)
            for step in range(min(stop, order.steps)):  # then interrupted
                target = min(step + head_start, rounds)
                ranks.run(plans, done, target, rounds)
                done = target
                for rank in range(order.world_size):
                    assert needed(order, step, rank) <= ranks.ranks[rank]
            ranks.run(plans, done, rounds, rounds)
        ranks.finish(plans)


@pytest.mark.parametrize("shuffle", ["shard", "none"])
def test_partitions_at_home_need_no_exchange(shuffle):
    ranks = Simulated(103, 4)
    for epoch in range(3):
        order = EpochOrder(103, 5, 4, epoch=epoch, shuffle=shuffle, drop_last=bool(epoch % 2))
        for plan in ranks.plans(order):
            assert not plan.counts.any()


def test_streaming_starts_with_a_small_part():
    """The head start is what chance has put ahead of its time: of order W/√N, not everything."""
    order = EpochOrder(50_000, 25, 4, epoch=1)
    home = (np.arange(50_000) % 4).astype(np.int16)
    head_start = max(migrate.plan(order, home, rank, True).head_start for rank in range(4))
    assert 1 <= head_start < 0.1 * order.steps


def test_an_order_with_a_sample_twice_is_refused():
    order = EpochOrder(8, 2, 2)
    twice = order.assignment.copy()
    twice[0, 0] = twice[1, 1]
    order.__dict__["assignment"] = twice
    with pytest.raises(ValueError, match="twice"):
        migrate.plan(order, np.zeros(8, np.int16), 0)
