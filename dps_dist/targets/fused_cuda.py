"""The fused DPS step as a Triton kernel; `fused.py` imports it for CUDA tensors and calls `step`.

One program a row, three sweeps over its classes; after the first the row comes from cache. Tested
in Triton's interpreter and compiled to machine code, but never run on a GPU, nor tuned for one.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LIMIT = tl.constexpr(2.0**126)  # `fused.LOGIT_LIMIT`
BLOCK = 4096  # classes at once; rows of up to this many are a single block


@triton.jit
def decode(code):  # type: ignore[no-untyped-def]
    m = code.to(tl.float32) * (1.0 / 32768)
    return tl.where(m < 0, m + 1, m)


@triton.jit
def encode(m):  # type: ignore[no-untyped-def]
    near_one = tl.minimum(m - 1, -1.0 / (1 << 30))
    return (tl.where(m > 0.5, near_one, m) * 32768).to(tl.float16)


@triton.jit
def target(code, is_label, off_label, on_label, evidence):  # type: ignore[no-untyped-def]
    """y = (γᵗα⁰ + B_t·m)/A_t."""
    return decode(code) * evidence + tl.where(is_label, on_label, off_label)


@triton.jit
def sharpen(y, log_max, sharpness):  # type: ignore[no-untyped-def]
    """(y / max y)^{1/τ}, with 0 staying 0."""
    positive = y > 0
    return tl.where(
        positive, tl.exp((tl.log(tl.where(positive, y, 1.0)) - log_max) * sharpness), 0.0
    )


@triton.jit
def one_row(  # type: ignore[no-untyped-def]
    logits, labels, slots, rows, visits, weights, grad, loss, classes, sharpness,
    SHARPEN: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i)
    label = tl.load(labels + i)
    present = slot >= 0
    z_row = logits + i * classes
    row = rows + slot * classes
    held = tl.where(present, classes, 0)  # how much of `row` there is
    # visits is uint16 seen as int16, which both the compiler and the interpreter know
    t = tl.load(visits + slot, mask=present, other=0).to(tl.int32) & 0xFFFF
    off_label = tl.load(weights + t * 4)
    on_label = tl.load(weights + t * 4 + 1)
    evidence = tl.load(weights + t * 4 + 2)
    update = tl.load(weights + t * 4 + 3)

    z_max = -float("inf")
    y_max = 0.0
    strange = 0
    for start in range(0, classes, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < classes
        z = tl.load(z_row + j, mask=inside, other=-float("inf")).to(tl.float32)
        strange += tl.sum((inside & ~(tl.abs(z) < LIMIT)).to(tl.int32))  # ~(<) holds for NaN too
        z_max = tl.maximum(z_max, tl.max(z))
        if SHARPEN:
            code = tl.load(row + j, mask=j < held, other=0.0)
            y = target(code, j == label, off_label, on_label, evidence)
            y_max = tl.maximum(y_max, tl.max(tl.where(inside, y, 0.0)))
    log_max = tl.log(y_max) if SHARPEN else 0.0

    sum_e = 0.0
    sum_q = 0.0
    sum_qz = 0.0
    for start in range(0, classes, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < classes
        shifted = tl.load(z_row + j, mask=inside, other=0.0).to(tl.float32) - z_max
        code = tl.load(row + j, mask=j < held, other=0.0)
        q = target(code, j == label, off_label, on_label, evidence)
        if SHARPEN:
            q = sharpen(q, log_max, sharpness)
        q = tl.where(inside, q, 0.0)
        sum_e += tl.sum(tl.where(inside, tl.exp(shifted), 0.0))
        sum_q += tl.sum(q)
        sum_qz += tl.sum(q * shifted)

    finite = strange == 0
    norm = 1 / sum_q if SHARPEN else 1.0
    scale = 1 / sum_e
    row_loss = tl.where(finite, norm * (sum_q * tl.log(sum_e) - sum_qz), float("nan"))
    tl.store(loss + i, tl.where(present, row_loss, 0.0))
    tl.store(visits + slot, tl.minimum(t + 1, 65535).to(tl.int16), mask=present & finite)
    writable = tl.where(finite, held, 0)
    for start in range(0, classes, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < classes
        z = tl.load(z_row + j, mask=inside, other=0.0).to(tl.float32)
        code = tl.load(row + j, mask=j < held, other=0.0)
        p = tl.exp(z - z_max) * scale
        if WITH_GRAD:
            q = target(code, j == label, off_label, on_label, evidence)
            if SHARPEN:
                q = sharpen(q, log_max, sharpness)
            g = tl.where(finite, norm * (p * sum_q - q), float("nan"))
            tl.store(grad + i * classes + j, tl.where(present, g, 0.0), mask=inside)
        m = decode(code)
        tl.store(row + j, encode(m * (1 - update) + p * update), mask=j < writable)


def step(
    logits: Tensor,
    labels: Tensor,
    slots: Tensor,
    rows: Tensor,
    visits: Tensor,
    weights: Tensor,
    tau: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Loss [B] and its gradient [B, K] (empty without `with_grad`); updates rows and visits."""
    z = logits.detach().contiguous()
    batch, classes = z.shape
    loss = torch.empty(batch, dtype=torch.float32, device=z.device)
    grad = torch.empty(z.shape if with_grad else (0,), dtype=torch.float32, device=z.device)
    block = min(BLOCK, triton.next_power_of_2(classes))
    if batch == 0:
        return loss, grad
    device: Any = torch.cuda.device(z.device) if z.is_cuda else nullcontext()
    with device:
        one_row[(batch,)](
            z, labels, slots, rows, visits.view(torch.int16), weights, grad, loss, classes, 1 / tau,
            SHARPEN=tau != 1, WITH_GRAD=with_grad, BLOCK=block,
            num_warps=max(1, min(8, block // 256)), enable_fp_fusion=True,
        )  # fmt: skip
    return loss, grad
