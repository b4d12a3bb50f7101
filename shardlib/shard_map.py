"""Per-device code: a function of local blocks, applied to sharded values.

Inside, ``psum(x, "x")`` and the other collectives move data by axis name, as in JAX.
Gradients are the exact adjoint of the program that all ranks run together: a replicated input's
gradient is summed over the axes it is replicated on, a replicated output's cotangent is
divided by the number of its copies.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NotRequired, ParamSpec, TypedDict, TypeVar, Unpack, overload

import optree
import torch
from torch import Tensor

from shardlib.collectives import (
    Stacked,
    Varies,
    alike,
    checking,
    differing,
    held,
    lead,
    real,
    verify,
    wrap,
)
from shardlib.errors import BadArgument, LayoutSyntax, RankMismatch, ShardError, WrongAxes, lettered
from shardlib.layouts import Layout, LayoutTree, as_layout, is_layout, per_leaf
from shardlib.mesh import POSTED, Mesh, MeshLike, as_mesh, refuse_posted, simulate, within
from shardlib.tensor import (
    Place,
    ShardedTensor,
    heard,
    lift,
    shared,
    to_pending,
    type_or_class,
    typeof,
    vary,
)

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class _ShardMapOptions(TypedDict):
    """Arguments on which the type of the result does not depend."""

    in_layouts: LayoutTree
    out_layouts: LayoutTree
    mesh: NotRequired[MeshLike | None]


@overload
def shard_map(
    f: Callable[Given, Returned], **how: Unpack[_ShardMapOptions]
) -> Callable[Given, Returned]: ...
@overload
def shard_map(
    f: None = None, **how: Unpack[_ShardMapOptions]
) -> Callable[[Callable[Given, Returned]], Callable[Given, Returned]]: ...
def shard_map(
    f: Callable[..., object] | None = None,
    *,
    in_layouts: LayoutTree,
    out_layouts: LayoutTree,
    mesh: MeshLike | None = None,
) -> Callable[..., Any]:
    """Run ``f`` on each rank's blocks; without ``f``, return a decorator.

    ``in_layouts``   one layout for every operand, or a tuple of one per operand; for an operand
                     that is a pytree, one for all its tensors or a tree of them like it or its
                     upper part.  An operand with another layout is refused; numbers and None pass.
    ``out_layouts``  the same for the results of ``f``; ``()`` for a tensor whole on every rank.
    ``mesh``         where no operand is sharded; else the operands' mesh, or the one in scope.
    Raises: ShardError where an operand or result does not have the stated layout, or ``f`` writes
    into an operand.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     total = sl.shard_map(lambda v: sl.psum(v.sum(), "x"), in_layouts="x", out_layouts="")
    ...     sl.unshard(total(sl.shard(torch.arange(6.0), "x")))
    tensor(15.)
    >>> @sl.shard_map(in_layouts=({"w": ". x", "b": "x"}, "..."), out_layouts=(". x", "..."))
    ... def layer(params, v):
    ...     y = v @ params["w"] + params["b"]
    ...     return y, sl.psum(y.sum(), "x")
    >>> with sl.simulate(x=2):
    ...     w, b = sl.shard(torch.ones(3, 4), ". x"), sl.shard(torch.zeros(4), "x")
    ...     y, total = layer({"w": w, "b": b}, sl.shard(torch.ones(2, 3), "..."))
    ...     sl.typeof((y, total)), sl.unshard(total).item()
    (('f32[2, 4@x]', 'f32[]'), 24.0)
    """
    if f is None:
        return partial(shard_map, in_layouts=in_layouts, out_layouts=out_layouts, mesh=mesh)  # type: ignore[return-value]
    if not callable(f):
        why = f"the body is a function of blocks, not {f!r}"
        fix = "sl.shard_map(lambda x: x + 1, in_layouts='...', out_layouts='...')"
        raise BadArgument(why, op="shard_map", fix=fix)
    each: Any = in_layouts
    flat = _several(each) and all(map(is_layout, each))
    made = partial(_BodyCall, mesh=mesh, layouts=in_layouts, flat=flat, known={})
    run = partial(_run, f, made, out_layouts)

    @wraps(f)
    def mapped(*args: object) -> Any:
        return heard(run, shard_map, *args)

    return mapped


def _run(
    body: Callable[..., Any], made: Callable[..., "_BodyCall"], out_layouts: object, *args: object
) -> Any:
    """Run the body on the blocks of these operands, and make sharded values of its results.

    ``made``  makes the call of its operands.
    """
    call = made(args)
    m = call.mesh
    if not call.simulated and checking() is not None:
        _rehearse(body, call, out_layouts)
    under_way = len(POSTED)
    with within(mesh=m, body=True):
        out = body(*call.bound(call.blocks))
    refuse_posted("shard_map", under_way)
    call.refuse_writes()
    results, tree = call.results(out, out_layouts)
    given = set(map(id, call.blocks))
    values = [
        # an operand is copied
        _result(call, x.clone() if id(x) in given else x, layout, i, line)
        for i, (x, layout, line) in enumerate(results)
    ]
    return optree.tree_unflatten(tree, values)


_Known = dict[tuple[object, int], Layout]
"""A layout as it was given, and a number of dimensions -> the layout that it stands for."""

_Line = Callable[[object], str]
"""Layout of a result -> the call with this layout in place of its own, for a fix line."""


class _BodyCall:
    """Operands of one call: their tensors, the layout of each and its block on this rank.

    ``flat``   whether ``layouts`` are one layout per operand.
    ``known``  the layouts of earlier calls.
    """

    def __init__(
        self, args: tuple[Any, ...], mesh: MeshLike | None, layouts: Any, flat: bool, known: _Known
    ) -> None:
        self.args: Any = args
        self.known = known
        self.leaves, self.tree = optree.tree_flatten(self.args)
        sharded = [a.mesh for a in self.leaves if isinstance(a, ShardedTensor)]
        self.mesh = sharded[0] if sharded else as_mesh(mesh)
        self.simulated = lead(self.mesh) > 0
        if isinstance(layouts, Mapping) and len(args) == 1:
            layouts = (layouts,)
        if (flat or _several(layouts)) and len(layouts) != len(args):
            one = ": sl.P(...) is one layout for all" if isinstance(layouts, tuple) else ""
            raise self.error(
                f"{len(args)} operands and {len(layouts)} layouts{one}",
                f"in_layouts = {_text(self.bound([laid(a) for a in self.leaves]))}",
                **_operands(args),
            )
        if flat and len(args) == len(self.leaves) and all(map(operator.is_, args, self.leaves)):
            given: list[Any] = list(layouts)
        else:
            given = per_leaf(layouts, args, "shard_map", "in_layouts = {}")
        self.at = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        self.layouts: list[Any] = [None] * len(given)
        self.blocks = list(self.leaves)
        for i in self.at:
            self.blocks[i], self.layouts[i] = self._block(i, given[i])
        self.versions = [self._version(i) for i in self.at]

    def error(self, why: str, fix: str, **operands: str) -> ShardError:
        """Return an error of this call."""
        return ShardError(why, op="shard_map", operands=operands, mesh=self.mesh, fix=fix)

    def _block(self, i: int, given: object) -> tuple[Tensor, Layout]:
        """Return an operand's block; refuse an operand with another layout."""
        m = self.mesh
        x = lift(self.leaves[i], m, "shard_map")
        shape = x.padded_shape
        # stands for the same on every mesh
        fixed = type(given) in (str, Layout)
        want = self.known.get((given, len(shape))) if fixed else None
        if want is None:
            found = as_layout(given, "shard_map", "in_layouts = {}", shape=shape, mesh=m)
            want = found.resolve(len(shape))
            if fixed:
                self.known[given, len(shape)] = want
        if x.sharding != want:
            name = self.name(i)
            why = f"operand {name} is laid out {x.sharding}, not {want}"
            fix = f"sl.reshard({name}, {str(want)!r})"
            raise self.error(why, fix, **{name: typeof(x)})
        used = {*want.named, *x.deferred}
        block = wrap(vary(x.raw, m, tuple(a for a in m.names if a not in used)), m)
        if type(block) is Stacked:
            block.varies = Varies(real(m, want.named))
        return block, want

    def bound(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Rebuild the operands' pytree with other leaves."""
        return optree.tree_unflatten(self.tree, leaves)  # type: ignore[return-value]

    def name(self, i: int) -> str:
        """Write an operand as the fix line calls it: ``x``, or ``x['w']`` in a tree."""
        place = self.tree.accessors()[i]
        return place[1:].codify([*lettered(self.args)][place[0].entry])

    def _version(self, i: int) -> int | None:
        raw = getattr(self.leaves[i], "raw", self.leaves[i])
        return None if raw.is_inference() else raw._version

    def refuse_writes(self) -> None:
        """Refuse a body that wrote to its operands: it is a function of values."""
        for i, before in zip(self.at, self.versions, strict=True):
            if self._version(i) != before:
                name = self.name(i)
                raise self.error(
                    f"the body wrote into operand {name}, whose values are those now",
                    f"{name} = {name}.clone()  # in the body, before it is written to",
                    **{name: typeof(self.leaves[i])},
                )

    def results(self, out: Any, given: Any) -> tuple[list[tuple[Any, Layout, _Line]], Any]:
        """Return the results, each with its layout and its ``_Line``, and the tree of all.

        Raises: ShardError for another number of results than layouts.
        """
        leaves, tree = optree.tree_flatten(out)
        tensors, fix = True, "out_layouts = {}"
        for leaf in leaves:
            if isinstance(leaf, ShardedTensor):
                why = "the body returned a sharded value, and is to return this rank's block"
                raise self.error(why, "return result.local", result=typeof(leaf))
            tensors = tensors and isinstance(leaf, Tensor)
        if not tensors:
            raise self._misfit(leaves, None, given)
        try:
            found = per_leaf(given, out, "shard_map", fix)
        except LayoutSyntax:
            raise self._misfit(leaves, tree, given) from None
        outs = [as_layout(o, "shard_map", fix, mesh=self.mesh) for o in found]

        def line(i: int, layout: object) -> str:
            return self.line(optree.tree_unflatten(tree, [*outs[:i], layout, *outs[i + 1 :]]))

        lines = [partial(line, i) for i in range(len(outs))]
        return list(zip(leaves, outs, lines, strict=True)), tree

    def _misfit(self, leaves: Sequence[Any], tree: Any, given: Any) -> ShardError:
        """Return the error for results that do not fit the layouts; without a tree, for no tensors."""
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves)
        flat = isinstance(given, tuple | list) and all(map(is_layout, given))
        several = [*given] if flat and not is_layout(given) else []
        meant = [*several, *["..."] * len(leaves)][: len(leaves)]
        fix = "return torch.as_tensor(result)"
        if tree is not None:
            fix = self.line(optree.tree_unflatten(tree, meant))
        why = f"the body returned ({kinds}), and out_layouts are {_text(given)}"
        return self.error(why, fix, **_operands(self.args))

    def line(self, outs: object) -> str:
        """Write the call with these layouts of its results."""
        given = self.bound(self.layouts)
        first = _text(given[0] if len(given) == 1 and is_layout(given[0]) else given)
        names = ", ".join(lettered(self.args))
        return f"sl.shard_map(f, in_layouts={first}, out_layouts={_text(outs)})({names})"


def _several(layouts: object) -> bool:
    return isinstance(layouts, tuple | list) and not is_layout(layouts)


def laid(x: object) -> str:
    return str(x.sharding) if isinstance(x, ShardedTensor) else "..."


def _text(layouts: object) -> str:
    """Write a tree of layouts, each as its text."""
    tree: Any = layouts
    return repr(
        optree.tree_map(lambda o: str(o) if isinstance(o, Layout) else o, tree, none_is_leaf=True)
    )


def _operands(args: Sequence[Any]) -> dict[str, str]:
    return {n: type_or_class(a) for n, a in lettered(args).items()}


def _result(call: _BodyCall, block: Tensor, layout: Layout, i: int, line: _Line) -> ShardedTensor:
    """Make a sharded result of a block."""
    mesh = call.mesh
    # a plain tensor made in the body is the same on all ranks
    raw = held(block, mesh)
    local = list(block.shape)
    try:
        layout = layout.resolve(len(local))
    except RankMismatch as e:
        why = f"result {i}: {e.message}"
        given = {"result": str(local), "layout": str(layout)}
        fix = line(" ".join(["."] * len(local)))
        raise RankMismatch(why, op="shard_map", operands=given, mesh=mesh, fix=fix) from None
    for d, token in enumerate(layout.dims):
        for axis in token.axes:
            local[d] *= mesh.axis_size(axis)
    copied = alike(mesh, layout)
    if call.simulated:
        _check_axes(block, layout, mesh, copied, i, line)
    elif copied and checking() is not None:
        fix = f"return sl.psum(result, {copied[0]!r})  # or name {copied[0]!r} in out_layouts"
        verify("shard_map", mesh, {f"result {i}": (raw, layout)}, fix)
    if copied and raw.requires_grad:
        raw = shared(raw, mesh.axis_size(copied))
    raw = to_pending(raw, mesh, (*layout.partial, *copied))  # type: ignore[arg-type]
    return ShardedTensor(raw, Place(layout, torch.Size(local), mesh))  # type: ignore[arg-type]


def _rehearse(f: Callable[..., Any], call: _BodyCall, out_layouts: object) -> None:
    """Run a body of real ranks on the shapes of simulated ones, and track what varies.

    Raises: WrongAxes.  A body that needs values cannot run on shapes, and is not checked.
    """
    axes: Any = call.mesh.axes
    stage, state = simulate(**axes, device="cpu"), torch.random.get_rng_state()
    given = list(call.blocks)
    for i in call.at:
        block, layout = call.blocks[i], call.layouts[i]
        raw = torch.empty((stage.size, *block.shape), dtype=block.dtype, device="meta")
        given[i] = seen = wrap(raw, stage)
        seen.varies = Varies(real(stage, layout.named))  # type: ignore[attr-defined]
    try:
        with within(mesh=stage, body=True, traces=(), watcher=None), torch.no_grad():
            out = f(*call.bound(given))
        results, _ = call.results(out, out_layouts)
        for i, (leaf, layout, line) in enumerate(results):
            layout = layout.resolve(leaf.ndim)
            _check_axes(leaf, layout, stage, alike(stage, layout), i, line)
    except WrongAxes:
        raise
    except Exception:
        return
    finally:
        torch.random.set_rng_state(state)


def _check_axes(
    block: Tensor,
    layout: Layout,
    mesh: Mesh,
    copied: Sequence[str],
    i: int,
    line: _Line,
) -> None:
    """Refuse a result that varies where its layout is replicated, or that is equal where partial.

    Simulated blocks are compared without a transfer; ``_rehearse`` runs this for real ones.
    """
    raw, text = held(block, mesh), str(layout)

    def refused(why: str, fix: str) -> WrongAxes:
        types = {f"result {i}": f"{raw.dtype} {list(raw.shape[1:])} on each rank"}
        return WrongAxes(f"result {i} {why}", op="shard_map", operands=types, mesh=mesh, fix=fix)

    known = frozenset() if type(block) is not Stacked else block.varies and block.varies.axes
    wrong = [a for a in copied if known and a in known]
    wrong = wrong or [a for a in [differing(raw, mesh, copied)] if a]
    if wrong:
        axis = wrong[0]
        why = f"varies along axis {axis!r}, and its layout {text!r} says that it is the same there"
        fix = f"return sl.psum(result, {axis!r})  # or name {axis!r} in out_layouts"
        raise refused(why, fix)
    sums = real(mesh, layout.partial)
    if known is not None and (whole := sorted(sums - known, key=mesh.names.index)):
        raise refused(
            f"is the same along axis {whole[0]!r}, and its layout {text!r} would add it up "
            f"{mesh.axes[whole[0]]} times",
            line(Layout(layout.dims, tuple(a for a in layout.partial if a not in whole))),
        )
