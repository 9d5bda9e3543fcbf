"""The maths against the paper's own recursion in float64, its oracles and its special cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_dist.targets.dirichlet import MAX_VISITS, Dirichlet

priors = st.builds(
    Dirichlet,
    num_classes=st.integers(2, 30),
    gamma=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
    c=st.floats(1e-3, 1e4),
    epsilon=st.one_of(st.just(0.0), st.floats(0, 10)),
)


def recursion(prior, labels, predictions):
    """The paper's: w = 1/(γA+1), y ← (1−w)y + wp, A ← γA+1, from y⁰ = α⁰/A⁰. float64."""
    alpha = torch.full((len(labels), prior.num_classes), prior.epsilon, dtype=torch.float64)
    alpha[torch.arange(len(labels)), labels] = prior.c
    total = alpha.sum(1, keepdim=True)
    y = alpha / total
    for p in predictions:
        w = 1 / (prior.gamma * total + 1)
        y, total = (1 - w) * y + w * p, prior.gamma * total + 1
    return y, total[:, 0]


def predictions(prior, visits, seed, rows=3):
    generator = torch.Generator().manual_seed(seed)
    shape = visits, rows, prior.num_classes
    return torch.softmax(4 * torch.randn(shape, generator=generator, dtype=torch.float64), -1)


@settings(max_examples=150, deadline=None)
@given(prior=priors, visits=st.integers(0, 60), seed=st.integers(0, 1000))
def test_evidence_form_is_the_papers_recursion(prior, visits, seed):
    labels = torch.tensor([0, 1, prior.num_classes - 1])
    seen = predictions(prior, visits, seed)
    y, total = recursion(prior, labels, seen)

    t = torch.full((3,), visits)
    torch.testing.assert_close(prior.total(t), total, rtol=1e-9, atol=1e-9)
    evidence = torch.zeros(3, prior.num_classes)
    for earlier, p in enumerate(seen):
        evidence = prior.updated(evidence, torch.full((3,), earlier), p)
    torch.testing.assert_close(
        prior.posterior(evidence, t, labels).double(), y, rtol=2e-5, atol=1e-7
    )


@settings(max_examples=100, deadline=None)
@given(prior=priors, t=st.integers(0, MAX_VISITS))
def test_sums_and_weights(prior, t):
    visits = torch.tensor([t])
    if prior.gamma < 1:
        exact = math.fsum(prior.gamma**s for s in range(min(t, 5000)))
        tail = prior.gamma**5000 if t > 5000 else 0.0
        if tail < 1e-12:
            assert float(prior.evidence_weight(visits)) == pytest.approx(exact, rel=1e-9)
    else:
        assert float(prior.evidence_weight(visits)) == t
    assert 0 <= float(prior.prior_weight(visits)) <= 1
    assert max(1 - prior.gamma, 1 / (t + 1)) * (1 - 1e-9) <= float(prior.update_weight(visits)) <= 1
    y = prior.posterior(torch.zeros(1, prior.num_classes), torch.tensor([0]), torch.tensor([1]))
    assert float(y.sum()) == pytest.approx(1, abs=1e-5)


def test_discount_next_to_one_keeps_its_precision():
    prior = Dirichlet(10, gamma=1 - 1e-12, c=1.0)
    assert float(prior.evidence_weight(torch.tensor([1000]))) == pytest.approx(1000, rel=1e-8)


def test_table_holds_the_coefficients_of_all_visits():
    prior = Dirichlet(100, 0.95, 1000.0, 0.01)
    t = torch.tensor([0, 1, 77, MAX_VISITS])
    assert prior.table.shape == (MAX_VISITS + 1, 4)
    assert torch.equal(prior.table[t], prior.coefficients(t))


class TestOracles:
    """The numbers that SPEC derives from the paper."""

    imagenet = Dirichlet(1000, 0.99, 1000.0, 0.05)

    def test_imagenet(self):
        y0 = self.imagenet.prior(torch.tensor([3]))[0]
        assert pytest.approx(1049.95) == self.imagenet.A0
        assert float(y0[3]) == pytest.approx(0.9524, abs=5e-5)
        assert float(y0[4]) == pytest.approx(4.76e-5, abs=5e-8)
        _, _, first, _ = self.imagenet.coefficients(torch.tensor([1]))[0]  # the evidence's weight
        assert float(first) == pytest.approx(9.61e-4, abs=5e-7)
        assert float(self.imagenet.total(torch.tensor(200))) == pytest.approx(227.27, abs=5e-3)
        assert float(self.imagenet.prior_weight(torch.tensor(200))) == pytest.approx(
            0.619, abs=5e-4
        )

    @pytest.mark.parametrize(
        ("gamma", "c", "visits", "weight"),
        [(0.95, 1000.0, 200, 0.0017), (0.95, 50.0, 40, 0.269), (0.97, 2000.0, 200, 0.120)],
    )
    def test_weight_of_the_prior(self, gamma, c, visits, weight):
        prior = Dirichlet(10, gamma, c)
        assert float(prior.prior_weight(torch.tensor(visits))) == pytest.approx(
            weight, abs=0.5 * 10 ** -len(str(weight).split(".")[1])
        )

    def test_cnn_prior_falls_below_half_at_update_77(self):
        weights = Dirichlet(10, 0.95, 1000.0).prior_weight(torch.arange(200))
        assert int((weights < 0.5).nonzero()[0]) == 77


class TestSpecialCases:
    labels = torch.tensor([2, 0, 1])

    def targets(self, prior, visits=12, seed=1):
        seen = predictions(prior, visits, seed)
        evidence = torch.zeros(3, prior.num_classes)
        for t, p in enumerate(seen):
            evidence = prior.updated(evidence, torch.full((3,), t), p)
        return prior.posterior(evidence, torch.full((3,), visits), self.labels), seen

    def test_large_c_is_plain_training(self):
        y, _ = self.targets(Dirichlet(5, 0.95, 1e12))
        torch.testing.assert_close(y, torch.eye(5)[self.labels], rtol=0, atol=1e-6)

    def test_balanced_prior_is_an_exact_moving_average(self):
        gamma = 0.9
        prior = Dirichlet(5, gamma, c=1 / (1 - gamma))
        y, seen = self.targets(prior)
        average = torch.eye(5, dtype=torch.float64)[self.labels]
        for p in seen:
            average = gamma * average + (1 - gamma) * p
        torch.testing.assert_close(y.double(), average, rtol=1e-5, atol=1e-7)

    def test_gamma_0_is_the_last_prediction_to_the_bit(self):
        y, seen = self.targets(Dirichlet(5, 0.0, 10.0, 0.1))
        assert torch.equal(y, seen[-1].float())

    def test_gamma_1_is_undiscounted(self):
        prior = Dirichlet(5, 1.0, 3.0, 0.5)
        y, seen = self.targets(prior)
        alpha = torch.full((3, 5), 0.5, dtype=torch.float64)
        alpha[torch.arange(3), self.labels] = 3.0
        torch.testing.assert_close(
            y.double(), (alpha + seen.sum(0)) / (prior.A0 + 12), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_classes", 1),
        ("gamma", -0.1),
        ("gamma", 1.5),
        ("gamma", math.nan),
        ("c", 0.0),
        ("c", math.inf),
        ("epsilon", -1.0),
        ("epsilon", math.nan),
    ],
)
def test_refuses_by_name(field, value):
    fields = {"num_classes": 10, "gamma": 0.9, "c": 1.0, "epsilon": 0.0, field: value}
    with pytest.raises(ValueError, match=f"^{field} is {value}: give "):
        Dirichlet(**fields)
