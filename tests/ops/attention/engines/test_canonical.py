"""Canonical attention: the same bits for any number of ranks."""

import pytest
import torch

import shardlib as sl
from shardlib.layouts import Ring
from tests.ops.attention.test_op import normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_canonical_bits_hang_on_no_ring(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (normal(1, h, 200, 16, seed=h).to(dtype) for h in (4, 2, 2))
    c, found = normal(1, 4, 200, 16, seed=7).to(dtype), []
    for p, schedule in (
        (1, "contiguous"),
        (2, "zigzag"),
        (3, "striped"),
        (4, "zigzag"),
        (8, "contiguous"),
    ):
        with sl.simulate(s=p):
            lay = Ring("s", 2, schedule)
            xs = [sl.shard(x, lay, pad=True).requires_grad_() for x in (q, k, v)]
            out = sl.ring_attention(*xs, mask=sl.masks.Causal() if causal else None, canonical=True)
            (out * sl.shard(c, lay, pad=True)).sum().backward()
            found.append([sl.unshard(out), *(sl.unshard(x.grad) for x in xs)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    with sl.simulate(s=2):  # the test could tell: another algorithm's bits do differ
        lay = Ring("s", 2)
        out = sl.ring_attention(
            *(sl.shard(x, lay) for x in (q, k, v)), mask=sl.masks.Causal() if causal else None
        )
    assert not torch.equal(sl.unshard(out), found[0][0])
