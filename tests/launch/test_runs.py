"""Which run the command line asks for: new names, --resume, what may change. No Ray is started."""

import errno
import fcntl
import io
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import yaml
from rich.console import Console

from dps_dist import locks, recipes
from dps_dist.cli import main
from dps_dist.errors import FailedError, InputError
from dps_dist.launch import ray_train
from dps_dist.launch.display import Display
from dps_dist.launch.runs import CONFIG, NAME, default_name, differences, open_run
from dps_dist.launch.worker import is_hopeless

VIT = ["--set", "model.name=vit_b_16", "--set", "data={resolution: 32, eval_resolution: 64}"]

RESNET = ["digits", "--set", "model.name=resnet18"]
ALONE = ["--workers", "1", "--set", "data.batch_size=1"]
TEN = ["--set", "data.batch_size=10"]
ONE = "model.name is resnet18: its batch norm cannot learn from a single image.* data.batch_size "


def created(out: Path, name: str = "a", recipe: str = "digits", settings: tuple[str, ...] = ()):
    run = open_run(recipe, settings, str(out), name, resume=False)
    run.create()
    return run


def test_a_new_run_writes_what_it_is(tmp_path):
    run = created(tmp_path, settings=("train.seed=7",))
    written = yaml.safe_load((tmp_path / "a" / CONFIG).read_text())
    facts = written.pop("run")
    assert written == json.loads(run.config.model_dump_json())
    assert written["train"]["seed"] == 7
    assert facts["name"] == "a"
    assert {"torch", "ray", "ffcv", "python", "revision", "command", "created"} <= facts.keys()


def test_its_config_is_a_recipe(tmp_path):
    run = created(tmp_path, settings=("method.c=5",))
    assert recipes.load(str(tmp_path / "a" / CONFIG)) == run.config


def test_a_name_that_exists_is_refused(tmp_path):
    created(tmp_path)
    with pytest.raises(InputError, match=r"a exists: choose another --name, or .* --resume"):
        open_run("digits", (), str(tmp_path), "a", resume=False)


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        open_run("digits", (), str(tmp_path), "a", resume=False)


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b"])
def test_a_name_is_one_plain_word(tmp_path, name):
    with pytest.raises(InputError, match="--name is"):
        open_run("digits", (), str(tmp_path), name, resume=False)


def test_two_that_start_at_once_do_not_share_a_folder(tmp_path):
    runs = [open_run("digits", (), str(tmp_path), "a", resume=False) for _ in range(2)]
    runs[0].create()
    with pytest.raises(InputError, match="a exists"):
        runs[1].create()


def test_a_run_that_could_not_be_written_is_not_in_the_way(small_disk):
    run = open_run("digits", (), str(small_disk / "runs"), "a", resume=False)
    filled = small_disk / "others"
    with suppress(OSError):
        filled.write_bytes(bytes(3 << 20))
    with pytest.raises(OSError, match=r"No space left on device: '.*/config.yaml'"):
        run.create()
    assert list((small_disk / "runs").iterdir()) == []
    filled.unlink()
    (small_disk / "runs/a").mkdir()  # an empty folder is as good as none
    created(small_disk / "runs")
    assert [path.name for path in small_disk.rglob("*")] == ["runs", "a", CONFIG]


def test_a_file_of_the_runs_name_is_in_the_way(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(InputError, match="a exists"):
        created(tmp_path)
    assert (tmp_path / "a").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_a_run_that_ray_loses_is_said_in_a_sentence(digits, tmp_path, monkeypatch):
    def lost(*_):
        raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr(ray_train.cluster, "connect", lambda: False)
    monkeypatch.setattr(ray_train.cluster, "nodes", lambda: [{"CPU": 2.0}])
    monkeypatch.setattr(ray_train, "_fit", lost)
    run = open_run("digits", (f"data.path={digits}",), str(tmp_path), "a", resume=False)
    with pytest.raises(FailedError, match=r"^Ray lost the run \(.*\): --resume continues") as told:
        ray_train.train(run, Display(Console(file=io.StringIO())))
    assert "\n" not in str(told.value)
    assert not is_hopeless(told.value)  # a sweep begins such a trial again
    assert (tmp_path / "a" / CONFIG).exists()


def test_a_password_is_not_written_down(tmp_path, monkeypatch):
    out = "s3://KEY:SECRET@bucket/runs?client_secret=SECRET"
    monkeypatch.setattr(sys, "argv", ["dps", "train", "--out", out, "--name", "a"])
    created(tmp_path)
    text = (tmp_path / "a" / CONFIG).read_text()
    assert "SECRET" not in text and "s3://***@bucket/runs?***' --name a" in text


def test_a_teacher_whose_address_holds_a_password_is_refused():
    teachers = "method.teachers=[runs/a, s3://KEY:SECRET@bucket/b]"
    with pytest.raises(InputError, match=r"teachers holds s3://\*\*\*@…") as told:
        recipes.load("cifar10-resnet18-kd", [teachers])
    assert "SECRET" not in str(told.value)
    assert recipes.load("cifar10-resnet18-kd", ["method.teachers=[s3://bucket/b@1]"])


def test_names_of_their_own_do_not_clash(tmp_path):
    run = open_run("digits", (), str(tmp_path), None, resume=False)
    assert run.storage.name.startswith("digits-dps-2")


@pytest.mark.parametrize(
    ("stem", "begins"),
    [
        ("my recipe", "my_recipe-dps-2"),
        (".größe", "gr_e-dps-2"),
        ("数字-dps", "dps-2"),
        ("数字", "dps-2"),
        ("x" * 200, "x" * 80 + "-2"),
    ],
)
def test_a_recipe_of_any_name_gives_a_name(tmp_path, stem, begins):
    (tmp_path / f"{stem}.yaml").write_text("extends: digits")
    run = open_run(str(tmp_path / f"{stem}.yaml"), (), str(tmp_path / "runs"), None, resume=False)
    assert run.storage.name.startswith(begins)
    assert NAME.fullmatch(default_name("数字"))


def test_resume_takes_the_stored_configuration(tmp_path):
    run = created(tmp_path, settings=("method.c=5", "train.seed=3"))
    again = open_run(None, (), str(tmp_path), "a", resume=True)
    assert again.config == run.config and not again.is_new and not again.is_finished


def test_resume_may_change_how_but_not_what(tmp_path):
    created(tmp_path)
    free = ("launch.workers=1:4", "train.checkpoint.every_steps=5", "data.threads=3")
    config = open_run(None, free, str(tmp_path), "a", resume=True).config
    assert config.launch.workers == "1:4" and config.train.checkpoint.every_steps == 5
    with pytest.raises(InputError) as caught:
        open_run("digits", ("method.gamma=.5", "train.epochs=9"), str(tmp_path), "a", resume=True)
    assert "method.gamma is 0.5 and was 0.85" in str(caught.value)
    assert "train.epochs is 9 and was 40" in str(caught.value)
    with pytest.raises(InputError, match=r"method.name is 'baseline' and was 'dps'"):
        open_run(None, ("method.name=baseline",), str(tmp_path), "a", resume=True)


def test_resume_needs_a_run(tmp_path):
    with pytest.raises(InputError, match=r"x is not a run, it has no config.yaml: check --out"):
        open_run(None, (), str(tmp_path), "x", resume=True)
    with pytest.raises(InputError, match="--resume needs the --name"):
        open_run(None, (), str(tmp_path), None, resume=True)


def test_a_damaged_configuration_is_not_resumed(tmp_path):
    created(tmp_path)
    (tmp_path / "a" / CONFIG).write_bytes(b"\x80\x81")
    with pytest.raises(InputError, match=r"a/config.yaml is damaged, it is no text"):
        open_run(None, (), str(tmp_path), "a", resume=True)


def test_a_run_with_a_summary_is_finished(tmp_path):
    created(tmp_path)
    (tmp_path / "a" / "summary.json").write_text("{}")
    assert open_run(None, (), str(tmp_path), "a", resume=True).is_finished


def test_only_a_new_run_without_checkpoints_is_forgotten(tmp_path):
    run = created(tmp_path)
    (tmp_path / "a" / "checkpoints" / "00000001-x").mkdir(parents=True)
    run.forget()
    assert (tmp_path / "a" / CONFIG).exists()
    other = created(tmp_path, "b")
    open_run(None, (), str(tmp_path), "b", resume=True).forget()
    assert (tmp_path / "b").exists()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    other.forget()
    assert (tmp_path / "b").exists()  # an epoch's work is something
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    other.forget()
    assert not (tmp_path / "b").exists()


def test_two_processes_do_not_train_one_run(tmp_path):
    run = created(tmp_path)
    other = open_run(None, (), str(tmp_path), "a", resume=True)
    refused = pytest.raises(InputError, match="is being trained by another process")
    with run.locked(), refused, other.locked():
        pass
    with run.locked():
        pass


def test_the_lock_is_one_that_nfs_gives(tmp_path, monkeypatch):
    def nfs(held, how):
        if not held.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", nfs)
    monkeypatch.setattr(locks, "NONE", ())
    with created(tmp_path).locked():
        pass


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_locks_is_trained_on(tmp_path, monkeypatch, number):
    def refuse(held, how):
        raise OSError(number, os.strerror(number))

    run = created(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with run.locked():
        pass


def test_a_lock_that_fails_otherwise_is_told(tmp_path, monkeypatch):
    def refuse(held, how):
        raise OSError(errno.EIO, "Input/output error")

    run = created(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"), run.locked():
        pass


def test_differences_go_field_by_field():
    old, new = recipes.load("digits"), recipes.load("digits", ["data.noise.rate=.5"])
    assert list(differences(old, new)) == [("data.noise.rate", 0.0, 0.5)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--workers", "3"], "--workers is 3: data.batch_size, 64, is not a multiple"),
        (["digits", "--workers", "65:70"], "--workers is 65:70: data.batch_size is only 64"),
        (["digits", "--workers", "1:2", "--set", "data.shuffle=shard"], "shuffle is shard"),
        (["digits", *VIT], "model.name is vit_b_16: it cannot take images of 64×64"),
        ([*RESNET, *ALONE], f"{ONE}1, data.max_per_worker none and --workers 1 leave"),
        ([*RESNET, "--set", "data.max_per_worker=1"], f"{ONE}64, data.max_per_worker 1 and --wor"),
        ([*RESNET, "--workers", "64"], f"{ONE}64, data.max_per_worker none and --workers 64 leave"),
        # Two workers have five images each, and two at a time
        (
            [*RESNET, *TEN, "--workers", "1:5"],
            f"{ONE}10, data.max_per_worker none and --workers 1:5",
        ),
        (["digits", "--workers", "none"], "launch.workers is 'none': give a number such as 2"),
        (["digits", "--resume"], "--resume needs the --name"),
        (["digits", "--name", "x", "--resume"], "x is not a run"),
        (["digits", "--name", "../x"], "--name is '../x'"),
        (["digit"], "did you mean digits"),
        (["digits", "--set", "data.path=nowhere"], "nowhere.*dps prepare"),
        (["digits", "--out", "what://x"], "what"),
        (["digits", "--set", "evaluate.split=test"], "test"),
        (["digits", "--set", "data.batch_size=5000"], "data.batch_size is 5000.*1200 images"),
        (["digits", "--set", "model.name=resnet19"], "model.name is resnet19: give one of"),
    ],
)
def test_bad_input_gets_its_sentence_before_ray_starts(
    arguments, said, digits, tmp_path, monkeypatch, capsys
):
    settings = [] if "data.path=nowhere" in arguments else ["--set", f"data.path={digits}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dps", "train", *arguments, *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(told.strip().splitlines()) == 1 and told.startswith("dps: ")
    assert re.search(said, told), told
    assert not list(tmp_path.iterdir())
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "settings", [["data.batch_size=2"], ["model.name=vit_b_16", "data.resolution=16"]]
)
def test_small_batches_are_taken_where_nothing_is_against_them(digits, settings):
    one = ["model.name=resnet18", "data.batch_size=1", "launch.workers=1"]
    ray_train.check(recipes.load("digits", [f"data.path={digits}", *one, *settings]))


def test_a_finished_run_says_so(tmp_path, monkeypatch, capsys):
    created(tmp_path)
    (tmp_path / "a" / "summary.json").write_text("{}")
    command = ["dps", "train", "--name", "a", "--out", str(tmp_path), "--resume"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and "is finished" in capsys.readouterr().out
