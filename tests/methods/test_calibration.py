"""MMCE, CRL, MDCA, AdaFocal, CPC, MbLS, ACLS and label smoothing against their formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given as draws
from hypothesis import settings as limits
from hypothesis import strategies as st

from dps_dist import config, methods
from dps_dist.methods.adafocal import AdaFocal
from dps_dist.methods.baseline import Baseline
from dps_dist.methods.crl import CRL
from tests.methods.batches import (
    AWKWARD,
    B,
    K,
    N,
    assert_is,
    ce,
    drawn,
    given,
    log_softmax,
    logits_of,
    loss_and_gradient,
    samples,
    softmax,
    store_for,
    visits,
)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def ls(z, y, _, s=0.1):
    K = z.shape[1]
    return -(((1 - s) * np.eye(K)[y] + s / K) * log_softmax(z)).sum(1)


def three_sums(z, y, width=0.4):
    """MMCE's M by its sums over right and right, wrong and wrong, right and wrong samples."""
    r, right = softmax(z).max(1), z.argmax(1) == y
    c, w = r[right], r[~right]
    m, n = max(1, len(c)), max(1, len(w))

    def total(a, b, weight):
        return sum(weight(r, s) * np.exp(-abs(r - s) / width) for r in a for s in b)

    both_right = total(c, c, lambda r, s: (1 - r) * (1 - s)) / m**2
    both_wrong = total(w, w, lambda r, s: r * s) / n**2
    return both_right + both_wrong - 2 * total(c, w, lambda r, s: (1 - r) * s) / (m * n)


def mmce(z, y, _, lam=2.0):
    return ce(z, y) + lam * np.sqrt(three_sums(z, y))


def mdca(z, y, _, beta=1.0):
    K = z.shape[1]
    return ce(z, y) + beta * abs(softmax(z).mean(0) - np.eye(K)[y].mean(0)).sum() / K


def cpc(z, y, _, lambda_1=0.1, lambda_2=1.0):
    loss, K = ce(z, y), z.shape[1]
    for b, (row, label) in enumerate(zip(z, y, strict=True)):
        others = [j for j in range(K) if j != label]
        loss[b] -= lambda_1 / (K - 1) * sum(log_sigmoid(row[label] - row[j]) for j in others)
        pairs = sum(0.5 * log_sigmoid(row[i] - row[j]) for i in others for j in others if i != j)
        loss[b] -= lambda_2 / ((K - 1) * (K - 2)) * pairs if K > 2 else 0
    return loss


def mbls(z, y, _, alpha=0.1, m=10.0):
    beyond = np.maximum(0, z.max(1, keepdims=True) - z - m)
    return ce(z, y) + alpha * beyond.mean(1)


def acls(z, y, fixed, weight=0.1, others=0.1, m=10.0):
    top = fixed.max(1, keepdims=True)
    high = np.maximum(0, z.max(1) - m) ** 2
    low = np.maximum(0, top - z - m) ** 2
    low[np.arange(len(z)), fixed.argmax(1)] = 0
    return ce(z, y) + weight * (high + others * low.sum(1) / (z.shape[1] - 1))


def focal(z, y, _, gamma=1.0):
    p = np.exp(-ce(z, y))
    return (1 - p) ** gamma * ce(z, y)


FORMULAS = {
    "ls": (config.LS(), ls),
    "ls .4": (config.LS(s=0.4), lambda *a: ls(*a, s=0.4)),
    "mmce": (config.MMCE(), mmce),
    "mdca": (config.MDCA(), mdca),
    "mdca 3": (config.MDCA(beta=3), lambda *a: mdca(*a, beta=3)),
    "cpc": (config.CPC(), cpc),
    "cpc 2, .5": (
        config.CPC(lambda_1=2, lambda_2=0.5),
        lambda *a: cpc(*a, lambda_1=2, lambda_2=0.5),
    ),
    "mbls": (config.MbLS(), mbls),
    "mbls m=3": (config.MbLS(alpha=0.5, margin=3), lambda *a: mbls(*a, alpha=0.5, m=3)),
    "acls": (config.ACLS(), acls),
    "acls m=2": (
        config.ACLS(weight=0.3, others=2, margin=2),
        lambda *a: acls(*a, weight=0.3, others=2, m=2),
    ),
    "focal": (config.AdaFocal(), focal),  # which AdaFocal is in its first epoch
    "focal γ=3": (config.AdaFocal(gamma_start=3), lambda *a: focal(*a, gamma=3)),
}


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("name", FORMULAS)
def test_formula(name, batch):
    row, formula = FORMULAS[name]
    assert_is(methods.build(row), batch, formula)


# ---- special cases

ARE_THE_BASELINE = [
    config.LS(s=0),
    config.MMCE(lam=0),
    config.MDCA(beta=0),
    config.CPC(lambda_1=0, lambda_2=0),
    config.MbLS(alpha=0),
    config.MbLS(margin=1e6),
    config.ACLS(weight=0),
    config.ACLS(margin=1e6),
    config.CRL(lam=0),
    config.SL(alpha=1, beta=0),
]


@pytest.mark.parametrize("row", ARE_THE_BASELINE, ids=repr)
def test_without_its_weight_it_is_the_baseline(row):
    method = methods.build(row)
    store = store_for(method)
    for batch in visits(3):
        loss, gradient = loss_and_gradient(method, batch, store)
        expected_loss, expected_gradient = loss_and_gradient(Baseline(), batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


@draws(
    count=st.integers(1, 12),
    classes=st.integers(2, 5),
    scale=st.sampled_from([0.01, 1.0, 5.0, 40.0]),
    seed=st.integers(0, 999),
)
@limits(max_examples=60, deadline=None)
def test_mmces_m_is_the_three_sums_and_not_negative(count, classes, scale, seed):
    z, y = drawn(count, classes, scale, seed)
    batch = given(z, y)
    M = three_sums(logits_of(batch), y)
    assert M > -1e-12
    loss, gradient = loss_and_gradient(methods.build(config.MMCE(lam=1)), batch)
    root = loss - ce(logits_of(batch), y)
    np.testing.assert_allclose(root, np.sqrt(max(M, 0)), rtol=1e-3, atol=3e-5)
    assert np.isfinite(gradient).all()


def test_mdca_costs_nothing_where_classes_are_predicted_as_often_as_they_occur():
    """Rows that are wrong one by one: only their mean counts."""
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])
    y = np.array([1, 2, 0])
    loss, _ = loss_and_gradient(methods.build(config.MDCA(beta=100)), given(np.log(p), y))
    np.testing.assert_allclose(loss, -np.log(p[np.arange(3), y]), atol=1e-4)
    loss, _ = loss_and_gradient(methods.build(config.MDCA(beta=100)), given(np.log(p), [1, 1, 1]))
    assert (loss > 10).all()


# ---- CRL


class Ranking:
    """c: how often each sample was predicted right, over the epochs before this one."""

    def __init__(self, lam):
        self.lam, self.right = lam, np.zeros(N)

    def formula(self, batch, epoch):
        """Of the counts before this batch, which is then counted."""
        real = batch.real.numpy()
        i = batch.index.numpy()[real]
        c = self.right[i] / max(1, epoch)
        rows = range(len(i))
        pairs = [(a, (a + 1) % len(i)) for a in rows if real.all() or a + 1 < len(i)]
        z, y = logits_of(batch)[real], batch.labels.numpy()[real]
        self.right[i] += z.argmax(1) == y

        def loss(z, y, _):
            kappa, total = softmax(z).max(1), 0.0
            for a, b in pairs:
                s = np.sign(c[a] - c[b])
                total += max(0, -s * (kappa[a] - kappa[b]) + abs(c[a] - c[b]))
            return ce(z, y) + self.lam * total / len(pairs)

        return loss


def often_right(index, epoch):
    """Logits that are right more often for some samples than for others."""
    batch = samples(index, seed=epoch)
    favour = 4 * np.eye(K)[batch.labels] * (index.numpy() % 3)[:, None]
    return given(logits_of(batch) + favour, batch.labels, index)


@pytest.mark.parametrize("lam", [1.0, 2.5])
def test_crl_ranks_by_how_often_samples_were_right(lam):
    method, paper = CRL(lam), Ranking(lam)
    store = store_for(method)
    for epoch in range(12):
        method.begin_epoch(epoch, 12)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(7):  # the last batch has two
            batch = often_right(index, epoch)
            assert_is(method, batch, paper.formula(batch, epoch), store)
    counts = store.visits(torch.arange(N)).numpy()
    np.testing.assert_array_equal(counts, paper.right)
    assert len(set(counts)) > 4 and (counts < 12).any()


def test_crl_pairs_no_padding():
    method, paper = CRL(1.0), Ranking(1.0)
    store = store_for(method)
    for epoch in range(3):
        method.begin_epoch(epoch, 3)
        batch = often_right(torch.arange(B), epoch)
        padded = given(logits_of(batch), batch.labels, [*range(7), -1, -1, -1])
        assert_is(method, padded, paper.formula(padded, epoch), store)
    assert store.visits(torch.arange(N))[7:].sum() == 0


def test_crl_does_not_count_the_prediction_at_hand():
    """In the first epoch nobody was right before."""
    method = CRL(5.0)
    batch = often_right(torch.arange(B), 0)
    loss, _ = loss_and_gradient(method, batch, store_for(method))
    np.testing.assert_allclose(loss, ce(logits_of(batch), batch.labels.numpy()), 1e-5, 1e-6)


# ---- AdaFocal


def test_adafocal_has_the_gamma_of_the_labels_bin():
    gamma, edges = np.array([2.0, -0.5, 0.7, -2.0]), np.array([0.02, 0.2, 0.6])
    method = AdaFocal(config.AdaFocal(bins=4))
    state = {"gamma": gamma, "edges": edges}
    method.load_state_dict({name: torch.tensor(x).float() for name, x in state.items()})

    def formula(z, y, fixed):
        p = np.exp(-ce(z, y))
        g = gamma[[sum(edge <= q for edge in edges) for q in np.exp(-ce(fixed, y))]]
        return np.where(g > 0, 1 - p, 1 + p) ** abs(g) * ce(z, y)

    batch = given(*drawn(40, scale=2.0))
    p = np.exp(-ce(logits_of(batch), batch.labels.numpy()))
    assert set(np.digitize(p, edges)) == {0, 1, 2, 3}
    assert_is(method, batch, formula)


def by_hand(gamma, confidence, right, lam=1.0, switch=0.2, least=-2.0, most=20.0):
    """Each bin's γ after the epoch; the bins are as equal as can be, larger ones first."""
    H, bins, start, after = len(confidence), len(gamma), 0, []
    ranked = sorted(zip(confidence, right, strict=True), key=lambda pair: pair[0])
    for b, g in enumerate(gamma):
        size = H // bins + (b < H % bins)
        mine, start = ranked[start : start + size], start + size
        if mine:
            gap = sum(c for c, _ in mine) / size - sum(r for _, r in mine) / size
            g = g * np.exp(np.sign(g) * lam * gap)
            if abs(g) < switch:
                g = -switch if g > 0 else switch
            g = min(max(g, least), most)
        after.append(g)
    return np.array(after)


@draws(
    held_out=st.integers(0, 40),
    bins=st.integers(1, 7),
    lam=st.sampled_from([0.0, 1.0, 9.0]),
    start=st.sampled_from([-1.5, -0.3, 0.3, 1.0, 19.0]),
    scale=st.sampled_from([0.3, 3.0]),
    seed=st.integers(0, 999),
)
@limits(max_examples=80, deadline=None)
def test_adafocals_gamma_follows_the_held_out_samples(held_out, bins, lam, start, scale, seed):
    method = AdaFocal(config.AdaFocal(gamma_start=start, lam=lam, bins=bins))
    gamma = np.full(bins, start)
    for epoch in range(4):
        z, y = drawn(held_out, 4, scale, [seed, epoch])
        z = z.astype(np.float32).astype(np.float64)
        method.adapt(torch.tensor(z).float(), torch.tensor(y))
        confidence = softmax(z).max(1) if held_out else []
        gamma = by_hand(gamma, confidence, z.argmax(1) == y, lam)
        np.testing.assert_allclose(method.gamma, gamma, rtol=1e-4)
        assert len(method.edges) == bins - 1 and method.edges.equal(method.edges.sort().values)
    # A sample is in the bin that a label of its confidence would be in
    sizes = [held_out // bins + (b < held_out % bins) for b in range(bins)]
    own = torch.tensor(z).float().softmax(-1).amax(-1).sort().values
    found = torch.bucketize(own, method.edges, right=True)
    assert found.tolist() == np.repeat(range(bins), sizes).tolist()


def test_adafocal_switches_and_clips():
    """Far too sure, γ grows to its greatest; far too unsure, it falls, turns over and stays."""
    sure, unsure = torch.tensor([[9.0, 0.0]] * 4), torch.tensor([[0.1, 0.0]] * 4)
    wrong, right = torch.ones(4).long(), torch.zeros(4).long()
    method = AdaFocal(config.AdaFocal(bins=2))
    seen = []
    for logits, labels in [(sure, wrong)] * 4 + [(unsure, right)] * 20 + [(sure, wrong)] * 6:
        method.adapt(logits, labels)
        assert method.gamma[0] == method.gamma[1]  # all are tied
        seen.append(float(method.gamma[0]))
    assert seen[3] == 20.0
    turned = next(k for k, gamma in enumerate(seen) if gamma < 0)
    assert seen[turned] == pytest.approx(-0.2) and seen[turned - 1] >= 0.2
    assert seen[23] == -2.0
    assert max(seen[24:]) > 0  # and back


def test_adafocals_ties_have_one_gamma():
    """Two bins hold the same confidence, ½: a label of that has the γ of the upper one."""
    method = AdaFocal(config.AdaFocal(bins=2))
    method.adapt(torch.zeros(4, 2), torch.tensor([1, 1, 0, 0]))  # class 0 is what is predicted
    loss, _ = loss_and_gradient(method, given([[0.0, 0.0], [0.0, 1.0]], [0, 0]))
    p, gamma = np.array([0.5, 1 / (1 + np.e)]), np.exp([-0.5, 0.5])
    np.testing.assert_allclose(loss, (1 - p) ** gamma * -np.log(p), rtol=1e-5)


def test_adafocals_state_goes_into_another():
    method, other = AdaFocal(config.AdaFocal()), AdaFocal(config.AdaFocal())
    z, y = drawn(100, seed=5)
    method.adapt(torch.tensor(z), torch.tensor(y))
    batch = samples(torch.arange(B))
    before, _ = loss_and_gradient(other, batch)
    other.load_state_dict(method.state_dict())
    np.testing.assert_array_equal(
        loss_and_gradient(other, batch)[0], loss_and_gradient(method, batch)[0]
    )
    assert (before != loss_and_gradient(other, batch)[0]).any()
