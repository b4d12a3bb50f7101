"""Where torch is silently wrong, shardlib is right or loud (each was reproduced on torch 2.13)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardlib as sl


def test_checkpoint_recomputes_with_the_same_rule(pool: Any) -> None:
    """A function mode took another matmul in the recomputation: gradients swapped, silently."""
    assert max(pool.run(_checkpointed, x=2, y=2)) < 1e-12


def _checkpointed() -> float:
    a, b = (torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
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
    gaps += [(p.grad.full_tensor() - x.grad).abs().max(), (q.grad.full_tensor() - w.grad).abs().max()]
    return float(max(gaps))


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
    p, q = sl.dtensor.from_dtensor(a.detach()).requires_grad_(), sl.dtensor.from_dtensor(b.detach()).requires_grad_()
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


@pytest.mark.parametrize("text", ["(x y) .", "(y x) ."])
def test_uneven_nested_splits_are_refused_or_padded_right(text: str) -> None:
    """full_tensor of (5, 3) over [Shard(0), Shard(0)] gave rows 0 3 6 0 9 after a flatten."""
    x = torch.arange(15.0).reshape(5, 3)
    with sl.simulate(x=2, y=2):
        with pytest.raises(sl.ShardError, match="size 5 does not divide"):
            sl.shard(x, text)
        assert torch.equal(sl.unshard(sl.shard(x, text, pad=True)), x)


def test_uneven_dtensors_are_refused(pool: Any) -> None:
    assert all(pool.run(_uneven_dtensor, x=2, y=2))


def _uneven_dtensor() -> bool:
    d = distribute_tensor(torch.ones(5, 3), sl.current_mesh().device_mesh, [Shard(0), Replicate()])
    try:
        sl.dtensor.from_dtensor(d)
    except sl.ShardError as e:
        return "size 5 does not divide" in str(e)
    return False


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


def test_pending_sums_do_not_take_a_scalar() -> None:
    """partial + 1 added one per rank."""
    with sl.simulate(x=2):
        p = sl.shard(torch.ones(4), ". + sum(x)")
        with pytest.raises(sl.ShardError, match="still pending"):
            p + 1
        with pytest.raises(sl.ShardError, match="still pending"):
            F.gelu(p)
        assert sl.unshard(p * 3 + p - (-p)).tolist() == [5.0] * 4


def test_gradients_through_to_local_are_whole(pool: Any) -> None:
    """to_local of a replicated DTensor met per-rank data: each rank kept its own gradient."""
    assert max(pool.run(_replicated_meets_split, x=2, y=2)) == 0


def _replicated_meets_split() -> float:
    mesh = sl.current_mesh().device_mesh
    w = distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]).requires_grad_()
    x = sl.shard(torch.arange(16.0).reshape(4, 4), "x y")
    (sl.dtensor.from_dtensor(w) * x).sum().backward()
    return float((w.grad.full_tensor() - torch.arange(16.0).reshape(4, 4).sum(0)).abs().max())


def test_initial_values_and_dropout_do_not_depend_on_the_layout() -> None:
    """DTensor's random numbers differ by layout and number of devices (pytorch 168058)."""
    seen = []
    for axes, text in [({"x": 1}, ". ."), ({"x": 4}, "x ."), ({"x": 2, "y": 2}, "y x")]:
        torch.manual_seed(11)
        with sl.simulate(**axes):
            seen.append(sl.unshard(F.dropout(sl.shard(torch.ones(8, 8), text), 0.5)))
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
