"""DPS and DPS+ against the paper's recursion in float64, and the special cases that it names."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dps_dist import config, methods
from dps_dist.methods import Mix, Samples, View
from dps_dist.methods.baseline import Baseline
from dps_dist.methods.dps import DPS
from tests.methods.batches import (
    AWKWARD,
    HALF,
    OF_ALL,
    B,
    K,
    N,
    as_images,
    drawn,
    float64,
    forward,
    kl,
    labels_of,
    log_softmax,
    logits_of,
    loss_and_gradient,
    mixed,
    samples,
    slope,
    softmax,
    store_for,
    visits,
)


class Paper:
    """The recursion of the paper, float64: y ← (1−w)y + wp with w = 1/(γA+1), A ← γA + 1."""

    def __init__(self, gamma, c, epsilon=0.0, tau=1.0, labels=None, classes=K):
        self.gamma, self.tau = gamma, tau
        labels = labels_of(torch.arange(N)) if labels is None else labels
        alpha = np.where(np.eye(classes)[labels] == 1, c, epsilon)
        self.A = alpha.sum(1)
        self.y = alpha / self.A[:, None]

    def sharpened(self, y):
        power = y ** (1 / self.tau)
        return power / power.sum(1, keepdims=True)

    def loss_and_gradient(self, batch):
        """Of each sample, against the targets before the update; then the update."""
        index, logs = batch.index.numpy(), log_softmax(logits_of(batch))
        plain = len(index)
        target = self.sharpened(self.y[index])
        if batch.mix is not None:
            plain, target = batch.mix.first, mixed(batch.mix, target)
        i, p = index[:plain], np.exp(logs[:plain])
        w = 1 / (self.gamma * self.A[i, None] + 1)
        self.y[i] = (1 - w) * self.y[i] + w * p
        self.A[i] = self.gamma * self.A[i] + 1
        return -(target * logs).sum(1), np.exp(logs) - target


def assert_is_the_paper(settings, mix=None, epochs=12):
    """DPS and the recursion over the same batches; the store, and the recursion, at the end."""
    method, paper = DPS(**settings), Paper(**settings)
    store = store_for(method)
    for batch in visits(epochs, mix):
        loss, gradient = loss_and_gradient(method, batch, store)
        expected_loss, expected_gradient = paper.loss_and_gradient(batch)
        # float16 keeps the evidence to 2⁻¹¹, and a loss weighs a class by up to 20
        np.testing.assert_allclose(loss, expected_loss, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-3)
    everyone = torch.arange(N)
    np.testing.assert_allclose(store.read(everyone, labels_of(everyone)), paper.y, atol=1e-3)
    return store, paper


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 0.95, "c": 1000.0},
        {"gamma": 0.85, "c": 3.0, "epsilon": 0.05},
        {"gamma": 0.85, "c": 3.0, "tau": 0.8},
        {"gamma": 0.9, "c": 1.0, "epsilon": 0.2, "tau": 2.0},
    ],
    ids=["weak evidence", "strong", "sharpened", "flattened"],
)
@pytest.mark.parametrize("mix", [None, HALF], ids=["plain", "half mixed"])
def test_dps_is_the_papers_recursion(settings, mix):
    store, paper = assert_is_the_paper(settings, mix)
    total = store.prior.total(store.visits(torch.arange(N)))
    np.testing.assert_allclose(total, paper.A, rtol=1e-9)  # every visit was counted, none twice


def test_dps_only_looks_at_the_mixed_half():
    """Its rows are neither updated nor visited; those of the plain half are, once."""
    method = DPS(gamma=0.9, c=2.0, tau=0.8)
    store = store_for(method)
    for batch in visits(2):
        method.loss(forward, batch, store)
    index = torch.arange(B)
    before = store._rows.clone()
    method.loss(forward, samples(index, HALF), store)
    changed = (store._rows != before).any(1)
    assert changed[: HALF.first].all() and not changed[HALF.first :].any()
    assert store.visits(index).tolist() == [3] * HALF.first + [2] * (B - HALF.first)


def test_dps_cut_out_rows_have_their_own_targets():
    """A mix of every row with itself, from the second half on."""
    method, plain = DPS(gamma=0.9, c=2.0), DPS(gamma=0.9, c=2.0)
    store, other = store_for(method), store_for(plain)
    mix = Mix(first=5, partner=torch.arange(5), lam=1.0)
    index = torch.arange(B)
    for _ in range(3):
        loss, gradient = loss_and_gradient(method, samples(index, mix), store)
        half, _ = loss_and_gradient(plain, samples(index), other)
        np.testing.assert_allclose(loss[:5], half[:5], rtol=1e-6)
    expected = Baseline()  # these were never updated: their targets are still the labels
    np.testing.assert_allclose(loss[5:], loss_and_gradient(expected, samples(index))[0][5:], 1e-5)
    assert np.isfinite(gradient).all()


def test_dps_with_a_certain_prior_is_the_baseline():
    """c → ∞."""
    method = DPS(gamma=0.95, c=1e30)
    store = store_for(method)
    for batch in visits(5):
        loss, gradient = loss_and_gradient(method, batch, store)
        expected_loss, expected_gradient = loss_and_gradient(Baseline(), batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def targets_after(method, epochs):
    """The targets [N, K] before and after each visit, and the predictions in between."""
    store, everyone = store_for(method), torch.arange(N)
    for batch in visits(epochs):
        before = store.read(batch.index, batch.labels).double().numpy()
        method.loss(forward, batch, store)
        after = store.read(batch.index, batch.labels).double().numpy()
        yield before, softmax(logits_of(batch)), after
    assert store.visits(everyone).tolist() == [epochs] * N


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_dps_whose_prior_weighs_as_all_evidence_is_a_moving_average(gamma):
    """A⁰ = 1/(1−γ): y ← γ·y + (1−γ)·p at every visit."""
    for before, p, after in targets_after(DPS(gamma=gamma, c=1 / (1 - gamma)), epochs=8):
        np.testing.assert_allclose(after, gamma * before + (1 - gamma) * p, atol=5e-4)


def test_dps_without_memory_keeps_the_last_prediction():
    """γ = 0: nothing else is in the target from the first visit on, whatever c."""
    for _, p, after in targets_after(DPS(gamma=0.0, c=50.0, epsilon=1.0), epochs=3):
        np.testing.assert_allclose(after, p, rtol=1e-3, atol=1e-6)


def test_dps_without_discount_counts():
    """γ = 1: y = (α⁰ + Σ p)/(A⁰ + t)."""
    method, c = DPS(gamma=1.0, c=4.0), 4.0
    store, seen = store_for(method), np.zeros((N, K))
    for batch in visits(6):
        method.loss(forward, batch, store)
        seen[batch.index] += softmax(logits_of(batch))
    labels = labels_of(torch.arange(N))
    counted = (c * np.eye(K)[labels] + seen) / (c + 6)
    np.testing.assert_allclose(store.read(torch.arange(N), labels), counted, atol=5e-4)


def test_dps_stores_what_is_not_sharpened():
    """τ changes the loss and nothing that is kept."""
    sharp, plain = DPS(gamma=0.9, c=2.0, tau=0.5), DPS(gamma=0.9, c=2.0)
    stores, losses = [store_for(sharp), store_for(plain)], []
    for batch in visits(4):
        pair = zip((sharp, plain), stores, strict=True)
        losses.append([method.loss(forward, batch, store)[0].sum() for method, store in pair])
    assert torch.equal(*(store._rows.view(torch.int16) for store in stores))
    assert all(a != b for a, b in losses[N // B :])


def test_dps_leaves_padding_alone():
    method = DPS(gamma=0.9, c=2.0)
    store = store_for(method)
    index = torch.tensor([3, 8, -1])
    loss, _ = method.loss(forward, Samples(torch.ones(3, K, 1, 1), labels_of(index), index), store)
    assert loss[2] == 0 and loss[:2].isfinite().all()
    assert store.visits(torch.arange(N)).nonzero().flatten().tolist() == [3, 8]


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize("tau", [1.0, 0.8])
def test_dps_on_awkward_batches(batch, tau):
    method, classes, real = DPS(0.9, 3.0, 0.1, tau), batch.images.shape[1], batch.real
    labels = torch.zeros(N).long().index_copy(0, batch.index[real], batch.labels[real])
    paper, store = Paper(0.9, 3.0, 0.1, tau, labels, classes), store_for(method, classes)
    shown = Samples(batch.images[real], batch.labels[real], batch.index[real])
    for _ in range(4):
        loss, gradient = loss_and_gradient(method, batch, store)
        expected_loss, expected_gradient = paper.loss_and_gradient(shown)
        coarse = 1e-2 if batch.images.dtype == torch.bfloat16 else 1e-3
        np.testing.assert_allclose(loss[real.numpy()], expected_loss, rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(gradient[real.numpy()], expected_gradient, atol=coarse)
        assert (gradient[~real.numpy()] == 0).all()


# ---- DPS+


def plus(**more):
    return methods.build(config.DPSPlus(gamma=0.9, c=3.0, **more))


def views(seed, mixes):
    return tuple(
        View(as_images(drawn(B, seed=[seed, k])[0]).float(), mix) for k, mix in enumerate(mixes)
    )


@pytest.mark.parametrize(
    "mixes",
    [(None,), (None, None), (OF_ALL, Mix(0, torch.arange(B).flip(0), 0.8)), (None, OF_ALL, None)],
    ids=["one view", "two", "mixed", "some mixed"],
)
def test_dps_plus(mixes):
    """L_DPS + λ_c·(1/m)Σ KL(p_weak, mixed as the view, ‖ strong view), over several visits."""
    method, paper = plus(lambda_c=2.5, tau=0.8, strong_views=len(mixes)), Paper(0.9, 3.0, tau=0.8)
    assert method.views == 1 + len(mixes)
    store = store_for(method)
    for number, batch in enumerate(visits(4)):
        strong = [view.images.requires_grad_() for view in views(number, mixes)]
        batch = replace(batch, other_views=tuple(map(View, strong, mixes)))
        images = batch.images.clone().requires_grad_()
        loss, logits = method.loss(forward, replace(batch, images=images), store)
        loss.sum().backward()
        assert torch.equal(logits, forward(images)) and loss.dtype == torch.float32
        expected, gradient = paper.loss_and_gradient(batch)
        np.testing.assert_allclose(float64(images.grad.flatten(1)), gradient, atol=1e-3)
        for view, mix in zip(strong, mixes, strict=True):
            p = softmax(logits_of(batch))
            p, z = p if mix is None else mixed(mix, p), float64(view.flatten(1))
            share = 2.5 / len(mixes)
            expected = expected + share * kl(p, z)
            wanted = slope(lambda z, p=p, share=share: share * kl(p, z), z)
            np.testing.assert_allclose(float64(view.grad.flatten(1)), wanted, atol=1e-5)
        np.testing.assert_allclose(float64(loss), expected, rtol=2e-3, atol=2e-3)
    everyone = torch.arange(N)
    np.testing.assert_allclose(store.read(everyone, labels_of(everyone)), paper.y, atol=1e-3)
    assert store.visits(everyone).tolist() == [4] * N  # strong views are no visits


def test_dps_plus_without_consistency_is_dps():
    method, dps = plus(lambda_c=0, tau=0.8), DPS(0.9, 3.0, tau=0.8)
    stores = store_for(method), store_for(dps)
    for number, batch in enumerate(visits(3)):
        shown = replace(batch, other_views=views(number, (OF_ALL, None)))
        found = loss_and_gradient(method, shown, stores[0])
        expected = loss_and_gradient(dps, batch, stores[1])
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    assert torch.equal(*(store._rows.view(torch.int16) for store in stores))


def test_dps_plus_asks_for_strong_views():
    method = plus(erase=0.3)
    assert method.views == 3 and method.strong.erase == 0.3 and method.mixes == "none"
