"""ZeRO-1: the unsharded optimizer's updates, with state and wire bytes as the formulas say."""

from fractions import Fraction
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.buckets import ALIGN
from shardlib.tensor import Place
from tests.ops.cases import close, r

PARAMS = {
    "a": r(8, 12, dtype=torch.float32),
    "b": r(8, seed=1, dtype=torch.float32),
    "c": r(6, 4, seed=2, dtype=torch.float32),
    "s": r(seed=3, dtype=torch.float32),
}
LAYOUTS = [
    {"a": "x y", "b": "y", "c": "x .", "s": ""},
    {"a": "y x", "b": ".", "c": ". y", "s": ""},
    {"a": ". .", "b": "x", "c": ". .", "s": ""},
]
MESHES = [{"data": 2, "x": 2, "y": 2}, {"data": 3, "x": 1, "y": 2}, {"data": 1, "x": 2, "y": 1}]
TX = {
    "sgd": sl.optim.sgd(0.05, 0.9),
    "adamw": sl.optim.adamw(0.05),
    "lion": sl.optim.lion(0.05, weight_decay=0.1),
}


def gradients(params: dict[str, Any], i: int) -> dict[str, Any]:
    return {k: (p * 0.3 + (i % 3 - 1)) * (1 + i) for k, p in params.items()}


def pending(g: sl.ShardedTensor, pieces: int) -> sl.ShardedTensor:
    """The same gradient as a sum over data that is still to be done: exact halves (or one part)."""
    raw = g.raw if pieces == 1 else g.raw * torch.tensor(1 / pieces)
    return sl.ShardedTensor(raw, Place(sl.Layout(g.dims, ("data",)), g.padded_shape, g.mesh))


def run(name: str, layouts: dict[str, str], how: str, count: int = 10) -> Any:
    mesh = sl.current_mesh()
    tx = TX[name]
    tx = sl.optim.zero(tx, "data") if how != "plain" else tx
    params = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
    state = tx.init(params)
    for i in range(count):
        g = gradients(params, i)
        g = {k: pending(v, mesh["data"]) for k, v in g.items()} if how == "pending" else g
        with sl.trace() as t:
            updates, state = tx.update(g, state, params)
        assert all(u.sharding == params[k].sharding for k, u in updates.items())
        params = sl.optim.apply_updates(params, updates)
    return {k: sl.unshard(p) for k, p in params.items()}, t, state, params


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("name", TX)
def test_zero_equals_the_unsharded_optimizer_bit_for_bit(
    name: str, layouts: dict[str, str], mesh: dict[str, int]
) -> None:
    with sl.simulate(**mesh):
        want = run(name, layouts, "plain")[0]
        ways = ["reduced", "pending"] if mesh["data"] < 3 else ["reduced"]  # thirds are not exact
        for how in ways:
            got = run(name, layouts, how)[0]
            assert all(torch.equal(got[k], want[k]) for k in want), how


def on_ranks(layouts: dict[str, str]) -> dict[str, bool]:
    out = {}
    for name in TX:
        want, _, _, _ = run(name, layouts, "plain")
        for how in ("reduced", "pending"):
            got, _, _, _ = run(name, layouts, how)
            out[f"{name} {how}"] = all(torch.equal(got[k], want[k]) for k in want)
    return out


def test_zero_equals_the_unsharded_optimizer_on_real_processes(pool: Any) -> None:
    layouts = {"a": ". y", "b": ".", "c": ". y", "s": ""}
    for answers in pool.run(on_ranks, layouts, data=2, y=2):
        assert all(answers.values()), answers


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_wire_and_state_bytes_are_the_papers(mesh: dict[str, int]) -> None:
    """Per rank: 2 (N-1)/N of the parameters on the wire, 8/N bytes of state per fp32 parameter."""
    n = mesh["data"]
    with sl.simulate(**mesh):
        for how, passes in (("pending", 2), ("reduced", 1)):
            _, t, state, params = run("adamw", LAYOUTS[0], how, 2)
            held = sum(p.local.numel() for p in params.values())
            padded = sum(m.local.numel() for m in state.mu.values()) * n
            pads = len(params) * ALIGN + len(state.mu) * n * ALIGN
            assert held <= padded <= held + pads
            assert t.bytes == Fraction(passes * (n - 1), n) * padded * 4
            kept = sum(x.local.numel() * 4 for tree in (state.mu, state.nu) for x in tree.values())
            assert kept * n == 8 * padded


def test_clipping_inside_zero_sees_the_same_norm() -> None:
    inner = sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(0.05))
    with sl.simulate(data=2, x=2, y=2):
        params = {k: sl.shard(p.double(), LAYOUTS[0][k]) for k, p in PARAMS.items()}
        g = gradients(params, 1)
        want, _ = inner.update(g, inner.init(params), params)
        tx = sl.optim.zero(inner, "data")
        for grads in (g, {k: pending(v, 2) for k, v in g.items()}):
            with sl.trace() as t:
                got, _ = tx.update(grads, tx.init(params), params)
            for k in want:
                close(sl.unshard(got[k]), sl.unshard(want[k]), 1e-12)
            assert sum(e.kind == "psum" for e in t.events) == 1


def test_state_is_a_tree_of_sharded_vectors() -> None:
    with sl.simulate(data=2, x=2):
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", bucket_mb=1e-4)
        state = tx.init(
            {k: sl.shard(p, "x ." if p.ndim == 2 else "...") for k, p in PARAMS.items()}
        )
        assert {str(m.sharding) for m in state.mu.values()} == {"(x data)", "data"}
        assert len(state.mu) > 2  # small buckets: at most 104 bytes or one leaf each


MISTAKES = [
    (lambda p: sl.optim.zero(sl.optim.adamw(0.1), "data", stage=4), "there is no stage 4"),
    (
        lambda p: sl.optim.zero(sl.optim.adamw(0.1)._replace(trait="tree"), "data"),
        "looks at the tree",
    ),
    (lambda p: sl.optim.zero(sl.optim.adamw(0.1), "dat").init(p), "did you mean 'data'"),
    (lambda p: sl.optim.zero(sl.optim.adamw(0.1), "x").init(p), "split over 'x' already"),
    (
        lambda p: sl.optim.zero(sl.optim.adamw(0.1), "data").init({"w": torch.ones(2)}),
        "this one is plain",
    ),
    (lambda p: sl.optim.zero(sl.optim.adamw(0.1), "data").update(p, None), "needs the parameters"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES)
def test_mistakes_are_named(call: Any, says: str) -> None:
    with sl.simulate(data=2, x=2), pytest.raises(sl.ShardError, match=says) as caught:
        call({"w": sl.shard(torch.ones(4, 4), "x .")})
    assert caught.value.fix


def test_half_pending_gradients_are_refused() -> None:
    with sl.simulate(data=2, x=2):
        p = {k: sl.shard(torch.ones(4), "x") for k in "ab"}
        g = {"a": p["a"], "b": pending(p["b"], 2)}
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data")
        with pytest.raises(sl.ShardError, match="every gradient must be pending"):
            tx.update(g, tx.init(p), p)


def small(dtype: torch.dtype = torch.float32, frozen: bool = False) -> dict[str, Any]:
    params = {k: sl.shard(p.to(dtype), LAYOUTS[0][k]) for k, p in PARAMS.items()}
    for k, p in params.items() if frozen else ():
        p.requires_grad_(k != "a")
    return params


def square(p: dict[str, Any], by: Any) -> Any:
    """Its gradients are 2 w, from batches that are split over data."""
    part = sl.shard(by, "data")
    return sum((x * part.sum()).square().sum() for x in p.values()) / 16


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_no_numbers_are_refused_or_skipped(stage: int, bad: float) -> None:
    """Parameters, state and the gradients themselves are as they were, and training goes on."""
    o = sl.optim
    clipped = o.chain(o.clip_by_global_norm(1.0), o.adamw(0.1))
    with sl.simulate(data=2, x=2, y=2):
        batch = torch.ones(4)
        for skips in (False, True):
            tx = o.zero(clipped, "data", stage, bucket_mb=1e-4)
            tx = o.skip_nonfinite(tx) if skips else tx
            params = small()
            state = tx.init(params)
            want, _ = clipped.update(
                sl.value_and_grad(square)(params, batch)[1], clipped.init(params), params
            )
            want = {k: sl.unshard(p) for k, p in sl.optim.apply_updates(params, want).items()}
            vg = sl.value_and_grad(square, into=tx)
            _, grads = vg(params, batch * bad)
            held = {k: g.raw.clone() for k, g in grads.items()}
            if skips:
                params, state, info = o.step(tx, params, grads, state)
                assert info.skipped
            else:
                with pytest.raises(sl.ShardError, match="norm of the gradients is"):
                    o.step(tx, params, grads, state)
                other = vg(params, batch)[1]  # in other memory
                as_it_was = (
                    torch.equal(held[k].nan_to_num(7.0), g.raw.nan_to_num(7.0))
                    for k, g in grads.items()
                )
                assert all(as_it_was)
                assert all(bool(g.raw.isfinite().all()) for g in other.values())
            params, state, info = o.step(tx, params, vg(params, batch)[1], state)
            assert not info.skipped
            for k, p in params.items():
                close(sl.unshard(p).double(), want[k].double(), 1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_parameters_stay_and_take_no_part(stage: int) -> None:
    with sl.simulate(data=2, x=2, y=2):
        ends = []
        for tx in (sl.optim.adamw(0.1), sl.optim.zero(sl.optim.adamw(0.1), "data", stage)):
            params = small(frozen=True)
            state = tx.init(params)
            into = {"into": tx} if tx.sink is not None else {}
            for _ in range(2):
                _, grads = sl.value_and_grad(square, **into)(params, torch.ones(4))  # type: ignore[call-overload]
                params, state, _ = sl.optim.step(tx, params, grads, state)
            assert [p.requires_grad for p in params.values()] == [False, True, True, True]
            ends.append({k: sl.unshard(p).detach() for k, p in params.items()})
        assert torch.equal(ends[0]["a"], PARAMS["a"]) and torch.equal(ends[1]["a"], PARAMS["a"])
        assert all(torch.equal(ends[0][k], ends[1][k]) for k in PARAMS)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "how", [{"reduce_dtype": torch.bfloat16}, {"gather_dtype": torch.bfloat16}]
)
def test_narrow_transfers_leave_every_rank_the_same(how: Any, stage: int, pool: Any) -> None:
    """Half the bytes of one way, and near what fp32 gives."""
    with sl.simulate(data=2, x=2, y=1):
        (answer,) = [narrow(how, stage)]
    assert answer[0] < 2e-2 and answer[1] == Fraction(3, 4) and answer[2] == 0
    assert pool.run(narrow, how, stage, data=2, x=2, y=1) == [answer] * 4


def narrow(how: Any, stage: int) -> tuple[float, Fraction, float]:
    ends, moved = [], []
    for more in ({}, how):
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data", stage, master="fp32", **more)
        params = small()
        state = tx.init(params)
        with sl.trace() as t:
            _, grads = sl.value_and_grad(square, into=tx)(params, torch.ones(4))
            params, *_ = sl.optim.step(tx, params, grads, state)
        moved.append(sum(e.bytes for e in t.events if e.axis == "data" and e.kind != "psum"))
        ends.append(params)
    apart = 0.0
    for p in ends[1].values():  # a copy that differs would show
        high = sl.unshard(
            sl.ShardedTensor(sl.collectives.api.unwrap(sl.pmax(p.local, "data")), p.place)
        )
        apart = max(apart, float((high - sl.unshard(p)).abs().max()))
    gap = max(float((sl.unshard(ends[0][k]) - sl.unshard(ends[1][k])).abs().max()) for k in PARAMS)
    return gap, Fraction(moved[1], moved[0]), apart
