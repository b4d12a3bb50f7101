"""Every matmul rule, layout and form against dense, value and every gradient, and its price."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl

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
    if rule in ("cannon", "summa_x", "summa_w") and not (rule == "summa_w" and (rows, k_token) == ("y", "x")):
        col = row = min(row, col)  # these need a square grid
    if rule == "summa_y" and (k_token, w) != ("y", "x y"):
        col = row = min(row, col)
    unit = row * col
    m, k, n = (unit * draw(st.integers(1, 2)) for _ in range(3))
    batch = draw(st.integers(1, 3)) if (rows, k_token) != ("y", "x") and draw(st.booleans()) else None
    if (rows, k_token) == ("y", "x"):
        data = 1
    form = draw(st.sampled_from(["nn", "nt", "tn"])) if batch is None else draw(st.sampled_from(["nn", "nt"]))
    return {"data": data, "x": row, "y": col}, rule, rows, k_token, w, (m * data, k, n), batch, form


@settings(max_examples=1000)
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
    axes = f"(data {rows})" if mesh["data"] > 1 and rows != "." else "data" if mesh["data"] > 1 else rows
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
        assert (backward.bytes, backward.messages) == (price.backward.bytes, price.backward.messages)
        assert relative(sl.unshard(c).detach(), y.detach()) < 1e-12
        assert a.grad is not None and a.grad.sharding == a.sharding
        assert b.grad is not None and b.grad.sharding == b.sharding
        da, db = sl.unshard(a.grad), sl.unshard(b.grad)
        assert relative(da.T if form == "tn" else da, x.grad) < 1e-12
        assert relative(db.T if form == "nt" else db, w.grad) < 1e-12


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2))
def test_pre_skewed_operands_save_the_first_move(q: int, m: int, k: int, n: int) -> None:
    x, w = torch.randn(q * m, q * k, dtype=torch.float64), torch.randn(q * k, q * n, dtype=torch.float64)
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


@settings(max_examples=60)
@given(st.sampled_from([(2, 2), (2, 3)]), st.sampled_from(["summa", "oned"]), st.integers(1, 3))
def test_batched_products_share_their_leading_dimensions(grid: tuple[int, int], rule: str, b: int) -> None:
    row, col = grid
    n = row * col
    x = torch.randn(b, n, n, dtype=torch.float64, requires_grad=True)
    w = torch.randn(b, n, 2 * n, dtype=torch.float64, requires_grad=True)
    g = torch.randn(b, n, 2 * n, dtype=torch.float64)
    (x @ w).backward(g)
    with sl.simulate(x=row, y=col):
        texts = (". x y", ". x y") if rule == "summa" else (". x .", ". . y")
        p, q = (sl.shard(t.detach(), text).requires_grad_() for t, text in zip((x, w), texts, strict=True))
        assert sl.why("matmul", p, q).chosen == rule
        c = p @ q
        c.backward(sl.shard(g, c.sharding))
        assert relative(sl.unshard(c).detach(), (x @ w).detach()) < 1e-12
        assert relative(sl.unshard(p.grad), x.grad) < 1e-12 and relative(sl.unshard(q.grad), w.grad) < 1e-12


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32_across_panels(dtype: torch.dtype) -> None:
    """One large panel product then many small ones: in half precision the small ones would be lost."""
    k = 16
    x = torch.ones(4, k, dtype=dtype)
    w = torch.full((k, 4), 0.25, dtype=dtype)
    w[: k // 4] = 64.0
    exact = x.double() @ w.double()
    with sl.simulate(x=4, y=4):
        for rule in ("summa", "cannon"):
            with sl.algorithm(matmul=rule):
                got = sl.unshard(sl.shard(x, "x y") @ sl.shard(w, "x y"))
            assert torch.equal(got, exact.to(dtype)), rule


def test_only_blocks_are_saved_for_backward() -> None:
    """Saved bytes are the two operands' blocks, for every 2D rule."""
    held: list[Tensor] = []
    for rule in ("summa", "summa_x", "summa_w", "cannon"):
        held.clear()
        with sl.simulate(x=2, y=2), sl.algorithm(matmul=rule):
            a, b = (sl.shard(torch.randn(8, 8), "x y").requires_grad_() for _ in range(2))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
                _ = a @ b
        assert sum(t.numel() for t in held) == a.raw.numel() + b.raw.numel(), rule


def test_the_largest_matrix_stays() -> None:
    with sl.simulate(x=4, y=4):
        wide = sl.shard(torch.zeros(16, 1024), "x y")
        narrow = sl.shard(torch.zeros(1024, 16), "x y")
        notes = {n: m for n, m in sl.why("matmul", wide, sl.shard(torch.zeros(1024, 64), "x y")).verdicts}
        assert "W stays" in notes["summa"].note
        assert "Y stays" in dict(sl.why("matmul", narrow, wide).verdicts)["summa"].note


@pytest.mark.parametrize("rule", ["summa_y", "summa_x", "summa_w"])
@pytest.mark.parametrize("w_text", ["x y", "y x"])
@pytest.mark.parametrize("alpha", [1e-9, 1e-3])
def test_measured_links_cut_panels_into_slices(rule: str, w_text: str, alpha: float) -> None:
    """Where messages are cheap, more of them: the same words, values and gradients."""
    x, w, g = (torch.randn(512, 512, dtype=torch.float64) for _ in range(3))
    x.requires_grad_(), w.requires_grad_()
    (x @ w).backward(g)
    with sl.simulate(x=2, y=2) as mesh, sl.algorithm(matmul=rule):
        a, b = sl.shard(x.detach(), "x y").requires_grad_(), sl.shard(w.detach(), w_text).requires_grad_()
        before = dict(sl.why("matmul", a, b).verdicts)[rule]
        mesh.links.update(x=sl.planning.Link(alpha, 1e-9), y=sl.planning.Link(alpha, 1e-9))
        price = dict(sl.why("matmul", a, b).verdicts)[rule]
        assert isinstance(before, sl.extend.Match) and isinstance(price, sl.extend.Match)
        panels = 2 if alpha < 1e-6 else 1  # 512 / 2 panels / 128
        assert price.cost.bytes == before.cost.bytes and (price.cost.messages > before.cost.messages) == (panels > 1)
        with sl.trace() as t:
            c = a @ b
            c.backward(sl.shard(g, c.sharding))
        assert (t.bytes, t.messages) == (price.cost.bytes, price.cost.messages)
        pairs = ((sl.unshard(c), x @ w), (sl.unshard(a.grad), x.grad), (sl.unshard(b.grad), w.grad))
        assert all(relative(mine.detach(), dense.detach()) < 1e-12 for mine, dense in pairs)


def test_a_rule_registered_later_replaces_and_can_be_pinned() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.eye(4), "x .")
        with sl.algorithm(matmul="oned"):
            assert sl.why("matmul", a, sl.shard(torch.eye(4), ". .")).chosen == "oned"
        with pytest.raises(sl.ShardError, match="unknown algorithm 'canon'"):
            sl.algorithm(matmul="canon").__enter__()


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
        x, w, g = (torch.randn(s, dtype=torch.float64, generator=draw) for s in ((4, 6), (6, 10), (4, 10)))
        x.requires_grad_(), w.requires_grad_()
        (x @ w).backward(g)
        with sl.algorithm(matmul=rule):
            a = sl.shard(
                x.detach().T if form == "tn" else x.detach(), "y x" if form == "tn" else "x y"
            ).requires_grad_()
            b = sl.shard(w.detach().T, sl.Layout.parse(w_text).T) if form == "nt" else sl.shard(w.detach(), w_text)
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
