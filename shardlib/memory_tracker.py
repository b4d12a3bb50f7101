"""Live bytes of tensors and their peak, from which memory plans are made."""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import DispatchMode
from shardlib.opspec import Args, Func, Kwargs


class _Held(weakref.ref[Any]):
    """Reference to a storage, with its key and its bytes: a tenth of the time of a finalizer."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class Live(DispatchMode):  # type: ignore[misc, valid-type]
    """Bytes of storages made inside the context and still alive, and their peak.

    Tables of integers are not counted.

    ``paper``  blocks on the meta device count as if they had memory; by default a tensor on the
               meta device, such as a module's skeleton, counts 0 bytes.

    >>> import torch
    >>> with Live() as live:
    ...     x = torch.empty(4)
    ...     y = torch.cat([x, x])
    ...     del x
    >>> live.now, live.peak
    (32, 48)
    """

    def __init__(self, paper: bool = False) -> None:
        super().__init__()
        self.paper = paper
        self.now = self.peak = 0
        self.known: dict[int, _Held] = {}
        self.changes: list[tuple[_Held, int]] = []

    def steady(self) -> int:
        """Return the peak of a step like this one, which finds in place what this one has left.

        >>> import torch
        >>> with Live() as live:
        ...     activations = torch.empty(4)
        ...     del activations
        ...     pool = torch.empty(2)
        >>> live.peak, live.steady()
        (16, 24)
        """
        left = {id(held): held.nbytes for held in self.known.values()}
        now = most = 0
        for held, change in self.changes:
            if id(held) not in left:
                now += change
                most = max(most, now)
        return most + sum(left.values())

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        for x in tensors_in((args, kwargs or {})):
            self._note(x, new=False)
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            self._note(x, new=True)
        return out

    def _note(self, x: Tensor, new: bool) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        # a 1-D table of positions or rows is made once and cached, so it is no temporary
        table = x.ndim == 1 and x.dtype == torch.int64
        holds = new and not table and (self.paper or not x.is_meta)
        held = self.known[key] = _Held(storage, self._free)
        held.key, held.nbytes = key, storage.nbytes() if holds else 0
        self._changed(held, held.nbytes)

    def _free(self, held: _Held) -> None:
        self.known.pop(held.key, None)
        self._changed(held, -held.nbytes)

    def _changed(self, held: _Held, change: int) -> None:
        if change:
            self.changes.append((held, change))
            self.now += change
            self.peak = max(self.peak, self.now)


_CONTAINERS = (tuple, list, dict)


def tensors_in(tree: object) -> list[Tensor]:
    """List the tensors in tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    found: list[Tensor] = []
    if isinstance(tree, tuple | list):
        for item in tree:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, _CONTAINERS):
                found += tensors_in(item)
    return found
