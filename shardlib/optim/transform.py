"""The Transform protocol, and its execution in place.

``update`` is pure.  ``donate`` is the same step on donated memory: parameters, moments and
gradients are overwritten, by one kernel over many tensors at once.  A transform without
``donate`` runs ``update`` and copies the results into the donated memory, so every transform can
run both ways.

Under ``zero`` the trees are ``Buckets``, which only ``trees`` tells from other trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib._compat import below_autograd, copy_all, fused_step
from shardlib.errors import BadArgument
from shardlib.kernels.active import checked, use
from shardlib.optim.later import chosen
from shardlib.optim.trees import ALIGN, Pieces, pieces, runs
from shardlib.tensor import ShardedTensor

__all__ = [
    "TRAITS", "Step", "Transform", "check_inner", "check_transform", "divide", "fused", "handed_on",
    "kept_whole", "restoring", "run_in_place", "trait_of",
]  # fmt: skip

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

    def divide(self, by: Tensor) -> None:
        """Multiply ``scale``: gradients count as divided by ``by`` too."""
        self.scale = by if self.scale is None else self.scale * by


def kept_whole(params: Any) -> Any:
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


def handed_on(tx: Transform) -> dict[str, Any]:
    """List the fields that a wrapping transform copies."""
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


def check_transform(tx: Any, op: str) -> None:
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


def divide(grads: Any, step: Step) -> None:
    """Divide the gradients by the scale, in place, for transforms that cannot do it themselves."""
    if step.scale is not None:
        for g in runs(grads)[0]:
            g.div_(step.scale.to(g.device, g.dtype))
        step.scale = None


def fused(name: str, lists: Sequence[Sequence[Tensor]], step: Step, count: int, **how: Any) -> bool:
    """Run torch's fused kernel ``name`` on ``lists``: parameters, gradients, moments; in place.

    ``count``  steps taken, this one included.
    Returns False, with nothing done, if torch has no such kernel for these dtypes: it takes one
    dtype.
    """
    kernel = fused_step(name)
    rows = [row if isinstance(row, Pieces) else Pieces(row) for row in lists]
    found = rows[0].beside(*rows[1:])
    if kernel is None or found.dtype is None:
        return False
    if not rows[0]:
        return True
    used: list[Any] = found.runs or rows
    if not found.contiguous:
        used = [r if r.contiguous else [t.contiguous() for t in r] for r in rows]
    how |= _scale_and_sound(step, found.dtype, used[1], rows[0][0].device)
    cut = _in_vectors(used) if found.runs is None and rows[0][0].is_cpu else None
    lists = used if cut is None else cut.lists
    found.count[0].fill_(count)
    with below_autograd():
        kernel(lists, found.count[:1] * len(lists[0]), **how)
    if cut is not None:
        cut.give_back()
    for row, made in zip(rows, used, strict=True) if not found.contiguous else ():
        if made is not row:
            copy_all(row, made)
    # the kernel does not bump versions: backward through an older graph must raise
    torch.autograd.graph.increment_version(found.roots)
    return True


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
    for g in grads:
        g.div_(step.scale.to(g.device, g.dtype))
    return how


class _Cut(NamedTuple):
    """Tensors cut to whole vectors, per list; the rest of each is collected in one more vector.

    ``ends``    per list the ends of its tensors; ``copies``  their copies in that vector.
    """

    lists: list[list[Tensor]]
    ends: list[list[Tensor]]
    copies: list[list[Tensor]]

    def give_back(self) -> None:
        """Copy the results back; gradients have none."""
        for i, (ends, copies) in enumerate(zip(self.ends, self.copies, strict=True)):
            if i != 1:
                copy_all(ends, copies)


def _in_vectors(lists: Sequence[Sequence[Tensor]]) -> _Cut | None:
    """Cut tensors so that a kernel rounds all elements alike; None if all are whole vectors.

    A CPU kernel rounds the last elements, which fill no vector, differently from the others.
    Without this, the layout's cuts would decide which elements these are.
    """
    odd = [i for i, t in enumerate(lists[0]) if t.numel() % ALIGN]
    if not odd:
        return None
    cut = _Cut([], [], [])
    sizes = [lists[0][i].numel() % ALIGN for i in odd]
    # fills the last vector
    room = lists[0][0].new_zeros(-sum(sizes) % ALIGN)
    for row in lists:
        flat = [t.view(-1) for t in row]
        ends = [flat[i][-n:] for i, n in zip(odd, sizes, strict=True)]
        together = torch.cat([*ends, room])
        bodies = [t[: t.numel() // ALIGN * ALIGN] for t in flat if t.numel() >= ALIGN]
        cut.lists.append([*bodies, together])
        cut.ends.append(ends)
        cut.copies.append(list(together.split([*sizes, room.numel()])[:-1]))
    return cut


def run_in_place(tx: Transform, grads: Any, state: Any, params: Any, step: Step) -> Any:
    """Run one step of any transform in place: ``params`` and ``state`` change."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_in_place(tx, grads, state, params, step)
    if step.sound is not None and not (tx.heeds or step.guarded):
        return restoring(tx, grads, state, params, step)
    if tx.donate is not None:
        return tx.donate(grads, state, params, step)
    divide(grads, step)
    updates, new = tx.update(grads, state, params)
    for p, u in zip(*pieces(params, updates), strict=True):
        p.add_(u)
    return keep(state, new)


def restoring(tx: Transform, grads: Any, state: Any, params: Any, step: Step) -> Any:
    """Run one step in place, and restore what it wrote where it is not sound.

    Parameters and state are held twice meanwhile.
    """
    assert step.sound is not None
    given: Any = state, params, step.beside
    held = [x for x in optree.tree_leaves(given) if isinstance(x, Tensor)]
    memory = [(x.raw if isinstance(x, ShardedTensor) else x).detach() for x in held]
    before = [x.clone() for x in memory]
    step.guarded = True
    after = run_in_place(tx, grads, state, params, step)
    step.guarded = False
    for x, b in zip(memory, before, strict=True):
        x.copy_(torch.where(step.sound, x, b))
    return chosen(step.sound, after, state)


def keep(old: Any, new: Any) -> Any:
    """Copy the new state into the old one's memory, if shapes and dtypes match."""

    def kept(n: Any, o: Any) -> Any:
        if not (isinstance(n, Tensor) and isinstance(o, Tensor)):
            return n
        one, two = (x.raw if isinstance(x, ShardedTensor) else x for x in (n, o))
        if one.shape != two.shape or one.dtype != two.dtype or one is two:
            return n
        two.copy_(one)
        return o

    leaves, tree = optree.tree_flatten(new, none_is_leaf=True)
    before, shape = optree.tree_flatten(old, none_is_leaf=True)
    if tree != shape:
        return new
    return optree.tree_unflatten(tree, [kept(n, o) for n, o in zip(leaves, before, strict=True)])
