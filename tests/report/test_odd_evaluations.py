"""Evaluations with any names and numbers in them, or none: a page all the same."""

import math
import re

import numpy as np
import pytest

from dps_dist.errors import InputError
from dps_dist.report import html, tables
from dps_dist.report.values import array
from tests.report.folders import NASTY, arrays, evaluate, evaluation, rows, write_run
from tests.report.pages import Page, assert_self_contained, figures, titles

pytestmark = pytest.mark.usefixtures("undrawn")


def test_names_are_escaped_everywhere(tmp_path, really):
    names = [NASTY, "b", NASTY * 3]
    facts = evaluation(3, names=names, split=NASTY)
    facts["on"] = {NASTY + str(k): held for k, held in enumerate(facts["on"].values())}
    facts["on"][NASTY + "0"]["by_corruption"] = {NASTY: [0.1, None, 0.3, 0.4, 0.5]}
    folder = evaluate(write_run(tmp_path / "a", rows(), NASTY), facts, arrays(3))
    out = html.write([tables.read(folder)], tmp_path / "page.html")
    text = out.read_text()
    assert_self_contained(text)
    assert "<img" not in text
    assert Page(text).text.count(NASTY) > 8
    files = [file.name for file in (tmp_path / "page.figures").iterdir()]
    assert files and all(re.fullmatch(r"[\w.-]+\.(png|svg)", name) for name in files)


def test_names_that_are_alike_in_ascii(tmp_path, really):
    facts = evaluation()
    facts["on"] = dict.fromkeys(("ä", "ö", "_", "a", "a_"), facts["on"]["cifar10-c"])
    run = tables.read(evaluate(write_run(tmp_path / "a", rows()), facts))
    assert sum("severity" in name for name in figures(html.page([run]))) == 10


def test_nan_null_and_nonsense(tmp_path, really):
    facts = evaluation()
    facts["figures"] |= {"nll": math.nan, "ece": None, "brier": "high"}
    facts["reliability"]["accuracy"][5] = math.nan
    facts["reliability_ts"]["count"] = [1, 2]
    facts["delta"]["mean"] = None
    facts["ta_kl"]["value"] = [None, math.nan, 0.3, 0.2, 0.1]
    facts["on"]["svhn"]["auroc"] = None
    facts["on"]["cifar10-c"]["ece_by_severity"] = "none"
    facts["on"]["cifar10-c"]["by_corruption"]["fog"] = [None] * 5
    facts["on"]["new"] = {"kind": "of another version"}
    facts["temperature"] = None
    held = arrays()
    held["mu"][0, 0], held["mu"][1, :] = np.nan, 0
    held["similar"][3] = np.nan
    run = tables.read(evaluate(write_run(tmp_path / "a", rows()), facts, held))
    text = html.page([run])
    assert_self_contained(text)
    assert len([name for name in figures(text) if "reliability" in name]) == 1
    for nothing in ({}, {"figures": [], "on": [], "class_names": 3, "reliability": None}):
        run = tables.read(evaluate(write_run(tmp_path / str(len(nothing)), rows()), nothing, {}))
        assert "Calibration" not in titles(html.page([run]))


def test_one_class_and_two(tmp_path, really):
    for classes in (1, 2):
        folder = write_run(tmp_path / str(classes), rows())
        run = tables.read(evaluate(folder, evaluation(classes), arrays(classes)))
        assert "Penultimate layer" not in titles(html.page([run]))


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.npz"])
def test_damaged_files_are_refused(tmp_path, name):
    folder = evaluate(write_run(tmp_path / "a", rows()))
    (folder / name).write_bytes(b"PK\x03\x04 [")
    with pytest.raises(InputError, match=rf"{re.escape(name)} is damaged.*dps evaluate"):
        tables.read(folder)


def test_a_thousand_classes_make_a_small_page(tmp_path, really):
    names = [f"n{k:08d} a name, and another" for k in range(1000)]
    facts = evaluation(1000, names=names, samples=50_000)
    folder = write_run(tmp_path / "a", rows())
    run = tables.read(evaluate(folder, facts, arrays(1000, samples=2000)))
    text = html.page([run])
    assert len(text.encode()) < 2e6
    assert "the greatest of 4×4 classes" in text and "200 samples a class are drawn" in text


@pytest.mark.parametrize(
    ("value", "length", "expected"),
    [
        ([1, None, 2.5], 3, [1, math.nan, 2.5]),
        ([1], 2, None),
        ([], None, None),
        ("12", None, None),
        ([1, "2"], None, None),
        (None, None, None),
    ],
)
def test_lists_of_numbers(value, length, expected):
    found = array(value, length)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, expected)
