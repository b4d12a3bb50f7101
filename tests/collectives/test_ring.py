"""Blocks round a ring: each is seen once, and their order can be restored."""

import pytest
import torch

import shardlib as sl
from shardlib.collectives.ring import cut, joined, rotate, rotate_sum


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("way", [1, -1])
def test_rotating_sees_every_block_once_and_joining_restores_their_order(p: int, way: int) -> None:
    with sl.simulate(x=p):
        whole = torch.arange(6.0 * p).reshape(2, 3 * p)
        mine = sl.collectives.pslice(whole, "x", 1)
        blocks = [block for (block,) in rotate([mine], "x", [way])]
        assert bool((joined(blocks, "x", 1, way) == whole).all())
        for t, block in enumerate(blocks):
            assert bool((cut(whole, "x", way * t, 1) == block).all())
        (scattered,) = rotate_sum([lambda back: cut(whole, "x", back, 1)], "x", [way])
        assert bool((scattered == sl.psum_scatter(whole, "x", 1)).all())
