"""ZeRO-1: the unsharded optimizer's updates, with state and wire bytes as the formulas say."""

from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.optim.buckets import ALIGN, Buckets
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
            sl.ShardedTensor(sl.collectives.unwrap(sl.pmax(p.local, "data")), p.place)
        )
        apart = max(apart, float((high - sl.unshard(p)).abs().max()))
    gap = max(float((sl.unshard(ends[0][k]) - sl.unshard(ends[1][k])).abs().max()) for k in PARAMS)
    return gap, Fraction(moved[1], moved[0]), apart


OWN = {
    "own": [("0.weight", "data ."), ("2.weight", ". data"), ("4.weight", "(data x) ."), ("*", "...")],
    "mixed": [("0.weight", "data x"), ("2.weight", "x ."), ("*", "...")],
    "every": [("*", "(data x) ...")],
}  # fmt: skip
OVER = [("data", None), (("data", "x"), None), ("data", "x")]
CLIPPED = sl.optim.chain(sl.optim.clip_by_global_norm(0.05), sl.optim.adamw(0.01))
MATRICES = sl.optim.muon(0.02, rest=sl.optim.adamw(0.01), matrices="*.weight")


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def ends(tx: Any, rules: Any = None, **how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and state after two steps, by name and whole; of the module alone without rules."""
    module, x, apply = net(), r(8, 8, dtype=torch.float64), None
    params: Any = {k: p.detach() for k, p in module.named_parameters()}
    if rules is not None:
        apply, params = sl.parallelize(module, rules, inputs={"input": "data ."})
    params = tx.shard(params)
    state = tx.init(params)

    def loss(p: Any) -> Any:
        f = partial(torch.func.functional_call, module) if apply is None else apply
        return f(p, x).square().mean()

    for _ in range(2):
        _, grads = sl.value_and_grad(loss, **how)(params)
        params, state, _ = sl.optim.step(tx, params, grads, state)
    named = sl.optim.state_dict(params) if isinstance(params, Buckets) else params
    return whole(named), whole(sl.optim.state_dict(state))


def whole(named: Any) -> dict[str, Any]:
    every = {k: sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x for k, x in named.items()}
    return {k: x.detach() if isinstance(x, Tensor) else x for k, x in every.items()}


def apart(mine: dict[str, Any], want: dict[str, Any]) -> float:
    assert mine.keys() == want.keys()
    return max(float(abs(torch.as_tensor(mine[k] - want[k])).max()) for k in want)


WAYS = ("tree", "into", "pending")


def own_parts_train(stage: int, dense: Any, layouts: Any, ways: Any = WAYS) -> float:
    """The largest difference of any layout, axes and way of gradients from the dense run."""
    most = 0.0
    for rules, (axis, inner), how in product(layouts, OVER, ways):
        tx = sl.optim.zero(CLIPPED, axis, stage, inner=inner, bucket_mb=1e-3)
        axes = axis if inner is None else (axis, inner)
        given: dict[str, Any] = {"into": {"into": tx}, "pending": {"pending": axes}}.get(how, {})
        if (how == "into" and stage == 3) or (how == "pending" and stage in (0, 3)):
            continue
        params, state = ends(tx, rules, **given)
        most = max(most, apart(params, dense[0]), apart(state, dense[1]))
    return most


@pytest.mark.parametrize("stage", range(4))
def test_parameters_that_are_split_over_zeros_axes_train_as_dense(stage: int) -> None:
    """The clip's norm too counts every element once."""
    dense = ends(CLIPPED)
    with sl.simulate(data=2, x=2):
        assert own_parts_train(stage, dense, OWN.values()) < 1e-12


def checked_parts_train(dense: Any) -> float:
    with sl.check():
        ways = zip(range(4), ("tree", "into", "pending", "tree"), strict=True)
        return max(own_parts_train(stage, dense, [OWN["own"]], [way]) for stage, way in ways)


def test_parameters_that_are_split_over_zeros_axes_train_as_dense_on_real_ranks(pool: Any) -> None:
    """Check mode, which compares replicas, finds none that differ."""
    assert max(pool.run(checked_parts_train, ends(CLIPPED), data=2, x=2)) < 1e-12


@pytest.mark.parametrize("way", ["gathered", "owners", None])
@pytest.mark.parametrize("rules", OWN.values(), ids=OWN)
def test_matrices_of_buckets_that_are_cut_over_several_axes_are_joined(
    rules: Any, way: Any
) -> None:
    dense = ends(MATRICES)
    with sl.simulate(data=2, x=2):
        for stage, axis in ((1, ("data", "x")), (3, "data")):
            pins = {} if way is None else {"muon": way}
            tx = sl.optim.zero(MATRICES, axis, stage)
            with sl.algorithm(**pins):
                params, state = ends(tx, rules)
            assert max(apart(params, dense[0]), apart(state, dense[1])) < 1e-9


def test_state_and_bytes_are_those_of_the_axes_that_a_layout_leaves_whole() -> None:
    """4 KiB of state per 16 KiB matrix of fp32 and moment on 4 ranks, wherever its layout splits."""
    layouts = {"a": "data .", "b": ". .", "c": "data x", "d": ". x"}
    left = {
        "data": {"b": 2, "d": 2},
        "x": {"a": 2, "b": 2},
        ("data", "x"): {"a": 2, "b": 4, "d": 2},
    }
    with sl.simulate(data=2, x=2):
        params = {k: sl.shard(torch.ones(64, 64), text) for k, text in layouts.items()}
        held = {k: p.local.nbytes for k, p in params.items()}
        for axis, ways in left.items():
            tx = sl.optim.zero(sl.optim.adamw(0.1), axis)
            state = tx.init(params)
            rows = {row.name: row.state for row in sl.summary(params, state=state).rows}
            assert rows == {k: 2 * held[k] // ways.get(k, 1) for k in params}
            axes = (axis,) if isinstance(axis, str) else axis
            grads = {
                k: sl.ShardedTensor(
                    p.raw,
                    p.place._replace(
                        layout=sl.Layout(p.dims, tuple(set(axes) - set(p.sharding.axes)))
                    ),
                )
                for k, p in params.items()
            }
            with sl.trace() as t:
                tx.update(grads, state, params)
            want = sum(Fraction(n - 1, n) * held[k] for k, n in ways.items())
            assert t.bytes == 2 * want
            parts = sl.optim.zero(sl.optim.adamw(0.1), axis, 3).shard(params)
            with sl.trace() as t, parts.opened() as named:  # what is read again is there still
                assert all(torch.equal(named[k].raw, params[k].raw) for k in 2 * list(params))
            assert t.bytes == want


@pytest.mark.parametrize("stage", [1, 3])
def test_state_of_parameters_that_are_split_over_zeros_axes_goes_elsewhere(stage: int) -> None:
    tx = sl.optim.zero(CLIPPED, ("data", "x"), stage)
    with sl.simulate(data=2, x=2):
        _, kept = ends(tx, OWN["mixed"])
    for mesh, rules, other in (
        ({"data": 4, "x": 1}, OWN["own"][1:2] + OWN["own"][3:], 3),
        ({"data": 1, "x": 2}, [("0.weight", "x ."), ("*", "...")], 1),
    ):
        with sl.simulate(**mesh):
            _, params = sl.parallelize(net(), rules)
            again = sl.optim.zero(CLIPPED, ("data", "x"), other)
            state = sl.optim.load_state_dict(again.init(again.shard(params)), kept)
            assert apart(whole(sl.optim.state_dict(state)), kept) == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_halves_that_are_their_own_part_are_stepped_in_fp32(stage: int) -> None:
    def loss(p: Any) -> Any:
        return sum(x.float().square().sum() for x in p.values())

    with sl.simulate(data=2):
        w = {k: sl.shard(PARAMS[k].bfloat16(), text) for k, text in (("a", "data ."), ("b", "."))}
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data", stage, master="fp32")
        state = tx.init(w)
        _, grads = sl.value_and_grad(loss, into=tx)(w)
        w, state, _ = sl.optim.step(tx, w, grads, state)
        for k, p in w.items():
            first = PARAMS[k].bfloat16().float()
            assert torch.equal(sl.unshard(p), (first - 0.1 * (2 * first)).bfloat16())
