"""Transfers on raw storages: the record of each linear collective, counted, posted, differentiated.

n is the bytes of a block and p the axis size.  A collective's gradient is its adjoint, which is the
exact transpose of the map that all ranks compute together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives.backends import BACKENDS, Backend, dist
from shardlib.collectives.backends.backend import Axes, Finish
from shardlib.collectives.backends.streams import beside
from shardlib.collectives.count import Trace, note
from shardlib.collectives.varying import public_name
from shardlib.errors import Unsupported
from shardlib.mesh import RECENT, Mesh, lost, number, scope

__all__ = [
    "ALL_GATHER", "ALL_TO_ALL", "PBROADCAST", "PMAX", "PPERMUTE", "PREDUCE", "PSLICE", "PSUM",
    "PSUM_SCATTER", "PVARY", "RAGGED", "SENT", "Collective", "Counts", "counted", "ended", "note_recent",
    "on_side_stream", "raise_lost", "raw_call", "begin", "begin_ahead",
]  # fmt: skip

T = TypeVar("T")


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


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
    return lambda raw, mesh, axes, pairs: b.ppermutes([raw], mesh, axes, [pairs])[0]


def _permuted(n: int, p: int, params: tuple) -> tuple[int, int, int]:
    moving = sum(s != d for s, d in params[0])
    return n * moving, p, int(moving > 0)


Counts = tuple[tuple[int, ...], ...]


def _moved_apart(counts: "Counts") -> int:
    """Count the elements sent to another rank, over all ranks."""
    return sum(n for i, row in enumerate(counts) for j, n in enumerate(row) if i != j)


def _unlinear(*_: object) -> tuple[Collective, tuple]:
    raise AssertionError("pmax has its own gradient")


PSUM = Collective(
    "psum",
    lambda b: b.psum,
    lambda *_: (PSUM, ()),
    lambda n, p, _: (2 * (p - 1) * n, p, 2 * (p - 1)),
)


PMAX = Collective("pmax", lambda b: b.pmax, _unlinear, PSUM.moved)


ALL_GATHER = Collective(
    "all_gather",
    lambda b: b.all_gather,
    lambda dim: (PSUM_SCATTER, (dim,)),
    lambda n, p, _: ((p - 1) * n, 1, p - 1),
)


PSUM_SCATTER = Collective(
    "psum_scatter",
    lambda b: b.psum_scatter,
    lambda dim, wire=None: (ALL_GATHER, (dim,)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)


PSLICE = Collective("pslice", lambda b: b.pslice, lambda dim: (_PLACE, (dim,)))


_PLACE = Collective("place", lambda b: b.place, lambda dim: (PSLICE, (dim,)))


PPERMUTE = Collective(
    "ppermute",
    _one_permuted,
    lambda pairs: (PPERMUTE, (tuple((d, s) for s, d in pairs),)),
    _permuted,
)


ALL_TO_ALL = Collective(
    "all_to_all",
    lambda b: b.all_to_all,
    lambda split, concat: (ALL_TO_ALL, (concat, split)),
    lambda n, p, _: ((p - 1) * n, p, p - 1),
)


RAGGED = Collective(
    "ragged_all_to_all",
    lambda b: lambda x, mesh, axes, counts, width: b.ragged_all_to_all(x, mesh, axes, counts),
    lambda counts, width: (RAGGED, (tuple(zip(*counts, strict=True)), width)),
    lambda n, p, params: (_moved_apart(params[0]) * params[1], p, p - 1),
)


PBROADCAST = Collective(
    "pbroadcast",
    lambda b: b.pbroadcast,
    lambda root: (PREDUCE, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)


PREDUCE = Collective(
    "preduce",
    lambda b: b.preduce,
    lambda root: (PBROADCAST, (root,)),
    lambda n, p, _: ((p - 1) * n, p, 1),
)


def _nothing_moves(b: Backend) -> Callable[..., Finish]:
    return lambda raw, *_: lambda: raw.view_as(raw)


PVARY = Collective("pvary", _nothing_moves, lambda: (PSUM, ()))


_ADDING = frozenset({PSUM, PMAX, PSUM_SCATTER, PREDUCE})


_SIDE = dict.fromkeys(_ADDING, "sum")  # kind of side stream; that of all others is "gather"


def note_recent(name: str, raw: Tensor, mesh: Mesh, axes: Axes, wire: Any = None) -> None:
    """Keep a transfer between processes among the last ones, for reports of a lost rank."""
    if mesh.device_mesh is not None:
        RECENT.append((number(), name, axes, raw.shape, wire or raw.dtype))


def raise_lost(e: RuntimeError, op: Collective, raw: Tensor, mesh: Mesh, axes: Axes) -> None:
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
        ctx: Any, raw: Tensor, op: Collective, mesh: Mesh, axes: Axes, params: tuple
    ) -> Tensor:
        ctx.call = op, mesh, axes, params
        try:
            return raw.view_as(raw) if op is PVARY else begin(op, raw, mesh, axes, params)()
        except RuntimeError as e:
            raise_lost(e, op, raw, mesh, axes)
            raise

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, mesh, axes, params = ctx.call
        back, given = op.adjoint(*params)
        return raw_call(back, grads[0], mesh, axes, given), None, None, None, None


class _Max(Local):
    """pmax; the gradient goes to the ranks that hold the maximum, shared if there are several."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        try:
            out = begin(PMAX, raw, mesh, axes, ())()
        except RuntimeError as e:
            raise_lost(e, PMAX, raw, mesh, axes)
            raise
        ctx.place = mesh, axes
        ctx.save_for_backward(raw, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (raw, out), (mesh, axes) = ctx.saved_tensors, ctx.place
        held = (raw == out).to(grads[0].dtype)
        both = raw_call(PSUM, torch.stack([grads[0], held], -1), mesh, axes, ())
        return held * both[..., 0] / both[..., 1], None, None


def begin(op: Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Count and post a collective; return the function that waits for its result."""
    dtype = raw.dtype
    if dtype not in SENT:
        return _begin_other(op, raw, mesh, axes, params)
    note_recent(op.name, raw, mesh, axes)
    if traces := scope().listeners.traces:
        ends = counted(traces, op, raw, mesh, axes, params)
        return ended(op.post(BACKENDS[mesh.kind])(raw, mesh, axes, *params), ends)
    return op.post(BACKENDS[mesh.kind])(raw, mesh, axes, *params)


def begin_ahead(op: Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Post a transfer that overlaps with other work; otherwise as ``begin``."""
    if raw.is_cpu:
        return begin(op, raw, mesh, axes, params)
    post = partial(begin, op, raw, mesh, axes, params)
    return on_side_stream(_SIDE.get(op, "gather"), post, mesh, axes, raw)


def on_side_stream(
    kind: str, post: Callable[[], Finish], mesh: Mesh, axes: Axes, *memory: Tensor
) -> Finish:
    """Post on a side stream, if the device has streams and the transport keeps their order."""
    if memory[0].is_cpu or not BACKENDS[mesh.kind].in_streams(mesh, axes):
        return post()
    return beside(kind, post, *memory)


def _begin_other(op: Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Finish:
    """Do as ``begin`` for a dtype that no transport supports, by sending it as another one."""
    dtype = raw.dtype
    if dtype in _SMALL and op in _ADDING:
        wide = begin(op, raw.to(torch.int32), mesh, axes, params)
        return lambda: wide().to(dtype)
    if op in _ADDING and (op is PMAX or not dtype.is_complex):
        raise Unsupported(
            f"{dtype} has no {'order' if dtype.is_complex else 'sum'} in torch",
            op=op.name,
            operands={"block": f"{dtype} {list(raw.shape)}"},
            mesh=mesh,
            fix=f"{public_name(op.name)}({'x.abs()' if dtype.is_complex else 'x.float()'}, "
            f"{(axes[0] if len(axes) == 1 else axes)!r})",
        )
    if dtype.is_complex:  # sent as pairs of reals, which is the same memory
        pairs = begin(op, torch.view_as_real(raw.resolve_conj()), mesh, axes, params)
        return lambda: torch.view_as_complex(pairs().contiguous())
    bits = begin(op, raw.view(_BITS[dtype.itemsize]), mesh, axes, params)
    return lambda: bits().view(dtype)


SENT = frozenset(
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


def counted(
    traces: tuple[Trace, ...], op: Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple
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


def ended(finish: Callable[[], T], ends: list[Callable[[], None]]) -> Callable[[], T]:
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


def raw_call(op: Collective, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> Tensor:
    if raw.requires_grad and torch.is_grad_enabled():
        if op is PMAX:
            return _Max.apply(raw, mesh, axes)  # type: ignore[return-value]
        return _Moved.apply(raw, op, mesh, axes, params)  # type: ignore[return-value]
    try:
        return raw if op is PVARY else begin(op, raw, mesh, axes, params)()
    except RuntimeError as e:
        raise_lost(e, op, raw, mesh, axes)
        raise
