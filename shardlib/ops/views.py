"""Views: the same elements with other dimensions.  Nothing moves, or the view is refused.

``view`` and ``reshape`` compute with mixed-radix digits: a dimension split ``(3 y)`` is the digits
3, y and a rest; merging dimensions concatenates digits, splitting one distributes them.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.autocast import DECLARED, casting
from shardlib.errors import BadArgument, ImplicitCommunication, OutOfRange
from shardlib.layouts import Dim, Layout
from shardlib.layouts.dims import Apart, cut, leading, without_ones
from shardlib.ops.declare import by_signature, rows_but, where
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.each_rank import FlatCall, each
from shardlib.ops.padding import beside, cuts_padding, of_true_sizes, sizes, the_dim
from shardlib.ops.signatures import ArgumentSlot, binder, dim_of, dims_of
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import (
    Place,
    ShardedTensor,
    Unfit,
    block_strides,
    blockwise,
    call_error,
    implements,
    is_dense,
    lift,
    local_call,
    no_implementation,
    partial_escape,
)

_Digit = tuple[str | Dim | None, int]
"""An axis, a ring-ordered token or None, and the number of positions that it counts."""


def _digits(dim: Dim, size: int, mesh: dict[str, int]) -> list[_Digit]:
    """List the digits of a dimension, major first."""
    if dim.order != "contiguous":
        # a ring-ordered split cannot be factored further: one digit
        groups = _digits(dim.groups, size, mesh)[:-1] if dim.groups.parts else []
        return [*groups, (Dim(dim.ring, dim.order), size // math.prod(r for _, r in groups))]
    out: list[_Digit] = [(p, mesh[p]) if isinstance(p, str) else (None, p) for p in dim.parts]
    return [*out, (None, size // max(1, math.prod(r for _, r in out)))]


def view_layout(
    layout: Layout, shape: tuple[int, ...], new: tuple[int, ...], mesh: dict[str, int]
) -> Layout | str:
    """Return the layout of a tensor viewed with a new shape, or why the blocks do not allow it.

    >>> view_layout(Layout.parse("d . y"), (8, 5, 12), (8, 5, 4, 3), {"d": 2, "y": 2})
    Layout('d . y .')
    >>> view_layout(Layout.parse("d . y"), (8, 5, 12), (40, 12), {"d": 2, "y": 2})
    Layout('d y')
    """
    layout = layout.resolve(len(shape))
    if any(mesh[a] == 1 for a in layout.axes):
        return _with_ones(layout, shape, new, mesh)
    if 0 in shape:
        return layout if not layout.axes else "an empty split tensor has no other view"
    left: list[_Digit] = []
    for dim, n in zip(layout.dims, shape, strict=True):
        for axis, radix in _digits(dim, n, mesh):
            if axis is None and left and left[-1][0] is None:
                # adjacent unsplit ones merge
                left[-1] = (None, left[-1][1] * radix)
            else:
                left.append((axis, radix))
    dims = []
    for n in new:
        try:
            taken = leading(left, n, lambda digit: digit[1], _divided)
        except Apart as e:
            assert isinstance(e.digit, tuple), "both shapes have as many elements"
            return f"{_named(*e.digit)} does not fit into a dimension of size {n}"
        for sequence, _ in taken[:-1]:
            if isinstance(sequence, Dim):
                return f"a sequence split {sequence} has no dimension after it"
        while left and left[0] == (None, 1):
            left.pop(0)
        dims.append(_dim(taken))
    return layout.onto(dims)


def _divided(digit: _Digit, major: int) -> list[_Digit]:
    axis, radix = digit
    if axis is not None:
        raise Apart(digit)
    return [(None, major), (None, radix // major)]


def _named(axis: str | Dim | None, radix: int) -> str:
    if isinstance(axis, Dim):
        return f"a sequence split {axis}"
    return f"a factor {radix}" if axis is None else f"axis {axis!r} (size {radix})"


def _with_ones(
    layout: Layout, shape: tuple[int, ...], new: tuple[int, ...], mesh: dict[str, int]
) -> Layout | str:
    """Find a view's layout; axes of size one go to the dimension that starts where theirs did."""
    bare = [without_ones(d, mesh) for d in layout.dims]
    out = view_layout(layout.onto(bare), shape, new, mesh)
    if isinstance(out, str):
        return out
    dims = list(out.resolve(len(new)).dims)
    for i, d in enumerate(layout.dims):
        j = None if d == bare[i] else _same_start(i, shape, new)
        if j is None:
            continue
        if new[j] == shape[i]:
            dims[j] = d
        elif dims[j].order == "contiguous":
            many = [k for k, p in enumerate(d.parts) if isinstance(p, int) or mesh[p] > 1]
            first = many[0] if many else len(d.parts)
            ahead = [p for p in d.parts[:first] if isinstance(p, str)]
            behind = [p for p in d.parts[first:] if isinstance(p, str) and mesh[p] == 1]
            dims[j] = Dim((*ahead, *dims[j].parts, *behind))
    return layout.onto(dims)


def _same_start(i: int, shape: tuple[int, ...], new: tuple[int, ...]) -> int | None:
    """Return the new dimension that starts at the element where dimension ``i`` does.

    Of dimensions that start together only the last has a size above one, and keeps its axes.
    """
    start, alone = math.prod(shape[:i]), shape[i] == 1
    before = sum(math.prod(shape[:k]) == start for k in range(i)) if alone else 0
    found = [j for j in range(len(new)) if math.prod(new[:j]) == start]
    found = [j for j in found if (new[j] == 1) is alone] or found
    return found[min(before, len(found) - 1)] if found else None


def _dim(digits: list[_Digit]) -> Dim:
    """Return digits as a token: unsplit ones before the last axis are factors, others the rest."""
    if digits and isinstance(digits[-1][0], Dim):
        ring = digits[-1][0]
        groups = _dim([*digits[:-1], ("", 1)]).parts[:-1]
        between = (1,) if groups and isinstance(groups[-1], str) else ()
        return Dim((*groups, *between, *ring.parts), ring.order)
    last = max((k for k, (a, _) in enumerate(digits) if a is not None), default=-1)
    parts: list[str | int] = []
    for axis, radix in digits[: last + 1]:
        if isinstance(axis, str):
            parts.append(axis)
        elif radix > 1:
            if parts and isinstance(parts[-1], int):
                parts[-1] *= radix
            else:
                parts.append(radix)
    return Dim(tuple(parts))


def _infer(sizes: tuple[int, ...], x: ShardedTensor, count: int, op: str) -> tuple[int, ...]:
    """Return sizes without a -1, with ``count`` as their product."""
    known = math.prod(s for s in sizes if s != -1)
    missing = count // known if known else -1
    full = tuple(missing if s == -1 else s for s in sizes)
    if sizes.count(-1) > 1 or min(full, default=0) < 0 or math.prod(full) != count:
        why = f"shape {list(sizes)} is invalid for {count} elements"
        fix = f"x.view({', '.join(map(str, x.shape))})"
        raise call_error(BadArgument, why, op, fix, tensor=x)
    return full


_Call = tuple[Func, Args, Kwargs]
"""A view function with its arguments, of which the first positional one is the tensor."""


@lru_cache(maxsize=4096)
def _viewed(
    layout: Layout, shape: tuple[int, ...], new: tuple[int, ...], mesh: tuple[tuple[str, int], ...]
):
    out = view_layout(layout, shape, new, dict(mesh))
    return out if isinstance(out, str) else (out, out.local_shape(new, dict(mesh)))


def _view(call: _Call, x: ShardedTensor, new: tuple[int, ...]) -> Any:
    """Return ``x`` with ``new`` sizes."""
    run = Tensor.view if call[0] is Tensor.view else Tensor.reshape
    new = _infer(new, x, x.shape.numel(), run.__name__)
    stored = _stored(call[0], x, new, lambda d, j: math.prod(x.shape[:d]) == math.prod(new[:j]))
    copied = not is_dense(x) and not _mergeable(x, stored)
    if copied and run is Tensor.view:
        why = (
            f"a view of {list(new)} is not compatible with the tensor's strides: it spans two of "
            "them"
        )
        raise call_error(BadArgument, why, "view", f"x.reshape{new}", tensor=x)
    size = x.padded_shape
    found = _viewed(x.sharding, size, stored, tuple(x.mesh.axes.items()))
    if isinstance(found, str):
        why = f"shape {list(new)} cuts through the blocks: {found}"
        fix = f"sl.reshard(x, '...').view{tuple(new)}"
        raise call_error(ImplicitCommunication, why, run, fix, tensor=x)
    layout, local = found
    place = x.place.becomes(layout, torch.Size(new), torch.Size(stored))
    if len(new) == 2 < len(size) and stored[-1] == size[-1]:
        place = place._replace(merged_from=tuple(size[:-1]))
    if not copied:
        return blockwise(*call, place, run, (local,), strided=True)
    raw = local_call(run, x.mesh, x.raw, local)
    if raw.untyped_storage().data_ptr() == x.raw.untyped_storage().data_ptr():
        # torch can view the block, but would copy the whole tensor
        raw = raw.clone()
    return ShardedTensor(raw, place)


def _stored(
    op: Func, x: ShardedTensor, new: tuple[int, ...], same: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Return the stored sizes of a view of ``x``: a dimension with padding stays as it is.

    ``same``  whether a dimension of ``x`` and one of the view may be the same one.
    """
    out = list(new)
    for d, (n, m) in enumerate(sizes(x)):
        if n != m:
            found = [j for j, k in enumerate(new) if k == n and same(d, j)]
            if not found:
                raise cuts_padding(f"a view of {list(new)}", op, x)
            out[min(found, key=lambda j: abs(j - d))] = m
    return tuple(out)


def _mergeable(x: ShardedTensor, new: tuple[int, ...]) -> bool:
    """Check whether torch could view the whole tensor with ``new`` sizes without a copy.

    Its strides are inferred from the block's: in the same order, with a gap wherever the block has
    one.
    """
    size = x.padded_shape
    block, local = block_strides(x), x.sharding.local_shape(size, x.mesh)
    whole = [0] * len(size)
    # next strides without a gap, of the block and of the whole tensor
    inner, outer = 1, 1
    for d in sorted(range(len(whole)), key=lambda d: (block[d], local[d] > 1, -d)):
        if block[d]:
            whole[d] = outer if block[d] <= inner else 2 * outer
            inner, outer = block[d] * local[d], whole[d] * size[d]
    return _viewable(size, whole, new)


def _viewable(size: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> bool:
    """Check whether a tensor of these sizes and strides has a view of ``new`` sizes.

    By torch, on one element: on a recorded mesh a tensor of the whole size would count as memory.
    """
    try:
        torch.empty((), device="meta").as_strided(size, stride).view(new)
    except RuntimeError:
        return False
    return True


_VIEW = binder("""
    view(input, *size: int)
    view(input, *shape: int)
""")


@implements(Tensor.view, Tensor.reshape, torch.reshape, takes="padding sums")
def view(func: Func, args: Args, kwargs: Kwargs) -> object:
    if (len(args) == 2 and isinstance(args[1], torch.dtype)) or "dtype" in kwargs:
        if {args[0].dtype} == {*args[1:], *kwargs.values()}:
            # as in torch, where view(dtype) is not differentiable
            return args[0].detach()
        raise no_implementation(func, args, kwargs, "a view as another dtype")
    x, new = _VIEW(*args, **kwargs).values()
    return _view((func, args or (x,), kwargs), x, new)


@by_signature(
    "view_as(input, other: tensor)",
    Tensor.view_as, Tensor.reshape_as, Tensor.expand_as, takes="all",
)  # fmt: skip
def sized_as(func: Func, x: Tensor, other: Tensor) -> object:
    """Run ``x.view_as(y)`` and others by the sizes of y."""
    return getattr(x, func.__name__.removesuffix("_as"))(other.shape)


_FLATTEN = binder("flatten(input, start_dim: int = 0, end_dim: int = -1)")


@implements(Tensor.flatten, torch.flatten, takes="padding sums")
def flatten(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, *ends = _FLATTEN(*args, **kwargs).values()
    start, end = (dim_of(d, len(x.shape), "flatten") for d in ends)
    if start > end:
        raise call_error(BadArgument, "start_dim cannot come after end_dim", "flatten", tensor=x)
    if x.shape and start == end:
        return x
    new = (*x.shape[:start], x.shape[start : end + 1].numel(), *x.shape[end + 1 :])
    return _view((func, args or (x,), kwargs), x, new)


_UNFLATTEN = binder("unflatten(input, dim: int, sizes: ints)")


@implements(Tensor.unflatten, torch.unflatten, takes="padding sums")
def unflatten(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, dim, sizes = _UNFLATTEN(*args, **kwargs).values()
    dim = dim_of(dim, len(x.shape), "unflatten")
    sizes = _infer(tuple(sizes), x, x.shape[dim], "unflatten")
    new = (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    return _view((func, args or (x,), kwargs), x, new)


# ---------------------------------------------------------------- permutations


@implements(
    Tensor.permute, torch.permute, Tensor.transpose, torch.transpose,
    Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, Tensor.movedim, torch.movedim,
    Tensor.moveaxis, torch.moveaxis, Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__,
    padding=of_true_sizes, takes="skew sums",
)  # fmt: skip
def permuted(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Reorder dimensions as torch reorders those of a stand-in, whose strides are their numbers."""
    call = FlatCall.of(func, *args, **kwargs)
    x, *others = call.tensors
    if others:
        raise Unfit("a dimension that is a tensor")
    ndim = len(x.shape)
    order = tuple(reversed(range(ndim)))
    if func != Tensor.T.__get__:
        # which warns of more than two dimensions
        frame = torch.empty([1] * ndim, device="meta").as_strided([1] * ndim, list(range(ndim)))
        a, k = call.replaced([frame])
        order = func(*a, **k).stride()
    shape = torch.Size([x.shape[d] for d in order])
    place = x.place.becomes(x.sharding.transpose(*order), shape)
    if func.__name__ in ("t", "__get__"):
        place = place._replace(out_layout=x.place.out_layout)
    return blockwise(func, args or (x,), kwargs, place, Tensor.permute, (order,))


# ---------------------------------------------------------------- dimensions of size one, expand


def _regrouped(x: ShardedTensor, dims: Iterable[Dim], shape: Iterable[int]) -> Place:
    """Return the place of a view of ``x`` with other tokens and sizes."""
    return x.place.becomes(x.sharding.onto(dims), torch.Size(shape))


_UNSQUEEZE = binder("unsqueeze(input, dim: int)")


@implements(Tensor.unsqueeze, torch.unsqueeze, padding=of_true_sizes)
def unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, dim = _UNSQUEEZE(*args, **kwargs).values()
    dim = dim_of(dim, len(x.shape) + 1, "unsqueeze")
    dims, shape = list(x.dims), list(x.shape)
    dims.insert(dim, Dim())
    shape.insert(dim, 1)
    place = _regrouped(x, dims, shape)
    return blockwise(func, args or (x,), kwargs, place, Tensor.unsqueeze, (dim,))


_SQUEEZE = binder("squeeze(input)\nsqueeze(input, *dim: int)")


@implements(Tensor.squeeze, torch.squeeze, padding=of_true_sizes)
def squeeze(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, *where = _SQUEEZE(*args, **kwargs).values()
    ndim = len(x.shape)
    chosen = dims_of(where[0], ndim, "squeeze") if where and ndim else range(ndim)
    gone = sorted(d for d in chosen if x.shape[d] == 1)
    keep = sorted(set(range(ndim)).difference(gone))
    place = _regrouped(x, [x.dims[d] for d in keep], [x.shape[d] for d in keep])
    # reshape could give other strides than squeeze
    at = tuple(d - ndim for d in gone)
    return blockwise(func, args or (x,), kwargs, place, Tensor.squeeze, (at,))


_EXPAND = binder("expand(input, *size: int, implicit: bool = False)")


@implements(Tensor.expand, Tensor.broadcast_to, torch.broadcast_to, takes="padding sums")
def expand(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, wanted, _ = _EXPAND(*args, **kwargs).values()
    new = torch.empty((), device="meta").expand(x.shape).expand(wanted).shape
    front = len(new) - len(x.shape)
    stored = _stored(func, x, new, lambda d, j: d + front == j)
    layout = x.sharding.onto((*[Dim()] * front, *x.dims))
    place = x.place.becomes(layout, new, torch.Size(stored))
    local = layout.local_shape(stored, x.mesh)
    return blockwise(func, args or (x,), kwargs, place, Tensor.expand, (local,))


# ---------------------------------------------------------------- pieces


@lru_cache(maxsize=4096)
def _split_sizes(name: str, size: int, pieces: int | tuple[int, ...]) -> list[int]:
    """List the sizes of pieces as torch cuts them."""
    line = torch.empty((), device="meta").expand(size)
    return [len(t) for t in getattr(torch, name)(line, pieces)]


_SPLIT = """
    split(input, split_size: ints, dim: int = 0)
    split(tensor, split_size_or_sections: ints, dim: int = 0)
    split(input, split_sizes: ints, dim: int = 0)
"""


@by_signature("chunk(input, chunks: int, dim: int = 0)", Tensor.chunk, torch.chunk, along_dim=True)
@by_signature(
    _SPLIT, Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes,
    along_dim=True,
)  # fmt: skip
def split(
    func: Func, x: ShardedTensor, pieces: int | Sequence[int], dim: int
) -> tuple[ShardedTensor, ...]:
    if not x.shape:
        raise BadArgument("a scalar has no pieces", op=func.__name__)
    dim = dim_of(dim, len(x.shape), func.__name__)
    pieces = pieces if isinstance(pieces, int) else tuple(pieces)
    sizes = _split_sizes(func.__name__, x.shape[dim], pieces)
    token = x.dims[dim]
    ways = 1
    if token.is_split and len(sizes) > 1:
        share = _groups_share(token, sizes)
        if share is None:
            return _pieces(x, dim, sizes) or _refuse_pieces(func, x, dim, sizes)
        token = share
    if token.is_split:
        ways = x.mesh.axis_size(token.axes)
    local = [n // ways for n in sizes]
    raws = local_call(torch.split, x.mesh, x.raw, local, dim - len(x.shape))
    return tuple(_resized(x, raw, dim, token, n) for raw, n in zip(raws, sizes, strict=True))


def _groups_share(token: Dim, sizes: list[int]) -> Dim | None:
    """Return the token of equal pieces that each have some of the groups of ``token``, or None."""
    groups, ways = token.parts[0], len(sizes)
    if not isinstance(groups, int) or groups % ways or token.order != "contiguous":
        return None
    if len(set(sizes)) > 1:
        return None
    left = groups // ways
    return Dim(token.parts[1:] if left == 1 else (left, *token.parts[1:]))


def _resized(x: ShardedTensor, raw: Tensor, dim: int, token: Dim, size: int) -> ShardedTensor:
    """Return a value like ``x``, of which one dimension has another token and size."""
    dims, shape = list(x.dims), list(x.shape)
    dims[dim], shape[dim] = token, size
    return x.becomes(raw, x.sharding.onto(dims), shape)


def _pieces(x: ShardedTensor, dim: int, sizes: list[int]) -> tuple[ShardedTensor, ...] | None:
    """Return pieces of a split dimension, if each rank holds an equal share of each, in one run."""
    stops = itertools.accumulate(sizes)
    cuts = [_cut(x, dim, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]
    if None in cuts:
        return None
    return tuple(_piece(x, dim, n, *c) for n, c in zip(sizes, cuts, strict=True) if c is not None)


def _refuse_pieces(func: Func, x: ShardedTensor, dim: int, sizes: list[int]) -> NoReturn:
    axis = x.dims[dim].axes[0]
    ways = len(sizes)
    fits = len(set(sizes)) == 1 and sizes[0] % x.mesh.axis_size(axis) == 0
    why = f"pieces of {sizes} cut through dimension {dim}"
    raise _through_blocks(why, func, x, dim, f"({ways} {axis})" if fits else ".")


def _through_blocks(
    why: str, op: Func | str, x: ShardedTensor, dim: int, token: str = "."
) -> ImplicitCommunication:
    """Return the refusal of what cuts a split dimension; its fix splits it by ``token``."""
    dims = [*map(str, x.dims[:dim]), token, *map(str, x.dims[dim + 1 :])]
    why, fix = f"{why}, which is split {x.dims[dim]}", f"sl.reshard(x, {' '.join(dims)!r})"
    return call_error(ImplicitCommunication, why, op, fix, tensor=x)


def _cut(x: ShardedTensor, dim: int, start: int, stop: int) -> tuple[slice, Dim] | None:
    return cut(x.dims[dim], x.shape[dim], tuple(x.mesh.axes.items()), start, stop)


def _piece(x: ShardedTensor, dim: int, size: int, here: slice, token: Dim) -> ShardedTensor:
    how = dim - len(x.shape), here.start, here.stop - here.start
    return _resized(x, local_call(torch.narrow, x.mesh, x.raw, *how), dim, token, size)


@by_signature("unbind(input, dim: int = 0)", Tensor.unbind, torch.unbind, along_dim=True)
def unbind(func: Func, x: ShardedTensor, dim: int) -> tuple[ShardedTensor, ...]:
    dim = dim_of(dim, len(x.shape), "unbind")
    if x.shape and not x.shape[dim]:
        return ()
    return tuple(squeeze(Tensor.squeeze, (p, dim), {}) for p in split(Tensor.split, x, 1, dim))


@by_signature("select(input, dim: int, index: int)", Tensor.select, torch.select, along_dim=True)
def select(func: Func, x: ShardedTensor, dim: int, index: int) -> ShardedTensor:
    return _at(x, dim_of(dim, len(x.shape), "select"), index)


@by_signature(
    "narrow(input, dim: int, start: int, length: int)", Tensor.narrow, torch.narrow, along_dim=True
)
def narrow(func: Func, x: ShardedTensor, dim: int, start: int, length: int) -> ShardedTensor:
    dim = dim_of(dim, len(x.shape), "narrow")
    size = (*x.shape, 0)[dim]
    begin = start + size if start < 0 else start
    if not (0 <= begin <= size and 0 <= length <= size - begin):
        why = f"start ({start}) + length ({length}) exceeds dimension size ({size})"
        raise call_error(OutOfRange, why, "narrow", tensor=x)
    return _at(x, dim, slice(begin, begin + length))


def _at(x: ShardedTensor, dim: int, index: int | slice) -> ShardedTensor:
    return piece(Tensor.__getitem__, (x, (*[slice(None)] * dim, index)), {})


def entries(index: object) -> tuple[Any, ...]:
    """Return an index as the tuple of what stands between its commas."""
    return index if isinstance(index, tuple) else (index,)


def named(index: Iterable[object]) -> int:
    """Count the entries of an index that are neither None nor Ellipsis."""
    return sum([i is not None and i is not Ellipsis for i in index])


def without_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Return an index with whole slices for its Ellipsis and for the dimensions left out."""
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:at], *[slice(None)] * (ndim - named(index)), *index[at + 1 :])


def indexed_dims(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """List what indexes each dimension."""
    return [i for i in without_ellipsis(index, ndim) if i is not None]


def piece(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Index unsplit dimensions by ints, slices, None and Ellipsis; split ones by whole slices."""
    x, index = args
    index = entries(index)
    if named(index) > len(x.shape):
        raise OutOfRange(
            f"too many indices for a tensor of {len(x.shape)} dimensions", op="getitem"
        )
    dims: list[Dim] = []
    shape: list[int] = []
    local: list[Any] = []
    d = 0
    for i in without_ellipsis(index, len(x.shape)):
        if i is None:
            dims.append(Dim())
            shape.append(1)
        else:
            x, i = _own_share(x, d, i)
            if isinstance(i, slice):
                dims.append(x.dims[d])
                shape.append(len(range(*i.indices(x.shape[d]))))
            d += 1
        local.append(i)
    raw = local_call(Tensor.__getitem__, x.mesh, x.raw, tuple(local))
    return x.becomes(raw, x.sharding.onto(dims), shape)


def _own_share(x: ShardedTensor, d: int, i: Any) -> tuple[ShardedTensor, Any]:
    """Take a slice of a split dimension of which ranks hold equal shares; return the index left.

    Raises: OutOfRange; ImplicitCommunication for another index of a split dimension.
    """
    token, size = x.dims[d], x.shape[d]
    if isinstance(i, int) and not isinstance(i, bool) and not -size <= i < size:
        why = f"index {i} is out of bounds for dimension {d} with size {size}"
        raise call_error(OutOfRange, why, "getitem", tensor=x)
    if not token.is_split:
        return x, i
    if isinstance(i, slice):
        start, stop, step = i.indices(size)
        if (start, stop, step) == (0, size, 1):
            return x, slice(None)
        found = _cut(x, d, start, max(start, stop))
        if step == 1 and found is not None:
            return _piece(x, d, stop - start, *found), slice(None)
    raise _through_blocks(f"index {i!r} cuts through dimension {d}", "getitem", x, d)


# torch casts it on the blocks, since autocast covers only some modes
DECLARED.add(F.pad)


@by_signature("pad(input, pad: ints, mode='constant', value: number = None)", F.pad)
def pad(
    func: Func, x: ShardedTensor, pad: Sequence[int], mode: str, value: float | None
) -> ShardedTensor:
    """Pad dimensions that are whole."""
    widths = list(pad)
    if len(widths) % 2 or len(widths) > 2 * len(x.shape):
        why = f"{len(widths)} widths for {len(x.shape)} dimensions"
        raise call_error(BadArgument, why, "pad", tensor=x)
    if x.sharding.partial and value:
        raise partial_escape("pad", x)
    size = list(x.shape)
    for i, w in enumerate(widths):
        d = len(size) - 1 - i // 2
        if w and x.dims[d].is_split:
            raise _through_blocks(f"blocks would move unasked to pad dimension {d}", func, x, d)
        size[d] += w
    with casting(func):
        raw = local_call(F.pad, x.mesh, x.raw, widths, mode, value)
    return x.becomes(raw, shape=size)


_REPEAT = binder("repeat_interleave(input, repeats, dim: int = None, *, output_size: int = None)")


@implements(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Repeat each element along a dimension: local, since blocks and groups stay in order."""
    x, repeats, dim, length = _REPEAT(*args, **kwargs).values()
    if dim is None or not isinstance(repeats, int):
        raise no_implementation(func, args, kwargs, "repeats must be an int and dim given")
    ndim = len(x.shape)
    dim = dim_of(dim, ndim, "repeat_interleave")
    size = repeats * x.shape[dim]
    if repeats < 0 or length not in (None, size):
        raise BadArgument(f"{repeats} repeats, output_size {length}", op="repeat_interleave")
    raw = local_call(torch.repeat_interleave, x.mesh, x.raw, repeats, dim=dim - ndim)
    return x.becomes(raw, shape=[*x.shape[:dim], size, *x.shape[dim + 1 :]])


_CAT = binder("cat(tensors, dim: int = 0)")


@implements(torch.stack, padding=beside(lambda *_, **__: []))
def stack(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Join pieces along a new dimension."""
    tensors, dim = _CAT(*args, **kwargs).values()
    return torch.cat([torch.unsqueeze(t, dim) for t in tensors], dim)


@implements(torch.cat, torch.concat, torch.concatenate, padding=beside(the_dim(_CAT)))
def cat(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Join pieces along a whole dimension: those of one layout as they are, others as rows."""
    tensors, dim = _CAT(*args, **kwargs).values()
    # torch joins (0,) to any shape
    pieces = [t for t in tensors if t.shape != (0,)] or tensors
    if len(pieces) == 1 and isinstance(pieces[0], ShardedTensor):
        return _joined_alone(pieces[0], tensors, dim)
    if not _join_as_they_are(tensors, dim):
        return rows_call(func, args, kwargs, lambda a, k: _piece_rows(**_CAT(*a, **k)))
    first = tensors[0]
    dim = dim_of(dim, first.ndim, func.__name__)
    raw = local_call(torch.cat, first.mesh, [t.raw for t in tensors], dim)
    return _resized(first, raw, dim, Dim(), sum(t.shape[dim] for t in tensors))


def _joined_alone(only: ShardedTensor, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Join one piece with others of shape (0,), or with none."""
    if len(tensors) == 1 and -only.ndim <= dim < only.ndim:
        return only.clone(memory_format=torch.contiguous_format)
    blocks = FlatCall.of(torch.cat, [lift(t, only.mesh, "cat").raw for t in tensors], dim)
    return only.becomes(each(blocks, only.mesh))


def _join_as_they_are(pieces: Sequence[Any], dim: int) -> bool:
    """Check whether joined blocks are the blocks of the joined pieces, pending sums among them."""
    first = pieces[0]
    if not all(type(t) is ShardedTensor and t.sharding == first.sharding for t in pieces):
        return False
    if not -first.ndim <= dim < first.ndim or first.dims[dim].is_split:
        return False
    return not any(t.deferred or t.ndim != first.ndim for t in pieces)


def _piece_rows(tensors: Sequence[ArgumentSlot], dim: int) -> Labels:
    """Label all dimensions but ``dim`` rows; a piece of shape (0,) has none."""
    along = where(dim, max(t.ndim for t in tensors))
    found = {t.at: rows_but(along, t.ndim) for t in tensors}
    return found | {t.at: (None,) for t in tensors if t.shape == (0,)}
