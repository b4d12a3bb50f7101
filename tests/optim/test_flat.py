"""Parameters that are views of flat memory."""

from typing import Any

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


def test_init_moves_what_no_graph_leads_to() -> None:
    """So that the parameters' old memory is free before the first gradients need some."""
    with sl.simulate(data=2):
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data")

        def moved(read: Any) -> bool:
            w = sl.shard(r(8, 4), "...").requires_grad_()
            kept, before = read(w), w.raw.data_ptr()
            tx.init({"w": w})
            if isinstance(kept, torch.Tensor):
                kept.backward()
                assert w.raw.grad is not None  # it went where it was to go
            return w.raw.data_ptr() != before

        assert moved(lambda w: None)
        assert not moved(lambda w: (w * w).sum().raw.sum())
