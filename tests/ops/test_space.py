"""Convolutions of channels apart: samples and channels may be split, nothing moves."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.ops.cases import SPACE, run_on_meshes


@pytest.mark.parametrize("layout", ["x y", "x .", ". y", ". (x y)"])
@pytest.mark.parametrize("space", [1, 2])
def test_channels_apart_are_rows(space: int, layout: str) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [(4, 8, *[6] * space), (8, 1, *[3] * space), (8,)]
    x, w, b = (torch.randn(s, dtype=torch.float64, generator=draw).requires_grad_() for s in sizes)
    conv = getattr(F, f"conv{space}d")
    want = conv(x, w, b, padding=2, groups=8)
    cotangent = torch.randn(want.shape, dtype=torch.float64, generator=draw)
    dense = torch.autograd.grad((want * cotangent).sum(), (x, w, b))
    channels = str(sl.Layout.parse(layout).dims[1])
    with sl.simulate(x=2, y=2):
        places = (f"{layout} ...", f"{channels} ...", channels)
        mine = [
            sl.shard(t.detach(), p).requires_grad_() for t, p in zip((x, w, b), places, strict=True)
        ]
        with sl.trace() as moved:
            out = conv(*mine, padding=2, groups=8)
        assert not moved.bytes and str(out.sharding) == layout + " ." * space
        grads = torch.autograd.grad((out * sl.shard(cotangent, out.sharding)).sum(), mine)
        assert (sl.unshard(out) - want).abs().max() < 1e-12
        for got, wanted in zip(grads, dense, strict=True):
            assert (sl.unshard(got) - wanted).abs().max() < 1e-12


@pytest.mark.parametrize("name", SPACE)
def test_convolutions_of_patches_equal_dense(name: str) -> None:
    run_on_meshes(name)
