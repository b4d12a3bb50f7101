import pickle

import pytest
import torch

import shardlib as sl
from shardlib.modules.apply import giving
from shardlib.tensor import Place


def test_a_place_is_one_frozen_value() -> None:
    with sl.simulate(x=2) as mesh:
        x = sl.shard(torch.zeros(4, 6), "x .")
    place = Place(sl.Layout.parse("x ."), torch.Size((4, 6)), mesh)
    assert x.place == place and hash(x.place) == hash(place)
    assert x.place != place._replace(deferred=frozenset({"x"}))
    with pytest.raises(AttributeError):
        x.place.layout = sl.Layout.parse(". .")
    again = pickle.loads(pickle.dumps(x.place))
    assert again[:2] == place[:2] and dict(again.mesh.axes) == {"x": 2}


@pytest.mark.parametrize(
    "f", [torch.neg, torch.clone, torch.detach, lambda w: w * 1.0, lambda w: w + w]
)
def test_a_weight_keeps_the_layout_of_its_products(f: object) -> None:
    with sl.simulate(x=2):
        w = giving({"w": sl.shard(torch.ones(4, 6), ". x")}, {"w": sl.Layout.parse("x .")})["w"]
        assert f(w).place.out_layout == sl.Layout.parse("x .")
        x = sl.shard(torch.ones(4, 4), "x .")
        assert sl.typeof(x @ f(w)) == "f32[4@x, 6]"
        assert sl.reshard(w, "...").place.out_layout is None


@pytest.mark.parametrize(
    "f", [lambda h: h, lambda h: h * 1.0, torch.relu, lambda h: h + h, "shift", "dropout"]
)
def test_rows_merged_by_a_view_are_known_after_elementwise_functions(f: object) -> None:
    """A product whose weight names three dimensions finds them, whatever stood between."""
    with sl.simulate(data=2, x=2):
        h = sl.shard(torch.ones(4, 4, 8), "data x .")
        shift = sl.shard(torch.ones(8), ".")
        between = {
            "shift": lambda t: t + shift,
            "dropout": lambda t: torch.nn.functional.dropout(t, 0.0),
        }.get(f, f)  # type: ignore[call-overload]
        w = sl.shard(torch.ones(8, 8), "x .")
        w = giving({"w": w}, {"w": sl.Layout.parse("data x .")})["w"]
        out = between(h.view(-1, 8)) @ w
        assert between(h.view(-1, 8)).place.merged_from == (4, 4)
        assert out.dims[0] == (h.view(-1, 8) @ w).dims[0]


def test_what_changes_layout_or_sizes_says_nothing_of_products() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(2, 2, 4), "x . .").view(4, 4)
        assert x.place.merged_from == (2, 2)
        assert x.becomes(x.raw).place is x.place
        assert x.becomes(x.raw, x.sharding, x.padded_shape).place.merged_from == ()


def test_a_pickled_tensor_lies_where_it_lay() -> None:
    """Padding and the layout of its products are in its place, and so survive."""
    with sl.simulate(x=2):
        x = sl.shard(torch.arange(15.0).view(5, 3), "x .", pad=True)
        back, again = pickle.loads(pickle.dumps((x, x + 1)))
    assert torch.equal(sl.unshard(back), sl.unshard(x)) and sl.typeof(back) == sl.typeof(x)
    assert back.mesh is again.mesh
