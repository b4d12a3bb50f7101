"""Ids that a table has are taken, ids that it has not are refused."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.ops.cases import r

W = r(8, 6, seed=2)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("layout", ["x .", "(x y) .", "y x", ". y"])
def test_ids_at_the_edge_of_a_vocabulary_are_taken(layout: str) -> None:
    edge = ids(0, 7, 7, 0)
    with sl.simulate(x=2, y=2):
        got = F.embedding(sl.shard(edge, "."), sl.shard(W, layout))
        assert torch.equal(sl.unshard(got), F.embedding(edge, W))
        loss = F.cross_entropy(
            sl.shard(W.T.contiguous(), ". (x y)")[:4], sl.shard(ids(0, 7, -100, 3), ".")
        )
        assert torch.allclose(sl.unshard(loss), F.cross_entropy(W.T[:4], ids(0, 7, -100, 3)))


def test_positions_out_of_range_are_refused() -> None:
    with sl.simulate(x=2), pytest.raises(sl.errors.BadArgument, match="out of range"):
        sl.shard(torch.zeros(4, 2), "x .")[torch.tensor([0, 4])]
