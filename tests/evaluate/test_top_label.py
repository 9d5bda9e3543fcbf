"""ECE, ACE and the reliability diagram, from pairs of confidence and right."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import binary_calibration_error

from dps_dist.errors import InputError
from dps_dist.evaluate.metrics import measured
from dps_dist.evaluate.top_label import ace, ece, reliability_of
from tests.evaluate.samples import rows


def pairs(n, seed=0):
    """Distinct confidences, and whether right, less often than they say."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.1, 1.0, n)
    assert len(np.unique(confidence)) == n
    return torch.from_numpy(confidence), torch.from_numpy(rng.random(n) < confidence**2)


def naive_ace(confidence, right, bins):
    """A sample at a time; the mean of right over those of the same confidence by a loop."""
    same = defaultdict(list)
    for c, r in zip(confidence, right, strict=True):
        same[c].append(r)
    ordered = sorted(confidence)
    n, total = len(ordered), 0.0
    for b in range(bins):
        members = ordered[b * n // bins : (b + 1) * n // bins]
        if members:
            accuracy = math.fsum(sum(same[c]) / len(same[c]) for c in members) / len(members)
            mean = math.fsum(members) / len(members)
            total += len(members) / n * abs(accuracy - mean)
    return total


tied_pairs = st.lists(
    st.tuples(st.sampled_from([0.2, 1 / 3, 0.4, 0.5, 0.6, 0.9, 1.0]), st.booleans()),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_ace_of_equal_masses(bins):
    """Where the bins divide the samples and none tie, numpy's split of the sorted ones."""
    confidence, right = pairs(15 * 4 * 7, seed=bins)
    order = np.argsort(confidence.numpy())
    gaps = [
        abs(right.numpy()[part].mean() - confidence.numpy()[part].mean())
        for part in np.array_split(order, bins)
    ]
    assert ace(confidence, right, bins) == pytest.approx(np.mean(gaps), rel=1e-12)


@settings(max_examples=200)
@given(table=tied_pairs, bins=st.integers(1, 20), seed=st.integers(0, 9))
def test_ace_with_ties_in_any_order(table, bins, seed):
    confidence, right = (list(column) for column in zip(*table, strict=True))
    expected = naive_ace(confidence, right, bins)
    order = np.random.default_rng(seed).permutation(len(table))
    c, r = torch.tensor(confidence, dtype=torch.float64)[order], torch.tensor(right)[order]
    assert ace(c, r, bins) == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_ace_of_one_confidence_is_ece():
    """However the bins cut them: 3 of 7 are right, in the order that would be the worst."""
    confidence, right = torch.full((7,), 0.9), torch.tensor([1, 1, 1, 0, 0, 0, 0])
    for bins in (1, 2, 3, 7, 15):
        assert ace(confidence, right, bins) == pytest.approx(0.9 - 3 / 7, abs=1e-7)
        assert ece(confidence, right, bins) == pytest.approx(0.9 - 3 / 7, abs=1e-7)


def test_ace_in_one_bin_is_ece_in_one_bin():
    confidence, right = pairs(100)
    expected = abs(float(right.double().mean() - confidence.mean()))
    assert ace(confidence, right, 1) == pytest.approx(expected, rel=1e-12)
    assert ece(confidence, right, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_like_torchmetrics(bins):
    confidence, right = pairs(800, seed=bins)
    theirs = binary_calibration_error(confidence, right.long(), n_bins=bins, norm="l1")
    assert ece(confidence, right, bins) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("bins", [5, 15])
def test_reliability_like_scikit_learn(bins):
    """Which leaves empty bins out."""
    confidence, right = pairs(300, seed=bins)
    confidence[confidence < 0.4] = 0.41
    diagram = reliability_of(confidence, right, bins)
    accuracy, mean = calibration_curve(right, confidence, n_bins=bins, strategy="uniform")
    assert [a for a in diagram["accuracy"] if a is not None] == pytest.approx(list(accuracy))
    assert [c for c in diagram["confidence"] if c is not None] == pytest.approx(list(mean))
    assert diagram["count"][0] == 0
    assert diagram["accuracy"][0] is None
    assert sum(diagram["count"]) == 300


@settings(max_examples=100)
@given(table=tied_pairs, bins=st.integers(1, 20))
def test_reliability_holds_the_ece(table, bins):
    confidence, right = (torch.tensor(column) for column in zip(*table, strict=True))
    diagram = reliability_of(confidence, right, bins)
    edges = diagram["edges"]
    assert len(edges) == bins + 1
    assert (edges[0], edges[-1]) == (0.0, 1.0)
    gap = 0.0
    for b, n in enumerate(diagram["count"]):
        inside = (confidence.double() > edges[b]) & (confidence.double() <= edges[b + 1])
        assert n == int(inside.sum())
        assert (diagram["accuracy"][b] is None) == (n == 0) == (diagram["confidence"][b] is None)
        if n:
            gap += n / len(table) * abs(diagram["accuracy"][b] - diagram["confidence"][b])
    assert ece(confidence, right, bins) == pytest.approx(gap, rel=1e-9, abs=1e-12)


def test_reliability_of_logits():
    logits, labels = rows(200, 10)
    confidence, predicted = logits.double().softmax(1).max(1)
    assert measured(logits, labels).reliability(10) == reliability_of(
        confidence, predicted == labels, 10
    )
    assert len(measured(logits, labels).reliability()["count"]) == 15


def test_edges_and_full_confidence_are_in_the_lower_bin():
    confidence = torch.tensor([3 / 15, 0.5, 1.0], dtype=torch.float64)
    right = torch.tensor([True, False, True])
    count = reliability_of(confidence, right, 15)["count"]
    assert [b for b, n in enumerate(count) if n] == [2, 7, 14]
    assert reliability_of(confidence, right, 2)["count"] == [2, 1]


@pytest.mark.parametrize("figure", [ece, ace, reliability_of])
def test_refuses_no_bins(figure):
    with pytest.raises(InputError, match=r"^bins is 0: give "):
        figure(*pairs(3), 0)
