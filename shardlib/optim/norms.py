"""Norms of whole tensors and of all gradients, clipping by them, and guards: skipped steps, loss scale.

A block counts on the first of the ranks that hold copies of it; its padding never counts.  All
tensors of a mesh share one psum of fp64 scalars.  A tensor in a bucket of ``zero`` counts for any
cut.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse, groupby
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import (
    blocks,
    flat_blocks,
    played,
    pmax,
    psum,
    psum_scatter,
    storage,
    unwrap,
    wrap,
)
from shardlib.dtypes import HALF, wider
from shardlib.errors import ShardError
from shardlib.kernels import active
from shardlib.kernels.active import Backend
from shardlib.kernels.apex import apex
from shardlib.mesh import Mesh, bind, scope, within
from shardlib.ops.padding import filled
from shardlib.optim.buckets import vector
from shardlib.optim.transform import (
    STEPS,
    Later,
    Posted,
    Range,
    Step,
    Transform,
    check_transform,
    handed_on,
    on_host,
    ranged,
    run_in_place,
    stateless,
    told,
    under,
)
from shardlib.optim.trees import (
    State,
    TensorView,
    Tree,
    by_tensor,
    cleared,
    each,
    named,
    nothing,
    ready,
    stages_around,
    without,
)
from shardlib.optional import optional_text, unless_none
from shardlib.tensor import ShardedTensor

BLOCK = 1 << 16
"""Elements that are summed in fp64 at a time, so that no full fp64 copy is made."""

Numbers = list[Tensor | None]


def squares(x: Tensor) -> Tensor:
    """Sum the squares of a block's elements, in fp64.

    fp32 would lose all but three digits of a sum over 20 M elements.
    """
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    if (not x.is_cpu or active.cpu) and (norm := apex("l2norm", flat)) is not None:
        return norm([flat]).double().square().sum()
    if not x.is_cpu:
        # the kernel widens while it reads, and adds in a tree
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in flat.split(BLOCK):
        wide = part.double()
        total += wide.dot(wide)
    return total


def powers(p: float) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a block's p-th powers, or finds its largest for p = inf."""
    if p == 2:
        return squares

    def of(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for part in x.reshape(-1).split(BLOCK):
            size = part.abs().double()
            total = torch.maximum(total, size.amax()) if p == math.inf else total + (size**p).sum()
        return total

    return of


def totals(
    *trees: Tree, of: Callable[[Tensor], Tensor] = squares, most: bool = False
) -> list[Numbers]:
    """Sum ``of`` (or find its largest, ``most``) over each tensor of each tree; None stays None.

    ``of``  a block -> a 0-dim fp64 tensor.
    Moves one psum (pmax) per mesh, of 8 bytes per tensor.
    """
    out: list[Numbers] = []
    places: dict[Mesh | None, list[tuple[TensorView, Numbers, int]]] = {}
    for tree in trees:
        views = by_tensor(cleared(tree))
        out.append([None] * len(views))
        for i, one in enumerate(views):
            if one is not None:
                places.setdefault(one.mesh, []).append((one, out[-1], i))
    for mesh, mine in places.items():
        zero = torch.zeros((), dtype=torch.float64, device=mine[0][0].like.device)
        rows = list(zip(*(_shares(one, of, zero) for one, *_ in mine), strict=True))
        values = rows[0]
        if mesh is not None:
            values = over_ranks(list(map(torch.stack, rows)), mesh, pmax if most else psum).unbind()
        for (_, numbers, i), value in zip(mine, values, strict=True):
            numbers[i] = value
    return out


def over_ranks(
    rows: Sequence[Tensor], mesh: Mesh | None, by: Callable[..., Tensor] = psum
) -> Tensor:
    """Sum a plain tensor of each rank over the whole mesh; return the sum, which all ranks get."""
    if mesh is None:
        return rows[0]
    with bind(mesh):
        return blocks(unwrap(by(wrap(storage(rows, mesh), mesh), mesh.names)), mesh)[0]


def norms(*trees: Tree) -> list[Numbers]:
    """Compute the Euclidean norm of each tensor of each tree, in fp64; see ``totals``."""
    return [[unless_none(torch.sqrt, t) for t in row] for row in totals(*trees)]


def scaled(tree: Tree, numbers: Sequence[Tensor | None]) -> Tree:
    """Multiply each tensor of the tree by its number, in ``totals``' order."""
    with torch.no_grad():
        out = each(torch.clone, tree)
        scale_in_place(out, numbers)
        return out


def scale_in_place(tree: Tree, numbers: Sequence[Tensor | None]) -> None:
    """Multiply each tensor of the tree in place by its number, in ``totals``' order."""
    for one, by in zip(by_tensor(tree), numbers, strict=True):
        if one is None or by is None:
            continue
        for x in one.parts:
            if x is not None:
                x.mul_(_factor(by, x))


def _factor(by: Tensor, x: Tensor) -> Tensor:
    """Convert a scalar to ``x``'s dtype; kernels take one on the CPU without an upload."""
    return by.to(x.dtype) if by.device.type == "cpu" else by.to(x.device, x.dtype)


def _shares(one: TensorView, of: Callable[[Tensor], Tensor], zero: Tensor) -> list[Tensor]:
    """Compute each rank's part of a tensor's number: zero where a rank before has its elements."""
    rows = zip(firsts(one.mesh, one.axes), one.parts, strict=True)
    return [of(x) if f and x is not None and x.numel() else zero for f, x in rows]


def firsts(mesh: Mesh | None, axes: Sequence[str]) -> list[bool]:
    """Return, per rank in this process, whether it is the first of those with the same block.

    ``axes``  those that split it.
    """
    if mesh is None:
        return [True]
    others = [a for a in mesh.names if a not in axes]
    return [not any(c[a] for a in others) for c in played(mesh)]


# ---------------------------------------------------------------- pending sums

MOST_BYTES = 25 << 20
"""The most bytes of one reduce-scatter of pending values."""


def summed(leaves: Sequence[Any]) -> list[Any]:
    """Sum the pending leaves, as vectors of which each rank holds a part.

    Half precision is summed in fp32.  Moves (N-1)/N of the pending bytes, one psum_scatter per
    25 MiB.
    """
    out = list(filterfalse(_is_unsummed, leaves))

    def kind(x: ShardedTensor) -> Any:
        split = [a in x.sharding.axes for a in x.mesh.names]
        return id(x.mesh), x.sharding.partial, split, str(x.dtype)

    for _, alike in groupby(sorted(filter(_is_unsummed, leaves), key=kind), key=kind):
        batch: list[ShardedTensor] = []
        for x in alike:
            if batch and sum(b.raw.nbytes for b in (*batch, x)) > MOST_BYTES:
                out.append(_scattered(batch))
                batch = []
            # one collective for many leaves, in bounded memory
            batch.append(x)
        out.append(_scattered(batch))
    return out


def _is_unsummed(x: object) -> bool:
    return isinstance(x, ShardedTensor) and bool(x.sharding.partial)


def _scattered(batch: Sequence[ShardedTensor]) -> ShardedTensor:
    mesh, over = batch[0].mesh, batch[0].sharding.partial
    with torch.no_grad(), bind(mesh):
        rows = [filled(x, 0).raw.detach() for x in batch]
        flat = torch.cat([flat_blocks(r, mesh) for r in rows], -1)
        ways = mesh.axis_size(over)
        # zeros at the end count in no norm
        flat = F.pad(flat, (0, -flat.shape[-1] % ways))
        half = flat.dtype in HALF
        wide, wire = (flat.float(), flat.dtype) if half else (flat, None)
        part = unwrap(psum_scatter(wrap(wide, mesh), over, 0, wire))
    axes = (*(a for a in mesh.names if a in batch[0].sharding.axes), *over)
    return ShardedTensor(part, vector(flat.shape[-1] // ways, axes, mesh))


# ---------------------------------------------------------------- the global norm, and clipping


def global_norm(tree: Tree, p: float = 2.0) -> Tensor:
    """Compute the p-norm of all leaves together, counting each element once in any layout.

    ``p``  positive, or inf for the largest.
    Powers accumulate in fp64.  Moves one psum of a scalar over the whole mesh, and one over the
    stages of a pipeline, of which a parameter that several stages hold counts once; leaves with a
    pending sum are reduce-scattered first, (N-1)/N of their bytes, since the norm of a sum needs
    the sum.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     global_norm({"a": sl.shard(torch.ones(4, 4), "x y"), "b": sl.shard(torch.ones(9), ".")})
    tensor(5., dtype=torch.float64)
    """
    if not p > 0:
        raise ShardError(
            f"the norm of order {p}: orders are positive",
            op="global_norm",
            fix="sl.optim.global_norm(grads, p=2.0)",
        )
    leaves = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    key = (p, *(id(x) for x in leaves))
    known = scope().norms
    if known is not None and key in known:
        return known[key][1]
    outer = stages_around(leaves[:1] or tree)
    total = _together(leaves if outer is None else without(tree, outer.copies), p)
    if outer is not None:
        with bind(outer.mesh):
            by = pmax if p == math.inf else psum
            total = by(total.to(outer.mesh.device).reshape(1), outer.axis).reshape(())
    total = total if p == math.inf else total ** (1 / p)
    if known is not None:
        # the leaves are kept alive, so that no id is reused
        known[key] = leaves, total
    return total


def _together(leaves: Sequence[Tensor], p: float) -> Tensor:
    """Sum the p-th powers of all leaves, or find the largest for p = inf."""
    (found,) = totals(summed(leaves), of=powers(p), most=p == math.inf)
    parts = [t for t in found if t is not None]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    together = torch.stack([t.to(parts[0].device) for t in parts])
    return together.amax() if p == math.inf else together.sum()


def run_measured(tx: Transform, grads: Tree, state: State, params: Tree, step: Step) -> State:
    """Run one step in place, after the norm of the gradients if the caller asks for it."""
    if step.ask and step.norm is None:
        step.norm = global_norm(grads)
    return run_in_place(tx, grads, state, params, step)


@contextmanager
def norms_known() -> Iterator[None]:
    """Cache norms inside the ``with``: the norm of the same leaves is computed once."""
    with within(norms={} if scope().norms is None else scope().norms):
        yield


def is_finite(tree: Tree) -> Tensor:
    """Return whether every element is finite: a 0-dim bool that is the same on every rank.

    It tests the global norm, so inside ``norms_known`` it moves nothing if that norm is known.  A
    pending sum is tested as the sum: finite parts may overflow together.

    >>> is_finite({"a": torch.ones(2), "b": torch.tensor(float("nan"))})
    tensor(False)
    """
    return torch.isfinite(global_norm(tree))


class ClipState(NamedTuple):
    """The norm of the last step, if a device had it and the host has not read it."""

    last: tuple[Posted, ...] = ()

    def at_rest(self) -> "ClipState":
        """Return the state of a checkpoint."""
        return ClipState()


@ranged("sl.optim.clip_by_global_norm(1.0)")
def clip_by_global_norm(
    max_norm: float, p: float = 2.0, *, check: bool = True, backend: Backend = "auto"
) -> Transform:
    """Scale all updates so that their global norm is at most ``max_norm``.

    Like torch.nn.utils.clip_grad_norm_, on gradients of any layout.  Pending sums stay pending;
    their norm moves the bytes given in ``global_norm``.
    ``check``    raise if the norm is not finite, before anything has changed.  ``optim.step`` on an
                 accelerator changes nothing in such a step either, but raises in the next, so that
                 the host does not wait.  ``tx.update`` waits.
    ``backend``  "apex": norms of blocks by its multi-tensor kernel, in fp32 (else fp64 sums).
    Raises: ShardError if the norm is not finite; ``skip_nonfinite`` skips such steps instead.

    >>> tx = clip_by_global_norm(1.0)
    >>> tx.update(torch.tensor([3.0, 4.0]), tx.init(None))[0]
    tensor([0.6000, 0.8000])
    """

    def over(norm: Tensor) -> Tensor:
        # the inverse of torch's clip_coef = max_norm / (norm + 1e-6), at most 1
        return ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def known(grads: Tree, step: Step) -> Tensor:
        return step.unscaled(global_norm(grads, p))

    def decide(norm: Tensor, grads: Tree, step: Step) -> None:
        """Refuse a norm that is not finite: on the host at once, else step only where it is."""
        if not on_host(norm):
            step.require(torch.isfinite(norm))
        elif not _is_number(norm, told):
            raise _no_number(norm, grads)

    def update(grads: Tree, state: ClipState, params: Tree = None) -> tuple[Any, ClipState]:
        norm = known(grads, Step())
        if check and not _is_number(norm, Tensor.item):
            raise _no_number(norm, grads)
        by = over(norm)
        return each(lambda g: g / by.to(g.device, g.dtype), grads), state

    def rescale(grads: Tree, state: ClipState, params: Tree, step: Step) -> ClipState:
        step.norm = known(grads, step)
        step.divide(over(step.norm))
        if check:
            decide(step.norm, grads, step)
        if not check or on_host(step.norm):
            return state
        own = step.norm if step.skips is None else step.norm.masked_fill(step.skips, 0)
        return ClipState((Posted(own, _error),))

    def look(grads: Tree, state: ClipState, params: Tree, step: Step) -> None:
        decide(known(grads, step), grads, step)

    tx = Transform(lambda params: ClipState(), update, "norm", rescale=rescale)
    return under(backend, tx._replace(check=look if check else None))


def _error(norm: float) -> ShardError | None:
    """Return the error of the step before: its norm is not finite."""
    if math.isfinite(norm):
        return None
    return ShardError(
        f"the norm of the gradients was {norm} in the step before, which changed nothing",
        op="clip_by_global_norm",
        fix="tx = sl.optim.skip_nonfinite(tx)",
    )


def _no_number(norm: Tensor, grads: Tree) -> ShardError:
    """Build the error for a norm that is not finite, with gradients that are not."""
    bad = list(dict.fromkeys(_not_finite(grads)))
    return ShardError(
        f"the norm of the gradients is {float(norm)}"
        + optional_text(": not a number here are {}", ", ".join(bad[:4])),
        op="clip_by_global_norm",
        fix="tx = sl.optim.skip_nonfinite(tx)",
    )


def _not_finite(grads: Tree) -> Iterator[str]:
    """List the paths of gradients that are not finite on the ranks in this process."""
    for name, view in zip(named(grads, once=True), by_tensor(grads), strict=True):
        parts = () if view is None else [x for x in view.parts if x is not None]
        if not all(bool(torch.isfinite(x).all()) for x in parts):
            yield name


@ranged("sl.optim.clip_by_value(1.0)")
def clip_by_value(limit: float) -> Transform:
    """Clamp every element of the updates to [-limit, limit]; torch.nn.utils.clip_grad_value_.

    >>> tx = clip_by_value(1.0)
    >>> tx.update(torch.tensor([-3.0, 0.5]), tx.init(None))[0]
    tensor([-1.0000,  0.5000])
    """

    def clipped(grads: Tree) -> Tree:
        ready(grads, "clip_by_value")
        return each(lambda g: g.clamp(-limit, limit), grads)

    return stateless(clipped)


@ranged("sl.optim.clip_by_parameter_norm(1.0)")
def clip_by_parameter_norm(max_norm: float) -> Transform:
    """Scale each tensor of the updates so that its own norm is at most ``max_norm``.

    Moves one psum, of a scalar per tensor.

    >>> tx = clip_by_parameter_norm(1.0)
    >>> tx.update({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}, tx.init(None))[0]
    {'a': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """

    def clipped(grads: Tree) -> Tree:
        ready(grads, "clip_by_parameter_norm")
        (found,) = totals(grads)
        by = [t if t is None else (max_norm / (t.sqrt() + 1e-6)).clamp(max=1.0) for t in found]
        return scaled(grads, by)

    return stateless(clipped, "tensor")


# ---------------------------------------------------------------- guards against gradients that are not finite


class SkipState(NamedTuple):
    """Consecutive steps skipped, steps skipped in all, and the transform's state."""

    running: Any
    skipped: Any
    inner: State


@ranged("tx = sl.optim.skip_nonfinite(sl.optim.adamw(1e-3))", most=STEPS)
def skip_nonfinite(tx: Transform, most: int = 100) -> Transform:
    """Skip steps with a gradient that is NaN or infinite: parameters and state do not change.

    It tests the global norm, one psum of a scalar, which a clip inside ``tx`` uses too.
    ``most``  the most consecutive steps that may be skipped.
    On an accelerator the device decides, and the host does not wait, unless a number of the state
    is read: ``optim.step`` holds parameters and state twice, but for rules by element (AdamW, SGD,
    Lion, ...), whose step is undone a span at a time.
    Raises: ShardError at the next one; on an accelerator in the step after it.

    >>> import shardlib as sl
    >>> tx, params = skip_nonfinite(sl.optim.sgd(1.0)), {"w": torch.ones(1)}
    >>> updates, state = tx.update({"w": torch.tensor([float("nan")])}, tx.init(params), params)
    >>> updates["w"].item(), state.skipped
    (0.0, 1)
    """

    check_transform(tx, "skip_nonfinite")

    def refused() -> ShardError:
        return ShardError(
            f"gradients were no numbers in {most + 1} steps, one after the other",
            op="skip_nonfinite",
            fix="with torch.autograd.detect_anomaly(): sl.value_and_grad(loss)(params)",
        )

    def after(state: SkipState) -> SkipState:
        if state.running >= most:
            raise refused()
        return SkipState(state.running + 1, state.skipped + 1, state.inner)

    def update(grads: Tree, state: SkipState, params: Tree = None) -> tuple[Any, SkipState]:
        with norms_known():
            if not _is_number(global_norm(grads), Tensor.item):
                return nothing(grads, params), after(state)
            updates, inner = tx.update(grads, state.inner, params)
            return updates, SkipState(0, state.skipped, inner)

    def donate(grads: Tree, state: SkipState, params: Tree, step: Step) -> SkipState:
        with norms_known():
            sound = _asked(grads, step)
            if sound is False:
                return after(state)
            if state.running > most:
                # a device counted the last one
                raise refused()
            inner = run_in_place(tx, grads, state.inner, params, step)
        running, skipped, _ = state
        if sound is True:
            return SkipState(0, skipped, inner)
        posted = Posted(sound)
        return SkipState(Later(posted, 0, running + 1), Later(posted, skipped, skipped + 1), inner)

    def init(params: Tree) -> SkipState:
        return SkipState(0, 0, tx.init(params))

    return Transform(init, update, _at_least(tx), donate, **handed_on(tx), halves=tx.halves)


class ScaleState(NamedTuple):
    """The scale of the loss, steps since it changed, steps skipped, and the transform's state.

    ``last``  the scale, if a device has it and the host has not read it.
    """

    scale: Any
    good: Any
    skipped: Any
    inner: State
    last: tuple[Posted, ...] = ()

    def at_rest(self) -> "ScaleState":
        """Return the state of a checkpoint."""
        return self._replace(scale=float(self.scale), last=())


@ranged(
    "tx = sl.optim.loss_scale(sl.optim.adamw(1e-3))",
    start=Range("more than 0, and finite", lambda n: 0 < n < math.inf),
    growth=Range("more than 1, and finite", lambda n: 1 < n < math.inf),
    backoff=Range("more than 0 and less than 1", lambda n: 0 < n < 1),
)
def loss_scale(
    tx: Transform,
    start: float = 2.0**16,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
) -> Transform:
    """Divide gradients by the scale of the loss, and find the largest scale that fits fp16.

    Multiply the loss by ``state.scale``.  If a gradient overflows, nothing is updated and the scale
    is multiplied by ``backoff``; after ``interval`` steps without overflow, by ``growth``; as in
    torch.amp.GradScaler.  Use it outermost, or directly inside ``zero``, whose pending gradients
    (stage 1) are then reduced once, for both; its one psum of a scalar serves a clip in ``tx`` too.
    Gradients in half precision are divided in fp32.  On an accelerator the device decides, as in
    ``skip_nonfinite``, and ``state.scale`` is a tensor there.
    Raises: ShardError if the scale falls below 2**-24: then the gradients themselves are not
    finite.

    >>> import shardlib as sl
    >>> tx, params = loss_scale(sl.optim.sgd(1.0), start=8.0), {"w": torch.ones(1)}
    >>> state = tx.init(params)
    >>> grads = sl.grad(lambda p: p["w"].sum() * state.scale)(params)
    >>> updates, state = tx.update(grads, state, params)
    >>> updates["w"].item(), state.scale
    (-1.0, 8.0)
    """

    check_transform(tx, "loss_scale")

    def too_small(scale: float) -> ShardError | None:
        if scale >= 2.0**-24:
            return None
        return ShardError(
            f"gradients are no numbers even with a loss scaled by {scale / backoff}",
            op="loss_scale",
            fix="with torch.autograd.detect_anomaly(): sl.value_and_grad(loss)(params)",
        )

    def init(params: Tree) -> ScaleState:
        return ScaleState(start, 0, 0, tx.init(params))

    def smaller(state: ScaleState) -> ScaleState:
        scale = state.scale * backoff
        if error := too_small(scale):
            raise error
        return state._replace(scale=scale, good=0, skipped=state.skipped + 1)

    def larger(state: ScaleState, inner: State) -> ScaleState:
        if state.good + 1 >= interval:
            return ScaleState(state.scale * growth, 0, state.skipped, inner)
        return ScaleState(state.scale, state.good + 1, state.skipped, inner)

    def update(grads: Tree, state: ScaleState, params: Tree = None) -> tuple[Any, ScaleState]:
        state = state.at_rest()
        with norms_known():
            # in fp32: fp16 gradients divided by 2**16 would underflow
            real = each(lambda g: g.to(wider(g.dtype)) / state.scale, grads)
            if not _is_number(global_norm(real), Tensor.item):
                return nothing(real, params), smaller(state)
            updates, inner = tx.update(real, state.inner, params)
            return updates, larger(state, inner)

    def donate(grads: Tree, state: ScaleState, params: Tree, step: Step) -> ScaleState:
        scale = state.scale
        with norms_known():
            device = getattr(scale, "device", "cpu")
            step.divide(torch.as_tensor(scale, dtype=torch.float64, device=device))
            sound = _asked(grads, step)
            if sound is False:
                return smaller(state)
            inner = run_in_place(tx, grads, state.inner, params, step)
        if sound is True:
            return larger(state, inner)
        if not isinstance(scale, Tensor):
            scale = torch.full((), scale, dtype=torch.float32, device=sound.device)
        posted, up = Posted(sound), larger(state._replace(scale=scale), inner)
        scale = torch.where(sound, up.scale.clamp(max=2.0**127), scale * backoff)
        good, skipped = Later(posted, up.good, 0), Later(posted, up.skipped, up.skipped + 1)
        return ScaleState(scale, good, skipped, inner, (Posted(scale, too_small),))

    return Transform(init, update, _at_least(tx), donate, **handed_on(tx), halves=tx.halves)


def _asked(grads: Tree, step: Step) -> Any:
    """Return whether the norm is finite; both are stored in ``step``.

    A bool where the host knows at once, else a tensor, by which the step is skipped on the device.
    """
    norm = global_norm(grads)
    step.norm = step.unscaled(norm)
    if on_host(norm):
        step.skipped = not _is_number(norm, told)
        return not step.skipped
    step.require(torch.isfinite(norm))
    assert step.sound is not None
    step.skips = ~step.sound
    return step.sound


def _is_number(norm: Tensor, read: Callable[[Tensor], Any]) -> bool:
    """Check whether a norm is finite; ``read`` gives it to the host."""
    return norm.is_meta or math.isfinite(read(norm))


def _at_least(tx: Transform) -> str | None:
    return "norm" if tx.trait == "elementwise" else tx.trait
