"""Runs that differ in nothing but seeds: the report has their mean ± std."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from dps_dist.report import html, markdown, plots, tables
from tests.report.folders import arrays, epoch, evaluate, evaluation, rows, write_run
from tests.report.pages import Page
from tests.report.test_report import in_terminal

pytestmark = pytest.mark.usefixtures("undrawn")
ACCURACY = {"dps": (0.95, 0.96, 0.98), "ls": (0.9, 0.91, 0.92)}


def seeds_of(folder, method, *, evaluated=False, settings=None, **changes):
    found = []
    for seed, accuracy in enumerate(ACCURACY[method]):
        config = {"method": {"name": method, **(settings or {})}, "train": {"seed": seed}}
        last = epoch(2, **({"accuracy": accuracy} | changes))
        run = write_run(folder / f"{method}-s{seed}", [epoch(1), last], config=config)
        if evaluated:
            evaluate(run, evaluation(seed=seed), arrays(seed=seed))
        found.append(tables.read(run))
    return found


def test_the_table_in_markdown_has_the_same_cells(tmp_path):
    runs = [*seeds_of(tmp_path, "dps"), *seeds_of(tmp_path, "ls")]
    _, found = tables.comparison(runs)
    titles, rule, *lines = markdown.save(runs, tmp_path / "t.md").read_text().splitlines()
    assert titles == "| run | method | accuracy | best accuracy | ECE | NLL |"
    assert rule == "|---" * 6 + "|" and lines[-2:] == ["", tables.ABOUT_MEANS]
    split = [line.strip("| ").split(" | ") for line in lines[:-2]]
    for row, cells in zip(split, found, strict=True):
        assert row == [f"**{cell.text}**" if cell.best else cell.text for cell in cells[:-1]]
    assert "**96.33% ± 1.53%**" in split[-2]


def test_names_do_not_break_the_markdown_table(tmp_path):
    run = tables.read(write_run(tmp_path / "a", [epoch(1)], name="a|b_c*"))
    *_, line = markdown.save([run], tmp_path / "t.md").read_text().splitlines()
    assert line.startswith("| a\\|b\\_c\\* | dps |")


def test_means_of_the_same_name_are_told_apart_by_their_folders(tmp_path):
    gamma_one = {"gamma": 1.0}
    runs = [*seeds_of(tmp_path / "a", "dps"), *seeds_of(tmp_path / "b", "dps", settings=gamma_one)]
    names = [row[0].text for row in tables.comparison(runs)[1][-2:]]
    assert names == [f"dps-s…, mean ± std of 3 seeds ({tmp_path / folder})" for folder in "ab"]


def test_means_of_the_same_name_in_one_folder_are_told_apart_by_their_first_runs(tmp_path):
    configs = [(gamma, seed) for gamma in (0.9, 0.95) for seed in (0, 1)]
    runs = []
    for k, (gamma, seed) in enumerate(configs):
        config = {"method": {"name": "dps", "gamma": gamma}, "train": {"seed": seed}}
        runs.append(tables.read(write_run(tmp_path / f"a{k}", [epoch(1)], config=config)))
    bundles = plots.bundled(runs)
    assert list(bundles) == [f"a…: 2 seeds ({tmp_path / name})" for name in ("a0", "a2")]
    assert list(bundles.values()) == [runs[:2], runs[2:]]
    names = [row[0].text for row in tables.comparison(runs)[1][-2:]]
    assert len(set(names)) == 2


def test_there_is_a_row_for_the_seeds_of_each_method(tmp_path):
    runs = [*seeds_of(tmp_path, "dps"), *seeds_of(tmp_path, "ls")]
    titles, found = tables.comparison(runs)
    assert len(found) == 8
    mean, std = np.mean(ACCURACY["dps"]), np.std(ACCURACY["dps"], ddof=1)
    shown = f"{100 * mean:.2f}% ± {100 * std:.2f}%"
    assert shown == "96.33% ± 1.53%"
    first = dict(zip(titles, found[6], strict=True))
    assert first["run"].text == "dps-s…, mean ± std of 3 seeds" and first["method"].text == "dps"
    assert first["accuracy"] == (shown, True, "") and first["NLL"].text == "0.380 ± 0.000"
    assert found[7][0].text == "ls-s…, mean ± std of 3 seeds" and not found[7][2].best
    assert [row[2].best for row in found[:6]] == [False, False, True, False, False, False]
    assert shown in in_terminal(runs, 80) and shown in html.page(runs)
    assert "differ in nothing but seeds" in Page(html.page(runs)).text


def test_there_is_none_of_other_runs(tmp_path):
    dps, ls = seeds_of(tmp_path, "dps"), seeds_of(tmp_path, "ls")
    assert len(tables.comparison([dps[0], ls[0], ls[0]])[1]) == 3  # the same seed twice
    config = {"method": {"name": "dps"}, "train": {"seed": 9, "epochs": 2}}
    under_way = tables.read(write_run(tmp_path / "u", rows(1), finished=False, config=config))
    assert len(tables.comparison([dps[0], under_way])[1]) == 2
    assert "mean ± std" not in html.page([dps[0], under_way])


def test_there_is_no_mean_where_a_seed_diverged(tmp_path):
    runs = seeds_of(tmp_path, "dps")
    runs[1].summary["nll"] = math.nan
    titles, found = tables.comparison(runs)
    assert found[3][titles.index("NLL")].text == "–"
    assert found[3][titles.index("accuracy")].text == "96.33% ± 1.53%"


def test_calibration_and_other_data_have_them_too(tmp_path):
    runs = seeds_of(tmp_path, "dps", evaluated=True)
    text = html.page(runs)
    accuracy = [0.9732 - seed / 100 for seed in range(3)]
    shown = f"{100 * np.mean(accuracy):.2f}% ± {100 * np.std(accuracy, ddof=1):.2f}%"
    assert shown == "96.32% ± 1.00%" and text.count(shown) == 1
    nll_ts = [(0.28 + seed / 100) * 0.61 for seed in range(3)]
    assert f"{np.mean(nll_ts):.3f} ± {np.std(nll_ts, ddof=1):.3f}" in text
    assert "dps-s…, mean ± std of 3 seeds, after TS" in text
    assert "94.14% ± 0.00%" in text  # AUROC
    assert "6.12% ± 0.00%" in text  # mFP
    wide = [run.evaluation.facts["on"]["cifar10-c"]["accuracy"] for run in runs]
    assert f"{100 * np.mean(wide):.2f}% ± {100 * np.std(wide, ddof=1):.2f}%" in text
    runs[0].evaluation.facts["split"] = "hold_out"
    del runs[0].evaluation.facts["on"]["svhn"]
    text = html.page(runs)
    assert shown not in text and "94.14% ±" not in text and "6.12% ± 0.00%" in text


def test_ta_kl_says_from_how_many_checkpoints(tmp_path):
    run = tables.read(evaluate(write_run(tmp_path / "a", rows())))
    assert "TA-KL is of 5 earlier checkpoints that the run kept: train.checkpoint.keep_last" in (
        Page(html.page([run])).text
    )
    run.evaluation.facts["ta_kl"] = {"epochs": [4], "value": [0.1]}
    assert "TA-KL is of 1 earlier checkpoint that the run kept" in Page(html.page([run])).text


def test_a_picture_has_a_line_and_a_band_for_the_seeds_of_each_method(tmp_path):
    te = {"method": {"name": "te"}}
    alone = tables.read(write_run(tmp_path / "alone", [epoch(1), epoch(2)], config=te))
    runs = [*seeds_of(tmp_path, "dps"), alone, *seeds_of(tmp_path, "ls")]
    bundles = plots.bundled(runs)
    assert list(bundles) == ["dps-s…: 3 seeds", "alone", "ls-s…: 3 seeds"]
    assert [len(members) for members in bundles.values()] == [3, 1, 3]
    axes = Figure().add_subplot()
    plots._draw_bundles(axes, bundles, plots.PANELS[0])
    ends = [line.get_ydata()[-1] for line in axes.lines]
    assert ends == pytest.approx([np.mean(ACCURACY["dps"]), 0.902, np.mean(ACCURACY["ls"])])
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert [(band.min(), band.max()) for band in bands] == [
        (0.901, max(ACCURACY["dps"])),
        (min(ACCURACY["ls"]), max(ACCURACY["ls"])),
    ]


def test_a_line_of_seeds_has_a_gap_where_one_of_them_has_no_figure(tmp_path):
    runs = seeds_of(tmp_path, "dps")
    runs[1].epochs[0]["accuracy"] = None
    del runs[2].epochs[0]
    axes = Figure().add_subplot()
    plots._draw_bundles(axes, plots.bundled(runs), plots.PANELS[0])
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [1, 2]
    assert np.isnan(line.get_ydata()[0])
    assert line.get_ydata()[1] == pytest.approx(np.mean(ACCURACY["dps"]))
    assert len(axes.collections) == 1


def test_what_all_names_of_a_picture_begin_with_is_left_out(tmp_path):
    rows = [epoch(1)]
    names = ["cifar10-wrn10_2-te", "cifar10-wrn10_2-dps"]
    runs = [tables.read(write_run(tmp_path / name, rows, name)) for name in names]
    assert list(plots.bundled(runs)) == ["te", "dps"]
    assert list(plots.bundled(runs[:1])) == names[:1]
