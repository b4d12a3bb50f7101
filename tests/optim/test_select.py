"""Which parameters are meant: every way to say it means the same."""

import re
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.groups import flags, labels
from shardlib.optim.trees import merged, named, only

TREE = {
    "h": [
        {"weight": torch.ones(2, 2), "bias": torch.ones(2)},
        {"weight": torch.ones(2, 2), "bias": None},
    ],
    "wte": torch.ones(3, 2),
}
WEIGHTS = {
    "h.0.bias": False,
    "h.0.weight": True,
    "h.1.bias": False,
    "h.1.weight": True,
    "wte": False,
}


def test_paths_are_keys_joined_by_dots() -> None:
    assert list(named(TREE)) == list(WEIGHTS)
    assert named({"a": {"b": 1}, "a.b": 2}) == {"'a'.b": 1, r"'a\.b'": 2}


SAID = [
    "*.weight",
    ["h.0.weight", "h.1.weight"],
    re.compile(r"\.weight$"),
    (re.compile("0.weight"), "h.1.w*"),
    {"h": [{"weight": True, "bias": False}, {"weight": True, "bias": False}], "wte": False},
    lambda tree: {
        "h": [{"weight": x["weight"].ndim == 2, "bias": False} for x in tree["h"]],
        "wte": False,
    },
]


@pytest.mark.parametrize("mask", SAID)
def test_a_mask_may_be_said_in_any_way(mask: Any) -> None:
    assert flags(mask, TREE, "masked") == WEIGHTS


def test_the_first_label_that_matches_holds() -> None:
    rules = [("wte", "hold"), ("*.bias", "rest"), (lambda name, x: x.ndim == 2, "decay")]
    want = {n: "hold" if n == "wte" else "decay" if "weight" in n else "rest" for n in WEIGHTS}
    assert labels(rules, TREE, "partition") == want
    assert labels(lambda tree: want, {n: torch.ones(1) for n in want}, "partition") == want


def test_merged_is_the_inverse_of_only() -> None:
    where = {n: str(i % 3) for i, n in enumerate(WEIGHTS)}
    parts = {v: only(TREE, where, v) for v in "012"}
    back = merged(TREE, where, parts)
    assert all(a is b for a, b in zip(named(back).values(), named(TREE).values(), strict=True))


MISTAKES = [
    (lambda: flags("*.wieght", TREE, "masked"), r"'\*.wieght' matches no parameter; there is 'h."),
    (
        lambda: flags({"h": True}, {"h": torch.ones(1), "g": torch.ones(1)}, "masked"),
        "nothing is said of 'g'",
    ),
    (lambda: labels([("h.*", "a")], TREE, "partition"), "no pattern matches parameter 'wte'"),
    (lambda: labels([("*", "a"), ("wpe", "b")], TREE, "partition"), "matches no parameter"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES)
def test_what_is_not_there_is_named(call: Any, says: str) -> None:
    with pytest.raises(sl.errors.RuleLint, match=says):
        call()
