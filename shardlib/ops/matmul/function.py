"""Autograd function of one product Y = X W, for any schedule.

A schedule is local code on this rank's blocks and axis names that computes Y and the two gradients.
``Product`` does the rest for all of them: wrapping blocks for the mesh, saving, skipping gradients
that are not needed, and second derivatives.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardlib._compat import Local, owned
from shardlib.collectives import lead, unwrap, wrap
from shardlib.mesh import Mesh, bind, scope
from shardlib.tensor import total, vary

__all__ = ["NOWHERE", "Axes", "Gradients", "Product", "Schedule"]

Axes = tuple[str, ...]
Gradients = tuple[Tensor | None, Tensor | None]

NOWHERE: tuple[Axes, Axes] = ((), ())


@runtime_checkable
class Schedule(Protocol):
    """Protocol of an algorithm on local blocks and axis names; usually a frozen dataclass.

    ``summed``  the mesh axes over which Y is summed and then whole on every rank; () for most.

    It gets no mesh, no process group and no rank number: ``sl.all_gather`` and the other
    collectives move blocks, and ``sl.axis_size`` returns a size.  On a simulated mesh the same
    code runs once for all ranks, so it must not branch on ``sl.axis_index``.

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
        """Return Y, with the bias added, and the blocks of X and of W to save for backward.

        If these are not x and w themselves, a schedule with ``saves_blocks`` has a method
        ``blocks(x, w)`` that returns them without computing Y, for regions that kept Y.
        """
        ...

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Return the gradients of X and of W that are needed, each summed over further mesh axes.

        Where gradients are recorded, for a second derivative, every step must be differentiable;
        ``over`` is empty then.
        """
        ...


class Product(Local):
    """apply(schedule, mesh, over, x, w, bias): the raw block of Y from those of x, w and bias.

    ``over``  further axes over which the gradients of x and of w are summed.
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
        with bind(mesh):
            region = scope().call.region
            if region is None and not lead(mesh):  # the usual case: storages are blocks
                y, *saved = schedule.forward(x, w, bias)
                ctx.save_for_backward(*saved)
                return owned(y)
            found = None if region is None else region.given()
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
        if x.is_complex():  # dX = dY W^H, but schedules only transpose, so conjugate here
            x, w = x.conj().resolve_conj(), w.conj().resolve_conj()
        need = ctx.needs_input_grad[3:5]
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
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
    """Return the blocks of X and of W to save for backward, where Y was kept."""
    blocks = getattr(schedule, "blocks", None)
    return (x, w) if blocks is None else blocks(x, w)


def _recorded(
    schedule: Schedule,
    mesh: Mesh,
    over: tuple[Axes, Axes],
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    need: Any,
) -> Gradients:
    """Return gradients that can be differentiated: ``vary`` and ``total`` place the sums."""
    dy, x, w = vary(dy, mesh, schedule.summed), vary(x, mesh, over[0]), vary(w, mesh, over[1])
    with bind(mesh):
        dx, dw = schedule.gradients(wrap(dy, mesh), wrap(x, mesh), wrap(w, mesh), need, NOWHERE)
    return (
        None if dx is None else total(unwrap(dx), mesh, over[0]),
        None if dw is None else total(unwrap(dw), mesh, over[1]),
    )
