"""Temporal Ensembling, PS-KD, DLB and knowledge distillation against their papers."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch

from dps_dist import config, methods
from dps_dist.methods import View
from dps_dist.methods.baseline import Baseline
from dps_dist.methods.dlb import DLB
from dps_dist.methods.kd import KD
from dps_dist.methods.pskd import PSKD
from tests.methods.batches import (
    AWKWARD,
    CUT_OUT,
    HALF,
    OF_ALL,
    B,
    K,
    N,
    as_images,
    assert_is,
    ce,
    drawn,
    float64,
    forward,
    given,
    kl,
    log_softmax,
    logits_of,
    loss_and_gradient,
    mixed,
    samples,
    slope,
    softmax,
    store_for,
    teach,
    visits,
)

# ---- Temporal Ensembling


class Ensembling:
    """Z ← aZ + (1−a)p at each visit; L = CE + w·(1/K)Σ(p − z̃)², z̃ = Z/(1−aᵗ)."""

    def __init__(self, a, w_max, rampup, classes=K):
        self.a, self.w_max, self.rampup = a, w_max, rampup
        self.Z, self.t = np.zeros((N, classes)), np.zeros(N)

    def formula(self, batch, epoch):
        real = batch.real.numpy()
        i, a = batch.index.numpy()[real], self.a
        w = self.w_max * exp(-5 * (1 - min(1, epoch / self.rampup)) ** 2) if epoch else 0
        known = self.t[i] > 0
        scale = np.where(known, 1 - a ** self.t[i], 1)
        ensembled = self.Z[i] / scale[:, None]
        self.Z[i] = a * self.Z[i] + (1 - a) * softmax(logits_of(batch)[real])
        self.t[i] += 1
        return lambda z, y, _: (
            ce(z, y) + w * known * ((softmax(z) - ensembled) ** 2).sum(1) / z.shape[1]
        )


@pytest.mark.parametrize(("a", "w_max"), [(0.6, 30.0), (0.9, 3.0), (0.0, 10.0)])
def test_te_over_many_visits(a, w_max):
    method = methods.build(config.TE(a=a, w_max=w_max, rampup_epochs=4))
    paper, store = Ensembling(a, w_max, rampup=4), store_for(method)
    for number, batch in enumerate(visits(8)):
        epoch = number // (N // B)
        method.begin_epoch(epoch, 8)
        assert_is(method, batch, paper.formula(batch, epoch), store, rtol=1e-3, atol=w_max * 5e-5)
    everyone = torch.arange(N)
    z_tilde = paper.Z / (1 - a**paper.t)[:, None]
    np.testing.assert_allclose(store.evidence(everyone), z_tilde, atol=1e-3)


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
def test_te_on_awkward_batches(batch):
    classes = batch.images.shape[1]
    method = methods.build(config.TE(rampup_epochs=2))
    paper, store = Ensembling(0.6, 30.0, 2, classes), store_for(method, classes)
    for epoch in range(3):
        method.begin_epoch(epoch, 3)
        turned = replace(batch, images=batch.images.roll(epoch, 1))
        if batch.images.equal(turned.images):
            turned = batch  # which may be the tied one
        assert_is(method, turned, paper.formula(turned, epoch), store, rtol=1e-3, atol=2e-3)


def test_te_a_sample_that_was_not_visited_has_its_label_only():
    method = methods.build(config.TE(w_max=1000))
    store = store_for(method)
    method.begin_epoch(150, 200)
    first, _ = loss_and_gradient(method, samples(torch.arange(5)), store)
    both = samples(torch.arange(B), seed=1)
    loss, _ = loss_and_gradient(method, both, store)
    plain = ce(logits_of(both), both.labels.numpy())
    np.testing.assert_allclose(loss[5:], plain[5:], 1e-5, 1e-6)
    assert (loss[:5] > plain[:5] + 1).all()
    batch = samples(torch.arange(5))
    np.testing.assert_allclose(first, ce(logits_of(batch), batch.labels.numpy()), 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("epoch", "weight"),
    [(0, 0), (1, 30 * exp(-5 * 0.99**2)), (50, 30 * exp(-1.25)), (100, 30), (199, 30)],
)
def test_te_weight(epoch, weight):
    method = methods.build(config.TE())
    method.begin_epoch(epoch, 200)
    assert method.weight == pytest.approx(weight)


def test_te_without_ramps():
    method = methods.build(config.TE(rampup_epochs=0, rampdown_epochs=0))
    for epoch, weight in [(0, 0), (1, 30), (9, 30)]:
        method.begin_epoch(epoch, 10)
        assert method.weight == weight and method.momentum(0.9, "adam") == 0.9


@pytest.mark.parametrize(
    ("epoch", "beta1"),
    [(0, 0.9), (150, 0.9), (175, 0.1 + 0.8 * exp(-3.125)), (200, 0.1 + 0.8 * exp(-12.5))],
)
def test_te_anneals_beta1_over_the_last_epochs(epoch, beta1):
    method = methods.build(config.TE(beta1_end=0.1))
    method.begin_epoch(epoch, 200)
    assert method.momentum(0.9, "adam") == pytest.approx(beta1)
    assert method.momentum(0.9, "sgd") == 0.9
    with_sgd = methods.build(config.TE(beta1_end=0.1, anneal_sgd=True))
    with_sgd.begin_epoch(epoch, 200)
    assert with_sgd.momentum(0.9, "sgd") == pytest.approx(beta1)


# ---- PS-KD


class LastPrediction:
    """CE((1−α_e)·onehot + α_e·p_prev, p); p_prev is the label at first."""

    def __init__(self, alpha_T, epochs, classes=K):
        self.alpha_T, self.epochs = alpha_T, epochs
        self.p, self.seen = np.zeros((N, classes)), np.zeros(N, bool)

    def formula(self, batch, epoch):
        """epoch: from 1."""
        real = batch.real.numpy()
        i, y = batch.index.numpy()[real], batch.labels.numpy()[real]
        alpha = self.alpha_T * epoch / self.epochs
        onehot = np.eye(self.p.shape[1])[y]
        previous = np.where(self.seen[i, None], self.p[i], onehot)
        target = (1 - alpha) * onehot + alpha * previous
        self.p[i], self.seen[i] = softmax(logits_of(batch)[real]), True
        return lambda z, y, _: -(target * log_softmax(z)).sum(1)


@pytest.mark.parametrize("alpha_T", [0.8, 0.3])
def test_pskd_over_many_visits(alpha_T):
    method, paper = PSKD(alpha_T), LastPrediction(alpha_T, 6)
    store = store_for(method)
    for number, batch in enumerate(visits(6)):
        epoch = number // (N // B)
        method.begin_epoch(epoch, 6)
        assert_is(method, batch, paper.formula(batch, epoch + 1), store, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(store.evidence(torch.arange(N)), paper.p, rtol=1e-3, atol=1e-8)
    assert method.alpha == pytest.approx(alpha_T)  # the whole of it, in the last epoch


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
def test_pskd_on_awkward_batches(batch):
    classes = batch.images.shape[1]
    method, paper = PSKD(0.8), LastPrediction(0.8, 3, classes)
    store = store_for(method, classes)
    for epoch in range(3):
        method.begin_epoch(epoch, 3)
        assert_is(method, batch, paper.formula(batch, epoch + 1), store, rtol=1e-3, atol=1e-3)


# ---- DLB


def again(rows, seed=7, mix=None):
    """The step before: what was said of its first view, and its second view."""
    z, y = drawn(rows, seed=seed)
    second = View(as_images(drawn(rows, seed=seed + 1)[0]).float(), mix)
    index = torch.arange(rows)
    return replace(
        given(z, y, index, mix=mix, logits=torch.tensor(z).float()), other_views=(second,)
    )


def dlb(z, y, now, before, T=3.0, alpha=1.0):
    """CE of both and the KL, by the samples that are not padding; now: logits of the view."""
    real = before.real.numpy()
    label = np.eye(K)[before.labels]
    if before.other_views[0].mix is not None:
        label = mixed(before.other_views[0].mix, label)
    ce_again = -(label * log_softmax(now)).sum(1)[real].mean()
    then = softmax(float64(before.logits) / T)
    distilled = T**2 * kl(then, now / T)[real].mean()
    return (ce(z, y) + ce_again) / 2 + alpha * distilled


@pytest.mark.parametrize(
    "before",
    [
        again(B),
        again(3),
        again(B, mix=OF_ALL),
        again(B, mix=HALF),
        replace(again(4), index=torch.tensor([5, 2, -1, -1])),
    ],
    ids=["as many", "fewer", "mixed", "half mixed", "padding"],
)
@pytest.mark.parametrize("batch", [AWKWARD["random"], AWKWARD["padding"]], ids=["all", "padded"])
@pytest.mark.parametrize(("T", "alpha"), [(3.0, 1.0), (2.0, 0.5)])
def test_dlb(T, alpha, batch, before):
    method = DLB(T, alpha)
    now = logits_of(before.other_views[0])
    batch = replace(batch, before=before)
    assert_is(method, batch, lambda z, y, _: dlb(z, y, now, before, T, alpha))
    # And the gradient in the view that is seen now
    view = before.other_views[0].images.clone().requires_grad_()
    shown = replace(before, other_views=(View(view, before.other_views[0].mix),))
    loss, _ = method.loss(forward, replace(batch, before=shown), None)
    loss[batch.real].sum().backward()
    real = batch.real.numpy()
    z, y = logits_of(batch)[real], batch.labels.numpy()[real]
    expected = slope(lambda moved: dlb(z, y, moved, before, T, alpha), now)
    np.testing.assert_allclose(float64(view.grad.flatten(1)), expected, 1e-4, 1e-5)


def test_dlbs_first_step_is_the_baseline():
    for mix in (None, HALF, OF_ALL):
        batch = samples(torch.arange(B), mix)
        found, expected = (loss_and_gradient(m, batch) for m in (DLB(3.0, 1.0), Baseline()))
        np.testing.assert_array_equal(found[0], expected[0])


def test_dlb_without_its_weight_is_the_mean_cross_entropy_of_both():
    batch, before = samples(torch.arange(B)), again(B)
    loss, _ = loss_and_gradient(DLB(3.0, 0.0), replace(batch, before=before))
    both = np.concatenate([logits_of(batch), logits_of(before.other_views[0])])
    labels = torch.cat([batch.labels, before.labels]).numpy()
    assert loss.mean() == pytest.approx(ce(both, labels).mean(), rel=1e-6)


def test_dlb_does_not_teach_what_was_said_before():
    said = torch.randn(B, K, requires_grad=True)
    batch = replace(samples(torch.arange(B)), before=replace(again(B), logits=said))
    loss_and_gradient(DLB(3.0, 1.0), batch)
    assert said.grad is None


# ---- knowledge distillation


def taught(z, T):
    """The mean of the teachers' softmax at T; z: what the teachers see."""
    return softmax(float64(teach(torch.tensor(z))) / T).mean(0)


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
@pytest.mark.parametrize(("T", "lam"), [(3.0, 0.9), (1.0, 0.4)])
def test_kd(T, lam, batch):
    method = KD(Baseline(), (), T, lam)
    method.teacher = teach

    def formula(z, y, fixed):
        return (1 - lam) * ce(z, y) + lam * T**2 * kl(taught(fixed, T), z / T)

    assert_is(method, batch, formula)


TASKS = [
    config.Baseline(),
    config.LS(),
    config.SL(),
    config.MMCE(),
    config.MDCA(),
    config.AdaFocal(),
    config.CPC(),
    config.MbLS(margin=2),
    config.ACLS(margin=2),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_kd_of_each_task(task):
    method, own = methods.build(config.KD(task=task, lam=0.3)), methods.build(task)
    method.teacher = teach
    assert method.mixes == own.mixes and method.adapts == own.adapts
    for mix in (None, OF_ALL) if own.mixes == "all" else (None,):
        batch = samples(torch.arange(B), mix)
        z = logits_of(batch)
        loss, _ = loss_and_gradient(method, batch)
        expected = 0.7 * loss_and_gradient(own, batch)[0] + 0.3 * 9 * kl(taught(z, 3.0), z / 3)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_every_task_is_tested():
    assert {task.name for task in TASKS} == {
        row.model_fields["name"].default
        for row in config.KD.model_fields["task"].annotation.__args__
    }


def test_kd_without_its_share_is_its_task():
    method = methods.build(config.KD(task=config.CPC(), lam=0))
    method.teacher = teach
    for mix in (None, OF_ALL, CUT_OUT):
        batch = samples(torch.arange(B), mix)
        expected = loss_and_gradient(methods.build(config.CPC()), batch)
        for found, wanted in zip(loss_and_gradient(method, batch), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_kd_alone_of_one_teacher_is_the_divergence():
    z, _ = drawn(B, seed=3)
    method = KD(Baseline(), (), T=2.0, lam=1.0)
    method.teacher = lambda images: torch.tensor(z).unsqueeze(0)
    batch = samples(torch.arange(B))
    loss, _ = loss_and_gradient(method, batch)
    expected = 4 * kl(softmax(z / 2), logits_of(batch) / 2)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    method.teacher = lambda images: images.flatten(1).detach().unsqueeze(0)
    loss, gradient = loss_and_gradient(method, batch)  # who knows all that the teacher does
    np.testing.assert_allclose(loss, 0, atol=1e-5)
    np.testing.assert_allclose(gradient, 0, atol=1e-5)


def test_kd_takes_the_mean_of_predictions_and_not_of_logits():
    """Of two teachers who are sure and differ, the mean of the logits would keep the surer one."""
    sure, surer = np.zeros((1, K)), np.zeros((1, K))
    sure[0, 0], surer[0, 1] = 60.0, 120.0
    method = KD(Baseline(), (), T=1.0, lam=1.0)
    method.teacher = lambda images: torch.tensor(np.stack([sure, surer]))
    _, gradient = loss_and_gradient(method, given(np.zeros((1, K)), [2]))
    np.testing.assert_allclose(gradient[0], 1 / K - np.array([0.5, 0.5, 0, 0, 0, 0]), atol=1e-6)


def test_kd_hands_held_out_samples_and_state_to_its_task():
    settings = config.KD(task=config.AdaFocal())
    method, other, own = (methods.build(s) for s in (settings, settings, config.AdaFocal()))
    z, y = drawn(60, seed=4)
    for each in (method, own):
        each.adapt(torch.tensor(z), torch.tensor(y))
    other.load_state_dict(method.state_dict())
    for each in (method, other):
        assert each.task.gamma.equal(own.gamma) and each.task.edges.equal(own.edges)
    assert not own.gamma.equal(torch.ones(15))
