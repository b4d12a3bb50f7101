"""``read`` and ``written`` are inverse, and spaces mean nothing but the end of a token."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import LayoutSyntax
from shardlib.layouts import Layout
from shardlib.layouts.text import read, written
from tests.strategies import spellings


@given(spellings(), st.integers(1, 3))
def test_written_is_read_back_whatever_the_spaces(layout: Layout, spaces: int) -> None:
    text = str(layout)
    assert written(read(text)) == text
    assert read(text.replace(" ", " " * spaces)) == read(text)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("x ... y", (["x", "y"], (), 1)),
        ("...", ([], (), 0)),
        ("(2 x) . + sum(y z)", (["(2 x)", "."], ("y", "z"), None)),
        ("x y skew b", (["x", "y"], (), None)),
        ("", ([], (), None)),
    ],
)
def test_a_text_is_its_fields(text: str, fields: Any) -> None:
    dims, *others = read(text)
    assert ([str(d) for d in dims], *others) == fields


@pytest.mark.parametrize(
    "text", ["x skew c", "x . skew a", "(x y) z skew b", "x + y", "(x", "x) .", "... x ...", "x?"]
)
def test_no_text_is_half_read(text: str) -> None:
    with pytest.raises(LayoutSyntax):
        read(text)
