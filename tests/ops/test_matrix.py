"""Matrices of a batch are computed where they are; a split matrix is refused, not gathered."""

import pytest
import torch

import shardlib as sl

SPD = torch.eye(3, dtype=torch.float64).expand(4, 3, 3) * 2 + 0.1
OPS = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "qr": lambda a: torch.linalg.qr(a).R,
    "svdvals": torch.linalg.svdvals,
    "triu": torch.triu,
    "matrix_exp": torch.linalg.matrix_exp,
}


@pytest.mark.parametrize("name", OPS)
def test_a_batch_is_split_and_nothing_moves(name: str) -> None:
    with sl.simulate(x=2):
        a = sl.shard(SPD, "x . .")
        with sl.trace() as t:
            out = OPS[name](a)
        assert torch.allclose(sl.unshard(out), OPS[name](SPD)) and t.bytes == 0
    assert out.sharding.axes == ("x",)


@pytest.mark.parametrize("name", ["cholesky", "inv", "det", "svdvals"])
def test_a_split_matrix_is_refused_and_gathered_where_that_is_allowed(name: str) -> None:
    whole = SPD[:, :2, :2].contiguous()
    with sl.simulate(x=2):
        a = sl.shard(whole, ". x .")
        with pytest.raises(sl.ShardError):
            OPS[name](a)
        with sl.implicit():
            assert torch.allclose(sl.unshard(OPS[name](a)), OPS[name](whole))
