"""A value of one's own that has a layout is taken wherever a layout is; nothing else is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import shardlib as sl
from shardlib.layouts import Layout, LayoutFamily, as_layout, is_layout


@dataclass(frozen=True)
class Dealt:
    """Rows dealt to the ranks of an axis, in so many rounds."""

    axis: str
    rounds: int = 2

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"({self.rounds} {self.axis}) ...")


class Pair(NamedTuple):
    """As Dealt, and a tuple: no tree of layouts."""

    axis: str
    rounds: int = 2

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"({self.rounds} {self.axis}) ...")


@dataclass(frozen=True)
class Asks:
    """A family that asks for more than axes."""

    axis: str
    rounds: int

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"({int(self.rounds)} {self.axis}) ...")


@dataclass(frozen=True)
class Both(Dealt):
    """One that has another layout for weights."""

    @property
    def weight(self) -> Layout:
        return Layout.parse(f"... {self.axis}")


@dataclass(frozen=True)
class Sequence:
    """Dimension 1 in zigzag order, as a Ring has it."""

    axis: str

    @property
    def layout(self) -> Layout:
        return Layout.parse(f". zigzag({self.axis}) ...")


X = torch.arange(16.0).reshape(8, 2)


@pytest.mark.parametrize("family", [Dealt("x"), Pair("x")], ids=["value", "tuple"])
def test_a_family_of_one_s_own_is_taken_everywhere(family: Any, tmp_path: Any) -> None:
    assert isinstance(family, LayoutFamily) and is_layout(family)
    want = family.layout.resolve(2)
    linear = torch.nn.Linear(2, 8)
    with sl.simulate(x=2) as mesh:
        a = sl.shard(X, family)
        found = [
            a,
            sl.shard({"a": X}, family)["a"],
            sl.shard({"a": X}, {"a": family})["a"],
            sl.reshard(sl.shard(X, "..."), family),
            sl.constrain(sl.shard(X, "x ..."), family),
            sl.from_local(lambda: X[0:4], family),
            sl.from_local(lambda: {"a": X[0:4]}, {"a": family})["a"],
            sl.shard_map(lambda t: 2 * t, in_layouts=family, out_layouts=family)(a),
            sl.shard_map(lambda t: 2 * t, in_layouts=[family], out_layouts=family)(a),
            sl.matmul(a, sl.shard(torch.ones(2, 2), "..."), family),
            next(iter(sl.data(torch.arange(16.0).reshape(8, 2), 8, family))),
            sl.parallelize(linear, [("weight", family), ("bias", "...")])[1]["weight"],
        ]
        assert {sl.layout_of(t) for t in found} == {want}
        apply, params = sl.parallelize(linear, [("*", "...")], inputs={"input": family})
        got = apply(params, X)
        assert sl.layout_of(got) == want and torch.allclose(sl.unshard(got), linear(X))
        sl.save(tmp_path, {"a": sl.shard(X, "x ...")})
        loaded = sl.load(tmp_path, mesh=mesh, layouts=family)["a"]
        assert sl.layout_of(loaded) == want and torch.equal(sl.unshard(loaded), X)
    proof = sl.check_model(linear, [("*", "...")], {"x": 2}, X, inputs={0: family})
    assert max(proof.errors["x=2"].values()) < 1e-12


def test_a_family_of_one_dimension_says_how_attention_splits_the_sequence() -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with sl.simulate(s=2):
        x = sl.shard(q, ". . zigzag(s) .")

        def local(t: torch.Tensor) -> torch.Tensor:
            return sl.ring_attention(t, t, t, mask=sl.masks.Causal(), layout=Sequence("s"))

        out = sl.shard_map(local, in_layouts=x.sharding, out_layouts=x.sharding)(x)
        assert torch.allclose(sl.unshard(out), want)


def test_a_family_with_a_layout_for_weights_is_refused_for_a_weight() -> None:
    linear = torch.nn.Linear(2, 8)
    with sl.simulate(x=2):
        assert sl.layout_of(sl.shard(X, Both("x"))) == Both("x").layout.resolve(2)
        says = r"for activations, .layout, and one for weights, .weight"
        with pytest.raises(sl.errors.LayoutSyntax, match=says):
            sl.parallelize(linear, [("weight", Both("x")), ("bias", "...")])
        with pytest.raises(sl.errors.LayoutSyntax, match=says) as e:
            as_layout(Both("x"), "init", "layout = {}", weight=True)
        assert e.value.fix == "layout = Both(axis='x', rounds=2).weight"


class Odd:
    layout = "x ..."  # a text, where a Layout is asked for


@pytest.mark.parametrize(
    ("given", "fix"),
    [(Dealt, "Dealt('x')"), (Asks, "'...'"), (X, "'...'"), (Odd(), "'...'"), (object(), "'...'")],
    ids=["uncalled", "asks for more", "tensor", "a text within", "object"],
)
def test_what_has_no_layout_is_refused_with_the_line_to_write(given: Any, fix: str) -> None:
    assert not is_layout(given)
    refused: list[Callable[[], Any]] = [
        lambda: sl.shard(X, given),
        lambda: sl.reshard(sl.shard(X, "..."), given),
        lambda: sl.parallelize(torch.nn.Linear(2, 8), [("*", given)]),
        lambda: sl.from_local(lambda: X[0:4], given),
    ]
    with sl.simulate(x=2):
        for call in refused:
            with pytest.raises(sl.errors.LayoutSyntax, match="is no layout: ") as e:
                call()
            if call is refused[0]:
                assert e.value.fix == f"sl.shard(x, {fix})"
                assert torch.equal(
                    sl.unshard(eval(e.value.fix, {"sl": sl, "x": X, "Dealt": Dealt})), X
                )
