"""Every rank receives what it lacks, and nothing else."""

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given

import shardlib as sl
from shardlib.layouts import Layout
from tests.layouts.test_reshard import cost, laws
from tests.strategies import placed


@laws
@example((Layout.parse("(3 a b)"), Layout.parse("(c b)"), (6,), {"a": 1, "b": 2, "c": 3}))
@example((Layout.parse(". ."), Layout.parse("a b skew a"), (2, 2), {"a": 2, "b": 2}))
@given(placed(2, most=12, most_elements=600, partial=False, skew=True))
def test_every_rank_receives_what_it_lacks(case: Any) -> None:
    """Counted position by position."""
    a, b, shape, mesh = case
    coords = [
        dict(zip(mesh, c, strict=True))
        for c in itertools.product(*(range(n) for n in mesh.values()))
    ]

    def positions(layout: Layout, coord: dict[str, int]) -> set[tuple[int, ...]]:
        held = (
            range(*s.indices(n)) if isinstance(s, slice) else s
            for s, n in zip(layout.slices(shape, mesh, coord), shape, strict=True)
        )
        return set(itertools.product(*held))

    lacked = sum(len(positions(b, c) - positions(a, c)) for c in coords)
    assert (a >> b).bytes(shape, mesh, 1) == Fraction(lacked, len(coords))


@pytest.mark.parametrize(
    ("a", "b", "c", "mesh"),
    [
        ("(d x) .", "(x d) .", "x .", {"d": 2, "x": 4}),
        ("x y", "y x", "y .", {"x": 2, "y": 2}),
        ("x y skew a", "y x skew a", ". x", {"x": 2, "y": 2}),
        ("x .", "y .", "x .", {"x": 4, "y": 2}),
        pytest.param(
            ". . + sum(x)", "y . + sum(x)", ". .", {"x": 4, "y": 2},
            marks=pytest.mark.xfail(strict=True, reason="copies of a pending sum share no work"),
        ),
    ],
)  # fmt: skip
def test_nor_does_one_by_whole_blocks_or_over_copies(a: str, b: str, c: str, mesh: Any) -> None:
    first, way, last = map(Layout.parse, (a, b, c))
    shape = (64, 64)
    assert cost(first, last, shape, mesh) <= cost(first, way, shape, mesh) + cost(
        way, last, shape, mesh
    )


WAYS = [
    ("x y .", "y x ."),
    ("(x y) . .", ". (y x) ."),
    ("zigzag(x y) . .", ". x y"),
    ("x . .", "striped(y x) . ."),
    (". . x + sum(y)", ". x . + sum(y)"),
    ("x . y", "x . ."),
]


def _there_and_back(a: str, b: str) -> tuple[bool, bool, bool]:
    """Is the block the right one, does the way back end
    where it began, was it counted: on this rank.
    """
    x = torch.arange(16 * 8 * 12, dtype=torch.float64).reshape(16, 8, 12)
    start = sl.shard(x, a)
    with sl.trace() as t:
        got = sl.reshard(start, b)
    messages = (Layout.parse(a) >> Layout.parse(b)).messages(x.shape, sl.current_mesh().axes)
    return (
        torch.equal(got.raw, sl.shard(x, b).raw),
        torch.equal(sl.reshard(got, a).raw, start.raw),
        t.messages == messages,
    )


def test_real_processes_exchange_as_planned(pool: Any) -> None:
    for a, b in WAYS:
        assert all(all(r) for r in pool.run(_there_and_back, a, b, x=2, y=2)), (a, b)
