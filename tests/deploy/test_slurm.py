"""dps.sbatch on a stand-in of a few lines; deploy/slurm/verify.sh runs it on a real Slurm."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from dps_dist import recipes
from dps_dist.cli.base import app

ROOT = Path(__file__).parent.parent.parent
SBATCH = ROOT / "deploy/slurm/dps.sbatch"
PATIENCE_S = 240  # a busy machine is no failure
COMMANDS = {
    "scontrol": 'echo "scontrol $*" >> calls; echo "   NodeAddr=127.0.0.1 NodeHostName=a"',
    "srun": 'echo "srun $*" >> calls; exec sleep 100',
    "ray": "exit 0",
    "dps": 'stat -c %a .dps-7.token > mode; echo "$*" >> trained; exec sleep "${TRAIN_S:-0}"',
    # All nodes are there; whether there is a folder is asked of the real one.
    "python": f'case "$*" in *ray.init*) ;; *) exec {shlex.quote(sys.executable)} "$@" ;; esac',
}


def test_it_is_bash():
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_its_commands_are_those_of_dps():
    pages = SBATCH.read_text() + (SBATCH.parent / "README.md").read_text()
    lines = re.sub(r"\\\n#?", " ", pages)
    found = re.findall(r"dps\.sbatch +(\w.*--workers.*)", lines)
    assert len(found) >= 2
    for line in found:
        words = [*shlex.split(line, comments=True), "--out", "o", "--name", "n", "--resume"]
        options = typer.main.get_command(app).commands["train"].make_context("train", words).params
        settings = [*(options["settings"] or ()), f"launch.workers={options['workers']}"]
        assert recipes.load(options["recipe"], settings)


@pytest.fixture
def job(tmp_path):
    """Starts dps.sbatch as Slurm would, in `tmp_path`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "dps",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURMD_NODENAME": "a",
    }

    def start(**more):
        return subprocess.Popen(["bash", SBATCH, "digits"], cwd=tmp_path, env={**env, **more})

    return start


def test_a_run_that_has_a_folder_is_resumed_and_the_token_goes_with_the_job(job, tmp_path):
    assert job().wait(PATIENCE_S) == 0
    (tmp_path / "runs/dps-7").mkdir(parents=True)
    (tmp_path / "runs/dps-7/config.yaml").touch()
    assert job().wait(PATIENCE_S) == 0
    first = "train digits --out runs --name dps-7"
    assert (tmp_path / "trained").read_text().splitlines() == [first, f"{first} --resume"]
    assert (tmp_path / "mode").read_text() == "600\n"
    assert not list(tmp_path.glob(".dps*"))


@pytest.mark.parametrize(("name", "code", "requeued"), [("USR1", 0, True), ("TERM", 143, False)])
def test_signals(job, tmp_path, name, code, requeued):
    """Slurm sends USR1 before the time limit, TERM when the job is cancelled."""
    started = job(TRAIN_S="100")
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "trained").exists():
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    subprocess.run(["kill", f"-{name}", str(started.pid)], check=True)
    assert started.wait(PATIENCE_S) == code
    assert ("scontrol requeue 7" in (tmp_path / "calls").read_text()) == requeued
    assert not list(tmp_path.glob(".dps*"))
