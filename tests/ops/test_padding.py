from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from tests.ops.cases import close, r


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
    st.sampled_from(["x y", "(x y) .", ". x", "zigzag(x) y", "(2 x) ."]),
    st.sampled_from([(2, 2), (2, 3), (4, 1)]),
)
def test_unshard_strips_what_shard_padded(shape: Any, layout: str, grid: Any) -> None:
    x = r(*shape)
    with sl.simulate(x=grid[0], y=grid[1]):
        a = sl.shard(x, layout, pad=True)
        assert a.shape == x.shape
        assert torch.equal(sl.unshard(a), x)
        close(sl.unshard(a.exp().sum()), x.exp().sum())
        close(sl.unshard((a + 1).mean(0)), (x + 1).mean(0))
        close(sl.unshard((a * a).mean(-1, keepdim=True)), (x * x).mean(-1, keepdim=True))


@settings(max_examples=100)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([(2, 2), (2, 3)]))
def test_padded_products_equal_dense(sizes: Any, grid: Any) -> None:
    m, k, n = sizes
    row, col = grid
    x, w, g = r(m, k).requires_grad_(), r(k, n, seed=1).requires_grad_(), r(m, n, seed=2)
    (x.exp() @ w).backward(g)
    lcm = {(2, 2): 2, (2, 3): 6}[grid]
    with sl.simulate(x=row, y=col):
        # exp(0) = 1 in the padding: it must not leak into the contraction
        k_pad = (0, -k % lcm)
        a = sl.shard(F.pad(x.detach(), k_pad), "x y", pad=True) if k_pad[1] else sl.shard(x.detach(), "x y", pad=True)
        b = (
            sl.shard(F.pad(w.detach().T, k_pad).T, "x y", pad=True)
            if k_pad[1]
            else sl.shard(w.detach(), "x y", pad=True)
        )
        a.requires_grad_(), b.requires_grad_()
        c = a.exp() @ b
        close(sl.unshard(c)[:m, :n].detach(), (x.exp() @ w).detach())
        (c * sl.shard(g, "x y", pad=True)).sum().backward()
        close(sl.unshard(a.grad)[:m, :k], x.grad)
        close(sl.unshard(b.grad)[:k, :n], w.grad)


def test_functions_without_a_rule_for_padding_refuse() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(5, 4), "x .", pad=True)
        for call in (lambda: F.softmax(a, -1), lambda: a.view(20), lambda: F.layer_norm(a, (4,))):
            with pytest.raises(sl.ShardError, match="no rule for padded blocks") as caught:
                call()
            assert eval(caught.value.fix, {"sl": sl, "x": a}).shape == (5, 4)
        with pytest.raises(sl.ShardError, match="padded alike"):
            a + sl.shard(torch.ones(5, 4), ". .")
        assert "padded" in sl.typeof(a)
