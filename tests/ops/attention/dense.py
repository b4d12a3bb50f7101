"""Attention on whole tensors, as its definition says: what everything here is compared with."""

import torch
from torch import Tensor

from shardlib.ops.attention.masks import At, Mask
from shardlib.ops.keyed import keep_mask


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: tuple[float, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse); dropout is (p, seed)."""
    (b, h, s, d), t = q.shape, k.shape[2]
    shared, at = h // k.shape[1], At(torch.arange(b), torch.arange(h))
    positions = torch.arange(s), torch.arange(t)
    scores = q @ k.repeat_interleave(shared, 1).mT * d**-0.5
    added, allowed = mask.scores(*positions, at), mask.allowed(*positions, at)
    scores = scores if added is None else scores + added.to(scores.dtype)
    scores = scores if bias is None or bias.dtype == torch.bool else scores + bias
    scores = scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))
    scores = scores.masked_fill(~bias, float("-inf")) if bias is not None and bias.dtype == torch.bool else scores
    empty = (scores == float("-inf")).all(-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty, float("-inf"))
    lse = lse if sink is None else torch.logaddexp(lse, sink[:, None])
    p = (scores - lse.masked_fill(empty, 0).unsqueeze(-1)).exp().masked_fill(empty.unsqueeze(-1), 0)
    if dropout is not None:
        p = p * keep_mask(torch.arange(b * h * s * t).view(b, h, s, t), dropout[1], dropout[0]) / (1 - dropout[0])
    return p @ v.repeat_interleave(shared, 1), lse
