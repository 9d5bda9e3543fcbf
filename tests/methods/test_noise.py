"""Symmetric cross-entropy and early-learning regularisation against their papers."""

import numpy as np
import pytest
import torch

from dps_dist import config, methods
from dps_dist.methods.elr import ELR
from tests.methods.batches import (
    AWKWARD,
    B,
    K,
    N,
    assert_is,
    ce,
    given,
    logits_of,
    loss_and_gradient,
    samples,
    softmax,
    store_for,
    visits,
)


def sl(z, y, _, alpha, beta):
    onehot = np.clip(np.eye(z.shape[1])[y], 1e-4, 1)
    return alpha * ce(z, y) - beta * (softmax(z) * np.log(onehot)).sum(1)


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 1.0), (6.0, 0.1)])
def test_sl(alpha, beta, batch):
    method = methods.build(config.SL(alpha=alpha, beta=beta))
    assert_is(method, batch, lambda *a: sl(*a, alpha, beta))


class Paper:
    """t ← βt + (1−β)p, and then CE + λ·log(1 − ⟨t, p⟩)."""

    def __init__(self, beta, lam, classes=K):
        self.beta, self.lam, self.t = beta, lam, np.zeros((N, classes))

    def formula(self, batch):
        real = batch.real.numpy()
        i, p = batch.index.numpy()[real], softmax(logits_of(batch)[real])
        self.t[i] = self.beta * self.t[i] + (1 - self.beta) * p
        t = self.t[i]
        return lambda z, y, _: ce(z, y) + self.lam * np.log(1 - (t * softmax(z)).sum(1))


@pytest.mark.parametrize(("beta", "lam"), [(0.7, 3.0), (0.9, 1.0)])
def test_elr_over_many_visits(beta, lam):
    method, paper = ELR(beta, lam), Paper(beta, lam)
    store = store_for(method)
    for batch in visits(8):
        # t is known to 2⁻¹¹, and log(1 − ⟨t, p⟩) weighs that by up to a hundred here
        assert_is(method, batch, paper.formula(batch), store, rtol=1e-3, atol=4e-3)
    everyone = torch.arange(N)
    t = (1 - beta ** store.visits(everyone).numpy())[:, None] * store.evidence(everyone).numpy()
    np.testing.assert_allclose(t, paper.t, atol=1e-3)
    assert (store.visits(everyone) == 8).all()


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
def test_elr_on_awkward_batches(batch):
    """At the first visit t = (1−β)p, so that it can be no nearer to 1 than that."""
    classes = batch.images.shape[1]
    method, paper = ELR(0.7, 3.0), Paper(0.7, 3.0, classes)
    assert_is(method, batch, paper.formula(batch), store_for(method, classes), atol=1e-4)


def test_elr_is_finite_where_t_and_p_are_one():
    """log(1 − ⟨t, p⟩) stops at log 1e-4."""
    method = ELR(0.0, 3.0)
    store = store_for(method)
    batch = given(100.0 * np.eye(K)[np.arange(B) % K], np.arange(B) % K)
    for _ in range(3):
        loss, gradient = loss_and_gradient(method, batch, store)
        np.testing.assert_allclose(loss, 3 * np.log(1e-4), rtol=1e-5)
        assert np.isfinite(gradient).all()


def test_elr_without_its_weight_is_the_baseline():
    method = ELR(0.7, 0.0)
    store = store_for(method)
    for seed in range(3):
        batch = samples(torch.arange(B), seed=seed)
        assert_is(method, batch, lambda z, y, _: ce(z, y), store)
