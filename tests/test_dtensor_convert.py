"""Values and gradients that go to DTensor and back, without a copy."""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardlib as sl


def test_dtensor_round_trip_is_no_copy(pool: Any) -> None:
    assert all(all(r) for r in pool.run(_dtensor_round_trips, x=2, y=2))


def _dtensor_round_trips() -> list[bool]:
    out = []
    for text in ["x y", "y x", ". y", "(x y) .", ". .", ". . + sum(x)"]:
        a = sl.shard(torch.arange(64.0).reshape(8, 8), text).requires_grad_()
        d = sl.dtensor.to_dtensor(a)
        back = sl.dtensor.from_dtensor(d)
        out += [
            d.to_local().data_ptr() == a.raw.data_ptr(),
            back.sharding == a.sharding,
            back.shape == a.shape,
        ]
        (sl.dtensor.from_dtensor(d) * 2).sum().backward() if not a.sharding.partial else None
        out.append(a.sharding.partial != () or bool((sl.unshard(a.grad) == 2).all()))
    leaf = torch.distributed.tensor.distribute_tensor(
        torch.ones(8, 8),
        sl.current_mesh().device_mesh,
        [torch.distributed.tensor.Shard(0), torch.distributed.tensor.Shard(1)],
    ).requires_grad_()
    (sl.dtensor.from_dtensor(leaf) * 3).sum().backward()
    out.append(
        leaf.grad.placements == leaf.placements and bool((leaf.grad.full_tensor() == 3).all())
    )
    moved = sl.reshard(leaf, ". x")
    out += [
        type(moved) is type(leaf),
        sl.typeof(moved) == "f32[8, 8@x]",
        bool((sl.unshard(moved) == 1).all()),
    ]
    return out


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def _refused(kind: str) -> str:
    mesh = sl.current_mesh().device_mesh
    x = distribute_tensor(_random(8, 6), mesh, [Shard(0), Replicate()])
    given = {"norm": lambda: x.norm(), "average": lambda: x.mean(), "largest": lambda: x.amax()}[
        kind
    ]()
    assert any(p.is_partial() for p in given.placements), "torch pends no reduction here any more"
    try:
        sl.dtensor.from_dtensor(given)
    except sl.errors.NotExpressible as e:
        return str(e)
    return "accepted"


@pytest.mark.parametrize(
    ("kind", "name"), [("norm", "norm"), ("average", "avg"), ("largest", "max")]
)
def test_a_pending_reduction_that_is_no_sum_is_refused_by_name(
    pool: Any, kind: str, name: str
) -> None:
    for text in pool.run(_refused, kind, x=2, y=2):
        assert name in text.splitlines()[0].lower() and "full_tensor" in text


def _crossing(layout: str, into: str) -> list[torch.Tensor]:
    """The gradient of w through the border, and the same from
    dense; ``into``: where the loss is computed.
    """
    w, x = _random(8, 4), _random(6, 8)
    dense = w.clone().requires_grad_()
    ((x @ dense).sin() * (dense.sum() + 1)).sum().backward()
    mine = sl.shard(w, layout).requires_grad_()
    mesh = sl.current_mesh()
    data = distribute_tensor(x, mesh.device_mesh, [Shard(0), Replicate()])
    if into == "dtensor":
        there = sl.dtensor.to_dtensor(mine)
        loss = ((data @ there).sin() * (there.sum() + 1)).sum()
        loss.full_tensor().backward()
        got = sl.unshard(mine.grad)
    else:
        there = distribute_tensor(
            w, mesh.device_mesh, sl.dtensor.to_dtensor(mine).placements
        ).requires_grad_()
        here, x = sl.dtensor.from_dtensor(there), sl.dtensor.from_dtensor(data)
        with sl.implicit():
            ((x @ here).sin() * (here.sum() + 1)).sum().backward()
        assert isinstance(there.grad, DTensor)
        got = there.grad.full_tensor()
    return [got, dense.grad]


@pytest.mark.parametrize(
    ("layout", "into"),
    [
        *((lay, into) for lay in (". .", ". y", "y .") for into in ("dtensor", "shardlib")),
        (". . + sum(y)", "dtensor"),
    ],
)
def test_gradients_cross_the_border(pool: Any, layout: str, into: str) -> None:
    for got, want in pool.run(_crossing, layout, into, x=2, y=2):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _deferred() -> list[torch.Tensor]:
    """A gradient left pending, through the border: it must be the sum of what the ranks hold."""
    w, x = _random(8, 4), _random(6, 8)

    def loss(v: Any) -> Any:
        there = sl.dtensor.to_dtensor(v)
        data = distribute_tensor(x, there.device_mesh, [Shard(0), Replicate()])
        return sl.dtensor.from_dtensor(
            (data @ there).sin().sum().redistribute(placements=[Replicate()] * 2)
        )

    dense = w.clone().requires_grad_()
    (x @ dense).sin().sum().backward()
    _, g = sl.value_and_grad(loss, pending="x")(sl.shard(w, ". ."))
    return [sl.unshard(g), dense.grad]


def test_a_pending_gradient_crosses_the_border_once(pool: Any) -> None:
    for got, want in pool.run(_deferred, x=2, y=2):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class _Nested(torch.Tensor):
    pass


def _of_other_blocks() -> str:
    mesh = sl.current_mesh().device_mesh
    inner = _random(4, 6).as_subclass(_Nested)
    try:
        sl.dtensor.from_dtensor(
            DTensor.from_local(inner, mesh, [Shard(0), Replicate()], run_check=False)
        )
    except sl.errors.Unsupported as e:
        return str(e)
    return "accepted"


def test_blocks_that_are_no_plain_tensors_are_refused_by_name(pool: Any) -> None:
    assert all("_Nested" in text for text in pool.run(_of_other_blocks, x=2, y=2))


def test_uneven_dtensors_are_refused(pool: Any) -> None:
    assert all(pool.run(_uneven_dtensor, x=2, y=2))


def _uneven_dtensor() -> bool:
    d = distribute_tensor(torch.ones(5, 3), sl.current_mesh().device_mesh, [Shard(0), Replicate()])
    try:
        sl.dtensor.from_dtensor(d)
    except sl.ShardError as e:
        return "size 5 does not divide" in str(e)
    return False


def test_gradients_through_to_local_are_whole(pool: Any) -> None:
    """to_local of a replicated DTensor met per-rank data: each rank kept its own gradient."""
    assert max(pool.run(_replicated_meets_split, x=2, y=2)) == 0


def _replicated_meets_split() -> float:
    mesh = sl.current_mesh().device_mesh
    w = distribute_tensor(torch.ones(4), mesh, [Replicate(), Replicate()]).requires_grad_()
    x = sl.shard(torch.arange(16.0).reshape(4, 4), "x y")
    (sl.dtensor.from_dtensor(w) * x).sum().backward()
    return float((w.grad.full_tensor() - torch.arange(16.0).reshape(4, 4).sum(0)).abs().max())
