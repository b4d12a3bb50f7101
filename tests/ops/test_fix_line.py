"""A fix line is the call itself, with its operands named as the error prints them."""

from typing import Any

import pytest
import torch

from shardlib.ops.each_rank import FlatCall
from shardlib.ops.fix_line import fix_line

A, B = torch.ones(2), torch.zeros(2)

LINES: dict[str, tuple[Any, Any, Any]] = {
    "torch.cumsum(sl.reshard(x, '...'), 0)": (torch.cumsum, (A, 0), {}),
    "torch.clamp(sl.reshard(x, '...'), min=float('-inf'))": (
        torch.clamp, (A,), {"min": -float("inf")}
    ),
    "torch.cat((sl.reshard(x, '...'), y), dim=0)": (torch.cat, ((A, B),), {"dim": 0}),
    "with sl.implicit(16): torch.Tensor.add_(x, y)": (torch.Tensor.add_, (A, B), {}),
    "with sl.implicit(16): torch.sin(sl.reshard(x, '...'), out=y)": (torch.sin, (A,), {"out": B}),
    "torch.functional.block_diag(sl.reshard(x, '...'), y)": (torch.block_diag, ([A, B],), {}),
    "torch.ops.aten.sin.default(sl.reshard(x, '...'))": (torch.ops.aten.sin.default, (A,), {}),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_call_is_written_with_its_operands_named(line: str) -> None:
    func, args, kwargs = LINES[line]
    call = FlatCall.of(func, *args, **kwargs)
    assert fix_line(call, {call.at[0]: "..."}, 16) == line
