"""Transfers of a step, posted in one call; each is waited for where it is used."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardlib.collectives import Pending, start_ppermutes, unwrap, wrap
from shardlib.mesh import bind
from shardlib.ops.attention.chunks import Pairs
from shardlib.ops.attention.engine import AttentionJob

__all__ = ["Coming", "Key", "Leaving", "send"]

Key = tuple[str, int, int]
"""(kind of block, index of its chunk, step at which it arrives)"""

Coming = dict[Key, Callable[[], Tensor]]
"""Transfers under way; calling a value waits for its block."""


class Leaving(NamedTuple):
    """Storage to be sent, with its (source, destination) pairs."""

    key: Key
    raw: Tensor
    pairs: Pairs


def send(job: AttentionJob, leaving: Sequence[Leaving]) -> Coming:
    """Post transfers over the ring as one call; a rank that receives nothing gets zeros.

    Those without pairs are left out.
    """
    moving = [item for item in leaving if item.pairs]
    with bind(job.mesh):
        blocks = [wrap(item.raw, job.mesh) for item in moving]
        pending = (
            start_ppermutes(blocks, job.axes, [item.pairs for item in moving]) if moving else []
        )
    return {item.key: _BlockTransfer(p, item.raw) for item, p in zip(moving, pending, strict=True)}


class _BlockTransfer:
    """Transfer under way; keeps the sent block alive until the wait, since the network reads it."""

    def __init__(self, pending: Pending, sent: Tensor) -> None:
        self.pending, self.sent = pending, sent

    def __call__(self) -> Tensor:
        return unwrap(self.pending.wait())
