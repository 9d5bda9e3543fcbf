"""Calibration of the predicted class, from each sample's confidence and whether it was right.

The pairs (confidence, right) of several ranks are concatenated, in any order.
"""

from typing import TypedDict

import torch
from torch import Tensor

from dps_dist.errors import InputError


class Reliability(TypedDict):
    """A reliability diagram: bin b is (edges[b], edges[b + 1]]; an empty one has no means."""

    edges: list[float]
    count: list[int]
    accuracy: list[float | None]
    confidence: list[float | None]


def inner_edges(bins: int, device: torch.device | str = "cpu") -> Tensor:
    """1/bins, 2/bins, …, (bins − 1)/bins in float64: `bucketize` by them is the bin (lo, hi]."""
    # Divided rather than multiplied by a step, so that 1/5 is the edge 7/35 to the bit
    return torch.arange(1, bins, device=device).double() / bins


def reliability_of(confidence: Tensor, right: Tensor, bins: int = 15) -> Reliability:
    """Count, mean of right and mean of confidence [N] in each of `bins` bins of equal width."""
    count, rights, confidences = _equal_width(confidence, right, bins)
    return {
        "edges": [0.0, *inner_edges(bins).tolist(), 1.0],
        "count": [int(n) for n in count.tolist()],
        "accuracy": _means(rights, count),
        "confidence": _means(confidences, count),
    }


def ece(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Σ_b (n_b/N)·|acc_b − conf_b| = Σ_b |Σ_{i in b} (right_i − confidence_i)| / N.

    The bins are of equal width, (b/bins, (b+1)/bins].
    """
    _, rights, confidences = _equal_width(confidence, right, bins)
    return float((rights - confidences).abs().sum() / len(confidence))


def ace(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """Adaptive calibration error of the top label: ECE's formula, with bins of equal mass.

    In the order of ascending confidence, bin b holds the samples ⌊bN/bins⌋ to ⌊(b+1)N/bins⌋ − 1.
    Samples of one confidence share their accuracy: each counts as right by the fraction of them
    that are, so that neither their order nor the bin that an edge leaves them in matters.
    """
    _check(bins)
    confidence, right = confidence.double(), right.double()
    _, tie, ties = torch.unique(confidence, return_inverse=True, return_counts=True)
    shared = (torch.bincount(tie, weights=right, minlength=len(ties)) / ties)[tie]
    gap = (shared - confidence)[confidence.argsort()]
    edges = [b * len(gap) // bins for b in range(1, bins)]
    total = sum(float(part.sum().abs()) for part in gap.tensor_split(edges))
    return total / len(gap)


def _equal_width(confidence: Tensor, right: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over each bin of 1, right and confidence, [bins] each."""
    _check(bins)
    confidence, right = confidence.double(), right.double()
    place = torch.bucketize(confidence, inner_edges(bins))
    count, rights, confidences = (
        torch.bincount(place, weights=value, minlength=bins)
        for value in (torch.ones_like(right), right, confidence)
    )
    return count, rights, confidences


def _means(total: Tensor, count: Tensor) -> list[float | None]:
    pairs = zip(total.tolist(), count.tolist(), strict=True)
    return [value / n if n else None for value, n in pairs]


def _check(bins: int) -> None:
    if bins < 1:
        raise InputError(f"bins is {bins}: give at least 1")
