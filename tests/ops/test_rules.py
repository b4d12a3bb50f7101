"""Every rule beside matmul: value and gradients equal dense under each layout."""

import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from tests.ops.cases import compare, r, run_all
from tests.strategies import examples


def test_rules_equal_dense_on_real_processes(pool) -> None:
    assert pool.run(run_all, x=2, y=2) == [[]] * 4


@examples(60)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 4), (4, 1), (2, 2), (2, 3), (3, 3), (4, 4)]),
)
def test_a_transformer_layer_of_any_shape_equals_dense(
    b: int, s: int, h: int, grid: tuple[int, int]
) -> None:
    row, col = grid
    unit = row * col
    width = unit * h * 2

    def layer(x, g, w1, b1, w2):
        y = F.layer_norm(x, (width,), g)
        return x + F.linear(F.gelu(F.linear(y, w1, b1)), w2)

    tensors = [
        r(row * b, s, width),
        r(width, seed=1),
        r(2 * width, width, seed=2),
        r(2 * width, seed=3),
        r(width, 2 * width, seed=4),
    ]
    with sl.simulate(x=row, y=col):
        compare(layer, tensors, ["x . y", "y", "y x", "y", "x y"], out="x . y")
        compare(layer, tensors, ["x . .", ".", "y .", "y", ". y"], out="x . .")
