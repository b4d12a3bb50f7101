"""Merging of partial attention outputs by log-sum-exp, and sums of gradients, as torch operators.

Both write in place and are not differentiable: attention's backward belongs to its engine.
"""

import torch
from torch import Tensor

from shardlib.kernels.active import native
from shardlib.kernels.library import CODES, call, code


def _strides(x: Tensor) -> list[int]:
    """Return the strides of sequences, heads and rows of [b, h, m, ...]."""
    return list(x.stride()[:3])


def mergeable(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Return whether the kernel takes these: fp32 lse, rows of any stride, dense columns."""
    if not (out.ndim == part.ndim == 4 and lse.ndim == part_lse.ndim == 3):
        return False
    if lse.dtype != torch.float32 or part_lse.dtype != torch.float32 or out.dtype not in CODES:
        return False
    if part.dtype != out.dtype and out.dtype != torch.float32:
        return False
    return out.stride(-1) == part.stride(-1) == 1 and native(out, part)


@torch.library.custom_op("shardlib::merge_", mutates_args=("out", "lse"))
def merge_(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, runs: Tensor | None = None
) -> None:
    """Merge a part [b, h, m, e] of attention, with its lse [b, h, m], into out and lse, in place.

    ``runs``  [n, 3] on their device, (from, to, count): ``count`` rows of the part starting at
              ``from`` are merged into the rows of out starting at ``to``; None: row by row.
    Rows that attended to no key (lse -inf) are not read, on either side.
    Source: Milakov and Gimelshein, arXiv 1805.02867 (online softmax).
    """
    if mergeable(out, lse, part, part_lse):
        many = 0 if runs is None else len(runs)
        strides = [n for x in (out, lse, part, part_lse) for n in _strides(x)]
        call(
            "merge", code(out), code(part), out, lse, part, part_lse, runs, many, *part.shape,
            strides,
        )  # fmt: skip
        return
    at = torch.arange(part.shape[2], device=out.device) if runs is None else _targets(runs)
    before, old = lse.index_select(2, at), out.index_select(2, at)
    both = torch.logaddexp(before, part_lse.to(lse.dtype))
    new = 0
    for value, weight in ((old, before), (part, part_lse.to(lse.dtype))):
        # -inf - -inf is NaN: a row without keys on both sides has share 0
        share = (weight - both).exp_().nan_to_num_(0.0).unsqueeze(-1)
        seen = value.to(lse.dtype).masked_fill((weight == -float("inf")).unsqueeze(-1), 0)
        new = new + seen * share
    out.index_copy_(2, at, new.to(out.dtype))
    lse.index_copy_(2, at, both)


def _targets(runs: Tensor) -> Tensor:
    """List the rows of out that receive the part's rows, in the part's order."""
    return torch.cat([torch.arange(to, to + n, device="cpu") for _, to, n in runs.tolist()]).to(
        runs.device
    )


@torch.library.custom_op("shardlib::accumulate_", mutates_args=("into",))
def accumulate_(into: Tensor, x: Tensor) -> None:
    """Add x [b, h, m, d], of any of the kernels' dtypes, to fp32 sums of its shape, in place."""
    taken = into.ndim == 4 and into.shape == x.shape and into.dtype == torch.float32
    taken = taken and into.stride(-1) == x.stride(-1) == 1
    if taken and native(into, x):
        call("add", code(x), into, x, *x.shape, [*_strides(into), *_strides(x)])
        return
    into += x
