"""Placement of data on a mesh: shard, unshard, reshard."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import optree
import torch
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local, is_dtensor, under_transform
from shardlib.capacity import LARGE, refuse_beyond
from shardlib.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    block_shape,
    checking,
    each_rank,
    holds_values,
    pbroadcast,
    played,
    ppermute,
    pslice,
    psum,
    psum_scatter,
    spans_processes,
    start_ppermutes,
    storage,
    storage_shape,
    unwrap,
    verify,
    wrap,
)
from shardlib.dtensor_convert import as_dtensor, from_dtensor
from shardlib.errors import MeshError, PlainTensor, ShardError, Unsupported
from shardlib.kernels import active
from shardlib.kernels.pack import copy_box, packable
from shardlib.layouts import (
    Exchange,
    Layout,
    LayoutLike,
    LayoutTree,
    ReshardStep,
    as_layout,
    per_leaf,
)
from shardlib.memory_sharing import one_storage
from shardlib.mesh import (
    Axes,
    Mesh,
    MeshLike,
    as_mesh,
    bind,
    brought,
    current_mesh,
    rank_along,
    scope,
    uploaded,
)
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import (
    Place,
    ShardedTensor,
    call_error,
    heard,
    implements,
    no_tensor,
    no_transform,
    one_copy,
    refuse_blocks,
    refuse_trace,
    replicated,
    settle,
    typeof,
    whole_now,
)

Key = TypeVar("Key")
Tree = TypeVar("Tree")


class _ShardOptions(TypedDict, total=False):
    """Arguments on which the type of the result does not depend."""

    src: int | None
    pad: bool


@overload
def shard(
    x: Tensor, layout: LayoutLike, mesh: MeshLike | None = None, **how: Unpack[_ShardOptions]
) -> ShardedTensor: ...
@overload
def shard(
    x: Mapping[Key, Tensor],
    layout: LayoutLike | Mapping[Key, LayoutLike],
    mesh: MeshLike | None = None,
    **how: Unpack[_ShardOptions],
) -> dict[Key, ShardedTensor]: ...
@overload
def shard(
    x: Tree, layout: LayoutTree, mesh: MeshLike | None = None, **how: Unpack[_ShardOptions]
) -> Tree: ...
def shard(
    x: object,
    layout: object,
    mesh: MeshLike | None = None,
    *,
    src: int | None = None,
    pad: bool = False,
) -> object:
    """Place a tensor (or each tensor of a pytree) that every rank has: keep this rank's block.

    ``layout``  a Layout, its text, a tuple as JAX's P, DTensor's placements; for a pytree one for
                all its tensors, or a tree of them like x or its upper part.
    ``src``     0: rank 0's values are used, the others' only for their shape and dtype.
                Without it the ranks verify, once for each line, that copies are the same.
    In a pytree numbers and None, such as an optimizer's step count, stay as they are.
    ``pad``     allow sizes that do not divide: blocks are padded, reductions mask the padding,
                ``unshard`` strips it; functions that would read it refuse.
    Only the local block is copied.  Differentiable: the gradient of x is the whole one.
    Raises: UnevenSplit, UnknownAxis, RankMismatch, NoMesh; x is left as it was.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     sl.shard(torch.arange(4).reshape(2, 2), "x y")
    ShardedTensor(i64[2@x, 2@y] on x=2 y=2
    x=0 y=0: tensor([[0]])
    x=0 y=1: tensor([[1]])
    x=1 y=0: tensor([[2]])
    x=1 y=1: tensor([[3]]))
    """
    m = as_mesh(mesh)
    if scope().call.body:
        way = "place values before the call"
        fix = f"sl.shard(x, {str(layout)!r})  # before the call, as an operand"
        raise _in_body(x, "shard", way, fix)
    if not isinstance(x, Tensor):
        return _shard_tree(x, layout, m, src, pad)
    _refuse_placed(x, layout, m)
    refuse_trace()
    if name := under_transform():
        raise no_transform(name)
    lay = as_layout(layout, "shard", "sl.shard(x, {})", shape=x.shape, mesh=m).resolve(x.ndim)
    placed = place_whole(x, lay, m, src=src, pad=pad)
    if src is None and spans_processes(m):
        fix = f"sl.shard(x, {str(lay)!r}, src=0)"
        verify("shard", m, {f"the {typeof(placed)}": (placed.raw, lay)}, fix)
    return placed


def _shard_tree(x: Any, layout: object, m: Mesh, src: int | None, pad: bool) -> object:
    leaves, tree = optree.tree_flatten(x)
    listed = isinstance(x, list | tuple) and leaves
    if not any(isinstance(leaf, Tensor) for leaf in leaves) and (listed or tree.is_leaf()):
        raise no_tensor(x, "shard", str(layout) if isinstance(layout, Layout | str) else "...")
    return _mapped(shard, x, layout, mesh=m, src=src, pad=pad)


def _refuse_placed(x: Tensor, layout: object, m: Mesh) -> None:
    """Refuse a tensor that is sparse, has no size yet or is sharded already."""
    if x.layout != torch.strided or isinstance(x, torch.nn.parameter.UninitializedTensorMixin):
        why = "only dense, initialised tensors are placed"
        raise Unsupported(why, op="shard", fix="sl.shard(x.to_dense(), layout)")
    if isinstance(x, ShardedTensor):
        line = "sl.reshard(x, {})"
        fix = line.format(repr(str(as_layout(layout, "shard", line, shape=x.shape, mesh=m))))
        why = "the tensor is sharded already"
        given = {"tensor": typeof(x)}
        raise ShardError(why, op="shard", operands=given, mesh=m, fix=fix)


def _in_body(
    x: object, op: str, way: str = "move blocks by collectives", fix: str = ""
) -> ShardError:
    """Build the error for shard, reshard or unshard in a body of shard_map, which has blocks."""
    m = current_mesh()
    why = f"a body of shard_map computes on this rank's block of each operand: {way}"
    given = {"x": f"{x.dtype} {list(x.shape)}"} if isinstance(x, Tensor) else {}
    line = fix or f"sl.all_gather(x, {m.names[0]!r})"
    return ShardError(why, op=op, operands=given, mesh=m, fix=line)


def place_whole(
    x: Tensor, lay: Layout, m: Mesh, *, src: int | None, pad: bool, device: torch.device | None = None
) -> ShardedTensor:  # fmt: skip
    """Shard one tensor, on the mesh's device or another, without comparing the ranks' blocks."""
    size = padded_size(lay, x, m, pad)
    lay.check(tuple(size), m, op="shard")
    if src is not None:
        x = _from_rank(x, m, src)
    shape = x.shape
    if size != shape:
        x = lengthened(x, shape, size)
    raw = _placed(x, lay, m, device or m.device)
    if (mode := checking()) is not None:
        mode.tag(raw)
    return ShardedTensor(raw, Place(lay, shape, m, size))


def lengthened(x: Tensor, shape: Sequence[int], size: Sequence[int]) -> Tensor:
    """Pad a tensor, or a block of one of this shape, at the end of each dimension."""
    sizes = zip(reversed(shape), reversed(size), strict=True)
    return torch.nn.functional.pad(x, [w for n, s in sizes for w in (0, s - n)])


def placed_like(x: Tensor, like: ShardedTensor) -> ShardedTensor:
    """Place a tensor, plain or sharded on any mesh, in the layout of ``like``; sizes agree.

    Plain ones must be the same on every rank; this is not verified here.
    """
    if is_dtensor(x):
        x = from_dtensor(x)
    if isinstance(x, ShardedTensor):
        if x.mesh is like.mesh and x.padded_shape == like.padded_shape:
            return x if x.place == like.place else reshard(x, like.sharding).at(like.place)
        x = unshard(x)
    placed = place_whole(x, like.sharding, like.mesh, src=None, pad=like.is_padded)
    return placed.at(like.place)


def _refuse_array(x: object, op: str) -> None:
    if not isinstance(x, Tensor) and getattr(x, "ndim", 0) and hasattr(x, "__array__"):
        raise no_tensor(x, op)


def _mapped(f: Any, x: Any, *layout: Any, **how: Any) -> Any:
    """Call ``f`` on each tensor of a pytree, with its layout if there are any; others stay.

    Raises: PlainTensor for a single object that is neither a tensor nor a number, or an array.
    """
    name = f.__name__
    leaves, tree = optree.tree_flatten(x)
    if tree.is_leaf() and not isinstance(x, int | float | complex):
        raise no_tensor(x, name)
    layouts = [per_leaf(given, x, name, f"sl.{name}(x, {{}})") for given in layout]
    for leaf in leaves:
        _refuse_array(leaf, name)
    each = zip(leaves, *layouts, strict=True)
    found = [f(*one, **how) if isinstance(one[0], Tensor) else one[0] for one in each]
    return optree.tree_unflatten(tree, found)


def _placed(x: Tensor, layout: Layout, m: Mesh, device: torch.device) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        refuse_blocks(x)
        return _Placed.apply(x, layout, m)
    return _blocks(x.detach(), layout, m, device)


def padded_size(layout: Layout, x: Tensor, m: Mesh, pad: bool = True) -> torch.Size:
    """Return the smallest sizes that divide; without ``pad`` those of the tensor."""
    if not pad:
        return x.shape
    local = layout.local_shape(tuple(x.shape), m, pad=True)
    return torch.Size([n * m.axis_size(d.axes) for n, d in zip(local, layout.dims, strict=True)])


def _from_rank(x: Tensor, m: Mesh, src: int) -> Tensor:
    if src != 0:
        raise ShardError(
            f"src must be 0, not {src}", op="shard", mesh=m, fix="sl.shard(x, layout, src=0)"
        )
    if not spans_processes(m):
        return x
    with bind(m):
        return pbroadcast(x.to(m.device), m.names, 0)


def _blocks(x: Tensor, layout: Layout, m: Mesh, device: torch.device) -> Tensor:
    """Return the raw storage of a tensor that is whole here."""
    shape = tuple(x.shape)
    if not holds_values(m):
        return torch.empty(layout.local_shape(shape, m), dtype=x.dtype, device="meta")
    if spans_processes(m) and m.coord is None:
        raise MeshError(
            "this process is not in the mesh", op="shard", mesh=m, fix="sl.make_mesh(x=-1)"
        )
    if x.nbytes > LARGE and not x.is_meta:
        made = math.prod(storage_shape(m, *layout.local_shape(shape, m)))
        refuse_beyond(made * x.element_size(), device, "shard", m)
    raw = storage([_cut(x, layout, m, c) for c in played(m)], m)
    return raw if raw.is_meta else brought(raw, device)


def _cut(x: Tensor, layout: Layout, m: Mesh, coord: dict[str, int]) -> Tensor:
    for d, held in enumerate(layout.indices(tuple(x.shape), m, coord)):
        if isinstance(held, range):
            x = x.narrow(d, held.start, len(held))
        else:
            x = x.index_select(d, uploaded(tuple(held), x.device))
    if layout.is_zero(coord):
        return torch.zeros_like(x)
    return x.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------- moving


_MOVES: dict[str, Callable[[Tensor, ReshardStep], Tensor]] = {
    "slice": lambda x, step: pslice(x, step.axes, step.dim),
    "all_gather": lambda x, step: all_gather(x, step.axes, step.dim),
    "all_to_all": lambda x, step: all_to_all(x, step.axes, step.to, step.dim),
    "psum": lambda x, step: psum(x, step.axes),
    "psum_scatter": lambda x, step: psum_scatter(x, step.axes, step.dim),
    "ppermute": lambda x, step: ppermute(x, step.axes, step.table),
    "mask": lambda x, step: _of_first(x, step.axes),
    "exchange": lambda x, step: _exchanged(x, step.axes, *step.table),
    "order_slice": lambda x, step: pslice(_reordered(x, step), step.axes, step.dim),
    "gather_order": lambda x, step: _reordered(all_gather(x, step.axes, step.dim), step),
}
"""Kind of a step of a reshard -> the function that takes it."""


def _reordered(x: Tensor, step: ReshardStep) -> Tensor:
    return torch.index_select(x, step.dim, uploaded(step.table, x.device))


def _of_first(x: Tensor, axes: Axes) -> Tensor:
    """Keep the block of the first rank along ``axes``, and zero the others."""
    if x.is_meta:
        return x.clone()
    away: Any = axis_index(axes) != 0
    away = away if isinstance(away, Tensor) else uploaded((away,), x.device, torch.bool)[0]
    # not x * 0, which makes nan of infinity
    return x.masked_fill(away, 0)


def _exchanged(x: Tensor, axes: Axes, plan: Exchange) -> Tensor:
    """Send all rounds, then copy the part that stays while they run, then what arrives."""
    mesh, raw = current_mesh(), unwrap(x)
    kernels = (not raw.is_cpu or active.cpu) and packable(raw, len(block_shape(raw, mesh)))

    def move(to: Tensor, put: _Box, source: Tensor, take: _Box) -> None:
        if kernels:
            copy_box(to, source, put, take)
        else:
            to[_index(put, raw.device)] = source[_index(take, raw.device)]

    sent = [raw.new_zeros(storage_shape(mesh, *r.shape)) for r in plan.rounds]
    out = raw.new_empty(storage_shape(mesh, *plan.shape))
    ranks = [(rank_along(axes, coord, mesh.axes), view) for coord, view in each_rank(mesh)]
    for buffer, r in zip(sent, plan.rounds, strict=True):
        for rank, view in ranks:
            if rank in r.takes:
                move(view(buffer), _everywhere(r.shape), view(raw), r.takes[rank])
    coming = start_ppermutes([wrap(b, mesh) for b in sent], axes, [r.pairs for r in plan.rounds])
    for rank, view in ranks:
        if rank in plan.kept:
            take, put = plan.kept[rank]
            move(view(out), put, view(raw), take)
    for transfer, r in zip(coming, plan.rounds, strict=True):
        arrived = unwrap(transfer.wait())
        for rank, view in ranks:
            if rank in r.puts:
                move(view(out), r.puts[rank], view(arrived), _everywhere(r.shape))
    return wrap(out, mesh)


_Box = Sequence[Sequence[int]]


def _everywhere(shape: Sequence[int]) -> list[range]:
    """List every place along each dimension."""
    return [range(n) for n in shape]


def _index(places: _Box, device: torch.device) -> tuple[Any, ...]:
    """Return places along each dimension as an index of the box that they span."""
    if all(isinstance(p, range) for p in places):
        return tuple(slice(p.start, p.stop) for p in places if isinstance(p, range))
    last = len(places) - 1
    held = (uploaded(p if isinstance(p, range) else tuple(p), device) for p in places)
    return tuple(t.reshape(-1, *[1] * (last - d)) for d, t in enumerate(held))


class _Reshard(Local):
    """Autograd Function from one layout to another; the cotangent moves back."""

    @staticmethod
    def forward(
        ctx: Ctx, raw: Tensor, source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh
    ) -> Tensor:
        ctx.way = source, target, shape, mesh
        ctx.set_materialize_grads(False)
        with bind(mesh):
            x = wrap(raw, mesh)
            for step in (source >> target).steps(shape, mesh):
                x = _MOVES[step.kind](x, step)
        out = unwrap(x)
        if not out.numel():
            # autograd forbids writes to a view made in a Function
            return out.clone()
        return out.view_as(out) if out is raw else out

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        if grads[0] is None:
            return None, None, None, None, None
        source, target, shape, mesh = ctx.way
        back = _Reshard.apply(grads[0], target.bare, source.bare, shape, mesh)
        return back, None, None, None, None


@overload
def reshard(x: ShardedTensor, layout: LayoutLike) -> ShardedTensor: ...
@overload
def reshard(x: Tree, layout: LayoutTree) -> Tree: ...
def reshard(x: object, layout: LayoutTree) -> object:
    """Move a sharded tensor (or each of a pytree) to another layout, by the cheapest plan.

    ``layout``  of a pytree one for all its tensors, or a tree of them like x or its upper part.
    A DTensor comes back as a DTensor.  A tensor that has this layout already is returned itself,
    and blocks that need not move are shared, as by ``Tensor.to``; ``unshard`` and ``clone`` copy.

    Differentiable; ``layout_of(x) >> layout`` shows the steps and bytes.
    Raises: UnevenSplit, UnknownAxis, RankMismatch, PlainTensor.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.arange(8.0).reshape(4, 2), "x .")
    ...     sl.typeof(sl.reshard(a, ". x"))
    'f32[4, 2@x]'
    """
    if not isinstance(x, Tensor):
        return _mapped(reshard, x, layout)
    if is_dtensor(x):
        return as_dtensor(reshard(from_dtensor(x), layout))
    if not isinstance(x, ShardedTensor):
        x = _promoted(x, layout)
    if type(layout) is not Layout:
        layout = as_layout(
            layout, "reshard", "sl.reshard(x, {})", shape=x.padded_shape, mesh=x.mesh
        )
    target = layout.resolve(len(x.padded_shape))
    if target == x.sharding:
        return x
    target.check(tuple(x.padded_shape), x.mesh, op="reshard")
    return heard(_moved, reshard, x, target)


def _promoted(x: Tensor, layout: Any) -> ShardedTensor:
    """Take a plain tensor as a replicated one where operators do so; else refuse it."""
    if scope().call.promoting and scope().mesh is not None:
        return replicated(x, scope().mesh)
    if scope().call.body:
        raise _in_body(x, "reshard")
    lay = as_layout(layout, "reshard", "sl.shard(x, {})", shape=x.shape)
    why = "a plain tensor has no layout to leave"
    raise call_error(PlainTensor, why, "reshard", f"sl.shard(x, {str(lay)!r})", tensor=x)


def _moved(x: ShardedTensor, target: Layout) -> ShardedTensor:
    if x.deferred & {*x.sharding.named, *target.named}:
        x = settle(x)
    size = tuple(x.padded_shape)
    still = not any(
        (a >> b).steps(size, x.mesh)
        for a, b in ((x.sharding, target), (target.bare, x.sharding.bare))
    )
    if still:
        return x.becomes(x.raw, target)
    item = x.raw.element_size()
    # an accelerator's allocator refuses by itself; the host's kills the process when it is filled
    if x.raw.is_cpu and math.prod(storage_shape(x.mesh, *size)) * item > LARGE:
        made = math.prod(storage_shape(x.mesh, *target.local_shape(size, x.mesh))) * item
        refuse_beyond(made, x.raw.device, "reshard", x.mesh)
    raw: Any = _Reshard.apply(x.raw, x.sharding, target, size, x.mesh)
    return x.becomes(raw, target)


def constrain(x: Tree, layout: LayoutTree) -> Tree:
    """Move the value to ``layout``, and in backward its gradient too.

    ``jax.lax.with_sharding_constraint``; moves what ``reshard`` moves.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.ones(4, 6), "x .").requires_grad_()
    ...     with sl.expect_comm(all_to_all=2, psum=1):  # one each way, and the sum's
    ...         h = sl.constrain(2 * a, ". x")  # and in this layout for its users
    ...         h.sum().backward()
    ...     sl.typeof(h), sl.typeof(a.grad)
    ('f32[4, 6@x]', 'f32[4@x, 6]')
    """
    return reshard(x, layout)


class _Placed(Local):
    """Autograd Function from a whole tensor to blocks; its gradient is gathered on every rank."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        ctx.way = layout, x.shape, mesh, x.device
        return _blocks(x, layout, mesh, mesh.device)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        layout, shape, mesh, device = ctx.way
        return (
            unshard(ShardedTensor(grads[0], Place(layout.bare, shape, mesh))).to(device),
            None,
            None,
        )


@overload
def unshard(x: Tensor) -> Tensor: ...
@overload
def unshard(x: Mapping[Key, Tensor]) -> dict[Key, Tensor]: ...
@overload
def unshard(x: Tree) -> Tree: ...
def unshard(x: object) -> object:
    """Return the full tensor on every rank (or each tensor of a pytree), in its own memory.

    Gathers along every axis that splits it, and sums where a sum is pending.  Differentiable.
    Writes to the result change no block, on simulated and on real ranks alike.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     sl.unshard(sl.shard(torch.arange(4), "x"))
    tensor([0, 1, 2, 3])
    """
    if not isinstance(x, Tensor):
        return _mapped(unshard, x)
    if is_dtensor(x):
        return unshard(from_dtensor(x))
    if not isinstance(x, ShardedTensor):
        if scope().call.body:
            raise _in_body(x, "unshard")
        raise call_error(PlainTensor, "a plain tensor is whole already", "unshard", "x", tensor=x)
    if x.is_padded:
        return unshard(x.with_padding)[tuple(slice(n) for n in x.shape)]
    return heard(_whole, unshard, x)


def whole_of(x: Tensor) -> Tensor:
    """Return the full tensor of a sharded one, a plain one itself."""
    return unshard(x) if isinstance(x, ShardedTensor) else x


def _whole(x: ShardedTensor) -> Tensor:
    block = x.raw
    raw = one_copy(settle(reshard(x, "...")).raw, x.mesh)
    return whole_now(raw.clone() if one_storage(raw, block) else raw)


@implements(Tensor.cpu, Tensor.cuda, takes="all")
def _leaving(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return x if it is on the device already, or a replicated x's copy on the CPU; else refuse."""
    x = args[0]
    if x.raw.device.type == func.__name__:
        return x
    if func is Tensor.cpu and not x.sharding.named:
        return x.becomes(func(x.raw, *args[1:], **kwargs))
    why = f"the blocks lie on {x.raw.device}, where the mesh computes"
    fix = f"sl.unshard(x).{func.__name__}()"
    raise call_error(ShardError, why, func, fix, tensor=x)
