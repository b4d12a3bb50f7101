"""Every public engine computes dense attention, and is one that ``ring_attention`` takes."""

import pytest
import torch

import shardlib as sl
from shardlib.testing import dense_attention

A = sl.attention
ENGINES = [A.OneWay(), A.BothWays(), A.DoubleRing(2), A.AllGather(), A.PassQ(), A.Ulysses(), A.RSA(), A.Canonical(4)]  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_an_engine_is_dense_attention(engine: object) -> None:
    x = torch.randn(3, 1, 4, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with sl.simulate(s=4):
        q, k, v = (sl.shard(t, sl.Ring("s", 2, "zigzag")) for t in x)
        out = sl.ring_attention(q, k, v, mask=sl.masks.Causal(), algorithm=engine)
        got = sl.unshard(out)
    assert torch.allclose(got, dense_attention(*x, sl.masks.Causal())[0], atol=1e-12)


def test_all_engines_are_public_and_tried() -> None:
    public = {getattr(A, n) for n in A.__all__ if isinstance(getattr(A, n), type)}
    assert public - {type(e) for e in ENGINES} == {A.Halo}, "Halo is of local windows"
