"""The fixture proves a model on its meshes, and fails where one of them gives other numbers."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl

pytest_plugins = ["shardlib.testing.plugin"]

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_it_covers_data_and_model_axes_alone_and_together(sharded: Any) -> None:
    from shardlib.testing.plugin import MESHES  # which pytest imports itself, as a plugin

    proof = sharded(nn.Linear(8, 8), [("weight", "x ."), ("bias", "x")], X)
    assert all(any(mesh[a] > 1 for mesh in MESHES) for a in ("data", "x", "y"))
    assert proof is not None and not proof.left


def test_one_mesh_may_be_given(sharded: Any) -> None:
    sharded(nn.Linear(8, 8), sl.recipes.megatron1d, X, meshes={"x": 4})
    with pytest.raises(sl.ShardError):
        sharded(nn.Linear(8, 8), [("weight", "x ."), ("bias", "x")], X, meshes={"x": 3})
