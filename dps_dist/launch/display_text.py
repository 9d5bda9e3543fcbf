"""What a run's events say: figures as text, the table's columns, lines of a log, all in words.

`display.py` decides when, and prints it.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

Event = dict[str, Any]
GAP, BEST, ABSENT = "  ", " *", "–"


def clock(seconds: float) -> str:
    """0:01:12"""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


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


def fitting(keys: set[str], epochs: int, width: int) -> list[Column]:
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


def row(columns: list[Column], event: Event, is_best: bool) -> Text:
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


def log_line(event: Event, epochs: int) -> str:
    named = (
        ("loss", "train_loss", _number),
        ("accuracy", "accuracy", _percent),
        ("top5", "top5", _percent),
        ("ece", "ece", _percent),
        ("nll", "nll", _number),
        ("recovered", "recovered", _percent),
    )
    parts = [f"{name} {text(event[key])}" for name, key, text in named if has(event, key)]
    return " ".join([f"epoch {event['epoch']}/{epochs}", *parts, *vitals({**event, "loss": None})])


def vitals(event: Event) -> list[str]:
    parts = []
    if has(event, "loss"):
        parts.append(f"loss {_number(event['loss'])}")
    if has(event, "images_per_s"):
        parts.append(f"{_rate(event['images_per_s'])} images/s")
    return parts


def facts(start: Event) -> dict[str, str]:
    steps = f"{count(start['steps'], 'step')} of {count(start['batch_size'], 'image')}"
    return {
        "method": clean(start["method"]),
        "model": f"{clean(start['model'])}, {count(start['parameters'], 'parameter')}",
        "data": f"{count(start['samples'], 'image')}, {count(start['classes'], 'class')}",
        "epochs": f"{start['epochs']:,}, each {steps}",
        "workers": f"{start['workers']} × {clean(start['device']).split(':')[0]}{_places(start)}",
    }


def _places(start: Event) -> str:
    """` on a ×2, b (process 1, 2, 3)`: where the workers are, as far as it is told."""
    counts = Counter(clean(str(host)) for host in start.get("hosts", ()))
    alike = len(set(counts.values())) == 1
    hosts = [host if alike else f"{host} ×{n}" for host, n in counts.items()]
    text = f" on {', '.join(hosts[:4])}" if hosts else ""
    if len(hosts) > 4:
        text += f" and {len(hosts) - 4} more"
    if 0 < len(pids := start.get("pids", ())) <= 4:
        text += f" (process {', '.join(map(str, pids))})"
    return text


def results(end: Event) -> dict[str, str]:
    results = {}
    if has(end, "accuracy"):
        results["accuracy"] = _percent(end["accuracy"])
        if has(end, "best_accuracy") and has(end, "best_epoch"):
            best = f"best {_percent(end['best_accuracy'])} in epoch {end['best_epoch']}"
            results["accuracy"] += f", {best}"
    for name, key, text in (
        ("top-5", "top5", _percent),
        ("ECE", "ece", _percent),
        ("NLL", "nll", _number),
        ("righted", "recovered", "{:.1%} of the wrong labels".format),
        ("speed", "images_per_s", "{:,.0f} images/s".format),
    ):
        if has(end, key):
            results[name] = text(end[key])
    return results


def pairs(rows: dict[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, width=8)
    for key, text in rows.items():
        grid.add_row(Text(key), Text(text))
    return grid


def joined(rows: dict[str, str]) -> str:
    return "; ".join(f"{key} {text}" for key, text in rows.items())


def count(n: int, thing: str) -> str:
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{n:,} {thing if n == 1 else plural}"


def has(event: Event, key: str) -> bool:
    return event.get(key) is not None


def clean(text: str) -> str:
    """Without colours and other control sequences, which would reach the terminal."""
    plain = Text.from_ansi(text).plain
    return "".join(c for c in plain if c.isprintable() or c == "\n")
