"""Calibration after training: temperature scaling (Guo et al., 2017)."""

import torch
from torch import Tensor
from torch.nn import functional as F

BOUNDS = (1e-2, 1e2)  # of the temperature, where every prediction is right, or none


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """T* = argmin_T NLL(z/T), by LBFGS on log T from T = 1, in float64."""
    z, labels = logits.detach().double(), labels.long()
    with torch.enable_grad():
        log_t = torch.zeros((), dtype=torch.float64, device=z.device, requires_grad=True)
        search = torch.optim.LBFGS([log_t], max_iter=100, line_search_fn="strong_wolfe")

        def nll() -> Tensor:
            search.zero_grad()
            loss = F.cross_entropy(z / log_t.exp(), labels)
            torch.autograd.backward(loss)
            return loss

        search.step(nll)  # type: ignore[no-untyped-call]
    return min(max(float(log_t.detach().exp()), BOUNDS[0]), BOUNDS[1])
