"""Reductions: over whole dimensions on the blocks, over split ones with a psum or pmax."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local
from shardlib.collectives import pmax, unwrap, wrap
from shardlib.dtypes import wide, wider
from shardlib.errors import BadArgument
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.ops.declare import by_signature, rows, rows_but, spelled
from shardlib.ops.dims import rows_call
from shardlib.ops.each_rank import FlatCall, each
from shardlib.ops.padding import neutral
from shardlib.ops.signatures import binder, dim_of, dims_of
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.tensor import refuse_sums
from shardlib.tensor.gradients import real_axes, total, vary
from shardlib.tensor.tensor import ShardedTensor, Unfit, call_error, implements, local_call

Dims = int | list[int] | tuple[int, ...] | None
"""Dimensions as an argument names them; None names all."""


def reduced_layout(
    x: ShardedTensor, dim: Dims, keepdim: bool, op: str = "sum"
) -> tuple[tuple[int, ...], tuple[str, ...], Layout, torch.Size]:
    """Return (dims reduced, mesh axes that split them, result layout, result shape)."""
    found = _reduced_layout(
        x.sharding, x.padded_shape, tuple(dim) if isinstance(dim, list) else dim, keepdim, op
    )
    if x.sharding.skew and not set(x.sharding.axes) <= set(found[1]):
        raise Unfit("skewed: the rows of a rank's block are not those of its neighbours")
    return found


@lru_cache(maxsize=8192)
def _reduced_layout(
    layout: Layout, size: torch.Size, dim: Dims, keepdim: bool, op: str
) -> tuple[tuple[int, ...], tuple[str, ...], Layout, torch.Size]:
    ndim = len(size)
    named = dims_of(() if dim is None else dim, ndim, op)
    gone = tuple(sorted(named if named and ndim else range(ndim)))
    axes = tuple(a for d in gone for a in layout.dims[d].axes)
    dims, shape = list(layout.dims), list(size)
    for d in reversed(gone):
        if keepdim:
            dims[d], shape[d] = Dim(), 1
        else:
            del dims[d], shape[d]
    return gone, axes, layout.onto(dims), torch.Size(shape)


_ANY = binder("""
    any(input)
    any(input, dim: ints, keepdim: bool = False)
""")
SUM = binder("""
    sum(input, *, dtype=None)
    sum(input, dim: ints = None, keepdim: bool = False, *, dtype=None)
""")
_DIM = "amax(input, dim: ints = None, keepdim: bool = False)"
_VAR = binder("""
    var(input, dim: ints = None, *, correction: number = 1, keepdim: bool = False)
    var(input, dim: ints = None, unbiased: bool = True, keepdim: bool = False)
    var(input, unbiased: bool)
""")
_SOFTMAX = binder("""
    softmax(input, dim: int, dtype=None)
    softmax(input, dim: int, _stacklevel=3, dtype=None)
""")


def _arguments(
    bind: Func, args: Args, kwargs: Kwargs
) -> tuple[ShardedTensor, Any, bool, dict[str, Any]]:
    given = bind(*args, **kwargs)
    x, dim = given.pop("input"), given.pop("dim", None)
    return x, None if dim == [] else dim, given.pop("keepdim", False), given


def _mean_of_sum(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Compute a mean as a sum divided by the number of elements."""
    x, dim, keepdim, more = _arguments(SUM, args, kwargs)
    if not (more["dtype"] or x.dtype).is_floating_point:
        raise Unfit("a mean needs floating point")
    gone, *_ = reduced_layout(x, dim, keepdim, func.__name__)
    return x.sum(gone, keepdim, dtype=more["dtype"]) / math.prod(x.shape[d] for d in gone)


@implements(torch.sum, Tensor.sum, padding=neutral, takes="skew sums")
@implements(torch.mean, Tensor.mean, padding=_mean_of_sum, takes="skew sums")
def sums(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Sum locally, then by one psum over the axes that split the reduced dimensions."""
    x, dim, keepdim, more = _arguments(SUM, args, kwargs)
    gone, axes, layout, shape = reduced_layout(x, dim, keepdim, func.__name__)
    asked = more.get("dtype") or x.raw.dtype
    if func in (torch.mean, Tensor.mean) and not (asked.is_floating_point or asked.is_complex):
        raise Unfit("a mean needs floating point")
    half = wider(asked) != asked
    if half:
        more = more | {"dtype": wider(asked)}  # rounded once it is summed
    raw = local_call(torch.sum, x.mesh, x.raw, gone, keepdim=keepdim, **more)
    # a part that is a single half precision element is sent as such, without loss
    wire = x.dtype if half and x.dtype == asked and raw.numel() == x.raw.numel() else None
    if func in (torch.mean, Tensor.mean):
        raw, wire = raw / (x.shape.numel() // max(1, shape.numel())), None
    raw = total(raw, x.mesh, axes, asked if half else None, wire)
    return x.becomes(raw, layout, shape)


@implements(Tensor.any, torch.any, Tensor.all, torch.all, takes="padding skew")
def claims(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Implement any and all by counting zeros or nonzeros, so that one psum is enough."""
    given = _ANY(*args, **kwargs)
    if given.get("dim") == [] or given.get("dim") == ():
        raise Unfit("torch reduces nothing here")
    x, dim, keepdim, _ = _arguments(_ANY, args, kwargs)
    if func.__name__ == "any":
        out = (x != 0).long().sum(dim, keepdim=keepdim) > 0
    else:
        out = (x == 0).long().sum(dim, keepdim=keepdim) == 0
    return out.to(torch.uint8) if x.dtype == torch.uint8 else out


@by_signature(
    _DIM, torch.amax, Tensor.amax, torch.amin, Tensor.amin, padding=neutral, takes="skew sums"
)
def extreme(
    func: Func, x: ShardedTensor, dim: Dims, keepdim: bool, nans: bool = False
) -> ShardedTensor:
    """Reduce by a local extreme, and over split dimensions by a pmax as well.

    If several elements are equal to it, they share the gradient.

    ``nans``  the gradient of a NaN is shared by all NaNs, as in torch's max() and norms; otherwise
              it is NaN for the whole row.
    """
    refuse_sums(func.__name__, x)
    gone, axes, layout, shape = reduced_layout(x, dim, keepdim, func.__name__)
    axes = real_axes(x.mesh, axes)
    tracked = x.raw.requires_grad and torch.is_grad_enabled()
    if not axes and not (nans and tracked):
        raw = local_call(func, x.mesh, x.raw, gone, keepdim)
        return x.becomes(raw, layout, shape)
    with torch.no_grad():
        raw = local_call(func, x.mesh, x.raw, gone, True)
        if axes:
            raw = _over_ranks(raw, x.mesh, axes, "max" in func.__name__)
    if tracked:
        with torch.no_grad():
            same = (x.raw == raw) | (x.raw.isnan() & raw.isnan()) if nans else x.raw == raw
            ties = same.to(x.dtype)
            count = local_call(torch.sum, x.mesh, ties, gone, True)
            share = ties / total(count, x.mesh, axes)
        raw = _TieShares.apply(x.raw, raw, share, x.mesh, axes)
    if not keepdim:
        raw = local_call(Tensor.squeeze, x.mesh, raw, gone)
    return x.becomes(raw, layout, shape)


class _TieShares(Local):
    """apply(x, value, share, mesh, axes): ``value``, a reduction of x over ``axes``.

    Each element gets its ``share`` of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, value: Tensor, share: Tensor, mesh: Mesh, axes: tuple[str, ...]
    ) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        ctx.save_for_backward(share)
        return value.clone()

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        return vary(grads[0], ctx.mesh, ctx.axes) * ctx.saved_tensors[0], *[None] * 4


def _over_ranks(raw: Tensor, mesh: Mesh, axes: tuple[str, ...], largest: bool) -> Tensor:
    """Take the extreme over mesh axes; the minimum is the maximum of the negatives, negated.

    For integers ~x is used, since -x overflows for the lowest one.
    """
    dtype = raw.dtype
    real = dtype.is_floating_point
    if not largest:
        other = torch.neg if real else torch.bitwise_not
        return other(_over_ranks(other(raw), mesh, axes, True))
    raw = raw if real or dtype == torch.int64 else raw.to(torch.int32)
    with bind(mesh):
        return unwrap(pmax(wrap(raw, mesh), axes)).to(dtype)


def merged(
    func: Func, x: ShardedTensor, dim: Dims, keepdim: bool, more: dict[str, Any]
) -> ShardedTensor:
    """Reduce every block, gather the results, and reduce them again by the same function.

    One number per rank and row is communicated.
    """
    gone, axes, layout, shape = reduced_layout(x, dim, keepdim, func.__name__)

    def run(v: ShardedTensor, keep: bool) -> Tensor:
        call = FlatCall.of(func, v.raw, *more.get("args", ()), dim=gone, keepdim=keep)
        return each(call, v.mesh)

    if not real_axes(x.mesh, axes):
        return x.becomes(run(x, keepdim), layout, shape)
    _, _, one, _ = reduced_layout(x, dim, True, func.__name__)
    dims, size = list(x.dims), list(x.shape)
    for d in gone:  # one result of each rank
        dims[d] = Dim(x.dims[d].axes)
        size[d] = x.mesh.axis_size(dims[d].axes)
    whole = reshard(x.becomes(run(x, True), Layout(tuple(dims)), size), one)
    return x.becomes(run(whole, keepdim), layout, shape)


Backward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _written(
    back: Backward,
    x: ShardedTensor,
    dim: Dims,
    keepdim: bool,
    op: str,
    value: Callable[[Any, bool, bool], Any],
) -> Any:
    """Reduce x; over split dimensions ``back`` computes the gradient, by torch's formula.

    It is finite exactly where torch's is, unlike the gradient of the composed steps.

    ``value``  (dimensions, keepdim, whether ``back`` gives the gradient) -> the result.
    """
    gone, split, layout, shape = reduced_layout(x, dim, keepdim, op)
    axes = real_axes(x.mesh, split)
    if not (axes and x.raw.requires_grad and torch.is_grad_enabled()):
        return value(gone, keepdim, False)
    with torch.no_grad():
        out = value(gone, True, True)
    raw: Any = _Given.apply(x.raw, out.raw, x.mesh, axes, back)
    if not keepdim:
        raw = local_call(Tensor.squeeze, x.mesh, raw, gone)
    return x.becomes(raw, layout, shape)


class _Given(Local):
    """apply(x, out, mesh, axes, back): ``out``, the reduction of x split over ``axes``.

    ``back``  (cotangent, x, out) -> the gradient of x.
    """

    @staticmethod
    def forward(
        ctx: Ctx, x: Tensor, out: Tensor, mesh: Mesh, axes: tuple[str, ...], back: Backward
    ) -> Tensor:
        ctx.mesh, ctx.axes, ctx.back = mesh, axes, back
        out = out.clone()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        x, out = ctx.saved_tensors
        g, out = (vary(t, ctx.mesh, ctx.axes) for t in (grads[0], out))
        return ctx.back(g, x, out), None, None, None, None


def _norm_gradient(p: float, g: Tensor, x: Tensor, norm: Tensor) -> Tensor:
    """Return g sgn(x) |x|^(p-1) / norm^(p-1), zero where the norm is zero, as in torch."""
    zero = norm == 0
    if p == 2:
        return g * (x / norm).masked_fill(zero, 0)
    if p < 1:
        powers = x.abs().pow(p - 1).masked_fill(x == 0, 0)
        return x.sgn() * powers * g * norm.pow(1 - p)
    # below 2, |x|^(p-2) is infinite at 0
    powers = x.sgn() * x.abs().pow(p - 1) if p < 2 else x * x.abs().pow(p - 2)
    return powers * (g / norm.pow(p - 1)).masked_fill(zero, 0)


_NORM = binder("""
    vector_norm(x, ord=2, dim: ints = None, keepdim: bool = False, *, dtype=None)
    norm(input, p=2, dim: ints = None, keepdim: bool = False, dtype=None)
    norm(input, p: number = 2, *, dtype=None)
""")


def _asked(x: Any, dtype: torch.dtype | None) -> Any:
    """Convert to ``dtype`` if it can hold every value of x, and is complex exactly if x is."""
    if dtype is None or dtype == x.dtype:
        return x
    if dtype.is_complex != x.dtype.is_complex or torch.promote_types(x.dtype, dtype) != dtype:
        raise Unfit("torch narrows no dtype here")
    return x.to(dtype)


def _norm_beside_zeros(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Take the norm of an operand with zeros as padding, which change no norm of a positive order."""
    if not 0 < _NORM(*args, **kwargs)["ord"] < math.inf:
        raise Unfit("zeros would change this norm")
    # by the dispatcher: blocks that are whole have no implementation
    return neutral(lambda _, args, kwargs: func(*args, **kwargs), func, args, kwargs)


@implements(torch.linalg.vector_norm, padding=_norm_beside_zeros, takes="skew")
def vector_norm(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the norm of the blocks' norms."""
    x, ord_, dim, keepdim, dtype = _NORM(*args, **kwargs).values()
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise Unfit("no floating point or complex numbers")
    x = _asked(x, dtype)
    if abs(ord_) == math.inf and 0 not in x.padded_shape:
        return extreme(torch.amax if ord_ > 0 else torch.amin, x.abs(), dim, keepdim, nans=True)
    if ord_ == 0 or 0 in x.padded_shape:
        raise Unfit("a count of elements, or the norm of none")
    if not real_axes(x.mesh, x.sharding.axes):
        raise Unfit("whole blocks")
    summed = wide(x)
    if ord_ == 1:
        # not by merged norms: with a NaN in a block, other elements keep a gradient
        return summed.abs().sum(dim, keepdim).to(x.dtype.to_real())

    def value(gone: Dims, keep: bool, tracked: bool) -> Any:
        if ord_ != 2 or not tracked:
            return merged(torch.linalg.vector_norm, summed, gone, keep, {"args": (ord_,)})
        # a psum of squares sends fewer bytes than a gather of every block's norm
        squares = (summed * summed.conj()).real if x.is_complex() else summed * summed
        return squares.sum(gone, keep).sqrt()

    back = partial(_norm_gradient, ord_)
    out = _written(back, summed, dim, keepdim, "vector_norm", value)
    return out.to(x.dtype.to_real())


@by_signature(
    "norm(input, p='fro', dim: ints = None, keepdim: bool = False, dtype=None)",
    Tensor.norm, torch.norm, takes="all",
)  # fmt: skip
def norm(
    func: Func,
    x: Tensor,
    p: float | str | None,
    dim: Dims,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    """Take a vector's norm over one dimension or all; "fro" as in torch."""
    if p == "nuc" or (p not in ("fro", None) and not isinstance(p, int | float)):
        raise Unfit("a norm of matrices")
    return torch.linalg.vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@implements(
    F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax,
    F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax,
    padding=neutral, takes="plain",
)  # fmt: skip
def softmax(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute softmax, locally over a whole dimension, over a split one by a pmax and a psum."""
    given = _SOFTMAX(*args, **kwargs)
    x, dim, dtype = given["input"], given["dim"], given["dtype"] or given["input"].dtype
    if not x.shape:
        raise Unfit("torch's own softmax of a scalar")
    dim = dim_of(dim, len(x.shape), func.__name__)
    if not dtype.is_floating_point:
        raise call_error(
            BadArgument, f"not implemented for {x.dtype}", func, "x.double().softmax(-1)", tensor=x
        )
    if not x.dims[dim].is_split or 0 in x.shape:
        run = torch.log_softmax if "log" in func.__name__ else torch.softmax
        raw = local_call(run, x.mesh, x.raw, dim - len(x.shape), dtype=given["dtype"])
        return x.becomes(raw)
    x = x.to(wider(dtype))
    shifted = x - x.detach().amax(dim, keepdim=True)
    if "log" in func.__name__:
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(dtype)
    weight = shifted.exp()
    return (weight / weight.sum(dim, keepdim=True)).to(dtype)


@by_signature(
    _DIM, torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp, padding=neutral, takes="plain"
)
def logsumexp(func: Func, x: ShardedTensor, dim: Dims, keepdim: bool) -> Tensor:
    """Compute logsumexp; over a split dimension, logsumexp of the blocks' results."""
    if not x.dtype.is_floating_point:
        raise Unfit("torch promotes integers, and sums complex numbers")
    _, split, *_ = reduced_layout(x, dim, keepdim, "logsumexp")
    summed = wide(x) if real_axes(x.mesh, split) else x

    def value(gone: Dims, keep: bool, _: bool) -> ShardedTensor:
        return merged(torch.logsumexp, summed, gone, keep, {})

    def back(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
        return g * (x - out).exp()

    return _written(back, summed, dim, keepdim, "logsumexp", value).to(x.dtype)


@implements(torch.var, Tensor.var, torch.std, Tensor.std, takes="all")
def variance(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Compute the variance in two passes: squares around the global mean are summed."""
    x, dim, keepdim, more = _arguments(_VAR, args, kwargs)
    if _VAR(*args, **kwargs).get("dim") in ([], ()):
        raise Unfit("torch reduces all dimensions here, and its gradient is not finite")
    given = more.get("correction", more.get("unbiased"))
    unbiased = 1 if given is None else given
    if not x.dtype.is_floating_point or 0 in x.padded_shape:
        raise Unfit("no real floating point, or no elements")
    gone, axes, *_ = reduced_layout(x, dim, keepdim, func.__name__)
    if not real_axes(x.mesh, axes):
        return rows_call(func, args, kwargs, lambda a, k: {0: rows_but(gone, x.ndim)})
    count = math.prod(x.shape[d] for d in gone)
    dtype, x = x.dtype, wide(x)
    centred = x - x.mean(gone, keepdim=True)
    # of NaN 0 too
    out = (centred * centred).sum(gone, keepdim=keepdim) / max(0, count - unbiased)
    if func in (torch.std, Tensor.std):
        square: Any = out
        out = square.becomes(_root(square.raw))
    return out.to(dtype)


def _root(variance: Tensor) -> Tensor:
    """Return the square root; where it is zero so is the gradient, as in torch."""
    zero = variance == 0
    return variance.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


_PROD = binder("""
    prod(input, *, dtype=None)
    prod(input, dim: int, keepdim: bool = False, *, dtype=None)
""")


@implements(torch.prod, Tensor.prod, padding=neutral, takes="skew")
def prod(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the product of the blocks' products."""
    x, dim, keepdim, more = _arguments(_PROD, args, kwargs)
    dtype = more["dtype"] or (torch.int64 if x.dtype == torch.bool else x.dtype)
    return merged(_prods, x.to(dtype), dim, keepdim, {})  # type: ignore[arg-type]


def _prods(x: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
    # torch.prod needs an explicit dtype to keep bool
    kept = x.dtype if x.dtype == torch.bool else None
    if not dim or (len(dim) == x.ndim and not keepdim):
        # its gradient near zeros differs per dim
        return x.prod(dtype=kept)
    for d in reversed(dim):
        x = x.prod(d, keepdim, dtype=kept)
    return x


# ---------------------------------------------------------------- composed of other operators


_NAN = "nansum(input, dim: ints = None, keepdim: bool = False, *, dtype=None)"


def _nansum(input: Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    if input.is_complex() or (dtype is not None and dtype.is_complex):
        raise Unfit("torch sums no complex numbers here on every device")
    known: Any = input
    # a NaN part makes the sum NaN, which parts alone cannot show
    refuse_sums("nansum", known)
    if input.dtype.is_floating_point:
        nan: Any = input.isnan()
        known = known.becomes(_Cleared.apply(known.raw, nan.raw))
    return known.sum(dim, keepdim, dtype=dtype)


class _Cleared(Local):
    """apply(x, nan): zeros for NaN; their gradient is zero times the cotangent, as in torch."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, nan: Tensor) -> Tensor:
        ctx.save_for_backward(nan)
        return x.masked_fill(nan, 0)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        return grads[0] * ~ctx.saved_tensors[0], None


@spelled(_NAN.replace("nansum", "nanmean"))
def _nanmean(input: Tensor, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    return _nansum(input, dim, keepdim, dtype) / (~input.isnan()).sum(dim, keepdim)


@spelled("aminmax(input, *, dim: int = None, keepdim: bool = False)")
def _aminmax(input: Tensor, dim: int | None, keepdim: bool) -> object:
    dims = () if dim is None else dim
    return torch.return_types.aminmax((input.amin(dims, keepdim), input.amax(dims, keepdim)))


spelled(_NAN)(_nansum)
spelled("""
    count_nonzero(input)
    count_nonzero(input, dim: none)
    count_nonzero(input, *dim: int)
""")(lambda input, dim=None: (input != 0).sum(dim))


def _with_mean(of: Func) -> Func:
    def body(
        input: Tensor,
        dim: Dims = None,
        keepdim: bool = False,
        correction: float | None = None,
        unbiased: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        if dim in ([], ()):
            raise Unfit("torch reduces all dimensions here, and its gradient is not finite")
        correction = int(unbiased is not False) if correction is None else correction
        return of(input, dim, correction=correction, keepdim=keepdim), input.mean(dim, keepdim)

    return body


_MEAN_TOO = """
    var_mean(input, dim: ints = None, *, correction: number = 1, keepdim: bool = False)
    var_mean(input, dim: ints = None, unbiased: bool = True, keepdim: bool = False)
    var_mean(input, unbiased: bool)
"""
spelled(_MEAN_TOO)(_with_mean(torch.var))
spelled(_MEAN_TOO.replace("var_mean", "std_mean"))(_with_mean(torch.std))


@spelled("linalg.matrix_norm(A, ord='fro', dim=(-2, -1), keepdim: bool = False, *, dtype=None)")
def _matrix_norm(
    A: Tensor, ord: Any, dim: tuple[int, int], keepdim: bool, dtype: torch.dtype | None
) -> Tensor:
    """Take a matrix's norm: Frobenius as a vector's, others as an extreme of sums."""
    A = _asked(A, dtype)
    rows_, cols = (d % A.ndim for d in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(A, 2, (rows_, cols), keepdim)
    if ord not in (1, -1, math.inf, -math.inf):
        return rows_call(
            torch.linalg.matrix_norm,
            (A, ord, dim, keepdim),
            {},
            lambda a, k: rows(a[0], lambda s: {rows_, cols}),
        )
    if 0 in A.shape:
        raise Unfit("an extreme of nothing")
    added, kept = (rows_, cols) if abs(ord) == 1 else (cols, rows_)
    sums_ = A.abs().sum(added, True)
    out = sums_.amax(kept, True) if ord > 0 else sums_.amin(kept, True)
    return out if keepdim else out.squeeze((rows_, cols))


@spelled("linalg.norm(A, ord=None, dim: ints = None, keepdim: bool = False, *, dtype=None)")
def _norm(A: Tensor, ord: Any, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Take a vector's norm; with an order and two dimensions (named, or all) a matrix's."""
    if (
        ord is None
        or isinstance(dim, int)
        or (dim is None and A.ndim == 1)
        or (dim is not None and len(dim) == 1)
    ):
        return torch.linalg.vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return torch.linalg.matrix_norm(A, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)
