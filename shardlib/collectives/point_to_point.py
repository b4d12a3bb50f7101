"""Messages from one rank of an axis to another: what crosses between the stages of a pipeline.

Between two ranks, messages arrive in the order in which they are sent.  Receives are therefore
posted in the order of the sender's program, which the receiver knows, and no transport needs tags
(NCCL has none).  Where one process runs all ranks, a message is handed over in memory.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives.posted import BITS, SENT
from shardlib.collectives.types import group, spans_processes
from shardlib.mesh import RECENT, Mesh, lost, number

Label = Hashable

_TAG = 1 << 21
"""Tag of all messages: gloo delivers messages of one tag in order, and others take smaller ones."""


class Message(NamedTuple):
    """A block that a rank sends to another: its label, and the block's shape and dtype.

    ``arrived``  the number of its receiver's messages that are at the sender by then.
    """

    label: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    arrived: int = 0


class Messages:
    """Messages of one program along an axis.

    ``coming``  rank on the axis -> the messages that it sends here, in its order.
    """

    def __init__(self, mesh: Mesh, axis: str, coming: Mapping[int, Iterator[Message]]) -> None:
        self.coming = coming
        self.group: Any = group(mesh, (axis,)) if spans_processes(mesh) else None
        self.device = mesh.device
        self.here: dict[Label, Tensor] = {}
        self.posted: dict[Label, tuple[int, Message, Any, Tensor, tuple[Any, ...]]] = {}
        # rank -> the number of messages to it so far, and those that may not have left, in order
        self.sent: Counter[int] = Counter()
        self.leaving: dict[int, deque[tuple[Label, int, Any, Tensor, Any]]] = defaultdict(deque)

    def send(self, label: Label, block: Tensor, to: int) -> None:
        """Post a message; the block is kept until it is known to have arrived, or ``finish``."""
        g = self.group
        if g is None or to == g.index:
            self.here[label] = block
            return
        block = block.contiguous()
        entry = self._recent("send", label, block)
        work = g.handle.send([_wire(block)], g.places[to], _TAG)
        self.sent[to] += 1
        self.leaving[to].append((label, self.sent[to], work, block, entry))

    def expect(self, label: Label, source: int) -> None:
        """Post the receive of a message, and those of its sender's messages before it."""
        g = self.group
        if g is None or source == g.index:
            return
        while label not in self.posted:
            message = next(self.coming[source])
            block = torch.empty(message.shape, dtype=message.dtype, device=self.device)
            work = g.handle.recv([_wire(block)], g.places[source], _TAG)
            entry = self._recent("receive", message.label, block)
            self.posted[message.label] = source, message, work, block, entry

    def take(self, label: Label) -> Tensor:
        """Wait for a message, and return its block.  Raises: RankFailed where its sender failed."""
        if label in self.here:
            # the receiver may write to its block in place
            return self.here.pop(label).clone()
        source, message, work, block, entry = self.posted.pop(label)
        self._wait(work, entry)
        self._release(source, message.arrived)
        return block

    def finish(self) -> None:
        """Wait until all blocks have left."""
        for rank, count in self.sent.items():
            self._release(rank, count)
        # the lists may refer to what owns these messages, whose memory would wait for the collector
        self.coming = {}

    def _release(self, to: int, count: int) -> None:
        """Release the blocks of the first messages to a rank, which have left or are about to."""
        leaving = self.leaving[to]
        while leaving and leaving[0][1] <= count:
            _, _, work, _, entry = leaving.popleft()
            self._wait(work, entry)

    def _wait(self, work: Any, entry: tuple[Any, ...]) -> None:
        try:
            work.wait()
        except RuntimeError as e:
            lost(e, entry, self.group.ranks)
            raise

    def _recent(self, verb: str, label: Label, block: Tensor) -> tuple[Any, ...]:
        entry = number(), f"{verb} of {label}", self.group.axes, block.shape, block.dtype
        RECENT.append(entry)
        return entry


def _wire(block: Tensor) -> Tensor:
    """View a block in a dtype that transports send."""
    return block if block.dtype in SENT else block.view(BITS[block.dtype.itemsize])
