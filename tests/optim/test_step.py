"""A step in place: what is given up is overwritten, what comes back is the optimizer's step."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.errors import BadArgument
from shardlib.optim.trees import SPAN
from tests.ops.cases import r

o = sl.optim
PARAMS = {"w": r(8, 12), "b": r(8, seed=1), "s": r(seed=2)}


def made(**how: Any) -> Any:
    params = {
        "w": sl.shard(PARAMS["w"], "x ."),
        "b": sl.shard(PARAMS["b"], "."),
        "s": sl.shard(PARAMS["s"], ""),
    }
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(0.1))
    tx = sl.optim.zero(tx, "data", **how) if how else tx
    return tx, params, tx.init(params)


def loss(p: Any) -> Any:
    return (p["w"] ** 2).sum() + p["b"].sum() * p["s"]


@pytest.mark.parametrize("how", [{}, {"stage": 1}, {"stage": 2}])
def test_what_was_given_up_cannot_be_used(how: Any) -> None:
    with sl.simulate(data=2, x=2):
        tx, params, state = made(**how)
        vg = sl.value_and_grad(loss, into=tx) if how else sl.value_and_grad(loss)
        _, grads = vg(params)
        old, before = optree.tree_leaves((params, grads)), state
        new, state, info = sl.optim.step(tx, params, grads, state)
        old += optree.tree_leaves(before)
        for x in old:
            if isinstance(x, torch.Tensor):
                uses = (lambda x: x + 1, sl.unshard, torch.sum, lambda x: x.raw, repr, sl.typeof)
                for use in uses:
                    with pytest.raises(sl.ShardError, match="given up"):
                        use(x)
        assert info.norm > 0.5 and info.lr == 0.1 and not info.skipped
        for _ in range(2):  # what came back is as good as new
            _, grads = vg(new)
            new, state, info = sl.optim.step(tx, new, grads, state)


def test_plain_tensors_are_given_up_too() -> None:
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    tx = sl.optim.adamw(0.1)
    state = tx.init(params)
    grads = {k: torch.ones_like(p) for k, p in PARAMS.items()}
    memory = [p.data_ptr() for p in params.values()]
    new, state, info = sl.optim.step(tx, params, grads, state, norm=True)
    assert [p.data_ptr() for p in new.values()] == memory and all(
        p.requires_grad for p in new.values()
    )
    assert info.norm == float(sum(p.numel() for p in PARAMS.values())) ** 0.5
    for x in (*params.values(), *grads.values()):
        with pytest.raises(sl.ShardError, match="given up"):
            x.sum()


def test_a_refused_step_changes_nothing() -> None:
    with sl.simulate(data=2, x=2):
        for how in ({}, {"stage": 1}):
            tx, params, state = made(**how)
            _, grads = sl.value_and_grad(loss)(params)
            before = optree.tree_map(lambda x: x.raw.clone(), (params, grads))
            for bad in (
                {k: g for k, g in grads.items() if k != "w"},
                grads | {"w": sl.shard(PARAMS["w"], ". x")},
                grads | {"w": PARAMS["w"]},
            ):
                with pytest.raises(sl.ShardError):
                    sl.optim.step(tx, params, bad, state)
            other = {k: p for k, p in params.items() if k != "s"}
            if how:
                with pytest.raises(sl.ShardError, match="parameters: they are without s"):
                    sl.optim.step(tx, other, grads, state)
                double = {k: sl.shard(sl.unshard(p).float(), p.sharding) for k, p in params.items()}
                with pytest.raises(sl.ShardError, match="and otherwise"):
                    sl.optim.step(tx, double, grads, state)
            after = optree.tree_map(lambda x: x.raw, (params, grads))
            assert all(map(torch.equal, optree.tree_leaves(before), optree.tree_leaves(after)))


def test_one_parameter_at_two_places_is_refused() -> None:
    w = torch.ones(3)
    tx = sl.optim.sgd(0.1)
    params = {"a": w, "b": w}
    with pytest.raises(sl.ShardError, match="two places"):
        sl.optim.step(tx, params, {"a": torch.ones(3), "b": torch.ones(3)}, tx.init(params))


def test_gradients_in_one_memory_are_divided_once_each() -> None:
    """Autograd gives both terms of a sum one gradient."""
    params = {"a": r(5, seed=3), "b": r(5, seed=4)}
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(0.1))
    f = sl.value_and_grad(lambda p: ((p["a"] + p["b"]) ** 2).sum())
    for dtype in (torch.float32, torch.float64):
        mine = {k: p.to(dtype, copy=True) for k, p in params.items()}
        want = {k: p.clone() for k, p in mine.items()}
        state, now = tx.init(mine), tx.init(mine)
        for _ in range(3):
            updates, state = tx.update(f(want)[1], state, want)
            want = sl.optim.apply_updates(want, updates)
            mine, now, _ = sl.optim.step(tx, mine, f(mine)[1], now)
        assert all(torch.allclose(mine[k], want[k], atol=1e-6) for k in want)


STATES = {
    "adamw": o.adamw(0.1),
    "sgd": o.sgd(0.1, 0.9),
    "lion": o.lion(0.1),
    "adagrad": o.adagrad(0.1),
    "rmsprop": o.rmsprop(0.1),
    "lamb": o.lamb(0.1),
    "adafactor": o.adafactor(0.1),
    "adam8bit": o.adam8bit(0.1),
    "mean": o.averaged(o.sgd(0.1)),
    "cycle": o.multi_steps(o.adamw(0.1), 2),
    "groups": o.partition({"all": o.adamw(0.1)}, [("*", "all")]),
}


@pytest.mark.parametrize("how", ["more", "renamed", "longer", "elsewhere", "plain"])
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_other_parameters_is_refused(name: str, how: str) -> None:
    """Kernels take blocks by position, and would write past the end of a shorter one."""
    tx = STATES[name]
    with sl.simulate(x=2):

        def made(w: str = "x .", rows: int = 4) -> dict[str, Any]:
            return {"w": sl.shard(torch.ones(rows, 6), w), "b": sl.shard(torch.ones(rows), ".")}

        change = {
            "more": lambda: made() | {"c": sl.shard(torch.ones(2), ".")},
            "renamed": lambda: {f"new.{k}": p for k, p in made().items()},
            "longer": lambda: made(rows=8),
            "elsewhere": lambda: made(". x"),
            "plain": lambda: {k: sl.unshard(p) for k, p in made().items()},
        }
        if (name, how) in (("adafactor", "elsewhere"), ("adafactor", "plain")):
            return  # rows and columns lie nowhere; vectors here are copied
        params, grads = change[how](), change[how]()
        with pytest.raises(sl.ShardError) as e:
            o.step(tx, params, grads, tx.init(made()))
        assert "other parameters" in str(e.value) or "trees differ" in str(e.value)
        raws = [p.raw if isinstance(p, sl.ShardedTensor) else p for p in params.values()]
        assert all((raw == 1).all() for raw in raws)


def test_what_is_no_transform_is_refused_by_all_that_take_one() -> None:
    takers: list[Any] = [
        lambda t: o.multi_steps(t, 2),
        o.skip_nonfinite,
        o.loss_scale,
        o.averaged,
        o.mixed,
        o.chain,
        lambda t: o.masked(t, "*"),
        lambda t: o.partition({"a": t}, [("*", "a")]),
        lambda t: o.zero(t, "data"),
        lambda t: o.as_torch(t, [torch.ones(1)]),
        lambda t: o.step(t, {}, {}, None),
    ]
    for take in takers:
        for odd in (o.adamw, torch.optim.AdamW, None, o.sgd(0.1)._replace(trait="fast")):
            with pytest.raises(BadArgument, match=r"a transform is expected|no trait 'fast'"):
                take(odd)


TX = {
    "adamw": (lambda: sl.optim.adamw(0.1), 0),
    "adam": (lambda: sl.optim.adam(0.1), 0),
    "sgd": (lambda: sl.optim.sgd(0.1), 0),
    "momentum": (lambda: sl.optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.1), 0),
    "adagrad": (lambda: sl.optim.adagrad(0.1), 0),
    "lion": (lambda: sl.optim.lion(0.1, weight_decay=0.1), 2),
    "rmsprop": (lambda: sl.optim.rmsprop(0.1, momentum=0.9, centered=True, weight_decay=0.1), 4),
    "masked": (lambda: sl.optim.adamw(0.1, mask=lambda t: {k: k == "w" for k in t}), 0),
}
FORMS: list[Any] = [
    (None, {}),
    (3, {}),
    (3, {"master": "fp32"}),
    (3, {"master": "bf16+rem"}),
]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", TX)
def test_a_step_in_place_needs_no_memory_of_the_parameters_size(
    name: str, clip: bool, tmp_path: Path
) -> None:
    """At most some spans, of the largest temporaries; the fused kernels need nothing."""
    make, most = TX[name]
    for stage, how in FORMS:
        tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), make()) if clip else make()
        tx = tx if stage is None else sl.optim.zero(tx, "data", stage, **how)
        dtype = torch.bfloat16 if how else torch.float32
        with sl.simulate(data=1):
            shapes = {"w": (8, SPAN), "b": (SPAN // 100,)}
            params: Any = {
                k: sl.shard(torch.ones(s, dtype=dtype), "...") for k, s in shapes.items()
            }
            params = tx.shard(params)
            state = tx.init(params)
            for turn in range(2):
                grads = given(params, stage)
                if turn:
                    step = partial(sl.optim.step, tx, params, grads, state)
                    found = peak(step, tmp_path / "trace.json")
                else:
                    params, state, _ = sl.optim.step(tx, params, grads, state)
        spans = max(most, 4 if clip else 0, 5 if how.get("master") == "bf16+rem" else 0)
        if clip and torch.get_default_device().type != "cpu":
            spans += 5  # what a step that the device may skip held before
        assert found <= spans * 4 * SPAN + 4096, (stage, how)


def given(params: Any, stage: int | None) -> Any:
    """Gradients as a backward gives them."""
    if stage == 3:
        made = {
            k: x.becomes(torch.ones_like(x.raw, dtype=torch.float32)) for k, x in params.items()
        }
        return params.like(made)
    return {k: x.becomes(torch.ones_like(x.raw)) for k, x in params.items()}


def peak(f: Callable[[], Any], trace: Path) -> int:
    """The most bytes that were allocated at a time beyond those at the beginning."""
    if torch.get_default_device().type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        f()
        return torch.accelerator.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        acc_events=True,  # else torch 2.11 warns
    ) as profile:
        f()
    profile.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most
