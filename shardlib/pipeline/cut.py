"""Cut of a function into stages: which calls each stage makes, and the tensors that cross.

The function runs once, on shapes alone.  ``Dependences`` lists the outputs of its calls with what
each depends on (parameters, outputs before it), and one loop over that list, from last to first,
finds what each stage needs.  So skip connections, tied weights, repeated blocks and tables that each
stage can make itself are no special cases.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib._compat import tree_flatten
from shardlib.errors import ShardError
from shardlib.mesh import Mesh, within
from shardlib.pipeline.flow import BYTE, INPUT, Dependences
from shardlib.pipeline.forward import (
    CallRecord,
    Output,
    OutputSpec,
    UnitCall,
    WholeForward,
    block_of_output,
    refuse_unregistered,
)
from shardlib.pipeline.units import dealt
from shardlib.tensor import ShardedTensor, raw_of

Params = Mapping[str, ShardedTensor]
Function = Callable[[Params, Any], Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """The stages of one function on inputs of one shape.

    ``owner``   call -> its stage; calls without one are made by every stage.
    ``needs``   of each stage, the outputs of earlier stages on which its results depend.
    ``makes``   of each stage, its outputs that later stages need.
    ``params``  of each stage, the names of the parameters that it reads.
    ``draws``   random keys that a whole forward draws.
    ``loss``    shape and dtype of the function's result.
    ``chain``   the first call of each block, with which a stage may begin -> its cost.
    """

    calls: CallRecord
    owner: Mapping[UnitCall, int]
    needs: Sequence[Sequence[Output]]
    makes: Sequence[Sequence[Output]]
    params: Sequence[Sequence[str]]
    draws: int
    loss: object
    chain: Mapping[UnitCall, float]

    @property
    def stages(self) -> int:
        return len(self.needs)

    @property
    def begins(self) -> list[UnitCall]:
        """List the first call of each stage."""
        return [own[0] for own in self._own]

    @cached_property
    def _own(self) -> list[list[UnitCall]]:
        """List the calls of each stage."""
        order = self.calls.order
        return [[c for c in order if self.owner.get(c) == s] for s in range(self.stages)]

    @cached_property
    def expected(self) -> list[list[UnitCall]]:
        """List for each stage the calls of units up to the last that others need, or its last."""
        order, rows = self.calls.order, zip(self.makes, self._own, strict=True)
        last = [[k.call for k in row] or own[-1:] for row, own in rows]
        ends = [max(map(order.index, row), default=-1) for row in last]
        return [[c for c in order[: end + 1] if "/" not in c.unit] for end in ends]

    def spec(self, output: Output) -> OutputSpec:
        """Return shape and dtype of a tensor that crosses."""
        return self.calls.spec(output)

    def source(self, output: Output) -> int:
        """Return the stage that makes an output."""
        return self.owner[output.call]

    def users(self, output: Output) -> list[int]:
        """List the stages that need an output."""
        return [s for s, needed in enumerate(self.needs) if output in needed]

    def holders(self, name: str, ranks: Sequence[int]) -> list[int]:
        """List the ranks of the pipe axis whose stages read a parameter, by first stage.

        One that is read by none is on the first rank.
        """
        readers = [ranks[s] for s, read in enumerate(self.params) if name in read]
        return list(dict.fromkeys(readers or ranks[:1]))

    def named(self, stage: int) -> str:
        """Return the first and last call of a stage, for messages."""
        own = [c for c in self._own[stage] if "/" not in c.unit]
        return f"{own[0]} to {own[-1]}" if len(own) > 1 else str(own[0]) if own else "no unit"


@dataclass(frozen=True, eq=False)
class Cutting:
    """A function that is cut: on a mesh of shapes, with its blocks and where each stage begins.

    ``inputs``  the function's second argument, a tree.
    ``stages``  how many, dealt so that the slowest takes as little time as possible; or the first
                block of each, by name or as the call with which it begins.
    """

    f: Function
    params: Params
    inputs: Any
    mesh: Mesh
    blocks: Sequence[str]
    stages: int | Sequence[str | UnitCall]

    def cut(self) -> Cut:
        """Return the cut.  Raises: ShardError where a stage would lack what it needs."""
        whole = WholeForward(CallRecord())
        reads, loss = self._whole(whole)
        # a loss reads and writes a result about as often as log_softmax does, forward and backward
        chain = self._chain(whole.calls, whole.flow.cost + 2 * BYTE * _floating_bytes(loss))
        owner = self._owners(whole.calls, chain)
        _refuse_strays(whole.flow, owner)
        count = self.stages if isinstance(self.stages, int) else len(self.stages)
        needs: list[list[Output]] = [[] for _ in range(count)]
        makes: list[list[Output]] = [[] for _ in range(count)]
        # name -> the stages whose results depend on it
        at: dict[Any, set[int]] = defaultdict(set, {n: {count - 1} for n in reads})
        for k, names in reversed(whole.flow.crossings.items()):
            users, s = at[k], owner.get(k.call)
            if s is not None and users:
                for user in users - {s}:
                    needs[user].append(k)
                makes[s] += [k] if users - {s} else []
                users = {s}
            for n in names:
                at[n] |= users
        for row in [*needs, *makes]:
            row.sort(key=whole.calls.rank)
        read = [[n for n in self.params if s in at[n]] for s in range(count)]
        return Cut(whole.calls, owner, needs, makes, read, whole.drawn, loss, chain)

    def _whole(self, whole: WholeForward) -> tuple[frozenset[Any], Any]:
        """Run all units; return what the result depends on, and the result."""
        own = {n: p.becomes(p.raw.detach().requires_grad_()) for n, p in self.params.items()}
        for name, p in own.items():
            whole.flow.mark(p.raw, name)
        for x in optree.tree_leaves(self.inputs):
            if isinstance(x, Tensor):
                whole.flow.mark(raw_of(x), INPUT)
        with within(stage=whole), whole.flow, torch.enable_grad():
            out = self.f(own, self.inputs)
            leaves = tree_flatten(out)[0]
            # a sum that is left open is made here, where its operands are known
            ends = [block_of_output(x) for x in leaves if isinstance(x, Tensor)]
            refuse_unregistered("the function", leaves)
            if not ends:
                raise _error(f"the function returns a {type(out).__name__}, and no tensor in it")
            for x in ends:
                whole.flow.read(x, None)
            return whole.flow.of(ends), out

    def _chain(self, calls: CallRecord, cost: float) -> dict[UnitCall, float]:
        """Return the calls with which a stage may begin, with their costs up to the next one."""
        blocks = set(self.blocks)
        at = [c for c in calls.order if c.unit in blocks and c not in calls.free]
        if not at:
            named = ", ".join(self.blocks) or "the module"
            raise _error(
                f"no block of {named} was called on what depends on parameters; blocks that are "
                "skipped at random, as by LayerDrop, are not cut"
            )
        # what is before the first block belongs to its stage, and what follows a block to the block's
        ends = [0.0, *(calls.began[c] for c in at[1:]), cost]
        costs = [after - before for before, after in pairwise(ends)]
        return dict(zip(at, costs if any(costs) else [1.0] * len(at), strict=True))

    def _owners(self, calls: CallRecord, chain: Mapping[UnitCall, float]) -> dict[UnitCall, int]:
        """Deal the calls to stages; a unit between two blocks goes with the block before it."""
        owner: dict[UnitCall, int] = {}
        stage, begins = 0, self._begins(calls, chain)
        for c in calls.order:
            stage = begins.get(c, stage)
            owner[c] = stage
        for around, rows in calls.inner.items():
            owner.update({inner: owner[around] for _, inner in rows})
        for c in calls.free:
            owner.pop(c, None)
        empty = set(range(stage + 1)) - set(owner.values())
        if empty:
            raise _error(f"stage {min(empty)} has no call that depends on parameters")
        return owner

    def _begins(self, calls: CallRecord, chain: Mapping[UnitCall, float]) -> dict[UnitCall, int]:
        """Return a call -> the stage that begins there."""
        if isinstance(self.stages, int):
            at = [*chain]
            return {at[i]: s for s, i in enumerate(dealt([*chain.values()], self.stages)) if s}
        first = {UnitCall(c, 0) if isinstance(c, str) else c: s for s, c in enumerate(self.stages)}
        found = {c: s for c, s in first.items() if s and c in calls.order}
        if len(found) < len(first) - 1:
            unknown = next(c for c in [*first][1:] if c not in found)
            why = f"cut: no block {str(unknown)!r} is called"
            fix = f"sl.Stages('pipe', cut={list(self.blocks)[: len(self.stages)]})"
            raise ShardError(why, op="parallelize", fix=fix)
        return found


def _floating_bytes(result: Any) -> int:
    found = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
    return sum(raw_of(x).nbytes for x in found if x.is_floating_point())


def _refuse_strays(flow: Dependences, owner: Mapping[UnitCall, int]) -> None:
    """Refuse tensors that pass from one stage to another otherwise than as outputs."""
    strays: Any = () if len(set(owner.values())) == 1 else flow.strays
    for maker, reader in strays:
        there = owner.get(maker)
        if there is not None and there != owner.get(reader):
            read = f"{reader} reads" if reader else "what runs between the blocks reads"
            raise _error(f"{read} a tensor that {maker} made or wrote to, and did not return")


def _error(why: str) -> ShardError:
    fix = 'sl.Stages("pipe", cut=["blocks.0", "blocks.4"])'
    return ShardError(f"the module cannot be cut so: {why}", op="parallelize", fix=fix)
