"""The table of `make bench`: what is measured stands beside its goal, and whether it is met."""

import json
import sys

import pytest

from tests.shown import ROOT, script

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def figures():
    return script(BENCHMARKS / "figures.py")


@pytest.mark.parametrize(
    ("limits", "goal", "met"),
    [
        ({"at_most": 1.5}, "≤ 1.50×", True),
        ({"at_most": 1.4}, "≤ 1.40×", False),
        ({"at_least": 1.4}, "≥ 1.40×", True),
        ({"at_least": 1.5}, "≥ 1.50×", False),
        ({"at_most": 0}, "≤ 0.00×", False),
        ({}, "", True),
    ],
)
def test_a_figure_is_held_against_its_goal(
    figures, monkeypatch, tmp_path, capsys, limits, goal, met
):
    monkeypatch.setenv(figures.KEPT, str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "argv", ["/somewhere/loader.py"])
    figures.found("speed", 1.45, note="one run", **limits)
    (line,) = (tmp_path / "kept").read_text().splitlines()
    row = json.loads(line)
    assert row["measured"] == "1.45× (one run)" and row["script"] == "loader.py"
    assert (row["goal"], row["met"]) == (goal, met)
    assert ("MISSED" in capsys.readouterr().out) == (not met)


def test_every_script_is_run_and_what_is_missed_is_said(figures):
    every = script(BENCHMARKS / "__main__.py")
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"__main__", "figures"}
    assert sorted(every.NAMES) == sorted(scripts)
    row = {"what": "speed", "measured": "2×", "goal": "≤ 1×", "met": False, "script": "loader.py"}
    assert every.markdown([row]).splitlines()[2:] == [
        "| speed | 2× | ≤ 1×, **missed** | `loader.py` |"
    ]
    page = every.PAGE.read_text()
    assert page.index(every.BEGIN) < page.index(every.END)
