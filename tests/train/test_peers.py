"""Peers on real processes, alone and three together: each exchange against what was put in."""

import pytest
import torch
import torch.distributed as dist

from dps_dist.train.peers import Peers
from tests.spawn import Ranks

TEXTS = ["", "step 12", "größer, 数字, 🎲", "a" * 100_000, "two\nlines\0", None]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, timeout=200) as ranks:
        yield ranks


@pytest.fixture(params=[1, 3])
def world_size(request):
    return request.param


def identity():
    peers = Peers()
    return peers.rank, peers.world_size


def test_who_it_is(ranks, world_size):
    found = ranks.run(identity, world_size=world_size)
    assert found == [(rank, world_size) for rank in range(world_size)]


def told():
    """What each rank hears of rank 0; the others have something else to say."""
    peers = Peers()
    others = ["not this", None, ""] * len(TEXTS)
    say = TEXTS if peers.rank == 0 else others[peers.rank :]
    return [peers.tell(text) for text, _ in zip(say, TEXTS, strict=False)]


def test_everyone_hears_rank_0(ranks, world_size):
    assert ranks.run(told, world_size=world_size) == [TEXTS] * world_size


def gathered():
    peers = Peers()
    listed = peers.gather([peers.rank, 0.5, True])
    as_tensor = peers.gather(torch.tensor([2**40 + peers.rank]))
    return listed.tolist(), as_tensor.tolist()


def test_gather(ranks, world_size):
    listed = [[rank, 0.5, 1.0] for rank in range(world_size)]
    as_tensor = [[2**40 + rank] for rank in range(world_size)]
    assert ranks.run(gathered, world_size=world_size) == [(listed, as_tensor)] * world_size


def summed():
    """Numbers whose sum depends on the order in which they are added."""
    peers = Peers()
    values = torch.tensor([[1e16, -1e16, 1.0][peers.rank], peers.rank + 1.0], dtype=torch.float64)
    grid = torch.full((2, 3), 10.0**peers.rank, dtype=torch.float32)
    return peers.sum(values).tolist(), peers.sum(grid)


@pytest.mark.parametrize(
    ("world_size", "first", "second", "entry"), [(1, 1e16, 1.0, 1.0), (3, 1.0, 6.0, 111.0)]
)
def test_sum_is_added_in_the_order_of_ranks(ranks, world_size, first, second, entry):
    for values, grid in ranks.run(summed, world_size=world_size):
        assert values == [first, second]
        assert torch.equal(grid, torch.full((2, 3), entry, dtype=torch.float64))


def rows_of_all():
    """Rank r has r + 1 rows of its own number, rank 1 none."""
    peers = Peers()
    own = 0 if peers.rank == 1 else peers.rank + 1
    numbers = peers.rows(torch.full((own, 2), peers.rank))
    tenths = peers.rows(torch.full((own,), 0.1, dtype=torch.float64))
    return numbers, tenths, peers.rows(torch.full((own, 2), peers.rank), everywhere=False)


def test_rows_of_all_ranks_one_after_the_other(ranks, world_size):
    expected = [[0, 0]] if world_size == 1 else [[0, 0], *[[2, 2]] * 3]
    found = ranks.run(rows_of_all, world_size=world_size)
    for rank, (numbers, tenths, on_first) in enumerate(found):
        assert on_first.tolist() == (expected if rank == 0 else [])
        assert numbers.tolist() == expected and numbers.dtype == torch.int64
        assert tenths.tolist() == [0.1] * len(expected)


def followed():
    """As batch norm's buffers are: numbers and a count without dimension."""
    peers = Peers()
    own = [torch.full((4,), float(peers.rank)), torch.tensor(10 + peers.rank), torch.zeros(0)]
    peers.follow(iter(own))
    return own


def test_follow_takes_what_rank_0_has(ranks, world_size):
    for mean, count, empty in ranks.run(followed, world_size=world_size):
        assert mean.tolist() == [0.0] * 4 and count == 10 and len(empty) == 0


def own_groups():
    """Messages of one group do not mix with those of another that is under way."""
    peers = Peers()
    group = peers.new_group()
    everyone = [torch.zeros(1) for _ in range(peers.world_size)]
    waiting = dist.all_gather(everyone, torch.ones(1), group=group, async_op=True)
    peers.barrier()
    gathered = peers.gather([7.0]).tolist()
    waiting.wait()
    return gathered, [int(one) for one in everyone]


def test_groups_are_apart(ranks, world_size):
    expected = [[7.0]] * world_size, [1] * world_size
    assert ranks.run(own_groups, world_size=world_size) == [expected] * world_size
