"""What a run looks like, in a terminal and in a log: event sequences → text."""

import io
import re

import pytest
from rich.console import Console

from dps_dist.launch.display import Display, Pace

START = {
    "kind": "start", "run": "digits-dps", "method": "dps", "model": "small_cnn", "workers": 2,
    "device": "cpu", "samples": 1200, "classes": 10, "parameters": 94000, "steps": 18,
    "epochs": 40, "batch_size": 64, "epoch": 0, "step": 0, "hosts": ["a", "a"], "pids": [1, 2],
}  # fmt: skip
EPOCH = {
    "kind": "epoch", "epoch": 1, "step": 18, "lr": 0.008, "train_loss": 0.61,
    "train_accuracy": 0.58, "accuracy": 0.955, "top5": 0.999, "nll": 0.31, "ece": 0.18,
    "target_entropy": 0.4, "label_agreement": 0.61, "recovered": 0.9, "images_per_s": 5200.0,
    "seconds": 0.3, "workers": 2,
}  # fmt: skip
END = {
    "kind": "end", "run": "digits-dps", "folder": "runs/digits-dps", "method": "dps", "epochs": 40,
    "accuracy": 0.955, "best_accuracy": 0.961, "best_epoch": 31, "ece": 0.032, "nll": 0.31,
    "top5": 0.999, "images_per_s": 5200.0, "seconds": 72.4,
}  # fmt: skip
LOG_LINE = re.compile(
    r"^epoch (?P<epoch>\d+)/(?P<epochs>\d+)(?: loss (?P<loss>[\d.]+|nan))?"
    r"(?: accuracy (?P<accuracy>[\d.]+)%)?(?: top5 [\d.]+%)?(?: ece (?P<ece>[\d.]+)%)?"
    r"(?: nll (?P<nll>[\d.]+))?(?: recovered [\d.]+%)? (?P<rate>[\d,]+) images/s$"
)


def progress(epoch, step, loss=0.53):
    return {
        "kind": "progress", "epoch": epoch, "step": step, "steps": 18, "loss": loss,
        "images_per_s": 5120.0,
    }  # fmt: skip


def without(event, *keys):
    return {key: value for key, value in event.items() if key not in keys}


class Watch:
    """A display, a clock that the test sets, and what has been written so far."""

    def __init__(self, width=80, terminal=True):
        self.time = 0.0
        self.file = io.StringIO()
        console = Console(
            file=self.file, width=width, force_terminal=terminal, get_time=lambda: self.time,
            color_system="standard" if terminal else None, _environ={},
        )  # fmt: skip
        self.display = Display(console)

    def show(self, *events):
        for event in events:
            self.display.show(event)
        return self

    def text(self):
        """Without colours; every redrawn line is a line of its own."""
        raw = self.file.getvalue().replace("\r", "\n")
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", raw)

    def lines(self):
        return [line.rstrip() for line in self.text().splitlines() if line.strip()]


def log(*events):
    watch = Watch(terminal=False).show(*events)
    assert "\x1b" not in watch.file.getvalue()
    return watch.lines()


def test_log_of_a_run():
    lines = log(
        {"kind": "phase", "text": "starting Ray"}, START, progress(0, 7), EPOCH,
        {**EPOCH, "epoch": 2, "step": 36}, {"kind": "note", "text": "worker 1 was lost"}, END,
    )  # fmt: skip
    assert lines[0] == "starting Ray"
    assert lines[1] == (
        "run digits-dps: method dps; model small_cnn, 94,000 parameters; data 1,200 images, "
        "10 classes; epochs 40, each 18 steps of 64 images; workers 2 × cpu on a (process 1, 2)"
    )
    assert lines[2] == (
        "epoch 1/40 loss 0.610 accuracy 95.5% top5 99.9% ece 18.0% nll 0.310 recovered 90.0% "
        "5,200 images/s"
    )
    assert lines[4] == "worker 1 was lost"
    assert "finished 40 epochs in 0:01:12" in lines[5] and "best 96.1% in epoch 31" in lines[5]
    assert lines[-1] == "next      dps report runs/digits-dps"


@pytest.mark.parametrize(
    "absent",
    [
        (),
        ("accuracy", "top5", "nll", "ece"),
        ("target_entropy", "label_agreement", "recovered"),
        ("accuracy", "recovered"),
    ],
)
def test_epoch_lines_of_a_log_parse(absent):
    *_, line = log(START, without(EPOCH, *absent))
    found = LOG_LINE.match(line)
    assert found, line
    assert found["epoch"] == "1" and found["loss"] == "0.610" and found["rate"] == "5,200"
    assert found["accuracy"] == (None if "accuracy" in absent else "95.5")


def test_none_counts_as_absent_and_nan_as_nan():
    *_, line = log(START, {**EPOCH, "accuracy": None, "train_loss": float("nan")})
    assert "loss nan" in line and "accuracy" not in line


def test_log_says_how_far_a_long_epoch_is_once_a_minute():
    watch = Watch(terminal=False).show(START)
    for step in range(1, 16):
        watch.time += 10
        watch.show(progress(3, step))
    said = [line for line in watch.lines() if line.startswith("step")]
    assert len(said) == 2
    # 36 epochs and 12 of 18 steps are left, at 10 s a step.
    assert said[0] == "step 6/18 of epoch 4/40 loss 0.530 5,120 images/s ETA 1:50:00"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_terminal_lines_fit_and_columns_align(width):
    watch = Watch(width).show({"kind": "phase", "text": "placing 2 workers"}, START)
    for epoch in range(4):
        watch.time += 1
        watch.show(progress(epoch, 9), {**EPOCH, "epoch": epoch + 1})
    watch.show({**without(EPOCH, "accuracy", "nll", "ece", "top5"), "epoch": 5}, END)
    watch.display.close()
    lines = watch.lines()
    assert max(len(line) for line in lines) <= width
    assert sum(line.startswith("epoch ") and "loss" in line for line in lines) == 1  # the header
    header = next(line for line in lines if line.startswith("epoch ") and "loss" in line)
    rows = [line for line in lines if re.match(r" *\d+/40 ", line)]
    assert len(rows) == 5
    assert all(row[: header.index("loss") + 4].endswith("0.610") for row in rows)
    assert "accuracy" in header and ("images/s" in header) == (width >= 60)
    assert ("top-5" in header) == (width >= 80) and ("lr" in header) == (width >= 120)
    assert rows[0].count("*") == 1 and rows[1].count("*") == 0
    if width >= 60:
        assert rows[-1].count("–") >= 3


def test_moving_line_keeps_the_eta_where_it_is_narrow():
    for width, whole in ((80, True), (60, False), (44, False)):
        watch = Watch(width).show(START, progress(0, 4))
        watch.time += 2
        watch.show(progress(0, 8))
        line = watch.lines()[-1]
        # 0.5 s a step, and 712 of 720 to go.
        assert "epoch 1/40" in line and " 8/18" in line and line.endswith("ETA 0:05:56")
        assert ("5,120 images/s" in line) == whole


def test_phase_counts_its_seconds_and_nothing_moves_in_a_log():
    watch = Watch().show({"kind": "phase", "text": "placing 2 workers"})
    watch.time += 75
    watch.display.tick()
    assert "placing 2 workers 0:01:15" in watch.lines()[-1]
    plain = Watch(terminal=False).show({"kind": "phase", "text": "placing 2 workers"})
    for _ in range(9):
        plain.display.tick()
    assert plain.lines() == ["placing 2 workers"]


@pytest.mark.parametrize("terminal", [True, False])
def test_resumed_start(terminal):
    for epoch, step, place in (
        (12, 0, "epoch 13 of 40"),
        (12, 12 * 18 + 7, "epoch 13 of 40, step 7 of 18"),
        (12, 7, "epoch 13 of 40, step 7 of 18"),
    ):
        watch = Watch(terminal=terminal).show({**START, "epoch": epoch, "step": step})
        assert re.search(rf"resumed +in {place} *$", watch.text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("hosts", "pids", "device", "said"),
    [
        (None, None, "cpu", "workers 2 × cpu"),
        (["a", "b"], [1, 2], "cuda:0", "workers 2 × cuda on a, b (process 1, 2)"),
        (["a", "a", "b"], [1, 2, 3], "cpu", "workers 3 × cpu on a ×2, b ×1 (process 1, 2, 3)"),
        (list("abcdef"), list(range(6)), "cuda", "workers 6 × cuda on a, b, c, d and 2 more"),
    ],
)
def test_where_the_workers_are(hosts, pids, device, said):
    event = {**START, "device": device, "workers": len(hosts or "ab"), "hosts": hosts, "pids": pids}
    event = {key: value for key, value in event.items() if value is not None}
    assert log(event)[0].endswith(f"; {said}")


@pytest.mark.parametrize("terminal", [True, False])
def test_restart_with_fewer_workers_is_a_line(terminal):
    again = {**START, "epoch": 1, "step": 18, "workers": 1, "hosts": ["a"], "pids": [3]}
    watch = Watch(terminal=terminal).show(START, EPOCH, again, {**EPOCH, "epoch": 2}, START)
    text = watch.text()
    assert "restarted with 1 worker instead of 2, in epoch 2 of 40" in text
    assert "restarted with 2 workers instead of 1, in epoch 1 of 40" in text
    assert text.count("small_cnn") == 1 and text.count("accuracy ") == (1 if terminal else 2)


@pytest.mark.parametrize("terminal", [True, False])
def test_text_from_outside_is_shown_as_it_is(terminal):
    name = "a [bold]b[/] [/nothing] :smile:"
    watch = Watch(120, terminal).show(
        {"kind": "phase", "text": name},
        {**START, "run": name, "method": name, "model": name, "hosts": [name, name]},
        {"kind": "note", "text": f"{name}\x1b[2J\x1b[31m red\x07"},
        {**END, "run": name, "folder": f"runs/{name}"},
    )
    assert watch.text().count(name) >= 8
    assert "\x1b[2J" not in watch.file.getvalue() and "\x07" not in watch.file.getvalue()
    assert f"dps report 'runs/{name}'" in watch.text()


def test_long_paths_and_log_lines_are_not_broken():
    folder = "/scratch/" + "deep/" * 40 + "run"
    for terminal in (True, False):
        watch = Watch(60, terminal).show(START, {**END, "folder": folder})
        assert f"dps report {folder}\n" in watch.text()
    note = "word " * 50 + "end"
    assert note in log(START, {"kind": "note", "text": note})


def test_end_shows_what_there_is():
    text = Watch().show(START, {**END, "recovered": 0.9}).text()
    for said in (
        "digits-dps finished 40 epochs in 0:01:12",
        "accuracy  95.5%, best 96.1% in epoch 31",
        "ECE       3.2%",
        "NLL       0.310",
        "righted   90.0% of the wrong labels",
        "speed     5,200 images/s",
        "folder    runs/digits-dps",
    ):
        assert said in text
    bare = without(END, "accuracy", "best_accuracy", "best_epoch", "ece", "nll", "top5")
    text = Watch().show(START, bare).text()
    assert "accuracy" not in text and "5,200 images/s" in text


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"kind": "phase", "text": "starting Ray"}],
        [START],
        [START, progress(3, 7)],
        [START, progress(3, 7), {**EPOCH, "epoch": 4}],
        [START, END],
    ],
)
def test_close_gives_the_cursor_back_and_says_where_it_stopped(events):
    watch = Watch().show(*events)
    watch.display.close()
    before = watch.file.getvalue()
    assert before.count("\x1b[?25l") == before.count("\x1b[?25h")
    watch.display.close()
    watch.display.tick()
    assert watch.file.getvalue() == before
    watch.show(progress(3, 8), {"kind": "note", "text": "the workers were stopped"})
    assert watch.file.getvalue().count("\x1b[?25l") == before.count("\x1b[?25l")
    assert watch.lines()[-1] == "the workers were stopped"
    if events and events[-1]["kind"] == "progress":
        assert re.match(r"  epoch 4/40 ━+.* 7/18", watch.lines()[-2])


def test_dumb_terminals_get_a_log_and_live_can_be_forced():
    file = io.StringIO()
    dumb = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    Display(dumb).show({"kind": "phase", "text": "loading"})
    assert file.getvalue() == "loading\n"
    file = io.StringIO()
    forced = Display(Console(file=file, force_terminal=True, _environ={}), live=False)
    forced.show({"kind": "phase", "text": "loading"})
    assert file.getvalue() == "loading\n"


def test_unknown_kinds_are_passed_over():
    assert log({"kind": "weather", "text": "rain"}) == []


def test_header_again_when_the_terminal_grows():
    watch = Watch(60).show(START, EPOCH)
    watch.display._console.width = 120
    watch.show({**EPOCH, "epoch": 2}, {**EPOCH, "epoch": 3})
    headers = [line for line in watch.lines() if "NLL" in line]
    assert len(headers) == 2 and "lr" in headers[1] and "lr" not in headers[0]


def test_pace_follows_a_change_and_counts_evaluation():
    pace = Pace()
    assert pace.epochs_per_s == 0
    now = 0.0
    for epoch in range(50):  # 8 s of steps, then 2 s of evaluation
        pace.reached(epoch, now)
        pace.reached(epoch + 0.5, now + 4)
        pace.reached(epoch + 0.999, now + 8)
        now += 10
    assert pace.epochs_per_s == pytest.approx(0.1, rel=0.1)
    for epoch in range(50, 70):
        pace.reached(epoch, now)
        now += 40
    assert pace.epochs_per_s == pytest.approx(1 / 40, rel=0.05)
