"""deploy/ray: Ray takes the `ray up` file, and the page starts the same nodes."""

import re
import shlex
import subprocess
import warnings

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.deploy.commands import DEPLOY

RAY = DEPLOY / "ray"
PORTS = re.compile(r"--[\w-]*port=(\d+)")


@pytest.fixture(scope="module")
def cluster():
    return yaml.safe_load((RAY / "cluster.yaml").read_text())


@pytest.fixture(scope="module")
def start():
    """The command `ray start`."""
    with warnings.catch_warnings():  # it imports all of Ray, parts of which warn of themselves
        warnings.simplefilter("ignore")
        from ray.scripts.scripts import start
    return start


def ray_starts(text):
    """Every `ray start …` of a text, as words."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"ray start ([^\n`]*--[^\n`]*)", joined)]


def test_ray_takes_the_file(cluster):
    validate_config(prepare_config(cluster))
    with pytest.raises(Exception, match="no_such_field"):
        validate_config(prepare_config({**cluster, "no_such_field": 1}))
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_its_nodes_start_with_a_token_and_fixed_ports(cluster, start):
    for kind in ("head", "worker"):
        stop, line = cluster[f"{kind}_start_ray_commands"]
        assert stop.endswith("ray stop")
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in line
        (words,) = ray_starts(line)
        options = start.make_context("start", list(words)).params
        assert options["head"] == (kind == "head")
        assert options["dashboard_host"] in ("127.0.0.1", "localhost")


def test_its_jobs_find_dps(cluster):
    for kind in ("head", "worker"):
        line = cluster[f"{kind}_start_ray_commands"][1]
        asked = line.replace("/opt/dps/bin/ray start", "sh -c 'echo $PATH' --")
        said = subprocess.run(["sh", "-c", asked], capture_output=True, text=True).stdout
        assert said.startswith("/opt/dps/bin:") and len(said) > len("/opt/dps/bin:\n")
    page = (RAY / "README.md").read_text()
    (block,) = [text for text in re.findall(r"```bash\n(.*?)```", page, re.S) if "--head" in text]
    assert block.index("export PATH=/opt/dps/bin:$PATH\n") < block.index("ray start")


def test_the_page_starts_the_same_nodes(cluster, start):
    page = (RAY / "README.md").read_text()
    head, worker = ray_starts(page)
    for kind, words in (("head", head), ("worker", worker)):
        start.make_context("start", list(words))
        ports = set(PORTS.findall(cluster[f"{kind}_start_ray_commands"][1]))
        assert ports == set(PORTS.findall(" ".join(words)))
        table = page[page.index("## Ports") :]
        assert all(re.search(rf"^\|.*{port}", table, re.MULTILINE) for port in ports)


def test_a_certificate_is_one_and_names_its_node(tmp_path):
    make = [str(RAY / "certificate.sh"), str(tmp_path)]
    for node in ("192.0.2.10", "head.example"):
        subprocess.run([*make, node, "192.0.2.99"], check=True, capture_output=True)
        certificate = tmp_path / node / "tls.crt"
        verify = ["openssl", "verify", "-CAfile", str(tmp_path / "ca.crt")]
        checks = ["-verify_ip" if node[0] == "1" else "-verify_hostname", node]
        done = subprocess.run([*verify, *checks, str(certificate)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / node / "tls.key").stat().st_mode & 0o077 == 0
    assert subprocess.run(make, capture_output=True).returncode == 2
