"""Rows of atoms keep their length through every split, and joined rows are one afterwards."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts.dims import Apart
from shardlib.modules.dim_factors import (
    fresh,
    join,
    leaves,
    length,
    mark,
    parted,
    piece,
    root,
    whole,
)

factors = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@given(factors)
def test_a_dimension_parts_at_every_product_of_its_major_factors(sizes: list[int]) -> None:
    row = fresh(math.prod(sizes))
    for n in sizes:
        major, row = parted(row, n)
        assert length(major) == n
    assert length(row) == 1


@given(factors, st.data())
def test_joined_rows_have_the_same_factors(sizes: list[int], data: st.DataObject) -> None:
    """Whichever of the two was split first."""
    a, b = fresh(math.prod(sizes)), fresh(math.prod(sizes))
    first = data.draw(st.sampled_from([a, b]))
    parted(first, sizes[0])
    join(a, b)
    assert [root(x) for x in leaves(a)] == [root(x) for x in leaves(b)]
    mark(a, "heads")
    assert all("heads" in x.seen for x in leaves(b))


@given(st.integers(2, 12), st.data())
def test_pieces_of_a_dimension_make_it_up(n: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, n - 1))
    row = fresh(n)
    front, back = piece(row, 0, cut), piece(row, cut, n)
    assert length(front) + length(back) == n == length(row)
    assert piece(row, 0, cut) == front, "the same slice is the same atom"


def test_what_does_not_fit_is_apart() -> None:
    with pytest.raises(Apart):
        join(fresh(4), fresh(6))
    with pytest.raises(Apart):
        parted(fresh(6), 4)


def test_a_row_is_one_atom_where_one_is_needed() -> None:
    row = [*fresh(2), *fresh(3)]
    assert whole(row).size == 6 and [a.size for a in leaves([whole(row)])] == [2, 3]
