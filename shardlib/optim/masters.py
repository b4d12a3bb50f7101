"""Master weights of half-precision parameters, in parts of buckets: fp32, or 16 bits more."""

from typing import Any, NamedTuple

import torch

from shardlib.errors import ShardError
from shardlib.kernels import active
from shardlib.optim.buckets import Buckets
from shardlib.optim.memory import Memory
from shardlib.optim.precision import Master, halves, joined
from shardlib.optim.transform import Step, Transform, run_in_place
from shardlib.optim.trees import refuse_copies, runs, spans
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["ZeroState", "begun", "step_parts"]


class ZeroState(NamedTuple):
    """The state of the inner transform, and the master weights.

    ``master``  the parameters' parts in fp32, or the 16 bits that bfloat16 parameters lack of fp32.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(data=2):
    ...     w = {"w": sl.shard(torch.zeros(4, dtype=torch.bfloat16), "...")}
    ...     tx = sl.optim.zero(sl.optim.adamw(1e-3), axis="data", master="fp32")
    ...     state = tx.init(w)
    >>> [sl.typeof(bucket) for bucket in state.master.values()]  # a half of each on every rank
    ['f32[128@data]']
    """

    inner: Any
    master: Buckets


def cast(parts: Buckets, dtype: torch.dtype, *, zeros: bool = False) -> Buckets:
    """Copy buckets to another dtype."""
    refuse_copies(parts, lambda _: dtype)
    made = {
        name: ShardedTensor(
            torch.zeros_like(x.raw, dtype=dtype) if zeros else x.raw.to(dtype, copy=True), x.place
        )
        for name, x in parts.items()
    }
    return parts.like(made)


def begun(tx: Transform, parts: Buckets, master: Master | None, axis: Any) -> Any:
    """Initialise the state of parts of parameters, with their master if one is asked."""
    if master is None:
        return tx.init(parts)
    full = cast(parts, torch.float32)
    if master == "fp32":
        return ZeroState(tx.init(full), full)
    odd = next((x for x in parts.values() if x.raw.dtype != torch.bfloat16), None)
    if odd is not None:
        raise ShardError(
            f"the remainder of {odd.raw.dtype} parameters is not 16 bits",
            op="zero",
            operands={"parameters": typeof(odd)},
            mesh=odd.mesh,
            fix=f'tx = sl.optim.zero(tx, axis={axis!r}, master="fp32")',
        )
    return ZeroState(tx.init(full), cast(parts, torch.int16, zeros=True))


def step_parts(
    tx: Transform,
    grads: Buckets,
    state: Any,
    mine: Buckets,
    step: Step,
    master: Master | None,
    memory: Memory,
) -> Any:
    """Step parts of parameters in place, or their master, whose rounding they then are."""
    if master is None:
        return run_in_place(tx, grads, state, mine, step)
    if master == "fp32":
        return _with_fp32(tx, grads, state, mine, step)
    return _with_remainder(tx, grads, state, mine, step, memory)


def _with_fp32(
    tx: Transform, grads: Buckets, state: ZeroState, mine: Buckets, step: Step
) -> ZeroState:
    step.beside = state.master, mine
    inner = run_in_place(tx, grads, state.inner, state.master, step)
    if step.beside is not None:
        step.beside = None
        for p, m in zip(mine.pieces, state.master.pieces, strict=True):
            p.copy_(m)
    return ZeroState(inner, state.master)


def _with_remainder(
    tx: Transform, grads: Buckets, state: ZeroState, mine: Buckets, step: Step, memory: Memory
) -> ZeroState:
    first = next(iter(mine.values())).raw
    if tx.halves and (not first.is_cpu or active.cpu) and active.serving(first):
        step.beside = mine, state.master
        inner = run_in_place(tx, grads, state.inner, mine, step)
        step.beside = None  # still set if the step was skipped
        return ZeroState(inner, state.master)
    raws = {n: memory.take(x.raw.shape, torch.float32, x.raw.device) for n, x in grads.items()}
    full = grads.like({n: ShardedTensor(raw.zero_(), grads[n].place) for n, raw in raws.items()})
    rows = runs(mine, state.master, full)
    for p, rest, m in spans(*rows):
        m.copy_(joined(p, rest))
    inner = run_in_place(tx, grads, state.inner, full, step)
    for p, rest, m in spans(*rows):
        high, low = halves(m)
        p.copy_(high)
        rest.copy_(low)
    memory.give(*raws.values())
    return ZeroState(inner, state.master)
