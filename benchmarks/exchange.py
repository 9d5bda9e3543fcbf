"""What it costs to bring each row to its visitor: migration against its alternatives.

    python benchmarks/exchange.py            N=200k, K=1000, 2 and 4 ranks: a few minutes, 5 GB
    python benchmarks/exchange.py --quick    N=20k, seconds

An epoch is the store's own work in it: one fused step a batch, on logits that are there already.

    no exchange    shuffle="shard": rows never move
    migration      shuffle="global": begin_epoch moves the rows, the steps touch local memory only
    streaming      the same with exchange="stream"
    per step       the usual way (as in PS-KD's public code): every rank has the whole table in
                   float32; each step all ranks' predictions and indices are gathered and written
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dps_dist.data.order import EpochOrder
from dps_dist.targets import Dirichlet, ShardedTargets, migrate
from figures import found


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """function(*args) on world_size processes joined by gloo; what rank 0 returns."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (world_size, store.port, results, function, args), world_size)
    return results.get()


def _rank(rank: int, world_size: int, port: int, results: Any, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.destroy_process_group()


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    function(*args)
    dist.barrier()
    return time.perf_counter() - start


def raw_exchange(order: EpochOrder, holder: np.ndarray, row: int) -> Callable[[], None]:
    """One all_to_all_single of the bytes that an epoch's migration moves, and nothing else."""
    turn = migrate.plan(order, holder, dist.get_rank()).between(0, 1, 1)
    sent = torch.ones(len(turn.leaving), row, dtype=torch.float16)
    received = torch.ones(len(turn.arriving), row, dtype=torch.float16)

    def exchange() -> None:
        dist.all_to_all_single(received, sent, turn.receive_splits, turn.send_splits)

    return exchange


def copies(store: ShardedTargets, order: EpochOrder) -> Callable[[], None]:
    """Packing and unpacking the rows of an epoch's migration in its chunks, and sending nothing."""
    plan = migrate.plan(order, store._holder, dist.get_rank())
    chunks = torch.from_numpy(plan.leaving).long().split(store._rows_a_round)
    slots = [store._slot[samples].long() for samples in chunks]
    parcel = torch.ones(store._rows_a_round, store.prior.num_classes, dtype=torch.float16)

    def pack_and_unpack() -> None:
        for places in slots:
            torch.index_select(store._rows, 0, places, out=parcel[: len(places)])
            store._rows.numpy()[places.numpy()] = parcel[: len(places)].numpy()

    return pack_and_unpack


def measure(N: int, K: int, B: int, chunk_rows: int, repeats: int) -> dict[str, Any]:
    rank, W = dist.get_rank(), dist.get_world_size()
    prior = Dirichlet(K, 0.99, 1000.0, 0.05)
    logits = torch.randn(B, K, generator=torch.Generator().manual_seed(rank))
    labels = torch.arange(B) % K
    bulk = ShardedTargets(N, prior, chunk_rows=chunk_rows)
    stream = ShardedTargets(N, prior, exchange="stream", chunk_rows=chunk_rows)
    still = ShardedTargets(N, prior)
    table = torch.zeros(N, K)

    def steps(store: ShardedTargets, order: EpochOrder) -> None:
        for step in range(order.steps):
            index = torch.tensor(order.batch(step, rank), dtype=torch.int64)
            store.step(logits, labels, index)

    def epoch(store: ShardedTargets, order: EpochOrder) -> None:
        store.begin_epoch(order)
        steps(store, order)

    gathered, indices = torch.zeros(W * B, K), torch.zeros(W * B, dtype=torch.int64)

    def per_step(order: EpochOrder) -> None:
        for step in range(order.steps):
            index = torch.tensor(order.batch(step, rank), dtype=torch.int64)
            target = 0.5 * table[index]
            target[torch.arange(B), labels] += 0.5
            log_p = logits.log_softmax(1)
            -(target * log_p).sum(1)
            p = log_p.exp()
            _gradient = p - target
            dist.all_gather_into_tensor(gathered, p)
            dist.all_gather_into_tensor(indices, index)
            table.numpy()[indices.numpy()] = gathered.numpy()

    names = ("no exchange", "migration", "streaming", "per step", "begin_epoch", "raw", "copies")
    times: dict[str, list[float]] = {name: [] for name in names}
    sent = 0
    for e in range(repeats + 1):  # the first one warms up
        order = EpochOrder(N, B, W, epoch=e)
        shard = EpochOrder(N, B, W, epoch=e, shuffle="shard")
        order.assignment, shard.assignment  # noqa: B018  the loader has made them
        raw = raw_exchange(order, bulk._holder, K + 1)
        before = bulk.sent_bytes
        now = {"no exchange": timed(epoch, still, shard), "raw": timed(raw)}
        now["copies"] = timed(copies(bulk, order))
        now["begin_epoch"] = timed(bulk.begin_epoch, order)
        now["migration"] = now["begin_epoch"] + timed(steps, bulk, order)
        now["streaming"] = timed(epoch, stream, order)
        now["per step"] = timed(per_step, order)
        sent = bulk.sent_bytes - before
        for name in names if e else ():
            times[name].append(now[name])
    result: dict[str, Any] = {name: statistics.median(values) for name, values in times.items()}
    steps_bytes = EpochOrder(N, B, W).steps * B * (W - 1) * (4 * K + 8)
    return {
        **result,
        "sent": sent,
        "sent per step": steps_bytes,
        "held": bulk.nbytes,
        "held per step": table.nbytes,
        "rounds": repeats,
    }


def report(W: int, r: dict[str, Any]) -> None:
    base = r["no exchange"]
    print(f"\nW={W}: seconds an epoch, median of {r['rounds']} interleaved repeats")
    print(f"{'':14}{'seconds':>9}{'ratio':>8}{'MB moved/rank':>15}{'MB held/rank':>14}")
    for name in ("no exchange", "migration", "streaming", "per step"):
        moved = {"no exchange": 0, "per step": r["sent per step"]}.get(name, r["sent"])
        held = r["held per step"] if name == "per step" else r["held"]
        print(
            f"{name:14}{r[name]:>9.3f}{r[name] / base:>8.2f}{moved / 1e6:>15.0f}{held / 1e6:>14.0f}"
        )
    found(
        f"epoch of target work with migration against one without exchange, W={W}",
        r["migration"] / base,
        at_most=2.5,
        note=f"streaming {r['streaming'] / base:.1f}×",
    )
    found(
        f"… with the usual per-step exchange of predictions, W={W}",
        r["per step"] / base,
        "{:.1f}×",
        note=f"{r['sent per step'] / r['sent']:.0f} times the bytes sent, "
        f"{r['held per step'] / r['held']:.0f} times the bytes held",
    )
    found(
        f"migration against a raw `all_to_all_single` of the same bytes, W={W}",
        r["begin_epoch"] / r["raw"],
        at_most=1.5,
        note=f"{r['begin_epoch']:.3f} s against {r['raw']:.3f} s; packing and unpacking alone "
        f"{r['copies']:.3f} s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="N=20k, 3 repeats")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=128, help="of a rank")
    parser.add_argument("--chunk-rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    N, repeats = (20_000, 3) if args.quick else (args.samples, args.repeats)
    print(f"N={N}, K={args.classes}, batch {args.batch} a rank, chunks of {args.chunk_rows}, gloo")
    for W in args.ranks:
        report(W, run_ranks(measure, W, N, args.classes, args.batch, args.chunk_rows, repeats))


if __name__ == "__main__":
    main()
