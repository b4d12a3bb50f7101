"""One product Y = X W as an autograd function, whatever its schedule.

A schedule is local code: it sees this rank's blocks and axis names, and says how Y and the two
gradients come about.  ``Product`` is the rest, once for all: blocks into the mesh and out of it,
what is saved, which gradients are wanted, and second derivatives.
"""

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local, any_autocast, owned
from shardlib.collectives import lead, unwrap, wrap
from shardlib.mesh import Mesh, bind, scope
from shardlib.tensor import total, vary

__all__ = ["NOWHERE", "Axes", "Gradients", "Product", "Schedule", "linear_of_blocks"]

Axes = tuple[str, ...]
Gradients = tuple[Tensor | None, Tensor | None]

NOWHERE: tuple[Axes, Axes] = ((), ())


@runtime_checkable
class Schedule(Protocol):
    """Way of multiplying local blocks by axis names; a frozen dataclass of what it must know.

    ``summed``  the mesh axes over which Y is summed and then whole on every rank; () for most.

    It sees no mesh, no process group and no rank number: ``sl.all_gather`` and its like move
    blocks, and ``sl.axis_size`` tells a size.  On a simulated mesh the same lines run once for
    all ranks, so that it must not branch on ``sl.axis_index``.

    >>> import torch, shardlib as sl
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Rows:  # x [M/axis, K], w [K, N] -> [M/axis, N]; dW is summed over the axis
    ...     summed: tuple[str, ...] = ()
    ...     def forward(self, x, w, bias):
    ...         return x @ w if bias is None else x @ w + bias, x, w
    ...     def gradients(self, dy, x, w, need, over):
    ...         dx, dw = dy @ w.mT, x.mT @ dy
    ...         return dx, sl.psum(dw, over[1]) if over[1] else dw
    >>> isinstance(Rows(), sl.extend.Schedule)
    True
    """

    @property
    def summed(self) -> Axes: ...

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Give Y, to which a bias is added, and what backward shall see of X and of W.

        Where that is not x and w themselves, a schedule with ``saves_blocks`` says it in a method
        ``blocks(x, w)`` without computing Y, for a region that has Y already (``"products"``).
        """
        ...

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Give the gradients of X and of W that are needed, each summed over further mesh axes.

        Where gradients are recorded, for a second derivative, every step must be differentiable;
        ``over`` is empty then.
        """
        ...


class Product(Local):
    """apply(schedule, mesh, over, x, w, bias): Y's raw block of theirs.

    ``over``  the axes over which the gradients of x and of w are summed besides.
    ``bias``  added before the result is rounded; its gradient is not computed here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        schedule: Schedule,
        mesh: Mesh,
        over: tuple[Axes, Axes],
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.call = schedule, mesh, over
        region = scope().region
        if region is None and not lead(mesh):  # the usual case: storages are blocks
            with bind(mesh):
                y, *saved = schedule.forward(x, w, bias)
            ctx.save_for_backward(*saved)
            return owned(y)
        found = None if region is None else region.given()
        with bind(mesh):
            bias = None if bias is None else wrap(bias, mesh)
            local = wrap(x, mesh), wrap(w, mesh)
            if found is None:
                y, *saved = schedule.forward(*local, bias)
            else:
                (y,), saved = found, _without_product(schedule, *local)
        ctx.save_for_backward(*map(unwrap, saved))
        if found is not None:
            return owned(y)
        y = owned(unwrap(y))
        if region is not None:
            blocks = saved[0] is local[0] and saved[1] is local[1]
            region.keep(*([y] if blocks or getattr(schedule, "saves_blocks", False) else []))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        schedule, mesh, over = ctx.call
        x, w = ctx.saved_tensors
        if x.is_complex():  # dX is dY times W's adjoint, and schedules transpose
            x, w = x.conj().resolve_conj(), w.conj().resolve_conj()
        need = ctx.needs_input_grad[3:5]
        if torch.is_grad_enabled():  # a gradient of the gradient will be asked for
            return None, None, None, *_recorded(schedule, mesh, over, grads[0], x, w, need), None
        if not lead(mesh):
            with bind(mesh):
                return None, None, None, *schedule.gradients(grads[0], x, w, need, over), None
        with bind(mesh):
            dx, dw = schedule.gradients(
                wrap(grads[0], mesh), wrap(x, mesh), wrap(w, mesh), need, over
            )
        dx = None if dx is None else unwrap(dx)
        return None, None, None, dx, None if dw is None else unwrap(dw), None


def _without_product(schedule: Schedule, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return what backward shall see of X and of W, where Y is there already."""
    blocks = getattr(schedule, "blocks", None)
    return (x, w) if blocks is None else blocks(x, w)


def linear_of_blocks(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute torch's linear of blocks, of which nothing moves.

    A weight whose gradient goes into a bucket has it written there by the product itself: it is
    not written to new memory first, and copied.
    """
    into = w.__dict__.get("into")
    if into is None or any_autocast() or not torch.is_grad_enabled():
        return F.linear(x, w, bias)
    if x.ndim < 2 or not x.numel() or x.is_complex() or not x.is_contiguous():
        return F.linear(x, w, bias)
    return _IntoBucket.apply(x, w, bias, into)  # type: ignore[return-value]


class _IntoBucket(Local):
    """apply(x, w, bias, into): torch's linear.

    ``into``  a list of the sink that takes w's gradient, empty but while that backward runs, and
              w's number there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, into: Any) -> Tensor:
        ctx.into = into
        ctx.save_for_backward(x, w)
        return owned(F.linear(x, w, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias, _ = ctx.needs_input_grad
        rows, dy = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, w.shape[0])
        dx = (dy @ w).view(x.shape) if need_x else None
        dw = None
        if need_w:
            takers, leaf = ctx.into
            if takers and not torch.is_grad_enabled():
                dw = takers[0].take_product(leaf, dy.mT, rows)
            dw = dy.mT @ rows if dw is None else dw
        return dx, dw, dy.sum(0) if need_bias else None, None


def _recorded(
    schedule: Schedule,
    mesh: Mesh,
    over: tuple[Axes, Axes],
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    need: Any,
) -> Gradients:
    """Return gradients that can be differentiated: sums of what is the same on all ranks are so."""
    dy, x, w = vary(dy, mesh, schedule.summed), vary(x, mesh, over[0]), vary(w, mesh, over[1])
    with bind(mesh):
        dx, dw = schedule.gradients(wrap(dy, mesh), wrap(x, mesh), wrap(w, mesh), need, NOWHERE)
    return (
        None if dx is None else total(unwrap(dx), mesh, over[0]),
        None if dw is None else total(unwrap(dw), mesh, over[1]),
    )
