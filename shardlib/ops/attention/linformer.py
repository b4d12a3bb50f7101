"""Linformer over a split sequence: keys and values projected from t positions to r, then whole.

Each rank projects its own positions and one psum adds the projections; attention is then local.
The bytes moved, and a rank's scores [b, h, s / p, r], do not grow with the sequence.

Source: Wang et al., arXiv 2006.04768; with a split sequence, Li et al., arXiv 2105.13120, section
        3.3.
"""

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
    projected = [
        _projected(w, x) for w, x in ((keys, k), (values if values is not None else keys, v))
    ]
    mesh, axes = k.mesh, k.sharding.resolve(4).dims[2].axes
    # one psum for keys and values
    both = total(local_call(torch.cat, mesh, (projected, -1), {}), mesh, axes)
    d, dims = k.padded_shape[3], k.sharding.resolve(4).dims
    layout = Layout((*dims[:2], Dim(), Dim()))
    whole = ShardedTensor(
        both,
        Place(
            layout,
            torch.Size((*k.padded_shape[:2], keys.shape[0], d + v.padded_shape[3])),
            mesh,
            deferred=k.deferred,
        ),
    )
    return ring_attention(q, whole[..., :d], whole[..., d:], dropout=dropout, scale=scale)


def _projected(w: Tensor, x: ShardedTensor) -> Tensor:
    """Compute this rank's part of w x: raw [b, g, r, d]."""
    t = x.shape[2]
    if w.ndim != 2 or w.shape[1] != t:
        why = f"a projection is [r, {t}], not {list(w.shape)}"
        fix = f"torch.randn(64, {t})"
        raise call_error(ShardError, why, "linformer_attention", fix, projection=w, projected=x)
    token, room = x.sharding.resolve(4).dims[2], x.padded_shape[2]
    x = filled(x, 0)
    w = w if isinstance(w, ShardedTensor) else replicated(F.pad(w, (0, room - t)), x.mesh)
    w = reshard(w, Layout((Dim(), token)))
    met = vary(
        w.raw, x.mesh, {*x.sharding.axes, *x.deferred}.difference(w.sharding.axes, w.deferred)
    )
    return local_call(torch.matmul, x.mesh, (met, x.raw), {})
