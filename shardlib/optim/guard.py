"""Guards against gradients that are not finite: skipped steps, and the loss scale for fp16."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.dtypes import wider
from shardlib.errors import ShardError
from shardlib.optim.norms import global_norm, norms_known
from shardlib.optim.transform import (
    COUNT,
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
    told,
)
from shardlib.optim.trees import State, Tree, each, nothing

__all__ = ["loss_scale", "skip_nonfinite"]


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
            if state.running > most:  # a device counted the last one
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
    interval=COUNT,
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

    def refused(scale: Any) -> ShardError:
        return ShardError(
            f"gradients are no numbers even with a loss scaled by {scale}",
            op="loss_scale",
            fix="with torch.autograd.detect_anomaly(): sl.value_and_grad(loss)(params)",
        )

    def too_small(scale: float) -> ShardError | None:
        return refused(scale / backoff) if scale < 2.0**-24 else None

    def init(params: Tree) -> ScaleState:
        return ScaleState(start, 0, 0, tx.init(params))

    def smaller(state: ScaleState) -> ScaleState:
        scale = state.scale * backoff
        if error := too_small(scale):
            raise error
        return state._replace(scale=scale, good=0, skipped=state.skipped + 1)

    def larger(state: ScaleState, inner: State) -> ScaleState:
        grown = state.good + 1 >= interval
        scale = state.scale * growth if grown else state.scale
        return ScaleState(scale, 0 if grown else state.good + 1, state.skipped, inner)

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
            step.divide(
                scale.double()
                if isinstance(scale, Tensor)
                else torch.tensor(scale, dtype=torch.float64, device="cpu")
            )
            sound = _asked(grads, step)
            if sound is False:
                return smaller(state)
            inner = run_in_place(tx, grads, state.inner, params, step)
        if sound is True:
            return larger(state, inner)
        scale = _on_device(scale, sound)
        posted, up = Posted(sound), larger(state._replace(scale=scale), inner)
        scale = torch.where(sound, up.scale.clamp(max=2.0**127), scale * backoff)
        good, skipped = Later(posted, up.good, 0), Later(posted, up.skipped, up.skipped + 1)
        return ScaleState(scale, good, skipped, inner, (Posted(scale, too_small),))

    return Transform(init, update, _at_least(tx), donate, **handed_on(tx), halves=tx.halves)


def _on_device(scale: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)


def _asked(grads: Tree, step: Step) -> Any:
    """Return whether the norm is finite; both are stored in ``step``.

    A bool where the host knows at once, else a tensor, by which the step is skipped on the device.
    """
    norm = global_norm(grads)
    step.norm = norm if step.scale is None else norm / step.scale.to(norm.device)
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
