"""Recipes: lists of sharding rules for modules, to use as they are or to edit.

A recipe traces the module once on the meta device, derives the role of each parameter
(param_roles.py), and writes one rule per kind of parameter, with layer numbers as ``*``.
``torch.nn.Linear`` stores its weight (out, in).  A parameter that does not divide, or whose split
no layout can express, is left whole; ``recipe.left`` names it.  Of these, a vocabulary is split
where ``parallelize`` is given ``pad=True``.

A module that cannot be run, because its inputs are unknown, is refused: give them, ``inputs=``.

Every recipe takes batches over a ``data`` axis as well, where the mesh has one.

``experts`` names mesh axes that split a mixture's stacks of experts [E, ...], every expert whole on
one rank (see experts.py); without it experts are split as other weights are, E whole.  Where a
recipe splits rows over these axes, they are gathered for the experts and the results scattered.
With axes over which the batch is not split only the sum is communicated, as with a column and a
row; with ``data`` itself no expert is copied:

    sl.recipes.megatron1d(model, experts="x")       # one sum of [tokens, features] per layer, pass
    sl.recipes.ddp(model, experts="data")           # rows gathered, results scattered
    sl.recipes.megatron1d(model, experts="data x")  # E over all ranks
"""

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.errors import AxisReused, BadArgument, ShardError, Unsupported
from shardlib.layouts import Dim, Layout, Ring
from shardlib.mesh import MeshLike, as_mesh
from shardlib.modules.colossalai import Legacy, from_colossalai_config
from shardlib.modules.dim_factors import Atom, common
from shardlib.modules.dim_trace import Dimensions, trace_dimensions
from shardlib.modules.experts import stacks
from shardlib.modules.param_roles import (
    MATRIX,
    RoleLayouts,
    Texts,
    assign,
    patterns,
    role_names,
    widening_names,
)
from shardlib.modules.rules import Suggested

__all__ = [
    "Legacy",
    "Recipe",
    "beside",
    "cube3d",
    "ddp",
    "from_colossalai_config",
    "fsdp",
    "matrices",
    "megatron1d",
    "optimus2d",
    "ring",
    "roles",
    "tesseract",
    "widening",
]

MLP_ROLES = ("mnk", "mnn", "mmk", "mmn", "nnk", "nnn")
"""Roles of axes x, y, z: activations are ``(x y) z``, rows over x, then y, columns over z."""


class Recipe(list[tuple[str, ...]]):
    """List of rules, with the layouts of the model's token ids and labels [B, S].

    ``left``  parameters left whole although their role would split them -> why.
    ``zero``  arguments of ZeRO for training: ``tx = sl.optim.zero(tx, **recipe.zero)``.
    ``inputs``     layouts of arguments that take precedence over ``inputs=``: ``position_ids``
                   along a split sequence are whole, since documents are found by jumps in them.
    ``documents``  borders of the documents of each row, see ``ring``.

    Rules put in front of it take precedence, and its own rules may then be unused without an
    error: ``[("h.*.attn.*", "..."), *recipe]``.

    >>> import shardlib as sl
    >>> model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2):
    ...     recipe = megatron1d(model)
    >>> recipe[:3], recipe.tokens
    ([('0.weight', '...'), ('1.weight', 'x .'), ('1.bias', 'x')], '. .')
    >>> recipe.left["0.weight"].partition(";")[0]
    'dimension 0 of [7, 4]: 7 rows have no even split over 2'
    """

    def __init__(
        self,
        rules: Iterable[tuple[str, ...]],
        tokens: str,
        labels: str,
        left: Mapping[str, str] | None = None,
        zero: Mapping[str, Any] | None = None,
        documents: Sequence[int] | None = None,
    ) -> None:
        super().__init__(r if isinstance(r, Suggested) else Suggested(r) for r in rules)
        self.tokens = tokens
        self.labels = labels
        rows, columns = Layout.parse(tokens).dims
        self.inputs: dict[str, Layout] = {}
        if columns.is_split:
            self.inputs["position_ids"] = Layout((rows, Dim()))
        self.documents = documents
        self.left = dict(left or {})
        self.zero: dict[str, Any] = dict(zero or {})

    def __radd__(self, rules: list[Any]) -> list[Any]:
        return [*rules, *self]

    def given(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that forward gets, where there are documents: the positions in each.

        A decoder of transformers finds documents by them if it has no mask and no cache.
        Raises: Unsupported where a mask is given too; BadArgument for rows shorter than documents.
        """
        assert self.documents is not None, "no argument is added where there are none"
        if named.get("attention_mask") is not None:
            raise Unsupported(
                "an attention_mask hides the documents from a decoder of transformers: it finds "
                "them by their positions where no mask is given",
                op="ring",
                fix="apply(params, input_ids=ids)  # without attention_mask",
            )
        out: dict[str, Any] = {}
        if named.get("use_cache") is None:
            out["use_cache"] = False
        if named.get("position_ids") is not None:
            return out
        tokens = next(x for x in named.values() if isinstance(x, Tensor) and x.ndim > 1)
        if tokens.shape[1] < self.documents[-1]:
            raise BadArgument(
                f"rows of {tokens.shape[1]} tokens end before their documents do, at "
                f"{self.documents[-1]}",
                op="ring",
                operands={"documents": self.documents, "tokens": list(tokens.shape)},
                fix=f"sl.recipes.ring(model, documents=(0, {tokens.shape[1]}))",
            )
        # the rest of a row is one more document
        borders = [*self.documents, tokens.shape[1]]
        # made there: nothing is uploaded
        where = tokens.device
        runs = [torch.arange(b - a, device=where) for a, b in itertools.pairwise(borders)]
        return out | {"position_ids": torch.cat(runs)[None]}


def megatron1d(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    axis: str = "x",
    data: str = "data",
    sequence: bool = False,
    experts: str = "",
    inputs: object = None,
) -> Recipe:
    """Split columns, then rows: heads and MLP width split over ``axis``.

    The residual stream is whole over ``axis``, or with ``sequence`` split along the sequence: the
    sums are then scattered and gathered, and norms and dropout hold 1/p of the positions.
    ``experts``  axes that split stacks of experts along E; without it each expert's width is split.

    Source: arXiv 1909.08053, section 3; arXiv 2205.05198 for the sequence.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2):
    ...     megatron1d(mlp)
    ...     megatron1d(mlp, sequence=True)[2]
    [('0.weight', 'x .'), ('0.bias', 'x'), ('2.weight', '. x'), ('2.bias', '.')]
    ('2.weight', '. x', '. x ...')
    """
    batch = _batch(mesh, data, "megatron1d", axis=axis)
    contract, where = [f". {axis}"], f"{batch} ."
    if sequence:
        where = f"{batch} {axis}"
        contract.append(f"{where} ...")
    own = {
        "expand": (f"{axis} .",),
        "contract": tuple(contract),
        "plain": (". .",),
        "tokens": (f"{axis} .",),
    }
    way = RoleLayouts(_layouts(".", axis, own), inner=(axis,))
    return _recipe(model, way, inputs, where, f"{batch} .", mesh, experts)


def optimus2d(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    rows: str = "x",
    cols: str = "y",
    data: str = "data",
    experts: str = "",
    inputs: object = None,
) -> Recipe:
    """Shard every matrix in 2D blocks: activations ``(data rows) . cols``; the wide side stays.

    An expanding weight is stored ``cols rows`` so that its output stays (Y-stationary), a
    contracting one ``rows cols`` so that its input stays (X-stationary).

    Source: arXiv 2104.05343, which keeps Y stationary always; the choice follows the sizes here.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(data=2, x=2, y=2):
    ...     rules = optimus2d(mlp)
    >>> rules, rules.tokens
    ([('0.weight', 'y x'), ('*.bias', 'y'), ('2.weight', 'x y')], '(data x) .')
    """
    where = f"{_batch(mesh, data, 'optimus2d', (rows,), rows=rows, cols=cols)} ."
    return _recipe(model, _plane(rows, cols), inputs, where, where, mesh, experts)


def tesseract(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    rows: str = "x",
    cols: str = "y",
    depth: str = "d",
    data: str = "data",
    experts: str = "",
    inputs: object = None,
) -> Recipe:
    """Shard in planes of 2D blocks: activations ``(depth rows) . cols``; depth copies weights.

    2.5D: the copies are over depth.

    The sum of each weight's gradient over depth is part of the product.

    Source: arXiv 2105.14500, section 3.

    >>> import shardlib as sl
    >>> with sl.simulate(d=2, x=2, y=2):
    ...     rules = tesseract(nn.Sequential(nn.Linear(4, 16)))
    >>> rules, rules.tokens
    ([('*.weight', 'y x'), ('*.bias', 'y')], '(d x) .')
    """
    batch = _batch(mesh, data, "tesseract", (depth, rows), depth=depth, rows=rows, cols=cols)
    where = f"{batch} ."
    return _recipe(model, _plane(rows, cols), inputs, where, where, mesh, experts)


def cube3d(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    x: str = "x",
    y: str = "y",
    z: str = "z",
    data: str = "data",
    mlp: str = "mnk",
    experts: str = "",
    inputs: object = None,
) -> Recipe:
    """Shard in 3D: activations ``(x y) . z``, weights ``(z x) y``, wide activations ``(x z) . y``.

    The axes may have any sizes: with one of size 1 this is 2D, with two 1D.  Tokens are split
    over x and y, labels over x and z, like the logits.

    ``mlp``  the roles of x, y and z in MLPs, of m (gathers weights), n (gathers activations in,
             scatters them out) and k (the other way round): mnk as everywhere else, mnn, mmk, mmn,
             nnk or nnn.  Inputs and outputs have the same layout in all of them, so nothing is
             resharded.

    Source: arXiv 2105.14450, section 3; general grids as in arXiv 2305.13525.
    Raises: ShardError for other roles.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2, y=2, z=2):
    ...     rules = cube3d(mlp)
    >>> rules
    [('0.weight', 'y (z x)'), ('0.bias', 'y'), ('2.weight', 'z (y x)'), ('2.bias', 'z')]
    >>> rules.tokens, rules.labels
    ('(x y) .', '(x z) .')
    >>> with sl.simulate(x=2, y=2, z=2):
    ...     rules = cube3d(mlp, mlp="mnn")
    >>> rules[0], rules[2:]
    (('0.weight', '(y z) x'), [('2.weight', '. (y z x)', '(x y) ... z'), ('2.bias', 'z')])
    """
    if mlp not in MLP_ROLES:
        why = f"no such roles in an MLP: {mlp!r}; there are {', '.join(MLP_ROLES)}"
        fix = 'sl.recipes.cube3d(model, mlp="mnk")'
        raise ShardError(why, op="recipe", mesh=as_mesh(mesh), fix=fix)
    rows, wide = (_batch(mesh, data, "cube3d", over, x=x, y=y, z=z) for over in ((x, y), (x, z)))
    own = {
        "expand": (f"{y} ({z} {x})",),
        "contract": (f"{z} ({y} {x})",),
        "plain": (f". ({z} {x})", f"{rows} ... {z}"),
        "scores": (f". {z}", f"{rows} ..."),
        "tokens": (f"{y} ({z} {x})",),
    }
    wider = None
    if mlp != "mnk":
        m, n, k = (
            " ".join(axis for axis, role in zip((x, y, z), mlp, strict=True) if role == wanted)
            for wanted in "mnk"
        )
        own["up"] = (f"{_token(n)} {_token(k, m)}",)
        own["down"] = (f"{_token(k)} {_token(n, m)}", f"{rows} ... {z}")
        wider = tuple(n.split())
    way = RoleLayouts(_layouts(z, y, own), (z,), (y,), wider, apart=True)
    return _recipe(model, way, inputs, f"{rows} .", f"{wide} .", mesh, experts)


def _token(*axes: str) -> str:
    """Write the token of one dimension over these axes."""
    return str(Dim(tuple(" ".join(axes).split())))


def ring(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    axis: str = "s",
    schedule: str = "zigzag",
    data: str = "data",
    weights: Recipe | None = None,
    experts: str = "",
    documents: Sequence[int] | None = None,
) -> Recipe:
    """Split the sequence: activations ``data zigzag(s) .``, ring attention, whole weights.

    ``schedule``  contiguous, zigzag (balances causal attention) or striped.
    ``weights``   another recipe for the same model, whose weights and batch this one keeps: the
                  sequence is split on top of it, as ring x 2D with ``weights=optimus2d(model)``.
    ``documents``  borders (0, 5, 9) of the documents packed in each row, for a decoder of
                   transformers: it gets their ``position_ids`` and no cache, so that each token
                   attends to its own document.  If they change from batch to batch, give
                   ``position_ids`` [B, S] to ``apply`` and ``use_cache=False``, sharded like the
                   tokens or plain.  The mask [B, 1, S, S] is whole on each rank, one byte each.

    Source: arXiv 2105.13120.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(data=2, s=4):
    ...     rules = ring(mlp)
    >>> rules, rules.tokens
    ([('*', '...')], 'data zigzag(s)')
    >>> with sl.simulate(x=2, y=2, s=2):
    ...     rules = ring(mlp, weights=optimus2d(mlp))
    >>> rules[0], rules.tokens
    (('0.weight', 'y x'), 'x zigzag(s)')
    """
    token = Ring(axis, 0, schedule).layout.dims[0]
    if documents is not None:
        documents = Ring(axis, 0, "documents", cu_seqlens=tuple(documents)).cu_seqlens
        if "position_ids" not in inspect.signature(model.forward).parameters:
            why = f"{type(model).__name__} takes no position_ids by which it could know documents"
            fix = "sl.attention(q, k, v, mask=sl.masks.Causal() & sl.masks.Documents((0, 5, 9)))"
            raise Unsupported(why, op="ring", fix=fix)
    if weights is None:
        where = f"{_batch(mesh, data, 'ring', axis=axis)} {token}"
        return Recipe(_whole(model, mesh, experts), where, where, documents=documents)
    tokens, labels = (Layout.parse(text).dims for text in (weights.tokens, weights.labels))
    taken = {a for d in (*tokens, *labels) for a in d.axes}
    used = taken.union(*(Layout.parse(text).axes for _, text, *_ in weights))
    free = next((a for a in as_mesh(mesh).names if a not in used), axis)
    line = f"sl.recipes.ring(model, axis={free!r}, weights=weights)"
    as_mesh(mesh).axis_size(axis, "recipe", line)
    if tokens[1].is_split or axis in taken:
        raise _refused(
            f"the other recipe splits the sequence already: {weights.tokens!r}",
            "sl.recipes.ring(model, weights=sl.recipes.optimus2d(model))",
        )
    rules = [*_whole(model, mesh, experts)[:-1], *weights]
    tokens, labels = (f"{dims[0]} {token}" for dims in (tokens, labels))
    return Recipe(rules, tokens, labels, weights.left, documents=documents)


def ddp(
    model: nn.Module, mesh: MeshLike | None = None, *, data: str = "data", experts: str = ""
) -> Recipe:
    """Split batches over ``data``, replicate all parameters, and sum their gradients.

    ``experts``  axes that split stacks of experts along E, as ``data``.
    ``tx = sl.optim.zero(tx, **rules.zero)`` and ``sl.value_and_grad(loss, into=tx)`` sum gradients
    in buckets while backward runs.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2):
    ...     rules = ddp(nn.Linear(4, 4))
    >>> rules, rules.tokens
    ([('*', '...')], 'data .')
    >>> rules.zero
    {'axis': 'data', 'stage': 0}
    """
    where = f"{_batch(mesh, data, 'ddp', data=data)} ."
    zero = {"axis": data, "stage": 0}
    return Recipe(_whole(model, mesh, experts), where, where, zero=zero)


def fsdp(
    model: nn.Module,
    mesh: MeshLike | None = None,
    *,
    axis: str = "x",
    data: str = "data",
    experts: str = "",
    inputs: object = None,
    flat: bool = False,
) -> Recipe:
    """Split batches and matrices over ``axis``; gather weights for products, scatter gradients.

    It is the 3D product of ``cube3d`` with y = z = 1.  Vectors, convolutions and positions are
    whole.  With a ``data`` axis as well, weights are copied over it and batches split over both.

    ``flat``  split all parameters instead, in flat buckets that are gathered block by block:
              ``tx = sl.optim.zero(tx, **rules.zero); params = tx.shard(params)``.

    Source: arXiv 1910.02054, stage 3; arXiv 2304.11277.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> with sl.simulate(x=2):
    ...     rules = fsdp(mlp)
    >>> rules, rules.tokens
    ([('*.weight', '. x'), ('*.bias', '.')], 'x .')
    >>> with sl.simulate(x=2):
    ...     fsdp(mlp, flat=True).zero
    {'axis': 'x', 'stage': 3}
    """
    where = f"{_batch(mesh, '' if data == axis else data, 'fsdp', (axis,), axis=axis)} ."
    if flat:
        zero = {"axis": axis, "stage": 3}
        return Recipe(_whole(model, mesh, experts), where, where, zero=zero)
    layouts = dict.fromkeys([*MATRIX.values(), "tokens"], (f". {axis}",)) | {"positions": (". .",)}
    way = RoleLayouts(layouts)
    return _recipe(model, way, inputs, where, where, mesh, experts)


def _plane(rows: str, cols: str) -> RoleLayouts:
    wide, narrow = (f"{cols} {rows}",), (f"{rows} {cols}",)
    own = {"expand": wide, "contract": narrow, "plain": wide, "tokens": narrow}
    return RoleLayouts(_layouts(cols, cols, own), (cols,), (cols,), widest=True)


def _layouts(residual: str, inner: str, own: Texts) -> dict[str, tuple[str, ...]]:
    """Return the layouts of all roles: those of a recipe's ``own``, else of a matrix's sides.

    ``residual``, ``inner``  the tokens of features of the two kinds.
    """
    tokens = {"residual": residual, "inner": inner, "whole": "."}
    sides = {role: (f"{tokens[out]} {tokens[into]}",) for (out, into), role in MATRIX.items()}
    return {**sides, "positions": (f". {residual}",), **own}


def _recipe(
    model: nn.Module,
    way: RoleLayouts,
    inputs: object,
    tokens: str,
    labels: str,
    mesh: MeshLike | None,
    experts: str,
) -> Recipe:
    """Write rules by traced roles.  Raises: Unsupported where the module cannot be run."""
    split = _stacked(model, mesh, experts)
    found = inputs if isinstance(inputs, Dimensions) else trace_dimensions(model, inputs)
    way = replace(way, sizes=as_mesh(mesh).axes)
    texts, left = assign(model, found, way)
    padded, _ = assign(model, found, replace(way, pad=True)) if left else (texts, left)
    left = {n: why for n, why in left.items() if n not in split}
    return Recipe(patterns(texts | split, padded | split), tokens, labels, left)


def _whole(model: nn.Module, mesh: MeshLike | None, experts: str) -> list[tuple[str, ...]]:
    """Write rules that leave all parameters whole but stacks of experts."""
    return [*patterns(_stacked(model, mesh, experts)), ("*", "...")]


def _stacked(model: nn.Module, mesh: MeshLike | None, experts: str) -> dict[str, tuple[str, ...]]:
    """Return the layouts of experts' parameters split along E over these axes.
    Raises: Unsupported, UnknownAxis.
    """
    axes, m = tuple(experts.split()), as_mesh(mesh)
    if not axes:
        return {}
    p = m.axis_size(axes, "recipe", "sl.recipes.megatron1d(model, experts=' '.join({}))")
    out: dict[str, tuple[str, ...]] = {}
    for name, module in stacks(model).items():
        for n, value in module.named_parameters(recurse=False):
            full = f"{name}.{n}".lstrip(".")
            if value.shape[0] % p:
                raise _refused(
                    f"the {value.shape[0]} experts of {full!r} do not divide over {p} ranks",
                    "sl.recipes.megatron1d(model)",
                    operands={full: list(value.shape)},
                )
            out[full] = (" ".join([_token(*axes), "..."]),)
    if not out:
        held = [n for n, _ in model.named_parameters() if "experts" in n.split(".")]
        why = "no experts"
        if held:
            why = f"{held[0]!r} is of one expert or of a module that says nothing of routing"
        raise _refused(
            f"{why}: a stack of experts holds parameters [E, ...], says E as num_experts, and its "
            "forward takes (hidden [T, D], index [T, k], weights [T, k])",
            "sl.recipes.megatron1d(model)",
        )
    return out


def _refused(why: str, fix: str, operands: Mapping[str, object] | None = None) -> Unsupported:
    return Unsupported(why, op="recipe", operands=operands, fix=fix)


def _batch(
    mesh: MeshLike | None, data: str, recipe: str, over: tuple[str, ...] = (), /, **axes: str
) -> str:
    """Return the token of a batch dimension over ``data``, if the mesh has it, and ``over``.

    ``axes``  the recipe's arguments that name one.  Raises: UnknownAxis, AxisReused.
    """
    m = as_mesh(mesh)
    fix = _instead(m.names, data, recipe, axes)
    for axis in axes.values():
        m.axis_size(axis, "recipe", fix)
    for argument, axis in axes.items():
        if argument != "data" and axis == data:
            why = (
                f"axis {axis!r} is used twice, as {argument!r} and as 'data', which splits batches"
            )
            raise AxisReused(why, op="recipe", mesh=m, fix=fix)
    return _token(*(a for a in (data, *over) if a in m.names))


def _instead(names: Sequence[str], data: str, recipe: str, axes: Mapping[str, str]) -> str:
    """Write a call that fits this mesh's axes: this recipe with other axes, or another recipe."""
    # by custom the axis of stages, which layouts do not name
    own = [n for n in names if n not in (data, "pipe")]
    left = [n for n in own if n not in axes.values()]
    lacks = [argument for argument, n in axes.items() if n not in own]
    if len(left) >= len(lacks):
        given = dict(zip(lacks, left, strict=False))
        if data in names and data != "data":
            given["data"] = data
        return f"sl.recipes.{recipe}(model, {', '.join(f'{k}={a!r}' for k, a in given.items())})"
    if not own and data in names:
        # the batch's axis is the only one: recipes that need no other
        alone = {"fsdp": "fsdp(model, axis"}.get(recipe, "ddp(model, data")
        return f"sl.recipes.{alone}={data!r})"
    wants = f"  # {recipe} wants axes {', '.join(axes.values())}" if len(axes) > 1 else ""
    return f"sl.recipes.megatron1d(model, axis={[*own, *names][0]!r}){wants}"


def roles(model: nn.Module, inputs: object = None) -> dict[str, str]:
    """Map module names to the roles of their parameters, by what feeds what in a traced run.

    A product expands, contracts, or is one of the others of ``param_roles.py``; a table that is looked up
    holds tokens or positions; a convolution is a patch; all else is a norm.
    ``inputs``  as a recipe's, for modules whose inputs cannot be derived from their signature.

    >>> roles(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.LayerNorm(4)))
    {'0': 'expand', '2': 'contract', '3': 'norm'}
    """
    by_parameter = role_names(trace_dimensions(model, inputs))
    found: dict[str, str] = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if found.get(owner, "norm") == "norm":
            found[owner] = by_parameter.get(name, "norm")
    return found


def matrices(model: nn.Module, inputs: object = None) -> list[str]:
    """List the weights that multiply activations between two other layers: the weights for Muon.

    Embeddings, heads (no other weight reads their output), norms and biases are not among them.
    ``inputs``  as a recipe's, for modules whose inputs cannot be derived from their signature.

    >>> matrices(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 4)))
    ['0.weight', '2.weight']
    """
    found = trace_dimensions(model, inputs)
    by_name = dict(model.named_parameters())

    row = partial(_atoms, found.params)
    read = [atom for r in found.products for atom in row(r.name, r.inputs)]
    apart = {r.name for r in found.lookups}
    apart |= {r.name for r in found.products if not common(row(r.name, r.outputs), read)}
    names = dict.fromkeys(r.name for r in found.products)
    return [n for n in names if n not in apart and by_name[n].ndim > 1]


def _atoms(params: Mapping[str, Sequence[Any]], name: str, dims: Sequence[int]) -> list[Atom]:
    """List the atoms of some dimensions of a parameter."""
    return [atom for d in dims for atom in params[name][d]]


def beside(rules: Iterable[Sequence[Any]]) -> list[tuple[Any, tuple[int, int]]]:
    """List the weights that hold several matrices, with their numbers in rows and in columns.

    These follow from the layouts: ``(3 y) x`` is split like three matrices one above the other.
    ``muon(..., side=beside(rules))`` makes each of them orthogonal on its own, on any mesh.

    >>> rules = [("qkv.weight", "(3 y) x"), ("c_attn.weight", "x (3 y)"), ("*.weight", "y x")]
    >>> beside([*rules, ("*", "...")])
    [('qkv.weight', (3, 1)), ('c_attn.weight', (1, 3))]
    """
    out = []
    for pattern, where, *_ in rules:
        layout = Layout.parse(where) if isinstance(where, str) else where
        if not isinstance(layout, Layout):
            continue
        if layout.ellipsis is not None and len(layout.dims) < 2:
            layout = layout.resolve(2)
        sides = tuple(map(_groups, layout.dims[-2:]))
        if len(sides) == 2 and sides != (1, 1):
            out.append((pattern, sides))
    return out


def _groups(dim: Dim) -> int:
    """Return the factor with which a token begins: the matrices that its dimension holds."""
    first = next(iter(dim.parts), 1)
    return first if isinstance(first, int) else 1


def widening(model: nn.Module, inputs: object = None) -> set[str]:
    """List the modules of an MLP's weights: those that widen, and those that contract again.

    >>> sorted(widening(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))))
    ['0', '2']
    """
    dims = trace_dimensions(model, inputs)
    return {name.rpartition(".")[0] for name in widening_names(dims)}
