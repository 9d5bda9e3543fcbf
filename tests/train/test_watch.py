"""Watch on real processes: its sums, when it looks, and how it says that a loss is not finite."""

import time

import numpy as np
import pytest
import torch

from dps_dist.data.loader import Batch
from dps_dist.train.peers import Peers
from dps_dist.train.watch import NonFiniteLossError, Watch
from tests.spawn import Ranks

B, K = 5, 4


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, timeout=200) as ranks:
        yield ranks


@pytest.fixture(params=[1, 2])
def world_size(request):
    return request.param


def step_of(rank, step, padding=0):
    """A batch with its losses and logits; padding has a loss, too."""
    rng = np.random.default_rng([rank, step])
    index = torch.arange(B) + 100 * rank + 10 * step
    loss, logits = torch.from_numpy(rng.exponential(size=B)), rng.standard_normal((B, K))
    weight = torch.ones(B)
    if padding:
        index[-padding:], weight[-padding:], loss[-padding:] = -1, 0, 100.0
    labels = torch.from_numpy(rng.integers(K, size=B))
    batch = Batch(torch.zeros(B, 3, 1, 1), labels, index, weight, (), padding)
    return batch, loss.float(), torch.from_numpy(logits).float()


def add_epoch(watch, rank, first, stop):
    for step in range(first, stop):
        padding = 2 if step == stop - 1 else 0
        watch.add(step + 1, *step_of(rank, step, padding))


def epochs():
    peers = Peers()
    watch = Watch(peers, 0.0)
    figures = []
    for first in (0, 6):  # the second one begins at nothing
        add_epoch(watch, peers.rank, first, first + 6)
        figures.append(watch.end_epoch())
    return figures


def naive(world_size, first, stop):
    """Mean loss and accuracy over all samples that are not padding."""
    losses, right = [], []
    for rank in range(world_size):
        for step in range(first, stop):
            rows = B - 2 if step == stop - 1 else B
            batch, loss, logits = step_of(rank, step)
            losses += loss[:rows].tolist()
            right += (logits.argmax(-1) == batch.labels)[:rows].tolist()
    return {"train_loss": np.mean(losses), "train_accuracy": np.mean(right)}


def test_an_epochs_figures_are_means_over_its_samples(ranks, world_size):
    for first, second in ranks.run(epochs, world_size=world_size):
        assert first == pytest.approx(naive(world_size, 0, 6), rel=1e-6)
        assert second == pytest.approx(naive(world_size, 6, 12), rel=1e-6)


def half_an_epoch(state):
    """The sums in mid-epoch; or those of others taken over, and the whole epoch's figures."""
    peers = Peers()
    watch = Watch(peers, 0.0)
    if state is None:
        add_epoch(watch, peers.rank, 0, 3)
        return watch.state()
    watch.restore(state)
    taken_over = watch.state()
    add_epoch(watch, peers.rank, 3, 6)
    return taken_over, watch.end_epoch()


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_sums_go_on_with_any_number_of_ranks(ranks, before, after):
    everyone = ranks.run(half_an_epoch, None, world_size=before)
    assert all(torch.equal(one, everyone[0]) for one in everyone)
    assert everyone[0].shape == (before, 3)
    first, second = naive(before, 0, 3), naive(after, 3, 6)
    whole = {key: (before * first[key] + after * second[key]) / (before + after) for key in first}
    for state, figures in ranks.run(half_an_epoch, everyone[0], world_size=after):
        assert figures == pytest.approx(whole, rel=1e-6)
        if before == after:
            assert torch.equal(state, everyone[0])


# ---- looks


def looks(steps):
    """In which steps it looked, on a rank that is now fast and now slow."""
    peers = Peers()
    watch, found = Watch(peers, 0.0), []
    for step in range(steps):
        time.sleep(0.002 * ((step + peers.rank) % 3) if step < 100 else 0)
        batch, loss, logits = step_of(peers.rank, step)
        watch.add(step + 1, batch, loss, logits)
        look = watch.step_done()
        if look is not None:
            found.append((step, look.loss, look.save_is_due))
    return found


def test_all_ranks_look_in_the_same_steps_and_not_in_all(ranks, world_size):
    everyone = ranks.run(looks, 300, world_size=world_size)
    steps = [step for step, _, _ in everyone[0]]
    assert all([step for step, _, _ in own] == steps for own in everyone)
    assert steps[:2] == [0, 1] or steps[:2] == [0, 2]
    assert 3 < len(steps) < 150
    assert not any(due for own in everyone for _, _, due in own)
    for rank, own in enumerate(everyone):
        last = 0
        for step, loss, _ in own:
            recent = torch.cat([step_of(rank, s)[1] for s in range(last, step + 1)])
            assert loss == pytest.approx(float(recent.mean()), rel=1e-5)
            last = step + 1


def look_now():
    """Whether each of three steps looks, of which the second is to."""
    watch = Watch(Peers(), 0.0)
    watch._until_look = 10
    return [watch.step_done(now) is not None for now in (False, True, False)]


def test_looks_when_asked_to(ranks):
    assert ranks.run(look_now)[0][:2] == [False, True]


def steps_until_the_next_look(parts):
    """After ten steps of so many parts in a second, and after a look with none between."""
    watch, found = Watch(Peers(), 0.0), []
    watch._until_look = watch._between = 100
    for step in range(10):
        for _ in range(parts):
            watch.add(step + 1, *step_of(0, step))
        watch.step_done()
    watch._looked = time.monotonic() - 1
    for _ in range(2):
        watch.look()
        found.append(watch._until_look)
    return found


@pytest.mark.parametrize("parts", [1, 4])
def test_looks_twice_a_second_however_many_parts_a_step_has(ranks, parts):
    assert ranks.run(steps_until_the_next_look, parts, world_size=1) == [[5, 5]]


def saves_by_minutes():
    """Whether a save is due at once, later, and right after one. Rank 1's own clock is ahead."""
    peers = Peers()
    watch = Watch(peers, 0.6 / 60 if peers.rank == 0 else 1e-9)
    found = [watch.look().save_is_due]
    time.sleep(0.8)
    found.append(watch.look().save_is_due)
    found.append(watch.look().save_is_due)  # until it is made
    watch.saved()
    found.append(watch.look().save_is_due)
    return found


def test_minutes_are_those_of_rank_0(ranks, world_size):
    found = ranks.run(saves_by_minutes, world_size=world_size)
    assert found == [[False, True, True, False]] * world_size


# ---- losses that are not finite


def diverging(bad):
    """bad: (rank, step, row, value) of losses that are not finite. What is said, if anything."""
    peers = Peers()
    watch = Watch(peers, 0.0)
    for step in range(4):
        batch, loss, logits = step_of(peers.rank, step, padding=1)
        loss[-1] = float("nan")  # of padding, which nobody minds
        for rank, when, row, value in bad:
            if (rank, when) == (peers.rank, step):
                loss[row] = value
        watch.add(step + 1, batch, loss, logits)
    try:
        watch.look()
    except NonFiniteLossError as error:
        return str(error)
    return None


def test_padding_may_be_anything(ranks, world_size):
    assert ranks.run(diverging, [], world_size=world_size) == [None] * world_size


def test_every_rank_names_the_first_step_and_its_samples(ranks):
    inf, nan = float("inf"), float("nan")
    said = ranks.run(diverging, [(1, 2, 0, nan), (1, 2, 3, inf), (0, 3, 1, nan)])
    assert said[0] == said[1]
    assert said[0].startswith("the loss is not finite at step 3, samples 120, 123: lower optim.lr")
    both = ranks.run(diverging, [(0, 1, 2, -inf), (1, 1, 0, nan)])[0]
    assert "at step 2, samples 12, 110:" in both


def test_says_it_alone_too(ranks):
    said = ranks.run(diverging, [(0, 0, row, float("nan")) for row in range(4)], world_size=1)
    assert "at step 1, samples 0, 1, 2, 3:" in said[0]
