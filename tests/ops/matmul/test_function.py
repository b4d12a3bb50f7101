"""Gradients of products of complex numbers: dX is dY times the adjoint of W."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.mesh import bind
from shardlib.ops.matmul.function import Product
from tests.ops.cases import r
from tests.ops.matmul.test_matmul2d import relative
from tests.tensor.test_weight_gradients import split

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
        got = torch.autograd.grad(
            y, [x, w], sl.shard(c, str(y.sharding).partition(" +")[0]), create_graph=True
        )
        seconds = torch.autograd.grad([g.abs().sum() for g in got], [x, w])
        for g, v in zip((*got, *seconds), (*want, *again), strict=True):
            assert torch.allclose(sl.unshard(g), v, atol=1e-11)


@pytest.mark.parametrize("rule", ["summa", "summa_x", "summa_w", "cannon"])
def test_double_backward_equals_dense(rule: str) -> None:
    def second(x: Tensor, w: Tensor, grad: Any) -> tuple[Tensor, ...]:
        (dx,) = grad((x @ w).square().sum(), [x], create_graph=True)
        return grad((dx * dx).sum(), [x, w])

    x, w = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    want = second(x.clone().requires_grad_(), w.clone().requires_grad_(), torch.autograd.grad)
    with sl.simulate(x=2, y=2), sl.algorithm(matmul=rule):
        a, b = (sl.shard(t, "x y").requires_grad_() for t in (x, w))
        got = second(a, b, torch.autograd.grad)
        for mine, dense in zip(got, want, strict=True):
            assert relative(sl.unshard(mine), dense) < 1e-12


def test_only_blocks_are_saved_for_backward() -> None:
    """Saved bytes are the two operands' blocks, for every 2D rule."""
    held: list[Tensor] = []
    for rule in ("summa", "summa_x", "summa_w", "cannon"):
        held.clear()
        with sl.simulate(x=2, y=2), sl.algorithm(matmul=rule):
            a, b = (sl.shard(torch.randn(8, 8), "x y").requires_grad_() for _ in range(2))
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: held.append(t) or t, lambda t: t
            ):
                _ = a @ b
        assert sum(t.numel() for t in held) == a.raw.numel() + b.raw.numel(), rule


@dataclass(frozen=True)
class Both:
    """A user's schedule that computes both gradients whatever is needed."""

    summed: tuple[str, ...] = ()

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return x @ w, x, w

    def gradients(self, dy: Tensor, x: Tensor, w: Tensor, need: Any, over: Any) -> Any:
        return dy @ w.mT, sl.psum(x.mT @ dy, over[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_a_gradient_that_waits_for_a_second_pass_is_added_once(dtype: torch.dtype) -> None:
    x, w = (r(2, 4, 4, seed=k).to(dtype).requires_grad_() for k in range(2))
    with sl.simulate(x=2) as mesh:
        found = split(lambda: Product.apply(Both(), mesh, ((), ("x",)), x, w * 2).abs(), [x], [w])
    assert found.gap < 1e-12 and found.count == 1


def test_without_a_second_pass_backward_reads_the_scope_by_no_call() -> None:
    """A call of Python is a tenth of what a small product costs."""
    called = []

    def watch(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_back.f_code is run.__code__:
            called.append(frame.f_code)

    run: Any = Product.backward
    run = next(c.cell_contents for c in run.__closure__ if callable(c.cell_contents))
    with sl.simulate(x=2):
        x, w = (sl.shard(r(4, 4, seed=k), "x .").requires_grad_() for k in range(2))
        y = (x @ w).sum()
        sys.setprofile(watch)
        y.backward()
        sys.setprofile(None)
    names = [c.co_name for c in called]
    assert bind.__enter__.__code__ in called and "scope" not in names and "put" not in names
