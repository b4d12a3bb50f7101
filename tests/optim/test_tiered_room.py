"""What needs bytes of the device has others give way: incomplete gradients, and blocks of other models."""

import gc
import time
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.optim.test_tiered import MESHES, RULES, WIDE, Blocks, block_bytes, clipped, least, model

o = sl.optim


def alternating(tiers: Any, count: int = 3) -> list[float]:
    """Losses of two models of 4 and 5 blocks, trained in turn."""
    runs, losses = [], []
    for i in range(2):
        f, params = model(4 + i)
        tx = o.zero(clipped(), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        runs.append([f, tx, parts, tx.init(parts)])
    for _ in range(count):
        for run in runs:
            f, tx, parts, state = run
            loss, grads = sl.value_and_grad(f, into=tx)(parts)
            run[2], run[3], _ = o.step(tx, parts, grads, state)
            losses.append(loss.item())
            del grads
    return losses


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("more", [0, 2])
def test_two_models_in_one_device_drop_each_others_chunks(mesh: Any, more: int) -> None:
    """Bit-equal where the device holds the least that one of them needs, and a little more."""
    with sl.simulate(**mesh):
        budget = least(mesh) + more * block_bytes(mesh)
        tiers = o.Tiers(device=budget)
        assert alternating(tiers) == alternating(None)
        assert tiers.ledger.peak["device"] <= budget
        assert emptied(tiers.ledger)


def emptied(ledger: Any, seconds: float = 20.0) -> bool:
    """Whether nothing is held once the updates that were posted have ended."""
    until = time.monotonic() + seconds
    while any(held.total() for held in ledger.held.values()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return not any(held.total() for held in ledger.held.values())


def twice(tiers: Any) -> list[float]:
    """Losses of a model that its loss reads twice, with frozen parameters among the others."""
    torch.manual_seed(0)
    apply, params = sl.parallelize(Blocks(4), RULES, inputs={"x": "data ."})
    for name, p in params.items():
        p.requires_grad_("up.weight" not in name)
    tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
    parts = tx.shard(params)
    state, losses = tx.init(parts), []
    x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        vg = sl.value_and_grad(lambda p: apply(p, x) + apply(p, x * 2), into=tx)
        loss, grads = vg(parts)
        parts, state, _ = o.step(tx, parts, grads, state)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 1, "x": 1}])
def test_incomplete_gradients_give_way_to_a_chunk(mesh: Any) -> None:
    """A loss that reads blocks twice holds gradients of all of them, unless bytes are needed."""
    with sl.simulate(**mesh):
        want = twice(None)
        with pytest.raises(sl.ShardError, match="needs") as refused:
            twice(o.Tiers(device=1))
        least = int(str(refused.value).split("device=")[-1].strip(" )"))
        assert twice(o.Tiers(device=least)) == want
