"""The figures against torchmetrics, against a naive loop in float64, and however they are split."""

import math
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from dps_dist.errors import InputError
from dps_dist.evaluate.metrics import Tally
from tests.evaluate.samples import figures_of, rows, tied_rows

NAMES = ("accuracy", "top5", "nll", "ece")


def naive(logits, labels, weight=None, bins=15):
    """A row at a time; the bin by counting the edges that the confidence exceeds."""
    weight = [1.0] * len(labels) if weight is None else weight
    sums, right_of, confidence_of = dict.fromkeys(NAMES[:3], 0.0), defaultdict(float), {}
    for row, label, w in zip(logits.tolist(), labels.tolist(), list(weight), strict=True):
        if w == 0:
            continue
        order = sorted(range(len(row)), key=lambda j: -row[j])  # stable: ties by number
        top = max(row)
        total = math.fsum(math.exp(x - top) for x in row)
        confidence, right = 1 / total, order[0] == label
        sums["accuracy"] += w * right
        sums["top5"] += w * (label in order[:5])
        sums["nll"] += w * (top + math.log(total) - row[label])
        b = sum(confidence > edge / bins for edge in range(1, bins))
        right_of[b] += w * right
        confidence_of[b] = confidence_of.get(b, 0.0) + w * confidence
    total = math.fsum(weight)
    gap = math.fsum(abs(right_of[b] - confidence_of[b]) for b in confidence_of)
    return {**{key: value / total for key, value in sums.items()}, "ece": gap / total}


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_like_a_naive_loop(classes, dtype):
    logits, labels = rows(200, classes, dtype=dtype)
    figures = figures_of(logits, labels)
    assert tuple(figures) == NAMES
    assert figures == pytest.approx(naive(logits, labels), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("bins", [1, 2, 10, 100])
def test_like_a_naive_loop_in_any_number_of_bins(bins):
    logits, labels = rows(300, 4, seed=bins)
    expected = naive(logits, labels, bins=bins)
    assert figures_of(logits, labels, bins) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("classes", [5, 10, 1000])
def test_like_torchmetrics(classes):
    """Its bins are [lo, hi), and a confidence of exactly 1 has a bin of its own; ours are (lo, hi].

    The two agree where no confidence is on an edge.
    """
    logits, labels = rows(2000, classes, seed=classes, scale=2.0)
    confidence = torch.softmax(logits, 1).amax(1)
    assert not torch.isin(confidence, torch.arange(16) / 15).any()
    figures = figures_of(logits, labels)
    accuracy, top5 = (
        MulticlassAccuracy(classes, top_k=k, average="micro")(logits, labels) for k in (1, 5)
    )
    calibration = MulticlassCalibrationError(classes, n_bins=15, norm="l1")(logits, labels)
    assert figures["accuracy"] == pytest.approx(float(accuracy), abs=1e-6)
    assert figures["top5"] == pytest.approx(float(top5), abs=1e-6)
    assert figures["ece"] == pytest.approx(float(calibration), abs=1e-5)
    assert figures["nll"] == pytest.approx(float(F.cross_entropy(logits.double(), labels)))


@pytest.mark.parametrize(
    ("on_edge", "below"),
    [([0.0, 0.0, -900.0], [0.0, 0.0, 0.0]), ([900.0, 0.0, 0.0], [8.0, 0.0, 0.0])],
)
def test_torchmetrics_differs_on_an_edge(on_edge, below):
    """One row right and on the edge, one wrong and below it: a bin of ours, two of theirs."""
    logits, labels = torch.tensor([on_edge, below]), torch.tensor([0, 1])
    high, low = (1 / sum(math.exp(x - row[0]) for x in row) for row in (on_edge, below))
    assert high in (0.5, 1.0)
    ours = figures_of(logits, labels, bins=4)["ece"]
    theirs = MulticlassCalibrationError(3, n_bins=4, norm="l1")(logits, labels)
    assert ours == pytest.approx(abs(1 - high - low) / 2, rel=1e-9)
    assert float(theirs) == pytest.approx(((1 - high) + low) / 2, rel=1e-5)


# In float32 the edge 15/30 is below 1/2, and 7·(1/35) is below 1/5 in float64
@pytest.mark.parametrize(
    ("classes", "bins"), [(5, 15), (3, 15), (2, 10), (10, 10), (7, 7), (2, 30), (5, 35), (5, 55)]
)
def test_a_confidence_on_an_edge_is_in_the_lower_bin(classes, bins):
    tally = Tally(bins)
    tally.add(torch.zeros(1, classes), torch.tensor([0]), torch.ones(1))
    (b,) = tally.sums[4 + bins :].nonzero().flatten().tolist()
    assert (b + 1) * classes == bins


def test_full_confidence_is_in_the_last_bin():
    tally = Tally(15)
    tally.add(torch.tensor([[900.0, -900.0]]), torch.tensor([0]), torch.ones(1))
    assert tally.sums.nonzero().flatten().tolist() == [0, 1, 2, 4 + 14, 4 + 15 + 14]
    assert tally.figures() == {"accuracy": 1.0, "top5": 1.0, "nll": 0.0, "ece": 0.0}


def test_confident_and_wrong():
    logits, labels = torch.tensor([[50.0, 0.0, 0.0]] * 4), torch.tensor([0, 0, 0, 2])
    figures = figures_of(logits, labels)
    assert figures["accuracy"] == 0.75
    assert figures["ece"] == pytest.approx(0.25, abs=1e-12)
    assert figures["nll"] == pytest.approx(12.5, abs=1e-12)


def test_ties_go_to_the_lower_class():
    logits = torch.zeros(8, 8)
    figures = figures_of(logits, torch.arange(8))
    assert figures["accuracy"] == 1 / 8
    assert figures["top5"] == 5 / 8
    for label in range(8):
        hit = figures_of(logits[:1], torch.tensor([label]))
        assert hit["accuracy"] == float(int(logits[0].argmax()) == label)
        assert hit["top5"] == float(label < 5)


def test_nan_logits_are_not_right():
    for values, label in (([math.nan] * 8, 0), ([9.0, math.nan] + [0.0] * 6, 0)):
        figures = figures_of(torch.tensor([values]), torch.tensor([label]))
        assert figures["accuracy"] == 0
        assert math.isnan(figures["nll"])
        assert math.isnan(figures["ece"])
    assert figures_of(torch.full((8, 8), math.nan), torch.arange(8))["top5"] == 0


@settings(max_examples=200)
@given(table=tied_rows, bins=st.integers(1, 20))
def test_ties_and_edges_like_a_naive_loop(table, bins):
    logits = torch.tensor([row for row, _ in table])
    labels = torch.tensor([label for _, label in table])
    figures = figures_of(logits, labels, bins)
    assert figures == pytest.approx(naive(logits, labels, bins=bins), rel=1e-12, abs=1e-13)
    assert figures["accuracy"] == float((logits.argmax(1) == labels).double().mean())
    assert figures["accuracy"] <= figures["top5"]
    if logits.shape[1] <= 5:
        assert figures["top5"] == 1


def assert_counts_are_whole(tally, bins=15):
    counts = torch.cat([tally.sums[:3], tally.sums[4 : 4 + bins]])
    assert torch.equal(counts, counts.round())
    assert int(counts[3:].sum()) == int(counts[1])


@settings(max_examples=100)
@given(
    cuts=st.lists(st.integers(0, 150), max_size=8),
    ranks=st.integers(1, 4),
    classes=st.sampled_from([2, 10, 1000]),
    seed=st.integers(0, 100),
)
def test_any_split_over_batches_and_ranks(cuts, ranks, classes, seed):
    logits, labels = rows(150, classes, seed)
    whole = Tally()
    whole.add(logits, labels, torch.ones(150))
    tallies = [Tally() for _ in range(ranks)]
    bounds = [0, *sorted(cuts), 150]
    for part, (start, end) in enumerate(pairwise(bounds)):
        tallies[part % ranks].add(logits[start:end], labels[start:end], torch.ones(end - start))
    total = Tally()
    for tally in tallies:
        total.sums += tally.sums
    assert total.figures() == pytest.approx(whole.figures(), rel=1e-12, abs=1e-12)
    for tally in (total, whole):
        assert_counts_are_whole(tally)
        assert int(tally.sums[0]) == 150


@settings(max_examples=60)
@given(
    padding=st.lists(st.integers(0, 40), max_size=10),
    junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    label=st.sampled_from([0, -1, 10, -100]),
)
def test_padding_weighs_nothing(padding, junk, label):
    logits, labels = rows(40, 10)
    expected = figures_of(logits, labels)
    keep = torch.ones(40 + len(padding), dtype=torch.bool)
    keep[torch.tensor(padding, dtype=torch.long)] = False
    places = keep.nonzero().flatten()[:40]
    padded = torch.full((len(keep), 10), junk)
    padded[places] = logits
    padded_labels = torch.full((len(keep),), label)
    padded_labels[places] = labels
    weight = torch.zeros(len(keep))
    weight[places] = 1.0
    tally = Tally()
    tally.add(padded, padded_labels, weight)
    assert tally.figures() == pytest.approx(expected, rel=1e-12)
    assert float(tally.sums[0]) == 40
    assert_counts_are_whole(tally)


def test_fractional_weights():
    logits, labels = rows(50, 10)
    weight = torch.arange(50) / 16
    tally = Tally()
    tally.add(logits, labels, weight)
    expected = naive(logits, labels, weight.tolist())
    assert tally.figures() == pytest.approx(expected, rel=1e-12)


def test_of_nothing():
    tally = Tally()
    assert all(math.isnan(value) for value in tally.figures().values())
    tally.add(torch.full((3, 10), math.nan), torch.tensor([-1, 0, 99]), torch.zeros(3))
    tally.add(torch.zeros(0, 10), torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert tuple(tally.figures()) == NAMES
    assert all(math.isnan(value) for value in tally.figures().values())
    assert not tally.sums.any()


def test_autocast_changes_nothing():
    logits, labels = rows(100, 10)
    expected = figures_of(logits, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert figures_of(logits, labels) == expected


def test_sums_stay_where_they_are():
    tally = Tally(bins=3)
    held = tally.sums
    logits, labels = rows(5, 4)
    tally.add(logits.requires_grad_(), labels, torch.ones(5))
    assert tally.sums is held
    assert (held.shape, held.dtype) == ((4 + 2 * 3,), torch.float64)
    assert not held.requires_grad


def test_add_never_waits_for_the_device():
    """On the meta device there are no values: whatever asks for one raises."""
    tally = Tally(device="meta")
    tally.add(*(tensor.to("meta") for tensor in rows(6, 10)), torch.ones(6, device="meta"))
    assert tally.sums.shape == (34,)


def test_refuses_no_bins():
    with pytest.raises(InputError, match=r"^bins is 0: give "):
        Tally(bins=0)
