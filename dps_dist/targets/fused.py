"""One DPS step in one call: read the target, soft cross-entropy, its gradient, evidence update.

`fused_step` (numba on the CPU, Triton on CUDA) is what the stores call; `eager_step` is the same in
plain torch, the reference that the kernels are tested against.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dps_dist.targets.codec import decode, encode
from dps_dist.targets.dirichlet import MAX_VISITS, Dirichlet

LOGIT_LIMIT = 2.0**126  # below it the difference of two logits cannot overflow


def fused_step(
    logits: Tensor,
    labels: Tensor,
    slots: Tensor,
    rows: Tensor,
    visits: Tensor,
    prior: Dirichlet,
    tau: float = 1.0,
) -> Tensor:
    """Loss of each sample, float32 [B], differentiable in `logits`; each row gets one more visit.

        p = softmax(z)   y = (γᵗα⁰ + B_t·m)/A_t   q = y^{1/τ}/‖y^{1/τ}‖₁, or y for τ=1
        loss = −Σ_j q_j log p_j   ∂loss/∂z = p·Σq − q   m ← (1−w)·m + w·p   t ← min(t+1, 65535)

    logits: [B, K] float32, bfloat16 or float16; the arithmetic is float32.
    labels: int64 [B], in 0 … K−1. Not checked here, nor are the slots: the store does that.
    slots: int64 [B], each sample's row in `rows`, none twice; −1 is padding: loss and gradient 0,
        no update.
    rows: float16 [S, K], coded evidence (`codec.py`), changed in place even under `torch.no_grad`.
    visits: uint16 [S], changed in place.

    A sample with a logit that is NaN, infinite or beyond ±2¹²⁶ gets loss NaN and gradient NaN (so
    that an AMP gradient scaler notices), and its row and visits stay as they are.
    """
    _check(logits, labels, slots, rows, visits, prior)
    table, kernel = _coefficients(prior, logits.device), _kernel(logits.device.type)

    def run(with_grad: bool) -> tuple[Tensor, Tensor]:
        return kernel(logits, labels, slots, rows, visits, table, tau, with_grad)

    loss: Tensor = _FusedStep.apply(run, logits)
    return loss


def eager_step(
    logits: Tensor,
    labels: Tensor,
    slots: Tensor,
    rows: Tensor,
    visits: Tensor,
    prior: Dirichlet,
    tau: float = 1.0,
) -> Tensor:
    """`fused_step` in plain torch."""
    present = slots >= 0
    z, labels, slots = logits[present].float(), labels[present], slots[present]
    evidence, t = decode(rows[slots]), visits[slots]

    target = prior.posterior(evidence, t, labels)
    if tau != 1:
        # y^{1/τ}/‖·‖₁, where 0 stays 0. torch's own float32 sum is off by 8e-5 at K=21841.
        target = (target.log() / tau).softmax(-1, dtype=torch.float64).float()
    log_p = z.log_softmax(-1)
    finite = (z.detach().abs() < LOGIT_LIMIT).all(-1)
    loss = -(target * log_p).sum(-1) * torch.where(finite, 1.0, torch.nan)

    p = log_p.detach().exp()[finite]
    slots, t = slots[finite], t[finite]
    rows[slots] = encode(prior.updated(evidence[finite], t, p))
    new_t = (t.int() + 1).clamp(max=MAX_VISITS).to(torch.uint16)
    visits.view(torch.int16)[slots] = new_t.view(torch.int16)  # torch cannot scatter uint16
    nothing = torch.zeros(len(present), dtype=torch.float32, device=z.device)
    return nothing.index_put((present,), loss)


Kernel = Callable[..., tuple[Tensor, Tensor]]


def _kernel(device: str) -> Kernel:
    """The step for a device; numba and Triton are imported (and compile) only when first needed."""
    if device == "cpu":
        from dps_dist.targets import fused_cpu

        return fused_cpu.step
    from dps_dist.targets import fused_cuda

    return fused_cuda.step


@lru_cache(maxsize=8)
def _coefficients(prior: Dirichlet, device: torch.device) -> Tensor:
    return prior.table.to(device)


class _FusedStep(torch.autograd.Function):
    """Forward knows the gradient but for the factor ∂(total)/∂loss, which backward brings.

    Autograd is shown the logits only: each further tensor would take it a few µs.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[bool], tuple[Tensor, Tensor]], logits: Tensor) -> Tensor:
        loss, grad = run(ctx.needs_input_grad[1])
        ctx.dtype = logits.dtype
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # once_differentiable lets this pass, as a constant
            raise RuntimeError(
                "store.step can be differentiated once: for create_graph=True use read and update"
            )
        (grad,) = ctx.saved_tensors
        return None, (grad * grad_loss.unsqueeze(-1)).to(ctx.dtype)


def _check(
    logits: Tensor, labels: Tensor, slots: Tensor, rows: Tensor, visits: Tensor, prior: Dirichlet
) -> None:
    """Our own callers' shapes and types: with wrong ones a kernel would write past an end."""
    batch, classes = logits.shape
    assert classes == prior.num_classes, (classes, prior.num_classes)
    assert labels.shape == slots.shape == (batch,), (labels.shape, slots.shape, batch)
    assert labels.dtype == slots.dtype == torch.int64, (labels.dtype, slots.dtype)
    assert rows.shape == (len(visits), classes), (rows.shape, visits.shape, classes)
    assert rows.dtype == torch.float16 and visits.dtype == torch.uint16, (rows.dtype, visits.dtype)
    assert rows.is_contiguous() and visits.is_contiguous()
    assert {x.device for x in (labels, slots, rows, visits)} == {logits.device}
