"""Shared gather: X is gathered once for all products that read it; their gradients are summed once.

``gathered`` caches the gathered copy on the value.  Its gradient is one autograd node, which runs
after every product that took part has added its own, so the sum is right even if a backward leaves
some of them out.  Products that save blocks gather X once more in backward, also together.

The copy is freed after the last product that reads it, where that is known (prefetch.py), or with
the value.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import all_gather, psum_scatter, unwrap, wrap
from shardlib.dtypes import is_half
from shardlib.mesh import Mesh, bind, current_mesh
from shardlib.ops.matmul.function import DimMove, post, rounded
from shardlib.tensor import ShardedTensor, Wide, made_of, real_axes, total, vary

Axes = tuple[str, ...]


class Again:
    """Gather of X in backward, shared by the products that save only blocks.

    ``readers``  number of them, counted in forward.
    """

    def __init__(self, moves: tuple[DimMove, ...], over: Axes, mesh: Mesh) -> None:
        self.moves, self.over, self.mesh = moves, over, mesh
        self.readers = self.done = 0
        # fp32 sum of half precision gradients
        self.sum = Wide()
        self.wide: Tensor | None = None

    def gather(self, raw: Tensor) -> Tensor:
        """Gather X for one reader's backward; after the last reader the copy is freed."""
        # create_graph: each reader needs a gather of its own, recorded in its graph
        if torch.is_grad_enabled():
            with bind(self.mesh):
                return unwrap(_gather(wrap(vary(raw, self.mesh, self.over), self.mesh), self.moves))
        if self.wide is None:
            with bind(self.mesh):
                self.wide = unwrap(_gather(wrap(raw, self.mesh), self.moves))
        wide, self.done = self.wide, self.done + 1
        if self.done % self.readers == 0:
            self.wide = None
        return wide


@dataclass(frozen=True, kw_only=True)
class ReadsShared:
    """Part of a schedule whose X was gathered for several products.

    ``again``  the gather of the block ``x`` that backward makes once for all of them; the schedule
               may outlive the graph of x (tensor/weight_gradients.py).
    ``wide``   fp32 accumulator of X's gradient, for the node that scatters it for all.
    """

    again: Again | None = None
    x: "weakref.ref[Tensor] | None" = None
    wide: Wide | None = None

    def blocks(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the blocks for backward: X's own block, if it will be gathered again."""
        block = None if self.x is None else self.x()
        if self.again is None or block is None:
            return x, w
        self.again.readers += 1
        return wrap(block, current_mesh()), w

    def whole(self, x: Tensor, needed: bool) -> Tensor:
        """Return backward's X, gathered again from the block that was saved."""
        if self.again is None or not needed:
            return x
        return wrap(self.again.gather(unwrap(x)), current_mesh())

    def left(self, dx: Tensor | None) -> Tensor | None:
        """Return X's gradient, unless it is added to those of the other products."""
        if self.wide is None or dx is None:
            return dx
        self.wide.add(unwrap(dx))
        return None


def _gather(x: Tensor, moves: tuple[DimMove, ...]) -> Tensor:
    return post(all_gather, x, moves).wait()


class _SharedGather(Local):
    """apply(again, raw): gather; the gradient is scattered, and summed over further axes."""

    @staticmethod
    def forward(ctx: Any, again: Again, raw: Tensor) -> Tensor:
        ctx.again, ctx.dtype = again, raw.dtype
        ctx.set_materialize_grads(False)
        with bind(again.mesh):
            return unwrap(_gather(wrap(raw, again.mesh), again.moves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        again, dtype = ctx.again, ctx.dtype
        mesh, g = again.mesh, again.sum.take(grads[0])
        again.wide = None
        if g is None:
            return None, None
        with bind(mesh):
            if torch.is_grad_enabled():
                return None, total(
                    unwrap(post(psum_scatter, wrap(g, mesh), again.moves).wait()), mesh, again.over
                )
            x = wrap(g.float() if dtype.itemsize == 2 else g, mesh)
            return None, unwrap(
                rounded(
                    post(psum_scatter, x, again.moves, wire=dtype).wait(), dtype, again.over, True
                )
            )


def gathered(
    x: ShardedTensor, moves: tuple[DimMove, ...], over: Axes, again: bool = True
) -> tuple[Tensor, dict[str, Any]]:
    """Gather X by ``moves``, once; its gradient is also summed over ``over``.

    Return also the fields of ReadsShared for a product that reads it.
    ``again``  whether its backward gathers X once more, with the other products'.
    """
    found, key = made_of(x), ("gather", moves, over)
    if key not in found:
        once = Again(moves, real_axes(x.mesh, over), x.mesh)
        found[key] = _SharedGather.apply(once, x.raw), once
    whole, once = found[key]
    shared: dict[str, Any] = {"wide": once.sum if is_half(whole) else None}
    if again:
        found["again", moves, over] = None
        shared |= {"again": once, "x": weakref.ref(x.raw)}
    return whole, shared


def let_go(x: ShardedTensor) -> None:
    """Free gathered copies that no later product reads."""
    found = made_of(x)
    for key in [k for k in found if k[0] != "vary"]:
        del found[key]
