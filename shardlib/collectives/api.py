"""Named-axis collectives on local blocks.

``axis`` is a mesh axis or a tuple of them, flattened major first; n is the bytes of x and p the
axis size in the costs below.  Gradients are exact adjoints of the map that all ranks compute
together.  A one-sized axis moves nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from numbers import Number
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives.backends import BACKENDS, Backend, backend, dist
from shardlib.collectives.backends.backend import Axes, Finish
from shardlib.collectives.backends.streams import beside
from shardlib.collectives.count import Trace, note
from shardlib.collectives.simulate import Stacked, of
from shardlib.collectives.varying import Varies, after_move, differing, real
from shardlib.errors import (
    BadArgument,
    RankMismatch,
    ShardError,
    UnevenSplit,
    Unsupported,
    WrongAxes,
)
from shardlib.mesh import GROUPS, POSTED, RECENT, Mesh, current_mesh, lost, number, scope, uploaded

__all__ = [
    "Pending", "all_gather", "all_to_all", "axis_index", "axis_size", "blocks", "broadcasts",
    "each_rank", "gather_into", "held", "holds_values", "lead", "pbroadcast", "pcast", "pick",
    "played", "pmax", "pmean", "ppermute", "preduce", "preduce_into", "pslice", "psum",
    "psum_scatter", "pvary", "ragged_all_to_all", "reductions", "scatter_into", "shift",
    "spans_processes", "start", "start_ppermutes", "storage", "unwrap", "wrap",
]  # fmt: skip

Axis = str | tuple[str, ...]
T = TypeVar("T")


def wrap(raw: Tensor, mesh: Mesh) -> Tensor:
    """Wrap a storage as a local block: unchanged, or Stacked under simulate."""
    return Stacked(raw, mesh) if mesh.kind == "stacked" else raw


def unwrap(local: Tensor) -> Tensor:
    """Return the storage of a local block."""
    return local.ranks if type(local) is Stacked else local


def held(local: Tensor, mesh: Mesh) -> Tensor:
    """Return the storage of a local block, or of a plain tensor that every rank holds."""
    return of(local, mesh) if mesh.kind == "stacked" else local


def played(mesh: Mesh) -> list[dict[str, int]]:
    """List the coordinates of the ranks that run in this process.

    >>> import shardlib as sl
    >>> played(sl.simulate(x=2)), played(sl.record(x=1000))
    ([{'x': 0}, {'x': 1}], [{'x': 0}])
    """
    return backend(mesh).played(mesh)


def storage(blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Join the blocks of this process's ranks to a storage: stacked, or the only one."""
    return backend(mesh).storage(blocks, mesh)


def blocks(raw: Tensor, mesh: Mesh) -> list[Tensor]:
    """List the block of each rank of this process, as views: writes go to the storage."""
    return backend(mesh).blocks(raw, mesh)


def lead(mesh: Mesh) -> int:
    """Count the dimensions that a storage has in front of a block's.

    1 where one process simulates several ranks.
    """
    return BACKENDS[mesh.kind].lead


def holds_values(mesh: Mesh) -> bool:
    """Check whether blocks hold values, not shapes only."""
    return backend(mesh).holds_values


def spans_processes(mesh: Mesh) -> bool:
    """Check whether other processes run the other ranks, and may hold other values."""
    return backend(mesh).spans_processes


def each_rank(mesh: Mesh) -> Iterator[tuple[dict[str, int], Callable[[Tensor], Tensor]]]:
    """Yield (coordinate, view) of every rank in this process; view(raw) is its block of a storage.

    For local code that differs between ranks in more than values; writes to the views go to the
    storage.
    """
    for i, coord in enumerate(played(mesh)):
        yield coord, lambda raw, i=i: raw[i] if lead(mesh) else raw


# ---------------------------------------------------------------- shared by all collectives


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@dataclass(frozen=True, eq=False)
class _Collective:
    """Record of a linear collective; ``params`` are its arguments besides the axes.

    ``post``     its function in a back end.
    ``adjoint``  params -> the collective that computes the gradient, and its params.
    ``moved``    (bytes of a block, axis size, params) -> bytes received, /, messages; None: it
                 moves nothing.
    """

    name: str
    post: Callable[[Backend], Callable[..., Finish]]
    adjoint: Callable[..., tuple["_Collective", tuple]]
    moved: Callable[[int, int, tuple], tuple[int, int, int]] | None = None


def _one_permuted(b: Backend) -> Callable[..., Finish]:
    return lambda raw, mesh, axes, pairs: b.ppermutes([raw], mesh, axes, [pairs])[0]


def _permuted(n: int, p: int, params: tuple) -> tuple[int, int, int]:
    moving = sum(s != d for s, d in params[0])
    return n * moving, p, int(moving > 0)


def _moved_apart(counts: "Counts") -> int:
    """Count the elements sent to another rank, over all ranks."""
    return sum(n for i, row in enumerate(counts) for j, n in enumerate(row) if i != j)


def _unlinear(*_: object) -> tuple[_Collective, tuple]:
    raise AssertionError("pmax has its own gradient")


_PSUM = _Collective(
    "psum",
    lambda b: b.psum,
    lambda *_: (_PSUM, ()),
    lambda n, p, _: (2 * (p - 1) * n, p, 2 * (p - 1)),
)
_PMAX = _Collective("pmax", lambda b: b.pmax, _unlinear, _PSUM.moved)
_ALL_GATHER = _Collective(
    "all_gather",
    lambda b: b.all_gather,
    lambda dim: (_PSUM_SCATTER, (dim,)),
    lambda n, p, _: ((p - 1) * n, 1, p - 1),
)
_PSUM_SCATTER = _Collective(
    "psum_scatter",
    lambda b: b.psum_scatter,
    lambda dim, wire=None: (_ALL_GATHER, (dim,)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)
_PSLICE = _Collective("pslice", lambda b: b.pslice, lambda dim: (_PLACE, (dim,)))
_PLACE = _Collective("place", lambda b: b.place, lambda dim: (_PSLICE, (dim,)))
_PPERMUTE = _Collective(
    "ppermute",
    _one_permuted,
    lambda pairs: (_PPERMUTE, (tuple((d, s) for s, d in pairs),)),
    _permuted,
)
_ALL_TO_ALL = _Collective(
    "all_to_all",
    lambda b: b.all_to_all,
    lambda split, concat: (_ALL_TO_ALL, (concat, split)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)
_RAGGED = _Collective(
    "ragged_all_to_all",
    lambda b: lambda x, mesh, axes, counts, width: b.ragged_all_to_all(x, mesh, axes, counts),
    lambda counts, width: (_RAGGED, (tuple(zip(*counts, strict=True)), width)),
    lambda n, p, params: (_moved_apart(params[0]) * params[1], p, p - 1),
)
_PBROADCAST = _Collective(
    "pbroadcast",
    lambda b: b.pbroadcast,
    lambda root: (_PREDUCE, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)
_PREDUCE = _Collective(
    "preduce",
    lambda b: b.preduce,
    lambda root: (_PBROADCAST, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)


def _nothing_moves(b: Backend) -> Callable[..., Finish]:
    return lambda raw, *_: lambda: raw.view_as(raw)


_PVARY = _Collective("pvary", _nothing_moves, lambda: (_PSUM, ()))

_ADDING = frozenset({_PSUM, _PMAX, _PSUM_SCATTER, _PREDUCE})
_SIDE = dict.fromkeys(_ADDING, "sum")  # kind of side stream; that of all others is "gather"


def _lost(e: RuntimeError, op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes) -> None:
    """Raise RankFailed if the error comes from a transfer between processes."""
    if mesh.device_mesh is None:
        return
    entry = next((r for r in reversed(RECENT) if r[1] == op.name and r[2] == axes), None)
    entry = entry or ("?", op.name, axes, raw.shape, raw.dtype)
    lost(e, entry, dist.group(mesh, axes).ranks)


class _Moved(Local):
    """A linear collective on raw storage; its backward is the adjoint collective."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, op: _Collective, mesh: Mesh, axes: Axes, params: tuple
    ) -> Tensor:
        ctx.call = op, mesh, axes, params
        try:
            return raw.view_as(raw) if op is _PVARY else _finish(op, raw, mesh, axes, params)()
        except RuntimeError as e:
            _lost(e, op, raw, mesh, axes)
            raise

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, mesh, axes, params = ctx.call
        back, given = op.adjoint(*params)
        return _raw_call(back, grads[0], mesh, axes, given), None, None, None, None


class _Max(Local):
    """pmax; the gradient goes to the ranks that hold the maximum, shared if there are several."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        try:
            out = _finish(_PMAX, raw, mesh, axes, ())()
        except RuntimeError as e:
            _lost(e, _PMAX, raw, mesh, axes)
            raise
        ctx.place = mesh, axes
        ctx.save_for_backward(raw, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (raw, out), (mesh, axes) = ctx.saved_tensors, ctx.place
        held = (raw == out).to(grads[0].dtype)
        both = _raw_call(_PSUM, torch.stack([grads[0], held], -1), mesh, axes, ())
        return held * both[..., 0] / both[..., 1], None, None


def _finish(op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Count and post a collective; return the function that waits for its result."""
    dtype = raw.dtype
    if dtype not in _SENT:
        return _finish_other(op, raw, mesh, axes, params)
    if mesh.device_mesh is not None:
        RECENT.append((number(), op.name, axes, raw.shape, dtype))
    if traces := scope().listeners.traces:
        ends = _note(traces, op, raw, mesh, axes, params)
        return _ended(op.post(backend(mesh))(raw, mesh, axes, *params), ends)
    return op.post(backend(mesh))(raw, mesh, axes, *params)


def _ahead(op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Post a transfer that overlaps with other work; otherwise as ``_finish``."""
    if raw.is_cpu:
        return _finish(op, raw, mesh, axes, params)
    post = partial(_finish, op, raw, mesh, axes, params)
    return _beside(_SIDE.get(op, "gather"), post, mesh, axes, raw)


def _beside(
    kind: str, post: Callable[[], Finish], mesh: Mesh, axes: Axes, *memory: Tensor
) -> Finish:
    """Post on a side stream, if the device has streams and the transport keeps their order."""
    if memory[0].is_cpu or not backend(mesh).in_streams(mesh, axes):
        return post()
    return beside(kind, post, *memory)


def _finish_other(op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Do as ``_finish`` for a dtype that no transport supports, by sending it as another one."""
    dtype = raw.dtype
    if dtype in _SMALL and op in _ADDING:
        wide = _finish(op, raw.to(torch.int32), mesh, axes, params)
        return lambda: wide().to(dtype)
    if op in _ADDING and (op is _PMAX or not dtype.is_complex):
        raise Unsupported(
            f"{dtype} has no {'order' if dtype.is_complex else 'sum'} in torch",
            op=op.name,
            operands={"block": f"{dtype} {list(raw.shape)}"},
            mesh=mesh,
            fix=f"{_public(op.name)}({'x.abs()' if dtype.is_complex else 'x.float()'}, "
            f"{(axes[0] if len(axes) == 1 else axes)!r})",
        )
    if dtype.is_complex:  # sent as pairs of reals, which is the same memory
        pairs = _finish(op, torch.view_as_real(raw.resolve_conj()), mesh, axes, params)
        return lambda: torch.view_as_complex(pairs().contiguous())
    bits = _finish(op, raw.view(_BITS[dtype.itemsize]), mesh, axes, params)
    return lambda: bits().view(dtype)


_SENT = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
"""Dtypes that gloo and nccl support; bool and int16 are added in int32,
others are sent as an integer or half type of the same width.
"""

_SMALL = frozenset({torch.bool, torch.int16})

_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


def _note(
    traces: tuple[Trace, ...], op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple
) -> list[Callable[[], None]]:
    """Count a transfer; return the functions to call when it completes."""
    heard = [t.before(op.name, raw, mesh, axes, params) for t in traces]
    if op.moved is not None:
        n, p = _bytes(raw), mesh.axis_size(axes)
        # a wire dtype narrower than the sum's sends fewer bytes
        if wires := [a.itemsize for a in params if isinstance(a, torch.dtype)]:
            n = n // raw.element_size() * sum(wires) // len(wires)
        if mesh.kind == "stacked":
            n //= mesh.size
        note(traces, op.name, axes[0] if len(axes) == 1 else axes, *op.moved(n, p, params))
    return [end for end in heard if end is not None]


def _ended(finish: Callable[[], T], ends: list[Callable[[], None]]) -> Callable[[], T]:
    """Return a transfer that calls the functions in ``ends`` when it completes."""
    if not ends:
        return finish

    def wait() -> T:
        try:
            return finish()
        finally:
            for end in ends:
                end()

    return wait


def _raw_call(op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Tensor:
    if raw.requires_grad and torch.is_grad_enabled():
        if op is _PMAX:
            return _Max.apply(raw, mesh, axes)  # type: ignore[return-value]
        return _Moved.apply(raw, op, mesh, axes, params)  # type: ignore[return-value]
    try:
        return raw if op is _PVARY else _finish(op, raw, mesh, axes, params)()
    except RuntimeError as e:
        _lost(e, op, raw, mesh, axes)
        raise


def _call(op: _Collective, x: Tensor, axis: Axis, params: tuple) -> Tensor:
    if type(x) is not Tensor and type(x) is not Stacked:
        _check_block(op.name, x, axis)
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    axes = (axis,) if isinstance(axis, str) else _several(axis, op.name)
    if mesh.axis_size(axes, *_named(op.name)) == 1 and params != (
        (),
    ):  # one rank keeps its block, except under ppermute without pairs, which gives zeros
        return x.to(params[0]) if op is _PSUM and params else x
    if mesh.kind != "stacked":
        return _raw_call(op, x, mesh, axes, params)
    varies = after_move(op.name, x, mesh, axes, params, _public(op.name))
    return _following(_raw_call(op, of(x, mesh), mesh, axes, params), mesh, varies)


def _several(axis: Axis, op: str) -> Axes:
    """Return several axes as a tuple.  Raises: BadArgument."""
    if isinstance(axis, tuple | list) and all(isinstance(a, str) for a in axis):
        return tuple(axis)
    name, line = _named(op)
    raise BadArgument(
        f"a mesh axis is a name, or a tuple of names, not {axis!r}",
        op=name,
        fix=line.format(repr(next(iter(current_mesh().names), "x"))),
    )


def _check_block(op: str, x: Any, axis: Axis) -> None:
    """Raise BadArgument for a number or a sharded value, which are not local blocks."""
    if not isinstance(x, Tensor):
        raise BadArgument(
            f"a collective takes a tensor, not {x!r}",
            op=op,
            fix=f"{_public(op)}(torch.as_tensor(x), {axis!r})",
        )
    if (layout := getattr(x, "sharding", None)) is not None:
        raise BadArgument(
            "a collective takes a rank's block, and this value is sharded",
            op=op,
            operands={"x": f"{x.dtype} {list(x.shape)} laid out {layout}"},
            fix=f"sl.shard_map(lambda x: {_public(op)}(x, {axis!r}), in_layouts={str(layout)!r}, "
            "out_layouts='...')(x)",
        )


def _following(raw: Tensor, mesh: Mesh, varies: Varies | None) -> Stacked:
    out = Stacked(raw, mesh)
    out.varies = varies
    return out


def _public(name: str) -> str:
    """Return a collective's public name: the common ones are in ``sl`` itself."""
    return f"sl.{name}" if name in _EVERY_DAY else f"sl.collectives.{name}"


@cache
def _named(name: str) -> tuple[str, str]:
    """Return the collective's name for an error about the axis, and its line with the axis open."""
    return name, f"{_public(name)}(x, {{}}{_MORE.get(name, '')})"


_MORE = {"all_to_all": ", split_dim, concat_dim", "ppermute": ", perm"}
"""Arguments of a call after the axis."""

_EVERY_DAY = frozenset(
    {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"}
)


def _dim(op: str, x: Tensor, axis: Axis, dim: int, splits: bool, new: int = 0) -> int:
    if type(x) is not Tensor and type(x) is not Stacked:
        _check_block(op, x, axis)
    ndim = x.ndim + new
    if not -ndim <= dim < ndim:
        raise RankMismatch(
            f"dimension {dim} of a block with {ndim} dimensions",
            op=op,
            operands={"block": list(x.shape)},
            fix=f"{_public(op)}(x, {axis!r}, dim=0)"
            if ndim
            else f"{_public(op)}(x.unsqueeze(0), {axis!r})",
        )
    if splits:
        mesh = x.mesh if type(x) is Stacked else current_mesh()
        p, n = mesh.axis_size(axis, *_named(op)), x.shape[dim]
        if n % p:
            raise UnevenSplit(
                f"dimension {dim} of size {n} does not divide over mesh axis {axis!r} (size {p}, "
                f"remainder {n % p})",
                op=op,
                operands={"block": list(x.shape)},
                mesh=mesh,
                fix=f"{_public(op)}(torch.nn.functional.pad(x.movedim({dim}, -1), (0, {-n % p}))"
                f".movedim(-1, {dim}), {axis!r}, {dim})",
            )
    return dim % ndim


# ---------------------------------------------------------------- the collectives


def psum(
    x: Tensor, axis: Axis, *, out: torch.dtype | None = None, wire: torch.dtype | None = None
) -> Tensor:
    """Sum over a mesh axis; every rank gets it.

    ``out``   the result's dtype, in which it is sent to all; the sum itself keeps x's.
    ``wire``  the dtype in which parts are sent to be summed; a rank's own part keeps x's.
    Moves:  2 (p-1)/p n bytes, 2 (p-1) messages; n of x, or half of n in each of these dtypes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum(torch.ones(2), "x")
    tensor([2., 2.])
    """
    return _call(_PSUM, x, axis, _narrow(x, out, wire))


def _narrow(
    x: Tensor, out: torch.dtype | None = None, wire: torch.dtype | None = None
) -> tuple[torch.dtype, ...]:
    if not isinstance(x, Tensor):
        return ()  # _call raises for it
    dtypes = out or x.dtype, wire or x.dtype
    return () if dtypes == (x.dtype, x.dtype) else dtypes


def pmean(x: Tensor, axis: Axis) -> Tensor:
    """Average over a mesh axis; every rank gets it.

    Moves what psum moves.
    Grad:   pmean.

    >>> import shardlib as sl
    >>> with sl.simulate(x=4):
    ...     pmean(axis_index("x") * 2.0, "x")  # of 0, 2, 4, 6
    tensor(3.)
    """
    if type(x) is not Stacked:
        return psum(x, axis) / axis_size(axis)
    # every rank counts once in the mean, so copies of a replicated value are meant to be summed
    return psum(pcast(x, axis, to="varying"), axis) / x.mesh.axis_size(axis)


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Take the elementwise maximum over a mesh axis; every rank gets it.

    Moves what psum moves.
    Grad:   to the maxima, shared.

    >>> import shardlib as sl
    >>> with sl.simulate(x=4):
    ...     pmax(axis_index("x") * torch.tensor([1, -1]), "x")  # of [0, 0] ... [3, -3]
    tensor([3, 0])
    """
    return _call(_PMAX, x, axis, ())


def all_gather(x: Tensor, axis: Axis, dim: int = 0, tiled: bool = True) -> Tensor:
    """Concatenate every rank's block along ``dim`` (``tiled=False``: stack them along a new one).

    Shapes: x [..., n, ...] -> [..., n p, ...].
    Moves:  (p-1) n bytes, p-1 messages.
    Grad:   psum_scatter.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3), sl.trace() as t:
    ...     block = axis_index("x") * torch.ones(2)  # rank 1 holds [1., 1.]
    ...     all_gather(block, "x"), all_gather(block, "x", tiled=False).shape
    (tensor([0., 0., 1., 1., 2., 2.]), torch.Size([3, 2]))
    >>> t.bytes, t.messages  # twice two blocks of 8 bytes
    (32, 4)
    """
    at = _dim("all_gather", x, axis, dim, False, new=not tiled)
    return _call(_ALL_GATHER, x if tiled else x.unsqueeze(at), axis, (at,))


def psum_scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> Tensor:
    """Sum over a mesh axis and keep this rank's block of the result.

    Shapes: x [..., n, ...] -> [..., n / p, ...] along ``dim``.
    ``wire``  send in this dtype; a rank's own part, and the sum, keep x's.
    Moves:  (p-1)/p n bytes, p-1 messages.
    Grad:   all_gather.
    Raises: UnevenSplit if the dimension is no multiple of the axis size; UnknownAxis.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum_scatter(torch.ones(4), "x")
    tensor([2., 2.])
    """
    return _call(_PSUM_SCATTER, x, axis, _scatter(x, axis, dim, wire))


def _scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> tuple:
    at = _dim("psum_scatter", x, axis, dim, True)
    return (at,) if wire is None or wire == x.dtype else (at, wire)


def pslice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Return this rank's block of a tensor that all ranks hold.

    Moves nothing.

    Shapes: x [..., n, ...] -> [..., n / p, ...].
    Grad:   the block placed in zeros.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pslice(torch.arange(6), "x")
    x=0: tensor([0, 1, 2])
    x=1: tensor([3, 4, 5])
    """
    return _call(_PSLICE, x, axis, (_dim("pslice", x, axis, dim, True),))


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Send blocks along (source, destination) pairs; ranks that receive nothing get zeros.

    Moves:  n bytes per moving pair / p, 1 message.
    Grad:   the inverse.
    Raises: ShardError if a rank sends or receives twice, or is not on the axis.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     ppermute(axis_index("x") + 10, "x", [(0, 1), (1, 2)])
    x=0: tensor(0)
    x=1: tensor(10)
    x=2: tensor(11)
    """
    return _call(_PPERMUTE, x, axis, _pairs(x, axis, perm))


def _pairs(
    x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]
) -> tuple[tuple[tuple[int, int], ...]]:
    pairs = tuple((int(s), int(d)) for s, d in perm)
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    _check_pairs(pairs, axis, mesh.axis_size(axis, *_named("ppermute")))
    return (pairs,)


@lru_cache(maxsize=1024)
def _check_pairs(pairs: tuple[tuple[int, int], ...], axis: Axis, p: int) -> None:
    sources, targets = [s for s, _ in pairs], [d for _, d in pairs]
    outside = [r for r in (*sources, *targets) if not 0 <= r < p]
    twice = [r for ranks in (sources, targets) for r in set(ranks) if ranks.count(r) > 1]
    if outside or twice:
        what = (
            f"rank {outside[0]} is not among 0..{p - 1}"
            if outside
            else f"rank {twice[0]} sends or receives twice"
        )
        raise ShardError(
            what,
            op="ppermute",
            fix=f"sl.ppermute(x, {axis!r}, {[(i, (i + 1) % p) for i in range(p)]})",
        )


def shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Send every rank's block ``by`` ranks further, cyclic: rank i's goes to rank i + by.

    Moves:  n bytes, 1 message.
    Grad:   shift by -by.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     shift(axis_index("x"), "x")
    x=0: tensor(2)
    x=1: tensor(0)
    x=2: tensor(1)
    """
    return _call(_PPERMUTE, x, axis, _by(x, axis, by))


def _by(x: Tensor, axis: Axis, by: int) -> tuple[tuple[tuple[int, int], ...]]:
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    return (_cycle(mesh.axis_size(axis, *_named("shift")), by),)


@lru_cache(maxsize=1024)
def _cycle(p: int, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((i, (i + by) % p) for i in range(p))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Send block j of ``split_dim`` to rank j and concatenate received blocks along ``concat_dim``.

    Shapes: x [.., n, .., m, ..] -> [.., n / p, .., m p, ..].
    Moves:  (p-1)/p n bytes, p-1 messages.
    Grad:   all_to_all with the dims exchanged.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     rows = pslice(torch.arange(8).reshape(4, 2), "x")  # [4/x, 2]
    ...     all_to_all(rows, "x", 1, 0)  # [4, 2/x]: from rows to columns
    x=0: tensor([[0],
            [2],
            [4],
            [6]])
    x=1: tensor([[1],
            [3],
            [5],
            [7]])
    """
    return _call(_ALL_TO_ALL, x, axis, _dims(x, axis, split_dim, concat_dim))


def _dims(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> tuple[int, int]:
    return _dim("all_to_all", x, axis, split_dim, True), _dim(
        "all_to_all", x, axis, concat_dim, False
    )


Counts = tuple[tuple[int, ...], ...]


def ragged_all_to_all(x: Tensor, axis: Axis, counts: Counts) -> Tensor:
    """Send ``counts[i][j]`` elements of rank i's vector to rank j, in the order of the ranks.

    Shapes: x [largest number sent by a rank] -> [largest number received by a rank]; elements
            beyond a rank's own count have no meaning.
    Moves:  on average over the ranks, the elements that change their rank; p-1 messages.
    Grad:   the same with ``counts`` transposed.
    Raises: ShardError if ``counts`` or x have other sizes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     ragged_all_to_all(sl.axis_index("x") * 10 + torch.arange(3), "x", ((1, 2), (0, 3)))
    x=0: tensor([0, 0, 0, 0, 0])
    x=1: tensor([ 1,  2, 10, 11, 12])
    """
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    line = "sl.collectives.api.ragged_all_to_all(x, {}, counts)"
    p, most = mesh.axis_size(axis, "ragged_all_to_all", line), max(map(sum, counts), default=0)
    if [len(row) for row in counts] != [p] * p or x.shape != (most,):
        raise ShardError(
            f"counts {counts} on {p} ranks for a vector of {list(x.shape)}",
            op="ragged_all_to_all",
            operands={"block": list(x.shape)},
            fix=f"sl.collectives.api.ragged_all_to_all(x.new_zeros({p}), {axis!r}, "
            f"{((1,) * p,) * p})",
        )
    return _call(_RAGGED, x, axis, (counts, x.element_size()))


def pbroadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Copy the root's block to every rank.

    Moves:  (p-1)/p n bytes on average, 1 message.
    Grad:   preduce.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pbroadcast(axis_index("x") * 10.0, "x", root=1)
    tensor(10.)
    """
    return _call(_PBROADCAST, x, axis, (_root("pbroadcast", x, axis, root),))


def preduce(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """Sum over a mesh axis at the root; the others get zeros.

    Moves:  (p-1)/p n bytes on average, 1 message.
    Grad:   pbroadcast.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     preduce(torch.ones(2), "x", root=1)
    x=0: tensor([0., 0.])
    x=1: tensor([2., 2.])
    """
    return _call(_PREDUCE, x, axis, (_root("preduce", x, axis, root),))


def preduce_into(
    target: Tensor, x: Tensor, axis: str, root: int, wire: torch.dtype | None = None
) -> None:
    """Write ``preduce(x, axis, root)`` into the root's ``target``; the others' do not change.

    x is sent in ``wire``, which is the target's dtype unless given, and may be wider: the root's
    own part and the sum are rounded once, to the target.  In place and without a gradient, for
    schedules.
    Moves:  the bytes of preduce in the dtype of the wire.
    """
    wire = wire or target.dtype
    mesh = current_mesh()
    if mesh.axis_size(axis) == 1:
        target.copy_(x)
        return
    raw = held(x, mesh)
    if mesh.kind == "stacked":
        varies = after_move("preduce", x, mesh, (axis,), (), _public("preduce"))
        if type(target) is Stacked and target.varies is not None:
            target.varies.join(None if varies is None else varies.axes)
    if mesh.device_mesh is not None:
        RECENT.append((number(), "preduce", (axis,), raw.shape, wire))
    traces = scope().listeners.traces
    ends = _note(traces, _PREDUCE, raw.to(wire), mesh, (axis,), (root,)) if traces else []
    try:
        _ended(backend(mesh).preduce_into(unwrap(target), raw, mesh, (axis,), root, wire), ends)()
    except RuntimeError as e:
        _lost(e, _PREDUCE, raw, mesh, (axis,))
        raise


def broadcasts(axis: str, like: Tensor) -> Callable[[Tensor, int], Any]:
    """Return ``start(pbroadcast, x, axis, root)`` as a function of x and root, for schedules.

    ``like``  one of the blocks to be sent: all are recorded once, for reports of a lost rank.
    """
    now = scope()
    mesh = current_mesh() if now.mesh is None else now.mesh
    found = None if now.listeners.traces else mesh.memo[GROUPS].get((broadcasts, axis))
    if found is None:
        if mesh.kind != "dist" or now.listeners.traces or mesh.axis_size(axis) == 1:
            return lambda x, root: start(pbroadcast, x, axis, root)
        found = mesh.memo[GROUPS][broadcasts, axis] = dist.broadcasts(mesh, (axis,))
    RECENT.append((number(), "pbroadcast", (axis,), like.shape, like.dtype))
    return found


def reductions(
    axis: str, like: Tensor, wire: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, int], Callable[[], object]]:
    """Return ``preduce_into(target, x, axis, root, wire)`` as a function of target, x and root.

    For loops in schedules.
    It posts the transfer; call its result to finish.  ``like``  one of the targets, as above.
    """
    now = scope()
    mesh = current_mesh() if now.mesh is None else now.mesh
    found = None if now.listeners.traces else mesh.memo[GROUPS].get((reductions, axis, wire))
    if found is None:
        if mesh.kind != "dist" or now.listeners.traces or mesh.axis_size(axis) == 1:
            return lambda target, x, root: partial(preduce_into, target, x, axis, root, wire)
        found = mesh.memo[GROUPS][reductions, axis, wire] = dist.reductions(mesh, (axis,), wire)
    RECENT.append((number(), "preduce", (axis,), like.shape, wire or like.dtype))
    return found


def _root(op: str, x: Tensor, axis: Axis, root: int) -> int:
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    p = mesh.axis_size(axis, *_named(op))
    if not 0 <= root < p:
        raise ShardError(
            f"root {root} is not among 0..{p - 1} of {axis!r}",
            op=op,
            mesh=mesh,
            fix=f"{_public(op)}(x, {axis!r}, 0)",
        )
    return root


def pvary(x: Tensor, axis: Axis) -> Tensor:
    """Mark a replicated value as combined with per-rank data: its gradient is summed over ``axis``.

    The value is the same and nothing moves forward.
    Grad:   psum.

    >>> import shardlib as sl
    >>> with sl.simulate(x=4) as mesh:
    ...     copies = torch.ones(4, 1, requires_grad=True)  # of one weight, a row per rank
    ...     y = pvary(wrap(copies, mesh), "x") * axis_index("x")  # each rank's own number
    ...     unwrap(y).sum().backward()
    >>> copies.grad.flatten()  # 0 + 1 + 2 + 3 on every rank
    tensor([6., 6., 6., 6.])
    """
    return _call(_PVARY, x, axis, ())


def axis_size(axis: Axis) -> int:
    """Count the ranks along an axis, or along several together.

    Raises: UnknownAxis; NoMesh where no mesh is in scope.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=3):
    ...     axis_size("y"), axis_size(("x", "y"))
    (3, 6)
    """
    return current_mesh().axis_size(axis, "axis_size", "sl.axis_size({})")


def axis_index(axis: Axis) -> Any:
    """Return this rank's index along an axis: an int, or under simulate a block with each rank's.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     axis_index("x")
    x=0: tensor(0)
    x=1: tensor(1)
    """
    mesh = current_mesh()
    axes = (axis,) if isinstance(axis, str) else _several(axis, "axis_index")
    mesh.axis_size(axis if isinstance(axis, str) else axes, "axis_index", "sl.axis_index({})")
    index = backend(mesh).axis_index(mesh, axes)
    if not isinstance(index, Tensor):
        return index
    return _following(index, mesh, Varies(real(mesh, axes)))


def pick(table: Sequence[complex] | Tensor, axis: Axis) -> Any:
    """Return ``table[axis_index(axis)]`` without a branch: for one rank, or for all of them.

    ``table``  one number for each rank along the axis, or a tensor with a row for each.
    Raises: BadArgument for anything else, or more or fewer of them.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pick([0.5, 2.0], "x") * torch.ones(2)
    x=0: tensor([0.5000, 0.5000])
    x=1: tensor([2., 2.])
    """
    index, p = axis_index(axis), current_mesh().axis_size(axis)
    numbers = isinstance(table, Tensor) or all(isinstance(n, Number) for n in table)
    if not numbers or len(table) != p:
        what = f"{len(table)} entries" if numbers else "entries that are no numbers"
        raise BadArgument(
            f"a table of {what}, and {axis!r} has {p} ranks",
            op="pick",
            mesh=current_mesh(),
            fix=f"sl.collectives.pick([0.0] * {p}, {axis!r})",
        )
    if not isinstance(index, Stacked):
        return table[index]
    where = index.ranks.device
    if not isinstance(table, Tensor):
        table = uploaded(tuple(table), where, torch.as_tensor(table).dtype)
    return _following(table.to(where)[index.ranks], index.mesh, index.varies)


def pcast(x: Tensor, axis: Axis, *, to: Literal["varying", "replicated"]) -> Tensor:
    """Override whether a block counts as varying along an axis in a body of shard_map.

    ``"replicated"``  every rank along the axis holds the same values, though they were computed
                      from varying ones: a ring that gathers passes every block to every rank.
    ``"varying"``     treat the ranks' copies as separate values, so that they may be summed.
    Moves nothing.  Grad: the identity.
    Raises: WrongAxes for "replicated" where simulated ranks hold different values.
    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     f = lambda v: sl.psum(sl.collectives.pcast(v, "x", to="varying"), "x")
    ...     x = sl.shard(torch.ones(2), ".")
    ...     sl.unshard(sl.shard_map(f, in_layouts=".", out_layouts=".")(x))
    tensor([2., 2.])
    """
    if to not in ("varying", "replicated"):
        raise ShardError(
            f"to={to!r} is neither 'varying' nor 'replicated'",
            op="pcast",
            fix=f"sl.collectives.pcast(x, {axis!r}, to='varying')",
        )
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    axes = (axis,) if isinstance(axis, str) else _several(axis, "pcast")
    mesh.axis_size(axes, "pcast", f"sl.collectives.pcast(x, {{}}, to={to!r})")
    if type(x) is not Stacked:
        return x
    known = None if x.varies is None else x.varies.axes
    over = real(mesh, axes)
    if to == "replicated":
        if wrong := differing(x.ranks, mesh, sorted(over, key=mesh.names.index)):
            raise WrongAxes(
                f"the block differs along axis {wrong!r}",
                op="pcast",
                operands={"block": f"{x.dtype} {list(x.shape)}"},
                mesh=mesh,
                fix=f"sl.psum(x, {wrong!r})",
            )
        now = None if known is None else Varies(known - over)
    else:
        now = None if known is None else Varies(known | over)
    return _following(x.ranks.view_as(x.ranks), mesh, now)


# ---------------------------------------------------------------- in place, on flat vectors


def scatter_into(
    flat: Tensor,
    out: Tensor,
    mesh: Mesh,
    axes: Axes,
    *,
    wire: torch.dtype | None = None,
    land: Tensor | None = None,
    ahead: bool = False,
) -> Finish:
    """Post ``psum_scatter`` of a storage of vectors [n]; its ``finish`` writes ``out`` [n / p].

    ``land``   memory to receive in, of n elements, or of any number unless ``ahead``; allocating
               fresh pages costs as much time as the sum.
    ``ahead``  other work comes between this call and ``finish``: all parts are sent meanwhile.
               Without it the ring runs inside ``finish``, needs less memory, and fills slow links
               better.
    Moves the bytes of psum_scatter.  Each part is summed round the ring, its owner last, in the
    same order on all but NCCL; half precision in fp32, which ``out`` may keep.  ``flat`` and
    ``land`` must stay until it is finished.
    """
    params = (0,) if wire is None or wire == flat.dtype else (0, wire)
    if mesh.axis_size(axes) == 1:
        return lambda: out.copy_(flat)

    def post() -> Finish:
        traces = scope().listeners.traces
        ends = _note(traces, _PSUM_SCATTER, flat, mesh, axes, params) if traces else []
        _remember("psum_scatter", flat, mesh, axes)
        into = backend(mesh).psum_scatter_into
        return _ended(into(flat, mesh, axes, out, *params[1:], land=land, ahead=ahead), ends)

    memory = (flat, out) if land is None else (flat, out, land)
    posted = _beside("sum", post, mesh, axes, *memory) if ahead else post()
    return _posted(_heard(posted, _PSUM_SCATTER, flat, mesh, axes)).wait


def gather_into(flat: Tensor, mesh: Mesh, axes: Axes, *, ahead: bool = False) -> Finish:
    """Post ``all_gather`` of vectors in place: each rank's part of ``flat`` [n] is already set.

    ``ahead``  other work comes between this call and ``finish``, as in ``scatter_into``.
    Moves the bytes of all_gather of the parts.
    """
    if mesh.axis_size(axes) == 1:
        return lambda: flat

    def post() -> Finish:
        ends = []
        if traces := scope().listeners.traces:
            part = flat.narrow(-1, 0, flat.shape[-1] // mesh.axis_size(axes))
            ends = _note(traces, _ALL_GATHER, part, mesh, axes, (0,))
        _remember("all_gather", flat, mesh, axes)
        return _ended(backend(mesh).all_gather_into(flat, mesh, axes, ahead), ends)

    posted = _beside("gather", post, mesh, axes, flat) if ahead else post()
    return _posted(_heard(posted, _ALL_GATHER, flat, mesh, axes)).wait


def _remember(name: str, raw: Tensor, mesh: Mesh, axes: Axes) -> None:
    if mesh.device_mesh is not None:
        RECENT.append((number(), name, axes, raw.shape, raw.dtype))


def _heard(finish: Finish, op: _Collective, raw: Tensor, mesh: Mesh, axes: Axes) -> Finish:
    """Wrap a transfer so that its failure names the rank that failed."""
    if mesh.device_mesh is None:
        return finish

    def wait() -> Tensor:
        try:
            return finish()
        except RuntimeError as e:
            _lost(e, op, raw, mesh, axes)
            raise

    return wait


# ---------------------------------------------------------------- asynchronous form


class Pending:
    """A transfer under way; ``wait()`` once for its result.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     later = start(psum, torch.ones(2), "x")  # under way
    ...     later.wait()
    tensor([2., 2.])
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        """Block until the transfer is done and return the block.

        Raises: ShardError the second time.
        """
        if self._finish is None:
            raise ShardError(
                "this transfer was waited for already", op="wait", fix="y = pending.wait()  # once"
            )
        POSTED.pop(self, None)
        try:
            out, self._finish = self._finish(), None
        except RuntimeError as e:
            lost(e)
            raise
        return out

    def _arrive(self) -> None:
        """Wait, and keep the result for ``wait``."""
        out = self.wait()
        self._finish = lambda: out


def _posted(finish: Finish) -> Pending:
    """Return a transfer that is kept until it is waited for, see mesh/posted.py."""
    pending = Pending(finish)
    POSTED[pending] = pending._arrive
    return pending


def start_ppermutes(
    xs: Sequence[Tensor], axis: Axis, perms: Sequence[Sequence[tuple[int, int]]]
) -> list[Pending]:
    """Post several ppermutes as one call, so that their sends and receives cannot deadlock.

    Each counts as its own; as with ``start``, for code that writes its own gradient.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = next((x.mesh for x in xs if type(x) is Stacked), None) or current_mesh()
    if mesh.axis_size(axes) == 1 or any(x.dtype not in _SENT or x.requires_grad for x in xs):
        return [start(ppermute, x, axis, perm) for x, perm in zip(xs, perms, strict=True)]
    tables = [_pairs(x, axis, perm)[0] for x, perm in zip(xs, perms, strict=True)]
    raws = [held(x, mesh) for x in xs]
    ends: list[Any] = []
    if traces := scope().listeners.traces:
        for raw, pairs in zip(raws, tables, strict=True):
            ends.append(_note(traces, _PPERMUTE, raw, mesh, axes, (pairs,)))
    if mesh.device_mesh is not None:
        RECENT.extend([(number(), "ppermute", axes, raw.shape, raw.dtype) for raw in raws])
    posted = backend(mesh).ppermutes(raws, mesh, axes, tables)
    if ends:
        posted = [_ended(finish, some) for finish, some in zip(posted, ends, strict=True)]
    if mesh.kind != "stacked":
        return [_posted(finish) for finish in posted]
    return [
        _pending(finish, mesh, after_move("ppermute", x, mesh, axes, (pairs,), "sl.ppermute"))
        for x, finish, pairs in zip(xs, posted, tables, strict=True)
    ]


def _pending(finish: Finish, mesh: Mesh, varies: Varies | None) -> Pending:
    """Return a Pending whose result is a simulated block."""
    return _posted(lambda: _following(finish(), mesh, varies))


_POSTABLE: dict[
    Callable[..., Tensor], Callable[..., tuple[_Collective, tuple]]
] = {  # the same checks as the synchronous form
    psum: lambda x, axis, out=None, wire=None: (_PSUM, _narrow(x, out, wire)),
    pmax: lambda x, axis: (_PMAX, ()),
    all_gather: lambda x, axis, dim=0: (_ALL_GATHER, (_dim("all_gather", x, axis, dim, False),)),
    psum_scatter: lambda x, axis, dim=0, wire=None: (_PSUM_SCATTER, _scatter(x, axis, dim, wire)),
    ppermute: lambda x, axis, perm: (_PPERMUTE, _pairs(x, axis, perm)),
    shift: lambda x, axis, by=1: (_PPERMUTE, _by(x, axis, by)),
    all_to_all: lambda x, axis, split_dim, concat_dim: (
        _ALL_TO_ALL,
        _dims(x, axis, split_dim, concat_dim),
    ),
    pbroadcast: lambda x, axis, root=0: (_PBROADCAST, (_root("pbroadcast", x, axis, root),)),
    preduce: lambda x, axis, root=0: (_PREDUCE, (_root("preduce", x, axis, root),)),
}


def start(f: Callable[..., Tensor], x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
    """Post a collective and continue: ``later = start(pbroadcast, x, "y", 0); ...; later.wait()``.

    For code that writes its own gradient.  Raises: ShardError if autograd would have to record it.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     block = axis_index("x") * torch.ones(2)
    ...     later = start(shift, block, "x")  # the neighbour's block is on its way
    ...     own = block @ block  # meanwhile
    ...     own + later.wait().sum()
    tensor(2.)
    """
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    plain = f"{_public(f.__name__)}(x, {axis!r})"
    if x.requires_grad and torch.is_grad_enabled():
        raise ShardError("the asynchronous form has no gradient", op=f.__name__, fix=plain)
    if f not in _POSTABLE:
        names = ", ".join(g.__name__ for g in _POSTABLE)
        raise ShardError(f"no asynchronous form; these have one: {names}", op=f.__name__, fix=plain)
    op, params = _POSTABLE[f](x, axis, *args, **kwargs)
    axes = (axis,) if isinstance(axis, str) else _several(axis, f.__name__)
    if mesh.axis_size(axes) == 1:
        out = _call(op, x, axis, params)
        return Pending(lambda: out)
    if mesh.kind != "stacked":
        return _posted(_ahead(op, x, mesh, axes, params))
    varies = after_move(op.name, x, mesh, axes, params, _public(op.name))
    return _pending(_ahead(op, of(x, mesh), mesh, axes, params), mesh, varies)
