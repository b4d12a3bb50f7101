"""Cannon: shifts of blocks on a square grid."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from tests.ops.matmul.test_matmul2d import relative
from tests.strategies import examples


@examples(32)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2))
def test_pre_skewed_operands_save_the_first_move(q: int, m: int, k: int, n: int) -> None:
    x, w = (
        torch.randn(q * m, q * k, dtype=torch.float64),
        torch.randn(q * k, q * n, dtype=torch.float64),
    )
    x.requires_grad_(), w.requires_grad_()
    g = torch.randn(q * m, q * n, dtype=torch.float64)
    (x @ w).backward(g)
    with sl.simulate(x=q, y=q):
        a = sl.shard(x.detach(), sl.Layout2D("x", "y", skew="a")).requires_grad_()
        b = sl.shard(w.detach(), sl.Layout2D("x", "y", skew="b")).requires_grad_()
        price = dict(sl.why("matmul", a, b).verdicts)["cannon"]
        with sl.trace() as t:
            c = a @ b
        with sl.trace() as back:
            c.backward(sl.shard(g, "x y"))
        assert t.bytes == price.forward.bytes == (q - 1) * 8 * (m * k + k * n)
        assert back.bytes == price.backward.bytes
        assert a.grad.sharding.skew == "a" and b.grad.sharding.skew == "b"
        assert relative(sl.unshard(c).detach(), (x @ w).detach()) < 1e-12
        assert relative(sl.unshard(a.grad), x.grad) < 1e-12
        assert relative(sl.unshard(b.grad), w.grad) < 1e-12


def test_cannon_on_a_grid_that_is_not_square_names_the_fix() -> None:
    with sl.simulate(x=2, y=3):
        a = sl.shard(torch.arange(36.0).view(6, 6), "x y")
        with (
            pytest.raises(sl.ShardError, match="cannon needs a square grid; x=2, y=3") as caught,
            sl.algorithm(matmul="cannon"),
        ):
            a @ a
        with eval(caught.value.fix, {"sl": sl}):
            assert (a @ a).shape == (6, 6)
