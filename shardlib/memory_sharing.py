"""Memory sharing: views as in torch; writes through a view of a gathered copy are refused.

A view of a block is a view of the value.  Where the tensor was gathered first, the view is one of
a copy, and torch would show a write to one in the other: ``link`` records such pairs, and
``refuse_write`` refuses writes to either while both are alive.
"""

import inspect
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import StorageWeakRef
from shardlib.errors import ShardError, Unsupported
from shardlib.opspec import Args, Func, Kwargs
from shardlib.opspec import writes as is_writer

LINKS: dict[int, list[tuple[Any, Any]]] = {}
"""Address of a storage -> weak pairs (it, the storage that torch would have made the same)."""


def one_storage(a: Tensor, b: Tensor) -> bool:
    """Check whether ``a`` and ``b`` have one storage, which on the meta device has no memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def same_memory(a: Tensor, b: Tensor) -> bool:
    return not a.is_meta and one_storage(a, b)


def alike(a: Tensor, b: Tensor) -> bool:
    """Check whether ``a`` and ``b`` share memory, or are linked."""
    if a.is_meta or same_memory(a, b):
        return not a.is_meta
    pairs = LINKS.get(a.untyped_storage()._cdata, ()) if LINKS else ()
    other = b.untyped_storage()._cdata
    return any(not me.expired() and not it.expired() and it.cdata == other for me, it in pairs)


def link(a: Tensor, b: Tensor) -> None:
    """Record that ``a`` and ``b`` would share memory in torch, or might."""
    if a.is_meta or same_memory(a, b):
        return
    one, two = StorageWeakRef(a.untyped_storage()), StorageWeakRef(b.untyped_storage())
    # list() copies: other threads may link while this loop runs
    for key in [k for k, pairs in list(LINKS.items()) if pairs[0][0].expired()]:
        LINKS.pop(key, None)
    LINKS.setdefault(one.cdata, []).append((one, two))
    LINKS.setdefault(two.cdata, []).append((two, one))


def link_views(
    results: Iterable[tuple[Tensor, Tensor]], operands: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Link results that are views of an operand's copy to the operand, as torch's would be.

    ``results``   each as it was computed, and as it is returned.
    ``operands``  each as it was computed with, and as it was given.
    """
    for (found, out), (used, given) in itertools.product(results, operands):
        if used is not given and alike(found, used):
            link(out, given)


WRITERS = frozenset(
    getattr(home, n) for home in (torch, Tensor, F) for n in dir(home) if is_writer(n)
)


_FLAGS = {
    f: list(inspect.signature(f).parameters).index("inplace")
    for f in vars(F).values()
    if inspect.isfunction(f) and "inplace" in f.__code__.co_varnames[: f.__code__.co_argcount]
}
"""Position of ``inplace`` in the functions that have it."""


def written(func: Func, args: Args, kwargs: Kwargs) -> list[Any]:
    """List the tensors that a call writes to, by its name and arguments."""
    at = _FLAGS.get(func)
    in_place = at is not None and (args[at] if len(args) > at else kwargs.get("inplace"))
    if func in WRITERS or in_place:
        found = args[0] if args else kwargs.get("input")
    elif "out" in kwargs:
        found = kwargs["out"]
    else:
        return []
    return list(found) if isinstance(found, tuple | list) else [found]


def writes(t: Tensor) -> int:
    """Count how often a tensor was written to.

    torch does not count it for tensors made in inference mode.
    """
    return 0 if t.is_inference() else t._version


def refuse_write(raw: Tensor, op: str, operands: dict[str, str], mesh: object) -> None:
    """Raise if memory that torch would share with ``raw``, and that here is a copy, is alive."""
    pairs = LINKS.get(raw.untyped_storage()._cdata, ())
    if any(not other.expired() for me, other in pairs if not me.expired()):
        raise Unsupported(
            "this tensor and another would share memory in torch, and do not here, because one of "
            "them had to be "
            "gathered or copied: what is written to one would not be seen in the other",
            op=op,
            operands=operands,
            mesh=mesh,
            fix="x = x.clone()",
        )


def refuse_overlap(raw: Tensor, op: str, operands: dict[str, str], mesh: object) -> None:
    """Raise if elements of ``raw``, which is about to be written to, share memory."""
    if any(not s and n > 1 for s, n in zip(raw.stride(), raw.shape, strict=True)):
        error = Unsupported(
            "elements that share memory are written to",
            op=op,
            operands=operands,
            mesh=mesh,
            fix="x = x.clone()",
        )
        error.final = True  # type: ignore[attr-defined]
        raise error


class SavedTensor:
    """A tensor that autograd saved where hooks pack it, for which torch itself checks no writes."""

    __slots__ = ("version", "x")

    def __init__(self, x: Tensor) -> None:
        # a node that saves its output would hold itself, if no backward frees what it saved
        self.x, self.version = x.detach(), x._version

    @property
    def is_written(self) -> bool:
        """Whether it was written to since."""
        return self.x._version != self.version

    def back(self) -> Tensor:
        """Return it.  Raises: ShardError if it was written to since."""
        if self.is_written:
            raise ShardError(
                f"a tensor of shape {list(self.x.shape)} that backward needs was written to in place",
                op="backward",
                fix="y = y + 1  # in place of y += 1",
            )
        return self.x


class TensorForm(NamedTuple):
    """Shape, strides and dtype of a tensor; a tensor on the meta device counts as memory on paper.

    >>> x = torch.empty(2, 3).T
    >>> TensorForm.of(x).empty("meta").stride() == x.stride()
    True
    >>> TensorForm.of(torch.empty(4, 6)[:, :2]).strides
    (2, 1)
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorForm":
        """Return the form of a tensor, with its dimensions in the same order and no gaps."""
        strides, reach = [0] * x.ndim, 1
        for d in sorted(range(x.ndim), key=lambda d: (x.stride(d), x.shape[d])):
            strides[d] = reach
            reach *= x.shape[d]
        return cls(tuple(x.shape), tuple(strides), x.dtype)

    def empty(self, device: torch.device | str) -> Tensor:
        """Return a tensor of this form, without values."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def unpacked(kept: Any) -> Tensor:
    """Return the tensor that a hook packed, whole or as an object with ``back()``."""
    if isinstance(kept, Tensor):
        return kept
    return kept.back()
