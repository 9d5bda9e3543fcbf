"""Calibration after training: temperature scaling (Guo et al., 2017)."""

from math import nan

import torch
from torch import Tensor

from dps_dist.evaluate.chunks import chunks

BOUNDS = (1e-2, 1e2)  # of the temperature, where every prediction is right, or none


@torch.no_grad()
def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """T* = argmin_T NLL(z/T), by LBFGS on log T from T = 1, in float64, a part of z at a time.

    With p = softmax(z/T), its slope d/d(log T) is Σ_i (ln p_iy − Σ_j p_ij·ln p_ij) / N.
    """
    labels = labels.long()
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([log_t], max_iter=100, line_search_fn="strong_wolfe")

    def nll() -> Tensor:
        with torch.no_grad():
            sums = torch.zeros(2, dtype=torch.float64)
            for z, y in chunks(logits, labels):
                log_p = (z / log_t.exp()).log_softmax(1)
                own = log_p.gather(1, y.unsqueeze(1)).sum()
                sums += torch.stack([-own, own - (log_p.exp() * log_p).sum()])
            log_t.grad = sums[1] / len(labels)
            return sums[0] / len(labels)

    nll()
    assert log_t.grad is not None
    if not log_t.grad.isfinite():  # nor would it be in any of the search's looks
        return nan
    search.step(nll)  # type: ignore[no-untyped-call]
    return min(max(float(log_t.detach().exp()), BOUNDS[0]), BOUNDS[1])
