"""Trees that meet must be alike, and what differs is named."""

from typing import Any

import optree
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.optim.trees import names_of
from tests.strategies import examples


def weight(layout: str) -> Any:
    return {"w": sl.shard(torch.arange(16.0).reshape(4, 4), layout)}


@pytest.mark.parametrize("other", ["y .", ". x", "(x y) .", ". .", "x . + sum(y)"])
@pytest.mark.parametrize("name", ["apply_updates", "sgd", "adamw", "adam", "lion", "zero"])
def test_leaves_that_lie_otherwise_are_never_combined(name: str, other: str) -> None:
    """Blocks are added by position: another layout, mesh or
    pending sum would be another tensor's part.
    """
    with sl.simulate(x=2, y=2):
        params, grads = weight("x ."), weight(other)
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
                    tx.update(params, tx.init(weight(other)), params)
        assert all(
            torch.equal(a, t.raw) for a, t in zip(before, (params["w"], grads["w"]), strict=True)
        )


def test_leaves_of_other_meshes_sizes_and_kinds_are_refused_with_a_fix() -> None:
    with sl.simulate(x=2, y=2):
        x = weight("x .")["w"]
        with sl.simulate(x=2, y=2):
            far = weight("x .")["w"]
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


KEYS = st.sampled_from(
    ["h", "h.1", "h.1.w", "1", "10", "h.", ".h", "", ".", "a b", "a/b", "a\\.b", "a\\", "'a'", "'a'.b",
     "é.ß", "~1", 0, 1, "0", "mu", "count"]
)  # fmt: skip
TREES = st.recursive(
    st.just(None), lambda of: st.dictionaries(KEYS, of, min_size=1, max_size=5), max_leaves=12
)


@examples(150)
@given(TREES)
@example({"a": {"b": None}, "a.b": None})
@example({"x": {"a": {"b": None}, "a.b": None}, "x.'a'": {"b": None}})
@example({"": None})
@example({0: None, "0": None})
def test_no_two_leaves_of_a_tree_have_one_name(tree: Any) -> None:
    paths, _, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    names = names_of(paths)
    assert len(set(names)) == len(names)
    plain = [".".join(map(str, p)) for p in paths]
    ends = any(p[-1:] == ("",) for p in paths)  # empty keys add nothing
    assert names == plain or len(set(plain)) < len(plain) or ends
    # and a tree in a tree keeps the names that it has by itself
    inner = names_of([("mu", *p) for p in paths])
    assert inner == [f"mu.{n}" if n else "mu" for n in names]
