"""Sharded tensors in torch.distributed.checkpoint: ``dcp.save`` and ``dcp.load`` take them.

DCP calls three methods of a tensor subclass to get the boxes of the global tensor that it holds.
Its planners, file format and readers and writers of Hugging Face directories therefore work with
every layout whose runs are contiguous, also padded, and with simulated ranks.  The methods are
those of ``torch.distributed._checkpointable._Checkpointable``, which DTensor implements too, in
torch 2.11 to 2.15.  If they are removed: ``sl.dtensor.to_dtensor`` before each call.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.checkpoint.boxes import Box, chunk, shares, size
from shardlib.checkpoint.tree import blocks, place_of
from shardlib.errors import Unsupported
from shardlib.tensor import ShardedTensor, partial_escape, typeof


class _ContiguousBox(NamedTuple):
    """A contiguous box of the global tensor, and the view of the block that holds it."""

    offset: torch.Size
    sizes: torch.Size
    view: Tensor


def _pieces(x: ShardedTensor, box: Box, block: Tensor) -> list[_ContiguousBox]:
    if any(r.stride > 1 for held in box for r in held):
        text = (
            "torch.distributed.checkpoint knows boxes without gaps, and here every other position "
            "lies on another rank"
        )
        fix = f"sl.reshard(x, {' '.join('.' * x.ndim)!r})"
        raise Unsupported(text, op="dcp", operands={"tensor": typeof(x)}, mesh=x.mesh, fix=fix)
    return [
        _ContiguousBox(
            torch.Size(r.start for r in runs),
            torch.Size(r.length for r in runs),
            block[tuple(slice(r.at, r.at + r.length) for r in runs)],
        )
        for runs in itertools.product(*box)
    ]


def _held(x: ShardedTensor) -> list[_ContiguousBox]:
    """List the pieces held here, divided as their holders write them."""
    place = place_of(x, 1)
    return [
        piece
        for rank, block in blocks(x, 0)
        for box in shares(place, rank)
        for piece in _pieces(x, box, block)
    ]


def _write_items(self: ShardedTensor, fqn: str, object: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if self.sharding.partial:
        raise partial_escape("dcp.save", self)
    place, found = place_of(self, 1), []
    for rank, block in blocks(self, 0):
        box = chunk(fqn, place, rank)
        if box is not None and size(box):
            found += _pieces(self, box, block)
        elif box is not None:
            found.append(_ContiguousBox(torch.Size([0] * self.ndim), self.shape, block))
    out = []
    for piece in found:
        there = ChunkStorageMetadata(offsets=piece.offset, sizes=piece.sizes)
        properties = TensorProperties(dtype=self.dtype)
        about = TensorWriteData(chunk=there, properties=properties, size=self.shape)
        index = MetadataIndex(fqn, piece.offset)
        out.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about))
    return out


def _chunk_list(self: ShardedTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=p.offset, sizes=p.sizes) for p in _held(self)]


def _tensor_shard(self: ShardedTensor, index: Any) -> Tensor:
    """Return a view, which DCP fills."""
    found = _held(self)
    hint = index.index
    if hint is not None and 0 <= hint < len(found) and found[hint].offset == index.offset:
        return found[hint].view
    for piece in found:
        if piece.offset == index.offset:
            return piece.view
    if not self.numel():
        return self.raw.detach().reshape(self.shape)
    raise ValueError(f"{index.fqn!r} has nothing at {tuple(index.offset)} here")


ShardedTensor.__create_write_items__ = _write_items  # type: ignore[attr-defined]
ShardedTensor.__create_chunk_list__ = _chunk_list  # type: ignore[attr-defined]
ShardedTensor.__get_tensor_shard__ = _tensor_shard  # type: ignore[attr-defined]
