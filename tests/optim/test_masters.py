"""A master keeps what half precision parameters lack."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.optim.test_exact import FIXED, train, value

o = sl.optim


def rounded(master: Any) -> Any:
    """bf16 parameters with a master, beside fp32 ones of the same start."""
    tx = o.zero(o.adamw(1e-3), "data", master=master)
    params, state = train(tx, FIXED, ("data",), "pending", torch.bfloat16)
    return params, state


@pytest.mark.parametrize("master", ["fp32", "bf16+rem"])
def test_masters_lose_nothing(master: str) -> None:
    """As fp32 parameters stepped by the same gradients, rounded at the end."""
    with sl.simulate(data=3, x=2):
        tx, params = o.adamw(1e-3), {}
        for i, (k, (s, layout)) in enumerate(FIXED.items()):
            params[k] = sl.shard(value(s, i).bfloat16().float(), layout, pad=True)
        state = tx.init(params)
        for t in range(3):
            grads = {}
            for i, (k, (s, _)) in enumerate(FIXED.items()):
                g = (value(s, 100 * t + i) * 16).round() / 16
                grads[k] = sl.shard(g.bfloat16().float(), params[k].sharding, pad=True)
            params, state, _ = o.step(tx, params, grads, state)
        got, kept = rounded(master)
        for k, p in params.items():
            if master == "fp32":
                assert torch.equal(got[k], p.raw.bfloat16()), k
            else:  # ties go away from zero there
                gap = (got[k].float() - p.raw).abs()
                assert (gap <= p.raw.abs() * 2.0**-8).all(), k
        bits = {x.dtype for x in kept.master.values()}
        assert bits == {torch.float32 if master == "fp32" else torch.int16}
