"""The target store at the full size of ImageNet, here, and what that means on larger machines.

    python benchmarks/imagenet_store.py            N=1,281,167, K=1000: some minutes, 4 GB of memory
    python benchmarks/imagenet_store.py --quick    a fiftieth of it, seconds

Measured on 2 ranks: bytes, planning and migration, an epoch of steps at B=128 (eager read + update,
and fused), saving; loading on 3 ranks. The second table is arithmetic on stated assumptions.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dps_dist.data.order import EpochOrder
from dps_dist.targets import Dirichlet, ShardedTargets, migrate
from exchange import run_ranks, timed
from figures import found

N, K, B = 1_281_167, 1000, 128
PRIOR = Dirichlet(K, 0.99, 1000.0, 0.05)


def train_and_save(N: int, folder: str, repeats: int) -> dict[str, Any]:
    rank, W = dist.get_rank(), dist.get_world_size()
    store = ShardedTargets(N, PRIOR)
    logits = torch.randn(B, K, generator=torch.Generator().manual_seed(rank))
    probs, labels = logits.softmax(1), torch.arange(B) % K
    store.step(logits, labels, torch.full((B,), -1))  # compiles

    def epoch(order: EpochOrder, fused: bool) -> None:
        for step in range(order.steps):
            index = torch.tensor(order.batch(step, rank), dtype=torch.int64)
            if fused:
                store.step(logits, labels, index)
            else:
                store.read(index, labels)
                store.update(index, probs)

    times: dict[str, list[float]] = {
        "order": [],
        "plan": [],
        "begin_epoch": [],
        "eager": [],
        "fused": [],
    }
    for e in range(repeats + 1):
        start = time.perf_counter()
        order = EpochOrder(N, B, W, epoch=e)
        order.assignment  # noqa: B018
        times["order"].append(time.perf_counter() - start)
        times["plan"].append(timed(migrate.plan, order, store._holder, rank))
        times["begin_epoch"].append(timed(store.begin_epoch, order))
        # eager and fused take turns, after one epoch that touches all memory
        fused = e % 2 == 0
        times["fused" if fused else "eager"].append(timed(epoch, order, fused))
    result: dict[str, Any] = {
        name: statistics.median(t[name != "eager" :]) for name, t in times.items()
    }
    result["save"] = timed(store.save, folder)
    result["load"] = timed(store.load, folder)
    return {
        **result,
        "steps": order.steps,
        "bytes": store.nbytes,
        "sent": store.sent_bytes / (repeats + 1),
    }


def load(N: int, folder: str) -> dict[str, Any]:
    store = ShardedTargets(N, PRIOR)
    seconds = timed(store.load, folder)
    visits = store._gather([int(store.visits(store.held()).sum())]).sum()
    return {"load": seconds, "visits": int(visits)}


def on_paper(N: int, K: int, W: int, plan: float, args: argparse.Namespace) -> tuple[float, ...]:
    """Bytes a rank, bytes moved a rank, seconds of exchange, of planning, of training an epoch.

    plan: seconds of planning a sample.
    """
    held = (-(-N // W) + migrate.slack_rows(W)) * (2 * K + 2) + 6 * N
    moved = N / W * (1 - 1 / W) * (2 * K + 2)
    nodes = max(1, W // 8)
    inside = moved / (args.node_bandwidth * 1e9)
    # the part that leaves the node, over the link that its 8 ranks share
    across = 8 * moved * (nodes - 1) / nodes / (args.network / 8 * 1e9)
    training = N / W / args.images_per_second
    return held, moved, max(inside, across), plan * N, training


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the samples")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--images-per-second", type=float, default=2500, help="of one GPU, assumed")
    parser.add_argument("--node-bandwidth", type=float, default=250, help="GB/s a GPU, assumed")
    parser.add_argument("--network", type=float, default=100, help="Gb/s a node of 8, assumed")
    args = parser.parse_args()
    size = N // 50 if args.quick else N
    with tempfile.TemporaryDirectory() as folder:
        r = run_ranks(train_and_save, 2, size, folder, args.repeats)
        files = sorted(Path(folder).glob("*.arrow"))
        disk = sum(path.stat().st_size for path in files)
        three = run_ranks(load, 3, size, folder)
    assert three["visits"] == (args.repeats + 1) * 2 * r["steps"] * B, "loading lost visits"

    exact = (2 * size * K + 2 * size) / 2
    rows = [
        ("bytes a rank", f"{r['bytes'] / 1e6:.0f} MB", f"(2NK + 2N)/W is {exact / 1e6:.0f} MB"),
        ("order", f"{r['order']:.3f} s", "permutation, made once for loader and store"),
        ("plan", f"{r['plan']:.3f} s", "part of begin_epoch"),
        ("begin_epoch", f"{r['begin_epoch']:.2f} s", f"{r['sent'] / 1e6:.0f} MB sent a rank"),
        ("steps, eager", f"{r['eager']:.2f} s", f"{r['steps']} × (read + update)"),
        ("steps, fused", f"{r['fused']:.2f} s", f"{r['steps']} × step, loss and gradient included"),
        ("save, W=2", f"{r['save']:.2f} s", f"{disk / r['save'] / 1e6:.0f} MB/s, with checksums"),
        ("load, W=2", f"{r['load']:.2f} s", f"{disk / r['load'] / 1e6:.0f} MB/s, verified"),
        ("load, W=3", f"{three['load']:.2f} s", f"{disk / three['load'] / 1e6:.0f} MB/s, verified"),
    ]
    print(f"N={size:,}, K={K}, B={B} a rank, 2 ranks on this machine, median of {args.repeats}\n")
    for name, figure, note in rows:
        print(f"{name:16}{figure:>10}   {note}")
    found(
        f"ImageNet's store, N={size:,}, K={K}, W=2: megabytes a rank",
        r["bytes"] / 1e6,
        "{:.0f} MB",
        note=f"(2NK + 2N)/W is {exact / 1e6:.0f} MB",
    )
    found("… `begin_epoch`", r["begin_epoch"], "{:.2f} s", note=f"{r['sent'] / 1e6:.0f} MB a rank")
    found(
        f"… an epoch's {r['steps']:,} steps, fused",
        r["fused"],
        "{:.1f} s",
        note=f"eager read and update {r['eager']:.1f} s",
    )
    found(
        "… save",
        r["save"],
        "{:.1f} s",
        note=f"load {r['load']:.1f} s, with W=3 {three['load']:.1f} s",
    )

    print(
        f"\non paper: {args.images_per_second:.0f} images/s a GPU, {args.node_bandwidth:.0f} GB/s "
        f"a GPU inside a node, {args.network:.0f} Gb/s a node; planning on the CPU as measured here"
    )
    titles = ("held/GPU", "moved/GPU", "exchange", "of epoch", "planning", "of epoch")
    print(" " * 24 + "".join(f"{title:>11}" for title in titles))
    for name, n, k, W in (
        ("ImageNet, 8 GPUs", N, K, 8),
        ("ImageNet, 64 GPUs", N, K, 64),
        ("ImageNet-21k, 8 GPUs", 14_197_122, 21841, 8),
        ("ImageNet-21k, 64 GPUs", 14_197_122, 21841, 64),
    ):
        held, moved, exchange, planning, epoch = on_paper(n, k, W, r["plan"] / size, args)
        print(
            f"{name:24}{held / 1e9:>8.2f} GB{moved / 1e6:>8.0f} MB{exchange:>9.3f} s"
            f"{exchange / epoch:>11.3%}{planning:>9.2f} s{planning / epoch:>11.2%}"
        )


if __name__ == "__main__":
    main()
