"""Batches of sequences: documents packed into rows, labels shifted before the split."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import BadArgument, ShardError
from shardlib.layouts import Layout, LayoutLike, as_layout
from shardlib.layouts.dims import check_axes
from shardlib.mesh import Mesh, MeshLike, as_mesh
from shardlib.placing import shard
from shardlib.tensor import ShardedTensor, typeof


class _SequenceOptions(TypedDict, total=False):
    """Arguments on which the type of the result does not depend."""

    mesh: MeshLike | None
    labels: str
    documents: Sequence[int] | None
    fill: int
    ignore_index: int


@overload
def shard_sequence(
    batch: Tensor, layout: LayoutLike, **how: Unpack[_SequenceOptions]
) -> tuple[ShardedTensor, ShardedTensor]: ...
@overload
def shard_sequence(
    batch: Mapping[str, Tensor], layout: LayoutLike, **how: Unpack[_SequenceOptions]
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

    Each is split by ``layout``.

    ``batch``      token ids [B, S]: returns (inputs, targets), the targets being the next ids; or
                   a dict of tensors, of which the one under ``labels`` is shifted and the others
                   are only split.
    ``layout``     of the sequence: ``Ring("s", schedule="zigzag")``,
                   or of [B, S]: ``recipe.tokens``.
    ``documents``  borders (0, 5, 9): the last token of a document predicts nothing.
    Lengths that do not divide are filled up: tokens with ``fill``, targets with ``ignore_index``;
    under a causal mask no token attends to the filling.  If the labels were shifted after the
    split, the last label of each rank would be lost.

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
    named = {"ids": batch, labels: batch} if isinstance(batch, Tensor) else batch
    m = as_mesh(mesh)
    length = _length(named, documents, m)
    lay = as_layout(layout, "shard_sequence", "layout = {}", shape=(1, length), mesh=m)
    check_axes(lay.axes, m, str(lay), "shard_sequence")
    rows = lay.resolve(2)
    token = rows.dims[1]
    block = Layout((token,)).local_shape((length,), m, pad=True)[0]
    room = block * m.axis_size(token.axes or ())
    out = {}
    for name, x in named.items():
        filler = fill
        if name == labels:
            filler = ignore_index
            x = F.pad(x[:, 1:], (0, 1), value=ignore_index)
            # the last token of a document must not predict the first of the next
            for border in list(documents or ())[1:]:
                x[:, border - 1] = ignore_index
        x = torch.cat([x, x.new_full((x.shape[0], room - length, *x.shape[2:]), filler)], 1)
        out[name] = shard(x, Layout(rows.dims, ellipsis=2) if x.ndim > 2 else rows, m)
    return (out["ids"], out[labels]) if isinstance(batch, Tensor) else out


def pack(
    documents: Iterable[Tensor | Sequence[int]],
    length: int,
    *,
    fill: int = 0,
    ignore_index: int = -100,
) -> list[dict[str, Tensor]]:
    """Pack documents of token numbers into rows of one length: a dataset for ``sl.data``.

    Each row is {"input_ids", "labels", "position_ids"}, int64 [length]: labels are the next tokens
    of the same document; positions restart at 0 in each, by which a decoder of transformers keeps
    documents apart where it has no mask and no cache.  Longer documents are cut.  The rest of a
    row has ``fill``, with labels ``ignore_index``.  Documents are packed best-fit, longest first:
    each into the fullest row that has room.

    >>> pack([[1, 2, 3], [4, 5], [6]], 4)[0]["input_ids"]
    tensor([1, 2, 3, 6])
    >>> pack([[1, 2, 3], [4, 5], [6]], 4)[0]["labels"]
    tensor([   2,    3, -100, -100])
    """
    if length < 1:
        raise BadArgument(
            f"rows of {length} tokens hold nothing", op="pack", fix="sl.pack(documents, 1024)"
        )
    numbers = (torch.as_tensor(d, dtype=torch.int64).flatten() for d in documents)
    pieces = sorted((x for d in numbers for x in d.split(length)), key=len, reverse=True)
    rows: list[list[Tensor]] = []
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    for piece in filter(len, pieces):
        at = bisect.bisect_left(room, (len(piece), -1))
        free, row = room.pop(at) if at < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(piece)
        bisect.insort(room, (free - len(piece), row))
    left = {row: free for free, row in room}
    return [_row(row, left[i], fill, ignore_index) for i, row in enumerate(rows)]


def _row(pieces: Sequence[Tensor], left: int, fill: int, ignore_index: int) -> dict[str, Tensor]:
    filler = torch.full((left,), fill, device="cpu")
    ends = torch.tensor([ignore_index], device="cpu")
    labels = [torch.cat([x[1:], ends]) for x in pieces] + [
        torch.full((left,), ignore_index, device="cpu")
    ]
    return {
        "input_ids": torch.cat([*pieces, filler]),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(x), device="cpu") for x in (*pieces, filler)]),
    }


def _length(batch: Mapping[str, Tensor], documents: Sequence[int] | None, m: Mesh) -> int:
    """Return the one length of the tensors [batch, sequence, ...], which the documents fill."""
    lengths = {x.shape[1] if x.ndim > 1 else -1 for x in batch.values()}
    if len(lengths) != 1 or -1 in lengths:
        why = "every tensor of a batch is [batch, sequence, ...], of one length"
        given = {n: typeof(x) for n, x in batch.items()}
        fix = "sl.shard_sequence({'input_ids': ids, 'labels': ids}, layout)"
        raise ShardError(why, op="shard_sequence", operands=given, mesh=m, fix=fix)
    (length,) = lengths
    if documents is not None and (list(documents)[:1] != [0] or list(documents)[-1] != length):
        why = f"borders of documents run from 0 to {length}, not {tuple(documents)}"
        fix = f"sl.shard_sequence(batch, layout, documents=(0, {length}))"
        raise ShardError(why, op="shard_sequence", mesh=m, fix=fix)
    return length
