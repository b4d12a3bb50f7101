"""Queries go round instead of keys: cheaper where there are fewer of them."""

import torch

import shardlib as sl
from shardlib.testing import dense_attention


def test_bytes_follow_the_queries_and_not_the_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    moved = {}
    for keys in (16, 64):
        q = torch.randn(1, 2, 16, 8, dtype=torch.float64, generator=draw)
        k, v = torch.randn(2, 1, 2, keys, 8, dtype=torch.float64, generator=draw)
        with sl.simulate(s=4):
            given = [sl.shard(t, sl.Ring("s", 2)) for t in (q, k, v)]
            with sl.trace() as t:
                out = sl.ring_attention(*given, algorithm=sl.attention.PassQ())
            assert torch.allclose(
                sl.unshard(out), dense_attention(q, k, v, sl.masks.Full())[0], atol=1e-12
            )
        moved[keys] = t.bytes
    assert moved[16] == moved[64] > 0
