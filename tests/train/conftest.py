"""Processes to train in, and places to keep a run that are not a plain folder."""

import subprocess

import pytest

from dps_dist import recipes
from tests.spawn import Ranks
from tests.train.runs import trained


@pytest.fixture(scope="session")
def ranks():
    """Three processes; the first one or two of them serve runs with fewer ranks."""
    with Ranks(3, timeout=200) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def settings(digits):
    """→ a configuration of the digits with some settings."""

    def with_settings(*more):
        return recipes.load("digits", [f"data.path={digits}", "train.epochs=2", *more])

    return with_settings


@pytest.fixture(scope="session")
def teacher(ranks, settings, tmp_path_factory):
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("teacher")
    config = settings("method.name=baseline", "train.epochs=3", "optim.ema=0.9")
    (folder / "config.yaml").write_text(recipes.as_yaml(config))
    trained(ranks, config, folder)
    return folder


@pytest.fixture(scope="session")
def own(teacher):
    """→ the settings that a method needs for a short run."""
    needed = {
        "kd": [f"method.teachers=[{teacher}]", "method.task.name=adafocal", "data.hold_out=192"],
        "adafocal": ["data.hold_out=192"],
        "te": ["method.rampup_epochs=2", "method.rampdown_epochs=2"],
        "dps_plus": ["method.lambda_c=1"],
        "mmce": ["method.lam=0.5"],
    }
    return lambda name: [f"method.name={name}", *needed.get(name, [])]


@pytest.fixture(scope="session")
def s3():
    """The URL of a new folder in a bucket, of a server in this process that speaks S3."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    host, port = server.get_host_and_port()
    account = {"aws_access_key_id": "me", "aws_secret_access_key": "password"}
    client = boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **account
    )
    client.create_bucket(Bucket="bucket")
    query = f"endpoint_override=http%3A%2F%2F{host}%3A{port}&scheme=http&region=us-east-1"
    yield lambda name: f"s3://me:password@bucket/{name}?{query}"
    server.stop()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
