"""A shape is taken if it is even over the axes; a block is the share of it, rounded up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import UnevenSplit, UnknownAxis
from shardlib.layouts.dims import block_shape, check_axes, check_sizes
from shardlib.layouts.text import read

MESH = {"x": 2, "y": 3}
texts = st.sampled_from([".", "x", "y", "(x y)", "(2 x)", "zigzag(y)"])


@given(texts, st.integers(1, 40))
def test_sizes_are_taken_exactly_if_they_are_multiples_of_the_parts(text: str, n: int) -> None:
    parts = {".": 1, "x": 2, "y": 3, "(x y)": 6, "(2 x)": 4, "zigzag(y)": 6}[text]
    dims = read(text)[0]
    if n % parts:
        with pytest.raises(UnevenSplit, match=f"size {n} does not divide.*remainder {n % parts}"):
            check_sizes(dims, (n,), MESH, text, "shard")
    else:
        check_sizes(dims, (n,), MESH, text, "shard")


@given(texts, st.integers(1, 40))
def test_blocks_cover_the_shape_and_no_more_than_rounding_needs(text: str, n: int) -> None:
    ranks = math.prod(MESH[a] for a in MESH if a in text.replace("zig", ""))
    (block,) = block_shape(read(text)[0], (n,), MESH)
    assert block * ranks >= n
    even = -(-n // block_parts(text)) * block_parts(text)
    assert block * ranks == even


def block_parts(text: str) -> int:
    return {".": 1, "x": 2, "y": 3, "(x y)": 6, "(2 x)": 4, "zigzag(y)": 6}[text]


def test_an_axis_that_the_mesh_lacks_is_named_with_its_nearest() -> None:
    check_axes(("x",), MESH, "x", "shard")
    with pytest.raises(UnknownAxis, match="unknown axis 'z'; this mesh has x, y"):
        check_axes(("x", "z"), MESH, "x z", "shard")
    with pytest.raises(UnknownAxis, match="did you mean 'cols'") as e:
        check_axes(("col",), {"cols": 2}, "col .", "shard")
    assert "'cols .'" in e.value.fix
