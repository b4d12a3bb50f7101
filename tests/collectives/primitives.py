"""One list of primitives with their meaning written as a
loop over ranks; every back end must agree.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib.collectives import ragged_all_to_all, unwrap, wrap

Blocks = list[Tensor]
Reference = Callable[[Blocks, int], Blocks]  # blocks of one group -> results of that group


def block(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What rank holds: [4, 6], different everywhere."""
    return (torch.arange(24).reshape(4, 6) * 0.5 + rank * 100 + (rank % 3)).to(dtype)


def groups(mesh: dict[str, int], axis: Any) -> list[list[int]]:
    """Ranks that communicate together, each in the order of the flattened axis."""
    axes = (axis,) if isinstance(axis, str) else axis
    names, out = list(mesh), {}
    for rank, c in enumerate(itertools.product(*(range(n) for n in mesh.values()))):
        place = dict(zip(names, c, strict=True))
        index = 0
        for a in axes:
            index = index * mesh[a] + place[a]
        out.setdefault(tuple(v for n, v in place.items() if n not in axes), []).append(
            (index, rank)
        )
    return [[r for _, r in sorted(g)] for g in out.values()]


def total(blocks: Blocks) -> Tensor:
    return torch.stack(blocks).sum(0)


def permuted(pairs: list[tuple[int, int]]) -> Reference:
    def f(blocks: Blocks, p: int) -> Blocks:
        out = [torch.zeros_like(blocks[0]) for _ in blocks]
        for s, d in pairs:
            out[d] = blocks[s]
        return out

    return f


def cycle(by: int) -> Reference:
    return lambda b, p: [b[(i - by) % p] for i in range(p)]


def cost(kind: str, n: int, p: int) -> tuple[float, int]:
    return {
        "gather": ((p - 1) * n, p - 1), "scatter": ((p - 1) * n / p, p - 1),
        "reduce": (2 * (p - 1) * n / p, 2 * (p - 1)),
        "one": ((p - 1) * n / p, 1), "shift": (n, 1), "none": (0, 0),
    }[kind]  # fmt: skip


def in_reverse(x: Tensor, axis: Any) -> Tensor:
    """Transfers of equal shape between the same ranks; each must
    get its own, whichever is awaited first.
    """
    posted = [
        sl.collectives.start(sl.collectives.preduce, x, axis, 0),
        sl.collectives.start(sl.collectives.preduce, 2 * x, axis, 0),
        sl.collectives.start(sl.collectives.shift, x, axis),
        sl.collectives.start(sl.collectives.shift, 3 * x, axis),
        sl.collectives.start(sl.collectives.pbroadcast, x, axis, 0),
    ]  # fmt: skip
    return torch.stack([p.wait() for p in reversed(posted)][::-1])


def ragged_counts(p: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((i + 2 * j) % 3 + (i == j) for j in range(p)) for i in range(p))


def ragged_most(p: int) -> int:
    return max(map(sum, ragged_counts(p)))


def ragged(blocks: Blocks, p: int) -> Blocks:
    counts, out = ragged_counts(p), []
    long = max(map(sum, zip(*counts, strict=True)))
    for j in range(p):
        parts = [b.reshape(-1)[sum(counts[i][:j]) :][: counts[i][j]] for i, b in enumerate(blocks)]
        came = torch.cat(parts)
        out.append(torch.cat([came, came.new_zeros(long - len(came))]))
    return out


# name -> (call on the local block and axis, reference per group, cost kind)
PRIMITIVES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Reference, str]] = {
    "psum": (sl.psum, lambda b, p: [total(b)] * p, "reduce"),
    "pmean": (sl.pmean, lambda b, p: [total(b) / p] * p, "reduce"),
    "pmax": (sl.pmax, lambda b, p: [torch.stack(b).amax(0)] * p, "reduce"),
    "all_gather 0": (lambda x, a: sl.all_gather(x, a, 0), lambda b, p: [torch.cat(b, 0)] * p, "gather"),
    "all_gather 1": (lambda x, a: sl.all_gather(x, a, -1), lambda b, p: [torch.cat(b, 1)] * p, "gather"),
    "all_gather stack": (lambda x, a: sl.all_gather(x, a, 0, tiled=False), lambda b, p: [torch.stack(b)] * p, "gather"),
    "psum_scatter 0": (lambda x, a: sl.psum_scatter(x, a, 0), lambda b, p: list(total(b).chunk(p, 0)), "scatter"),
    "psum_scatter of a view": (
        lambda x, a: sl.psum_scatter(x.mT, a, 1), lambda b, p: list(total(b).T.chunk(p, 1)), "scatter"
    ),
    "pslice": (lambda x, a: sl.collectives.pslice(x, a, 0), lambda b, p: [x.chunk(p, 0)[i] for i, x in enumerate(b)], "none"),
    "shift +1": (lambda x, a: sl.collectives.shift(x, a), cycle(1), "shift"),
    "shift -1": (lambda x, a: sl.collectives.shift(x, a, -1), cycle(-1), "shift"),
    "shift of a view": (lambda x, a: sl.collectives.shift(x[:, 1:3], a), lambda b, p: cycle(1)([x[:, 1:3] for x in b], p), ""),
    "ppermute identity": (
        lambda x, a: sl.ppermute(x, a, [(i, i) for i in range(sl.axis_size(a))]), lambda b, p: b, "none"
    ),
    "ppermute partial": (lambda x, a: sl.ppermute(x, a, [(0, 1)]), permuted([(0, 1)]), ""),
    "ppermute swap": (lambda x, a: sl.ppermute(x, a, [(1, 0), (0, 1)]), permuted([(1, 0), (0, 1)]), ""),
    "all_to_all 0 1": (
        lambda x, a: sl.all_to_all(x, a, 0, 1),
        lambda b, p: [torch.cat([x.chunk(p, 0)[i] for x in b], 1) for i in range(p)], "scatter",
    ),
    "all_to_all 0 0": (
        lambda x, a: sl.all_to_all(x, a, 0, 0),
        lambda b, p: [torch.cat([x.chunk(p, 0)[i] for x in b], 0) for i in range(p)], "scatter",
    ),
    "pbroadcast 0": (lambda x, a: sl.collectives.pbroadcast(x, a, 0), lambda b, p: [b[0]] * p, "one"),
    "pbroadcast 1": (lambda x, a: sl.collectives.pbroadcast(x, a, 1), lambda b, p: [b[1]] * p, "one"),
    "pbroadcast of a view": (lambda x, a: sl.collectives.pbroadcast(x.mT, a, 1), lambda b, p: [b[1].T] * p, "one"),
    "preduce 0": (
        lambda x, a: sl.collectives.preduce(x, a, 0), lambda b, p: [total(b), *[torch.zeros_like(b[0])] * (p - 1)], "one"
    ),
    "preduce 1": (
        lambda x, a: sl.collectives.preduce(x, a, 1),
        lambda b, p: [total(b) if i == 1 else torch.zeros_like(b[0]) for i in range(p)], "one",
    ),
    "axis_index": (lambda x, a: x * 0 + sl.axis_index(a), lambda b, p: [x * 0 + i for i, x in enumerate(b)], "none"),
    "pick": (lambda x, a: (x * sl.collectives.pick([3.0, 5.0, 7.0, 9.0][: sl.axis_size(a)], a)).to(x.dtype), lambda b, p: [x * (3 + 2 * i) for i, x in enumerate(b)], "none"),
    "start pbroadcast": (lambda x, a: sl.collectives.start(sl.collectives.pbroadcast, x, a, 1).wait(), lambda b, p: [b[1]] * p, "one"),
    "start shift": (lambda x, a: sl.collectives.start(sl.collectives.shift, x, a, -1).wait(), cycle(-1), "shift"),
    "start all_gather": (lambda x, a: sl.collectives.start(sl.all_gather, x, a, 1).wait(), lambda b, p: [torch.cat(b, 1)] * p, "gather"),
    "start psum_scatter": (lambda x, a: sl.collectives.start(sl.psum_scatter, x, a, 0).wait(), lambda b, p: list(total(b).chunk(p, 0)), "scatter"),
    "start psum": (lambda x, a: sl.collectives.start(sl.psum, x, a).wait(), lambda b, p: [total(b)] * p, "reduce"),
    "start by default": (lambda x, a: sl.collectives.start(sl.collectives.pbroadcast, x, a).wait(), lambda b, p: [b[0]] * p, "one"),
    "start by name": (lambda x, a: sl.collectives.start(sl.all_gather, x, a, dim=-1).wait(), lambda b, p: [torch.cat(b, 1)] * p, "gather"),
    "start pmax": (lambda x, a: sl.collectives.start(sl.pmax, x, a).wait(), lambda b, p: [torch.stack(b).amax(0)] * p, "reduce"),
    "start preduce": (
        lambda x, a: sl.collectives.start(sl.collectives.preduce, x, a, 0).wait(), lambda b, p: [total(b), *[torch.zeros_like(b[0])] * (p - 1)], "one"
    ),
    "start ppermute": (
        lambda x, a: sl.collectives.start(sl.ppermute, x, a, [(i, i) for i in range(sl.axis_size(a))]).wait(), lambda b, p: b, "none"
    ),
    "start all_to_all": (
        lambda x, a: sl.collectives.start(sl.all_to_all, x, a, -2, -1).wait(),
        lambda b, p: [torch.cat([x.chunk(p, 0)[i] for x in b], 1) for i in range(p)], "scatter",
    ),
    "ragged_all_to_all": (
        lambda x, a: ragged_all_to_all(x.reshape(-1)[: ragged_most(sl.axis_size(a))], a, ragged_counts(sl.axis_size(a))),
        lambda b, p: ragged(b, p), "",
    ),
    "ppermute nowhere": (lambda x, a: sl.ppermute(x, a, []), permuted([]), "none"),
    "waited for in reverse": (in_reverse, lambda b, p: [
        torch.stack([total(b) * (i == 0), 2 * total(b) * (i == 0), b[(i - 1) % p], 3 * b[(i - 1) % p], b[0]]) for i in range(p)
    ], ""),
    "two in flight": (
        lambda x, a: (lambda one, two: one.wait() + two.wait())(sl.collectives.start(sl.collectives.shift, x, a, 1), sl.collectives.start(sl.collectives.pbroadcast, x, a, 0)),
        lambda b, p: [b[(i - 1) % p] + b[0] for i in range(p)], "",
    ),
    "start psum, narrow": (
        lambda x, a: sl.collectives.start(sl.psum, x, a, out=torch.float32, wire=torch.float32).wait().to(x.dtype),
        lambda b, p: [total(b)] * p, ""
    ),
    "start psum, narrow back": (
        lambda x, a: sl.collectives.start(sl.psum, x[:3, :3], a, out=torch.float32).wait().to(x.dtype), lambda b, p: [total(b)[:3, :3]] * p, ""
    ),
    "start psum_scatter, narrow": (
        lambda x, a: sl.collectives.start(sl.psum_scatter, x, a, 0, wire=torch.float32).wait(), lambda b, p: list(total(b).chunk(p, 0)), ""
    ),
    "psum of a scalar": (lambda x, a: sl.psum(x[0, 0], a), lambda b, p: [total(b)[0, 0]] * p, ""),
    "psum of nothing": (lambda x, a: sl.psum(x[:0], a), lambda b, p: [b[0][:0]] * p, ""),
}  # fmt: skip

ADJOINTS = [
    n for n in PRIMITIVES if not n.startswith(("start", "two", "waited", "axis", "psum of nothing"))
]


def expected(name: str, mesh: dict[str, int], axis: Any, dtype: torch.dtype) -> Blocks:
    """Results by rank."""
    reference = PRIMITIVES[name][1]
    out: dict[int, Tensor] = {}
    for ranks in groups(mesh, axis):
        results = reference([block(r, dtype) for r in ranks], len(ranks))
        out.update(zip(ranks, results, strict=True))
    return [out[r] for r in range(math.prod(mesh.values()))]


def on_rank(name: str, axis: Any, dtype: torch.dtype) -> tuple[Tensor, Any, int]:
    """Run one primitive where this process is one rank (or records)."""
    mesh = sl.current_mesh()
    rank = 0
    for n, s in mesh.items():
        rank = rank * s + (mesh.coord or dict.fromkeys(mesh, 0))[n]
    x = block(rank, dtype).to(mesh.device)
    with sl.trace() as t:
        out = PRIMITIVES[name][0](x, axis)
    return out.clone(), t.bytes, t.messages


def all_on_rank(axes: list[Any]) -> dict[Any, tuple[Tensor, Any, int]]:
    return {(n, a): on_rank(n, a, torch.float64) for a in axes for n in PRIMITIVES}


def adjoint_gap(name: str, axis: Any) -> float:
    """|<y, A x> - <A^T y, x>| over all real ranks, relative."""
    mesh = sl.current_mesh()
    rank = sum(
        mesh.coord[n] * math.prod(list(mesh.sizes)[i + 1 :]) for i, n in enumerate(mesh.names)
    )
    x = torch.randn(
        4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    ).requires_grad_()
    y = PRIMITIVES[name][0](x, axis)
    g = torch.randn(
        y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank)
    )
    y.backward(g)
    sides = torch.stack([(y.detach() * g).sum(), (x.detach() * x.grad).sum()])
    left, right = sl.psum(sides, tuple(mesh.names)).tolist()
    return abs(left - right) / max(1.0, abs(left))


def gradient(name: str, axis: Any, x: Tensor) -> Tensor | None:
    """Of the sum of squares of the result, on this rank or on all simulated ones."""
    x = x.detach().clone().requires_grad_()
    PRIMITIVES[name][0](x, axis).square().sum().backward()
    return x.grad


def all_gradients(axes: list[Any], blocks: Tensor) -> dict[Any, Tensor | None]:
    mesh = sl.current_mesh()
    x = blocks[sl.axis_index(mesh.names)]
    return {(n, a): gradient(n, a, x) for a in axes for n in ADJOINTS}


def of_nothing(axis: Any) -> list[torch.Size]:
    """Shapes of what comes back for blocks without elements."""
    x = sl.axis_index(axis) * torch.zeros(0, 4)
    return [
        y.shape
        for y in (
            sl.psum(x, axis), sl.all_gather(x, axis, 0), sl.all_gather(x, axis, 1),
            sl.psum_scatter(x, axis, 1),
            sl.psum_scatter(x, axis, 0), sl.collectives.shift(x, axis),
            sl.collectives.pbroadcast(x, axis, 1), sl.collectives.preduce(x, axis, 1),
            sl.all_to_all(x, axis, 1, 0), sl.all_to_all(x, axis, 0, 1),
            sl.collectives.pslice(x, axis, 1), sl.ppermute(x, axis, [(0, 1)]),
        )
    ]  # fmt: skip


def halves(dtype: torch.dtype, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of half precision blocks: scattered, and at the root."""
    mesh = sl.current_mesh()
    x = blocks[sl.axis_index("x")] if mesh.kind == "dist" else wrap(blocks, mesh)
    return sl.psum_scatter(x.to(dtype), "x"), sl.collectives.preduce(x.to(dtype), "x", 1).clone()


def linear_adjoints(axes: list[Any]) -> dict[Any, float]:
    return {(n, a): adjoint_gap(n, a) for a in axes for n in ADJOINTS if n != "pmax"}


def stacked_input(mesh: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return wrap(torch.stack([block(r, dtype) for r in range(mesh.size)]), mesh)


__all__ = [
    "ADJOINTS", "PRIMITIVES", "all_gradients", "all_on_rank", "expected", "gradient", "halves",
    "linear_adjoints", "of_nothing", "stacked_input", "unwrap",
]  # fmt: skip

MESHES: list[tuple[dict[str, int], list[Any]]] = [
    ({"x": 2, "y": 2}, ["x", "y", ("x", "y"), ("y", "x")]),
    ({"x": 4}, ["x"]),
    ({"data": 2, "x": 1, "y": 2}, ["data", "y", ("y", "data")]),
]
EACH = [(m, a) for m, axes in MESHES for a in axes]
