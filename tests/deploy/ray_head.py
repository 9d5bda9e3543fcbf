"""A Ray head of a test's own, that asks for a token: own folder, own ports, ended by its own id."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from tests.launch.training import ELSEWHERE, OWN_RAY, PATIENCE_S, kill, processes_of

RAY = Path(sys.executable).parent / "ray"
PORTS = ("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port")


@dataclass(frozen=True)
class Head:
    """env: what a command needs to be let in."""

    address: str  # of the job API
    gcs: str
    env: Mapping[str, str]


@contextmanager
def head(home: Path, path: str, tls: Mapping[str, str]) -> Iterator[Head]:
    """home: a short path. path: the PATH of its jobs. tls: what tells Ray of certificates."""
    token = home / "token"
    token.write_text(secrets.token_hex(32))
    kept = {key: value for key, value in os.environ.items() if not ELSEWHERE.fullmatch(key)}
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    env = {**kept, **OWN_RAY, **auth, **tls, "PATH": path}
    ports = free_ports()
    options = [f"--{name}={port}" for name, port in ports.items()]
    options += [f"--temp-dir={home / 'ray'}"]
    options += ["--num-cpus=1", "--object-store-memory=100000000"]
    with (home / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--disable-usage-stats", *options],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{ports['dashboard-port']}"
            _wait_for(address, process, home / "head.log")
            yield Head(address, f"127.0.0.1:{ports['port']}", env)
        finally:
            kill(processes_of(process.pid))
            process.wait()


def free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in PORTS]
        for one in sockets:
            one.bind(("", 0))
        return {name: one.getsockname()[1] for name, one in zip(PORTS, sockets, strict=True)}


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            urlopen(f"{address}/api/version", timeout=5)
        except HTTPError as error:
            assert error.code == 401, "it must ask for the token"
            return
        except (URLError, OSError):
            time.sleep(0.3)
