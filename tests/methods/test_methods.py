"""Each method against the paper's formulas in float64, and what every method must do."""

import pkgutil
from importlib import import_module
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

from dps_dist import config, methods
from dps_dist.methods import Mix, Samples
from dps_dist.methods.baseline import Baseline
from dps_dist.methods.dps import DPS
from dps_dist.targets import Dirichlet, LocalTargets

N, K, B = 30, 6, 10
SETTINGS = get_args(get_args(config.Method)[0])
MIX = Mix(first=4, partner=torch.tensor([2, 0, 5, 1, 4, 3]), lam=0.7)
OF_ALL = Mix(first=0, partner=torch.arange(B).roll(3), lam=0.35)
CUT_OUT = Mix(first=0, partner=torch.arange(B), lam=1.0)


def labels_of(index):
    return (7 * index + index // 3) % K


def samples(index, mix=None, views=1):
    """Samples of that index. Their images hold random numbers, which `as_logits` takes K of."""
    random = torch.Generator().manual_seed(int(index[0]))
    images = [torch.randn(len(index), 3, 4, 4, generator=random) for _ in range(views)]
    return Samples(images[0], labels_of(index), index, tuple(images[1:]), mix)


def as_logits(images):
    return 3 * images.flatten(1)[:, :K]


def loss_and_gradient(method, batch, targets=None):
    """Of each sample: its loss [B], and the gradient of the losses' sum in the logits [B, K]."""
    logits = as_logits(batch.images).requires_grad_()
    loss, returned = method.loss(lambda images: logits, batch, targets)
    assert returned is logits and loss.dtype == torch.float32
    loss.sum().backward()
    return loss.detach().double().numpy(), logits.grad.double().numpy()


def log_softmax(z):
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def log_p(batch):
    return log_softmax(as_logits(batch.images).double().numpy())


def mixed(mix, values):
    """The rows from mix.first on mixed with their partners', the others as they are."""
    values = values.copy()
    rows = values[mix.first :]
    values[mix.first :] = mix.lam * rows + (1 - mix.lam) * rows[mix.partner.numpy()]
    return values


# ---- Baseline


@pytest.mark.parametrize("mix", [None, MIX, OF_ALL, CUT_OUT], ids=["none", "half", "all", "cutout"])
def test_baseline(mix):
    index = torch.arange(B)
    batch = samples(index, mix)
    target = np.eye(K)[batch.labels]
    if mix is not None:
        target = mixed(mix, target)
    loss, gradient = loss_and_gradient(Baseline(), batch)
    np.testing.assert_allclose(loss, -(target * log_p(batch)).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(log_p(batch)) - target, atol=1e-6)


def test_baseline_learns_cut_out_images_by_their_label():
    index = torch.arange(B)
    plain, _ = loss_and_gradient(Baseline(), samples(index))
    cut_out, _ = loss_and_gradient(Baseline(), samples(index, CUT_OUT))
    np.testing.assert_array_equal(cut_out, plain)


# ---- Deep Probabilistic Supervision


class Paper:
    """The recursion of the paper, float64: y ← (1−w)y + wp with w = 1/(γA+1), A ← γA + 1."""

    def __init__(self, gamma, c, epsilon=0.0, tau=1.0):
        self.gamma, self.tau = gamma, tau
        alpha = np.where(np.eye(K)[labels_of(torch.arange(N))] == 1, c, epsilon)
        self.A = alpha.sum(1)
        self.y = alpha / self.A[:, None]

    def sharpened(self, y):
        power = y ** (1 / self.tau)
        return power / power.sum(1, keepdims=True)

    def loss_and_gradient(self, batch):
        """Of each sample, against the targets before the update; then the update."""
        index, logs = batch.index.numpy(), log_p(batch)
        plain = len(index)
        target = self.sharpened(self.y[index])
        if batch.mix is not None:
            plain, target = batch.mix.first, mixed(batch.mix, target)
        i, p = index[:plain], np.exp(logs[:plain])
        w = 1 / (self.gamma * self.A[i, None] + 1)
        self.y[i] = (1 - w) * self.y[i] + w * p
        self.A[i] = self.gamma * self.A[i] + 1
        return -(target * logs).sum(1), np.exp(logs) - target


def store_for(method):
    evidence = method.evidence
    return LocalTargets(N, Dirichlet(K, evidence.gamma, evidence.c, evidence.epsilon))


def visits(count, mix=None):
    """Batches of `count` epochs over all samples, each time another order and other images."""
    for epoch in range(count):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(B):
            yield samples(index, mix)


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
@pytest.mark.parametrize("mix", [None, MIX], ids=["plain", "half mixed"])
def test_dps_is_the_papers_recursion(settings, mix):
    store, paper = assert_is_the_paper(settings, mix)
    total = store.prior.total(store.visits(torch.arange(N)))
    np.testing.assert_allclose(total, paper.A, rtol=1e-9)  # every visit was counted, none twice


def test_dps_only_looks_at_the_mixed_half():
    """Its rows are neither updated nor visited; those of the plain half are, once."""
    method = DPS(gamma=0.9, c=2.0, tau=0.8)
    store = store_for(method)
    for batch in visits(2):
        method.loss(as_logits, batch, store)
    index = torch.arange(B)
    before = store._rows.clone()
    method.loss(as_logits, samples(index, MIX), store)
    changed = (store._rows != before).any(1)
    assert changed[: MIX.first].all() and not changed[MIX.first :].any()
    assert store.visits(index).tolist() == [3] * MIX.first + [2] * (B - MIX.first)


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
        method.loss(as_logits, batch, store)
        after = store.read(batch.index, batch.labels).double().numpy()
        yield before, np.exp(log_p(batch)), after
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
        method.loss(as_logits, batch, store)
        seen[batch.index] += np.exp(log_p(batch))
    labels = labels_of(torch.arange(N))
    counted = (c * np.eye(K)[labels] + seen) / (c + 6)
    np.testing.assert_allclose(store.read(torch.arange(N), labels), counted, atol=5e-4)


def test_dps_stores_what_is_not_sharpened():
    """τ changes the loss and nothing that is kept."""
    sharp, plain = DPS(gamma=0.9, c=2.0, tau=0.5), DPS(gamma=0.9, c=2.0)
    stores, losses = [store_for(sharp), store_for(plain)], []
    for batch in visits(4):
        pair = zip((sharp, plain), stores, strict=True)
        losses.append([method.loss(as_logits, batch, store)[0].sum() for method, store in pair])
    assert torch.equal(*(store._rows.view(torch.int16) for store in stores))
    assert all(a != b for a, b in losses[N // B :])


def test_dps_leaves_padding_alone():
    method = DPS(gamma=0.9, c=2.0)
    store = store_for(method)
    index = torch.tensor([3, 8, -1])
    loss, _ = method.loss(
        as_logits, Samples(torch.ones(3, 3, 4, 4), labels_of(index), index), store
    )
    assert loss[2] == 0 and loss[:2].isfinite().all()
    assert store.visits(torch.arange(N)).nonzero().flatten().tolist() == [3, 8]


# ---- every method


def test_every_method_has_settings_and_every_settings_a_method():
    modules = [module.name for module in pkgutil.iter_modules(methods.__path__)]
    with_code = {
        name for name in modules if hasattr(import_module(f"dps_dist.methods.{name}"), "build")
    }
    assert with_code == {row.model_fields["name"].default for row in SETTINGS}


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.__name__)
def test_every_row_is_described(row):
    assert row.__doc__ and row.__doc__ != config.Section.__doc__
    assert all(field.description for field in row.model_fields.values())


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.__name__)
def test_every_method_gives_a_loss_for_each_sample(row):
    method = methods.build(row())
    model, seen = nn.Linear(48, K), []

    def forward(images):
        seen.append(len(images))
        return model(images.flatten(1))

    targets = store_for(method) if method.evidence is not None else None
    method.begin_epoch(1, 10)
    batch = samples(torch.arange(B), views=method.views)
    loss, logits = method.loss(forward, batch, targets)
    assert loss.shape == (B,) and loss.dtype == torch.float32 and loss.isfinite().all()
    assert logits.shape == (B, K)
    assert len(seen) == 1, "DDP wants one forward pass a step"
    loss.sum().backward()
    assert model.weight.grad.abs().sum() > 0
    assert method.mixes in ("all", "half")


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.__name__)
def test_every_methods_state_goes_into_another(row):
    method, other = methods.build(row()), methods.build(row())
    targets = store_for(method) if method.evidence is not None else None
    method.begin_epoch(1, 10)
    method.loss(as_logits, samples(torch.arange(B), views=method.views), targets)
    state = method.state_dict()
    other.load_state_dict(state)
    assert repr(other.state_dict()) == repr(state)
