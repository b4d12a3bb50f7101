"""The ways in: local blocks, DTensors, checkpointing, layouts on one mesh with others, the planner's choice."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.ops.attention.engines import AllGather
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_op import gap, normal

Q, K, V = (normal(2, h, 16, 8, seed=h) for h in (4, 2, 2))


def test_local_blocks_say_their_layout() -> None:
    """Inside shard_map, as hand-written code would call it."""
    want, _ = attention(Q, K, V, sl.masks.Causal())
    with sl.simulate(s=4):
        lay = Ring("s", 2, "zigzag")
        text = str(lay.layout.resolve(4))
        f = sl.shard_map(
            lambda q, k, v: sl.ring_attention(q, k, v, layout=lay, mask=sl.masks.Causal()),
            in_layouts=(text,) * 3,
            out_layouts=text,
        )
        assert gap(sl.unshard(f(*(sl.shard(x, lay) for x in (Q, K, V)))), want) < 1e-12


def test_local_keys_may_lie_otherwise_than_queries() -> None:
    keys = normal(2, 2, 24, 8, seed=5)
    want, _ = attention(Q, keys, keys, sl.masks.Causal())
    with sl.simulate(s=4):
        ours, theirs = Ring("s", 2, "zigzag"), Ring("s", 2, "striped")
        f = sl.shard_map(
            lambda q, k: sl.ring_attention(q, k, k, layout=ours, kv_layout=theirs, mask=sl.masks.Causal()),
            in_layouts=(". . zigzag(s) .", ". . striped(s) ."),
            out_layouts=". . zigzag(s) .",
        )
        assert gap(sl.unshard(f(sl.shard(Q, ours), sl.shard(keys, theirs))), want) < 1e-12


def dtensors() -> float:
    mesh: Any = sl.current_mesh().device_mesh
    xs = [sl.dtensor.to_dtensor(sl.shard(x, ". . s .")).requires_grad_() for x in (Q, K, V)]
    out = sl.ring_attention(*xs, mask=sl.masks.Causal())
    assert isinstance(out, DTensor) and out.device_mesh == mesh
    out.sum().backward()
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    want, _ = attention(*leaves, sl.masks.Causal())
    want.sum().backward()
    errors = [gap(out.full_tensor(), want.detach())]
    errors += [gap(x.grad.full_tensor(), y.grad) for x, y in zip(xs, leaves, strict=True)]  # type: ignore[union-attr]
    return max(errors)


def test_dtensors_in_dtensors_out(pool: Any) -> None:
    assert all(error < 1e-12 for error in pool.run(dtensors, s=4))


def test_heads_and_batch_may_be_split_too() -> None:
    want, _ = attention(
        Q, K, V, sl.masks.Causal() & sl.masks.ALiBi([1.0, 0.5, 0.25, 0.125]) & sl.masks.Padding([9, 16])
    )
    with sl.simulate(data=2, x=2, s=2):
        xs = [sl.shard(x, "data x zigzag(s) .") for x in (Q, K, V)]
        for algorithm in ("auto", "ring_bidirectional", "ulysses", AllGather(1)):
            mask = sl.masks.Causal() & sl.masks.ALiBi([1.0, 0.5, 0.25, 0.125]) & sl.masks.Padding([9, 16])
            assert gap(sl.unshard(sl.ring_attention(*xs, mask=mask, algorithm=algorithm)), want) < 1e-12


def test_activation_checkpointing_gives_the_same_gradient() -> None:
    """Dropout on: the seed is drawn again."""
    with sl.simulate(s=4):
        grads = []
        for wrap in (False, True):
            xs = [sl.shard(x, Ring("s", 2, "zigzag")).requires_grad_() for x in (Q, K, V)]

            def f(*xs: Tensor) -> Tensor:
                return sl.ring_attention(*xs, mask=sl.masks.Causal(), dropout=0.2)

            torch.manual_seed(0)
            out: Any = checkpoint(f, *xs, use_reentrant=False) if wrap else f(*xs)
            out.sum().backward()
            grads.append([sl.unshard(x.grad) for x in xs])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"scale": 0.2}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
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
        q, k, v = (sl.shard(x.detach(), Ring("s", 2, "zigzag")).requires_grad_() for x in (Q, one, two))
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert t.by_kind().keys() == {"ppermute"}
        assert gap(sl.unshard(got), want.detach()) < 1e-12
        found = torch.autograd.grad(got.square().sum(), (k, v))
        assert max(gap(sl.unshard(g), w) for g, w in zip(found, wanted, strict=True)) < 1e-12


def test_the_plan_follows_mask_and_sizes() -> None:
    def chosen(mask: sl.masks.Mask, order: str = "contiguous", s: int = 8, n: int = 65536, g: int = 8) -> str:
        with sl.record(s=s):
            q = sl.shard(torch.empty(1, 32, n, 128, device="meta", dtype=torch.bfloat16), Ring("s", 2, order))
            k = sl.shard(torch.empty(1, g, n, 128, device="meta", dtype=torch.bfloat16), Ring("s", 2, order))
            return sl.planning.attention_plan(q, k, k, mask).algorithm

    assert chosen(sl.masks.Causal() & sl.masks.Window(512)) in ("halo", "ring_bidirectional")
    with sl.record(s=8):
        q = sl.shard(torch.empty(1, 8, 8, 64, device="meta"), Ring("s", 2))
        k = sl.shard(torch.empty(1, 8, 1 << 20, 64, device="meta"), Ring("s", 2))
        assert sl.planning.attention_plan(q, k, k).algorithm == "pass_q"  # few queries, many keys


def test_why_names_every_algorithm_and_a_pin_holds() -> None:
    with sl.simulate(s=4):
        xs = [sl.shard(x, Ring("s", 2)) for x in (Q, K, V)]
        table = sl.why("attention", *xs, sl.masks.Causal())
        assert table.chosen in str(table) and "split over two axes" in str(table)
        assert {n for n, _ in table.verdicts} >= {
            "ring",
            "halo",
            "double_ring",
            "allgather",
            "ulysses",
            "usp",
            "pass_q",
            "rsa",
        }
        with sl.algorithm(attention="rsa"), sl.trace() as t:
            sl.ring_attention(*xs)
        assert t.messages == 6  # K round, then V round


def test_documents_of_a_packed_batch_lie_in_zigzag_each() -> None:
    borders = (0, 16, 24, 64)
    mask = sl.masks.Causal() & sl.masks.Documents(borders)
    q = normal(1, 2, 64, 8, seed=1)
    want, _ = attention(q, q, q, mask)
    with sl.simulate(s=4):
        lay = Ring("s", 2, "documents", borders)
        x = sl.shard(q, lay)
        assert gap(sl.unshard(sl.ring_attention(x, x, x, mask=mask)), want) < 1e-12
        work = [0] * 4
        for areas in sl.planning.attention_plan(x, x, x, mask, "ring").areas:
            work = [a + b for a, b in zip(work, areas, strict=True)]
        assert max(work) == min(work)
