"""Gradients of functions of sharded parameters, as values: ``grad`` and ``value_and_grad``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import optree
import torch
from optree import PyTreeSpec
from torch import Tensor

from shardlib.dtypes import wider
from shardlib.errors import ShardError
from shardlib.mesh import Axes, Mesh, axes_of, scope, within
from shardlib.microbatches import MicroBatches
from shardlib.opspec import Args, Kwargs
from shardlib.tensor import (
    Place,
    ShardedTensor,
    Together,
    gradient_of,
    leaf_block,
    leaf_of,
    refuse_blocks,
    settle,
    type_or_class,
    typeof,
    whole_now,
)


class TakesGradients(Protocol):
    """Type of ``into=``: a transform with gradient buckets, see ``sl.optim.zero``."""

    @property
    def sink(self) -> Callable[[Any], Any] | None:
        """Parameters -> an object with the axes ``over`` which it sums, ``take(leaf, gradient)``, ``finish()``."""
        ...


P = ParamSpec("P")
# any tree: a lambda's argument has no type
Params = TypeVar("Params", bound=Any)
Second = TypeVar("Second", bound=Any)
# a loss, or with has_aux a pair of it and more
Value = TypeVar("Value", bound=Any)


class _Options(TypedDict, total=False):
    """Arguments on which the type of a result does not depend."""

    pending: str | Sequence[str]


class _AuxOptions(_Options, total=False):
    has_aux: bool
    microbatches: int | None
    weigh: Callable[..., object] | None


@overload
def value_and_grad(
    f: Callable[Concatenate[Params, P], Value],
    argnums: Literal[0] = 0,
    **how: Unpack[_AuxOptions],
) -> Callable[Concatenate[Params, P], tuple[Value, Params]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Params, Second, P], Value],
    argnums: tuple[Literal[0], Literal[1]],
    **how: Unpack[_AuxOptions],
) -> Callable[Concatenate[Params, Second, P], tuple[Value, tuple[Params, Second]]]: ...
@overload
def value_and_grad(
    f: Callable[Concatenate[Params, P], Value],
    *,
    has_aux: bool = False,
    into: TakesGradients,
    microbatches: int | None = None,
    weigh: Callable[..., object] | None = None,
) -> Callable[Concatenate[Params, P], tuple[Value, dict[str, ShardedTensor]]]: ...
@overload
def value_and_grad(
    f: Callable[P, Value],
    argnums: Sequence[int],
    **how: Unpack[_AuxOptions],
) -> Callable[P, tuple[Value, tuple[object, ...]]]: ...
@overload
def value_and_grad(
    f: Callable[P, object],
    argnums: int | Sequence[int] = 0,
    **how: Unpack[_AuxOptions],
) -> Callable[P, tuple[object, object]]: ...
def value_and_grad(
    f: Callable[..., object],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
    pending: str | Sequence[str] = (),
    into: TakesGradients | None = None,
    microbatches: int | None = None,
    weigh: Callable[..., object] | None = None,
) -> Callable[..., tuple[object, object]]:
    """Turn a loss into ``(params, ...) -> (loss, grads)``; grads in the parameters' layouts.

    ``argnums``  the argument to differentiate, any pytree of tensors; of several, a tuple of
                 gradients.
    ``has_aux``  f returns (loss, aux); the result is then ((loss, aux), grads).
    ``pending``  mesh axes over which gradients are left unsummed: their layout has ``+ sum(axis)``,
                 which ``zero(..., axis)`` reduce-scatters instead of all-reducing.
    ``into``     a transform made by ``zero``: backward copies each gradient into its buckets, and
                 at stage 2 reduce-scatters it meanwhile; the result is a ``Buckets``.

    ``microbatches``  the other arguments are cut along their first dimension into so many parts,
                 and f runs on one after the other; the loss is their mean.  Of a module with
                 ``stages``, whose stages run at the same time on different parts, in the order of
                 their schedule: each rank gets the gradients of the parameters that it holds.
    ``weigh``    with ``microbatches``, their weights in the mean: a function of a part's arguments,
                 such as ``lambda batch: (batch["labels"] != -100).sum()``.

    A leaf that the loss does not use gets zeros.  Where some leaves of an argument require grad,
    the others are frozen: their gradient is None, nothing is computed or moved for it, and
    transforms leave them unchanged.  A tree where no leaf requires grad is differentiated whole, so
    one ``requires_grad_()`` freezes all the other leaves.
    Inside a function that is differentiated itself, value and gradients are functions of its
    arguments, so that ``sl.grad(lambda w: sl.grad(f)(w).square().sum())`` is a second derivative.
    Raises: ShardError if the loss is no scalar.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     w = sl.shard(torch.ones(4), "x")
    ...     v = sl.shard(torch.arange(8.0).reshape(2, 4), "data x")
    ...     loss, g = sl.value_and_grad(lambda w: (v * w).sum())(w)
    ...     _, later = sl.value_and_grad(lambda w: (v * w).sum(), pending="data")(w)
    >>> loss.item(), sl.typeof(g), sl.typeof(later), sl.unshard(g).tolist()
    (28.0, 'f32[4@x]', 'f32[4@x]{sum:data}', [4.0, 6.0, 8.0, 10.0])
    """
    axes = axes_of(pending)
    if into is not None:
        _check_into(into, axes, argnums)
    several = not isinstance(argnums, int)
    numbers: Sequence[int] = argnums if not isinstance(argnums, int) else (argnums,)
    parts = _Parts(f, microbatches, weigh, axes, into)

    def run(*args: object, **kwargs: object) -> tuple[Any, Any]:
        if microbatches is not None or (args and staged_mesh(args[0]) is not None):
            check_parts(microbatches, has_aux, argnums)
            return parts(args[0], args[1:], kwargs)
        value, grads = _run(f, numbers, has_aux, axes, into, args, kwargs)
        return value, tuple(grads) if several else grads[0]

    return run


def _run(
    f: Callable[..., Any], numbers: Sequence[int], has_aux: bool, over: Axes,
    into: TakesGradients | None, args: tuple[Any, ...], kwargs: dict[str, Any],
) -> tuple[Any, Sequence[Any]]:  # fmt: skip
    """Call ``f``; return its value and the gradients of the arguments ``numbers``, or buckets."""
    at = [_position(n, len(args)) for n in numbers]
    given = [args[i] for i in at]
    inside = scope().call.differentiated and torch.is_grad_enabled()
    sink = None if into is None else _sink(into, given[0], inside)
    leaves = _leaves(given, over if sink is None else sink.over, inside)
    inner = list(args)
    for i, one in zip(at, leaves.arguments, strict=True):
        inner[i] = one
    with ExitStack() as stack:
        # if backward raises, no transfer stays posted
        stack.enter_context(within())
        # nothing is left to be summed with others
        alone = sink is not None or inside
        together = stack.enter_context(Together([] if alone else leaves.wanted))
        with torch.enable_grad(), within(differentiated=True):
            out: Any = f(*inner, **kwargs)
            loss, aux = out if has_aux else (out, None)
            raw = loss_block(loss).sum()
        if sink is not None:
            hooks = [w.register_hook(partial(sink.take, i)) for i, w in enumerate(leaves.wanted)]
            stack.callback(lambda: [hook.remove() for hook in hooks])
        together.open = True
        found: Sequence[Tensor | None] = [None] * len(leaves.wanted)
        if raw.requires_grad:
            found = torch.autograd.grad(raw, leaves.wanted, allow_unused=True, create_graph=inside)
        found = with_sums(found, together.finish())
        if sink is not None:
            sink.leaves = leaves.pairs
        grads = leaves.gradients(found) if sink is None else [sink.finish()]
    value = loss if inside else loss.detach()
    return ((value, aux) if has_aux else value), grads


class _Leaves(NamedTuple):
    """Leaves of the arguments that are differentiated.

    ``arguments``  the arguments with leaves of this call.
    ``pairs``      all leaves, as they were given and as they are in ``arguments``.
    ``frozen``     whether each leaf is frozen; ``asked`` are the others, ``wanted`` their blocks, and
                   ``given`` they as they were given.
    """

    arguments: Any
    pairs: tuple[list[Any], list[Any]]
    tree: PyTreeSpec
    frozen: list[bool]
    asked: list[Any]
    wanted: list[Tensor]
    given: list[Any]

    def gradients(self, found: Sequence[Tensor | None]) -> Any:
        """Return the arguments' gradients; those of frozen leaves are None."""
        rows = zip(self.given, self.asked, self.wanted, found, strict=True)
        each = (_grad(x, _zeros(of, raw) if g is None else g) for of, x, raw, g in rows)
        return optree.tree_unflatten(self.tree, [None if f else next(each) for f in self.frozen])


def _leaves(given: Any, over: Axes, inside: bool) -> _Leaves:
    leaves, tree = optree.tree_flatten(given)
    frozen_at = [f for one in given for f in frozen(optree.tree_leaves(one))]
    pairs = list(zip(leaves, frozen_at, strict=True))
    ours = [_held(x, inside) if f else _leaf(x, over, inside) for x, f in pairs]
    asked = [x for x, f in zip(ours, frozen_at, strict=True) if not f]
    wanted = [x.raw if isinstance(x, ShardedTensor) else x for x in asked]
    arguments = optree.tree_unflatten(tree, ours)
    were = [x for x, f in pairs if not f]
    return _Leaves(arguments, (leaves, ours), tree, frozen_at, asked, wanted, were)


def _sink(into: TakesGradients, params: object, inside: bool) -> Any:
    """Return the buckets that take the gradients.  Raises: ShardError in a differentiated call."""
    if inside:
        why = "buckets hold gradients of which none is taken, and this call is differentiated"
        fix = "sl.value_and_grad(f)(params)"
        raise _error(why, fix)
    sink = into.sink
    assert sink is not None, "value_and_grad refuses a transform without buckets"
    return sink(params)


def loss_block(loss: object) -> Tensor:
    """Return the loss's block.  Raises: ShardError if the loss is no scalar."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return _ready(loss)
    why = f"the loss is {type_or_class(loss)}, not a scalar"
    fix = "sl.value_and_grad(lambda p: f(p).mean())(params)"
    raise _error(why, fix)


def _check_into(into: TakesGradients, axes: Axes, argnums: object) -> None:
    if getattr(into, "sink", None) is None:
        why = f"{type(into).__name__} has no buckets for gradients"
        fix = 'tx = sl.optim.zero(tx, axis="data", stage=2)'
        raise _error(why, fix)
    if axes or argnums != 0:
        why = "into= says itself what is pending, and takes the gradients of the first argument"
        fix = "sl.value_and_grad(f, into=tx)(params)"
        raise _error(why, fix)


def _error(why: str, fix: str) -> ShardError:
    return ShardError(why, op="value_and_grad", fix=fix)


def _held(x: Any, inside: bool) -> Any:
    # a frozen value that is fetched when it is read stays so
    stays = inside or not isinstance(x, Tensor) or not getattr(x, "is_stored", True)
    return x if stays else x.detach()


def _position(n: int, count: int) -> int:
    if not -count <= n < count:
        why = f"argnums={n} of a call with {count} positional arguments"
        fix = "sl.value_and_grad(f, argnums=0)"
        raise _error(why, fix)
    return n % count


def frozen(leaves: Sequence[Any]) -> list[bool]:
    """Return whether each leaf of a tree is frozen: it requires no grad, and another leaf does.

    The other leaf may be one of another stage of a pipeline.
    """
    asks = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    some = True in asks or any(isinstance(x, ShardedTensor) and is_frozen(x.mesh) for x in leaves)
    return [some and not a for a in asks]


def is_frozen(mesh: Mesh) -> bool:
    """Return whether a mesh is that of a stage of which no parameter is trained."""
    return mesh.outer is not None and mesh.outer.frozen


@overload
def grad(
    f: Callable[Concatenate[Params, P], Tensor],
    argnums: Literal[0] = 0,
    **how: Unpack[_Options],
) -> Callable[Concatenate[Params, P], Params]: ...
@overload
def grad(
    f: Callable[Concatenate[Params, Second, P], Tensor],
    argnums: tuple[Literal[0], Literal[1]],
    **how: Unpack[_Options],
) -> Callable[Concatenate[Params, Second, P], tuple[Params, Second]]: ...
@overload
def grad(
    f: Callable[P, Tensor], argnums: Sequence[int], **how: Unpack[_Options]
) -> Callable[P, tuple[object, ...]]: ...
@overload
def grad(
    f: Callable[P, Tensor], argnums: int = 0, **how: Unpack[_Options]
) -> Callable[P, object]: ...
def grad(
    f: Callable[..., Tensor], argnums: int | Sequence[int] = 0, *, pending: str | Sequence[str] = ()
) -> Callable[..., object]:
    """Differentiate as ``value_and_grad`` does, without the value.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     w = sl.shard(torch.arange(4.0), "x")
    ...     g = sl.grad(lambda w: w.square().sum())(w)
    ...     sl.typeof(g), sl.unshard(g)
    ('f32[4@x]', tensor([0., 2., 4., 6.]))
    """
    both = value_and_grad(f, argnums, pending=pending)
    return lambda *args, **kwargs: both(*args, **kwargs)[1]


def _leaf(x: object, axes: Axes, inside: bool) -> Tensor:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        what = typeof(x) if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"
        why = f"only floating point leaves have gradients, this is {what}"
        fix = "x.float()" if isinstance(x, Tensor) else "torch.tensor(float(x))"
        raise _error(why, fix)
    if not isinstance(x, ShardedTensor):
        return _apart(x, inside)
    place = x.place.mesh.memo("leaf", (x.place, axes), lambda: deferring(x, axes))
    return ShardedTensor(leaf_block(_apart(leaf_of(x), inside)), place)


def _apart(raw: Tensor, inside: bool) -> Tensor:
    """Return a leaf with the same values; inside a function that is differentiated, a copy that
    stays connected to its graph.
    """
    return raw.clone() if inside and raw.requires_grad else raw.detach().requires_grad_()


def deferring(x: ShardedTensor, axes: Axes) -> Place:
    """Return the place of a leaf whose gradient stays unsummed over axes that do not split it."""
    for a in axes:
        x.mesh.axis_size(a, "value_and_grad", "sl.value_and_grad(f, pending={})(params)")
    return x.place._replace(deferred=frozenset(a for a in axes if a not in x.sharding.axes))


def _ready(loss: Tensor) -> Tensor:
    if not isinstance(loss, ShardedTensor):
        refuse_blocks(loss)
        return loss
    if loss.sharding.named:
        why = "the loss must be the same on every rank"
        given = {"loss": typeof(loss)}
        fix = "sl.reshard(loss, '...')"
        raise ShardError(why, op="value_and_grad", operands=given, mesh=loss.mesh, fix=fix)
    return settle(loss).raw


def with_sums(found: Sequence[Tensor | None], sums: dict[int, Tensor]) -> list[Tensor | None]:
    """Add to each leaf's gradient from autograd the sum that was made outside it."""
    out = list(found)
    for i, g in sums.items():
        out[i] = g if (came := out[i]) is None else came + g
    return out


def _grad(x: Tensor, found: Tensor) -> Tensor:
    return gradient_of(x, found) if isinstance(x, ShardedTensor) else whole_now(found)


def _row(given: Any, dtype: torch.dtype) -> Tensor | None:
    """Return memory for the gradient of a leaf in another memory tier; None for other leaves."""
    read = getattr(getattr(given, "facts", None), "read", None)
    return read.gradient(dtype) if hasattr(read, "gradient") else None


def _zeros(given: Any, raw: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a gradient of zeros of a leaf, in the memory tier in which others of it are."""
    row = _row(given, dtype or raw.dtype)
    return torch.zeros_like(raw, dtype=dtype) if row is None else row.zero_()


# ---------------------------------------------------------------- micro-batches


class GradientSums:
    """Gradients of micro-batches added up, and summed over mesh axes once, when the last is there.

    ``axes``    those over which they are left unsummed.
    ``sink``    takes them in the place of the result.
    ``given``   leaves of which the sum is given away: to ``together``, which sums it over axes, or
                to the sink, or to ``result``.
    ``memory``  the numbers of storages that no other sum may be added up in.
    """

    def __init__(self, params: Any, axes: Axes, sink: Any = None) -> None:
        self.params, self.sink = params, sink
        self.axes = axes if sink is None else sink.over
        self.mesh = _mesh_of(params)
        # parts of buckets are reduced when they are gathered again
        self.parts = hasattr(params, "opened")
        open_axes = () if self.parts or self.mesh is None else self.mesh.names
        self.over = tuple(a for a in open_axes if self.mesh.axes[a] > 1)
        self.sums: dict[int, Tensor] = {}
        self.given: set[int] = set()
        self.memory: set[int] = set()
        self.result: dict[int, Tensor] = {}
        # gradients that are on their way to another memory tier
        self.owed: list[tuple[int, Callable[[], Tensor]]] = []

    @cached_property
    def first(self) -> _Leaves:
        """The leaves of which gradients are added up."""
        return _leaves([self.params], self.over, False)

    @cached_property
    def old(self) -> list[Any]:
        """The leaves as they are in the arguments."""
        return optree.tree_leaves(self.first.arguments)

    @property
    def nbytes(self) -> int:
        """Bytes of all sums."""
        return sum(w.numel() * wider(w.dtype).itemsize for w in self.first.wanted)

    @cached_property
    def together(self) -> Together:
        """The sums over mesh axes of what is given away."""
        return Together([], self.nbytes)

    def leaves(self, again: bool = False) -> _Leaves:
        """Return new leaves of the parameters, with gradients unsummed over all axes.

        ``again``  the same ones each time, as long as nothing was derived from them.
        """
        if self.parts:
            leaves = _leaves([self.params], self.over, False)
            if getattr(self.params, "in_tiers", False):
                for i, w in enumerate(leaves.wanted):
                    w.together = self, i
            return leaves
        # the same blocks, in values of their own: what is derived from a value is kept with it
        if again and all(getattr(x, "facts", None) is None for x in self.old):
            return self.first
        new = [x.at(x.place) if isinstance(x, ShardedTensor) else x for x in self.old]
        return self.first._replace(arguments=optree.tree_unflatten(self.first.tree, new))

    def backward(
        self, wanted: Sequence[Tensor], ends: Any, grads: Sequence[Tensor] | None = None,
        inputs: Sequence[Tensor] = (), retain: bool = False,
    ) -> None:  # fmt: skip
        """Add the gradients of the blocks ``wanted`` of the leaves; half precision in fp32.

        ``ends``    where backward begins: tensors, or edges of the graph, with their ``grads``.
        ``inputs``  other leaves, which get their gradients as ``.grad``.
        ``retain``  whether some gradients of this graph are computed later.
        """
        torch.autograd.backward(ends, grads, retain, inputs=[*inputs, *wanted])
        self._settle(0)
        sent = (x.grad for x in inputs if x.grad is not None)
        self.memory.update(g.untyped_storage()._cdata for g in sent)
        for i, w in enumerate(wanted):
            self._add(i, w, retain)

    def _add(self, i: int, w: Tensor, retain: bool = False) -> None:
        g = w.grad
        # autograd itself adds to the gradient of the same leaf, in place
        if g is None or g is self.sums.get(i):
            return
        assert i not in self.given, "no gradient of a parameter comes after its last"
        # of one row, gradients may be views of one tensor, which those computed later read
        memory = g.untyped_storage()._cdata
        self._sum(i, g, retain or memory in self.memory)
        self.memory.add(memory)
        if self.sums[i] is not g:
            w.grad = None

    def _sum(self, i: int, g: Tensor, copy: bool = False) -> None:
        if (old := self.sums.get(i)) is None:
            self.sums[i] = self._in(i, g, wider(g.dtype), copy)
        else:
            old.add_(g)

    def _in(self, i: int, g: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
        """Return a gradient in a dtype, in the memory tier in which it is."""
        row = None
        if copy or g.dtype != dtype:
            row = _row(self.first.given[i], dtype)
        return g.to(dtype, copy=copy) if row is None else row.copy_(g)

    def takes(self, i: int) -> bool:
        """Check whether a leaf's gradient may come after backward, see ``Together``."""
        return not torch.is_grad_enabled()

    def owe(self, i: int, finish: Callable[[], Tensor]) -> None:
        """Add the gradient that ``finish()`` returns when the next one is owed, or backward ends."""
        self.owed.append((i, finish))
        self._settle(1)

    def _settle(self, most: int) -> None:
        while len(self.owed) > most:
            i, finish = self.owed.pop(0)
            self._sum(i, finish())

    @contextmanager
    def ending(self, leaves: Sequence[int]) -> Iterator[None]:
        """Give away the sums of these leaves as backward completes them: no gradient follows."""
        self.land()

        def ended(i: int, w: Tensor) -> None:
            self._add(i, w)
            self.give(i)

        wanted = self.first.wanted
        hooks = [wanted[i].register_post_accumulate_grad_hook(partial(ended, i)) for i in leaves]
        yield
        for hook in hooks:
            hook.remove()
        for i in leaves:
            # one that this backward does not reach
            self.give(i)
        self.together.post()

    def give(self, i: int) -> None:
        """Give away the sum of a leaf, once; zeros where there is none."""
        if i in self.given:
            return
        self.given.add(i)
        x, raw = self.first.asked[i], self.first.wanted[i]
        g = self.sums.pop(i, None)
        g = _zeros(self.first.given[i], raw) if g is None else g
        raw.grad = None
        kept = self.axes if isinstance(x, ShardedTensor) else ()
        axes = tuple(a for a in self.over if a not in kept and a not in _split(x))
        if axes:
            self.together.take(i, g, x.mesh, axes, raw.dtype, raw.dtype)
        else:
            self._take(i, self._in(i, g, raw.dtype))

    def _take(self, i: int, g: Tensor) -> None:
        if self.sink is None:
            self.result[i] = g
        else:
            self.sink.take(i, g)

    def land(self) -> None:
        """Wait for the sums over mesh axes that are posted."""
        for i, g in self.together.finish().items():
            self._take(i, g)

    def of(self, name: str) -> Tensor:
        """Return the sum for a parameter of a dict, zeros where there is none."""
        i = self.number[name]
        assert i is not None, "a frozen parameter has no gradient"
        if i not in self.sums:
            raw = self.first.wanted[i]
            self.sums[i] = _zeros(self.first.given[i], raw, wider(raw.dtype))
        return self.sums[i]

    def set(self, name: str, total: Tensor) -> None:
        """Replace the sum for a parameter of a dict, and give it away."""
        i = self.number[name]
        assert i is not None, "a frozen parameter has no gradient"
        self.sums[i] = total
        self.give(i)

    @cached_property
    def number(self) -> dict[str, int | None]:
        """Name of a parameter of a dict -> the number of its leaf, None of a frozen one."""
        p, where = self.params, getattr(self.params, "index", None)
        # optree sorts the keys of a dict, and frozen leaves have no gradient
        keys = sorted(p) if where is None else [b.name for b in where]
        held = frozen([p[k] for k in keys])
        trained = [k for k, f in zip(keys, held, strict=True) if not f]
        number = {**dict.fromkeys(keys), **{k: i for i, k in enumerate(trained)}}
        if where is None:
            return number
        # a tied parameter has a bucket of its own
        return {n: number[keys[where.where[i][0]]] for i, n in enumerate(p.paths)}

    def finish(self) -> Any:
        """Return the gradients as a tree like the parameters, or what the sink makes of them."""
        for i in range(len(self.first.wanted)):
            self.give(i)
        self.land()
        if self.sink is not None:
            self.sink.leaves = self.first.pairs
            return self.sink.finish()
        same = self.axes == self.over
        leaves = self.first if same else _leaves([self.params], self.axes, False)
        return leaves.gradients([self.result.pop(i) for i in range(len(leaves.wanted))])[0]


def _split(x: object) -> Axes:
    return x.sharding.axes if isinstance(x, ShardedTensor) else ()


def _mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh of a tree's first sharded leaf."""
    return next((x.mesh for x in optree.tree_leaves(tree) if isinstance(x, ShardedTensor)), None)


def stage_mesh(tree: Any) -> Mesh | None:
    """Return the mesh of a tree, if it is that of one stage of a pipeline.

    A tree without leaves is of the mesh in scope, or a stage of it.
    """
    mesh: Mesh | None = _mesh_of(tree) or getattr(tree, "mesh", None)
    known = [mesh]
    if not optree.tree_leaves(tree):
        near = mesh or scope().mesh
        known = [] if near is None else [near, *near.stages.values()]
    return next((m for m in known if m is not None and m.outer is not None), None)


def staged_mesh(params: Any) -> Mesh | None:
    """Return the mesh of the parameters, if modules were cut into stages on it."""
    mesh = stage_mesh(params)
    return mesh if mesh is not None and mesh.outer is not None and mesh.outer.staged else None


def check_parts(microbatches: object, has_aux: bool = False, argnums: object = 0) -> None:
    """Refuse a number of micro-batches that is none, and what they cannot give."""
    whole = isinstance(microbatches, int) and microbatches is not True and microbatches > 0
    if microbatches is not None and not whole:
        why = f"microbatches={microbatches!r} is no positive whole number"
        raise _error(why, "sl.value_and_grad(f, microbatches=4)")
    if has_aux or argnums != 0:
        why = "micro-batches give one loss and the gradients of the first argument"
        raise _error(
            why, "sl.value_and_grad(lambda params, *batch: f(params, *batch)[0], microbatches=4)"
        )
    if scope().call.differentiated and torch.is_grad_enabled():
        why = "a call in micro-batches cannot be differentiated itself"
        raise _error(why, "sl.value_and_grad(f)(params)")


class _Reached(BaseException):
    """The module with stages that a function calls first."""


class _Search:
    """Scope in which a call of a module with stages raises ``_Reached``."""

    def entered(self, pipeline: object) -> None:
        raise _Reached(pipeline)


@dataclass(eq=False)
class _Parts:
    """A loss to be run on micro-batches; ``pipeline`` is the module with stages that it calls."""

    f: Callable[..., Any]
    count: int | None
    weigh: Callable[..., Any] | None
    axes: Axes
    into: TakesGradients | None
    pipeline: Any = None

    def __call__(self, params: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        stage = staged_mesh(params)
        batch = MicroBatches(args, kwargs, self.count or 1, self.weigh, stage)
        sink = None if self.into is None else _sink(self.into, params, False)
        with within(), within(mesh=stage or scope().mesh):
            sums = GradientSums(params, self.axes, sink)
            if stage is None:
                loss = _accumulated(self.f, batch, sums)
            else:
                self.pipeline = self.pipeline or pipeline_of(self.f, params, batch)
                loss = self.pipeline.step(self.f, params, batch, sums)
            return loss, sums.finish()


def pipeline_of(f: Callable[..., Any], params: Any, batch: MicroBatches) -> Any:
    """Return the module with stages that a loss calls.  Raises: ShardError for none."""
    args, kwargs = batch[0]
    try:
        with within(stage=_Search()):
            f(params, *args, **kwargs)
    except _Reached as found:
        return found.args[0]
    why = "the parameters are those of stages, and the loss calls no module that has stages"
    raise _error(why, "loss = lambda params, *batch: apply(params, *batch).mean()")


def _accumulated(f: Callable[..., Any], batch: MicroBatches, sums: GradientSums) -> Any:
    """Run a loss on one micro-batch after the other; return the mean."""
    total: Any = None
    for k in range(batch.count):
        loss, raw = accumulate(f, batch, k, sums)
        total = raw if total is None else total + raw
    return with_block(loss, total)


def accumulate(
    f: Callable[..., Any], batch: MicroBatches, k: int, sums: GradientSums
) -> tuple[Any, Tensor]:
    """Run a loss on micro-batch ``k`` and add its gradients; return it, and its part of the mean."""
    leaves, (args, kwargs) = sums.leaves(), batch[k]
    with torch.enable_grad(), within(differentiated=True):
        loss = f(leaves.arguments[0], *args, **kwargs)
        raw = batch.part(loss_block(loss), k)
    if raw.requires_grad:
        last = k == batch.count - 1 and not sums.parts
        with sums.ending(range(len(leaves.wanted))) if last else nullcontext():
            sums.backward(leaves.wanted, raw.sum())
    return loss, raw.detach()


def with_block(loss: Tensor, raw: Tensor) -> Tensor:
    """Return a loss with another block, and no sum left open."""
    return settle(loss).becomes(raw) if isinstance(loss, ShardedTensor) else raw
