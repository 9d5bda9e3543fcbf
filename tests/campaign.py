"""A random campaign of kills, longer than a test may take: `python tests/campaign.py --kills 100`.

Runs are started and their processes killed at random moments until there were enough kills. Each
run must then end as one that nobody touched, to the last bit: exit code 1 if any did not.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from dps_dist.data.sources import open_source
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.train.manifest import step_of
from tests.launch.training import (
    EndedError,
    Reader,
    Training,
    after_a_save,
    differences,
    freeze,
    short_home,
    thaw,
    uninterrupted,
    wait_gone,
    while_saving,
)

WORKERS = ("--workers", "2")
SETTINGS = (
    "data.batch_size=16",  # 75 steps an epoch
    "data.drop_last=false",
    "train.epochs=12",
    "train.checkpoint.every_steps=10",
    "launch.max_failures=-1",
)
TARGETS = {"rank 0": (0,), "rank 1": (1,), "both workers": (0, 1), "driver": ()}
AIMS = ("start", "step", "step", "saving", "after-save")
PER_RUN = (3, 6)  # kills before a run is left alone
START_S, WORK_S = 25.0, 3.0  # a random kill comes within so many seconds of a start, of work
EQUAL = "equal"
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Kill:
    run: int
    target: str
    phase: str  # start | step | saving | after-save
    saved: int  # the newest checkpoint's step at that time


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="at least so many, over several runs")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    asked = parser.parse_args()
    dice, kills, verdicts = random.Random(asked.seed), [], []
    with tempfile.TemporaryDirectory(prefix="dps-campaign-") as folder:
        settings = (*SETTINGS, f"data.path={prepared(Path(folder))}")
        expected = uninterrupted(Path(folder, "uninterrupted"), settings, workers=2)
        console.print("the run that nobody touches is done")
        while len(kills) < asked.kills:
            count = min(dice.randint(*PER_RUN), asked.kills - len(kills))
            with short_home() as home, Training(home, settings) as training:
                verdicts.append(one_run(training, len(verdicts) + 1, count, dice, kills, expected))
            console.print(f"run {len(verdicts)}: {verdicts[-1]}")
    console.print(table(kills))
    wrong = [verdict for verdict in verdicts if verdict != EQUAL]
    console.print(f"{len(kills)} kills, {len(verdicts)} runs, {len(wrong)} of them not equal")
    return 1 if wrong else 0


def prepared(folder: Path) -> Path:
    for split in ("train", "val"):
        source = open_source("digits", None, split)
        write_split(source, folder, split, {"source": "digits"}, ImageOptions("raw"), workers=1)
    return folder


def one_run(
    training: Training,
    number: int,
    count: int,
    dice: random.Random,
    kills: list[Kill],
    expected: Path,
) -> str:
    """Start a run, kill it so often, let it end: `EQUAL`, or what is wrong with it."""
    with Reader(training.run) as reader:
        try:
            training.start(*WORKERS)
            with suppress(EndedError):  # it may be over before it was killed often enough
                for _ in range(count):
                    kills.append(one_kill(training, number, dice))
                    console.print(f"run {number}: {kills[-1].target} killed, {kills[-1].phase}")
            code = training.end()
        except AssertionError as error:
            return str(error)
    if code:
        return f"exit code {code}: {training.terminal()}"
    wrong = [f"metrics: {problem}" for problem in reader.problems[:3]]
    wrong += [f"terminal: {line}" for line in training.unexpected()]
    wrong += [f"{name} differs" for name in differences(training.run, expected)]
    return "; ".join(wrong) or EQUAL


def one_kill(training: Training, number: int, dice: random.Random) -> Kill:
    """Kill something some time; if that was the driver, set the run going again."""
    target, aim = dice.choice(list(TARGETS)), dice.choice(AIMS)
    frozen, phase = caught(training, target, aim, dice)
    newest = training.saves().newest
    if target == "driver":
        training.kill_driver()
        thaw(frozen.values())
        made = (training.run / "config.yaml").exists()  # else it was killed before
        training.start(*(["--resume"] if made else []), *WORKERS)  # while its workers still die
        wait_gone(frozen.values(), 60)
    else:
        training.kill_workers(frozen, TARGETS[target])
    return Kill(number, target, phase, step_of(newest) if newest else 0)


def caught(
    training: Training, target: str, aim: str, dice: random.Random
) -> tuple[dict[int, psutil.Process], str]:
    """The workers, frozen, and the phase that they are in: what was aimed at, or nearly."""
    if aim == "start" and target == "driver":
        pause(training, dice.uniform(0, START_S))
        return {}, phase_of(training)
    training.goes_on()
    if aim in ("saving", "after-save"):
        return training.catch(while_saving if aim == "saving" else after_a_save), aim
    if aim == "step":
        training.until("a save", lambda: training.new_saves().committed)
    pause(training, dice.uniform(0, WORK_S))
    workers = training.workers()
    if not workers.keys() >= set(TARGETS[target]):
        raise EndedError("its workers are done")
    freeze(workers.values())
    return workers, phase_of(training)


def phase_of(training: Training) -> str:
    saves = training.new_saves()
    return "saving" if saves.saving else "step" if saves.committed else "start"


def pause(training: Training, seconds: float) -> None:
    end = time.monotonic() + seconds
    training.until("killed", lambda: time.monotonic() > end)


def table(kills: list[Kill]) -> Table:
    shown = Table("run", "killed", "phase", "saved step", box=None, header_style="bold")
    for kill in kills:
        shown.add_row(*map(str, astuple(kill)))
    return shown


if __name__ == "__main__":
    sys.exit(main())
