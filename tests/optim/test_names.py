"""State by name goes to any mesh, layout, stage and bucket size, and comes back the same."""

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.optim.stage3 import Parts
from tests.optim.test_exact import MESHES, sets, value

o = sl.optim
PLACES = [
    ({"data": 1, "x": 1, "y": 1}, 0),
    ({"data": 2, "x": 1, "y": 1}, 1),
    ({"data": 4, "x": 1, "y": 1}, 2),
    ({"data": 1, "x": 4, "y": 1}, 1),
    ({"data": 1, "x": 2, "y": 2}, 2),
    ({"data": 2, "x": 2, "y": 1}, 1),
    ({"data": 4, "x": 1, "y": 1}, 3),
    ({"data": 2, "x": 2, "y": 1}, 3),
]
SHAPES = {
    "a": ((128, 64), "x y"),
    "b": ((256,), "x"),
    "c": ((64, 512), ". x"),
    "d": ((), ""),
    "odd": ((13, 5), "x ."),
    "prime": ((7, 131), "y x"),
    "few": ((3,), "x"),
}


def placed(shapes: Any) -> dict[str, sl.ShardedTensor]:
    return {
        k: sl.shard(value(s, i), layout, pad=True)
        for i, (k, (s, layout)) in enumerate(shapes.items())
    }


def moved(x: Any) -> Any:
    """What a file would give back: a whole tensor."""
    return sl.unshard(x).clone() if isinstance(x, sl.ShardedTensor) else x


@settings(max_examples=25, deadline=None)
@given(sets(), st.sampled_from(MESHES), st.sampled_from(MESHES), st.booleans())
def test_what_is_loaded_elsewhere_is_what_was_kept(
    shapes: Any, one: Any, two: Any, small: bool
) -> None:
    def made(axes: Any, inner: Any, mb: float) -> Any:
        tx = o.chain(o.clip_by_global_norm(1.0), o.adamw(0.1))
        return o.zero(tx, axes, 2, bucket_mb=mb, inner=inner)

    with sl.simulate(**one[0]):
        tx, params = made(one[1], one[2], 1e-3 if small else 25.0), placed(shapes)
        state = tx.init(params)
        for _ in range(2):
            _, state = tx.update(params, state, params)
        kept = {k: moved(x) for k, x in o.state_dict(state).items()}
    assert kept["1.count"] == 2
    for k, (shape, _) in shapes.items():
        assert kept[f"1.mu.{k}"].shape == shape
    with sl.simulate(**two[0]):
        tx = made(two[1], two[2], 25.0 if small else 1e-3)
        again = o.load_state_dict(tx.init(placed(shapes)), kept)
        there = {k: moved(x) for k, x in o.state_dict(again).items()}
    assert list(there) == list(kept)
    for k, x in kept.items():
        assert torch.equal(there[k], x) if isinstance(x, torch.Tensor) else there[k] == x


def run(tx: Any, params: Any, state: Any, first: int, steps: int) -> Any:
    for t in range(first, first + steps):
        grads = {
            k: sl.shard(value(s, 50 * t + i), SHAPES[k][1], pad=True)
            for i, (k, (s, _)) in enumerate(SHAPES.items())
        }
        if isinstance(params, Parts):
            grads = params.like(dict(tx.shard(grads)))
        params, state, _ = o.step(tx, params, grads, state)
    return params, state


@pytest.mark.parametrize(("axes", "stage"), PLACES)
def test_five_more_steps_elsewhere_are_the_same_bit_for_bit(axes: Any, stage: int) -> None:
    """Also where a block is cut within a vector of the fused kernel."""
    with sl.simulate(data=2, x=2, y=1):
        tx, params = o.zero(o.adamw(0.1), "data", 2), placed(SHAPES)
        params, state = run(tx, params, tx.init(params), 0, 4)
        kept = {k: moved(x) for k, x in o.state_dict(state).items()}
        weights = {k: moved(p) for k, p in params.items()}
        want = {k: moved(p) for k, p in run(tx, params, state, 4, 5)[0].items()}
    with sl.simulate(**axes):
        params = {k: sl.shard(w, SHAPES[k][1], pad=True) for k, w in weights.items()}
        tx = o.zero(o.adamw(0.1), "data", stage, bucket_mb=0.01) if stage else o.adamw(0.1)
        params = tx.shard(params)
        state = o.load_state_dict(tx.init(params), kept)
        got = o.state_dict(run(tx, params, state, 4, 5)[0])
        assert all(torch.equal(moved(got[k]), want[k]) for k in want)


def on_ranks() -> list[str]:
    wrong = []
    tx, params = o.zero(o.adamw(0.1), "data", 2), placed(SHAPES)
    _, state = run(tx, params, tx.init(params), 0, 2)
    kept = o.state_dict(state)
    mb = sum(x.local.numel() for x in kept.values() if isinstance(x, sl.ShardedTensor))
    held = sum(x.local.numel() for t in (state.mu, state.nu) for x in t.values())
    if mb > held * 1.1:
        wrong.append(f"{mb} elements by name, {held} in buckets")
    again = o.load_state_dict(tx.init(placed(SHAPES)), kept)
    for one, two in ((state.mu, again.mu), (state.nu, again.nu)):
        wrong += [k for k in one if not torch.equal(one[k].raw, two[k].raw)]
    return wrong


def test_on_real_ranks_each_holds_its_part(pool: Any) -> None:
    for mesh in ({"data": 2, "x": 2, "y": 1}, {"data": 4, "x": 1, "y": 1}):
        assert pool.run(on_ranks, **mesh) == [[]] * 4


def test_state_of_another_model_is_refused() -> None:
    tx = o.zero(o.adamw(0.1), "data")
    with sl.simulate(data=2):
        p = {"w": sl.shard(torch.ones(4), "."), "b": sl.shard(torch.ones(3), ".")}
        state = tx.init(p)
        kept = o.state_dict(state)
        for bad, says in [
            ({k: v for k, v in kept.items() if k != "mu.w"}, "lacks mu.w"),
            (kept | {"mu.v": torch.ones(1)}, "has mu.v"),
            (kept | {"mu.w": torch.ones(5)}, "'mu.w' is of another kind"),
            (kept | {"mu.w": torch.ones(4).double()}, "'mu.w' is of another kind"),
            (kept | {"count": torch.ones(4)}, "'count' is of another kind"),
            (o.state_dict(o.sgd(0.1, 0.9).init(p)), "lacks mu.b, mu.w, nu.b, nu.w and has trace"),
        ]:
            with pytest.raises(sl.ShardError, match=says):
                o.load_state_dict(state, bad)


def test_states_of_names_that_look_alike_are_all_kept() -> None:
    """Keys with dots in them, of parameters and of groups, on every stage and in no buckets."""
    params = {
        "a": {"b": torch.zeros(4), "count": torch.zeros(2)},
        "a.b": torch.ones(4),
        "b": torch.ones(3),
    }
    which = {"a": {"b": "x", "count": "x"}, "a.b": "x.mu", "b": "x.mu.a"}
    kept = []
    with sl.simulate(data=2):
        for stage in (None, 1, 3):
            given = params if stage is None else sl.shard(params, "...")
            groups = sl.optim.partition(
                dict.fromkeys(("x", "x.mu", "x.mu.a"), sl.optim.adamw(0.1)), which
            )
            tx = groups if stage is None else sl.optim.zero(groups, "data", stage)
            given = tx.shard(given)
            state = tx.init(given)
            grads = optree.tree_map(lambda x: x * 0 + 1, given)
            if stage == 1:
                grads = optree.tree_map(lambda x: x * 0 + 1, sl.shard(params, "..."))
            _, state = tx.update(grads, state, given)
            kept.append(sl.optim.state_dict(state))
            again = sl.optim.load_state_dict(tx.init(given), kept[0])
            found = sl.optim.state_dict(again)
            assert found.keys() == kept[-1].keys() == kept[0].keys()
            assert sum(isinstance(x, torch.Tensor) for x in found.values()) == 2 * 4
            for k, x in found.items():
                if isinstance(x, torch.Tensor):
                    mine = sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x
                    assert torch.equal(mine, kept[0][k]), k


def test_a_cycle_that_has_not_begun_goes_between_zero_and_none() -> None:
    """Its sums are zeros, or nothing; one that has begun is refused, with what to write."""
    batch = [{"w": torch.full((8, 4), float(i))} for i in range(4)]

    def runs(tx: Any, kept: Any, some: Any, sharded: bool = True) -> tuple[Any, Any]:
        params: Any = {"w": sl.shard(torch.ones(8, 4), "data .") if sharded else torch.ones(8, 4)}
        state = tx.init(params)
        state = state if kept is None else o.load_state_dict(state, kept)
        for g in some:
            g = {k: sl.shard(x, "data .") for k, x in g.items()} if sharded else g
            _, state = tx.update(g, state, params)
        return state, {k: moved(x) for k, x in o.state_dict(state).items()}

    def cycled(stage: int | None) -> Any:
        inner = o.sgd(0.1, 0.9)
        if stage == 1:  # inside
            return o.zero(o.multi_steps(inner, 2), ("data", "x"))
        return o.multi_steps(inner if stage is None else o.zero(inner, ("data", "x"), stage), 2)

    want = runs(cycled(None), None, batch, False)[1]
    half = runs(cycled(None), None, batch[:3], False)[1]
    for first in (None, 0, 1, 2):
        with sl.simulate(data=2, x=2):
            kept = runs(cycled(first), None, batch[:2])[1]
        for then in (None, 0, 1, 2):
            with sl.simulate(data=4, x=1):
                state, found = runs(cycled(then), kept, batch[2:])
                assert all(torch.as_tensor(found[k] == want[k]).all() for k in found)
                if then == 2:
                    with pytest.raises(sl.ShardError, match="keep a state when a cycle ends"):
                        o.load_state_dict(state, half)
                else:
                    again = runs(cycled(then), half, batch[3:])[1]
                    assert again.keys() == want.keys()
                    assert all(torch.as_tensor(again[k] == want[k]).all() for k in want)


@pytest.mark.parametrize("mesh", [{"data": 1, "x": 2}, {"data": 2, "x": 1}, {"data": 1, "x": 1}])
@pytest.mark.parametrize("layout", ["data x", ". x"])
def test_an_axis_of_one_rank_may_split_a_parameter_and_its_buckets(
    mesh: dict[str, int], layout: str
) -> None:
    with sl.simulate(**mesh):
        params = {"w": sl.shard(value((4, 6), 0), layout)}
        tx = o.zero(o.sgd(0.1, 0.9), ("data", "x"))
        _, state = tx.update(params, tx.init(params), params)
        kept = o.state_dict(state)
        assert torch.equal(sl.unshard(kept["trace.w"]), value((4, 6), 0))
        again = o.state_dict(o.load_state_dict(tx.init(params), kept))
        assert torch.equal(sl.unshard(again["trace.w"]), value((4, 6), 0))
