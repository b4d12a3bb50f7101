"""What a step was given raises afterwards, whoever holds it, and how ever it lay in its tree."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import optree
import pytest
import torch

import shardlib as sl
from shardlib.optim.step import GivenUp, hand_over
from shardlib.tensor import Facts
from tests.ops.cases import r


class Pair(NamedTuple):
    one: Any
    two: Any


def fresh(n: int = 3) -> dict[str, Any]:
    return {f"w{i}": sl.shard(r(4, 6, seed=i).float(), "x .") for i in range(n)}


def given_up(x: Any) -> bool:
    with pytest.raises(sl.ShardError, match="given up"):
        _ = x + 1
    return isinstance(x, GivenUp)


def test_a_value_that_its_dict_alone_holds_goes_over_and_its_dict_keeps_none() -> None:
    with sl.simulate(x=2):
        params, state = fresh(), Pair(3, fresh())
        ids = [[id(x) for x in d.values()] for d in (params, state.two)]
        memory = [x.raw.data_ptr() for x in params.values()]
        new, after = hand_over(params, {}, state, state)
        assert [[id(x) for x in d.values()] for d in (new, after.two)] == ids
        assert [x.raw.data_ptr() for x in new.values()] == memory and after.one == 3
        assert new is not params and list(new) == list(params)
        assert all(given_up(x) for d in (params, state.two) for x in d.values())


def test_a_value_that_is_held_elsewhere_raises_there() -> None:
    with sl.simulate(x=2):
        params, state = fresh(), Pair(fresh(), 0)
        kept, copied = params["w1"], dict(state.one)
        new, after = hand_over(params, {}, state, state)
        assert given_up(kept) and all(map(given_up, copied.values()))
        assert all(map(given_up, params.values()))
        for tree in (new, after.one):
            assert all(
                type(x) is sl.ShardedTensor and x.raw.shape == (2, 2, 6) for x in tree.values()
            )


@pytest.mark.parametrize("hold", [False, True])
def test_what_was_made_of_a_value_stays_behind(hold: bool) -> None:
    with sl.simulate(x=2):
        params = fresh()
        for i, x in enumerate(params.values()):
            x.facts, x.mine, x._is_param = Facts(), i, True
        kept = list(params.values()) if hold else []
        new, _ = hand_over(params, {}, (), ())
        for x in new.values():
            assert vars(x).keys() == {"raw", "place", "_is_param"}
            assert isinstance(x, torch.nn.Parameter)
        assert all(map(given_up, kept))


@pytest.mark.parametrize("hold", [False, True])
def test_trees_of_every_kind_come_back_as_they_were(hold: bool) -> None:
    with sl.simulate(x=2):
        inner = fresh(2)
        tree = {
            "a": [fresh(1)["w0"], None, (r(3), 2.5)],
            "b": Pair(OrderedDict(z=r(2), y=fresh(1)["w0"]), inner),
            "c": {"again": inner, "empty": {}},
            "d": torch.nn.Parameter(torch.ones(2)),
        }
        before, shape = optree.tree_flatten(tree)
        values = [x if isinstance(x, float) else x.clone() for x in before]
        kept = before if hold else []
        del before
        new, after = hand_over(tree, {}, inner, inner)
        leaves, structure = optree.tree_flatten(new)
        assert structure == shape and list(new["b"].one) == ["z", "y"]
        for x, y in zip(leaves, values, strict=True):
            assert type(x) is type(y) or isinstance(x, torch.nn.Parameter)
            assert x == y if isinstance(y, float) else torch.equal(raw(x), raw(y))
        assert isinstance(new["d"], torch.nn.Parameter) and new["d"].requires_grad
        for x, y in zip(after.values(), new["b"].two.values(), strict=True):
            assert x.raw is y.raw
        for x in kept + optree.tree_leaves(tree) + list(inner.values()):
            assert isinstance(x, float) or given_up(x)


def raw(x: Any) -> torch.Tensor:
    return x.raw if isinstance(x, sl.ShardedTensor) else x


def test_a_loop_over_steps_makes_no_values_and_a_held_one_costs_only_its_dict() -> None:
    with sl.simulate(data=2):
        params = {k: sl.shard(r(64, seed=i), "...") for i, k in enumerate("abc")}
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", 2)
        state = tx.init(params)
        run = sl.value_and_grad(lambda p: sum((x**2).sum() for x in p.values()), into=tx)
        seen = []
        for _ in range(3):
            _, grads = run(params)
            params, state, _ = sl.optim.step(tx, params, grads, state)
            seen.append([id(x) for x in (*params.values(), *state.mu.values())])
            assert all(map(given_up, grads.values()))
        assert seen[0] == seen[1] == seen[2]
        held = params["a"]
        _, grads = run(params)
        params, state, _ = sl.optim.step(tx, params, grads, state)
        assert given_up(held) and id(params["b"]) != seen[0][1]
        assert [id(x) for x in state.mu.values()] == seen[0][3:]


def test_a_given_up_dict_cannot_be_stepped_again_or_copied() -> None:
    with sl.simulate(x=2):
        params, tx = fresh(), sl.optim.sgd(0.1)
        state, grads = tx.init(params), fresh()
        sl.optim.step(tx, params, grads, state)
        with pytest.raises(sl.ShardError, match="given up"):
            sl.optim.step(tx, params, fresh(), state)
        with pytest.raises(sl.ShardError, match="given up"):
            copy.deepcopy(params)
