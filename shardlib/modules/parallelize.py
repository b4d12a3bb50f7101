"""Parallelize: an unmodified module as a pure function over sharded parameters.

``apply, params = parallelize(module, rules)``: ``params`` is a dict name -> ShardedTensor, and
``apply(params, *inputs)`` runs the module's forward with them.  ``apply`` keeps the module's tree
without its weights (weightless_copy.py); the module keeps its own tensors, which are freed with it.
Every parameter must match a rule and every rule must match a parameter: nothing is
replicated, or sharded, by accident.
"""

import copy
import inspect
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from shardlib._compat import uncompiled
from shardlib.capacity import refuse_beyond
from shardlib.collectives import checking, holds_values, lead, verify
from shardlib.errors import (
    AxisReused,
    LayoutSyntax,
    RankMismatch,
    RuleLint,
    ShardError,
    UnevenSplit,
    UnknownAxis,
    UnknownParameter,
    similar,
)
from shardlib.layouts import Dim, Layout, LayoutLike, as_layout
from shardlib.mesh import Mesh, MeshLike, as_mesh, bind, unknown_axis, within
from shardlib.modules.attributes import reported
from shardlib.modules.experts import divided, standing_in
from shardlib.modules.patterns import Pattern, matches
from shardlib.modules.remat import Remat, regions, remembering, version_of
from shardlib.modules.weightless_copy import exchanged, skeleton
from shardlib.ops.matmul.prefetch import Entry, not_prefetching, prefetching
from shardlib.placing import padded_size, place_whole, reshard, shard, unshard
from shardlib.random import Plain
from shardlib.tensor import Place, ShardedTensor, promoting, refuse_trace, replicated

__all__ = [
    "Apply",
    "Rules",
    "Suggested",
    "match_rules",
    "parallelize",
    "placed",
    "swapped",
]

Axes: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes that split a logical dimension: one, several, or None."""

Rules = Sequence[
    tuple[Pattern[Tensor], LayoutLike]
    | tuple[Pattern[Tensor], LayoutLike, LayoutLike]
    | tuple[str, ...]
]


class Suggested(tuple[str, ...]):
    """Rule written by a recipe: unlike a user's, it may be shadowed completely by earlier rules.

    ``padded``  the rule for ``pad=True``: a vocabulary that does not divide is split, and padded.
    """

    padded: tuple[str, ...]

    def __new__(cls, rule: Iterable[str], padded: Iterable[str] | None = None) -> "Suggested":
        made = super().__new__(cls, rule)
        made.padded = tuple(getattr(rule, "padded", made) if padded is None else padded)
        return made


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Arguments = tuple[tuple[str, Any], ...]


def arguments(forward: Callable[..., Any]) -> Arguments:
    """List the names and kinds of a forward's arguments, through decorators and partials."""
    return tuple((p.name, p.kind) for p in inspect.signature(forward).parameters.values())


def positional(given: Arguments, count: int) -> list[str]:
    """List the names of the first ``count`` arguments of a forward; ``*args`` all share a name."""
    return ([n for n, kind in given if kind in _POSITIONAL] + [_rest_name(given)] * count)[:count]


def _rest_name(given: Arguments) -> str:
    return next((n for n, kind in given if kind is inspect.Parameter.VAR_POSITIONAL), "")


class Calls:
    """Outside calls of a module: the layouts of their inputs, and the weights they gather early.

    ``inputs``     the name of an argument of forward -> Layout.
    ``arguments``  names and kinds of forward's arguments.
    ``suggested``  the recipe, or other rules, by which its parameters were sharded.
    """

    def __init__(
        self,
        inputs: Mapping[str, Layout],
        mesh: Mesh,
        arguments: Arguments,
        suggested: Any = (),
    ) -> None:
        self.inputs, self.mesh, self.arguments = inputs, mesh, arguments
        self.suggested = suggested
        # (submodule, mesh) -> the products of its last call there, and which of them share an X
        self.orders: dict[Any, list[Entry]] = {}
        self.reads: dict[Any, list[int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Drop the recorded orders in a copy: its first call records them."""
        return {**self.__dict__, "orders": {}, "reads": {}}

    @contextmanager
    def calling(self, params: Mapping[str, Tensor], of: str = "") -> Iterator[None]:
        """Run a call inside the ``with``, with weights gathered early in the last call's order.

        Plain tensors count as the same on every rank.
        ``of``  the submodule that is called, whose parameters these are.
        """
        weights = {
            n: p.raw
            for n, p in params.items()
            if isinstance(p, ShardedTensor) and p.ndim == 2 and p.read is None
        }
        where = of, tuple(self.mesh.axes.items())
        order, reads = self.orders.setdefault(where, []), self.reads.setdefault(where, [])
        refuse_trace()
        with promoting(), prefetching(order, weights, reads):
            yield

    def named(self, count: int, named: Iterable[str] = ()) -> list[str]:
        """List the names of forward's first ``count`` positional arguments; ``named`` are keywords.

        Raises: RuleLint if one is part of ``*args`` and may be meant by a name in ``inputs=`` that
                is not in the signature, as for a wrapper without functools.wraps.
        """
        given = self.arguments
        rest, places = _rest_name(given), len([n for n, kind in given if kind in _POSITIONAL])
        unsaid = [n for n in self.inputs if n not in {*named, *(n for n, _ in given)}]
        if rest and rest not in self.inputs and unsaid and count > places:
            raise RuleLint(
                f"inputs: forward takes positional input {places + 1} in *{rest}, so nothing says "
                "whether it is "
                f"{unsaid[0]!r}; give it by name",
                op="apply",
                operands={
                    "forward": ", ".join(n for n, _ in given),
                    "inputs": ", ".join(self.inputs),
                },
                mesh=self.mesh,
                fix=f"apply(params, {unsaid[0]}={unsaid[0]})",
            )
        return positional(given, count)

    def added(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that a recipe adds to a call's, such as positions in documents."""
        give = getattr(self.suggested, "given", None)
        takes = {n for n, _ in self.arguments}
        return {} if give is None else {k: v for k, v in give(named).items() if k in takes}

    def place(self, name: str, value: Any) -> Any:
        """Place an input of this name by its layout in ``inputs=``; without one, replicate it.

        A layout of the recipe takes precedence, as for position ids.
        """
        own = getattr(self.suggested, "inputs", {}).get(name)

        def place(x: Any) -> Any:
            if own is not None and isinstance(x, Tensor) and x.ndim == len(own.dims):
                layout = Layout((Dim(), *own.dims[1:])) if x.shape[0] == 1 else own
                if isinstance(x, ShardedTensor):
                    return reshard(x, layout)
                return shard(x, layout, self.mesh)
            if not isinstance(x, Tensor) or isinstance(x, ShardedTensor):
                return x
            layout = self.inputs.get(name)
            return replicated(x, self.mesh) if layout is None else shard(x, layout, self.mesh)

        return optree.tree_map(place, value, none_is_leaf=True)


class Apply(Calls):
    """Module as a function of its parameters: ``apply(params, *inputs, **inputs)``.

    ``module``       the module's tree as it was when ``apply`` was made, without weights: change
                     hooks or attributes here.  While the caller's module is alive, its ``train()``
                     and ``eval()`` count too.
    ``layouts``      parameter name -> Layout.
    ``tied``         alias -> the name that holds the value.
    ``buffers``      name -> tensor, cloned from the module.
    ``out_layouts``  parameter name -> the layout that products with it must give, where a rule
                     names one.
    ``remat``        module name -> policy of the tensors it keeps for backward, see remat.py.
    ``suggested``    the recipe, or other rules, that it was made from.

    Threads may call it concurrently: a call runs on a copy of the tree if the tree is in use.
    ``copy.deepcopy`` and ``pickle`` make one with a tree and buffers of its own.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: dict[str, Layout],
        tied: dict[str, str],
        inputs: Mapping[str, Layout],
        mesh: Mesh,
        out_layouts: Mapping[str, Layout] | None = None,
        remat: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(inputs, mesh, arguments(uncompiled(module).forward))
        own = {n: b.detach().clone() for n, b in module.named_buffers()}
        here = holds_values(mesh)
        plain = {n: b.to(mesh.device) if here and not b.is_meta else b for n, b in own.items()}
        self.module = skeleton(module, plain)
        self.bare = skeleton(self.module)  # never run: the template of further copies
        self.remat = remat or {}
        self.copies = [Copy(self.module, layouts, self.remat)]
        self.modes = [
            TrainingMode(m, own)
            for m, own in zip(module.modules(), self.module.modules(), strict=True)
        ]
        self.layouts, self.tied = layouts, tied
        self.out_layouts = out_layouts or {}
        self.plain = Plain()
        self.buffers = {n: replicated(b, mesh) for n, b in plain.items()}

    @property
    def stacks(self) -> list[nn.Module]:
        """Modules of experts that are split, see experts.py."""
        return self.copies[0].stacks

    def __copy__(self) -> "Apply":
        """Share the tree and the buffers."""
        new = object.__new__(Apply)
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Keep the tree and the buffers; a copy does not follow the caller's module."""
        for mode in self.modes:
            mode.follow()
        return {**super().__getstate__(), "copies": [], "modes": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.copies = [Copy(self.module, self.layouts, {})]

    def __call__(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.
        Inputs: plain tensors are sharded by ``inputs=``, or replicated without a layout there.

        Runs on the mesh of ``params``, which may be another than the one it was made for.
        """
        opened = getattr(params, "opened", None)
        if opened is not None:  # parts of flat buckets, which are gathered when they are read
            with opened() as whole:
                return self(whole, *args, **kwargs)
        self.check(params)
        mesh = next((p.mesh for p in params.values() if isinstance(p, ShardedTensor)), self.mesh)
        if mesh is self.mesh:
            return self._run(params, self.buffers, args, kwargs)[0]
        moved = copy.copy(self)
        moved.mesh = mesh
        moved.buffers = {n: replicated(unshard(b), mesh) for n, b in self.buffers.items()}
        return moved._run(params, moved.buffers, args, kwargs)[0]

    def mutable(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a module that writes to its buffers in forward; return (output, new buffers)."""
        self.check(params)
        return self._run(params, buffers, args, kwargs)

    def _run(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> Any:
        if blank := [
            n for n, b in buffers.items() if b.device.type == "meta" and holds_values(self.mesh)
        ]:
            raise ShardError(
                "the module was made on the meta device, and nothing gave a value to its buffer "
                f"{blank[0]!r}",
                op="apply",
                mesh=self.mesh,
                fix=f"apply.buffers[{blank[0]!r}] = sl.shard(value, '...')"
                "  # or take sl.init(module, rules)",
            )
        params = {
            **params,
            **{n: giving(params[n], layout) for n, layout in self.out_layouts.items()},
        }
        written: dict[str, Tensor] = {}
        state = {**params, **{n: b.clone() for n, b in buffers.items()}}
        names = self.named(len(args), kwargs)
        kwargs |= self.added(dict(zip(names, args, strict=True)) | kwargs)
        args = tuple(self.place(name, a) for name, a in zip(names, args, strict=True))
        kwargs = {k: self.place(k, v) for k, v in kwargs.items()}

        def run() -> Any:
            with self._running() as copy:
                again = partial(copy.swapped, state, written)
                with self.calling(params), within(again=again), standing_in(copy.stacks):
                    copy.state, own = state, {n: (state[n], version_of(state[n])) for n in buffers}
                    try:
                        watch = nullcontext() if checking() is None else reported(copy.module)
                        with exchanged(copy.module, state), watch:
                            return copy.module(*args, **kwargs)
                    except ShardError as e:
                        self._point_at(e, copy.module)
                        raise
                    finally:
                        copy.state = None
                        for n, (b, version) in own.items():
                            if state[n] is not b or version_of(b) != version:
                                written[n] = buffers[n]

        return self.plain.alike(run, self.mesh), {n: state[n] for n in buffers}

    @contextmanager
    def _running(self) -> Iterator["Copy"]:
        """Return a copy of the tree that no other thread runs on, with current training modes."""
        for mode in self.modes:
            mode.follow()
        copy = next((c for c in self.copies if c.lock.acquire(blocking=False)), None)
        if copy is None:
            copy = Copy(skeleton(self.bare), self.layouts, self.remat)
            copy.lock.acquire(blocking=False)  # before it is shared, so this cannot fail
            self.copies.append(copy)
        try:
            if copy.module is not self.module:
                for mine, said in zip(copy.module.modules(), self.module.modules(), strict=True):
                    mine.training = said.training
            yield copy
        finally:
            copy.lock.release()

    def _point_at(self, e: ShardError, module: nn.Module) -> None:
        """Add to an error its submodule, the parameters there and a rule that leaves them whole."""
        paths = {id(m): n for n, m in module.named_modules()}
        frames, path = e.__traceback__, ""
        while frames is not None:
            path = paths.get(id(frames.tb_frame.f_locals.get("self")), path)
            frames = frames.tb_next
        while path and not any(n.startswith(f"{path}.") for n in self.layouts):
            path = path.rpartition(".")[0]
        held = {
            n: str(lay)
            for n, lay in self.layouts.items()
            if n.startswith(f"{path}." if path else "") and lay.axes
        }
        if "parameters" in e.operands or not held:
            return
        some = [f"{n}: {text}" for n, text in list(held.items())[:4]]
        e.operands["parameters"] = ", ".join([*some, "..."] if len(held) > 4 else some)
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", path) + ".*" if path else "*"
        e.operands["or"] = (
            f"rules = [({pattern!r}, '...'), *rules]  # {path or 'the module'} whole on every rank"
        )
        e.args = (e.text(),)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Check that exactly the module's parameters are given, by name."""
        for name in params:
            if name not in self.layouts:
                near = similar(name, self.layouts, 1)
                raise UnknownParameter(
                    f"no parameter {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                    op="apply",
                    operands={"parameters": ", ".join(self.layouts)},
                    mesh=self.mesh,
                    fix=f"params[{(near or list(self.layouts))[0]!r}] = params.pop({name!r})",
                )
        missing = [n for n in self.layouts if n not in params]
        if missing:
            raise UnknownParameter(
                f"parameters are missing: {', '.join(missing)}",
                op="apply",
                operands={"params": ", ".join(params), "module": type(self.module).__name__},
                mesh=self.mesh,
                fix=f"params[{missing[0]!r}] = sl.shard(module.get_parameter({missing[0]!r}), "
                f"{str(self.layouts[missing[0]])!r})",
            )


class Copy:
    """Tree of modules without weights, for one thread at a time.

    ``stacks``  its modules of experts that are split.
    ``state``   the tensors of the call that runs.
    """

    def __init__(
        self, module: nn.Module, layouts: dict[str, Layout], remat: Mapping[str, str]
    ) -> None:
        self.module, self.stacks = module, divided(module, layouts)
        self.lock = threading.RLock()
        self.state: Any = None
        remembering(module, remat)

    def swapped(
        self, state: Mapping[str, Tensor], written: Mapping[str, Tensor], run: Callable[[], Any]
    ) -> Any:
        """Call ``run()`` again on the tensors of the call with ``state``.

        That call may be the one that runs.

        ``written``  buffers as they were before forward wrote to them; new writes are dropped.
        """
        seen = {**state, **{n: b.clone() for n, b in written.items()}}
        if self.state is state:
            return swapped(self.module, seen, self.stacks, run)
        with self.lock:
            return swapped(self.module, seen, self.stacks, run)


class TrainingMode:
    """Training mode of the caller's module, which its copy follows."""

    def __init__(self, module: nn.Module, copy: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.copy = copy
        self.seen = module.training

    def follow(self) -> None:
        """Set the copy to the mode if the caller changed it since the last call."""
        module = self.module()
        if module is not None and module.training is not self.seen:
            self.copy.training = self.seen = module.training


def _check_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a key that is no argument of forward.

    With ``**kwargs``, refuse one that looks like a misspelt argument.
    """
    if not isinstance(inputs, Mapping):
        raise RuleLint(
            "inputs is a mapping from the names of forward's arguments to layouts, not "
            f"{type(inputs).__name__}",
            op="parallelize",
            fix="sl.parallelize(module, rules, inputs=dict(inputs))",
        )
    given = arguments(uncompiled(module).forward)
    names = [n for n, kind in given if kind is not inspect.Parameter.VAR_KEYWORD]
    loose = len(names) < len(given)
    for name in inputs:
        near = similar(name, names, 1, 0.8 if loose else 0.0)
        if name in names or (loose and not near):
            continue
        raise RuleLint(
            f"inputs: forward has no argument {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
            op="parallelize",
            operands={"forward": ", ".join(names)},
            fix=f"inputs = {{{near[0]!r}: inputs.pop({name!r}), **inputs}}"
            if near
            else f"inputs.pop({name!r})",
        )


def swapped(
    module: nn.Module,
    state: Mapping[str, Tensor],
    stacks: Sequence[nn.Module],
    run: Callable[[], Any],
) -> Any:
    """Call ``run()`` again on the tensors, ``state``, of an earlier call."""
    with promoting(), not_prefetching(), standing_in(stacks), exchanged(module, dict(state)):
        return run()


def _pattern_text(pattern: Pattern[Tensor]) -> str:
    if isinstance(pattern, str):
        return repr(pattern)
    return f"re.compile({pattern.pattern!r})" if isinstance(pattern, re.Pattern) else repr(pattern)


def logical(text: str, axes: Mapping[str, Axes]) -> Layout:
    """Resolve logical dimension names: ``embed (3 heads hd)`` with heads="x" -> ``. (3 x)``.

    Inside a group an integer is an unsplit factor, a name with a mesh axis splits, and names
    mapped to ``.`` end the group.

    >>> logical("embed (3 heads hd)", {"embed": ".", "heads": "x", "hd": "."})
    Layout('. (3 x)')
    >>> logical("vocab embed", {"vocab": ("x", "y"), "embed": None})
    Layout('(x y) .')
    """
    tokens = re.findall(r"\([^)]*\)|\S+", text)
    named = {name: _written(axis) for name, axis in axes.items()}

    def resolve(token: str) -> str:
        if not (token.startswith("(") and token.endswith(")")):
            return named.get(token, token)
        parts = [q for p in token[1:-1].split() for q in named.get(p, p).strip("()").split()]
        while parts and parts[-1] == ".":
            parts.pop()
        if "." in parts:
            raise RuleLint(
                f"{token!r}: {'.'!r} may only end a group; give the factor's size as a number",
                op="parallelize",
                operands={"layout": text},
                fix="sl.parallelize(module, rules, axes=dict(heads='x', hd='.'))",
            )
        return f"({' '.join(parts)})" if parts else "."

    return Layout.parse(" ".join(resolve(t) for t in tokens))


def _written(axis: Axes) -> str:
    """Write the mesh axes of a logical dimension: one, several as a tuple, or None, as in JAX."""
    if axis is None or isinstance(axis, str):
        return axis or "."
    return f"({' '.join(axis)})" if axis else "."


def giving(weight: Tensor, layout: Layout) -> Tensor:
    """Return the same weight with ``out_layout``, the layout required of its products."""
    if not isinstance(weight, ShardedTensor):
        return weight
    return weight.at(weight.place._replace(out_layout=layout))


def match_rules(
    named: Mapping[str, Tensor],
    rules: Rules,
    axes: Mapping[str, Axes] | None = None,
    pad: bool = False,
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Find the layout of every parameter, and that of its products where the rule names one.

    First match wins; every parameter and every rule must be used.
    ``pad``  parameters are padded: use the padded variants of a recipe's rules.

    Raises: RuleLint listing the parameters no rule matches and the rules that match nothing.
    """
    for rule in rules:
        if not isinstance(rule, tuple | list) or len(rule) not in (2, 3):
            raise RuleLint(
                "a rule is (pattern, layout) or (pattern, layout, layout of its products), not "
                f"{rule!r}",
                op="parallelize",
                fix="sl.parallelize(module, [('*', '...')])",
            )
        if not (isinstance(rule[0], str | re.Pattern) or callable(rule[0])):
            raise RuleLint(
                "a pattern is a glob, a compiled regex or a function of (name, tensor), not "
                f"{rule[0]!r}",
                op="parallelize",
                fix="sl.parallelize(module, [('*', '...')])",
            )
    given = list(rules)
    if pad:
        rules = [rule.padded if isinstance(rule, Suggested) else rule for rule in given]
    used = [False] * len(rules)
    layouts: dict[str, Layout] = {}
    out_layouts: dict[str, Layout] = {}
    unmatched = []
    for name, value in named.items():
        hits = [i for i, (pattern, *_) in enumerate(rules) if matches(pattern, name, value)]
        if not hits:
            unmatched.append(name)
            continue
        used[hits[0]] = True
        _, layout, *out = rules[hits[0]]
        with _naming(name, rules, named):
            layouts[name] = _read(layout, axes, shape=value.shape, weight=True).resolve(value.ndim)
            if out:
                out_layouts[name] = _read(out[0], axes)
    # earlier rules may shadow a recipe's rule, but not a user's
    spare = [isinstance(rule, Suggested) and _reached(rule[0], named) for rule in given]
    unused = [rules[i][0] for i, hit in enumerate(used) if not hit and not spare[i]]
    if unmatched or unused:
        raise RuleLint(
            _lint(unmatched, unused, named, rules),
            op="parallelize",
            fix="rules = [*rules, ('*', '...')]" if not unused else _without(unused, rules),
        )
    return layouts, out_layouts


def _without(unused: list[Pattern[Tensor]], rules: Rules) -> str:
    """Write the line that drops these rules, by their text, or by number if one is a function."""
    if all(isinstance(p, str | re.Pattern) for p in unused):
        texts = "".join(f"{_pattern_text(p)}, " for p in unused)
        return f"rules = [r for r in rules if r[0] not in ({texts})]"
    numbers = tuple(i for i, (p, *_) in enumerate(rules) if any(p is u for u in unused))
    return f"rules = [r for i, r in enumerate(rules) if i not in {numbers}]"


def _read(
    layout: object,
    axes: Mapping[str, Axes] | None,
    mesh: Mesh | None = None,
    shape: Sequence[int] = (1,),
    weight: bool = False,
) -> Layout:
    """Return the layout of a rule or an input, its logical names resolved, on ``mesh`` if given."""
    if not isinstance(layout, str):
        layout = as_layout(layout, "parallelize", "{}", shape=shape, mesh=mesh, weight=weight)
    found = logical(str(layout), axes or {})
    for axis in (*found.axes, *found.partial) if mesh is not None else ():
        if mesh is not None and axis not in mesh.axes:
            raise unknown_axis(axis, mesh.axes, "parallelize", "")  # _said adds the fix
    return found


def _reached(pattern: Pattern[Tensor], named: Mapping[str, Tensor]) -> bool:
    return any(matches(pattern, n, v) for n, v in named.items())


def _lint(
    unmatched: list[str], unused: list[Pattern[Tensor]], named: Mapping[str, Tensor], rules: Rules
) -> str:
    lines = []
    for name in unmatched:
        near = similar(name, [p for p, *_ in rules if isinstance(p, str)], 1, 0.5)
        lines.append(
            f"no rule matches parameter {name!r}"
            + (f" (nearest rule: {near[0]!r})" if near else "")
        )
    for pattern in unused:
        shadow = [n for n, v in named.items() if matches(pattern, n, v)]
        text = _pattern_text(pattern)
        if shadow:
            lines.append(
                f"rule {text} is never reached: an earlier rule takes {', '.join(shadow[:3])}"
            )
            continue
        near = similar(text.strip("'*"), list(named), 1, 0.4)
        lines.append(
            f"rule {text} matches no parameter" + (f" (nearest: {near[0]!r})" if near else "")
        )
    return "\n    ".join(lines)


def _place_parameter(
    p: Tensor, layout: Layout, mesh: Mesh, pad: bool, blank: bool, src: int | None = None
) -> ShardedTensor:
    if (p.is_meta or blank) and holds_values(mesh):
        size = padded_size(layout, p, mesh) if pad else p.shape
        layout.check(tuple(size), mesh, op="parallelize")
        block = layout.local_shape(tuple(size), mesh)
        shape = (*(mesh.size,) * lead(mesh), *block)
        raw = torch.full(shape, float("nan"), dtype=p.dtype, device=mesh.device).requires_grad_(
            p.requires_grad
        )
        return ShardedTensor(raw, Place(layout, size, mesh, p.shape if size != p.shape else None))
    placed = place_whole(p.detach(), layout, mesh, src=src, pad=pad)
    placed.requires_grad_(p.requires_grad)
    return placed


def parallelize(
    module: nn.Module,
    rules: Rules,
    *,
    mesh: MeshLike | None = None,
    axes: Mapping[str, Axes] | None = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    src: int | None = None,
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Turn a module into ``(apply, params)``, each parameter sharded by the first rule it matches.

    ``rules``   (glob, compiled regex or callable(name, tensor), layout) in order; a third entry is
                the layout that a product with the parameter must give, where several are valid.
    ``axes``    logical dimension names used in layouts -> mesh axis, several as a tuple, or None
                (".") for not split.
    ``inputs``  forward's argument name -> layout, for plain tensors given to ``apply``, by position
                or by name.
    ``pad``     parameters whose sizes do not divide are padded, as a vocabulary of 50257 is, which
                a recipe leaves whole otherwise; the padding takes no part in the result and gets no
                gradient.
    ``remat``   (pattern, policy) over names of modules: the tensors that their calls keep for
                backward.  ``"full"`` keeps their inputs and recomputes the rest, ``"products"``
                also keeps the results of products and attention, ``"host"`` moves kept tensors to
                host memory, ``"all"`` keeps them on the device.  A rule takes the outermost modules
                that match, a module the first rule that takes it.  Gradients are the same, bit for
                bit.
    ``src``     0: rank 0's values are used.  Without it the ranks verify that theirs are the same.

    Tied parameters are one leaf under their first name.  The module is read, never changed:
    ``apply`` runs on a copy of its tree that has no weights, so they are freed with the module.
    Hooks, configurations and tensors in plain attributes are shared; references back to the
    module, such as bound methods, refer to the copy.  Parameters on the meta device get blocks of
    NaN, shard by shard, for ``sl.load`` to fill; ``sl.init`` draws fresh values for them and for
    buffers.
    Raises: RuleLint, UnevenSplit, UnknownAxis; RankFailed where copies of a parameter differ.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with sl.simulate(x=2, y=2):
    ...     apply, params = sl.parallelize(nn.Linear(4, 6), [("weight", "y x"), ("bias", "y")])
    ...     out = apply(params, sl.shard(torch.ones(2, 4), "x y"))
    >>> sl.typeof(params["weight"]), sl.typeof(out)
    ('f32[6@y, 4@x]', 'f32[2@x, 6@y]')
    """
    given: dict[str, Any] = {"axes": axes, "inputs": inputs, "pad": pad, "remat": remat}
    return placed(module, rules, mesh=as_mesh(mesh), src=src, **given)


_UNFIT = (UnevenSplit, RankMismatch, UnknownAxis, AxisReused, LayoutSyntax, RuleLint)


@contextmanager
def _naming(
    name: str,
    rules: Rules,
    named: Mapping[str, Tensor],
    misfits: Callable[[], Sequence[str]] = tuple,
) -> Iterator[None]:
    """Refuse a layout that does not fit a parameter, with the rules for it and all ``misfits``."""
    try:
        yield
    except _UNFIT as e:
        names = list(dict.fromkeys([name, *misfits()]))
        whole = ", ".join(f"({n!r}, '...')" for n in names)
        fix = f"sl.parallelize(module, [{whole}{_rest(names, rules, named)}])"
        raise _said(f"the rule of parameter {name!r} does not fit it", e, fix) from None


def _said(what: str, e: ShardError, fix: str) -> ShardError:
    """Return a layout's error with the name of its parameter or input, and the line to write."""
    return type(e)(
        f"{what}: {e.message}", op="parallelize", operands=e.operands, mesh=e.mesh, fix=fix
    )


def _misfits(
    named: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh, pad: bool
) -> list[str]:
    """List the parameters that their layouts do not fit."""
    found = []
    for n, p in named.items():
        try:
            size = padded_size(layouts[n], p, mesh) if pad else p.shape
            layouts[n].check(tuple(size), mesh)
        except _UNFIT:
            found.append(n)
    return found


def _rest(names: Sequence[str], rules: Rules, named: Mapping[str, Tensor]) -> str:
    """Return the rules that still match something after rules for these parameters come first."""
    first = {n: next((p for p, *_ in rules if matches(p, n, v)), None) for n, v in named.items()}
    kept = [p for n, p in first.items() if n not in names]
    unused = [p for p, *_ in rules if p not in kept]
    if not kept:
        return ""
    if not unused:
        return ", *rules"
    if all(isinstance(p, str | re.Pattern) for p in unused):
        texts = "".join(f"{_pattern_text(p)}, " for p in unused)
        return f", *(r for r in rules if r[0] not in ({texts.rstrip()}))"
    numbers = tuple(i for i, (p, *_) in enumerate(rules) if any(p is u for u in unused))
    return f", *(r for i, r in enumerate(rules) if i not in {numbers})"


def placed(
    module: nn.Module,
    rules: Rules,
    *,
    mesh: Mesh,
    axes: Mapping[str, Axes] | None = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    blank: bool = False,
    src: int | None = None,
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Implement ``parallelize``; with ``blank`` no value is read, and blocks hold NaN."""
    named = dict(module.named_parameters())
    for n, t in [*named.items(), *module.named_buffers()]:
        if isinstance(t, UninitializedTensorMixin):
            raise ShardError(
                f"{n!r} has no size before the module's first call",
                op="parallelize",
                operands={n: type(t).__name__},
                mesh=mesh,
                fix="module(*inputs)  # a call gives every Lazy module its sizes",
            )
    with bind(mesh):  # DTensor placements in a rule refer to the axes of this mesh
        layouts, out_layouts = match_rules(named, rules, axes, pad)
    held = {id(p): n for n, p in named.items()}
    everything = module.named_parameters(remove_duplicate=False)
    tied = {n: held[id(p)] for n, p in everything if held[id(p)] != n}
    _check_inputs(module, inputs or {})
    policies = regions(module, remat)
    for n, lay in out_layouts.items():
        with _naming(n, rules, named):
            _read(lay, None, mesh)
    given = {}
    for n, lay in (inputs or {}).items():
        try:
            given[n] = _read(lay, axes, mesh)
        except _UNFIT as e:
            fix = f"sl.parallelize(module, rules, inputs={{**inputs, {n!r}: '...'}})"
            raise _said(f"the layout of input {n!r} does not fit", e, fix) from None
    if holds_values(mesh):
        unfit = _misfits(named, layouts, mesh, pad)  # refused below
        sizes = [
            math.prod(layouts[n].local_shape(tuple(p.shape), mesh, pad=True)) * p.element_size()
            for n, p in named.items()
            if n not in unfit
        ]
        refuse_beyond(
            sum(sizes) * (mesh.size if lead(mesh) else 1), mesh.device, "parallelize", mesh
        )
    params = {}
    for n, p in named.items():
        with _naming(n, rules, named, lambda: _misfits(named, layouts, mesh, pad)):
            params[n] = _place_parameter(p, layouts[n], mesh, pad, blank, src)
    if src is None and not blank:
        filled = {n: (p.raw, p.sharding) for n, p in params.items() if not named[n].is_meta}
        verify("parallelize", mesh, filled, "sl.parallelize(module, rules, src=0)")
    apply = Apply(module, layouts, tied, given, mesh, out_layouts, policies)
    apply.suggested = rules
    return apply, params
