"""Sums over tensors: what the dense tensors give, however they are laid out, padded or pending."""

import math
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given, settings

import shardlib as sl
from shardlib.optim.buckets import Item, index, parts_of
from shardlib.optim.norms import norms, powers, scaled, squares, summed, totals
from shardlib.tensor import Place, ShardedTensor
from tests.ops.cases import r
from tests.strategies import placed


@given(placed(2, partial=False))
@settings(max_examples=40)
def test_totals_count_each_element_once(case: Any) -> None:
    first, second, shape, mesh = case
    a, b = r(*shape), r(*shape, seed=1)
    with sl.simulate(**mesh):
        one, two = totals({"a": sl.shard(a, first), "n": None}, [sl.shard(b, second)])
        (large,) = totals([sl.shard(a, first)], of=powers(math.inf), most=True)
    assert one[1] is None and abs(one[0] - a.square().sum()) <= 1e-12 * (1 + a.square().sum())
    assert abs(two[0] - b.square().sum()) <= 1e-12 * (1 + b.square().sum())
    assert large[0] == (a.abs().max() if a.numel() else 0)


@given(placed(1, partial=True))
@settings(max_examples=40)
def test_pending_sums_are_done_before_they_are_squared(case: Any) -> None:
    layout, shape, mesh = case
    ways = math.prod(mesh[a] for a in layout.partial)
    a = r(*shape)
    with sl.simulate(**mesh), sl.trace() as t:
        x = sl.shard(a, layout)  # the value lies on the first rank, zeros on the others
        (found,) = totals(summed([x]))
    assert abs(found[0] - a.square().sum()) <= 1e-12 * (1 + a.square().sum())
    local = math.prod(layout.local_shape(shape, mesh)) * 8
    padded = -(-local // (8 * ways)) * 8 * ways
    moved = Fraction((ways - 1) * padded, ways)
    assert t.by_kind().get("psum_scatter", 0) == moved


def test_what_padding_holds_counts_nowhere() -> None:
    a = r(7, 5)
    with sl.simulate(x=2, y=3):
        x = sl.shard(a, "x y", pad=True)
        x.raw[x.raw == 0] = 1e9
        (found,) = totals([x])
    assert abs(found[0] - a.square().sum()) < 1e-12


def test_pending_halves_are_summed_in_fp32() -> None:
    with sl.simulate(data=2):
        raw = torch.tensor([[60000.0], [60000.0]], dtype=torch.float16)
        x = ShardedTensor(
            raw, Place(sl.Layout.parse(". + sum(data)"), torch.Size([1]), sl.current_mesh())
        )
        assert sl.optim.global_norm([x]) == 120000


def test_slots_of_buckets_are_tensors() -> None:
    """However a bucket is cut, each parameter has its own sum and its own factor."""
    tensors = {"a": r(5, 3), "b": r(7, seed=1), "c": r(seed=2), "d": r(4, 4, seed=3)}
    axes = {"data": 3, "x": 2}
    with sl.simulate(**axes) as mesh:
        leaves = [sl.shard(t, "x ..." if k == "d" else "...") for k, t in tensors.items()]
        items = tuple(
            Item(k, x.sharding.local_shape(x.shape, mesh), x.dtype, x.sharding.axes, i)
            for i, (k, x) in enumerate(zip(tensors, leaves, strict=True))
        )
        buckets = index(items, (("data",),), tuple(axes.items()), 1 << 20)
        tree = parts_of(leaves, buckets, mesh)
        (found,) = norms(tree)
        order = [i for bucket in buckets for s in bucket.slots for i in s.leaves[:1]]
        for i, norm in zip(order, found, strict=True):
            assert abs(norm - list(tensors.values())[i].norm()) < 1e-12
        again = norms(scaled(tree, [1 / n for n in found]))[0]
        assert all(abs(n - 1) < 1e-12 for n in again)
        assert all(abs(n - m) < 1e-12 for n, m in zip(norms(tree)[0], found, strict=True))


def test_squares_keep_their_digits() -> None:
    x = torch.full((2_000_000,), 0.1)
    assert abs(float(squares(x)) / (float(x[0]) ** 2 * len(x)) - 1) < 1e-12
    assert squares(torch.tensor([3 + 4j])) == 25
