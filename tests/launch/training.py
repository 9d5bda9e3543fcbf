"""`dps train` as a user starts it, watched, frozen and killed from outside, by its processes' ids.

with Training(home, settings) as training:
    training.start()
    training.goes_on()
    training.lose(while_saving, ranks=[0])
    assert training.end() == 0
assert differences(training.run, uninterrupted(…)) == []
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pyarrow as pa
import torch

from dps_dist import recipes
from dps_dist.config import Config
from dps_dist.train.checkpoint import open_checkpoint
from dps_dist.train.files import METRICS, SUMMARY
from dps_dist.train.loop import run as run_loop
from dps_dist.train.manifest import FOLDER, MANIFEST, attempt_of, newest_whole, step_of
from dps_dist.train.storage import Storage
from tests.spawn import Ranks

T = TypeVar("T")
DPS = Path(sys.executable).parent / "dps"
PATIENCE_S = 240.0  # for anything: a busy machine is no failure
TIMED = ("seconds", "images_per_s")  # what may differ between two runs
ELSEWHERE = re.compile(r"RAY_\w+|TMPDIR|GLOO_\w+")  # what would lead to somebody else's Ray
OWN_RAY = {"RAY_worker_niceness": "0"}  # else workers starve on a machine that is busy
RANK = re.compile(r"pid=(\d+)\) world_rank=(\d+)")
SET_OUT = re.compile(r"^(?:run \S+: |restarted with ).*$", re.MULTILINE)
PLACE = re.compile(r"in epoch (\d+) of \d+(?:, step (\d+))?")
EPOCH = re.compile(r"epochs [\d,]+, each (\d+) steps")
# All that may stand in the log of a run with which nothing but kills went wrong
EXPECTED = re.compile(
    r"starting Ray|placing \S+ workers|loading|run \S+: .*|epoch \d+/\d+ .*|step \d+/\d+ .*"
    r"|restarted with .*|\S+ finished .*|folder .*|next .*|dps: stopped"
    r"|\S+ is finished: .*|`dps train .* --resume` goes on where it was"
)


class EndedError(AssertionError):
    """The run is over before what was waited for."""


@dataclass(frozen=True)
class Saves:
    """Checkpoints as the run's folder shows them."""

    committed: dict[str, float]  # and when
    unfinished: frozenset[str]

    @property
    def newest(self) -> str | None:
        by_step = sorted(self.committed, key=lambda name: (step_of(name), self.committed[name]))
        return by_step[-1] if by_step else None

    @property
    def saving(self) -> list[str]:
        """Those under way; what is unfinished and older is being removed."""
        last = step_of(self.newest) if self.newest else -1
        return [name for name in self.unfinished if step_of(name) > last]

    @property
    def attempts(self) -> set[str]:
        return {attempt_of(name) for name in (*self.committed, *self.unfinished)}

    def of(self, attempts: Collection[str]) -> "Saves":
        ours = {
            name for name in (*self.committed, *self.unfinished) if attempt_of(name) in attempts
        }
        committed = {name: at for name, at in self.committed.items() if name in ours}
        return Saves(committed, self.unfinished & ours)


# Moments: what the workers that run now have saved, and had saved when it was last looked at.

Moment = Callable[[Saves, Saves], bool]


def before_the_first_save(now: Saves, before: Saves) -> bool:
    return not now.attempts


def in_a_step(now: Saves, before: Saves) -> bool:
    """About half-way between two saves."""
    if len(now.committed) < 2 or now.saving:
        return False
    *_, last, newest = sorted(now.committed.values())
    return time.time() - newest > (newest - last) / 2


def while_saving(now: Saves, before: Saves) -> bool:
    return bool(now.saving)


def after_a_save(now: Saves, before: Saves) -> bool:
    return now.newest != before.newest and not now.saving


class Training:
    """A run and the `dps train` that works on it. `close` ends whatever of it is still there."""

    def __init__(
        self,
        home: Path,
        settings: Collection[str],
        env: Mapping[str, str] | None = None,
        prefix: Collection[str] = (),
    ) -> None:
        """home: a short path, Ray's sockets are below it. prefix: such as `ip netns exec HOST`."""
        self.home, self.run, self.log = home, home / "runs" / "run", home / "terminal.log"
        self.settings, self.prefix = settings, prefix
        kept = {key: value for key, value in os.environ.items() if not ELSEWHERE.fullmatch(key)}
        self.env = {**kept, **OWN_RAY, "RAY_TMPDIR": str(home), "TMPDIR": str(home), **(env or {})}
        self.sessions: list[int] = []

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.close()
        if error and self.log.exists():
            print(self.log.read_text())  # the folder will be gone

    def start(self, *more: str) -> None:
        """`dps train` in a session of its own, to which all that it starts belongs."""
        self._said = self.log.stat().st_size if self.log.exists() else 0
        self._set_out, self._former = 0, self.saves().attempts
        command = [*self.prefix, str(DPS), "train", "digits", "--name", "run"]
        command += ["--out", str(self.run.parent), *more]
        for setting in self.settings:
            command += ["--set", setting]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )
        self.sessions.append(self.process.pid)

    def until(self, what: str, condition: Callable[[], T], every: float = 0.05) -> T:
        """What the condition gives when it holds at last; an error if the run ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            code = self.process.poll()
            if code is not None:
                raise EndedError(f"ended with {code} before {what}:\n{self.terminal()}")
            assert time.monotonic() < deadline, f"still not {what}:\n{self.terminal()}"
            time.sleep(every)
        return found

    def goes_on(self) -> None:
        """Wait for the next workers, which must set out from the newest checkpoint there is."""
        self.until("workers set out", lambda: len(self.set_out()) > self._set_out)
        newest = self.saves().of(self._former).newest
        assert self.set_out()[self._set_out] == (step_of(newest) if newest else 0), self.terminal()

    def end(self) -> int:
        """The exit code, when `dps train` has ended by itself."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.terminal()}") from None

    def close(self) -> None:
        for session in self.sessions:
            kill(processes_of(session))
        if self.sessions:
            self.process.wait()

    # Kills

    def catch(self, moment: Moment) -> dict[int, psutil.Process]:
        """The workers by rank, frozen at that moment: it is certain before anything is killed."""
        workers, before = self.workers(), self.new_saves()

        def caught() -> bool:
            nonlocal before
            now = self.new_saves()
            if moment(now, before):
                freeze(workers.values())
                now = self.new_saves()
                if moment(now, before):
                    return True
                thaw(workers.values())
            before = now
            return False

        self.until(moment.__name__, caught, every=0.0005)
        return workers

    def lose(self, moment: Moment, ranks: Collection[int]) -> None:
        """Kill these workers at that moment, and see the run go on."""
        workers = self.catch(moment)
        saving = self.new_saves().saving
        self.kill_workers(workers, ranks)
        self.goes_on()
        if 0 in ranks:  # who would have committed it
            assert not set(saving) & self.saves().committed.keys()

    def kill_workers(self, workers: Mapping[int, psutil.Process], ranks: Collection[int]) -> None:
        """Of these, frozen or not; the others then live on as long as they can."""
        self._set_out, self._former = len(self.set_out()), self.saves().attempts
        kill([workers[rank] for rank in ranks])
        thaw(workers.values())

    def kill_driver(self) -> list[psutil.Process]:
        """What it had started, which is to vanish by itself."""
        started = processes_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        return [process for process in started if process.pid != self.process.pid]

    # What it shows

    def terminal(self) -> str:
        """What it has said since the last start."""
        return self.log.read_bytes()[self._said :].decode()

    def unexpected(self) -> list[str]:
        """Lines of all starts that a user should not have to read."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if not EXPECTED.fullmatch(line)]

    def set_out(self) -> list[int]:
        """The steps from which workers have set out since the last start."""
        steps = []
        for line in SET_OUT.findall(self.terminal()):
            place = PLACE.search(line)
            epoch, step = (int(place[1]) - 1, int(place[2] or 0)) if place else (0, 0)
            steps.append(epoch * self.steps_per_epoch() + step)
        return steps

    def rows(self) -> list[dict[str, Any]]:
        """Of the epochs that are in a checkpoint: they stay as they are."""
        newest = self.saves().newest
        return [row for row in rows_of(self.run) if newest and row["step"] <= step_of(newest)]

    def worker_counts(self) -> list[int]:
        """How many workers did these epochs, as in [2, 1, 2]."""
        return [count for count, _ in groupby(row["workers"] for row in self.rows())]

    def steps_per_epoch(self) -> int:
        return int(EPOCH.search(self.log.read_text())[1])

    def saves(self) -> Saves:
        committed, unfinished, folder = {}, set(), self.run / FOLDER
        with suppress(FileNotFoundError):
            for name in filter(step_of, os.listdir(folder)):  # noqa: PTH208  # a tight loop
                try:
                    committed[name] = (folder / name / MANIFEST).stat().st_mtime
                except FileNotFoundError:
                    unfinished.add(name)
        return Saves(committed, frozenset(unfinished))

    def new_saves(self) -> Saves:
        """Of the workers that run now."""
        saves = self.saves()
        return saves.of(saves.attempts - self._former)

    def workers(self) -> dict[int, psutil.Process]:
        """The living workers by rank, as the log of Ray Train's controller names them."""
        logs = (self.home / "ray" / "session_latest" / "logs" / "train").glob("*-sys-controller-*")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        started = [line for line in lines if "Started training worker group" in line]
        named = RANK.findall(started[-1]) if started else []
        workers = {int(rank): self._worker(int(pid)) for pid, rank in named}
        return {rank: process for rank, process in workers.items() if process is not None}

    def _worker(self, pid: int) -> psutil.Process | None:
        """If it is one: a log may be old, and the number somebody else's by now."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            is_younger = process.create_time() >= psutil.Process(self.process.pid).create_time()
            if is_younger and "RayTrainWorker" in " ".join(process.cmdline()):
                return process
        return None


# Processes


def processes_of(session: int) -> list[psutil.Process]:
    """All living processes of the session, whoever their parents are by now."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == session and is_alive(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Collection[psutil.Process]) -> None:
    """SIGKILL, all at once; returns when they are gone."""
    _signal(processes, signal.SIGKILL)
    wait_gone(processes, 60)


def wait_gone(processes: Collection[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
        time.sleep(0.01)


def freeze(processes: Collection[psutil.Process]) -> None:
    """SIGSTOP; returns when no thread of them runs, or finishes a write, any more."""
    _signal(processes, signal.SIGSTOP)
    for process in processes:
        while is_alive(process) and not _thread_states(process.pid) <= set("TZX"):
            time.sleep(0.0005)


def thaw(processes: Collection[psutil.Process]) -> None:
    _signal(processes, signal.SIGCONT)


@contextmanager
def slowed(processes: Collection[psutil.Process]) -> Iterator[None]:
    """Meanwhile they run for a tenth of the time only: others get something done."""
    stop = threading.Event()

    def hold_back() -> None:
        while not stop.wait(0.05):
            freeze(processes)
            stop.wait(0.45)
            thaw(processes)

    thread = threading.Thread(target=hold_back, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _signal(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _thread_states(pid: int) -> set[str]:
    states = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.add(stat.read_text().rpartition(")")[2].split()[0])
    return states


# What a run has computed


def uninterrupted(run: Path, settings: Collection[str], workers: int) -> Path:
    """The same in as many processes, without Ray and kills: what runs are compared with."""
    config = recipes.load("digits", [*settings, f"launch.workers={workers}"])
    with Ranks(workers, timeout=PATIENCE_S) as ranks:
        ranks.run(_train_here, config.model_dump_json(), str(run), timeout=2 * PATIENCE_S)
    return run


def _train_here(config: str, run: str) -> None:
    run_loop(Config.model_validate_json(config), Storage(run), lambda event: None, threads=1)


def differences(run: Path, other: Path) -> list[str]:
    """Names of the results that are not the same to the last bit in both finished runs."""
    ours, theirs = results(run), results(other)
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if ours.get(name, ours) != theirs.get(name, theirs)]


def results(run: Path) -> dict[str, Any]:
    """Every value that must not depend on kills, by its name; tensors as bytes."""
    found = newest_whole(Storage(run), lambda text: None)
    assert found is not None, f"{run} has no checkpoint"
    opened = open_checkpoint(Storage(run), found.name, run)
    summary = json.loads((run / SUMMARY).read_text())
    everything = {
        "checkpoint": {
            "state": opened.state,
            "at": [opened.moment.epoch, opened.moment.position, opened.moment.step],
            "accuracy": found.accuracy,
            "targets": targets_of(opened.folder / "targets"),
        },
        "targets": targets_of(run / "targets"),
        "metrics": rows_of(run),
        "summary": {key: value for key, value in summary.items() if key not in ("run", "folder")},
    }
    return dict(_flat(everything))


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def targets_of(folder: Path) -> dict[str, torch.Tensor]:
    """The columns of all ranks' files, in the order of the samples."""
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(folder.glob("*.arrow"))]
    batch = pa.concat_tables(tables).combine_chunks().to_batches()[0]
    order = batch["index"].to_numpy().argsort()
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.flatten() if name == "evidence" else column
        rows = values.to_numpy().reshape(len(batch), -1)[order]
        columns[name] = torch.from_numpy(rows)
    return columns


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        raw = value.detach().reshape(-1).view(torch.uint8)
        yield name, (value.dtype, tuple(value.shape), raw.numpy().tobytes())
    elif isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        yield f"{name}.size", len(value)
        for key, entry in entries:
            if key not in TIMED:
                yield from _flat(entry, f"{name}.{key}")
    else:
        yield name, value


class Reader:
    """Reads a run's metrics without a pause, in a thread; `problems`: what was ever wrong."""

    def __init__(self, run: Path) -> None:
        self.path, self.reads = run / METRICS, 0
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read_on(self) -> None:
        while not self._stop.wait(0.005):
            try:
                problem = _problem(self.path.read_text())
                self.reads += 1
            except FileNotFoundError:
                problem = "it is gone" if self.reads else None
            if problem:
                self.problems.append(problem)


def _problem(text: str) -> str | None:
    if text and not text.endswith("\n"):
        return f"cut off: {text[-80:]!r}"
    try:
        epochs = [json.loads(line)["epoch"] for line in text.splitlines()]
    except (ValueError, KeyError) as error:
        return f"{error}: {text[-80:]!r}"
    return None if epochs == list(range(1, len(epochs) + 1)) else f"epochs {epochs}"


@contextmanager
def short_home() -> Iterator[Path]:
    """A folder with a short name: that of a socket may have no more than 107 characters."""
    home = Path(tempfile.mkdtemp(prefix="dps", dir="/tmp"))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)
