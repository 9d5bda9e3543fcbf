"""`ray job submit` and `dps submit` on a real cluster: a head and a worker that want a token."""

import json
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from dps_dist.errors import InputError, LostError
from dps_dist.launch import jobs, tokens
from tests.launch.cluster import RAY, Cluster, free_ports
from tests.launch.training import DPS, PATIENCE_S, rows_of
from tests.launch.training import short_home as make_home


@pytest.fixture(scope="module")
def cluster():
    with make_home() as home:
        (home / "work" / "runs").mkdir(parents=True)
        (home / "work" / "runs" / "old").touch()
        (home / "work" / "x.beton").touch()
        made = Cluster(home)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def train(cluster, digits):
    """What stands after `dps train` and `dps submit`."""
    out = cluster.home / "runs"
    return ["digits", "--set", f"data.path={digits}", "--workers", "2", "--out", str(out)]


@pytest.mark.timeout(600)
def test_who_has_no_token_or_a_wrong_one_is_refused(cluster, train):
    wrong = cluster.home / "wrong"
    wrong.write_text("0" * 32)
    submit = [DPS, "submit", *train, "--name", "a", "--address", cluster.address]
    for env, more, why in (
        (cluster.stranger, [], "it wants a token"),
        (cluster.stranger, ["--token-file", wrong], "the token is wrong"),
        (cluster.stranger | {"RAY_AUTH_TOKEN": "1" * 32}, [], "the token is wrong"),
    ):
        refused = cluster.run(*submit, *more, env=env)
        assert refused.returncode == 2 and why in refused.stderr, refused.stderr
        assert refused.stderr.count("\n") == 1 and "RAY_AUTH_TOKEN" in refused.stderr
    # Nor does one get in by the other door
    direct = cluster.run(
        DPS, "train", *train, "--name", "a", env=cluster.stranger | {"RAY_ADDRESS": cluster.gcs}
    )
    assert direct.returncode == 2 and "it wants a token" in direct.stderr, direct.stderr
    assert requests.get(f"{cluster.address}/api/jobs/", timeout=10).status_code == 401
    forged = {"Authorization": "Bearer " + "0" * 32}
    asked = requests.get(f"{cluster.address}/api/jobs/", headers=forged, timeout=10)
    assert asked.status_code == 403
    assert not (cluster.home / "runs").exists()


@pytest.mark.timeout(900)
def test_a_job_is_followed_stopped_and_resumed(cluster, train):
    run, epochs = cluster.home / "runs" / "a", ["--set", "train.epochs=60"]
    job = [RAY, "job", "submit", "--address", cluster.address, "--working-dir", "."]
    job += ["--submission-id", "first", "--", "dps", "train", *train, *epochs, "--name", "a"]
    following = subprocess.Popen(
        [str(word) for word in job],
        stdout=subprocess.PIPE,
        text=True,
        env=cluster.env,
        cwd=cluster.home / "work",
    )
    log = [following.stdout.readline()]
    while "epoch 3/60" not in log[-1]:
        assert log[-1], "".join(log)
        log.append(following.stdout.readline())
    stopped = cluster.run(RAY, "job", "stop", "--address", cluster.address, "first")
    assert stopped.returncode == 0, stopped.stderr
    following.communicate(timeout=PATIENCE_S)
    assert "STOPPED" in cluster.status("first").upper()
    cluster.ended("a", "KeyboardInterrupt")
    assert not (run / "summary.json").exists() and len(rows_of(run)) >= 3

    resumed = cluster.run(
        *(DPS, "submit", "--address", cluster.address, "--out", run.parent, "--name", "a"),
        *("--resume", "--token-file", cluster.token),
        env=cluster.stranger,
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "epoch 60/60" in resumed.stdout and "succeeded" in resumed.stdout
    assert "in epoch " in resumed.stdout  # it did not begin anew
    assert "SUCCEEDED" in cluster.status(resumed.stdout.split(":")[0]).upper()
    cluster.ended("a", "finished")
    assert [row["epoch"] for row in rows_of(run)] == list(range(1, 61))
    assert json.loads((run / "summary.json").read_text())["workers"] == 2


@pytest.mark.timeout(600)
def test_a_job_that_is_refused_or_stopped_ends_so(cluster, train):
    (cluster.home / "work" / "my.yaml").write_text("extends: digits\n")
    given = [DPS, "submit", "my.yaml", *train[1:], "--address", cluster.address]
    refused = cluster.run(*given, "--set", "data.path=/nowhere", "--name", "b")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "dps: /nowhere" in refused.stdout and "failed" in refused.stdout
    waiting = subprocess.Popen(
        [str(word) for word in (*given, "--set", "train.epochs=1000", "--name", "d")],
        stdout=subprocess.PIPE,
        text=True,
        env=cluster.env,
        cwd=cluster.home / "work",
    )
    ours = waiting.stdout.readline().split(":")[0]
    handed_in = cluster.run(*given, "--set", "train.epochs=1000", "--name", "c", "--no-wait")
    assert handed_in.returncode == 0
    client = jobs.client(cluster.address, cluster.token.read_text())
    job = handed_in.stdout.split(":")[0]
    client.stop_job(job)
    assert jobs.follow(client, job, lambda text: None) == jobs.STOPPED
    fails = jobs.submit(client, "exit 1", cluster.home / "work", [])
    assert jobs.follow(client, fails, lambda text: None) == 1
    client.stop_job(ours)
    said, _ = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 143 and f"{ours} was stopped" in said, said


class Proxy:
    """Between a client and the dashboard: a connection that can be lost, and found again."""

    def __init__(self, port: int) -> None:
        self._to, self._open = port, list[socket.socket]()
        self.port = free_ports(1)[0]
        self.mend()

    def mend(self) -> None:
        self._server = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        for one in (self._server, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, far = server.accept()[0], socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)


@pytest.mark.timeout(600)
def test_a_lost_connection_is_not_a_failed_job(cluster, monkeypatch):
    (cluster.home / "work" / "my.yaml").touch()
    proxy = Proxy(int(cluster.address.rpartition(":")[2]))
    client = jobs.client(f"http://127.0.0.1:{proxy.port}", cluster.token.read_text())
    go_on = cluster.home / "go_on"
    command = f"ls -R; echo first; until [ -e {go_on} ]; do sleep .1; done; echo last"
    job = jobs.submit(client, command, cluster.home / "work", [])
    heard = []

    def hear(text: str) -> None:
        heard.append(text)
        if "first" in text:
            proxy.cut()

    monkeypatch.setattr(jobs, "PATIENCE_S", 2.0)
    with pytest.raises(LostError, match=f"no longer answers .* while {job} goes on: `ray job st"):
        jobs.follow(client, job, hear)
    assert LostError.code == 75

    # Found again in time, when the job has ended: what was missed is said
    monkeypatch.setattr(jobs, "PATIENCE_S", PATIENCE_S)
    proxy.mend()
    heard.clear()

    def hear_again(text: str) -> None:
        heard.append(text)
        if "first" in text:
            proxy.cut()
            go_on.touch()
            threading.Timer(4, proxy.mend).start()

    assert jobs.follow(client, job, hear_again) == 0
    proxy.cut()
    said = "".join(heard)
    assert said.count("first\n") == 1 and said.endswith("last\n")
    assert "my.yaml" in said and "x.beton" not in said and "old" not in said


@pytest.mark.parametrize(
    ("settings", "out", "sentence"),
    [
        ((), "runs", "--out is runs: a job's working directory goes with it"),
        ((), "/runs", "data.path is data/digits: data do not travel with a job"),
        (("method.gamma=2",), "/runs", "method.gamma is 2"),
        (
            ("data.path=/d", "method={name: kd, teachers: [/runs/a, runs/b]}"),
            "/runs",
            "method.teachers holds runs/b: runs do not travel with a job",
        ),
    ],
)
def test_what_would_end_with_the_job_is_refused(settings, out, sentence):
    with pytest.raises(InputError, match=sentence.replace(".", r"\.")):
        jobs.entrypoint("digits", settings, [], out, Path())


def test_a_recipe_travels_only_inside_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for folder in (tmp_path, tmp_path / "in"):
        (folder / "my.yaml").write_text("extends: digits\ndata: {path: /data/digits}\n")
    command = jobs.entrypoint(str(tmp_path / "in" / "my.yaml"), (), [], "/runs", tmp_path / "in")
    assert command == "dps train my.yaml"
    for outside in (tmp_path / "my.yaml", tmp_path / "in" / ".." / "my.yaml"):
        with pytest.raises(InputError, match="is outside of --working-dir"):
            jobs.entrypoint(str(outside), (), [], "/runs", tmp_path / "in")
    monkeypatch.chdir(tmp_path / "in")
    command = jobs.entrypoint("my.yaml", (), [], "/runs", Path(".."))
    assert command == "dps train in/my.yaml"


def test_what_a_recipe_extends_travels_with_it_or_is_named_in_full(tmp_path):
    here = tmp_path / "in"
    for folder in (here / "runs", tmp_path / "out"):
        folder.mkdir(parents=True)
    for base in (here / "base.yaml", here / "runs" / "base.yaml", tmp_path / "out" / "base.yaml"):
        base.write_text("extends: digits\ndata: {path: /data/digits}\n")
    recipe = here / "my.yaml"
    for extends, refused in (
        ("base.yaml", None),
        (str(tmp_path / "out" / "base.yaml"), None),
        ("../out/base.yaml", r"out/base.yaml is outside of --working-dir"),
        ("runs/base.yaml", "runs/base.yaml does not travel with a job, as it is in runs"),
    ):
        recipe.write_text(f"extends: {extends}\n")
        if refused:
            with pytest.raises(InputError, match=refused):
                jobs.entrypoint(str(recipe), (), [], "/runs", here)
        else:
            assert jobs.entrypoint(str(recipe), (), [], "/runs", here) == "dps train my.yaml"
    (here / "link.yaml").symlink_to(tmp_path / "out" / "base.yaml")  # Ray packs what it leads to
    assert jobs.entrypoint(str(here / "link.yaml"), (), [], "/runs", here) == "dps train link.yaml"


def test_a_recipe_in_a_folder_that_is_left_out_does_not_travel(tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("extends: digits\ndata: {path: /data/digits}\n")
    with pytest.raises(InputError, match="does not travel with a job, as it is in runs"):
        jobs.entrypoint(str(run / "config.yaml"), (), [], "/runs", tmp_path)


def test_the_token_is_not_shown_to_a_proxy(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 32)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        tokens.check("127.0.0.1:9")  # where nobody answers
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize("address", ["head:8265", "http://127.0.0.1:9", "http://no.such.host:8265"])
def test_a_cluster_that_does_not_answer_is_named(address):
    with pytest.raises(InputError, match=f"--address is {address}"):
        jobs.client(address, None)
