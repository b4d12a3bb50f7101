"""Layer and RMS normalisation over dimensions that may be split.

Each rank reduces its own part to (mean, M2); the parts are gathered once and merged by
Welford's rule, so a mean of 3000 costs no digits (E[x^2] - E[x]^2 would lose them all).

Source: Chan, Golub and LeVeque 1983 for the merge; arXiv 2104.05343, section 3.2.4 for the split.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local
from shardlib.collectives import (
    all_gather,
    axis_size,
    block_shape,
    blocks,
    lead,
    psum,
    storage,
    storage_shape,
    unwrap,
    wrap,
)
from shardlib.dtypes import is_half, wide, wider
from shardlib.errors import BadArgument
from shardlib.kernels import active
from shardlib.kernels.apex import apex
from shardlib.kernels.norm import (
    norm_apply,
    norm_back,
    norm_back_sums,
    norm_columns,
    norm_settle,
    norm_stats,
    serves,
)
from shardlib.mesh import Axes, Mesh, bind
from shardlib.ops.elementwise import brought
from shardlib.ops.padding import beside
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optional import unless_none
from shardlib.tensor.gradients import vary, vjp_again, widened
from shardlib.tensor.lifting import lifted
from shardlib.tensor.tensor import ShardedTensor, Unfit, blockwise, call_error, implements

TorchCall = tuple[Func, Args, Kwargs]
Factor = Tensor | None
"""Scale or shift, if there is one."""
# without and with the mean subtracted
_OPS = "rms_norm", "layer_norm"


class _RowNorm(NamedTuple):
    """Normalisation of the trailing dimensions, of ``shape`` and ``count`` elements.

    ``axes``    the axes that split them.
    ``overs``   the axes over which the gradients of the tensor, the scale and the shift are summed.
    ``centre``  whether the mean is subtracted, as layer_norm does.
    ``single``  whether raw blocks are one rank's.
    """

    mesh: Mesh
    axes: Axes
    overs: tuple[Axes, Axes, Axes]
    shape: tuple[int, ...]
    count: int
    eps: float
    centre: bool
    single: bool

    def rows(self, x: Tensor) -> Tensor:
        """[..., *trailing dims] -> [R, H]."""
        return x.reshape(-1, math.prod(x.shape[x.ndim - len(self.shape) :]))


def _moments(x: Tensor, axes: Axes, count: int) -> tuple[Tensor, Tensor]:
    """Compute mean and variance over the last dimension and ``axes``: [R, H/axes] -> [R, 1]."""
    mean = x.mean(-1, keepdim=True)
    m2 = (x - mean).square().sum(-1, keepdim=True)
    parts = all_gather(torch.cat([mean, m2], -1).unsqueeze(0), axes, 0)  # [p, R, 2]
    means, m2s = parts[..., 0:1], parts[..., 1:2]
    mean = means.mean(0)
    spread = (means - mean).square().sum(0) * (count // axis_size(axes))
    return mean, (m2s.sum(0) + spread) / count


class _Normalise(Local):
    """(x - mean) / sqrt(var + eps) * w + b, or x / sqrt(mean(x^2) + eps) * w.

    apply(norm, x, w, b) on raw blocks.  Half precision is rounded once, at the end.
    """

    @staticmethod
    def forward(ctx: Ctx, norm: _RowNorm, x: Tensor, w: Factor, b: Factor) -> Tensor:
        ctx.norm = norm
        out, mean, scale = _forward(norm, x, w, b)
        # the shift too: what is not saved so keeps a gathered parameter
        ctx.save_for_backward(x, w, mean, scale, b)
        return out

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        norm = ctx.norm
        # read once: a checkpoint may recompute them at each access
        *saved, b = ctx.saved_tensors
        if torch.is_grad_enabled():
            raws = (*saved[:2], b)
            again = vjp_again(
                lambda *t: _forward(norm, *t)[0], norm.mesh, raws, norm.overs, grads[0]
            )
            return None, *again
        found = None
        # kernels do so before the sum over ranks
        rounds = norm.overs[0] and is_half(saved[0])
        if not rounds and (not saved[0].is_cpu or active.cpu):
            found = _kernels_back(norm, saved, b, grads[0])
        return None, *(found or _eager_back(norm, saved, b, grads[0]))


def _forward(
    norm: _RowNorm, x_raw: Tensor, w_raw: Factor, b_raw: Factor
) -> tuple[Tensor, Any, Tensor]:
    """Return the result, the mean if it was subtracted, and 1 / sqrt(var + eps)."""
    if (not x_raw.is_cpu or active.cpu) and not torch.is_grad_enabled():
        found = _kernels(norm, x_raw, w_raw, b_raw)
        if found is not None:
            return found
    mesh, axes = norm.mesh, norm.axes
    mean = None
    with bind(mesh):
        x = wrap(x_raw, mesh)
        rows = norm.rows(wide(x))
        if norm.centre:
            mean, var = _moments(rows, axes, norm.count)
        else:
            var = psum(rows.square().sum(-1, keepdim=True), axes) / norm.count
        scale = (var + norm.eps).rsqrt()
        out = _normal(rows, mean, scale).reshape(x.shape)
        if w_raw is not None:
            out = out * wide(wrap(w_raw, mesh))
        if b_raw is not None:
            out = out + wide(wrap(b_raw, mesh))
        return unwrap(out.to(x.dtype)), unless_none(unwrap, mean), unwrap(scale)


def _eager_back(norm: _RowNorm, saved: Any, b_raw: Factor, grad: Tensor) -> list[Any]:
    """Return the gradients of the tensor, the scale and the shift."""
    mesh, axes, (over_x, over_w, over_b) = norm.mesh, norm.axes, norm.overs
    with bind(mesh):
        x, w, mean, scale, b, g = (unless_none(wrap, t, mesh) for t in (*saved, b_raw, grad))
        assert x is not None and scale is not None and g is not None, "given above"
        g, y = wide(g), _normal(norm.rows(wide(x)), mean, scale)
        db = dw = None
        if b is not None:
            db = unwrap(_settled(g.sum_to_size(b.shape), over_b, b.dtype))
        if w is not None:
            dw = unwrap(_settled((g * y.reshape(g.shape)).sum_to_size(w.shape), over_w, w.dtype))
            g = g * wide(w)
        g = norm.rows(g)
        sums = torch.cat([(g * y).sum(-1, keepdim=True), g.sum(-1, keepdim=True)], -1)
        sums = psum(sums, axes) / norm.count
        dx = g - y * sums[..., 0:1]
        dx = (dx if mean is None else dx - sums[..., 1:2]) * scale
        return [unwrap(_settled(dx.reshape(x.shape), over_x, x.dtype, x.dtype)), dw, db]


def _kernels(
    norm: _RowNorm, x_raw: Tensor, w_raw: Factor, b_raw: Factor
) -> tuple[Tensor, Any, Tensor] | None:
    """Run ``_forward`` by kernels, with its collectives; None if kernels refuse these blocks."""
    every = _flat_blocks(norm, x_raw, w_raw, b_raw)
    if every is None:
        return None
    mesh, axes, centre = norm.mesh, norm.axes, norm.centre
    parts = storage([norm_stats(x, centre).unsqueeze(0) for x, *_ in every], mesh)
    each = every[0][0].shape[1]
    if axes:
        with bind(mesh):
            if centre:
                parts = unwrap(all_gather(wrap(parts, mesh), axes, 0))
            else:
                # sums of squares merge by addition, so psum is enough
                parts, each = unwrap(psum(wrap(parts, mesh), axes)), each * axis_size(axes)
    found = [norm_settle(part, centre, each, norm.eps) for part in blocks(parts, mesh)]
    out = [
        norm_apply(x, w, b, *statistics).view(block.shape)
        for block, (x, w, b), statistics in zip(blocks(x_raw, mesh), every, found, strict=True)
    ]
    mean, scale = (storage(list(row), mesh) for row in zip(*found, strict=True))
    return storage(out, mesh), mean if centre else None, scale


def _kernels_back(norm: _RowNorm, saved: Any, b_raw: Factor, grad: Tensor) -> list[Any] | None:
    """Run ``_eager_back`` by kernels, with its collectives; None if kernels refuse these blocks."""
    mesh, (over_x, over_w, over_b) = norm.mesh, norm.overs
    x_raw, w_raw, mean_raw, scale_raw = saved
    every = _flat_blocks(norm, x_raw, w_raw, b_raw)
    if every is None:
        return None
    xs, ws, _ = zip(*every, strict=True)
    gs = [g.reshape(x.shape).contiguous() for g, x in zip(blocks(grad, mesh), xs, strict=True)]
    means = [scale_raw.new_empty(0, 1)] * len(xs)
    if mean_raw is not None:
        means = blocks(mean_raw, mesh)
    given = list(zip(xs, gs, ws, means, blocks(scale_raw, mesh), strict=True))
    sums = storage([norm_back_sums(*of_rank) for of_rank in given], mesh)
    with bind(mesh):
        if norm.axes:
            sums = unwrap(psum(wrap(sums, mesh), norm.axes))
        made = [
            norm_back(*of_rank, total, norm.count)
            for of_rank, total in zip(given, blocks(sums, mesh), strict=True)
        ]
        dx = _gradient(made, mesh, x_raw, over_x, x_raw.dtype)
        if w_raw is None and b_raw is None:
            return [dx, None, None]
        of_w, of_b = zip(*(norm_columns(x, g, m, s) for x, g, _, m, s in given), strict=True)
        return [dx, _gradient(of_w, mesh, w_raw, over_w), _gradient(of_b, mesh, b_raw, over_b)]


def _gradient(
    made: Sequence[Tensor], mesh: Mesh, like: Factor, over: Axes, wire: torch.dtype | None = None
) -> Factor:
    """Return the gradient that the ranks' kernels made, if there is such an operand."""
    if like is None:
        return None
    raw = storage(made, mesh).view(like.shape)
    return unwrap(_settled(wrap(raw, mesh), over, like.dtype, wire))


def _flat_blocks(
    norm: _RowNorm, x_raw: Tensor, *factors: Factor
) -> list[tuple[Tensor, Factor, Factor]] | None:
    """Return each rank's rows x [R, H] and factors [H]; None if kernels do not support them."""
    if not active.native(x_raw, *factors):
        return None
    mesh = norm.mesh
    tail = x_raw.shape[x_raw.ndim - len(norm.shape) :]
    if any(f is not None and block_shape(f, mesh) != tail for f in factors):
        return None
    xs = list(map(norm.rows, blocks(x_raw, mesh)))
    ws, bs = (
        [None] * len(xs) if f is None else [block.reshape(-1) for block in blocks(f, mesh)]
        for f in factors
    )
    out = list(zip(xs, ws, bs, strict=True))
    return out if all(serves(*rows) for rows in out) else None


def _settled(x: Tensor, over: Axes, dtype: torch.dtype, wire: torch.dtype | None = None) -> Tensor:
    """Sum over further axes and round to ``dtype``; parts are sent in ``wire``, else unrounded."""
    return psum(x, over, out=dtype, wire=wire)


def _normal(rows: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
    return (rows if mean is None else rows - mean) * scale


def _whole(norm: _RowNorm, x: Tensor, w: Factor, b: Factor) -> Tensor | None:
    """Normalise rows that each rank holds whole by apex's kernel, or torch's own; None: by neither.

    The scale and the shift of half precision values are widened first, so that their gradients are
    summed, over the mesh too, before they are rounded.
    """
    mesh, run = norm.mesh, None
    over_x, *overs = norm.overs
    if (not x.is_cpu or active.cpu) and norm.single:
        run = apex(_OPS[norm.centre], x)
    if run is None and not norm.centre:
        return None
    if over_x:
        x = vary(x, mesh, over_x)
    w, b = widened((w, b), mesh, overs)
    if run is not None:
        found = run(x, norm.shape, *(w, b)[: 1 + norm.centre], norm.eps)
        if found is not None or not norm.centre:
            return found
    return _layer_norm(norm, x, w, b)


def _layer_norm(norm: _RowNorm, x: Tensor, w: Factor, b: Factor) -> Tensor:
    """Run torch's own kernel on whole rows; wide factors of half precision rows are applied apart."""
    shape = norm.shape
    # torch 2.13 has no gradient for a wide shift alone
    mixes = norm.mesh.device_type in ("cpu", "meta") and (w is not None or b is None)
    if norm.single and (not is_half(x) or mixes):
        return F.layer_norm(x, shape, w, b, norm.eps)
    # under simulate every rank has its own scale; other devices have no kernel of mixed dtypes
    out = F.layer_norm(wide(x), shape, None, None, norm.eps)
    ones = [1] * (len(block_shape(x, norm.mesh)) - len(shape))
    for factor, f in ((w, torch.mul), (b, torch.add)):
        if factor is not None:
            out = f(out, factor.reshape(storage_shape(norm.mesh, *ones, *shape)))
    return out.to(x.dtype)


def _is_torchs(norm: _RowNorm, call: TorchCall, values: list[Any], raws: list[Tensor]) -> bool:
    """Check whether torch's own kernel on the blocks is all that whole rows need."""
    _, args, kwargs = call
    whole = norm.single and not (norm.axes or any(norm.overs))
    if not whole or not raws[0].is_cpu or active.cpu or is_half(raws[0]):
        return False
    given = filter(torch.is_tensor, (*args, *kwargs.values()))
    same = bool(args) and all(map(operator.is_, given, values))
    return same and all(map(operator.is_, [v.raw for v in values], raws))


def _normalised(
    call: TorchCall, given: dict[str, Any], shape: tuple[int, ...], eps: float, centre: bool
) -> ShardedTensor:
    """Normalise the trailing dimensions that ``shape`` counts.

    ``call``   torch's call (func, args, kwargs).
    ``given``  its tensor x, its scale w and its shift b; None: there is none.
    """
    op = _OPS[centre]
    operands = {k: v for k, v in given.items() if v is not None}
    values = lifted(op, *operands.values())
    _check(op, values, shape)
    mesh = values[0].mesh
    raws, overs, place = brought(op, values)
    over = dict(zip(operands, overs, strict=True))
    raw = dict(zip(operands, raws, strict=True))
    axes = tuple([a for t in place.dims[-len(shape) :] for a in t.axes if mesh.axes[a] > 1])
    summed = over["x"], over.get("w", ()), over.get("b", ())
    norm = _RowNorm(mesh, axes, summed, shape, math.prod(shape), eps, centre, not lead(mesh))
    if centre and _is_torchs(norm, call, values, raws):
        return blockwise(*call, place)
    blocks_of = raw["x"], raw.get("w"), raw.get("b")
    found = None if axes else _whole(norm, *blocks_of)
    if found is None:
        found = _Normalise.apply(norm, *blocks_of)
    return ShardedTensor(found, place)


def _check(op: str, values: list[ShardedTensor], shape: tuple[int, ...]) -> None:
    """Refuse shapes and dtypes that torch does not take."""
    x = values[0]
    if not shape or tuple(x.padded_shape[-len(shape) :]) != shape:
        why = f"normalized_shape {list(shape)} is not the tail of the tensor's shape"
        raise call_error(BadArgument, why, op, f"F.{op}(x, {list(x.padded_shape[-1:])})", tensor=x)
    own = x.dtype
    for k, v in enumerate(values):
        dtype = v.dtype
        mixed = op == "layer_norm" and dtype not in (own, wider(own))
        other = k > 0 and tuple(v.padded_shape) != shape
        if mixed or other or not dtype.is_floating_point:
            why = (
                f"scale and shift have the shape {list(shape)} and the dtype of the tensor, which "
                "is floating point"
            )
            raise call_error(BadArgument, why, op, tensor=x, parameter=v)


_LAYER = binder(
    "layer_norm(input: tensor, normalized_shape, weight: tensor = None, bias: tensor = None, "
    "eps: number = 1e-5, cudnn_enable=True)"
)
_RMS = binder(
    "rms_norm(input: tensor, normalized_shape, weight: tensor = None, eps: number = None)"
)


def _tail(bind: Func, *args: Any, **kwargs: Any) -> range:
    """Return the normalised dimensions; rows of ones must be finite with this eps."""
    given = bind(*args, **kwargs)
    eps = given["eps"]
    if eps is not None and eps <= (0 if "bias" in given else -1):
        raise Unfit("what is made of the padding would not be finite")
    return range(-len(given["normalized_shape"]), 0)


@implements(
    F.layer_norm, torch.layer_norm, padding=beside(partial(_tail, _LAYER), 1), takes="plain"
)
def layer_norm(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Normalise as F.layer_norm, with the normalised dimensions split or whole."""
    x, shape, w, b, eps, *_ = _LAYER(*args, **kwargs).values()
    return _normalised((func, args, kwargs), {"x": x, "w": w, "b": b}, tuple(shape), eps, True)


@implements(F.rms_norm, torch.rms_norm, padding=beside(partial(_tail, _RMS), 1), takes="plain")
def rms_norm(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Normalise as F.rms_norm, with the normalised dimensions split or whole."""
    x, shape, w, eps = _RMS(*args, **kwargs).values()
    # as torch: the eps of the dtype in which it computes
    eps = torch.finfo(wider(x.dtype)).eps if eps is None else eps
    return _normalised((func, args, kwargs), {"x": x, "w": w}, tuple(shape), eps, False)
