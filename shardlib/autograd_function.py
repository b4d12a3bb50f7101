"""torch.autograd.Function on sharded values and on simulated blocks.

C++ autograd does not look inside a wrapper, so ``MyFunction.apply(sharded)`` would return a value
without a graph.  Here its forward and backward run on values (global view), inside one Function on
their raw blocks: backward receives cotangents in the layouts of the outputs, and its results are
moved to the layouts of the inputs' gradients, pending over the axes that the input defers.

``torch.utils.checkpoint`` (reentrant) and module backward hooks are Functions too: see
``STANDINS``.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from torch.utils.hooks import RemovableHandle

from shardlib._compat import (
    NO_SETUP,
    Ctx,
    Grads,
    HookFunction,
    Local,
    intercept_functions,
    intercept_inputs,
    patch,
)
from shardlib.collectives import Stacked, blocks
from shardlib.errors import ShardError, lettered
from shardlib.mesh import Mesh, bind
from shardlib.opspec import Args, Func
from shardlib.optional import unless_none
from shardlib.placing import reshard
from shardlib.shard_map import laid
from shardlib.tensor import (
    Facts,
    ShardedTensor,
    gradient_place,
    promoting,
    replicated,
    settle,
    typeof,
)

_WRAPPERS: frozenset[type] = frozenset({ShardedTensor, Stacked})

STANDINS: dict[Any, Func] = {}
"""Function class -> its substitute where a wrapper is among its arguments."""


# ---------------------------------------------------------------- metadata of a raw block


class _Form:
    """Metadata to rebuild one argument from its local block and to place its gradient."""

    def __init__(self, x: Tensor | None, mesh: Mesh) -> None:
        self.mesh = mesh

    @staticmethod
    def raw(x: Tensor) -> Tensor:
        return x

    def value(self, raw: Tensor) -> Tensor:
        return raw

    given = output = cotangent = value

    def gradient(self, g: Tensor, op: str) -> Tensor:
        """Return the raw gradient of a plain tensor, which is the same on every rank."""
        if isinstance(g, ShardedTensor):
            g = reshard(g, "...").raw
            return blocks(g, self.mesh)[0]
        return g.ranks.sum(0) if type(g) is Stacked else g


class _Whole(_Form):
    """Form of a ShardedTensor."""

    def __init__(self, x: ShardedTensor, mesh: Mesh) -> None:
        super().__init__(x, mesh)
        self.shape = x.shape
        self.dtype = x.dtype
        # not x itself: hooks of autograd may move its saved block
        self.place = x.place

    @staticmethod
    def raw(x: object) -> Tensor:
        return x.raw

    def value(self, raw: Tensor) -> Tensor:
        """Return a saved tensor; backward uses it once more, so its gradient is not deferred."""
        return self.given(settle(self.output(raw)).raw if self.place.deferred else raw)

    def given(self, raw: Tensor) -> Tensor:
        return ShardedTensor(raw, self.place._replace(deferred=frozenset()))

    def output(self, raw: Tensor) -> ShardedTensor:
        return ShardedTensor(raw, self.place)

    def cotangent(self, raw: Tensor) -> Tensor:
        return ShardedTensor(raw, gradient_place(self.place))

    def gradient(self, g: Tensor, op: str) -> Tensor:
        if not isinstance(g, ShardedTensor):
            g = replicated(g, self.mesh)
        if g.shape != self.shape:
            like = self.output(g.raw.new_empty((), dtype=self.dtype))
            verb = "expand" if g.shape.numel() < self.shape.numel() else "sum_to_size"
            raise ShardError(
                f"backward returned a gradient of shape {list(g.shape)} for an input of shape "
                f"{list(self.shape)}",
                op=op, operands={"input": typeof(like), "grad": typeof(g)}, mesh=self.mesh,
                fix=f"return grad.{verb}{tuple(self.shape)}",
            )  # fmt: skip
        return reshard(g, gradient_place(self.place).layout).raw


class _Block(_Form):
    """Form of a Stacked: each rank's block."""

    @staticmethod
    def raw(x: object) -> Tensor:
        return x.ranks

    def value(self, raw: Tensor) -> Tensor:
        return Stacked(raw, self.mesh)

    given = output = cotangent = value

    def gradient(self, g: Tensor, op: str) -> Tensor:
        return g.ranks if type(g) is Stacked else g.unsqueeze(0).expand(self.mesh.size, *g.shape)


def _form(x: Tensor | None, mesh: Mesh) -> "_Form":
    """Return the form of a tensor, or of None, which stays None."""
    return _FORMS.get(type(x), _Form)(x, mesh)


_FORMS: dict[type, Callable[..., _Form]] = {ShardedTensor: _Whole, Stacked: _Block}


def _each(method: str, forms: Sequence[_Form], given: Sequence[Any], *more: str) -> Grads:
    """Call a method of each form with its value; None stays None."""
    return tuple(
        unless_none(getattr(form, method), x, *more) for form, x in zip(forms, given, strict=True)
    )


# ---------------------------------------------------------------- ctx of the user's Function


class _Context:
    """torch's ctx, with sharded values instead of blocks."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self._saved: Args = ()
        self._dirty: Args = ()
        self._constant: Args = ()
        self._fill = True
        self._read: Callable[[], Args] | None = None

    def save_for_backward(self, *tensors: object) -> None:
        self._saved = tensors

    def save_for_forward(self, *tensors: object) -> None:
        pass

    def mark_dirty(self, *tensors: object) -> None:
        self._dirty = tensors

    def mark_non_differentiable(self, *tensors: object) -> None:
        self._constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self._fill = value

    @property
    def saved_tensors(self) -> Args:
        return () if self._read is None else self._read()


class _FunctionCall:
    """State of one ``cls.apply(*args)``."""

    def __init__(self, cls: Any, args: Sequence[Any], mesh: Mesh) -> None:
        self.cls = cls
        self.mesh = mesh
        self.args = list(args)
        self.at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.forms = [_form(args[i], mesh) for i in self.at]
        self.count = len(self.args)

    def forward(self, ctx: Ctx, raws: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the user's forward on sharded values; return the blocks of its results."""
        values = list(self.args)
        needs = [False] * self.count
        for i, form, raw, need in zip(
            self.at, self.forms, raws, ctx.needs_input_grad[1:], strict=True
        ):
            values[i] = form.given(raw)
            needs[i] = need
        self.user = user = _Context(tuple(needs))
        outs = self._called(values)
        self.rest = [None if isinstance(o, Tensor) else o for o in outs]
        self.put = [i for i, o in enumerate(outs) if isinstance(o, Tensor)]
        self.outs = [_form(outs[i], self.mesh) for i in self.put]
        self._mark(ctx, outs, values)
        self._save(ctx, values)
        user._saved = user._dirty = user._constant = ()
        self.args = []
        return tuple(f.raw(outs[i]) for i, f in zip(self.put, self.outs, strict=True))

    def _called(self, values: list[Any]) -> Args:
        """Call the user's forward, in one of torch's two forms; return its results as a tuple."""
        if self.cls.setup_context is NO_SETUP:
            out = self.cls.forward(self.user, *values)
        else:
            out = self.cls.forward(*values)
            self.cls.setup_context(self.user, tuple(values), out)
        self.single = not isinstance(out, tuple)
        return (out,) if self.single else out

    def _mark(self, ctx: Ctx, outs: Sequence[Any], values: Sequence[Any]) -> None:
        """Tell torch which blocks were written to and which have no gradient.

        ``same``: number of a tensor result -> number of the argument that it is, written in place.
        """
        dirty = self.user._dirty
        written = {id(values[i]): i for i in self.at if any(values[i] is d for d in dirty)}
        self.same = {
            n: written[id(outs[i])] for n, i in enumerate(self.put) if id(outs[i]) in written
        }
        if dirty:
            ctx.mark_dirty(*[_form(t, self.mesh).raw(t) for t in dirty])
        if constant := self.user._constant:
            ctx.mark_non_differentiable(*[_form(t, self.mesh).raw(t) for t in constant])
        ctx.set_materialize_grads(self.user._fill)

    def _save(self, ctx: Ctx, values: Sequence[Any]) -> None:
        """Save the blocks of what the user's forward saved."""
        given = {id(values[i]): form for i, form in zip(self.at, self.forms, strict=True)}
        saved = self.user._saved
        self.saved = [given.get(id(t)) or _form(t, self.mesh) for t in saved]
        ctx.save_for_backward(*[f.raw(t) for f, t in zip(self.saved, saved, strict=True)])

    def backward(self, ctx: Ctx, raws: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the user's backward on sharded cotangents; return the blocks of its gradients."""
        values: list[Any] = [None] * len(self.rest)
        for i, g in zip(self.put, _each("cotangent", self.outs, raws), strict=True):
            values[i] = g
        user, cls = self.user, self.cls
        user._read = lambda: tuple(
            f.value(t) for f, t in zip(self.saved, ctx.saved_tensors, strict=True)
        )
        run = cls.backward if cls.backward is not torch.autograd.Function.backward else cls.vjp
        once = getattr(run, "__code__", None) is _ONCE
        try:
            with promoting(), bind(self.mesh):
                if once:
                    with torch.no_grad():
                        found = run.__wrapped__(user, *values)
                else:
                    found = run(user, *values)
                out = self._blocks(found if isinstance(found, tuple) else (found,))
        finally:
            user._read = None
        if once and torch.is_grad_enabled():
            # torch checks the cotangents only, and drops the second derivative where they are
            # constant; saved tensors may require grad too
            near = [r for r in (*raws, *ctx.saved_tensors) if r is not None and r.requires_grad]
            out = [None if g is None else _Final.apply(g, cls.__name__, *near) for g in out]
        return out

    def _blocks(self, found: Args) -> list[Tensor | None]:
        """Return the blocks of the gradients of the tensors among the arguments."""
        name = self.cls.__name__
        if any(g is not None for g in found[self.count :]):
            raise RuntimeError(
                f"function {name} returned an incorrect number of gradients "
                f"(expected {self.count}, got {len(found)})"
            )
        found += (None,) * (self.count - len(found))
        needed = [found[i] if self.user.needs_input_grad[i] else None for i in self.at]
        return [*_each("gradient", self.forms, needed, name)]


_ONCE = torch.autograd.function.once_differentiable(lambda ctx: None).__code__


class _Final(Local):
    """apply(gradient, name, *cotangents): a gradient whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Ctx, g: Tensor, name: str, *raws: Tensor) -> Tensor:
        ctx.name = name
        return g.view_as(g)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        raise RuntimeError(
            f"{ctx.name}: trying to differentiate twice a function that was marked with "
            "@once_differentiable"
        )


class _Run(Local):
    """apply(call, *raws); a subclass for each user's Function has its name."""

    @staticmethod
    def forward(ctx: Ctx, call: _FunctionCall, *raws: Tensor) -> Any:
        ctx.call = call
        return call.forward(ctx, raws)

    @staticmethod
    def backward(ctx: Ctx, *grads: object) -> Any:
        return None, *ctx.call.backward(ctx, grads)


_RUNS: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


def _apply(cls: type, args: Args) -> object:
    """Run ``cls.apply(*args)`` where a wrapper is among args."""
    if cls in STANDINS:
        return STANDINS[cls](*args)
    found = next(a for a in args if isinstance(a, ShardedTensor | Stacked))
    if type(found) is Stacked and any(isinstance(a, ShardedTensor) for a in args):
        raise _mixed(cls.__name__, args, found.mesh)
    run = _RUNS.get(cls)
    if run is None:
        run = _RUNS[cls] = type(cls.__name__, (_Run,), {})
    call = _FunctionCall(cls, args, found.mesh)
    given = [args[i] for i in call.at]
    raws = run.apply(call, *[f.raw(x) for f, x in zip(call.forms, given, strict=True)])
    out = call.rest
    for n, (i, form, raw) in enumerate(zip(call.put, call.outs, raws, strict=True)):
        if n in call.same:
            out[i] = x = args[call.same[n]]
            if isinstance(x, ShardedTensor):
                x.place = x.place._replace(deferred=frozenset())
        else:
            out[i] = form.output(raw)
    call.rest = [None] * len(out)
    return out[0] if call.single else tuple(out)


def _mixed(name: str, args: Args, mesh: Mesh) -> ShardError:
    """Make the error of a block of one rank that meets a sharded value."""
    given = lettered(a for a in args if isinstance(a, Tensor))
    names = ", ".join(given)
    layouts = tuple(map(laid, given.values()))
    fix = (
        f"sl.shard_map(lambda {names}: {name}.apply({names}), "
        f"in_layouts={layouts!r}, out_layouts='...')"
    )
    return ShardError("a block and a sharded value meet", op=name, mesh=mesh, fix=fix)


def _hid(cls: type, args: Args, out: object) -> object:
    """Refuse sharded results of plain arguments that have a gradient, which would be lost."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        op = f"{cls.__name__}.apply"
        why = "its results are sharded and its arguments are not: their gradient would be lost"
        fix = f"{op}(x, ...)  # each sharded value an argument of its own, not in a list"
        raise ShardError(why, op=op, fix=fix)
    return out


# ---------------------------------------------------------------- torch's own Functions


class Node:
    """Graph node whose hooks receive and return values; for torch's module backward hooks."""

    def __init__(self, node: object, ins: list[Any], outs: list[Any]) -> None:
        self.node = node
        self.ins = ins
        self.outs = outs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def name(self) -> str:
        return self.node.name()

    def _raws(self, forms: list[Any], given: object) -> Grads | None:
        """Return the blocks of what a hook returned, in place of a node's gradients."""
        if given is None:
            return None
        given = given if isinstance(given, tuple) else (given,)
        return _each("gradient", forms, given, "backward hook")

    def register_prehook(self, hook: Func) -> RemovableHandle:
        def run(grad_outputs: Grads) -> Grads | None:
            return self._raws(self.outs, hook(_each("cotangent", self.outs, grad_outputs)))

        return self.node.register_prehook(run)

    def register_hook(self, hook: Func) -> RemovableHandle:
        def run(grad_inputs: Grads, grad_outputs: Grads) -> Grads | None:
            ins = _each("cotangent", self.ins, grad_inputs)
            return self._raws(self.ins, hook(ins, _each("cotangent", self.outs, grad_outputs)))

        return self.node.register_hook(run)


def _hooked(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Replace BackwardHookFunction: the identity, whose graph node carries module hooks."""
    mesh = next(t.mesh for t in tensors if isinstance(t, ShardedTensor | Stacked))
    forms = [_form(t, mesh) for t in tensors]
    cls = HookFunction
    raws = cls.apply(*[f.raw(t) for f, t in zip(forms, tensors, strict=True)])
    nodes = [r.grad_fn for r in raws if r.grad_fn is not None]
    node = next((n for n in nodes if n.name() == cls.__name__ + "Backward"), None)
    outs = []
    for f, r in zip(forms, raws, strict=True):
        out = f.output(r)
        if node is not None and r.grad_fn is node and out is not r:
            out.facts = Facts(node=Node(node, forms, forms))
        outs.append(out)
    return tuple(outs)


def _checkpointed(function: object, preserve: bool, *args: object) -> object:
    """Run a reentrant checkpoint as a non-reentrant one.

    The reentrant kind calls backward inside backward and refuses ``inputs=``.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _opened(x: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    form = _form(x, x.mesh)
    return form.raw(x), form.output


STANDINS |= {CheckpointFunction: _checkpointed, HookFunction: _hooked}
patch("inputs", lambda: STANDINS.update(intercept_inputs(_WRAPPERS, _opened)))
patch("functions", lambda: intercept_functions(_WRAPPERS, _apply, _hid))
