"""Linformer: dense values and gradients for drawn rings and lengths;
what moves does not grow with the sequence.
"""

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Ring
from tests.ops.attention.test_op import gap, normal


def dense(q: Any, k: Any, v: Any, e: Any, f: Any) -> Any:
    shared = q.shape[1] // k.shape[1]
    k, v = (e @ k).repeat_interleave(shared, 1), (f @ v).repeat_interleave(shared, 1)
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.integers(1, 4),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
)
def test_linformer_equals_dense(s: int, t: int, p: int, schedule: str) -> None:
    q, k, v = normal(2, 4, s, 4, seed=1), normal(2, 2, t, 4, seed=2), normal(2, 2, t, 5, seed=3)
    e, f = normal(3, t, seed=4), normal(3, t, seed=5)
    leaves = [x.requires_grad_() for x in (q, k, v, e, f)]
    want, c = dense(*leaves), normal(2, 4, s, 5, seed=6)
    grads = torch.autograd.grad((want * c).sum(), leaves)
    with sl.simulate(data=2, s=p):
        lay = Ring("s", 2, schedule).layout
        lay = sl.Layout.parse("data . . .") * lay.resolve(4)
        xs = [sl.shard(x.detach(), lay, pad=True).requires_grad_() for x in (q, k, v)]
        ws = [x.detach().requires_grad_() for x in (e, f)]
        out = sl.ops.attention.linformer_attention(*xs, *ws)
        (out * sl.shard(c, lay, pad=True)).sum().backward()
        assert gap(sl.unshard(out), want.detach()) < 1e-12
        got = [*(sl.unshard(x.grad) for x in xs), *(w.grad for w in ws)]
        assert all(gap(a, b) < 1e-12 for a, b in zip(got, grads, strict=True))


def test_what_moves_does_not_grow_with_the_sequence() -> None:
    moved = []
    for s in (16, 64):
        with sl.simulate(s=4), sl.trace() as t:
            q = sl.shard(normal(1, 2, s, 4, seed=1), Ring("s", 2)).requires_grad_()
            sl.ops.attention.linformer_attention(q, q, q, normal(3, s, seed=4)).sum().backward()
        moved.append(t.bytes)
    assert moved[0] == moved[1] == 2 * Fraction(2 * 3, 4) * 2 * 3 * 8 * 8 + Fraction(2 * 3, 4) * 8


@pytest.mark.parametrize("which", range(5))
def test_a_gradient_left_pending_is_dense(which: int) -> None:
    """It was counted once per rank of the pending axis, but for that of the keys."""
    x, e = normal(2, 2, 10, 4, seed=1), normal(3, 10, seed=2)
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def scaled(x: Any, e: Any, w: Any) -> list[Any]:
        given = [x, x, x, e, e]
        given[which] = given[which] * w
        return given

    dense(*scaled(x, e, w)).square().sum().backward()
    for batch in (".", "y"):
        with sl.simulate(s=4, y=2):
            xs = sl.shard(x, f"{batch} . s .", pad=True)
            es = sl.shard(e, ". s", pad=True)

            def loss(p: Any, xs: Any = xs, es: Any = es) -> Any:
                return sl.attention.linformer_attention(*scaled(xs, es, p["w"])).square().sum()

            leaf = {"w": sl.shard(w.detach(), "")}
            for pending in ((), ("y",), ("s", "y")):
                _, g = sl.value_and_grad(loss, pending=pending)(leaf)
                assert torch.allclose(sl.unshard(g["w"]), w.grad, rtol=1e-10)
