"""The figures of `dps evaluate`, like scikit-learn, torchmetrics and a loop, for any split."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss
from torchmetrics.classification import BinaryCalibrationError

from dps_dist.evaluate import chunks, dark_knowledge
from dps_dist.evaluate.calibration import fit_temperature
from dps_dist.evaluate.metrics import NAMES, Figures, all_figures, measured
from dps_dist.evaluate.ood import auroc
from tests.evaluate.samples import figures_of, rows, tensors, tied_rows


def softmax(row):
    top = max(row)
    exps = [math.exp(x - top) for x in row]
    total = math.fsum(exps)
    return [x / total for x in exps]


def naive(logits, labels, bins=15):
    """Brier and SCE, a sample and a class at a time; SCE from means of bins, as it is defined."""
    table = [(softmax(row), y) for row, y in zip(logits.tolist(), labels.tolist(), strict=True)]
    n, classes = len(table), logits.shape[1]
    brier = math.fsum((q - (j == y)) ** 2 for p, y in table for j, q in enumerate(p)) / n
    sce = 0.0
    for k in range(classes):
        members = {}
        for p, y in table:
            b = sum(p[k] > edge / bins for edge in range(1, bins))
            members.setdefault(b, []).append((p[k], y == k))
        for group in members.values():
            confidence, accuracy = (math.fsum(x) / len(group) for x in zip(*group, strict=True))
            sce += len(group) / n * abs(accuracy - confidence) / classes
    return {"brier": brier, "sce": sce}


def of_parts(logits, labels, cuts):
    """Added part by part."""
    total = Figures(logits.shape[1])
    for start, end in pairwise([0, *sorted(cuts), len(labels)]):
        total.add(logits[start:end], labels[start:end])
    return total


@pytest.mark.parametrize("classes", [1, 2, 3, 10, 1000])
def test_brier_and_sce_like_a_naive_loop(classes):
    logits, labels = rows(150, classes, seed=classes)
    figures = all_figures(logits, labels)
    assert tuple(figures) == NAMES
    for name, value in naive(logits, labels).items():
        assert figures[name] == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_brier_like_scikit_learn(classes):
    logits, labels = rows(500, classes)
    expected = brier_score_loss(
        labels, logits.double().softmax(1), labels=range(classes), scale_by_half=False
    )
    assert all_figures(logits, labels)["brier"] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("classes", [2, 5, 20])
def test_sce_is_the_mean_of_each_class_against_the_rest(classes):
    """torchmetrics's bins are [lo, hi): no probability may be on an edge."""
    logits, labels = rows(1000, classes, scale=1.5)
    p = logits.double().softmax(1)
    assert not torch.isin(p, torch.arange(16).double() / 15).any()
    each = [
        float(BinaryCalibrationError(n_bins=15, norm="l1")(p[:, k], (labels == k).long()))
        for k in range(classes)
    ]
    assert all_figures(logits, labels)["sce"] == pytest.approx(sum(each) / classes, abs=1e-6)


@settings(max_examples=150)
@given(table=tied_rows)
def test_ties_and_edges_like_a_naive_loop(table):
    logits, labels = tensors(table)
    figures = all_figures(logits, labels)
    for name, value in naive(logits, labels).items():
        assert figures[name] == pytest.approx(value, rel=1e-10, abs=1e-12)
    of_tally = figures_of(logits, labels)
    assert {name: figures[name] for name in of_tally} == pytest.approx(of_tally, rel=1e-12)
    assert figures["ece_10"] == pytest.approx(figures_of(logits, labels, 10)["ece"], abs=1e-12)


@pytest.mark.parametrize(("right", "brier", "gap"), [(True, 0.0, 0.0), (False, 2.0, 1.0)])
@pytest.mark.parametrize("n", [1, 7, 40])
def test_certain_and_all_right_or_all_wrong(right, brier, gap, n):
    labels = torch.arange(n) % 4
    logits = 900.0 * torch.nn.functional.one_hot(labels if right else (labels + 1) % 4, 4)
    figures = all_figures(logits, labels)
    assert figures["brier"] == brier
    assert [figures[name] for name in ("ece", "ece_10", "ace")] == [gap] * 3
    # A wrong sample is 1 off in the first bin of its class and in the last of the other's
    assert figures["sce"] == 2 * gap / 4


def test_of_one_class_all_is_certain_and_right():
    """And δ, the temperature and TA-KL have a value."""
    logits, labels = rows(40, 1)
    figures = all_figures(logits, labels)
    perfect = {"accuracy": 1.0, "top5": 1.0}
    assert figures == {name: perfect.get(name, 0.0) for name in NAMES}
    assert fit_temperature(logits, labels) == 1.0
    p = logits.double().softmax(1)
    mu = dark_knowledge.mean_predictions(p, labels)
    assert mu.tolist() == [[1.0]] and dark_knowledge.deviations(p, labels, mu)["mean"] == 0
    assert dark_knowledge.ta_kl(logits, 2 * logits, 1.0, 1.0) == 0
    assert auroc(logits, logits) == 0.5


def test_of_one_sample():
    figures = all_figures(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([1]))  # p = 3/4, 1/4
    assert figures == pytest.approx(
        {
            "accuracy": 0.0,
            "top5": 1.0,
            "nll": math.log(4.0),
            "brier": 2 * 0.75**2,
            "ece": 0.75,
            "ece_10": 0.75,
            "sce": 0.75,
            "ace": 0.75,
        }
    )


def test_sce_is_of_all_classes_where_one_is_present():
    """Those that never occur are as wrong as they are probable."""
    logits = torch.tensor([[1.0, 0.0, 0.0]] * 6)
    p = softmax([1.0, 0.0, 0.0])
    figures = all_figures(logits, torch.zeros(6, dtype=torch.long))
    assert figures["sce"] == pytest.approx((1 - p[0] + p[1] + p[2]) / 3)


def test_a_probability_on_an_edge_is_in_the_lower_bin():
    """p = 1/5 = 3/15 beside p = 0.19, both of class 0: one bin; one error is not two's sum."""
    on_edge, below = [0.0] * 5, [math.log(0.19 / 0.81 * 4), 0.0, 0.0, 0.0, 0.0]
    logits = torch.tensor([on_edge, below], dtype=torch.float64)
    assert float(logits[0].softmax(0)[0]) == 3 / 15
    # Class 0: |1 − 0.2 − 0.19|/2 in one bin, which (1 − 0.2 + 0.19)/2 would be in two; the label
    # of the second sample is 1: |1 − 0.2025| in the bin above, |0 − 0.2| below.
    figures = all_figures(logits, torch.tensor([0, 1]))
    others = 0.2025
    expected = (abs(1 - 0.2 - 0.19) + (0.2 + 1 - others) + 3 * (0.2 + others)) / 2 / 5
    assert figures["sce"] == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 120), max_size=8),
    classes=st.sampled_from([2, 10, 1000]),
    seed=st.integers(0, 50),
    ties=st.booleans(),
)
def test_any_split_over_batches(cuts, classes, seed, ties):
    logits, labels = rows(120, classes, seed)
    if ties:
        logits[:, 1:] = 0.0
        logits = logits.round()
    split = of_parts(logits, labels, cuts)
    whole = all_figures(logits, labels)
    assert split.figures() == pytest.approx(whole, rel=1e-11, abs=1e-13)
    assert len(split) == 120
    diagram, expected = split.reliability(), measured(logits, labels).reliability()
    assert diagram["count"] == expected["count"]
    assert diagram["accuracy"] == expected["accuracy"]
    for ours, theirs in zip(diagram["confidence"], expected["confidence"], strict=True):
        assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-12))


def test_chunks_change_nothing(monkeypatch):
    logits, labels = rows(101, 7)
    whole, diagram = all_figures(logits, labels), measured(logits, labels).reliability()
    monkeypatch.setattr(chunks, "ELEMENTS", 10)  # a row at a time
    assert all_figures(logits, labels) == pytest.approx(whole, rel=1e-12)
    assert measured(logits, labels).reliability()["count"] == diagram["count"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_of_logits_and_labels(dtype):
    logits, labels = rows(60, 10, dtype=dtype)
    figures = all_figures(logits.requires_grad_(), labels.int())
    assert figures["brier"] == pytest.approx(naive(logits.detach(), labels)["brier"], rel=1e-10)


def test_logits_are_left_alone():
    logits, labels = rows(30, 5, dtype=torch.float64)
    before = logits.clone()
    assert len(measured(logits, labels)) == 30
    assert torch.equal(logits, before)


def test_of_nothing():
    figures = Figures(10)
    figures.add(torch.zeros(0, 10), torch.zeros(0, dtype=torch.long))
    assert tuple(figures.figures()) == NAMES
    assert all(math.isnan(value) for value in figures.figures().values())
    diagram = figures.reliability()
    assert diagram["count"] == [0] * 15
    assert diagram["accuracy"] == diagram["confidence"] == [None] * 15


def test_nan_logits_give_nan():
    logits, labels = rows(20, 4)
    logits[3, 2] = math.nan
    figures = all_figures(logits, labels)
    assert all(math.isnan(figures[name]) for name in NAMES if name not in ("accuracy", "top5"))
    assert figures["accuracy"] < 1


def test_a_part_is_small():
    logits, labels = torch.rand(700, 1000), torch.arange(700)
    parts = list(chunks.chunks(logits, labels))
    assert all(z.numel() <= chunks.ELEMENTS and z.dtype == torch.float64 for z, _ in parts)
    assert torch.equal(torch.cat([z for z, _ in parts]), logits.double())
    assert torch.equal(torch.cat([y for _, y in parts]), labels)
    (wide,) = next(chunks.chunks(torch.zeros(2, chunks.ELEMENTS + 1)))
    assert len(wide) == 1
