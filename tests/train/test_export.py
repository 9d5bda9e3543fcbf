"""Exports of real runs: other programs get the same logits and targets, or nothing at all."""

import errno
import json
import re
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from dps_dist import models, recipes
from dps_dist.config import Data
from dps_dist.data import manifest as manifests
from dps_dist.data.loader import noisy_labels
from dps_dist.data.pictures import pictures
from dps_dist.errors import InputError
from dps_dist.report import audit
from dps_dist.targets import Dirichlet, LocalTargets
from dps_dist.train import export as exports
from dps_dist.train.card import loading
from dps_dist.train.evaluation import evaluate
from dps_dist.train.evidence import evidence_of
from dps_dist.train.export import export, write_targets
from dps_dist.train.manifest import Moment
from dps_dist.train.storage import Storage
from dps_dist.train.trained import load
from tests.train.runs import saved_targets, trained, went_on

DOCS = Path(__file__).parents[2] / "docs/export.md"


def train(ranks, config, folder):
    (folder / "config.yaml").write_text(recipes.as_yaml(config))
    trained(ranks, config, folder)
    return folder


@pytest.fixture(scope="module")
def noisy(ranks, settings, tmp_path_factory):
    """DPS on digits of which 40% have had their label redrawn."""
    noise = ["data.noise.kind=symmetric", "data.noise.rate=0.4", "method.tau=0.8"]
    held_out = ["data.hold_out=100", "evaluate.temperature=true"]
    config = settings(*noise, *held_out, "train.epochs=12")
    return train(ranks, config, tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def residual(ranks, settings, tmp_path_factory):
    """→ the run of a ResNet-18 with that stem."""
    made = {}

    def run(stem):
        if stem not in made:
            few = ["train.epochs=1", "data.hold_out=1000", "data.batch_size=32"]
            config = settings("model.name=resnet18", f"model.stem={stem}", *few)
            made[stem] = train(ranks, config, tmp_path_factory.mktemp(f"stem{stem}"))
        return made[stem]

    return run


def images(count=16, side=8):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def test_the_weights_give_the_same_bits(noisy, tmp_path):
    out = export(noisy, tmp_path / "out")
    model = models.build("small_cnn", 10)
    model.load_state_dict(load_file(out / "model.safetensors"))
    model = model.to(memory_format=torch.channels_last).eval()
    with torch.no_grad():
        assert torch.equal(model(images()), load(noisy).model(images()))
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["model"] == "small_cnn"


def test_averaged_weights_are_what_is_exported(teacher, tmp_path):
    state = load_file(export(teacher, tmp_path / "out") / "model.safetensors")
    own = load(teacher).model.state_dict()
    assert state.keys() == own.keys() and all(torch.equal(state[key], own[key]) for key in own)


def test_torchvisions_own_resnet_takes_the_weights(residual, tmp_path):
    run = residual("7x7")
    state = load_file(export(run, tmp_path / "out") / "model.safetensors")
    model = torchvision.models.resnet18(num_classes=10)
    model.load_state_dict(state, strict=True)
    own = load(run).model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        assert torch.equal(model.eval()(images()), own(images()))


def test_the_docs_ten_lines_load_it(residual, digits, tmp_path, monkeypatch, capsys):
    run = residual("3x3")
    export(run, tmp_path / "exported")
    block = re.search(r"```py\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    code = [line for line in block.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= 10
    (tmp_path / "digit.png").write_bytes(pictures(Data(path=str(digits)), "val", [4])[0])
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(block, "docs/export.md", "exec"), names)
    own = load(run).model.to(memory_format=torch.contiguous_format)
    with torch.no_grad():
        assert torch.equal(names["model"](images()), own(images()))
    assert capsys.readouterr().out.split()[0].isdigit()


@pytest.mark.parametrize(
    ("name", "stem"),
    [(name, stem) for name, row in models.MODELS.items() for stem in row.stems or (None,)],
)
def test_the_card_loads_every_model(name, stem, monkeypatch):
    """All names and shapes fit, which needs no numbers: on torch's meta device."""
    row = models.MODELS[name]
    side = 32 if name != "vit_b_16" else 48
    settings = [f"model.name={name}", f"data.resolution={side}", "augment.crop=resized"]
    config = recipes.load("digits", [*settings, *([f"model.stem={stem}"] if stem else [])])
    with torch.device("meta"):
        built = models.build(name, 7, stem=stem, image_size=side)
        monkeypatch.setattr("safetensors.torch.load_file", lambda file: built.state_dict())
        names = {}
        exec(loading(config, 7), names)
    of_torchvision = row.published is not None or row.torchvision
    assert isinstance(names["model"], models.Classifier) == (not of_torchvision)
    image = Image.fromarray(np.full((50, 60, 3), 128, np.uint8))
    assert names["prepare"](image).shape == (3, side, side)


def test_the_card_prepares_images_as_evaluation_does(noisy, digits):
    config = load(noisy).config
    names = {"load_file": None}
    code = loading(config, 10).replace("model.load_state_dict", "# ")
    exec(code, names)
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    expected = (image / 255 - np.array(config.data.mean)) / np.array(config.data.std)
    shown = names["prepare"](Image.fromarray(image)).permute(1, 2, 0).numpy()
    assert np.allclose(shown, expected, atol=1e-5)


def test_the_card_has_recipe_figures_and_classes(noisy, tmp_path):
    card = (export(noisy, tmp_path / "out") / "README.md").read_text()
    summary = json.loads((noisy / "summary.json").read_text())
    for key in ("accuracy", "nll", "ece", "ece_ts"):
        assert f"| {key} | {summary[key]:.4g} |" in card
    assert f"divide the logits by the temperature {summary['temperature']:.4g}" in card
    assert "40% symmetric label noise" in card and "small_cnn" in card and "method dps" in card
    names = manifests.read(load(noisy).config.data.path, "val").class_names
    assert all(f"{number}. {name}" in card for number, name in enumerate(names))
    assert (tmp_path / "out/config.yaml").read_bytes() == (noisy / "config.yaml").read_bytes()


def test_the_card_says_in_which_precision_it_was_measured(teacher, tmp_path):
    """In training under train.amp; `dps evaluate` computes in float32."""
    run = shutil.copytree(teacher, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("amp: none", "amp: bfloat16"))
    assert "| val, in float32 | |" in (export(teacher, tmp_path / "a") / "README.md").read_text()
    assert "| val, in bfloat16 | |" in (export(run, tmp_path / "b") / "README.md").read_text()
    (found,) = evaluate([str(run)])
    found.write()
    assert "| val, in float32 | |" in (export(run, tmp_path / "c") / "README.md").read_text()


def test_the_card_says_that_there_is_no_temperature(teacher, tmp_path):
    card = (export(teacher, tmp_path / "out") / "README.md").read_text()
    assert "No temperature was fitted, as nothing was held out of training (data.hold_out" in card
    assert "divide the logits" not in card


@pytest.fixture(scope="module")
def evaluated(noisy, digits, tmp_path_factory):
    """A copy of the run, evaluated also on the same digits under another name."""
    run = shutil.copytree(noisy, tmp_path_factory.mktemp("evaluated") / "run")
    where = {"on": {"v2": str(digits)}, "ood": {"others": str(digits)}}
    (found,) = evaluate([str(run)], split="train", **where)
    found.write()
    return run, found.report


def test_the_card_prefers_what_was_evaluated(evaluated, tmp_path):
    run, report = evaluated
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    again, figures = report["on"]["v2"]["figures"], report["figures"]
    for key in ("accuracy", "brier", "nll_ts"):
        assert f"| {key} | {figures[key]:.4g} |" in card
    assert "| train, in float32 | |" in card
    assert f"the temperature {report['temperature']:.4g}," in card
    assert f"| accuracy on v2 | {again['accuracy']:.4g} |" in card
    assert f"| auroc on others | {report['on']['others']['auroc']:.4g} |" in card
    assert "samples on" not in card


@pytest.mark.parametrize("held", [{"figures": None}, {"on": None}, {"on": {"svhn": 3}}])
def test_a_card_is_made_of_an_evaluation_that_was_edited(evaluated, tmp_path, held):
    run = shutil.copytree(evaluated[0], tmp_path / "run")
    (run / "evaluation.json").write_text(json.dumps(evaluated[1] | held))
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert ("| brier |" in card) == ("figures" not in held)
    assert ("accuracy on v2" in card) == ("on" not in held)


def test_the_card_has_no_figures_of_other_weights(evaluated, tmp_path):
    run, _ = evaluated
    for moment in (Moment(12, 64, 9000), Moment(13, 0, 9000)):
        went_on(run, tmp_path / "run", moment)
        card = (export(tmp_path / "run", tmp_path / "out") / "README.md").read_text()
        assert "## Figures" not in card and "temperature" not in card
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "out")


def test_a_model_is_exported_without_its_data(noisy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(noisy, run)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(r"(?m)^  path: .*$", "  path: nowhere", text))
    card = (export(run, tmp_path / "out") / "README.md").read_text()
    assert "10; their names were not at hand" in card
    with pytest.raises(InputError, match=r"nowhere/train.beton does not exist"):
        export(run, tmp_path / "other", targets="top")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def posterior(run):
    """The targets of visited samples in float64, from the run's Arrow files."""
    config, saved = load(run).config, saved_targets(run)
    v = saved["evidence"].astype(np.float64)
    m = np.where(v >= 0, v / 2**15, 1 + v / 2**15)
    gamma, c, t = config.method.gamma, config.method.c, saved["visits"].astype(float)[:, None]
    prior = c * np.eye(10)[saved["label"]]
    weight = (1 - gamma**t) / (1 - gamma)
    y = (gamma**t * prior + weight * m) / (gamma**t * c + weight)
    seen = saved["visits"] > 0
    return saved["index"][seen], saved["label"][seen], saved["visits"][seen], y[seen]


def test_targets_are_probabilities_that_others_read(noisy, tmp_path):
    table = pq.read_table(
        export(noisy, tmp_path / "out", targets="probabilities") / "targets.parquet"
    )
    table = table.sort_by("index")
    index, labels, visits, y = posterior(noisy)
    assert np.array_equal(table["index"], index) and len(index) == 1100  # not those held out
    assert np.array_equal(table["label"], labels) and np.array_equal(table["visits"], visits)
    found = np.array(table["probabilities"].to_pylist(), np.float32)
    assert found.shape == (1100, 10) and np.allclose(found, y, atol=1e-6)
    assert str(table.schema.field("probabilities").type.value_type) == "float"
    paths = manifests.read(load(noisy).config.data.path, "train").paths
    assert table["path"].to_pylist() == [paths[int(i)] for i in index]
    names = json.loads(table.schema.metadata[b"class_names"])
    assert names == list(manifests.read(load(noisy).config.data.path, "train").class_names)


def test_the_largest_targets_come_with_their_classes(noisy, tmp_path):
    table = pq.read_table(export(noisy, tmp_path / "a", targets="top", top_k=3) / "targets.parquet")
    table = table.sort_by("index")
    _, _, _, y = posterior(noisy)
    classes, found = (
        np.array(table["classes"].to_pylist()),
        np.array(table["probabilities"].to_pylist()),
    )
    assert classes.shape == found.shape == (1100, 3)
    assert np.allclose(found, -np.sort(-y, axis=1)[:, :3], atol=1e-6)
    assert np.allclose(np.take_along_axis(y, classes, 1), found, atol=1e-6)
    write_targets(noisy, tmp_path / "all.parquet", 50)
    assert len(pq.read_table(tmp_path / "all.parquet")["classes"][0]) == 10


@pytest.mark.parametrize("reader", ["pandas", "polars", "duckdb"])
def test_their_readers_open_the_targets(reader, noisy, tmp_path):
    module = import_module(reader)
    file = str(export(noisy, tmp_path / "out", targets="top", top_k=2) / "targets.parquet")
    if reader == "duckdb":
        rows = module.sql(f"select probabilities[1] from '{file}'").fetchall()
        assert len(rows) == 1100 and 0 < rows[0][0] <= 1
    else:
        frame = module.read_parquet(file)
        assert len(frame) == 1100 and len(frame["probabilities"][0]) == 2


def test_names_with_a_colon_are_no_urls(noisy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_targets(noisy, Path("top:1.parquet"), 1)
    with Path("top:1.parquet").open("rb") as file:
        assert len(pq.read_table(file)) == 1100
    with evidence_of(noisy) as kept:
        Path("a:b").symlink_to(kept.data.beton.parent)
        there = replace(kept.data, beton=Path("a:b") / kept.data.beton.name)
        assert len(replace(kept, data=there).paths()) == 1200


def test_a_method_without_targets_exports_its_evidence(digits, tmp_path):
    """PS-KD's: the prediction of the last epoch."""
    run = tmp_path / "run"
    run.mkdir()
    config = recipes.load("digits", [f"data.path={digits}", "method.name=pskd"])
    (run / "config.yaml").write_text(recipes.as_yaml(config))
    labels = manifests.read(digits, "train").labels
    store = LocalTargets(1200, Dirichlet(10, 0.0, 1.0))
    p = torch.rand(1200, 10, generator=torch.Generator().manual_seed(1)).softmax(-1)
    store.update(torch.arange(1200), p)
    store.save(run / "targets", labels=labels)
    (run / "summary.json").write_text("{}")
    write_targets(run, tmp_path / "targets.parquet")
    found = np.array(pq.read_table(tmp_path / "targets.parquet")["probabilities"].to_pylist())
    assert np.allclose(found, p.numpy(), atol=1e-4)


def test_the_audit_finds_the_wrong_labels_of_a_real_run(noisy):
    config = load(noisy).config
    data = manifests.read(config.data.path, "train")
    table = audit.rank(noisy)
    assert table.num_rows == 1100
    assert np.array_equal(
        np.array(table["label"]), noisy_labels(config.data, data)[np.array(table["index"])]
    )
    found = audit.quality(table, data.clean_labels)
    assert found["auroc"] > 0.97 and found["average_precision"] > 0.95
    assert found["precision"] > 0.9 and found["recall"] > 0.85


def test_onnx_gives_the_same_logits_for_any_batch(noisy, tmp_path):
    from onnx.reference import ReferenceEvaluator

    out = export(noisy, tmp_path / "out", onnx=True)
    session = ReferenceEvaluator(str(out / "model.onnx"))
    for count in (1, 5):
        with torch.no_grad():
            own = load(noisy).model(images(count)).numpy()
        assert np.allclose(session.run(None, {"images": images(count).numpy()})[0], own, atol=1e-4)


def test_onnx_that_is_missing_is_said(noisy, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "find_spec", lambda name: None if name == "onnxscript" else "here")
    with pytest.raises(InputError, match=r"onnxscript, which is not installed: pip install 'dps_d"):
        export(noisy, tmp_path / "out", onnx=True)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_refused(noisy, teacher, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    with pytest.raises(InputError, match=r"full is there and not empty: give a new folder"):
        export(noisy, full)
    assert (full / "mine").read_text() == "x"
    with pytest.raises(InputError, match=r"full/mine is there"):
        export(noisy, full / "mine")
    with pytest.raises(InputError, match=r"top_k is 0: give 1 or more"):
        export(noisy, tmp_path / "out", targets="top", top_k=0)
    with pytest.raises(InputError, match=r"targets is 'some': give none, probabilities, top"):
        export(noisy, tmp_path / "out", targets="some")
    with pytest.raises(InputError, match=r"is baseline, which keeps no evidence"):
        export(teacher, tmp_path / "out", targets="top")
    with pytest.raises(InputError, match=r"has no config.yaml"):
        export(tmp_path / "nothing", tmp_path / "out")
    early = went_on(teacher, tmp_path / "full" / "early", Moment(0, 64, 1), kept=False)
    with pytest.raises(InputError, match=r"early has not finished an epoch"):
        export(early, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_empty_folder_is_filled_and_a_failure_leaves_nothing(noisy, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()

    def fails(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exports, "card", fails)
        with pytest.raises(OSError, match="No space left"):
            export(noisy, out)
    assert list(tmp_path.iterdir()) == [out] and not list(out.iterdir())
    export(noisy, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.yaml",
        "model.safetensors",
    ]


def test_a_full_disk_is_told_by_its_name_and_leaves_nothing(noisy, small_disk):
    (small_disk / "others").write_bytes(bytes(2 << 20))
    with pytest.raises(OSError) as told:
        export(noisy, small_disk / "out")
    assert told.value.errno == errno.ENOSPC and told.value.filename == str(small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["others"]


def test_a_run_elsewhere_is_exported(noisy, tmp_path):
    """In a file system that is not the machine's own."""
    Storage("memory://exported").upload(noisy, "run")
    out = export("memory://exported/run", tmp_path / "out", targets="top")
    own = export(noisy, tmp_path / "own", targets="top")
    one, other = (load_file(folder / "model.safetensors") for folder in (out, own))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    tables = [pq.read_table(folder / "targets.parquet") for folder in (out, own)]
    assert tables[0].equals(tables[1])
