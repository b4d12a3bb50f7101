"""SUMMA: the largest matrix stays where it is."""

import torch

import shardlib as sl


def test_the_largest_matrix_stays() -> None:
    with sl.simulate(x=4, y=4):
        wide = sl.shard(torch.zeros(16, 1024), "x y")
        narrow = sl.shard(torch.zeros(1024, 16), "x y")
        notes = {
            n: m for n, m in sl.why("matmul", wide, sl.shard(torch.zeros(1024, 64), "x y")).verdicts
        }
        assert "W stays" in notes["summa"].note
        assert "Y stays" in dict(sl.why("matmul", narrow, wide).verdicts)["summa"].note
