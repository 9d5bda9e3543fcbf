"""A run as people watch it: events of the workers → the terminal, or lines of a log.

`launch` feeds it from the main thread. A terminal gets a table that grows by a row an epoch, and
under it one line that moves; a log gets plain lines, of which those of epochs begin with `epoch`.
"""

import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

Event = dict[str, Any]
LOG_PROGRESS_S = 60.0
MIN_BAR, MAX_BAR = 8, 40
GAP, BEST, ABSENT = "  ", " *", "–"


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
                self._say(Text(_clean(event["text"]), "yellow"))
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
        text = _clean(event["text"])
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
            workers = _count(event["workers"], "worker")
            if event["workers"] != before["workers"]:
                workers += f" instead of {before['workers']}"
            self._say(Text(f"restarted with {workers}, in {place}", "yellow"))
            return
        facts = _facts(event)
        if epoch or step:
            facts["resumed"] = f"in {place}"
        name = _clean(event["run"])
        if self._live:
            self._say(Text(name, "bold"), _pairs(facts), "")
        else:
            self._say(f"run {name}: {_joined(facts)}")

    def _show_progress(self, event: Event) -> None:
        now = self._console.get_time()
        self._phase, self._at = None, event
        self._pace.reached(event["epoch"] + event["step"] / event["steps"], now)
        if not self._live and now - self._said_at >= LOG_PROGRESS_S:
            place = f"step {event['step']}/{event['steps']} of epoch {self._epoch(event)}"
            self._say(" ".join([place, *_vitals(event), *self._eta()]))

    def _show_epoch(self, event: Event) -> None:
        epochs = self._start["epochs"]
        self._pace.reached(event["epoch"], self._console.get_time())
        if event["epoch"] < epochs:
            self._phase = None
            self._at = {**(self._at or {}), "epoch": event["epoch"], "step": 0}
        is_best = _has(event, "accuracy") and event["accuracy"] > self._best
        if is_best:
            self._best = event["accuracy"]
        if not self._live:
            self._say(_log_line(event, epochs))
            return
        self._keys |= {key for key, value in event.items() if value is not None}
        columns = _fitting(self._keys, epochs, self._console.width)
        header = GAP.join(f"{column.title:>{column.width}}" for column in columns)
        if header != self._header:  # the first, or the terminal became wider or narrower
            self._header = header
            self._say(Text(header, "bold"))
        self._say(_row(columns, {**event, "epoch": f"{event['epoch']}/{epochs}"}, is_best))

    def _show_end(self, event: Event) -> None:
        self._stop_moving()
        epochs = _count(event["epochs"], "epoch")
        done = f"{_clean(event['run'])} finished {epochs} in {_clock(event['seconds'])}"
        results, folder = _results(event), _clean(str(event["folder"]))
        if self._live:
            self._say("", Text(done, "bold"), _pairs(results))
        else:
            self._say(f"{done}: {_joined(results)}")
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
            waited = _clock(self._console.get_time() - since)
            line.add_row(mark, Text(text, no_wrap=True, overflow="ellipsis"), Text(waited, "dim"))
            return line
        if not self._at:
            return None
        at, epoch = self._at, f"epoch {self._epoch(self._at)}"
        step = f"{at['step']:>{len(str(at['steps']))}}/{at['steps']}"
        room = self._console.width - len(epoch) - len(step) - MIN_BAR - 5
        vitals = []
        eta = self._eta()
        for part in (*eta, *_vitals(at)):  # where there is little room, the ETA is what matters
            if len(part) + len(GAP) <= room:
                vitals.append(part)
                room -= len(part) + len(GAP)
        tail = GAP.join(vitals[len(eta) :] + vitals[: len(eta)])
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
        return [f"ETA {_clock((self._start['epochs'] - done) / self._pace.epochs_per_s)}"]

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


def _clock(seconds: float) -> str:
    """0:01:12"""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else _clock(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 1000 else f"{value:.3f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}"


class Column(NamedTuple):
    title: str
    key: str
    width: int
    text: Callable[[Any], str]
    rank: int  # the highest is left out first where the terminal is narrow
    always: bool = True  # also while no epoch has had it


COLUMNS = (
    Column("epoch", "epoch", 5, str, 0),
    Column("loss", "train_loss", 6, _number, 1),
    Column("train", "train_accuracy", 6, _percent, 8),
    Column("accuracy" + " " * len(BEST), "accuracy", 8 + len(BEST), _percent, 2),
    Column("top-5", "top5", 6, _percent, 7),
    Column("ECE", "ece", 6, _percent, 3),
    Column("NLL", "nll", 6, _number, 4),
    Column("righted", "recovered", 7, _percent, 6, always=False),
    Column("entropy", "target_entropy", 7, _number, 10, always=False),
    Column("agree", "label_agreement", 6, _percent, 11, always=False),
    Column("lr", "lr", 7, "{:.2g}".format, 12),
    Column("images/s", "images_per_s", 8, _rate, 5),
    Column("time", "seconds", 7, _seconds, 9),
)


def _fitting(keys: set[str], epochs: int, width: int) -> list[Column]:
    """The most important columns that fit, in the table's order."""
    fit = 0
    ranked = sorted(COLUMNS, key=lambda column: column.rank)
    ranked = [column for column in ranked if column.always or column.key in keys]
    ranked[0] = ranked[0]._replace(width=max(ranked[0].width, len(f"{epochs}/{epochs}")))
    room = width + len(GAP)
    for column in ranked:
        room -= len(GAP) + column.width
        if room < 0:
            break
        fit += 1
    keys_in_order = [column.key for column in COLUMNS]
    return sorted(ranked[: max(fit, 1)], key=lambda column: keys_in_order.index(column.key))


def _row(columns: list[Column], event: Event, is_best: bool) -> Text:
    row = Text(no_wrap=True)
    for column in columns:
        value = event.get(column.key)
        text = ABSENT if value is None else column.text(value)
        style = "dim" if value is None else ""
        if column.key == "accuracy":
            text += BEST if is_best else " " * len(BEST)
            style = "green" if is_best else style
        row.append(GAP if row else "").append(f"{text:>{column.width}}", style)
    return row


def _log_line(event: Event, epochs: int) -> str:
    named = (
        ("loss", "train_loss", _number),
        ("accuracy", "accuracy", _percent),
        ("top5", "top5", _percent),
        ("ece", "ece", _percent),
        ("nll", "nll", _number),
        ("recovered", "recovered", _percent),
    )
    parts = [f"{name} {text(event[key])}" for name, key, text in named if _has(event, key)]
    return " ".join([f"epoch {event['epoch']}/{epochs}", *parts, *_vitals({**event, "loss": None})])


def _vitals(event: Event) -> list[str]:
    parts = []
    if _has(event, "loss"):
        parts.append(f"loss {_number(event['loss'])}")
    if _has(event, "images_per_s"):
        parts.append(f"{_rate(event['images_per_s'])} images/s")
    return parts


def _facts(start: Event) -> dict[str, str]:
    steps = f"{_count(start['steps'], 'step')} of {_count(start['batch_size'], 'image')}"
    return {
        "method": _clean(start["method"]),
        "model": f"{_clean(start['model'])}, {_count(start['parameters'], 'parameter')}",
        "data": f"{_count(start['samples'], 'image')}, {_count(start['classes'], 'class')}",
        "epochs": f"{start['epochs']:,}, each {steps}",
        "workers": f"{start['workers']} × {_clean(start['device']).split(':')[0]}{_places(start)}",
    }


def _places(start: Event) -> str:
    """` on a ×2, b (process 1, 2, 3)`: where the workers are, as far as it is told."""
    counts = Counter(_clean(str(host)) for host in start.get("hosts", ()))
    alike = len(set(counts.values())) == 1
    hosts = [host if alike else f"{host} ×{n}" for host, n in counts.items()]
    text = f" on {', '.join(hosts[:4])}" if hosts else ""
    if len(hosts) > 4:
        text += f" and {len(hosts) - 4} more"
    if 0 < len(pids := start.get("pids", ())) <= 4:
        text += f" (process {', '.join(map(str, pids))})"
    return text


def _results(end: Event) -> dict[str, str]:
    results = {}
    if _has(end, "accuracy"):
        results["accuracy"] = _percent(end["accuracy"])
        if _has(end, "best_accuracy") and _has(end, "best_epoch"):
            best = f"best {_percent(end['best_accuracy'])} in epoch {end['best_epoch']}"
            results["accuracy"] += f", {best}"
    for name, key, text in (
        ("top-5", "top5", _percent),
        ("ECE", "ece", _percent),
        ("NLL", "nll", _number),
        ("righted", "recovered", "{:.1%} of the wrong labels".format),
        ("speed", "images_per_s", "{:,.0f} images/s".format),
    ):
        if _has(end, key):
            results[name] = text(end[key])
    return results


def _pairs(rows: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=8)
    for key, text in rows.items():
        grid.add_row(Text(key), Text(text))
    return grid


def _joined(rows: dict[str, str]) -> str:
    return "; ".join(f"{key} {text}" for key, text in rows.items())


def _count(n: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{n:,} {thing if n == 1 else plural}"


def _has(event: Event, key: str) -> bool:
    return event.get(key) is not None


def _clean(text: str) -> str:
    """Without colours and other control sequences, which would reach the terminal."""
    plain = Text.from_ansi(text).plain
    return "".join(c for c in plain if c.isprintable() or c == "\n")
