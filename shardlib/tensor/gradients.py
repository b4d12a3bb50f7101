"""Gradients of sharded values: where a gradient is summed, and its layout in the global view.

Gradients in the global view have their value's own layout: a split value has a split cotangent, a
replicated value a replicated one, and a pending sum (``+ sum(x)``) a replicated one.  Two
functions, each the other's transpose, hold for all operators (docs/decisions/0001):

``vary``   used where a value that is replicated along mesh axes is combined with data that is not:
           identity forward, psum backward.  Megatron-LM calls it f; JAX's shard_map, pvary.
``total``  a sum over mesh axes whose result is the same on every rank: psum forward, the identity
           backward.  Megatron-LM calls it g; in JAX it is psum of a varying value.

``settle`` ends a deferral: a parameter whose gradient is left as pending sums (``deferred``; JAX
calls such a cotangent unreduced) has its gradient divided where the value is used in full.

Source: arXiv 1909.08053, section 3, for f and g.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local, backward_now
from shardlib.collectives import block_shape, flat_blocks, psum, unwrap, wrap
from shardlib.dtypes import is_half, wide, wider
from shardlib.mesh import Mesh, bind
from shardlib.optional import unless_none
from shardlib.tensor.grad_coalescing import together_of
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import Facts, ShardedTensor

Value = TypeVar("Value", bound=Tensor)
Map = Callable[[Tensor], Tensor]


class Wide:
    """fp32 gradient accumulator of a half precision value, rounded once after all products added.

    Autograd carries gradients in their value's dtype.  Products that read the same value add their
    gradients here instead and return None to autograd; the node that sums them runs last and takes
    what was added during this backward.
    """

    __slots__ = ("sum", "task")

    def __init__(self) -> None:
        self.task, self.sum = -1, None

    def add(self, g: Tensor) -> None:
        """Add ``g`` in fp32; the caller must not use ``g`` afterwards."""
        task = backward_now()
        if self.task == task and self.sum is not None:
            self.sum += g
        else:
            # a sum left by another backward that never reached the summing node is dropped
            self.task, self.sum = task, g

    def take(self, g: Tensor | None) -> Tensor | None:
        """Return the sum of all that was added and of ``g``, which autograd delivered."""
        mine = self.sum if self.task == backward_now() else None
        self.task, self.sum = -1, None
        if mine is None or g is None:
            return g if mine is None else mine
        return mine.add_(g)


class _Vary(Local):
    """Identity; the gradient is summed over ``axes``."""

    @staticmethod
    def forward(
        ctx: Ctx, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], wide: Wide | None = None
    ) -> Tensor:
        ctx.mesh, ctx.axes, ctx.wide, ctx.dtype = mesh, axes, wide, raw.dtype
        ctx.leaf = together_of(raw)
        ctx.set_materialize_grads(False)
        return raw.view_as(raw)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        g = grads[0] if ctx.wide is None else ctx.wide.take(grads[0])
        if g is None:
            return None, None, None, None
        # the parts are sent in half precision and summed in fp32
        narrow = ctx.dtype if wider(ctx.dtype) != ctx.dtype else None
        g = wide(g)
        if _handed_over(ctx.leaf, g, ctx.mesh, ctx.axes, narrow, narrow):
            return None, None, None, None
        return _Sum.apply(g, ctx.mesh, ctx.axes, narrow, narrow), None, None, None


def _handed_over(
    leaf: Any,
    g: Tensor,
    mesh: Mesh,
    axes: tuple[str, ...],
    narrow: torch.dtype | None,
    wire: torch.dtype | None = None,
) -> bool:
    """Hand a leaf's gradient to ``Together``, which sums several at once; False if it cannot."""
    if leaf is None or not leaf[0].takes(leaf[1]):
        return False
    leaf[0].take(leaf[1], g, mesh, axes, narrow, wire)
    return True


class _Sum(Local):
    """psum whose result, and whose cotangent, is the same on every rank: backward is identity."""

    @staticmethod
    def forward(
        ctx: Ctx,
        raw: Tensor,
        mesh: Mesh,
        axes: tuple[str, ...],
        narrow: torch.dtype | None = None,
        wire: torch.dtype | None = None,
    ) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        with bind(mesh):
            out = unwrap(psum(wrap(raw, mesh), axes, out=narrow, wire=wire))
        # autograd refuses writes to an alias
        return out.clone() if out._is_view() else out

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        # _Vary in place of the identity, so that second derivatives are summed as well
        return _Vary.apply(grads[0], ctx.mesh, ctx.axes), None, None, None, None


class _Mapped(Local):
    """apply(raw, back, f): see ``mapped``."""

    @staticmethod
    def forward(ctx: Ctx, raw: Tensor, back: Map, f: Map | None) -> Tensor:
        ctx.back = back
        ctx.set_materialize_grads(False)
        return raw.view_as(raw) if f is None else f(raw)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        return unless_none(ctx.back, grads[0]), None, None


def mapped(raw: Tensor, back: Map, f: Map | None = None) -> Tensor:
    """Return ``f`` of a block, the identity if None; its gradient is ``back`` of the cotangent.

    Neither keeps a tensor: what backward reads is saved by a Function of its own.
    """
    return _Mapped.apply(raw, back, f)


def shared(raw: Tensor, count: int) -> Tensor:
    """Mark a value that ``count`` ranks all return: each gets 1 / count of its gradient."""
    return mapped(raw, lambda g: g / count)


def of_pending(raw: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Mark an operand that is pending over ``axes`` and is multiplied by one that is not.

    Each rank along them computes the same, full gradient of its part, from values marked by
    ``vary``; the derivative of that gradient is shared.
    """
    over = real_axes(mesh, axes)
    if not (over and raw.requires_grad):
        return raw
    return mapped(raw, lambda g: shared(g, mesh.axis_size(over)))


def to_pending(raw: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Mark the product of such operands as pending over the same axes.

    Its cotangent is replicated, and its derivative is summed, by ``vary``.
    """
    over = real_axes(mesh, axes)
    if not (over and raw.requires_grad):
        return raw
    return mapped(raw, lambda g: _Vary.apply(g, mesh, over))


def vary(raw: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Mark a value that is replicated along ``axes`` as combined with data that is not.

    Identity forward; backward is one psum over ``axes``.
    """
    over = real_axes(mesh, axes)
    return _Vary.apply(raw, mesh, over) if over and raw.requires_grad else raw


_SERIAL = itertools.count()


def made_of(x: ShardedTensor) -> dict[Any, Any]:
    """Return the cache of values derived from x; it is empty after a change in place.

    Under inference mode there are no version counters to detect such changes, so nothing is cached.
    """
    raw = x.raw
    if raw.is_inference():
        return {}
    version, tracked = raw._version, raw.requires_grad and torch.is_grad_enabled()
    facts = x.facts
    if facts is None:
        facts = x.facts = Facts()
    block, then, recorded = facts.of
    if facts.derived is None or block is not raw or (then, recorded) != (version, tracked):
        facts.derived, facts.of, facts.serial = {}, (raw, version, tracked), next(_SERIAL)
    return facts.derived


def varied_wide(x: ShardedTensor, axes: Collection[str]) -> tuple[Tensor, Wide | None]:
    """Call ``vary`` once per value; products of half precision add their gradients in fp32."""
    over = real_axes(x.mesh, axes)
    if not (over and x.raw.requires_grad and torch.is_grad_enabled()):
        return x.raw, None
    found = made_of(x)
    key = ("vary", over)
    if key not in found:
        wide = Wide() if is_half(x.raw) else None
        found[key] = _Vary.apply(x.raw, x.mesh, over, wide), wide
    return found[key]


def widened(
    raws: Sequence[Tensor | None],
    mesh: Mesh,
    overs: Sequence[Collection[str]],
    matrices: bool = False,
) -> list[Tensor | None]:
    """Call ``vary`` on several values, widen half precision ones, and sum gradients together.

    Gradients that are summed over the same axes share one psum; those of half precision values are
    sent and summed in fp32, and rounded once.

    ``matrices``  those of two dimensions and more are sent in half precision, as a product's are.
    """
    out = list(raws)
    together: dict[Any, list[int]] = {}
    for i, (raw, over) in enumerate(zip(raws, overs, strict=True)):
        if raw is None:
            continue
        axes = real_axes(mesh, over) if raw.requires_grad else ()
        if axes:
            narrow = matrices and is_half(raw) and len(block_shape(raw, mesh)) > 1
            wire = raw.dtype if narrow else None
            together.setdefault((axes, raw.dtype, wire), []).append(i)
        else:
            out[i] = wide(raw)
    for (axes, _, wire), alike in together.items():
        found: Any = _VaryAll.apply(mesh, axes, wire, *[raws[i] for i in alike])
        for i, t in zip(alike, found, strict=True):
            out[i] = t
    return out


class _VaryAll(Local):
    """apply(mesh, axes, wire, *raws): identity, half ones to fp32; the gradients share a psum."""

    @staticmethod
    def forward(
        ctx: Ctx, mesh: Mesh, axes: tuple[str, ...], wire: torch.dtype | None, *raws: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.axes, ctx.narrow = mesh, axes, raws[0].dtype if is_half(raws[0]) else None
        ctx.wire = wire
        ctx.leaves = [together_of(raw) for raw in raws]
        ctx.set_materialize_grads(False)
        return tuple(raw.view_as(raw) if ctx.narrow is None else raw.float() for raw in raws)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> Grads:
        mesh, how = ctx.mesh, (ctx.axes, ctx.narrow, ctx.wire)
        grads = tuple(
            None if g is None or _handed_over(leaf, g, mesh, *how) else g
            for leaf, g in zip(ctx.leaves, grads, strict=True)
        )
        came = [g for g in grads if g is not None]
        if not came:
            return None, None, None, *grads
        if len(came) == 1:
            sums = [_Sum.apply(came[0], mesh, *how)]
        else:
            flat = [flat_blocks(g, mesh) for g in came]
            both: Any = _Sum.apply(torch.cat(flat, -1), mesh, *how)
            parts = both.split([f.shape[-1] for f in flat], -1)
            sums = [part.reshape(g.shape) for part, g in zip(parts, came, strict=True)]
        found = iter(sums)
        return None, None, None, *(None if g is None else next(found) for g in grads)


def total(
    raw: Tensor,
    mesh: Mesh,
    axes: Collection[str],
    narrow: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Tensor:
    """Sum over ``axes``; the result is replicated and so is its cotangent.

    ``narrow``  the dtype of the result, where raw is wider: it is rounded once.
    ``wire``    the dtype in which the parts are sent, raw's own if None; a narrower one rounds
                each part before the sum, which loses precision where parts cancel.
    """
    over = real_axes(mesh, axes)
    if over:
        return _Sum.apply(raw, mesh, over, narrow, wire)
    return raw if narrow is None else raw.to(narrow)


def vjp_again(
    f: Callable[..., Tensor],
    mesh: Mesh,
    inputs: Sequence[Tensor | None],
    overs: Sequence[Collection[str]],
    g: Tensor,
) -> list[Tensor | None]:
    """Return the gradients of f(*inputs) as functions that can be differentiated again.

    For backward in grad mode.
    ``inputs``  saved raw inputs, still attached to their graph.
    ``overs``   for each input, the axes over which its gradient is summed.
    """
    met = [unless_none(vary, t, mesh, over) for t, over in zip(inputs, overs, strict=True)]
    need = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(f(*met), need, g, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def real_axes(mesh: Mesh, axes: Collection[str]) -> tuple[str, ...]:
    """List the axes of more than one rank, in mesh order, which is the same on every rank."""
    return tuple([a for a, n in mesh.axes.items() if n > 1 and a in axes]) if axes else ()


def settle(x: ShardedTensor) -> ShardedTensor:
    """End a deferral: from here on the value's cotangent is replicated again."""
    if not x.deferred:
        return x
    raw = shared(x.raw, x.mesh.axis_size(tuple(x.deferred)))
    return ShardedTensor(raw, Place(x.sharding, x.shape, x.mesh, x.padded_shape))


def gradient_place(place: Place) -> Place:
    """Return the place of a value's gradient: same layout, unsummed over the deferred axes."""
    layout = place.layout
    if place.deferred or layout.partial:
        layout = replace(layout, partial=tuple(place.deferred))
    return Place(layout, place.shape, place.mesh, place.tiled)


def gradient_of(x: ShardedTensor, raw_grad: Tensor) -> ShardedTensor:
    """Wrap a gradient block: ``x``'s layout, unsummed over the axes that ``x`` defers."""
    return ShardedTensor(raw_grad, gradient_place(x.place))
