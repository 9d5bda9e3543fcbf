"""`dps evaluate` on real runs: figures against numpy, what it writes, what it refuses."""

import json
import math
import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from dps_dist import config, recipes
from dps_dist.cli import main
from dps_dist.data import manifest as manifests
from dps_dist.data.hold_out import split
from dps_dist.data.loader import eval_loader
from dps_dist.data.order import EpochOrder
from dps_dist.data.sources.cifar import CIFAR10_CLASSES
from dps_dist.data.write import ImageOptions, write_split
from dps_dist.errors import InputError
from dps_dist.evaluate import dark_knowledge, metrics
from dps_dist.evaluate.calibration import fit_temperature
from dps_dist.launch.ray_train import check
from dps_dist.report import tables
from dps_dist.train.checkpoint import Writer, open_checkpoint
from dps_dist.train.evaluation import ensemble, evaluate, over_seeds
from dps_dist.train.manifest import FOLDER, Moment, complete
from dps_dist.train.predict import Shown, on_arrays, on_split
from dps_dist.train.storage import Storage
from dps_dist.train.trained import load
from tests.train.runs import trained, went_on

KEPT = ["train.epochs=3", "data.hold_out=100", "train.checkpoint.keep_last=9"]


def made(ranks, folder, settings):
    (folder / "config.yaml").write_text(recipes.as_yaml(settings))
    trained(ranks, settings, folder)
    return folder


@pytest.fixture(scope="module")
def other(ranks, settings, tmp_path_factory):
    """Another run on the same data, with held-out samples and all of its checkpoints."""
    return made(ranks, tmp_path_factory.mktemp("other"), settings("train.seed=1", *KEPT))


def changed(run, copy, *settings):
    """A copy of a run with another configuration."""
    shutil.copytree(run, copy)
    fields = recipes.parse((run / "config.yaml").read_text(), "")
    text = recipes.as_yaml(recipes.resolve(fields, settings, where=""))
    (copy / "config.yaml").write_text(text)
    return copy


def logits_of(folder, only=None, part="val", checkpoint="newest"):
    """float64 [N, K], and the labels: by a loop of its own."""
    run = load(folder, checkpoint=checkpoint)
    held = manifests.read(run.config.data.path, part)
    order = EpochOrder(len(held), 64, shuffle="none", drop_last=False, only=only)
    loader = eval_loader(run.config, held, threads=1)
    with torch.no_grad():
        rows = [(run.model(batch.images), batch) for batch in loader.epoch(order)]
    logits = torch.cat([z[: len(z) - batch.padding] for z, batch in rows])
    labels = held.clean_labels if only is None else held.clean_labels[only]
    return logits.double().numpy(), labels


def softmax(z):
    e = np.exp(z - z.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def only_one(folder, **more):
    (found,) = evaluate([str(folder)], **more)
    return found


# ---- one run


def test_has_the_figures_that_the_run_measured(teacher):
    """With the averaged weights, by which it was measured."""
    measured = json.loads((teacher / "summary.json").read_text())
    assert (measured["samples"], measured["classes"]) == (1200, 10)
    found = only_one(teacher)
    for key in ("accuracy", "top5", "nll", "ece"):
        assert found.figures[key] == pytest.approx(measured[key], rel=1e-5)
    report = found.report
    assert (report["epoch"], report["position"]) == (3, 0)
    assert (report["split"], report["samples"]) == ("val", 597)
    assert "temperature" not in report and "ta_kl" not in report  # nothing was held out
    assert sum(report["reliability"]["count"]) == 597


def test_dark_knowledge(teacher):
    found = only_one(teacher)
    z, labels = logits_of(teacher)
    p = softmax(z)
    mu = np.stack([p[labels == k].mean(0) for k in range(10)])
    np.testing.assert_allclose(found.arrays["mu"], mu, atol=1e-6)
    delta = np.abs(p - mu[labels]).sum(1)
    assert found.report["delta"]["mean"] == pytest.approx(delta.mean(), rel=1e-5)
    assert sum(found.report["delta"]["count"]) == 597
    for name in ("similar", "dissimilar"):
        classes = found.report["projection"][name]["classes"]
        shown = np.isin(labels, classes)
        assert found.arrays[name].shape == (shown.sum(), 2)
        assert (found.arrays[f"{name}_class"] == labels[shown]).all()
        assert np.isfinite(found.arrays[name]).all() and found.arrays[name].std() > 0


def test_of_too_many_classes_nothing_is_made_of_every_two(teacher, tmp_path, monkeypatch, capsys):
    """At 21,841 they took 33 GB; the other figures are there, and it is said."""
    run = shutil.copytree(teacher, tmp_path / "run")
    monkeypatch.setattr(dark_knowledge, "MOST_CLASSES", 9)
    assert run_command(monkeypatch, run) == 0
    said = "note: the mean predictions μ, δ and the projections are left out: they take a number "
    assert f"{said}for every two of the 10 classes, and are made of at most 9" in (
        capsys.readouterr().out
    )
    report = json.loads((run / "evaluation.json").read_text())
    assert report["left_out"].startswith("the mean predictions μ")
    assert "delta" not in report and "projection" not in report
    assert report["figures"]["nll"] > 0 and report["precision"] == "float32"
    assert tables.read(run).evaluation.mu() is None


def test_temperature_is_fitted_on_the_held_out_samples(other):
    found = only_one(other)
    only = split(1200, 100, 0).held_out
    temperature = fit_temperature(*map(torch.from_numpy, logits_of(other, only, "train")))
    assert found.report["temperature"] == pytest.approx(temperature, rel=1e-4)
    z, labels = logits_of(other)
    nll = -np.log(softmax(z / temperature)[np.arange(len(labels)), labels]).mean()
    assert found.figures["nll_ts"] == pytest.approx(nll, rel=1e-4)
    assert "accuracy_ts" not in found.figures and "reliability_ts" in found.report


def test_earlier_epochs_are_compared_with_the_last(other):
    only = split(1200, 100, 0).held_out
    by_epoch = {one.moment.epoch: one.name for one in complete(Storage(other))}
    scaled = {}
    for epoch in (1, 2, 3):
        name = by_epoch[epoch]
        held = map(torch.from_numpy, logits_of(other, only, "train", name))
        scaled[epoch] = softmax(logits_of(other, checkpoint=name)[0] / fit_temperature(*held))
    found = only_one(other).report["ta_kl"]
    assert found["epochs"] == [1, 2]
    for epoch, value in zip(found["epochs"], found["value"], strict=True):
        kl = (scaled[3] * np.log(scaled[3] / scaled[epoch])).sum(1).mean()
        assert value == pytest.approx(kl, rel=1e-3)
    assert found["value"][0] > found["value"][1] > 0


def test_evaluates_the_samples_that_were_held_out(other):
    z, labels = logits_of(other, split(1200, 100, 0).held_out, "train")
    found = only_one(other, split="hold_out")
    assert found.figures["accuracy"] == pytest.approx((z.argmax(1) == labels).mean())
    assert found.report["samples"] == 100


def test_says_how_far_into_an_epoch_the_model_is(teacher, tmp_path):
    midway = went_on(teacher, tmp_path / "midway", Moment(3, 640, 1000))
    report = only_one(midway).report
    assert (report["epoch"], report["position"]) == (3, 640)


def test_earlier_checkpoints_that_cannot_be_read_are_left_out(other, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(other, run)
    third, second, first = complete(Storage(run))
    state = run / FOLDER / second.name / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    assert only_one(run).report["ta_kl"]["epochs"] == [1]
    shutil.rmtree(run / FOLDER / first.name)  # pruned after it was listed
    monkeypatch.setattr("dps_dist.train.evaluation.complete", lambda _: [third, second, first])
    assert "ta_kl" not in only_one(run).report


# ---- the run's own data


def with_classes(run, folder, parts, names):
    """A copy of a run, on a copy of its data whose classes have other names."""
    data = shutil.copytree(load(run).config.data.path, folder / "data")
    for part in parts:
        file = data / f"{part}.parquet"
        table = pq.read_table(file)
        about = {**table.schema.metadata, b"class_names": json.dumps(names).encode()}
        pq.write_table(table.replace_schema_metadata(about), file)
    copy = shutil.copytree(run, folder / "run")
    fields = recipes.parse((copy / "config.yaml").read_text(), "")
    settings = recipes.resolve(fields, [f"data.path={data}"], where="")
    (copy / "config.yaml").write_text(recipes.as_yaml(settings))
    return copy


@pytest.mark.parametrize("names", ["abcdefghij", "0123456789ab"])
def test_data_of_other_classes_are_refused(teacher, tmp_path, names):
    run = with_classes(teacher, tmp_path, ["val"], list(names))
    with pytest.raises(InputError, match=r"val.beton is not what .*run was trained on \(.*class"):
        evaluate([str(run)])


def test_held_out_samples_of_other_classes_are_refused(other, tmp_path):
    run = with_classes(other, tmp_path, ["train"], list("abcdefghij"))
    with pytest.raises(InputError, match=r"train.beton is not what .* was trained on"):
        evaluate([str(run)])


def test_each_run_is_held_against_the_data(teacher, tmp_path):
    """The first knows the classes, and the other does not."""
    other = with_classes(teacher, tmp_path, [], [])
    first = shutil.copytree(other, tmp_path / "first")
    found = complete(Storage(other))[0]
    state = open_checkpoint(Storage(other), found.name, tmp_path).state
    known = {**state["data"], "sum of class names": 7}
    writer = Writer(Storage(other), config.Checkpoint(), "later", None)
    writer.save(Moment(3, 0, found.moment.step + 1), {**state, "data": known}, None)
    writer.wait()
    with pytest.raises(InputError, match=r"val.beton is not what .*run was trained on"):
        evaluate([str(first), str(other)])


# ---- several


def test_an_ensemble_is_the_mean_of_softmaxes(teacher, other):
    # Who is named twice counts once
    found = evaluate([str(teacher), str(other), str(teacher), f"{teacher}/"])
    assert [one.run.folder for one in found] == [str(teacher), str(other)]
    (z, labels), (w, _) = logits_of(teacher), logits_of(other)
    mean = (softmax(z) + softmax(w)) / 2
    nll = -np.log(mean[np.arange(len(labels)), labels]).mean()
    figures = ensemble(found)
    assert figures["nll"] == pytest.approx(nll, rel=1e-6)
    assert figures["accuracy"] == pytest.approx((mean.argmax(1) == labels).mean())


def test_the_same_data_may_be_named_in_several_ways(teacher, digits, tmp_path, monkeypatch):
    monkeypatch.chdir(digits.parent)
    relative = changed(teacher, tmp_path / "run", f"data.path={digits.name}", "train.seed=2")
    found = evaluate([str(teacher), str(relative)])
    assert over_seeds(found).mean["nll"] == pytest.approx(found[0].figures["nll"])


def test_runs_that_see_other_images_are_refused(teacher, other, cifar, tmp_path):
    with pytest.raises(InputError, match=r"has data.hold_out 0 and .* 100"):
        evaluate([str(other), str(teacher)], split="hold_out")
    with pytest.raises(InputError, match=r"--split is hold_out: .* held nothing out; give val"):
        evaluate([str(teacher)], split="hold_out")
    with pytest.raises(InputError, match=r"has samples 200 and .* 1200: evaluate runs on the same"):
        evaluate([str(teacher), str(cifar)])
    named = changed(cifar, tmp_path / "named", "data.source=cifar10")
    with pytest.raises(InputError, match=r"named has data.source cifar10 and .* digits: evaluate"):
        evaluate([str(cifar), str(named)])
    larger = tmp_path / "larger"
    shutil.copytree(teacher, larger)
    text = (larger / "config.yaml").read_text().replace("\n  resolution: 8", "\n  resolution: 12")
    (larger / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=r"larger has data.eval_resolution 12 and .* 8"):
        evaluate([str(teacher), str(larger)])


# ---- other data


class FakeCifar:
    """Images of CIFAR-10's form: class k is bright by 25·k."""

    class_names = CIFAR10_CLASSES

    def __init__(self, count, seed=0):
        rng = np.random.default_rng(seed)
        self.labels = np.arange(count) % 10
        noise = rng.integers(0, 20, (count, 32, 32, 3))
        self.images = (25 * self.labels[:, None, None, None] + noise).astype(np.uint8)

    def __len__(self):
        return len(self.labels)

    def read(self, i):
        return self.images[i]

    def path(self, i):
        return f"{i}.png"


@pytest.fixture(scope="module")
def cifar(ranks, tmp_path_factory):
    """A run on images of CIFAR-10's form, for a few steps."""
    data = tmp_path_factory.mktemp("cifar")
    for name, count in (("train", 200), ("val", 50)):
        fake = FakeCifar(count)
        write_split(fake, data, name, {"source": "cifar10"}, ImageOptions("raw"), workers=1)
    small = ["data.resolution=32", "method.name=baseline", "train.epochs=4"]
    settings = recipes.load("digits", [f"data.path={data}", *small])
    return made(ranks, tmp_path_factory.mktemp("cifar run"), settings)


def predicted(folder, images):
    run = load(folder)
    mean, std = (np.array(v) for v in (run.config.data.mean, run.config.data.std))
    x = torch.tensor((images / 255 - mean) / std, dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        return run.model(x).argmax(1).numpy()


def test_corruptions(cifar, tmp_path):
    fake = FakeCifar(100, seed=1)
    fake.labels[:] = np.arange(20).repeat(5) % 10
    np.save(tmp_path / "labels.npy", fake.labels)
    rng = np.random.default_rng(0)
    expected = {}
    for name in ("fog", "snow"):
        images = rng.permuted(fake.images, axis=0)
        np.save(tmp_path / f"{name}.npy", images)
        right = predicted(cifar, images) == fake.labels
        expected[name] = [right[20 * k : 20 * (k + 1)].mean() for k in range(5)]
    found = only_one(cifar, on={"c": str(tmp_path)}).report["on"]["c"]
    assert found["kind"] == "corruptions" and len(found["ece_by_severity"]) == 5
    for name, accuracies in expected.items():
        assert found["by_corruption"][name] == pytest.approx(accuracies)
    assert found["accuracy"] == pytest.approx(np.mean(list(expected.values())))


def test_perturbations(cifar, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 4, 1, 1, 3)).repeat(32, 2).repeat(32, 3).astype(np.uint8)
    for name in ("tilt", "gaussian_noise"):
        np.save(tmp_path / f"{name}.npy", images)
    classes = predicted(cifar, images.reshape(-1, 32, 32, 3)).reshape(6, 4)
    found = only_one(cifar, on={"p": str(tmp_path)}).report["on"]["p"]
    tilt = (classes[:, 1:] != classes[:, :-1]).mean()
    noise = (classes[:, 1:] != classes[:, :1]).mean()
    assert found["by_perturbation"] == pytest.approx({"tilt": tilt, "gaussian_noise": noise})
    assert found["mfp"] == pytest.approx((tilt + noise) / 2) and 0 < found["mfp"] < 1


def test_further_data_and_foreign_images(cifar, teacher, digits):
    data = load(cifar).config.data.path
    found = only_one(cifar, on={"again": data}, ood={"digits": str(digits)}).report
    again = found["on"]["again"]
    assert again["kind"] == "labelled" and again["figures"] == pytest.approx(found["figures"])
    assert found["on"]["digits"]["samples"] == 597 and 0 <= found["on"]["digits"]["auroc"] <= 1


class Varied(FakeCifar):
    """The same, in photographs of several sizes: the middle is the image, the rest is white."""

    def read(self, i):
        large = self.images[i].repeat(2, 0).repeat(2, 1)
        beside = 10 + i % 7
        return np.pad(large, ((0, 0), (beside, beside), (0, 0)), constant_values=255)


def test_images_of_any_size_are_cut_and_resized(cifar, tmp_path):
    """Though the run's own are shown as they are stored."""
    assert load(cifar).config.augment.crop == "pad"
    raw = ImageOptions("raw")
    write_split(Varied(50), tmp_path, "val", {"source": "photos"}, raw, workers=1)
    found = only_one(cifar, on={"varied": str(tmp_path)}, ood={"foreign": str(tmp_path)}).report
    assert found["on"]["varied"]["figures"] == pytest.approx(found["figures"], rel=1e-4)
    assert found["on"]["foreign"]["auroc"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        ("data.eval_crop=.75",),
        ("augment.crop=resized", "data.eval_resolution=24"),
    ],
)
def test_arrays_are_shown_as_prepared_images_are(cifar, tmp_path, settings):
    run = load(changed(cifar, tmp_path / "run", *settings))
    images = np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3)).astype(np.uint8)
    fake = FakeCifar(50)
    fake.images = images
    write_split(fake, tmp_path, "val", {"source": "cifar10"}, ImageOptions("raw"), workers=1)
    prepared = on_split(run, Shown(manifests.read(tmp_path, "val"), None)).logits
    torch.testing.assert_close(on_arrays(run, images), prepared, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"on": {"d": "DIGITS"}}, r"--on d=.* has the classes 0, 1, 2, … \(10\) and .* airplane"),
        ({"on": {"c": "WRONG"}}, r"fog.npy is uint8 of shape \(10, 8, 8, 3\): expected uint8"),
        ({"on": {"c": "EMPTY"}}, r"--on c is .*: there is no .beton file; prepare it with"),
        ({"on": {"p": "STILL"}}, r"tilt.npy has sequences of one frame: expected at least 2"),
        ({"on": {"all": "BOTH"}}, r"it holds CIFAR-10-C and CIFAR-10-P; give each by itself, as "),
        ({"ood": {"o": "EMPTY"}}, r"--ood o is .*: there is no .beton file; prepare it with"),
    ],
)
def test_other_data_that_do_not_fit_are_refused(cifar, digits, tmp_path, option, said, monkeypatch):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    np.save(wrong / "fog.npy", np.zeros((10, 8, 8, 3), np.uint8))
    still, both = tmp_path / "still", tmp_path / "both"
    for folder in (tmp_path / "empty", still, both / "CIFAR-10-C", both / "CIFAR-10-P"):
        folder.mkdir(parents=True)
    np.save(still / "tilt.npy", np.zeros((10, 1, 32, 32, 3), np.uint8))
    np.save(both / "CIFAR-10-C/fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    np.save(both / "CIFAR-10-P/tilt.npy", np.zeros((5, 2, 32, 32, 3), np.uint8))
    paths = {"DIGITS": str(digits), "WRONG": str(wrong), "EMPTY": str(tmp_path / "empty")}
    paths |= {"STILL": str(still), "BOTH": str(both)}
    monkeypatch.delattr("dps_dist.train.evaluation.on_split")  # nothing may be computed before
    given = {
        key: {name: paths[where] for name, where in value.items()} for key, value in option.items()
    }
    with pytest.raises(InputError, match=said):
        evaluate([str(cifar)], **given)


def test_prepared_corruptions_are_not_taken_for_one(cifar, tmp_path):
    """As `dps prepare cifar10-c` and `cifar10-p` write them."""
    raw = ImageOptions("raw")
    for name in ("brightness", "fog"):
        write_split(FakeCifar(20), tmp_path, name, {"source": "cifar10-c"}, raw, workers=1)
    for option in ("on", "ood"):
        with pytest.raises(InputError, match=r"holds brightness, fog and neither val nor test: "):
            evaluate([str(cifar)], **{option: {"c": str(tmp_path)}})
    unlabelled = FakeCifar(20)
    unlabelled.labels = np.full(20, -1)
    folder = tmp_path / "p"
    write_split(unlabelled, folder, "tilt", {"source": "cifar10-p"}, raw, workers=1)
    said = r"--on p is .*: .*tilt.beton has 20 of 20 samples without a label; give "
    with pytest.raises(InputError, match=said):
        evaluate([str(cifar)], on={"p": str(folder)})


def test_a_split_without_labels_is_refused(cifar, tmp_path, monkeypatch, capsys):
    """As --split and as the run's own, before anything is computed."""
    data = shutil.copytree(load(cifar).config.data.path, tmp_path / "data")
    unlabelled = FakeCifar(20)
    unlabelled.labels = np.full(20, -1)
    write_split(unlabelled, data, "tilt", {"source": "cifar10-p"}, ImageOptions("raw"), workers=1)
    run = changed(cifar, tmp_path / "run", f"data.path={data}")
    own = changed(run, tmp_path / "own", "evaluate.split=tilt")
    for words, given in (((run, "--split", "tilt"), "--split"), ((own,), "evaluate.split")):
        assert run_command(monkeypatch, *words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert (
            f"{given} is tilt: {data}/tilt.beton has 20 of 20 samples without a label; give "
            in said
        )
    with pytest.raises(InputError, match=r"evaluate.split is tilt: .* without a label; give "):
        check(load(own).config)
    write_split(unlabelled, data, "train", {"source": "cifar10"}, ImageOptions("raw"), workers=1)
    with pytest.raises(InputError, match=r"data.path is .*: .*train.beton has 20 of 20 samples "):
        check(load(run).config)


# ---- the command


def run_command(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["dps", "evaluate", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_the_command_says_which_epoch_was_the_best(teacher, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(teacher, tmp_path / "run")
    assert run_command(monkeypatch, run, "--checkpoint", "best") == 0
    report = json.loads((run / "evaluation-best.json").read_text())
    printed = capsys.readouterr().out
    assert f"note: the best checkpoint of {run} is that of epoch {report['epoch']}" in printed
    assert f"written to {run}/evaluation-best.json" in printed
    assert report["epoch"] == load(run, checkpoint="best").moment.epoch


def test_the_command_prints_and_writes(teacher, other, digits, tmp_path, monkeypatch, capsys):
    runs = [tmp_path / "a", tmp_path / "b"]
    for source, copy in zip((teacher, other), runs, strict=True):
        shutil.copytree(source, copy)
    out = tmp_path / "both.json"
    assert run_command(monkeypatch, *runs, "--out", out, "--on", f"same={digits}") == 0
    printed = capsys.readouterr().out
    both = json.loads(out.read_text())
    for folder in runs:
        report = json.loads((folder / "evaluation.json").read_text())
        assert report == both["runs"][str(folder)]
        assert f"{100 * report['figures']['accuracy']:.2f}" in printed
        assert f"{folder} on same: " in printed
        with np.load(folder / "evaluation.npz", allow_pickle=False) as arrays:
            assert arrays["mu"].shape == (10, 10)
    assert "mean ± deviation" not in printed  # another method, and other data held out
    assert f"{100 * both['ensemble']['accuracy']:.2f}" in printed


def test_a_run_that_cannot_be_written_to_is_measured(teacher, tmp_path, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "figures.json"
    shutil.copytree(teacher, run)
    (run / "evaluation.npz").mkdir()
    assert run_command(monkeypatch, run, "--out", out) == 2
    said = capsys.readouterr()
    (report,) = json.loads(out.read_text())["runs"].values()
    assert f"{100 * report['figures']['accuracy']:.2f}" in said.out
    assert f"{run}/evaluation.npz: Is a directory" in said.err


def test_the_command_takes_corruptions_and_foreign_images(
    cifar, digits, tmp_path, monkeypatch, capsys
):
    run, c, p = (tmp_path / name for name in ("run", "CIFAR-10-C", "CIFAR-10-P"))
    shutil.copytree(cifar, run)
    c.mkdir()
    p.mkdir()
    fake = FakeCifar(100, seed=1)
    np.save(c / "labels.npy", fake.labels)
    np.save(c / "fog.npy", fake.images)
    np.save(p / "tilt.npy", fake.images.reshape(20, 5, 32, 32, 3))
    words = ("--on", f"c={c}", "--on", f"p={p}", "--ood", f"svhn={digits}")
    assert run_command(monkeypatch, run, *words) == 0
    printed = capsys.readouterr().out
    found = json.loads((run / "evaluation.json").read_text())["on"]
    kinds = {name: found[name]["kind"] for name in ("c", "p")}
    assert kinds == {"c": "corruptions", "p": "perturbations"} and "auroc" in found["svhn"]
    assert all(f"{run} on {name}: " in printed for name in found)


def test_a_mean_is_of_runs_that_differ_in_seeds_alone(other, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    for k, (setting, same) in enumerate((("train.seed=7", True), ("method.gamma=.5", False))):
        again = changed(other, tmp_path / str(k), setting, "launch.workers=2")
        assert run_command(monkeypatch, other, again, "--out", out) == 0
        assert ("mean ± deviation" in capsys.readouterr().out) == same
        assert {"mean", "std"} <= set(json.loads(out.read_text())) or not same


def diverged(run, copy, *settings, epoch=3):
    """A copy of a run, with another configuration and with weights that are NaN at that epoch."""
    changed(run, copy, *settings)
    found = next(one for one in complete(Storage(copy)) if one.moment.epoch == epoch)
    state = open_checkpoint(Storage(copy), found.name, copy / "unused").state
    weights = {
        key: torch.full_like(value, math.nan) if value.is_floating_point() else value
        for key, value in state["model"].items()
    }
    writer = Writer(Storage(copy), config.Checkpoint(keep_last=9), "later", None)
    writer.save(Moment(epoch, 0, found.moment.step + 1), {**state, "model": weights}, None)
    writer.wait()
    shutil.rmtree(copy / FOLDER / found.name)
    return copy


def test_mean_and_deviation_are_written(other, digits, tmp_path, monkeypatch, capsys):
    first = shutil.copytree(other, tmp_path / "first")
    second = changed(other, tmp_path / "second", "train.seed=2")
    for found in complete(Storage(second))[:1]:  # so that it is another model
        shutil.rmtree(second / FOLDER / found.name)
    out = tmp_path / "out.json"
    foreign = ("--ood", f"others={digits}")
    assert run_command(monkeypatch, first, second, "--out", out, *foreign) == 0
    printed, held = capsys.readouterr().out, json.loads(out.read_text())
    reports = [held["runs"][str(run)] for run in (first, second)]
    nll = np.array([report["figures"]["nll"] for report in reports])
    assert nll.std() > 0
    assert held["mean"]["nll"] == pytest.approx(nll.mean())
    assert held["std"]["nll"] == pytest.approx(nll.std(ddof=1))
    assert f"{nll.mean():.3f} ± {nll.std(ddof=1):.3f}" in printed
    auroc = np.array([report["on"]["others"]["auroc"] for report in reports])
    assert held["mean"]["auroc on others"] == pytest.approx(auroc.mean())
    spread = f"{100 * auroc.mean():.2f} ± {100 * auroc.std(ddof=1):.2f}%"
    assert f"mean ± deviation on others: AUROC {spread}" in printed
    temperatures = np.array([report["temperature"] for report in reports])
    assert held["std"]["temperature"] == pytest.approx(temperatures.std(ddof=1))
    assert "ensemble" in held


def test_a_seed_that_diverged_leaves_a_table(other, digits, tmp_path, monkeypatch, capsys):
    first = shutil.copytree(other, tmp_path / "first")
    broken = diverged(other, tmp_path / "broken", "train.seed=2")
    out = tmp_path / "out.json"
    foreign = ("--ood", f"others={digits}")
    assert run_command(monkeypatch, first, broken, "--out", out, *foreign) == 0
    printed, held = capsys.readouterr().out, json.loads(out.read_text())
    figures = [held["runs"][str(run)]["figures"] for run in (first, broken)]
    assert figures[1]["nll"] is None and held["mean"]["nll"] is None and held["std"]["nll"] is None
    row = next(line for line in printed.splitlines() if line.startswith("NLL "))
    assert row.split() == ["NLL", f"{figures[0]['nll']:.3f}", "–", "–", "–"]
    accuracy = np.array([own["accuracy"] for own in figures])
    assert held["mean"]["accuracy"] == pytest.approx(accuracy.mean())
    assert "nan" not in printed and f"{broken} on others: AUROC –% against" in printed
    assert "ta_kl" not in held["runs"][str(broken)]  # its earlier epochs are there


def test_an_epoch_that_diverged_is_not_compared_with_the_last(other, tmp_path):
    broken = diverged(other, tmp_path / "broken", epoch=2)
    assert only_one(broken).report["ta_kl"]["epochs"] == [1]


def test_the_table_holds_what_json_can(teacher, tmp_path, monkeypatch):
    run, out = shutil.copytree(teacher, tmp_path / "run"), tmp_path / "new" / "table.json"
    real = metrics.Figures.figures
    monkeypatch.setattr(metrics.Figures, "figures", lambda own: real(own) | {"nll": math.nan})
    assert run_command(monkeypatch, run, "--out", out) == 0
    assert json.loads(out.read_text())["runs"][str(run)]["figures"]["nll"] is None


def test_the_command_wants_names(teacher, monkeypatch, capsys):
    assert run_command(monkeypatch, teacher, "--on", "somewhere") == 2
    assert "--on is somewhere: write it as NAME=PATH" in capsys.readouterr().err
