"""A table with one line per parameter: its type, its layout, and its bytes on a rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardlib.collectives import block_shape
from shardlib.optim.buckets import Buckets
from shardlib.planning.explanation import size
from shardlib.seeing.canvas import html_table, text_table
from shardlib.tensor import ShardedTensor, named_tensors, typeof


class SummaryRow(NamedTuple):
    """A parameter; ``bytes`` are of one rank, ``whole`` of the global tensor."""

    name: str
    type: str
    bytes: int
    whole: int
    state: int


@dataclass(frozen=True)
class Summary:
    """A table of parameters and totals; ``print`` it, or let a notebook show it.

    ``other``  bytes of the optimizer's state that belong to no parameter, such as gaps in buckets.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=4):
    ...     found = sl.summary({"w": sl.shard(torch.zeros(64, 32), "x .")})
    >>> found.bytes, found.whole, found.elements, found.rows[0].type
    (2048, 8192, 2048, 'f32[64@x, 32]')
    """

    rows: tuple[SummaryRow, ...]
    elements: int
    other: int
    mesh: str

    @property
    def bytes(self) -> int:
        """Bytes of the parameters on one rank."""
        return sum(r.bytes for r in self.rows)

    @property
    def whole(self) -> int:
        """Bytes of the global parameters."""
        return sum(r.whole for r in self.rows)

    @property
    def state(self) -> int:
        """Bytes of the optimizer's state on one rank."""
        return self.other + sum(r.state for r in self.rows)

    def table(self) -> list[list[str]]:
        """Return rows of text with their heading, with a column for the state if there is one."""
        wide = 4 + bool(self.state)
        out = [["parameter", "type", "per rank", "whole", "state per rank"][:wide]]
        for r in self.rows:
            out.append([r.name, r.type, size(r.bytes), size(r.whole), size(r.state)][:wide])
        count = f"{len(self.rows)} parameters"
        elements = f"{self.elements:,} elements"
        out.append([count, elements, size(self.bytes), size(self.whole), size(self.state)][:wide])
        return out

    def __str__(self) -> str:
        lines = text_table(self.table(), right=(2, 3, 4))
        rule = "-" * max(map(len, lines))
        lines[1:1] = lines[-1:-1] = [rule]
        if self.mesh:
            lines.append(self.mesh)
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.table())


def summary(params: object, state: object = None) -> Summary:
    """List each parameter: its type and layout, its bytes on a rank and in all.

    ``params``  a dictionary of tensors, or any tree; ``dict(model.named_parameters())`` of a
                module.
    ``state``   an optimizer's state, assigned to its parameters; for ``zero``'s buckets, which are
                cut across parameters, each rank's average share.
    Raises: PlainTensor for an object that is neither a tensor nor a tree of tensors.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     w, b = sl.shard(torch.zeros(64, 32), "y x"), sl.shard(torch.zeros(64), "y")
    ...     params = {"w": w, "b": b}
    ...     print(summary(params, sl.optim.adamw(1e-3).init(params)))
    parameter     type             per rank     whole  state per rank
    -----------------------------------------------------------------
    b             f32[64@y]           128 B     256 B           256 B
    w             f32[64@y, 32@x]  2.00 KiB  8.00 KiB        4.00 KiB
    -----------------------------------------------------------------
    2 parameters  2,112 elements   2.12 KiB  8.25 KiB        4.25 KiB
    on x=2 y=2
    """
    found = named_tensors(params, "summary")
    of: dict[str, int] = dict.fromkeys(found, 0)
    other = _count(state, of, ())
    rows = tuple(
        SummaryRow(n, typeof(x), _held(x), x.numel() * x.element_size(), of[n])
        for n, x in found.items()
    )
    meshes = {str(x.mesh) for x in found.values() if isinstance(x, ShardedTensor)}
    on = f"on {', '.join(sorted(meshes))}" if meshes else ""
    return Summary(rows, sum(x.numel() for x in found.values()), other, on)


def _held(x: Tensor) -> int:
    """Count the bytes that one rank holds."""
    if not isinstance(x, ShardedTensor):
        return x.numel() * x.element_size()
    return block_shape(x.raw, x.mesh).numel() * x.raw.element_size()


def _count(node: object, of: dict[str, int], path: tuple[str, ...]) -> int:
    """Add a state's bytes to the parameters whose names end its paths; return the remainder."""
    if isinstance(node, Buckets):
        return _count_buckets(node, of)
    if isinstance(node, Tensor):
        # a state repeats the parameter's path at the end of its own
        for end in (".".join(path[i:]) for i in range(len(path))):
            if end in of:
                of[end] += _held(node)
                return 0
        return _held(node)
    if isinstance(node, tuple | list):
        node = dict(zip(getattr(node, "_fields", range(len(node))), node, strict=True))
    if isinstance(node, Mapping):
        return sum(_count(v, of, (*path, str(k))) for k, v in node.items())
    return 0


def _count_buckets(node: Buckets, of: dict[str, int]) -> int:
    """Add the bytes of buckets to the parameters in them; return those of gaps."""
    other = 0
    for bucket in node.index:
        item, spare = node[bucket.name].element_size(), bucket.length
        for slot in bucket.slots:
            name = node.paths[slot.leaves[0]]
            if name in of:
                of[name] += slot.length * item // bucket.ways
                spare -= slot.length
        other += spare * item // bucket.ways
    return other
