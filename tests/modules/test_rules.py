"""Every parameter takes the first rule that matches it, and every rule matches a parameter."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard

import shardlib as sl
from shardlib.modules.rules import matches


def _first(name: str, value: torch.Tensor) -> bool:
    return name == "weight"


UNFIT: dict[str, tuple[Any, str]] = {
    "another size": ([("weight", "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "another number of dimensions": ([("weight", "x . ."), ("bias", ".")], "has 3 dimensions"),
    "an unknown axis": ([("weight", "q ."), ("bias", ".")], "unknown axis 'q'"),
    "an unknown axis of products": ([("weight", ". x", "q ."), ("bias", ".")], "unknown axis 'q'"),
    "an axis twice": ([("weight", "x x"), ("bias", ".")], "axis 'x' is used twice"),
    "no layout": ([("weight", None), ("bias", ".")], "None is no layout"),
    "a tuple of tokens": ([("weight", ("x", ".")), ("bias", ".")], r"\('x', '.'\) is no layout"),
    "placements": ([("weight", [Shard(0), Shard(1)]), ("bias", ".")], "one for each axis of"),
    "a family": (
        [("weight", sl.Layout3D("x", "y", "z")), ("bias", ".")],
        "Layout3D.* has a layout for activations, .act, and one for weights",
    ),
    "no end of a group": ([("weight", "(x ."), ("bias", ".")], "cannot read"),
    "a whole factor in a group": ([("weight", "(. x) ."), ("bias", ".")], "may only end a group"),
    "a function's": ([(_first, "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "a regex's": ([(re.compile("we"), "x ."), ("bias", ".")], "dimension 0 of size 5"),
    "one that others share": ([("*", "x ...")], "dimension 0 of size 5"),
}


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("case", UNFIT)
def test_a_layout_that_does_not_fit_names_its_parameter_and_the_fix_runs(
    case: str, meta: bool
) -> None:
    rules, says = UNFIT[case]
    module = nn.Linear(4, 5, device="meta" if meta else None)
    with sl.simulate(x=2):
        with pytest.raises(
            sl.ShardError, match=f"^parallelize: the rule of parameter 'weight' .*{says}"
        ) as caught:
            sl.parallelize(module, rules)
        fix = caught.value.fix
        _, params = eval(fix, {"sl": sl, "module": module, "rules": rules, "re": re})
    assert {str(p.sharding) for p in params.values()} == {". .", "."}


MLP = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
GOOD = [("*.weight", "..."), ("*.bias", ".")]


def test_rules_match_by_glob_regex_and_function_in_order() -> None:
    with sl.simulate(x=2):
        _, p = sl.parallelize(
            MLP,
            [("0.weight", "x ."), (re.compile(r"^2\.w"), ". x"), (lambda n, t: t.ndim == 1, ".")],
        )
    assert [str(v.sharding) for v in p.values()] == ["x .", ".", ". x", "."]


def test_logical_names_resolve_by_axes() -> None:
    with sl.simulate(x=2):
        _, p = sl.parallelize(
            nn.Linear(4, 12),
            [("weight", "(3 heads hd) embed"), ("bias", "(3 heads hd)")],
            axes={"heads": "x", "embed": ".", "hd": "."},
        )
    assert str(p["weight"].sharding) == "(3 x) ." and str(p["bias"].sharding) == "(3 x)"


LINT = [
    ([("0.*", "...")], "no rule matches parameter '2.weight'"),
    ([*GOOD, ("3.wieght", ".")], "rule '3.wieght' matches no parameter"),
    (
        [("*", "..."), ("0.weight", "x .")],
        "rule '0.weight' is never reached: an earlier rule takes 0.weight",
    ),
    ([*GOOD, (lambda n, t: n == "3.weight", ".")], "matches no parameter"),
]


@pytest.mark.parametrize(("rules", "says"), LINT)
def test_rules_are_linted_both_ways_and_the_fix_runs(rules: Any, says: str) -> None:
    with sl.simulate(x=2):
        with pytest.raises(sl.ShardError, match=re.escape(says)) as caught:
            sl.parallelize(MLP, rules)
        space = {"rules": rules, "re": re}
        if caught.value.fix.startswith("rules ="):
            exec(caught.value.fix, space)
            mended = space["rules"]
        else:
            mended = eval(caught.value.fix, space)
        sl.parallelize(MLP, mended)


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
