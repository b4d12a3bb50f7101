"""What shares memory in torch shares it here, or a write to it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import r

X = r(4, 6)


def test_a_write_that_torch_would_show_elsewhere_is_refused() -> None:
    a = torch.randn(4, 6)
    with sl.simulate(x=2, y=2), sl.implicit():
        x = sl.shard(a, "x y")
        row = x[1]  # gathered for it: a copy, where torch has a view
        for refused in (row, row.view(2, 3), x):
            with pytest.raises(sl.ShardError, match="share memory"):
                refused.mul_(2)
        assert torch.equal(sl.unshard(x), a)
        del row, refused
        assert torch.equal(sl.unshard(x.mul_(2)), a * 2)


def test_a_transposed_view_of_one_row_blocks_is_copied_where_the_whole_would_be() -> None:
    x = r(6, 6)
    for layout in (". x", "x ."):
        with sl.simulate(x=6):
            y = sl.shard(x, layout) * 1
            y.T.flatten().zero_()
            assert torch.equal(sl.unshard(y), x)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 1}], ids=str)
def test_results_may_be_written_to(mesh: dict[str, int]) -> None:
    index = torch.tensor([3, 0])
    forms: list[Callable[[Any, Any], Any]] = [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x[:, :0].sum(0),
        lambda x, i: x[i, 2:2],
        lambda x, i: x.sum(0),
    ]
    for f in forms:
        want = f(X, index) * 3
        with sl.simulate(**mesh), sl.implicit():
            y = f(sl.shard(X, "x .").requires_grad_(), sl.shard(index, "."))
            y *= 3
            assert torch.allclose(sl.unshard(y), want)
