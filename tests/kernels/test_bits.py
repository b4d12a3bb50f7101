"""Bits are a function of position and key alone: any part of a range has the bits of the whole."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.kernels.bits import bits, signed

keys = st.integers(0, 2**64 - 1)


@given(keys, st.integers(0, 2**40), st.integers(1, 64), st.data())
def test_a_block_has_the_bits_of_its_positions(
    key: int, at: int, n: int, data: st.DataObject
) -> None:
    whole = bits(torch.arange(at, at + n), key)
    lo = data.draw(st.integers(0, n - 1))
    assert torch.equal(bits(torch.arange(at + lo, at + n), key), whole[lo:])
    assert len(set(whole.tolist())) == n, "positions are mapped one to one"


@given(keys)
def test_bits_are_fair_and_differ_by_key(key: int) -> None:
    drawn = bits(torch.arange(4096), key)
    for shift in (0, 17, 31, 45, 63):
        ones = float(((drawn >> shift) & 1).double().mean())
        assert abs(ones - 0.5) < 0.06  # 7 standard deviations
    other = bits(torch.arange(4096), key ^ 1)
    assert int((drawn == other).sum()) == 0


@given(keys)
def test_signed_keeps_the_64_bits(key: int) -> None:
    assert signed(key) % 2**64 == key and -(2**63) <= signed(key) < 2**63
