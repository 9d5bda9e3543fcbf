"""deploy/reproduce: what its scripts would run for their rows, and a real run, tiny."""

import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from ray.util import get_node_ip_address

from dps_dist.recipes import paper
from tests.conftest import write_photos
from tests.deploy.commands import DEPLOY, ROOT, config_of, parsed
from tests.deploy.ray_head import RAY, Head, head
from tests.launch.training import DPS, ELSEWHERE, OWN_RAY, short_home

SCRIPT, CIFAR10 = (DEPLOY / "reproduce" / name for name in ("imagenet.sh", "cifar10.sh"))
both = pytest.mark.parametrize("script", [SCRIPT, CIFAR10], ids=lambda script: script.name)
SMALL = (
    *("model={name: small_cnn, stem: 3x3}", "data.resolution=32", "data.batch_size=16"),
    *("train.epochs=2", "train.amp=none", "optim.warmup_epochs=0", "launch.cpus_per_worker=1"),
)


def environment(home: Path) -> dict[str, str]:
    """With a `dps` that is this code, and a Ray of its own."""
    (home / "bin").mkdir()
    dps = home / "bin" / "dps"
    run = "from dps_dist.cli import main; main()"
    dps.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{run}" "$@"\n')
    dps.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not ELSEWHERE.fullmatch(key)}
    own = {"RAY_TMPDIR": str(home), "TMPDIR": str(home), "PYTHONPATH": str(ROOT)}
    return {**kept, **OWN_RAY, **own, "PATH": f"{home / 'bin'}:{kept['PATH']}"}


def planned(*options: str, script: Path = SCRIPT) -> list[list[str]]:
    """The commands of a dry run; nothing else is printed, and nothing is there after it."""
    done = subprocess.run(
        [script, "--images", "/no/images", "--dry-run", *options], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(line.startswith("+ ") for line in done.stdout.splitlines())
    return [shlex.split(line[2:]) for line in done.stdout.splitlines()]


def rows_of(script: Path) -> list[str]:
    """Of ImageNet the paper's recipes; of CIFAR-10 the lightweight methods, clean and noisy."""
    if script == CIFAR10:
        methods = ("baseline", "te", "dlb", "pskd", "ls", "sl", "dps")
        return [f"cifar10-wrn10_2-{name}{noise}" for noise in ("", "-sym40") for name in methods]
    (accuracy,) = [table for table in paper.tables() if table.id == "accuracy"]
    rows = [row.recipes for row in accuracy.rows if row.name.startswith("ImageNet,")]
    return [name for row in rows for name in row]


@both
def test_the_dry_run_names_the_rows(tmp_path, script):
    folders = ("--data", str(tmp_path / "data"), "--runs", str(tmp_path / "runs"))
    options = [parsed(words) for words in planned(*folders, script=script)]
    assert [one["command"] for one in (options[0], options[-1])] == ["prepare", "report"]
    assert str(options[0]["root"]) == "/no/images"
    assert options[0]["train_images"] == (1500 if script == CIFAR10 else None)
    trained = [one for one in options if one["command"] == "train"]
    wanted = [(name, seed) for name in rows_of(script) for seed in (0, 1, 2)]
    assert [(one["recipe"], config_of(one).train.seed) for one in trained] == wanted
    for one in trained:
        config = config_of(one)
        assert config.data.path == str(tmp_path / "data")
        assert config.data.source == options[0]["source"]
        assert config.data.noise.rate == (0.4 if one["recipe"].endswith("-sym40") else 0)
        assert one["name"] == f"{one['recipe']}-{config.train.seed}"
        if one["recipe"].endswith("-kd"):
            assert len(config.method.teachers) == 3
            assert {Path(teacher).name for teacher in config.method.teachers} <= {
                other["name"] for other in trained
            }
    evaluated = [run for one in options if one["command"] == "evaluate" for run in one["runs"]]
    assert evaluated == [f"{tmp_path}/runs/{one['name']}" for one in trained]
    assert list(map(str, options[-1]["runs"])) == evaluated
    assert not list(tmp_path.iterdir())


def test_on_a_cluster_it_submits_jobs():
    options = ("--address", "http://head:8265", "--models", "resnet152", "--rows", "dps-cutmix")
    commands = planned(*options, "--seeds", "7", "--workers", "8:64", "--set", "train.epochs=3")
    jobs = [words for words in commands if words[:3] == ["ray", "job", "submit"]]
    assert len(jobs) == 2
    for words in jobs:
        assert words[words.index("--address") + 1] == "http://head:8265"
    train, evaluate = (parsed(words[words.index("--") + 1 :]) for words in jobs)
    assert config_of(train).train.epochs == 3 and train["workers"] == "8:64"
    assert evaluate["runs"] == [f"{train['out']}/{train['name']}"]


@pytest.mark.parametrize("folder", ["100%d", "a%sb", "a b"])
def test_teachers_are_in_any_folder(tmp_path, folder):
    runs = tmp_path / folder
    options = ("--runs", str(runs), "--models", "resnet152", "--rows", "kd", "--seeds", "0 1")
    trained = [words for words in planned(*options) if words[:2] == ["dps", "train"]]
    teachers = ",".join(f"{runs}/imagenet-resnet152-baseline-{seed}" for seed in (0, 1))
    assert len(trained) == 2
    assert all(f"method.teachers=[{teachers}]" in words for words in trained)


@both
def test_help_names_every_option_and_default(script):
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{script.name} --images DIR") and not done.stderr
    taken = re.findall(r"^ +(--[a-z-]+)\)", (script.parent / "rows.sh").read_text(), re.MULTILINE)
    assert set(taken) <= set(re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE))
    rows = re.search(r"rows=\"(.*?)\"", script.read_text())
    assert rows and f"[{rows[1]}]" in done.stdout


@both
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--images is missing"),
        (["--images"], "--images needs a value"),
        (["--images", "/no/images"], "--images is /no/images: it holds no"),
        (["--image", "x"], "--image is not an option"),
        (["--images", "x", "--runs", "s3://bucket/runs"], "give folders"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(script, options, said):
    done = subprocess.run([script, *options], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script.name}: ") and said in line


@pytest.mark.timeout(600)
def test_from_images_to_report(tmp_path):
    """All of it, with one tiny run."""
    write_photos(tmp_path / "images", per_class=16)
    runs = tmp_path / "runs"
    call = [SCRIPT, "--images", tmp_path / "images", "--data", tmp_path / "data", "--runs", runs]
    call += ["--models", "resnet152", "--rows", "dps", "--seeds", "0", "--workers", "1"]
    call += ["--prepare", "--max-side 64 --workers 1"]
    call += [word for setting in SMALL for word in ("--set", setting)]
    with short_home() as home:
        env = environment(home)
        done = subprocess.run(call, capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        run = runs / "imagenet-resnet152-dps-0"
        summary = json.loads((run / "summary.json").read_text())
        assert summary["epochs"] == 2 and (run / "targets" / "targets.json").exists()
        evaluated = json.loads((runs / "imagenet-resnet152-dps.json").read_text())
        assert list(evaluated["runs"]) == [str(run)]
        assert "imagenet-resnet152-dps-0" in (runs / "report.html").read_text()


def test_again_it_does_what_is_missing(tmp_path):
    """Seen by a `dps` that only notes how it is called, and fails where it is told to."""
    calls, runs = tmp_path / "calls", tmp_path / "runs"
    dps = tmp_path / "dps"
    dps.write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase $* in *-te-2*) exit 1 ;; esac\n')
    dps.chmod(0o755)
    (tmp_path / "images" / "train").mkdir(parents=True)
    for seed, files in (("0", ["config.yaml", "summary.json"]), ("1", ["config.yaml"])):
        run = runs / f"imagenet-resnet152-te-{seed}"
        run.mkdir(parents=True)
        for name in files:
            (run / name).touch()
    call = [SCRIPT, "--images", tmp_path / "images", "--runs", runs, "--rows", "te"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(call, capture_output=True, text=True, env=env, cwd=tmp_path)
    prepare, resume, begin = calls.read_text().splitlines()
    assert prepare.startswith("prepare imagefolder")
    assert resume == f"train --name imagenet-resnet152-te-1 --out {runs} --workers 8 --resume"
    assert begin.startswith("train imagenet-resnet152-te --name imagenet-resnet152-te-2")
    assert done.returncode == 1, "what fails ends it: no evaluation of half of the runs"


@pytest.mark.timeout(600)
def test_its_jobs_run_on_a_cluster_and_a_stopped_one_ends_it(tmp_path, digits):
    """On a real Ray with token and TLS; only `dps` is a script that notes how it is called."""
    calls, dps = tmp_path / "calls", tmp_path / "dps"
    dps.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\ncase $1 in evaluate) exec sleep 300 ;; esac\n'
    )
    dps.chmod(0o755)
    (tmp_path / "images" / "train").mkdir(parents=True)
    path = f"{tmp_path}:{RAY.parent}:{os.environ['PATH']}"
    call = [SCRIPT, "--images", tmp_path / "images", "--models", "resnet152", "--rows", "kd"]
    call += ["--seeds", "4", "--gpus", "0", "--set", "method={T: 2, lam: 0.5}"]
    with short_home() as home, head(home, path, certificate(home)) as ray:
        started = subprocess.Popen(
            [*call, "--address", ray.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ray.env,
            cwd=tmp_path,
        )
        for line in started.stdout:
            if "Running entrypoint" in line and "dps evaluate" in line:
                job = shlex.split(line)[4].rstrip(":")
                stop = [RAY, "job", "stop", "--address", ray.address, job]
                subprocess.run(stop, env=ray.env, check=True, capture_output=True)
        _, errors = started.communicate(timeout=60)
        who_trains_there_needs_token_and_certificate(ray, digits, tmp_path / "real")
    assert started.returncode == 1
    assert f"imagenet.sh: job {job} did not succeed" in errors
    prepare, train, evaluate = calls.read_text().splitlines()
    assert prepare.startswith("prepare") and evaluate.startswith("evaluate")
    assert train.startswith("train imagenet-resnet152-kd ")
    assert "--set method={T: 2, lam: 0.5} " in train  # in one piece, through two shells
    teacher = f"{tmp_path}/runs/imagenet/imagenet-resnet152-baseline-4"
    assert train.endswith(f"--set train.seed=4 --set method.teachers=[{teacher}]")


def certificate(home: Path) -> dict[str, str]:
    """Made as deploy/ray/README.md says, for this node's address, and given to Ray as there."""
    node, folder = get_node_ip_address(), home / "certs"
    make = [DEPLOY / "ray" / "certificate.sh", folder, node]
    subprocess.run(make, check=True, capture_output=True)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
        "RAY_TLS_SERVER_CERT": str(folder / node / "tls.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / node / "tls.key"),
    }


def who_trains_there_needs_token_and_certificate(ray: Head, digits: Path, out: Path) -> None:
    def train(**env: str) -> subprocess.CompletedProcess[str]:
        command = [str(DPS), "train", "digits", "--workers", "1", "--name", "a", "--out", str(out)]
        command += ["--set", f"data.path={digits}", "--set", "train.epochs=1"]
        env = {**ray.env, "RAY_ADDRESS": ray.gcs, **env}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    for env, why in (
        ({"RAY_AUTH_TOKEN": "0" * 32}, "the token is wrong"),
        ({"RAY_TLS_CA_CERT": "/no/ca.crt"}, "RAY_TLS_CA_CERT is /no/ca.crt"),
    ):
        refused = train(**env)
        assert refused.returncode == 2 and not out.exists()
        (line,) = refused.stderr.splitlines()
        assert why in line
    done = train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "a" / "summary.json").exists()
    host, _, port = ray.gcs.rpartition(":")
    authority = ssl.create_default_context(cafile=ray.env["RAY_TLS_CA_CERT"])
    with (
        socket.create_connection((host, int(port))) as plain,
        authority.wrap_socket(plain, server_hostname=host) as encrypted,
    ):
        assert encrypted.version()


@pytest.mark.parametrize("script", sorted(DEPLOY.rglob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", script])
    assert done.returncode == 0
