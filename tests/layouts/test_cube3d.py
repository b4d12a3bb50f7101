"""On a cube every rank holds an equal share of every matrix, and two layers come back."""

import math

import torch

import shardlib as sl

L = sl.Layout3D("x", "y", "z")
MESH = {"x": 2, "y": 2, "z": 2}


def test_no_element_is_held_twice() -> None:
    for layout in (L.act, L.weight, L.out):
        assert math.prod(layout.resolve(2).local_shape((8, 8), MESH)) * 8 == 64


def test_an_output_is_the_next_layers_input_with_y_and_z_swapped() -> None:
    after = sl.Layout3D("x", "z", "y")
    assert after.act == L.out and after.out == L.act
    with sl.simulate(**MESH):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), L.act)
        w, v = (sl.shard(torch.randn(8, 8).double(), m.weight) for m in (L, after))
        wide = x @ w
        back = wide @ v
        assert torch.allclose(sl.unshard(back), sl.unshard(x) @ sl.unshard(w) @ sl.unshard(v))
    assert wide.sharding == L.out.resolve(2) and back.sharding == L.act.resolve(2)
