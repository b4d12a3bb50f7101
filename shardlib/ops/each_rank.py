"""A function called on each rank's blocks: once where a process is one rank, in turn under simulate.

The answers of simulated ranks are stacked, or returned as one view of the operands' blocks where
each is the same view of its own.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib._compat import unseen
from shardlib.autocast import casting
from shardlib.collectives import holds_values, lead
from shardlib.dtypes import is_half
from shardlib.errors import ShardError
from shardlib.memory_sharing import WRITERS, link, same_memory
from shardlib.mesh import Mesh
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import ShardedTensor, Unfit, on_shapes


class FlatCall(NamedTuple):
    """Call of a torch function with its arguments flattened; tensors are at ``at``."""

    func: Func
    leaves: list[Any]
    tree: Any
    at: list[int]

    @staticmethod
    def of(func: Func, /, *args: object, **kwargs: object) -> "FlatCall":
        """Flatten the arguments of a call."""
        leaves, tree = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
        return FlatCall(
            func, leaves, tree, [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        )

    @property
    def tensors(self) -> list[Any]:
        """The tensors among the arguments."""
        return [self.leaves[i] for i in self.at]

    @property
    def key(self) -> Hashable:
        """All that the results' sizes depend on."""
        return (self.func, self.tree, *map(_fixed, self.leaves))

    def replaced(self, values: Iterable[object]) -> tuple[Args, Kwargs]:
        """Return the arguments with other values in place of the tensors."""
        leaves = list(self.leaves)
        for i, value in zip(self.at, values, strict=True):
            leaves[i] = value
        return optree.tree_unflatten(self.tree, leaves)  # type: ignore[return-value]

    def shapes(self, sizes: Iterable[Sequence[int] | None]) -> list[torch.Size]:
        """Find the sizes of the results for operands of these sizes, on the meta device.

        An operand without a size stands for itself.
        Raises: Unfit.
        """
        try:
            with unseen(), torch.no_grad():
                args, kwargs = self.replaced(
                    x if size is None else torch.empty(size, dtype=x.dtype, device="meta")
                    for x, size in zip(self.tensors, sizes, strict=True)
                )
                found = optree.tree_leaves(self.func(*args, **kwargs), none_is_leaf=True)
        except Exception as e:
            # torch refuses wrong shapes with errors of any class
            raise Unfit(f"{type(e).__name__}: {e}") from None
        if not all(type(t) is Tensor for t in found):
            raise Unfit("a result is no tensor")
        return [t.shape for t in found]


def size_of(x: Tensor) -> torch.Size | None:
    """Return the size of a tensor; None for a number, whose value may decide the results' sizes."""
    return x.shape if isinstance(x, ShardedTensor) or x.ndim else None


def _fixed(x: object) -> object:
    """Return what of an argument the results' sizes depend on; a list if it cannot be a key."""
    if isinstance(x, Tensor):
        return [x] if size_of(x) is None else (x.shape, x.dtype)
    return (slice, x.start, x.stop, x.step) if isinstance(x, slice) else (type(x), x)


def run(func: Func, mesh: Mesh, args: Args, kwargs: Kwargs) -> Any:
    """Make the call; on a recorded mesh, which has no values, refuse one that depends on them."""
    if holds_values(mesh):
        with casting(func):
            return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as e:
        # also NotImplementedError, its subclass
        if "meta" not in str(e).lower():
            raise
        raise on_shapes(func, mesh) from e


def each(call: FlatCall, mesh: Mesh, blocks: Sequence[Any] | None = None) -> Any:
    """Call the function on every rank's blocks, one rank after the other.

    ``blocks``  raw tensors in place of the call's tensors, if those are not raw themselves.
    """
    func, given = call.func, blocks or call.tensors
    if not lead(mesh):
        return run(func, mesh, *call.replaced(given))
    writing = func in WRITERS and isinstance(given[0], Tensor)
    # Simulated ranks share a storage, so autograd would treat rank 0's write as a change of rank
    # 1's saved tensor; write to clones.
    copies = [block.clone() for block in given[0]] if writing else []
    found: list[Any] = []
    shape: Any = None
    for rank in range(mesh.size):
        mine = [block[rank] for block in given]
        if writing:
            mine[0] = copies[rank]
        args, kwargs = call.replaced(mine)
        with casting(func):
            answer = func(*args, **kwargs)
        out, shape = optree.tree_flatten(answer, none_is_leaf=True)
        found.append(out)
    if writing:
        given[0].copy_(torch.stack(copies))
    joined = [
        given[0] if writing and values[0] is copies[0] else _joined(func, mesh, values, given)
        for values in zip(*found, strict=True)
    ]
    return optree.tree_unflatten(shape, joined)


def _joined(func: Func, mesh: Mesh, values: Any, blocks: Sequence[Any]) -> Any:
    """Return the ranks' answers as one: a view of the operands' blocks if they are views alike."""
    first = values[0]
    if not isinstance(first, Tensor):
        if any(v != first and v == v for v in values):
            raise ShardError(
                "the ranks' answers differ", op=func.__name__, mesh=mesh, fix="sl.unshard(x)"
            )
        return first
    view = _block_view(values, blocks)
    if view is not None:
        # a view as another dtype is not differentiable
        return view.detach() if view.requires_grad and not first.requires_grad else view
    stacked = torch.stack(values)
    for raw in blocks:
        if isinstance(raw, Tensor) and same_memory(first, raw):
            link(stacked, raw)
    return stacked


def _block_view(found: Any, blocks: Sequence[Any]) -> Tensor | None:
    """Return the ranks' results as one view of all blocks, if they are the same view of each."""
    first = found[0]
    sharing = [b for b in blocks if isinstance(b, Tensor) and same_memory(first, b)]
    raw = next((b for b in sharing if b.is_neg() == first.is_neg()), None)
    if raw is None:
        return None
    shared = any(not s and n > 1 for s, n in zip(raw.stride(), raw.shape, strict=True))
    if shared and raw.requires_grad and is_half(raw):
        # as_strided sums gradients of a shared element in half precision
        return None
    try:
        raw = _in_terms_of(first, raw)
        starts = [first.storage_offset() + rank * raw.stride(0) for rank in range(len(found))]
        if raw.dtype != first.dtype or [t.storage_offset() for t in found] != starts:
            # the offset depends on data, so ranks differ
            return None
        return raw.as_strided(
            (raw.shape[0], *first.shape), (raw.stride(0), *first.stride()), first.storage_offset()
        )
    except RuntimeError:
        return None


def _in_terms_of(view: Tensor, raw: Tensor) -> Tensor:
    """Return ``raw`` as complex, real or conjugate numbers, as a view of its memory is."""
    if raw.is_complex() and not view.is_complex():
        return torch.view_as_real(raw)
    if view.is_complex() and not raw.is_complex():
        return torch.view_as_complex(raw)
    return raw.conj() if view.is_conj() != raw.is_conj() else raw
