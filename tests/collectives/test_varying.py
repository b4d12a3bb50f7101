"""What varies is followed through every torch function that a body may call."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.collectives import Stacked, Varies

ONE: list[Any] = [
    lambda x: x.exp(),
    lambda x: x.sum(-1),
    lambda x: x.softmax(-1),
    lambda x: x[1:, ::2],
    lambda x: x[torch.tensor([1, 0])],
    lambda x: x.T.reshape(-1),
    lambda x: x.max(-1),
    lambda x: x.split(1),
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([torch.zeros(2, 4), x]),
    lambda x: F.linear(x, torch.ones(3, 4)),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: torch.where(x > 0, 1.0, 0.0),
    lambda x: torch.zeros(2, 4) + x,
    lambda x: 1.0 / x,
    lambda x: x.clone().add_(1.0),
    lambda x: x.detach(),
    lambda x: x.to(torch.float64),
    lambda x: torch.linalg.qr(x),
    lambda x: x.unbind(0),
]


@pytest.mark.parametrize("f", ONE)
@pytest.mark.parametrize("axes", [frozenset(), frozenset("x"), frozenset("xy")])
def test_a_result_varies_as_its_operand(f: Any, axes: frozenset[str]) -> None:
    mesh = sl.simulate(x=2, y=2)
    x = Stacked(torch.rand(4, 2, 4) + 0.5, mesh)
    x.varies = Varies(axes)
    out = f(x)
    for block in [out] if isinstance(out, Tensor) else out:
        assert block.varies is not None and block.varies.axes == axes


def test_two_operands_unite_and_shapes_tell_nothing() -> None:
    mesh = sl.simulate(x=2, y=2)
    a, b, unknown = (Stacked(torch.rand(4, 3, 3), mesh) for _ in range(3))
    a.varies, b.varies = Varies(frozenset("x")), Varies(frozenset("y"))
    axes = {
        "product": (a @ b).varies,
        "shape": a.new_zeros(2).varies,
        "like": torch.ones_like(a).varies,
        "as": a.expand_as(b).varies,
        "filled": a.masked_fill(b > 0, 1.0).varies,
    }
    found = {k: v.axes for k, v in axes.items() if v is not None}
    x, both, none = frozenset("x"), frozenset("xy"), frozenset()
    assert found == {"product": both, "shape": none, "like": none, "as": x, "filled": both}
    assert (unknown + 1).varies is None
    mixed = (a + unknown).varies
    assert mixed is None or mixed.axes is None


def test_what_is_written_reaches_every_view() -> None:
    mesh = sl.simulate(x=2, y=2)
    a, b = (Stacked(torch.rand(4, 3, 3), mesh) for _ in range(2))
    a.varies, b.varies = Varies(frozenset()), Varies(frozenset("y"))
    row, copy = a[0], a.clone()
    row[1:].copy_(b[0, 1:])
    assert a.varies.axes == row.varies.axes == a.T.varies.axes == frozenset("y")
    assert copy.varies.axes == frozenset()
    with pytest.raises(sl.ShardError, match="neither"):
        sl.collectives.pcast(a, "x", to="sum")  # type: ignore[arg-type]
