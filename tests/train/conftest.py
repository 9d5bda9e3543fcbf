"""Places to keep a run that are not a plain folder: an S3 server, a disk that is soon full."""

import subprocess

import pytest


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
