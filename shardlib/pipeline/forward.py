"""Forward of a module on one stage: its own units run, the others return what was received.

The module's own code runs on every stage.  A unit of another stage is not called: it returns the
tensors that its stage sent, or *ghosts*, NaN of the right shape, where nothing that this stage
computes depends on them.  The run is broken off once all that other stages need is there.
``WholeForward`` runs every unit and records the calls, on shapes alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlib._compat import tree_flatten, tree_unflatten
from shardlib.collectives import storage_shape
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh
from shardlib.pipeline.flow import Dependences
from shardlib.random import Draws
from shardlib.tensor import Place, ShardedTensor, raw_of, settle
from shardlib.tensor.gradients import vary


class UnitCall(NamedTuple):
    """The ``turn``-th call of a unit in a forward."""

    unit: str
    turn: int

    def __str__(self) -> str:
        return f"{self.unit}, call {self.turn + 1}" if self.turn else self.unit


RESULT = UnitCall("the function's result", 0)
"""The end of a forward, after all calls."""


class Output(NamedTuple):
    """A tensor that a call returns: leaf number ``leaf`` of its result."""

    call: UnitCall
    leaf: int


class OutputSpec(NamedTuple):
    """Block and dtype of an output; ``place`` None: a plain tensor, the same on every rank.

    ``block``  the shape of one rank's block.
    ``grad``   whether it depends on parameters, so that a gradient comes back for it.
    """

    place: Place | None
    block: torch.Size
    dtype: torch.dtype
    grad: bool

    @property
    def nbytes(self) -> int:
        """The bytes of one rank's block."""
        return self.block.numel() * self.dtype.itemsize

    def stored(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of its storage, of all ranks that a process runs."""
        return tuple(self.block) if self.place is None else storage_shape(mesh, *self.block)

    def value(self, raw: Tensor, mesh: Mesh, deferred: bool = False) -> Tensor:
        """Return the output with this storage.

        ``deferred``  with a gradient that is left unsummed over the axes that do not split it.
        """
        if self.place is None:
            return raw
        over = whole_axes(self.place.layout, mesh) if deferred else ()
        return ShardedTensor(raw, self.place._replace(mesh=mesh, deferred=frozenset(over)))

    def nan(self, mesh: Mesh) -> Tensor:
        """Return storage that must not be used: one NaN as all elements, so that a use shows."""
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        one = torch.full((), value, dtype=self.dtype, device=mesh.device)
        return one.expand(self.stored(mesh))


def block_of_output(x: Tensor) -> Tensor:
    """Return the storage of an output, whose gradient is whole on every rank."""
    return settle(x).raw if isinstance(x, ShardedTensor) else x


def whole_axes(layout: Layout, mesh: Mesh) -> list[str]:
    """List the axes over which gradients of an output are summed by the stage that made it."""
    known = mesh.names if layout.partial else layout.axes
    return [a for a in mesh.names if a not in known]


def block_that_crosses(x: Any) -> Tensor:
    """Return the storage of an output, whose gradient is left unsummed as ``OutputSpec.value`` says.

    Stages that use it would sum each use's gradient; it is summed here once, or by what made it.
    """
    if not isinstance(x, ShardedTensor) or x.sharding.partial:
        return block_of_output(x)
    return vary(x.raw, x.mesh, set(whole_axes(x.sharding, x.mesh)) - x.deferred)


def spec_of(x: Any) -> Any:
    """Return the spec of a tensor, any other value as it is; on shapes, blocks are of one rank."""
    if not isinstance(x, Tensor):
        return x
    place, raw = None, block_of_output(x)
    if isinstance(x, ShardedTensor):
        place = settle(x).place._replace(deferred=frozenset())
    return OutputSpec(place, raw.shape, raw.dtype, raw.requires_grad)


class Returned(NamedTuple):
    """Result of a call: specs of its tensors and other leaves, and their tree.

    ``draws``  random keys that the forward had drawn before the call, and after it.
    ``began``  the cost of the forward before the call.
    ``inner``  paths of its submodules whose hooks take outputs, as transformers collects hidden
               states and router logits: these outputs are leaves too, those of its own first.
    """

    leaves: tuple[Any, ...]
    tree: Any
    draws: tuple[int, int] = (0, 0)
    began: float = 0.0
    inner: Sequence[str] = ()


Calls = dict[UnitCall, Returned]


class AllSent(BaseException):
    """All outputs that other stages need are computed: the rest of forward is not run."""


@dataclass(eq=False)
class UnitForward:
    """State of one run.

    ``pipeline``  the module with stages that it runs, if it is known: no other is called.
    ``blocks``    runs it on blocks, which are whole on the one rank of a stage, see apply.py.
    ``begun``     whether the module was called.
    """

    pipeline: object = None
    blocks: Callable[..., Any] | None = None
    begun: bool = False

    def entered(self, pipeline: object) -> None:
        """Begin a call of a module with stages.  Raises: ShardError for a second one, or another."""
        if pipeline is None or self.begun or self.pipeline not in (None, pipeline):
            why = "a loss calls one module with stages, once, and no other module"
            fix = "loss = lambda params, *batch: apply(params, *batch).mean()"
            raise ShardError(why, op="value_and_grad", fix=fix)
        self.begun = True


@contextmanager
def hooked(m: nn.Module) -> Iterator[list[tuple[str, Any]]]:
    """Yield a list of the outputs of submodules that have hooks, with their paths, in order."""
    outputs: list[tuple[str, Any]] = []

    def ended(path: str, sub: nn.Module, args: Any, out: Any) -> None:
        outputs.append((path, out))

    hooked = [(path, sub) for path, sub in m.named_modules() if path and sub._forward_hooks]
    handles = [sub.register_forward_hook(partial(ended, path)) for path, sub in hooked]
    try:
        yield outputs
    finally:
        for h in handles:
            h.remove()


def _results(out: Any, inner: Sequence[tuple[str, Any]]) -> Any:
    """Return the result of a call, with the outputs that hooks take inside it if there are any."""
    return (out, *(x for _, x in inner)) if inner else out


def _view(x: Any) -> Any:
    """Return a tensor as an object of its own in the same memory, any other value as it is.

    What is done with a view is not done with the tensor, so that ways round a call show.
    """
    if not isinstance(x, Tensor):
        return x
    raw = raw_of(x)
    view = raw.view_as(raw)
    return x.becomes(view) if isinstance(x, ShardedTensor) else view


def _state(x: Tensor) -> tuple[int, int]:
    """Return what differs once a tensor was written to."""
    return raw_of(x)._cdata, raw_of(x)._version


@dataclass(eq=False)
class WholeForward(UnitForward):
    """A run of every unit on shapes, which records the calls, in order.

    ``drawn``  random keys drawn so far; random.py counts them.
    """

    calls: Calls = field(default_factory=dict)
    flow: Dependences = field(default_factory=Dependences)
    drawn: int = 0

    def call(
        self, unit: str, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = UnitCall(unit, sum(c.unit == unit for c in self.calls))
        before, began = self.drawn, self.flow.cost
        tensors = {id(x): x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)}
        given = lambda x: views.get(id(x), x)  # noqa: E731
        with hooked(m) as inner, self.flow.call(call):
            views = {at: _view(x) for at, x in tensors.items()}
            states = {at: _state(x) for at, x in views.items()}
            out = forward(*map(given, args), **{k: given(x) for k, x in kwargs.items()})
            out = type(out)(map(_view, out)) if type(out) in (tuple, list) else _view(out)
            for at in (at for at, x in views.items() if _state(x) != states[at]):
                self.flow.write(raw_of(tensors[at]))
            leaves, tree = tree_flatten(_results(out, inner))
            refuse_unregistered(call, leaves)
            for i, x in enumerate(leaves):
                if isinstance(x, Tensor):
                    self.flow.cross(raw_of(x), Output(call, i))
        specs, paths = tuple(map(spec_of, leaves)), [path for path, _ in inner]
        self.calls[call] = Returned(specs, tree, (before, self.drawn), began, paths)
        return out


def refuse_unregistered(call: object, leaves: Iterable[object]) -> None:
    """Refuse results of a call that hold tensors where torch's trees find none."""
    for x in leaves:
        if is_dataclass(x) and any(isinstance(t, Tensor) for t in vars(x).values()):
            kind = type(x).__name__
            why = f"{call} returns a {kind}, whose tensors are not known to torch's trees"
            fix = f"torch.export.register_dataclass({kind})"
            raise Unsupported(why, op="parallelize", fix=fix)


@dataclass(eq=False, kw_only=True)
class StageForward(UnitForward):
    """A run of the units of one stage.

    ``cut``     of the function, see cut.py; ``at`` the number of the next of its calls.
    ``given``   outputs of other stages that were received.
    ``wanted``  outputs that other stages need; ``found`` those computed so far.
    ``draws``   the random keys of this run, which follow the whole forward's.
    ``ghosts``  the ghosts' memory, by shape and dtype: all share it, and it may be written to.
    ``copies``  whether copies of what was received are handed out.
    """

    mesh: Mesh
    cut: Any
    number: int
    wanted: frozenset[Output]
    given: Mapping[Output, Tensor] = field(default_factory=dict)
    at: int = 0
    found: dict[Output, Tensor] = field(default_factory=dict)
    draws: Draws | None = None
    drawn: int = 0
    ghosts: dict[Any, Tensor] = field(default_factory=dict)
    copies: bool = False

    def call(
        self, unit: str, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        call = self.next_call(unit)
        returned = self.cut.calls[call]
        if self.draws is not None:
            self.draws.go_to(returned.draws[0])
        if self.cut.owner.get(call, self.number) == self.number:
            with hooked(m) if returned.inner else nullcontext([]) as inner:
                out = forward(*args, **kwargs)
            self._keep(call, _results(out, inner))
        else:
            out = self._left_out(call, m, returned)
        if self.draws is not None:
            self.draws.go_to(returned.draws[1])
        return out

    def next_call(self, unit: str) -> UnitCall:
        """Return the next call.  Raises: Unsupported where it is not of this unit."""
        call = self.cut.order[self.at]
        if call.unit != unit:
            why = f"{call} was next when the stages were cut, and {unit} is now"
            fix = "module.eval()  # blocks that are skipped at random, as by LayerDrop, are not cut"
            raise Unsupported(why, op="value_and_grad", mesh=self.mesh, fix=fix)
        self.at += 1
        return call

    def region(self) -> "Callable[[], StageForward]":
        """Begin a region that is recomputed; return the function that makes a run for it."""
        # the region may write to what was received, which its recomputation needs again
        self.copies = True
        # without its outputs, see recompute.py
        bare = replace(self, wanted=frozenset(), found={})

        def again() -> StageForward:
            draws = None if bare.draws is None else bare.draws.replaced()
            return replace(bare, draws=draws, found={})

        return again

    def _keep(self, call: UnitCall, results: Any) -> None:
        """Keep what is wanted of a call's results; break the run off if they were the last."""
        if own := [k for k in self.wanted if k.call == call]:
            leaves = tree_flatten(results)[0]
            self.found.update({k: leaves[k.leaf] for k in own})
            if len(self.found) == len(self.wanted):
                raise AllSent
            # what follows may write to an output in place
            self.found.update({k: self.found[k].clone() for k in own})

    def _left_out(self, call: UnitCall, m: nn.Module, returned: Returned) -> Any:
        """Return the result of a call of another stage, and give its submodules' hooks theirs."""
        leaves = [self._leaf(Output(call, i), x) for i, x in enumerate(returned.leaves)]
        results = tree_unflatten(leaves, returned.tree)
        out, *inner = results if returned.inner else (results,)
        for path, x in zip(returned.inner, inner, strict=True):
            sub, unsent = m.get_submodule(path), _Unsent()
            unsent.path = f"{call.unit}.{path}"
            for key, hook in list(sub._forward_hooks.items()):
                given = ({},) if key in sub._forward_hooks_with_kwargs else ()
                hook(sub, unsent, *given, x)
        return out

    def _leaf(self, output: Output, spec: Any) -> Any:
        if output in self.given:
            given = self.given[output]
            return given.clone() if self.copies else given
        if not isinstance(spec, OutputSpec):
            return spec
        # the shape of a block, from its layout, is computed once for each output
        if (ghost := self.ghosts.get(id(spec))) is None:
            key = spec.stored(self.mesh), spec.dtype
            if key not in self.ghosts:
                self.ghosts[key] = spec.nan(self.mesh).contiguous()
            ghost = self.ghosts[id(spec)] = self.ghosts[key]
        raw = ghost.detach()
        return raw if self.blocks else spec.value(raw, self.mesh)


class _Unsent(tuple[Any, ...]):
    """Arguments of a submodule's call on another stage, which are not sent: a read raises."""

    path: str

    def _refuse(self, *_: object) -> Any:
        why = f"a forward hook of {self.path} reads its input, which only its own stage has"
        fix = 'stages = sl.Stages("pipe", cut=1)  # or read the output in the hook'
        raise ShardError(why, op="apply", fix=fix)

    __getitem__ = __iter__ = __len__ = _refuse  # type: ignore[assignment]
