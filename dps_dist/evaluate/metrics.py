"""Accuracy, top-5, NLL and ECE as sums over samples, which ranks add up and which are divided last.

The evaluation loop feeds a `Tally` batch by batch, all-reduces its `sums`, and asks for `figures`.
"""

from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F

from dps_dist.errors import InputError

COUNTS = 4  # weight, correct, in the top 5, NLL; then the bins' correct and confidence


class Tally:
    """Sums over samples of accuracy, top-5, NLL and the calibration bins; divided last.

    With weights w_i, p_i = softmax(logits_i), confidence c_i = max_j p_ij and W = Σ w_i:

        accuracy = Σ w_i·[rank_i < 1] / W          rank_i: classes that come before the label
        top5     = Σ w_i·[rank_i < min(5, K)] / W
        nll      = −Σ w_i·ln p_i,label / W
        ece      = Σ_b |Σ_{i in b} w_i·[rank_i < 1] − Σ_{i in b} w_i·c_i| / W

    over `bins` bins of equal width, (b/bins, (b+1)/bins] for b = 0, 1, …. Classes come in the order
    of descending logits and, where these tie, of their numbers: the first one is torch's argmax.
    Another class's NaN comes before the label, and a label whose own logit is NaN comes last.

    sums: float64 [4 + 2·bins], all of the state. Added over ranks, they give the figures of all;
    those that count samples are exact integers where the weights are 0 and 1.
    """

    def __init__(self, bins: int = 15, device: torch.device | str = "cpu") -> None:
        if bins < 1:
            raise InputError(f"bins is {bins}: give at least 1")
        self.sums = torch.zeros(COUNTS + 2 * bins, dtype=torch.float64, device=device)
        self._bins = torch.arange(bins, device=device)
        # Divided rather than multiplied by a step, so that 1/5 is the edge 7/35 to the bit
        self._edges = self._bins[1:].double() / bins

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Count logits [B, K], labels [B] with weight [B]; rows of weight 0 may hold anything."""
        assert logits.ndim == 2 and logits.shape[:1] == labels.shape == weight.shape
        padding = weight == 0
        logits = logits.double().masked_fill(padding.unsqueeze(1), 0.0)
        labels = labels.long().masked_fill(padding, 0)
        weight = weight.double()

        rank = _rank(logits, labels)
        right = (rank < 1).double()
        top5 = (rank < min(5, logits.shape[1])).double()
        nll = F.cross_entropy(logits, labels, reduction="none")
        confidence = torch.softmax(logits, dim=1).amax(1)

        # As a masked sum: scattered additions on a GPU happen in any order and round differently
        in_bin = torch.bucketize(confidence, self._edges).unsqueeze(1) == self._bins
        in_bin = in_bin.double() * weight.unsqueeze(1)
        counts = torch.stack([torch.ones_like(weight), right, top5, nll], dim=1)
        self.sums += torch.cat(
            [
                (counts * weight.unsqueeze(1)).sum(0),
                (in_bin * right.unsqueeze(1)).sum(0),
                (in_bin * confidence.unsqueeze(1)).sum(0),
            ]
        )

    def figures(self) -> dict[str, float]:
        """accuracy, top5, nll and ece, the first two and the last as fractions; NaN for no rows."""
        total, *counts = self.sums[:COUNTS].tolist()
        if total == 0:
            return dict.fromkeys(("accuracy", "top5", "nll", "ece"), nan)
        right, confidence = self.sums[COUNTS:].view(2, -1)
        gap = float((right - confidence).abs().sum())
        values = (value / total for value in (*counts, gap))
        return dict(zip(("accuracy", "top5", "nll", "ece"), values, strict=True))


def figures_of(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """The figures of logits [N, K] and labels [N], every row once."""
    tally = Tally(bins, logits.device)
    tally.add(logits, labels, torch.ones(len(labels), device=logits.device))
    return tally.figures()


def _rank(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label, [B]; counted by those that come after it."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    own, label = logits.gather(1, labels.unsqueeze(1)), labels.unsqueeze(1)
    after = (logits < own) | ((logits == own) & (classes > label))
    return logits.shape[1] - 1 - after.sum(1)
