"""The ways in: local blocks, DTensors, checkpointing, layouts on
one mesh with others, the planner's choice.
"""

from typing import Any

import torch
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
            lambda q, k: sl.ring_attention(
                q, k, k, layout=ours, kv_layout=theirs, mask=sl.masks.Causal()
            ),
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
        Q,
        K,
        V,
        sl.masks.Causal() & sl.masks.ALiBi([1.0, 0.5, 0.25, 0.125]) & sl.masks.Padding([9, 16]),
    )
    with sl.simulate(data=2, x=2, s=2):
        xs = [sl.shard(x, "data x zigzag(s) .") for x in (Q, K, V)]
        for algorithm in ("auto", "ring_bidirectional", "ulysses", AllGather(1)):
            mask = (
                sl.masks.Causal()
                & sl.masks.ALiBi([1.0, 0.5, 0.25, 0.125])
                & sl.masks.Padding([9, 16])
            )
            assert (
                gap(sl.unshard(sl.ring_attention(*xs, mask=mask, algorithm=algorithm)), want)
                < 1e-12
            )


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
