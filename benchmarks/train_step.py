"""What DPS, data, metrics and checkpoints add to training, and what comes before the first step.

    python benchmarks/train_step.py [--quick]

One process that calls the training loop's own functions; whatever is compared is measured in turn
in the same run, medians. The digits are blown up to 32×32 for ResNet-18.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dps_dist import recipes
from dps_dist.data.order import EpochOrder
from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.targets import Dirichlet, LocalTargets
from dps_dist.train.loop import step
from dps_dist.train.manifest import Moment
from dps_dist.train.setup import Training, build
from dps_dist.train.state import save
from dps_dist.train.storage import Storage
from figures import found

SMALL = ["launch.workers=1"]
RESNET = [
    *SMALL,
    "model={name: resnet18, stem: 3x3}",
    "augment.crop=none",
    "data.resolution=32",
]
SHARD = (150_000, 1000)  # samples and classes: 300 MB, an eighth of ImageNet
GPU_SPEED = 2500.0  # images/s of a GPU, to say what a stall is of an epoch


def prepared(folder: Path) -> Path:
    for split in ("train", "val"):
        source = open_source("digits", None, split)
        write_split(
            source, folder, split, {}, ImageOptions("raw"), workers=1, say=lambda line: None
        )
    return folder


def training(data: Path, settings: list[str], method: str) -> Training:
    config = recipes.load("digits", [f"data.path={data}", f"method.name={method}", *settings])
    return build(config, Storage(data / "run"), lambda event: None, threads=1)


def steps_in_turn(data: Path, settings: list[str], rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of a whole training step of each method, on the same batches; and the median
    ratio of two that were measured one after the other."""
    runs = {method: training(data, settings, method) for method in ("baseline", "dps")}
    first = runs["dps"]
    B, N = first.config.data.batch_size, len(first.train_set)
    seconds: dict[str, list[float]] = {method: [] for method in runs}
    done, epoch = -2, 0
    while done < rounds:
        order = EpochOrder(N, B, epoch=epoch)
        for batch in first.loader.epoch(order):
            for method in sorted(runs, reverse=done % 2 == 0):
                start = time.perf_counter()
                step(runs[method], batch, samples=B)
                if done >= 0:
                    seconds[method].append(time.perf_counter() - start)
                run = runs[method]
                run.at = replace(run.at, step=min(run.at.step + 1, 700))
                run.watch.look()
            done += 1
            if done >= rounds:
                break
        epoch += 1
    ratios = [dps / plain for dps, plain in zip(seconds["dps"], seconds["baseline"], strict=True)]
    medians = {method: statistics.median(times) for method, times in seconds.items()}
    return medians, statistics.median(ratios)


def epoch_against_compute(
    data: Path, settings: list[str], rounds: int, most: int
) -> tuple[float, float, float]:
    """Median seconds a step: of (the first `most` steps of) epochs as they are trained, and of
    forward, backward, optimizer; and the median ratio of two measured one after the other."""
    run = training(data, settings, "dps")
    assert run.targets is not None
    B, N = run.config.data.batch_size, len(run.train_set)
    kept = next(iter(run.loader.epoch(EpochOrder(N, B)))).clone()
    whole, compute = [], []
    for epoch in range(rounds + 1):
        order = EpochOrder(N, B, epoch=epoch)
        steps = min(order.steps, most)
        start = time.perf_counter()
        run.targets.begin_epoch(order)
        for batch in islice(run.loader.epoch(order), steps):
            step(run, batch, samples=B)
            run.watch.step_done()
        run.watch.look()
        if epoch:
            whole.append((time.perf_counter() - start) / steps)
        start = time.perf_counter()
        for _ in range(steps):
            loss = torch.nn.functional.cross_entropy(run.forward(kept.images), kept.labels)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        if epoch:
            compute.append((time.perf_counter() - start) / steps)
    ratios = [one / other for one, other in zip(whole, compute, strict=True)]
    return statistics.median(whole), statistics.median(compute), statistics.median(ratios)


def checkpoint_stall(data: Path, rounds: int) -> tuple[float, float]:
    """Seconds that a save of ResNet-18 and a 300 MB shard holds the step, and that it takes."""
    run = training(data, RESNET, "dps")
    run.targets = filled_store()  # type: ignore[assignment]  # alike, without the digits' size
    held, total = [], []
    for number in range(rounds + 1):
        run.at = Moment(0, number + 1, number + 1)
        start = time.perf_counter()
        save(run)
        between = time.perf_counter()
        run.writer.wait()
        if number:  # the first one also finds the memory that all use
            held.append(between - start)
            total.append(time.perf_counter() - start)
    return statistics.median(held), statistics.median(total)


def filled_store() -> LocalTargets:
    """Memory that was never written to would be read for nothing."""
    N, K = SHARD
    store = LocalTargets(N, Dirichlet(K, 0.99, 1000.0, 0.05))
    probs = torch.randn(10_000, K).softmax(-1)
    for index in torch.arange(N).split(len(probs)):
        store.update(index, probs[: len(index)])
    return store


def start_up(data: Path, folder: Path) -> dict[str, float]:
    """Seconds from `dps train` to the moments that its log tells of."""
    command = [str(Path(sys.executable).parent / "dps"), "train", "digits", "--workers", "2"]
    command += ["--set", f"data.path={data}", "--set", "train.epochs=1", "--out", str(folder)]
    began, moments = time.monotonic(), {}
    signs = {
        "imports": "starting Ray",
        "Ray": "placing",
        "its workers": "loading",
        "model and data": "run ",
        "training": "epoch 1/1",
    }
    own_ray = os.environ | {"RAY_ADDRESS": "local"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own_ray) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for what, sign in signs.items():
                if line.startswith(sign) and what not in moments:
                    moments[what] = time.monotonic() - began
    if process.returncode or len(moments) < len(signs):
        seen = ", ".join(moments) or "nothing"
        sys.exit(f"dps train ended with {process.returncode}, after {seen}")
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="ResNet-18 with B=32, fewer rounds, no start of Ray"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        report(Path(scratch), quick)
    dist.destroy_process_group()


def report(scratch: Path, quick: bool) -> None:
    data = prepared(scratch / "digits")
    B = 32 if quick else 128
    resnet = [*RESNET, f"data.batch_size={B}"]
    for name, settings, count in (
        (f"ResNet-18, 32×32, B={B}", resnet, 4 if quick else 16),
        ("small CNN, 8×8, B=64", SMALL, 100 if quick else 600),
    ):
        times, ratio = steps_in_turn(data, settings, count)
        found(
            f"whole DPS training step against plain training's, {name}",
            ratio,
            "{:.3f}×",
            at_most=1.03,
            note=f"median of paired ratios; median steps {1e3 * times['dps']:.1f} and "
            f"{1e3 * times['baseline']:.1f} ms",
        )
    rounds, most = (1, 3) if quick else (3, 6)
    whole, compute, ratio = epoch_against_compute(data, resnet, rounds, most)
    found(
        "ResNet-18's epoch with data, targets, metrics against forward, backward, optimizer alone",
        ratio - 1,
        "{:+.1%}",
        at_most=0.05,
        note=f"median of paired ratios; median steps {1e3 * whole:.0f} and {1e3 * compute:.0f} ms",
    )
    held, total = checkpoint_stall(data, 2 if quick else 7)
    epoch = SHARD[0] / GPU_SPEED
    found(
        "checkpoint of a 300 MB shard: how long it holds training, of the "
        f"{epoch:.0f} s that its samples take at {GPU_SPEED:,.0f} images/s",
        held / epoch,
        "{:.2%}",
        at_most=0.02,
        note=f"{held:.2f} s; written after {total:.1f} s",
    )
    if quick:
        return
    moments = start_up(data, scratch / "runs")
    taken = np.diff([0.0, *moments.values()])
    parts = [f"{what} {seconds:.0f} s" for what, seconds in zip(moments, taken, strict=True)]
    found(
        "from `dps train` to the end of its first epoch, two workers",
        max(moments.values()),
        "{:.0f} s",
        note=", ".join(parts),
    )


if __name__ == "__main__":
    main()
