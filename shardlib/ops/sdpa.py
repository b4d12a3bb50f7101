"""Scaled dot product attention: local for a whole sequence, ring attention for a split one.

If there are fewer heads of keys than ranks, keys and values are whole and each rank slices the
heads that its queries use.
"""

import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import holds_values
from shardlib.errors import BadArgument, ImplicitCommunication, ShardError, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.layouts.dims import without_ones
from shardlib.mesh import Mesh, scope
from shardlib.ops.attention import ring_attention
from shardlib.ops.attention.kernels import on_paper
from shardlib.ops.attention.masks import Causal, Full
from shardlib.ops.elementwise import onto
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.recompute import once
from shardlib.tensor.gradients import vary
from shardlib.tensor.lifting import lift, lifted
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, blockwise, call_error, implements, local_call

_SDPA = binder(
    "sdpa(query: tensor, key: tensor, value: tensor, attn_mask: tensor = None, dropout_p: number = "
    "0.0, "
    "is_causal: bool = False, scale: number = None, enable_gqa: bool = False)"
)


@implements(F.scaled_dot_product_attention, takes="plain")
def scaled_dot_product_attention(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Attend over q, k, v [B, H, S, D]: B and H split alike, D whole, S whole or split in all.

    A split sequence goes to ``ring_attention``, and so does dropout, which is drawn by global
    position there.
    """
    given = _SDPA(*args, **kwargs)
    q, k, v = given.pop("query"), given.pop("key"), given.pop("value")
    q, k, v = lifted("scaled_dot_product_attention", q, k, v)
    mesh = q.mesh
    _check(q, k, v, given["dropout_p"], given["enable_gqa"])
    k, v = (_heads_of(q, t, given["enable_gqa"]) for t in (k, v))
    if len(q.dims) == 4 and (q.dims[2].is_split or given["dropout_p"]):
        return _round_a_ring(q, k, v, given)
    _check_local(q, k, v, given["dropout_p"])
    mask, deferred = given.pop("attn_mask", None), q.deferred | k.deferred | v.deferred
    if mask is not None:
        mask = lift(mask, mesh, "scaled_dot_product_attention")
        deferred = deferred.union(mask.deferred).difference(q.sharding.axes)
        given["attn_mask"] = _as_scores(mask, q, k, deferred)
    run = func
    if q.raw.is_meta and not holds_values(mesh):
        run = partial(on_paper, mesh.device_type)
    size = torch.Size((*q.padded_shape[:-1], v.padded_shape[-1]))
    place = Place(q.sharding, size, mesh, deferred=deferred)
    alike = len(args) == 3 and all(map(operator.is_, args, (q, k, v)))
    same = q.deferred == k.deferred == v.deferred == deferred
    if mask is None and alike and same and scope().call.region is None:
        return blockwise(func, args, kwargs, place, run)
    raws = tuple(
        vary(t.raw, mesh, deferred.difference(t.sharding.axes, t.deferred)) for t in (q, k, v)
    )
    return ShardedTensor(once(lambda: local_call(run, mesh, *raws, **given)), place)


Operands = tuple[ShardedTensor, ShardedTensor, ShardedTensor]


def _refused(error: type[ShardError], why: str, operands: Operands, fix: str = "") -> ShardError:
    q, k, v = operands
    return call_error(error, why, "scaled_dot_product_attention", fix, query=q, key=k, value=v)


def _check(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, dropout: float, grouped: bool
) -> None:
    """Refuse operands that torch does not take either."""
    given = q, k, v
    if len({t.dtype for t in given}) > 1 or not q.dtype.is_floating_point:
        why = "query, key and value have one dtype, which is floating point"
        raise _refused(BadArgument, why, given)
    sizes = [t.padded_shape for t in given]
    if min(map(len, sizes)) < 2 or sizes[0][-1] != sizes[1][-1] or sizes[1][-2] != sizes[2][-2]:
        why = "queries and keys have one size, keys and values one length"
        raise _refused(BadArgument, why, given)
    if not 0.0 <= dropout <= 1.0:
        why = f"dropout probability has to be between 0 and 1, but got {dropout}"
        raise _refused(BadArgument, why, given)
    _check_heads(given, sizes, grouped)


def _check_heads(given: Operands, sizes: list[torch.Size], grouped: bool) -> None:
    """Refuse heads of keys and values that the queries' heads do not share evenly."""
    heads, *others = (size[-3] if len(size) > 2 else 1 for size in sizes)
    shares = all(n and heads % n == 0 for n in others)
    if shares if grouped else len({heads, *others} - {1}) < 2:
        # a single head is broadcast
        return
    why = f"{heads} heads of queries, {others[0]} of keys and {others[1]} of values"
    if shares:
        fix = "F.scaled_dot_product_attention(q, k, v, enable_gqa=True)"
        raise _refused(BadArgument, why, given, fix)
    raise _refused(BadArgument, why + ", which do not share them out evenly", given)


def _check_local(q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, dropout: float) -> None:
    """Refuse operands whose blocks do not hold whole heads alike, and dropout of 3 dimensions."""
    batch, mesh = q.dims[:-2], q.mesh
    for t in (q, k, v):
        cut = any(mesh.axes[a] > 1 for d in t.dims[-2:] for a in d.axes)
        mine = t.dims[:-2]
        if cut or (mine != batch and _apart(mine, mesh) != _apart(batch, mesh)):
            want = " ".join([*map(str, batch), ".", "."])
            why = (
                "attention is local where batch and heads are split alike and sequence and head "
                "size are whole"
            )
            fix = f"F.scaled_dot_product_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))"
            raise _refused(ImplicitCommunication, why, (q, k, v), fix)
    if dropout:
        why = "dropout of the probabilities takes [batch, heads, sequence, size]"
        rows = "q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)"
        fix = f"F.scaled_dot_product_attention({rows}, dropout_p=0.1)"
        raise _refused(Unsupported, why, (q, k, v), fix)


def _as_scores(
    mask: ShardedTensor, q: ShardedTensor, k: ShardedTensor, deferred: frozenset[str]
) -> Tensor:
    """Return the mask's block that fits a block of the scores."""
    scores = torch.Size((*q.padded_shape[:-1], k.padded_shape[-2]))
    place = Place(Layout(dims=(*q.dims[:-1], Dim())), scores, q.mesh, deferred=deferred)
    like = ShardedTensor(q.raw[..., :1], place)
    return onto("scaled_dot_product_attention", [like, mask])[1]


def _apart(dims: tuple[Dim, ...], mesh: Mesh) -> list[Dim]:
    """Return the dimensions' splits without axes of one rank."""
    return [without_ones(d, mesh.axes) for d in dims]


def _round_a_ring(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, given: dict[str, Any]
) -> ShardedTensor:
    """Call ``ring_attention`` with F.scaled_dot_product_attention's arguments (mask as bias)."""
    heads = [t.padded_shape[1] for t in (q, k, v)]
    if heads[1] != heads[2] or heads[0] < heads[1]:
        # ring_attention only groups heads of queries
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
        # split otherwise than the queries: refused or gathered later
        return t
    if q.padded_shape[-3] != t.padded_shape[-3]:
        if not grouped:
            return t
        t = t.repeat_interleave(q.padded_shape[-3] // t.padded_shape[-3], -3)  # type: ignore[assignment]
    return reshard(t, Layout(dims=(*theirs[:-3], mine[-3], *theirs[-2:])))
