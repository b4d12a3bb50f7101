"""Half precision: no rule loses more than the dense product does, within a factor of 1.4."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.ops.matmul.case import case
from shardlib.ops.registry import choose

# rule -> mesh, layouts of x and w, the layout asked of y
RULES = {
    "oned row": ("oned", {"x": 4}, ". x", "x .", None),
    "oned data": ("oned", {"x": 8}, "x .", ". .", None),
    "oned column": ("oned", {"x": 8}, ". .", ". x", None),
    "summa": ("summa", {"x": 4, "y": 4}, "x y", "x y", None),
    "summa abt": ("summa", {"x": 2, "y": 4}, "x y", "y x", None),
    "summa_x": ("summa_x", {"x": 4, "y": 4}, "x y", "x y", None),
    "summa_w": ("summa_w", {"x": 4, "y": 4}, "x y", "x y", None),
    "cannon": ("cannon", {"x": 4, "y": 4}, "x y", "x y", None),
    "summa, copies": ("summa", {"d": 4, "x": 2, "y": 2}, "(d x) y", "x y", None),
    "summa_y, copies": ("summa_y", {"d": 4, "x": 2, "y": 2}, "(d x) y", "x y", None),
    "summa abt, copies": ("summa", {"d": 4, "x": 2, "y": 2}, "(d x) y", "y x", None),
    "summa_x, copies": ("summa_x", {"d": 4, "x": 2, "y": 2}, "(d x) y", "x y", None),
    "cannon, copies": ("cannon", {"d": 4, "x": 2, "y": 2}, "(d x) y", "x y", None),
    "cube, copies": ("mm3", {"d": 4, "x": 2, "y": 2}, "(d x) y", "x y", None),
    "cube, two sums": ("mm3", {"x": 2, "y": 2, "z": 4}, "x (z y)", "z y", "x y"),
    "cube": ("mm3", {"x": 2, "y": 2, "z": 4}, "(x y) z", "(z x) y", None),
    "cube saved": ("mm3_xw", {"x": 4, "y": 2, "z": 2}, "(x y) z", "(z x) y", None),
    "scatter of 8": ("mm3", {"x": 8}, ". x", "x .", "x ."),
    "gather of 8": ("mm3", {"x": 8}, "x .", ". x", ". x"),
}


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_rule_loses_more_than_the_dense_product(name: str, dtype: torch.dtype) -> None:
    rule, mesh, x_text, w_text, out = RULES[name]
    draw = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(128, 128, generator=draw).to(dtype).requires_grad_() for _ in range(3))
    dense = (y := x @ w).detach(), *torch.autograd.grad(y, (x, w), g)
    wide = tuple(t.detach().double().requires_grad_() for t in (x, w))
    exact = (z := wide[0] @ wide[1]).detach(), *torch.autograd.grad(z, wide, g.double())
    with sl.simulate(**mesh), sl.algorithm(matmul=rule):
        a, b = (
            sl.shard(x.detach(), x_text).requires_grad_(),
            sl.shard(w.detach(), w_text).requires_grad_(),
        )
        price = choose("matmul", (name, dtype), lambda: case(a, b, out))
        with sl.trace() as t:
            c = sl.matmul(a, b, out=out)
        assert (t.bytes, t.messages) == (price.forward.bytes, price.forward.messages)
        with sl.trace() as t:
            c.backward(sl.shard(g.detach(), c.sharding))
        assert (t.bytes, t.messages) == (price.backward.bytes, price.backward.messages)
        ours = sl.unshard(c).detach(), sl.unshard(a.grad), sl.unshard(b.grad)
    bar = 4.0 if dtype == torch.float32 else 1.4
    for what, mine, theirs, true in zip(("y", "dx", "dw"), ours, dense, exact, strict=True):
        assert error(mine, true) <= bar * error(theirs, true), (
            what,
            error(mine, true) / error(theirs, true),
        )


X, V = torch.randn(256, 512, generator=torch.Generator().manual_seed(1)), torch.linspace(-1, 1, 512)
WIDE = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)) / 22
OTHERS = {  # name -> function, operands, their layouts, mesh
    "linear, rows": (F.linear, (X, WIDE, V), (". x", ". x", "."), {"x": 8}),
    "linear, columns": (F.linear, (X, WIDE, V), (". .", "x .", "x"), {"x": 8}),
    "linear, data": (F.linear, (X, WIDE, V), ("x .", ". .", "."), {"x": 8}),
    "linear, 2D": (F.linear, (X, WIDE, V), ("x y", "y x", "y"), {"x": 4, "y": 4}),
    "linear, 2D, X stays": (F.linear, (X, WIDE, V), ("x y", "x y", "y"), {"x": 4, "y": 2}),
    "linear, 2.5D": (F.linear, (X, WIDE, V), ("(d x) y", "y x", "y"), {"d": 4, "x": 2, "y": 2}),
    "linear, 3D": (F.linear, (X, WIDE, V), ("(x y) z", "y (z x)", "y"), {"x": 2, "y": 2, "z": 2}),
    "a bias": (lambda x, b: x + b, (X, V), ("x .", "."), {"x": 8}),
    "a scale": (lambda x, b: x * b, (X, V), ("x y", "y"), {"x": 8, "y": 2}),
    "layer_norm": (
        lambda x, g, b: F.layer_norm(x, (512,), g, b),
        (X, V, V),
        ("(d x) y", "y", "y"),
        {"d": 2, "x": 2, "y": 4},
    ),
    "rms_norm": (lambda x, g: F.rms_norm(x, (512,), g), (X, V), ("x y", "y"), {"x": 4, "y": 4}),
    "rms_norm of whole rows": (
        lambda x, g: F.rms_norm(x, (512,), g),
        (X, V),
        ("x .", "."),
        {"x": 8},
    ),
    "softmax": (lambda x: F.softmax(x, -1), (X,), (". x",), {"x": 4}),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (X,), (". x",), {"x": 4}),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (X,), (". x",), {"x": 4}),
    "var": (lambda x: x.var(-1), (X,), (". x",), {"x": 4}),
    "sum": (lambda x: x.sum(0), (X,), ("x .",), {"x": 8}),
    "mean": (lambda x: x.mean(0), (X,), ("x .",), {"x": 8}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_sum_loses_more_than_the_dense_one(name: str) -> None:
    """bfloat16: the value and every gradient."""
    f, operands, layouts, mesh = OTHERS[name]
    narrow = [t.bfloat16() for t in operands]

    def results(values: list[Tensor], g: Tensor | None = None) -> list[Tensor]:
        values = [v.detach().requires_grad_() for v in values]
        y = f(*values)
        g = (
            torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
            if g is None
            else g
        )
        g = sl.shard(g, sl.layout_of(y)) if isinstance(y, sl.ShardedTensor) else g.to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, values, g)]

    exact, dense = results([t.double() for t in narrow]), results(narrow)
    with sl.simulate(**mesh):
        ours = [
            sl.unshard(t)
            for t in results([sl.shard(t, lay) for t, lay in zip(narrow, layouts, strict=True)])
        ]
    for mine, theirs, true in zip(ours, dense, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, true) <= 1.4 * error(theirs, true), error(mine, true) / error(
            theirs, true
        )
