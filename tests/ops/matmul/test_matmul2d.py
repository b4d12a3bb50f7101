"""Every matmul rule, layout and form against dense, value and every gradient, and its price."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from tests.strategies import examples

GRIDS = [(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 3), (4, 4)]
RULES = ["oned", "summa", "summa_y", "summa_x", "summa_w", "cannon"]
# (x's last dims, w's dims): the token patterns that some rule takes
TWO_D = [("x", "y", "x y"), ("x", "y", "y x"), ("y", "x", "x y")]
ONE_D = [
    ("x", ".", ". y"),
    (".", "y", "y ."),
    ("x", "y", "y ."),
    (".", ".", ". ."),
    ("x", ".", ". ."),
    (".", ".", ". y"),
]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if b.numel() else 0.0


@st.composite
def products(draw: Any) -> Any:
    row, col = draw(st.sampled_from(GRIDS))
    data = draw(st.sampled_from([1, 1, 2]))
    rule = draw(st.sampled_from(RULES))
    rows, k_token, w = draw(st.sampled_from(ONE_D if rule == "oned" else TWO_D))
    if rule in ("cannon", "summa_x", "summa_w") and not (
        rule == "summa_w" and (rows, k_token) == ("y", "x")
    ):
        col = row = min(row, col)  # these need a square grid
    if rule == "summa_y" and (k_token, w) != ("y", "x y"):
        col = row = min(row, col)
    unit = row * col
    m, k, n = (unit * draw(st.integers(1, 2)) for _ in range(3))
    batch = (
        draw(st.integers(1, 3)) if (rows, k_token) != ("y", "x") and draw(st.booleans()) else None
    )
    if (rows, k_token) == ("y", "x"):
        data = 1
    form = (
        draw(st.sampled_from(["nn", "nt", "tn"]))
        if batch is None
        else draw(st.sampled_from(["nn", "nt"]))
    )
    return {"data": data, "x": row, "y": col}, rule, rows, k_token, w, (m * data, k, n), batch, form


@examples(250)
@given(products(), st.integers(0, 2**31))
@example(({"data": 2, "x": 2, "y": 3}, "summa", "x", "y", "x y", (12, 6, 6), 3, "nt"), 0)
def test_products_equal_dense_and_cost_what_they_say(case: Any, seed: int) -> None:
    mesh, rule, rows, k_token, w_text, (m, k, n), batch, form = case
    draw = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.randn(*s, dtype=torch.float64, generator=draw)  # noqa: E731
    lead = (m,) if batch is None else (m, batch)
    x, w, g = rand(*lead, k).requires_grad_(), rand(k, n).requires_grad_(), rand(*lead, n)
    y = x @ w
    y.backward(g)
    axes = (
        f"(data {rows})"
        if mesh["data"] > 1 and rows != "."
        else "data"
        if mesh["data"] > 1
        else rows
    )
    x_text = f"{axes} {k_token}" if batch is None else f"{axes} . {k_token}"
    with sl.simulate(**mesh), sl.algorithm(matmul=rule):
        a, b = sl.shard(x.detach(), x_text), sl.shard(w.detach(), w_text)
        if form == "tn":  # x is stored transposed
            a = sl.shard(x.detach().T, sl.layout_of(a).T)
        if form == "nt":
            b = sl.shard(w.detach().T, sl.layout_of(b).T)
        a.requires_grad_(), b.requires_grad_()
        left, right = (a.T if form == "tn" else a), (b.T if form == "nt" else b)
        with sl.trace() as forward:
            c = F.linear(left, b) if form == "nt" else left @ right
        with sl.trace() as backward:
            c.backward(sl.shard(g, c.sharding))
        price = dict(sl.why("matmul", left, right).verdicts)[rule]
        assert isinstance(price, sl.extend.Match), price
        assert (forward.bytes, forward.messages) == (price.forward.bytes, price.forward.messages)
        assert (backward.bytes, backward.messages) == (
            price.backward.bytes,
            price.backward.messages,
        )
        assert relative(sl.unshard(c).detach(), y.detach()) < 1e-12
        assert a.grad is not None and a.grad.sharding == a.sharding
        assert b.grad is not None and b.grad.sharding == b.sharding
        da, db = sl.unshard(a.grad), sl.unshard(b.grad)
        assert relative(da.T if form == "tn" else da, x.grad) < 1e-12
        assert relative(db.T if form == "nt" else db, w.grad) < 1e-12


@examples(12)
@given(st.sampled_from([(2, 2), (2, 3)]), st.sampled_from(["summa", "oned"]), st.integers(1, 3))
def test_batched_products_share_their_leading_dimensions(
    grid: tuple[int, int], rule: str, b: int
) -> None:
    row, col = grid
    n = row * col
    x = torch.randn(b, n, n, dtype=torch.float64, requires_grad=True)
    w = torch.randn(b, n, 2 * n, dtype=torch.float64, requires_grad=True)
    g = torch.randn(b, n, 2 * n, dtype=torch.float64)
    (x @ w).backward(g)
    with sl.simulate(x=row, y=col):
        texts = (". x y", ". x y") if rule == "summa" else (". x .", ". . y")
        p, q = (
            sl.shard(t.detach(), text).requires_grad_()
            for t, text in zip((x, w), texts, strict=True)
        )
        assert sl.why("matmul", p, q).chosen == rule
        c = p @ q
        c.backward(sl.shard(g, c.sharding))
        assert relative(sl.unshard(c).detach(), (x @ w).detach()) < 1e-12
        assert (
            relative(sl.unshard(p.grad), x.grad) < 1e-12
            and relative(sl.unshard(q.grad), w.grad) < 1e-12
        )


REAL = [
    (rule, w, form)
    for rule in ("summa", "summa_y", "summa_x", "summa_w", "cannon")
    for w in ("x y", "y x")
    for form in ("nn", "nt", "tn")
]


def on_a_real_rank() -> dict[str, float]:
    """Every 2D rule, layout and form on 2x2: the largest relative error of value and gradients."""
    out = {}
    for rule, w_text, form in REAL:
        draw = torch.Generator().manual_seed(1)
        x, w, g = (
            torch.randn(s, dtype=torch.float64, generator=draw) for s in ((4, 6), (6, 10), (4, 10))
        )
        x.requires_grad_(), w.requires_grad_()
        (x @ w).backward(g)
        with sl.algorithm(matmul=rule):
            a = sl.shard(
                x.detach().T if form == "tn" else x.detach(), "y x" if form == "tn" else "x y"
            ).requires_grad_()
            b = (
                sl.shard(w.detach().T, sl.Layout.parse(w_text).T)
                if form == "nt"
                else sl.shard(w.detach(), w_text)
            )
            b.requires_grad_()
            left, right = (a.T if form == "tn" else a), (b.T if form == "nt" else b)
            with sl.trace() as forward:
                c = left @ right
            with sl.trace() as backward:
                c.backward(sl.shard(g, c.sharding))
            price = dict(sl.why("matmul", left, right).verdicts)[rule]
        assert isinstance(price, sl.extend.Match) and (forward.bytes, backward.bytes) == (
            price.forward.bytes,
            price.backward.bytes,
        )
        da, db = sl.unshard(a.grad), sl.unshard(b.grad)
        out[f"{rule} {w_text} {form}"] = max(
            relative(sl.unshard(c).detach(), (x @ w).detach()),
            relative(da.T if form == "tn" else da, x.grad),
            relative(db.T if form == "nt" else db, w.grad),
        )
    return out


def test_every_2d_rule_on_real_processes_equals_dense(pool) -> None:
    for errors in pool.run(on_a_real_rank, x=2, y=2):
        assert max(errors.values()) < 1e-12, errors
