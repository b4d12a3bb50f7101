"""The call of a parallelized module: a pure function of its parameters, and its inputs placed.

``apply(params, *inputs)`` shards plain inputs by ``inputs=`` or by the recipe, sets the parameters
in a copy of the module's tree (copies.py) and runs its forward, while weights that the last call
multiplied with are gathered ahead.  The caller's module keeps its own tensors.
"""

import copy
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb
from typing import Any, cast

import optree
from torch import Tensor, nn

from shardlib._compat import tree_flatten, tree_unflatten, uncompiled
from shardlib.collectives import holds_values
from shardlib.errors import RuleLint, ShardError, UnknownParameter, meant, similar
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, scope, within
from shardlib.modules.copies import Copies, exchanged
from shardlib.modules.rules import Layouts, Named, stars
from shardlib.ops.matmul.prefetch import Entry, prefetching
from shardlib.opspec import Args, Kwargs
from shardlib.placing import reshard, shard, unshard
from shardlib.random import Plain
from shardlib.tensor import (
    ShardedTensor,
    promoting,
    raw_of,
    refuse_trace,
    replicated,
    whole_now,
)
from shardlib.tensor.weight_gradients import SplitProducts

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Arguments = tuple[tuple[str, Any], ...]


def arguments(forward: Callable[..., Any]) -> Arguments:
    """List the names and kinds of a forward's arguments, through decorators and partials."""
    return tuple((p.name, p.kind) for p in inspect.signature(forward).parameters.values())


def positional(given: Arguments, count: int) -> list[str]:
    """List the names of the first ``count`` arguments of a forward; ``*args`` all share a name."""
    return ([n for n, kind in given if kind in _POSITIONAL] + [_rest_name(given)] * count)[:count]


def needed(forward: Callable[..., object]) -> int:
    """Count the positional arguments that have no default."""
    takes = inspect.signature(forward).parameters.values()
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in takes)


def _rest_name(given: Arguments) -> str:
    return next((n for n, kind in given if kind is inspect.Parameter.VAR_POSITIONAL), "")


@dataclass(eq=False)
class Calls:
    """Outside calls of a module: the layouts of their inputs, and the weights they gather early.

    ``inputs``     the name of an argument of forward -> Layout.
    ``arguments``  names and kinds of forward's arguments.
    ``suggested``  the recipe, or other rules, by which its parameters were sharded.
    """

    inputs: Layouts
    mesh: Mesh
    arguments: Arguments
    suggested: object
    # (submodule, mesh) -> the products of its last call there, and which of them share an X
    orders: dict[Any, tuple[list[Entry], list[int]]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the recorded orders in a copy: its first call records them."""
        return {**self.__dict__, "orders": {}}

    @contextmanager
    def calling(self, params: Named, of: str = "") -> Iterator[None]:
        """Run a call inside the ``with``, with weights gathered early in the last call's order.

        Plain tensors count as the same on every rank.
        ``of``  the submodule that is called, whose parameters these are.
        """
        refuse_trace()
        if self.mesh.size == 1:
            # nothing is gathered
            with promoting():
                yield
            return
        weights = {
            n: p.raw
            for n, p in params.items()
            if isinstance(p, ShardedTensor) and p.ndim == 2 and p.is_stored
        }
        stage = getattr(scope().call.stage, "number", None)
        where = of, stage, tuple(self.mesh.axes.items())
        order, reads = self.orders.setdefault(where, ([], []))
        with promoting(), prefetching(order, weights, reads):
            yield

    def named(self, count: int, named: Iterable[str] = ()) -> list[str]:
        """List the names of forward's first ``count`` positional arguments; ``named`` are keywords.

        Raises: RuleLint if one is part of ``*args`` and may be meant by a name in ``inputs=`` that
                is not in the signature, as for a wrapper without functools.wraps.
        """
        given = self.arguments
        rest, places = _rest_name(given), len([n for n, kind in given if kind in _POSITIONAL])
        unsaid = [n for n in self.inputs if n not in {*named, *dict(given)}]
        if rest and rest not in self.inputs and unsaid and count > places:
            raise RuleLint(
                f"inputs: forward takes positional input {places + 1} in *{rest}, so nothing says "
                "whether it is "
                f"{unsaid[0]!r}; give it by name",
                op="apply",
                operands={
                    "forward": ", ".join(dict(given)),
                    "inputs": ", ".join(self.inputs),
                },
                mesh=self.mesh,
                fix=f"apply(params, {unsaid[0]}={unsaid[0]})",
            )
        return positional(given, count)

    def added(self, args: Args, kwargs: Kwargs) -> Kwargs:
        """Return keyword arguments with those that a recipe adds, as positions in documents."""
        if getattr(self.suggested, "documents", None) is None:
            return kwargs
        names = self.named(len(args), kwargs)
        more = self.suggested.given(dict(zip(names, args, strict=True)) | kwargs)
        takes = {n for n, _ in self.arguments}
        return kwargs | {k: v for k, v in more.items() if k in takes}

    def place(self, name: str, value: Any) -> Any:
        """Place an input of this name by its layout in ``inputs=``; without one, replicate it.

        A layout of the recipe takes precedence, as for position ids.
        """
        own = getattr(self.suggested, "inputs", {}).get(name)

        def place(x: object) -> Any:
            if own is not None and isinstance(x, Tensor) and x.ndim == len(own.dims):
                layout = of_batch(own, x)
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
    ``copy.copy`` shares the tree and the buffers, ``copy.deepcopy`` and ``pickle`` make one with a
    tree and buffers of its own, which does not follow the caller's module.
    """

    def __init__(
        self,
        module: nn.Module,
        layouts: dict[str, Layout],
        tied: dict[str, str],
        inputs: Layouts,
        mesh: Mesh,
        out_layouts: Layouts,
        remat: Mapping[str, str],
        suggested: object,
    ) -> None:
        super().__init__(inputs, mesh, arguments(uncompiled(module).forward), suggested)
        own = {n: b.detach().clone() for n, b in module.named_buffers()}
        here = holds_values(mesh)
        plain = {n: b.to(mesh.device) if here and not b.is_meta else b for n, b in own.items()}
        self.copies = Copies(module, plain, layouts, remat)
        self.module = self.copies.module
        self.remat, self.out_layouts = remat, out_layouts
        self.layouts, self.tied = layouts, tied
        self.plain = Plain()
        self.buffers = {n: replicated(b, mesh) for n, b in plain.items()}
        # the pipeline.Pipeline whose stages run parts of the module
        self.stages: Any = None

    def staged(self, pipeline: object, units: Sequence[str]) -> None:
        """Have the stages of a pipeline run these submodules, each its own."""
        self.stages = pipeline
        self.copies.ask(units)

    def elsewhere(self, params: Container[str]) -> dict[str, ShardedTensor]:
        """Return the parameters that stages of other ranks alone hold, without values."""
        whole = getattr(self.stages, "whole", {})
        others = {n: x for n, x in whole.items() if n not in params}
        return {
            n: ShardedTensor(x.raw, x.place._replace(mesh=self.mesh)) for n, x in others.items()
        }

    def __copy__(self) -> "Apply":
        """Share the tree and the buffers."""
        new = object.__new__(Apply)
        new.__dict__.update(self.__dict__)
        return new

    def __call__(self, params: Named, *args: object, **kwargs: object) -> Any:
        """Run the module's forward.
        Inputs: plain tensors are sharded by ``inputs=``, or replicated without a layout there.

        Runs on the mesh of ``params``, which may be another than the one it was made for.
        """
        opened = getattr(params, "opened", None)
        if opened is not None:
            # parts of flat buckets, which are gathered when they are read
            with opened() as whole:
                return self(whole, *args, **kwargs)
        stage = scope().call.stage
        if stage is not None:
            stage.entered(self.stages)
            if stage.blocks is not None:
                return stage.blocks(params, args, kwargs)
        if self.stages is not None:
            if stage is None:
                return self.stages.forward(params, args, kwargs)
            params = self.stages.completed(params)
        mesh = next((p.mesh for p in params.values() if isinstance(p, ShardedTensor)), self.mesh)
        if mesh is self.mesh:
            return self.mutable(params, self.buffers, *args, **kwargs)[0]
        moved = copy.copy(self)
        moved.mesh = mesh
        moved.buffers = {n: replicated(unshard(b), mesh) for n, b in self.buffers.items()}
        return moved.mutable(params, moved.buffers, *args, **kwargs)[0]

    def mutable(
        self, params: Named, buffers: Named, /, *args: object, **kwargs: object
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a module that writes to its buffers in forward; return (output, new buffers)."""
        self.check(params)
        self._refuse_blank(buffers)
        params = giving(params, self.out_layouts)
        state = {**params, **{n: b.clone() for n, b in buffers.items()}}
        written: dict[str, Tensor] = {}
        names = self.named(len(args), kwargs)
        kwargs = self.added(args, kwargs)
        args = tuple(self.place(name, a) for name, a in zip(names, args, strict=True))
        kwargs = {k: self.place(k, v) for k, v in kwargs.items()}

        def run() -> Any:
            with self.copies.taken() as copy:
                again = partial(copy.swapped, state, written)
                with self.calling(params), within(again=again):
                    try:
                        return copy.run(state, buffers, written, args, kwargs)
                    except ShardError as e:
                        self._point_at(e, copy.module)
                        raise

        return self.plain.alike(run, self.mesh), {n: state[n] for n in buffers}

    @contextmanager
    def on_blocks(self, params: Named) -> Iterator[Callable[[Named, Args, Kwargs], Any]]:
        """Set the blocks of parameters in the module inside the ``with``; yield its call.

        On a mesh of one rank blocks are whole values, and the module runs by torch alone.
        """
        self._refuse_blank(self.buffers)
        whole = self.stages.completed(params)
        self.check(whole)
        held = {n: raw_of(x) for n, x in whole.items()}
        with ExitStack() as stack:
            copy = stack.enter_context(self.copies.taken())
            # listed once: other tensors in the slots look like another tree
            found = copy.slots()
            stack.enter_context(exchanged(found, dict(held)))

            def call(given: Named, args: Args, kwargs: Kwargs) -> Any:
                others = () if given is params else given.items()
                state = {n: raw_of(x) for n, x in others if raw_of(x) is not held[n]}
                state.update((n, raw_of(b).clone()) for n, b in self.buffers.items())
                inputs: Any = args, self.added(args, kwargs)
                args, kwargs = cast(Any, optree.tree_map(raw_of, inputs, none_is_leaf=True))
                split = scope().policy.split_backward
                with (
                    exchanged(found, state) if state else nullcontext(),
                    SplitProducts() if split else nullcontext(),
                ):
                    out = copy.module(*args, **kwargs)
                leaves, tree = tree_flatten(out)
                values = [_whole(x, self.mesh) if isinstance(x, Tensor) else x for x in leaves]
                return tree_unflatten(values, tree)

            yield call

    def _refuse_blank(self, buffers: Named) -> None:
        """Refuse a buffer of a module on the meta device that has no value yet."""
        blank = [n for n, b in buffers.items() if b.device.type == "meta"]
        if blank and holds_values(self.mesh):
            raise ShardError(
                "the module was made on the meta device, and nothing gave a value to its buffer "
                f"{blank[0]!r}",
                op="apply",
                mesh=self.mesh,
                fix=f"apply.buffers[{blank[0]!r}] = sl.shard(value, '...')"
                "  # or take sl.init(module, rules)",
            )

    def _point_at(self, e: ShardError, module: nn.Module) -> None:
        """Add to an error its submodule, the parameters there and a rule that leaves them whole."""
        path = _raised_in(e, module)
        while path and not self._inside(path):
            path = path.rpartition(".")[0]
        held = [f"{n}: {lay}" for n, lay in self._inside(path).items() if lay.axes]
        if "parameters" in e.operands or not held:
            return
        if len(held) > 4:
            held[4:] = ["..."]
        e.operands["parameters"] = ", ".join(held)
        pattern = f"{stars(path)}.*".lstrip(".")
        e.operands["or"] = (
            f"rules = [({pattern!r}, '...'), *rules]  # {path or 'the module'} whole on every rank"
        )

    def _inside(self, path: str) -> dict[str, Layout]:
        """Return the layouts of the parameters of a submodule."""
        return {n: lay for n, lay in self.layouts.items() if not path or n.startswith(f"{path}.")}

    def check(self, params: Named) -> None:
        """Check that exactly the module's parameters are given, by name."""
        for name in params:
            if name not in self.layouts:
                near = similar(name, self.layouts, 1)
                why = f"no parameter {name!r}{meant(near)}"
                given = {"parameters": ", ".join(self.layouts)}
                fix = f"params[{(near or list(self.layouts))[0]!r}] = params.pop({name!r})"
                raise UnknownParameter(why, op="apply", operands=given, mesh=self.mesh, fix=fix)
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


def _whole(x: Tensor, mesh: Mesh) -> ShardedTensor:
    return replicated(whole_now(x), mesh)


def _raised_in(e: ShardError, module: nn.Module) -> str:
    """Return the path of the innermost submodule whose forward raised."""
    paths = {id(m): n for n, m in module.named_modules()}
    path = ""
    for frame, _ in walk_tb(e.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")), path)
    return path


def giving(params: Named, layouts: Layouts) -> dict[str, Tensor]:
    """Return the same parameters, some with ``out_layout``, the layout required of products."""
    found = dict(params)
    for name, layout in layouts.items():
        weight = params[name]
        if isinstance(weight, ShardedTensor):
            found[name] = weight.at(weight.place._replace(out_layout=layout))
    return found


def of_batch(layout: Layout, x: Tensor) -> Layout:
    """Return the layout of an input with a batch: a single row is not split."""
    return Layout((Dim(), *layout.dims[1:])) if x.shape[:1] == (1,) else layout
