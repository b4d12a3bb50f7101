"""Autograd function of one product Y = X W for any schedule, and what schedules have in common.

A schedule is local code on this rank's blocks and axis names that computes Y and the two gradients.
``Product`` does the rest for all of them: wrapping blocks for the mesh, saving, skipping gradients
that are not needed, and second derivatives.  Their helpers are early transfers, accumulation in
fp32, and K panels.
"""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local, owned
from shardlib.collectives import Pending, axis_size, lead, psum, start, unwrap, wrap
from shardlib.dtypes import HALF, wider
from shardlib.mesh import Mesh, bind, bound_scope, scope
from shardlib.optional import unless_none
from shardlib.tensor import total, vary
from shardlib.tensor.weight_gradients import WeightForm

Axes = tuple[str, ...]
Gradients = tuple[Tensor | None, Tensor | None]
Step = TypeVar("Step")

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
        bias: Tensor | None = None,
    ) -> Tensor:
        ctx.call = schedule, mesh, over
        with bind(mesh):
            region = scope().call.region
            if region is None and not lead(mesh):
                # the usual case: storages are blocks
                y, *saved = schedule.forward(x, w, bias)
                ctx.save_for_backward(*saved)
                return owned(y)
            found = None if region is None else region.given()
            bias = unless_none(wrap, bias, mesh)
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
        if x.is_complex():
            # dX = dY W^H, but schedules only transpose, so conjugate here
            x, w = x.conj().resolve_conj(), w.conj().resolve_conj()
        need = ctx.needs_input_grad[3:5]
        if torch.is_grad_enabled():
            # create_graph: the gradients must be differentiable
            return None, None, None, *_recorded(schedule, mesh, over, grads[0], x, w, need), None
        with bind(mesh):
            queued, later = False, bound_scope().call.later
            if later is not None and all(need):
                # detached, since x's graph holds what the layers before it saved
                of_w = partial(_of_w, schedule, mesh, over, grads[0], x.detach(), WeightForm.of(w))
                queued = later.put(ctx.next_functions[1], of_w, w)
                need = True, not queued
            if not lead(mesh):
                dx, dw = schedule.gradients(grads[0], x, w, need, over)
                return None, None, None, dx, None if queued else dw, None
            dx, dw = schedule.gradients(
                wrap(grads[0], mesh), wrap(x, mesh), wrap(w, mesh), need, over
            )
        dx, dw = unless_none(unwrap, dx), unless_none(unwrap, dw)
        return None, None, None, dx, None if queued else dw, None


def _of_w(
    schedule: Schedule, mesh: Mesh, over: tuple[Axes, Axes], dy: Tensor, x: Tensor, form: WeightForm
) -> Tensor | None:
    """Compute the gradient of W alone, after the backward that computed that of X."""
    w = form.zeros(dy)
    with bind(mesh):
        _, dw = schedule.gradients(
            wrap(dy, mesh), wrap(x, mesh), wrap(w, mesh), (False, True), over
        )
    return unless_none(unwrap, dw)


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
        found = schedule.gradients(wrap(dy, mesh), wrap(x, mesh), wrap(w, mesh), need, NOWHERE)
    dx, dw = (unless_none(unwrap, g) for g in found)
    return unless_none(total, dx, mesh, over[0]), unless_none(total, dw, mesh, over[1])


class DimMove(NamedTuple):
    """Gather a dimension over mesh axes, or scatter its sum; major axis first."""

    axes: tuple[str, ...]
    dim: int


def post(f: Any, x: Tensor, moves: tuple[DimMove, ...], **how: Any) -> Pending:
    """Start the moves: all but the last are waited for.

    Differentiable where a gradient is recorded.
    """
    if torch.is_grad_enabled():
        for move in moves:
            x = f(x, move.axes, move.dim, **how)
    elif moves:
        for move in moves[:-1]:
            x = f(x, move.axes, move.dim, **how)
        return start(f, x, moves[-1].axes, moves[-1].dim, **how)
    return Pending(lambda: x)


def ahead(posted: Iterable[Step], skipped: int = 0) -> Iterator[Step]:
    """Yield the transfers of step 0, 1, ...; those of step k+1 are sent while step k is computed.

    ``posted`` starts the transfers of a step when it is asked for them.
    ``skipped``  steps that are counted as equal to the last but one, see ``Panels.rounds``.
    """
    steps = iter(posted)
    now = next(steps)
    for k, coming in enumerate(steps, 1):
        yield now
        now = coming
        if skipped and k == _ROUNDS - 2:
            counted = scope().listeners.repeats.times(skipped)
        elif skipped and k == _ROUNDS - 1:
            counted()
    yield now


def nothing() -> None:
    """Do nothing; used in place of a wait before anything was posted."""


def accumulator(like: Tensor, *shape: int) -> Tensor:
    """Return zeros to add products into: fp32 for half precision operands."""
    return like.new_zeros(shape, dtype=wider(like.dtype))


def add_product(c: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to c in c's precision.

    a [.., M, K], b [.., K, N], c [.., M, N].
    """
    if c.dtype != a.dtype:
        a, b = a.to(c.dtype), b.to(c.dtype)
    if c.ndim == 2:
        c.addmm_(a, b)
    else:
        c.add_(a @ b)


def plus_product(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to c, or return it if c is None: one pass less than adding to zeros.

    a [.., M, K], b [.., K, N], c [.., M, N].
    """
    if c is None:
        return partial_product(a, b)
    add_product(c, a, b)
    return c


def partial_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a @ b as a part of a sum: half precision operands in fp32.

    a [.., M, K], b [.., K, N].
    """
    if a.dtype not in HALF:
        return a @ b
    if a.is_cuda and a.ndim == b.ndim == 2:
        # one kernel that reads half precision and writes fp32, without copies of a and b
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def rounded(
    c: Tensor,
    dtype: torch.dtype,
    over: tuple[str, ...] = (),
    wire: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Round an accumulator plus a bias to the operands' ``dtype``, after a sum over further axes.

    ``wire``  parts are sent in the accumulator's dtype, since they were
              rounded to ``dtype`` already.
    """
    if bias is not None:
        # every rank adds its share, since the sum over ``over`` adds up all of them
        c = c + bias.to(c.dtype) / (axis_size(over) if over else 1)
    if over:
        return psum(c, over, out=dtype, wire=c.dtype if wire else dtype)
    return c if c.dtype == dtype else c.to(dtype)


def summed_product(
    a: Tensor, b: Tensor, over: tuple[str, ...], bias: Tensor | None = None
) -> Tensor:
    """Compute a @ b + bias, summed over mesh axes.

    Half precision is multiplied in fp32, and rounded to be sent and after the sum.
    """
    if over or (bias is not None and type(bias) is not Tensor):
        return rounded(partial_product(a, b), a.dtype, over, bias=bias)
    # F.linear adds the bias before it rounds, as ``rounded`` does
    return a @ b if bias is None else F.linear(a, b.mT, bias)


# the first step, the last one, and two between: from one to the next is what each step takes
_ROUNDS = 4


class Panels(NamedTuple):
    """K panels; ``steps``: A's owner along ``col`` and slot there, B's along ``row`` and slot."""

    steps: list[tuple[int, int, int, int]]
    # panels that a rank owns of A, and of B
    of_a: int
    of_b: int

    def rounds(self) -> tuple[list[tuple[int, int, int, int]], int]:
        """Return the steps to run, and how many more are equal to one of them.

        They are all run, but where a call is priced on shapes: the first three and the last.
        """
        skipped = len(self.steps) - _ROUNDS
        if skipped <= 0 or scope().listeners.repeats is None:
            return self.steps, 0
        return [*self.steps[: _ROUNDS - 1], self.steps[-1]], skipped


@lru_cache(maxsize=256)
def panels(row: int, col: int, slices: int = 1) -> Panels:
    """Cut K into lcm(row, col) panels, so that each has one owner in both operands.

    Each panel is cut into ``slices``.

    >>> panels(1, 2).steps
    [(0, 0, 0, 0), (1, 0, 0, 1)]
    """
    n = math.lcm(row, col) * slices
    return Panels(
        [(*divmod(k, n // col), *divmod(k, n // row)) for k in range(n)], n // col, n // row
    )


def cut(x: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
    """Return the panels of ``x`` that this rank owns, as views."""
    return x.chunk(parts, dim) if parts > 1 else (x,)
