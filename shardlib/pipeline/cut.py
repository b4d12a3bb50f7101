"""Cut of a function into stages: which calls each stage makes, and the tensors that cross.

The function runs once, on shapes alone.  ``Dependences`` lists the outputs of its calls with what
each depends on (parameters, outputs before it), and one loop over that list, from last to first,
finds what each stage needs.  So skip connections, tied weights, repeated blocks and tables that each
stage can make itself are no special cases.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeGuard, cast

import optree
import torch
from torch import Tensor

from shardlib._compat import tree_flatten
from shardlib.errors import ShardError
from shardlib.mesh import Mesh, within
from shardlib.opspec import Args, Kwargs
from shardlib.pipeline.flow import INPUT, Within
from shardlib.pipeline.forward import (
    RESULT,
    Calls,
    Output,
    OutputSpec,
    UnitCall,
    WholeForward,
    block_of_output,
    refuse_unregistered,
)
from shardlib.pipeline.units import dealt
from shardlib.planning.constant_folding import Answers, Known
from shardlib.planning.explain import on_paper
from shardlib.tensor import ShardedTensor, raw_of

Params = Mapping[str, ShardedTensor]
Inputs = tuple[Args, Kwargs]


@dataclass(frozen=True, eq=False)
class Cut:
    """The stages of one function on inputs of one shape.

    ``owner``   call -> its stage; calls without one are made by every stage.
    ``users``   each output that crosses -> the other stages whose results depend on it.
    ``params``  of each stage, the names of the parameters that it reads.
    ``draws``   random keys that a whole forward draws.
    ``result``  shapes and dtypes of the function's result.
    ``chain``   the first call of each block, with which a stage may begin -> its cost.
    """

    calls: Calls
    owner: Mapping[UnitCall, int]
    users: Mapping[Output, Sequence[int]]
    params: Sequence[Sequence[str]]
    draws: int
    result: object
    chain: Mapping[UnitCall, float]

    @property
    def stages(self) -> int:
        return len(self.params)

    @property
    def begins(self) -> list[UnitCall]:
        """List the first call of each stage."""
        return [own[0] for own in self._own]

    @cached_property
    def _own(self) -> list[list[UnitCall]]:
        """List the calls of each stage."""
        return [[c for c in self.calls if self.owner.get(c) == s] for s in range(self.stages)]

    @cached_property
    def makes(self) -> list[list[Output]]:
        """List the outputs of each stage that others need."""
        rows = range(self.stages)
        return [[k for k in self.users if self.owner[k.call] == s] for s in rows]

    @cached_property
    def order(self) -> list[UnitCall]:
        """List the calls, and the end of the function."""
        return [*self.calls, RESULT]

    def spec(self, output: Output) -> OutputSpec:
        """Return shape and dtype of a tensor that crosses."""
        return self.calls[output.call].leaves[output.leaf]

    def named(self, stage: int) -> str:
        """Return the first and last call of a stage, for messages."""
        own = self._own[stage]
        return f"{own[0]} to {own[-1]}" if len(own) > 1 else str(own[0]) if own else "no unit"


@contextmanager
def on_shapes(paper: Mesh, inputs: Inputs) -> Iterator[tuple[Known, Any]]:
    """Open a mesh of shapes; yield the values that are known there, and the inputs on it."""
    with paper, Known() as known, within(traces=(), watcher=None, differentiated=True):

        def told(x: object) -> object:
            shape = on_paper(x, paper)
            if tells(x):
                known.tell(shape, x)
            return shape

        yield known, optree.tree_map(told, cast(Any, inputs), none_is_leaf=True)


def tells(x: object) -> TypeGuard[Tensor]:
    """Check for plain integers, whose values are known when a function is cut."""
    plain = isinstance(x, Tensor) and not isinstance(x, ShardedTensor)
    return plain and not x.is_floating_point()


def cut_of(
    f: Callable[..., Any], paper: Mesh, params: Params, inputs: Inputs, blocks: Sequence[str],
    stages: int | Sequence[str | UnitCall],
) -> tuple[Cut, Answers]:  # fmt: skip
    """Cut ``f(params, *args, **kwargs)``, on shapes; also return the values that it asks for.

    Raises: ShardError where it cannot be cut.

    ``stages``  how many, dealt so that the slowest takes as little time as possible; or the first
                block of each, by name or as the call with which it begins.
    """
    whole = WholeForward()
    calls, flow, end = whole.calls, whole.flow, Output(RESULT, 0)
    with on_shapes(paper, inputs) as (known, given):
        result, reads = _result_of(whole, f, params, given)
    # parameters, and outputs and calls that depend on them: each stage makes the others itself
    bound: set[Any] = {*params}
    for k, names in flow.crossings.items():
        if not names.isdisjoint(bound):
            bound |= {k, k.call}
    chain = _chain(calls, flow.cost, blocks, bound)
    owner = _owners(calls, _begins(calls, chain, blocks, stages), bound)
    count = stages if isinstance(stages, int) else len(stages)
    users: dict[Output, list[int]] = {}
    # name -> the stages whose results depend on it
    at: dict[Any, set[int]] = defaultdict(set, {end: {count - 1}})
    for k, names in reversed([*flow.crossings.items(), (end, reads)]):
        here, s = at[k], owner.get(k.call)
        if s is not None and here:
            if others := sorted(here - {s}):
                users[k] = others
            here = {s}
        for n in names:
            at[n] |= here
        _refuse_strays(k.call, names, here, owner)
    # each stage runs it, those too that do not have what an earlier one made
    _refuse_strays("what runs between the blocks", flow.between, {count - 1}, owner)
    read = [[n for n in params if s in at[n]] for s in range(count)]
    users = dict(reversed(users.items()))
    return Cut(calls, owner, users, read, whole.drawn, result, chain), known.answers


def _refuse_strays(
    reader: object, names: Iterable[Any], stages: set[int], owner: Mapping[UnitCall, int]
) -> None:
    """Refuse tensors that pass from a call to another stage otherwise than as its results."""
    for n in names:
        if isinstance(n, Within) and n.call in owner and stages - {owner[n.call]}:
            what = f"a tensor that {n.call} made or wrote to, and did not return"
            raise _error(f"{reader} reads {what}")


def _result_of(
    whole: WholeForward, f: Callable[..., Any], params: Params, inputs: Inputs
) -> tuple[Any, frozenset[Any]]:
    """Run all units; return the result, and what it depends on."""
    own = {n: p.becomes(p.raw.detach().requires_grad_()) for n, p in params.items()}
    for name, p in own.items():
        whole.flow.mark(p.raw, name)
    for x in optree.tree_leaves(cast(Any, inputs)):
        if isinstance(x, Tensor):
            whole.flow.mark(raw_of(x), INPUT)
    with within(stage=whole), whole.flow, torch.enable_grad():
        out = f(own, *inputs[0], **inputs[1])
        leaves = tree_flatten(out)[0]
        # a sum that is left open is made here, where its operands are known
        ends = [block_of_output(x) for x in leaves if isinstance(x, Tensor)]
    refuse_unregistered("the function", leaves)
    if not ends:
        raise _error(f"the function returns a {type(out).__name__}, and no tensor in it")
    # a loss reads and writes a result about as often as log_softmax does, forward and backward
    whole.flow.touched += 2 * sum(x.nbytes for x in ends if x.is_floating_point())
    return out, whole.flow.of(ends)


def _chain(
    calls: Calls, cost: float, blocks: Sequence[str], bound: Container[Any]
) -> dict[UnitCall, float]:
    """Return the calls with which a stage may begin, with their costs up to the next one."""
    at = [c for c in calls if c.unit in blocks and c in bound]
    if not at:
        raise _error(
            f"no block of {', '.join(blocks) or 'the module'} was called on what depends on "
            "parameters; blocks that are skipped at random, as by LayerDrop, are not cut"
        )
    # what is before the first block belongs to its stage, and what follows a block to the block's
    ends = [0.0, *(calls[c].began for c in at[1:]), cost]
    costs = [after - before for before, after in pairwise(ends)]
    return dict(zip(at, costs if any(costs) else [1.0] * len(at), strict=True))


def _begins(
    calls: Calls, chain: Mapping[UnitCall, float], blocks: Sequence[str],
    stages: int | Sequence[str | UnitCall],
) -> dict[UnitCall, int]:  # fmt: skip
    """Return a call -> the stage that begins there, but for the first."""
    if isinstance(stages, int):
        at = [*chain]
        return {at[i]: s for s, i in enumerate(dealt([*chain.values()], stages)) if s}
    first = [UnitCall(c, 0) if isinstance(c, str) else c for c in stages]
    for c in first[1:]:
        if c not in calls:
            why = f"cut: no block {str(c)!r} is called"
            fix = f"sl.Stages('pipe', cut={list(blocks)[: len(stages)]})"
            raise ShardError(why, op="parallelize", fix=fix)
    return {c: s for s, c in enumerate(first) if s}


def _owners(
    calls: Iterable[UnitCall], begins: Mapping[UnitCall, int], bound: Container[Any]
) -> dict[UnitCall, int]:
    """Deal the calls to stages; a unit between two blocks goes with the block before it."""
    owner: dict[UnitCall, int] = {}
    stage = 0
    for c in calls:
        stage = begins.get(c, stage)
        if c in bound:
            owner[c] = stage
    empty = set(range(stage + 1)) - set(owner.values())
    if empty:
        raise _error(f"stage {min(empty)} has no call that depends on parameters")
    return owner


def _error(why: str) -> ShardError:
    fix = 'sl.Stages("pipe", cut=["blocks.0", "blocks.4"])'
    return ShardError(f"the module cannot be cut so: {why}", op="parallelize", fix=fix)
