"""The index of a tree: the same while the tree is, and never another tree's."""

from typing import Any

import pytest
import torch

import shardlib as sl


@pytest.mark.parametrize(
    "other", [("y .", {"data": 2, "x": 2, "y": 2}), ("x .", {"data": 4, "x": 2, "y": 1})]
)
def test_state_made_for_other_places_is_refused(other: Any) -> None:
    """Blocks of one size lie end to end alike, whatever they are blocks of."""
    layout, axes = other
    tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    with sl.simulate(data=2, x=2, y=2):
        state = tx.init({"w": sl.shard(torch.arange(16.0).reshape(4, 4), "x .")})
    with sl.simulate(**axes):
        params = {"w": sl.shard(torch.arange(16.0).reshape(4, 4), layout)}
        with pytest.raises(sl.ShardError):
            tx.update({"w": params["w"] * 0 + 1}, state, params)


def test_a_bucket_holds_25_mib_at_most_unless_it_is_said() -> None:
    made = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data", 2)
    asked = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data", 2, bucket_mb=1.5)
    with sl.record(data=2):
        for tx, count, each, most in (
            (made, 40, 1 << 17, 1),  # 20 MiB
            (made, 30, 10 << 18, 15),
            (asked, 40, 1 << 17, 14),
        ):
            params = {
                f"p{i}": sl.shard(torch.empty(each, device="meta"), ".") for i in range(count)
            }
            buckets = tx.init(params).trace.index.buckets
            assert len(buckets) == most
            assert max(b.length * 4 for b in buckets) <= (25 << 20) + 128 * 4


@pytest.mark.parametrize("stage", [1, 2])
def test_a_state_is_not_taken_for_that_of_parameters_of_other_names_or_others_frozen(
    stage: int,
) -> None:
    """Though they lie at the very same places."""
    with sl.simulate(data=2):
        params = {k: sl.shard(torch.ones(4, 6), "...") for k in "abc"}
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", stage)
        state = tx.init(params)
        grads = {k: sl.shard(torch.ones(4, 6), "...") for k in "abc"}
        params, state, _ = sl.optim.step(tx, params, grads, state)
        same = {k: x.at(params["a"].place) for k, x in params.items()}
        one = {k: x.becomes(torch.ones_like(x.raw)) for k, x in same.items()}
        same, state, _ = sl.optim.step(tx, same, one, state)
        for x in same.values():
            x.requires_grad_()
        grads = {k: sl.shard(torch.ones(4, 6), "...") for k in "abc"}
        other = {f"z{k}": x for k, x in same.items()}
        with pytest.raises(sl.ShardError, match="without a, b, c; with za, zb, zc"):
            sl.optim.step(tx, other, {f"z{k}": g for k, g in grads.items()}, state)
        nested = {"a": {"b": same["a"], "c": same["b"]}, "d": same["c"]}
        with pytest.raises(sl.ShardError, match="made for other parameters"):
            sl.optim.step(tx, nested, {"a": {k: grads[k] for k in "bc"}, "d": grads["a"]}, state)
        same["b"].requires_grad_(False)
        with pytest.raises(sl.ShardError, match="without b"):
            sl.optim.step(tx, same, grads | {"b": None}, state)
        same["b"].requires_grad_()
        same, state, _ = sl.optim.step(tx, same, grads, state)
        assert state.count == 3
