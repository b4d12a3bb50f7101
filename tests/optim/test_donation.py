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


def test_results_are_on_the_donated_memory_and_a_states_values_move_from_its_dict() -> None:
    with sl.simulate(x=2):
        params, state = fresh(), Pair(3, fresh())
        memory = [[x.raw.data_ptr() for x in d.values()] for d in (params, state.two)]
        ids = [id(x) for x in state.two.values()]
        new, after = hand_over(params, {}, state, state)
        assert [[x.raw.data_ptr() for x in d.values()] for d in (new, after.two)] == memory
        assert [id(x) for x in after.two.values()] == ids and after.one == 3
        assert new is not params and list(new) == list(params)
        assert all(given_up(x) for d in (params, state.two) for x in d.values())


def test_a_parameter_or_gradient_that_is_held_raises_there_and_a_states_is_the_new_one() -> None:
    with sl.simulate(x=2):
        params, grads, state = fresh(), fresh(), Pair(fresh(), 0)
        kept = [*params.values(), *grads.values()]
        held = state.one["w1"]
        # gradients of an accumulation, which the next state holds
        new, after = hand_over(params, grads, state, Pair(state.one, grads))
        assert all(map(given_up, kept)) and held is after.one["w1"]
        assert all(map(given_up, [*params.values(), *grads.values(), *state.one.values()]))
        for tree in (new, after.one, after.two):
            assert all(
                type(x) is sl.ShardedTensor and x.raw.shape == (2, 2, 6) for x in tree.values()
            )


@pytest.mark.parametrize("rebuilt", [False, True])
def test_what_lies_in_two_trees_stays_one(rebuilt: bool) -> None:
    """A state that holds the parameters' own values, and one at two places or outside of a dict."""
    with sl.simulate(x=2):
        params, mine = fresh(), fresh()
        state = {"slow": dict(params), "two": mine, "again": dict(mine), "loose": (mine["w0"], 1)}
        given = {k: dict(v) if type(v) is dict else v for k, v in state.items()}
        new, after = hand_over(params, {}, state, given if rebuilt else state)
        assert all(after["slow"][k] is new[k] for k in new)
        assert all(after["two"][k] is after["again"][k] for k in new)
        assert after["loose"][0] is after["two"]["w0"] and given_up(mine["w0"])
        assert not any(isinstance(x, GivenUp) for x in optree.tree_leaves((new, after)))
        assert all(map(given_up, [x for x in optree.tree_leaves(state) if type(x) is not int]))


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


def test_a_loop_over_steps_makes_no_values_of_its_state() -> None:
    with sl.simulate(data=2):
        params = {k: sl.shard(r(64, seed=i), "...") for i, k in enumerate("abc")}
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", 2)
        state = tx.init(params)
        run = sl.value_and_grad(lambda p: sum((x**2).sum() for x in p.values()), into=tx)
        seen = []
        for _ in range(3):
            _, grads = run(params)
            params, state, _ = sl.optim.step(tx, params, grads, state)
            seen.append([id(x) for x in state.mu.values()])
            assert all(map(given_up, grads.values()))
        assert seen[0] == seen[1] == seen[2]


def run_of(tx: Any, seen: list[Any]) -> Any:
    """Return the gradients' function of a loss that notes the leaves it is called with."""

    def loss(p: Any) -> Any:
        seen.append(dict(p))
        return sum((x**2).sum() for x in p.values())

    return sl.value_and_grad(loss, into=tx)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("hold", [False, True])
def test_parameters_of_a_step_are_the_leaves_of_its_gradients_and_no_new_objects(
    stage: int, hold: bool
) -> None:
    """Whoever holds a parameter, whatever was derived from it, and in whatever order its dict is."""
    with sl.simulate(data=2):
        params = {k: sl.shard(r(64, seed=i), "...") for i, k in enumerate("cab")}
        params["b"]._is_param = True
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", stage)
        state, seen = tx.init(params), []
        run = run_of(tx, seen)
        memory = []
        for _ in range(3):
            _, grads = run(params)
            old = list(params.values()) if hold else []
            params["a"].mine = 1
            params, state, _ = sl.optim.step(tx, params, grads, state)
            assert list(params) == ["c", "a", "b"] and all(map(given_up, old))
            assert all(params[k] is seen[-1][k] for k in params)
            assert [len(vars(params[k])) for k in params] == [2, 2, 3]
            assert not any(x.requires_grad for x in params.values())
            memory.append([x.raw.data_ptr() for x in (*params.values(), *state.mu.values())])
            assert all(map(given_up, grads.values()))
        assert memory[0] == memory[1] == memory[2]


@pytest.mark.parametrize("how", ["others", "tree", "again", "copied"])
def test_leaves_of_other_parameters_are_left_alone(how: str) -> None:
    with sl.simulate(data=2):
        tx, seen = sl.optim.zero(sl.optim.adamw(0.1), "data", 2), []
        mine = {k: sl.shard(r(64, seed=i), "...") for i, k in enumerate("ab")}
        _, grads = run_of(tx, seen)(mine)
        params = {k: x.clone() for k, x in mine.items()}
        params = {
            "again": {**params},
            "copied": mine,
            "others": params,
            "tree": {"a": params["a"], "b": mine["b"]},
        }[how]
        if how == "again":
            grads = grads.like(grads)
        if how == "copied":
            grads = copy.deepcopy(grads)
            assert "leaves" not in vars(grads)
        new, _, _ = sl.optim.step(tx, params, grads, tx.init(params))
        assert not any(new[k] is seen[0][k] for k in new)
        assert all(type(x) is sl.ShardedTensor for x in seen[0].values())
        assert all(map(given_up, params.values()))


def test_a_given_up_dict_cannot_be_stepped_again_or_copied() -> None:
    with sl.simulate(x=2):
        params, tx = fresh(), sl.optim.sgd(0.1, momentum=0.9)
        state, grads = tx.init(params), fresh()
        sl.optim.step(tx, params, grads, state)
        with pytest.raises(sl.ShardError, match="given up"):
            sl.optim.step(tx, params, fresh(), state)
        with pytest.raises(sl.ShardError, match="given up"):
            sl.optim.step(tx, fresh(), fresh(), state)
        with pytest.raises(sl.ShardError, match="given up"):
            copy.deepcopy(params)
