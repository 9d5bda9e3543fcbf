"""How many workers the nodes can hold, decided without a cluster."""

import socket

import pytest

from dps_dist import recipes
from dps_dist.config import Launch
from dps_dist.errors import InputError
from dps_dist.launch import cluster, tokens
from dps_dist.launch.cluster import placement
from dps_dist.launch.ray_train import check, for_workers

CPU2 = {"CPU": 2.0, "memory": 1e9}
GPU8 = {"CPU": 96.0, "GPU": 8.0}


def test_a_fixed_number_on_cpus():
    scaling = placement(Launch(workers=2), [CPU2])
    assert scaling.num_workers == 2 and not scaling.use_gpu
    assert scaling.resources_per_worker == {"CPU": 1.0}


def test_a_range_is_elastic():
    scaling = placement(Launch(workers="1:4", resize_interval_s=7), [CPU2])
    assert scaling.num_workers == (1, 4)
    assert scaling.elastic_resize_monitor_interval_s == 7


def test_a_gpu_each_where_there_are_any():
    scaling = placement(Launch(workers=16, cpus_per_worker=12), [GPU8, GPU8])
    assert scaling.use_gpu and scaling.resources_per_worker == {"CPU": 12.0, "GPU": 1.0}
    assert not placement(Launch(workers=2, gpus_per_worker=0), [GPU8]).use_gpu


@pytest.mark.parametrize(
    ("launch", "nodes", "room"),
    [
        (Launch(workers=3), [CPU2], 2),
        (Launch(workers="3:5"), [CPU2], 2),
        (Launch(workers=2, cpus_per_worker=2), [CPU2], 1),
        (Launch(workers=2, cpus_per_worker=1.5), [CPU2, {"CPU": 1.0}], 1),  # not 3 CPUs / 1.5
        (Launch(workers=17), [GPU8, GPU8], 16),
        (Launch(workers=9, cpus_per_worker=24), [GPU8, GPU8], 8),
        (Launch(workers=3, placement="STRICT_SPREAD"), [CPU2, CPU2], 2),
        (Launch(workers=3, placement="STRICT_PACK"), [CPU2, CPU2], 2),
        (Launch(workers=1), [{"memory": 1.0}], 0),
        (Launch(workers=1, gpus_per_worker=1), [CPU2], 0),
    ],
)
def test_more_than_fit_are_refused_at_once(launch, nodes, room):
    with pytest.raises(InputError, match=f"--workers is {launch.workers}: .* can place {room} "):
        placement(launch, nodes)


@pytest.mark.parametrize("given", [None, "", "auto"])
def test_the_cluster_of_this_machine_is_found(tmp_path, monkeypatch, given):
    """Its own address may be stale, and RAY_ADDRESS= is as good as none."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", given)
    assert cluster.address() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray/ray_current_cluster").write_text(here)
        assert cluster.address() == here
    assert cluster.address() is None


def test_who_cannot_join_learns_how_to_do_without(monkeypatch):
    def refuse(**_):
        raise ConnectionError("of another version")

    local = r"or train on this machine with RAY_ADDRESS=local$"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match=f"RAY_ADDRESS is 127.0.0.1:1: nothing .* {local}"):
        cluster.connect()
    monkeypatch.setattr(cluster, "address", lambda: "127.0.0.1:1")
    monkeypatch.setattr(cluster.tokens, "check", lambda at: None)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(InputError, match=rf"refuses \(of another version\).* {local}"):
        cluster.connect()


@pytest.mark.parametrize("given", ["option", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_that_is_no_text_is_refused(tmp_path, monkeypatch, given):
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    with pytest.raises(InputError, match=f"{file} holds no token, it is no text: give"):
        tokens.find(file if given == "option" else None)


def test_workers_are_given_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.pt").touch()
    teachers = "method={name: kd, teachers: [runs/a, s3://bucket/b, /c]}"
    config = recipes.load("digits", [teachers, "model.weights=weights.pt"])
    given = for_workers(config)
    assert given.data.path == str(tmp_path / "data/digits")
    assert given.model.weights == str(tmp_path / "weights.pt")
    assert given.method.teachers == (str(tmp_path / "runs/a"), "s3://bucket/b", "/c")
    named = recipes.load("digits", ["model.weights=IMAGENET1K_V1"])
    assert for_workers(named).model.weights == "IMAGENET1K_V1"


@pytest.mark.parametrize("workers", ["2", "1:2"])
def test_workers_of_one_run_do_not_share_a_gpu(digits, workers):
    """NCCL refuses two ranks on one; trials of a sweep, each a run of one worker, may share it."""
    half = [f"data.path={digits}", "launch.gpus_per_worker=.5"]
    check(recipes.load("digits", [*half, "launch.workers=1"]))
    config = recipes.load("digits", [*half, f"launch.workers={workers}"])
    said = f"launch.gpus_per_worker is 0.5 and --workers-per-trial {workers}: workers of one run "
    with pytest.raises(InputError, match=said):
        check(config, "--workers-per-trial")


def test_a_worker_has_whole_gpus_or_a_part_of_one(digits):
    config = recipes.load("digits", [f"data.path={digits}", "launch.gpus_per_worker=1.5"])
    with pytest.raises(InputError, match=r"launch\.gpus_per_worker is 1\.5: .* give 1 or 2"):
        check(config)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("augment.crop=pad", "augment.crop is pad: the images of .* have sides of"),
        ("data.noise={kind: asymmetric, rate: 0.4, mapping: {0: 7}}", "mapping"),
    ],
)
def test_images_and_labels_are_looked_at_before_ray_starts(photos, setting, said):
    base = [f"data.path={photos}", "augment.crop=resized", "data.batch_size=4"]
    check(recipes.load("digits", base))
    with pytest.raises(InputError, match=said):
        check(recipes.load("digits", [*base, setting]))


def test_teachers_that_are_not_there_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = recipes.load("digits", ["method={name: kd, teachers: [runs/a]}"])
    with pytest.raises(InputError, match=r"runs/a is not the folder of a run"):
        check(config)
