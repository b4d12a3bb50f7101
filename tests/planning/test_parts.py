"""Layers are one part only where an equal one may follow."""

import torch
from torch import nn

import shardlib as sl

CLUSTER = sl.planning.Cluster(1e12, 2e10, 1, between=sl.planning.Link(1e-4, 1e-8), bandwidth=5e9)


class Outside(nn.Module):
    """Layers whose residual is added outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = x + layer(x)
        return x


def test_layers_that_no_equal_layer_may_follow_are_planned_one_by_one() -> None:
    module, rows = Outside(), torch.randn(8, 16)
    found = sl.plan(module, rows, mesh={"a": 2}, cluster=CLUSTER)
    with sl.simulate(a=2):
        apply, params, _ = found.apply(module)
        out = apply(params, sl.shard(rows, found.inputs[0]))
        assert torch.allclose(sl.unshard(out), module(rows), atol=1e-6)
