"""Label noise: exact counts, determinism, and that nothing else changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare

from dps_dist.data.noise import CIFAR10_FLIPS, apply, asymmetric, symmetric
from dps_dist.data.sources.cifar import CIFAR10_CLASSES
from dps_dist.errors import InputError

K = 10
labels_of_any_length = arrays(np.int64, st.integers(0, 300), elements=st.integers(0, K - 1))
rates = st.floats(0, 1)
seeds = st.integers(0, 2**32)


def cifar_labels(per_class: int = 500) -> np.ndarray:
    return np.tile(np.arange(K), per_class)


@given(labels_of_any_length, rates, seeds)
def test_the_input_is_untouched_and_the_result_repeats(labels, rate, seed):
    before = labels.copy()
    for kind in ("none", "symmetric", "asymmetric"):
        noisy = apply(labels, K, kind, rate, seed, CIFAR10_FLIPS)
        assert noisy is not labels and not np.shares_memory(noisy, labels)
        np.testing.assert_array_equal(labels, before)
        np.testing.assert_array_equal(noisy, apply(labels, K, kind, rate, seed, CIFAR10_FLIPS))
        assert noisy.dtype == np.int64 and noisy.shape == labels.shape


@given(labels_of_any_length, rates, seeds)
def test_symmetric_redraws_exactly_the_rate(labels, rate, seed):
    # Labels that no redraw can give show which were redrawn.
    outside = labels + K
    noisy = symmetric(outside, K, rate, seed)
    assert np.sum(noisy < K) == round(rate * len(labels))
    assert noisy.min(initial=0) >= 0
    np.testing.assert_array_equal(noisy[noisy >= K], outside[noisy >= K])


@given(labels_of_any_length, rates, seeds)
def test_asymmetric_flips_exactly_the_rate_of_each_mapped_class(labels, rate, seed):
    noisy = asymmetric(labels, rate, seed, CIFAR10_FLIPS)
    for label in range(K):
        mine = labels == label
        changed = noisy[mine] != label
        expected = round(rate * mine.sum()) if label in CIFAR10_FLIPS else 0
        assert changed.sum() == expected
        assert set(noisy[mine][changed]) <= {CIFAR10_FLIPS.get(label)}


@given(labels_of_any_length, seeds)
def test_rate_0_and_rate_1(labels, seed):
    np.testing.assert_array_equal(symmetric(labels, K, 0, seed), labels)
    np.testing.assert_array_equal(asymmetric(labels, 0, seed, CIFAR10_FLIPS), labels)
    everything = np.array([CIFAR10_FLIPS.get(int(label), label) for label in labels], np.int64)
    np.testing.assert_array_equal(asymmetric(labels, 1, seed, CIFAR10_FLIPS), everything)


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_seeds_differ(kind):
    one, other = (apply(cifar_labels(), K, kind, 0.2, seed, CIFAR10_FLIPS) for seed in (1, 2))
    assert (one != other).any()


def test_redrawn_labels_are_uniform_over_all_classes():
    # All of one class: 1 in K comes out unchanged, the rest spreads evenly.
    noisy = symmetric(np.full(100_000, 3), K, 1.0, seed=5)
    assert chisquare(np.bincount(noisy, minlength=K)).pvalue > 1e-3


def test_the_samples_to_redraw_are_chosen_uniformly():
    noisy = symmetric(np.full(100_000, K), K, 0.5, seed=6)
    assert chisquare((noisy < K).reshape(20, -1).sum(axis=1)).pvalue > 1e-3


def test_cifar10s_own_flips_by_name():
    flips = {CIFAR10_CLASSES[a]: CIFAR10_CLASSES[b] for a, b in CIFAR10_FLIPS.items()}
    assert flips == {
        "truck": "automobile",
        "bird": "airplane",
        "cat": "dog",
        "dog": "cat",
        "deer": "horse",
    }
    noisy = apply(cifar_labels(), K, "asymmetric", 0.4, 0, class_names=CIFAR10_CLASSES)
    np.testing.assert_array_equal(noisy, asymmetric(cifar_labels(), 0.4, 0, CIFAR10_FLIPS))


def test_the_order_in_which_a_mapping_is_written_does_not_matter():
    backwards = dict(reversed(CIFAR10_FLIPS.items()))
    np.testing.assert_array_equal(
        asymmetric(cifar_labels(), 0.3, 0, backwards),
        asymmetric(cifar_labels(), 0.3, 0, CIFAR10_FLIPS),
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "asymmetric"}, "mapping is missing"),
        ({"kind": "asymmetric", "class_names": tuple("0123456789")}, "mapping is missing"),
        ({"kind": "asymmetric", "mapping": {}}, "mapping is missing"),
        ({"kind": "asymmetric", "mapping": {1: 10}}, "1: 10"),
        ({"kind": "asymmetric", "mapping": {-1: 1}}, "-1: 1"),
        ({"kind": "asymmetric", "mapping": {1: 1}}, "1: 1"),
        ({"num_classes": 9}, "labels run from 0 to 9"),
    ],
)
def test_wrong_settings_get_their_sentence(arguments, said):
    settings = {"num_classes": K, "kind": "symmetric", "rate": 0.2, "seed": 0} | arguments
    with pytest.raises(InputError, match=said):
        apply(cifar_labels(), **settings)
