"""Global gradient norm, and clipping by it, by each tensor's norm, or by value."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import holds_values
from shardlib.errors import ShardError
from shardlib.kernels.active import Backend
from shardlib.mesh import scope, within
from shardlib.optim.global_reductions import powers, scaled, summed, totals
from shardlib.optim.hyperparam_checks import POSITIVE, ranged
from shardlib.optim.later import Posted, on_host, told
from shardlib.optim.transform import Step, Transform, under
from shardlib.optim.trees import EmptyState, by_tensor, each, one_each, ready
from shardlib.tensor import ShardedTensor

__all__ = [
    "clip_by_global_norm", "clip_by_parameter_norm", "clip_by_value", "global_norm", "is_finite",
    "norms_known",
]  # fmt: skip


def global_norm(tree: Any, p: float = 2.0) -> Tensor:
    """Compute the p-norm of all leaves together, counting each element once in any layout.

    ``p``  positive, or inf for the largest.
    Powers accumulate in fp64.  Moves one psum of a scalar over the whole mesh; leaves with a
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
    (found,) = totals(summed(leaves), of=powers(p), most=p == math.inf)
    parts = [t for t in found if t is not None]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    together = torch.stack([t.to(parts[0].device) for t in parts])
    total = together.amax() if p == math.inf else together.sum() ** (1 / p)
    if known is not None:
        known[key] = leaves, total  # the leaves are kept alive, so that no id is reused
    return total


@contextmanager
def norms_known() -> Iterator[None]:
    """Cache norms inside the ``with``: the norm of the same leaves is computed once."""
    with within(norms={} if scope().norms is None else scope().norms):
        yield


def is_finite(tree: Any) -> Tensor:
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


@ranged("sl.optim.clip_by_global_norm(1.0)", max_norm=POSITIVE, p=POSITIVE)
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

    def known(grads: Any, step: Step) -> Tensor:
        norm = global_norm(grads, p)
        return norm if step.scale is None else norm / step.scale.to(norm.device)

    def decide(norm: Tensor, grads: Any, step: Step) -> None:
        """Refuse a norm that is not finite: on the host at once, else step only where it is."""
        if on_host(norm):
            _number(norm, grads)
        else:
            step.require(torch.isfinite(norm))

    def update(grads: Any, state: ClipState, params: Any = None) -> tuple[Any, ClipState]:
        norm = known(grads, Step())
        if check:
            _number(norm, grads)
        by = over(norm)
        return each(lambda g: g / by.to(g.device, g.dtype), grads), state

    def rescale(grads: Any, state: ClipState, params: Any, step: Step) -> ClipState:
        step.norm = known(grads, step)
        step.divide(over(step.norm))
        if check:
            decide(step.norm, grads, step)
        if not check or on_host(step.norm):
            return state
        own = step.norm if step.skips is None else step.norm.masked_fill(step.skips, 0)
        return ClipState((Posted(own, _error),))

    def look(grads: Any, state: ClipState, params: Any, step: Step) -> None:
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


def _number(norm: Tensor, grads: Any) -> None:
    """Refuse a norm that is not finite."""
    for x in optree.tree_leaves(grads):
        if isinstance(x, ShardedTensor) and not holds_values(x.mesh):
            return
    if norm.is_meta or math.isfinite(told(norm)):
        return
    bad = list(dict.fromkeys(_not_finite(grads)))
    raise ShardError(
        f"the norm of the gradients is {float(norm)}"
        + (f": not a number here are {', '.join(bad[:4])}" if bad else ""),
        op="clip_by_global_norm",
        fix="tx = sl.optim.skip_nonfinite(tx)",
    )


def _not_finite(grads: Any) -> Iterator[str]:
    """List the paths of gradients that are not finite on the ranks in this process."""
    for (name, _), view in zip(one_each(grads), by_tensor(grads), strict=True):
        parts = () if view is None else [x for x in view.parts if x is not None]
        if not all(bool(torch.isfinite(x).all()) for x in parts):
            yield name


@ranged("sl.optim.clip_by_value(1.0)", limit=POSITIVE)
def clip_by_value(limit: float) -> Transform:
    """Clamp every element of the updates to [-limit, limit]; torch.nn.utils.clip_grad_value_.

    >>> tx = clip_by_value(1.0)
    >>> tx.update(torch.tensor([-3.0, 0.5]), tx.init(None))[0]
    tensor([-1.0000,  0.5000])
    """

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        ready(grads, "clip_by_value")
        return each(lambda g: g.clamp(-limit, limit), grads), state

    return Transform(lambda params: EmptyState(), update, "elementwise")


@ranged("sl.optim.clip_by_parameter_norm(1.0)", max_norm=POSITIVE)
def clip_by_parameter_norm(max_norm: float) -> Transform:
    """Scale each tensor of the updates so that its own norm is at most ``max_norm``.

    Moves one psum, of a scalar per tensor.

    >>> tx = clip_by_parameter_norm(1.0)
    >>> tx.update({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}, tx.init(None))[0]
    {'a': tensor([0.6000, 0.8000]), 'b': tensor([0.5000])}
    """

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        ready(grads, "clip_by_parameter_norm")
        (found,) = totals(grads)
        by = [t if t is None else (max_norm / (t.sqrt() + 1e-6)).clamp(max=1.0) for t in found]
        return scaled(grads, by), state

    return Transform(lambda params: EmptyState(), update, "tensor")
