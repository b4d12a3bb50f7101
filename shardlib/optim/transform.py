"""The Transform protocol, and its execution in place.

``update`` is pure.  ``donate`` is the same step on donated memory: parameters, moments and
gradients are overwritten, by one kernel over many tensors at once.  A transform without
``donate`` runs ``update`` and copies the results into the donated memory, so every transform can
run both ways.

Under ``zero`` the trees are ``Buckets``, which only ``trees`` tells from other trees.

A step whose gradients are not finite changes nothing.  On the host that is an ``if``.  On an
accelerator its results are chosen on the device.  What the host must know of the choice stands in
the state: the number that decided, ``Posted``, whose copy to the host has begun, and counts that
hang on it, ``Later``.  The copy began a step before, so the host waits only where the device is
more than a step behind.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

from shardlib._compat import below_autograd, copy_all, fused_step
from shardlib.dtypes import wider
from shardlib.errors import BadArgument
from shardlib.kernels.active import checked, use
from shardlib.optim.trees import (
    ALIGN,
    EmptyState,
    State,
    Tree,
    each,
    moments,
    need,
    pieces,
    ready,
    spans,
    with_raw,
    writable,
)
from shardlib.tensor import raw_of

Schedule = Callable[[int], float]
"""A hyperparameter as a function of the step, counted from 0."""

TRAITS = ("elementwise", "norm", "tensor", "rows", "matrix", "tree")
"""Dependencies of an update of one element, in increasing order: that element alone; also a norm
over all elements; also a norm over its tensor; also statistics of its row and column; its whole
matrix; the structure of the tree."""


@dataclass
class Step:
    """Values shared by the transforms of one ``optim.step``, which they read and write.

    ``scale``    a 0-dim fp64 tensor by which the gradients are still to be divided; None: 1.
    ``norm``     their global norm before clipping, if a transform computed it.
    ``lr``       the rate of the last transform that has one.
    ``skipped``  whether parameters and state do not change.
    ``sound``    0-dim bool on a device; where False, parameters and state must not change.  None:
                 the host decided, see ``skipped``.
    ``skips``    0-dim bool on a device; where True, a guard skips the step, which is no error.
    ``guarded``  whether a caller restores what is written while ``sound`` is False.
    ``ask``      whether to compute the norm even if no transform needs it.
    ``beside``   (parameters, companion copy).  A transform that updates both sets this to None.
                 The companion of fp32 parameters is their rounding in half precision; that of
                 bfloat16 parameters the 16 bits that they lack of fp32, for a transform with
                 ``halves``.
    """

    scale: Tensor | None = None
    norm: Tensor | None = None
    lr: float | None = None
    skipped: bool = False
    sound: Tensor | None = None
    skips: Tensor | None = None
    guarded: bool = False
    ask: bool = False
    beside: tuple[Any, Any] | None = None

    @property
    def unchanged(self) -> bool | Tensor:
        """Whether parameters and state do not change, by whoever decided it."""
        return self.skipped if self.sound is None else ~self.sound

    def require(self, sound: Tensor) -> None:
        """Change nothing in this step but where ``sound``, a 0-dim bool on a device."""
        self.sound = sound if self.sound is None else self.sound & sound

    def unscaled(self, norm: Tensor) -> Tensor:
        """Return the norm that gradients have when they are divided by ``scale``."""
        return norm if self.scale is None else norm / self.scale.to(norm.device)

    def unscale(self, grads: Tree) -> None:
        """Divide gradients by ``scale``, in place, for transforms that cannot do it themselves."""
        if self.scale is not None:
            divided(pieces(grads)[0], self.scale)
            self.scale = None

    def divide(self, by: Tensor) -> None:
        """Multiply ``scale``: gradients count as divided by ``by`` too."""
        self.scale = by if self.scale is None else self.scale * by


def kept_whole(params: Tree) -> Tree:
    """Return the parameters unchanged: the default of ``Transform.shard``."""
    return params


class Transform(NamedTuple):
    """An optimizer's rule: ``init(params) -> state``, ``update(grads, state, params)``.

    ``update`` returns (updates, state) and changes nothing.

    ``trait``    what an update of one element depends on, see ``TRAITS``: ``zero`` keeps it exact;
                 None: unknown, and ``zero`` refuses it.
    ``donate``   ``donate(grads, state, params, step) -> state``: one step in place.  It divides the
                 gradients by ``step.scale``, overwrites parameters and the tensors in ``state``,
                 may overwrite gradients, and returns the state with its new numbers.
    ``rescale``  ``rescale(grads, state, params, step) -> state``, of a transform that multiplies
                 all gradients by one number: it puts the number into ``step.scale`` and writes no
                 tensor.
    ``check``    ``check(grads, state, params, step)`` raises the errors of ``donate`` for gradients
                 that are not finite, and writes nothing, so that several transforms can be checked
                 before the first one steps; on a device it puts what it found into ``step.sound``.
    ``groups``   ``groups(params)`` has a word, or a tuple of words, per leaf: parameters with
                 different words share no bucket.
    ``sink``     ``sink(params)`` collects gradients in buckets while backward runs, see ``zero``.
    ``shard``    ``shard(params)`` keeps only this rank's parts of parameters, see ``zero`` at stage
                 3; other transforms return the parameters unchanged.
    ``halves``   whether ``donate`` steps bfloat16 parameters with a companion of the bits that they
                 lack of fp32, see ``Step.beside``.
    ``heeds``    whether ``donate`` itself changes nothing where ``step.sound`` is False.
    ``eager``    ``eager(params, state, step)`` returns a context in which backward updates each
                 parameter when its gradient is complete, and which gives the state afterwards; None
                 where the gradients are needed together, see ``value_and_step``.

    >>> import torch, shardlib as sl
    >>> tx = sl.optim.Transform(
    ...     lambda params: 0,  # the state: how many steps were made
    ...     lambda grads, n, params=None: ({k: -g / (1 + n) for k, g in grads.items()}, n + 1),
    ... )
    >>> with sl.simulate(x=2):
    ...     w = {"w": sl.shard(torch.ones(4), "x")}
    ...     both = sl.optim.chain(tx, sl.optim.scale(0.5))
    ...     updates, state = both.update(w, both.init(w), w)
    >>> sl.typeof(updates["w"]), sl.unshard(updates["w"]), state[0]
    ('f32[4@x]', tensor([-0.5000, -0.5000, -0.5000, -0.5000]), 1)
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    trait: str | None = None
    donate: Callable[[Any, Any, Any, Step], Any] | None = None
    rescale: Callable[[Any, Any, Any, Step], Any] | None = None
    check: Callable[[Any, Any, Any, Step], object] | None = None
    sink: Callable[[Any], Any] | None = None
    groups: Callable[[Any], list[Any]] | None = None
    shard: Callable[[Any], Any] = kept_whole
    halves: bool = False
    heeds: bool = False
    eager: Callable[[Any, Any, Step], Any] | None = None


def stateless(f: Callable[[Tree], Tree], trait: str = "elementwise") -> Transform:
    """Make a transform without memory from a function of the gradients."""
    return Transform(
        lambda params: EmptyState(), lambda grads, state, params=None: (f(grads), state), trait
    )


def handed_on(tx: Transform, begins_again: bool = False) -> dict[str, Any]:
    """List the fields that a wrapping transform copies.

    ``begins_again``  whether a run that is taken up may begin without the wrapping one's state.
    Raises: Unsupported for one whose steps outlive their process, and of a wrapping one none would.
    """
    alone = getattr(getattr(tx.shard, "__self__", None), "alone", None)
    if alone is not None and not begins_again:
        alone()
    return {"groups": tx.groups, "sink": tx.sink, "shard": tx.shard}


def trait_of(*transforms: Transform) -> str | None:
    """Return the most demanding trait of some transforms, None if one of them has none."""
    traits = [t.trait for t in transforms]
    if None in traits:
        return None
    return max((t for t in traits if t is not None), key=TRAITS.index, default="elementwise")


def check_inner(tx: Transform) -> Callable[[Any, Any, Any, Step], object] | None:
    """Adapt the check of an inner transform, whose state is ``state.inner``, to its wrapper."""
    check = tx.check
    if check is None:
        return None
    return lambda grads, state, params, step: check(grads, state.inner, params, step)


def check_transform(tx: object, op: str) -> None:
    """Refuse objects that are no Transform, such as torch's optimizers, and unknown traits."""
    if not isinstance(tx, Transform):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise BadArgument(
            f"a transform is expected, not {name}",
            op=op,
            fix="tx = sl.optim.adamw(1e-3)",
        )
    if tx.trait is not None and tx.trait not in TRAITS:
        raise BadArgument(
            f"there is no trait {tx.trait!r}; there are {', '.join(TRAITS)}",
            op=op,
            fix='tx = tx._replace(trait="elementwise")',
        )


def under(backend: str, tx: Transform) -> Transform:
    """Return the transform with a fixed backend of kernels, as ``sl.kernels.use`` names them."""
    if checked(backend, "backend") == "auto":
        return tx

    def within(f: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with use(backend):  # type: ignore[arg-type]
                return f(*args, **kwargs)

        return f and run

    return tx._replace(
        update=within(tx.update), donate=within(tx.donate), rescale=within(tx.rescale)
    )


def divided(tensors: Iterable[Tensor], by: Tensor) -> None:
    """Divide plain tensors by a scalar, in place."""
    for t in tensors:
        t.div_(by.to(t.device, t.dtype))


def one_dtype(rows: Iterable[Iterable[Tensor]]) -> torch.dtype | None:
    """Return the dtype of all tensors of these lists, None if they have several."""
    found = {t.dtype for row in rows for t in row}
    return found.pop() if len(found) == 1 else None


def written(rows: Iterable[Iterable[Tensor]]) -> None:
    """Make backward through older graphs raise, after a kernel that does not bump versions."""
    torch.autograd.graph.increment_version([t for row in rows for t in row])


def fused(name: str, rows: Sequence[list[Tensor]], step: Step, count: int, **how: Any) -> bool:
    """Run torch's fused kernel ``name`` on parameters, gradients and moments, in place.

    ``count``  steps taken, this one included.
    Returns False, with nothing done, if torch has no such kernel for these dtypes: it takes one
    dtype.
    """
    if not rows[0]:
        return True
    kernel, dtype = fused_step(name), one_dtype(rows)
    if kernel is None or dtype is None or not dtype.is_floating_point:
        return False
    whole = [all(t.is_contiguous() for t in tensors) for tensors in zip(*rows, strict=True)]
    rest, loose = ([i for i, w in enumerate(whole) if w == kind] for kind in (True, False))
    if rest:
        _run_fused(kernel, [[row[i] for i in rest] for row in rows], step, count, **how)
    # gradients of products may be transposed: few are copied at once
    for some in _in_groups(loose, [x.nbytes for x in rows[1]]):
        memory = [[row[i] for i in some] for row in rows]
        made = [[t.contiguous() for t in row] for row in memory]
        _run_fused(kernel, made, step, count, **how)
        for row, values in zip(memory, made, strict=True):
            copy_all(row, values)
    written(rows)
    return True


def _run_fused(
    kernel: Callable[..., Any], rows: Sequence[list[Tensor]], step: Step, count: int, **how: Any
) -> None:
    """Run a fused kernel on rows of contiguous tensors of its dtype."""
    used: Any = rows
    ends: list[tuple[Any, Any]] = []
    device = rows[0][0].device
    how |= _scale_and_sound(step, rows[0][0].dtype, rows[1], device)
    if device.type == "cpu":
        used, ends = _in_vectors(rows)
    # the kernel takes a count per tensor: here all share one
    counts = [torch.full((), count, dtype=torch.float32, device=device)] * len(used[0])
    # on paper not all kernels run
    if device.type != "meta":
        with below_autograd():
            kernel(used, counts, **how)
    for memory, made in ends:
        copy_all(memory, made)


def _in_groups(numbers: Sequence[int], nbytes: Sequence[int]) -> list[list[int]]:
    """Cut numbers of tensors into groups of a sixteenth of all bytes, or of one tensor.

    >>> _in_groups([0, 2, 3], [9, 1, 1, 20])
    [[0], [2], [3]]
    >>> _in_groups(range(4), [1, 1, 1, 61])
    [[0, 1, 2], [3]]
    """
    groups: list[list[int]] = []
    left = 0
    for i in numbers:
        if nbytes[i] > left:
            groups.append([])
            left = sum(nbytes) // 16
        groups[-1].append(i)
        left -= nbytes[i]
    return groups


def _scale_and_sound(
    step: Step, dtype: torch.dtype, grads: Sequence[Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Return a kernel's arguments for the scale of gradients, and for a step that is not sound.

    The kernel divides fp32 gradients itself; others are divided here.
    """
    how: dict[str, Tensor] = {}
    if step.sound is not None:
        how["found_inf"] = (~step.sound).to(device, torch.float32)
    if step.scale is None:
        return how
    if dtype == torch.float32:
        return how | {"grad_scale": step.scale.to(device, torch.float32)}
    divided(grads, step.scale)
    return how


def _in_vectors(lists: Sequence[Sequence[Tensor]]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Cut tensors so that a kernel rounds all elements alike: the rest of each fills one more vector.

    A CPU kernel rounds the last elements, which fill no vector, differently from the others.
    Without this, the layout's cuts would decide which elements these are.
    Returns the lists, and the ends of tensors with their copies in that vector, without gradients.
    """
    odd = [i for i, t in enumerate(lists[0]) if t.numel() % ALIGN]
    if not odd:
        return lists, []
    cut, back = [], []
    sizes = [lists[0][i].numel() % ALIGN for i in odd]
    # fills the last vector
    room = lists[0][0].new_zeros(-sum(sizes) % ALIGN)
    for row in lists:
        flat = [t.view(-1) for t in row]
        ends = [flat[i][-n:] for i, n in zip(odd, sizes, strict=True)]
        together = torch.cat([*ends, room])
        bodies = [t[: t.numel() // ALIGN * ALIGN] for t in flat if t.numel() >= ALIGN]
        cut.append([*bodies, together])
        back.append((ends, list(together.split([*sizes, room.numel()])[:-1])))
    del back[1]
    return cut, back


def run_in_place(tx: Transform, grads: Tree, state: State, params: Tree, step: Step) -> State:
    """Run one step of any transform in place: ``params`` and ``state`` change."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_in_place(tx, grads, state, params, step)
    if step.sound is not None and not (tx.heeds or step.guarded):
        return restoring(tx, grads, state, params, step)
    if tx.donate is not None:
        return tx.donate(grads, state, params, step)
    step.unscale(grads)
    updates, new = tx.update(grads, state, params)
    for p, u in zip(*pieces(params, updates), strict=True):
        p.add_(u)
    return keep(state, new)


def restoring(tx: Transform, grads: Tree, state: State, params: Tree, step: Step) -> State:
    """Run one step in place, and restore what it wrote where it is not sound.

    Parameters and state are held twice meanwhile.
    """
    assert step.sound is not None
    given: Any = state, params, step.beside
    held = [x for x in optree.tree_leaves(given) if isinstance(x, Tensor)]
    memory = [raw_of(x).detach() for x in held]
    before = [x.clone() for x in memory]
    step.guarded = True
    after = run_in_place(tx, grads, state, params, step)
    step.guarded = False
    for x, b in zip(memory, before, strict=True):
        x.copy_(torch.where(step.sound, x, b))
    return chosen(step.sound, after, state)


def keep(old: State, new: State) -> State:
    """Copy the new state into the old one's memory, if shapes and dtypes match."""

    def kept(n: Any, o: Any) -> Any:
        if not (isinstance(n, Tensor) and isinstance(o, Tensor)):
            return n
        one, two = raw_of(n), raw_of(o)
        if one.shape != two.shape or one.dtype != two.dtype or one is two:
            return n
        two.copy_(one)
        return o

    return mapped(kept, new, old)


# ---------------------------------------------------------------- transforms of one rule


Rule = Callable[[int, float], Callable[..., Tensor]]


def elementwise(
    op: str,
    state_of: Callable[..., Any],
    lr: float | Schedule,
    rule: Rule,
    *,
    kept: Sequence[str] = (),
    start: float = 0.0,
    weights: bool = False,
    decay: float = 0.0,
    own: Callable[..., bool] = lambda *lists: False,
    kernel: str = "",
    **how: Any,
) -> Transform:
    """Make a transform in which the update of an element depends on that element alone.

    ``state_of`` makes the state of the count of steps, and of the trees ``kept`` by name.
    ``rule``     ``rule(count, rate)`` returns the function from a gradient, the moments and, with
                 ``weights``, the parameter, to the update; it overwrites the moments.
    ``kept``     the names of the moments, which are ``start`` at first.
    ``decay``    the multiple of the parameter that is added to its gradient.
    ``kernel``   torch's fused kernel, with its other arguments; "" if it has none.
    ``own``      ``own(params, lists, step, rate, count)`` steps in place by another kernel, on
                 lists as ``fused`` takes them; False, with nothing done, if it takes no such tensors.
    """

    if decay:
        rule = _decayed(rule, decay)
        weights = True

    def known(grads: Tree, state: State) -> list[Any]:
        trees = [getattr(state, name) for name in kept]
        ready(grads, op, *trees[:1])
        return trees

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        trees = known(grads, state)
        if weights:
            need(params, op)
        count, rate = state.count + 1, at_step(lr, state.count)
        trees = [each(lambda m, g: m.clone(), tree, grads) for tree in trees]
        given = [params] if weights else []
        updates = each(rule(count, rate), grads, *trees, *given)
        return updates, state._replace(count=count, **dict(zip(kept, trees, strict=True)))

    def in_spans(grads: Tree, state: State, params: Tree, step: Step) -> State:
        trees = known(grads, state)
        step.unscale(grads)
        step.lr = at_step(lr, state.count)
        f = rule(state.count + 1, step.lr)
        sound = None if step.guarded else step.sound
        for g, *held in spans(*pieces(grads, params, *trees)):
            before = [] if sound is None else [x.clone() for x in held]
            p, *more = held
            p.add_(f(g, *more, p) if weights else f(g, *more))
            for x, b in zip(held, before, strict=False):
                x.copy_(torch.where(sound, x, b))  # type: ignore[arg-type]
        return chosen(sound, state._replace(count=state.count + 1), state)

    def donate(grads: Tree, state: State, params: Tree, step: Step) -> State:
        g, p, *trees = pieces(grads, params, *known(grads, state))
        rate, count, lists = at_step(lr, state.count), state.count + 1, (p, g, *trees)
        by_own = own(params, lists, step, rate, count)
        if not by_own and not fused(kernel, lists, step, count, lr=rate, **how):
            return in_spans(grads, state, params, step)
        step.lr = rate
        return chosen(step.sound, state._replace(count=count), state)

    init = beginning(state_of, *kept, start=start)
    return Transform(init, update, "elementwise", donate if kernel else in_spans, heeds=True)


def beginning(
    state_of: Callable[..., Any], *names: str, start: float = 0.0
) -> Callable[[Tree], State]:
    """Return the function from parameters to a state of no steps, with moments of these names."""

    def init(params: Tree) -> State:
        zeros = moments(params, *names)
        if start:
            zeros = {n: each(lambda t: t + start, tree) for n, tree in zeros.items()}
        return state_of(0, **zeros)

    return init


def _decayed(rule: Rule, by: float) -> Rule:
    """Return a rule of the gradient and the parameter, of which a multiple is added to it."""

    def decayed(count: int, rate: float) -> Callable[..., Tensor]:
        f = rule(count, rate)
        return lambda g, *more: f(g.add(more[-1], alpha=by), *more[:-1])

    return decayed


def by_directions(
    op: str,
    trait: str,
    init: Callable[[Any], Any],
    lr: float | Schedule,
    direct: Callable[[Any, Any, Any, Any, float], tuple[Any, float]],
    *,
    moment: str | None = None,
    like: Callable[[Any, Any], Any] | None = None,
    weights: bool = True,
    groups: Callable[[Any], list[Any]] | None = None,
) -> Transform:
    """Make a transform that writes a direction for every tensor, then adds it to the parameter.

    ``direct``   ``direct(grads, state, params, way, rate)`` writes directions to ``way``, which may
                 be the gradients' memory, and overwrites the state's tensors.  It returns the state
                 and the multiple of the parameters that is added too.
    ``moment``   the name of a tree of the state that has a leaf for every gradient, of the
                 direction's dtype; None: there is none, and directions are wider than half.
    ``like``     ``like(grads, state)`` has the dtypes of directions, where these are others.
    ``weights``  whether ``update`` needs the parameters.
    """

    def checked(grads: Tree, state: State) -> Tree:
        """Check gradients; return a tree of the directions' dtypes."""
        kept = None if moment is None else getattr(state, moment)
        ready(grads, op, kept)
        if like is not None:
            return like(grads, state)
        return widened(grads) if kept is None else kept

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        dtypes = checked(grads, state)
        if weights:
            need(params, op)
            each(lambda g, p: g, grads, params)  # refuses other layouts
        how: Any = {"memory_format": torch.contiguous_format}
        way = each(lambda g, m: torch.zeros_like(g, dtype=m.dtype, **how), grads, dtypes)
        with torch.no_grad():
            rate = at_step(lr, state.count)
            state, decay = direct(grads, each(torch.clone, state), params, way, rate)
        if decay:
            way = each(lambda u, p: u.add_(p, alpha=decay), way, params)
        return way, state

    def donate(grads: Tree, state: State, params: Tree, step: Step) -> State:
        dtypes = checked(grads, state)
        step.unscale(grads)
        step.lr = at_step(lr, state.count)
        way = writable(grads, dtypes)
        state, decay = direct(grads, state, params, way, step.lr)
        for p, u in spans(*pieces(params, way)):
            p.add_(u.add_(p, alpha=decay) if decay else u)
        return state

    return Transform(init, update, trait, donate, groups=groups)


def widened(tree: Tree) -> Tree:
    """Convert half precision to fp32."""
    return each(lambda g: g.to(wider(g.dtype)), tree)


# ---------------------------------------------------------------- ranges of hyperparameters, and rates at a step


Hyper = ParamSpec("Hyper")
Made = TypeVar("Made")


class Range(NamedTuple):
    """A range of valid numbers, and its description in errors."""

    said: str
    fits: Callable[[Any], bool]
    whole: bool = False


AMOUNT = Range("0 or more, and finite", lambda n: 0 <= n < math.inf)
# a weight of the old value
SHARE = Range("at least 0 and less than 1", lambda n: 0 <= n < 1)
POSITIVE = Range("more than 0", lambda n: n > 0)
NUMBER = Range("a finite number", math.isfinite)
COUNT = Range("a whole number, 1 or more", lambda n: n >= 1, whole=True)
STEPS = Range("a whole number, 0 or more", lambda n: n >= 0, whole=True)

_NAMED = {
    **dict.fromkeys(("b1", "b2", "momentum", "decay"), SHARE),
    **dict.fromkeys("lr eps eps1 eps2 weight_decay lr_decay start peak end value".split(), AMOUNT),
    **dict.fromkeys(("max_norm", "limit", "p", "most", "most_mb"), POSITIVE),
    **dict.fromkeys(("every", "interval"), COUNT),
    **dict.fromkeys(("warmup", "steps"), STEPS),
    "factor": NUMBER,
}


def ranged(
    fix: str = "", **ranges: Range
) -> Callable[[Callable[Hyper, Made]], Callable[Hyper, Made]]:
    """Check hyperparameters by the names of their arguments, as torch does.

    ``ranges``  of arguments whose range is not that of their name.
    ``fix``     a valid call.
    ``None`` is valid if it is the default, a function where a schedule is.
    Raises: BadArgument for a number out of range, and for other types.

    >>> ranged()(lambda lr, b1=0.9: lr)(-1.0)
    Traceback (most recent call last):
    shardlib.errors.BadArgument: <lambda>: lr=-1.0 is not 0 or more, and finite...
    """
    known = _NAMED | ranges

    def around(make: Callable[Hyper, Made]) -> Callable[Hyper, Made]:
        own = inspect.signature(make).parameters
        checked = {name: known[name] for name in own if name in known}

        @wraps(make)
        def made(*args: Hyper.args, **kwargs: Hyper.kwargs) -> Made:
            given = dict(zip(own, args, strict=False)) | kwargs
            for name, range_ in checked.items():
                default = own[name].default
                value = given.get(name, default)
                if value is default or (name == "lr" and callable(value)) or _in(range_, value):
                    continue
                raise BadArgument(
                    f"{name}={value!r} is not {range_.said}",
                    op=make.__name__,
                    fix=fix or f"sl.optim.{make.__name__}(1e-3)",
                )
            return make(*args, **kwargs)

        return made

    return around


def _in(range_: Range, value: object) -> bool:
    if isinstance(value, Tensor):
        return not range_.whole
    kind = Integral if range_.whole else Real
    return isinstance(value, kind) and not isinstance(value, bool) and range_.fits(value)


def at_step(lr: float | Schedule, count: int) -> float:
    """Return the rate at step ``count``, from 0, of a number or a schedule.

    Raises: BadArgument if a schedule returns an invalid rate.
    """
    if not callable(lr):
        return lr
    rate = lr(count)
    if isinstance(rate, Real) and not AMOUNT.fits(rate):
        raise BadArgument(
            f"the schedule gives {rate} at step {count}: a rate is {AMOUNT.said}",
            op="schedule",
            fix="sl.optim.warmup_cosine(1e-3, 100, 1000)",
        )
    return rate


# ---------------------------------------------------------------- decisions of the device


def on_host(x: Tensor) -> bool:
    """Say whether the host reads a number without waiting, or nobody has it: on a mesh of shapes."""
    return x.device.type in ("cpu", "meta")


def told(x: Tensor) -> Any:
    """Return a number that is ``on_host``; a trace counts no wait."""
    return x.item()


def _no_error(number: Any) -> Exception | None:
    return None


class Posted:
    """A number on a device that is being copied to the host.

    ``error``  the error that the number is, if it is one; ``begun`` raises it, once.

    >>> x = Posted(torch.tensor(2.0), lambda x: ValueError(f"{x} is too much"))
    >>> x.read(), x.error(), x.error()
    (2.0, ValueError('2.0 is too much'), None)
    """

    def __init__(self, x: Tensor, error: Callable[[Any], Exception | None] = _no_error) -> None:
        self._there, self._done, self._error = x, None, error
        if not on_host(x):
            self._there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._there.copy_(x, non_blocking=True)
            try:
                self._done = torch.Event(x.device)
                self._done.record()
            except RuntimeError:
                # a registered device may have no events: its copy waits
                self._there, self._done = x.cpu(), None

    def read(self) -> Any:
        """Return the number; wait for its copy."""
        if self._done is not None and not self._done.query():
            self._done.synchronize()
        return self._there.item()

    def error(self) -> Exception | None:
        """Return the error, to the first who asks."""
        asked, self._error = self._error, _no_error
        return asked(self.read())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the number when it has arrived: an event can be neither."""
        self.read()
        return Posted, (self._there, self._error)


class Later:
    """A number that is ``made`` where the device found a step sound, else ``kept``.

    Whatever reads it waits until the device has decided.

    >>> count = Later(Posted(torch.tensor(False)), 4, 3)
    >>> count, int(count), count + 1, 2 * count, count < 4
    (3, 3, 4, 6, True)
    """

    def __init__(self, sound: Posted, made: Any, kept: Any) -> None:
        self._sound, self._made, self._kept = sound, made, kept

    def read(self) -> Any:
        """Return the number."""
        return _read(self._made if self._sound.read() else self._kept)

    def __reduce__(self) -> Any:
        x = self.read()
        return type(x), (x,)


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, Later) else x


def _as_number() -> None:
    """Give ``Later`` the operators of numbers."""

    def first(f: Any) -> Any:
        return lambda self, *others: f(self.read(), *others)

    def second(f: Any) -> Any:
        return lambda self, other: f(other, self.read())

    for f in (int, float, bool, repr, hash, format):
        setattr(Later, f"__{f.__name__}__", first(f))
    for name in "index neg lt le gt ge eq ne".split():
        setattr(Later, f"__{name}__", first(getattr(operator, name)))
    for name in "add sub mul truediv floordiv mod pow".split():
        setattr(Later, f"__{name}__", first(getattr(operator, name)))
        setattr(Later, f"__r{name}__", second(getattr(operator, name)))


_as_number()


def begun(state: State) -> State:
    """Return a state whose counts the host has read, for the next step; raise the last one's error.

    Whoever asks again, with the same state, goes on: the step with the error changed nothing.
    """
    leaves = optree.tree_leaves(state)
    kinds = set(map(type, leaves))
    if Posted in kinds:
        errors = [e for x in leaves if type(x) is Posted and (e := x.error()) is not None]
        if errors:
            raise errors[0]
    if Later not in kinds:
        return state
    return mapped(_read, state)


def at_rest(tree: Tree) -> State:
    """Return a tree as a checkpoint holds it, the same on every device: nothing is to be read."""

    def own(x: Any) -> bool:
        return hasattr(type(x), "at_rest")

    def resting(x: Any) -> Any:
        if own(x):
            return type(x)(*map(at_rest, x.at_rest()))
        return _read(x)

    return mapped(resting, tree, is_leaf=own)


def chosen(sound: Tensor | None, new: State, old: State) -> State:
    """Return the tensors and numbers of ``new`` where ``sound``, else those of ``old``."""
    if sound is None:
        return new
    posted: list[Posted] = []

    def choose(n: Any, o: Any) -> Any:
        if type(n) in (int, float) and type(o) in (int, float) and n != o:
            posted[:] = posted or [Posted(sound)]
            return Later(posted[0], n, o)
        return _where(sound, n, o) if isinstance(n, Tensor) and isinstance(o, Tensor) else n

    return mapped(choose, new, old)


def _where(sound: Tensor, new: Tensor, old: Tensor) -> Tensor:
    one, two = raw_of(new), raw_of(old)
    return new if one.data_ptr() == two.data_ptr() else with_raw(new, torch.where(sound, one, two))


def mapped(
    f: Callable[..., Any],
    first: Tree,
    *others: Tree,
    is_leaf: Callable[[Any], bool] = lambda x: False,
) -> Any:
    """Map leaves as optree does, but return the objects themselves in which nothing changes.

    Where another tree has another structure, the first is returned.
    """
    if others and all(o is first for o in others):
        return first
    if isinstance(first, Tensor | int | float | None) or is_leaf(first):
        return f(first, *others)
    below, shape = optree.tree_flatten(first, is_leaf=lambda x: x is not first, none_is_leaf=True)
    if len(below) == 1 and below[0] is first:
        return f(first, *others)
    try:
        rest = [shape.flatten_up_to(o) for o in others]
    except (ValueError, TypeError, KeyError):
        return first
    new = [mapped(f, *xs, is_leaf=is_leaf) for xs in zip(below, *rest, strict=True)]
    if all(n is b for n, b in zip(new, below, strict=True)):
        return first
    return shape.unflatten(new)
