"""Bytes of tensors that are alive, and the most that ever were: what a memory plan is made of."""

import weakref
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import DispatchMode

__all__ = ["Live"]


class Live(DispatchMode):  # type: ignore[misc, valid-type]
    """Bytes of storages made within it and still alive, and their peak; tables of integers aside.

    ``paper``  blocks are on the meta device and count as if they were elsewhere; by default what
               is on the meta device, as a module's skeleton, takes no memory.

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
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in _tensors((args, kwargs or {})):
            self._note(x, new=False)
        out = func(*args, **(kwargs or {}))
        for x in _tensors(out):
            self._note(x, new=True)
        return out

    def _note(self, x: Tensor, new: bool) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        table = x.ndim == 1 and x.dtype == torch.int64  # of positions or rows: made once, and kept
        holds = new and not table and (self.paper or not x.is_meta)
        nbytes = storage.nbytes() if holds else 0
        self.known[key] = weakref.finalize(storage, self._free, key, nbytes)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def _free(self, key: int, nbytes: int) -> None:
        self.known.pop(key, None)
        self.now -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [x for item in tree for x in _tensors(item)] if isinstance(tree, tuple | list) else []
