"""What `dps evaluate` prints fits into the terminal, whatever the runs are called and how many."""

import io
import math

import pytest
from rich.console import Console

from dps_dist.evaluate import seeds
from dps_dist.report import terminal
from tests.report.folders import evaluation


def reports(count, name="seed{}"):
    made = [evaluation(seed=k) | {"run": name.format(k)} for k in range(count)]
    return {f"runs/{k}": report for k, report in enumerate(made)}


def printed(found, width, **more):
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    for table in terminal.tables(found, width=width, **more):
        console.print(table)
    return file.getvalue()


def over_seeds(found):
    return seeds.spread([report["figures"] for report in found.values()])


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("name", ["s{}", "cifar10-resnet18-dps-20261116-18305{}"])
def test_no_figure_is_cut_off(width, count, name):
    found = reports(count, name)
    over = over_seeds(found) if count > 1 else None
    text = printed(found, width, ensemble=found["runs/0"]["figures"], spread=over)
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for report in found.values():
        for key, value in report["figures"].items():
            if key in terminal.ORDER:
                assert terminal._number(key, value) in text
    blocks = text.count("SCE %")
    assert blocks == 1 or (width, count) not in ((80, 1), (160, 1), (160, 3))
    assert text.count("ECE after TS %") == blocks and ("±" in text) == (count > 1)


def test_columns_are_the_runs_and_rows_the_figures():
    found = reports(2)
    lines = printed(found, 80, spread=over_seeds(found)).splitlines()
    assert lines[0].split() == ["seed0", "seed1", "mean", "±", "deviation"]
    assert lines[1].split() == ["accuracy", "%", "97.32", "96.32", "96.82", "±", "0.71"]
    assert len(lines) == 1 + len(terminal.ORDER)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_of_a_run_that_diverged_there_is_a_dash(value):
    found = reports(3)
    found["runs/1"]["figures"]["nll"] = value
    found["runs/1"]["on"]["svhn"]["auroc"] = value
    found["runs/1"]["on"]["cifar10-c"]["ece_by_severity"][4] = value
    text = printed(found, 160, spread=over_seeds(found), ensemble={"nll": value})
    rows = {line[:12].strip(): line.split() for line in text.splitlines()}
    assert rows["NLL"] == ["NLL", "0.280", "–", "0.300", "–", "–"]
    assert rows["accuracy %"][2:] == ["97.32", "96.32", "95.32", "96.32", "±", "1.00", "–"]
    del found["runs/1"]["on"]["scanned"]  # made up, with few figures
    said = list(terminal.elsewhere({"runs/1": found["runs/1"]}))
    assert any("runs/1 on svhn: AUROC –% against" in line for line in said)
    assert any("ECE by severity 3.0, 5.0, 8.0, 13.0, –%" in line for line in said)


def test_means_on_further_data_are_said():
    over = seeds.Spread({"auroc on svhn": 0.91, "accuracy on a": 0.5}, {"auroc on svhn": 0.004})
    found = {"r": {"on": {"svhn": {"kind": "ood", "auroc": 0.91, "samples": 3}}}}
    lines = list(terminal.elsewhere(found, over))
    assert lines[1:] == ["mean ± deviation on svhn: AUROC 91.00 ± 0.40%"]


def test_runs_of_one_name_are_told_apart_by_their_folders():
    lines = printed(reports(2, "same"), 80).splitlines()
    assert lines[0].split() == ["runs/0", "runs/1"]


def test_a_run_may_have_any_name():
    found = reports(1, "[bold]ensemble")
    text = printed(found | {"runs/1": {**found["runs/0"], "run": "ensemble"}}, 80, ensemble={})
    assert text.splitlines()[0].split() == ["[bold]ensemble", "ensemble", "ensemble"]


def test_what_is_missing_is_said():
    on = {name: evaluation()["on"][name] for name in ("cifar10-c", "cifar10-p", "svhn")}
    on["cifar10-c"]["missing"] = ["snow", "frost", "glass_blur", "pixelate"]
    on["cifar10-p"]["missing"] = ["tilt"]
    said = list(terminal.elsewhere({"runs/0": {"on": on}}))
    assert "% without snow, frost, glass_blur, … (4); ECE by severity" in said[0]
    assert "mFP 6.12% without tilt (" in said[1]
    assert "without" not in said[2]
