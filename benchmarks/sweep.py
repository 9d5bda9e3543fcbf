"""What Ray Tune costs: a 16-cell sweep beside the same 16 trials without it.

    python benchmarks/sweep.py [--quick] [--pairs 3]

Both run two trials at once on two cores, from the start of a process to the end of the last trial.
Without Tune: two plain processes that take the trials one after the other; neither Ray, nor page,
nor records. Pairs are interleaved; the ratio is the median of the pairs'.
Beside it, one `dps train` of the same trial, which starts Ray anew: 16 of them back to back are
what a shell loop would do.
"""

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from figures import found

ROOT = Path(__file__).parents[1]
GAMMA, C = (0.8, 0.9, 0.97, 1.0), (5, 20, 50, 200)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 cells, one pair, no `dps train`")
    parser.add_argument("--pairs", type=int, default=3, help="how often both are run")
    asked = parser.parse_args()
    quick, pairs_asked = asked.quick, asked.pairs
    gamma, c = (GAMMA[:1], C[:2]) if quick else (GAMMA, C)
    cells = [(g, k) for g in gamma for k in c]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        settings = [f"data.path={prepared(folder)}", "data.hold_out=120"]
        pairs = []
        for k in range(1 if quick else pairs_asked):
            tuned = by_tune(folder / f"tune{k}", settings, gamma, c)
            plain = without(folder / f"plain{k}", settings, cells)
            pairs.append((tuned, plain))
            print(f"with Tune {tuned:.1f} s, without {plain:.1f} s", flush=True)
        single = None if quick else one_run(folder / "runs", settings, cells[0])
    overhead = median(tuned / plain for tuned, plain in pairs) - 1
    tuned = median(tuned for tuned, _ in pairs)
    found(
        f"what Ray Tune adds to {len(cells)} trials by two plain processes",
        overhead,
        "{:+.0%}",
        at_most=0.25,
        note="; ".join(f"{tuned:.1f} s against {plain:.1f} s" for tuned, plain in pairs),
    )
    if single is not None:
        found(
            f"the sweep against {len(cells)} times one `dps train`",
            tuned / (len(cells) * single),
            note=f"one takes {single:.0f} s",
        )


def prepared(folder: Path) -> Path:
    subprocess.run([dps(), "prepare", "digits", folder / "data"], check=True, capture_output=True)
    return folder / "data"


def dps() -> str:
    return str(Path(sys.executable).parent / "dps")


def by_tune(
    folder: Path, settings: list[str], gamma: tuple[float, ...], c: tuple[int, ...]
) -> float:
    command = [sys.executable, str(ROOT / "tune" / "ablation.py"), "digits-sym40", "--seeds", "1"]
    command += ["--gamma", ",".join(map(str, gamma)), "--c", ",".join(map(str, c))]
    command += [word for one in settings for word in ("--set", one)]
    return timed([*command, "--concurrent", "2", "--out", str(folder), "--name", "sweep"])


def one_run(folder: Path, settings: list[str], cell: tuple[float, int]) -> float:
    command = [dps(), "train", "digits-sym40", "--workers", "1", "--out", str(folder)]
    chosen = [*settings, "evaluate.split=hold_out", *fields(cell)]
    return timed([*command, *(word for one in chosen for word in ("--set", one))])


def timed(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(
        command, check=True, capture_output=True, env=os.environ | {"RAY_ADDRESS": "local"}
    )
    return time.monotonic() - started


def without(folder: Path, settings: list[str], cells: list[tuple[float, int]]) -> float:
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        jobs = [(str(folder / str(k)), settings, cell) for k, cell in enumerate(cells)]
        pool.starmap(alone, jobs, chunksize=1)
    seconds = time.monotonic() - started
    shutil.rmtree(folder)
    return seconds


def alone(folder: str, settings: list[str], cell: tuple[float, int]) -> None:
    import torch
    import torch.distributed as dist

    from dps_dist import recipes
    from dps_dist.train.loop import run
    from dps_dist.train.storage import Storage

    torch.set_num_threads(1)
    chosen = [*settings, "evaluate.split=hold_out", "launch.workers=1", *fields(cell)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(recipes.load("digits-sym40", chosen), Storage(folder), lambda event: None, threads=1)
    finally:
        dist.destroy_process_group()


def fields(cell: tuple[float, int]) -> list[str]:
    return [f"method.gamma={cell[0]}", f"method.c={cell[1]}"]


if __name__ == "__main__":
    main()
