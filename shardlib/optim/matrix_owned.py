"""State of whole matrices, each on the one rank that owns the matrix.

State of a matrix as a whole, such as statistics of its rows, need not be sent: it stays on the rank
that computes the matrix.  A rank's matrices are stored one after the other in a vector; all ranks'
vectors form one ShardedTensor split over the whole mesh.  So every rank holds about its share of
the state, for any layout of the parameters.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from shardlib.capacity import refuse_beyond
from shardlib.collectives import blocks, played, psum, storage, unwrap, wrap
from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.optim.matrix_owners import Deal, Laid
from shardlib.placing import reshard, unshard
from shardlib.tensor import Place, ShardedTensor

__all__ = ["OwnedNumbers", "Kind", "Owned"]

Kind = Literal["mn", "mm", "nn"]
"""Numbers kept of a matrix [m, n]: one per element, per pair of rows, or per pair of columns."""


@dataclass(frozen=True)
class OwnedNumbers:
    """A list of the numbers kept per matrix, with their owners.

    ``paths``  of the parameters, in the order of ``plan.spreads``.
    ``most``   sides with more rows, or columns, keep no pairs.
    """

    paths: tuple[str, ...]
    plan: Deal
    kind: Kind
    most: float = math.inf

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shape of the numbers per matrix, for each parameter."""
        out = []
        for spread in self.plan.spreads:
            m, n = spread.shape[-2:]
            side = {"mn": (m, n), "mm": (m, m), "nn": (n, n)}[self.kind]
            kept = self.kind == "mn" or side[0] <= self.most
            out.append(side if kept else (0, 0))
        return tuple(out)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per rank, (unit, offset of its numbers in the rank's vector)."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.plan.holds]
        ends = [0] * len(out)
        for unit, ((param, _), owner) in enumerate(
            zip(self.plan.units, self.plan.owner, strict=True)
        ):
            out[owner].append((unit, ends[owner]))
            ends[owner] += math.prod(self.shapes[param])
        return tuple(map(tuple, out))

    @cached_property
    def length(self) -> int:
        """The length of the longest rank's vector."""
        ends = [0] * len(self.plan.holds)
        for (param, _), owner in zip(self.plan.units, self.plan.owner, strict=True):
            ends[owner] += math.prod(self.shapes[param])
        return max(ends, default=0)


class Owned:
    """Numbers of matrices on their owners; a pytree node with one vector in it.

    ``vector``  a ShardedTensor split over the whole mesh, or a plain tensor without a mesh.
    """

    def __init__(self, vector: Any, held: OwnedNumbers, mesh: Mesh | None) -> None:
        self.vector = vector
        self.held = held
        self.mesh = mesh

    @staticmethod
    def zeros(
        items: Sequence[Laid], plan: Deal, kind: Kind, dtype: torch.dtype, most: float
    ) -> "Owned":
        """Make zeros for the numbers of these matrices, on the owners of ``plan``."""
        held, mesh = OwnedNumbers(tuple(x.path for x in items), plan, kind, most), items[0].mesh
        new, many = items[0].runs[0].new_zeros, 1 if mesh is None else len(played(mesh))
        device = items[0].runs[0].device
        refuse_beyond(held.length * dtype.itemsize * many, device, "init", mesh)
        if mesh is None:
            return Owned(new(held.length, dtype=dtype), held, mesh)
        raw = storage([new(held.length, dtype=dtype) for _ in played(mesh)], mesh)
        size = torch.Size([held.length * mesh.size])
        place = Place(Layout((Dim(tuple(mesh.names)),)), size, mesh)
        return Owned(ShardedTensor(raw, place), held, mesh)

    def clone(self) -> "Owned":
        """Copy the numbers."""
        return Owned(self.vector.clone(), self.held, self.mesh)

    def views(self, i: int) -> dict[int, Tensor]:
        """Map units to views of their numbers, for the units of the i-th rank in this process."""
        rank, vector = 0, self._vector(i)
        if self.mesh is not None:
            rank = rank_along(self.mesh.names, played(self.mesh)[i], self.mesh.axes)
        units = self.held.plan.units
        shapes = self.held.shapes
        out = {}
        for unit, at in self.held.places[rank]:
            shape = shapes[units[unit][0]]
            out[unit] = vector[at : at + math.prod(shape)].view(shape)
        return out

    def _vector(self, i: int) -> Tensor:
        return self.vector if self.mesh is None else blocks(self.vector.raw, self.mesh)[i]

    @property
    def paths_held(self) -> list[str]:
        """The paths of the parameters whose numbers are kept."""
        shapes = zip(self.held.paths, self.held.shapes, strict=True)
        return [path for path, shape in shapes if shape != (0, 0)]

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a parameter's numbers, those of a stack of matrices in one tensor."""
        param = self.held.paths.index(path)
        return (*self.held.plan.spreads[param].shape[:-2], *self.held.shapes[param])

    def by_parameter(self) -> list[tuple[str, Tensor]]:
        """List (path, its numbers as one tensor), split over the mesh if a dimension divides.

        Moves: one psum of each.
        """
        return [(path, self._parameter(path)) for path in self.paths_held]

    def _parameter(self, path: str) -> Tensor:
        param = self.held.paths.index(path)
        spread, shape = self.held.plan.spreads[param], self.held.shapes[param]
        ranks = range(1 if self.mesh is None else len(played(self.mesh)))
        rows = []
        for i in ranks:
            row = self._vector(i).new_zeros(spread.count, *shape)
            for unit, view in self.views(i).items():
                p, k = self.held.plan.units[unit]
                if p == param:
                    row[k] = view
            rows.append(row.view(self.shape(path)))
        if self.mesh is None:
            return rows[0]
        with bind(self.mesh):
            raw = unwrap(psum(wrap(storage(rows, self.mesh), self.mesh), self.mesh.names))
        size = torch.Size(self.shape(path))
        value = ShardedTensor(raw, Place(Layout((Dim(),) * len(size)), size, self.mesh))
        at = next((d for d, n in enumerate(size) if n and n % self.mesh.size == 0), None)
        if at is None:
            return value
        dims = [Dim()] * len(size)
        dims[at] = Dim(tuple(self.mesh.names))
        return reshard(value, Layout(tuple(dims)))

    def filled(self, values: Mapping[str, Tensor]) -> "Owned":
        """Return a copy with the numbers of each path replaced."""
        out = self.clone()
        every = [out.views(i) for i in range(1 if self.mesh is None else len(played(self.mesh)))]
        for path, value in values.items():
            whole = unshard(value) if isinstance(value, ShardedTensor) else value
            param = self.held.paths.index(path)
            flat = whole.reshape(-1, *self.held.shapes[param])
            for mine in every:
                for unit, view in mine.items():
                    p, k = self.held.plan.units[unit]
                    if p == param:
                        view.copy_(flat[k])
        return out

    def check(self, items: Sequence[Laid], op: str) -> None:
        """Refuse matrices other than those of this state."""
        paths, spreads = tuple(x.path for x in items), tuple(x.spread for x in items)
        held = self.held
        if paths == held.paths and spreads == held.plan.spreads:
            return
        others = sorted(set(held.paths) ^ set(paths))
        gone = others or [
            path for path, a, b in zip(paths, spreads, held.plan.spreads, strict=True) if a != b
        ]
        raise ShardError(
            f"the state was made for other parameters: they differ at {', '.join(gone[:4])}",
            op=op,
            mesh=self.mesh,
            fix="state = tx.init(params)"
            if others
            else "state = sl.optim.load_state_dict(tx.init(params), sl.optim.state_dict(state))",
        )


def _flat(x: Owned) -> tuple[list[Any], Any, list[str]]:
    return [x.vector], (x.held, x.mesh), ["vector"]


def _unflat(where: tuple[OwnedNumbers, Mesh | None], children: Iterable[Any]) -> Owned:
    return Owned(next(iter(children)), *where)


optree.register_pytree_node(
    Owned,  # type: ignore[arg-type]
    _flat,  # type: ignore[arg-type]
    _unflat,  # type: ignore[arg-type]
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # type: ignore[attr-defined]
)
