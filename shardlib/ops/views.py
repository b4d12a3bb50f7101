"""Views: the same elements with other dimensions.  Nothing moves, or the view is refused.

``view`` and ``reshape`` compute with mixed-radix digits: a dimension split ``(3 y)`` is the digits
3, y and a rest; merging dimensions concatenates digits, splitting one distributes them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.autocast import DECLARED, casting
from shardlib.errors import (
    BadArgument,
    ImplicitCommunication,
    NoImplementation,
    OutOfRange,
    Unsupported,
    lettered,
)
from shardlib.layouts import Dim, Layout
from shardlib.layouts.dims import Apart, cut, leading, without_ones
from shardlib.ops.each_rank import FlatCall
from shardlib.ops.padding import beside, last_only, of_true_sizes, padded_to, the_dim
from shardlib.ops.signatures import binder, dim_of, dims_of
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
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
    typeof,
)

__all__ = ["VIEW", "piece", "view_layout"]

# (axis, or a ring-ordered token, or None; radix), major first
_Digits = list[tuple[str | Dim | None, int]]


def _digits(dim: Dim, size: int, mesh: dict[str, int]) -> _Digits:
    if dim.order != "contiguous":  # a ring-ordered split cannot be factored further: one digit
        groups = _digits(dim.groups, size, mesh)[:-1] if dim.groups.parts else []
        return [*groups, (Dim(dim.ring, dim.order), size // math.prod(r for _, r in groups))]
    out: _Digits = [(p, mesh[p]) if isinstance(p, str) else (None, p) for p in dim.parts]
    rest = size // max(1, math.prod(r for _, r in out))
    return [*out, (None, rest)]


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
    if layout.skew:
        return "a skewed tensor has no other view"
    if 0 in shape:
        return layout if not layout.axes else "an empty split tensor has no other view"
    reader = _DigitReader(layout, shape, mesh)
    try:
        dims = tuple(reader.dim(n) for n in new)
        reader.end()
    except _DigitCut as e:
        return str(e)
    return Layout(dims=dims, partial=layout.partial)


class _DigitCut(Exception):
    """Reason why a new dimension does not consist of whole digits."""


class _DigitReader:
    """Digits of a layout's dimensions, regrouped as the dimensions of another shape.

    ``at``    the next dimension to read.
    ``left``  digits read and not used yet, and ``count`` their product.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], mesh: dict[str, int]) -> None:
        self.dims, self.shape, self.mesh = layout.dims, shape, mesh
        self.at, self.count = 0, 1
        self.left: _Digits = []

    def dim(self, n: int) -> Dim:
        """Return the token of the next dimension of the new shape, of size ``n``."""
        if n != 1 and not self.left:  # both shapes end a dimension here: nothing to regroup
            self._skip_ones()
            if self.at < len(self.shape) and self.shape[self.at] == n:
                self.at += 1
                return self.dims[self.at - 1]
        self._read(n)
        taken = self._taken(n)
        self.count //= n
        for sequence, _ in taken[:-1]:
            if isinstance(sequence, Dim):
                raise _DigitCut(f"a sequence split {sequence} has no dimension after it")
        while self.left and self.left[0] == (None, 1):
            self.left.pop(0)
        return _dim(taken)

    def end(self) -> None:
        """Check that nothing is left that is split."""
        if any(d.is_split for d in self.dims[self.at :]) or any(a for a, _ in self.left):
            raise _DigitCut("a split dimension of size 1 would vanish")

    def _skip_ones(self) -> None:
        while self.at < len(self.shape) and self.shape[self.at] == 1:
            if self.dims[self.at].is_split:
                raise _DigitCut(f"dimension {self.at} of size 1 is split")
            self.at += 1

    def _read(self, n: int) -> None:
        """Read dimensions until their digits hold ``n``, or a multiple if none is split."""
        while self.at < len(self.shape):
            unsplit = len(self.left) == 1 and self.left[0][0] is None
            if self.count >= n and not (unsplit and self.count % n):
                return
            for axis, radix in _digits(self.dims[self.at], self.shape[self.at], self.mesh):
                if axis is None and self.left and self.left[-1][0] is None:
                    self.left[-1] = (None, self.left[-1][1] * radix)  # adjacent unsplit ones merge
                else:
                    self.left.append((axis, radix))
            self.count *= self.shape[self.at]
            self.at += 1

    def _taken(self, n: int) -> _Digits:
        """Take the digits of a dimension of size ``n``; an unsplit digit may be divided."""
        try:
            return leading(self.left, n, lambda digit: digit[1], _divided)
        except Apart as e:
            assert isinstance(e.digit, tuple), "as many digits as positions were read"
            why = f"{_named(*e.digit)} does not fit into a dimension of size {n}"
            raise _DigitCut(why) from None


def _divided(digit: tuple[str | Dim | None, int], major: int) -> _Digits:
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
    out = view_layout(Layout(tuple(bare), layout.partial), shape, new, mesh)
    if isinstance(out, str):
        return out
    dims = list(out.resolve(len(new)).dims)
    for i, d in enumerate(layout.dims):
        j = None if d == bare[i] else _same_start(i, shape, new)
        if j is None:
            continue
        if dims[j] == bare[i] and new[j] == shape[i]:
            dims[j] = d
        elif dims[j].order == "contiguous":
            many = [k for k, p in enumerate(d.parts) if isinstance(p, int) or mesh[p] > 1]
            first = many[0] if many else len(d.parts)
            ahead = [p for p in d.parts[:first] if isinstance(p, str)]
            behind = [p for p in d.parts[first:] if isinstance(p, str) and mesh[p] == 1]
            dims[j] = Dim((*ahead, *dims[j].parts, *behind))
    return Layout(tuple(dims), layout.partial)


def _same_start(i: int, shape: tuple[int, ...], new: tuple[int, ...]) -> int | None:
    """Return the new dimension that starts at the element where dimension ``i`` does.

    Of dimensions that start together only the last has a size above one, and keeps its axes.
    """
    start, alone = math.prod(shape[:i]), shape[i] == 1
    before = sum(math.prod(shape[:k]) == start for k in range(i)) if alone else 0
    found = [j for j in range(len(new)) if math.prod(new[:j]) == start]
    found = [j for j in found if (new[j] == 1) is alone] or found
    return found[min(before, len(found) - 1)] if found else None


def _dim(digits: _Digits) -> Dim:
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
    holes = sizes.count(-1)
    fits = (
        holes <= 1
        and all(s >= -1 for s in sizes)
        and (known and count % known == 0 if holes else known == count)
    )
    if not fits:
        why = f"shape {list(sizes)} is invalid for {count} elements"
        raise call_error(
            BadArgument, why, op, f"x.view({', '.join(map(str, x.padded_shape))})", tensor=x
        )
    return tuple(count // known if s == -1 else s for s in sizes) if holes else sizes


class _ViewCall(NamedTuple):
    """Call of a view function, as it was made."""

    func: Any
    args: Any
    kwargs: Any

    def seen(
        self, x: ShardedTensor, run: Func, how: tuple[Any, ...], place: Place, strided: bool = False
    ) -> Any:
        """Return a view of ``x``: ``run`` of its blocks, with place ``place``."""
        if self.args and self.args[0] is x:
            return blockwise(*self, place, run, how, strided)
        return ShardedTensor(local_call(run, x.mesh, (x.raw, *how), {}), place)


@lru_cache(maxsize=4096)
def _viewed(
    layout: Layout, shape: tuple[int, ...], new: tuple[int, ...], mesh: tuple[tuple[str, int], ...]
):
    out = view_layout(layout, shape, new, dict(mesh))
    return out if isinstance(out, str) else (out, out.local_shape(new, dict(mesh)))


def _view(call: _ViewCall, func: Func, x: ShardedTensor, new: tuple[int, ...]) -> Any:
    new = _infer(new, x, x.padded_shape.numel(), func.__name__)
    copied = not is_dense(x) and not _mergeable(x, new)
    if copied and func is Tensor.view:
        why = (
            f"a view of {list(new)} is not compatible with the tensor's strides: it spans two of "
            "them"
        )
        raise call_error(BadArgument, why, "view", f"x.reshape{new}", tensor=x)
    found = _viewed(x.sharding, tuple(x.padded_shape), new, tuple(x.mesh.axes.items()))
    if isinstance(found, str):
        why = f"shape {list(new)} cuts through the blocks: {found}"
        raise call_error(
            ImplicitCommunication, why, func, f"sl.reshard(x, '...').view{tuple(new)}", tensor=x
        )
    layout, local = found
    place = Place(layout, torch.Size(new), x.mesh, deferred=x.deferred)
    if len(new) == 2 < len(x.padded_shape) and new[-1] == x.padded_shape[-1]:
        place = place._replace(merged_from=tuple(x.padded_shape[:-1]))
    if not copied:
        return call.seen(x, func, (local,), place, strided=True)
    out = ShardedTensor(local_call(func, x.mesh, (x.raw, local), {}), place)
    if out.raw.untyped_storage().data_ptr() == x.raw.untyped_storage().data_ptr():
        out.raw = out.raw.clone()  # torch can view the block, but would copy the whole tensor
    return out


def _mergeable(x: ShardedTensor, new: tuple[int, ...]) -> bool:
    """Check whether torch could view the whole tensor with ``new`` sizes without a copy.

    Its strides are inferred from the block's: in the same order, with a gap wherever the block has
    one.
    """
    size, block, local = (
        x.padded_shape,
        block_strides(x),
        x.sharding.local_shape(tuple(x.padded_shape), x.mesh),
    )
    whole = [0] * len(size)
    inner, outer = 1, 1  # next strides without a gap, of the block and of the whole tensor
    for d in sorted(range(len(size)), key=lambda d: (block[d], local[d] > 1, -d)):
        if block[d]:
            whole[d] = outer if block[d] <= inner else 2 * outer
            inner, outer = block[d] * local[d], whole[d] * size[d]
    return _viewable(size, whole, new)


def _viewable(size: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> bool:
    """Check whether a tensor of these sizes and strides has a view of ``new`` sizes.

    No tensor is made: on a recorded mesh one of the whole size would count as a rank's memory.
    """
    if math.prod(size) == 0:
        return True
    left = [n for n in new if n != 1]
    run = 1  # elements after dimension d that are contiguous with it
    dims = [(n, s) for n, s in zip(size, stride, strict=True) if n != 1]
    for d in reversed(range(len(dims))):
        run *= dims[d][0]
        if d and dims[d - 1][1] == dims[d][0] * dims[d][1]:
            continue
        while left and run % left[-1] == 0 and run > 1:
            run //= left.pop()
        if run != 1:
            return False
    return True


VIEW = binder("""
    view(input, *size: int)
    view(input, *shape: int)
""")


def _padded_view(run: Func, func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """View a padded operand: other dimensions merge and split, the padded last one stays."""
    x, wanted = VIEW(*args, **kwargs).values()
    last_only(x, func)
    known = [n for n in wanted if n != -1]
    kept = wanted[-1:] == (x.shape[-1],) and wanted.count(-1) <= 1
    kept = kept or (wanted[-1:] == (-1,) and math.prod(known) * x.shape[-1] == x.shape.numel())
    if not kept:
        why = f"a view of {list(wanted)} cuts through the padded dimension"
        raise call_error(Unsupported, why, func, f"x.view(-1, {x.shape[-1]})", tensor=x)
    out = run(func, (x.with_padding, *wanted[:-1], x.padded_shape[-1]), {})
    return padded_to(out, (*out.padded_shape[:-1], x.shape[-1]))


@implements(Tensor.view, Tensor.reshape, torch.reshape, padded=_padded_view, repeats=True)
def view(func: Func, args: Args, kwargs: Kwargs) -> object:
    if (len(args) == 2 and isinstance(args[1], torch.dtype)) or "dtype" in kwargs:
        if {args[0].dtype} == {*args[1:], *kwargs.values()}:
            return args[0].detach()  # as in torch, where view(dtype) is not differentiable
        raise no_implementation(func, args, kwargs, "a view as another dtype")
    x, new = VIEW(*args, **kwargs).values()
    run = Tensor.view if func is Tensor.view else Tensor.reshape
    return _view(_ViewCall(func, args, kwargs), run, x, new)


_AS = binder("view_as(input, other: tensor)")


@implements(Tensor.view_as, Tensor.reshape_as, repeats=True)
def view_as(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, other = _AS(*args, **kwargs).values()
    run = Tensor.view if func is Tensor.view_as else Tensor.reshape
    if not isinstance(x, ShardedTensor):
        return run(x, other.shape)
    return _view(_ViewCall(func, args, kwargs), run, x, tuple(other.shape))


_FLATTEN = binder("flatten(input, start_dim: int = 0, end_dim: int = -1)")


def _merged(*args: object, **kwargs: object) -> range:
    x, start, end = _FLATTEN(*args, **kwargs).values()
    return range(*slice(start % max(x.ndim, 1), end % max(x.ndim, 1) + 1).indices(x.ndim))


@implements(Tensor.flatten, torch.flatten, padded=beside(_merged), repeats=True)
def flatten(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, start, end = _FLATTEN(*args, **kwargs).values()
    start, end = (dim_of(d, len(x.padded_shape), "flatten") for d in (start, end))
    if start > end:
        raise call_error(BadArgument, "start_dim cannot come after end_dim", "flatten", tensor=x)
    if x.padded_shape and start == end:
        return x
    size = x.padded_shape
    new = (*size[:start], size[start : end + 1].numel(), *size[end + 1 :])
    return _view(_ViewCall(func, args, kwargs), Tensor.reshape, x, new)


_UNFLATTEN = binder("unflatten(input, dim: int, sizes: ints)")


@implements(
    Tensor.unflatten,
    torch.unflatten,
    padded=beside(the_dim(_UNFLATTEN)),
    repeats=True,
)
def unflatten(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, dim, sizes = _UNFLATTEN(*args, **kwargs).values()
    dim = dim_of(dim, len(x.padded_shape), "unflatten")
    sizes = _infer(tuple(sizes), x, x.padded_shape[dim], "unflatten")
    new = (*x.padded_shape[:dim], *sizes, *x.padded_shape[dim + 1 :])
    return _view(_ViewCall(func, args, kwargs), Tensor.reshape, x, new)


# ---------------------------------------------------------------- permutations


@implements(
    Tensor.permute, torch.permute, Tensor.transpose, torch.transpose,
    Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, Tensor.movedim, torch.movedim,
    Tensor.moveaxis, torch.moveaxis, Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__,
    padded=of_true_sizes, skewed=True, repeats=True,
)  # fmt: skip
def permuted(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Reorder dimensions as torch reorders those of a stand-in, whose strides are their numbers."""
    call = FlatCall.of(func, *args, **kwargs)
    x, *others = call.tensors
    if others:
        raise Unfit("a dimension that is a tensor")
    ndim = len(x.padded_shape)
    order = tuple(reversed(range(ndim)))
    if func != Tensor.T.__get__:  # which warns of more than two dimensions
        frame = torch.empty([1] * ndim, device="meta").as_strided([1] * ndim, list(range(ndim)))
        a, k = call.replaced([frame])
        order = func(*a, **k).stride()
    shape = torch.Size([x.padded_shape[d] for d in order])
    place = x.place.becomes(x.sharding.resolve(ndim).transpose(*order), shape)
    if func.__name__ in ("t", "__get__"):
        place = place._replace(out_layout=x.place.out_layout)
    return _ViewCall(func, args, kwargs).seen(x, Tensor.permute, (order,), place)


# ---------------------------------------------------------------- dimensions of size one, expand


_UNSQUEEZE = binder("unsqueeze(input, dim: int)")


@implements(Tensor.unsqueeze, torch.unsqueeze, padded=of_true_sizes, repeats=True)
def unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, dim = _UNSQUEEZE(*args, **kwargs).values()
    ndim = len(x.padded_shape)
    dim = dim_of(dim, ndim + 1, "unsqueeze")
    dims = x.sharding.resolve(ndim).dims
    layout = Layout(dims=(*dims[:dim], Dim(), *dims[dim:]), partial=x.sharding.partial)
    shape = torch.Size((*x.padded_shape[:dim], 1, *x.padded_shape[dim:]))
    return _ViewCall(func, args, kwargs).seen(
        x, Tensor.unsqueeze, (dim,), x.place.becomes(layout, shape)
    )


_SQUEEZE = binder("squeeze(input)\nsqueeze(input, *dim: int)")


@implements(Tensor.squeeze, torch.squeeze, padded=of_true_sizes, repeats=True)
def squeeze(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, *where = _SQUEEZE(*args, **kwargs).values()
    ndim = len(x.padded_shape)
    chosen = dims_of(where[0], ndim, "squeeze") if where and ndim else range(ndim)
    gone = {d for d in chosen if x.padded_shape[d] == 1}
    keep = [d for d in range(ndim) if d not in gone]
    layout = Layout(
        dims=tuple(x.sharding.resolve(ndim).dims[d] for d in keep), partial=x.sharding.partial
    )
    new = torch.Size([x.padded_shape[d] for d in keep])
    at = tuple(d - ndim for d in sorted(gone))  # reshape could give other strides than squeeze
    return _ViewCall(func, args, kwargs).seen(
        x, Tensor.squeeze, (at,), x.place.becomes(layout, new)
    )


_EXPAND = binder("expand(input, *size: int, implicit: bool = False)")


def _padded_expand(run: Func, func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Expand a padded operand whose padded dimensions stay as they are."""
    x, sizes, *_ = (_AS if func is Tensor.expand_as else _EXPAND)(*args, **kwargs).values()
    sizes = tuple(sizes.shape) if isinstance(sizes, Tensor) else tuple(sizes)
    if not isinstance(x, ShardedTensor) or not x.is_padded or len(sizes) < x.ndim:
        raise Unfit("a tensor without padding, expanded as a padded one")
    front = len(sizes) - x.ndim
    given = list(sizes)
    for d, (true, padded) in enumerate(zip(x.shape, x.padded_shape, strict=True), front):
        if true != padded and given[d] not in (-1, true):
            raise Unfit("a padded dimension that grows")
        given[d] = padded if true != padded else given[d]
    out = run(Tensor.expand, (x.with_padding, *given), {})
    sized = zip(out.padded_shape[front:], x.padded_shape, x.shape, strict=True)
    kept = [true if true != padded else n for n, padded, true in sized]
    return padded_to(out, (*out.padded_shape[:front], *kept))


@implements(
    Tensor.expand,
    Tensor.broadcast_to,
    torch.broadcast_to,
    Tensor.expand_as,
    padded=_padded_expand,
    repeats=True,
)
def expand(func: Func, args: Args, kwargs: Kwargs) -> object:
    if func is Tensor.expand_as:
        x, other = _AS(*args, **kwargs).values()
        sizes = tuple(other.shape)
        if not isinstance(x, ShardedTensor):
            return x.expand(sizes)
    else:
        x, sizes, _ = _EXPAND(*args, **kwargs).values()
    lead = len(sizes) - len(x.padded_shape)
    new = tuple(
        x.padded_shape[d - lead] if s == -1 and d >= lead else s for d, s in enumerate(sizes)
    )
    if (
        lead < 0
        or min(new, default=0) < 0
        or any(m not in (1, n) for m, n in zip(x.padded_shape, new[lead:], strict=True))
    ):
        raise call_error(BadArgument, f"cannot expand to {list(sizes)}", "expand", tensor=x)
    layout = Layout(dims=(*[Dim()] * lead, *x.dims), partial=x.sharding.partial)
    local = layout.local_shape(new, x.mesh)
    return _ViewCall(func, args, kwargs).seen(
        x, Tensor.expand, (local,), x.place.becomes(layout, torch.Size(new))
    )


# ---------------------------------------------------------------- pieces


def _split_sizes(func: Func, size: int, pieces: Any) -> list[int]:
    if isinstance(pieces, int) and pieces <= 0 < size:
        raise BadArgument(f"{pieces} pieces, or pieces of that size, of {size}", op=func.__name__)
    if "chunk" in func.__name__:
        if not size:
            return [0] * pieces  # for an empty dimension torch returns as many as requested
        pieces = -(-size // pieces)
    if isinstance(pieces, int):
        return [min(pieces, size - k) for k in range(0, size, pieces or 1)] or [0]
    if sum(pieces) != size or min(pieces, default=0) < 0:
        raise BadArgument(f"pieces of {list(pieces)} do not make {size}", op=func.__name__)
    return list(pieces)


_SPLIT = binder("""
    split(input, split_size: ints, dim: int = 0)
    split(tensor, split_size_or_sections: ints, dim: int = 0)
    split(input, split_sizes: ints, dim: int = 0)
""")
_CHUNK = binder("chunk(input, chunks: int, dim: int = 0)")


@implements(Tensor.chunk, torch.chunk, padded=beside(the_dim(_CHUNK)))
@implements(
    Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes,
    padded=beside(the_dim(_SPLIT)),
)  # fmt: skip
def split(func: Func, args: Args, kwargs: Kwargs) -> tuple[ShardedTensor, ...]:
    x, pieces, dim = (_CHUNK if "chunk" in func.__name__ else _SPLIT)(*args, **kwargs).values()
    if not x.padded_shape:
        raise BadArgument("a scalar has no pieces", op=func.__name__)
    dim = dim_of(dim, len(x.padded_shape), func.__name__)
    sizes = _split_sizes(func, x.padded_shape[dim], pieces)
    token = x.dims[dim]
    local, piece = sizes, token
    if len(sizes) == 1:
        local = [x.sharding.local_shape(x.padded_shape, x.mesh)[dim]]
    elif token.is_split:
        ways = len(sizes)
        groups = token.parts[0] if isinstance(token.parts[0], int) else 1
        if len(set(sizes)) != 1 or groups % ways or token.order != "contiguous":
            found = _pieces(x, dim, sizes)
            if found is not None:
                return found
            fits = len(set(sizes)) == 1 and sizes[0] % x.mesh.axis_size(token.axes[0]) == 0
            why = f"pieces of {sizes} along dimension {dim} cut through blocks split {token}"
            fix = f"sl.reshard(x, {_with(x, dim, f'({ways} {token.axes[0]})' if fits else '.')!r})"
            raise call_error(ImplicitCommunication, why, func, fix, tensor=x)
        # each piece has groups / ways of the groups that the token's leading integer counts
        rest_parts = token.parts[1:] if groups == ways else (groups // ways, *token.parts[1:])
        piece = Dim(rest_parts)
        shards = math.prod(x.mesh.axes[a] for a in token.axes)
        local = [s // shards for s in sizes]
    raws = local_call(torch.split, x.mesh, (x.raw, local, dim - len(x.padded_shape)), {})
    dims = x.dims
    layout = Layout(dims=(*dims[:dim], piece, *dims[dim + 1 :]), partial=x.sharding.partial)
    return tuple(
        x.becomes(raw, layout, torch.Size((*x.padded_shape[:dim], n, *x.padded_shape[dim + 1 :])))
        for raw, n in zip(raws, sizes, strict=True)
    )


def _pieces(x: ShardedTensor, dim: int, sizes: list[int]) -> tuple[ShardedTensor, ...] | None:
    """Return pieces of a split dimension, if each rank holds an equal share of each, in one run."""
    token, mesh = x.dims[dim], tuple(x.mesh.axes.items())
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    cuts = [
        cut(token, x.padded_shape[dim], mesh, a, a + n) for a, n in zip(starts, sizes, strict=True)
    ]
    if any(c is None for c in cuts):
        return None
    return tuple(_piece(x, dim, n, *c) for n, c in zip(sizes, cuts, strict=True) if c is not None)


def _piece(x: ShardedTensor, dim: int, size: int, here: slice, token: Dim) -> ShardedTensor:
    ndim, dims = len(x.padded_shape), x.dims
    raw = local_call(
        torch.narrow, x.mesh, (x.raw, dim - ndim, here.start, here.stop - here.start), {}
    )
    layout = Layout(dims=(*dims[:dim], token, *dims[dim + 1 :]), partial=x.sharding.partial)
    shape = torch.Size((*x.padded_shape[:dim], size, *x.padded_shape[dim + 1 :]))
    return x.becomes(raw, layout, shape)


def _with(x: ShardedTensor, dim: int, token: str) -> str:
    dims = [str(d) for d in x.dims]
    dims[dim] = token
    return " ".join(dims)


_UNBIND = binder("unbind(input, dim: int = 0)")


@implements(Tensor.unbind, torch.unbind, padded=beside(the_dim(_UNBIND)))
def unbind(func: Func, args: Args, kwargs: Kwargs) -> tuple[ShardedTensor, ...]:
    x, dim = _UNBIND(*args, **kwargs).values()
    dim = dim_of(dim, len(x.padded_shape), "unbind")
    if x.padded_shape and not x.padded_shape[dim]:
        return ()
    return tuple(
        squeeze(Tensor.squeeze, (p, dim), {}) for p in split(Tensor.split, (x, 1, dim), {})
    )


_SELECT = binder("select(input, dim: int, index: int)")
_NARROW = binder("narrow(input, dim: int, start: int, length: int)")


_CUT = binder("""
    narrow(input, dim: int, start, length)
    select(input, dim: int, index)
""")


@implements(Tensor.narrow, torch.narrow, Tensor.select, torch.select, padded=beside(the_dim(_CUT)))
def narrow(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    if func in (Tensor.select, torch.select):
        x, dim, where = _SELECT(*args, **kwargs).values()
        dim = dim_of(dim, len(x.padded_shape), "select")
    else:
        x, dim, start, length = _NARROW(*args, **kwargs).values()
        dim = dim_of(dim, len(x.padded_shape), "narrow")
        size = x.padded_shape[dim] if x.padded_shape else 0
        begin = start + size if start < 0 else start
        if not (0 <= begin <= size and 0 <= length <= size - begin):
            why = f"start ({start}) + length ({length}) exceeds dimension size ({size})"
            raise call_error(OutOfRange, why, "narrow", tensor=x)
        where = slice(begin, begin + length)
    return piece(Tensor.__getitem__, (x, (*[slice(None)] * dim, where)), {})


def without_ellipsis(index: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Return an index with whole slices for its Ellipsis and for the dimensions left out."""
    named = sum(i is not None and i is not Ellipsis for i in index)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return (*index[:at], *[slice(None)] * (ndim - named), *index[at + 1 :])


def indexed_dims(index: tuple[Any, ...], ndim: int) -> list[Any]:
    """List what indexes each dimension."""
    return [i for i in without_ellipsis(index, ndim) if i is not None]


def piece(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Index unsplit dimensions by ints, slices, None and Ellipsis; split ones by whole slices."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    if sum(i is not None and i is not Ellipsis for i in index) > len(x.padded_shape):
        raise OutOfRange(
            f"too many indices for a tensor of {len(x.padded_shape)} dimensions", op="getitem"
        )
    x, index = _own_shares(x, without_ellipsis(index, len(x.padded_shape)))
    dims, sizes, local = [], [], []
    dimensions = iter(enumerate(zip(x.dims, x.padded_shape, strict=True)))
    for i in index:
        if i is None:
            dims.append(Dim())
            sizes.append(1)
            local.append(i)
            continue
        d, (token, size) = next(dimensions)
        _check_piece(x, d, i)
        if isinstance(i, slice):
            dims.append(token)
            sizes.append(len(range(*i.indices(size))))
        local.append(slice(None) if isinstance(i, slice) and token.is_split else i)
    raw = local_call(Tensor.__getitem__, x.mesh, (x.raw, tuple(local)), {})
    return x.becomes(raw, Layout(dims=tuple(dims), partial=x.sharding.partial), torch.Size(sizes))


def _check_piece(x: ShardedTensor, d: int, i: object) -> None:
    """Refuse an index beyond dimension ``d``, and one that cuts its blocks."""
    token, size = x.dims[d], x.padded_shape[d]
    if isinstance(i, int) and not isinstance(i, bool) and not -size <= i < size:
        why = f"index {i} is out of bounds for dimension {d} with size {size}"
        raise call_error(OutOfRange, why, "getitem", tensor=x)
    whole = isinstance(i, slice) and i.indices(size) == (0, size, 1)
    if token.is_split and not whole:
        why = f"index {i!r} cuts through dimension {d}, which is split {token}"
        raise call_error(
            ImplicitCommunication, why, "getitem", f"sl.reshard(x, {_with(x, d, '.')!r})", tensor=x
        )


def _own_shares(x: ShardedTensor, index: tuple[Any, ...]) -> tuple[ShardedTensor, tuple[Any, ...]]:
    """Take slices of split dimensions of which ranks hold equal shares; return the index left."""
    out, d = list(index), 0
    for k, i in enumerate(index):
        if i is None:
            continue
        token, size = x.dims[d], x.padded_shape[d]
        if (
            token.is_split
            and isinstance(i, slice)
            and i.indices(size) != (0, size, 1)
            and i.indices(size)[2] == 1
        ):
            start, stop, _ = i.indices(size)
            found = cut(token, size, tuple(x.mesh.axes.items()), start, max(start, stop))
            if found is not None:
                x, out[k] = _piece(x, d, stop - start, *found), slice(None)
        d += 1
    return x, tuple(out)


_PAD = binder("pad(input, pad: ints, mode='constant', value: number = None)")


DECLARED.add(F.pad)  # torch casts it on the blocks, since autocast covers only some modes


@implements(F.pad)
def pad(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Pad dimensions that are whole."""
    given = _PAD(*args, **kwargs)
    x, widths = given.pop("input"), list(given.pop("pad"))
    ndim = len(x.padded_shape)
    if len(widths) % 2 or len(widths) > 2 * ndim:
        raise BadArgument(
            f"{len(widths)} widths for {ndim} dimensions", op="pad", operands={"tensor": typeof(x)}
        )
    dims = x.sharding.resolve(ndim).dims
    if x.sharding.partial and given.get("value"):
        raise partial_escape("pad", x)
    changed = [ndim - 1 - i // 2 for i, w in enumerate(widths) if w]
    split_at = next((d for d in changed if dims[d].is_split), None)
    if split_at is not None:
        why = f"padding dimension {split_at}, which is split {dims[split_at]}, would move blocks"
        fix = f"sl.reshard(x, {_with(x, split_at, '.')!r})"
        raise call_error(ImplicitCommunication, why, "pad", fix, tensor=x)
    with casting(func):
        raw = local_call(F.pad, x.mesh, (x.raw, widths), given)
    size = list(x.padded_shape)
    for i, w in enumerate(widths):
        size[ndim - 1 - i // 2] += w
    return x.becomes(raw, Layout(dims, x.sharding.partial), torch.Size(size))


def _alike(values: list[ShardedTensor], dim: int) -> list[ShardedTensor]:
    """Slice whole pieces to the split of the others; nothing moves for that."""
    ndim = len(values[0].padded_shape)
    if len({v.sharding for v in values}) == 1 or any(
        len(v.padded_shape) != ndim or v.sharding.partial for v in values
    ):
        return values
    tokens = [v.sharding.resolve(ndim).dims for v in values]
    finest = [next((t[d] for t in tokens if t[d].is_split), Dim()) for d in range(ndim)]
    out = []
    for v, own in zip(values, tokens, strict=True):
        want = tuple(finest[d] if d != dim and not own[d].is_split else own[d] for d in range(ndim))
        axes = [a for t in want for a in t.axes]
        free = want != own and len(axes) == len(set(axes)) and not v.deferred
        out.append(reshard(v, Layout(dims=want)) if free else v)
    return out


_REPEAT = binder("repeat_interleave(input, repeats, dim: int = None, *, output_size: int = None)")


@implements(torch.repeat_interleave, Tensor.repeat_interleave)
def repeat_interleave(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Repeat each element along a dimension: local, since blocks and groups stay in order."""
    x, repeats, dim, length = _REPEAT(*args, **kwargs).values()
    if dim is None or not isinstance(repeats, int):
        raise no_implementation(func, args, kwargs, "repeats must be an int and dim given")
    ndim = len(x.padded_shape)
    dim = dim_of(dim, ndim, "repeat_interleave")
    if repeats < 0 or (length is not None and length != repeats * x.padded_shape[dim]):
        raise BadArgument(f"{repeats} repeats, output_size {length}", op="repeat_interleave")
    raw = local_call(torch.repeat_interleave, x.mesh, (x.raw, repeats), {"dim": dim - ndim})
    size = torch.Size([n * repeats if d == dim else n for d, n in enumerate(x.padded_shape)])
    return x.becomes(raw, x.sharding, size)


_CAT = binder("cat(tensors, dim: int = 0)")


@implements(torch.stack, padded=beside(lambda *_, **__: []))
@implements(torch.cat, torch.concat, torch.concatenate, padded=beside(the_dim(_CAT)))
def cat(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Join pieces with equal layouts along a whole dimension; dtypes promote as in torch."""
    tensors, dim = _CAT(*args, **kwargs).values()
    mesh = next(t.mesh for t in tensors if isinstance(t, ShardedTensor))
    values = [lift(t, mesh, func.__name__) for t in tensors]
    kinds = dict.fromkeys(v.dtype for v in values)
    empty: list[ShardedTensor] = []
    if func is torch.stack:
        values = [unsqueeze(torch.unsqueeze, (v, dim), {}) for v in values]
    elif any(v.padded_shape != (0,) for v in values):  # torch joins shape (0,) to any shape
        empty = [v for v in values if v.padded_shape == (0,)]
        values = [v for v in values if v.padded_shape != (0,)]
    dim = dim_of(dim, len(values[0].padded_shape), func.__name__)
    _check_sizes(func, values, dim)
    if len(kinds) > 1:  # promoted by dtype alone, since no operand of cat is 0-dim
        common = reduce(torch.promote_types, kinds)
        values = [lift(v.to(common), mesh, func.__name__) for v in values]
    if len(values) == 1:
        only = values[0]
        return only.becomes(_joined_raw(values, empty, dim)) if empty else only.clone()  # type: ignore[return-value]
    values = _alike(values, dim)
    _check_layouts(func, values, dim)
    raw = _joined_raw(values, empty, dim)
    size = list(values[0].padded_shape)
    size[dim] = sum(v.padded_shape[dim] for v in values)
    return ShardedTensor(raw, Place(values[0].sharding, torch.Size(size), mesh))


def _check_sizes(func: Func, values: list[ShardedTensor], dim: int) -> None:
    """Refuse pieces whose sizes differ in another dimension, or in any for ``stack``."""
    sizes = [list(v.padded_shape) for v in values]
    if func is not torch.stack:
        sizes = [[*size[:dim], *size[dim + 1 :], len(size)] for size in sizes]
    if not values[0].padded_shape or any(size != sizes[0] for size in sizes):
        raise BadArgument(
            f"sizes of the pieces must match except in dimension {dim}, of which there must be one",
            op=func.__name__,
            operands={f"piece {i}": typeof(v) for i, v in enumerate(values)},
            mesh=values[0].mesh,
        )


def _check_layouts(func: Func, values: list[ShardedTensor], dim: int) -> None:
    """Refuse pieces that would move to be joined."""
    error, why, where = NoImplementation, "the pieces lie differently", "..."
    if len({v.sharding for v in values}) == 1 and not any(v.deferred for v in values):
        if not values[0].dims[dim].is_split:
            return
        error, why = ImplicitCommunication, f"joining along dimension {dim} would move blocks"
        where = _with(values[0], dim, ".")
    raise error(
        why,
        op=func.__name__,
        operands=lettered(map(typeof, values)),
        mesh=values[0].mesh,
        fix=_joined(values, where, dim),
    )


def _joined_raw(values: list[ShardedTensor], empty: list[ShardedTensor], dim: int) -> Tensor:
    """Join the blocks; pieces of shape (0,) stay in the graph: their gradients are empty."""
    first = values[0]
    at = dim - len(first.padded_shape)
    block = [0 if d == at else n for d, n in enumerate(first.raw.shape, -first.raw.ndim)]
    nothing = [v.raw.to(first.dtype).reshape(block) for v in empty]
    return local_call(torch.cat, first.mesh, ([*(v.raw for v in values), *nothing], at), {})


def _joined(values: list[ShardedTensor], where: str, dim: int) -> str:
    """Return the line that joins the pieces after resharding them alike."""
    pieces = ", ".join(lettered(values))
    return f"torch.cat([sl.reshard(t, {where!r}) for t in ({pieces})], {dim})"
