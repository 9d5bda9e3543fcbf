"""What telemetry costs of a training step.

    python benchmarks/telemetry.py [--quick]

The same step of the same run with and without its clock, in turn: the median ratio of what was
measured one after the other, in CPU seconds of the process, which a busy machine disturbs least.
What is done now and then (vitals at every look, metrics to a real Ray) is timed by itself, and is a
share of the time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from unittest.mock import patch

import ray
import torch
import torch.distributed as dist

from dps_dist.data.loader import Batch
from dps_dist.data.order import EpochOrder
from dps_dist.launch.telemetry import REFRESH_S, RankTelemetry
from dps_dist.train.loop import step
from dps_dist.train.setup import Training
from dps_dist.train.vitals import Clock, TimedTargets, vitals
from dps_dist.train.watch import LOOK_S
from figures import found
from train_step import SMALL, prepared, training


def seconds_of_step(run: Training, batch: Batch, clocked: bool) -> float:
    """As `train.loop.epoch` makes it, or without the clock; CPU seconds."""
    # Patched either way, so that what patching itself does to caches is the same for both
    with patch.object(TimedTargets, "of", TimedTargets.of if clocked else attrgetter("targets")):
        start = time.process_time()
        if clocked:
            run.clock.lap("data")
        step(run, batch, samples=len(batch.index))
        if clocked:
            run.clock.count(len(batch.index) - batch.padding)
            run.clock.lap("compute")
        return time.process_time() - start


def steps_in_turn(run: Training, rounds: int) -> tuple[float, list[float], list[float]]:
    """Median seconds of a step without the clock; the ratios of steps with it to steps without;
    and, as a control, of steps without it to others without."""
    epoch = EpochOrder(len(run.train_set), run.config.data.batch_size)
    batch = next(iter(run.loader.epoch(epoch))).clone()
    plain: list[float] = []
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for number in range(-2, rounds):
        for compared, kept in ratios.items():
            first = second = 0.0
            for is_first in (True, False, False, True):  # whatever follows what, it does so twice
                took = seconds_of_step(run, batch, clocked=compared and is_first)
                first, second = first + took * is_first, second + took * (not is_first)
                run.watch.look()
            if number >= 0:
                plain.append(second / 2)
                kept.append(first / second)
    return statistics.median(plain), ratios[True], ratios[False]


def spread(ratios: list[float]) -> str:
    """The median ratio less 1, and how far off it may be (95%)."""
    low, middle, high = statistics.quantiles(ratios)
    error = 1.57 * (high - low) / len(ratios) ** 0.5
    return f"{100 * (middle - 1):+.2f}% ± {100 * error:.2f}%"


def each(call: Callable[[], object], times: int) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def now_and_then(run: Training, telemetry: RankTelemetry) -> float:
    """Share of the time that looks and reports take; all metrics have a value by then."""
    row = ("accuracy", "ece", "target_entropy", "prior_weight", "label_agreement")
    telemetry.hear({"kind": "epoch", **dict.fromkeys(row, 0.5)})

    def look() -> None:
        run.clock.count(64)
        run.clock.lap("compute")  # so that counters have something to tell
        telemetry.see(vitals(run, 0.5))

    return each(look, 300) / LOOK_S + each(lambda: (look(), telemetry._tell()), 300) / REFRESH_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    telemetry = RankTelemetry("benchmark", 0)
    with tempfile.TemporaryDirectory() as scratch:
        report(prepared(Path(scratch) / "digits"), telemetry, quick)
    telemetry.close()
    ray.shutdown()
    dist.destroy_process_group()


def report(data: Path, telemetry: RankTelemetry, quick: bool) -> None:
    clock = Clock()
    laps = each(lambda: [clock.lap("data") for _ in range(1000)], 50) * 4 / 1000
    run = training(data, [*SMALL, "train.epochs=1000"], "dps")  # so many steps has its schedule
    plain, clocked, control = steps_in_turn(run, 150 if quick else 1500)
    share = now_and_then(run, telemetry)
    found(
        f"telemetry, of the shortest step there is (small CNN, {1e3 * plain:.1f} ms)",
        statistics.median(clocked) - 1 + share,
        "{:.2%}",
        at_most=0.005,
        note=f"{spread(clocked)} with its clock, {spread(control)} where neither has one; four "
        f"laps alone {1e6 * laps:.1f} µs; looks and reports {share:.3%} of the time",
    )


if __name__ == "__main__":
    main()
