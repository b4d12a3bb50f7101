"""Keys are gathered whole or a few heads at a time: the same bytes, in more messages."""

import pytest
import torch

import shardlib as sl
from shardlib.testing import dense_attention


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_fewer_heads_at_once_are_more_messages_and_the_same_bytes(heads: int) -> None:
    x = torch.randn(3, 1, 4, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for at_once in (heads, None):
        engine = sl.attention.AllGather() if at_once is None else sl.attention.AllGather(at_once)
        with sl.simulate(s=4):
            q, k, v = (sl.shard(y, sl.Ring("s", 2)) for y in x)
            with sl.trace() as t:
                out = sl.ring_attention(q, k, v, algorithm=engine)
        found[at_once] = t
        assert torch.allclose(sl.unshard(out), dense_attention(*x, sl.masks.Full())[0], atol=1e-12)
    gathers = {n: [e for e in t.events if e.kind == "all_gather"] for n, t in found.items()}
    assert sum(e.bytes for e in gathers[heads]) == sum(e.bytes for e in gathers[None])
    assert sum(e.messages for e in gathers[heads]) * heads == 4 * sum(
        e.messages for e in gathers[None]
    )
