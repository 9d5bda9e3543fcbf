"""What predictions say beyond the class: f(x) = μ_k + δ(x), k the true class; and how it emerges.

The penultimate layer is seen in a plane, three classes at a time (Müller et al., 2019).
"""

import math
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dps_dist.errors import InputError
from dps_dist.evaluate.chunks import chunks

MOST_CLASSES = 4096  # μ of more would take gigabytes: K² numbers, in float64 and several times
FIRST_PAIRS = 4  # a class: more than are joined until three of random ones are

Three = tuple[int, int, int]


class Delta(TypedDict):
    """Histogram of Σ_j |δ(x)_j|: bin b is [edges[b], edges[b + 1]), the last one with its end."""

    edges: list[float]
    count: list[int]
    mean: float


@torch.no_grad()
def mean_predictions(probs: Tensor, labels: Tensor) -> Tensor:
    """μ float64 [K, K] of probs [N, K]: μ_k = mean of probs_i over samples i of true class k.

    The row of a class without samples is NaN.
    """
    classes = probs.shape[1]
    sums = torch.zeros(classes, classes, dtype=torch.float64)
    labels = labels.long().cpu()
    for p, y in chunks(probs, labels):
        sums.index_add_(0, y, p)
    return sums / labels.bincount(minlength=classes).unsqueeze(1)


@torch.no_grad()
def deviations(probs: Tensor, labels: Tensor, mu: Tensor, bins: int = 50) -> Delta:
    """Histogram on [0, 2] and mean of Σ_j |probs_ij − μ_kj| over samples i, k = labels_i."""
    mu = mu.cpu().double()
    parts = [(p - mu[y]).abs().sum(1) for p, y in chunks(probs, labels.long())]
    total = torch.cat(parts)
    edges = torch.arange(bins + 1).double() * 2 / bins
    place = torch.bucketize(total, edges[1:-1], right=True)  # what rounds to above 2 is in the last
    return {
        "edges": edges.tolist(),
        "count": place.bincount(minlength=bins).tolist(),
        "mean": float(total.mean()),
    }


@torch.no_grad()
def ta_kl(final_logits: Tensor, logits: Tensor, T_final: float, T: float) -> float:
    """Temperature-adjusted KL: mean of KL(softmax(z_T/T_T) ‖ softmax(z_t/T_t)) over samples.

    z_T [N, K] are of the final model, z_t [N, K] of an earlier one, T_T and T_t the temperatures
    that fit each.
    """
    assert final_logits.shape == logits.shape
    total = 0.0
    for final, z in chunks(final_logits, logits):
        log_p, log_q = (final / T_final).log_softmax(1), (z.double() / T).log_softmax(1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / len(logits)


@torch.no_grad()
def projection(activations: Tensor, templates: Tensor) -> Tensor:
    """Activations [n, D] in the plane through templates w_1, w_2, w_3 [3, D], float64 [n, 2].

    Templates are rows of the last layer's weight, without its bias. The coordinates of x are
    (x − w_1)·e_1 and (x − w_1)·e_2: e_1 points from w_1 to w_2, e_2 is normal to it on w_3's side.
    """
    assert templates.shape == (3, activations.shape[1]) and templates.shape[1] > 1
    w_1, w_2, w_3 = templates.cpu().double()
    basis, r = torch.linalg.qr(torch.stack([w_2 - w_1, w_3 - w_1], dim=1))
    basis = torch.where(r.diagonal() < 0, -basis, basis)
    return torch.cat([(x - w_1) @ basis for (x,) in chunks(activations)])


def similar_and_dissimilar(mu: Tensor) -> tuple[Three, Three]:
    """Two similar classes and one that is not, and three dissimilar ones, of μ [K, K].

    Similarity is S_ab = (μ_ab + μ_ba)/2. Similar: the pair a < b of the greatest S, then the class
    c of the least max(S_ac, S_bc). Dissimilar: the three, in ascending order, of which the most
    similar pair is the least so. Where values tie, it is the lower numbers or the first found, the
    same each time. Classes without samples (a row of NaN) are left out.
    """
    mean = mu.detach().cpu().double().numpy()
    (present,) = np.nonzero(~np.isnan(mean).any(1))
    if len(present) < 3:
        raise InputError(f"there are samples of {len(present)} classes: a plane takes three")
    within = mean[np.ix_(present, present)]
    similarity = (within + within.T) / 2
    a, b, c = present[list(_two_and_one(similarity))].tolist()
    d, e, f = present[list(_three_apart(similarity))].tolist()
    return (a, b, c), (d, e, f)


def _pairs(similarity: NDArray[Any], below: float) -> NDArray[Any]:
    """S of the pairs a < b, at a·K + b: so they are in order. below: what stands elsewhere."""
    return np.where(np.tri(len(similarity), dtype=bool), below, similarity).ravel()


def _two_and_one(similarity: NDArray[Any]) -> Three:
    a, b = divmod(int(_pairs(similarity, -np.inf).argmax()), len(similarity))
    to_either = np.maximum(similarity[a], similarity[b])
    to_either[[a, b]] = np.inf
    return a, b, int(to_either.argmin())


def _three_apart(similarity: NDArray[Any]) -> Three:
    """Join pairs from the least similar on; the first triangle that closes is the answer.

    It closes early, mostly: so only as many pairs are put in order as are joined.
    """
    classes = len(similarity)
    values = _pairs(similarity, np.inf)
    joined = np.zeros((classes, classes), dtype=bool)
    done, sought = 0, FIRST_PAIRS * classes
    while True:
        for a, b in _least(values, min(sought, classes * (classes - 1) // 2))[done:]:
            both = joined[a] & joined[b]
            if both.any():
                first, second, third = sorted((int(a), int(b), int(both.argmax())))
                return first, second, third
            joined[a, b] = joined[b, a] = True
            done += 1
        sought *= FIRST_PAIRS


def _least(values: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The first `count` pairs [n, 2] in ascending order, and all that tie with the last of them."""
    (found,) = np.nonzero(values <= np.partition(values, count - 1)[count - 1])
    found = found[values[found].argsort(kind="stable")]
    return np.stack(np.divmod(found, math.isqrt(len(values))), 1)
