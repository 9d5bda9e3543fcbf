"""The maths of Deep Probabilistic Supervision: a Dirichlet per sample, fed by its predictions.

Pure functions of the prior's four numbers and of the visits; the stores call them batch by batch.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite, log

import torch
from torch import Tensor

from dps_dist.errors import InputError

MAX_VISITS = 65535  # visits are kept as uint16 and stay at this value
MAX_CLASSES = 2**24  # class numbers stay exact in float32


@dataclass(frozen=True)
class Dirichlet:
    """The prior α⁰ (c at the label, ε elsewhere) and the discount γ of the evidence.

    After t visits with predictions p_1 … p_t the posterior is Dirichlet with

        α_t = γᵗα⁰ + Σ_s γ^(t−s) p_s        A_t = Σ_j α_t,j = γᵗA⁰ + B_t        B_t = Σ_s γ^(t−s)

    and its mean y_t = α_t/A_t is the training target. The stores keep the evidence
    m_t = Σ_s γ^(t−s) p_s / B_t, the discounted mean of the predictions: nothing of prior or label.

    num_classes: K, at least 2.
    gamma: discount γ in [0, 1]; 0 keeps the last prediction only, 1 forgets nothing.
    c: prior pseudo-count of the label, above 0.
    epsilon: prior pseudo-count ε of every other class, 0 or more.
    """

    num_classes: int
    gamma: float
    c: float
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gamma", "c", "epsilon"):  # numpy's numbers too, which JSON cannot hold
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "num_classes", int(self.num_classes))
        ranges = {
            "num_classes": (2 <= self.num_classes <= MAX_CLASSES, f"2 to {MAX_CLASSES}"),
            "gamma": (0.0 <= self.gamma <= 1.0, "a number from 0 to 1"),
            "c": (self.c > 0 and isfinite(self.c), "a finite number above 0"),
            "epsilon": (self.epsilon >= 0 and isfinite(self.epsilon), "a finite number, 0 or more"),
        }
        for field in fields(self):
            valid, remedy = ranges[field.name]
            if not valid:
                raise InputError(f"{field.name} is {getattr(self, field.name)}: give {remedy}")
        if not isfinite(self.A0):
            raise InputError(f"c is {self.c} and epsilon {self.epsilon}: give smaller ones")

    @property
    def A0(self) -> float:  # noqa: N802
        """A⁰ = c + (K−1)ε, the prior's total count."""
        return self.c + (self.num_classes - 1) * self.epsilon

    def discount(self, visits: Tensor) -> Tensor:
        """γᵗ, float64."""
        return torch.pow(self.gamma, visits.double())

    def evidence_weight(self, visits: Tensor) -> Tensor:
        """B_t = (1−γᵗ)/(1−γ), and t for γ=1; float64."""
        t = visits.double()
        if self.gamma == 1.0:
            return t
        if self.gamma == 0.0:
            return (t > 0).double()
        # expm1 keeps full precision where γᵗ is close to 1
        return -torch.expm1(t * log(self.gamma)) / (1.0 - self.gamma)

    def total(self, visits: Tensor) -> Tensor:
        """A_t = γᵗA⁰ + B_t, float64."""
        return self.discount(visits) * self.A0 + self.evidence_weight(visits)

    def prior_weight(self, visits: Tensor) -> Tensor:
        """γᵗA⁰/A_t, float64: how much of the target still is the prior."""
        return self.discount(visits) * self.A0 / self.total(visits)

    def update_weight(self, visits: Tensor) -> Tensor:
        """1/(γB_t + 1), float64: the next prediction's share of the evidence, after t visits."""
        return 1.0 / (self.gamma * self.evidence_weight(visits) + 1.0)

    def coefficients(self, visits: Tensor) -> Tensor:
        """float32 [B, 4]: all that a row's arithmetic needs to know of its visits.

        0: γᵗε/A_t   1: γᵗc/A_t   2: B_t/A_t   3: 1/(γB_t + 1), so that for row i with label l
        y_j = [0] + [2]·m_j for j ≠ l,   y_l = [1] + [2]·m_l,   m ← (1−[3])·m + [3]·p.
        """
        prior, evidence = self.discount(visits), self.evidence_weight(visits)
        total = prior * self.A0 + evidence
        columns = (
            prior * self.epsilon / total,
            prior * self.c / total,
            evidence / total,
            1.0 / (self.gamma * evidence + 1.0),
        )
        return torch.stack(columns, dim=-1).float()

    @cached_property
    def table(self) -> Tensor:
        """`coefficients` of each possible number of visits, float32 [65536, 4]: 1 MB, made once."""
        return self.coefficients(torch.arange(MAX_VISITS + 1))

    def posterior(self, evidence: Tensor, visits: Tensor, labels: Tensor) -> Tensor:
        """y = (γᵗα⁰ + B_t·m)/A_t, float32 [B, K], from m [B, K], t [B] and labels [B]."""
        elsewhere, label, scale, _ = self.coefficients(visits).unbind(-1)
        # Products and sums are separate operations: a fused multiply-add rounds differently in a
        # vector's tail, and a row's bits would depend on where in its batch it stands.
        y = (evidence * scale.unsqueeze(-1)).add_(elsewhere.unsqueeze(-1))
        at_label = evidence.gather(-1, labels.unsqueeze(-1)).mul_(scale.unsqueeze(-1))
        return y.scatter_(-1, labels.unsqueeze(-1), at_label.add_(label.unsqueeze(-1)))

    def prior(self, labels: Tensor) -> Tensor:
        """y⁰ = α⁰/A⁰, float32 [B, K]."""
        shape = len(labels), self.num_classes
        nothing = torch.zeros(shape, dtype=torch.float32, device=labels.device)
        return self.posterior(nothing, torch.zeros_like(labels), labels)

    def updated(self, evidence: Tensor, visits: Tensor, probs: Tensor) -> Tensor:
        """m ← (1−w)·m + w·p with w = 1/(γB_t + 1): the evidence [B, K] after one more visit.

        w is 1 at the first visit and never below 1−γ; the paper's w = 1/(γA+1), on y instead of m,
        starts near 1/c, which float16 rounds away. At w=1 the result is p exactly. Overwrites
        `evidence`.
        """
        weight = self.update_weight(visits).unsqueeze(-1)
        evidence.mul_((1.0 - weight).float())
        return evidence.add_(probs.float() * weight.float())
