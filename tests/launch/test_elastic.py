"""`--workers 1:2` on a cluster that loses a node and gets another one."""

from contextlib import contextmanager

import pytest
from ray.cluster_utils import Cluster

from tests.launch.training import OWN_RAY, Training, short_home, slowed, targets_of

EPOCHS = 20
SETTINGS = (
    "data.batch_size=16",
    "data.drop_last=false",
    f"train.epochs={EPOCHS}",
    "train.checkpoint.every_steps=25",
    "launch.resize_interval_s=2",
)
# A dead node refuses, which counts at once; one that is only slow has time to answer
NOTICES_SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.mark.timeout(1200)
def test_the_run_shrinks_with_the_cluster_and_grows_with_it(digits, monkeypatch):
    with short_home() as home, cluster(home, monkeypatch) as nodes:
        second = nodes.add_node(num_cpus=1)
        env = {"RAY_ADDRESS": nodes.address, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
        with Training(home, (*SETTINGS, f"data.path={digits}"), env) as training:
            training.start("--workers", "1:2")
            training.until("two workers at work", lambda: training.worker_counts() == [2])
            nodes.remove_node(second, allow_graceful=False)
            training.until("one worker at work", lambda: training.worker_counts() == [2, 1])
            nodes.add_node(num_cpus=1)
            with slowed(training.workers().values()):
                training.until("two again", lambda: "2 workers instead of 1" in training.terminal())
            assert training.end() == 0
            assert training.worker_counts() == [2, 1, 2]
            assert [row["step"] for row in training.rows()] == list(range(75, 75 * EPOCHS + 1, 75))
            assert training.unexpected() == []
            targets = targets_of(training.run / "targets")
            assert len(targets["visits"]) == 1200
            assert (targets["visits"].int() == EPOCHS).all()


@contextmanager
def cluster(home, monkeypatch):
    """A Ray cluster in processes of this machine; its head has room for one worker."""
    for name, value in {**OWN_RAY, **NOTICES_SOON, "RAY_TMPDIR": str(home)}.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield nodes
    finally:
        nodes.shutdown()
