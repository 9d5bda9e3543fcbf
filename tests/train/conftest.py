"""Processes to train in, runs, and a disk that is soon full."""

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
