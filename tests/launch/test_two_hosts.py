"""Two hosts with a network between them, which is cut: network namespaces joined by a cable."""

import os
import secrets
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

from tests.launch.training import (
    DPS,
    OWN_RAY,
    PATIENCE_S,
    Training,
    kill,
    processes_of,
    short_home,
    targets_of,
)

EPOCHS = 6
SETTINGS = (
    "data.batch_size=16",
    "data.drop_last=false",
    f"train.epochs={EPOCHS}",
    "train.checkpoint.every_steps=25",
    "launch.placement=STRICT_SPREAD",
    "launch.timeout_s=20",
    "launch.max_failures=20",  # on a busy machine 20 s may pass without a cut
)
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen by the two namespaces only
PORT = 6379
HOST_ENV = {
    **OWN_RAY,
    "GLOO_SOCKET_IFNAME": "eth0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.mark.timeout(1200)
def test_a_host_that_is_cut_off_is_done_without(digits):
    with two_hosts() as hosts, short_home() as home, ray_on(hosts, home) as cluster:
        env = {**cluster, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
        settings = (*SETTINGS, f"data.path={digits}")
        with Training(home, settings, env, prefix=inside(hosts[0])) as training:
            training.start("--workers", "1:2")
            training.until("both hosts at work", lambda: training.worker_counts() == [2])
            ip("-n", hosts[1], "link", "set", "eth0", "down")
            training.until("one at work", lambda: "1 worker instead of 2" in training.terminal())
            assert training.end() == 0
            assert training.worker_counts() == [2, 1]
            assert [row["step"] for row in training.rows()] == list(range(75, 75 * EPOCHS + 1, 75))
            assert training.unexpected() == []
            targets = targets_of(training.run / "targets")
            assert len(targets["visits"]) == 1200
            assert (targets["visits"].int() == EPOCHS).all()


@pytest.fixture(autouse=True)
def iproute2():
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made with `ip`: install iproute2")


@contextmanager
def two_hosts():
    """The names of two network namespaces with an eth0 each, the two ends of one cable."""
    names = tuple(f"dps{os.getpid()}{end}" for end in "ab")
    try:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        near, far = names
        ip("-n", near, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", far)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


def inside(host):
    return ("ip", "netns", "exec", host)


@contextmanager
def ray_on(hosts, home):
    """The environment of a Ray cluster with one CPU a host; the first host is its head."""
    token = home / "token"
    token.write_text(secrets.token_hex(16))
    env = {**HOST_ENV, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    env = {**env, "RAY_TMPDIR": str(home)}
    address = f"{ADDRESSES[0]}:{PORT}"
    head = ("--head", "--port", str(PORT), "--include-dashboard=false")
    started = []
    try:
        for host, own, joins in zip(hosts, ADDRESSES, (head, ("--address", address)), strict=True):
            command = [*inside(host), str(DPS.with_name("ray")), "start", "--block", *joins]
            command += ["--node-ip-address", own, "--num-cpus", "1", "--disable-usage-stats"]
            command += ["--temp-dir", str(home / host)]
            started.append(start(command, home / f"{host}.log", {**os.environ, **env}))
            wait_ready(started[-1], home / f"{host}.log")
        yield {**env, "RAY_ADDRESS": address}
    finally:
        for process in started:
            kill(processes_of(process.pid))
            process.wait()


def start(command, log, env):
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)


def wait_ready(process, log):
    deadline = time.monotonic() + PATIENCE_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
