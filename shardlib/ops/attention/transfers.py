"""Posting the transfers of a step in one call, and waiting for each where it is used."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shardlib.collectives import Pending, start_ppermutes, unwrap, wrap
from shardlib.mesh import bind
from shardlib.ops.attention.chunks import Pairs
from shardlib.ops.attention.engine import Job

__all__ = ["Coming", "Key", "Leaving", "send"]

Key = tuple[str, int, int]
"""(what travels, which chunk, the step at which it arrives)"""

Coming = dict[Key, Callable[[], Tensor]]
"""Call one to wait for it."""


class Leaving(NamedTuple):
    """A storage that is sent, and the (source, destination) pairs."""

    key: Key
    raw: Tensor
    pairs: Pairs


def send(job: Job, leaving: Sequence[Leaving]) -> Coming:
    """Post transfers over the ring as one call; a rank that nobody sends to gets zeros.

    Those without pairs are left out.
    """
    moving = [item for item in leaving if item.pairs]
    with bind(job.mesh):
        blocks = [wrap(item.raw, job.mesh) for item in moving]
        pending = (
            start_ppermutes(blocks, job.axes, [item.pairs for item in moving]) if moving else []
        )
    return {item.key: _Posted(p, item.raw) for item, p in zip(moving, pending, strict=True)}


class _Posted:
    """A transfer under way; holds what is sent until it is waited for, as the network does."""

    def __init__(self, pending: Pending, sent: Tensor) -> None:
        self.pending, self.sent = pending, sent

    def __call__(self) -> Tensor:
        return unwrap(self.pending.wait())
