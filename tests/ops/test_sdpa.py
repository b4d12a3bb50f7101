"""Layouts of queries, keys and values that name one mesh axis for several dimensions."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.errors import BadArgument
from shardlib.layouts import Ring
from shardlib.tensor import ShardedTensor
from tests.ops.attention.test_op import gap, normal
from tests.ops.attention.test_operands import K, Q, V
from tests.ops.cases import ATTENTION, r, run_on_meshes


@pytest.mark.parametrize(
    "layouts",
    [("y . .", ". y .", ". . y"), ("y . .", ". . y", "x y ."), ("y x .", "x . y", ". y x")],
)
def test_an_axis_that_is_taken_is_refused_or_gathered(layouts: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    dense = [torch.randn(4, 4, 6, dtype=torch.float64).requires_grad_() for _ in range(3)]
    want = F.scaled_dot_product_attention(*dense)
    want.square().sum().backward()
    with sl.simulate(x=2, y=2):
        ours = [
            sl.shard(t.detach(), s).requires_grad_() for t, s in zip(dense, layouts, strict=True)
        ]
        with pytest.raises(sl.errors.ImplicitCommunication):
            F.scaled_dot_product_attention(*ours)
        with sl.implicit():
            got = F.scaled_dot_product_attention(*ours)
            got.square().sum().backward()
        torch.testing.assert_close(sl.unshard(got), want)
        for a, b in zip(dense, ours, strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(sl.unshard(b.grad), a.grad)


def test_attention_modules_drop_by_position() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
    seen = []
    for axes, layout in (({"x": 1}, "..."), ({"x": 2}, "x . ."), ({"x": 4}, "x . .")):
        with sl.simulate(**axes):
            apply, params = sl.parallelize(layer, [("*", "...")], inputs={"src": layout})
            torch.manual_seed(2)
            seen.append(sl.unshard(apply(params, x)))
    assert torch.allclose(seen[0], seen[1], atol=1e-12) and torch.allclose(
        seen[0], seen[2], atol=1e-12
    )
    assert not torch.allclose(seen[0], layer.eval()(x), atol=1e-3)


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": "bool"}, {"attn_mask": "float"}],
)
def test_torch_s_function_goes_round_the_ring(kwargs: dict[str, Any]) -> None:
    given = dict(kwargs)
    if "attn_mask" in given:
        mask = normal(1, 1, 16, 16, seed=9)
        given["attn_mask"] = mask > -0.5 if given["attn_mask"] == "bool" else mask
    want = F.scaled_dot_product_attention(Q, K, V, **given, enable_gqa=True)
    with sl.simulate(s=4), sl.trace() as t:
        xs = [sl.shard(x, Ring("s", 2, "striped")) for x in (Q, K, V)]
        got = F.scaled_dot_product_attention(*xs, **given, enable_gqa=True)
        assert t.by_kind().keys() == {"ppermute"}
        assert gap(sl.unshard(got), want) < 1e-12


def test_one_head_of_keys_is_broadcast_round_the_ring_as_torch_does() -> None:
    one, two = K[:, :1].clone().requires_grad_(), V[:, :1].clone().requires_grad_()
    want = F.scaled_dot_product_attention(Q, one, two, is_causal=True)
    wanted = torch.autograd.grad(want.square().sum(), (one, two))
    with sl.simulate(s=4), sl.trace() as t:
        q, k, v = (
            sl.shard(x.detach(), Ring("s", 2, "zigzag")).requires_grad_() for x in (Q, one, two)
        )
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert t.by_kind().keys() == {"ppermute"}
        assert gap(sl.unshard(got), want.detach()) < 1e-12
        found = torch.autograd.grad(got.square().sum(), (k, v))
        assert max(gap(sl.unshard(g), w) for g, w in zip(found, wanted, strict=True)) < 1e-12


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_whole_sequences_equals_dense(name: str) -> None:
    run_on_meshes(name)


SAME = [normal(2, 2, 4, 8, seed=k) for k in range(3)]
MASK = normal(4, 4, seed=3)


@pytest.mark.parametrize("layout", [". . . .", ". . x .", ". x . ."])
def test_a_mask_that_is_a_pending_sum_is_refused_or_summed(layout: str) -> None:
    want = F.scaled_dot_product_attention(*SAME, attn_mask=MASK)
    with sl.simulate(x=2, y=2):
        q, k, v = (sl.shard(t, layout) for t in SAME)
        m = sl.shard(MASK, ". . + sum(y)")
        with pytest.raises(sl.errors.PartialEscape):
            F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        with sl.implicit():
            got = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        assert gap(sl.unshard(got), want) < 1e-9


def test_a_bias_that_is_a_pending_sum_is_refused() -> None:
    with sl.simulate(x=2, y=2):
        q, k, v = (sl.shard(t, ". . x .") for t in SAME)
        with pytest.raises(sl.errors.PartialEscape):
            sl.ring_attention(q, k, v, bias=sl.shard(MASK, ". . + sum(y)"))


@pytest.mark.parametrize("layout", [". . . .", "x . . .", ". x . .", ". . x ."])
def test_heads_are_taken_and_refused_as_torch_does(layout: str) -> None:
    """A refusal is the library's, and where groups would do its fix says so and runs."""
    fixes = 0
    for heads in itertools.product((2, 4), (1, 2, 4), (1, 2, 3, 4)):
        q, k, v = (normal(2, n, 4, 4, seed=n) for n in heads)
        for grouped in (False, True):
            try:
                want = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
            except RuntimeError:
                want = None
            with sl.simulate(x=2):
                if layout == ". x . ." and any(n % 2 for n in heads):
                    continue
                at = {"F": F} | {
                    n: sl.shard(t, layout) for n, t in zip("qkv", (q, k, v), strict=True)
                }
                call = "F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)"
                if want is not None:
                    assert gap(sl.unshard(eval(call, at | {"grouped": grouped})), want) < 1e-12
                    continue
                with pytest.raises(BadArgument, match="heads of queries") as e:
                    eval(call, at | {"grouped": grouped})
                if e.value.fix:
                    fixes += 1
                    exec(e.value.fix, at)
    assert fixes


@pytest.mark.parametrize(
    "layouts", [(". . . .", ". . . .", ". x . ."), ("y . . .", "y x . .", "(y x) . . .")]
)
def test_an_axis_of_one_rank_splits_nothing(layouts: tuple[str, ...]) -> None:
    dense = [r(2, 2, 4, 6, seed=k).requires_grad_() for k in range(3)]
    want = F.scaled_dot_product_attention(*dense, is_causal=True)
    want.square().sum().backward()
    with sl.simulate(x=1, y=2):
        placed = [
            sl.shard(t.detach(), lay).requires_grad_()
            for t, lay in zip(dense, layouts, strict=True)
        ]
        got = F.scaled_dot_product_attention(*placed, is_causal=True)
        got.square().sum().backward()
        assert torch.allclose(sl.unshard(got), want)
        for a, b in zip(placed, dense, strict=True):
            assert torch.allclose(sl.unshard(a.grad), b.grad)


def _deferred(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Which of q, k, v and the mask were deferred where a gradient differs from dense."""
    g = torch.Generator().manual_seed(0)
    values = [
        torch.randn(s, dtype=torch.float64, generator=g) for s in [(2, 2, 6, 8)] * 3 + [shape]
    ]
    weights = torch.randn(2, 2, 6, 8, dtype=torch.float64, generator=g)
    plain = [t.clone().requires_grad_() for t in values]
    (F.scaled_dot_product_attention(*plain[:3], attn_mask=plain[3]) * weights).sum().backward()
    wrong = []
    for which in itertools.product((False, True), repeat=4):
        ours = [sl.shard(t, "...") for t in values]
        ours = [
            ShardedTensor(t.raw, t.place._replace(deferred=frozenset("x" if late else ())))
            for t, late in zip(ours, which, strict=True)
        ]
        for t in ours:
            t.requires_grad_()
        out = F.scaled_dot_product_attention(*ours[:3], attn_mask=ours[3])
        (out * sl.shard(weights, "...")).sum().backward()
        if not all(
            torch.allclose(sl.unshard(a.grad), b.grad, rtol=0, atol=1e-12)
            for a, b in zip(ours, plain, strict=True)
        ):
            wrong.append(which)
    return wrong


@pytest.mark.parametrize("shape", [(6, 6), (2, 6, 6), (2, 2, 6, 6)])
def test_a_mask_s_gradient_is_dense_s_whichever_operands_are_deferred(shape: Any) -> None:
    with sl.simulate(x=4):
        assert _deferred(shape) == []


def test_a_mask_s_gradient_is_dense_s_on_real_ranks(pool: Any) -> None:
    assert pool.run(_deferred, (2, 6, 6), x=4) == [[]] * 4
