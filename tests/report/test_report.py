"""Run folders → table, curves, page: the files' numbers, whatever the files hold."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dps_dist.config import Config
from dps_dist.errors import InputError
from dps_dist.report import drawing, html, markdown, plots, tables, write_whole
from tests.report.folders import epoch, write_run
from tests.report.pages import Page, assert_self_contained

NASTY = '<script>alert("x")</script> [bold]b[/] $\\frac$ & _c'


@pytest.fixture
def one(tmp_path):
    return tables.read(write_run(tmp_path / "runs/a", [epoch(k) for k in range(1, 6)]))


@pytest.fixture
def two(tmp_path, one):
    rows = [epoch(k, accuracy=0.95, nll=0.5, recovered=0.8) for k in range(1, 4)]
    config = {"method": {"name": "baseline"}, "train": {"epochs": 9, "seed": 4}}
    return [
        one,
        tables.read(write_run(tmp_path / "runs/b", rows, config=config, run={"torch": "9"})),
    ]


def in_terminal(runs, width=200):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system="standard")
    console.print(tables.compare(runs, width))
    return file.getvalue()


def test_reads_a_run(one):
    assert one.name == "a" and len(one.epochs) == 5 and one.summary["best_epoch"] == 3
    assert one.field("method.name") == "dps" and one.field("method.nothing.there") is None
    assert one.last("accuracy") == 0.905 and one.best() == (0.9876, 3)
    assert tables.progress(one) is None


def test_reads_a_run_under_way(tmp_path):
    rows = [epoch(1), epoch(2, accuracy=0.99), epoch(3, accuracy=None, ece=None, nll=None)]
    folder = write_run(tmp_path / "a", rows, finished=False, config={"train": {"epochs": 40}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "accur')
    run = tables.read(folder)
    assert run.summary is None and len(run.epochs) == 3
    assert run.last("accuracy") == 0.99 and run.best() == (0.99, 2) and run.last("ece") == 0.1
    assert "a, 3 of 40 epochs" in in_terminal([run])
    assert "not finished: 3 of 40 epochs" in Page(html.page([run])).text


def test_an_epoch_that_was_run_again_counts_once(tmp_path):
    rows = [epoch(1), epoch(2, accuracy=0.1), epoch(2, accuracy=0.2), epoch(3)]
    run = tables.read(write_run(tmp_path / "a", rows))
    assert [row["epoch"] for row in run.epochs] == [1, 2, 3] and run.epochs[1]["accuracy"] == 0.2


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: None, ()),
        (lambda f: (f / "config.yaml").unlink(), ("is no run", "config.yaml", "dps train")),
        (lambda f: (f / "config.yaml").write_text("a: ["), ("config.yaml is damaged",)),
        (lambda f: (f / "config.yaml").write_text("- 1"), ("config.yaml is damaged",)),
        (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe\x00"), ("config.yaml is damaged",)),
        (lambda f: (f / "metrics.jsonl").unlink(), ("has not finished an epoch",)),
        (lambda f: (f / "metrics.jsonl").write_text(""), ("has not finished an epoch",)),
        (lambda f: (f / "metrics.jsonl").write_text('{"epo'), ("has not finished an epoch",)),
        (
            lambda f: (f / "metrics.jsonl").write_text('{"epoch": 1}\n{"ep\n{"epoch": 3}\n'),
            ("metrics.jsonl is damaged in line 2",),
        ),
        (lambda f: (f / "summary.json").write_text("[]"), ("summary.json is damaged",)),
        (lambda f: (f / "summary.json").write_text("{"), ("summary.json is damaged",)),
    ],
)
def test_refusals_are_sentences(tmp_path, spoil, said):
    folder = write_run(tmp_path / "a", [epoch(1)])
    spoil(folder)
    if not said:
        tables.read(folder)
        return
    with pytest.raises(InputError) as refused:
        tables.read(folder)
    for part in (str(folder), *said):
        assert part in str(refused.value)


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.write_text("x")])
def test_what_is_no_folder_is_refused(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(InputError, match=r"x is no folder: give a run's"):
        tables.read(tmp_path / "x")


def test_comparison_has_the_files_numbers_and_marks_the_best(two):
    titles, rows = tables.comparison(two)
    assert titles[:4] == ["run", "method", "accuracy", "best accuracy"]
    assert titles[4:] == ["ECE", "NLL", "wrong labels righted", "images/s"]
    assert [cell.text for cell in rows[0]] == [
        "a", "dps", "90.50%", "98.76% (epoch 3)", "4.00%", "0.350", "–", "5,005",
    ]  # fmt: skip
    assert [cell.text for cell in rows[1]][1:3] == ["baseline", "95.00%"]
    best = [[title for title, cell in zip(titles, row, strict=True) if cell.best] for row in rows]
    assert best == [["best accuracy", "ECE", "NLL", "images/s"], ["accuracy", "best accuracy"]]
    text = in_terminal(two)
    assert "\x1b[1m  95.00%\x1b[0m" in text and "\x1b[1m  90.50%" not in text


@pytest.mark.parametrize("width", [50, 60, 80, 100])
def test_narrow_terminals_get_fewer_columns_and_whole_numbers(tmp_path, two, width):
    rows = [epoch(k, recovered=0.8) for k in (1, 2)]
    long = tables.read(write_run(tmp_path / "a-rather-long-name-of-a-run", rows))
    text = in_terminal([*two, long], width)
    for number in ("90.50%", "4.00%", "80.00%"):
        assert number in text
    assert ("98.76% (epoch 3)" in text) == (width >= 80) and ("5,005" in text) == (width >= 100)


def test_one_run_has_no_best_and_no_column_for_what_nobody_has(one):
    titles, rows = tables.comparison([one])
    assert "wrong labels righted" not in titles and not any(cell.best for cell in rows[0])


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [tables.read(write_run(tmp_path / x / "run", [epoch(1)])) for x in "ab"]
    assert tables.labels(runs) == [f"run ({run.folder})" for run in runs]


@pytest.mark.parametrize("out", ["page.html", "table.md", "curves.png"])
def test_folders_whose_names_are_no_text_are_told_apart(tmp_path, out):
    parents = [tmp_path / "a", tmp_path / os.fsdecode(b"b\xff")]
    runs = [tables.read(write_run(parent / "run", [epoch(1)])) for parent in parents]
    assert tables.labels(runs)[1] == f"run ({tmp_path}/b\\udcff/run)"
    save = {".html": html.write, ".md": markdown.save, ".png": plots.save}[Path(out).suffix]
    assert save(runs, tmp_path / out).stat().st_size > 100


def test_page_of_one_run(one):
    out = html.write([one], html.default_out([one]))
    assert out == one.folder / "report/index.html"
    assert sorted(file.name for file in out.parent.iterdir()) == ["figures", "index.html"]
    text = out.read_text()
    assert_self_contained(text)
    page = Page(text)
    for said in ("90.50%", "98.76% (epoch 3)", "4.00%", "0.350", "5,005", "gamma: 0.95"):
        assert said in page.text
    for said in ("dps train digits --name 'a'", "3f9c2ab", "2.15.0"):
        assert said in page.text.replace(html.NO_BREAK, " ")
    assert sum(tag == "figure" for tag, _ in page.tags) == 4
    assert "what differs" not in page.text and "http" not in text


def test_page_of_two_runs(two, tmp_path, monkeypatch):
    assert html.default_out(two) == tmp_path / "runs/report.html"
    monkeypatch.chdir(tmp_path)
    out = html.write(two, html.default_out(two))
    assert str(out) == "runs/report.html"
    assert_self_contained(out.read_text())
    assert "<b>95.00%</b>" in out.read_text()
    assert out.read_text() == html.page(two)
    found = html.differences(two)
    assert found["train.seed"] == ["0", "4"] and found["method.name"] == ["dps", "baseline"]
    assert found["method.gamma"] == ["0.95", "–"] and found["run.torch"] == ["2.15.0", "9"]
    assert "data.batch_size" not in found and "run.name" not in found
    text = Page(out.read_text()).text
    assert "method.exchange" in text and "2 runs compared" in text
    assert text.count("full configuration") == 2


def test_differences_of_many_runs_are_rather_long_than_wide(tmp_path):
    runs = [
        tables.read(write_run(tmp_path / f"run{k}", [epoch(1)], config={"train": {"seed": k}}))
        for k in range(3)
    ]
    text = html.page(runs)
    assert '<th scope="col">run</th><th scope="col">train.<wbr>seed</th>' in text
    assert '<th scope="row">run2</th><td>2</td>' in text


def test_same_configuration_is_said(tmp_path):
    runs = [tables.read(write_run(tmp_path / x, [epoch(1)])) for x in "ab"]
    assert html.differences(runs) == {}
    assert "The runs have the same configuration." in html.page(runs)


def test_names_are_shown_as_they_are(tmp_path):
    rows = [epoch(k) for k in (1, 2, 3)]
    run = {"command": f"dps train {NASTY}", "revision": NASTY}
    config = {"data": {"path": NASTY}}
    runs = [
        tables.read(write_run(tmp_path / "a", rows, NASTY, config=config, run=run)),
        tables.read(write_run(tmp_path / "b", rows, "_hidden")),
    ]
    text = html.page(runs)
    assert_self_contained(text)
    assert Page(text).text.replace(html.NO_BREAK, " ").count(NASTY) >= 7
    assert f"<title>{NASTY}" not in text and "<script" not in text.lower()
    assert_self_contained(html.page(runs[:1]))
    assert NASTY in in_terminal(runs)
    figure = plots.save(runs, tmp_path / "figure.svg")
    assert figure.stat().st_size > 10_000


def test_nan_infinity_and_gaps(tmp_path):
    nan, inf = float("nan"), float("inf")
    rows = [epoch(1, nll=inf), epoch(2, accuracy=nan, train_loss=nan), epoch(3, accuracy=None)]
    rows += [epoch(4, accuracy=0.7, ece=None), epoch(5, accuracy=nan, nll=nan)]
    broken = tables.read(write_run(tmp_path / "a", rows, finished=False))
    fine = tables.read(write_run(tmp_path / "b", [epoch(1), epoch(2)]))
    assert broken.best() == (0.901, 1)
    _, (first, second) = tables.comparison([broken, fine])
    assert first[2].text == "nan%" and not first[2].best and not second[2].best
    assert first[5].text == "nan" and first[4].text == "4.00%"
    assert_self_contained(html.page([broken, fine]))


def test_bare_metrics_are_enough(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.yaml").write_text("data: {source: digits}\n")
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "train_loss": 2.0}\n')
    run = tables.read(folder)
    assert run.name == "a" and run.best() is None and tables.progress(run) == "1 epochs"
    page = Page(html.page([run]))
    assert sum(tag == "figure" for tag, _ in page.tags) == 1
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "accuracy": "high", "ece": true}\n')
    page = Page(html.page([tables.read(folder)]))
    assert sum(tag == "figure" for tag, _ in page.tags) == 0
    plots.save([tables.read(folder)], tmp_path / "empty.png")


def test_many_runs_have_looks_of_their_own():
    looks = {(drawing.colour(k), drawing.dash(k)) for k in range(24)}
    assert len(looks) == 24


def test_curves_of_the_page_take_its_colours(two):
    (panel,) = plots.drawings(two, plots.PANELS[:1])
    svg = drawing.Album().figure(panel)
    assert "var(--run0)" in svg and "var(--run1)" in svg and "var(--soft)" in svg
    assert not any(colour in svg for colour in (drawing.INK, *drawing.COLOURS))
    assert svg == drawing.Album().figure(panel)


def test_figure_without_background(two, tmp_path):
    out = plots.save(two, tmp_path / "new/figure.png")
    with Image.open(out) as picture:
        pixels = np.asarray(picture.convert("RGBA"))
    assert pixels[0, 0, 3] == 0 and pixels.shape[1] == 1600
    for colour in drawing.COLOURS[:2]:
        rgb = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
        assert (pixels[..., :3] == rgb).all(-1).any()


def test_a_full_disk_is_told_by_the_name_of_the_page(small_disk):
    write_whole(small_disk / "page.html", b"before")
    with pytest.raises(OSError) as told:
        write_whole(small_disk / "page.html", bytes(3 << 20))
    assert told.value.errno == errno.ENOSPC and told.value.filename == str(small_disk / "page.html")
    assert [file.read_bytes() for file in small_disk.iterdir()] == [b"before"]


def test_a_read_only_disk_is_told_by_the_name_of_the_page(small_disk):
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True)
    with pytest.raises(OSError) as told:
        write_whole(small_disk / "page.html", b"new")
    assert told.value.errno == errno.EROFS and told.value.filename == str(small_disk / "page.html")


def test_other_suffixes_are_refused(one, tmp_path):
    for write, name in ((html.write, "page.pdf"), (plots.save, "figure.pdf")):
        with pytest.raises(InputError, match=f"--out is .*{name}"):
            write([one], tmp_path / name)


def test_a_page_that_cannot_be_written_leaves_the_old_one(one, tmp_path, monkeypatch):
    out = html.write([one], tmp_path / "page.html")
    before = out.read_text()
    full = OSError(errno.ENOSPC, "full")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="full"):
        html.write([one], out)
    assert out.read_text() == before
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["page.html"]


def test_imports_no_training_code():
    code = (
        "import sys; from dps_dist.report import html, plots, tables;"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'ray', 'ffcv', 'numba'}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_default_configuration_has_what_the_report_names():
    config = Config().model_dump(mode="json")
    run = tables.Run(None, "x", config, [epoch(1)], None)
    for path in ("method.name", "model.name", "data.source", "train.epochs", "evaluate.split"):
        assert run.field(path) is not None
