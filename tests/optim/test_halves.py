"""fp32 is its nearest bfloat16 and 16 bits, and nothing else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.optim.precision import halves, joined


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_joining_inverts_halving(bits: list[int]) -> None:
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]
    high, low = halves(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    assert torch.equal(joined(high, low).view(torch.int32), x.view(torch.int32))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=64))
def test_the_high_half_is_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    gap = (halves(x)[0].double() - x.double()).abs()
    assert torch.equal(gap, (x.bfloat16().double() - x.double()).abs())
