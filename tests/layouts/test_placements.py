"""Placements say what a layout says, where DTensor can say it, and are refused elsewhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Dim, Layout
from tests.strategies import examples, layouts

laws = examples(100)


@laws
@given(layouts(special=False), st.permutations("abcd"))
def test_placements_round_trip(layout: Layout, names: Any) -> None:
    mesh = dict.fromkeys(names, 1)
    dims = tuple(Dim(tuple(sorted(d.axes, key=names.index))) for d in layout.dims)
    natural = Layout(dims, layout.partial)

    class Held:
        device_mesh, ndim, placements = mesh, len(dims), natural.placements(mesh)

    assert Layout.from_dtensor(Held) == natural


def test_other_nestings_are_not_expressible() -> None:
    for text in ("(y x)", "(3 x)", "zigzag(x)", "striped(x)"):
        with pytest.raises(sl.ShardError, match="DTensor cannot say"):
            Layout.parse(text).placements({"x": 2, "y": 2})
