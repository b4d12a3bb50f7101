"""Two rounds: scores by keys, then outputs by values; all scores are held, whatever the mask."""

import torch

import shardlib as sl
from shardlib.testing import dense_attention


def test_keys_then_values_go_round_and_the_mask_saves_nothing() -> None:
    x = torch.randn(3, 1, 2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = []
    for mask in (sl.masks.Full(), sl.masks.Causal()):
        with sl.simulate(s=4):
            q, k, v = (sl.shard(t, sl.Ring("s", 2)) for t in x)
            with sl.trace() as t:
                out = sl.ring_attention(q, k, v, mask=mask, algorithm=sl.attention.RSA())
            assert torch.allclose(sl.unshard(out), dense_attention(*x, mask)[0], atol=1e-12)
        moved.append(t.bytes)
    block = 1 * 2 * 4 * 8 * 8  # bytes of a rank's keys
    assert moved == [2 * 3 * block] * 2
