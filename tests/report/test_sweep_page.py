"""A sweep's folder → Parquet and a page: cells, the Pareto front, what is waiting or failed."""

import json
import math
from statistics import mean, stdev

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dps_dist.errors import InputError
from dps_dist.report import sweep as sweeps
from dps_dist.report import sweep_page
from dps_dist.report.sweep import Cell
from dps_dist.report.sweep_page import publish, ranked
from dps_dist.train.files import read_metrics
from dps_dist.train.storage import Storage
from tests.report import browser as browsers
from tests.report.pages import assert_self_contained

GAMMA, C = [0.9, 0.96, 1.0], [50.0, 1000.0]


def write_sweep(folder, space, figures, metric="accuracy", **states):
    """figures: (point, seed) → accuracy, ece, nll; states: other than finished, by trial."""
    trials = {}
    for k, (point, seed, (accuracy, ece, nll)) in enumerate(figures):
        name = f"trial{k}"
        status, reason = states.get(name, ("finished", ""))
        trials[name] = {
            "point": {**point, "train.seed": seed},
            "status": status,
            "reason": reason,
        }
        if status == "waiting":
            continue
        run = folder / "runs" / name
        run.mkdir(parents=True)
        rows = [
            {"epoch": 1, "accuracy": 0.1, "ece": 0.5, "nll": 3.0, "seconds": 2.0},
            {"epoch": 2, "seconds": 2.0},  # not evaluated
            {"epoch": 3, "accuracy": accuracy, "ece": ece, "nll": nll, "seconds": 2.0},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir(exist_ok=True)
    (folder / "trials.json").write_text(json.dumps(trials))
    sweep = {
        "recipe": "digits-sym40",
        "space": space,
        "settings": ["train.epochs=3"],
        "seeds": 2,
        "hold_out": 120,
        "search": "grid",
        "scheduler": "none",
        "metric": metric,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    return Storage(folder)


@pytest.fixture
def grid(tmp_path):
    space = {"method.gamma": GAMMA, "method.c": C}
    figures = [
        ({"method.gamma": g, "method.c": c}, seed, (0.5 + g / 4 + seed / 100, g / 10, 1 - g / 2))
        for seed in (0, 1)
        for g in GAMMA
        for c in C
    ]
    return write_sweep(
        tmp_path / "s",
        space,
        figures,
        trial0=("failed", "the loss is not finite at step 3"),
        trial1=("stopped", ""),
        trial11=("waiting", ""),
    )


def test_cells_are_means_over_the_seeds_of_finished_trials(grid):
    found = {cell.values: cell for cell in sweeps.cells(sweeps.read(grid))}
    assert {values: cell.seeds for values, cell in found.items()} == {
        (0.9, 50.0): 1,
        (0.9, 1000.0): 1,
        (0.96, 50.0): 2,
        (0.96, 1000.0): 2,
        (1.0, 50.0): 2,
        (1.0, 1000.0): 1,
    }
    accuracies = [0.5 + 0.96 / 4, 0.5 + 0.96 / 4 + 0.01]
    assert found[0.96, 50.0].mean["accuracy"] == pytest.approx(mean(accuracies))
    assert found[0.96, 50.0].deviation["accuracy"] == pytest.approx(stdev(accuracies))
    assert math.isnan(found[0.9, 50.0].deviation["accuracy"])


def test_a_damaged_line_of_a_trial_is_told_in_a_sentence(grid):
    """As `dps report` tells it; the last line may be one that is being written."""
    file = grid.local / "runs/trial3/metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"epoch": 4, "accur')
    assert sweeps.read(grid).rows[3]["epoch"] == 3
    file.write_text(whole.replace('{"epoch": 2', '{"ep'))
    said = r"trial3/metrics\.jsonl is damaged in line 2: remove that line$"
    for read in (sweeps.read, publish, lambda folder: read_metrics(folder / "runs/trial3")):
        with pytest.raises(InputError, match=said):
            read(grid)


def test_which_way_is_better_is_said_once(grid, monkeypatch):
    """In config/sweep.py: best, order and heatmaps follow."""
    for module in (sweeps, sweep_page):
        monkeypatch.setattr(module, "BETTER", {"accuracy": "min", "ece": "max", "nll": "max"})
    results = sweeps.read(grid)
    found = sweeps.cells(results)
    assert ranked(results)[0][0] == sweep_page._name(results, sweeps.best(found, "accuracy"))
    drawn = {one.title: one.about for one in sweep_page._heatmaps(results.fields, found)}
    assert drawn["accuracy %"].startswith("lower is better")
    assert drawn["ECE %"].startswith("higher is better")


def test_the_parquet_has_a_row_for_each_trial(grid):
    publish(grid)
    rows = pq.read_table(grid.local / "results.parquet").to_pylist()
    assert len(rows) == 12
    assert rows[0]["status"] == "failed" and rows[0]["reason"] == "the loss is not finite at step 3"
    assert rows[2]["method.gamma"] == 0.96 and rows[2]["train.seed"] == 0
    assert rows[2]["accuracy"] == pytest.approx(0.74) and rows[2]["epoch"] == 3
    assert rows[2]["seconds"] == 6.0 and rows[2]["run"] == "runs/trial2"
    assert rows[11]["accuracy"] is None and rows[11]["status"] == "waiting"


def test_fields_of_several_kinds_are_kept(tmp_path):
    space = {"optim.clip_norm": [None, 1, 2.5], "optim.betas": [[0.9, 0.99]], "model.name": ["a"]}
    points = [
        {"optim.clip_norm": v, "optim.betas": [0.9, 0.99], "model.name": "a"}
        for v in (None, 1, 2.5)
    ]
    figures = [(point, 0, (0.5, 0.1, 1.0)) for point in points]
    folder = write_sweep(tmp_path / "s", space, figures)
    publish(folder)
    rows = pq.read_table(tmp_path / "s" / "results.parquet").to_pylist()
    assert [row["optim.clip_norm"] for row in rows] == [None, 1.0, 2.5]
    assert json.loads(rows[0]["optim.betas"]) == [0.9, 0.99]


def test_a_page_says_what_failed_and_reloads_until_all_is_done(grid):
    publish(grid)
    page = (grid.local / "index.html").read_text()
    assert_self_contained(page)
    assert '<meta http-equiv="refresh"' in page and not (grid.local / "figures").exists()
    assert "12 trials: 9 finished, 1 waiting, 1 stopped, 1 failed" in page
    assert "the loss is not finite at step 3" in page and "by the scheduler, after epoch 3" in page
    trials = json.loads((grid.local / "trials.json").read_text())
    trials["trial11"]["status"] = "failed"
    (grid.local / "trials.json").write_text(json.dumps(trials))
    publish(grid)
    assert '<meta http-equiv="refresh"' not in (grid.local / "index.html").read_text()
    drawn = {path.name for path in (grid.local / "figures").iterdir()}
    assert {"accuracy-grid.png", "ece-grid.svg", "nll-grid.png", "pareto.png"} <= drawn


def test_a_page_of_a_sweep_that_was_stopped_does_not_reload(grid):
    publish(grid, ended=True)
    page = (grid.local / "index.html").read_text()
    assert '<meta http-equiv="refresh"' not in page and "1 waiting" in page
    assert (grid.local / "figures").is_dir()


def test_a_page_before_the_first_trial_ends(tmp_path):
    point = {"method.gamma": 0.9}
    folder = write_sweep(
        tmp_path / "s", {"method.gamma": [0.9]}, [(point, 0, (0, 0, 0))], trial0=("waiting", "")
    )
    publish(folder)
    assert "No trial is finished yet" in (tmp_path / "s" / "index.html").read_text()


def test_figures_that_are_not_finite_do_not_break_the_page(tmp_path):
    figures = [
        (
            {"method.gamma": g, "method.c": c},
            seed,
            (None, None, None) if g == 1 and seed else (g, g / 9, g),
        )
        for seed in (0, 1)
        for g in GAMMA
        for c in C
    ]
    publish(write_sweep(tmp_path / "s", {"method.gamma": GAMMA, "method.c": C}, figures))
    assert "γ=0.96, c=50" in (tmp_path / "s" / "index.html").read_text()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_is_what_no_cell_beats(places):
    found = [
        Cell((k,), 1, {"accuracy": a / 9, "ece": e / 9, "nll": 0.0}, {})
        for k, (a, e) in enumerate(places)
    ]

    def beats(one: Cell, other: Cell) -> bool:
        better = (
            one.mean["accuracy"] - other.mean["accuracy"],
            other.mean["ece"] - one.mean["ece"],
        )
        return min(better) >= 0 and max(better) > 0

    naive = {
        (cell.mean["accuracy"], cell.mean["ece"])
        for cell in found
        if not any(beats(other, cell) for other in found)
    }
    front = sweeps.pareto(found)
    assert {(cell.mean["accuracy"], cell.mean["ece"]) for cell in front} == naive
    assert len(front) == len(naive)


@pytest.mark.skipif(browsers.found() is None, reason="no Chromium: `make test` installs it")
def test_every_figure_is_seen_in_a_browser(grid, tmp_path):
    publish(grid)
    browser = browsers.Browser(tmp_path / "profile")
    try:
        for width in (360, 1600):
            browser.open(grid.local / "index.html", width, dark=width == 360)
            assert browser.said == []
            boxes = browser.ask(
                "[...document.querySelectorAll('figure svg')].map(e => {"
                "const b = e.getBoundingClientRect(); return [b.left, b.right, b.height]})"
            )
            assert len(boxes) == 4
            assert all(
                left >= 0 and right <= width and height > 80 for left, right, height in boxes
            )
            numbers = browser.ask(
                "[...document.querySelectorAll('figure svg text')].map(e => e.textContent)"
            )
            assert "74.5" in numbers  # the cell γ=.96, c=50
    finally:
        browser.close()
