"""The fused DPS step on the CPU, compiled by numba; `fused.py` imports it when first needed.

Every inner loop is written so that LLVM vectorises it, with exp and log as short polynomials: numba
would call the ones of libm element by element.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int32, njit, uint16
from numba.extending import intrinsic
from torch import Tensor

from dps_dist.compiled import kept

f32, i32 = np.float32, np.int32

ZERO, ONE, HALF, NAN = f32(0), f32(1), f32(0.5), f32(np.nan)
UNIT, MIN_GAP = f32(2.0**15), f32(-(2.0**-30))  # the coding's scale, and the least distance below 1
LIMIT = f32(2.0**126).view(i32)  # `fused.LOGIT_LIMIT`, as bits
LOG2_E = f32(1.44269504)
LN2_HIGH, LN2_LOW = f32(0.693359375), f32(-2.12194440e-4)  # n · LN2_HIGH is exact for small n
EXP_LOWEST = f32(-87.0)  # keeps 2ⁿ a normal number
# Minimax polynomials of the Cephes library (expf, logf): within an ulp or two of float32.
E0, E1, E2, E3, E4, E5 = map(
    f32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
L0, L1, L2, L3, L4, L5, L6, L7, L8 = map(
    f32,
    (
        7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    ),
)  # fmt: skip
SQRT_HALF = 0x3F3504F3  # the bits of √½: mantissas are taken in [√½, √2)
TINY = f32(2.0**-126)  # subnormal targets count as 0
SUM_BLOCK = 512  # float32 sums no longer than this: over 21841 classes their error would reach 4e-5
ELEMENTS_PER_THREAD = 2**20  # 1 to 3 ms

# FMA is wanted everywhere, reordering only where `sums` asks: it would fold away the two-step range
# reductions of exp and log. NaN and infinity keep their meaning throughout.
plain: Any = njit(error_model="numpy", nogil=True, fastmath={"contract"})
sums: Any = njit(error_model="numpy", nogil=True, fastmath={"contract", "reassoc", "nsz"})
whole: Any = kept(  # with its types given, it compiles on import, or finds what it compiled before
    "void(float32[:,::1], int64[::1], int64[::1], uint16[:,::1], uint16[::1], float32[:,::1],"
    " float32, float32[:,::1], float32[::1])",
    error_model="numpy",
    nogil=True,
)


def _llvm(returns: Any, takes: Any, build: Any) -> Any:
    """A function of one scalar made of LLVM instructions that numba has no spelling for."""

    def typing(context: Any, x: Any) -> Any:
        return returns(takes), lambda context, builder, signature, args: build(builder, args[0])

    return intrinsic(typing)


_int32, _float, _half = ir.IntType(32), ir.FloatType(), ir.HalfType()


def _ordered(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, _int32)
    flip = builder.and_(builder.ashr(bits, _int32(31)), _int32(0x7FFFFFFF))
    return builder.xor(bits, flip)


def _exponent(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, _int32)
    return builder.ashr(builder.sub(bits, _int32(SQRT_HALF)), _int32(23))


# LLVM makes vcvtph2ps and vcvtps2ph (F16C) of these: rounding to nearest even, as torch's .half().
from_half = _llvm(float32, uint16, lambda b, x: b.fpext(b.bitcast(x, _half), _float))
to_half = _llvm(uint16, float32, lambda b, x: b.bitcast(b.fptrunc(x, _half), ir.IntType(16)))
bits_of = _llvm(int32, float32, lambda b, x: b.bitcast(x, _int32))
float_of = _llvm(float32, int32, lambda b, x: b.bitcast(x, _float))
# Integers in the floats' order: their maximum vectorises without the promise that there is no NaN.
ordered = _llvm(int32, float32, _ordered)
exponent = _llvm(int32, float32, _exponent)


@plain
def exp(x: Any) -> Any:
    """eˣ for x ≤ 0; below −87, where it is 1.6e-38, it stays there."""
    x = max(x, EXP_LOWEST)
    n = np.rint(x * LOG2_E)
    r = x - n * LN2_HIGH - n * LN2_LOW
    poly = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    return (poly * r * r + r + ONE) * float_of(i32((i32(n) + i32(127)) << i32(23)))


@plain
def log(x: Any) -> Any:
    """ln x for normal x > 0."""
    n = exponent(x)
    r = float_of(i32(bits_of(x) - (n << i32(23)))) - ONE
    poly = L0 * r + L1
    poly = ((((((poly * r + L2) * r + L3) * r + L4) * r + L5) * r + L6) * r + L7) * r + L8
    k = f32(n)
    return r + (r * r * (r * poly - HALF) + k * LN2_LOW) + k * LN2_HIGH


@plain
def decode(bits: Any) -> Any:
    x = from_half(bits) / UNIT
    return x + ONE if x < ZERO else x


@plain
def encode(m: Any) -> Any:
    return to_half((min(m - ONE, MIN_GAP) if m > HALF else m) * UNIT)


@plain
def largest(x: Any) -> Any:
    """The largest entry of x [K], or NaN where an entry is NaN, infinite or beyond ±2¹²⁶."""
    top = low = ordered(x[0])
    for j in range(x.size):
        key = ordered(x[j])
        top = max(top, key)
        low = min(low, key)
    if top >= LIMIT or low <= ~LIMIT:  # the key of −x is ~ the key of x
        return NAN
    return float_of(i32(top if top >= 0 else top ^ 0x7FFFFFFF))


@plain
def fill_target(row: Any, label: int, weights: Any, sharpness: Any, q: Any) -> None:
    """q ← the target up to a factor: y, or (y / max y)^{1/τ} for a sharpness 1/τ ≠ 1."""
    off_label, on_label, evidence = weights[0], weights[1], weights[2]
    for j in range(row.size):
        q[j] = decode(row[j]) * evidence + off_label
    q[label] = decode(row[label]) * evidence + on_label
    if sharpness != ONE:
        log_max = log(largest(q))
        for j in range(row.size):
            y = q[j]
            power = exp((log(max(y, TINY)) - log_max) * sharpness)
            q[j] = power if y >= TINY else ZERO


@sums
def softmax_sums(z: Any, z_max: Any, q: Any, e: Any) -> Any:
    """e ← exp(z − max z); returns Σe, Σq, Σq·(z − max z), of terms of one sign: none cancels."""
    sum_e = sum_q = sum_qz = ZERO
    for j in range(z.size):
        shifted = z[j] - z_max
        e[j] = exp(shifted)
        sum_e += e[j]
        sum_q += q[j]
        sum_qz += q[j] * shifted
    return sum_e, sum_q, sum_qz


@plain
def one_row(z: Any, label: int, row: Any, weights: Any, sharpness: Any, q: Any, grad: Any) -> Any:
    """Loss of one sample; its gradient goes to `grad`, its new evidence to `row`."""
    z_max = largest(z)
    if np.isnan(z_max):
        grad[:] = NAN
        return NAN
    fill_target(row, label, weights, sharpness, q)
    sum_e = sum_q = sum_qz = 0.0  # float64
    for start in range(0, z.size, SUM_BLOCK):
        part = slice(start, start + SUM_BLOCK)
        block_e, block_q, block_qz = softmax_sums(z[part], z_max, q[part], grad[part])
        sum_e += block_e
        sum_q += block_q
        sum_qz += block_qz
    norm = 1.0 if sharpness == ONE else 1 / sum_q
    p_scale, p_part, q_part = f32(1 / sum_e), f32(norm * sum_q / sum_e), f32(norm)
    update, keep = weights[3], ONE - weights[3]
    for j in range(z.size):
        e = grad[j]
        m = decode(row[j])
        grad[j] = e * p_part - q[j] * q_part
        row[j] = encode(m * keep + e * p_scale * update)
    return f32(norm * (sum_q * np.log(sum_e) - sum_qz))


@whole
def many_rows(
    logits: Any,
    labels: Any,
    slots: Any,
    rows: Any,
    visits: Any,
    weights: Any,
    sharpness: Any,
    grad: Any,
    loss: Any,
) -> None:
    """`grad` may have a single row: then it is only scratch space."""
    q = np.empty(logits.shape[1], np.float32)
    for i in range(slots.size):
        out = grad[min(i, grad.shape[0] - 1)]
        slot = slots[i]
        if slot < 0:
            out[:] = ZERO
            loss[i] = ZERO
            continue
        t = visits[slot]
        loss[i] = one_row(logits[i], labels[i], rows[slot], weights[t], sharpness, q, out)
        if t < 65535 and not np.isnan(loss[i]):
            visits[slot] = t + 1


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
    """Loss [B] and its gradient [B, K] (scratch if not `with_grad`); updates rows and visits."""
    z = logits.detach().to(torch.float32).contiguous()
    loss = z.new_empty(z.shape[0])
    grad = z.new_empty(z.shape if with_grad else (1, z.shape[1]))
    store = rows.numpy().view(np.uint16), visits.numpy(), weights.numpy(), f32(1 / tau)
    batch = z.numpy(), labels.numpy(), slots.numpy()
    gradients, losses = grad.numpy(), loss.numpy()

    def part(samples: slice) -> None:
        out = gradients[samples] if with_grad else np.empty_like(gradients)
        many_rows(*(array[samples] for array in batch), *store, out, losses[samples])

    # Plain threads, not numba's: its default layer must not be entered from two threads at once,
    # and the data loader may be in it. They live for one call, so only large batches are split.
    threads = min(torch.get_num_threads(), z.numel() // ELEMENTS_PER_THREAD)
    if threads < 2:
        part(slice(None))
    else:
        size = -(-z.shape[0] // threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, (slice(i, i + size) for i in range(0, z.shape[0], size))))
    return loss, grad
