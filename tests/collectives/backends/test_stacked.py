"""Simulated ranks give what a loop over ranks gives."""

import pytest
import torch

import shardlib as sl
from shardlib.collectives import unwrap
from tests.collectives.primitives import (
    EACH,
    PRIMITIVES,
    expected,
    stacked_input,
)


@pytest.mark.parametrize("name", PRIMITIVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stacked_ranks_agree_with_a_loop_over_ranks(name: str, dtype: torch.dtype) -> None:
    for mesh, axis in [*EACH, ({"a": 2, "x": 3, "y": 2}, ("y", "a")), ({"x": 4, "y": 2}, "x")]:
        with sl.simulate(**mesh) as m:
            got = unwrap(PRIMITIVES[name][0](stacked_input(m, dtype), axis))
        want = torch.stack(expected(name, mesh, axis, dtype))
        torch.testing.assert_close(got, want, rtol=0 if dtype == torch.float64 else 1e-2, atol=0)
