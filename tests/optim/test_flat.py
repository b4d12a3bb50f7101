"""Parameters that are views of flat memory."""

import pytest
import torch

import shardlib as sl
from shardlib.optim.buckets import Buckets
from shardlib.optim.flat import adopt, own, put_back
from tests.ops.cases import r


def laid(axes: dict[str, int]) -> tuple[list[sl.ShardedTensor], Buckets, sl.Mesh]:
    mesh = sl.simulate(**axes)
    with mesh:
        params = {
            "a": sl.shard(r(8, 12), "x ."),
            "b": sl.shard(r(7, seed=1), ".").requires_grad_(),
            "s": sl.shard(r(seed=2), ""),
            "z": sl.shard(r(0, 3, seed=2), "..."),
        }
        for p in params.values():
            p.requires_grad_()
        state = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data").init(params)
    return list(params.values()), state.trace, mesh


def test_adopted_parameters_are_views_that_keep_their_values_and_flags() -> None:
    leaves, trace, mesh = laid({"data": 3, "x": 2})
    before = [sl.unshard(x).clone() for x in leaves]
    flats = adopt(leaves, trace.index, mesh)
    assert all(torch.equal(sl.unshard(x), b) for x, b in zip(leaves, before, strict=True))
    assert all(x.raw.requires_grad and x.raw.is_leaf for x in leaves)
    for flat in flats:
        flat.mul_(2)
    assert all(torch.equal(sl.unshard(x), 2 * b) for x, b in zip(leaves, before, strict=True))
    again = adopt(leaves, trace.index, mesh)  # nothing is moved a second time
    assert [f.data_ptr() for f in again] == [f.data_ptr() for f in flats]
    moved = [x.becomes(x.raw.clone()) for x in leaves]
    other = adopt(moved, trace.index, mesh)
    assert not {f.data_ptr() for f in other} & {f.data_ptr() for f in flats}


def test_own_pieces_are_the_ranks_parts_in_place() -> None:
    leaves, trace, mesh = laid({"data": 3, "x": 2})
    flats = adopt(leaves, trace.index, mesh)
    mine = own(flats, trace.index, mesh)
    assert [p.shape for p in mine.pieces] == [p.shape for p in trace.pieces]
    for p in mine.pieces:
        p.fill_(5.0)
    put_back(flats, mine)
    for x in leaves:  # each element was in the piece of one rank along data, of each rank along x
        assert (x.raw == 5).sum() == x.raw.numel() / 3


def test_init_moves_parameters_and_a_graph_made_before_runs_on() -> None:
    """So that the parameters' old memory is free before the first gradients need some."""
    with sl.simulate(data=2):
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data")
        w = sl.shard(r(8, 4), "...").requires_grad_()
        loss, block, before = (w * w).sum(), w.raw, w.raw.data_ptr()
        state = tx.init({"w": w})
        assert w.raw is block and w.raw.data_ptr() != before
        loss.raw.sum().backward(retain_graph=True)
        assert torch.equal(w.raw.grad, 2 * w.raw)  # it went where it was to go
        g = w.becomes(torch.ones_like(w.raw))
        sl.optim.step(tx, {"w": w}, {"w": g}, state)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.raw.sum().backward()
