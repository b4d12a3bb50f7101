"""Trees that meet must be alike, and what differs is named."""

from typing import Any

import pytest
import torch

import shardlib as sl


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
        tx.update({"w": sl.shard(torch.ones(3), ". + sum(x)")}, state, p)
