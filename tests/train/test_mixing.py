"""The randomness of a step: what it depends on, and that it does what its numbers say."""

import numpy as np
import pytest
import torch

from dps_dist.config import Augment, Config, Data
from dps_dist.data.augment import normalized
from dps_dist.data.loader import Batch
from dps_dist.methods import Strong
from dps_dist.methods.baseline import Baseline
from dps_dist.train.manifest import Moment
from dps_dist.train.mixing import mixed, seeded

AT = Moment(epoch=3, position=128, step=50)
B, SIDE = 11, 8


def batch_of(rows=B, padding=0):
    """Every pixel of row b is 1 + b, so that it shows where it comes from."""
    images = (1.0 + torch.arange(rows)).view(-1, 1, 1, 1).expand(rows, 3, SIDE, SIDE).clone()
    index = torch.arange(rows) + 100
    weight = torch.ones(rows)
    if padding:
        images[-padding:], index[-padding:], weight[-padding:] = 0, -1, 0
    return Batch(images, torch.arange(rows) % 10, index, weight, (2 * images,), padding)


def shown(mix, part="all", at=AT, rank=0, seed=0, batch=None, **fields):
    config = Config(augment=Augment(mix=mix, cutout_size=4, **fields))
    method = Baseline()
    method.mixes = part
    return mixed(batch or batch_of(), config, method, seeded(seed, at, rank))


# ---- what the draws depend on


def drawn(*key):
    """Numbers of the step's own generator, and of torch's, which dropout uses."""
    return (torch.rand(3, generator=seeded(*key)), torch.rand(3))


def test_the_same_step_draws_the_same_whatever_was_drawn_before():
    first = drawn(5, AT, 1)
    torch.manual_seed(999)
    torch.rand(17)
    again = drawn(5, AT, 1)
    other_step_number = drawn(5, Moment(AT.epoch, AT.position, 51), 1)
    for own, same, resumed in zip(first, again, other_step_number, strict=True):
        assert torch.equal(own, same) and torch.equal(own, resumed)


def test_every_seed_epoch_position_and_rank_draws_something_else():
    keys = [(seed, Moment(e, p, 0), rank) for seed in (0, 1) for e in (0, 1) for p in (0, 64)
            for rank in (0, 1)]  # fmt: skip
    for numbers in zip(*(drawn(*key) for key in keys), strict=True):
        assert len({tuple(one.tolist()) for one in numbers}) == len(keys)


def test_dropout_drops_the_same_in_a_resumed_step():
    dropout, ones = torch.nn.Dropout(0.5), torch.ones(1000)
    seeded(0, AT, 0)
    first = dropout(ones)
    seeded(0, AT, 1)
    assert not torch.equal(dropout(ones), first)
    seeded(0, AT, 0)
    assert torch.equal(dropout(ones), first)


@pytest.mark.parametrize("mix", ["cutmix", "cutout", "mixup"])
def test_a_step_mixes_alike_again_and_other_steps_otherwise(mix):
    first, again = shown(mix), shown(mix)
    assert torch.equal(first.images, again.images) and first.mix.lam == again.mix.lam
    assert torch.equal(first.mix.partner, again.mix.partner)
    others = [shown(mix, seed=1), shown(mix, rank=1), shown(mix, at=Moment(4, 128, 50))]
    assert not any(torch.equal(first.images, other.images) for other in others)


# ---- what they do


@pytest.mark.parametrize(("part", "first"), [("all", 0), ("half", 6)])
@pytest.mark.parametrize("position", range(0, 640, 64))
def test_cutmix_takes_a_box_from_the_partner(part, first, position):
    batch = batch_of()
    result = shown("cutmix", part, Moment(0, position, 0), batch=batch)
    assert result.mix.first == first
    assert torch.equal(result.images[:first], batch.images[:first])
    own = batch.images[first:]
    other = own[result.mix.partner]
    assert ((result.images[first:] == own) | (result.images[first:] == other)).all()
    foreign = (result.images[first:] != own)[own[:, 0, 0, 0] != other[:, 0, 0, 0]]
    share = foreign.double().mean((1, 2, 3))
    np.testing.assert_allclose(share, 1 - result.mix.lam, atol=1e-9)


@pytest.mark.parametrize(("part", "first"), [("all", 0), ("half", 6)])
def test_mixup_is_a_weighted_mean(part, first):
    batch = batch_of()
    result = shown("mixup", part, batch=batch)
    assert result.mix.first == first and 0 < result.mix.lam < 1
    own = batch.images[first:].double()
    mean = result.mix.lam * own + (1 - result.mix.lam) * own[result.mix.partner]
    np.testing.assert_allclose(result.images[first:], mean, rtol=1e-6)
    assert torch.equal(result.images[:first], batch.images[:first])


@pytest.mark.parametrize(("part", "first"), [("all", 0), ("half", 6)])
def test_cutout_blanks_a_square_and_mixes_nothing(part, first):
    batch = batch_of()
    result = shown("cutout", part, batch=batch)
    assert result.mix.first == first and result.mix.lam == 1
    assert result.mix.partner.tolist() == list(range(B - first))
    blank = result.images == 0
    assert not blank[:first].any() and torch.equal(result.images[~blank], batch.images[~blank])
    for image in blank[first:]:
        rows, columns = image[0].any(1).nonzero().ravel(), image[0].any(0).nonzero().ravel()
        assert 1 <= len(rows) <= 4 and 1 <= len(columns) <= 4
        assert image[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()


@pytest.mark.parametrize("mix", ["none", "cutmix", "cutout", "mixup"])
def test_the_rest_of_the_batch_is_passed_on(mix):
    batch = batch_of()
    before = batch.images.clone()
    result = shown(mix, batch=batch)
    assert result.labels is batch.labels and result.index is batch.index
    assert len(result.other_views) == 1 and result.other_views[0].mix is result.mix
    assert torch.equal(batch.images, before)  # not changed in place
    assert result.images.is_contiguous(memory_format=torch.channels_last) or mix == "none"


def test_nothing_is_mixed_unless_asked():
    batch = batch_of()
    for result in (shown("none", batch=batch), shown("cutmix", batch=batch, mix_probability=0.0)):
        assert result.images is batch.images and result.mix is None


def test_as_many_batches_are_mixed_as_asked():
    steps = [Moment(0, 64 * k, k) for k in range(400)]
    share = np.mean([shown("mixup", at=at, mix_probability=0.3).mix is not None for at in steps])
    assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / 400)


def test_the_half_of_a_single_row_is_nothing():
    assert shown("cutmix", "half", batch=batch_of(1)).mix is None
    assert shown("cutmix", "half", batch=batch_of(2)).mix.first == 1


@pytest.mark.parametrize("part", ["all", "half"])
def test_a_sample_is_not_mixed_with_padding(part):
    """Its black image has no class."""
    for position in range(0, 640, 64):
        batch = batch_of(2, padding=1)
        result = shown("mixup", part, Moment(0, position, 0), batch=batch)
        assert result.mix is None and torch.equal(result.images, batch.images)


@pytest.mark.parametrize("mix", ["cutmix", "mixup"])
@pytest.mark.parametrize("part", ["all", "half"])
def test_all_views_of_a_sample_are_mixed_alike(mix, part):
    """The second view is twice the first: so it is after mixing."""
    for position in range(0, 640, 64):
        result = shown(mix, part, Moment(0, position, 0))
        assert torch.equal(result.other_views[0].images, 2 * result.images)


def test_each_view_has_a_square_of_its_own():
    result = shown("cutout")
    view = result.other_views[0].images
    assert (view == 0).any((1, 2, 3)).all() and not torch.equal(view == 0, result.images == 0)


# ---- strong views


def strongly(at=AT, padding=0, erase=0.5):
    """One weak view and two strong ones of random images."""
    data = Data(mean=(0.2, 0.5, 0.6), std=(0.3, 0.2, 0.25))
    random = torch.Generator().manual_seed(3)
    pixels = torch.randint(256, (3, B, 3, 32, 32), generator=random, dtype=torch.uint8)
    weak, *others = (normalized(view, data.mean, data.std) for view in pixels)
    index = torch.arange(B)
    batch = Batch(weak, index % 10, index, torch.ones(B), tuple(others), padding)
    method = Baseline()
    method.strong = Strong(erase)
    return batch, mixed(batch, Config(data=data), method, seeded(0, at, 0))


def test_strong_views_are_changed_and_mixed_each_by_itself():
    batch, result = strongly()
    assert result.images is batch.images and result.mix is None
    one, other = result.other_views
    for view, plain in zip(result.other_views, batch.other_views, strict=True):
        assert view.mix.first == 0 and view.images.shape == plain.shape
        assert view.images.is_contiguous(memory_format=torch.channels_last)
        assert (view.images != plain).flatten(1).any(1).float().mean() > 0.5
    assert one.mix.lam != other.mix.lam and not torch.equal(one.mix.partner, other.mix.partner)


def test_strong_views_are_the_same_again():
    for one, again in zip(strongly()[1].other_views, strongly()[1].other_views, strict=True):
        assert torch.equal(one.images, again.images) and one.mix.lam == again.mix.lam
    elsewhere = strongly(Moment(3, 192, 51))[1].other_views[0]
    assert not torch.equal(elsewhere.images, one.images)


def test_strong_views_of_a_padded_batch_are_not_mixed():
    assert all(view.mix is None for view in strongly(padding=1)[1].other_views)
