"""Layer and RMS normalisation over dimensions that may be split.

Each rank reduces its own part to (mean, M2); the parts are gathered once and merged by
Welford's rule, so a mean of 3000 costs no digits (E[x^2] - E[x]^2 would lose them all).

Source: Chan, Golub and LeVeque 1983 for the merge; arXiv 2104.05343, section 3.2.4 for the split.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Local
from shardlib.collectives import all_gather, axis_size, blocks, lead, psum, storage, unwrap, wrap
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
from shardlib.mesh import Mesh, bind
from shardlib.ops.elementwise import brought
from shardlib.ops.padding import filled, with_zeros
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor.gradients import vary, vjp_again, widened
from shardlib.tensor.lifting import lift
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    ShardedTensor,
    Unfit,
    blockwise,
    call_error,
    has_padding,
    implements,
)

__all__ = ["layer_norm", "rms_norm"]

Axes = tuple[str, ...]
TorchCall = tuple[Func, Args, Kwargs]


def _moments(x: Tensor, axes: tuple[str, ...], count: int) -> tuple[Tensor, Tensor]:
    """Compute mean and variance over the last dimension and ``axes``: [R, H/axes] -> [R, 1]."""
    mean = x.mean(-1, keepdim=True)
    m2 = (x - mean).square().sum(-1, keepdim=True)
    if not axes:
        return mean, m2 / count
    parts = all_gather(torch.cat([mean, m2], -1).unsqueeze(0), axes, 0)  # [p, R, 2]
    means, m2s = parts[..., 0:1], parts[..., 1:2]
    mean = means.mean(0)
    spread = (means - mean).square().sum(0) * (count // axis_size(axes))
    return mean, (m2s.sum(0) + spread) / count


class _Normalise(Local):
    """(x - mean) / sqrt(var + eps) * w + b, or x / sqrt(mean(x^2) + eps) * w.

    It normalises over ``width`` trailing dimensions.

    apply(mesh, axes, overs, width, count, eps, centre, x, w, b) on raw blocks; ``axes`` split the
    trailing dims, ``overs`` are those over which the gradients of x, w and b are summed.  Half
    precision is rounded once, at the end.
    """

    @staticmethod
    def forward(
        ctx: Ctx, mesh: Mesh, axes: Axes, overs: list[Axes], width: int, count: int, eps: float,
        centre: bool, x_raw: Tensor, w_raw: Tensor | None, b_raw: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.place, ctx.how = (mesh, axes, overs, width, count), (eps, centre)
        out, mean, scale = _forward(mesh, axes, width, count, eps, centre, x_raw, w_raw, b_raw)
        ctx.like = b_raw
        ctx.save_for_backward(x_raw, w_raw, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mesh, axes, overs, width, count = ctx.place
        saved = ctx.saved_tensors  # read once: a checkpoint may recompute them at each access
        if torch.is_grad_enabled():
            f = partial(_forward, mesh, axes, width, count, *ctx.how)
            raws = (*saved[:2], ctx.like)
            over = (overs[0], overs[1 if raws[1] is not None else 0], overs[-1])
            return *[None] * 7, *vjp_again(lambda *t: f(*t)[0], mesh, raws, over, grads[0])
        if not saved[0].is_cpu or active.cpu:
            found = _kernels_back(ctx, saved, grads[0])
            if found is not None:
                return *[None] * 7, *found
        with bind(mesh):
            x, w, mean, scale = (None if t is None else wrap(t, mesh) for t in saved)
            b = None if ctx.like is None else wrap(ctx.like, mesh)
            assert x is not None and scale is not None, "saved above"
            g, y = wide(wrap(grads[0], mesh)), _normal(_rows(wide(x), width), mean, scale)
            db = None if b is None else _settled(g.sum_to_size(b.shape), overs[-1], b.dtype)
            dw = (
                None
                if w is None
                else _settled((g * y.reshape(g.shape)).sum_to_size(w.shape), overs[1], w.dtype)
            )
            g = _rows(g if w is None else g * wide(w), width)
            sums = torch.cat([(g * y).sum(-1, keepdim=True), g.sum(-1, keepdim=True)], -1)
            sums = (psum(sums, axes) if axes else sums) / count
            dx = g - y * sums[..., 0:1]
            dx = (dx if mean is None else dx - sums[..., 1:2]) * scale
            found = (_settled(dx.reshape(x.shape), overs[0], x.dtype, x.dtype), dw, db)
            return *[None] * 7, *(None if t is None else unwrap(t) for t in found)


def _forward(
    mesh: Mesh, axes: Axes, width: int, count: int, eps: float, centre: bool,
    x_raw: Tensor, w_raw: Tensor | None, b_raw: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    if (not x_raw.is_cpu or active.cpu) and not torch.is_grad_enabled():
        found = _kernels(mesh, axes, width, eps, centre, x_raw, w_raw, b_raw)
        if found is not None:
            return found
    with bind(mesh):
        x = wrap(x_raw, mesh)
        rows, mean = _rows(wide(x), width), None
        if centre:
            mean, var = _moments(rows, axes, count)
        else:
            squares = rows.square().sum(-1, keepdim=True)
            var = (psum(squares, axes) if axes else squares) / count
        scale = (var + eps).rsqrt()
        out = _normal(rows, mean, scale).reshape(x.shape)
        out = out if w_raw is None else out * wide(wrap(w_raw, mesh))
        out = out if b_raw is None else out + wide(wrap(b_raw, mesh))
        return unwrap(out.to(x.dtype)), None if mean is None else unwrap(mean), unwrap(scale)


def _kernels(
    mesh: Mesh, axes: Axes, width: int, eps: float, centre: bool,
    x_raw: Tensor, w_raw: Tensor | None, b_raw: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:  # fmt: skip
    """Run ``_forward`` by kernels, with its collectives; None if kernels refuse these blocks."""
    every = _flat_blocks(mesh, width, x_raw, w_raw, b_raw)
    if every is None:
        return None
    parts = storage([norm_stats(x, centre).unsqueeze(0) for x, *_ in every], mesh)
    each = every[0][0].shape[1]
    if axes:
        with bind(mesh):
            if centre:
                parts = unwrap(all_gather(wrap(parts, mesh), axes, 0))
            else:  # sums of squares merge by addition, so psum is enough
                parts, each = unwrap(psum(wrap(parts, mesh), axes)), each * axis_size(axes)
    found = [norm_settle(part, centre, each, eps) for part in blocks(parts, mesh)]
    out = [
        norm_apply(x, w, b, *statistics).view(block.shape)
        for block, (x, w, b), statistics in zip(blocks(x_raw, mesh), every, found, strict=True)
    ]
    mean, scale = (storage(list(row), mesh) for row in zip(*found, strict=True))
    return storage(out, mesh), mean if centre else None, scale


def _kernels_back(ctx: Ctx, saved: Any, grad: Tensor) -> list[Tensor | None] | None:
    """Run ``backward`` by kernels, with its collectives; None if kernels refuse these blocks."""
    mesh, axes, overs, width, count = ctx.place
    x_raw, w_raw, mean_raw, scale_raw = saved
    every = _flat_blocks(mesh, width, x_raw, w_raw, ctx.like)
    if every is None or (overs[0] and is_half(x_raw)):  # kernels round before the sum over ranks
        return None
    gs = [
        g.reshape(x.shape).contiguous()
        for g, (x, *_) in zip(blocks(grad, mesh), every, strict=True)
    ]
    empty = scale_raw.new_empty(0, 1)
    means = [empty] * len(every) if mean_raw is None else blocks(mean_raw, mesh)
    given = list(zip(every, gs, means, blocks(scale_raw, mesh), strict=True))
    sums = storage([norm_back_sums(x, g, w, m, s) for (x, w, _), g, m, s in given], mesh)
    with bind(mesh):
        if axes:
            sums = unwrap(psum(wrap(sums, mesh), axes))
        made = [
            norm_back(x, g, w, m, s, total, count)
            for ((x, w, _), g, m, s), total in zip(given, blocks(sums, mesh), strict=True)
        ]
        dx = storage(made, mesh).view(x_raw.shape)
        if overs[0]:
            dx = unwrap(_settled(wrap(dx, mesh), overs[0], x_raw.dtype, x_raw.dtype))
        out: list[Tensor | None] = [dx, None, None]
        if w_raw is not None or ctx.like is not None:
            columns = [norm_columns(x, g, m, s) for (x, _, _), g, m, s in given]
            for at, (like, over) in enumerate([(w_raw, overs[1]), (ctx.like, overs[-1])]):
                if like is not None:
                    raw = storage([c[at] for c in columns], mesh).view(like.shape)
                    out[1 + at] = unwrap(_settled(wrap(raw, mesh), over, like.dtype))
    return out


def _flat_blocks(
    mesh: Mesh, width: int, x_raw: Tensor, w_raw: Tensor | None, b_raw: Tensor | None
) -> list[tuple[Tensor, Tensor | None, Tensor | None]] | None:
    """Return each rank's rows x [R, H] and factors [H]; None if kernels do not support them."""
    if not active.native(x_raw, w_raw, b_raw):
        return None
    out = []
    for i, block in enumerate(blocks(x_raw, mesh)):
        tail = block.shape[block.ndim - width :]
        w, b = (None if raw is None else blocks(raw, mesh)[i] for raw in (w_raw, b_raw))
        if any(f is not None and f.shape != tail for f in (w, b)):
            return None
        x = _rows(block, width)
        w, b = (None if f is None else f.reshape(-1) for f in (w, b))
        if not serves(x, w, b):
            return None
        out.append((x, w, b))
    return out


def _settled(x: Tensor, over: Axes, dtype: torch.dtype, wire: torch.dtype | None = None) -> Tensor:
    """Sum over further axes and round to ``dtype``; parts are sent in ``wire``, else unrounded."""
    return psum(x, over, out=dtype, wire=wire) if over else x.to(dtype)


def _normal(rows: Tensor, mean: Tensor | None, scale: Tensor) -> Tensor:
    return (rows if mean is None else rows - mean) * scale


def _rows(x: Tensor, width: int) -> Tensor:
    """[..., *width dims] -> [R, H]."""
    return x.reshape(-1, math.prod(x.shape[x.ndim - width :]))


def _whole(
    x: ShardedTensor, raw: Tensor, overs: list[Axes], w: Tensor | None, b: Tensor | None,
    shape: tuple[int, ...], eps: float,
) -> Tensor:  # fmt: skip
    """Normalise rows that each rank holds whole by torch's own kernel.

    The scale and the shift of half precision values are widened first, so that their gradients are
    summed, over the mesh too, before they are rounded.
    """
    mesh = x.mesh
    raw = vary(raw, mesh, overs[0]) if overs[0] else raw
    w, b = widened((w, b), mesh, (overs[1] if w is not None else (), overs[-1]))
    if (not raw.is_cpu or active.cpu) and not lead(mesh):
        run = apex("layer_norm", raw)
        found = None if run is None else run(raw, shape, w, b, eps)
        if found is not None:
            return found
    # torch 2.13 has no gradient for a wide shift alone
    mixes = mesh.device_type in ("cpu", "meta") and (w is not None or b is None)
    if not lead(mesh) and (not is_half(raw) or mixes):
        return F.layer_norm(raw, shape, w, b, eps)
    # under simulate every rank has its own scale; other devices have no kernel of mixed dtypes
    out = F.layer_norm(wide(raw), shape, None, None, eps)
    for scale, f in ((w, torch.mul), (b, torch.add)):
        if scale is not None:
            ones = [1] * (raw.ndim - len(shape) - lead(mesh))
            out = f(out, scale.unflatten(0, (-1, *ones)) if lead(mesh) else scale)
    return out.to(raw.dtype)


def _is_torchs(
    call: TorchCall, values: list[ShardedTensor], raws: list[Tensor], overs: Sequence[Axes]
) -> bool:
    """Check whether torch's own kernel on the blocks is all that whole rows need."""
    x, args = values[0], call[1]
    if not args or args[0] is not x or lead(x.mesh) or any(overs):
        return False
    given = [v for v in (*args, *call[2].values()) if isinstance(v, Tensor)]
    same = len(given) == len(values) and all(map(operator.is_, given, values))
    kept = all(raw is v.raw for raw, v in zip(raws, values, strict=True))
    plain = all(v.dtype == x.dtype for v in values) and not is_half(x)
    return same and kept and plain and x.raw.is_cpu and not active.cpu


def _normalised(
    call: TorchCall,
    x: ShardedTensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centre: bool,
) -> ShardedTensor:
    """Normalise the trailing dimensions that ``shape`` counts.

    ``call``  torch's call (func, args, kwargs).
    """
    op, width = "layer_norm" if centre else "rms_norm", len(shape)
    mesh = next(v.mesh for v in (x, weight, bias) if isinstance(v, ShardedTensor))
    values = [lift(v, mesh, op) for v in (x, weight, bias) if v is not None]
    x = values[0]
    _check(op, values, shape)
    raws, overs, out, size, deferred = brought(op, values)
    rest = iter(raws[1:])
    w = None if weight is None else next(rest)
    b = None if bias is None else next(rest)
    axes = tuple(a for t in out.dims[-width:] for a in t.axes if mesh.axes[a] > 1)
    place = Place(out, size, mesh, deferred=deferred)
    if axes:
        found = None
    elif centre and _is_torchs(call, values, raws, overs):
        func, args, kwargs = call
        return blockwise(func, args, kwargs, place)
    elif centre:
        found = _whole(x, raws[0], overs, w, b, shape, eps)
    else:
        found = _apex_rms(mesh, raws[0], overs, w, shape, eps)
    if found is None:
        count = math.prod(shape)
        found = _Normalise.apply(mesh, axes, overs, width, count, eps, centre, raws[0], w, b)
    return ShardedTensor(found, place)  # type: ignore[arg-type]


def _check(op: str, values: list[ShardedTensor], shape: tuple[int, ...]) -> None:
    """Refuse shapes and dtypes that torch does not take, and pending sums."""
    x = values[0]
    if not shape or tuple(x.padded_shape[-len(shape) :]) != shape:
        why = f"normalized_shape {list(shape)} is not the tail of the tensor's shape"
        raise call_error(BadArgument, why, op, f"F.{op}(x, {list(x.padded_shape[-1:])})", tensor=x)
    dtypes = {x.dtype, wider(x.dtype)}
    for k, v in enumerate(values):
        mixed = op == "layer_norm" and v.dtype not in dtypes
        other = k > 0 and tuple(v.padded_shape) != shape
        if mixed or other or not v.dtype.is_floating_point:
            why = (
                f"scale and shift have the shape {list(shape)} and the dtype of the tensor, which "
                "is floating point"
            )
            raise call_error(BadArgument, why, op, tensor=x, parameter=v)


def _apex_rms(
    mesh: Mesh, raw: Tensor, overs: list[Axes], w: Tensor | None, shape: tuple[int, ...], eps: float
) -> Tensor | None:
    """Normalise whole rows by apex's kernel, if it is there and takes them."""
    if (raw.is_cpu and not active.cpu) or lead(mesh):
        return None
    run = apex("rms_norm", raw)
    if run is None:
        return None
    held = vary(raw, mesh, overs[0]) if overs[0] else raw
    (scale,) = widened((w,), mesh, (overs[-1],))
    return run(held, shape, scale, eps)


_LAYER = binder(
    "layer_norm(input: tensor, normalized_shape, weight: tensor = None, bias: tensor = None, eps: "
    "number = 1e-5, "
    "cudnn_enable=True)"
)
_RMS = binder(
    "rms_norm(input: tensor, normalized_shape, weight: tensor = None, eps: number = None)"
)


def _padded_rows(run: Func, func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Normalise an operand padded in its rows only, filled with ones to keep them finite."""
    given = (_LAYER if "layer" in func.__name__ else _RMS)(*args, **kwargs)
    x, width = given["input"], len(given["normalized_shape"])
    others = (given["weight"], given.get("bias"))
    if not x.is_padded or has_padding(others) or x.shape[-width:] != x.padded_shape[-width:]:
        raise Unfit("the padding would be normalised")
    eps = given["eps"]
    if eps is not None and eps <= (0 if "bias" in given else -1):
        raise Unfit("what is made of the padding would not be finite")
    return with_zeros(run(func, (), given | {"input": filled(x, 1)}), x.shape)


@implements(F.layer_norm, torch.layer_norm, padded=_padded_rows, pending=False, repeats=True)
def layer_norm(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Normalise as F.layer_norm, with the normalised dimensions split or whole."""
    x, shape, w, b, eps, *_ = _LAYER(*args, **kwargs).values()
    return _normalised((func, args, kwargs), x, tuple(shape), w, b, eps, True)


@implements(F.rms_norm, torch.rms_norm, padded=_padded_rows, pending=False)
def rms_norm(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Normalise as F.rms_norm, with the normalised dimensions split or whole."""
    x, shape, w, eps = _RMS(*args, **kwargs).values()
    x = lift(x, x.mesh if w is None else getattr(x, "mesh", None) or w.mesh, "rms_norm")
    # as torch: the eps of the dtype in which it computes
    eps = torch.finfo(wider(x.dtype)).eps if eps is None else eps
    return _normalised((func, args, kwargs), x, tuple(shape), w, None, eps, False)
