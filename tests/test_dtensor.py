"""The border to DTensor: what crosses it keeps its value and its
gradient, and what cannot is refused by name.
"""

from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

import shardlib as sl


def test_a_replicated_cotangent_keeps_gradients_in_the_operands_layout(pool: Any) -> None:
    """DTensor answers (a @ b).sum().backward() with gradients that are pending on both axes."""
    for rows in pool.run(_replicated_cotangent, x=2, y=2):
        assert all(rows), rows


def _replicated_cotangent() -> list[bool]:
    mesh = sl.current_mesh().device_mesh
    where = [Shard(0), Shard(1)]
    a, b = (distribute_tensor(torch.randn(8, 8), mesh, where).requires_grad_() for _ in range(2))
    with sl.dtensor.rules(), sl.trace() as t:
        (a @ b).sum().backward()
    kinds = set(t.by_kind())
    p, q = (
        sl.dtensor.from_dtensor(a.detach()).requires_grad_(),
        sl.dtensor.from_dtensor(b.detach()).requires_grad_(),
    )
    (p @ q).sum().backward()
    return [
        list(a.grad.placements) == where, list(b.grad.placements) == where, kinds == {"pbroadcast", "preduce"},
        p.grad.sharding == p.sharding, torch.equal(p.grad.raw, a.grad.to_local()),
    ]  # fmt: skip


def test_rules_leave_no_trace_in_dtensor(pool: Any) -> None:
    """Handlers installed in a process-wide table used to be lost or left behind."""
    assert all(pool.run(_table_is_restored, x=2, y=2))


def _table_is_restored() -> bool:
    from shardlib._compat import dtensor_handlers

    before = dict(dtensor_handlers())
    with sl.dtensor.rules(), sl.dtensor.rules():
        pass
    try:
        with sl.dtensor.rules():
            raise KeyError
    except KeyError:
        pass
    return dict(dtensor_handlers()) == before
