"""Trained runs as models: which checkpoint they are, whom they can teach."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from dps_dist.errors import InputError
from dps_dist.train.checkpoint import open_checkpoint
from dps_dist.train.evaluation import evaluate
from dps_dist.train.export import export
from dps_dist.train.manifest import FOLDER, MANIFEST, Moment, complete, encode
from dps_dist.train.storage import Storage
from dps_dist.train.trained import load
from dps_dist.train.trained import teacher as teacher_of
from tests.train.runs import went_on


def test_a_damaged_checkpoint_is_passed_over(teacher, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    newest, before = complete(Storage(copy))[:2]
    state = copy / FOLDER / newest.name / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    weights = load(copy).model.state_dict()
    expected = open_checkpoint(Storage(copy), before.name, tmp_path).state["ema"]["parameters"]
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_the_best_checkpoint_is_the_one_with_the_best_accuracy(teacher, tmp_path):
    run = shutil.copytree(teacher, tmp_path / "run")
    newest, before = complete(Storage(run))[:2]

    def measured(one, accuracy):
        text = encode(one.moment, one.world_size, accuracy, one.files)
        (run / FOLDER / one.name / MANIFEST).write_bytes(text)

    for known, expected in (((0.4, 0.5), before), ((0.5, 0.5), before), ((0.5, None), newest)):
        measured(newest, known[0])
        measured(before, known[1])
        assert load(run, checkpoint="best").moment == expected.moment
        assert load(run).moment == newest.moment
    measured(newest, None)
    with pytest.raises(InputError, match="has no checkpoint that was evaluated: take the newest"):
        load(run, checkpoint="best")
    measured(before, 0.5)
    (found,) = evaluate([str(run)], checkpoint="best")
    assert found.report["epoch"] == before.moment.epoch != newest.moment.epoch
    assert found.write() == "evaluation-best.json"
    assert not (run / "evaluation.json").exists()  # the report shows that as the run's own
    exported = export(run, tmp_path / "out", checkpoint="best")
    weights = load_file(exported / "model.safetensors")
    expected = load(run, checkpoint="best").model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    card = (exported / "README.md").read_text()
    assert "this one had the best accuracy on val" in card
    assert f"| accuracy | {found.figures['accuracy']:.4g} |" in card
    measured(newest, 0.4)  # which does not stand for it
    state = run / FOLDER / before.name / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(InputError, match="damaged"):
        load(run, checkpoint="best")


def test_what_is_no_trained_run_is_refused(teacher, tmp_path):
    with pytest.raises(InputError, match=r"is not the folder of a run, it has no config.yaml"):
        load(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\x80\x81")
    with pytest.raises(InputError, match=r"config.yaml is damaged, it is no text: restore it"):
        load(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(teacher / "config.yaml", empty)
    with pytest.raises(InputError, match=r"has no checkpoint: train it for an epoch first"):
        load(empty)


def test_a_run_in_its_first_epoch_is_refused(teacher, tmp_path):
    early = went_on(teacher, tmp_path / "early", Moment(0, 640, 10), kept=False)
    with pytest.raises(InputError, match=r"early has not finished an epoch: try again when it has"):
        load(early)
    assert load(early, checkpoint=complete(Storage(early))[0].name).moment.position == 640


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


@pytest.mark.parametrize("model", ["resnet18", "wide_resnet10_2"])
def test_a_config_of_another_model_is_refused(teacher, tmp_path, model):
    run = tmp_path / "run"
    shutil.copytree(teacher, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("name: small_cnn", f"name: {model}"))
    with pytest.raises(InputError, match=rf"config\.yaml: model\.name is {model}, .*set these as"):
        load(run)
