"""Batches whose images are their logits, and what compares a method with a formula in float64."""

from dataclasses import replace

import numpy as np
import torch

from dps_dist import methods
from dps_dist.methods import Mix, Samples, View
from dps_dist.targets import Dirichlet, LocalTargets

N, K, B = 30, 6, 10
HALF = Mix(first=4, partner=torch.tensor([2, 0, 5, 1, 4, 3]), lam=0.7)
OF_ALL = Mix(first=0, partner=torch.arange(B).roll(3), lam=0.35)
CUT_OUT = Mix(first=0, partner=torch.arange(B), lam=1.0)


def labels_of(index):
    return (7 * index + index // 3) % K


def as_images(logits):
    return torch.as_tensor(logits)[..., None, None]


def forward(images):
    """What stands for a model: the images are the logits."""
    return images.flatten(1)


def given(z, labels, index=None, **more):
    """Samples of which `forward` says the logits z."""
    images = as_images(torch.as_tensor(z).to(more.pop("dtype", torch.float32)))
    index = torch.arange(len(images)) if index is None else torch.as_tensor(index)
    return Samples(images, torch.as_tensor(labels), index, **more)


def drawn(count, classes=K, scale=3.0, seed=0):
    """Random logits [count, classes] and labels."""
    rng = np.random.default_rng(seed)
    return scale * rng.standard_normal((count, classes)), rng.integers(classes, size=count)


def samples(index, mix=None, seed=0):
    """Samples of that index with logits that differ from seed to seed."""
    logits, _ = drawn(len(index), seed=[seed, *(index + 1).tolist()])
    return given(logits, labels_of(index), index, mix=mix)


def visits(epochs, mix=None):
    """Batches of several epochs over all samples, each time another order and other images."""
    for epoch in range(epochs):
        order = torch.randperm(N, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(B):
            yield samples(index, mix, seed=epoch)


# Ties between classes, between samples, and of whole rows
TIED = given(
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [30, 0, 0, 0], [0, 2, 0, 2], [0, 2, 0, 2]],
    [0, 1, 2, 0, 3, 0],
)
_z, _y = drawn(B)
AWKWARD = {
    "random": given(_z, _y),
    "steep": given(*drawn(B, scale=12.0)),
    "two classes": given(*drawn(B, classes=2)),
    "one row": given(*drawn(1)),
    "all right": given(_z, _z.argmax(1)),
    "all wrong": given(_z, (_z.argmax(1) + 1 + _y % (K - 1)) % K),
    "ties": TIED,
    "padding": given(_z, _y, [4, 2, 9, 0, 5, 1, 7, -1, -1, -1]),
    "bfloat16": given(_z, _y, dtype=torch.bfloat16),
}


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def softmax(z):
    return np.exp(log_softmax(z))


def ce(z, y):
    return -log_softmax(z)[np.arange(len(y)), y]


def kl(p, z):
    """KL(p ‖ softmax(z)), float64 [B]."""
    return np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - log_softmax(z)), 0).sum(-1)


def mixed(mix, values):
    """The rows from mix.first on mixed with their partners', the others as they are."""
    values = values.copy()
    rows = values[mix.first :]
    values[mix.first :] = mix.lam * rows + (1 - mix.lam) * rows[mix.partner.numpy()]
    return values


def float64(tensor):
    return tensor.detach().double().numpy()


def logits_of(batch):
    return float64(batch.images.flatten(1))


def loss_and_gradient(method, batch, targets=None):
    """Each sample's loss [B], and the gradient of the sum over those not padding, [B, K]."""
    images = batch.images.clone().requires_grad_()
    loss, logits = method.loss(forward, replace(batch, images=images), targets)
    assert loss.dtype == torch.float32 and loss.shape == batch.index.shape
    assert torch.equal(logits, images.flatten(1))
    loss[batch.real].sum().backward()
    return float64(loss), float64(images.grad.flatten(1))


def slope(formula, z, h=1e-6):
    """The gradient of Σ formula(z) by central differences, float64, shaped as z."""
    steps = h * np.eye(z.size).reshape(-1, *z.shape)
    ends = [formula(z + step).sum() - formula(z - step).sum() for step in steps]
    return np.array(ends).reshape(z.shape) / (2 * h)


def assert_is(method, batch, formula, targets=None, rtol=1e-5, atol=1e-5):
    """The method's losses are formula(z, y, fixed), and their gradient its slope in z.

    z, y: of the samples that are not padding, which is to have no gradient. fixed: z as a
    constant, which is what a stop-gradient sees.
    """
    loss, gradient = loss_and_gradient(method, batch, targets)
    real = batch.real.numpy()
    z, y = logits_of(batch)[real], batch.labels.numpy()[real]
    np.testing.assert_allclose(loss[real], formula(z, y, z), rtol, atol)
    assert np.isfinite(gradient).all() and (gradient[~real] == 0).all()
    if batch is TIED:  # where a largest or an |difference| has several slopes
        return
    if batch.images.dtype == torch.bfloat16:
        rtol, atol = 1e-2, 1e-2
    expected = slope(lambda moved: formula(moved, y, z), z)
    np.testing.assert_allclose(gradient[real], expected, 10 * rtol, 10 * atol)


def store_for(method, classes=K):
    """The method's store of N samples; None if it keeps none."""
    own = method.evidence
    if own is None:
        return None
    return LocalTargets(N, Dirichlet(own.classes or classes, own.gamma, own.c or 1.0, own.epsilon))


def teach(images):
    """The logits of two teachers, [2, B, K]."""
    z = images.detach().flatten(1)
    return torch.stack([2 * z, z.roll(1, -1)])


def ready(settings):
    """The method with its teacher, in the second of ten epochs."""
    method = methods.build(settings)
    method.teacher = teach
    method.begin_epoch(1, 10)
    return method


def with_views(batch, method, before=True):
    """The batch with the views and the step before that the method wants."""

    def views(of, seed):
        drawings = [drawn(*of.images.shape[:2], seed=[seed, k]) for k in range(method.views - 1)]
        return tuple(View(as_images(z).to(of.images.dtype)) for z, _ in drawings)

    batch = replace(batch, other_views=views(batch, 1))
    if not (method.recalls and before):
        return batch
    z, y = drawn(B, batch.images.shape[1], seed=2)
    earlier = given(z, y, logits=torch.tensor(z).float())
    return replace(batch, before=replace(earlier, other_views=views(earlier, 3)))
