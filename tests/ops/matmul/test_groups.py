"""Products of operands whose dimensions lie in groups or in a ring's order."""

import itertools

import pytest
import torch

import shardlib as sl
from tests.ops.cases import r

ALGORITHMS = [
    "oned",
    "summa",
    "summa_y",
    "summa_x",
    "summa_w",
    "cannon",
    "mm3",
    "ring",
    "ring2",
    "streamed",
]
LAYOUTS = [
    "y x",
    "x y",
    "y .",
    "(2 y) x",
    "(2 y) (2 x)",
    "x (2 y)",
    ". (2 x)",
    "(2 x y) .",
    "zigzag(y) x",
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_product_of_grouped_operands_or_refuses_it(
    algorithm: str,
) -> None:
    a, b = r(8, 8), r(8, 8, seed=1)
    ran = 0
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        with sl.simulate(x=2, y=2), sl.algorithm(matmul=algorithm):
            try:
                y = sl.shard(a, left) @ sl.shard(b, right)
            except sl.ShardError:
                continue
            ran += 1
            assert torch.allclose(sl.unshard(y), a @ b), (left, right)
    assert ran or algorithm in ("ring", "ring2", "streamed")


@pytest.mark.parametrize("right", [". x y", ". x .", ". . y"])
@pytest.mark.parametrize("left", ["y x", "y .", ". x"])
def test_a_matrix_times_a_stack_of_matrices_is_torchs(left: str, right: str) -> None:
    a, b = r(6, 2), r(4, 2, 6, seed=1)
    with sl.simulate(x=2, y=2), sl.implicit():
        assert torch.allclose(sl.unshard(sl.shard(a, left) @ sl.shard(b, right)), a @ b)
