"""The fused DPS step against plain cross-entropy on the same logits, forward and backward.

    taskset -c 1 python benchmarks/store_step.py

One step is loss and backward down to logits.grad; the DPS ones also read and update their rows of a
store that is larger than the caches. Every round times all of them, in random order; medians.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dps_dist.targets.codec import encode
from dps_dist.targets.dirichlet import Dirichlet
from dps_dist.targets.fused import eager_step, fused_step
from figures import found

LIMITS = {1000: 2.0, 21841: 1.5}  # fused/cross-entropy
STORE_BYTES = 2**28


def step_times(K: int, B: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each kind."""
    prior = Dirichlet(num_classes=K, gamma=0.99, c=1000.0, epsilon=0.05)
    samples = STORE_BYTES // (2 * K)
    logits = (3 * torch.randn(B, K)).requires_grad_()
    labels = torch.randint(K, (B,))
    row = encode((3 * torch.randn(B, K)).softmax(-1))
    rows = row.repeat(-(-samples // B), 1)[:samples].contiguous()
    visits = torch.full((samples,), 20, dtype=torch.int32).to(torch.uint16)

    def dps(step: Callable[..., Tensor], tau: float) -> Callable[[Tensor], Tensor]:
        return lambda slots: step(logits, labels, slots, rows, visits, prior, tau).mean()

    kinds = {
        "cross-entropy": lambda slots: F.cross_entropy(logits, labels),
        "fused": dps(fused_step, 1.0),
        "fused τ=.8": dps(fused_step, 0.8),
        "eager": dps(eager_step, 1.0),
        "eager τ=.8": dps(eager_step, 0.8),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for done in range(-3, rounds):
        for kind in random.sample(list(kinds), len(kinds)):
            slots = torch.randperm(samples)[:B]
            logits.grad = None
            start = time.perf_counter()
            torch.autograd.backward(kinds[kind](slots))
            elapsed = time.perf_counter() - start
            if done >= 0:  # the rounds before warm up and compile
                seconds[kind].append(elapsed)
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def bandwidth() -> float:
    """Bytes read and written per second by a copy that is larger than the caches."""
    source = torch.ones(2**25)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--rounds", type=int, default=100, help="at K=1000; a fifth at K=21841")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rounds = 20 if options.quick else options.rounds
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    speed = bandwidth()
    threads = f"{options.threads} thread{'s' * (options.threads > 1)}"
    print(f"{threads}, batch {options.batch}, memcpy {speed / 1e9:.1f} GB/s")
    for K, limit in LIMITS.items():
        times = step_times(K, options.batch, rounds if K < 10000 else rounds // 5)
        # logits read, gradient written, evidence read and written
        times["bandwidth floor"] = (4 + 4 + 2 + 2) * K * options.batch / speed
        base = times["cross-entropy"]
        ratios = {kind: f"{kind} {seconds / base:.2f}×" for kind, seconds in times.items()}
        found(
            f"fused step against `F.cross_entropy` + backward, {threads}, B={options.batch}, K={K}",
            times["fused"] / base,
            at_most=limit,
            note=f"{ratios['fused τ=.8']}, {ratios['eager']}",
        )
        for kind, seconds in times.items():
            print(f"  {kind:16} {seconds * 1e3:8.3f} ms {seconds / base:6.2f}x")


if __name__ == "__main__":
    main()
