"""Protocol of a back end: which ranks run in this process, and how blocks are communicated.

A back end is a module with these functions.  ``x`` is a storage: the blocks of this process's ranks
with ``lead`` dimensions in front of each.  Dimensions in arguments count those of a block, from 0;
``g`` is the group of the axes, which have more than one rank.  A collective posts its transfer and
returns ``finish``, which waits and returns the storage of the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.dtypes import is_half
from shardlib.mesh import Axes, Mesh

Finish = Callable[[], Tensor]
Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks along one axis of a mesh or several, flattened major first.

    ``index``  of this process's rank among them, or of each of its ranks.
    """

    mesh: Mesh
    axes: Axes
    size: int
    index: int | Tensor


class Landing(NamedTuple):
    """Memory of the caller that a sum of vectors is written to.

    ``wire``   dtype in which parts are sent; None for that of the vectors.
    ``land``   memory to receive in.
    ``ahead``  other work comes between posting and finish.
    """

    out: Tensor
    wire: torch.dtype | None = None
    land: Tensor | None = None
    ahead: bool = False


LARGE = 1 << 15
"""Bytes of a block from which our own exchange is faster than gloo's."""


def swaps_whole(x: Tensor, size: int) -> bool:
    """Return whether a sum of two blocks over gloo is one exchange of them."""
    return size == 2 and x.dtype in (torch.float32, torch.float64) and x.nbytes >= LARGE


def lands_alone(parts: Tensor, to: Landing) -> bool:
    """Return whether a sum of vectors over gloo receives in ``to``, and in pieces beside it."""
    alike = to.wire is None and to.out.dtype == parts.dtype and not is_half(parts)
    return alike and parts.nbytes >= LARGE * len(parts) and (len(parts) == 2 or not to.ahead)


def padded(flat: Tensor, size: int) -> Tensor:
    """Return a vector of a multiple of ``size`` elements: itself, or a copy with zeros behind."""
    more = -flat.shape[-1] % size
    if not more:
        return flat
    return F.pad(flat, (0, more))


G = TypeVar("G")


class Backend(Protocol[G]):
    """Interface of the back ends: the collectives, and the form of storages."""

    holds_values: bool
    """False where blocks are shapes only."""

    spans_processes: bool
    """True where other processes run the other ranks."""

    lead: int
    """Number of dimensions of a storage in front of a block's."""

    def group(self, mesh: Mesh, axes: Axes) -> G:
        """Make the group of one axis or several; nothing is sent."""
        ...

    def in_streams(self, g: G) -> bool:
        """Check whether streams wait for a transfer, rather than the host."""
        ...

    def psum(self, x: Tensor, g: G) -> Finish: ...

    def pmax(self, x: Tensor, g: G) -> Finish: ...

    def all_gather(self, x: Tensor, g: G, dim: int) -> Finish: ...

    def psum_scatter(
        self, x: Tensor, g: G, dim: int, wire: torch.dtype | None = None
    ) -> Finish: ...

    def psum_scatter_into(self, x: Tensor, g: G, to: Landing) -> Finish:
        """Sum vectors as psum_scatter does, each part round the ring, its owner last."""
        ...

    def all_gather_into(self, flat: Tensor, g: G, ahead: bool = False) -> Finish:
        """Gather vectors in place: this rank's part is at its position already."""
        ...

    def pslice(self, x: Tensor, g: G, dim: int) -> Finish:
        """Return this rank's block along a dimension; nothing moves."""
        ...

    def place(self, x: Tensor, g: G, dim: int) -> Finish:
        """Place this rank's block among zeros, the adjoint of pslice; nothing moves."""
        ...

    def all_to_all(self, x: Tensor, g: G, split_dim: int, concat_dim: int) -> Finish: ...

    def ragged_all_to_all(self, x: Tensor, g: G, counts: Sequence[Sequence[int]]) -> Finish:
        """Send ``counts[i][j]`` elements from rank i to j; the result is as long as the longest."""
        ...

    def ppermutes(self, xs: Sequence[Tensor], g: G, tables: Sequence[Pairs]) -> list[Finish]:
        """Permute several at once; zeros where a rank receives nothing."""
        ...

    def pbroadcast(self, x: Tensor, g: G, root: int) -> Finish: ...

    def preduce(self, x: Tensor, g: G, root: int) -> Finish: ...

    def preduce_into(
        self, target: Tensor, x: Tensor, g: G, root: int, wire: torch.dtype
    ) -> Callable[[], object]:
        """Write the sum into the root's target; parts are sent in ``wire``."""
        ...
