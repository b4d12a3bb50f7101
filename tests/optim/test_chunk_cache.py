"""The device cache loads as few chunks as its room allows, within the ledger's budget."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.tiers.schedule import Uses, loads
from tests.optim.test_tiered import (
    RULES,
    WIDE,
    Blocks,
    block_bytes,
    clipped,
    least,
    model,
    run,
)

o = sl.optim


@pytest.mark.parametrize("count", [8, 12])
@pytest.mark.parametrize("data", [1, 2])
def test_a_step_loads_2_l_minus_c_blocks(count: int, data: int) -> None:
    mesh = {"data": data, "x": 1}
    part = block_bytes(mesh)
    # gathered and sent: two of each, and what a sum is received in
    beside = 2 * part if data == 1 else 2 * (2 * part) + 2 * (2 * 2 * part + part)
    for room in (2, 3, 4, count - 1, count):
        with sl.simulate(**mesh):
            tiers = o.Tiers(device=beside + room * part)
            found = run(o.adamw(0.01), tiers, count)
        assert found["loads"] == [2 * count - room] * 3, room
        assert tiers.ledger.peak["device"] <= beside + room * part


def test_a_step_that_reads_otherwise_goes_on_by_demand() -> None:
    """A use that was left out, or that is new, moves the position to the next such use."""
    uses = Uses(["a", "b", "c", "c", "b", "a"])
    assert [uses.find(c, at) for c, at in (("a", -1), ("c", 0), ("x", 2), ("a", 2))] == [0, 2, 2, 5]


def test_what_is_read_is_the_row_as_it_is_now() -> None:
    """A copy of a row that was changed elsewhere is not used."""
    with sl.simulate(data=1, x=1):
        f, params = model(2)
        parts = o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers()).shard(params)
        with torch.no_grad():
            first = f(parts)
            loads = parts.cache.loads
            again = f(parts)
            assert float(again) == float(first) and parts.cache.loads == loads == 2
            for x in parts.values():
                x.raw.mul_(2.0)
            assert float(f(parts)) != float(first) and parts.cache.loads == 4


class Skipping(Blocks):
    """Blocks of which a step may leave some out."""

    def forward(self, x: Any, left_out: Any = ()) -> Any:
        for i, block in enumerate(self.h):
            if i not in left_out:
                x = block(x)
        return x.square().mean()


def skipping(tiers: Any) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Losses, and loads counted and scheduled, of steps whose order and batch change."""
    torch.manual_seed(0)
    apply, params = sl.parallelize(Skipping(8), RULES, inputs={"x": "data ."})
    tx = o.zero(clipped(), "data", 3, tiers=tiers)
    params = tx.shard(params)
    state, losses, counted, said = tx.init(params), [], [], []
    for i, left_out in enumerate([(), (), (3,), (3,), (3,), (1, 5), (1, 5), (1, 5), (), (), ()]):
        x = torch.randn(8 * (1 + i % 2), WIDE, generator=torch.Generator().manual_seed(i))
        before = params.cache.loads if tiers else 0
        vg = sl.value_and_grad(lambda p: apply(p, x, left_out), into=tx)  # noqa: B023
        loss, grads = vg(params)
        if tiers:
            cache = params.cache
            counted.append(cache.loads - before)
            said.append(len(loads(cache.uses, cache.sizes, cache.most, cache.depth) or []))
        params, state, _ = o.step(tx, params, grads, state)
        losses.append(loss)
    return losses, counted, said


@pytest.mark.parametrize("mesh", [{"data": 1, "x": 1}, {"data": 2, "x": 2}])
def test_the_schedule_is_that_of_the_last_order(mesh: dict[str, int]) -> None:
    """Bit-equal with blocks left out and other batches; loads are as scheduled at the second repeat."""
    with sl.simulate(**mesh):
        want, *_ = skipping(None)
        tiers = o.Tiers(device=least(mesh) + 2 * block_bytes(mesh))
        losses, counted, said = skipping(tiers)
        assert list(map(float, losses)) == list(map(float, want))
        repeated = [1, 4, 7, 10]
        assert [counted[i] for i in repeated] == [said[i] for i in repeated]
        # a block that is left out is not loaded
        assert counted[4] == counted[1] - 2 and counted[7] == counted[1] - 4


def measured(rates: list[float], depth: int | None = None) -> int:
    """The depth after some steps, by rank at a link of its own."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    tiers = o.Tiers(rate=rates[rank], depth=depth)
    f, params = model(16)
    tx = o.zero(o.sgd(0.1), "data", 3, tiers=tiers)
    params = tx.shard(params)
    state = tx.init(params)
    for _ in range(4):
        _, grads = sl.value_and_grad(f)(params)
        params, state, _ = o.step(tx, params, grads, state)
    return params.cache.depth


def test_the_depth_is_measured_unless_it_is_given() -> None:
    """A load that takes 20 ms, among uses that take about 2."""
    with sl.simulate(data=1, x=1):
        part = block_bytes({"data": 1, "x": 1})
        assert measured([part / 0.02]) > 2
        assert measured([part / 0.02], 1) == 1


def test_the_depth_is_equal_on_all_ranks(pool: Any) -> None:
    found = pool.run(measured, [1e12, 1e12, 2e5, 1e12], data=4, x=1)
    assert len(set(found)) == 1 and found[0] > 2
