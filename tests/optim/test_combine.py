"""Transforms one after another."""

import torch

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import close
from tests.optim.cases import PARAMS, gradients, steps


def test_schedules_and_masks() -> None:
    tx = sl.optim.chain(
        sl.optim.masked(sl.optim.scale(2.0), {"a": True, "b": False}),
        sl.optim.scale_by_schedule(lambda i: float(i)),
    )
    state = tx.init({"a": torch.ones(1), "b": torch.ones(1)})
    for i in range(3):
        updates, state = tx.update({"a": torch.ones(1), "b": torch.ones(1)}, state)
        assert (updates["a"].item(), updates["b"].item()) == (2.0 * i, 1.0 * i)


def test_a_chain_in_place_is_the_pure_chain() -> None:
    tx = sl.optim.chain(
        sl.optim.clip_by_global_norm(0.5), sl.optim.clip_by_value(0.1), sl.optim.lamb(0.05)
    )
    want = steps(tx, PARAMS, 4)
    params = {k: p.clone() for k, p in PARAMS.items()}
    state = tx.init(params)
    for i in range(4):
        state = run_in_place(tx, gradients(params, i), state, params, Step())
    for k in want:
        close(params[k], want[k], 1e-12)


def test_a_chain_keeps_apart_what_any_of_its_parts_does() -> None:
    tx = sl.optim.chain(
        sl.optim.masked(sl.optim.scale(2.0), "w"),
        sl.optim.partition(
            {"a": sl.optim.scale(1.0), "b": sl.optim.scale(2.0)}, [("b", "b"), ("*", "a")]
        ),
    )
    assert tx.groups is not None and tx.groups(PARAMS) == [("off", "b"), ("off", "a"), ("on", "a")]
    assert sl.optim.chain(sl.optim.scale(2.0)).groups is None
