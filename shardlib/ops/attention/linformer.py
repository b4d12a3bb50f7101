"""Linformer over a split sequence: keys and values projected from t positions to r, then whole.

Each rank projects its own positions and one psum adds the projections; attention is then local.
The bytes moved, and a rank's scores [b, h, s / p, r], do not grow with the sequence.

Source: Wang et al., arXiv 2006.04768; with a split sequence, Li et al., arXiv 2105.13120, section
        3.3.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.ops.attention.op import ring_attention
from shardlib.ops.padding import filled
from shardlib.placing import reshard
from shardlib.tensor.gradients import total, vary
from shardlib.tensor.lifting import replicated
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error, local_call


def linformer_attention(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    keys: Tensor,
    values: Tensor | None = None,
    *,
    dropout: float | None = None,
    scale: float | None = None,
) -> Any:
    """Compute softmax(q (E k)^T) (F v), which is linear in the sequence.

    E = ``keys`` [r, t] and F = ``values`` [r, t] (None: E).

    Shapes: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e].  E and F may be learned.
    Moves:  2 (p - 1) / p of b g r (d + e) elements forward, and again backward, for any s and t.

    >>> import shardlib as sl
    >>> q, e = torch.randn(1, 2, 8, 4), torch.randn(3, 8)
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(q, sl.Ring("s", dim=2))
    ...     out = sl.unshard(linformer_attention(x, x, x, e))
    >>> torch.allclose(out, F.scaled_dot_product_attention(q, e @ q, e @ q), atol=1e-6)
    True
    """
    given = [_aligned(w, x) for w, x in ((keys, k), (keys if values is None else values, v))]
    left = frozenset(a for pair in given for t in pair for a in t.deferred)
    # a sum that one operand leaves pending is left by all: those without it leave their part of it
    projected = []
    for w, x in given:
        blocks = tuple(_varied(t, {*x.sharding.axes, *left}) for t in (w, x))
        projected.append(local_call(torch.matmul, x.mesh, *blocks))
    mesh, dims = k.mesh, k.sharding.resolve(4).dims
    # one psum for keys and values
    both = total(local_call(torch.cat, mesh, projected, -1), mesh, dims[2].axes)
    d, e = k.padded_shape[3], v.padded_shape[3]
    size = torch.Size((*k.padded_shape[:2], keys.shape[0], d + e))
    layout = Layout((*dims[:2], Dim(), Dim()))
    place = Place(layout, size, mesh, deferred=left.difference(layout.axes))
    whole = ShardedTensor(both, place)
    return ring_attention(q, whole[..., :d], whole[..., d:], dropout=dropout, scale=scale)


def _aligned(w: Tensor, x: ShardedTensor) -> tuple[ShardedTensor, ShardedTensor]:
    """Return w split as the sequence of x, and x with zeros as padding."""
    t = x.shape[2]
    if w.ndim != 2 or w.shape[1] != t:
        why = f"a projection is [r, {t}], not {list(w.shape)}"
        fix = f"torch.randn(64, {t})"
        raise call_error(ShardError, why, "linformer_attention", fix, projection=w, projected=x)
    if not isinstance(w, ShardedTensor):
        w = replicated(F.pad(w, (0, x.padded_shape[2] - t)), x.mesh)
    return reshard(w, Layout((Dim(), x.sharding.resolve(4).dims[2]))), filled(x, 0)


def _varied(t: ShardedTensor, axes: Iterable[str]) -> Tensor:
    """Return the block, whose gradient is summed over those axes that it neither has nor leaves."""
    return vary(t.raw, t.mesh, {*axes}.difference(t.sharding.axes, t.deferred))
