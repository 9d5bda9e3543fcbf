"""What the scripts in tune/ share: their options, and a sweep with its progress and its page."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dps_dist.cli.base import console, say
from dps_dist.errors import FailedError, InputError

if TYPE_CHECKING:
    from dps_dist.launch.sweeps import Folder, Sweep
    from dps_dist.report.sweep import Results
    from dps_dist.train.storage import Storage

PUBLISH_S = 5.0  # between two pages, at least
PAUSE = 20.0  # and so many times what one takes: drawing is not to take the trials' time
SHOWN = 5  # best cells, in the terminal

Recipe = Annotated[str, typer.Argument(help="A recipe's name or file; `dps recipes` lists them.")]
Seeds = Annotated[int, typer.Option(help="Runs of each cell, with train.seed 0, 1, …")]
Workers = Annotated[
    str, typer.Option("--workers-per-trial", metavar="N", help="Worker processes of a trial.")
]
Concurrent = Annotated[
    int | None, typer.Option(help="Trials at once. \\[default: all that the cluster holds]")
]
Scheduler = Annotated[
    Literal["none", "asha"], typer.Option(help="asha: stop trials that lag behind, early.")
]
HoldOut = Annotated[
    int,
    typer.Option(
        help="Training samples to score on. \\[default: the recipe's data.hold_out, or a tenth]"
    ),
]
Metric = Annotated[
    Literal["accuracy", "ece", "nll"], typer.Option(help="What the search and asha go by.")
]
Out = Annotated[str, typer.Option(help="Where sweeps are: a folder, s3://, gs://.")]
Name = Annotated[
    str | None, typer.Option(help="The sweep's folder in --out. \\[default: recipe and time]")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the sweep --name, asked for as it was begun.")
]


def start(sweep: "Sweep", out: str, name: str | None, resume: bool, concurrent: int | None) -> None:
    """Run a sweep to its end, its page always up to date; the best cells at last."""
    from dps_dist.launch import ray_tune
    from dps_dist.launch.runs import default_name
    from dps_dist.launch.sweeps import checked, open_folder
    from dps_dist.report.sweep_page import PAGE, publish

    if resume and name is None:
        raise InputError("--resume needs the --name of the sweep that is to be continued")
    folder = open_folder(checked(sweep), out, name or default_name(Path(sweep.recipe).stem), resume)
    try:
        with _publishing(folder.storage) as touched, _progress(folder) as advanced:

            def changed(folder: "Folder") -> None:
                touched.set()
                advanced(folder)

            ray_tune.sweep(folder, concurrent, changed)
    except (FailedError, KeyboardInterrupt):
        with suppress(Exception):  # what was met first tells
            publish(folder.storage, ended=True)
        raise
    results = publish(folder.storage, ended=True)
    console.print(best_cells(results))
    say(f"written to {folder.storage / PAGE} and {folder.storage / 'results.parquet'}")
    unasked = sweep.trials - len(folder.trials)  # points that Optuna has not chosen yet
    if folder.count("waiting", "running") or unasked > 0:
        again = f"--name {folder.storage.name} --resume"
        say(f"stopped; the same command with {again} goes on", to=sys.stderr)
        raise typer.Exit(130)
    if failed := folder.count("failed"):
        raise FailedError(
            f"{failed} of {len(folder.trials)} trials failed: the page says why; the same command "
            f"with --name {folder.storage.name} --resume tries them again"
        )


@contextmanager
def _publishing(storage: "Storage") -> Iterator[threading.Event]:
    """Writes the page anew, in a thread, soon after the event that is given is set."""
    from dps_dist.report.sweep_page import publish

    touched, ended = threading.Event(), threading.Event()

    def keep() -> None:
        pause = PUBLISH_S
        while not ended.wait(pause):
            if touched.is_set():
                touched.clear()
                started = time.monotonic()
                with suppress(Exception):  # the next one may succeed, and the last one speaks
                    publish(storage)
                pause = max(PUBLISH_S, PAUSE * (time.monotonic() - started))

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield touched
    finally:
        ended.set()
        thread.join()


@contextmanager
def _progress(folder: "Folder"):  # type: ignore[no-untyped-def]
    """A bar on a terminal; elsewhere a line for each trial that ends."""
    told = {name for name, trial in folder.trials.items() if trial.status == "finished"}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("starting Ray", total=None)

        def advanced(folder: "Folder") -> None:
            ended = folder.count("finished", "stopped", "failed")
            total = max(folder.sweep.trials, len(folder.trials))
            bar.update(
                task,
                completed=ended,
                total=total,
                description=f"{folder.count('running')} running",
            )
            for name, trial in folder.trials.items():
                if trial.status in ("finished", "stopped", "failed") and name not in told:
                    told.add(name)
                    reason = f": {trial.reason}" if trial.reason else ""
                    bar.console.print(
                        f"{name} {trial.status}{reason} ({ended} of {total})", markup=False
                    )

        yield advanced


def best_cells(results: "Results") -> Table:
    from dps_dist.report import sweep_page
    from dps_dist.report.sweep import METRICS

    shown = Table("cell", *METRICS, "seeds", box=None, header_style="bold")
    for row in sweep_page.ranked(results)[:SHOWN]:
        shown.add_row(*row)
    return shown
