"""Samples that are held out of training, and orders that visit only some samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_dist.data.hold_out import split
from dps_dist.data.order import PADDING, EpochOrder
from dps_dist.errors import InputError


@given(st.integers(2, 300), st.data(), st.integers(0, 5))
def test_each_sample_is_trained_on_or_held_out(num_samples, data, seed):
    count = data.draw(st.integers(1, num_samples - 1))
    trained, held_out = split(num_samples, count, seed)
    assert len(held_out) == count
    assert sorted([*trained, *held_out]) == list(range(num_samples))
    assert (np.diff(trained) > 0).all() and (np.diff(held_out) > 0).all()


def test_the_seed_decides_and_nothing_else():
    first, again, other = split(500, 50, 0), split(500, 50, 0), split(500, 50, 1)
    assert (first.held_out == again.held_out).all()
    assert 0 < len(np.intersect1d(first.held_out, other.held_out)) < 20  # 5 are expected


def test_nothing_is_held_out_unless_asked():
    assert split(10, 0, 0) == (None, None)


def test_something_must_be_left_to_train_on():
    with pytest.raises(InputError, match=r"data.hold_out is 10: there are 10 images; give less"):
        split(10, 10, 0)


@given(
    st.integers(2, 60),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from(["global", "shard", "none"]),
    st.booleans(),
    st.data(),
)
def test_an_order_of_some_samples(num_samples, batch, world_size, shuffle, drop_last, data):
    """It is that of as many samples as there are to visit, with their numbers put in."""
    only = data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1))
    only = np.array(sorted(only), np.int32)
    fields = {"seed": 3, "epoch": 2, "shuffle": shuffle, "drop_last": drop_last}
    some = EpochOrder.of_batch(num_samples, batch, world_size, only=only, **fields)
    like = EpochOrder.of_batch(len(only), batch, world_size, **fields)
    assert some.steps == like.steps and some.num_samples == num_samples
    expected = np.where(like.assignment == PADDING, PADDING, only[like.assignment])
    assert (some.assignment == expected).all()
    assert some.position_after(some.steps) == like.position_after(like.steps)


def test_an_order_of_some_samples_goes_on_in_mid_epoch():
    only = np.arange(0, 100, 3, dtype=np.int32)
    whole = EpochOrder.of_batch(100, 6, 2, only=only)
    rest = EpochOrder.of_batch(100, 6, 2, only=only, position=whole.position_after(2))
    assert (rest.assignment == whole.assignment[2 * whole.batch_size :]).all()
