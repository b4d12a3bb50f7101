"""Gradients of many leaves, summed over mesh axes in few transfers while backward goes on.

A leaf that ``value_and_grad`` made knows of the ``Together`` of its call, as long as that lasts.
Where the gradient of such a leaf would be summed by itself, it is handed over instead and autograd
gets none; what has the same axes and dtype travels in one psum as soon as there is a bucket of it.
Every rank hands over in the same order, that of its backward, so that all post the same transfers.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlib.collectives import lead, psum, start, unwrap, wrap
from shardlib.mesh import Mesh, bind

__all__ = ["LEAST", "MOST", "Together", "together_of"]

LEAST, MOST = 1 << 20, 25 << 20
"""Bytes of a bucket: less costs more in messages than it hides, and MOST is as DDP's."""

_Key = tuple[Mesh, tuple[str, ...], torch.dtype, torch.dtype | None, torch.dtype | None]


class Together:
    """The sums of one call: its leaves know of them within ``with``, in which forward runs.

    Their gradients are taken while it is ``open``.

    ``raws``  storages of the leaves.
    ``most``  bytes from which what waits is posted: a fifth of the leaves', so that small models
              have several transfers too.
    """

    def __init__(self, raws: Sequence[Tensor]) -> None:
        self.raws = list(raws)
        self.most = min(max(sum(r.nbytes for r in self.raws) // 5, LEAST), MOST)
        self.open = False
        self.waiting: dict[_Key, list[tuple[int, Tensor]]] = {}
        self.owed: list[tuple[int, Callable[[], Tensor]]] = []
        self.flying: list[tuple[list[tuple[int, torch.Size]], int, Callable[[], Tensor]]] = []

    def __enter__(self) -> "Together":
        for i, raw in enumerate(self.raws):
            raw.together = self, i  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False
        for raw in self.raws:
            del raw.together  # type: ignore[attr-defined]
        self.raws = []  # nothing here keeps a block alive

    def takes(self, i: int) -> bool:
        """Say whether leaf ``i``'s gradient may come later: backward is ours, no hook hears it."""
        return self.open and not torch.is_grad_enabled() and not self.raws[i]._backward_hooks

    def take(
        self,
        i: int,
        g: Tensor,
        mesh: Mesh,
        axes: tuple[str, ...],
        out: torch.dtype | None,
        wire: torch.dtype | None,
    ) -> None:
        """Sum ``g`` over ``axes`` with others; ``out`` and ``wire`` as psum has them."""
        key = mesh, axes, g.dtype, out, wire
        rows = self.waiting.setdefault(key, [])
        rows.append((i, g))
        if sum(x.nbytes for _, x in rows) >= self.most:
            self._post(key)

    def owe(self, i: int, wait: Callable[[], Tensor]) -> None:
        """Take the gradient that ``wait()`` gives, of what sums it by itself."""
        self.owed.append((i, wait))

    def finish(self) -> dict[int, Tensor]:
        """Post what waits, wait for all: leaf -> the sum of what was handed over of it."""
        for key in list(self.waiting):
            self._post(key)
        found: dict[int, Tensor] = {}
        for parts, front, wait in self.flying:
            flat, at = wait(), 0
            for i, shape in parts:
                n = shape[front:].numel()
                g = flat[..., at : at + n].view(shape)
                found[i] = found[i] + g if i in found else g
                at += n
        for i, wait in self.owed:
            g = wait()
            found[i] = found[i] + g if i in found else g
        self.flying, self.owed = [], []
        return found

    def _post(self, key: _Key) -> None:
        mesh, axes, _, out, wire = key
        rows, front = self.waiting.pop(key), lead(key[0])
        vectors = [g.flatten(front) if g.ndim > front else g.unsqueeze(-1) for _, g in rows]
        with torch.no_grad(), bind(mesh):
            flat = vectors[0] if len(vectors) == 1 else torch.cat(vectors, -1)
            later = start(psum, wrap(flat, mesh), axes, out=out, wire=wire)
        self.flying.append(([(i, g.shape) for i, g in rows], front, lambda: unwrap(later.wait())))


def together_of(raw: Tensor) -> tuple[Together, int] | None:
    """Return the Together that sums this leaf's gradient, and its index."""
    return raw.__dict__.get("together")
