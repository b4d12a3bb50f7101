"""Gradients of products of complex numbers: dX is dY times the adjoint of W."""

import pytest
import torch

import shardlib as sl
from tests.ops.cases import r

LAYOUTS = [
    ("x .", ". ."),
    (". .", ". x"),
    (". x", "x ."),
    ("x y", "x y"),
    ("x .", ". y"),
    (". y", "y x"),
    ("x y", "y ."),
]


@pytest.mark.parametrize(("left", "right"), LAYOUTS)
def test_gradients_of_complex_products_are_those_of_torch(left: str, right: str) -> None:
    a, b = (torch.complex(r(*s, seed=k), r(*s, seed=k + 2)) for k, s in enumerate([(4, 6), (6, 4)]))
    c = torch.complex(r(4, 4, seed=8), r(4, 4, seed=9))
    a0, b0 = a.clone().requires_grad_(), b.clone().requires_grad_()
    want = torch.autograd.grad(a0 @ b0, [a0, b0], c, create_graph=True)
    again = torch.autograd.grad([w.abs().sum() for w in want], [a0, b0])
    with sl.simulate(x=2, y=2), sl.implicit():
        x, w = sl.shard(a, left).requires_grad_(), sl.shard(b, right).requires_grad_()
        y = x @ w
        got = torch.autograd.grad(y, [x, w], sl.shard(c, str(y.sharding).partition(" +")[0]), create_graph=True)
        seconds = torch.autograd.grad([g.abs().sum() for g in got], [x, w])
        for g, v in zip((*got, *seconds), (*want, *again), strict=True):
            assert torch.allclose(sl.unshard(g), v, atol=1e-11)
