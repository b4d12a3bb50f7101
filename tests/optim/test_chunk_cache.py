"""The device cache loads as few chunks as its room allows, within the ledger's budget."""

import pytest
import torch

import shardlib as sl
from shardlib.tiers.schedule import Uses
from tests.optim.test_tiered import block_bytes, model, run

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
