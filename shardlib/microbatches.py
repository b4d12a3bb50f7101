"""Micro-batches of a call: its batch arguments cut along their first dimension into equal parts.

A loss that is a mean over rows is then the mean of the micro-batches' losses.  Where it is a mean
over something else, as the tokens that are not ignored, a weight for each micro-batch says how much
of the whole it has.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import block_shape, each_rank, storage
from shardlib.errors import ShardError, UnevenSplit
from shardlib.mesh import Mesh
from shardlib.opspec import Args, Kwargs
from shardlib.tensor import ShardedTensor, settle, typeof


class MicroBatches:
    """The arguments of a call in ``count`` parts; numbers and tensors of one row are in each part.

    ``weigh``  micro-batch's arguments -> its weight in the mean; None: all weigh the same.
    ``stage``  the mesh of one stage, on which values of the whole mesh are placed.
    """

    def __init__(
        self,
        args: Args,
        kwargs: Kwargs,
        count: int,
        weigh: Callable[..., Any] | None = None,
        stage: Mesh | None = None,
    ) -> None:
        self.count = count
        leaves, self.tree = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
        leaves = [x if stage is None else inward(x, stage) for x in leaves]
        _refuse_arrays(leaves, stage is not None)
        rows = max((_rows(x) for x in leaves), default=1)
        if count > 1 and not any(isinstance(x, Tensor) and x.ndim for x in leaves):
            why = f"no argument has rows, and {count} micro-batches would each be the whole batch"
            fix = f"sl.value_and_grad(lambda params, x: loss(params, x), microbatches={count})"
            raise ShardError(why, op="value_and_grad", fix=fix)
        blocks = math.lcm(*map(_blocks, leaves))
        self.parts = [_parts(x, count, rows, blocks) for x in leaves]
        self.weigh = weigh
        self._shares: list[Any] = []

    def __getitem__(self, k: int) -> tuple[Args, Kwargs]:
        """Return the arguments of micro-batch ``k``."""
        found: Any = optree.tree_unflatten(self.tree, [parts[k] for parts in self.parts])
        return found

    def part(self, loss: Tensor, k: int) -> Tensor:
        """Return the part of the mean that micro-batch ``k`` with this loss has.

        The loss of one without weight may be NaN, as a mean over no tokens is: its part is 0.
        """
        if not self._shares:
            weights: list[Any] = [1] * self.count
            if self.weigh is not None:
                every = map(self.__getitem__, range(self.count))
                weights = [_weight(self.weigh(*args, **kwargs)) for args, kwargs in every]
            if all(map(_is_zero, weights)):
                why = f"the {self.count} micro-batches weigh 0 together"
                raise ShardError(why, op="value_and_grad", fix="sl.value_and_grad(loss)")
            total = sum(weights)
            self._shares = [None if _is_zero(w) else w / total for w in weights]
        share = self._shares[k]
        # weights are fp64
        return torch.zeros_like(loss) if share is None else (loss * share).to(loss.dtype)


def _refuse_arrays(leaves: Sequence[object], staged: bool) -> None:
    """Refuse arrays of other libraries, and in stages any value by which no call is known again."""
    for x in leaves:
        array = hasattr(x, "__array__")
        if not isinstance(x, Tensor) and type(x).__hash__ is None and (staged or array):
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            why = f"an argument is a {kind}, neither a tensor nor a hashable value"
            fix = "x = torch.as_tensor(x)" if array else "x = vars(x)"
            raise ShardError(why, op="value_and_grad", operands={"x": kind}, fix=fix)


def _weight(x: Tensor | float) -> Tensor | float:
    """Return a weight as a number or as the storage of a value that every rank has."""
    if not isinstance(x, Tensor):
        return float(x)
    return settle(x).raw.detach().double() if isinstance(x, ShardedTensor) else x.detach().double()


def _is_zero(weight: object) -> bool:
    if isinstance(weight, Tensor):
        return not weight.is_meta and not bool(weight.any())
    return weight == 0


def inward(x: object, stage: Mesh) -> object:
    """Place a value of the whole mesh, the same at all stages, on the mesh of one stage."""
    outer = stage.outer
    if outer is None or not isinstance(x, ShardedTensor):
        return x
    if x.mesh is outer.mesh.without(outer.axis):
        # the result of another model, see ``Mesh.for_model``
        return x if x.mesh is stage else ShardedTensor(x.raw, x.place._replace(mesh=stage))
    if x.mesh is not outer.mesh:
        return x
    if outer.axis in x.sharding.axes:
        why = f"a batch is split over {outer.axis!r}, along which the stages are placed"
        fix = "batch = sl.reshard(batch, '...')"
        given = {"batch": typeof(x)}
        raise ShardError(why, op="value_and_grad", operands=given, mesh=outer.mesh, fix=fix)
    # one stage's blocks: of this process, or of the first of the simulated stages
    here = [(coord[outer.axis], view(x.raw)) for coord, view in each_rank(outer.mesh)]
    raw = storage([block for at, block in here if at == here[0][0]], stage)
    return ShardedTensor(raw, x.place._replace(mesh=stage))


def _rows(x: object) -> int:
    return x.shape[0] if isinstance(x, Tensor) and x.ndim else 1


def _blocks(x: object) -> int:
    """Count the blocks into which a mesh splits the rows of an argument."""
    if not isinstance(x, ShardedTensor) or x.ndim == 0:
        return 1
    return x.padded_shape[0] // max(1, block_shape(x.raw, x.mesh)[0])


def _parts(x: object, count: int, rows: int, blocks: int) -> list[Any]:
    """Cut one argument.  Raises: UnevenSplit, with a number of micro-batches that fits.

    A micro-batch has rows of each of the ``blocks`` into which any argument is split, so that all
    arguments have the same rows in it.
    """
    if not isinstance(x, Tensor) or x.ndim == 0 or (x.shape[0] == 1 and rows > 1):
        return [x] * count
    inner = blocks // _blocks(x)
    if not isinstance(x, ShardedTensor):
        return _cut(x, x, count, inner, blocks)
    if x.is_padded:
        raise _uneven(f"a padded batch cannot be cut into {count} micro-batches", x, 1)
    parts = _cut(x, x.raw, count, inner, blocks)
    size = torch.Size((x.shape[0] // count, *x.shape[1:]))
    return [x.becomes(part.contiguous(), None, size) for part in parts]


def _cut(x: Tensor, raw: Tensor, count: int, inner: int, blocks: int) -> list[Tensor]:
    """Cut the storage of an argument, ``inner`` blocks of rows, each into ``count`` parts."""
    # a storage of simulated ranks has their dimension before the rows
    dim = raw.ndim - x.ndim
    here = raw.shape[dim]
    if here % (count * inner):
        where = f" in {blocks} blocks" if inner > 1 else ""
        if blocks > inner:
            where = " on each rank"
        fits = next((d for d in range(count, 0, -1) if here % (d * inner) == 0), 1)
        raise _uneven(f"{here} rows{where} are not {count} equal micro-batches", x, fits)
    cut = raw.unflatten(dim, (inner, count, -1))
    return [part.flatten(dim, dim + 1) for part in cut.unbind(dim + 1)]


def _uneven(why: str, x: Tensor, fits: int) -> UnevenSplit:
    fix = f"sl.value_and_grad(loss, microbatches={fits})"
    return UnevenSplit(why, op="value_and_grad", operands={"batch": typeof(x)}, fix=fix)
