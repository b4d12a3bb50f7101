"""Bias and sink of attention, resharded like the scores of this rank's queries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.ops.elementwise import aligned
from shardlib.tensor import ShardedTensor, call_error, replicated

__all__ = ["bias_and_sink"]


def bias_and_sink(
    q: ShardedTensor, k: ShardedTensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the bias and the sink, where given, as raw blocks in the layout of the scores."""
    return None if bias is None else _bias(q, k, bias), None if sink is None else _sink(q, sink)


def _bias(q: ShardedTensor, k: ShardedTensor, bias: Tensor) -> Tensor:
    """Align a bias [.., s, t] with this rank's queries, all keys: [b or 1, h or 1, lq or 1, t]."""
    s, t = q.shape[2], k.shape[2]
    fits = 2 <= bias.ndim <= 4 and bias.shape[-2] in (1, s) and bias.shape[-1] in (1, t)
    if not fits:
        why = f"a bias is [.., {s}, {t}], broadcast over batch and heads, not {list(bias.shape)}"
        fix = f"sl.ring_attention(q, k, v, bias=torch.zeros({s}, {t}))"
        raise call_error(ShardError, why, "ring_attention", fix, q=q, k=k, bias=bias)
    if not isinstance(bias, ShardedTensor):
        if bias.shape[-2] not in (1, q.padded_shape[2]):
            bias = F.pad(bias, (0, 0, 0, q.padded_shape[2] - s))
        bias = replicated(bias, q.mesh)
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    (_, raw), *_ = aligned("ring_attention", [_scores(q, max(t, 2)), bias])  # type: ignore[list-item]
    return raw


def _sink(q: ShardedTensor, sink: Tensor) -> Tensor:
    """Align one score per local head: [1, h, 1], behind a dimension of ranks under simulate."""
    h = q.padded_shape[1]
    if tuple(sink.shape) != (h,):
        why = f"a sink is one score for each of {h} heads, not {list(sink.shape)}"
        fix = f"sl.ring_attention(q, k, v, sink=torch.zeros({h}))"
        raise call_error(ShardError, why, "ring_attention", fix, q=q, sink=sink)
    sink = sink if isinstance(sink, ShardedTensor) else replicated(sink, q.mesh)
    (_, raw), *_ = aligned("ring_attention", [_scores(q, 2), sink[:, None, None]])  # type: ignore[list-item]
    return raw.squeeze(-1).unsqueeze(-3)


def _scores(q: ShardedTensor, last: int) -> ShardedTensor:
    """Return a value with the layout of the scores [b, h, s, last]."""
    layout = Layout((*q.sharding.resolve(4).dims[:3], Dim()))
    return q.becomes(q.raw[..., :1], layout, torch.Size((*q.padded_shape[:3], last)))
