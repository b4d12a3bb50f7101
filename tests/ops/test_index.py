"""Positions along split dimensions: what is picked or added is dense's, wherever blocks lie."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

SHAPE = (4, 6, 8)
LAYOUTS = ["x . .", ". y x", "(2 x) . y", "(x y) . .", "zigzag(x) y .", ". . ."]


def ids(n: int, *shape: int) -> Tensor:
    return torch.randint(-n, n, shape)


def indices() -> list[tuple[Any, ...]]:
    """One tensor or several, apart or together, with numbers, slices, None, lists and masks."""
    a, b, c = SHAPE
    return [
        (ids(a, 5),),
        (slice(None), ids(b, 3)),
        (ids(a, 4), ids(b, 4)),
        (ids(a, 4), slice(None), ids(c, 4)),
        (ids(a, 2, 3), ids(b, 3)),
        (ids(a, 4), None, slice(None), ids(c, 4)),
        (None, ids(a, 3), ids(b, 3)),
        (torch.rand(a, b) > 0.5,),
        (slice(None), torch.rand(b, c) > 0.5),
        (torch.tensor(1),),
        (torch.tensor([0, 2]), torch.tensor(1)),
        (slice(None), [0, 2], [1, 1]),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picking_by_tensors_equals_dense(layout: str) -> None:
    torch.manual_seed(0)
    with sl.simulate(x=2, y=2):
        for index in indices():
            dense = torch.randn(SHAPE, dtype=torch.float64)
            x, y = dense.clone().requires_grad_(), sl.shard(dense, layout).requires_grad_()
            want, have = x[index], y[index]
            g = torch.randn_like(want)
            want.backward(g)
            have.backward(sl.shard(g, have.sharding))
            assert torch.equal(sl.unshard(have), want), index
            assert torch.allclose(sl.unshard(y.grad), x.grad, atol=1e-12), index


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["x .", ". x", "x y", "(2 x) .", "zigzag(x) y"])
def test_adding_at_positions_moves_nothing(layout: str, in_place: bool) -> None:
    torch.manual_seed(0)
    dense, rows, at = (
        torch.randn(8, 4).double(),
        torch.randn(6, 4).double(),
        torch.randint(0, 8, (6,)),
    )
    with sl.simulate(x=2, y=2):
        a, b = dense.clone().requires_grad_(), rows.clone().requires_grad_()
        c, d = sl.shard(dense, layout).requires_grad_(), sl.shard(rows, "...").requires_grad_()
        add = Tensor.index_add_ if in_place else Tensor.index_add
        with sl.trace() as moved:
            have = add(c * 1, 0, at, d, alpha=2)
        want = add(a * 1, 0, at, b, alpha=2)
        g = torch.randn_like(want)
        want.backward(g)
        have.backward(sl.shard(g, have.sharding))
        assert moved.bytes == 0
        for mine, theirs in ((have, want), (c.grad, a.grad), (d.grad, b.grad)):
            assert torch.allclose(sl.unshard(mine), theirs, atol=1e-12)


@pytest.mark.parametrize("layout", ["x y", ". y", "x ."])
def test_every_rank_learns_where_a_condition_holds(layout: str) -> None:
    dense = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with sl.simulate(x=2, y=2):
        x = sl.shard(dense, layout)
        assert torch.equal(sl.unshard((x > 0).nonzero()), (dense > 0).nonzero())
        found = zip(torch.where(x > 0), torch.where(dense > 0), strict=True)
        assert all(torch.equal(sl.unshard(mine), theirs) for mine, theirs in found)
        assert torch.equal(
            sl.unshard(F.one_hot((x > 0).long(), 3)), F.one_hot((dense > 0).long(), 3)
        )


@pytest.mark.parametrize(
    "index", [(0,), (-1,), (Ellipsis, -1), (slice(None), 2), (1, slice(None), 3), (None, 1, 2, 3)]
)
def test_a_number_picks_from_the_rank_that_has_it(index: tuple[Any, ...]) -> None:
    """One slice is summed; it is no view, and writing through it is refused."""
    dense = torch.randn(4, 6, 8, dtype=torch.float64)
    with sl.simulate(x=2, y=2):
        x, y = dense.clone().requires_grad_(), sl.shard(dense, "x . zigzag(y)").requires_grad_()
        want, have = x[index], y[index]
        g = torch.randn_like(want)
        want.backward(g)
        have.backward(sl.shard(g, have.sharding))
        assert torch.equal(sl.unshard(have), want) and torch.equal(sl.unshard(y.grad), x.grad)
        if index != (slice(None), 2):  # along a whole dimension it is a view
            z = sl.shard(dense, "x . zigzag(y)")
            with pytest.raises(sl.errors.Unsupported, match="would share memory in torch"):
                z[index].zero_()


@pytest.mark.parametrize("layout", [". x .", "x . .", ". . x", "... "])
def test_a_position_in_a_tensor_without_dimensions_counts_from_the_end_too(layout: str) -> None:
    dense, at = torch.randn(4, 6, 8), torch.tensor([-1, 2])
    with sl.simulate(x=2), sl.implicit():
        x, i = sl.shard(dense, layout), sl.shard(at, ".")
        assert torch.equal(sl.unshard(x[i[0], i[0], 3:]), dense[-1, -1, 3:])
        assert torch.equal(sl.unshard(x[i[0], :, i[1]]), dense[-1, :, 2])


@pytest.mark.parametrize("number", [True, False])
def test_one_number_has_its_position_in_a_list_of_one(number: bool) -> None:
    t = torch.tensor(number)
    with sl.simulate(x=2):
        (found,) = torch.where(sl.shard(t, "..."))
        assert torch.equal(sl.unshard(found), *torch.where(t))
