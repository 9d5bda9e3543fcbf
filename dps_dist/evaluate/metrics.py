"""Accuracy, top-5, NLL and ECE as sums over samples, which ranks add up and which are divided last.

The evaluation loop feeds a `Tally` batch by batch, all-reduces its `sums`, and asks for `figures`;
`dps evaluate` asks `Figures` for these and more.
"""

from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F

from dps_dist.errors import InputError
from dps_dist.evaluate.chunks import chunks
from dps_dist.evaluate.top_label import Reliability, ace, ece, inner_edges, reliability_of

BINS = 15
NAMES = ("accuracy", "top5", "nll", "brier", "ece", "ece_10", "sce", "ace")
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

    def __init__(self, bins: int = BINS, device: torch.device | str = "cpu") -> None:
        if bins < 1:
            raise InputError(f"bins is {bins}: give at least 1")
        self.sums = torch.zeros(COUNTS + 2 * bins, dtype=torch.float64, device=device)
        self._bins = torch.arange(bins, device=device)
        self._edges = inner_edges(bins, device)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, weight: Tensor) -> None:
        """Count logits [B, K], labels [B] with weight [B]; rows of weight 0 may hold anything."""
        assert logits.ndim == 2 and logits.shape[:1] == labels.shape == weight.shape
        padding = weight == 0
        logits = logits.double().masked_fill(padding.unsqueeze(1), 0.0)
        labels = labels.long().masked_fill(padding, 0)
        weight = weight.double()

        before = classes_before(logits, labels)
        right = (before < 1).double()
        top5 = (before < min(5, logits.shape[1])).double()
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


class Figures:
    """The figures of a `Tally`, and of the probabilities p_i = softmax(logits_i), onehot y_i:

        brier  = Σ_i Σ_j (p_ij − y_ij)² / N
        ece_10 = ECE with 10 bins
        sce    = (1/K) Σ_k Σ_b (n_bk/N)·|acc_bk − conf_bk|
               = (1/K) Σ_k Σ_b |Σ_{i: p_ik in b} (y_ik − p_ik)| / N
        ace    = ECE with 15 bins of equal mass (see `top_label.ace`)

    SCE is classwise: bin b of class k holds the n_bk samples, of whatever label, whose p_ik is in
    (b/15, (b+1)/15], 0 being in the first; acc_bk is the share of them that are of class k.

    All is kept on the CPU, in float64: sums, and of each sample its confidence and whether it was
    right, which ACE has to sort.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._tally = Tally(BINS)
        self._brier = torch.zeros((), dtype=torch.float64)
        self._gaps = torch.zeros(classes * BINS, dtype=torch.float64)  # Σ (p − y), for SCE
        self._confidence = torch.zeros(0, dtype=torch.float64)
        self._right = torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count logits [B, K], labels [B]."""
        assert logits.ndim == 2 and logits.shape == (len(labels), self._classes)
        confidences, rights = [self._confidence], [self._right]
        first_bins = torch.arange(self._classes) * BINS
        for z, y in chunks(logits, labels.long()):
            self._tally.add(z, y, torch.ones(len(y)))
            p = z.softmax(1)
            confidences.append(p.amax(1))
            rights.append((classes_before(z, y) < 1).double())
            place = torch.bucketize(p, inner_edges(BINS)) + first_bins
            p[torch.arange(len(y)), y] -= 1.0
            self._brier += p.square().sum()
            self._gaps += torch.bincount(place.flatten(), p.flatten(), len(self._gaps))
        self._confidence, self._right = torch.cat(confidences), torch.cat(rights)

    def __len__(self) -> int:
        """How many samples were counted."""
        return len(self._right)

    def figures(self) -> dict[str, float]:
        """By NAMES; shares as fractions; NaN for no samples."""
        n = len(self)
        if n == 0:
            return dict.fromkeys(NAMES, nan)
        values = self._tally.figures() | {
            "brier": float(self._brier) / n,
            "ece_10": ece(self._confidence, self._right, bins=10),
            "sce": float(self._gaps.abs().sum()) / n / self._classes,
            "ace": ace(self._confidence, self._right, BINS),
        }
        return {name: values[name] for name in NAMES}

    def reliability(self, bins: int = BINS) -> Reliability:
        """The reliability diagram of the samples counted."""
        return reliability_of(self._confidence, self._right, bins)


def measured(logits: Tensor, labels: Tensor) -> Figures:
    """Logits [N, K] and labels [N], counted."""
    figures = Figures(logits.shape[1])
    figures.add(logits, labels)
    return figures


def all_figures(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The figures of logits [N, K] and labels [N]."""
    return measured(logits, labels).figures()


def classes_before(logits: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the label, [B]; counted by those that come after it."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    own, label = logits.gather(1, labels.unsqueeze(1)), labels.unsqueeze(1)
    after = (logits < own) | ((logits == own) & (classes > label))
    return logits.shape[1] - 1 - after.sum(1)
