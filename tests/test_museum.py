"""Where torch is silently wrong, shardlib is right or loud (each was reproduced on torch 2.13)."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl


def test_checkpoint_recomputes_with_the_same_rule(pool: Any) -> None:
    """A function mode took another matmul in the recomputation: gradients swapped, silently."""
    assert max(pool.run(_checkpointed, x=2, y=2)) < 1e-12


def _checkpointed() -> float:
    a, b = (
        torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in (1, 2)
    )
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    (x @ w).square().sum().backward()
    gaps = []
    p, q = sl.shard(a, "x y").requires_grad_(), sl.shard(b, "x y").requires_grad_()
    checkpoint(lambda s, t: s @ t, p, q, use_reentrant=False).square().sum().backward()
    gaps += [(sl.unshard(p.grad) - x.grad).abs().max(), (sl.unshard(q.grad) - w.grad).abs().max()]
    mesh = sl.current_mesh().device_mesh
    p, q = (distribute_tensor(t, mesh, [Shard(0), Shard(1)]).requires_grad_() for t in (a, b))
    with sl.dtensor.rules():
        checkpoint(lambda s, t: s @ t, p, q, use_reentrant=False).square().sum().backward()
    gaps += [
        (p.grad.full_tensor() - x.grad).abs().max(),
        (q.grad.full_tensor() - w.grad).abs().max(),
    ]
    return float(max(gaps))


def test_broadcast_from_another_root_over_a_strided_axis() -> None:
    """torch's LocalTensorMode gave 1 1 1 1 where 2 3 2 3 is right."""
    with sl.simulate(x=2, y=2):
        rank = sl.axis_index(("x", "y"))
        assert sl.collectives.pbroadcast(rank, "x", root=1).ranks.tolist() == [2, 3, 2, 3]
        assert sl.collectives.pbroadcast(rank, "y", root=1).ranks.tolist() == [1, 1, 3, 3]


def test_a_branch_on_the_rank_is_refused_under_simulate() -> None:
    """One side was taken for all ranks, without complaint."""
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="different values"):
        if sl.axis_index("x") == 0:
            pass


def test_simulated_ranks_come_in_rank_order() -> None:
    with sl.simulate(x=2, y=3):
        assert sl.axis_index(("x", "y")).ranks.tolist() == list(range(6))
        assert sl.axis_index(("y", "x")).ranks.tolist() == [0, 2, 4, 1, 3, 5]
