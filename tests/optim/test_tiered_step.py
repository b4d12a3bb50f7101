"""Updates in memory tiers: chunk by chunk, while the next forward runs, or in backward."""

import gc
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.tiers import buffers
from tests.optim.test_chunk_cache import Skipping
from tests.optim.test_chunk_trees import groups
from tests.optim.test_tiered import (
    MESHES,
    RULES,
    WIDE,
    block_bytes,
    clipped,
    differing,
    model,
    run,
)

o = sl.optim


def test_a_step_that_is_refused_or_skipped_changes_nothing() -> None:
    for guard in (lambda tx: tx, o.skip_nonfinite):
        with sl.simulate(data=2, x=1):
            f, params = model(3)
            tx = guard(o.zero(clipped(), "data", 3, tiers=o.Tiers()))
            parts = tx.shard(params)
            state = tx.init(parts)
            _, grads = sl.value_and_grad(f)(parts)
            parts, state, _ = o.step(tx, parts, grads, state)
            before = {n: sl.unshard(x).clone() for n, x in o.state_dict(parts).items()}
            _, grads = sl.value_and_grad(f)(parts)
            for g in grads.values():
                g.raw.fill_(float("nan"))
            try:
                parts, state, info = o.step(tx, parts, grads, state)
                assert info.skipped
            except sl.ShardError as e:
                assert guard is not o.skip_nonfinite and "norm of the gradients" in str(e)
            after = {n: sl.unshard(x) for n, x in o.state_dict(parts).items()}
            assert differing(before, after) == []
            assert (
                o.state_dict(state)["1.count" if guard is not o.skip_nonfinite else "inner.1.count"]
                == 1
            )
            _, grads = sl.value_and_grad(f)(parts)
            parts, state, _ = o.step(tx, parts, grads, state)


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_gradient_of_what_nothing_reads_is_a_row_of_the_host(microbatches: Any) -> None:
    """Zeros, entered in the ledger like all others, and nothing on the device."""
    with sl.simulate(data=2, x=1):
        apply, params = sl.parallelize(Skipping(3), RULES, inputs={"x": "data ."})
        tiers = o.Tiers()
        parts = o.zero(o.sgd(0.1), "data", 3, tiers=tiers).shard(params)
        loss = lambda p, x: apply(p, x, (1,))  # noqa: E731
        _, grads = sl.value_and_grad(loss, microbatches=microbatches)(parts, torch.randn(8, WIDE))
        rows = [g.raw for g in grads.values()]
        tiers.ledger.trim("host")
        assert [bool(row.any()) for row in rows] == [True, False, True]
        assert sum(row.nbytes for row in rows) == 2 * tiers.ledger.held["host"]["gradients"]


def stepped(inner: Any, tiers: Any, dtype: torch.dtype, **how: Any) -> dict[str, Any]:
    """Losses, parameters and state of three steps by ``value_and_step``."""
    f, params = model(6, dtype)
    tx = o.zero(inner, "data", 3, tiers=tiers, **how)
    params = tx.shard(params)
    state, out = tx.init(params), dict[str, Any]()
    step = o.value_and_step(f, tx)
    for i in range(3):
        out[f"loss {i}"], params, state, _ = step(params, state)
    out |= {f"param {n}": sl.unshard(x) for n, x in o.state_dict(params).items()}
    state = o.state_dict(state)
    return out | {n: sl.unshard(x) if isinstance(x, torch.Tensor) else x for n, x in state.items()}


KINDS = [(torch.float32, None, 12), (torch.bfloat16, "bf16+rem", 12), (torch.bfloat16, "fp32", 14)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("dtype", "master", "rest"), KINDS)
def test_bytes_of_a_parameter_over_all_tiers(mesh: Any, dtype: Any, master: Any, rest: int) -> None:
    """12 at rest, exact, where no gradient waits; a gradient's more where a norm needs them all."""
    with sl.simulate(**mesh):
        want = stepped(o.adamw(0.01), None, dtype, master=master)
        tiers = o.Tiers()
        assert differing(want, stepped(o.adamw(0.01), tiers, dtype, master=master)) == []
        held = tiers.ledger.peaks["host"]
        numbers = held["parameters"] / dtype.itemsize
        assert (held["parameters"] + held["state"]) / numbers == rest
        # of six blocks, three are on their way
        assert held["gradients"] <= 3 / 6 * numbers * dtype.itemsize
        tiers = o.Tiers()
        run(clipped(), tiers, 6, dtype=dtype, master=master)
        # what one job of the host joins to fp32 at once
        joined = tiers.ledger.peaks["host"]["buffers"]
        assert (tiers.ledger.peak["host"] - joined) / numbers == rest + dtype.itemsize
        assert joined == numbers * 4 * (master == "bf16+rem")


@pytest.mark.parametrize(("dtype", "master", "rest"), KINDS)
def test_memory_of_the_host_is_entered_before_it_is_allocated(
    dtype: Any, master: Any, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, made = Counter[int](), buffers.host_memory

    def counted(n: int, kind: torch.dtype, device: torch.device) -> Any:
        row, owner = made(n, kind, device)
        alive[id(owner)] = n * kind.itemsize
        weakref.finalize(owner, alive.pop, id(owner)).atexit = False
        # of both ranks
        assert alive.total() <= 2 * tiers.ledger.held["host"].total()
        return row, owner

    monkeypatch.setattr(buffers, "host_memory", counted)
    how: Any = {"dtype": dtype, "master": master}
    for step in (partial(run, clipped(), count=6), partial(stepped, o.adamw(0.01))):
        gc.collect()
        tiers = o.Tiers()
        with sl.simulate(data=2, x=1):
            step(tiers=tiers, **how)
        assert alive.total() <= 2 * tiers.ledger.peak["host"]


@pytest.mark.parametrize(("dtype", "master", "rest"), KINDS)
def test_state_that_lies_in_no_bucket_is_of_all_blocks(
    dtype: Any, master: Any, rest: int, tmp_path: Path
) -> None:
    """The scales of 8-bit moments: all blocks are updated at once, where the host holds them."""
    how: Any = {"dtype": dtype, "master": master}
    for inner in (o.adam8bit(0.01), o.chain(o.clip_by_global_norm(0.1), o.adam8bit(0.01))):
        with sl.simulate(data=2, x=1):
            tiers = o.Tiers(host="1MB")
            assert differing(run(inner, None, 6, **how), run(inner, tiers, 6, **how)) == []
            f, params = model(6, dtype)
            tx = o.zero(inner, "data", 3, master=master, tiers=tiers)
            said = sl.explain(f, tx.shard(params), tx=tx).tiers
            assert said is not None and said.host["state"] == tiers.ledger.peaks["host"]["state"]
            for more in (
                {"update": "device"},
                {"disk": tmp_path, "host": "76KB" if master else "101KB"},
            ):
                with pytest.raises(sl.ShardError, match="this transform needs all blocks at once"):
                    run(inner, o.Tiers(**more), 6, **how)


def muon() -> Any:
    return o.muon(0.01, rest=o.adamw(0.01), matrices="*.weight")


def least_here(run: Any, inner: Any, **how: Any) -> int:
    """The bytes that the refusal of a smaller device names."""
    with pytest.raises(sl.ShardError, match="its update") as refused:
        run(inner, o.Tiers(device=1, update="device"), **how)
    return int(str(refused.value).split("device=")[-1].strip(" )"))


@pytest.mark.parametrize(
    ("mesh", "dtype", "master", "rest"),
    [(mesh, *kind) for mesh, kind in zip(MESHES, (*KINDS, KINDS[1]), strict=True)],
)
def test_an_update_on_the_device_is_that_in_memory(
    mesh: Any, dtype: Any, master: Any, rest: int
) -> None:
    """By a step, with a clip, and in backward; a copy that is updated stays valid: 2 (L - C) loads."""
    count, how = 6, {"dtype": dtype, "master": master}
    part = block_bytes(mesh, dtype)
    with sl.simulate(**mesh):
        want = run(clipped(), None, count, **how)
        there = stepped(o.adamw(0.01), None, **how)
        least = least_here(run, clipped(), count=count, **how)
        for more, room in ((0, 1), (part, 2), (None, count)):
            budget = None if more is None else least + more
            tiers = o.Tiers(device=budget, update="device")
            found = run(clipped(), tiers, count, **how)
            assert differing(want, found) == [] and found["loads"][1:] == [2 * (count - room)] * 2
            eager = o.Tiers(device=budget, update="device")
            assert differing(there, stepped(o.adamw(0.01), eager, **how)) == []
            for some in (tiers, eager):
                assert some.ledger.peak["device"] <= (budget or 1 << 62)
                assert some.ledger.peaks["device"]["state"] >= part // dtype.itemsize * (
                    rest - dtype.itemsize
                )
            # no gradient leaves the device
            assert eager.ledger.peaks["host"]["gradients"] == 0


@pytest.mark.parametrize("make", [lambda: o.lamb(0.01), muon])
def test_transforms_of_tensors_and_matrices_are_run_on_the_device_block_by_block(make: Any) -> None:
    with sl.simulate(data=2, x=2):
        want = run(make(), None)
        budget = least_here(run, make())
        tiers = o.Tiers(device=budget, update="device")
        assert differing(want, run(make(), tiers)) == []
        assert tiers.ledger.peak["device"] <= budget
        for whole in (o.adafactor(0.01), o.chain(o.clip_by_value(0.1), clipped())):
            with pytest.raises(sl.errors.Unsupported, match="the device holds one"):
                run(whole, o.Tiers(update="device"))


def test_an_update_in_backward_sends_state_and_parameters_alone() -> None:
    """Each way once a step, beside the loads of 2 (L - C) blocks."""
    mesh, count = {"data": 2, "x": 1}, 6
    part = block_bytes(mesh)
    with sl.simulate(**mesh):
        least = least_here(run, o.adamw(0.01), count=count)
        for budget, room in ((least, 1), (2 * least + part, 3), (None, count)):
            f, params = model(count)
            tx = o.zero(o.adamw(0.01), "data", 3, tiers=o.Tiers(device=budget, update="device"))
            params = tx.shard(params)
            state, step = tx.init(params), o.value_and_step(f, tx)
            for _ in range(3):
                cache = params.cache
                before = cache.loads, *(m.moved for m in cache.movers[:2])
                _, params, state, _ = step(params, state)
                after = cache.loads, *(m.moved for m in cache.movers[:2])
                moved = [b - a for a, b in zip(before, after, strict=True)]
            loads, numbers = 2 * (count - room), 2 * count * part
            assert moved == [loads, 2 * part * loads + 2 * numbers, 3 * numbers]


def test_an_error_of_an_update_reaches_the_next_reader() -> None:
    """With its cause, and the line of the step that posted it."""

    def rate(count: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("no rate")
        return 0.1

    with sl.simulate(data=1, x=1):
        f, params = model(3)
        tx = o.zero(o.adamw(rate), "data", 3, tiers=o.Tiers())
        parts = tx.shard(params)
        _, grads = sl.value_and_grad(f)(parts)
        parts, _, _ = o.step(tx, parts, grads, tx.init(parts))
        with pytest.raises(OSError, match="no rate") as raised:
            f(parts)
        assert any("test_tiered_step.py" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    ("inner", "alone"),
    [
        (lambda: o.adamw(0.1), True),
        (clipped, True),
        (lambda: o.chain(o.clip_by_value(0.1), o.clip_by_global_norm(0.1), o.sgd(0.1)), False),
        (lambda: o.lamb(0.1), False),
        (groups, True),
    ],
)
def test_a_chunk_is_updated_alone_where_that_is_the_same(inner: Any, alone: bool) -> None:
    with sl.simulate(data=2, x=1):
        f, params = model(3)
        tx = o.zero(inner(), "data", 3, tiers=o.Tiers())
        parts = tx.shard(params)
        _, grads = sl.value_and_grad(f)(parts)
        parts, _, _ = o.step(tx, parts, grads, tx.init(parts))
        assert bool(parts.cache.updates) == alone
