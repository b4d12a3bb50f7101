"""A plan's figures are those of the whole model, and of the step that it is a plan of."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.planning import Cluster, Link
from shardlib.planning.cluster import CLUSTERS
from shardlib.planning.plan import Strategy, _loss, _Study

CONFIG = GPTConfig(vocab=64, ctx=16, layers=5, heads=4, embed=32)
WAYS = [
    Strategy("megatron1d", {"data": 2, "x": 2}),
    Strategy("optimus2d", {"x": 2, "y": 2}),
    Strategy("cube3d", {"x": 2, "y": 2, "z": 2}),
    Strategy("fsdp", {"x": 4}),
    Strategy("ring", {"s": 2}),
]


def study(**more: Any) -> _Study:
    given = {"cluster": CLUSTERS["h100"], "batch": 8, "sequence": 16, "state": 8.0, "loss": _loss}
    return _Study(GPT(CONFIG), **given, room=80e9, **more)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_layers_on_paper_are_the_whole_model(way: Strategy) -> None:
    """Bytes exactly, and what is held to a twentieth."""
    with sl.record(**way.mesh) as mesh:
        model = GPT(CONFIG)
        rules = getattr(sl.recipes, way.recipe)(model, mesh)
        apply, params = sl.parallelize(model, rules, mesh=mesh)
        ids = torch.empty(8, 16, dtype=torch.int64, device="meta")
        given = sl.shard(ids, rules.tokens), sl.shard(ids, rules.labels)
        whole = sl.explain(lambda p, i, t: _loss(apply, p, i, t), params, given)
    found = study()._measured(way, "")
    moved = sum(v for k, v in found.items() if " bytes " in k)
    assert moved == pytest.approx(float(whole.bytes), rel=1e-12)
    assert found["parameters"] == whole.parameters and found["saved"] == whole.saved
    held = max(found["saved"], found["parameters"]) + found["temporary"]
    assert held == pytest.approx(whole.transient, rel=0.05)


def test_operations_are_counted_once_per_layer() -> None:
    """Six per weight of a product and token, and attention's."""
    found, c = study(), CONFIG
    weights = 12 * c.layers * c.embed**2 + c.embed * c.vocab
    attention = 12 * c.layers * 16 * c.embed
    assert found.flops == 8 * 16 * (6 * weights + attention)


def test_less_memory_is_never_faster() -> None:
    """Where there is enough: stage 1 alone; what fits is what its figures say."""
    model = GPT(GPTConfig(vocab=64, ctx=16, layers=6, heads=4, embed=64))
    rows = []
    for memory in (6e6, 3.2e6, 1.9e6):
        found = sl.planning.plan(
            model, 4, batch=8, sequence=16, memory=memory, recipe="ddp", cluster="h100", pipe=1
        )
        (row,) = found.table
        assert row.fits is (row.peak <= memory)
        rows.append(row)
    assert (rows[0].way.stage, rows[0].way.remat, rows[0].way.accumulate) == (1, "", 1)
    assert [r.fits for r in rows] == [True, True, False]
    assert rows[0].seconds < rows[1].seconds and rows[1].peak < rows[0].peak


def test_what_is_planned_is_what_a_run_of_it_moves() -> None:
    """The first line's recipe on its mesh: forward and backward on simulated ranks."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    found = sl.planning.plan(model, 4, batch=8, sequence=16, recipe=["megatron1d"], most=2, pipe=1)
    best = found.best
    assert best is not None
    ids = torch.randint(64, (8, 16))
    with sl.simulate(**best.way.mesh):
        rules = sl.recipes.megatron1d(model)
        apply, params = sl.parallelize(model, rules, pad=True)
        given = sl.shard(ids, rules.tokens), sl.shard(ids, rules.labels)
        with sl.trace() as t:
            sl.value_and_grad(lambda p: _loss(apply, p, *given))(params)
    assert best.bytes == pytest.approx(float(t.bytes), rel=1e-12)


ACCUMULATED = [
    Strategy("ddp", {"data": 4}),
    Strategy("megatron1d", {"data": 2, "x": 2}),
    Strategy("fsdp", {"data": 2, "x": 2}),
    Strategy("ring", {"data": 2, "s": 2}),
]


studied = cache(study)


@cache
def measured(number: int, count: int) -> Mapping[str, float]:
    """The cost of one of so many micro-batches; it does not depend on ZeRO's stage."""
    return studied()._measured(replace(ACCUMULATED[number], accumulate=count), "")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(ACCUMULATED)), ids=map(str, ACCUMULATED))
def test_micro_batches_are_priced_as_a_run_of_them_moves(number: int, stage: int) -> None:
    """Two of them, with ZeRO: its buckets are padded, and nothing else differs."""
    torch.manual_seed(0)
    way = replace(ACCUMULATED[number], stage=stage, accumulate=2)
    axes = list(way.copies)
    planned = studied()._staged(way, measured(number, 2))
    model, ids = GPT(CONFIG), torch.randint(64, (4, 16))
    with sl.simulate(**way.mesh):
        rules = getattr(sl.recipes, way.recipe)(model)
        apply, params = sl.parallelize(model, rules, pad=True)
        tx = sl.optim.zero(sl.optim.adamw(1e-3), axis=axes, stage=stage)
        given = sl.shard(ids, rules.tokens), sl.shard(ids, rules.labels)
        params = tx.shard(params) if stage == 3 else params
        state = tx.init(params)
        how: dict[str, Any] = {"pending": axes} if stage == 1 else {"into": tx}
        step = sl.value_and_grad(lambda p: _loss(apply, p, *given), **how)
        with sl.trace() as t:
            _, grads = step(params)
            _, more = step(params)
            grads = optree.tree_map(torch.add, grads, more)
            sl.optim.step(tx, params, grads, state)
    assert planned.bytes == pytest.approx(float(t.bytes), rel=0.05)
    once = studied()._staged(replace(way, accumulate=1), measured(number, 1))
    assert once.saved == pytest.approx(2 * planned.saved, rel=0.05)
    assert planned.state == once.state and planned.parameters == once.parameters
    copies = math.prod(way.mesh[a] for a in axes)
    whole = measured(number, 1)["parameters"]
    assert planned.state == 2 * whole / copies  # of fp32: two moments
    assert planned.gradients == whole / (copies if stage > 1 else 1)
    assert planned.parameters == whole / (copies if stage == 3 else 1)


def test_what_does_not_fit_whole_fits_in_micro_batches() -> None:
    """Less memory, more of them; each plan that fits is one that its way's figures say fits."""
    model = GPT(GPTConfig(vocab=64, ctx=64, layers=6, heads=4, embed=64))
    counts = []
    for memory in (2e8, 4e7, 1.5e7, 8e6):
        found = sl.planning.plan(
            model, 4, batch=256, sequence=64, memory=memory, recipe="megatron1d", pipe=1
        )
        best = found.best
        assert best is not None and best.peak <= memory, found
        counts.append(best.way.accumulate)
        assert (f"fits with {counts[-1]} micro-batches" in str(found)) is (counts[-1] > 1)
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 2
    asked = sl.planning.plan(
        model, 4, batch=256, sequence=64, memory=2e8, recipe="megatron1d", accumulate=3, pipe=1
    )
    assert asked.best is not None and asked.best.way.accumulate == 4  # 64 rows do not make three


def test_more_micro_batches_than_rows_are_refused() -> None:
    found = sl.planning.plan(
        GPT(CONFIG), 4, batch=8, sequence=16, recipe="ddp", accumulate=4, pipe=1
    )
    assert not found.table and "no 4 micro-batches" in found.rejected[0][1]


def test_the_links_that_are_given_are_those_that_count() -> None:
    slow = replace(CLUSTERS["h100"], inside=sl.planning.Link(1e-5, 1e-6), source="as given")
    fast, late = (
        sl.planning.plan(
            GPT(CONFIG), 4, batch=8, sequence=16, recipe="megatron1d", cluster=c, pipe=1
        )
        for c in ("h100", slow)
    )
    assert late.table[0].seconds > 10 * fast.table[0].seconds
    assert "nothing was measured" in str(fast) and "(as given)" in str(late)


def test_every_way_is_on_so_many_ranks() -> None:
    names = ("ddp", "megatron1d", "fsdp", "optimus2d", "cube3d", "ring")
    for ranks in (1, 2, 8, 12):
        for way in study().ways(ranks, names):
            size = 1
            for n in way.mesh.values():
                size *= n
            assert size == ranks


def test_mistakes_say_what_to_write() -> None:
    for given in (
        {"ranks": 0},
        {"batch": 0},
        {"cluster": "h10"},
        {"accumulate": 0},
        {"recipe": "megatron"},
    ):
        how = {"ranks": 2, "batch": 8, "sequence": 16, **given}
        with pytest.raises(sl.errors.BadArgument):
            sl.planning.plan(GPT(CONFIG), **how)


SLOW = Link(1e-3, 8 / 50e6)  # 50 Mbit/s between all ranks
RIG = Cluster(8e9, 5e10, 1, SLOW, SLOW)


def test_behind_slow_links_layers_are_on_different_ranks() -> None:
    model = GPT(GPTConfig(vocab=64, ctx=64, layers=8, heads=4, embed=128))
    found, none = (
        sl.planning.plan(model, 8, batch=64, sequence=64, cluster=RIG, pipe=pipe)
        for pipe in (None, 1)
    )
    assert found.best is not None and none.best is not None
    assert found.best.way.pipe in (2, 4) and found.best.seconds < none.best.seconds
    assert f"pipe={found.best.way.pipe}" in str(found) and "micro-batches" in str(found)
    # by formulas alone
    grid = sl.choose(model, 8, batch=64, sequence=64, links=SLOW, flops=RIG.flops).best
    assert grid.pipe == found.best.way.pipe
    assert grid.seconds == pytest.approx(found.best.seconds, rel=0.15)
    fast = sl.planning.plan(model, 8, batch=8, sequence=64, pipe=4).best
    assert fast is not None and fast.way.pipe == 4


@pytest.mark.parametrize(
    "way",
    [Strategy("ddp", {"pipe": 5, "data": 2}), Strategy("megatron1d", {"pipe": 5, "x": 2})],
    ids=str,
)
def test_a_pipeline_moves_and_holds_what_was_planned(way: Strategy) -> None:
    way = replace(way, accumulate=4)
    study_ = study()
    planned = study_._staged(way, study_._measured(way, ""))
    with sl.simulate(**way.mesh):
        model = GPT(CONFIG)
        rules = getattr(sl.recipes, way.recipe)(model)
        apply, params = sl.parallelize(model, rules, pad=True, stages=sl.Stages("pipe"))
        ids = sl.shard(torch.zeros(8, 16, dtype=torch.int64), rules.tokens)
        f = lambda p, i: _loss(apply, p, i, i)  # noqa: E731
        told = sl.explain(f, params, (ids,), microbatches=4)
    # a tied weight is apart: its gradient crosses once in a step
    tied = sum(apply.stages.nbytes(n) * 2 for n in apply.stages.shared) / 5
    assert planned.along["pipe"][0] == pytest.approx(float(told.sent.bytes) - tied, rel=1e-12)
    inside = float(told.bytes - told.sent.bytes)
    assert planned.bytes - planned.along["pipe"][0] <= inside < 1.5 * planned.bytes
    # what is outside the layers counts as if one stage had all of it
    assert told.parameters <= planned.parameters <= 1.5 * told.parameters
    assert planned.saved == pytest.approx(told.stages[0].kept * 4, rel=0.5)
