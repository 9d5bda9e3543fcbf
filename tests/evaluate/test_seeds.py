"""Runs of several seeds: which are alike, and mean ± deviation like numpy's."""

import math

import numpy as np
import pytest

from dps_dist.evaluate.seeds import groups, mean_std, spread


def test_mean_and_deviation_like_numpy():
    rows = [{"accuracy": a, "nll": 1 - a} for a in (0.9, 0.95, 0.92, 0.5)]
    found = spread(rows)
    for key in ("accuracy", "nll"):
        values = np.array([row[key] for row in rows])
        assert found.mean[key] == pytest.approx(values.mean(), rel=1e-12)
        assert found.std[key] == pytest.approx(values.std(ddof=1), rel=1e-12)


@pytest.mark.parametrize("values", [[], [0.5], [0.5, math.nan], [math.inf, 1, 2], [0.5, None, 1]])
def test_there_is_no_mean_where_a_run_has_no_figure(values):
    assert all(map(math.isnan, mean_std(values)))
    assert math.isnan(spread([{"nll": 1.0}, {}]).mean["nll"])


def of(seed=0, noise=0, gamma=0.9, path="a", workers=1):
    return {
        "train": {"seed": seed},
        "data": {"path": path, "noise": {"seed": noise}},
        "method": {"gamma": gamma},
        "launch": {"workers": workers},
        "run": {"name": f"{seed}"},
    }


def test_groups_differ_in_seeds_and_in_where_they_ran_alone():
    configs = [of(0), of(0, gamma=0.5), of(1, workers=2), of(0, 3, path="b"), of(1, gamma=0.5)]
    assert groups(configs) == [[0, 2, 3], [1, 4]]
    assert groups([of(0), of(0, gamma=0.5)]) == [] and groups([]) == []


def test_the_same_seed_twice_is_no_group():
    assert groups([of(0), of(0, path="b"), of(1)]) == []
