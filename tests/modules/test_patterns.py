"""A pattern is a glob over the whole name, a regex found in it, or a function of name and value."""

import re

from hypothesis import given
from hypothesis import strategies as st

from shardlib.modules.patterns import matches

names = st.text("ab.0", min_size=1, max_size=8)


@given(names, names)
def test_a_glob_is_of_the_whole_name(name: str, other: str) -> None:
    assert matches(name, name, None) and matches("*", name, None)
    assert matches(name, other, None) == (name == other)
    assert matches(f"{name}*", name + other, None) and matches(f"*{other}", name + other, None)


@given(names, names)
def test_a_regex_is_found_anywhere_and_a_function_decides_alone(name: str, other: str) -> None:
    assert matches(re.compile(re.escape(other)), name, None) == (other in name)
    assert matches(lambda n, value: n == name and value == 3, name, 3)
    assert not matches(lambda n, value: value == 3, name, 4)


def test_upper_and_lower_case_differ() -> None:
    assert not matches("a*", "A1", None)
