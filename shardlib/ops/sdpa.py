"""Scaled dot product attention: local for a whole sequence, ring attention for a split one.

If there are fewer heads of keys than ranks, keys and values are whole and each rank slices the
heads that its queries use.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F

from shardlib.collectives import holds_values
from shardlib.errors import BadArgument, ImplicitCommunication, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, scope
from shardlib.ops.attention import ring_attention
from shardlib.ops.attention.kernels import on_paper
from shardlib.ops.attention.masks import Causal, Full
from shardlib.ops.elementwise import onto
from shardlib.ops.signatures import binder
from shardlib.placing import reshard
from shardlib.recompute import once
from shardlib.tensor import (
    Place,
    ShardedTensor,
    blockwise,
    implements,
    lift,
    local_call,
    partial_escape,
    typeof,
    vary,
)

__all__ = ["scaled_dot_product_attention"]


_SDPA = binder(
    "sdpa(query: tensor, key: tensor, value: tensor, attn_mask: tensor = None, dropout_p: number = "
    "0.0, "
    "is_causal: bool = False, scale: number = None, enable_gqa: bool = False)"
)


@implements(F.scaled_dot_product_attention, repeats=True)
def scaled_dot_product_attention(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Attend over q, k, v [B, H, S, D]: B and H split alike, D whole, S whole or split in all.

    A split sequence goes to ``ring_attention``, and so does dropout, which is drawn by global
    position there.
    """
    given = _SDPA(*args, **kwargs)
    q, k, v = given.pop("query"), given.pop("key"), given.pop("value")
    mesh = next(t.mesh for t in (q, k, v) if isinstance(t, ShardedTensor))
    q, k, v = (lift(t, mesh, "scaled_dot_product_attention") for t in (q, k, v))
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.dtype.is_floating_point:
        raise BadArgument(
            "query, key and value have one dtype, which is floating point",
            op="scaled_dot_product_attention",
            operands=_named(q, k, v),
            mesh=mesh,
        )
    if (
        min(len(t.padded_shape) for t in (q, k, v)) < 2
        or q.padded_shape[-1] != k.padded_shape[-1]
        or k.padded_shape[-2] != v.padded_shape[-2]
    ):
        raise BadArgument(
            "queries and keys have one size, keys and values one length",
            op="scaled_dot_product_attention",
            operands=_named(q, k, v),
            mesh=mesh,
        )
    if not 0.0 <= given["dropout_p"] <= 1.0:
        raise BadArgument(
            f"dropout probability has to be between 0 and 1, but got {given['dropout_p']}",
            op="scaled_dot_product_attention",
            operands=_named(q, k, v),
            mesh=mesh,
        )
    _check_heads(q, k, v, given["enable_gqa"])
    tokens = q.dims
    k, v = (_heads_of(q, t, given["enable_gqa"]) for t in (k, v))
    if len(tokens) == 4 and (tokens[2].is_split or given["dropout_p"]):
        return _round_a_ring(q, k, v, given)
    for t in (q, k, v):
        if t.sharding.partial:
            raise partial_escape("scaled_dot_product_attention", t)
        dims = t.dims
        cut = any(mesh.axes[a] > 1 for d in dims[-2:] for a in d.axes)
        if cut or (
            dims[:-2] != tokens[:-2] and _apart(dims[:-2], mesh) != _apart(tokens[:-2], mesh)
        ):
            want = " ".join([*(str(d) for d in tokens[:-2]), ".", "."])
            raise ImplicitCommunication(
                "attention is local where batch and heads are split alike and sequence and head "
                "size are whole",
                op="scaled_dot_product_attention",
                operands=_named(q, k, v),
                mesh=mesh,
                fix="F.scaled_dot_product_attention"
                f"(*(sl.reshard(t, {want!r}) for t in (q, k, v)))",
            )
    if given["dropout_p"]:
        raise Unsupported(
            "dropout of the probabilities takes [batch, heads, sequence, size]",
            op="scaled_dot_product_attention",
            operands=_named(q, k, v),
            mesh=mesh,
            fix="F.scaled_dot_product_attention"
            "(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), dropout_p=0.1)",
        )
    mask, deferred = given.pop("attn_mask", None), q.deferred | k.deferred | v.deferred
    if mask is not None:
        mask = lift(mask, mesh, "scaled_dot_product_attention")
        if mask.sharding.partial:
            raise partial_escape("scaled_dot_product_attention", mask)
        deferred = deferred.union(mask.deferred).difference(q.sharding.axes)
        scores = torch.Size((*q.padded_shape[:-1], k.padded_shape[-2]))
        lies = Place(Layout(dims=(*tokens[:-1], Dim())), scores, mesh, deferred=deferred)
        frame = ShardedTensor(q.raw[..., :1], lies)
        given["attn_mask"] = onto(mask, frame, "scaled_dot_product_attention")
    run = on_paper if q.raw.is_meta and not holds_values(mesh) else func
    size = torch.Size((*q.padded_shape[:-1], v.padded_shape[-1]))
    place = Place(q.sharding, size, mesh, deferred=deferred)
    alike = len(args) == 3 and all(map(operator.is_, args, (q, k, v)))
    same = q.deferred == k.deferred == v.deferred == deferred
    if mask is None and alike and same and scope().call.region is None:
        return blockwise(func, args, kwargs, place, run)
    raws = tuple(
        vary(t.raw, mesh, deferred.difference(t.sharding.axes, t.deferred)) for t in (q, k, v)
    )
    raw = once(lambda: local_call(run, mesh, raws, given))
    return ShardedTensor(raw, place)


def _apart(dims: tuple[Dim, ...], mesh: Mesh) -> list[Dim]:
    """Return the dimensions' splits without axes of one rank."""
    found = [
        Dim(tuple(p for p in d.parts if isinstance(p, int) or mesh.axes[p] > 1), d.order)
        for d in dims
    ]
    return [d if d.axes else Dim() for d in found]


def _check_heads(q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, grouped: bool) -> None:
    """Refuse numbers of heads that torch cannot broadcast or group."""
    heads, *others = (t.padded_shape[-3] if len(t.padded_shape) > 2 else 1 for t in (q, k, v))
    shares = all(n and heads % n == 0 for n in others)
    if shares if grouped else len({heads, *others} - {1}) < 2:  # a single head is broadcast
        return
    raise BadArgument(
        f"{heads} heads of queries, {others[0]} of keys and {others[1]} of values"
        + ("" if shares else ", which do not share them out evenly"),
        op="scaled_dot_product_attention",
        operands=_named(q, k, v),
        mesh=q.mesh,
        fix="F.scaled_dot_product_attention(q, k, v, enable_gqa=True)" if shares else "",
    )


def _named(q: ShardedTensor, k: ShardedTensor, v: ShardedTensor) -> dict[str, str]:
    return {"query": typeof(q), "key": typeof(k), "value": typeof(v)}


def _round_a_ring(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, given: dict[str, Any]
) -> ShardedTensor:
    """Call ``ring_attention`` with F.scaled_dot_product_attention's arguments (mask as bias)."""
    heads = [t.padded_shape[1] for t in (q, k, v)]
    if heads[1] != heads[2] or heads[0] < heads[1]:  # ring_attention only groups heads of queries
        q, k, v = (
            t.repeat_interleave(max(heads) // n, 1) if n < max(heads) else t
            for t, n in zip((q, k, v), heads, strict=True)
        )  # type: ignore[assignment]
    mask, bias = Causal() if given.get("is_causal") else Full(), given.get("attn_mask")
    if bias is not None and len(bias.shape) < 2:
        bias = bias.reshape(*[1] * (2 - len(bias.shape)), *bias.shape)
    dropout = given.get("dropout_p", 0.0)
    return ring_attention(q, k, v, mask=mask, bias=bias, dropout=dropout, scale=given.get("scale"))


def _heads_of(q: ShardedTensor, t: ShardedTensor, grouped: bool) -> ShardedTensor:
    """Slice keys or values with unsplit heads to the heads of the queries; nothing moves."""
    ndim = len(q.padded_shape)
    mine, theirs = q.sharding.resolve(ndim).dims, t.dims
    if (
        len(theirs) != ndim
        or ndim < 3
        or theirs[-3].is_split
        or not mine[-3].is_split
        or t.sharding.partial
    ):
        return t
    if set(mine[-3].axes) & set(t.sharding.axes):
        return t  # split otherwise than the queries: refused or gathered later
    if q.padded_shape[-3] != t.padded_shape[-3]:
        if not grouped:
            return t
        t = t.repeat_interleave(q.padded_shape[-3] // t.padded_shape[-3], -3)  # type: ignore[assignment]
    return reshard(t, Layout(dims=(*theirs[:-3], mine[-3], *theirs[-2:])))
