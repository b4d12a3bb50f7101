"""Place: layout, sizes and mesh of a tensor, as one frozen value.

It holds all that an operator needs of an operand besides its block, so a result's place is computed
once, compared, hashed and used as the key of a plan, and no copy can forget a separate attribute.
"""

from typing import NamedTuple

import torch

from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh

_NONE: frozenset[str] = frozenset()
_new = tuple.__new__


class _Fields(NamedTuple):
    layout: Layout
    shape: torch.Size
    mesh: Mesh
    tiled: torch.Size
    deferred: frozenset[str]
    out_layout: Layout | None
    merged_from: tuple[int, ...]


class Place(_Fields):
    """Layout of a tensor's elements on a mesh, with its sizes.

    ``layout``      one token per dimension, and the sums that are still pending.
    ``shape``       global sizes.
    ``mesh``        the Mesh whose axes the layout names.
    ``tiled``       the sizes that the blocks tile exactly: ``shape``, with padding if there is any.
    ``deferred``    mesh axes over which the gradient of a replicated value is left unsummed.
    ``out_layout``  the layout that a product with this weight must give, if that is fixed.
    ``merged_from`` for a matrix whose rows a view merged from several dimensions: their sizes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     x = sl.shard(torch.zeros(3, 4), "x .", pad=True)
    >>> x.place.layout, tuple(x.place.shape), tuple(x.place.tiled)
    (Layout('x .'), (3, 4), (4, 4))
    """

    __slots__ = ()

    def __new__(
        cls,
        layout: Layout,
        shape: torch.Size,
        mesh: Mesh,
        tiled: torch.Size | None = None,
        deferred: frozenset[str] = _NONE,
        out_layout: Layout | None = None,
        merged_from: tuple[int, ...] = (),
    ) -> "Place":
        """Make a place of these fields."""
        tiled = shape if tiled is None else tiled
        return _new(cls, (layout, shape, mesh, tiled, deferred, out_layout, merged_from))

    @property
    def dims(self) -> tuple[Dim, ...]:
        """One token per dimension."""
        return self.layout.dims

    @property
    def settled(self) -> bool:
        """Whether no sum is left open: of the value's parts, or of its gradient's."""
        return not (self.layout.partial or self.deferred)

    def becomes(
        self, layout: Layout, shape: torch.Size, tiled: torch.Size | None = None
    ) -> "Place":
        """Return the place with another layout and other sizes.

        ``out_layout`` and ``merged_from`` are dropped: they hold only for the value as it was.
        """
        return Place(layout, shape, self.mesh, tiled, self.deferred)
