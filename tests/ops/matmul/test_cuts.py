"""An operand that is whole is cut where a rank needs a part of it alone."""

import pytest
import torch

import shardlib as sl
from shardlib.ops.matmul.op import product_of


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (". .", "x ."),
        (". .", "y x"),
        ("x .", "y x"),
        (". y", "x y"),
        ("(x y) .", "(z x) y"),
        (". x", ". ."),
    ],
)
def test_a_product_cuts_what_every_rank_holds(x: str, w: str) -> None:
    """As a row-parallel layer does to an input that is not split; only sums move."""
    torch.manual_seed(0)
    with sl.simulate(x=2, y=2, z=2):
        a, b = (
            torch.randn(8, 8).double().requires_grad_(),
            torch.randn(8, 8).double().requires_grad_(),
        )
        c, d = (sl.shard(t.detach(), place).requires_grad_() for t, place in ((a, x), (b, w)))
        want, have = a @ b, product_of(c, d)
        g = torch.randn_like(want)
        want.backward(g)
        have.backward(sl.shard(g, have.sharding))
        for mine, theirs in ((have, want), (c.grad, a.grad), (d.grad, b.grad)):
            assert torch.allclose(sl.unshard(mine), theirs, atol=1e-12)
            assert c.grad.sharding == c.sharding and d.grad.sharding == d.sharding
