"""Stage 3 keeps parts: of every parameter, once, and steps those that are trained."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.stage3 import Parts


def parts(stage: int = 3) -> tuple[Any, Any]:
    params: Any = {k: sl.shard(torch.ones(4, 6), "...") for k in ("h.0.w", "h.1.w", "ln")}
    for name, x in params.items():
        x.requires_grad_(name != "ln")
    tx = sl.optim.zero(sl.optim.sgd(0.5), "data", stage)
    return tx, tx.shard(params)


def test_a_group_of_modules_and_what_is_frozen_have_buckets_of_their_own() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        assert isinstance(params, Parts) and tx.shard(params) is params
        of = {params.paths[b.slots[0].leaves[0]]: params[b.name] for b in params.index}
        assert {path: x.requires_grad for path, x in of.items()} == {
            "h.0.w": True, "h.1.w": True, "ln": False,
        }  # fmt: skip


def test_a_step_changes_the_parts_that_are_trained() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        state = tx.init(params)
        grads = params.like({n: x.becomes(torch.ones_like(x.raw)) for n, x in params.items()})
        params, state, _ = sl.optim.step(tx, params, grads, state)
        with params.opened() as whole:
            found = {k: sl.unshard(x).unique().tolist() for k, x in whole.items()}
        assert found == {"h.0.w": [0.5], "h.1.w": [0.5], "ln": [1.0]}


def test_whole_parameters_and_gradients_of_others_are_refused() -> None:
    with sl.simulate(data=2):
        tx, params = parts()
        _, whole = parts(stage=2)
        with pytest.raises(sl.ShardError, match="these are whole"):
            tx.init(whole)
        with pytest.raises(sl.ShardError, match="another tree"):
            tx.update({}, tx.init(params), params)
