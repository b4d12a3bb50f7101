"""The memory that a plan takes on paper is what its executor
allocates on real ranks, to the byte.
"""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.layouts.orders import dealt
from shardlib.memory_tracker import Live
from shardlib.mesh import as_mesh, bind
from shardlib.ops.attention.case import Sizes, attention_case
from shardlib.ops.attention.engine import AttentionJob, peak, planned
from shardlib.ops.attention.engines import AllGather, DoubleRing
from shardlib.ops.attention.kernels import pick
from shardlib.ops.attention.masks import At
from tests.ops.cases import case_on_paper

CASES = [
    ("contiguous", "ring", False), ("zigzag", "ring", True), ("zigzag", "ring_bidirectional", True),
    ("striped", "ring", True), ("contiguous", DoubleRing(2), False),
    ("contiguous", "allgather", True),
    ("contiguous", AllGather(1), False), ("zigzag", "ulysses", True),
    ("contiguous", "pass_q", False),
    ("contiguous", "rsa", True), ("zigzag", "canonical", True),
]  # fmt: skip


def counted(schedule: str, algorithm: Any, causal: bool, dtype: torch.dtype) -> tuple[Any, Any]:
    """(planned, counted) peaks of forward and backward on this rank of the mesh in scope."""
    mesh = as_mesh(None)
    lay, mask = Ring("s", 2, schedule), sl.masks.Causal() if causal else sl.masks.Full()
    xs = [sl.shard(torch.randn(1, h, 256, 32, dtype=dtype), lay) for h in (4, 2, 2)]
    case = attention_case(*xs, mask)
    plan = planned(case, algorithm).run
    q, k, v = (x.raw for x in xs)
    at = At(torch.arange(1), torch.arange(4))
    job = AttentionJob(mesh, plan, 0.2, pick(q, v, causal, False), lambda _: at, (4, 256, 256))
    forward, backward = plan.engine.forward, plan.engine.backward
    on_paper = peak(plan, dtype, mesh.coord["s"])
    with bind(mesh), torch.no_grad(), Live() as live:
        out, lse, saved = forward(job, q, k, v, None, None)
        out = out.to(dtype)
        first = live.peak
        dout = torch.empty_like(out)
        live.peak = live.now
        backward(job, saved, None, None, (dout, None, out, lse), False)
        found = first, live.peak - dout.untyped_storage().nbytes()
    return (on_paper.forward, on_paper.backward), found


def all_counted(cases: list[tuple[str, Any, bool]], dtype: torch.dtype) -> list[Any]:
    return [counted(*case, dtype) for case in cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_peaks_are_counted_peaks(pool: Any, dtype: torch.dtype) -> None:
    """Gloo's threads let go of a finished collective's blocks when they get to it: the least of
    up to five runs counts.
    """
    least: dict[tuple[int, int], tuple[int, ...]] = {}
    left = list(range(len(CASES)))
    for _ in range(5):
        wrong = {}
        for rank, answers in enumerate(pool.run(all_counted, [CASES[i] for i in left], dtype, s=4)):
            for i, (stated, found) in zip(left, answers, strict=True):
                found = least[i, rank] = tuple(map(min, least.get((i, rank), found), found))
                if found != stated:
                    wrong[i] = CASES[i], stated, found
        left = [*wrong]
    assert not left, wrong


def test_what_a_ring_keeps_does_not_grow_with_the_ring() -> None:
    """With n positions per rank: the same peaks for 2 and for 64 ranks."""
    found = set()
    for p in (2, 8, 64):
        runs, sizes = dealt("contiguous", 128 * p, p), Sizes(1, 4, 4, 128, 128, 32, 32, 4, 4)
        found.add(
            peak(planned(case_on_paper(runs, runs, sizes=sizes), "ring").run, torch.float32)[1:]
        )
    assert len(found) <= 2, found  # a ring of 2 has no second stop to hold


def test_an_all_gather_does() -> None:
    sizes = Sizes(1, 4, 4, 128, 128, 32, 32, 4, 4)
    grown = []
    for p in (4, 16):
        runs = dealt("contiguous", 128 * p, p)
        plan = planned(case_on_paper(runs, runs, sizes=sizes), "allgather").run
        grown.append(peak(plan, torch.float32).backward)
    assert grown[1] > 2 * grown[0]
