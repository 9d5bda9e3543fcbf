"""Trained runs as models: what they predict is what the run measured, alone and together."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from dps_dist import recipes
from dps_dist.cli import main
from dps_dist.data import manifest as manifests
from dps_dist.data.loader import eval_loader
from dps_dist.data.order import EpochOrder
from dps_dist.errors import InputError
from dps_dist.train.checkpoint import complete, open_checkpoint
from dps_dist.train.evaluation import ENSEMBLE, evaluate, mean_and_std
from dps_dist.train.manifest import FOLDER
from dps_dist.train.storage import Storage
from dps_dist.train.trained import load
from dps_dist.train.trained import teacher as teacher_of
from tests.train.runs import trained


@pytest.fixture(scope="module")
def other(ranks, settings, tmp_path_factory):
    """Another run on the same data, without averaged weights."""
    folder = tmp_path_factory.mktemp("other")
    config = settings("train.seed=1", "train.epochs=1", "data.hold_out=100")
    (folder / "config.yaml").write_text(recipes.as_yaml(config))
    trained(ranks, config, folder)
    return folder


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def logits_of(folder, only=None, split="val"):
    run = load(folder)
    held = manifests.read(run.config.data.path, split)
    order = EpochOrder(len(held), 64, shuffle="none", drop_last=False, only=only)
    loader = eval_loader(run.config, held, threads=1)
    with torch.no_grad():
        rows = [(run.model(batch.images), batch) for batch in loader.epoch(order)]
    logits = torch.cat([z[: len(z) - batch.padding] for z, batch in rows])
    return logits.double().numpy(), held.clean_labels if only is None else held.clean_labels[only]


def test_a_trained_run_has_the_figures_that_it_measured(teacher):
    """With the averaged weights, by which it was measured."""
    figures = evaluate([str(teacher)])[str(teacher)]
    for key in ("accuracy", "top5", "nll", "ece"):
        assert figures[key] == pytest.approx(summary(teacher)[key], rel=1e-5)


def test_an_ensemble_is_the_mean_of_softmaxes(teacher, other):
    figures = evaluate([str(teacher), str(other), str(teacher)])  # who is named twice counts once
    assert list(figures) == [str(teacher), str(other), ENSEMBLE]
    p, labels = [], None
    for folder in (teacher, other):
        z, labels = logits_of(folder)
        e = np.exp(z - z.max(1, keepdims=True))
        p.append(e / e.sum(1, keepdims=True))
    mean = (p[0] + p[1]) / 2
    nll = -np.log(mean[np.arange(len(labels)), labels]).mean()
    assert figures[ENSEMBLE]["nll"] == pytest.approx(nll, rel=1e-6)
    assert figures[ENSEMBLE]["accuracy"] == pytest.approx((mean.argmax(1) == labels).mean())


def test_evaluates_the_samples_that_were_held_out(other):
    from dps_dist.data.hold_out import split

    only = split(1200, 100, 0).held_out
    z, labels = logits_of(other, only, "train")
    figures = evaluate([str(other)], split="hold_out")[str(other)]
    assert figures["accuracy"] == pytest.approx((z.argmax(1) == labels).mean())


def test_runs_that_see_other_images_are_refused(teacher, other):
    with pytest.raises(InputError, match=r"has data.hold_out 0 and .* 100"):
        evaluate([str(other), str(teacher)], split="hold_out")
    with pytest.raises(InputError, match=r"--split is hold_out: the runs held nothing out"):
        evaluate([str(teacher)], split="hold_out")


def test_runs_at_other_resolutions_are_refused(teacher, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(teacher, larger)
    text = (larger / "config.yaml").read_text().replace("\n  resolution: 8", "\n  resolution: 12")
    (larger / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"larger has data.eval_resolution 12 and .* 8"):
        evaluate([str(teacher), str(larger)])


def test_a_damaged_checkpoint_is_passed_over(teacher, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    newest, before = complete(Storage(copy))[:2]
    state = copy / FOLDER / newest.name / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    weights = load(copy).model.state_dict()
    expected = open_checkpoint(Storage(copy), before.name, tmp_path).state["ema"]["parameters"]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_what_is_no_trained_run_is_refused(teacher, tmp_path):
    with pytest.raises(InputError, match=r"is not the folder of a run, it has no config.yaml"):
        load(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(teacher / "config.yaml", empty)
    with pytest.raises(InputError, match=r"has no checkpoint: train it for an epoch first"):
        load(empty)


def test_a_teacher_knows_the_same_classes_and_sees_the_same_images(teacher, settings, train_digits):
    config, device = settings(), torch.device("cpu")
    images = torch.randn(5, 3, 8, 8)
    taught = teacher_of([str(teacher), str(teacher)], config, train_digits, device)(images)
    own = load(teacher).model(images)
    assert taught.shape == (2, 5, 10) and torch.equal(taught[0], own) and not taught.requires_grad
    for names in ("abc", "abcdefghij"):
        others = replace(train_digits, class_names=tuple(names))
        with pytest.raises(InputError, match=rf"knows 10 classes and .* has {len(names)}, or"):
            teacher_of([str(teacher)], config, others, device)
    darker = config.model_copy(update={"data": config.data.model_copy(update={"mean": (0, 0, 0)})})
    with pytest.raises(InputError, match=r"another data.mean or data.std"):
        teacher_of([str(teacher)], darker, train_digits, device)


def test_the_command_prints_and_writes_them(teacher, other, tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    words = ["dps", "evaluate", str(teacher), str(other), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    written = json.loads(out.read_text())
    assert written == evaluate([str(teacher), str(other)])
    printed = capsys.readouterr().out
    for figures in written.values():
        assert f"{100 * figures['accuracy']:.2f}" in printed
    assert "mean ± deviation" in printed and ENSEMBLE in printed.splitlines()[-1]


def test_mean_and_deviation():
    mean, std = mean_and_std([1.0, 2.0, 4.0])
    assert mean == pytest.approx(np.mean([1, 2, 4])) and std == pytest.approx(
        np.std([1, 2, 4], ddof=1)
    )
    assert np.isnan(mean_and_std([1.0])[1])
