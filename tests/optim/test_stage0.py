"""Stage 0 returns summed gradients in the parameters' tree and layouts."""

from typing import Any

import torch

import shardlib as sl
from tests.ops.cases import r


def test_gradients_are_those_without_buckets() -> None:
    with sl.simulate(data=2, x=2):
        params: Any = {"w": sl.shard(r(8, 4), ". x"), "deep": [sl.shard(r(4, seed=1), "...")]}
        params["w"].requires_grad_()
        params["deep"][0].requires_grad_()
        params["held"] = sl.shard(r(3, seed=2), "...")
        x = sl.shard(r(6, 8, seed=3), "data .")

        def loss(p: Any) -> Any:
            return ((x @ p["w"]) ** 2).sum() + (p["deep"][0] * p["held"].sum()).sum() * x.sum()

        tx = sl.optim.zero(sl.optim.sgd(0.1), "data", 0)
        for _ in range(2):  # in the second, buckets have the order in which gradients came
            _, mine = sl.value_and_grad(loss, into=tx)(params)
            _, theirs = sl.value_and_grad(loss)(params)
            assert mine["held"] is None
            for g, other in ((mine["w"], theirs["w"]), (mine["deep"][0], theirs["deep"][0])):
                assert g.sharding == other.sharding
                assert torch.allclose(sl.unshard(g), sl.unshard(other), rtol=1e-12)
