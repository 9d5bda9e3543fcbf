"""What stands beside a run's own figures: the paper's, the samples' images, other runs."""

import json
import re
import sys

import pytest

from dps_dist import recipes
from dps_dist.errors import InputError
from dps_dist.report import html, plots, tables
from tests.report.folders import NASTY, evaluate, evaluation, rows, write_run
from tests.report.pages import Page, assert_self_contained, cells, titles

pytestmark = pytest.mark.usefixtures("undrawn")


def test_the_paper_stands_in_its_own_column(tmp_path):
    config = recipes.load("cifar10-resnet18").model_dump(mode="json")
    run = {"recipe": "cifar10-resnet18"}
    folder = evaluate(write_run(tmp_path / "a", rows(), config=config, run=run))
    text = html.page([tables.read(folder)])
    shown = cells(text, "Beside the paper")
    assert shown[0] == ["", "this run", "the paper says"]
    found = {row[0]: row[1:] for row in shown[1:]}
    assert found["accuracyTest accuracy: CIFAR-10, ResNet-18, DPS"] == ["97.32%", "94.88 ± 0.06%"]
    corrupted = "accuracy on CIFAR-10-CCIFAR-10-C and CIFAR-10-P: ResNet-18, C DPS"
    assert found[corrupted][1] == "74.88 ± 0.28%"
    perturbed = "mFP on CIFAR-10-PCIFAR-10-C and CIFAR-10-P: ResNet-18, P DPS"
    assert found[perturbed] == ["6.12%", "6.09 ± 0.08%"]
    theirs = [row[2] for row in shown[1:]]
    boxed = re.findall(r'<td class="number boxed">(.*?)</td>', text)
    assert boxed == theirs and "differs from the recipe" not in text
    assert text.count("94.88 ±") == 1


def beside_the_paper(folder, facts):
    """The run's own figures by the paper's metric."""
    config = recipes.load("cifar10-resnet18").model_dump(mode="json")
    run = {"recipe": "cifar10-resnet18"}
    text = html.page(
        [tables.read(evaluate(write_run(folder, rows(), config=config, run=run), facts))]
    )
    shown = cells(text, "Beside the paper")[1:]
    return {row[0]: row[1] for row in shown}, Page(text).text


def test_figures_of_another_split_do_not_stand_beside_the_paper(tmp_path):
    own, _ = beside_the_paper(tmp_path / "a", evaluation(split="hold_out"))
    last = f"{100 * rows()[-1]['accuracy']:.2f}%"
    assert own["accuracyTest accuracy: CIFAR-10, ResNet-18, DPS"] == last != "97.32%"


def test_means_over_some_files_do_not_stand_beside_the_paper(tmp_path):
    facts = evaluation()
    whole, _ = beside_the_paper(tmp_path / "whole", facts)
    facts["on"]["cifar10-c"]["missing"] = ["snow", "glass_blur"]
    facts["on"]["cifar10-p"]["missing"] = ["tilt"]
    part, said = beside_the_paper(tmp_path / "part", facts)
    differ = {name.split("CIFAR-10-C and")[0] for name in whole if whole[name] != part[name]}
    assert differ == {"accuracy on CIFAR-10-C", "mFP on CIFAR-10-P"}
    assert {part[name] for name in whole if whole[name] != part[name]} == {"–"}
    assert "the mean is without snow, glass blur." in said
    assert "the mean is without tilt." in said


def test_ensembles_have_no_row(tmp_path):
    config = recipes.load("cifar10-resnet18-baseline").model_dump(mode="json")
    run = {"recipe": "cifar10-resnet18-baseline"}
    text = html.page([tables.read(write_run(tmp_path / "a", rows(), config=config, run=run))])
    assert "Beside the paper" in titles(text) and "Ens." not in text


@pytest.mark.parametrize(
    ("recipe", "settings", "shown"),
    [
        ("cifar10-resnet18", [], True),
        ("cifar10-resnet18", ["train.epochs=7"], True),
        ("cifar10-resnet18", ["method.name=baseline"], False),
        ("cifar10-resnet18", ["model.name=small_cnn"], False),
        ("cifar10-resnet18", ["data.hold_out=50", "evaluate.split=hold_out"], False),
        ("digits", [], False),
    ],
)
def test_only_a_run_of_the_papers_row_stands_beside_it(tmp_path, recipe, settings, shown):
    config = recipes.load(recipe, settings).model_dump(mode="json")
    run = {"recipe": recipe}
    text = html.page([tables.read(write_run(tmp_path / "a", rows(), config=config, run=run))])
    assert ("Beside the paper" in titles(text)) == shown
    assert ("train.epochs is 7 instead of" in text) == ("train.epochs=7" in settings)


def test_most_changed_samples_have_images(evaluated, audited):
    text = html.page([evaluated])
    assert_self_contained(text)
    page = Page(text)
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert [image["alt"] for image in images] == [
        "sample 1234, labelled one",
        "sample 7, labelled two",
    ]
    assert all(image["src"].startswith("data:image/png;base64,") for image in images)
    assert audited == [("data/digits", "train", [1234, 7], 96)]
    assert f"one → {NASTY}" in page.text and "evidence 0.912 against 0.0123" in page.text


def test_without_evidence_one_line_says_why(evaluated, audited, monkeypatch):
    def refuse(run):
        raise InputError("baseline keeps no evidence")

    monkeypatch.setattr(sys.modules["dps_dist.report.audit"], "rank", refuse)
    page = Page(html.page([evaluated]))
    assert "none are shown, because baseline keeps no evidence" in page.text
    assert not any(tag == "img" for tag, _ in page.tags)


def test_different_data_are_refused(tmp_path):
    def run(name, data, facts=None):
        folder = write_run(tmp_path / name, rows(), config={"data": data})
        return tables.read(evaluate(folder, facts) if facts else folder)

    digits = run("a", {})
    folder = run("b", {"source": "imagefolder", "path": "data/cats"})
    with pytest.raises(InputError) as refused:
        html.page([digits, folder])
    for part in (str(digits.folder), str(folder.folder), "digits", "data/cats"):
        assert part in str(refused.value)
    with pytest.raises(InputError, match="different data sets"):
        plots.save([digits, folder], tmp_path / "curves.png")
    with pytest.raises(InputError, match="different data sets"):
        html.page([folder, run("c", {"source": "imagefolder", "path": "data/dogs"})])
    html.page([folder, run("d", {"source": "imagefolder", "path": "/mnt/cats"})])
    known = [run("e", {"source": "imagefolder", "path": p}, evaluation()) for p in ("x",)]
    known.append(run("f", {"source": "imagefolder", "path": "y"}, evaluation()))
    html.page(known)
    for k, change in enumerate(({}, {"samples": 40_000}, {"sum of class names": 8})):
        folders = [tmp_path / f"{k}{name}" for name in "ab"]
        for folder, facts in zip(folders, ({}, change), strict=True):
            write_run(folder, rows(), config={"data": {"source": "cifar10"}})
            summary = json.loads((folder / "summary.json").read_text())
            summary |= {"samples": 50_000, "classes": 10, "sum of class names": 7} | facts
            (folder / "summary.json").write_text(json.dumps(summary))
        pair = [tables.read(folder) for folder in folders]
        if change:
            with pytest.raises(InputError, match=r"\(50000 samples, .* class names\) but .* \("):
                html.page(pair)
        else:
            html.page(pair)
    other = run("g", {"source": "imagefolder", "path": "x"}, evaluation(names=list("abcdefghij")))
    with pytest.raises(InputError, match="different data sets"):
        html.page([known[0], other])
