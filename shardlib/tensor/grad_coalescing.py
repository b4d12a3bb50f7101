"""Gradients of many leaves, summed over mesh axes in few transfers while backward goes on.

``value_and_grad`` attaches the ``Together`` of its call to each of its leaves.  A gradient of such
a leaf that would be summed alone is collected here instead, and autograd gets None; gradients with
the same axes and dtype share one psum, posted as soon as they fill a bucket.  Every rank collects
in the order of its backward, which is the same on all, so that all post the same transfers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlib.collectives import flat_blocks, lead, psum, start, unwrap, wrap
from shardlib.mesh import Axes, Mesh, bind

LEAST, MOST = 1 << 20, 25 << 20
"""Bytes of a bucket: below LEAST, latency costs more than overlap hides; MOST is DDP's default."""

_Key = tuple[Mesh, Axes, torch.dtype, torch.dtype | None, torch.dtype | None]

_Sums = Callable[[], list[tuple[int, Tensor]]]
"""Function that waits for the sums of some leaves: (leaf, sum)."""


class Together:
    """Gradient buckets of one call: attached to its leaves within ``with``, where forward runs.

    Gradients are collected while it is ``open``.

    ``raws``    storages of the leaves.
    ``nbytes``  of their gradients, if not their own.

    A bucket is posted from a fifth of the leaves' bytes on, so that small models have several
    transfers too.
    """

    def __init__(self, raws: Sequence[Tensor], nbytes: int = 0) -> None:
        self.raws = list(raws)
        self.nbytes = nbytes or sum(r.nbytes for r in self.raws)
        self.open = False
        self.waiting: dict[_Key, list[tuple[int, Tensor]]] = {}
        self.owed: list[_Sums] = []
        self.flying: list[_Sums] = []

    def __enter__(self) -> "Together":
        for i, raw in enumerate(self.raws):
            raw.together = self, i
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False
        for raw in self.raws:
            del raw.together
        # so that no block is kept alive from here
        self.raws = []

    def takes(self, i: int) -> bool:
        """Check whether leaf ``i``'s gradient may come later: plain backward and no hook on it."""
        return self.open and not torch.is_grad_enabled() and not self.raws[i]._backward_hooks

    def take(
        self,
        i: int,
        g: Tensor,
        mesh: Mesh,
        axes: Axes,
        out: torch.dtype | None,
        wire: torch.dtype | None,
    ) -> None:
        """Sum ``g`` over ``axes`` with others; ``out`` and ``wire`` as in psum."""
        key = mesh, axes, g.dtype, out, wire
        rows = self.waiting.setdefault(key, [])
        rows.append((i, g))
        # the blocks of all simulated ranks are one tensor
        ranks = mesh.size if lead(mesh) else 1
        most = min(max(self.nbytes // (5 * ranks), LEAST), MOST)
        if sum(x.nbytes for _, x in rows) >= most * ranks:
            self._post(key)

    def owe(self, i: int, wait: Callable[[], Tensor]) -> None:
        """Add the gradient that ``wait()`` returns, summed elsewhere."""
        self.owed.append(lambda: [(i, wait())])

    def post(self) -> None:
        """Post the remaining gradients."""
        for key in list(self.waiting):
            self._post(key)

    def finish(self) -> dict[int, Tensor]:
        """Post the remaining gradients and wait for all: leaf index -> its summed gradient."""
        self.post()
        found: dict[int, Tensor] = {}
        for wait in (*self.flying, *self.owed):
            for i, g in wait():
                # a leaf used in several places has a gradient from each
                found[i] = found[i] + g if i in found else g
        self.flying, self.owed = [], []
        return found

    def _post(self, key: _Key) -> None:
        mesh, axes, _, out, wire = key
        rows = self.waiting.pop(key)
        vectors = [flat_blocks(g, mesh) for _, g in rows]
        with torch.no_grad(), bind(mesh):
            flat = vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)
            later = start(psum, wrap(flat, mesh), axes, out=out, wire=wire)
        leaves = [(i, g.shape) for i, g in rows]
        sizes = [v.shape[-1] for v in vectors]

        def wait() -> list[tuple[int, Tensor]]:
            parts = unwrap(later.wait()).split(sizes, -1)
            return [(i, g.view(s)) for (i, s), g in zip(leaves, parts, strict=True)]

        self.flying.append(wait)


def together_of(raw: Tensor) -> tuple[Together, int] | None:
    """Return the Together that sums this leaf's gradient, and its index."""
    return raw.__dict__.get("together")
