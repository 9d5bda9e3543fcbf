"""The float16 coding: what survives a round trip, and how precisely."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dps_dist.targets.codec import decode, encode

evidence = st.floats(0, 1, width=32)


def codes():
    """Every float16 that `encode` can produce: 0 … ½ and −½ … −2⁻³⁰, times 2¹⁵."""
    bits = np.arange(65536, dtype=np.uint16).view(np.float16)
    exact = bits.astype(np.float64)
    return bits[((exact >= 0) & (exact <= 2**14)) | ((exact < 0) & (exact > -(2**14)))]


@given(st.lists(evidence, min_size=1, max_size=50))
def test_round_trip_is_precise_near_zero_and_near_one(values):
    m = torch.tensor(values)
    decoded = decode(encode(m)).double()
    m = m.double()
    distance = torch.minimum(m, 1 - m)
    # 2⁻¹² is half a float16's step; 2⁻⁴⁰ half the least subnormal; 2⁻²⁵ half a float32's step at 1
    bound = distance * 2**-11 + torch.where(m > 0.5, 2.0**-24, 2.0**-39)
    assert ((decoded - m).abs() <= bound).all()


@given(evidence, evidence)
def test_order_is_kept(a, b):
    low, high = sorted([a, b])
    first, second = decode(encode(torch.tensor([low, high]))).tolist()
    assert first <= second


def test_a_second_trip_changes_nothing():
    stored = torch.from_numpy(codes())
    once = decode(stored)
    # Next to 1 a float32 is coarser than the code: there the evidence is the same, not the bits
    assert torch.equal(decode(encode(once)), once)
    coarse = (stored < 0) & (stored > -2)
    assert torch.equal(encode(once)[~coarse], stored[~coarse])


def test_ends_are_exact():
    ends = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(decode(encode(ends)), ends)
    assert torch.equal(decode(torch.zeros(3, dtype=torch.float16)), torch.zeros(3))
    assert (
        float(decode(encode(torch.tensor(1.001)))) == 1.0
    )  # a half-precision softmax may exceed 1


def test_matches_the_formula_of_the_design():
    generator = torch.Generator().manual_seed(0)
    m = torch.rand(100_000, generator=generator) ** 8
    m = torch.cat([m, 1 - m])
    coded = torch.where(m > 0.5, (m - 1).clamp(max=-(2.0**-30)), m).mul(2.0**15).half()
    assert torch.equal(encode(m), coded)
    v = coded.double() / 2**15
    assert torch.equal(decode(coded), torch.where(v < 0, v + 1, v).float())


def test_a_row_has_the_same_bits_wherever_it_stands():
    generator = torch.Generator().manual_seed(0)
    m = torch.softmax(3 * torch.randn(37, 101, generator=generator), -1)
    whole = encode(m)
    for row in range(37):
        assert torch.equal(encode(m[row]), whole[row])
        assert torch.equal(decode(whole[row]), decode(whole)[row])
