"""A plan's figures are those of the whole model, and of the step that it is a plan of."""

from typing import Any

import pytest
import torch

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.planning.plan import CLUSTERS, Way, _loss, _Study

CONFIG = GPTConfig(vocab=64, ctx=16, layers=5, heads=4, embed=32)
WAYS = [
    Way("megatron1d", {"data": 2, "x": 2}),
    Way("optimus2d", {"x": 2, "y": 2}),
    Way("cube3d", {"x": 2, "y": 2, "z": 2}),
    Way("fsdp", {"x": 4}),
    Way("ring", {"s": 2}),
]


def study(**more: Any) -> _Study:
    given = {"cluster": CLUSTERS["h100"], "batch": 8, "sequence": 16, "state": 8.0, "loss": _loss}
    return _Study(GPT(CONFIG), **given, room=80e9, **more)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_layers_on_paper_are_the_whole_model(way: Way) -> None:
    """Bytes exactly, and what is held to a twentieth."""
    with sl.record(**way.mesh) as mesh:
        model = GPT(CONFIG)
        rules = getattr(sl.recipes, way.recipe)(model, mesh)
        apply, params = sl.parallelize(model, rules, mesh=mesh)
        ids = torch.empty(8, 16, dtype=torch.int64, device="meta")
        given = sl.shard(ids, rules.tokens), sl.shard(ids, rules.labels)
        whole = sl.explain(lambda p, i, t: _loss(apply, p, i, t), params, given)
    found = study()._measured(way, "")
    moved = sum(v for k, v in found.items() if k.startswith("bytes "))
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


def test_more_memory_needs_less_zero_and_no_remat() -> None:
    model = GPT(GPTConfig(vocab=64, ctx=16, layers=6, heads=4, embed=64))
    stages, remats, peaks = [], [], []
    for memory in (6e6, 3.2e6, 2.2e6, 1.9e6):
        found = sl.planning.plan(
            model, 4, batch=8, sequence=16, memory=memory, recipe="ddp", cluster="h100"
        )
        (row,) = found.table
        stages.append(row.way.stage), remats.append(row.way.remat), peaks.append(row.peak)
        assert row.fits is (row.peak <= memory)
    assert stages == sorted(stages) and stages[0] == 1 and peaks == sorted(peaks, reverse=True)


def test_what_is_planned_is_what_a_run_of_it_moves() -> None:
    """The first line's recipe on its mesh: forward and backward on simulated ranks."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    found = sl.planning.plan(model, 4, batch=8, sequence=16, recipe=["megatron1d"], most=2)
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


def test_every_way_is_on_so_many_ranks() -> None:
    names = ("ddp", "megatron1d", "fsdp", "optimus2d", "cube3d", "ring")
    for ranks in (1, 2, 8, 12):
        for way in study().ways(ranks, names):
            size = 1
            for n in way.mesh.values():
                size *= n
            assert size == ranks


def test_mistakes_say_what_to_write() -> None:
    for given in ({"ranks": 0}, {"batch": 0}, {"cluster": "h10"}):
        how = {"ranks": 2, "batch": 8, "sequence": 16, **given}
        with pytest.raises(sl.errors.BadArgument):
            sl.planning.plan(GPT(CONFIG), **how)
