"""The losses that methods share, against a few lines of float64 and their closed-form gradients."""

import numpy as np
import pytest
import torch

from dps_dist.methods.losses import (
    cross_entropy,
    kl_divergence,
    mean_of,
    sharpened,
    soft_cross_entropy,
)

B, K = 40, 7


def drawn(scale=4.0):
    """logits [B, K], labels [B], targets [B, K] with a few zeros."""
    rng = np.random.default_rng(0)
    targets = rng.dirichlet(np.full(K, 0.5), B)
    targets[::5, 0] = 0
    targets /= targets.sum(1, keepdims=True)
    return scale * rng.standard_normal((B, K)), rng.integers(K, size=B), targets


def log_softmax(z):
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def gradient_of(loss, logits):
    z = torch.tensor(logits, dtype=torch.float32, requires_grad=True)
    loss(z).sum().backward()
    return z.grad.numpy()


def test_cross_entropy():
    z, labels, _ = drawn()
    given = torch.from_numpy(labels)
    loss = cross_entropy(torch.tensor(z, dtype=torch.float32), given)
    assert loss.dtype == torch.float32 and loss.shape == (B,)
    np.testing.assert_allclose(loss, -log_softmax(z)[np.arange(B), labels], rtol=1e-5, atol=1e-6)
    p_minus_y = np.exp(log_softmax(z)) - np.eye(K)[labels]
    gradient = gradient_of(lambda logits: cross_entropy(logits, given), z)
    np.testing.assert_allclose(gradient, p_minus_y, atol=1e-6)


def test_soft_cross_entropy():
    z, _, targets = drawn()
    given = torch.tensor(targets, dtype=torch.float32)
    loss = soft_cross_entropy(torch.tensor(z, dtype=torch.float32), given)
    assert loss.dtype == torch.float32 and loss.shape == (B,)
    np.testing.assert_allclose(loss, -(targets * log_softmax(z)).sum(1), rtol=1e-5)
    p_minus_y = np.exp(log_softmax(z)) - targets
    gradient = gradient_of(lambda logits: soft_cross_entropy(logits, given), z)
    np.testing.assert_allclose(gradient, p_minus_y, atol=1e-6)


def test_a_label_is_a_target_that_is_one_there():
    z, labels, _ = drawn()
    logits, given = torch.tensor(z, dtype=torch.float32), torch.from_numpy(labels)
    one_hot = torch.eye(K)[given]
    assert torch.allclose(cross_entropy(logits, given), soft_cross_entropy(logits, one_hot))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_have_losses_in_float32(dtype):
    z, labels, targets = drawn()
    logits, soft = torch.tensor(z, dtype=dtype), torch.tensor(targets, dtype=torch.float32)
    exact = log_softmax(logits.double().numpy())
    hard = cross_entropy(logits, torch.from_numpy(labels))
    np.testing.assert_allclose(hard, -exact[np.arange(B), labels], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(soft_cross_entropy(logits, soft), -(targets * exact).sum(1), 1e-5)


@pytest.mark.parametrize("tau", [0.25, 0.8, 1.0, 3.0])
def test_sharpened(tau):
    _, _, targets = drawn()
    power = targets ** (1 / tau)
    power /= power.sum(1, keepdims=True)
    result = sharpened(torch.tensor(targets, dtype=torch.float32), tau).numpy()
    np.testing.assert_allclose(result, power, rtol=1e-4, atol=1e-7)
    assert (result[targets == 0] == 0).all()


def test_sharpened_leaves_a_label_alone():
    assert torch.equal(sharpened(torch.eye(K), 0.8), torch.eye(K))


@pytest.mark.parametrize("T", [1.0, 3.0])
def test_kl_divergence(T):
    z, _, targets = drawn()
    given = torch.tensor(targets, dtype=torch.float32)
    loss = kl_divergence(given, torch.tensor(z, dtype=torch.float32), T)
    assert loss.dtype == torch.float32 and loss.shape == (B,)
    log_y = np.log(np.where(targets > 0, targets, 1))
    expected = (targets * (log_y - log_softmax(z / T))).sum(1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-6)
    gradient = gradient_of(lambda logits: kl_divergence(given, logits, T), z)
    np.testing.assert_allclose(gradient, (np.exp(log_softmax(z / T)) - targets) / T, atol=1e-6)


def test_mean_of():
    values = torch.tensor([1.0, 2.0, float("nan"), 6.0], requires_grad=True)
    mean = mean_of(values, torch.tensor([True, False, False, True]))
    mean.backward()
    assert mean == 3.5 and values.grad.tolist() == [0.5, 0, 0, 0.5]
    assert mean_of(values, torch.zeros(4, dtype=torch.bool)) == 0
