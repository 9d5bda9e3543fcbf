"""The fused step against its eager form, a float64 oracle and the paper's recursion.

Run as a script, it checks the Triton kernel in Triton's interpreter; a test here does that.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dps_dist.targets import fused
from dps_dist.targets.codec import decode, encode
from dps_dist.targets.dirichlet import Dirichlet
from dps_dist.targets.fused import eager_step, fused_step


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: threads would wait for each other and for others on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """A store of some history and a batch that visits it."""

    logits: Tensor
    labels: Tensor
    slots: Tensor
    rows: Tensor
    visits: Tensor
    prior: Dirichlet
    tau: float = 1.0

    def copy(self) -> "Case":
        logits = self.logits.detach().clone().requires_grad_()
        return self._replace(logits=logits, rows=self.rows.clone(), visits=self.visits.clone())


def make_case(
    K: int = 10,
    B: int = 6,
    gamma: float = 0.95,
    c: float = 50.0,
    epsilon: float = 0.01,
    tau: float = 1.0,
    scale: float = 4.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """B samples in any order, a store of B + 3; the first is unvisited, the last padding."""
    random = torch.Generator().manual_seed(seed)
    S = B + 3
    rows = encode((3 * torch.randn(S, K, generator=random)).softmax(-1))
    visits = torch.randint(1, 300, (S,), generator=random)
    slots = torch.randperm(S, generator=random)[:B]
    rows[slots[0]], visits[slots[0]] = 0, 0
    if B > 1:
        slots[-1] = -1
    return Case(
        logits=(scale * torch.randn(B, K, generator=random)).to(dtype),
        labels=torch.randint(K, (B,), generator=random),
        slots=slots,
        rows=rows,
        visits=visits.to(torch.uint16),
        prior=Dirichlet(K, gamma, c, epsilon),
        tau=tau,
    )


class Result(NamedTuple):
    loss: Tensor
    grad: Tensor
    rows: Tensor
    visits: Tensor


def run(step, case: Case, grad_loss: Tensor | None = None) -> Result:
    own = case.copy()
    loss = step(*own)
    loss.backward(torch.ones_like(loss) if grad_loss is None else grad_loss)
    return Result(loss.detach(), own.logits.grad, own.rows, own.visits.int())


def oracle(case: Case):
    """Loss, p, q and new evidence of the present samples in float64, straight from the formulas."""
    prior, K = case.prior, case.prior.num_classes
    here = case.slots >= 0
    slots, labels = case.slots[here], case.labels[here].numpy()
    z = case.logits[here].detach().double().numpy()
    code = case.rows[slots].double().numpy() / 2**15
    m = np.where(code < 0, 1 + code, code)
    t = case.visits.int()[slots].numpy()[:, None]
    alpha = np.where(np.arange(K) == labels[:, None], prior.c, prior.epsilon)
    discount = prior.gamma**t
    B_t = t * 1.0 if prior.gamma == 1 else (1 - discount) / (1 - prior.gamma)
    A_t = discount * (prior.c + (K - 1) * prior.epsilon) + B_t
    q = (discount * alpha + B_t * m) / A_t
    if case.tau != 1:
        q = (q / q.max(-1, keepdims=True)) ** (1 / case.tau)
        q /= q.sum(-1, keepdims=True)
    shifted = z - z.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    p = np.exp(log_p)
    return -(q * log_p).sum(-1), p, q, m + (p - m) / (prior.gamma * B_t + 1)


def check_against_oracle(case: Case, result: Result) -> None:
    here = case.slots >= 0
    slots = case.slots[here]
    loss, p, q, m = oracle(case)
    np.testing.assert_allclose(result.loss[here], loss, rtol=3e-6, atol=2e-7)
    # Relative to p and q, so that small classes count as much as large ones.
    rounding = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[
        case.logits.dtype
    ]
    smallest = 1e-7 if case.logits.dtype == torch.float16 else 1e-30
    exact = p * q.sum(-1, keepdims=True) - q
    wrong = np.abs(result.grad[here].double().numpy() - exact)
    assert (wrong <= rounding * (p + q) + smallest).all(), wrong.max()
    # One rounding to float16, and what float32 cannot tell apart.
    half_ulp = 2.0**-11 * np.minimum(m, 1 - m) + 2.0**-40
    float32 = np.where(m > 0.5, 2e-7, 4e-6 * m)
    wrong = np.abs(decode(result.rows[slots]).double().numpy() - m)
    assert (wrong <= half_ulp + float32).all(), wrong.max()
    check_what_stays(case, result)


def check_what_stays(case: Case, result: Result) -> None:
    visited = case.slots[case.slots >= 0]
    padding = case.slots < 0
    assert (result.loss[padding] == 0).all() and (result.grad[padding] == 0).all()
    expected = case.visits.int()
    expected[visited] = (expected[visited] + 1).clamp(max=65535)
    assert result.visits.tolist() == expected.tolist()
    others = torch.ones(len(case.rows), dtype=torch.bool).index_fill(0, visited, False)
    assert same_bits(result.rows[others], case.rows[others])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def check_against_eager(case: Case, result: Result, grad_loss: Tensor | None = None) -> None:
    """Another exp moves a stored entry by at most a float16 ulp, or by 2⁻²² near 1."""
    eager = run(eager_step, case, grad_loss)
    low = case.logits.dtype != torch.float32
    torch.testing.assert_close(result.loss, eager.loss, rtol=1e-5, atol=5e-7)
    torch.testing.assert_close(result.grad, eager.grad, rtol=0.02 if low else 1e-4, atol=1e-6)
    assert torch.equal(result.visits, eager.visits)
    ulps = (result.rows.view(torch.int16).int() - eager.rows.view(torch.int16).int()).abs()
    apart = (decode(result.rows) - decode(eager.rows)).abs()
    assert ((ulps <= 1) | (apart <= 2.0**-22)).all(), ulps.max()
    assert (ulps > 0).float().mean() < 0.01 + 2 / ulps.numel()


CASES = {
    **{f"K={K}": {"K": K} for K in (2, 10, 1000, 1003)},
    "K=21841": {"K": 21841, "c": 1000.0, "gamma": 0.99, "epsilon": 0.05, "B": 3},
    "last prediction (γ=0)": {"gamma": 0.0},
    "undiscounted (γ=1)": {"gamma": 1.0},
    "hard prior (ε=0)": {"epsilon": 0.0, "K": 1000},
    "sharpened": {"tau": 0.8, "K": 1000},
    "sharpened, ε=0": {"tau": 0.8, "epsilon": 0.0, "K": 100},
    "sharpened, K=21841": {"tau": 0.8, "K": 21841, "B": 3},
    "very sharp": {"tau": 0.05, "K": 1000},
    "flattened": {"tau": 3.0, "epsilon": 0.0},
    "saturated softmax": {"scale": 300.0},
    "bfloat16": {"dtype": torch.bfloat16, "K": 1000},
    "float16": {"dtype": torch.float16, "K": 1000},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_loss_gradient_and_update(options):
    case = make_case(**options)
    grad_loss = torch.linspace(-2.0, 3.0, len(case.labels))
    check_against_oracle(case, run(fused_step, case))
    check_against_eager(case, run(fused_step, case, grad_loss), grad_loss)
    if case.prior.num_classes < 2000:  # beyond, torch's own float32 sums are too coarse
        check_against_oracle(case, run(eager_step, case))


@settings(max_examples=60, deadline=None)
@given(
    K=st.sampled_from([2, 3, 9, 17, 100]),
    B=st.integers(1, 5),
    gamma=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    c=st.floats(0.5, 5000),
    epsilon=st.just(0.0) | st.floats(1e-6, 2.0),
    tau=st.sampled_from([1.0, 0.8, 0.5, 2.0]),
    scale=st.floats(1e-3, 1e4),
    seed=st.integers(0, 2**31),
)
def test_random_cases(**drawn):
    case = make_case(**drawn)
    check_against_oracle(case, run(fused_step, case))


@pytest.mark.parametrize("tau", [1.0, 0.8])
def test_gradient_is_the_slope_of_the_loss(tau):
    """Also where a row's sum is off: then Σq ≠ 1 for τ=1."""
    case = make_case(K=10, scale=1.0, tau=tau)
    case.rows.copy_(encode(0.9 * decode(case.rows)))
    direction = torch.randn(case.logits.shape, generator=torch.Generator().manual_seed(1))
    h = 0.01

    def loss(move: float) -> Tensor:
        own = case.copy()
        with torch.no_grad():
            return fused_step(own.logits + move * direction, *own[1:])

    slope = (loss(h) - loss(-h)) / (2 * h)
    grad = run(fused_step, case).grad
    torch.testing.assert_close((grad * direction).sum(-1), slope, rtol=1e-3, atol=3e-4)


def test_follows_the_papers_recursion():
    """A hundred visits: y ← (1−w)y + wp with w = 1/(γA+1), A ← γA+1, in float64."""
    K, B, gamma, c, epsilon = 100, 4, 0.95, 1000.0, 0.05
    random = torch.Generator().manual_seed(0)
    labels, slots = torch.arange(B), torch.arange(B)
    rows, visits = torch.zeros(B, K, dtype=torch.float16), torch.zeros(B, dtype=torch.uint16)
    y = torch.full((B, K), epsilon, dtype=torch.float64)
    y[slots, labels] = c
    A = y.sum(-1, keepdim=True)
    y /= A
    for _ in range(100):
        logits = 3 * torch.randn(B, K, generator=random)
        loss = fused_step(logits, labels, slots, rows, visits, Dirichlet(K, gamma, c, epsilon))
        log_p = logits.double().log_softmax(-1)
        torch.testing.assert_close(loss.double(), -(y * log_p).sum(-1), rtol=5e-4, atol=0.0)
        w = 1 / (gamma * A + 1)
        y, A = (1 - w) * y + w * log_p.exp(), gamma * A + 1
    assert visits.tolist() == [100] * B


def test_visits_saturate():
    case = make_case(B=4)
    for slot, t in zip(case.slots, (65533, 65534, 65535), strict=False):
        case.visits[slot] = t
    result = run(fused_step, case)
    assert result.visits[case.slots[:3]].tolist() == [65534, 65535, 65535]
    check_against_eager(case, result)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf"), 3e38])
def test_non_finite_logits_leave_the_store_alone(bad):
    case = make_case(K=1003, B=6)
    case.logits[1, 1002] = bad
    case.logits[5, 3] = bad  # padding: not looked at
    good = torch.tensor([0, 2, 3, 4, 5])
    for step in (fused_step, eager_step):
        result = run(step, case)
        assert result.loss.isnan().tolist() == [i == 1 for i in range(6)]
        assert result.grad.isnan().all(-1).tolist() == [i == 1 for i in range(6)]
        slot = case.slots[1]
        assert same_bits(result.rows[slot], case.rows[slot])
        assert result.visits[slot] == int(case.visits[slot])
        without = case._replace(
            **{name: getattr(case, name)[good] for name in ("logits", "labels", "slots")}
        )
        check_what_stays(without, result._replace(loss=result.loss[good], grad=result.grad[good]))


def test_updates_without_a_gradient_too():
    case = make_case(K=1003)
    with_grad, own = run(fused_step, case), case.copy()
    with torch.no_grad():
        loss = fused_step(*own)
    assert not loss.requires_grad and torch.equal(loss, with_grad.loss)
    assert same_bits(own.rows, with_grad.rows)
    assert torch.equal(own.visits.int(), with_grad.visits)


def test_a_rows_bits_do_not_depend_on_its_batch():
    """The store's invariant: the same predictions give the same bits on any number of workers."""
    case = make_case(K=1003, B=9, tau=0.8)
    whole = run(fused_step, case)
    for i in torch.randperm(8, generator=torch.Generator().manual_seed(0)).tolist():
        alone = case._replace(
            **{name: getattr(case, name)[i : i + 1] for name in ("logits", "labels", "slots")}
        )
        result = run(fused_step, alone)
        slot = case.slots[i]
        assert same_bits(result.rows[slot], whole.rows[slot])
        assert torch.equal(result.grad[0], whole.grad[i])
        assert result.loss[0] == whole.loss[i]


def test_threads_change_nothing(monkeypatch):
    from dps_dist.targets import fused_cpu

    case = make_case(K=1003, B=7)
    one = run(fused_step, case)
    parts = []
    kernel = fused_cpu.many_rows
    monkeypatch.setattr(fused_cpu, "ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(fused_cpu, "many_rows", lambda *args: (parts.append(1), kernel(*args)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    many = run(fused_step, case)
    assert len(parts) == 3
    assert torch.equal(one.loss, many.loss) and torch.equal(one.grad, many.grad)
    assert same_bits(one.rows, many.rows) and torch.equal(one.visits, many.visits)


def test_logits_need_not_be_contiguous():
    case = make_case(K=1003)
    wide = torch.stack([case.logits, -case.logits], -1)
    expected, own = run(fused_step, case), case.copy()
    logits = wide.requires_grad_()[..., 0]
    loss = fused_step(logits, *own[1:])
    loss.sum().backward()
    assert torch.equal(loss.detach(), expected.loss) and same_bits(own.rows, expected.rows)
    assert torch.equal(wide.grad[..., 0], expected.grad) and (wide.grad[..., 1] == 0).all()


def test_backward_can_be_repeated():
    own = make_case().copy()
    loss = fused_step(*own).mean()
    (first,) = torch.autograd.grad(loss, own.logits, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, own.logits)
    torch.testing.assert_close(second, 2 * first)


def test_nothing_but_padding():
    """Also with an empty batch, and on a rank that holds no rows."""
    for B in (0, 2):
        case = make_case(B=2)
        case = case._replace(
            logits=case.logits[:B],
            labels=case.labels[:B],
            slots=torch.full((B,), -1),
            rows=case.rows[:0],
            visits=case.visits[:0],
        )
        for step in (fused_step, eager_step):
            result = run(step, case)
            assert result.loss.tolist() == [0.0] * B and (result.grad == 0).all()


def test_wrong_shapes_are_refused():
    case = make_case()
    for wrong in (
        {"labels": case.labels[:-1]},
        {"labels": case.labels.int()},
        {"rows": case.rows.float()},
        {"rows": case.rows[:, :-1]},
        {"visits": case.visits[:-1]},
        {"prior": Dirichlet(11, 0.9, 10.0)},
    ):
        with pytest.raises(AssertionError):
            fused_step(*case._replace(**wrong))


def python(*args: str, **env: str) -> str:
    root = str(Path(fused.__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_is_light():
    code = "import sys, dps_dist.targets.fused; print({'numba', 'triton'} & set(sys.modules))"
    assert python("-c", code).strip() == "set()"


def test_triton_kernel_in_the_interpreter():
    """In its own process: triton reads the variable when it is first imported."""
    lines = python(__file__, TRITON_INTERPRET="1").splitlines()
    assert len(lines) == len(TRITON_CASES)


@pytest.mark.parametrize("sharpen", [False, True])
def test_triton_kernel_compiles_for_a_gpu(sharpen):
    """To machine code for compute capability 8.0, without one: the interpreter is laxer."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dps_dist.targets.fused_cuda import one_row

    arguments = ["*bf16", "*i64", "*i64", "*fp16", "*i16", *["*fp32"] * 3, "i32", "fp32"]
    constants = {"SHARPEN": sharpen, "WITH_GRAD": True, "BLOCK": 4096}
    types = [*arguments, *["constexpr"] * len(constants)]
    signature = dict(zip(one_row.arg_names, types, strict=True))
    options = {"num_warps": 8, "enable_fp_fusion": True}
    source = ASTSource(fn=one_row, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    assert kernel.asm["cubin"]


TRITON_CASES = [
    *(
        {"K": K, "tau": tau, "dtype": dtype, "B": 3}
        for K in (10, 100, 1000)
        for tau in (1.0, 0.8)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    {"K": 21841, "tau": 1.0, "B": 3, "dtype": torch.bfloat16},
    {"K": 21841, "tau": 1.0, "B": 3, "c": 1000.0, "gamma": 0.99, "epsilon": 0.05},
    {"K": 21841, "tau": 0.8, "B": 3},
    {"K": 100, "tau": 0.8, "epsilon": 0.0},
    {"K": 100, "gamma": 0.0},
    {"K": 100, "gamma": 1.0},
    {"K": 2, "scale": 1e4},
]


def check_triton() -> None:
    from dps_dist.targets import fused_cuda

    torch.set_num_threads(1)
    fused._kernel = lambda device: fused_cuda.step
    for options in TRITON_CASES:
        case = make_case(**options)
        case.visits[case.slots[case.slots >= 0][-1]] = 65535
        result = run(fused_step, case)
        check_against_oracle(case, result)
        check_against_eager(case, result)
        print(options, flush=True)
    for bad in (float("nan"), float("inf"), -float("inf"), 3e38):
        test_non_finite_logits_leave_the_store_alone(bad)
    test_updates_without_a_gradient_too()
    test_nothing_but_padding()


if __name__ == "__main__":
    check_triton()


def test_a_second_derivative_is_refused_and_not_dropped():
    prior = Dirichlet(4, 0.9, 5.0)
    logits = torch.randn(2, 4, requires_grad=True)
    rows, visits = torch.zeros(2, 4, dtype=torch.float16), torch.zeros(2, dtype=torch.uint16)
    loss = fused_step(logits, torch.tensor([0, 1]), torch.arange(2), rows, visits, prior).mean()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss, logits, create_graph=True)
