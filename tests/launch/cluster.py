"""A real cluster on this machine: a head and a worker that want a token."""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import requests

from tests.launch.training import OWN_RAY, PATIENCE_S, Training, kill, processes_of

RAY = Path(sys.executable).parent / "ray"
LOOKED_S = 5.0  # Prometheus comes every 10 s, and finds a gauge for about 15 s after its process


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


class Cluster:
    """Nodes with so many CPUs each, by `ray start`.

    Nodes of one machine share Ray's folder, where one takes a job's working directory from under
    the other: a job that looks for it later wants a cluster of one.
    """

    def __init__(self, home: Path, cpus: Sequence[int] = (1, 1)) -> None:
        self.home, self.token = home, home / "token"
        self.token.write_text(secrets.token_hex(16))
        self.token.chmod(0o600)
        self.stranger = Training(home, ()).env | OWN_RAY | {"HOME": str(home)}  # has no token
        self.stranger["PATH"] = f"{RAY.parent}:{os.environ['PATH']}"
        self.env = self.stranger | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            # Killed after Ray's 3 s, on a busy machine, a run would have no last word
            "RAY_JOB_STOP_WAIT_TIME_S": str(int(PATIENCE_S)),
        }
        gcs, dashboard, *agents = free_ports(2 + len(cpus))
        self.gcs, self.address = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        head = ["--head", f"--port={gcs}", f"--dashboard-port={dashboard}"]
        secret = {"Authorization": f"Bearer {self.token.read_text()}"}
        head += [f"--temp-dir={home}/ray"]
        self.nodes = [self._start(*head, agent=agents[0], cpus=cpus[0])]
        try:
            self._until(lambda: self._asked("api/version", {}).status_code == 401)
            for agent, count in zip(agents[1:], cpus[1:], strict=True):
                self.nodes.append(self._start(f"--address={self.gcs}", agent=agent, cpus=count))
            nodes = "nodes?view=summary"
            self._until(lambda: self._asked(nodes, secret).text.count('"ALIVE"') == len(cpus))
        except BaseException:
            self.close()
            raise

    def _start(self, *options: str, agent: int, cpus: int) -> subprocess.Popen:
        command = [RAY, "start", *options, f"--dashboard-agent-listen-port={agent}"]
        command += [f"--num-cpus={cpus}", "--disable-usage-stats", "--block"]
        with (self.home / "ray.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )

    def _asked(self, path: str, headers: dict[str, str]) -> requests.Response:
        return requests.get(f"{self.address}/{path}", headers=headers, timeout=5)

    def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with suppress(requests.RequestException):
                if reached():
                    return
            time.sleep(0.2)
        raise AssertionError((self.home / "ray.log").read_text())

    def run(
        self, *command: object, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            env=env or self.env,
            cwd=self.home / "work",
            timeout=PATIENCE_S,
        )

    def status(self, job: str) -> str:
        return self.run(RAY, "job", "status", "--address", self.address, job).stdout

    def ended(self, run: str, how: str) -> None:
        """What Prometheus would see, though Ray reports every 10 s and the driver is gone."""
        found = self.home / "ray" / "prom_metrics_service_discovery.json"
        nodes = [one for group in json.loads(found.read_text()) for one in group["targets"]]
        deadline = time.monotonic() + LOOKED_S
        while time.monotonic() < deadline:
            seen = "".join(requests.get(f"http://{one}/metrics", timeout=10).text for one in nodes)
            if re.search(rf'^ray_dps_ended{{(?=.*run="{run}").*how="{how}"', seen, re.MULTILINE):
                return
            time.sleep(0.5)
        raise AssertionError(seen)

    def close(self) -> None:
        for node in self.nodes:
            kill(processes_of(node.pid))
            node.wait()
