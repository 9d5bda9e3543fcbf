"""The summaries of CIFAR-10-C and CIFAR-10-P, against a naive loop and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dps_dist.errors import InputError
from dps_dist.evaluate.robustness import (
    CORRUPTIONS,
    PERTURBATIONS,
    by_severity,
    corruptions,
    flip_probability,
    perturbations,
)
from tests.evaluate.samples import figures_of, rows


def test_corruptions():
    names = ("fog", "snow", "jpeg_compression")
    drawn = {name: rows(5 * n, 10, seed=n) for name, n in zip(names, (8, 20, 31), strict=True)}
    found = corruptions({name: by_severity(*table) for name, table in drawn.items()})
    each = []
    for name, (logits, labels) in drawn.items():
        hits = (logits.argmax(1) == labels).double().view(5, -1).mean(1).tolist()
        assert found["by_corruption"][name] == pytest.approx(hits)
        each += hits
    assert found["accuracy"] == pytest.approx(sum(each) / 15)
    for severity in range(5):
        parts = [[x.chunk(5)[severity] for x in table] for table in drawn.values()]
        logits, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        together = figures_of(logits, labels)["ece"]
        assert found["ece_by_severity"][severity] == pytest.approx(together, rel=1e-12)


def test_corruptions_weigh_the_same_whatever_they_hold():
    """5 right images and 50 wrong ones: half."""
    logits = torch.tensor([[9.0, 0.0]])
    right, wrong = (torch.full((n,), y) for n, y in ((5, 0), (50, 1)))
    tallies = {"a": by_severity(logits.expand(5, 2), right)}
    tallies["b"] = by_severity(logits.expand(50, 2), wrong)
    assert corruptions(tallies)["accuracy"] == 0.5


def test_ece_of_a_severity_is_of_all_samples_together():
    """One corruption too sure, another not sure enough: together less so."""
    logits = torch.tensor([[1.0, -1.0]]).expand(10, 2)  # confidence 0.88
    low, high = torch.ones(10, dtype=torch.long), torch.zeros(10, dtype=torch.long)
    apart = [figures_of(logits[:2], y[:2])["ece"] for y in (low, high)]
    found = corruptions({"a": by_severity(logits, low), "b": by_severity(logits, high)})
    confidence = float(logits[0].double().softmax(0)[0])
    assert found["ece_by_severity"] == pytest.approx([confidence - 0.5] * 5)
    assert found["ece_by_severity"][0] < sum(apart) / 2 - 0.1


def test_severities_follow_each_other():
    labels = torch.zeros(10, dtype=torch.long)
    logits = torch.zeros(10, 2)
    logits[6:8, 1] = 1.0  # severity 4 is wrong
    assert corruptions({"fog": by_severity(logits, labels)})["by_corruption"]["fog"] == [
        1,
        1,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize("n", [0, 4, 12])
def test_refuses_images_that_five_does_not_divide(n):
    with pytest.raises(InputError, match=f"^{n} images of a corruption: give "):
        by_severity(*rows(n, 3))


def test_refuses_no_corruption():
    with pytest.raises(InputError, match=r"^no corruption was given: give"):
        corruptions({})


def naive_flips(predicted, noise):
    per_video = []
    for video in predicted.tolist():
        reference, flips = video[0], []
        for frame in video[1:]:
            flips.append(frame != reference)
            if not noise:
                reference = frame
        per_video.append(sum(flips) / len(flips))
    return sum(per_video) / len(per_video)


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(2, 9)),
    classes=st.integers(1, 4),
    name=st.sampled_from(PERTURBATIONS),
    seed=st.integers(0, 1000),
)
def test_flips_like_a_naive_loop(shape, classes, name, seed):
    predicted = np.random.default_rng(seed).integers(classes, size=shape)
    expected = naive_flips(predicted, noise=name in ("gaussian_noise", "shot_noise"))
    assert flip_probability(predicted, name) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tilt", 2 / 4),
        ("motion_blur", 2 / 4),
        ("shot_noise", 1 / 4),
        ("gaussian_noise", 1 / 4),
        ("speckle_noise_2", 1 / 4),
    ],
)
def test_noise_compares_with_the_first_frame(name, expected):
    """There and back: two flips from frame to frame, one frame that differs from the first."""
    assert flip_probability(np.array([[3, 3, 5, 3, 3]]), name) == expected


@pytest.mark.parametrize("shape", [(4,), (4, 1), (0, 5), (2, 3, 4)])
def test_refuses_what_is_not_frames_of_videos(shape):
    with pytest.raises(InputError, match=r"^tilt has predictions of shape \(.*: give "):
        flip_probability(np.zeros(shape, int), "tilt")


def test_says_which_corruptions_are_missing():
    tally = by_severity(*rows(10, 3))
    assert len(CORRUPTIONS) == 19
    assert corruptions({"fog": tally, "snow": tally})["missing"] == [
        name for name in CORRUPTIONS if name not in ("fog", "snow")
    ]
    assert "missing" not in corruptions(dict.fromkeys(CORRUPTIONS, tally))


def test_mfp_is_of_the_ten():
    flips = {name: k / 100 for k, name in enumerate(PERTURBATIONS)}
    more = {"speckle_noise": 0.9, "gaussian_noise_2": 0.8, "shear": 0.7}
    found = perturbations({**more, **flips})
    assert found["mfp"] == pytest.approx(0.045)
    assert found["by_perturbation"] == {**more, **flips}
    assert "missing" not in found


def test_mfp_says_what_is_missing():
    found = perturbations({"tilt": 0.1, "shot_noise": 0.3, "snow": 0.8})
    assert found["mfp"] == pytest.approx(0.2)
    assert found["missing"] == [n for n in PERTURBATIONS if n not in ("tilt", "shot_noise")]
    assert "mfp" not in perturbations({"snow": 0.8})
