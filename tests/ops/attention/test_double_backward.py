"""The gradient of attention's gradient is dense's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.layouts import Ring
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_op import gap, normal


@pytest.mark.parametrize(
    "algorithm", ["ring", "ring_bidirectional", "allgather", "pass_q", "rsa", "canonical"]
)
def test_a_gradient_of_the_gradient_is_dense_s(algorithm: str) -> None:
    q, k, v = (normal(1, h, 6, 4, seed=h).requires_grad_() for h in (4, 2, 2))
    mask, sink = sl.masks.Causal(), normal(4, seed=9).requires_grad_()
    c = normal(1, 4, 6, 4, seed=5)

    def penalty(out: Tensor, xs: Any) -> Tensor:
        grads = torch.autograd.grad(out, xs, create_graph=True)
        return sum((g * g).sum() for g in grads)  # type: ignore[return-value]

    want = torch.autograd.grad(
        penalty((attention(q, k, v, mask, None, sink)[0] * c).sum(), (q, k, v)), (q, k, v, sink)
    )
    with sl.simulate(s=2):
        xs = [sl.shard(x.detach(), Ring("s", 2)).requires_grad_() for x in (q, k, v)]
        s = sink.detach().requires_grad_()
        out = sl.ring_attention(*xs, mask=mask, sink=s, algorithm=algorithm)
        loss = penalty((out * sl.shard(c, Ring("s", 2))).sum(), xs)
        got = torch.autograd.grad(loss, [*xs, s])
        for mine, its in zip(got, want, strict=True):
            mine = sl.unshard(mine) if isinstance(mine, sl.ShardedTensor) else mine
            assert gap(mine, its) < 1e-12
