"""Evidence ↔ float16: what the stores keep of a probability.

A float16 is precise to 2⁻¹¹ of its value, but only from 2⁻¹⁴ on, and probabilities crowd at both
ends of [0, 1]: at K=1000 most lie below 2⁻¹⁴, and a confident one sits just under 1. So

    m ≤ ½ is stored as 2¹⁵·m                     out of the subnormals: precise from 2⁻²⁹ on
    m > ½ is stored as 2¹⁵·min(m − 1, −2⁻³⁰)     the distance to 1, just as precise

and a negative value decodes by adding 1. Zeros decode to 0, so a fresh store is all zeros.
"""

import torch
from torch import Tensor

SCALE = 2.0**15
NEAREST_TO_ONE = -(2.0**-30)  # keeps the sign of an exact 1; decodes to 1 in float32
FORMULA = "m = v / 2**15 if v >= 0 else 1 + v / 2**15"

# Sums and rounding only: comparisons and `where` take three times as long in torch on a CPU.


def encode(evidence: Tensor) -> Tensor:
    """float32 in [0, 1] → float16."""
    nearest = evidence.round()  # 0 up to ½, 1 above
    limit = (1.0 - nearest).add_(nearest, alpha=NEAREST_TO_ONE)  # −2⁻³⁰ above ½, below it none
    return torch.minimum(evidence - nearest, limit).mul_(SCALE).half()


def decode(stored: Tensor) -> Tensor:
    """float16 → float32 in [0, 1]."""
    evidence = stored.float().mul_(1.0 / SCALE)
    return evidence.sub_(evidence.floor())  # the floor of a negative one is −1
