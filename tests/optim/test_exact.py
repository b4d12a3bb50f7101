"""Under zero every step is the optimizer's own, bit for bit, given the same reduced gradient.

The gradients are small multiples of 1/16, so that their sums are exact in whatever order.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.collectives import played, storage
from shardlib.mesh import rank_along
from shardlib.optim.stage3 import Parts, Reading
from shardlib.tensor import Place

o = sl.optim
SIZES = [0, 1, 2, 3, 5, 7, 13, 53, 64, 97, 127, 131]
TX = {
    "adamw": lambda: o.adamw(0.03, weight_decay=0.1),
    "clipped": lambda: o.chain(o.clip_by_global_norm(0.5), o.adamw(0.03)),
    "momentum": lambda: o.sgd(0.03, 0.9, nesterov=True),
    "lion": lambda: o.lion(0.03, weight_decay=0.1),
    "adagrad": lambda: o.adagrad(0.03),
    "rmsprop": lambda: o.rmsprop(0.03),
    "groups": lambda: o.partition(
        {"a": o.adamw(0.03), "b": o.chain(o.clip_by_value(0.1), o.sgd(0.1))},
        lambda tree: {k: "ab"[int(k[1:]) % 2] for k in tree},
    ),
}
MESHES = [
    ({"data": 1, "x": 2, "y": 2}, "data", None),
    ({"data": 2, "x": 2, "y": 2}, "data", None),
    ({"data": 3, "x": 1, "y": 2}, "data", None),
    ({"data": 4, "x": 1, "y": 1}, "data", None),
    ({"data": 8, "x": 1, "y": 1}, "data", None),
    ({"x": 2, "data": 2, "y": 1, "pod": 2}, ("pod", "data"), None),
    ({"pod": 3, "x": 1, "data": 2, "y": 1}, ("pod",), "data"),
    ({"data": 2, "x": 2, "y": 1, "d": 2}, ("data",), None),  # 2.5D: the weights are copied over d
]
LAYOUTS = {0: [""], 1: [".", "x", "y", "(x y)"], 2: ["x y", "y x", ". x", "(y x) .", ". ."]}


@st.composite
def sets(draw: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    out = {}
    for i in range(draw(st.integers(2, 9))):
        ndim = draw(st.sampled_from([0, 1, 1, 2, 2]))
        shape = tuple(draw(st.sampled_from(SIZES)) for _ in range(ndim))
        out[f"p{i}"] = shape, draw(st.sampled_from(LAYOUTS[ndim]))
    return out


def value(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pending(like: sl.ShardedTensor, total: torch.Tensor, axes: tuple[str, ...]) -> sl.ShardedTensor:
    """``total`` as the sum over axes of parts that differ, whose sum is exact."""
    mesh, whole = like.mesh, sl.shard(total, like.sharding, pad=True)
    p = mesh.axis_size(axes)
    blocks = []
    for coord, block in zip(played(mesh), sl.collectives.blocks(whole.raw, mesh), strict=True):
        rank = rank_along(axes, coord, mesh.axes)
        noise = torch.arange(block.numel()).reshape(block.shape) % 7 / 16
        blocks.append(noise * (rank + 1) if rank < p - 1 else block - noise * (p * (p - 1) / 2))
    layout = sl.Layout(like.dims, tuple(sorted(axes)))
    return sl.ShardedTensor(
        storage(blocks, mesh), Place(layout, like.shape, mesh, like.padded_shape)
    )


def back(parts: Any, grads: dict[str, sl.ShardedTensor]) -> Any:
    """Gradients of parts, from those of whole parameters that came through backward of a gather."""
    mine = {n: x.raw.detach().requires_grad_() for n, x in parts.items()}
    reading = Reading(parts.like({n: parts[n].becomes(raw) for n, raw in mine.items()}))
    read, given = [], []
    for i, (b, n) in parts.index.where.items():
        slot = parts.index.buckets[b].slots[n]
        read.append(reading.read(reading.buckets[parts.index.buckets[b].name], slot.leaves[0]))
        given.append(grads[parts.paths[i]].raw)
    found = torch.autograd.grad(read, list(mine.values()), given)
    return parts.like({n: parts[n].becomes(g) for n, g in zip(mine, found, strict=True)})


def train(
    tx: Any, shapes: Any, axes: tuple[str, ...], how: str, dtype: torch.dtype = torch.float32
) -> Any:
    params = {
        k: sl.shard(value(s, i).to(dtype), layout, pad=True)
        for i, (k, (s, layout)) in enumerate(shapes.items())
    }
    places = {k: p.becomes(p.raw.detach()) for k, p in params.items()}  # a step gives params up
    split = how != "reduced"
    params = tx.shard(params)
    state = tx.init(params)
    for t in range(3):
        grads: Any = {}
        for i, (k, (s, _)) in enumerate(shapes.items()):
            total = (value(s, 100 * t + i) * 16).round() / 16
            p = places[k]
            g = pending(p, total, axes) if split else sl.shard(total, p.sharding, pad=True)
            grads[k] = g.becomes(g.raw.to(dtype)) if dtype != torch.float32 else g
        if how == "buckets":
            sink = tx.sink(params)
            for i, k in reversed(list(enumerate(sorted(params)))):
                sink.take(i, grads[k].raw)
            grads = sink.finish()
        if isinstance(params, Parts):
            grads = back(params, grads) if split else params.like(dict(tx.shard(grads)))
        params, state, _ = o.step(tx, params, grads, state)
    if isinstance(params, Parts):
        with torch.no_grad(), params.opened() as whole:
            return {k: p.raw.clone() for k, p in whole.items()}, state
    return {k: p.raw for k, p in params.items()}, state


def unequal(name: str, shapes: Any, axes: Any, inner: Any, stage: int, mb: float) -> list[str]:
    cut = (*((axes,) if isinstance(axes, str) else axes), *((inner,) if inner else ()))
    want, _ = train(TX[name](), shapes, cut, "reduced")
    wrong = []
    for how in ("reduced", "pending", "buckets")[: 2 if stage == 3 else 3]:
        tx = o.zero(TX[name](), axes, stage, bucket_mb=mb, inner=inner)
        got, _ = train(tx, shapes, cut, how)
        wrong += [f"{name} {how} {k} {shapes[k]}" for k in want if not torch.equal(got[k], want[k])]
    return wrong


@settings(max_examples=40, deadline=None)
@given(
    sets(),
    st.sampled_from(sorted(TX)),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1e-3, 25.0]),
)
def test_every_step_is_the_unsharded_optimizers_bit_for_bit(
    shapes: Any, name: str, case: Any, stage: int, mb: float
) -> None:
    axes, over, inner = case
    with sl.simulate(**axes):
        assert unequal(name, shapes, over, inner, stage, mb) == []


def stepped(tx: Any, shapes: Any, laid: bool) -> dict[str, torch.Tensor]:
    """Parameters after three steps, whole; plain ones in one process unless ``laid``."""

    def lie(x: torch.Tensor, layout: str) -> Any:
        return sl.shard(x, layout, pad=True) if laid else x

    params = {k: lie(value(s, i), layout) for i, (k, (s, layout)) in enumerate(shapes.items())}
    state = tx.init(params)
    for t in range(3):
        grads = {
            k: lie(value(s, 100 * t + i), layout)
            for i, (k, (s, layout)) in enumerate(shapes.items())
        }
        params, state, _ = o.step(tx, params, grads, state)
    return {k: sl.unshard(p) if laid else p for k, p in params.items()}


@settings(max_examples=40, deadline=None)
@given(
    sets(),
    st.sampled_from(sorted(set(TX) - {"clipped"})),  # whose norm is summed in another order
    st.sampled_from([{"x": 2, "y": 1}, {"x": 1, "y": 3}, {"x": 2, "y": 2}, {"x": 4, "y": 1}]),
)
def test_a_step_rounds_alike_under_every_layout(shapes: Any, name: str, axes: Any) -> None:
    """Also the last elements of a block, which fill no vector of a kernel."""
    want = stepped(TX[name](), shapes, False)
    with sl.simulate(**axes):
        got = stepped(TX[name](), shapes, True)
    assert [k for k in want if not torch.equal(got[k], want[k])] == []


FIXED = {
    "a": ((131, 7), "x ."),
    "b": ((53,), "x"),
    "c": ((), ""),
    "d": ((0, 3), ". ."),
    "e": ((97, 64), ". x"),
    "f": ((301,), "."),
}


@pytest.mark.parametrize(
    ("mesh", "axes", "inner"),
    [
        ({"data": 2, "x": 2}, "data", None),
        ({"data": 4, "x": 1}, "data", None),
        ({"x": 1, "pod": 2, "data": 2}, ("data", "pod"), None),
        ({"x": 1, "pod": 2, "data": 2}, "pod", "data"),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_real_ranks_too(stage: int, mesh: Any, axes: Any, inner: Any, pool: Any) -> None:
    names = ("clipped", "lion") if (stage + len(mesh)) % 2 else ("lion", "clipped")
    for name, mb in zip(names, (1e-3, 25.0), strict=True):  # the rest of the product is simulated
        assert pool.run(unequal, name, FIXED, axes, inner, stage, mb, **mesh) == [[]] * 4
