"""Transforms made of transforms."""

import torch

import shardlib as sl


def test_schedules_and_masks() -> None:
    tx = sl.optim.chain(
        sl.optim.masked(sl.optim.scale(2.0), {"a": True, "b": False}),
        sl.optim.scale_by_schedule(lambda i: float(i)),
    )
    state = tx.init({"a": torch.ones(1), "b": torch.ones(1)})
    for i in range(3):
        updates, state = tx.update({"a": torch.ones(1), "b": torch.ones(1)}, state)
        assert (updates["a"].item(), updates["b"].item()) == (2.0 * i, 1.0 * i)


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
