"""Dependences between tensors on the meta device: which marked tensors a result was made of.

Two sources are joined, since each alone misses some.  Data flow, as torch dispatches operators,
knows tensors that need no gradient (an encoder's mask, a position bias of zeros).  Autograd knows
operators that compute only shapes where there are no values (rings of attention).
"""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from shardlib._compat import DispatchMode, tree_flatten
from shardlib.opspec import Args, Func, Kwargs

Names = frozenset[Hashable]

# their results have the sizes of an operand, and none of its values; not empty_like and new_empty,
# with which transfers make their results on shapes
_FILLS = frozenset(
    "zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like".split()
)


class Dependences(DispatchMode):  # type: ignore[misc, valid-type]
    """Record, while open, which marked tensors each new tensor is computed from.

    >>> flow = Dependences()
    >>> a, b = torch.ones(2, device="meta"), torch.ones(2, device="meta")
    >>> flow.mark(a, "a"), flow.mark(b, "b")
    (None, None)
    >>> with flow:
    ...     c = a * 2 + torch.zeros_like(b)
    >>> sorted(flow.of([c]))
    ['a']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, Names] = {}
        self.marked: dict[Hashable, Tensor] = {}
        # an address is used again once its tensor is gone
        self.alive: list[Tensor] = []

    def mark(self, x: Tensor, name: Hashable) -> None:
        """Give a tensor a name, under which results computed from it are found."""
        self.marked[name] = x
        self._add(x, frozenset([name]))

    def reaches(self, x: Tensor) -> bool:
        """Check whether a tensor was computed from a marked one."""
        return bool(self.names.get(x._cdata))

    def of(self, results: Sequence[Tensor]) -> Names:
        """Return the names of the marked tensors that any of these results depends on."""
        found = _joined(self.names.get(x._cdata, frozenset()) for x in results)
        ends = [x for x in results if x.requires_grad]
        leaves = {n: x for n, x in self.marked.items() if x.requires_grad}
        if not ends or not leaves:
            return found
        given = [torch.empty_like(x) for x in ends]
        asked = list(leaves.values())
        grads = torch.autograd.grad(ends, asked, given, allow_unused=True)
        return found | {n for n, g in zip(leaves, grads, strict=True) if g is not None}

    def _add(self, x: Tensor, names: Names) -> None:
        if x._cdata not in self.names:
            self.alive.append(x)
        self.names[x._cdata] = self.names.get(x._cdata, frozenset()) | names

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _FILLS:
            return out
        operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        names = _joined(self.names.get(x._cdata, frozenset()) for x in operands)
        if names:
            written = [
                x
                for a, x in zip(func._schema.arguments, args, strict=False)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            for x in [*tree_flatten(out)[0], *written]:
                if isinstance(x, Tensor):
                    self._add(x, names)
        return out


def _joined(names: Iterable[Names]) -> Names:
    return frozenset().union(*names)
