"""A run as people watch it: events of the workers → the terminal, or lines of a log.

`launch` feeds it from the main thread. A terminal gets a table that grows by a row an epoch, and
under it one line that moves; a log gets plain lines, of which those of epochs begin with `epoch`.
"""

import shlex

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dps_dist.launch.display_text import (
    GAP,
    Event,
    clean,
    clock,
    count,
    facts,
    fitting,
    has,
    joined,
    log_line,
    pairs,
    results,
    row,
    vitals,
)

LOG_PROGRESS_S = 60.0
MIN_BAR, MAX_BAR = 8, 40


class Display:
    """Shows events as they come. `close` may be called at any time, and twice."""

    def __init__(self, console: Console, live: bool | None = None) -> None:
        self._console = console
        self._live: Live | None = None
        if console.is_interactive if live is None else live:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._spinner = Spinner("dots", style="cyan")
        self._pace = Pace()
        self._start: Event = {}
        self._phase: tuple[str, float] | None = None
        self._at: Event | None = None
        self._keys: set[str] = set()
        self._header = ""
        self._best = float("-inf")
        self._said_at = console.get_time()
        self._closed = False

    def show(self, event: Event) -> None:
        match event["kind"]:
            case "phase":
                self._show_phase(event)
            case "start":
                self._show_start(event)
            case "progress":
                self._show_progress(event)
            case "epoch":
                self._show_epoch(event)
            case "note":
                self._say(Text(clean(event["text"]), "yellow"))
            case "end":
                self._show_end(event)
        self.tick()

    def tick(self) -> None:
        """Move what moves: the spinner, its seconds, the bar."""
        if self._live and not self._closed and (line := self._moving(self._spin())):
            self._live.start()
            self._live.update(line, refresh=True)

    def close(self) -> None:
        """Give the terminal back. Of a run that stops under way, the moving line stays behind."""
        left = self._moving(" ") if self._live and not self._closed else None
        self._stop_moving()
        self._closed = True
        if left:
            self._console.print(left, highlight=False)

    def _show_phase(self, event: Event) -> None:
        text = clean(event["text"])
        self._phase = text, self._console.get_time()
        if not self._live:
            self._say(text)

    def _show_start(self, event: Event) -> None:
        before, self._start = self._start, event
        self._phase, self._pace = None, Pace()
        epoch, step, steps = event["epoch"], event["step"] % event["steps"], event["steps"]
        self._at = {"epoch": epoch, "step": step, "steps": steps}
        place = f"epoch {min(epoch + 1, event['epochs'])} of {event['epochs']}"
        place += f", step {step} of {steps}" if step else ""
        if before:
            workers = count(event["workers"], "worker")
            if event["workers"] != before["workers"]:
                workers += f" instead of {before['workers']}"
            self._say(Text(f"restarted with {workers}, in {place}", "yellow"))
            return
        known = facts(event)
        if epoch or step:
            known["resumed"] = f"in {place}"
        name = clean(event["run"])
        if self._live:
            self._say(Text(name, "bold"), pairs(known), "")
        else:
            self._say(f"run {name}: {joined(known)}")

    def _show_progress(self, event: Event) -> None:
        now = self._console.get_time()
        self._phase, self._at = None, event
        self._pace.reached(event["epoch"] + event["step"] / event["steps"], now)
        if not self._live and now - self._said_at >= LOG_PROGRESS_S:
            place = f"step {event['step']}/{event['steps']} of epoch {self._epoch(event)}"
            self._say(" ".join([place, *vitals(event), *self._eta()]))

    def _show_epoch(self, event: Event) -> None:
        epochs = self._start["epochs"]
        self._pace.reached(event["epoch"], self._console.get_time())
        if event["epoch"] < epochs:
            self._phase = None
            self._at = {**(self._at or {}), "epoch": event["epoch"], "step": 0}
        is_best = has(event, "accuracy") and event["accuracy"] > self._best
        if is_best:
            self._best = event["accuracy"]
        if not self._live:
            self._say(log_line(event, epochs))
            return
        self._keys |= {key for key, value in event.items() if value is not None}
        columns = fitting(self._keys, epochs, self._console.width)
        header = GAP.join(f"{column.title:>{column.width}}" for column in columns)
        if header != self._header:  # the first, or the terminal became wider or narrower
            self._header = header
            self._say(Text(header, "bold"))
        self._say(row(columns, {**event, "epoch": f"{event['epoch']}/{epochs}"}, is_best))

    def _show_end(self, event: Event) -> None:
        self._stop_moving()
        epochs = count(event["epochs"], "epoch")
        done = f"{clean(event['run'])} finished {epochs} in {clock(event['seconds'])}"
        found, folder = results(event), clean(str(event["folder"]))
        if self._live:
            self._say("", Text(done, "bold"), pairs(found))
        else:
            self._say(f"{done}: {joined(found)}")
        lines = [("folder", folder)]
        if "://" not in folder:  # a report reads folders of this machine
            lines.append(("next", f"dps report {shlex.quote(folder)}"))
        for key, text in lines:
            self._say(Text.assemble((f"{key:<8}", "dim"), GAP, text), whole=True)

    def _moving(self, mark: RenderableType) -> RenderableType | None:
        """The line under the table: a phase and its seconds, or how far the run is."""
        line = Table.grid(padding=(0, 1))
        if self._phase:
            text, since = self._phase
            waited = clock(self._console.get_time() - since)
            line.add_row(mark, Text(text, no_wrap=True, overflow="ellipsis"), Text(waited, "dim"))
            return line
        if not self._at:
            return None
        at, epoch = self._at, f"epoch {self._epoch(self._at)}"
        step = f"{at['step']:>{len(str(at['steps']))}}/{at['steps']}"
        room = self._console.width - len(epoch) - len(step) - MIN_BAR - 5
        shown = []
        eta = self._eta()
        for part in (*eta, *vitals(at)):  # where there is little room, the ETA is what matters
            if len(part) + len(GAP) <= room:
                shown.append(part)
                room -= len(part) + len(GAP)
        tail = GAP.join(shown[len(eta) :] + shown[: len(eta)])
        width = min(MIN_BAR + room, MAX_BAR)
        bar = ProgressBar(
            at["steps"], at["step"], width, complete_style="cyan", finished_style="cyan"
        )
        line.add_row(mark, epoch, bar, step, Text(f" {tail}", no_wrap=True))
        return line

    def _spin(self) -> RenderableType:
        return self._spinner.render(self._console.get_time())

    def _stop_moving(self) -> None:
        self._phase = self._at = None
        if self._live and self._live.is_started:
            self._live.stop()

    def _epoch(self, at: Event) -> str:
        return f"{min(at['epoch'] + 1, self._start['epochs'])}/{self._start['epochs']}"

    def _eta(self) -> list[str]:
        if not self._at or not self._pace.epochs_per_s:
            return []
        done = self._at["epoch"] + self._at["step"] / self._at["steps"]
        return [f"ETA {clock((self._start['epochs'] - done) / self._pace.epochs_per_s)}"]

    def _say(self, *lines: RenderableType, whole: bool = False) -> None:
        """Print above the moving line; `whole`: unbroken, to be copied. A log breaks no line."""
        self._said_at = self._console.get_time()
        for line in lines:
            # Never markup: names and notes come from outside.
            printed = Text(line) if isinstance(line, str) else line
            self._console.print(printed, soft_wrap=whole or not self._live, highlight=False)


class Pace:
    """Epochs a second, evaluation and all, forgetting with a half-life of an epoch, at least 20 s.

    Counted from the first report on: what comes before it is compiling and filling of caches.
    """

    def __init__(self) -> None:
        self._epochs = self._seconds = 0.0
        self._last: tuple[float, float] | None = None

    @property
    def epochs_per_s(self) -> float:
        return self._epochs / self._seconds if self._seconds else 0.0

    def reached(self, epochs: float, now: float) -> None:
        if self._last is not None:
            ran, took = epochs - self._last[0], now - self._last[1]
            if ran <= 0 or took <= 0:
                return
            kept = 0.5 ** min(ran, took / 20)
            self._epochs = self._epochs * kept + ran
            self._seconds = self._seconds * kept + took
        self._last = epochs, now
