"""LocalTargets: what it computes, what it refuses, and the other methods that it serves."""

import numpy as np
import pytest
import torch

from dps_dist.data.order import EpochOrder
from dps_dist.targets import Dirichlet, LocalTargets
from dps_dist.targets.dirichlet import MAX_VISITS

N, K, B = 20, 11, 6
PRIOR = Dirichlet(K, 0.9, 5.0, 0.1)


def softmax(*shape, seed=0, scale=3.0):
    return torch.softmax(
        scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), -1
    )


def contents(store):
    return store._rows.clone().view(torch.int16), store._visits.clone().view(torch.int16)


def trained(prior=PRIOR, epochs=30, num_samples=N):
    """A store after some epochs, and the predictions [epochs, N, K] that it was given."""
    store = LocalTargets(num_samples, prior)
    seen = softmax(epochs, num_samples, prior.num_classes)
    for p in seen:
        for index in torch.randperm(num_samples).split(B):
            store.update(index, p[index])
    return store, seen


def test_targets_follow_the_papers_recursion():
    store, seen = trained()
    labels = torch.arange(N) % K
    y = torch.full((N, K), 0.1, dtype=torch.float64)
    y[torch.arange(N), labels] = 5.0
    total = y.sum(1, keepdim=True)
    y /= total
    for p in seen.double():
        w = 1 / (PRIOR.gamma * total + 1)
        y, total = (1 - w) * y + w * p, PRIOR.gamma * total + 1
    read = store.read(torch.arange(N), labels)
    assert read.dtype == torch.float32
    # each update rounds by 2⁻¹², and what it rounds fades with γ
    torch.testing.assert_close(read.double(), y, rtol=2**-12 / (1 - PRIOR.gamma), atol=1e-5)
    assert store.visits(torch.arange(N)).tolist() == [30] * N


def test_fresh_store_reads_the_prior():
    store = LocalTargets(N, PRIOR)
    labels = torch.tensor([0, 4, 10])
    assert torch.equal(store.read(torch.tensor([3, 1, 2]), labels), PRIOR.prior(labels))
    assert not store.evidence(torch.tensor([3])).any()


def test_holds_two_bytes_a_class_and_two_a_sample():
    assert LocalTargets(N, PRIOR).nbytes == 2 * N * K + 2 * N


def test_rows_do_not_depend_on_their_batch():
    one, other = LocalTargets(N, PRIOR), LocalTargets(N, PRIOR)
    for p in softmax(5, N, K):
        one.update(torch.arange(N), p)
        for index in torch.randperm(N).split(1):
            other.update(index, p[index])
    assert all(torch.equal(a, b) for a, b in zip(contents(one), contents(other), strict=True))


def test_visits_stay_at_their_maximum():
    store = LocalTargets(3, PRIOR)
    store._visits.view(torch.int16)[:] = -2  # 65534 as uint16
    p = softmax(3, K)
    for expected in (MAX_VISITS - 1, MAX_VISITS, MAX_VISITS, MAX_VISITS):
        assert store.visits(torch.arange(3)).tolist() == [expected] * 3
        before = store.evidence(torch.arange(3))
        store.update(torch.arange(3), p)
        moved = store.evidence(torch.arange(3)) - before
        torch.testing.assert_close(moved, (p - before) * (1 - PRIOR.gamma), rtol=0.01, atol=1e-3)


def test_padding_is_ignored():
    store, _ = trained()
    before = contents(store)
    index, probs = torch.tensor([-1, 4, -1, 7]), softmax(4, K, seed=1)
    probs[0] = torch.nan
    labels = torch.tensor([-7, 3, 99, 2])
    y = store.read(index, labels)
    assert torch.equal(y[[1, 3]], store.read(index[[1, 3]], labels[[1, 3]]))
    assert not store.evidence(index)[[0, 2]].any() and not store.visits(index)[[0, 2]].any()
    store.update(index, probs)
    changed = (contents(store)[1] != before[1]).nonzero().squeeze(1)
    assert changed.tolist() == [4, 7]
    store.update(torch.full((4,), -1), probs)
    store.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0, K))
    assert store.visits(torch.tensor([4])) == 31


def test_updates_only_where_it_is_asked_to():
    (store, _), (other, _) = trained(), trained()
    index, probs = torch.tensor([3, 4, -1, 7]), softmax(4, K, seed=1)
    probs[1] = torch.nan
    store.update(index, probs, where=torch.tensor([True, False, True, True]))
    other.update(index[[0, 3]], probs[[0, 3]])
    assert all(torch.equal(a, b) for a, b in zip(contents(store), contents(other), strict=True))


def with_entry(value):
    probs = softmax(3, K)
    probs[1, 2] = value
    return probs


LABELS = torch.tensor([0, 1, 2])
INDEX = torch.tensor([2, 0, 5])
REFUSED = {
    "unknown sample": (lambda s: s.read(torch.tensor([0, N, 1]), LABELS), "index holds 20"),
    "negative sample": (
        lambda s: s.update(torch.tensor([0, -2, 1]), softmax(3, K)),
        "index holds -2",
    ),
    "label": (lambda s: s.read(INDEX, torch.tensor([0, K, 1])), "label of sample 0 is 11"),
    "negative label": (
        lambda s: s.read(INDEX, torch.tensor([0, -1, 1])),
        "label of sample 0 is -1",
    ),
    "twice": (lambda s: s.update(torch.tensor([5, 0, 5]), softmax(3, K)), "sample 5 is twice"),
    "NaN": (lambda s: s.update(INDEX, with_entry(torch.nan)), "probs of sample 0"),
    "infinite": (lambda s: s.update(INDEX, with_entry(torch.inf)), "probs of sample 0"),
    "negative": (lambda s: s.update(INDEX, with_entry(-0.01)), "probs of sample 0"),
    "above 1": (lambda s: s.update(INDEX, with_entry(1.1)), "probs of sample 0"),
    "shape of index": (lambda s: s.read(INDEX[None], LABELS), "index has shape"),
    "shape of labels": (lambda s: s.read(INDEX, LABELS[:2]), "labels has shape"),
    "shape of probs": (lambda s: s.update(INDEX, softmax(3, K + 1)), "probs has shape"),
    "shape of where": (
        lambda s: s.update(INDEX, softmax(3, K), where=torch.ones(2, dtype=torch.bool)),
        "where has shape",
    ),
    "step twice": (lambda s: s.step(softmax(3, K), LABELS, torch.tensor([5, 0, 5])), "5 is twice"),
    "step label": (lambda s: s.step(softmax(3, K), LABELS + K, INDEX), "label of sample 2"),
    "step shape": (lambda s: s.step(softmax(3, K + 1), LABELS, INDEX), "logits has shape"),
    "step tau": (lambda s: s.step(softmax(3, K), LABELS, INDEX, tau=0.0), "tau is 0.0"),
    "order's samples": (lambda s: s.begin_epoch(EpochOrder(N + 1, 2)), "num_samples is 21"),
    "order's ranks": (lambda s: s.begin_epoch(EpochOrder(N, 2, 2)), "world_size is 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_stays_unchanged(case):
    call, message = REFUSED[case]
    store, _ = trained(epochs=3)
    before = contents(store)
    with pytest.raises(ValueError, match=message):
        call(store)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(store), strict=True))


def test_refuses_an_empty_data_set():
    with pytest.raises(ValueError, match="num_samples is 0"):
        LocalTargets(0, PRIOR)


def test_step_is_read_loss_and_update():
    eager, fused = trained(epochs=4)[0], trained(epochs=4)[0]
    eager._rows.copy_(fused._rows)
    index, labels = torch.tensor([3, -1, 8, 0]), torch.tensor([1, 0, 10, 5])
    logits = torch.randn(4, K, generator=torch.Generator().manual_seed(3), requires_grad=True)

    loss = fused.step(logits, labels, index, tau=0.8)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)

    y = eager.read(index, labels) ** (1 / 0.8)
    y = y / y.sum(1, keepdim=True)
    expected = -(y * logits.log_softmax(1)).sum(1) * (index >= 0)
    eager.update(index, logits.softmax(1))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    everything = torch.arange(N)
    torch.testing.assert_close(
        fused.evidence(everything), eager.evidence(everything), rtol=2e-3, atol=1e-7
    )
    assert torch.equal(fused.visits(everything), eager.visits(everything))


def test_step_of_rows_on_another_device():
    """As if the logits were on a GPU and the rows were not: the rows go there and back."""
    here, there = trained(epochs=4)[0], trained(epochs=4)[0]
    there._rows.copy_(here._rows)
    there.device = torch.device("cpu", 0)  # the same memory by another name
    index, labels = torch.tensor([3, -1, 8, 0]), torch.tensor([1, 0, 10, 5])
    logits = torch.randn(4, K, generator=torch.Generator().manual_seed(3))
    assert there.device != logits.device
    assert torch.equal(here.step(logits, labels, index), there.step(logits, labels, index))
    assert all(torch.equal(a, b) for a, b in zip(contents(here), contents(there), strict=True))


class TestOtherMethods:
    """Each against its own recursion, with nothing but the public calls."""

    epochs = 25

    def store_and_predictions(self, gamma):
        return trained(Dirichlet(K, gamma, c=1.0), self.epochs)

    def test_temporal_ensembling(self):
        a = 0.6
        store, seen = self.store_and_predictions(a)
        Z = torch.zeros(N, K, dtype=torch.float64)
        for p in seen.double():
            Z = a * Z + (1 - a) * p
        target = Z / (1 - a**self.epochs)
        torch.testing.assert_close(
            store.evidence(torch.arange(N)).double(), target, rtol=2e-3, atol=1e-7
        )

    def test_ps_kd(self):
        store, seen = self.store_and_predictions(0.0)
        torch.testing.assert_close(
            store.evidence(torch.arange(N)), seen[-1], rtol=2**-11, atol=2**-24
        )

    def test_elr(self):
        beta = 0.7
        store, seen = self.store_and_predictions(beta)
        t = torch.zeros(N, K, dtype=torch.float64)
        for p in seen.double():
            t = beta * t + (1 - beta) * p
        index = torch.arange(N)
        scale = 1 - beta ** store.visits(index).double()
        torch.testing.assert_close(
            scale[:, None] * store.evidence(index).double(), t, rtol=2e-3, atol=1e-7
        )


def test_visits_takes_no_memory_for_rows():
    """At ImageNet's size a float32 copy of the rows would be gigabytes."""
    store = LocalTargets(20_000, Dirichlet(2000, 0.9, 5.0))
    store._take = lambda *_: pytest.fail("rows were read")
    assert store.visits(torch.arange(-1, 20_000)).sum() == 0


def test_answers_are_float32_whatever_the_default_is():
    store, index = LocalTargets(4, Dirichlet(3, 0.9, 5.0)), torch.arange(4)
    labels, logits = torch.tensor([0, 1, 2, 0]), torch.zeros(4, 3, dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        assert store.step(logits, labels, index).dtype == torch.float32
        assert store.read(index, labels).dtype == torch.float32
        assert store.prior.prior(labels).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_any_integers_will_do_and_others_are_refused():
    store, logits = LocalTargets(4, Dirichlet(3, 0.9, 5.0)), torch.zeros(2, 3)
    index, labels = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.uint8)
    store.step(logits, labels, index)
    assert store.visits(torch.arange(4)).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match=r"labels has type torch.float32: give integers"):
        store.read(index, torch.tensor([0.0, 1.5]))
    with pytest.raises(ValueError, match=r"index has type torch.float32"):
        store.visits(torch.tensor([0.9]))
    with pytest.raises(ValueError, match=r"labels has shape \[4\]: give \[0\]"):
        store.read(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    for tau in (0.0, -1.0, 1e-40, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="tau is"):
            store.step(logits, labels, index, tau=tau)


def test_numbers_of_numpy_make_a_prior_that_can_be_saved(tmp_path):
    prior = Dirichlet(np.int64(3), np.float32(0.5), np.float64(5), np.float32(0))
    LocalTargets(4, prior).save(tmp_path)
    LocalTargets(4, Dirichlet(3, 0.5, 5.0)).load(tmp_path)


def drifting(samples, K, epochs, seed):
    """Logits of each epoch, in which the leading class changes, or grows ever more certain."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, K, generator=generator)
    certain = torch.arange(samples) % 2 == 0
    for epoch in range(epochs):
        logits = 0.97 * logits + 0.5 * torch.randn(samples, K, generator=generator)
        now = 2 * logits
        now[certain, 0] += 12 * epoch / epochs
        yield now


@pytest.mark.parametrize(
    ("prior", "limit"),
    [
        (Dirichlet(10, 0.95, 1000.0), 0.01),
        (Dirichlet(10, 0.85, 2000.0), 0.01),
        (Dirichlet(1000, 0.99, 1000.0, 0.05), 0.001),
    ],
)
def test_targets_stay_exact_over_200_epochs(prior, limit):
    """The limits of the accuracy benchmark, on the store itself, against the paper's recursion."""
    n, K = 24, prior.num_classes
    store, index, labels = LocalTargets(n, prior), torch.arange(n), torch.arange(n) % K
    y = torch.full((n, K), prior.epsilon, dtype=torch.float64)
    y[index, labels] = prior.c
    A = prior.A0
    y /= A
    for logits in drifting(n, K, 200, seed=0):
        store.step(logits, labels, index)
        p, w = logits.double().softmax(-1), 1 / (prior.gamma * A + 1)
        y, A = (1 - w) * y + w * p, prior.gamma * A + 1
    ours = store.read(index, labels).double()
    gradient = p - y
    assert ((ours - y).abs().sum(-1) / gradient.abs().sum(-1)).max() < limit
    ours, y = ours / ours.sum(-1, keepdim=True), y / y.sum(-1, keepdim=True)
    assert (y * (y.clamp(min=1e-300).log() - ours.clamp(min=1e-300).log())).sum(-1).max() < 1e-6
