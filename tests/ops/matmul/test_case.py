"""A case is sizes and layouts alone: blocks, the result's shape, and the axes of gradients' sums."""

import math

from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.ops.matmul.case import case

parse = sl.Layout.parse


@given(
    st.sampled_from(["x .", ". .", "x y", ". y", "y x"]),
    st.sampled_from([". .", "y x", ". y", "x ."]),
)
def test_operands_are_described_without_their_values(x: str, w: str) -> None:
    import torch

    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.zeros(4, 8), x), sl.shard(torch.zeros(8, 6), w)
        found = case(a, b)
    assert found.y_shape == (4, 6) and found.axes == {"x": 2, "y": 2}
    assert found.x_bytes == a.raw[0].nbytes and found.w_bytes == b.raw[0].nbytes
    assert hash(found) == hash(case(a, b)) and found == case(a, b)


@given(st.sampled_from(["x y", ". y", "x .", ". ."]))
def test_gradients_are_summed_over_axes_that_the_operand_is_whole_along(out: str) -> None:
    made = sl.extend.MatmulCase(parse("x ."), parse(". y"), (4, 8), (8, 6), (("x", 2), ("y", 2)), 4)
    over_x, over_w = made.over(parse(out))
    assert over_x == tuple(a for a in "y" if a in out) and over_w == tuple(
        a for a in "x" if a in out
    )
    assert made.rows_by(made.w.dims[-1]) == parse("x y")
    assert made.bytes_of(parse("x y"), made.y_shape) * 4 == 4 * math.prod(made.y_shape)


def test_half_precision_is_summed_in_twice_its_width() -> None:
    for itemsize, width in ((2, 2), (4, 1), (8, 1)):
        made = sl.extend.MatmulCase(parse("."), parse("."), (4, 8), (8, 6), (), itemsize)
        assert made.width == width
