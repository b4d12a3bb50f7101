"""Transfers: the record of each linear collective, counted, posted, waited for, differentiated.

n is the bytes of a block and p the axis size.  A collective's gradient is its adjoint, which is the
exact transpose of the map that all ranks compute together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives.backends import BACKENDS, Backend, dist
from shardlib.collectives.backends.backend import AxisGroup, Finish, Pairs, padded
from shardlib.collectives.backends.streams import beside
from shardlib.collectives.count import Trace, note
from shardlib.collectives.simulate import Stacked, Varies
from shardlib.collectives.types import after_move, flat_blocks, following, group, held, public_name
from shardlib.errors import ShardError, Unsupported, axes_text
from shardlib.mesh import (
    GROUPS,
    POSTED,
    RECENT,
    Axis,
    Mesh,
    axes_of,
    current_mesh,
    lost,
    number,
    scope,
)

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Collective:
    """Record of a linear collective; ``params`` are its arguments besides the axes.

    ``post``     its function in a back end.
    ``adjoint``  params -> the collective that computes the gradient, and its params.
    ``moved``    (bytes of a block, axis size, params) -> bytes received, /, messages; None: it
                 moves nothing.
    """

    name: str
    post: Callable[[Backend], Callable[..., Finish]]
    adjoint: Callable[..., tuple["Collective", tuple]]
    moved: Callable[[int, int, tuple], tuple[int, int, int]] | None = None


def _one_permuted(b: Backend) -> Callable[..., Finish]:
    return lambda raw, g, pairs: b.ppermutes([raw], g, [pairs])[0]


def _permuted(n: int, p: int, params: tuple) -> tuple[int, int, int]:
    moving = sum(s != d for s, d in params[0])
    return n * moving, p, int(moving > 0)


Counts = tuple[tuple[int, ...], ...]


def _moved_apart(counts: "Counts") -> int:
    """Count the elements sent to another rank, over all ranks."""
    return sum(n for i, row in enumerate(counts) for j, n in enumerate(row) if i != j)


def _unlinear(*_: object) -> tuple[Collective, tuple]:
    raise AssertionError("pmax has its own gradient")


def _psum(b: Backend) -> Callable[..., Finish]:
    return lambda raw, g, *dtypes: _sum_in_parts(b, raw, g, *dtypes) if dtypes else b.psum(raw, g)


def _sum_in_parts(
    b: Backend, raw: Tensor, g: AxisGroup, out: torch.dtype, wire: torch.dtype
) -> Finish:
    """Sum each rank's part in raw's dtype, sent in ``wire``, and gather the parts in ``out``."""
    flat = flat_blocks(raw, g.mesh)
    n = flat.shape[-1]
    part = b.psum_scatter(padded(flat, g.size), g, 0, wire)
    return lambda: b.all_gather(part().to(out), g, 0)()[..., :n].reshape(raw.shape)


PSUM = Collective(
    "psum",
    _psum,
    lambda *_: (PSUM, ()),
    lambda n, p, _: (2 * (p - 1) * n, p, 2 * (p - 1)),
)


PMAX = Collective("pmax", attrgetter("pmax"), _unlinear, PSUM.moved)


ALL_GATHER = Collective(
    "all_gather",
    attrgetter("all_gather"),
    lambda dim: (PSUM_SCATTER, (dim,)),
    lambda n, p, _: ((p - 1) * n, 1, p - 1),
)


PSUM_SCATTER = Collective(
    "psum_scatter",
    attrgetter("psum_scatter"),
    lambda dim, wire=None: (ALL_GATHER, (dim,)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)


PSLICE = Collective("pslice", attrgetter("pslice"), lambda dim: (_PLACE, (dim,)))


_PLACE = Collective("place", attrgetter("place"), lambda dim: (PSLICE, (dim,)))


PPERMUTE = Collective(
    "ppermute",
    _one_permuted,
    lambda pairs: (PPERMUTE, (tuple((d, s) for s, d in pairs),)),
    _permuted,
)


ALL_TO_ALL = Collective(
    "all_to_all",
    attrgetter("all_to_all"),
    lambda split, concat: (ALL_TO_ALL, (concat, split)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)


RAGGED = Collective(
    "ragged_all_to_all",
    lambda b: lambda x, g, counts, width: b.ragged_all_to_all(x, g, counts),
    lambda counts, width: (RAGGED, (tuple(zip(*counts, strict=True)), width)),
    lambda n, p, params: (_moved_apart(params[0]) * params[1], p, p - 1),
)


PBROADCAST = Collective(
    "pbroadcast",
    attrgetter("pbroadcast"),
    lambda root: (PREDUCE, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)


PREDUCE = Collective(
    "preduce",
    attrgetter("preduce"),
    lambda root: (PBROADCAST, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)


def _nothing_moves(b: Backend) -> Callable[..., Finish]:
    return lambda raw, *_: lambda: raw.view_as(raw)


PVARY = Collective("pvary", _nothing_moves, lambda: (PSUM, ()))


_ADDING = frozenset({PSUM, PMAX, PSUM_SCATTER, PREDUCE})


# kind of side stream; that of all others is "gather"
_SIDE = dict.fromkeys(_ADDING, "sum")


def note_recent(name: str, raw: Tensor, g: AxisGroup, wire: Any = None) -> None:
    """Keep a transfer between processes among the last ones, for reports of a lost rank."""
    if g.mesh.device_mesh is not None:
        RECENT.append((number(), name, g.axes, raw.shape, wire or raw.dtype))


def raise_lost(e: RuntimeError, op: Collective, raw: Tensor, g: Any) -> None:
    """Raise RankFailed if the error comes from a transfer between processes."""
    if g.mesh.device_mesh is None:
        return
    entry = next((r for r in reversed(RECENT) if r[1] == op.name and r[2] == g.axes), None)
    lost(e, entry or ("?", op.name, g.axes, raw.shape, raw.dtype), g.ranks)


def watched(finish: Callable[[], T], op: Collective, raw: Tensor, g: AxisGroup) -> Callable[[], T]:
    """Return a transfer whose failure names the rank that failed."""
    if g.mesh.device_mesh is None:
        return finish

    def wait() -> T:
        try:
            return finish()
        except RuntimeError as e:
            raise_lost(e, op, raw, g)
            raise

    return wait


def _run(op: Collective, raw: Tensor, g: AxisGroup, params: tuple) -> Tensor:
    """Post a transfer and wait for it."""
    try:
        return raw.view_as(raw) if op is PVARY else begin(op, raw, g, params)()
    except RuntimeError as e:
        raise_lost(e, op, raw, g)
        raise


class _Moved(Local):
    """A linear collective on raw storage; its backward is the adjoint collective."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, op: Collective, g: AxisGroup, params: tuple) -> Tensor:
        ctx.call = op, g.mesh, g.axes, params
        return _run(op, raw, g, params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, mesh, axes, params = ctx.call
        back, given = op.adjoint(*params)
        return raw_call(back, grads[0], group(mesh, axes), given), None, None, None


class _Max(Local):
    """pmax; the gradient goes to the ranks that hold the maximum, shared if there are several."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, g: AxisGroup) -> Tensor:
        out = _run(PMAX, raw, g, ())
        ctx.place = g.mesh, g.axes
        ctx.save_for_backward(raw, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (raw, out), (mesh, axes) = ctx.saved_tensors, ctx.place
        held = (raw == out).to(grads[0].dtype)
        both = raw_call(PSUM, torch.stack([grads[0], held], -1), group(mesh, axes), ())
        return held * both[..., 0] / both[..., 1], None, None


def begin(op: Collective, raw: Tensor, g: AxisGroup, params: tuple) -> Finish:
    """Count and post a collective; return the function that waits for its result."""
    if raw.dtype not in SENT:
        return _begin_other(op, raw, g, params)
    if is_on_host(raw, g.mesh):
        there = begin(op, raw.to(g.mesh.device), g, params)
        return lambda: there().to("cpu")
    return posted(partial(op.post(BACKENDS[g.mesh.kind]), raw, g, *params), op, raw, g, params)


def is_on_host(raw: Tensor, mesh: Mesh) -> bool:
    """Return whether a block is in host memory, from which an accelerator's transport sends nothing."""
    return raw.is_cpu and mesh.device.type not in ("cpu", "meta")


def posted(
    post: Callable[[], Callable[[], T]],
    op: Collective,
    raw: Tensor,
    g: AxisGroup,
    params: tuple,
    wire: torch.dtype | None = None,
) -> Callable[[], T]:
    """Count and post a collective of another form than ``op``'s own, as ``begin`` does that one.

    ``wire``  the dtype that is sent, where it is not raw's.
    """
    note_recent(op.name, raw, g, wire)
    traces = scope().listeners.traces
    if not traces:
        return post()
    ends = _counted(traces, op, raw if wire is None else raw.to(wire), g, params)
    return _ended(post(), ends)


def _begin_ahead(op: Collective, raw: Tensor, g: AxisGroup, params: tuple) -> Finish:
    """Post a transfer that overlaps with other work; otherwise as ``begin``."""
    if raw.is_cpu:
        return begin(op, raw, g, params)
    post = partial(begin, op, raw, g, params)
    return on_side_stream(_SIDE.get(op, "gather"), post, g, raw)


def on_side_stream(kind: str, post: Callable[[], Finish], g: AxisGroup, *memory: Tensor) -> Finish:
    """Post on a side stream, if the device has streams and the transport keeps their order."""
    if memory[0].is_cpu or not BACKENDS[g.mesh.kind].in_streams(g):
        return post()
    return beside(kind, post, *memory)


def _begin_other(op: Collective, raw: Tensor, g: AxisGroup, params: tuple) -> Finish:
    """Do as ``begin`` for a dtype that no transport supports, by sending it as another one."""
    dtype = raw.dtype
    if dtype in _SMALL and op in _ADDING:
        wide = begin(op, raw.to(torch.int32), g, params)
        return lambda: wide().to(dtype)
    if op in _ADDING and (op is PMAX or not dtype.is_complex):
        raise Unsupported(
            f"{dtype} has no {'order' if dtype.is_complex else 'sum'} in torch",
            op=op.name,
            operands={"block": f"{dtype} {list(raw.shape)}"},
            mesh=g.mesh,
            fix=f"{public_name(op.name)}({'x.abs()' if dtype.is_complex else 'x.float()'}, "
            f"{axes_text(g.axes)})",
        )
    if dtype.is_complex:
        # sent as pairs of reals, which is the same memory
        pairs = begin(op, torch.view_as_real(raw.resolve_conj()), g, params)
        return lambda: torch.view_as_complex(pairs().contiguous())
    bits = begin(op, raw.view(BITS[dtype.itemsize]), g, params)
    return lambda: bits().view(dtype)


SENT = frozenset(
    getattr(torch, name)
    for name in "float64 float32 float16 bfloat16 int64 int32 int8 uint8".split()
)
"""Dtypes that gloo and nccl support; bool and int16 are added in int32,
others are sent as an integer or half type of the same width.
"""


_SMALL = frozenset({torch.bool, torch.int16})


BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64, 16: torch.float64}


def _counted(
    traces: tuple[Trace, ...], op: Collective, raw: Tensor, g: AxisGroup, params: tuple
) -> list[Callable[[], None]]:
    """Count a transfer; return the functions to call when it completes."""
    mesh, axes = g.mesh, g.axes
    heard = [t.before(op.name, raw, mesh, axes, params) for t in traces]
    if op.moved is not None:
        n, p = raw.nbytes, g.size
        # a wire dtype narrower than the sum's sends fewer bytes
        if wires := [a.itemsize for a in params if isinstance(a, torch.dtype)]:
            n = n // raw.element_size() * sum(wires) // len(wires)
        if mesh.kind == "stacked":
            n //= mesh.size
        note(traces, op.name, axes, *op.moved(n, p, params))
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


def raw_call(op: Collective, raw: Tensor, g: AxisGroup, params: tuple) -> Tensor:
    if raw.requires_grad and torch.is_grad_enabled():
        if op is PMAX:
            return _Max.apply(raw, g)  # type: ignore[return-value]
        return _Moved.apply(raw, op, g, params)  # type: ignore[return-value]
    return raw if op is PVARY else _run(op, raw, g, params)


# ---------------------------------------------------------------- transfers under way


class Pending:
    """A transfer under way; ``wait()`` once for its result.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     later = sl.collectives.start(sl.psum, torch.ones(2), "x")  # under way
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


def keep_posted(finish: Finish) -> Pending:
    """Return a transfer that is kept until it is waited for, see mesh/posted.py."""
    transfer = Pending(finish)
    POSTED[transfer] = transfer._arrive
    return transfer


def post(op: Collective, x: Tensor, g: AxisGroup, params: tuple) -> Pending:
    """Post a collective on a block, over axes of more than one rank."""
    varies = after_move(op.name, x, g, params)
    return _result(_begin_ahead(op, held(x, g.mesh), g, params), g.mesh, varies)


def _result(finish: Finish, mesh: Mesh, varies: Varies | None) -> Pending:
    """Return a transfer of storages as one of blocks."""
    if mesh.kind != "stacked":
        return keep_posted(finish)
    return keep_posted(lambda: following(finish(), mesh, varies))


def broadcasts(axis: str, like: Tensor) -> Callable[[Tensor, int], Any]:
    """Return ``start(pbroadcast, x, axis, root)`` as a function of x and root, for schedules.

    ``like``  one of the blocks to be sent: all are recorded once, for reports of a lost rank.
    """
    now = scope()
    mesh = current_mesh() if now.mesh is None else now.mesh
    found = None if now.listeners.traces else mesh.memo[GROUPS].get((broadcasts, axis))
    if found is None:
        if mesh.kind != "dist" or now.listeners.traces or mesh.axis_size(axis) == 1:
            return partial(_broadcast, group(mesh, (axis,)))
        found = mesh.memo[GROUPS][broadcasts, axis] = dist.broadcasts(group(mesh, (axis,)))
    RECENT.append((number(), "pbroadcast", (axis,), like.shape, like.dtype))
    return found


def _broadcast(g: AxisGroup, x: Tensor, root: int) -> Pending:
    return Pending(lambda: x) if g.size == 1 else post(PBROADCAST, x, g, (root,))


def start_ppermutes(
    xs: Sequence[Tensor], axis: Axis, tables: Sequence[tuple[tuple[int, int], ...]]
) -> list[Pending]:
    """Post several ppermutes as one call, so that their sends and receives cannot deadlock.

    Each counts as its own; as with ``start``, for code that writes its own gradient.
    """
    axes = axes_of(axis)
    mesh = next((x.mesh for x in xs if type(x) is Stacked), None) or current_mesh()
    g = group(mesh, axes)
    if g.size == 1:
        return [Pending(partial(_alone, x, pairs)) for x, pairs in zip(xs, tables, strict=True)]
    if any(x.dtype not in SENT for x in xs):
        each = zip(xs, tables, strict=True)
        return [post(PPERMUTE, x, g, (pairs,)) for x, pairs in each]
    raws = [held(x, mesh) for x in xs]
    traces, ends = scope().listeners.traces, []
    for raw, pairs in zip(raws, tables, strict=True):
        note_recent("ppermute", raw, g)
        ends.append(_counted(traces, PPERMUTE, raw, g, (pairs,)) if traces else [])
    out = []
    finishes = BACKENDS[mesh.kind].ppermutes(raws, g, tables)
    for x, pairs, finish, end in zip(xs, tables, finishes, ends, strict=True):
        varies = after_move("ppermute", x, g, (pairs,))
        out.append(_result(_ended(finish, end), mesh, varies))
    return out


def _alone(x: Tensor, pairs: Pairs) -> Tensor:
    """Permute on an axis of one rank, which has zeros if it sends itself nothing."""
    return x if pairs else torch.zeros_like(x)
