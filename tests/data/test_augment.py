"""Batch-level augmentation against what each method says of itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torchvision.transforms import v2

from dps_dist.data import augment
from dps_dist.data.augment import (
    beta,
    cutmix,
    cutout,
    denormalized,
    generator,
    mixup,
    normalized,
    strong_view,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def numbered(count=16, side=20):
    """Image b is the constant b + 1, so that every pixel tells where it is from."""
    images = torch.arange(1.0, count + 1).view(-1, 1, 1, 1).expand(count, 3, side, side)
    return images.contiguous(memory_format=torch.channels_last)


@given(st.integers(0, 10**6))
def test_cutmix_mixes_a_box_and_tells_its_area(seed):
    images = numbered()
    mixed = cutmix(images, 1.0, generator(seed, 0, 0))
    own = (mixed.images == images)[:, 0]
    other = (mixed.images == images[mixed.partner])[:, 0]
    assert (own | other).all()
    for b in range(len(images)):
        if mixed.partner[b] == b:
            continue
        assert own[b].float().mean().item() == pytest.approx(mixed.lam)
        box = other[b]
        rows, columns = box.any(1), box.any(0)
        assert torch.equal(box, rows[:, None] & columns[None, :])  # a rectangle
    assert sorted(mixed.partner.tolist()) == list(range(16))
    assert torch.equal(images, numbered())  # the input is left alone


@given(st.integers(0, 10**6), st.floats(0.1, 5))
def test_mixup_is_a_convex_combination(seed, alpha):
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    mixed = mixup(images, alpha, generator(seed, 1, 2))
    assert 0 <= mixed.lam <= 1
    for b, p in enumerate(mixed.partner.tolist()):
        torch.testing.assert_close(
            mixed.images[b], mixed.lam * images[b] + (1 - mixed.lam) * images[p]
        )


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_beta_has_its_distribution(alpha):
    draws = [beta(alpha, generator(0, 0, step)) for step in range(2000)]
    assert kstest(draws, "beta", args=(alpha, alpha)).pvalue > 1e-3


def test_beta_refuses_zero():
    with pytest.raises(ValueError, match="alpha is 0"):
        beta(0, generator(0, 0, 0))


@given(st.integers(0, 10**6), st.sampled_from([1, 4, 7, 16, 20]))
def test_cutout_zeroes_one_square_an_image(seed, size):
    images = numbered(side=20)
    out = cutout(images, size, generator(seed, 0, 0))
    holes = (out == 0).all(1)
    assert torch.equal(out, torch.where(holes[:, None], 0, images))
    for hole in holes:
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns[None, :])
        assert 0 < rows.sum() <= size and 0 < columns.sum() <= size
        inside = rows[1:-1].any() and not rows[0] and not rows[-1]
        assert rows.sum() == size or not inside
    assert len({hole.numpy().tobytes() for hole in holes}) > 1  # each image its own


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 24), st.integers(1, 24))
def test_cutout_draws_row_and_column_for_each_image_in_turn(seed, size, height, width):
    images = torch.randn(5, 3, height, width, generator=torch.Generator().manual_seed(seed))
    random, expected = generator(seed), images.clone()
    for image in expected:
        top, left = (
            int(torch.randint(n, (), generator=random)) - size // 2 for n in image.shape[1:]
        )
        image[:, max(top, 0) : top + size, max(left, 0) : left + size] *= 0
    out = cutout(images, size, generator(seed))
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))  # the sign of 0 as well


def test_cutout_reaches_every_pixel():
    hit = torch.zeros(8, 8)
    for step in range(100):
        hit += (cutout(torch.ones(4, 1, 8, 8), 3, generator(0, 0, step)) == 0).sum((0, 1))
    assert (hit > 0).all()


def test_a_step_can_be_repeated_and_steps_differ():
    def draw(*key):
        return torch.rand(4, generator=generator(*key)).tolist()

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (2**40, 3, 4)]
    assert len({tuple(draw(*key)) for key in keys}) == len(keys)
    assert all(draw(*key) == draw(*key) for key in keys)


def test_normalising_is_undone_exactly_and_is_torchvisions():
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3, 1).view(1, 3, 16, 16)
    images = normalized(pixels, MEAN, STD)
    assert torch.equal(denormalized(images, MEAN, STD), pixels)
    torch.testing.assert_close(images, v2.Normalize(MEAN, STD)(pixels / 255))


def test_means_go_to_a_device_once():
    """Each time they do, the host waits for all that a GPU has to do."""
    pixels = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    normalized(pixels, MEAN, STD)
    sent = augment._center_and_spread.cache_info().misses
    denormalized(normalized(pixels, MEAN, STD), MEAN, STD)
    assert augment._center_and_spread.cache_info().misses == sent


def test_strong_views_draw_for_each_image_and_can_be_repeated():
    pixels = torch.randint(0, 256, (1, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    images = normalized(pixels.to(torch.uint8).expand(24, 3, 32, 32), MEAN, STD)
    before = torch.random.get_rng_state()
    first = strong_view(images, MEAN, STD, generator(0, 0, 0))
    assert torch.equal(torch.random.get_rng_state(), before)  # the global state is left alone
    again = strong_view(images, MEAN, STD, generator(0, 0, 0))
    other = strong_view(images, MEAN, STD, generator(0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) > 12
    assert first.shape == images.shape
    assert first.is_contiguous(memory_format=torch.channels_last)


def test_random_erasing_follows_its_probability():
    images = normalized(torch.full((200, 3, 32, 32), 200, dtype=torch.uint8), MEAN, STD)

    def erased(probability):
        """A constant image stays constant under every operation but shears, shifts and erasing."""
        views = denormalized(
            strong_view(images, MEAN, STD, generator(0, 0, 0), erase=probability), MEAN, STD
        )
        return int((views.amin((1, 2, 3)) == 0).sum())

    never, always = erased(0.0), erased(1.0)
    assert always > never + 60
