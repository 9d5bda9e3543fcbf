"""Temperature scaling against a search by scipy, and where the answer is known."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional as F
from torch.profiler import profile

from dps_dist.evaluate import calibration, chunks
from dps_dist.evaluate.calibration import BOUNDS, fit_temperature


def drawn(temperature, n=4000, k=10, seed=0):
    """Logits, and labels that follow softmax(logits/temperature)."""
    rng = np.random.default_rng(seed)
    z = 3 * rng.standard_normal((n, k))
    p = np.exp(z / temperature)
    p /= p.sum(1, keepdims=True)
    labels = (p.cumsum(1) > rng.random((n, 1))).argmax(1)
    return torch.tensor(z, dtype=torch.float32), torch.from_numpy(labels)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, 8.0])
def test_finds_the_temperature_that_the_labels_follow(temperature):
    logits, labels = drawn(temperature)
    assert fit_temperature(logits, labels) == pytest.approx(temperature, rel=0.08)


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("k", [2, 100])
def test_is_where_the_likelihood_is_greatest(temperature, k):
    logits, labels = drawn(temperature, n=600, k=k, seed=1)

    def nll(log_t):
        return float(F.cross_entropy(logits.double() / np.exp(log_t), labels))

    best = minimize_scalar(nll, bounds=np.log(BOUNDS), method="bounded", options={"xatol": 1e-9})
    found = fit_temperature(logits, labels)
    assert nll(np.log(found)) <= best.fun + 1e-9
    assert found == pytest.approx(np.exp(best.x), rel=1e-4)


def in_one_piece(logits, labels):
    """As it was fitted at first: all logits in float64 at once, the slope by autograd."""
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([log_t], max_iter=100, line_search_fn="strong_wolfe")

    def nll():
        search.zero_grad()
        loss = F.cross_entropy(logits.double() / log_t.exp(), labels)
        loss.backward()
        return loss

    search.step(nll)
    return float(log_t.detach().exp())


@pytest.mark.parametrize(("n", "k"), [(600, 10), (3000, 1000)])
@pytest.mark.parametrize("temperature", [0.3, 2.5])
def test_parts_give_what_one_piece_does(n, k, temperature):
    logits, labels = drawn(temperature, n=n, k=k)
    assert fit_temperature(logits, labels) == pytest.approx(in_one_piece(logits, labels), rel=1e-9)


def test_the_fit_takes_little_memory():
    """A part at a time: 50,000 × 1000 were gigabytes, on every rank and after each epoch."""
    logits, labels = drawn(2.0, n=16_000, k=1000)
    with profile(profile_memory=True) as memory:
        fit_temperature(logits, labels)
    seen = [event.self_cpu_memory_usage for event in memory.events()]
    assert 0 < max(seen) < logits.numel() * 4 / 4  # of a single allocation


def test_half_precision_and_gradients_do_not_matter():
    logits, labels = drawn(2.0)
    with torch.no_grad():
        found = fit_temperature(logits.bfloat16(), labels.int())
    assert found == pytest.approx(fit_temperature(logits, labels), rel=0.01)


def test_stays_within_bounds_where_every_prediction_is_right():
    logits = torch.eye(5).repeat(4, 1)
    for z, likely in ((logits, 1.0), (-logits, 0.2)):
        found = fit_temperature(z, logits.argmax(1))
        assert BOUNDS[0] <= found <= BOUNDS[1]
        assert (z / found).softmax(1)[0, 0] == pytest.approx(likely, abs=0.01)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_have_none_and_are_looked_at_once(broken, monkeypatch):
    logits, labels = drawn(2.0, n=50)
    logits[7, 3] = broken
    looks = []
    monkeypatch.setattr(
        calibration, "chunks", lambda *both: looks.append(both) or chunks.chunks(*both)
    )
    assert np.isnan(fit_temperature(logits, labels)) and len(looks) == 1
