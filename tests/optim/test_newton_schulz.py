"""Singular values end near one, singular vectors stay, and blocks give what the whole gives."""

import pytest
import torch

import shardlib as sl
from shardlib.optim.matrix_owners import flops
from shardlib.optim.muon import on_blocks, orthogonal


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(6, 6), (4, 8), (8, 4), (3, 4, 6)])
def test_singular_values_are_near_one_and_vectors_are_kept(shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    y = orthogonal(x)
    assert y.shape == x.shape
    values = torch.linalg.svdvals(y)
    assert bool(((values > 0.6) & (values < 1.3)).all())
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    turned = u.mT @ y @ vh.mT  # diagonal where singular vectors are those of x
    assert (turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-10


def test_a_transposed_matrix_is_transposed_and_scale_does_not_matter() -> None:
    x = drawn(4, 6)
    assert torch.allclose(orthogonal(x.mT), orthogonal(x).mT, atol=1e-12)
    assert torch.allclose(orthogonal(1000 * x), orthogonal(x), atol=1e-6)


@pytest.mark.parametrize("layout", ["x y", "x .", ". y", "(x y) ."])
def test_blocks_give_what_the_whole_gives(layout: str) -> None:
    x = drawn(8, 8)
    with sl.simulate(x=2, y=2):
        y = on_blocks(sl.shard(x, layout))
        assert torch.allclose(sl.unshard(y), orthogonal(x), atol=1e-10)
    assert str(y.sharding) == layout


def test_the_narrow_side_is_the_one_that_is_squared() -> None:
    assert flops(4, 64) == flops(64, 4) < flops(16, 16) * 16 and flops(8, 8, 10) == 2 * flops(
        8, 8, 5
    )
