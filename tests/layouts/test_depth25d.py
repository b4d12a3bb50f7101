"""A layer on planes: Tesseract copies weights over depth, Solomonik and Demmel copy nothing."""

import math

import pytest
import torch

import shardlib as sl

L = sl.Layout25D("x", "y", "d")
MESH = {"x": 2, "y": 2, "d": 2}


def test_activations_come_back_in_their_own_layout() -> None:
    with sl.simulate(**MESH):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), L.act)
        w = sl.shard(torch.randn(8, 8, dtype=torch.float64), L.weight)
        y = x @ w
        assert torch.allclose(sl.unshard(y), sl.unshard(x) @ sl.unshard(w))
    assert y.sharding == L.act.resolve(2)


@pytest.mark.parametrize(
    ("layout", "copies"),
    [(L.act, 1), (L.weight, 2), (L.deep_act, 1), (L.deep_weight, 1), (L.deep_out, 1)],
)
def test_only_tesseracts_weights_are_copied(layout: sl.Layout, copies: int) -> None:
    block = layout.resolve(2).local_shape((8, 8), MESH)
    assert math.prod(block) * math.prod(MESH.values()) == copies * 64


def test_a_contraction_over_depth_is_scattered_over_the_rows() -> None:
    with sl.simulate(**MESH):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), L.deep_act)
        w = sl.shard(torch.randn(8, 8, dtype=torch.float64), L.deep_weight)
        y = sl.matmul(x, w, out=L.deep_out)
        assert torch.allclose(sl.unshard(y), sl.unshard(x) @ sl.unshard(w))
