"""μ, δ, the temperature-adjusted KL and the plane of three templates, each against a loop."""

import math
import tracemalloc
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy
from sklearn.metrics import pairwise_distances

from dps_dist.errors import InputError
from dps_dist.evaluate import chunks
from dps_dist.evaluate.dark_knowledge import (
    MOST_CLASSES,
    deviations,
    mean_predictions,
    projection,
    similar_and_dissimilar,
    ta_kl,
)
from tests.evaluate.samples import rows


def predictions(n, classes, seed=0):
    logits, labels = rows(n, classes, seed)
    return logits.softmax(1), labels


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_mu_is_the_mean_of_each_class(classes, monkeypatch):
    probs, labels = predictions(700, classes)
    mu = mean_predictions(probs, labels)
    assert mu.dtype == torch.float64
    for k in range(classes):
        own = probs.double()[labels == k].mean(0)
        torch.testing.assert_close(mu[k], own, rtol=1e-12, atol=1e-15, equal_nan=True)
    order = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(chunks, "ELEMENTS", 3 * classes)
    shuffled = mean_predictions(probs[order], labels[order].int())
    torch.testing.assert_close(shuffled, mu, rtol=1e-12, atol=1e-15, equal_nan=True)


def test_mu_of_a_class_without_samples_is_nan():
    mu = mean_predictions(torch.tensor([[0.5, 0.25, 0.25]] * 4), torch.tensor([0, 0, 2, 2]))
    assert mu[[0, 2]].tolist() == [[0.5, 0.25, 0.25]] * 2
    assert mu[1].isnan().all()


@pytest.mark.parametrize(("classes", "bins"), [(2, 50), (10, 50), (1000, 50), (10, 1)])
def test_delta_like_numpy(classes, bins):
    probs, labels = predictions(300, classes)
    mu = mean_predictions(probs, labels)
    total = [
        math.fsum(abs(p - m) for p, m in zip(row, mu[y].tolist(), strict=True))
        for row, y in zip(probs.double().tolist(), labels.tolist(), strict=True)
    ]
    found = deviations(probs, labels, mu, bins)
    count, edges = np.histogram(total, bins=bins, range=(0, 2))
    assert found["count"] == count.tolist()
    assert found["edges"] == pytest.approx(edges.tolist(), abs=1e-15)
    assert found["mean"] == pytest.approx(np.mean(total), rel=1e-10)


def test_delta_of_every_sample_like_its_class_is_0():
    probs = torch.eye(3)[[0, 1, 2, 1]]
    found = deviations(probs, torch.tensor([0, 1, 2, 1]), torch.eye(3))
    assert len(found["edges"]) == 51
    assert found["count"] == [4] + [0] * 49
    assert found["mean"] == 0


def test_delta_of_a_sample_unlike_its_class_is_2():
    """On the last edge, and what rounds to above it."""
    probs = torch.tensor([[0.0, 1.0], [0.0, 1.0 + 1e-12]], dtype=torch.float64)
    found = deviations(probs, torch.tensor([0, 0]), torch.eye(2))
    assert found["count"] == [0] * 49 + [2]
    assert found["mean"] == pytest.approx(2)


@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (2.0, 0.7)])
def test_ta_kl_like_scipy(classes, temperatures, monkeypatch):
    final, _ = rows(80, classes)
    earlier, _ = rows(80, classes, seed=1)
    p, q = (
        (z.double() / t).softmax(1) for z, t in zip((final, earlier), temperatures, strict=True)
    )
    expected = np.mean(entropy(p, q, axis=1))
    assert expected > 0.1
    assert ta_kl(final, earlier, *temperatures) == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(chunks, "ELEMENTS", 7 * classes)
    assert ta_kl(final, earlier, *temperatures) == pytest.approx(expected, rel=1e-9)


def test_ta_kl_sees_through_the_temperature():
    logits, _ = rows(50, 10)
    assert ta_kl(logits, logits, 1.3, 1.3) == 0
    assert ta_kl(3 * logits, logits, 3.0, 1.0) == pytest.approx(0, abs=1e-12)
    assert ta_kl(3 * logits, logits, 1.0, 1.0) > 0.01


def test_ta_kl_is_finite_where_a_probability_is_0():
    final, earlier = torch.tensor([[0.0, -2000.0]]), torch.tensor([[-2000.0, 0.0]])
    assert float(final.double().softmax(1)[0, 1]) == 0
    assert ta_kl(final, earlier, 1.0, 1.0) == pytest.approx(2000)


@pytest.mark.parametrize("width", [2, 3, 512])
def test_the_plane_holds_its_templates(width):
    """Their distances are kept, and activations go to the nearest point of the plane."""
    generator = torch.Generator().manual_seed(width)
    w = torch.randn(3, width, generator=generator, dtype=torch.float64)
    x = 5 + torch.randn(40, width, generator=generator, dtype=torch.float64)
    corners = projection(w, w)
    np.testing.assert_allclose(pairwise_distances(corners), pairwise_distances(w), atol=1e-9)
    assert corners[0].tolist() == [0, 0]
    assert corners[1, 0] > 0
    assert abs(float(corners[1, 1])) < 1e-9
    assert corners[2, 1] > 0
    # Least squares for x ≈ w_1 + s·(w_2 − w_1) + t·(w_3 − w_1) finds the same point
    sides = (w[1:] - w[0]).T.numpy()
    weights = np.linalg.lstsq(sides, (x - w[0]).T.numpy(), rcond=None)[0]
    expected = weights.T @ corners[1:].numpy()
    np.testing.assert_allclose(projection(x, w), expected, atol=1e-8)


def test_what_is_normal_to_the_plane_does_not_show():
    w = torch.tensor([[0.0, 0.0, 7.0], [2.0, 0.0, 7.0], [1.0, 3.0, 7.0]])
    x = torch.tensor([[1.0, 2.0, -50.0], [-4.0, 0.5, 1000.0]])
    torch.testing.assert_close(projection(x, w).float(), x[:, :2])


def test_the_plane_of_templates_in_a_line_is_still_one():
    found = projection(torch.randn(5, 4), torch.ones(3, 4) * torch.tensor([[1.0], [2.0], [3.0]]))
    assert found.shape == (5, 2)
    assert found.isfinite().all()


def naive_three_apart(similarity):
    return min(
        max(similarity[a][b], similarity[a][c], similarity[b][c])
        for a, b, c in combinations(range(len(similarity)), 3)
    )


@settings(max_examples=100)
@given(classes=st.integers(3, 12), seed=st.integers(0, 500), levels=st.sampled_from([2, 5, 10**6]))
def test_three_classes_like_a_search_of_all(classes, seed, levels):
    mu = torch.from_numpy(
        np.random.default_rng(seed).integers(levels, size=(classes, classes)) / levels
    )
    s = ((mu + mu.T) / 2).tolist()
    (a, b, c), apart = similar_and_dissimilar(mu)
    best = max(s[i][j] for i, j in combinations(range(classes), 2))
    ties = [(i, j) for i, j in combinations(range(classes), 2) if s[i][j] == best]
    assert (a, b) == ties[0]
    assert c == min((max(s[a][k], s[b][k]), k) for k in range(classes) if k not in (a, b))[1]
    assert list(apart) == sorted(set(apart))
    assert max(s[i][j] for i, j in combinations(apart, 2)) == naive_three_apart(s)
    assert similar_and_dissimilar(mu) == ((a, b, c), apart)


def before(mu):
    """As it was computed at first, with lists of all pairs."""
    mean = mu.double().numpy()
    s = (mean + mean.T) / 2
    row, column = np.triu_indices(len(s), 1)
    a, b = (int(of[s[row, column].argmax()]) for of in (row, column))
    to_either = np.maximum(s[a], s[b])
    to_either[[a, b]] = np.inf
    order, joined = s[row, column].argsort(kind="stable"), [0] * len(s)
    for d, e in zip(row[order].tolist(), column[order].tolist(), strict=True):
        if both := joined[d] & joined[e]:
            f = (both & -both).bit_length() - 1
            return (a, b, int(to_either.argmin())), tuple(sorted((d, e, f)))
        joined[d] |= 1 << e
        joined[e] |= 1 << d
    raise AssertionError("three classes are a triangle")


@settings(max_examples=60)
@given(
    classes=st.integers(3, 60), seed=st.integers(0, 500), levels=st.sampled_from([1, 2, 5, 10**6])
)
def test_the_same_three_as_before(classes, seed, levels):
    """Also where many values tie, and where two halves share no triangle for long."""
    rng = np.random.default_rng(seed)
    mu = rng.integers(levels, size=(classes, classes)) / levels
    half = np.arange(classes) < classes // 2
    for one in (mu, mu + (half[:, None] == half)):
        one = torch.from_numpy(one)
        assert similar_and_dissimilar(one) == before(one)


def test_the_same_three_of_a_thousand_classes():
    logits = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1))
    mu = (logits + 6 * torch.eye(1000)).softmax(1)
    assert similar_and_dissimilar(mu) == before(mu)


def test_the_choice_of_classes_makes_no_lists_of_pairs():
    """8 million pairs at the most classes: as Python's own numbers they took a gigabyte."""
    mu = torch.rand(MOST_CLASSES, MOST_CLASSES, generator=torch.Generator().manual_seed(0))
    tracemalloc.start()  # numpy tells it, too
    similar_and_dissimilar(mu)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 6 * 8 * MOST_CLASSES**2


def test_cats_and_dogs():
    """0 airplane, 1 cat, 2 truck, 3 dog, 4 ship: only cats and dogs, and vehicles, are alike."""
    mu = torch.eye(5)
    mu[3, 1], mu[0, 4], mu[2, 4], mu[0, 2], mu[1, 2] = 0.3, 0.1, 0.08, 0.05, 0.01
    assert similar_and_dissimilar(mu) == ((1, 3, 0), (0, 1, 2))
    mu[0, 1] = 0.09
    similar, dissimilar = similar_and_dissimilar(mu)
    assert similar == (1, 3, 4)
    assert dissimilar == (0, 2, 3)


def test_classes_without_samples_are_left_out():
    mu = torch.full((6, 6), math.nan)
    mu[[1, 3, 5]] = torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0, 0.9])
    assert similar_and_dissimilar(mu) == ((3, 5, 1), (1, 3, 5))
    mu[3] = math.nan
    with pytest.raises(InputError, match=r"^there are samples of 2 classes: "):
        similar_and_dissimilar(mu)


def test_a_thousand_classes():
    mu = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0))
    (a, b, _), apart = similar_and_dissimilar(mu)
    s = (mu.double() + mu.double().T) / 2
    s.fill_diagonal_(0)
    assert float(s[a, b]) == float(s.max())
    assert len(set(apart)) == 3
    assert max(float(s[i, j]) for i, j in combinations(apart, 2)) < 0.05
