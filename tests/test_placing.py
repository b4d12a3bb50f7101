"""What moving values between layouts may never depend on."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import shardlib as sl
from tests.layouts.test_layout import laws
from tests.ops.cases import PLACING, r, run_on_meshes
from tests.strategies import placed


def test_a_sum_is_made_pending_on_any_number_of_ranks() -> None:
    """All ranks but the first hold zeros; tables are as long as the axis."""
    with sl.simulate(x=4200):
        pending = sl.reshard(sl.shard(torch.ones(2), "."), ". + sum(x)")
        assert sl.typeof(pending) == "f32[2]{sum:x}"
        assert torch.equal(sl.unshard(pending), torch.ones(2))


def test_shard_copies_only_the_block(pool: Any) -> None:
    assert pool.run(_shard_leaves_the_source_alone, x=2, y=2) == [True] * 4


def _shard_leaves_the_source_alone() -> bool:
    whole = torch.arange(16.0).reshape(4, 4)
    a = sl.shard(whole, "x y")
    with torch.no_grad():
        a.zero_()
    return a.raw.untyped_storage().nbytes() == 16 and whole.sum() == 120


@pytest.mark.parametrize("text", ["(x y) .", "(y x) ."])
def test_uneven_nested_splits_are_refused_or_padded_right(text: str) -> None:
    """full_tensor of (5, 3) over [Shard(0), Shard(0)] gave rows 0 3 6 0 9 after a flatten."""
    x = torch.arange(15.0).reshape(5, 3)
    with sl.simulate(x=2, y=2):
        with pytest.raises(sl.ShardError, match="size 5 does not divide"):
            sl.shard(x, text)
        assert torch.equal(sl.unshard(sl.shard(x, text, pad=True)), x)


def test_src_takes_the_values_of_rank_zero(pool: Any) -> None:
    assert pool.run(_from_zero, x=2, y=2) == [6.0] * 4


def _from_zero() -> float:
    mine = torch.full((2, 2), float(sl.axis_index(("x", "y")))) + torch.arange(4.0).reshape(2, 2)
    return float(sl.unshard(sl.shard(mine, "x y", src=0)).sum())


@pytest.mark.parametrize("layout", ["data x", ". x", "(data x) .", ". .", ". . + sum(x)"])
def test_placing_is_differentiable_twice(layout: str) -> None:
    bare = layout.split(" + ")[0]

    def f(x: Tensor) -> Tensor:
        return sl.unshard(sl.reshard(sl.shard(x * 2, layout), bare) ** 3)

    with sl.simulate(data=2, x=2):
        x = r(4, 6, seed=1)[:, :4].clone().requires_grad_()
        assert torch.autograd.gradcheck(f, (x,)) and torch.autograd.gradgradcheck(f, (x,))


@laws
@given(placed(skew=True))
def test_unshard_inverts_shard(case: Any) -> None:
    layout, shape, mesh = case
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    with sl.simulate(**mesh):
        assert torch.equal(sl.unshard(sl.shard(x, layout)), x)


@laws
@given(placed())
def test_unshard_gives_a_value_of_its_own(case: Any) -> None:
    layout, shape, mesh = case
    x = torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    with sl.simulate(**mesh):
        _unshard_is_apart(x, layout)


@pytest.mark.parametrize("axes", [{"x": 4, "y": 1}, {"x": 2, "y": 2}, {"x": 1, "y": 4}])
def test_unshard_gives_a_value_of_its_own_on_real_ranks(pool: Any, axes: dict[str, int]) -> None:
    pool.run(_unshard_is_apart_everywhere, **axes)


def _unshard_is_apart_everywhere() -> None:
    x = torch.arange(1.0, 17.0).reshape(4, 4)
    texts = ["...", "x y", "y x", "y .", ". y", "x .", ". x", ". . + sum(y)", "x . + sum(y)"]
    for text in texts:
        _unshard_is_apart(x, text)
        _unshard_is_apart(x.clone().requires_grad_(), text)
    _unshard_is_apart(x[:3, :3], "x y", pad=True)
    a = sl.shard(x, "...")
    sl.unshard(sl.dtensor.to_dtensor(a)).zero_()
    assert torch.equal(a.raw, x)


def _unshard_is_apart(x: Tensor, layout: Any, **how: Any) -> None:
    a = sl.shard(x, layout, **how)
    for value in (a, a.detach(), sl.reshard(a, layout)):
        whole = sl.unshard(value)
        assert torch.equal(whole, x) and whole.requires_grad == value.requires_grad
        with torch.no_grad():
            whole.zero_()
        assert torch.equal(sl.unshard(value), x)
    tree = {"a": [a.detach()], "b": (a.detach(),)}
    snapshot = sl.unshard(tree)
    with torch.no_grad():
        a.zero_()
    assert torch.equal(snapshot["a"][0], x) and torch.equal(snapshot["b"][0], x)


@pytest.mark.parametrize("name", PLACING)
def test_reshard_is_the_identity_with_its_gradient(name: str) -> None:
    run_on_meshes(name)
