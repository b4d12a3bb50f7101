"""JAX's PartitionSpec, tuples like it and DTensor's placements are taken wherever a layout is."""

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardlib as sl
from shardlib.errors import LayoutSyntax, NotExpressible
from shardlib.layouts import Layout, LayoutFamily, as_layout, per_leaf
from tests.strategies import layouts, meshes, only


class PartitionSpec:
    """As jax.sharding.PartitionSpec is: no tuple, and iterated over."""

    def __init__(self, *dims: Any, unreduced: frozenset[str] = frozenset()) -> None:
        self.dims, self.unreduced = dims, unreduced

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dims)


def mentions(kind: Any) -> bool:
    """Whether an annotation is of layouts: those of users say so by their family's protocol."""
    if kind is LayoutFamily or (
        isinstance(kind, str | typing.ForwardRef) and "Layout" in str(kind)
    ):
        return True
    return any(mentions(k) for k in typing.get_args(kind) if not isinstance(k, str) or "L" in k)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and the public methods and operators of public classes."""
    for module in (sl, *(v for v in map(sl.__dict__.get, sl.__all__) if inspect.ismodule(v))):
        for name in module.__all__:
            value = getattr(module, name)
            at = f"{module.__name__.replace('shardlib', 'sl')}.{name}"
            if isinstance(value, types.FunctionType):
                yield at, value
            for key, method in vars(value).items() if isinstance(value, type) else ():
                method = getattr(method, "__func__", method)
                if isinstance(method, types.FunctionType) and (key[0] != "_" or key[:2] == "__"):
                    yield f"{at}.{key}", method


def layouts_taken() -> set[str]:
    """The parameters of public functions that are layouts, as ``sl.shard.layout``."""
    found = {}
    for at, function in functions():
        for form in (function, *typing.get_overloads(function)):
            hints = typing.get_type_hints(form, localns={"DTensor": DTensor})
            for name, kind in hints.items():
                if name != "return" and mentions(kind):
                    found[function, name] = min(
                        found.get((function, name), f"{at}.{name}"), f"{at}.{name}", key=len
                    )
    return set(found.values())


X = torch.arange(16.0).reshape(4, 4)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False)


def _loaded(read: Callable[..., Any]) -> Callable[[Any, Path], Any]:
    def call(one: Any, path: Path) -> Any:
        sl.save(path / "c", {"w": sl.shard(X, "...")})
        return read(one, path)

    return call


def _check_model(one: Any, where: str) -> Any:
    rules, inputs = ([("*", one)], {}) if where == "rules" else ([("*", "...")], {"input": one})
    return sl.check_model(linear(), rules, {"x": 2, "y": 2}, {"input": X}, inputs=inputs).errors


def _load_hf(one: Any, path: Path, where: str) -> Any:
    save_file({"weight": X.clone()}, path / "model.safetensors")
    rules, inputs = ([("*", one)], {}) if where == "rules" else ([("*", "...")], {"input": one})
    apply, params = sl.load_hf(path, linear(), rules, inputs=inputs)
    return params["weight"], apply(params, X)


def _from_hf(one: Any, path: Path) -> Any:
    save_file({"weight": X.clone()}, path / "model.safetensors")
    sl.checkpoint.from_hf(path, path / "c", {"x": 2, "y": 2}, layouts=one)
    return sl.load(path / "c")["weight"]


def _resharded(one: Any, path: Path) -> Any:
    sl.checkpoint.reshard(path / "c", path / "d", {"x": 2, "y": 2}, layouts=one)
    return sl.load(path / "d")["w"]


def _applied(one: Any, where: str, make: Any) -> Any:
    rules = [("*", one)] if where == "rules" else [("*", "...")]
    apply, params = make(linear(), rules, inputs={"input": one} if where == "inputs" else None)
    return params["weight"], apply(params, X)


def _attended(one: Any, **more: Any) -> Any:
    q = sl.shard(torch.ones(4, 1, 4, 2), "x ...")
    return sl.ring_attention(q, q, q, **{"layout": "...", "kv_layout": one} | more)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "sl.shard.layout": lambda one, _: (sl.shard(X, one), sl.shard({"a": {"b": X}}, {"a": one})),
    "sl.reshard.layout": lambda one, _: sl.reshard([sl.shard(X, "y .")] * 2, [one, one]),
    "sl.constrain.layout": lambda one, _: sl.constrain(sl.shard(X, "y ."), one),
    "sl.from_local.layout": lambda one, _: sl.from_local(lambda: {"a": X[:2]}, {"a": one}),
    "sl.data.layout": lambda one, _: next(
        iter(sl.data([{"a": row} for row in X], 4, {"a": one}, shuffle=False))
    ),
    "sl.shard_sequence.layout": lambda one, _: sl.shard_sequence({"ids": X.long()}, one)["ids"],
    "sl.shard_map.in_layouts": lambda one, _: sl.shard_map(
        lambda v, w: v + w["b"], in_layouts=(one, {"b": one}), out_layouts="x ."
    )(sl.shard(X, "x ."), {"b": sl.shard(X, "x .")}),
    "sl.shard_map.out_layouts": lambda one, _: sl.shard_map(
        lambda v: {"a": v, "b": 2 * v}, in_layouts="x .", out_layouts={"a": one, "b": one}
    )(sl.shard(X, "x .")),
    "sl.matmul.out": lambda one, _: sl.matmul(sl.shard(X, "x ."), sl.shard(X, "..."), one),
    "sl.ring_attention.layout": lambda one, _: _attended("...", layout=one),
    "sl.ring_attention.kv_layout": lambda one, _: _attended(one),
    "sl.parallelize.rules": lambda one, _: _applied(one, "rules", sl.parallelize),
    "sl.parallelize.inputs": lambda one, _: _applied(one, "inputs", sl.parallelize),
    "sl.init.rules": lambda one, _: _applied(one, "rules", sl.init)[0],
    "sl.init.inputs": lambda one, _: sl.layout_of(_applied(one, "inputs", sl.init)[1]),
    "sl.check_model.rules": lambda one, _: _check_model(one, "rules"),
    "sl.check_model.inputs": lambda one, _: _check_model(one, "inputs"),
    "sl.load.layouts": _loaded(lambda one, path: sl.load(path / "c", layouts=one)),
    "sl.load_hf.rules": lambda one, path: _load_hf(one, path, "rules"),
    "sl.load_hf.inputs": lambda one, path: _load_hf(one, path, "inputs"),
    "sl.checkpoint.reshard.layouts": _loaded(_resharded),
    "sl.checkpoint.from_hf.layouts": _from_hf,
    "sl.testing.check_layout.layout": lambda one, _: bool(sl.testing.check_layout(one)),
    "sl.Layout.__mul__.other": lambda one, _: (Layout.parse(". y") * one).resolve(2),
    "sl.Layout.refine.other": lambda one, _: Layout.parse("y .").refine(one).resolve(2),
    "sl.Layout.__and__.other": lambda one, _: (Layout.parse("(x y) .") & one).resolve(2),
    "sl.Layout.__le__.other": lambda one, _: Layout.parse("(x y) .") <= one,
    "sl.Layout.__matmul__.other": lambda one, _: (Layout.parse("y x") @ one).resolve(2),
    "sl.Layout.__rshift__.other": lambda one, _: (Layout.parse("y .") >> one).bytes((4, 4), MESH),
    "sl.Layout.equivalent.other": lambda one, _: Layout.parse("x .").equivalent(one, (4, 4), MESH),
}
MESH = {"x": 2, "y": 2}
SPELLINGS = {
    "a tuple": ("x", None),
    "a short tuple": ("x",),
    "P": sl.P("x", None),
    "PartitionSpec": PartitionSpec("x"),
    "placements": [Shard(0), Replicate()],
    "a tuple of placements": (Shard(0), Replicate()),
}


def test_every_public_layout_has_its_call_here() -> None:
    """A new function that takes a layout takes it as users write it, or fails here."""
    assert layouts_taken() == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_layout_is_taken_as_jax_and_dtensor_write_it(name: str, tmp_path: Path) -> None:
    with sl.simulate(**MESH):
        (tmp_path / "text").mkdir()
        want = _plain(CALLS[name]("x ...", tmp_path / "text"))
        for said, one in SPELLINGS.items():
            folder = tmp_path / said.replace(" ", "_")
            folder.mkdir()
            assert _plain(CALLS[name](one, folder)) == want, said


def _plain(found: Any) -> str:
    """What a call gave, as text: types, layouts and values."""
    leaves, spec = optree.tree_flatten(found)
    told = [
        (sl.typeof(v), sl.unshard(v).tolist()) if isinstance(v, sl.ShardedTensor) else repr(v)
        for v in leaves
    ]
    return f"{spec} {told}"


@given(st.data())
def test_placements_read_back_as_the_layout_that_wrote_them(data: Any) -> None:
    mesh = data.draw(meshes())
    layout = only(data.draw(layouts(special=False)), mesh)
    layout = Layout(
        tuple(type(d)(tuple(sorted(d.axes, key=list(mesh).index))) for d in layout.dims),
        layout.partial,
    )
    placed = list(layout.placements(mesh))
    ndim = len(layout.dims)
    ends = [Shard(p.dim - ndim) if isinstance(p, Shard) else p for p in placed]
    for one in (placed, tuple(placed), ends):
        assert as_layout(one, "", "{}", mesh=mesh).resolve(ndim) == layout
    if not layout.partial:
        dims = [d.axes if len(d.axes) > 1 else d.axes[0] if d.axes else None for d in layout.dims]
        assert as_layout(tuple(dims), "", "{}").resolve(ndim) == layout == sl.P(*dims).resolve(ndim)
    spec = PartitionSpec(*(d.axes or None for d in layout.dims), unreduced={*layout.partial})
    assert as_layout(spec, "", "{}").resolve(ndim) == layout


TREES = [
    ("x", {"a": 1, "b": (2, 3)}, ["x", "x", "x"]),
    ({"a": "x", "b": "y"}, {"a": 1, "b": (2, 3)}, ["x", "y", "y"]),
    ({"a": "x", "b": ("y", None)}, {"a": 1, "b": {"c": 2}}, ["x", ("y", None)]),
    (("x", ("y", "z")), (1, (2, 3)), ["x", "y", "z"]),
    (["x", "y"], (1, {"c": 2, "d": 3}), ["x", "y", "y"]),
    ([[Shard(0)], "y"], [1, 2], [[Shard(0)], "y"]),
    ([Shard(0)], [1, 2, 3], [[Shard(0)]] * 3),
    (sl.P("x", "y"), (1, 2), [sl.P("x", "y")] * 2),
    ((), (), []),
    ((), None, []),
    ("x", None, []),
    ((), {"a": 1}, [()]),
]


@pytest.mark.parametrize(("given", "tree", "found"), TREES, ids=lambda v: str(v)[:20])
def test_a_tree_of_layouts_is_the_upper_part_of_a_tree(given: Any, tree: Any, found: Any) -> None:
    assert per_leaf(given, tree, "shard", "{}") == found


@pytest.mark.parametrize(
    ("given", "tree"),
    [
        ({"a": "x"}, {"b": 1}),
        (("x", "y"), (1, 2, 3)),
        ({"a": "x"}, (1,)),
        (["x"], {"a": 1}),
        (3, [1]),
    ],
)
def test_a_tree_of_layouts_unlike_the_tensors_is_refused(given: Any, tree: Any) -> None:
    with pytest.raises(LayoutSyntax, match="no tree of layouts like"):
        per_leaf(given, tree, "shard", "sl.shard(x, {})")


def test_placements_name_the_axes_of_the_mesh_that_they_are_for() -> None:
    assert sl.typeof(sl.shard(X, [Shard(1)], mesh=sl.simulate(q=2))) == "f32[4, 4@q]"
    with pytest.raises(LayoutSyntax, match="and no mesh is in scope"):
        Layout.parse("x .") * [Shard(0)]
    with sl.simulate(x=2, y=2):
        for wrong in ([Shard(0)], [Shard(0)] * 3):
            with pytest.raises(LayoutSyntax, match="the mesh has x, y"):
                sl.shard(X, wrong)
        with pytest.raises(NotExpressible, match="a pending max"):
            sl.shard(X, [Shard(0), Partial("max")])
        with pytest.raises(sl.errors.UnknownAxis, match="'z'"):
            sl.shard(X, ("z", None))
        with pytest.raises(sl.errors.RankMismatch):
            sl.shard(X, ("x", None, None))


def test_real_ranks_place_what_jax_and_dtensor_write(pool: Any) -> None:
    want = ["f32[4@x, 4]", "f32[4, 4@y]", "f32[4, 4@(x y)]"] * 2
    assert pool.run(_placed, x=2, y=2) == [want] * 4


def _placed() -> list[str]:
    tree = {"a": X, "b": X, "c": X}
    tuples = {"a": ("x", None), "b": (None, "y"), "c": PartitionSpec(None, ("x", "y"))}
    placements = {"a": [Shard(0), Replicate()], "b": [Replicate(), Shard(1)], "c": [Shard(-1)] * 2}
    return [t for given in (tuples, placements) for t in sl.typeof(sl.shard(tree, given)).values()]
