"""The baseline, and what every method must do."""

import pkgutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given as draws
from hypothesis import settings as limits
from hypothesis import strategies as st
from torch import nn

from dps_dist import config, methods
from dps_dist.methods import View
from dps_dist.methods.baseline import Baseline
from tests.methods.batches import (
    AWKWARD,
    CUT_OUT,
    HALF,
    OF_ALL,
    B,
    K,
    assert_is,
    ce,
    drawn,
    float64,
    forward,
    given,
    log_softmax,
    logits_of,
    loss_and_gradient,
    mixed,
    ready,
    samples,
    softmax,
    store_for,
    with_views,
)

SETTINGS = config.METHODS
MIXES = {"half": HALF, "all": OF_ALL, "cutout": CUT_OUT}
WHOLLY_MIXED = [row for row in SETTINGS if methods.build(row()).mixes == "all"]
every_row = pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.__name__)


# ---- Baseline


@pytest.mark.parametrize("batch", AWKWARD.values(), ids=AWKWARD)
def test_baseline(batch):
    assert_is(Baseline(), batch, lambda z, y, _: ce(z, y))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_baseline_of_mixed_images(mix):
    batch = samples(torch.arange(B), mix)
    target, z = mixed(mix, np.eye(K)[batch.labels]), logits_of(batch)
    loss, gradient = loss_and_gradient(Baseline(), batch)
    np.testing.assert_allclose(loss, -(target * log_softmax(z)).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, softmax(z) - target, atol=1e-6)


def test_baseline_learns_cut_out_images_by_their_label():
    index = torch.arange(B)
    plain, _ = loss_and_gradient(Baseline(), samples(index))
    cut_out, _ = loss_and_gradient(Baseline(), samples(index, CUT_OUT))
    np.testing.assert_array_equal(cut_out, plain)


# ---- every method


def in_training(settings):
    """A method with its store after two epochs, so that nothing of it is still at its start."""
    method = ready(settings)
    store = store_for(method)
    for epoch in range(2):
        method.begin_epoch(epoch, 10)
        method.loss(forward, with_views(samples(torch.arange(B), seed=epoch), method), store)
    if method.adapts:
        z, y = drawn(60, seed=9)
        method.adapt(torch.tensor(z), torch.tensor(y))
    method.begin_epoch(2, 10)
    return method, store


def test_every_method_has_settings_and_every_settings_a_method():
    modules = [
        import_module(f"dps_dist.methods.{module.name}")
        for module in pkgutil.iter_modules(methods.__path__)
    ]
    with_code = {
        module.__name__.rpartition(".")[2]
        for module in modules
        if getattr(getattr(module, "build", None), "__module__", None) == module.__name__
    }
    assert with_code == {row.model_fields["name"].default for row in SETTINGS}


@every_row
def test_a_method_that_keeps_evidence_says_where(row):
    assert issubclass(row, config.Stored) == (methods.build(row()).evidence is not None)


@every_row
def test_every_row_is_described(row):
    assert row.__doc__ and row.__doc__ != config.Section.__doc__
    assert all(field.description for field in row.model_fields.values())


@every_row
def test_every_method_gives_a_loss_for_each_sample(row):
    method = ready(row())
    model, seen = nn.Linear(K, K), []

    def counted(images):
        seen.append(len(images))
        return model(images.flatten(1))

    targets = store_for(method)
    for before in (False, True):
        seen.clear()
        batch = with_views(samples(torch.arange(B)), method, before)
        loss, logits = method.loss(counted, batch, targets)
        assert loss.shape == (B,) and loss.dtype == torch.float32 and loss.isfinite().all()
        assert torch.allclose(logits, model(batch.images.flatten(1)), atol=1e-6)
        assert len(seen) == 1, "DDP wants one forward pass a step"
        model.zero_grad()
        loss.sum().backward()
        assert model.weight.grad.abs().sum() > 0
    assert method.mixes in ("all", "half", "none")


@every_row
def test_every_methods_state_goes_into_another(row):
    """With it and the same store, the next loss is the same."""
    method, store = in_training(row())
    other = ready(row())
    state = method.state_dict()
    other.load_state_dict(state)
    other.begin_epoch(2, 10)
    assert repr(other.state_dict()) == repr(state)
    batch = with_views(samples(torch.arange(B), seed=5), method)
    again = in_training(row())[1] if store is not None else None
    losses = [m.loss(forward, batch, s)[0] for m, s in ((method, store), (other, again))]
    assert torch.equal(*losses)


@every_row
def test_logits_of_half_precision_have_losses_in_float32(row):
    """The same as the same numbers in float32 have; autocast changes nothing either."""
    losses = []
    for dtype, cast in [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]:
        method, store = in_training(row())
        batch = with_views(samples(torch.arange(B), seed=6), method)
        views = tuple(View(view.images.bfloat16().to(dtype)) for view in batch.other_views)
        batch = replace(batch, images=batch.images.bfloat16().to(dtype), other_views=views)
        if batch.before is not None:
            second = View(batch.before.other_views[0].images.bfloat16().to(dtype))
            said = batch.before.logits.bfloat16().to(dtype)
            batch = replace(batch, before=replace(batch.before, logits=said, other_views=(second,)))
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            losses.append(method.loss(forward, batch, store)[0])
    assert all(loss.dtype == torch.float32 for loss in losses)
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-5, atol=1e-6)


@every_row
@draws(padding=st.integers(1, B - 1), scale=st.sampled_from([1.0, 50.0]), seed=st.integers(0, 99))
@limits(max_examples=5, deadline=None)
def test_padding_changes_nothing_for_the_others(row, padding, scale, seed):
    """Whatever it shows, and whatever its label."""
    seen, index = [], torch.arange(B).where(torch.arange(B) < B - padding, -1)
    for change in (False, True):
        method, store = in_training(row())
        batch = with_views(samples(torch.arange(B), seed=seed), method)
        z, y = torch.tensor(logits_of(batch)), batch.labels.clone()
        if change:
            z[-padding:] = torch.tensor(drawn(padding, scale=scale, seed=seed)[0])
            y[-padding:] = torch.tensor(drawn(padding, seed=seed)[1])
        batch = replace(given(z, y, index), other_views=batch.other_views, before=batch.before)
        loss, gradient = loss_and_gradient(method, batch, store)
        assert np.isfinite(loss).all()
        assert (gradient[B - padding :] == 0).all()
        rows = [] if store is None else store._rows.view(torch.int16).tolist()
        visits = [] if store is None else store.visits(torch.arange(B)).tolist()
        seen.append((loss[: B - padding], gradient[: B - padding], rows, visits))
    for one, other in zip(*seen, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@every_row
@draws(
    classes=st.integers(2, 4),
    rows=st.lists(
        st.lists(
            st.sampled_from([-1e4, -90.0, -1.0, 0.0, 1.0, 17.0, 90.0, 1e4]), min_size=4, max_size=4
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 9),
)
@limits(max_examples=12, deadline=None)
def test_losses_and_gradients_are_finite(row, classes, rows, seed):
    """Also where a softmax is 0 or 1, and where samples or classes are tied."""
    method = ready(row())
    store = store_for(method, classes)
    z = torch.tensor(rows)[:, :classes]
    batch = given(z, drawn(len(rows), classes, seed=seed)[1])
    for _ in range(2):
        shown = with_views(batch, method)
        loss, gradient = loss_and_gradient(method, shown, store)
        assert np.isfinite(loss).all() and np.isfinite(gradient).all()
        if method.adapts:
            method.adapt(z, batch.labels)


def test_which_methods_may_be_mixed():
    part = {row.model_fields["name"].default: methods.build(row()).mixes for row in SETTINGS}
    assert {name for name, which in part.items() if which == "half"} == {"dps"}
    assert {name for name, which in part.items() if which == "all"} == {
        *("baseline", "ls", "sl", "dlb", "kd", "adafocal", "cpc", "mbls", "acls")
    }


@pytest.mark.parametrize("row", WHOLLY_MIXED, ids=lambda row: row.__name__)
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_losses_are_mixed_as_the_images(row, mix):
    """λ·L(a) + (1−λ)·L(b), for every method of which all of a batch may be mixed."""
    method, _ = in_training(row())
    batch = with_views(samples(torch.arange(B), seed=7), method)
    partners = batch.labels.clone()
    partners[mix.first :] = partners[mix.first :][mix.partner]
    found, own, other = (
        loss_and_gradient(method, shown)
        for shown in (replace(batch, mix=mix), batch, replace(batch, labels=partners))
    )
    for mixture, a, b in zip(found, own, other, strict=True):  # b is a where nothing is mixed
        np.testing.assert_allclose(mixture, mix.lam * a + (1 - mix.lam) * b, rtol=1e-5, atol=1e-6)
    assert mix is CUT_OUT or abs(found[0] - own[0]).max() > 0.1


@every_row
def test_every_method_learns(row):
    """Twelve steps down its own gradient lower the cross-entropy with the labels."""
    method, store = in_training(row())
    z = torch.tensor(drawn(B, scale=1.0, seed=8)[0]).float()
    method.teacher = lambda images: 4 * torch.eye(K)[y].unsqueeze(0)
    batch = with_views(samples(torch.arange(B)), method)
    y, start = batch.labels, None
    for _ in range(12):
        shown = replace(batch, images=z[..., None, None])
        _, gradient = loss_and_gradient(method, shown, store)
        z = z - 0.1 * torch.tensor(gradient).float()
        start = start if start is not None else ce(float64(z), y.numpy()).mean()
    assert ce(float64(z), y.numpy()).mean() < start
