from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import close, r

PARAMS = {"w": r(8, 12), "b": r(8, seed=1), "s": r(seed=2)}
LAYOUTS = [
    {"w": "x y", "b": "x", "s": ""},
    {"w": "y x", "b": ".", "s": ""},
    {"w": "(x y) .", "b": "y", "s": ""},
]


def steps(tx: sl.optim.Transform, params: Any, count: int = 10) -> Any:
    """Deterministic gradients: a function of parameter and step."""
    state = tx.init(params)
    for i in range(count):
        grads = {k: (p * 0.3 + (i % 3 - 1)) * (1 + i) for k, p in params.items()}
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
    return params


TORCH = {
    "sgd": (sl.optim.sgd(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": (sl.optim.sgd(0.05, 0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        sl.optim.sgd(0.05, 0.9, True),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    ),
    "adam": (sl.optim.adam(0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adamw": (
        sl.optim.adamw(0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_transforms_follow_torch_optim(name: str) -> None:
    tx, make = TORCH[name]
    theirs = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = make(list(theirs.values()))
    for i in range(10):
        for p in theirs.values():
            p.grad = ((p * 0.3 + (i % 3 - 1)) * (1 + i)).detach()
        optimizer.step()
    for k, p in steps(tx, PARAMS).items():
        close(p, theirs[k].detach(), 1e-12)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "tx", [sl.optim.adamw(0.05), sl.optim.lion(0.05, weight_decay=0.1), sl.optim.sgd(0.05, 0.9)]
)
def test_sharded_updates_are_the_dense_ones_bit_for_bit(
    tx: sl.optim.Transform, layouts: dict[str, str]
) -> None:
    want = steps(tx, PARAMS)
    with sl.simulate(x=2, y=2):
        got = steps(tx, {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        for k in want:
            assert torch.equal(sl.unshard(got[k]), want[k])


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_global_norm_counts_each_element_once_in_one_collective(
    layouts: dict[str, str],
) -> None:
    want = torch.cat([p.reshape(-1) for p in PARAMS.values()]).norm()
    for axes in ({"x": 2, "y": 2}, {"data": 3, "x": 1, "y": 2}, {"x": 4, "y": 2}):
        with sl.simulate(**axes), sl.trace() as t:
            got = sl.optim.global_norm({k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        assert abs(float(got - want)) < 1e-12 * float(want) and len(t.events) == 1


def test_the_global_norm_of_many_fp32_elements_keeps_its_digits() -> None:
    x = torch.full((2_000_000,), 0.1)
    assert abs(float(sl.optim.global_norm(x)) / float(x.double().norm()) - 1) < 1e-12


def test_clipping_scales_to_the_bound_and_no_further() -> None:
    tx = sl.optim.clip_by_global_norm(1.0)
    big, _ = tx.update({"w": torch.full((4,), 3.0)}, tx.init(None))
    small, _ = tx.update({"w": torch.full((4,), 0.1)}, tx.init(None))
    assert abs(float(sl.optim.global_norm(big)) - 1) < 1e-5 and torch.equal(
        small["w"], torch.full((4,), 0.1)
    )


def test_schedules_and_masks() -> None:
    tx = sl.optim.chain(
        sl.optim.masked(sl.optim.scale(2.0), {"a": True, "b": False}),
        sl.optim.scale_by_schedule(lambda i: float(i)),
    )
    state = tx.init({"a": torch.ones(1), "b": torch.ones(1)})
    for i in range(3):
        updates, state = tx.update({"a": torch.ones(1), "b": torch.ones(1)}, state)
        assert (updates["a"].item(), updates["b"].item()) == (2.0 * i, 1.0 * i)


def test_nothing_given_is_changed() -> None:
    tx = sl.optim.adamw(0.1)
    p, g = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    state = tx.init(p)
    tx.update(g, state, p)
    assert state.count == 0 and state.mu["w"].sum() == 0 and g["w"].sum() == 3 and p["w"].sum() == 3


def given(layout: str) -> Any:
    return {"w": sl.shard(torch.arange(16.0).reshape(4, 4), layout)}


@pytest.mark.parametrize("other", ["y .", ". x", "(x y) .", ". .", "x . + sum(y)"])
@pytest.mark.parametrize("name", ["apply_updates", "sgd", "adamw", "adam", "lion", "zero"])
def test_leaves_that_lie_otherwise_are_never_combined(name: str, other: str) -> None:
    """Blocks are added by position: another layout, mesh or
    pending sum would be another tensor's part.
    """
    with sl.simulate(x=2, y=2):
        params, grads = given("x ."), given(other)
        before = [t.raw.clone() for t in (params["w"], grads["w"])]
        tx = {"sgd": sl.optim.sgd(0.1, 0.9), "adamw": sl.optim.adamw(0.1), "adam": sl.optim.adam(0.1), "lion": sl.optim.lion(0.1, weight_decay=0.1),
              "zero": sl.optim.zero(sl.optim.adamw(0.1), "y")}.get(name)  # fmt: skip
        if tx is None:
            with pytest.raises(sl.ShardError) as e:
                sl.optim.apply_updates(params, grads)
            names = {"sl": sl, "x": params["w"], "y": grads["w"]}
            moved = eval(e.value.fix, names)
            assert torch.equal(
                sl.unshard(sl.optim.apply_updates(names["x"], moved)),
                2 * torch.arange(16.0).reshape(4, 4),
            )
        elif not (name == "zero" and other == "x . + sum(y)"):  # which reduces it
            with pytest.raises(sl.ShardError):
                tx.update(grads, tx.init(params), params)
            if "sum" not in other and name != "zero":  # state of another layout than the gradients
                with pytest.raises(sl.ShardError):
                    tx.update(params, tx.init(given(other)), params)
        assert all(
            torch.equal(a, t.raw) for a, t in zip(before, (params["w"], grads["w"]), strict=True)
        )


def test_leaves_of_other_meshes_sizes_and_kinds_are_refused_with_a_fix() -> None:
    with sl.simulate(x=2, y=2):
        x = given("x .")["w"]
        with sl.simulate(x=2, y=2):
            far = given("x .")["w"]
        for y, says in ((far, "different meshes"), (torch.ones(4, 4), "not both sharded")):
            with pytest.raises(sl.ShardError, match=says) as e:
                sl.optim.apply_updates(x, y)
            sl.optim.apply_updates(x, eval(e.value.fix))
        with pytest.raises(sl.ShardError, match="not both sharded") as e:
            sl.optim.apply_updates(torch.ones(4, 4), x)
        y, x = x, torch.ones(4, 4)
        sl.optim.apply_updates(eval(e.value.fix), y)
        with pytest.raises(sl.ShardError, match="different sizes"):
            sl.optim.apply_updates(y, sl.shard(torch.ones(8, 4), "x ."))


def test_set_to_zero_holds_what_a_mask_passes_on() -> None:
    mask, rest = {"a": True, "b": False}, {"a": False, "b": True}
    tx = sl.optim.chain(
        sl.optim.masked(sl.optim.sgd(0.5), mask), sl.optim.masked(sl.optim.set_to_zero(), rest)
    )
    p = {"a": torch.ones(2), "b": torch.ones(2)}
    updates, _ = tx.update(p, tx.init(p), p)
    new = sl.optim.apply_updates(p, updates)
    assert torch.equal(new["a"], torch.full((2,), 0.5)) and torch.equal(new["b"], p["b"])


def test_masks_and_clipping_pass_over_frozen_leaves() -> None:
    p = {"a": torch.ones(2).requires_grad_(), "b": torch.ones(2)}
    g = {"a": torch.full((2,), 3.0), "b": None}
    tx = sl.optim.chain(
        sl.optim.clip_by_global_norm(1.0),
        sl.optim.masked(sl.optim.adamw(0.1), {"a": True, "b": True}),
    )
    updates, _ = tx.update(g, tx.init(p), p)
    new = sl.optim.apply_updates(p, updates)
    assert (
        updates["b"] is None
        and new["b"] is p["b"]
        and new["a"].requires_grad
        and not new["b"].requires_grad
    )


def test_step_counts_pass_through_placing() -> None:
    with sl.simulate(x=2):
        tx = sl.optim.chain(sl.optim.adamw(0.1), sl.optim.scale_by_schedule(lambda i: 1.0))
        tree = {
            "params": {"w": torch.ones(4)},
            "state": tx.init({"w": torch.ones(4)}),
            "step": 3,
            "none": None,
        }
        placed = sl.shard(tree, "x")
        back = sl.unshard(sl.reshard(placed, "."))
        assert back["step"] == 3 and back["none"] is None and back["state"][0].count == 0
        assert torch.equal(back["params"]["w"], torch.ones(4)) and back["state"][0].mu[
            "w"
        ].shape == (4,)


def test_mistakes_are_named() -> None:
    tx = sl.optim.adamw(0.1)
    p = {"w": torch.ones(3)}
    state = tx.init(p)
    with pytest.raises(sl.ShardError, match="adamw needs the parameters"):
        tx.update(p, state)
    with pytest.raises(sl.ShardError, match="the trees differ at v, w"):
        tx.update({"v": torch.ones(3)}, state, p)
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="still pending"):
        sl.optim.global_norm(sl.shard(torch.ones(2), ". + sum(x)"))
