"""Mixed precision as a value: the dtypes of parameters, computation, reduction and state.

Half precision has 8 (bfloat16) or 11 significant bits, and an update is often less than 1/256 of
its weight: added in half precision it changes nothing.  So an fp32 copy is kept, the master, or
only the 16 bits that a bfloat16 lacks of it; the parameters are the rounded master.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.dtypes import HALF, wide, wider
from shardlib.errors import ShardError, Unsupported, axes_text
from shardlib.kernels import active
from shardlib.optim.transform import Step, Transform, check_transform, kept_whole, run_in_place
from shardlib.optim.trees import (
    State,
    Tree,
    each,
    is_bucketed,
    need,
    pieces,
    refuse_copies,
    spans,
    trainable,
)
from shardlib.tensor import typeof

Master = Literal["fp32", "bf16+rem"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run.

    ``param``    of the parameters, also while they are gathered.
    ``compute``  of the model's computation; None: the parameters'.
    ``reduce``   of sums of gradients over ranks; None: their own, half precision in fp32.
    ``state``    of the moments; None: fp32 (fp64 for fp64).
    ``master``   "fp32": 4 more bytes per parameter; "bf16+rem": 2 more bytes, the same values;
                 None: parameters are rounded at every step.

    Bytes per parameter with Adam, the gradient's 2 included: with "fp32" 16, with "bf16+rem" 14.
    Raises: ShardError for other dtypes than floating point, and for "bf16+rem" of other parameters.

    >>> policy = Precision(master="bf16+rem")
    >>> policy.to_param({"w": torch.ones(2)})
    {'w': tensor([1., 1.], dtype=torch.bfloat16)}
    >>> policy.for_zero()
    {'master': 'bf16+rem', 'reduce_dtype': torch.float32}
    """

    param: torch.dtype = torch.bfloat16
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32
    state: torch.dtype | None = None
    master: Master | None = "fp32"

    def __post_init__(self) -> None:
        for name in ("param", "compute", "reduce", "state"):
            dtype = getattr(self, name)
            floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if not floats and (dtype is not None or name == "param"):
                why = f"{name}={dtype!r} is no floating point dtype"
                raise _unfit(why, f"{name}=torch.bfloat16")
        if self.master not in (None, "fp32", "bf16+rem"):
            why = f"master={self.master!r} is none of 'fp32', 'bf16+rem', None"
            raise _unfit(why, 'master="fp32"')
        if self.master == "bf16+rem" and self.param != torch.bfloat16:
            why = f"16 bits more make fp32 of bfloat16, not of {self.param}"
            raise _unfit(why, 'param=torch.bfloat16, master="bf16+rem"')

    def to_param(self, tree: Tree) -> Tree:
        """Cast floating point leaves to the parameters' dtype."""
        return optree.tree_map(partial(_cast, self.param), tree)

    def to_compute(self, tree: Tree) -> Tree:
        """Cast the tree to the dtype of computation; gradients have the leaves' own dtype.

        ``loss(policy.to_compute(params), policy.to_compute(batch))``
        """
        return optree.tree_map(partial(_cast, self.compute or self.param), tree)

    def for_zero(self) -> dict[str, Any]:
        """Return the arguments of ``zero(tx, "data", **policy.for_zero())``, which keeps the master."""
        return {"master": self.master, "reduce_dtype": self.reduce}


def _unfit(why: str, arguments: str) -> ShardError:
    return ShardError(why, op="Precision", fix=f"sl.optim.Precision({arguments})")


def _cast(dtype: torch.dtype, x: Any) -> Any:
    """Convert real numbers to a dtype; other values stay."""
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class MixedState(NamedTuple):
    """The master (fp32, or int16 remainders), and the transform's state."""

    master: Tree
    inner: State


def mixed(tx: Transform, precision: Precision | None = None) -> Transform:
    """Run ``tx`` on an fp32 master of half-precision parameters, which are the rounded master.

    For use without ``zero``, which keeps the master itself, in parts.  Parameters in other dtypes
    are their own master.  ``precision.state`` is the dtype of the state between steps.

    >>> import shardlib as sl
    >>> tx = mixed(sl.optim.sgd(1.0))
    >>> params = {"w": torch.full((1,), 256.0, dtype=torch.bfloat16)}
    >>> state = tx.init(params)
    >>> for _ in range(4):  # each step is a quarter of what bfloat16 can tell at 256
    ...     grads = {"w": torch.full((1,), -0.5, dtype=torch.bfloat16)}
    ...     updates, state = tx.update(grads, state, params)
    ...     params = sl.optim.apply_updates(params, updates)
    >>> params["w"].item(), state.master["w"].item()
    (258.0, 258.0)
    """
    check_transform(tx, "mixed")
    if tx.shard is not kept_whole:
        raise _zeros_own()
    how = precision or Precision()
    rest = how.master == "bf16+rem"
    computed = how.state and wider(how.state)

    def exact(params: Tree, master: Any) -> Tree:
        """Return the exact parameters: fp32 for half-precision ones, the others themselves."""
        return each(joined if rest else lambda p, m: m, trainable(params), master)

    def apart(p: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rounded parameter, and its master or remainder."""
        return halves(n) if rest else (n.to(p.dtype), n)

    def init(params: Tree) -> MixedState:
        if is_bucketed(params):
            raise _zeros_own()
        if how.master is None:
            return MixedState((), _to(tx.init(params), how.state))
        # bfloat16 parameters are exact at first: their remainder is 0
        begin = (lambda p: torch.zeros_like(p, dtype=torch.int16)) if rest else Tensor.float
        half = _half(params)
        # of the remainders, until the state is made
        refuse_copies(half, lambda _: torch.float32)
        master = each(lambda p: begin(p.detach()), half)
        return MixedState(master, _to(tx.init(exact(params, master)), how.state))

    def update(grads: Tree, state: MixedState, params: Tree = None) -> tuple[Any, MixedState]:
        need(params, "mixed")
        inner = _to(state.inner, computed)
        if how.master is None:
            updates, inner = tx.update(grads, inner, params)
            return updates, MixedState((), _to(inner, how.state))
        before = exact(params, state.master)
        updates, inner = tx.update(each(wide, grads), inner, before)
        new = each(lambda p, u: (p + u).to(p.dtype), before, updates)
        high = each(lambda p, n: apart(p, n)[0], _half(params), new)
        master = each(lambda p, n: apart(p, n)[1], _half(params), new)
        # in fp64, so that p + u is exactly the rounded value
        steps = each(lambda p, h: h.double() - p.double(), _half(params), high)
        updates = optree.tree_map(
            lambda u, step: u if step is None else step, updates, steps, none_is_leaf=True
        )
        return updates, MixedState(master, _to(inner, how.state))

    def donate(grads: Tree, state: MixedState, params: Tree, step: Step) -> MixedState:
        inner = _to(state.inner, computed)
        if how.master is None:
            return MixedState((), _to(run_in_place(tx, grads, inner, params, step), how.state))
        before = exact(params, state.master)
        inner = run_in_place(tx, each(wide, grads), inner, before, step)
        for p, kept, exactly in spans(*pieces(_half(params), state.master, before)):
            high, low = apart(p, exactly)
            p.copy_(high)
            if rest:
                kept.copy_(low)
        return MixedState(state.master, _to(inner, how.state))

    return Transform(init, update, tx.trait, donate, groups=tx.groups, sink=tx.sink)


def _zeros_own() -> Unsupported:
    return Unsupported(
        "zero keeps masters itself, in parts",
        op="mixed",
        fix="tx = sl.optim.zero(sl.optim.adamw(1e-3), 'data', master='fp32')",
    )


def _half(params: Tree) -> Tree:
    """Keep trained leaves in half precision; all others become None."""
    return optree.tree_map(
        lambda p: p if isinstance(p, Tensor) and p.dtype in HALF else None, trainable(params)
    )


def _to(state: State, dtype: torch.dtype | None) -> State:
    """Cast the state's tensors to a dtype."""
    if dtype is None:
        return state
    return each(partial(_cast, dtype), state)


# ---------------------------------------------------------------- fp32 in two halves


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bfloat16, ties away from zero, and the 16 bits that it lacks.

    Rounding ties to even would need a 17th bit.

    >>> high, low = halves(torch.tensor([1.0, 3.14159]))
    >>> high, torch.equal(joined(high, low), torch.tensor([1.0, 3.14159]))
    (tensor([1.0000, 3.1406], dtype=torch.bfloat16), True)
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join ``halves`` to the original fp32 values."""
    bits = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + low).view(torch.float32)


# ---------------------------------------------------------------- masters of zero's parts


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

    inner: State
    master: Tree


def with_master(
    tx: Transform,
    master: Master | None,
    axes: Sequence[str],
    memory: Any = None,
) -> Transform:
    """Run ``tx`` on a master of parts of parameters, which are the rounded master; in place only.

    ``memory``  a pool of vectors; None: that of the parts' index.
    """
    if master is None:
        return tx

    def begin(parts: Tree) -> ZeroState:
        refuse_copies(parts, lambda _: torch.float32)
        full = each(lambda x: x.detach().to(torch.float32, copy=True), parts)
        if master == "fp32":
            return ZeroState(tx.init(full), full)
        odd = next((x for x in optree.tree_leaves(parts) if x.dtype != torch.bfloat16), None)
        if odd is not None:
            raise ShardError(
                f"the remainder of {odd.dtype} parameters is not 16 bits",
                op="zero",
                operands={"parameters": typeof(odd)},
                mesh=odd.mesh,
                fix=f'tx = sl.optim.zero(tx, axis={axes_text(axes)}, master="fp32")',
            )
        # bfloat16 parameters are exact at first: their remainder is 0
        rest = each(lambda x: torch.zeros_like(x, dtype=torch.int16), parts)
        return ZeroState(tx.init(full), rest)

    def donate(grads: Tree, state: ZeroState, mine: Tree, step: Step) -> ZeroState:
        run = _with_fp32 if master == "fp32" else partial(_with_remainder, memory)
        return ZeroState(run(tx, grads, state, mine, step), state.master)

    return Transform(begin, tx.update, tx.trait, donate, heeds=True)


def _with_fp32(tx: Transform, grads: Tree, state: ZeroState, mine: Tree, step: Step) -> State:
    step.beside = state.master, mine
    inner = run_in_place(tx, grads, state.inner, state.master, step)
    if step.beside is not None:
        step.beside = None
        for p, m in zip(*pieces(mine, state.master), strict=True):
            p.copy_(m)
    return inner


def _with_remainder(
    memory: Any, tx: Transform, grads: Tree, state: ZeroState, mine: Tree, step: Step
) -> State:
    first = optree.tree_leaves(mine)[0].raw
    memory = mine.index.room.memory if memory is None else memory
    if tx.halves and (not first.is_cpu or active.cpu) and active.serving(first):
        step.beside = mine, state.master
        inner = run_in_place(tx, grads, state.inner, mine, step)
        # still set if the step was skipped
        step.beside = None
        return inner
    full = each(lambda g: memory.take(g.shape, torch.float32, g.device).zero_(), grads)
    rows = pieces(mine, state.master, full)
    for p, rest, m in spans(*rows):
        m.copy_(joined(p, rest))
    inner = run_in_place(tx, grads, state.inner, full, step)
    for p, rest, m in spans(*rows):
        high, low = halves(m)
        p.copy_(high)
        rest.copy_(low)
    memory.give(*(x.raw for x in optree.tree_leaves(full)))
    return inner
