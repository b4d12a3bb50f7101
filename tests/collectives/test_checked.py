"""Check mode: ranks that part ways are told apart before anything moves; off, nothing is added."""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.collectives import agreed, checking, digest
from shardlib.mesh import posted, within
from tests import faults
from tests.workers import Pool


@pytest.mark.parametrize(
    ("fault", "who"), [("swap", 1), ("other dtype", 2), ("other number", 3), ("a thread", 0)]
)
def test_ranks_that_part_ways_say_where(fault: str, who: int) -> None:
    told = faults.play(fault, who, 2, check=True)
    assert faults.wrong(fault, who, told, check=True) == []
    assert max(t.seconds for t in told) < 3.0  # sooner than the timeout


def test_a_right_program_runs_alike_under_check(pool: Any) -> None:
    for plain, checked in pool.run(_both, x=2, y=2):
        assert plain == checked


def _both() -> tuple[Any, Any]:
    found = []
    for mode in (sl.trace(), sl.check()):
        torch.manual_seed(3)
        with mode, sl.trace() as t:
            w = sl.shard(torch.randn(8, 8), "x y").requires_grad_()
            v = sl.shard(torch.randn(8, 8), ". y")
            loss = (torch.dropout(v @ w.T, 0.5, True) * 1.5).softmax(-1).square().sum()
            loss.backward()
            body = sl.shard_map(lambda b: sl.psum(b.sum(0), "x"), in_layouts="x y", out_layouts="y")
            out = sl.unshard(body(w.detach()))
        assert w.grad is not None
        found.append((loss.item(), sl.unshard(w.grad).tolist(), out.tolist(), t.bytes, t.messages))
    return found[0], found[1]


def _stages_apart() -> tuple[int, ...] | None:
    """Other calls and values in each stage, at the same lines, and sums over both."""
    mesh = sl.current_mesh()
    inner, at = mesh.without("pipe"), (mesh.coord or {})["pipe"]
    with sl.check():
        x = sl.shard(torch.full((4,), float(at)), "...", inner)
        for _ in range(at):
            x = x * 2.0
        assert sl.psum(x.raw, "pipe").tolist() == [2.0] * 4
    return agreed("order", inner, [at])


def test_stages_of_a_pipeline_are_compared_apart(pool: Any) -> None:
    assert pool.run(_stages_apart, pipe=2, data=2) == [(0,), (0,), (1,), (1,)]


def test_check_is_ambient_and_outside_it_nothing_listens() -> None:
    assert checking() is None
    with sl.simulate(x=2), sl.check():
        assert checking() is not None
        assert sl.unshard(sl.shard(torch.arange(4.0), "x") * 2).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert checking() is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_digest_tells_values_apart(dtype: torch.dtype) -> None:
    x = (torch.rand(40, 50, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    y = x.clone()
    y[0, 0] = not y[0, 0] if dtype is torch.bool else y[0, 0] + 3
    assert digest(x) == digest(x.clone()) != digest(y)
    assert digest(x) == digest(x.T.contiguous().T)
    assert digest(torch.empty(0)) == ""


def _apart(early: bool, calls: int) -> str:
    rank = dist.get_rank()
    long = "q" * 500
    try:
        with sl.check():
            y = sl.shard(torch.ones(4, 4), "x .") * (1.0 + (early and rank))
            for _ in range(calls):
                y = y * 1.0
            mode = checking()
            assert mode is not None
            mode.note(f"f({long}{'b' if rank and not early else 'a'}{long})")
            sl.psum(torch.ones(4), "x")
    except sl.ShardError as e:
        return e.message
    return ""


def _late(whole: bool) -> str:
    """Part ways after the last transfer; in a whole program, the mesh is left in check mode."""
    mesh, rank = sl.current_mesh(), dist.get_rank()
    with within(mesh=None), contextlib.ExitStack() as stack:
        if whole:
            stack.enter_context(sl.check())
        posted.CHECKED = whole
        try:
            for n in range(2):
                with mesh, contextlib.nullcontext() if whole else sl.check():
                    y = sl.shard(torch.ones(4, 4), "x .")
                    sl.psum(torch.ones(4), "x")
                    _ = y * (2.0 + (n and rank))
        except sl.ShardError as e:
            return e.message
        finally:
            posted.CHECKED = False
    return ""


@pytest.mark.parametrize("whole", [False, True])
def test_a_difference_after_the_last_transfer_is_found_at_the_end(whole: bool) -> None:
    workers = Pool(2)  # their own: the job fails
    try:
        told = [t for t in workers.run(_late, whole, x=2) if t]
    finally:
        workers.close()
    # nobody waits at the end: the rank that comes later finds it
    assert told and all(re.search(r"2\.0.*3\.0|3\.0.*2\.0", t) for t in told)


@pytest.mark.parametrize(
    ("early", "calls", "said"),
    [
        (True, 1000, r"2\.0.*and rank.*1\.0|1\.0.*and rank.*2\.0"),
        (True, 4500, "different calls"),
        (False, 1, "qb.*qa|qa.*qb"),
    ],
)
def test_what_differs_is_printed_wherever_it_stands(early: bool, calls: int, said: str) -> None:
    workers = Pool(2)  # their own: the job fails
    try:
        one, other = workers.run(_apart, early, calls, x=2)
    finally:
        workers.close()
    assert one == other and re.search(said, one) and len(one) < 1200
