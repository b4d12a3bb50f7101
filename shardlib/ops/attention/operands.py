"""Operands of ``ring_attention``: DTensors, local blocks or sharded tensors, with their checks."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib._compat import is_dtensor
from shardlib.collectives import Stacked, unwrap
from shardlib.dtensor_convert import as_dtensor, from_dtensor
from shardlib.errors import ImplicitCommunication, PlainTensor, RankMismatch, ShardError
from shardlib.layouts import Dim, Layout, LayoutFamily, as_layout
from shardlib.mesh import current_mesh
from shardlib.ops.attention.case import AttentionCase, case_of_values
from shardlib.ops.attention.masks import Mask, as_mask
from shardlib.ops.registry import case_of
from shardlib.tensor import Place, ShardedTensor, call_error, partial_escape, typeof

__all__ = ["Operands", "attention_case", "check", "entered"]


class Operands(NamedTuple):
    """q, k and v as sharded tensors, and the conversion back if they were of another kind."""

    q: ShardedTensor
    k: ShardedTensor
    v: ShardedTensor
    leave: Callable[[ShardedTensor], Tensor] | None


def entered(q: Tensor, k: Tensor, v: Tensor, layout: Any, kv_layout: Any) -> Operands:
    """Convert sharded tensors, DTensors, or local blocks split as the layouts state.

    Raises: PlainTensor, RankMismatch, ImplicitCommunication and others if they do not fit.
    """
    keys_layout = layout if kv_layout is None else kv_layout
    if any(is_dtensor(t) for t in (q, k, v)):
        values = [from_dtensor(t) if is_dtensor(t) else t for t in (q, k, v)]
        leave: Callable[[ShardedTensor], Tensor] | None = as_dtensor
    elif isinstance(q, ShardedTensor):
        values, leave = [q, k, v], None
    else:
        values, leave = _placed(q, k, v, layout, keys_layout), attrgetter("local")
        layout = keys_layout = None
    check(*values)
    _check_layout("q", values[0], layout)
    _check_layout("k", values[1], keys_layout)
    return Operands(*values, leave)  # type: ignore[arg-type]  # all of them sharded: check


@case_of("attention")
def attention_case(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask | None = None,
    biased: bool = False,
) -> AttentionCase:
    """Describe three operands as a case for the engines."""
    check(q, k, v)
    return case_of_values(q, k, v, as_mask(mask), biased)


def _placed(q: Any, k: Any, v: Any, layout: Any, keys_layout: Any) -> list[Tensor]:
    """Wrap local blocks as sharded values."""
    if layout is None:
        axis = next(iter(current_mesh().axes))
        why = "local blocks need their layout; a whole tensor is sharded first"
        fix = f"sl.ring_attention(*(sl.shard(t, sl.Ring({axis!r}, dim=2)) for t in (q, k, v)))"
        raise call_error(PlainTensor, why, "ring_attention", fix, q=q)
    mesh = q.mesh if type(q) is Stacked else current_mesh()
    out: list[Tensor] = []
    for x, asked in ((q, layout), (k, keys_layout), (v, keys_layout)):
        token = _token(asked, mesh)
        size = list(x.shape)
        size[2] *= mesh.axis_size(token.axes) if token.axes else 1
        out.append(
            ShardedTensor(
                unwrap(x), Place(Layout((Dim(), Dim(), token, Dim())), torch.Size(size), mesh)
            )
        )
    return out


def _token(layout: Any, mesh: Any) -> Dim:
    """Return the token of the sequence: dimension 2, or the only dimension a family splits."""
    fix = "sl.ring_attention(q, k, v, layout={})"
    found = as_layout(layout, "ring_attention", fix, shape=(1, 1, 1, 1), mesh=mesh)
    split = [d for d in found.dims if d.is_split]
    if isinstance(layout, LayoutFamily) and len(split) == 1:
        return split[0]
    return found.resolve(4).dims[2]


def _check_layout(name: str, x: Any, asked: Any) -> None:
    if asked is None:
        return
    dims, want = x.sharding.resolve(4).dims, _token(asked, x.mesh)
    if want != dims[2]:
        b, h, s, d = map(str, dims)
        raise ImplicitCommunication(
            f"{name}'s sequence is split {s}, not {want}",
            op="ring_attention",
            operands={name: typeof(x)},
            mesh=x.mesh,
            fix=f"sl.reshard({name}, {' '.join([b, h, str(want), d])!r})",
        )


# ---------------------------------------------------------------- checks


def check(q: Any, k: Any, v: Any) -> None:
    """Raise the first error of the operands' kinds, sizes or layouts."""
    _check_kinds(q, k, v)
    _check_sizes(q, k, v)
    _check_layouts(q, k, v)


def _about(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Return the fields that all these errors share."""
    operands = {n: typeof(t) for n, t in (("q", q), ("k", k), ("v", v))}
    return {"op": "ring_attention", "operands": operands, "mesh": q.mesh}


def _check_kinds(q: Any, k: Any, v: Any) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, ShardedTensor):
            fix = f"sl.shard({name}, {str(q.sharding)!r})"
            raise PlainTensor(
                f"{name} is a plain tensor and q is sharded", **_about(q, k, v), fix=fix
            )
        if len(t.padded_shape) != 4:
            raise RankMismatch(
                f"{name} has {len(t.padded_shape)} dimensions; attention takes [batch, heads, "
                "sequence, size]",
                **_about(q, k, v),
                fix=f"{name}[(None,) * {max(0, 4 - len(t.padded_shape))}]",
            )
        if t.sharding.partial:
            raise partial_escape("ring_attention", t)
    if not q.raw.dtype == k.raw.dtype == v.raw.dtype:
        fix = "sl.ring_attention(q, k.to(q.dtype), v.to(q.dtype))"
        raise ShardError("q, k and v have different dtypes", **_about(q, k, v), fix=fix)


def _check_sizes(q: Any, k: Any, v: Any) -> None:
    (b, h, _, d), (kb, g, t, kd), (vb, vg, vt, _) = (x.shape for x in (q, k, v))
    alike = b == kb == vb and (g, t) == (vg, vt) and d == kd
    if not alike or g == 0 or h % g:
        raise ShardError(
            "sizes do not fit: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] with g a divisor of "
            "h",
            **_about(q, k, v),
            fix="sl.ring_attention(q, q, q)",
        )


def _check_layouts(q: Any, k: Any, v: Any) -> None:
    mesh = q.mesh
    (qb, qh, qs, qd), (kb, kh, ks, kd), (vb, vh, vs, ve) = (
        t.sharding.resolve(4).dims for t in (q, k, v)
    )
    want = " ".join([str(qb), str(qh), str(ks), "."])
    whole = not (qd.is_split or kd.is_split or ve.is_split)
    if not whole or not (qb == kb == vb and qh == kh == vh and ks == vs):
        raise ImplicitCommunication(
            "batch and heads must be split alike, keys and values too, and the head size be whole",
            **_about(q, k, v),
            fix=f"sl.ring_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))",
        )
    grouped = qs.groups.parts or ks.groups.parts
    if grouped or (ks.is_split and ks.axes != qs.axes):
        raise ImplicitCommunication(
            f"the sequence of q is split {qs} and that of k {ks}: they must be split over the same "
            "axes",
            **_about(q, k, v),
            fix=f"sl.reshard(q, {want!r})",
        )
    n = math.prod(mesh.axes[a] for a in qh.axes)
    if (q.padded_shape[1] // n) % max(1, k.padded_shape[1] // n):
        raise ImplicitCommunication(
            "each rank's heads of queries must share its heads of keys",
            **_about(q, k, v),
            fix=f"sl.ring_attention(*(sl.reshard(t, '{qb} . {qs} .') for t in (q, k, v)))",
        )
