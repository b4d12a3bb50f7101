"""Parallelize: an unmodified module as a pure function over sharded parameters.

``apply, params = parallelize(module, rules)``: ``params`` is a dict name -> ShardedTensor, placed
by the first rule that matches (rules.py), and ``apply(params, *inputs)`` runs the module's forward
with them (apply.py), on a copy of its tree without weights (copies.py).  The module keeps its own
tensors, which are freed with it.  Nothing is replicated, or sharded, by accident.
"""

import inspect
import math
from collections.abc import Callable, Container, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin

from shardlib._compat import uncompiled
from shardlib.capacity import refuse_beyond
from shardlib.collectives import holds_values, storage_shape, verify
from shardlib.errors import ShardError, meant, similar
from shardlib.layouts import Layout, LayoutLike
from shardlib.mesh import Mesh, MeshLike, as_mesh, bind
from shardlib.modules.apply import Apply, arguments
from shardlib.modules.remat import Remat, regions
from shardlib.modules.rules import (
    UNFIT,
    Layouts,
    LogicalAxes,
    Named,
    Rules,
    match_rules,
    misfits,
    naming,
    read_layout,
    renamed,
    rule_error,
)
from shardlib.placing import padded_size, place_whole
from shardlib.tensor import Place, ShardedTensor


class CutsIntoStages(Protocol):
    """Type of ``stages=``: see ``sl.Stages``."""

    def parallelized(
        self, module: nn.Module, rules: Rules, *, mesh: Mesh, src: int | None,
        blank: bool = False, **given: object,
    ) -> tuple[Apply, dict[str, ShardedTensor]]:  # fmt: skip
        """Return the call and the parameters of the stages that run here."""
        ...


def parallelize(
    module: nn.Module,
    rules: Rules,
    *,
    mesh: MeshLike | None = None,
    axes: LogicalAxes = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    src: int | None = None,
    stages: CutsIntoStages | None = None,
    host: bool = False,
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
    ``stages``  ``sl.Stages("pipe")``: blocks of the module run on different ranks of that axis, and
                ``params`` has only the parameters that this rank's stages read.
    ``host``    parameters are placed in host memory, from where ``sl.optim.zero(..., tiers=)``
                takes them: the device need not hold them all.

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
    given: dict[str, Any] = {
        "axes": axes, "inputs": inputs, "pad": pad, "remat": remat, "host": host,
    }  # fmt: skip
    return placing(stages)(module, rules, mesh=as_mesh(mesh), src=src, **given)


def placing(stages: CutsIntoStages | None) -> Callable[..., tuple[Apply, dict[str, ShardedTensor]]]:
    """Return the function that places a module's parameters, or those of its stages."""
    if stages is None:
        return placed
    if not hasattr(stages, "parallelized"):
        axis = stages if isinstance(stages, str) else "pipe"
        why = f"stages={stages!r} is no sl.Stages"
        fix = f"sl.parallelize(module, rules, stages=sl.Stages({axis!r}))"
        raise ShardError(why, op="parallelize", fix=fix)
    return stages.parallelized


def placed(
    module: nn.Module,
    rules: Rules,
    *,
    mesh: Mesh,
    axes: LogicalAxes = None,
    inputs: Mapping[str, LayoutLike] | None = None,
    pad: bool = False,
    remat: Remat = (),
    host: bool = False,
    blank: bool = False,
    src: int | None = None,
    only: Container[str] | None = None,
) -> tuple[Apply, dict[str, ShardedTensor]]:
    """Implement ``parallelize``; with ``blank`` no value is read, and blocks hold NaN.

    ``only``  names of the parameters that are placed; None: all.
    """
    inputs = inputs or {}
    named = dict(module.named_parameters())
    _refuse_unsized({**named, **dict(module.named_buffers())}, mesh)
    with bind(mesh):
        # DTensor placements in a rule refer to the axes of this mesh
        layouts, out_layouts = match_rules(named, rules, axes, pad)
    tied = _tied(module)
    _check_inputs(module, inputs)
    policies = regions(module, remat)
    for n, lay in out_layouts.items():
        with naming(n, rules, named):
            read_layout(lay, None, mesh)
    given = {n: _input_layout(n, lay, axes, mesh) for n, lay in inputs.items()}
    unfit = misfits(named, layouts, mesh, pad)
    own = {n: p for n, p in named.items() if only is None or n in only}
    device = torch.device("cpu") if host else mesh.device
    _refuse_too_large({n: p for n, p in own.items() if n not in unfit}, layouts, mesh, device)
    params = {}
    for n, p in own.items():
        with naming(n, rules, named, lambda: unfit):
            params[n] = _place_parameter(p, layouts[n], mesh, device, pad, blank, src)
    if src is None and not blank:
        filled = {n: (p.raw, p.sharding) for n, p in params.items() if not named[n].is_meta}
        verify("parallelize", mesh, filled, "sl.parallelize(module, rules, src=0)")
    return Apply(module, layouts, tied, given, mesh, out_layouts, policies, rules), params


def _tied(module: nn.Module) -> dict[str, str]:
    """Map further names of parameters to their first."""
    first = {id(p): n for n, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in every if first[id(p)] != n}


def _refuse_unsized(tensors: Named, mesh: Mesh) -> None:
    """Refuse the tensors of Lazy modules, which have no size yet."""
    for n, t in tensors.items():
        if isinstance(t, UninitializedTensorMixin):
            why = f"{n!r} has no size before the module's first call"
            given = {n: type(t).__name__}
            fix = "module(*inputs)  # a call gives every Lazy module its sizes"
            raise ShardError(why, op="parallelize", operands=given, mesh=mesh, fix=fix)


def _input_layout(name: str, layout: LayoutLike, axes: LogicalAxes, mesh: Mesh) -> Layout:
    """Return the layout of an argument of forward.  Raises: a layout's error that names it."""
    try:
        return read_layout(layout, axes, mesh)
    except UNFIT as e:
        fix = f"sl.parallelize(module, rules, inputs={{**inputs, {name!r}: '...'}})"
        raise renamed(f"the layout of input {name!r} does not fit", e, fix) from None


def _refuse_too_large(named: Named, layouts: Layouts, mesh: Mesh, device: torch.device) -> None:
    """Refuse parameters whose blocks do not fit into the memory of the device."""
    if not holds_values(mesh):
        return
    sizes = [
        math.prod(layouts[n].local_shape(tuple(p.shape), mesh, pad=True)) * p.element_size()
        for n, p in named.items()
    ]
    made = math.prod(storage_shape(mesh, sum(sizes)))
    refuse_beyond(made, device, "parallelize", mesh)


def _check_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a key that is no argument of forward.

    With ``**kwargs``, refuse one that looks like a misspelt argument.
    """
    if not isinstance(inputs, Mapping):
        raise rule_error(
            "inputs is a mapping from the names of forward's arguments to layouts, not "
            f"{type(inputs).__name__}",
            "sl.parallelize(module, rules, inputs=dict(inputs))",
        )
    given = arguments(uncompiled(module).forward)
    names = [n for n, kind in given if kind is not inspect.Parameter.VAR_KEYWORD]
    loose = len(names) < len(given)
    for name in inputs:
        near = similar(name, names, 1, 0.8 if loose else 0.0)
        if name in names or (loose and not near):
            continue
        fix = f"inputs.pop({name!r})"
        if near:
            fix = f"inputs = {{{near[0]!r}: inputs.pop({name!r}), **inputs}}"
        why = f"inputs: forward has no argument {name!r}{meant(near)}"
        raise rule_error(why, fix, operands={"forward": ", ".join(names)})


def _place_parameter(
    p: Tensor, layout: Layout, mesh: Mesh, device: torch.device, pad: bool, blank: bool,
    src: int | None = None,
) -> ShardedTensor:  # fmt: skip
    if (p.is_meta or blank) and holds_values(mesh):
        size = padded_size(layout, p, mesh, pad)
        layout.check(tuple(size), mesh, op="parallelize")
        shape = storage_shape(mesh, *layout.local_shape(tuple(size), mesh))
        raw = torch.full(shape, float("nan"), dtype=p.dtype, device=device)
        raw.requires_grad_(p.requires_grad)
        return ShardedTensor(raw, Place(layout, p.shape, mesh, size))
    placed = place_whole(p.detach(), layout, mesh, src=src, pad=pad, device=device)
    placed.requires_grad_(p.requires_grad)
    return placed
