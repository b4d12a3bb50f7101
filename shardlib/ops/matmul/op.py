"""Matrix products of sharded values: torch's matmul and linear, ``sl.matmul``, and fused bias.

``product_of`` chooses an algorithm that fits the operands' layouts (registry.py), runs its schedule
on their blocks (function.py), and records the result's layout.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local, owned
from shardlib.collectives import lead, unwrap, wrap
from shardlib.dtypes import HALF, is_half, wide
from shardlib.errors import BadArgument, NoImplementation, ShardError
from shardlib.layouts import Layout, LayoutLike, as_layout
from shardlib.mesh import Mesh, Scope, bind, scope
from shardlib.ops.einsum import contract, product_line
from shardlib.ops.elementwise import elementwise
from shardlib.ops.matmul.case import MatmulCase, case, cut_for, whole_rows
from shardlib.ops.matmul.function import Axes, Product, rounded
from shardlib.ops.matmul.shared_gather import let_go
from shardlib.ops.padding import of_true_sizes, sizes
from shardlib.ops.registry import Match, decide
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optional import unless_none
from shardlib.placing import reshard
from shardlib.tensor.grad_coalescing import together_of
from shardlib.tensor.gradients import made_of, real_axes, total, vary
from shardlib.tensor.lifting import lift, lifted, tiles_of
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    ShardedTensor,
    Unfit,
    blockwise,
    call_error,
    heard,
    implements,
    typeof,
)

_MM = binder("""
    matmul(input, other)
    mm(input, mat2)
    mv(input, vec)
    dot(input, tensor)
""")
_NEED = {
    getattr(home, name): need
    for name, need in {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}.items()
    for home in (torch, Tensor)
}


def _padded_product(run: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Multiply padded operands: zeros in the padding add nothing to a contraction."""
    of_x, of_w = map(sizes, _MM(*args, **kwargs).values())
    summed = of_w[-2:][:1]  # of a vector its only size
    if of_x[-1:] != summed or (len(of_w) > 2 and of_x[:-2] != of_w[:-2]):
        raise Unfit("what is summed over, or the batch, is padded otherwise")
    return of_true_sizes(run, func, args, kwargs, 0)


def _composed_linear(run: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute ``linear`` by a product and a sum."""
    x, w, bias = _LINEAR(*args, **kwargs).values()
    if w.ndim != 2 or (bias is not None and bias.dtype != x.dtype):
        raise Unfit("a weight has two dimensions, and a bias the dtype of the tensor")
    _check_bias(x, w, bias)
    out = torch.matmul(x, w.mT)
    return out if bias is None else out + bias


@implements(
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.linalg.matmul,
    torch.bmm, Tensor.bmm, torch.mv, Tensor.mv, torch.dot, Tensor.dot,
    padding=_padded_product, takes="skew sums",
)  # fmt: skip
def matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, w = args if len(args) == 2 and not kwargs else _MM(*args, **kwargs).values()
    left, right = x.shape, w.shape
    if (func in _NEED and (len(left), len(right)) != _NEED[func]) or not (left and right):
        name = func.__name__.strip("_")
        # torch raises for this on whole tensors too
        raise Unfit(f"{name} of {len(left)} and {len(right)} dimensions")
    if 0 in left or 0 in right:
        raise Unfit("an empty product")
    if x.dtype == torch.bool:
        raise Unfit("torch multiplies no matrices of what is true or false")
    if (len(left), len(right)) != (2, 2) and x.dtype != w.dtype:
        why = "operands have different dtypes"
        raise call_error(BadArgument, why, func.__name__.strip("_"), "x @ y.to(x.dtype)", x=x, y=w)
    if len(left) > 1 and len(right) > 1 and isinstance(x, Tensor) and isinstance(w, Tensor):
        try:
            return product_of(x, w, call=None if kwargs else (func, args, kwargs))
        except ShardError as refusal:
            # a name that outlives this block would keep the operands until a garbage collection
            if len(left) == len(right) == 2:
                raise
            try:
                return contract(product_of, product_line(len(left), len(right)), x, w)
            except ShardError:
                raise refusal from None
    return contract(product_of, product_line(len(left), len(right)), x, w)


_LINEAR = binder("linear(input, weight, bias=None)")


def _transposed(w: ShardedTensor) -> Any:
    """Return w.mT, cached on w."""
    found, key = made_of(w), ("mT", w.place.out_layout)
    if key not in found:
        found[key] = w.mT
    return found[key]


def _check_bias(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Raise BadArgument for a bias of another length, or one that would change the shape of Y."""
    if bias is None:
        return
    if len(bias.shape) == 1:
        if bias.shape[0] not in (1, w.shape[0]):
            why = f"a bias of {bias.shape[0]} does not fit a weight of {w.shape[0]} rows"
            raise call_error(
                BadArgument, why, "linear", "F.linear(x, weight)", x=x, weight=w, bias=bias
            )
        return
    of_y = (*x.shape[:-1], w.shape[0])
    lead = len(bias.shape) - len(of_y)
    if lead > 0 or any(n == 1 != m for m, n in zip(bias.shape[::-1], of_y[::-1], strict=False)):
        why = f"a bias of {list(bias.shape)} would enlarge a result of {list(of_y)}"
        raise call_error(
            BadArgument, why, "linear", "F.linear(x, weight) + bias", x=x, weight=w, bias=bias
        )


@implements(F.linear, padding=_composed_linear, takes="skew sums")
def linear(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute x @ w.T + b; w is stored (out, in)."""
    x, w, bias = args if len(args) == 3 and not kwargs else _LINEAR(*args, **kwargs).values()
    if w.ndim != 2 or x.dtype == torch.bool:
        raise Unfit("a weight has two dimensions, of numbers")
    if isinstance(bias, ShardedTensor) and type(x) is Tensor and type(w) is Tensor:
        x = lift(x, bias.mesh, "linear")
    if bias is not None and bias.dtype != x.dtype:
        raise BadArgument("the bias has another dtype than the tensor", op="linear",
                          operands={"x": typeof(x), "bias": typeof(bias)})  # fmt: skip
    _check_bias(x, w, bias)
    if tiles := tiles_of(w):
        out = _by_tiles(x, tiles)
    elif x.ndim < 2:
        out = contract(product_of, "...k,ok->...o", x, w)
    else:
        turned = _transposed(w) if type(w) is ShardedTensor else w.mT
        if bias is None and type(x) is ShardedTensor and not lead(x.mesh):
            return product_of(x, turned, call=(func, args, kwargs))
        if isinstance(bias, ShardedTensor) and not bias.sharding.partial:
            return product_of(x, turned, bias=bias, call=(func, args, kwargs))
        out = product_of(x, turned)
    return out if bias is None else out + bias


def _by_tiles(x: Tensor, tiles: Sequence[ShardedTensor]) -> Any:
    """Multiply by one tile of a weight's rows after another; each gives columns of the result.

    A tile has the same rows of each block of the weight, so its columns are parts of as many runs.
    """
    ways = tiles[0].mesh.axis_size(tuple(tiles[0].dims[0].axes))
    return torch.cat([F.linear(x, t).unflatten(-1, (ways, -1)) for t in tiles], -1).flatten(-2)


def product(x: Tensor, w: Tensor, out: LayoutLike | None = None) -> ShardedTensor:
    """Multiply X by W; the result has layout ``out``.

    The layouts of X, W and Y decide which axis moves what.

    Shapes: x [..., M, K], w [K, N] -> [..., M, N].
    Raises: NoImplementation listing every algorithm and why it does not give that layout.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(tp=2):
    ...     x, w = sl.shard(torch.ones(4, 8), ". tp"), sl.shard(torch.ones(8, 6), "tp .")
    ...     sl.typeof(x @ w), sl.typeof(sl.matmul(x, w, out="tp ."))
    ('f32[4, 6]', 'f32[4@tp, 6]')
    """
    if out is not None:
        mesh = next((t.mesh for t in (x, w) if isinstance(t, ShardedTensor)), None)
        shape = (*x.shape[:-1], *w.shape[-1:])
        out = as_layout(out, "matmul", "out = {}", shape=shape, mesh=mesh)
    return heard(product_of, product, x, w, out)


def product_of(
    x: Any,
    w: Any,
    out: Layout | str | None = None,
    bias: ShardedTensor | None = None,
    call: tuple[Any, Any, Any] | None = None,
) -> ShardedTensor:
    """Compute x @ w by the cheapest or the pinned algorithm; the result has layout ``out``.

    ``bias`` [N] is added; in half precision before the result is rounded, if it is split as the
             columns are.
    ``call``  the torch call (func, args, kwargs) that this product implements, if there is one.
    """
    if not (type(x) is type(w) is ShardedTensor and x.place.mesh is w.place.mesh):
        call = None
        x, w = lifted("matmul", x, w)
    of_x, of_w = x.place, w.place
    if of_x.merged_from and _needs_rows(of_x, of_w):
        unfolded = x.view(*of_x.merged_from, of_x.shape[-1])
        return product_of(unfolded, w, out, bias).reshape(of_x.shape[0], of_w.shape[-1])  # type: ignore[return-value]
    if x.raw.dtype != w.raw.dtype:
        why = "operands have different dtypes"
        raise call_error(ShardError, why, "matmul", "x @ w.to(x.dtype)", x=x, w=w)
    now = scope()
    again = None
    if now.call.prefetch is not None and _may_move(of_x, of_w, out):
        again = now.call.prefetch.again(x)
    made = x.facts is not None and x.facts.derived is not None
    held = frozenset(made_of(x)) if made else _NOTHING
    plan = _plan_of(x, w, out, bias, held, again, now)
    if not isinstance(plan, _ProductPlan):
        return product_of(reshard(x, plan[0]), reshard(w, plan[1]), plan[2], bias)
    if (watcher := now.listeners.watcher) is not None:
        watcher.chose(plan.match, product=True)
    fresh = again is None and not held
    if call is not None and (done := _kept(plan, call, fresh, now)) is not None:
        return done
    raw = _multiplied(plan, x, w, bias)
    if again is False:
        let_go(x)
    y = ShardedTensor(raw, plan.place)
    return y if bias is None or plan.adds else elementwise(torch.add, (y, bias), {})


def _kept(
    plan: "_ProductPlan", call: tuple[Any, Any, Any], fresh: bool, now: Scope
) -> ShardedTensor | None:
    """Make torch's call so that equal ones are not planned again; None if this plan is not enough.

    ``fresh``  whether nothing is known of X's other readers, or was derived for them.
    """
    if plan.own and now.call.region is None:
        return blockwise(*call, plan.place, None if call[0] is F.linear else torch.matmul)
    if fresh and plan.fixed and call[0] is not F.linear:
        run = partial(Product.apply, plan.match.run, plan.place.mesh, plan.over)
        return blockwise(*call, plan.place, run, moves=True)
    return None


def _multiplied(
    plan: "_ProductPlan", x: ShardedTensor, w: ShardedTensor, bias: ShardedTensor | None
) -> Tensor:
    """Run the algorithm, which adds the bias if the plan says so."""
    match, over, _, adds, *_ = plan
    if over[1] and (later := _later(w, over[1])) is not None:
        w, over = ShardedTensor(later, w.place), (over[0], ())
    if bias is not None and adds is not None:
        return _biased(match, over, adds, x, w, bias)
    return _run(match, over, x, w, None)


def _run(
    match: Match, over: tuple[Axes, Axes], x: ShardedTensor, w: ShardedTensor, bias: Tensor | None
) -> Tensor:
    if match.call is not None:
        return match.call(x, w, over, bias)
    return Product.apply(match.run, x.mesh, over, x.raw, w.raw, bias)  # type: ignore[return-value]


def _plan_of(
    x: ShardedTensor, w: ShardedTensor, out: Layout | str | None, bias: ShardedTensor | None,
    held: frozenset[Any], again: bool | None, now: Scope,
) -> "_ProductPlan | tuple[Layout, Layout, Layout | None]":  # fmt: skip
    """Return the plan of a product, cached on the mesh by all that it depends on.

    ``again``  whether a later product of this call reads X.
    """
    of_x, of_w, dtype = x.place, w.place, x.raw.dtype
    asked, out = out is not None, out or of_w.out_layout
    # the first call guesses and later ones know: a price that cannot depend on it is found once
    more = again if again is not None and _may_gather(of_x.layout, of_w.layout) else None
    of_bias = None if bias is None else bias.place
    sides = of_x.layout, of_w.layout, of_x.shape, of_w.shape, of_x.deferred, of_w.deferred
    return of_x.mesh.memo(
        "product",
        (sides, of_bias, dtype, out, held, more, asked, now.policy),
        lambda: _planned(case(x, w, out, held, more), asked, (of_x, of_w), of_bias, dtype),
    )


def _needs_rows(x: Place, w: Place) -> bool:
    """Check whether a product must have X's rows as they were before a view merged them.

    A weight's rule refers to those dimensions, and so do groups of rows.
    """
    return bool(w.out_layout) or any(isinstance(p, int) for p in x.dims[0].parts)


class _Adds(NamedTuple):
    """Way in which an algorithm adds the bias.

    ``torchs``  whether torch's own function adds it and computes its gradient.
    ``met``     the axes over which that gradient is summed.
    """

    torchs: bool
    met: Axes


class _ProductPlan(NamedTuple):
    """Plan of a product: algorithm, axes of the sums of X's and W's gradients, Y's place, bias.

    It depends on no values; ``adds`` is None where the bias is added to Y afterwards.
    ``own``     whether torch's own function on the blocks is the whole product.
    ``fixed``   whether it is one function of the blocks: no operand is prepared, and no gradient
                is summed later with another leaf's.
    """

    match: Match
    over: tuple[Axes, Axes]
    place: Place
    adds: _Adds | None
    own: bool
    fixed: bool


def _planned(
    case: MatmulCase,
    asked: bool,
    operands: tuple[Place, Place],
    bias: Place | None,
    dtype: torch.dtype,
) -> _ProductPlan | tuple[Layout, Layout, Layout | None]:
    """Plan a product, or return the layouts to which operands are sliced before the product."""
    try:
        match = decide("matmul", case)
    except NoImplementation:
        bare = replace(case, held=_NOTHING, more=None)
        cut = cut_for(bare) or (None if asked or case.out is None else whole_rows(bare))
        if cut is None:
            raise
        return cut
    of_x, of_w = operands
    mesh, axes = of_x.mesh, match.out.axes
    deferred = (of_x.deferred | of_w.deferred).difference(axes)
    over_x, over_w = match.over or case.over(match.out)
    if of_x.deferred or of_w.deferred:
        meets = {*axes, *deferred}
        over_x, over_w = (meets.difference(p.layout.axes, p.deferred) for p in operands)
    over = (real_axes(mesh, over_x), real_axes(mesh, over_w))
    place = Place(match.out, torch.Size(case.y_shape), mesh, deferred=deferred)
    adds = unless_none(_adds, bias, place, match, dtype)
    if scope().policy.split_backward:
        match, adds = _in_two_passes(match, adds)
    own = match.local and not (over[0] or over[1])
    if bias is not None:
        own = own and adds is not None and adds.torchs and not adds.met
    fixed = match.call is None and not over[1]
    return _ProductPlan(match, over, place, adds, own, fixed)


def _in_two_passes(match: Match, adds: _Adds | None) -> tuple[Match, _Adds | None]:
    """Return the product with a backward of ours: torch's own computes both gradients at once."""
    if not (match.local and match.adds and match.call):
        return match, adds
    call = partial(match.call, torchs=False)
    return replace(match, call=call, local=False), adds and adds._replace(torchs=False)


def _may_move(x: Place, w: Place, out: Layout | str | None) -> bool:
    """Check whether a product may move anything: W or X's rows are split, or Y's layout is given."""
    if out or w.out_layout:
        return True
    sizes = x.mesh.axes
    axes = (*w.layout.named, *x.dims[-1].axes, *x.layout.partial)
    return any(sizes[a] > 1 for a in axes)


def _may_gather(x: Layout, w: Layout) -> bool:
    """Check whether a product may gather X: an axis of its K splits no K of W, or rows and columns."""
    inner, columns = w.dims[-2].axes, w.dims[-1].axes
    return any(a not in inner for a in x.dims[-1].axes) or any(
        a in columns for d in x.dims[:-1] for a in d.axes
    )


_NOTHING: frozenset[Any] = frozenset()


def _later(w: ShardedTensor, axes: Axes) -> Tensor | None:
    """Return W's block, its gradient to be summed over ``axes`` with those of other leaves.

    W must be a leaf of ``value_and_grad`` or its transpose.  None otherwise, and in half precision,
    where the product sums its fp32 parts before they are rounded.
    """
    raw = w.raw
    leaf = raw if raw.is_leaf else raw._base
    if leaf is None or is_half(raw) or together_of(leaf) is None or not torch.is_grad_enabled():
        return None
    if leaf is raw or _same_view(raw, leaf):
        return vary(leaf, w.mesh, axes)
    if leaf.ndim > 1 and _same_view(raw, leaf.mT):
        return vary(leaf, w.mesh, axes).mT
    return None


def _same_view(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and a.stride() == b.stride()
    return alike and a.data_ptr() == b.data_ptr()


def _adds(bias: Place, of_y: Place, match: Match, dtype: torch.dtype) -> _Adds | None:
    """Return how the algorithm adds this bias: before rounding to half precision, or as torch does.

    None if it does not add it.
    """
    mesh, half = of_y.mesh, dtype in HALF
    torchs = match.adds and not lead(mesh)
    alike = bias.mesh is mesh and len(bias.shape) == 1 and bias.dims == of_y.dims[-1:]
    meets = {*of_y.layout.axes, *of_y.deferred}
    if not ((half or torchs) and alike and bias.deferred <= meets):
        return None
    return _Adds(torchs, real_axes(mesh, meets.difference(bias.layout.axes, bias.deferred)))


def _biased(
    match: Match, over: tuple[Axes, Axes], adds: _Adds, x: Any, w: Any, bias: ShardedTensor
) -> Tensor:
    """Multiply and add the bias; its gradient is the algorithm's, or that of a node of its own."""
    mesh = x.mesh
    own = adds.torchs and not over[1] and not (over[0] and is_half(x.raw))
    added = vary(bias.raw, mesh, adds.met) if own else bias.raw.detach()
    raw = _run(match, over, x, w, added)
    if own or not bias.raw.requires_grad:
        return raw
    if adds.met and together_of(bias.raw) is not None:
        return _Biased.apply(raw, vary(bias.raw, mesh, adds.met), mesh, ())  # type: ignore[return-value]
    return _Biased.apply(raw, bias.raw, mesh, adds.met)  # type: ignore[return-value]


class _Biased(Local):
    """apply(y, bias, mesh, axes): y, which holds the bias; its gradient is summed over ``axes``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        ctx.place = mesh, axes, bias.dtype
        return owned(y.view_as(y))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mesh, axes, dtype = ctx.place
        if torch.is_grad_enabled():
            g = wide(unwrap(wrap(grads[0], mesh).flatten(0, -2)))
            return grads[0], total(g.sum(-2), mesh, axes, dtype), None, None
        with bind(mesh):
            g = wrap(grads[0], mesh)
            rows = g.flatten(0, -2)
            if axes and is_half(grads[0]):
                # in fp32, 512 rows at a time to bound the memory
                rows = torch.stack([part.float().sum(0) for part in rows.split(512)]).sum(0)
                rows = rounded(rows, dtype, axes, wire=True)
            else:
                # torch's own sum accumulates in fp32
                rows = rounded(rows.sum(0), dtype, axes)
            return grads[0], unwrap(rows), None, None
