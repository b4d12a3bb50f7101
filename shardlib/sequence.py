"""A batch of sequences, ready for a split sequence: labels shifted before anything is cut."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.layouts import Layout, LayoutLike, as_layout
from shardlib.layouts.dims import axis_sizes
from shardlib.layouts.fit import check_axes
from shardlib.mesh import MeshLike, as_mesh
from shardlib.placing import shard
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["shard_sequence"]


@overload
def shard_sequence(
    batch: Tensor,
    layout: LayoutLike,
    *,
    mesh: MeshLike | None = None,
    labels: str = "labels",
    documents: Sequence[int] | None = None,
    fill: int = 0,
    ignore_index: int = -100,
) -> tuple[ShardedTensor, ShardedTensor]: ...
@overload
def shard_sequence(
    batch: Mapping[str, Tensor],
    layout: LayoutLike,
    *,
    mesh: MeshLike | None = None,
    labels: str = "labels",
    documents: Sequence[int] | None = None,
    fill: int = 0,
    ignore_index: int = -100,
) -> dict[str, ShardedTensor]: ...
def shard_sequence(
    batch: Tensor | Mapping[str, Tensor],
    layout: LayoutLike,
    *,
    mesh: MeshLike | None = None,
    labels: str = "labels",
    documents: Sequence[int] | None = None,
    fill: int = 0,
    ignore_index: int = -100,
) -> tuple[ShardedTensor, ShardedTensor] | dict[str, ShardedTensor]:
    """Shift the labels by one, then split every tensor of a batch [batch, sequence, ...].

    Each is split as ``layout`` says.

    ``batch``      token ids [B, S]: gives (inputs, targets), the targets being the next ids; or a
                   dict of tensors, in which what is under ``labels`` is shifted and all else is
                   only split.
    ``layout``     of the sequence: ``Ring("s", schedule="zigzag")``,
                   or of [B, S]: ``recipe.tokens``.
    ``documents``  borders (0, 5, 9): the last token of a document predicts nothing.
    Lengths that do not divide are filled up: tokens with ``fill``, targets with ``ignore_index``;
    under a causal mask nothing looks at what was filled in.  Shifted after the split, each rank's
    last label would be lost.

    >>> import shardlib as sl
    >>> with sl.simulate(s=2):
    ...     ids, targets = shard_sequence(torch.arange(1, 8)[None], sl.Ring("s", schedule="zigzag"))
    ...     ids
    ...     sl.unshard(targets)
    ShardedTensor(i64[1, 8@zigzag(s)] on s=2
    s=0: tensor([[1, 2, 7, 0]])
    s=1: tensor([[3, 4, 5, 6]]))
    tensor([[   2,    3,    4,    5,    6,    7, -100, -100]])
    """
    if isinstance(batch, Tensor):
        named = {"ids": batch, labels: batch}
        out = _split(named, layout, mesh, labels, documents, fill, ignore_index)
        return out["ids"], out[labels]
    return _split(batch, layout, mesh, labels, documents, fill, ignore_index)


def _split(
    batch: Mapping[str, Tensor],
    layout: Any,
    mesh: Any,
    labels: str,
    documents: Any,
    fill: int,
    ignore_index: int,
) -> dict[str, ShardedTensor]:
    m = as_mesh(mesh)
    lengths = {x.shape[1] for x in batch.values() if x.ndim > 1}
    if len(lengths) != 1 or any(x.ndim < 2 for x in batch.values()):
        raise ShardError(
            "every tensor of a batch is [batch, sequence, ...], of one length",
            op="shard_sequence",
            operands={n: typeof(x) for n, x in batch.items()},
            mesh=m,
            fix="sl.shard_sequence({'input_ids': ids, 'labels': ids}, layout)",
        )
    (length,) = lengths
    if documents is not None and (list(documents)[:1] != [0] or list(documents)[-1] != length):
        raise ShardError(
            f"borders of documents run from 0 to {length}, not {tuple(documents)}",
            op="shard_sequence",
            mesh=m,
            fix=f"sl.shard_sequence(batch, layout, documents=(0, {length}))",
        )
    lay = as_layout(layout, "shard_sequence", "layout = {}", shape=(1, length))
    check_axes(lay.axes, axis_sizes(m), str(lay), "shard_sequence")
    token = lay.resolve(2).dims[1]
    room = Layout((token,)).local_shape((length,), axis_sizes(m), pad=True)[0] * m.axis_size(
        token.axes or ()
    )
    out = {}
    for name, x in batch.items():
        filler = fill
        if name == labels:
            x, filler = F.pad(x[:, 1:], (0, 1), value=ignore_index), ignore_index
            for border in list(documents or ())[1:]:
                x[:, border - 1] = ignore_index
        x = torch.cat([x, x.new_full((x.shape[0], room - length, *x.shape[2:]), filler)], 1)
        out[name] = shard(
            x, Layout(lay.resolve(2).dims, ellipsis=2) if x.ndim > 2 else lay.resolve(2), m
        )
    return out
