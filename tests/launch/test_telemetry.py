"""Prometheus watches a real run: all that the dashboard asks for is there, and an alert comes."""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from dps_dist.launch.telemetry import METRICS, OF_THE_RUN
from dps_dist.train.vitals import PARTS
from tests.launch.training import (
    DPS,
    OWN_RAY,
    PATIENCE_S,
    Training,
    freeze,
    kill,
    processes_of,
    short_home,
    thaw,
)

ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
PAGE = (ROOT / "docs" / "telemetry.md").read_text()


def panels():
    board = json.loads((GRAFANA / "dps.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(panel, run):
    """As Grafana asks them when that run is chosen."""
    for target in panel["targets"]:
        yield target["expr"].replace("$run", run).replace("$__rate_interval", "10s")


@pytest.fixture
def promtool():
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("there is no Prometheus: install Debian's package prometheus")


@pytest.mark.timeout(600)
def test_a_run_is_watched_and_a_stopped_worker_is_noticed(promtool, digits):
    settings = (f"data.path={digits}", "train.epochs=100000", "train.checkpoint.keep_last=1")
    with (
        short_home() as home,
        prometheus(home) as ask,
        ray_head(home) as cluster,
        Training(home, settings, cluster) as training,
    ):
        training.start("--workers", "2")
        for panel in panels():
            for query in queries(panel, "run"):
                training.until(f"data for {panel['title']}: {query}", lambda q=query: ask(q))
        for metric in METRICS:
            if metric.name != "dps_ended":
                found = ask(f'{metric.exported}{{run="run"}}')
                assert found and all("rank" in one for one in found) != (metric in OF_THE_RUN)
        assert {one["rank"] for one in ask("ray_dps_loss")} == {"0", "1"}
        assert {one["part"] for one in ask("ray_dps_seconds_total")} == {*PARTS}
        rules = ask.rules()
        assert all(rule["health"] == "ok" for rule in rules), rules
        training.until("all is well", lambda: ask.firing() == {})

        workers = training.workers()
        freeze([workers[1]])
        alert = "DpsWorkersLost", "run misses 1 of its workers"
        training.until("the alert", lambda: alert in ask.firing().items())
        thaw([workers[1]])
        training.until("all is well", lambda: ask.firing() == {})
        training.process.send_signal(signal.SIGINT)
        assert training.end() != 0
        ended = 'max_over_time(ray_dps_ended{run="run", how="KeyboardInterrupt"}[5m])'
        wait_for(lambda: ask(ended))
        assert ask.firing() == {}


def test_the_rules_are_right(promtool):
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_settings_for_kubernetes_are_right(promtool, tmp_path):
    """But for the discovery itself, which Debian's build leaves out; test_manifests reads that."""
    settings = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    (scrape,) = settings["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs")
    scrape["static_configs"] = [{"targets": ["192.0.2.1:8080"]}]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(settings))
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    check = ["promtool", "check", "config", tmp_path / "kubernetes.yml"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert settings["global"] == ours["global"]


def test_each_panel_says_what_it_shows():
    for panel in panels():
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"], panel
        assert panel["description"].endswith(".") and "\n" not in panel["description"], panel
    asked = " ".join(query for panel in panels() for query in queries(panel, "run"))
    unseen = {metric.name for metric in METRICS if metric.exported not in asked}
    assert unseen == {"dps_ended"}  # which is there for a moment


def test_the_page_names_every_metric_and_alert():
    rows = dict(re.findall(r"^\| `(ray_dps_\w+)` \| (?:gauge|counter) \| (.+) \|$", PAGE, re.M))
    assert rows == {metric.exported: metric.meaning for metric in METRICS}
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    alerts = [rule["alert"] for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(Dps\w+)` \|", PAGE, re.M) == alerts


# Prometheus


class Prometheus:
    """Answers of the one that listens there."""

    def __init__(self, address):
        self._url = f"http://{address}"

    def __call__(self, query):
        """The labels of what a query finds, now."""
        return [one["metric"] for one in self._get("query", query=query)["result"]]

    def rules(self):
        [group] = self._get("rules")["groups"]
        return group["rules"]

    def firing(self):
        """The alerts that fire, and what they say."""
        alerts = [one for one in self._get("alerts")["alerts"] if one["state"] == "firing"]
        return {one["labels"]["alertname"]: one["annotations"]["summary"] for one in alerts}

    def ready(self):
        try:
            return urlopen(f"{self._url}/-/ready", timeout=5).status == 200
        except URLError:
            return False

    def _get(self, what, **parameters):
        with urlopen(f"{self._url}/api/v1/{what}?{urlencode(parameters)}", timeout=20) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(home):
    """As we configure it, but that it watches this test's Ray, and does not wait for long."""
    folder, address = home / "prometheus", f"127.0.0.1:{free_port()}"
    folder.mkdir()
    config = (PROMETHEUS / "prometheus.yml").read_text()
    assert DISCOVERY in config
    config = config.replace(DISCOVERY, str(home / "ray" / Path(DISCOVERY).name))
    (folder / "prometheus.yml").write_text(re.sub(r"_interval: \w+", "_interval: 1s", config))
    rules = (PROMETHEUS / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 5s", rules))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with started(command, folder / "log", os.environ):
        ask = Prometheus(address)
        wait_for(ask.ready)
        yield ask


@contextmanager
def ray_head(home):
    """The environment of a cluster of one node, whose processes report every second."""
    token, log = home / "token", home / "head.log"
    token.write_text(secrets.token_hex(16))
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(home)}
    env |= {**OWN_RAY, "RAY_metrics_report_interval_ms": "1000"}
    port, dashboard = free_port(), free_port()
    command = [DPS.with_name("ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += ["--port", str(port), "--dashboard-port", str(dashboard), "--num-cpus", "2"]
    command += ["--node-ip-address", "127.0.0.1", "--temp-dir", str(home / "ray")]
    with started(command, log, {**os.environ, **env}):
        wait_for(lambda: "Ray runtime started" in log.read_text())
        yield {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}


@contextmanager
def started(command, log, env):
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        yield
    finally:
        kill(processes_of(process.pid))
        process.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
