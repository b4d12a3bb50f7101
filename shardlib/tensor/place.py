"""Place: where a tensor lies, as one frozen value.

Everything that an operator must know of an operand beside its block is here, so that a result's
place is computed once, compared, hashed and kept as the key of a plan, and nothing travels beside
it that a copy could forget.
"""

from typing import NamedTuple

import torch

from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh

__all__ = ["Place"]

_NONE: frozenset[str] = frozenset()


class Place(NamedTuple):
    """Place of a tensor's elements.

    ``layout``      one token per dimension, and the sums that are still pending.
    ``shape``       global sizes that the blocks tile exactly, with padding where there is any.
    ``mesh``        the Mesh whose axes the layout names.
    ``true_shape``  global sizes without padding; None where nothing is padded.
    ``deferred``    mesh axes over which the gradient of a replicated value is left unsummed.
    ``out_layout``  the layout that a product with this weight must give, if that matters.
    ``merged_from`` of a matrix whose rows were several dimensions until a view: their sizes.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     x = sl.shard(torch.zeros(3, 4), "x .", pad=True)
    >>> x.place.layout, tuple(x.place.shape), tuple(x.place.true_shape)
    (Layout('x .'), (4, 4), (3, 4))
    """

    layout: Layout
    shape: torch.Size
    mesh: Mesh
    true_shape: torch.Size | None = None
    deferred: frozenset[str] = _NONE
    out_layout: Layout | None = None
    merged_from: tuple[int, ...] = ()

    @property
    def dims(self) -> tuple[Dim, ...]:
        """One token per dimension."""
        return self.layout.dims

    @property
    def partial(self) -> tuple[str, ...]:
        """The mesh axes over which a sum is pending."""
        return self.layout.partial

    def becomes(self, layout: Layout, shape: torch.Size) -> "Place":
        """Return the place with another layout and other sizes, without padding.

        What a weight says of its products (``out_layout``) and what was merged into its rows stay
        behind; a value that lies elsewhere has neither.
        """
        return Place(layout, shape, self.mesh, None, self.deferred)
