"""Dependences between tensors on the meta device: which marked tensors a result was made of.

Two sources are joined, since each alone misses some.  Data flow, as torch dispatches operators,
knows tensors that need no gradient (an encoder's mask, a position bias of zeros).  Autograd knows
operators that compute only shapes where there are no values (rings of attention).
"""

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from shardlib._compat import DispatchMode
from shardlib.memory_tracker import tensors_in
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.work import operations, touched

Names = frozenset[Hashable]

BYTE = 64.0
"""Operations that take as long as a byte takes to memory or back: a CPU's 10, an H100's 300."""

INPUT = object()
"""Name of every tensor among the inputs: all stages have them."""

# their results have the sizes of an operand, and none of its values; not empty_like and new_empty,
# with which transfers make their results on shapes
_FILLS = frozenset(
    "zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like".split()
)


class Within(NamedTuple):
    """Name of what a call makes of inputs, or writes to: other calls get its results alone."""

    call: Any


class Dependences(DispatchMode):  # type: ignore[misc, valid-type]
    """Record, while open, which marked tensors each new tensor is computed from.

    >>> import torch
    >>> flow = Dependences()
    >>> a, b = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    >>> flow.mark(a, "a"), flow.mark(b, "b")
    (None, None)
    >>> with flow:
    ...     c = a * 2 + torch.zeros_like(b)
    >>> sorted(flow.of([c]))
    ['a']

    ``crossings``  the tensors named by ``cross`` -> the names on which each depends, in order; what
                   is computed of anything else of a call depends on its name ``Within``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, Names] = {}
        # names that a tensor, or a node of autograd, was given
        self.given: dict[Hashable, Names] = {}
        self.crossings: dict[Any, Names] = {}
        # of the call that is open; of operands where none is
        self.within: Names = frozenset()
        self.between: set[Hashable] = set()
        # an address is used again once its tensor is gone
        self.alive: list[Tensor] = []
        # of products and attention so far, and bytes of operands and results made of inputs
        self.flops, self.touched = 0.0, 0

    @property
    def cost(self) -> float:
        """The time of what ran so far, in that of an operation."""
        return self.flops + BYTE * self.touched

    def mark(self, x: Tensor, name: Hashable) -> None:
        """Give a tensor a name, under which results computed from it are found.

        Every call may read one that is named INPUT.
        """
        self.given[x._cdata] = frozenset([name])
        self.write(x, self.given[x._cdata])

    def cross(self, x: Tensor, name: Hashable) -> None:
        """Name a result of a call: what is computed from it depends on this name alone."""
        self.crossings[name] = self.of([x])
        self.alive.append(x)
        for at in {x._cdata, x.grad_fn} - {None}:
            self.given[at] = self.given.get(at, frozenset()) | {name}
        at = x._cdata
        self.names[at] = self.given[at] | (self.names.get(at, frozenset()) & {INPUT})
        if x._base is not None and x._base.grad_fn is not None:
            # the graph of a view that is written to leads past the view's node
            self.given.setdefault(x._base.grad_fn, frozenset([name]))

    @contextmanager
    def call(self, name: Hashable) -> Iterator[None]:
        """Name the call that makes tensors, and writes to them, in this context."""
        before, self.within = self.within, frozenset([Within(name)])
        try:
            yield
        finally:
            self.within = before

    def write(self, x: Tensor, names: Names = frozenset()) -> None:
        """Record that a tensor was made of what has these names, or written to."""
        if x._cdata not in self.names:
            self.alive.append(x)
        names |= self.names.get(x._cdata, frozenset())
        self.names[x._cdata] = names | (self.within if INPUT in names else frozenset())

    def of(self, results: Iterable[Tensor]) -> Names:
        """Return the names on which any of these results depends, inputs excepted.

        Gradients go along edges alone, so a walk finds all that a backward would, at less cost.
        """
        found: set[Hashable] = set()
        for x in results:
            found |= self.names.get(x._cdata, frozenset())
        nodes = list({x.grad_fn for x in results} - {None})
        known = set(nodes)
        for node in nodes:
            leaf = getattr(node, "variable", None)
            at = node if leaf is None else leaf._cdata
            found |= self.given.get(at, frozenset())
            if at not in self.given:
                after = {n for n, _ in node.next_functions} - known - {None}
                known |= after
                nodes += after
        return frozenset(found - {INPUT})

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += operations(func, out, args, kwargs)
        if func.overloadpacket.__name__ in _FILLS:
            return out
        known = [x for x in tensors_in((args, kwargs)) if x._cdata in self.names]
        names = frozenset[Hashable]().union(*(self.names[x._cdata] for x in known))
        if not self.within:
            self.between |= names
        if INPUT in names:
            read = [x for x in known if INPUT in self.names[x._cdata]]
            self.touched += touched(func, read, out)
        if names:
            written = [
                x
                for a, x in zip(func._schema.arguments, args, strict=False)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for x in tensors_in([out, written]):
                self.write(x, names)
        return out
