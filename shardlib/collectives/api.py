"""Named-axis collectives on local blocks.

``axis`` is a mesh axis or a tuple of them, flattened major first; n is the bytes of x and p the
axis size in the costs below.  Gradients are exact adjoints of the map that all ranks compute
together.  A one-sized axis moves nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import dist, record, stacked
from shardlib.collectives.count import Trace, note
from shardlib.collectives.stacked import Stacked, of
from shardlib.errors import RankMismatch, ShardError, UnevenSplit, Unsupported
from shardlib.mesh import Mesh, current_mesh, scope

__all__ = [
    "Pending", "all_gather", "all_to_all", "axis_index", "axis_size", "broadcasts", "each_rank", "pbroadcast",
    "pick", "pmax", "pmean", "ppermute", "preduce", "preduce_add", "pslice", "psum", "psum_scatter", "pvary",
    "reductions", "shift", "start", "start_ppermutes", "unwrap", "wrap",
]  # fmt: skip

Axis = str | tuple[str, ...]


def wrap(raw: Tensor, mesh: Mesh) -> Tensor:
    """Storage as a local block: itself, or Stacked under simulate."""
    return Stacked(raw, mesh) if mesh.kind == "stacked" else raw


def unwrap(local: Tensor) -> Tensor:
    """The storage of a local block."""
    return local.ranks if type(local) is Stacked else local


def each_rank(mesh: Mesh) -> Iterator[tuple[dict[str, int], Callable[[Tensor], Tensor]]]:
    """(coordinate, view) of every rank that this process plays; view(raw) is that rank's block of a storage.

    For local code that differs in more than values from rank to rank; what it writes to the views stays.
    """
    if mesh.kind != "stacked":
        yield mesh.coord or dict.fromkeys(mesh.names, 0), lambda raw: raw
        return
    for rank, coord in enumerate(stacked.coordinates(mesh)):
        yield coord, lambda raw, rank=rank: raw[rank]


# ---------------------------------------------------------------- one path for all of them


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


_COUNT: dict[str, Callable[[int, int, tuple], tuple[int, int, int]]] = {  # (n, p, params) -> bytes, /, messages
    "psum": lambda n, p, _: (2 * (p - 1) * n, p, 2 * (p - 1)),
    "pmax": lambda n, p, _: (2 * (p - 1) * n, p, 2 * (p - 1)),
    "all_gather": lambda n, p, _: ((p - 1) * n, 1, p - 1),
    "psum_scatter": lambda n, p, _: ((p - 1) * n, p, p - 1),
    "all_to_all": lambda n, p, _: ((p - 1) * n, p, p - 1),
    "pbroadcast": lambda n, p, _: ((p - 1) * n, p, 1),
    "preduce": lambda n, p, _: ((p - 1) * n, p, 1),
    "ppermute": lambda n, p, a: (n * sum(s != d for s, d in a[0]), p, int(any(s != d for s, d in a[0]))),
}

_ADJOINT: dict[str, Callable[..., tuple]] = {
    "psum": lambda *_: ("psum",),
    "all_gather": lambda dim: ("psum_scatter", dim),
    "psum_scatter": lambda dim, wire=None: ("all_gather", dim),
    "pslice": lambda dim: ("place", dim),
    "place": lambda dim: ("pslice", dim),
    "ppermute": lambda pairs: ("ppermute", tuple((d, s) for s, d in pairs)),
    "all_to_all": lambda split, concat: ("all_to_all", concat, split),
    "pbroadcast": lambda root: ("preduce", root),
    "preduce": lambda root: ("pbroadcast", root),
    "pvary": lambda: ("psum",),
}


class _Moved(Local):
    """A linear collective on raw storage; its backward is the adjoint collective."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, op: str, mesh: Mesh, axes: tuple[str, ...], params: tuple) -> Tensor:
        ctx.call = op, mesh, axes, params
        return raw.view_as(raw) if op == "pvary" else _finish(op, raw, mesh, axes, params)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, mesh, axes, params = ctx.call
        name, *back = _ADJOINT[op](*params)
        return _raw_call(name, grads[0], mesh, axes, tuple(back)), None, None, None, None


class _Max(Local):
    """pmax; the gradient goes to the maxima, shared where several ranks hold one."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        out = _finish("pmax", raw, mesh, axes, ())()
        ctx.place = mesh, axes
        ctx.save_for_backward(raw, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (raw, out), (mesh, axes) = ctx.saved_tensors, ctx.place
        held = (raw == out).to(grads[0].dtype)
        both = _raw_call("psum", torch.stack([grads[0], held], -1), mesh, axes, ())
        return held * both[..., 0] / both[..., 1], None, None


def _finish(op: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple) -> Callable[[], Tensor]:
    """Count, post, and return how to get the result."""
    dtype = raw.dtype
    if dtype in _SMALL and op in _ADDS:  # no back end adds these as they are
        wide = _finish(op, raw.to(torch.int32), mesh, axes, params)
        return lambda: wide().to(dtype)
    if dtype not in _SENT and op in _ADDS and (op == "pmax" or not dtype.is_complex):
        raise Unsupported(
            f"{dtype} has no {'order' if dtype.is_complex else 'sum'} in torch",
            op=op,
            operands={"block": f"{dtype} {list(raw.shape)}"},
            mesh=mesh,
            fix=f"sl.{op}({'x.abs()' if dtype.is_complex else 'x.float()'}, {axes!r})",
        )
    if dtype not in _SENT and not dtype.is_complex:
        bits = _finish(op, raw.view(_BITS[dtype.itemsize]), mesh, axes, params)
        return lambda: bits().view(dtype)
    if traces := scope().traces:
        _note(traces, op, raw, mesh, axes, params)
    if mesh.kind == "dist":
        raw = raw.resolve_conj() if raw.is_conj() else raw  # torch.distributed sends the memory as it is
        if not dtype.is_complex:
            return _DIST[op](raw, mesh, axes, *params)
        pairs = _DIST[op](torch.view_as_real(raw), mesh, axes, *params)
        return lambda: torch.view_as_complex(pairs().contiguous())
    module: ModuleType = stacked if mesh.kind == "stacked" else record
    out = getattr(module, op)(raw, mesh, axes, *params)
    return lambda: out


_ADDS = frozenset({"psum", "pmax", "psum_scatter", "preduce"})

_SENT = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""What gloo and nccl take; bool and int16 are added in int32, others are moved as bits of their width."""

_SMALL = frozenset({torch.bool, torch.int16})

_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}

_DIST: dict[str, Callable[..., Callable[[], Tensor]]] = {n: getattr(dist, n) for n in _ADJOINT if n != "pvary"} | {
    "pmax": dist.pmax
}


def _note(traces: tuple[Trace, ...], op: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple) -> None:
    if op in _COUNT:
        n, p = _bytes(raw), mesh.axis_size(axes)
        if wires := [a.itemsize for a in params if isinstance(a, torch.dtype)]:  # narrower than what is summed
            n = n // raw.element_size() * sum(wires) // len(wires)
        if mesh.kind == "stacked":
            n //= mesh.size
        note(traces, op, axes[0] if len(axes) == 1 else axes, *_COUNT[op](n, p, params))


def _raw_call(op: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple) -> Tensor:
    if raw.requires_grad and torch.is_grad_enabled():
        if op == "pmax":
            return _Max.apply(raw, mesh, axes)  # type: ignore[return-value]
        return _Moved.apply(raw, op, mesh, axes, params)  # type: ignore[return-value]
    return raw if op == "pvary" else _finish(op, raw, mesh, axes, params)()


def _call(op: str, x: Tensor, axis: Axis, params: tuple) -> Tensor:
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if mesh.axis_size(axes) == 1 and params != ((),):  # ppermute along no pair: nobody receives
        return x.to(params[0]) if op == "psum" and params else x
    if mesh.kind != "stacked":
        return _raw_call(op, x, mesh, axes, params)
    return Stacked(_raw_call(op, stacked.of(x, mesh), mesh, axes, params), mesh)


def _dim(op: str, x: Tensor, axis: Axis, dim: int, splits: bool, new: int = 0) -> int:
    ndim = x.ndim + new
    if not -ndim <= dim < ndim:
        raise RankMismatch(
            f"dimension {dim} of a block with {ndim} dimensions",
            op=op,
            operands={"block": list(x.shape)},
            fix=f"sl.{op}(x, {axis!r}, dim=0)" if ndim else f"sl.{op}(x.unsqueeze(0), {axis!r})",
        )
    if splits:
        mesh = x.mesh if type(x) is Stacked else current_mesh()
        p, n = mesh.axis_size(axis), x.shape[dim]
        if n % p:
            raise UnevenSplit(
                f"dimension {dim} of size {n} does not divide over mesh axis {axis!r} (size {p}, remainder {n % p})",
                op=op,
                operands={"block": list(x.shape)},
                mesh=mesh,
                fix=f"sl.{op}(torch.nn.functional.pad(x.movedim({dim}, -1), (0, {-n % p})).movedim(-1, {dim}), "
                f"{axis!r}, {dim})",
            )
    return dim % ndim


# ---------------------------------------------------------------- the collectives


def psum(x: Tensor, axis: Axis, *, out: torch.dtype | None = None, wire: torch.dtype | None = None) -> Tensor:
    """Sum over a mesh axis; every rank gets it.

    ``out``   the result's dtype, in which it travels to all; the sum itself keeps x's.
    ``wire``  the dtype in which the parts travel to the sum; what stays on its rank keeps x's.
    Moves: 2 (p-1)/p n bytes, 2 (p-1) messages; n of x, or half of n in each of these dtypes.    Grad: psum.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum(torch.ones(2), "x")
    tensor([2., 2.])
    """
    return _call("psum", x, axis, _narrow(x, out, wire))


def _narrow(x: Tensor, out: torch.dtype | None = None, wire: torch.dtype | None = None) -> tuple[torch.dtype, ...]:
    dtypes = out or x.dtype, wire or x.dtype
    return () if dtypes == (x.dtype, x.dtype) else dtypes


def pmean(x: Tensor, axis: Axis) -> Tensor:
    """Mean over a mesh axis.  Moves what psum moves.  Grad: pmean."""
    return psum(x, axis) / axis_size(axis) if type(x) is not Stacked else psum(x, axis) / x.mesh.axis_size(axis)


def pmax(x: Tensor, axis: Axis) -> Tensor:
    """Elementwise maximum over a mesh axis.  Moves what psum moves.  Grad: to the maxima, shared."""
    return _call("pmax", x, axis, ())


def all_gather(x: Tensor, axis: Axis, dim: int = 0, tiled: bool = True) -> Tensor:
    """Every rank's block, concatenated along ``dim`` (``tiled=False``: stacked along a new one).

    Shapes: x [..., n, ...] -> [..., n p, ...].
    Moves: (p-1) n bytes, p-1 messages.    Grad: psum_scatter.
    """
    at = _dim("all_gather", x, axis, dim, False, new=not tiled)
    return _call("all_gather", x if tiled else x.unsqueeze(at), axis, (at,))


def psum_scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> Tensor:
    """Sum over a mesh axis and keep this rank's block of the result.

    Shapes: x [..., n, ...] -> [..., n / p, ...] along ``dim``.
    ``wire``  travel in this dtype; what stays on its rank, and the sum, keep x's.
    Moves:  (p-1)/p n bytes, p-1 messages.    Grad: all_gather.
    Raises: UnevenSplit if the dimension is no multiple of the axis size; UnknownAxis.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     psum_scatter(torch.ones(4), "x")
    tensor([2., 2.])
    """
    return _call("psum_scatter", x, axis, _scatter(x, axis, dim, wire))


def _scatter(x: Tensor, axis: Axis, dim: int = 0, wire: torch.dtype | None = None) -> tuple:
    at = _dim("psum_scatter", x, axis, dim, True)
    return (at,) if wire is None or wire == x.dtype else (at, wire)


def pslice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Keep this rank's block of a tensor that all ranks hold.  Moves nothing.

    Shapes: x [..., n, ...] -> [..., n / p, ...].    Grad: the block placed in zeros.
    """
    return _call("pslice", x, axis, (_dim("pslice", x, axis, dim, True),))


def ppermute(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Send blocks along (source, destination) pairs; who receives nothing gets zeros.

    Moves: n bytes per moving pair / p, 1 message.    Grad: the inverse.
    Raises: ShardError if a rank sends or receives twice, or is not on the axis.
    """
    return _call("ppermute", x, axis, _pairs(x, axis, perm))


def _pairs(x: Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, int], ...]]:
    pairs = tuple((int(s), int(d)) for s, d in perm)
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    _check_pairs(pairs, mesh.axis_size(axis))
    return (pairs,)


@lru_cache(maxsize=1024)
def _check_pairs(pairs: tuple[tuple[int, int], ...], p: int) -> None:
    sources, targets = [s for s, _ in pairs], [d for _, d in pairs]
    outside = [r for r in (*sources, *targets) if not 0 <= r < p]
    twice = [r for ranks in (sources, targets) for r in set(ranks) if ranks.count(r) > 1]
    if outside or twice:
        what = f"rank {outside[0]} is not among 0..{p - 1}" if outside else f"rank {twice[0]} sends or receives twice"
        raise ShardError(what, op="ppermute", fix=f"perm={[(i, (i + 1) % p) for i in range(p)]}")


def shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """Rank i's block goes to rank i + by, cyclic.  Moves: n bytes, 1 message.  Grad: shift by -by."""
    return _call("ppermute", x, axis, _by(x, axis, by))


def _by(x: Tensor, axis: Axis, by: int) -> tuple[tuple[tuple[int, int], ...]]:
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    return (_cycle(mesh.axis_size(axis), by),)


@lru_cache(maxsize=1024)
def _cycle(p: int, by: int) -> tuple[tuple[int, int], ...]:
    return tuple((i, (i + by) % p) for i in range(p))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Give block j of ``split_dim`` to rank j and concatenate what comes along ``concat_dim``.

    Shapes: x [.., n, .., m, ..] -> [.., n / p, .., m p, ..].
    Moves: (p-1)/p n bytes, p-1 messages.    Grad: all_to_all with the dims exchanged.
    """
    return _call("all_to_all", x, axis, _dims(x, axis, split_dim, concat_dim))


def _dims(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> tuple[int, int]:
    return _dim("all_to_all", x, axis, split_dim, True), _dim("all_to_all", x, axis, concat_dim, False)


def pbroadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """The root's block on every rank.  Moves: (p-1)/p n bytes on average, 1 message.  Grad: preduce.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     pbroadcast(axis_index("x") * 10.0, "x", root=1)
    tensor(10.)
    """
    return _call("pbroadcast", x, axis, (_root("pbroadcast", x, axis, root),))


def preduce(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """The sum at the root, zeros elsewhere.  Moves: (p-1)/p n bytes on average, 1 message.  Grad: pbroadcast."""
    return _call("preduce", x, axis, (_root("preduce", x, axis, root),))


def preduce_add(target: Tensor, x: Tensor, axis: str, root: int, wire: torch.dtype | None = None) -> None:
    """``target += preduce(x, axis, root)`` without the zeros: only the root's target changes.

    x travels in ``wire``, which is the target's dtype unless given, and may be wider: the root's own
    part and the sum are rounded once, to the target.  In place and without a gradient, for rules.
    Moves: what preduce in the dtype of the wire moves.
    """
    wire = wire or target.dtype
    mesh = current_mesh()
    if mesh.axis_size(axis) == 1:
        target.add_(x)
    elif mesh.kind == "dist":
        if traces := scope().traces:
            _note(traces, "preduce", x.to(wire), mesh, (axis,), ())
        dist.reductions(mesh, (axis,), wire)(target, x, root)()
    elif x.dtype == wire:
        target.add_(preduce(x, axis, root))
    else:
        sent = x.to(wire)
        total = preduce(sent, axis, root)  # counted, and right but for its rounding
        if mesh.kind == "stacked":
            exact = Stacked(stacked.preduce(of(sent, mesh).to(x.dtype), mesh, (axis,), root), mesh)
            total = exact + (x - sent) * (axis_index(axis) == root)
        target.add_(total)


def broadcasts(axis: str) -> Callable[[Tensor, int], Any]:
    """``start(pbroadcast, x, axis, root)`` as a function of x and root, for loops in rules."""
    now = scope()
    mesh = now.mesh or current_mesh()
    known = None if now.traces else mesh.groups.get((broadcasts, axis))
    if known is not None:
        return known
    if mesh.kind != "dist" or now.traces or mesh.axis_size(axis) == 1:
        return lambda x, root: start(pbroadcast, x, axis, root)
    found = mesh.groups[broadcasts, axis] = dist.broadcasts(mesh, (axis,))
    return found


def reductions(axis: str, wire: torch.dtype | None = None) -> Callable[[Tensor, Tensor, int], Callable[[], object]]:
    """``preduce_add(target, x, axis, root, wire)`` as a function of target, x and root, for loops in rules.

    It is posted; call what it returns to finish it.
    """
    now = scope()
    mesh = now.mesh or current_mesh()
    known = None if now.traces else mesh.groups.get((reductions, axis, wire))
    if known is not None:
        return known
    if mesh.kind != "dist" or now.traces or mesh.axis_size(axis) == 1:
        return lambda target, x, root: partial(preduce_add, target, x, axis, root, wire)
    found = mesh.groups[reductions, axis, wire] = dist.reductions(mesh, (axis,), wire)
    return found


def _root(op: str, x: Tensor, axis: Axis, root: int) -> int:
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    p = mesh.axis_size(axis)
    if not 0 <= root < p:
        raise ShardError(f"root {root} is not among 0..{p - 1} of {axis!r}", op=op, mesh=mesh, fix="root=0")
    return root


def pvary(x: Tensor, axis: Axis) -> Tensor:
    """The identity, whose gradient is summed over ``axis``: a replicated value met per-rank data."""
    return _call("pvary", x, axis, ())


def axis_size(axis: Axis) -> int:
    """Number of ranks along an axis."""
    return current_mesh().axis_size(axis)


def axis_index(axis: Axis) -> Any:
    """This rank's place along an axis: an int, or under simulate a block holding each rank's."""
    mesh = current_mesh()
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh.axis_size(axes)
    module: Any = {"dist": dist, "stacked": stacked, "record": record}[mesh.kind]
    return module.axis_index(mesh, axes)


def pick(table: Sequence[Any], axis: Axis) -> Any:
    """``table[axis_index(axis)]`` without a branch: works for one rank and for all of them."""
    index = axis_index(axis)
    if not isinstance(index, Stacked):
        return table[index]
    return Stacked(torch.as_tensor(table)[index.ranks], index.mesh)


# ---------------------------------------------------------------- asynchronous form


class Pending:
    """A transfer under way; ``wait()`` once for its result."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        """Block until the transfer is done and return the block.  Raises: ShardError the second time."""
        if self._finish is None:
            raise ShardError("this transfer was waited for already", op="wait", fix="y = pending.wait()  # once")
        out, self._finish = self._finish(), None
        return out


def start_ppermutes(xs: Sequence[Tensor], axis: Axis, perms: Sequence[Sequence[tuple[int, int]]]) -> list[Pending]:
    """Post several ppermutes as one call: a batch of sends and receives that cannot wait for each other.

    Each counts as its own; as with ``start``, for code that writes its own gradient.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = next((x.mesh for x in xs if type(x) is Stacked), None) or current_mesh()
    if mesh.kind != "dist" or mesh.axis_size(axes) == 1:
        return [start(ppermute, x, axis, perm) for x, perm in zip(xs, perms, strict=True)]
    tables = [_pairs(x, axis, perm)[0] for x, perm in zip(xs, perms, strict=True)]
    if traces := scope().traces:
        for x, pairs in zip(xs, tables, strict=True):
            _note(traces, "ppermute", x, mesh, axes, (pairs,))
    return [Pending(finish) for finish in dist.ppermutes(xs, mesh, axes, tables)]


_POSTABLE: dict[Callable[..., Tensor], Callable[..., tuple[str, tuple]]] = {  # the same checks as the synchronous form
    psum: lambda x, axis, out=None, wire=None: ("psum", _narrow(x, out, wire)),
    pmax: lambda x, axis: ("pmax", ()),
    all_gather: lambda x, axis, dim=0: ("all_gather", (_dim("all_gather", x, axis, dim, False),)),
    psum_scatter: lambda x, axis, dim=0, wire=None: ("psum_scatter", _scatter(x, axis, dim, wire)),
    ppermute: lambda x, axis, perm: ("ppermute", _pairs(x, axis, perm)),
    shift: lambda x, axis, by=1: ("ppermute", _by(x, axis, by)),
    all_to_all: lambda x, axis, split_dim, concat_dim: ("all_to_all", _dims(x, axis, split_dim, concat_dim)),
    pbroadcast: lambda x, axis, root=0: ("pbroadcast", (_root("pbroadcast", x, axis, root),)),
    preduce: lambda x, axis, root=0: ("preduce", (_root("preduce", x, axis, root),)),
}


def start(f: Callable[..., Tensor], x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
    """Post a collective and go on: ``later = start(pbroadcast, x, "y", 0); ...; later.wait()``.

    For code that writes its own gradient; Raises: ShardError if autograd would have to record it.
    """
    mesh = x.mesh if type(x) is Stacked else current_mesh()
    if x.requires_grad and torch.is_grad_enabled():
        raise ShardError("the asynchronous form has no gradient", op=f.__name__, fix=f"sl.{f.__name__}(x, {axis!r})")
    if f not in _POSTABLE:
        names = ", ".join(g.__name__ for g in _POSTABLE)
        raise ShardError(
            f"no asynchronous form; these have one: {names}", op=f.__name__, fix=f"sl.{f.__name__}(x, {axis!r})"
        )
    op, params = _POSTABLE[f](x, axis, *args, **kwargs)
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if mesh.kind != "dist" or mesh.axis_size(axes) == 1:
        out = _call(op, x, axis, params)
        return Pending(lambda: out)
    return Pending(_finish(op, x, mesh, axes, params))
