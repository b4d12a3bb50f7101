"""Half precision: no rule loses more than the dense product does, within a factor of 1.4."""

from collections.abc import Callable
from typing import Any

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
    "addmm": (torch.addmm, (V, X, WIDE), (".", ". x", "x ."), {"x": 8}),
    "a vector": (torch.mv, (X, V), ("x .", "."), {"x": 8}),
    "einsum": (lambda x, v: torch.einsum("mk,k->m", x, v), (X, V), (". x", "x"), {"x": 8}),
    "a scalar": (lambda x, s: x * s, (X, V[3]), ("x .", ""), {"x": 8}),
    "batch_norm": (
        lambda x, g, b: F.batch_norm(x, None, None, g, b, True),
        (X, V, V),
        ("x .", ".", "."),
        {"x": 8},
    ),
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


CANCEL = {  # parts of ranks that are large, with a sum that is small
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "nansum": lambda x: x.nansum(0),
    "var_mean": lambda x: torch.var_mean(x, 0)[1],
    "einsum": lambda x: torch.einsum("mk->k", x),
    "a bias' gradient": lambda x: gradient(lambda b: (x.detach() * 0 + b) * x, x, (48,)),
    "a norm's gradient": lambda x: gradient(
        lambda b: F.layer_norm(x * 0, (48,), None, b) * x, x, (48,)
    ),
    "a vector's gradient": lambda x: gradient(lambda b: x @ b, x, (48,)),
}


def gradient(f: Callable[[Tensor], Tensor], x: Tensor, shape: tuple[int, ...]) -> Tensor:
    b = torch.ones(shape, dtype=x.dtype)
    b = sl.shard(b, ".") if isinstance(x, sl.ShardedTensor) else b
    return torch.autograd.grad(f(b.requires_grad_()).sum(), b)[0]


def cancelled(dtype: torch.dtype, ranks: int) -> dict[str, float]:
    """How far each is from the exact value, over the distance of dense."""
    draw = torch.Generator().manual_seed(4)
    sign = 1 - 2 * (torch.arange(64) * ranks // 64 % 2)
    x = (torch.randn(64, 48, generator=draw) + 20 * sign[:, None]).to(dtype)
    found = {}
    for name, f in CANCEL.items():
        exact, dense = f(x.double()), f(x)
        mine = f(sl.shard(x, "x ."))
        assert mine.dtype == dtype, name
        far, room = (float((t.double() - exact).norm()) for t in (sl.unshard(mine), dense))
        found[name] = far / max(room, float(torch.finfo(dtype).eps) / 8 * float(exact.norm()))
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_once_and_not_at_each_rank(dtype: torch.dtype, ranks: int) -> None:
    with sl.simulate(x=ranks):
        found = cancelled(dtype, ranks)
    assert max(found.values()) <= 1.4, found


def test_a_sum_is_rounded_once_on_real_ranks_too(pool: Any) -> None:
    with sl.simulate(x=4):
        here = cancelled(torch.bfloat16, 4)
    for there in pool.run(cancelled, torch.bfloat16, 4, x=4):
        assert max(there.values()) <= 1.4, there
        assert there.keys() == here.keys()


def test_parts_travel_in_fp32_and_the_sum_in_half_precision() -> None:
    x = torch.ones(64, 48).bfloat16()
    with sl.simulate(x=4):
        a = sl.shard(x, "x .")
        with sl.trace() as t:
            a.sum(0)
        assert t.bytes == 48 * (4 + 2) * 3 / 4
        with sl.trace() as t:  # each part is one element
            sl.shard(x[:4], "x .").sum(0)
        assert t.bytes == 48 * (2 + 2) * 3 / 4


MEETS = {  # name -> function, shapes of x and of what is whole, layouts, the split dimension of y
    "conv1d": (F.conv1d, [(8, 4, 30), (6, 4, 3), (6,)], ["x . .", "...", "."], 0),
    "conv2d": (F.conv2d, [(8, 4, 9, 9), (6, 4, 3, 3), (6,)], ["x . . .", "...", "."], 0),
    "conv2d, filters": (F.conv2d, [(6, 4, 9, 9), (8, 4, 3, 3)], ["...", "x . . ."], 1),
    "conv2d, channels apart": (
        lambda x, w, b: F.conv2d(x, w, b, groups=4),
        [(8, 4, 9, 9), (4, 1, 3, 3), (4,)],
        ["x . . .", "...", "."],
        0,
    ),
    "conv3d": (F.conv3d, [(8, 2, 5, 5, 5), (6, 2, 3, 3, 3), (6,)], ["x . . . .", "...", "."], 0),
    "conv_transpose2d": (
        F.conv_transpose2d,
        [(8, 4, 9, 9), (4, 6, 3, 3), (6,)],
        ["x . . .", "...", "."],
        0,
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        [(8, 4, 9, 9), (4,), (4,)],
        ["x . . .", ".", "."],
        0,
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        [(8, 4, 9, 9), (4,), (4,)],
        ["x . . .", ".", "."],
        0,
    ),
    "prelu": (F.prelu, [(8, 4, 9), (4,)], ["x . .", "."], 0),
    "bilinear": (
        F.bilinear,
        [(16, 8), (16, 8), (6, 8, 8), (6,)],
        ["x .", "x .", "...", "."],
        0,
    ),
    "index_select": (
        lambda i, w: w.index_select(0, i),
        [(64,), (8, 16)],
        ["x", "..."],
        0,
    ),
    "a table at positions": (lambda i, w: w[i], [(64,), (8, 16)], ["x", "..."], 0),
}
ADDED = {  # name -> function, shapes of the summand and the factors, layouts, their split dimension
    "addmv": (torch.addmv, [(48,), (48, 64), (64,)], [".", ". x", "x"], (1, 0)),
    "addmm": (torch.addmm, [(48, 24), (48, 64), (64, 24)], ["...", ". x", "x ."], (1, 0)),
    "baddbmm": (
        torch.baddbmm,
        [(3, 48, 24), (3, 48, 64), (3, 64, 24)],
        ["...", ". . x", ". x ."],
        (2, 1),
    ),
    "addbmm": (
        torch.addbmm,
        [(48, 24), (8, 48, 16), (8, 16, 24)],
        ["...", "x . .", "x . ."],
        (0, 0),
    ),
}


def opposed(shape: tuple[int, ...], dim: int, ranks: int, sign: int, seed: int) -> Tensor:
    """Draw blocks that are nearly equal, or nearly each other's negative: their sum is small."""
    draw = torch.Generator().manual_seed(seed)
    size = (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])
    block = torch.randn(size, generator=draw)
    blocks = torch.cat([block * sign**k for k in range(ranks)], dim)
    return blocks + torch.randn(shape, generator=draw) / 50


def lost(dtype: torch.dtype, ranks: int) -> dict[str, float]:
    """How far values and gradients are from the exact ones, over the distance of their rounding."""
    found = {}
    for name, (f, shapes, layouts, at) in (MEETS | ADDED).items():
        draw = torch.Generator().manual_seed(5)
        operands = [torch.randn(s, generator=draw) for s in shapes]
        split = [layout.split().index("x") if "x" in layout else None for layout in layouts]
        for k, (s, dim) in enumerate(zip(shapes, split, strict=True)):
            if dim is not None:  # of factors that are summed, one changes its sign
                sign = -1 if name in ADDED and k == 1 else 1
                operands[k] = opposed(s, dim, ranks, sign, k)
        if name in ("index_select", "a table at positions"):
            operands[0] = torch.arange(64) % 8
        if name in ADDED:  # nearly the product, too, and of the other sign
            operands[0] = operands[0] / 50 - f(
                torch.zeros(shapes[0]), *(t.to(dtype).float() for t in operands[1:])
            )
        shape = f(*operands).shape
        g = torch.randn(shape, generator=draw)
        if name in MEETS:
            g = opposed(shape, at, ranks, -1, 9)
        g = g.to(dtype)
        narrow = [t.to(dtype) if t.is_floating_point() else t for t in operands]

        def results(given: list[Tensor], g: Tensor = g, f: Any = f) -> list[Tensor]:
            given = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
            y = f(*given)
            g = g.to(y.dtype)
            g = sl.shard(g, sl.layout_of(y)) if isinstance(y, sl.ShardedTensor) else g
            return [y.detach(), *torch.autograd.grad(y, [t for t in given if t.requires_grad], g)]

        wide = [t.double() if t.is_floating_point() else t for t in narrow]
        given = [sl.shard(t, lay) for t, lay in zip(narrow, layouts, strict=True)]
        results(given)  # the second call goes a shorter way
        ours = results(given)
        for i, (mine, true) in enumerate(zip(ours, results(wide), strict=True)):
            assert mine.dtype == dtype, name
            once = error(true.to(dtype), true)
            found[f"{name}, {i}"] = error(sl.unshard(mine), true) / max(once, 1e-9)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_ranks_add_up_is_rounded_once_whatever_made_it(dtype: torch.dtype, ranks: int) -> None:
    with sl.simulate(x=ranks):
        found = lost(dtype, ranks)
    assert max(found.values()) <= 1.4, found


def test_what_real_ranks_add_up_is_rounded_once(pool: Any) -> None:
    for found in pool.run(lost, torch.bfloat16, 4, x=4):
        assert max(found.values()) <= 1.4, found


LOSSES = {  # name -> loss of x and of targets
    "mse_loss": F.mse_loss,
    "mse_loss, sum": lambda x, t: F.mse_loss(x, t, reduction="sum"),
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "poisson_nll_loss": F.poisson_nll_loss,
    "kl_div": lambda x, t: F.kl_div(x, t, reduction="batchmean"),
    "cross_entropy, weighed": lambda x, t: F.cross_entropy(x, t, x.detach()[0].abs() + 0.1),
    "cross_entropy of shares": F.cross_entropy,
}


def lost_by_losses(dtype: torch.dtype) -> dict[str, float]:
    """How far losses and their gradients are from the exact ones, over one rounding's distance."""
    found = {}
    for name, f in LOSSES.items():
        x, t = (torch.randn(44, 7, generator=torch.Generator().manual_seed(k)) for k in (6, 7))
        x, t = x.to(dtype), t.sigmoid().to(dtype)
        t = torch.arange(44) % 7 if name == "cross_entropy, weighed" else t
        wide = x.double().requires_grad_()
        exact = f(wide, t.double() if t.is_floating_point() else t)
        mine = sl.shard(x, "x .").requires_grad_()
        loss = f(mine, sl.shard(t, "x ." if t.ndim == 2 else "x"))
        assert loss.dtype == dtype, name
        (true,), (g,) = torch.autograd.grad(exact, wide), torch.autograd.grad(loss, mine)
        room = float(torch.finfo(dtype).eps)
        found[name] = error(sl.unshard(loss).detach(), exact.detach()) / room
        found[f"{name}'s gradient"] = error(sl.unshard(g), true) / error(true.to(dtype), true)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_and_its_gradient_are_rounded_once(dtype: torch.dtype) -> None:
    with sl.simulate(x=4):
        found = lost_by_losses(dtype)
    assert max(found.values()) <= 1.4, found


def test_a_loss_of_real_ranks_is_rounded_once(pool: Any) -> None:
    for found in pool.run(lost_by_losses, torch.bfloat16, x=4):
        assert max(found.values()) <= 1.4, found
