"""Recurrent layers: the batch is rows, and dropout between layers is drawn by position."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_between_layers(make: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    for p, both in ((1.0, False), (0.5, True)):
        net = make(6, 8, num_layers=3, dropout=p, bidirectional=both).double()
        seen = []
        for axes, layout in (({"x": 1}, ". . ."), ({"x": 2}, ". x ."), ({"x": 4}, ". x .")):
            with sl.simulate(**axes):
                apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": layout})
                torch.manual_seed(2)
                out, state = apply(params, x)
                ends = state if isinstance(state, tuple) else (state,)
                seen.append([sl.unshard(t) for t in (out, *ends)])
        for other in seen[1:]:
            assert all(
                torch.allclose(a, b, atol=1e-12) for a, b in zip(seen[0], other, strict=True)
            )
        if p == 1.0:  # nothing is left to chance
            out, state = net(x)
            want = [out, *(state if isinstance(state, tuple) else (state,))]
            assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(seen[0], want, strict=True))
