"""What an evaluation left → sections of the page: there when measured, with the files' numbers."""

import json

import numpy as np
import pytest
from PIL import Image

from dps_dist.report import html, tables
from dps_dist.report.figures import heatmap
from tests.report.folders import arrays, epoch, evaluate, evaluation, rows, write_run
from tests.report.pages import Page, assert_self_contained, cells, figures, titles

pytestmark = pytest.mark.usefixtures("undrawn")


def test_every_section_of_an_evaluated_run(evaluated, really):
    text = html.page([evaluated])
    assert_self_contained(text)
    assert titles(text) == [
        "Results", "Calibration", "Curves", "Targets", "Dark knowledge", "Penultimate layer",
        "Other data", "Most changed samples", "How it was run",
    ]  # fmt: skip
    assert len(figures(text)) == 2 + 4 + 3 + 3 + 2 + 2
    assert "dps evaluate" not in text
    assert "penultimate layer of the classes 0, 2, 1" in text  # those alike first


def test_a_run_that_was_not_evaluated_says_what_to_run(tmp_path):
    folder = write_run(tmp_path / "runs/a b", [epoch(1), epoch(2)])
    text = html.page([tables.read(folder)])
    assert titles(text) == ["Results", "Curves", "Most changed samples", "How it was run"]
    assert f"dps evaluate '{folder}'" in Page(text).text


def test_only_some_evaluated(two, tmp_path):
    third = tables.read(write_run(tmp_path / "runs/c", rows()))
    text = html.page([*two, third])
    assert f"<code>dps evaluate {third.folder}</code>" in text
    assert "Some are not evaluated yet" in text and "Calibration" in titles(text)


@pytest.mark.parametrize(("position", "when"), [(0, "after epoch 3"), (64, "in epoch 4")])
def test_an_evaluation_of_an_earlier_epoch_is_said(tmp_path, position, when):
    facts = evaluation(epoch=3, position=position)
    folder = evaluate(write_run(tmp_path / "a", rows(5)), facts)
    said = Page(html.page([tables.read(folder)])).text
    assert f"was evaluated {when} and went on to 5" in said


@pytest.mark.parametrize(
    ("facts", "held", "gone"),
    [
        (("reliability", "reliability_ts"), (), ["reliability"]),
        (("delta",), (), ["Σ|f(x) − μ|"]),
        (("ta_kl",), (), ["TA-KL"]),
        (("on",), (), ["severity"]),
        ((), ("mu",), ["mean prediction"]),
        ((), ("similar", "dissimilar"), ["penultimate"]),
        (("delta", "ta_kl"), ("mu",), ["mean prediction", "TA-KL", "Σ|f(x) − μ|"]),
    ],
)
def test_what_was_not_measured_is_not_shown(tmp_path, facts, held, gone):
    whole = html.page([tables.read(evaluate(write_run(tmp_path / "whole", rows())))])
    left = {key: value for key, value in evaluation().items() if key not in facts}
    kept = {key: value for key, value in arrays().items() if key not in held}
    folder = evaluate(write_run(tmp_path / "part", rows()), left, kept)
    text = html.page([tables.read(folder)])
    assert_self_contained(text)
    for word in gone:
        assert any(word in name for name in figures(whole)), word
        assert not any(word in name for name in figures(text)), word
    if len(gone) == 3:
        assert "Dark knowledge" not in titles(text)
    if "on" in facts:
        assert "Other data" not in titles(text)


def test_calibration_has_the_files_numbers(two):
    text = html.page(two)
    shown = cells(text, "Calibration")
    assert shown[0] == ["", "a", "a, after TS (T = 1.314)", "b"]
    by_name = {row[0]: row[1:] for row in shown[1:]}
    assert list(by_name) == [
        "accuracy", "top-5 accuracy", "NLL", "Brier score", "ECE", "ECE, 10 bins", "SCE", "ACE",
    ]  # fmt: skip
    assert by_name["accuracy"] == ["97.32%", "–", "96.32%"]
    assert by_name["NLL"] == ["0.280", "0.171", "0.290"]
    assert by_name["SCE"] == ["4.12%", "2.51%", "4.12%"]
    assert "<b>97.32%</b>" in text and "<b>0.171</b>" not in text  # no other to be better than
    bins = evaluation()["reliability"]
    for share in bins["accuracy"]:
        assert share is None or f'<td class="number">{100 * share:.2f}%</td>' in text


def test_two_precisions_are_said_where_both_stand(tmp_path, evaluated):
    """The same weights under train.amp and in float32 have two accuracies."""
    mixed = write_run(tmp_path / "runs/m", rows(), config={"train": {"amp": "bfloat16"}})
    said = "dps evaluate computed in float32, and training, of which the figures under Results"
    text = Page(html.page([evaluated, tables.read(evaluate(mixed))])).text
    assert text.count(f"{said} are, in bfloat16 (train.amp)") == 1
    assert said not in Page(html.page([evaluated])).text


def test_what_too_many_classes_leave_out_is_said(tmp_path):
    facts = evaluation(left_out="the mean predictions μ, … are left out: they take")
    folder = evaluate(write_run(tmp_path / "a", rows()), facts, {})
    assert "The mean predictions μ, … are left out: they take." in (
        Page(html.page([tables.read(folder)])).text
    )


def test_many_runs_are_rather_long_than_wide(tmp_path):
    runs = [tables.read(evaluate(write_run(tmp_path / f"r{k}", rows()))) for k in range(4)]
    shown = cells(html.page(runs), "Calibration")
    assert shown[0][:3] == ["run", "accuracy", "top-5 accuracy"] and len(shown) == 9


def test_other_data_has_the_files_numbers(evaluated):
    text = html.page([evaluated])
    page = Page(text).text
    on = evaluation()["on"]
    for five in on["cifar10-c"]["by_corruption"].values():
        assert f"{100 * np.mean(five):.2f}%" in page
        assert all(f"{100 * share:.2f}%" in page for share in five)
    for said in ("6.12%", "3.45%", "7.89%", "94.14%", "26,032 samples", "81.25%", "88 samples"):
        assert said in page


def test_greatest_confusions_are_named(tmp_path):
    mu = np.full((3, 3), 0.01, np.float32)
    mu[2, 0] = 0.375
    folder = evaluate(
        write_run(tmp_path / "a", rows()), evaluation(3, names=["ant", "bee", "cat"]), {"mu": mu}
    )
    text = html.page([tables.read(folder)])
    assert '<th scope="row">cat</th><td>ant</td><td class="number">37.50%</td>' in text


def test_compared_maps_have_the_same_colours():
    nan = np.array([[np.nan, 0.5], [0.5, 1.0]])
    one, other = np.full((2, 2), 0.5), np.full((2, 2), 0.0034)
    assert heatmap.least([one]) == heatmap.least([nan]) == 0.1
    assert heatmap.least([one, other]) == pytest.approx(0.001)
    assert heatmap.least([np.zeros((2, 2))]) == pytest.approx(1e-6)


def test_coarse_keeps_the_greatest():
    mu = np.random.default_rng(0).random((7, 7))
    coarse = heatmap.coarse(mu, 3)
    assert coarse.shape == (3, 3)
    for row in range(3):
        for column in range(3):
            block = mu[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            assert coarse[row, column] == block.max()


def test_figures_are_written_beside_the_page(two, tmp_path, really):
    out = html.write(two, tmp_path / "r/index.html")
    folder = tmp_path / "r/figures"
    names = {file.stem for file in folder.iterdir()}
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    }
    assert len(names) == len(figures(out.read_text()))
    assert {"accuracy", "recovered", "delta", "ta_kl", "mu-0-a", "similar-1-b"} <= names
    assert {"reliability-0-a", "reliability-scaled-0-a", "reliability-1-b"} <= names
    for file in folder.glob("*.png"):
        with Image.open(file) as picture:
            assert np.asarray(picture.convert("RGBA"))[0, 0, 3] == 0
    for file in folder.glob("*.svg"):
        assert file.read_text().startswith("<?xml") and "var(" not in file.read_text()
    assert json.dumps(sorted(names)).isascii()


def test_the_page_is_the_same_every_time(two, really):
    assert html.page(two) == html.page(two)
