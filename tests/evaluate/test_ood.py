"""AUROC of the maximum softmax, against every pair of scores, one at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_dist.errors import InputError
from dps_dist.evaluate.ood import auroc, max_softmax
from tests.evaluate.samples import rows, tied_rows


def naive(inside, outside):
    """The share of pairs in which the inner score is the greater; a tie is half."""
    scores = [[max(row) for row in z.double().softmax(1).tolist()] for z in (inside, outside)]
    wins = [(s > t) + (s == t) / 2 for s in scores[0] for t in scores[1]]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_like_a_naive_loop(classes):
    inside, _ = rows(60, classes, scale=2.0)
    outside, _ = rows(45, classes, seed=1, scale=1.5)
    expected = naive(inside, outside)
    assert 0.5 < expected < 1
    assert auroc(inside, outside) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=100)
@given(table=tied_rows, cut=st.floats(0, 1))
def test_ties_count_half(table, cut):
    logits = torch.tensor([row for row, _ in table])
    logits = torch.cat([logits, logits[:1]])  # at least two, and a tie
    n = min(max(1, int(cut * len(logits))), len(logits) - 1)
    assert auroc(logits[:n], logits[n:]) == pytest.approx(naive(logits[:n], logits[n:]), abs=1e-12)


def test_in_distribution_is_positive():
    sure, unsure = torch.tensor([[9.0, 0.0]] * 3), torch.tensor([[1.0, 0.0], [0.0, 1.5]])
    assert auroc(sure, unsure) == 1
    assert auroc(unsure, sure) == 0
    assert auroc(sure, sure) == 0.5


def test_nearly_certain_scores_are_told_apart():
    """In float32 both softmaxes are 1."""
    sure, surer = torch.tensor([[20.0, 0.0]]), torch.tensor([[25.0, 0.0]])
    assert float(sure.softmax(1).amax()) == float(surer.softmax(1).amax()) == 1
    assert auroc(surer, sure) == 1


def test_half_precision():
    logits, _ = rows(20, 10, dtype=torch.bfloat16)
    assert torch.equal(max_softmax(logits), logits.double().softmax(1).amax(1))


@pytest.mark.parametrize("bad", [torch.zeros(0, 2), torch.tensor([[math.nan, 0.0]])])
def test_refuses_what_has_no_score(bad):
    good = torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"^the in-distribution images are "):
        auroc(bad, good)
    with pytest.raises(InputError, match=r"^the out-of-distribution images are "):
        auroc(good, bad)
