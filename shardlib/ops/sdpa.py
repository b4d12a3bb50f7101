"""Scaled dot product attention with batch and heads split: local on every rank.

Where there are fewer heads of keys than ranks, keys and values are whole and each rank takes the
heads that its queries use.  Splitting the sequence needs a ring, which is another family of rules.
"""

from typing import Any

import torch
import torch.nn.functional as F

from shardlib.errors import ImplicitCommunication
from shardlib.layouts import Dim, Layout
from shardlib.ops.elementwise import aligned
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor, implements, lift, local_call, partial_escape, typeof

__all__ = ["scaled_dot_product_attention"]


@implements(F.scaled_dot_product_attention)
def scaled_dot_product_attention(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """q, k, v [B, H, S, D] with B and H split alike; S and D whole.

    Dropout inside the kernel would draw by rank: it is refused, use F.dropout on the output.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args, strict=False)) | kwargs
    q, k, v = given.pop("query"), given.pop("key"), given.pop("value")
    mesh = next(t.mesh for t in (q, k, v) if isinstance(t, ShardedTensor))
    q, k, v = (lift(t, mesh, "scaled_dot_product_attention") for t in (q, k, v))
    operands = {"query": typeof(q), "key": typeof(k), "value": typeof(v)}
    tokens = q.sharding.resolve(len(q.size_)).dims
    k, v = (_heads_of(q, t, given.get("enable_gqa", False)) for t in (k, v))
    for t in (q, k, v):
        if t.sharding.partial:
            raise partial_escape("scaled_dot_product_attention", t)
        dims = t.sharding.resolve(len(t.size_)).dims
        if dims[-1].is_split or dims[-2].is_split or dims[:-2] != tokens[:-2]:
            want = " ".join([*(str(d) for d in tokens[:-2]), ".", "."])
            raise ImplicitCommunication(
                "attention is local where batch and heads are split alike and sequence and head size are whole",
                op="scaled_dot_product_attention",
                operands=operands,
                mesh=mesh,
                fix=f"F.scaled_dot_product_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))",
            )
    if given.get("dropout_p", 0.0):
        raise ImplicitCommunication(
            "dropout inside attention would draw differently on every layout",
            op="scaled_dot_product_attention",
            operands=operands,
            mesh=mesh,
            fix="F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)",
        )
    mask = given.pop("attn_mask", None)
    if mask is not None:
        mask = lift(mask, mesh, "scaled_dot_product_attention")
        scores = torch.Size((*q.size_[:-1], k.size_[-2]))
        frame = ShardedTensor(q.raw[..., :1], Layout(dims=(*tokens[:-1], Dim())), scores, mesh)
        (_, given["attn_mask"]), *_ = aligned("scaled_dot_product_attention", [frame, mask])
    raw = local_call(func, mesh, (q.raw, k.raw, v.raw), given)
    deferred = q.deferred | k.deferred | v.deferred
    return ShardedTensor(raw, q.sharding, torch.Size((*q.size_[:-1], v.size_[-1])), mesh, deferred)


def _heads_of(q: ShardedTensor, t: ShardedTensor, grouped: bool) -> ShardedTensor:
    """Keys or values whose heads are whole, cut to the heads of the queries; nothing moves for that."""
    ndim = len(q.size_)
    mine, theirs = q.sharding.resolve(ndim).dims, t.sharding.resolve(len(t.size_)).dims
    if len(theirs) != ndim or ndim < 3 or theirs[-3].is_split or not mine[-3].is_split or t.sharding.partial:
        return t
    if q.size_[-3] != t.size_[-3]:
        if not grouped:
            return t
        t = t.repeat_interleave(q.size_[-3] // t.size_[-3], -3)  # type: ignore[assignment]
    return reshard(t, Layout(dims=(*theirs[:-3], mine[-3], *theirs[-2:])))
