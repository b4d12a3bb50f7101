"""Which positions a rank holds of a dimension, digits, orders and skews included."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Layout
from shardlib.layouts.dims import Apart, leading
from shardlib.mesh import coordinates
from tests.layouts.test_layout import count, laws


@laws
@given(st.integers(1, 4), st.sampled_from(["a", "b"]), st.integers(1, 3), st.integers(1, 3))
def test_skewed_shards_tile_the_matrix(q: int, skew: str, m: int, n: int) -> None:
    layout, mesh = Layout.parse(f"x y skew {skew}"), {"x": q, "y": q}
    assert (count(layout, (q * m, q * n), mesh) == 1).all()
    for c in coordinates(mesh):
        rows, cols = layout.slices((q * m, q * n), mesh, c)
        k = (c["x"] + c["y"]) % q
        assert (rows.start, cols.start) == (
            (c["x"] * m, k * n) if skew == "a" else (k * m, c["y"] * n)
        )


def test_an_order_in_groups_is_that_order_in_each() -> None:
    """``zigzag(2 s)`` of a flattened [2, n] is ``. zigzag(s)`` of [2, n]."""
    with sl.simulate(data=2, s=2):
        x = torch.arange(32).reshape(4, 8)
        y = sl.shard(x, "data zigzag(s)")
        flat = y.view(32)
        assert str(flat.sharding) == "zigzag(data 2 s)"
        assert torch.equal(sl.unshard(flat), x.view(32))
        assert torch.equal(flat.raw, sl.shard(x.view(32), "zigzag(data 2 s)").raw)
        assert flat.view(4, 8).sharding == y.sharding
        whole = sl.reshard(sl.shard(x.view(32), "data"), "zigzag(data 2 s)")
        assert torch.equal(whole.raw, flat.raw)
        assert (sl.Layout.parse("data") >> flat.sharding).bytes((32,), {"data": 2, "s": 2}) == 0


@laws
@given(st.lists(st.integers(1, 4), max_size=4), st.integers(1, 64))
def test_leading_digits_and_the_rest_number_what_all_of_them_do(row: list[int], n: int) -> None:
    left = list(row)
    total = math.prod(row)
    if total % n:
        with pytest.raises(Apart):
            leading(left, n, int, lambda digit, major: (major, digit // major))
        return
    try:
        taken = leading(left, n, int, lambda digit, major: (major, digit // major))
    except Apart as e:
        assert e.digit in row, "one that would be in two dimensions"
        return
    assert math.prod(taken) == n and math.prod(taken + left) == total
