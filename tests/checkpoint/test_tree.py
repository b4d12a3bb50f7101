"""Names are paths whatever keys hold, values are exact, and containers come back."""

import math
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
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


keys = st.one_of(
    st.sampled_from(
        ["a", "b", "A", "a.b", "a/b", "a~b", "~1", "a@0:1", "", ".", "..", "/etc", "\0"]
    ),
    st.sampled_from(["é", "e\u0301", "ﬁ", "fi", "__metadata__", "0", "CON", "a" * 300]),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
)
containers = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=13),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=30,
)


@given(containers)
def test_two_leaves_have_two_names_and_a_tree_comes_back_from_its_file(tree: Any) -> None:
    """Empty containers and lists of more than ten too; two keys of one text are refused."""
    try:
        leaves = Leaves.of(tree, "save")
    except ShardError as e:
        assert "two leaves are named" in e.message
        return
    assert len(set(leaves.names)) == len(leaves.leaves)
    with tempfile.TemporaryDirectory() as d:
        sl.save(f"{d}/c", tree)
        assert sl.load(f"{d}/c") == tree
        assert sorted(os.listdir(f"{d}/c")) == ["lock", "rank_00000.safetensors", "shardlib.json"]


def test_keys_that_look_alike_have_names_of_their_own() -> None:
    alike = [{"a": {"b": 1}}, {"a.b": 1}, {"a/b": 1}, {"a~1b": 1}, {"A": {"b": 1}}, {"a": {"B": 1}}]
    alike += [{"é": 1}, {"e\u0301": 1}]
    names = [Leaves.of(tree, "save").names[0] for tree in alike]
    assert len(set(names)) == len(names)


def test_tensors_of_a_long_list_come_back_in_their_places(pool: Any, tmp_path: Path) -> None:
    for found in pool.run(_long, str(tmp_path / "c"), x=2, y=2):
        assert found == [float(i) for i in range(12)]
    with sl.simulate(x=2):
        assert _long(str(tmp_path / "d")) == [float(i) for i in range(12)]


def _long(path: str) -> list[float]:
    sl.save(path, [sl.shard(torch.full((2,), float(i)), "x") for i in range(12)])
    return [float(sl.unshard(x)[0]) for x in sl.load(path)]
