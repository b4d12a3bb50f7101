"""A fixed matrix of layouts, masks, lengths and algorithms on four gloo
processes: dense values, planned transfers.
"""

from typing import Any

import torch

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.ops.attention.case import attention_case
from shardlib.ops.attention.engine import planned
from shardlib.ops.attention.engines import AllGather, DoubleRing
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_op import gap, normal

LENGTHS = (1, 3, 7, 64, 1499)
MASKS = {
    "full": lambda n: sl.masks.Full(),
    "causal": lambda n: sl.masks.Causal(),
    "window": lambda n: sl.masks.Causal() & sl.masks.Window(9),
    "documents": lambda n: sl.masks.Causal() & sl.masks.Documents((0, n // 3, n // 2, n)),
    "padding": lambda n: sl.masks.Padding([n, n // 2]),
}
CASES = [
    *((s, m, *((7, "ring"), (64, "ring_bidirectional"))[(i + j) % 2])
      for i, s in enumerate(("contiguous", "zigzag", "striped")) for j, m in enumerate(MASKS)),
    *(("zigzag", "causal", n, "ring") for n in LENGTHS),
    *(("zigzag", "causal", n, "auto") for n in (3, 64)),
    *(("zigzag", "causal", 64, a) for a in (DoubleRing(2), AllGather(1), "ulysses", "usp", "pass_q", "rsa",
                                            "canonical")),
    ("contiguous", "window", 64, "halo"),
    ("documents", "documents", 50, "ring_bidirectional"),
]  # fmt: skip


def worst(cases: list[tuple[str, str, int, Any]]) -> list[tuple[Any, ...]]:
    """(case, error, planned and counted bytes and messages of both passes) on the mesh in scope."""
    mesh, out = sl.current_mesh(), []
    for schedule, name, n, algorithm in cases:
        mask = MASKS[name](n)
        b, heads = (2, (4, 2, 2)) if n < 1000 else (1, (2, 1, 1))
        q, k, v = (normal(b, h, n, 8, seed=h).requires_grad_() for h in heads)
        want, _ = attention(q, k, v, mask)
        c = normal(*want.shape, seed=7)
        dense = torch.autograd.grad((want * c).sum(), (q, k, v))
        lay = Ring(
            mesh.names, 2, schedule, (0, n // 3, n // 2, n) if schedule == "documents" else None
        )
        xs = [sl.shard(x.detach(), lay, pad=True).requires_grad_() for x in (q, k, v)]
        case = attention_case(*xs, mask)
        plan = planned(case, algorithm).run
        with sl.trace() as forward:
            got = sl.ring_attention(*xs, mask=mask, algorithm=algorithm)
        loss = (got * sl.shard(c, lay, pad=True)).sum()
        with sl.trace() as backward:
            loss.backward()
        errors = [gap(sl.unshard(got), want.detach())]
        errors += [gap(sl.unshard(x.grad), g) for x, g in zip(xs, dense, strict=True)]
        stated = [(p.bytes, p.messages) for p in (plan.forward, plan.backward)]
        counted = [(t.bytes, t.messages) for t in (forward, backward)]
        out.append(((schedule, name, n, algorithm), max(errors), stated, counted))
    return out


def test_real_processes_give_dense_values_and_the_planned_transfers(pool: Any) -> None:
    for mesh in ({"s": 4}, {"r": 2, "s": 2}):
        two = len(mesh) == 2
        cases = [c for c in CASES if (two if c[3] == "usp" else not two or c[2] == 64)]
        for answers in pool.run(worst, cases, seconds=240.0, **mesh):
            for case, error, stated, counted in answers:
                assert error < 1e-12, (case, error)
                assert stated == counted, (case, stated, counted)


def packed() -> float:
    """Borders of documents that change from step to step, over one layout."""
    found = 0.0
    for step in range(6):
        cuts = (
            torch.randint(0, 48, (5,), generator=torch.Generator().manual_seed(step))
            .sort()
            .values.tolist()
        )
        mask = sl.masks.Causal() & sl.masks.Documents((0, *cuts, 48))
        q = normal(1, 2, 48, 8, seed=step)
        x = sl.shard(q, Ring("s", 2, "zigzag"))
        found = max(
            found,
            gap(sl.unshard(sl.ring_attention(x, x, x, mask=mask)), attention(q, q, q, mask)[0]),
        )
    return found


def test_packed_batches_may_change_from_step_to_step(pool: Any) -> None:
    assert all(error < 1e-12 for error in pool.run(packed, s=4))
