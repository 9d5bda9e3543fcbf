"""`dps audit`, `dps export` and `dps report` as they are typed, on real runs."""

import shutil
import sys

import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file

from dps_dist import recipes
from dps_dist.cli import main
from dps_dist.data import manifest as manifests
from dps_dist.train.trained import load
from tests.train.runs import trained

NOISE = ["data.noise={kind: symmetric, rate: .4}", "method.tau=.8", "train.epochs=12"]


@pytest.fixture(scope="module")
def data(digits, tmp_path_factory):
    """A copy of the digits, as a corrected manifest will be written beside them."""
    folder = tmp_path_factory.mktemp("data") / "digits"
    shutil.copytree(digits, folder)
    return folder


@pytest.fixture(scope="module")
def noisy(ranks, settings, data, tmp_path_factory):
    """A run with DPS on labels of which 40% were redrawn."""
    folder = tmp_path_factory.mktemp("noisy")
    config = settings(f"data.path={data}", *NOISE)
    (folder / "config.yaml").write_text(recipes.as_yaml(config))
    trained(ranks, config, folder, 2)
    return folder


@pytest.fixture
def dps(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["dps", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, capsys.readouterr()

    return run


def test_audit(dps, noisy, data, tmp_path):
    code, said = dps("audit", noisy, "--html", "wrong.html", "--top", 20, "--fix")
    assert code == 0, said.err
    table = pq.read_table(noisy / "audit.parquet")
    assert table.num_rows == 1200 and "1,200 samples" in said.out
    assert (tmp_path / "wrong.html").read_text().count("<img") == 20
    fixed = data / "train.corrected.parquet"
    corrected = pq.read_table(fixed)["label"].to_numpy()
    fixed.unlink()
    given, clean = table["label"].to_numpy(), manifests.read(data, "train").clean_labels
    assert (corrected == clean).mean() > 0.9 > (given == clean[table["index"].to_numpy()]).mean()


def test_audit_by_itself_writes_its_table(dps, noisy, tmp_path):
    (noisy / "audit.parquet").unlink(missing_ok=True)
    code, said = dps("audit", noisy)
    assert code == 0 and (noisy / "audit.parquet").exists(), said.err
    assert not list(tmp_path.iterdir())


def test_audit_writes_nothing_if_something_cannot_be(dps, noisy, data, tmp_path):
    (noisy / "audit.parquet").unlink(missing_ok=True)
    there = data / "train.corrected.parquet"
    there.write_bytes(b"mine")
    code, said = dps("audit", noisy, "--fix")
    assert code == 2 and "train.corrected.parquet is there already: remove it" in said.err
    there.unlink()
    code, said = dps("audit", noisy, "--html", "wrong.png", "--fix")
    assert code == 2 and "--html is wrong.png: give a page's name" in said.err
    assert not (noisy / "audit.parquet").exists() and not there.exists()


def test_audit_above_a_threshold(dps, noisy, data, tmp_path):
    changed = {}
    for threshold in ("0", ".5"):
        words = ["--html", "wrong.html", "--top", 2000, "--fix", "--threshold", threshold]
        code, said = dps("audit", noisy, *words)
        assert code == 0, said.err
        fixed = data / "train.corrected.parquet"
        changed[threshold] = int(pq.read_schema(fixed).metadata[b"corrected_labels"])
        assert (tmp_path / "wrong.html").read_text().count("<img") == changed[threshold]
        fixed.unlink()
    assert 0 < changed[".5"] < changed["0"]
    assert dps("audit", noisy, "--threshold", "1.5")[0] == 2


def test_audit_of_a_method_without_evidence(dps, teacher):
    code, said = dps("audit", teacher)
    assert code == 2 and said.err.startswith("dps: ") and "baseline" in said.err


def test_export(dps, noisy, tmp_path):
    code, said = dps("export", noisy, "exported", "--targets", "top", "--top-k", 3)
    assert code == 0, said.err
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert weights.keys() == load(noisy).model.state_dict().keys()
    assert pq.read_table(tmp_path / "exported/targets.parquet").num_rows == 1200
    assert "model.safetensors" in said.out and "README.md" in said.out
    code, said = dps("export", noisy, "exported")
    assert code == 2 and "exported" in said.err


def test_export_without_and_with_everything(dps, noisy, tmp_path):
    for words, more in (
        ([], set()),
        (["--onnx", "--targets", "probabilities"], {"model.onnx", "targets.parquet"}),
    ):
        code, said = dps("export", noisy, f"exported{len(words)}", *words)
        assert code == 0, said.err
        written = {path.name for path in (tmp_path / f"exported{len(words)}").iterdir()}
        assert written == {"model.safetensors", "README.md", "config.yaml", *more}


def test_report_of_several_runs_is_beside_them(dps, noisy, teacher, tmp_path):
    runs = [tmp_path / "runs" / name for name in ("baseline", "dps")]
    for run, copy in zip((teacher, noisy), runs, strict=True):
        shutil.copytree(run, copy)
    code, said = dps("report", "runs/baseline", "runs/dps")
    assert code == 0 and "baseline" in said.out and "dps" in said.out, said.err
    assert (tmp_path / "runs" / "report.html").stat().st_size > 10_000
    code, said = dps("report", *sorted((tmp_path / "runs").glob("[bd]*")), "--out", "curves.png")
    assert code == 0, said.err
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 500
    for name in ("table.md", "curves.svg", "curves.PNG"):
        code, said = dps("report", *sorted((tmp_path / "runs").iterdir()), "--out", f"runs/{name}")
        assert code == 0, said.err
    assert dps("report", *sorted((tmp_path / "runs").iterdir()))[0] == 0


def test_folders_that_are_no_runs_are_left_out_of_several(dps, noisy, teacher, tmp_path):
    for run, name in ((teacher, "baseline"), (noisy, "dps")):
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(run)
    (tmp_path / "runs/sweep/runs").mkdir(parents=True)
    every = sorted((tmp_path / "runs").iterdir())
    code, said = dps("report", *every, "--out", "table.md")
    assert code == 0, said.err
    assert said.err == f"note: {tmp_path}/runs/sweep is no run, it has no config.yaml: left out\n"
    assert (tmp_path / "table.md").read_text().count("\n| ") == 2
    code, said = dps("report", every[0], "runs/typo", "--out", "table.md")
    assert code == 2 and "runs/typo is no folder" in said.err
    for none in (["runs/sweep"], ["runs/sweep", "runs/sweep/runs"]):
        code, said = dps("report", *none, "--out", "table.md")
        assert code == 2 and "runs/sweep is no run, it has no config.yaml" in said.err
