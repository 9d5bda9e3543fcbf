"""EpochOrder: everyone once, the same global batches for any world size, exact resumption."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_dist.data.order import PADDING, EpochOrder
from dps_dist.targets import checks

SHUFFLES = st.sampled_from(["global", "shard", "none"])


@st.composite
def orders(draw, **fixed):
    options = {
        "num_samples": draw(st.integers(1, 200)),
        "batch_size": draw(st.integers(1, 9)),
        "world_size": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 1000)),
        "shuffle": draw(SHUFFLES),
        "drop_last": draw(st.booleans()),
    }
    return EpochOrder(**{**options, **fixed})


def visited(order: EpochOrder) -> list[int]:
    """What all ranks visit, through the public `batch`, in order of steps."""
    rows = [
        order.batch(step, rank) for step in range(order.steps) for rank in range(order.world_size)
    ]
    return [int(i) for row in rows for i in row if i != PADDING]


def global_batch(order: EpochOrder, step: int) -> set[int]:
    return {int(i) for rank in range(order.world_size) for i in order.batch(step, rank)}


@given(orders())
def test_every_sample_once(order):
    seen = visited(order)
    left_out = order.num_samples - len(seen)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(order.num_samples))
    assert left_out == (order.num_samples % order.global_batch_size if order.drop_last else 0)


@given(orders())
def test_ranks_have_equal_steps_and_full_batches(order):
    assert order.assignment.shape == (order.steps * order.batch_size, order.world_size)
    for rank in range(order.world_size):
        for step in range(order.steps):
            batch = order.batch(step, rank)
            assert batch.shape == (order.batch_size,)
            assert PADDING not in batch or (not order.drop_last and step == order.steps - 1)


@given(orders())
def test_padding_only_ends_a_column(order):
    padded = order.assignment == PADDING
    assert (np.diff(padded.astype(int), axis=0) >= 0).all()


@given(st.integers(1, 300), st.integers(0, 99), st.integers(0, 9), st.booleans(), st.integers(1, 4))
def test_the_global_batch_does_not_depend_on_the_world_size(n, seed, epoch, drop_last, scale):
    whole = 12 * scale
    by_world = [
        EpochOrder(n, whole // w, w, seed=seed, epoch=epoch, drop_last=drop_last)
        for w in (1, 2, 3, 4, 6, 12)
    ]
    assert len({order.steps for order in by_world}) == 1
    for step in range(by_world[0].steps):
        assert len({frozenset(global_batch(order, step)) for order in by_world}) == 1


@st.composite
def uneven_orders(draw, **fixed):
    """Steps of any number of samples, which the ranks need not share evenly."""
    options = {
        "num_samples": draw(st.integers(1, 200)),
        "global_batch": draw(st.integers(1, 20)),
        "world_size": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 2**40)),
        "shuffle": draw(SHUFFLES),
        "drop_last": draw(st.booleans()),
    }
    return EpochOrder.of_batch(**{**options, **fixed})


@given(uneven_orders())
def test_an_uneven_batch_is_dealt_in_turn(order):
    """Everyone once; no rank has more than its share of a step, nor of the epoch."""
    W, G = order.world_size, order.global_batch_size
    seen = visited(order)
    assert len(set(seen)) == len(seen)
    assert order.num_samples - len(seen) == (order.num_samples % G if order.drop_last else 0)
    real = (order.assignment != PADDING).reshape(order.steps, order.batch_size, W)
    full = real if order.drop_last else real[:-1]
    assert (full.sum((1, 2)) == G).all()
    assert np.ptp(full.sum(1), axis=-1).max(initial=0) <= 1
    assert real.sum((0, 1)).max(initial=0) <= -(-order.num_samples // W)
    assert (np.diff(real.astype(int), axis=1) <= 0).all()  # padding only ends a batch
    if order.shuffle == "shard":
        for rank in range(W):
            column = order.assignment[:, rank]
            assert (column[column != PADDING] % W == rank).all()


@given(uneven_orders(), st.integers(1, 6), st.data())
def test_uneven_batches_hold_the_same_samples_on_any_number_of_ranks(order, world_size, data):
    if order.shuffle == "shard":
        return  # its partitions depend on the number of ranks
    done = data.draw(st.integers(0, order.steps))
    fields = {**vars_of(order), "position": order.position_after(done)}
    for name in ("batch_size", "world_size"):
        fields.pop(name)
    other = EpochOrder.of_batch(world_size=world_size, **fields)
    assert other.steps == (order.steps - done if done < order.steps else 0)
    for step in range(other.steps):
        ours, theirs = global_batch(order, done + step), global_batch(other, step)
        assert ours - {PADDING} == theirs - {PADDING}


@given(uneven_orders(drop_last=True), st.data())
def test_uneven_batches_resume_exactly(order, data):
    done = data.draw(st.integers(0, order.steps))
    resumed = EpochOrder(**{**vars_of(order), "position": order.position_after(done)})
    np.testing.assert_array_equal(resumed.assignment, order.assignment[done * order.batch_size :])


@pytest.mark.parametrize("global_batch", [3, 7])
def test_refuses_a_batch_that_does_not_fill_the_ranks(global_batch):
    with pytest.raises(ValueError, match=f"global_batch is {global_batch}: give 4 to 6"):
        EpochOrder(10, 2, 3, global_batch=global_batch)


@given(orders(), st.data())
def test_resuming_continues_exactly(order, data):
    done = data.draw(st.integers(0, order.steps))
    resumed = EpochOrder(**{**vars_of(order), "position": order.position_after(done)})
    if order.drop_last or done < order.steps:
        np.testing.assert_array_equal(
            resumed.assignment, order.assignment[done * order.batch_size :]
        )
    else:
        assert resumed.steps == 0


@given(orders(shuffle="global", drop_last=False), st.data())
def test_resuming_with_another_world_size_visits_the_rest(order, data):
    done = data.draw(st.integers(0, order.steps))
    position = order.position_after(done)
    before = EpochOrder(**vars_of(order))
    first = [
        int(i)
        for step in range(done)
        for rank in range(order.world_size)
        for i in before.batch(step, rank)
        if i != PADDING
    ]
    changed = {
        "world_size": data.draw(st.integers(1, 5)),
        "batch_size": data.draw(st.integers(1, 9)),
    }
    rest = visited(EpochOrder(**{**vars_of(order), **changed, "position": position}))
    assert sorted(first + rest) == list(range(order.num_samples))


@given(st.sampled_from(["global", "shard"]), st.integers(1, 4), st.integers(0, 2**32))
def test_epochs_and_seeds_differ(shuffle, world_size, seed):
    def flat(seed: int, epoch: int) -> bytes:
        order = EpochOrder(400, 4, world_size, seed=seed, epoch=epoch, shuffle=shuffle)
        return order.assignment.tobytes()

    assert flat(seed, 0) == flat(seed, 0)
    assert len({flat(seed, 0), flat(seed, 1), flat(seed + 1, 0), flat(seed + 1, 1)}) == 4


@given(orders(shuffle="shard"))
def test_shard_stays_in_its_partition(order):
    for rank in range(order.world_size):
        column = order.assignment[:, rank]
        assert (column[column != PADDING] % order.world_size == rank).all()


def test_none_is_the_stored_order():
    order = EpochOrder(7, 2, 2, shuffle="none", drop_last=False)
    assert order.batch(0, 0).tolist() == [0, 2]
    assert order.batch(0, 1).tolist() == [1, 3]
    assert order.batch(1, 0).tolist() == [4, 6]
    assert order.batch(1, 1).tolist() == [5, PADDING]


def test_padding_is_the_same_to_loader_and_targets():
    """They do not import each other, so each has its own."""
    assert PADDING == checks.PADDING


def test_the_permutation_is_even():
    """Sample 0's place over many epochs: each tenth of the epoch about equally often."""
    places = [
        int(np.argmax(EpochOrder(100, 1, seed=3, epoch=e).assignment[:, 0] == 0))
        for e in range(2000)
    ]
    counts = np.bincount(np.array(places) // 10, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-square, 9 degrees of freedom, p = .001


def test_golden_order():
    """A changed order would silently make old runs resume wrongly."""
    order = EpochOrder(10, 2, 2, seed=7, epoch=3, drop_last=False)
    assert order.assignment.T.tolist() == [[3, 4, 8, 9, 1, -1], [5, 7, 0, 2, 6, -1]]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_samples", 0, "num_samples is 0: give 1"),
        ("batch_size", 0, "batch_size is 0"),
        ("world_size", 0, "world_size is 0"),
        ("seed", -1, "seed is -1"),
        ("shuffle", "quasi", "shuffle is 'quasi': give global, shard or none"),
        ("position", 11, "position is 11: give at most num_samples, 10"),
    ],
)
def test_refuses(field, value, said):
    with pytest.raises(ValueError, match=said):
        EpochOrder(**{"num_samples": 10, "batch_size": 2, field: value})


def test_shard_refuses_to_resume_between_ranks():
    with pytest.raises(ValueError, match="multiple of world_size, 3"):
        EpochOrder(10, 2, 3, shuffle="shard", position=4)


def test_shard_can_say_that_an_epoch_is_over():
    order = EpochOrder(10, 2, 3, shuffle="shard", drop_last=False)
    over = EpochOrder(
        10, 2, 3, shuffle="shard", drop_last=False, position=order.position_after(order.steps)
    )
    assert over.steps == 0


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (2, 0), (0, 2), (0, -1)])
def test_batch_refuses_what_is_not_there(step, rank):
    with pytest.raises(IndexError):
        EpochOrder(8, 2, 2).batch(step, rank)


def vars_of(order: EpochOrder) -> dict:
    return {name: getattr(order, name) for name in order.__dataclass_fields__}
