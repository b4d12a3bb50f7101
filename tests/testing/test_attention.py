"""An engine and a mask of one's own, each in a file: whichever is
imported first, they keep the laws and meet.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.testing import check_engine, check_mask, dense_attention
from tests.test_extend import MASK  # as the page writes it

ENGINE = '''
"""Attention that gathers everything and computes all scores at once."""

from dataclasses import dataclass

import torch

from shardlib.extend import (
    AttentionMove, AttentionPlan, Engine, Moves, Run, add_sink, gathered, local_queries, positions,
    register_engine, scattered, started, sums_like, viewed,
)


@dataclass(frozen=True)
class GatherAll(Engine):
    name = "gather_all"

    def plan(self, case):
        return case.unsplit() or AttentionPlan(self, case)

    def moves(self, plan):
        z, n = plan.case.sizes, plan.p - 1
        words = [n * z.b * z.g * z.lk * width for width in (z.d, z.e)]
        gathers = [AttentionMove(w * z.itemsize, n) for w in words]
        return Moves(gathers, gathers + [AttentionMove(w * z.acc_itemsize, n) for w in words])

    def forward(self, job, q, k, v, bias, sink):
        keys, values = (gathered(job, x, job.plan.k_runs) for x in (k, v))
        every = (Run(0, 1, keys.shape[-2]),)
        out, lse = started(q, v.shape[-1])
        for rank in local_queries(job, q, bias):
            view, at = rank.view, positions(every, q.device)
            rank.attend(rank.calls(every), view(keys), view(values), at, view(out), view(lse))
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(self, job, saved, bias, sink, given, wants_bias):
        (q, k, v), runs = saved, job.plan.k_runs
        keys, values = (gathered(job, x, runs) for x in (k, v))
        every = (Run(0, 1, keys.shape[-2]),)
        dq, dk, dv = (sums_like(x) for x in (q, keys, values))
        dbias = sums_like(bias) if wants_bias else None
        for rank in local_queries(job, q, bias):
            view, at = rank.view, positions(every, q.device)
            rank.attend_back(rank.calls(every), view(keys), view(values), at, viewed(given, view), view(dq),
                             lambda: (view(dk), view(dv)), None if dbias is None else view(dbias))
        return dq, scattered(job, dk, runs, k.shape[-2]), scattered(job, dv, runs, k.shape[-2]), dbias


register_engine(GatherAll())
'''


@pytest.fixture
def written(tmp_path: Path) -> Iterator[dict[str, Path]]:
    files = {"engine": tmp_path / "gather_all.py", "mask": tmp_path / "strided.py"}
    files["engine"].write_text(ENGINE)
    files["mask"].write_text(MASK)
    yield files
    sl.extend.remove("attention", "gather_all")


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("order", [("engine", "mask"), ("mask", "engine")], ids="-".join)
def test_an_engine_and_a_mask_of_one_s_own_keep_the_laws(
    written: dict[str, Path], order: tuple[str, ...]
) -> None:
    found = {name: imported(written[name]) for name in order}
    engine, mask = found["engine"].GatherAll(), found["mask"].Strided(4)
    check_engine(engine, masks=(sl.masks.Full(), sl.masks.Causal(), mask, mask & sl.masks.Causal()))
    check_mask(mask, engines=("ring", "ulysses", engine))
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    with sl.simulate(s=4):
        x = sl.shard(q, sl.Ring("s", dim=2))
        assert "gather_all" in dict(sl.why("attention", x, x, x, mask).verdicts)
        with sl.algorithm(attention="gather_all"), sl.trace() as t:
            out = sl.unshard(sl.ring_attention(x, x, x, mask=mask))
        assert t.by_kind().keys() == {"all_gather"}
        assert torch.allclose(out, dense_attention(q, q, q, mask)[0])


def test_what_is_chosen_does_not_hang_on_who_was_registered_when(written: dict[str, Path]) -> None:
    """The new engine costs what all-gather costs: registered twice,
    or after others, it takes no call from it.
    """
    with sl.simulate(s=4):
        x = sl.shard(torch.randn(1, 2, 8, 4), sl.Ring("s", dim=2))
        before = sl.why("attention", x, x, x).chosen
        for _ in range(2):
            imported(written["engine"])
            assert sl.why("attention", x, x, x).chosen == before
        names = [name for name, _ in sl.why("attention", x, x, x).verdicts]
        assert names.count("gather_all") == 1


@pytest.mark.parametrize("name", ["ring", "ring_bidirectional", "double_ring", "allgather", "ulysses", "usp", "pass_q",
                                  "rsa", "canonical"])  # fmt: skip
def test_the_library_s_own_engines_keep_the_laws(name: str) -> None:
    with sl.record(r=2, s=2):
        x = sl.shard(torch.empty(1, 4, 8, 4, device="meta"), sl.Ring(("r", "s"), 2))
        engine = sl.planning.attention_plan(x, x, x, algorithm=name).engine
    check_engine(engine)


def test_the_laws_find_a_price_that_is_not_paid() -> None:
    ring: Any = type(sl.attention.OneWay())

    class Cheap(ring):
        def moves(self, plan: Any) -> Any:
            found = super().moves(plan)
            return type(found)(found.forward[1:], found.backward)

    with pytest.raises(AssertionError, match="bytes and messages forward"):
        check_engine(Cheap())


def test_the_laws_find_a_mask_that_is_not_asked() -> None:
    ring: Any = type(sl.attention.OneWay())

    class Blind(ring):
        def forward(self, job: Any, *operands: Any) -> Any:
            return super().forward(replaced(job), *operands)

    def replaced(job: Any) -> Any:
        from dataclasses import replace

        plan = replace(job.plan, case=replace(job.plan.case, mask=sl.masks.Full()))
        return replace(job, plan=plan)

    with pytest.raises(AssertionError, match="is off by"):
        check_engine(Blind())
