"""Names are paths whatever keys hold, values are exact, and containers come back."""

import math
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint.tree import Leaves, built, spoken, unspoken
from shardlib.errors import ShardError


class State(NamedTuple):
    mu: Any
    count: int


values = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(), st.none(), st.complex_numbers()
)


@given(values)
def test_a_value_is_spoken_exactly(value: Any) -> None:
    again = unspoken(spoken(value))
    assert type(again) is type(value)
    assert repr(again) == repr(value) or (value != value and again != again)


def test_zero_has_its_sign() -> None:
    assert math.copysign(1, unspoken(spoken(-0.0))) == -1  # type: ignore[arg-type]


trees = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


@given(trees)
def test_containers_come_back(tree: Any) -> None:
    try:
        leaves = Leaves.of(tree, "save")
    except ShardError:  # a lone surrogate in a key
        return
    assert built(leaves.skeleton, leaves.values) == tree


def test_names_are_paths() -> None:
    tree = {"a/b": torch.ones(1), "a": OrderedDict(b=[1, (2,)]), "s": State({"~": 3}, 4)}
    found = Leaves.of(tree, "save")
    assert sorted(found.names) == ["a/b/0", "a/b/1/0", "a~1b", "s/count", "s/mu/~0"]
    assert built(found.skeleton, dict(zip(found.names, found.names, strict=True)))["s"] == {
        "mu": {"~": "s/mu/~0"},
        "count": "s/count",
    }


def test_one_name_for_two_leaves_is_refused() -> None:
    with pytest.raises(ShardError, match="two leaves are named '1'"):
        Leaves.of({1: 0, "1": 0}, "save")
