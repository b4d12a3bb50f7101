"""Roles of parameters, derived from the traced dimensions, never from names.

Every atom of a dimension (dim_trace.py) is *residual* (of the stream to which blocks add:
embeddings, norms and outputs of contractions), *inner* (heads, the width of an MLP, a vocabulary:
computed from the residual and contracted back to it) or *whole* (it is sorted, joined, contracted
between activations, or does not divide over the axes).  The role of a matrix follows from its two
sides:

    expand   inner <- residual       lift   inner <- whole       plain    residual <- residual
    contract residual <- inner       drop   whole <- inner       scores   whole <- residual
    land     residual <- whole       whole  whole <- whole

If no layout can express a split for one parameter, its atoms become whole for all of them: correct,
at a cost that prices include.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from shardlib.layouts import Dim, Layout
from shardlib.layouts.dims import joined, said
from shardlib.modules.dim_factors import Atom, Row, leaves, length, root
from shardlib.modules.dim_trace import Dimensions, ParameterUse
from shardlib.modules.rules import Suggested

__all__ = ["RoleLayouts", "assign", "deep", "kinds", "patterns", "role_names", "widening_names"]

MATRIX = {
    ("inner", "residual"): "expand",
    ("residual", "inner"): "contract",
    ("residual", "residual"): "plain",
    ("whole", "residual"): "scores",
    ("inner", "whole"): "lift",
    ("whole", "inner"): "drop",
    ("residual", "whole"): "land",
    ("whole", "whole"): "whole",
}


@dataclass(frozen=True)
class RoleLayouts:
    """Layouts that a recipe gives to the roles of parameters.

    ``layouts``   role -> (matrix stored (out, in), vector, layout of the products).
    ``sizes``     mesh axis -> size.
    ``residual``  axes that split the residual stream's features.
    ``inner``     axes that split heads and widths.
    ``wide``      axes that split MLPs, if different.
    ``widest``    a matrix counts as contracting only if it has more inputs than outputs.
    ``apart``     rows of activations have another layout where features are inner.
    ``pad``       split a vocabulary that does not divide, since its rows will be padded.
    """

    layouts: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    residual: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    wide: tuple[str, ...] | None = None
    widest: bool = False
    apart: bool = False
    pad: bool = False

    def ways(self, axes: Iterable[str]) -> int:
        """Count the blocks of a split over these axes."""
        return math.prod(self.sizes[a] for a in axes)


@dataclass
class _Found:
    """Kinds of atoms, and parameters that were left whole."""

    dims: Dimensions
    kind: dict[int, str] = field(default_factory=dict)
    mlp: set[int] = field(default_factory=set)
    vocabulary: set[int] = field(default_factory=set)
    pad: bool = False
    # (parameter, dimension) left whole -> why
    left: dict[tuple[str, int], str] = field(default_factory=dict)

    def of(self, row: Iterable[Atom]) -> str:
        """Return the kind of a dimension: the most splittable kind among its atoms."""
        every = {self.kind.get(id(a), "") for a in deep(row)}
        return next((k for k in ("inner", "residual", "") if k in every), "whole")

    def put(self, row: Iterable[Atom], kind: str, over: tuple[str, ...] = ("",)) -> None:
        for a in deep(row):
            if self.kind.get(id(a), "") in over:
                self.kind[id(a)] = kind

    def row(self, name: str, dims: Sequence[int]) -> Row:
        return [a for d in dims for a in self.dims.params[name][d]]


def deep(row: Iterable[Atom]) -> list[Atom]:
    """List every atom of a row; an atom that was sliced is replaced by its parts."""
    out = []
    for a in leaves(row):
        out += deep(a.parts) if a.parts else [a]
    return out


def kinds(dims: Dimensions) -> _Found:
    """Classify atoms as residual or inner, independently of a mesh.

    >>> from shardlib.modules.dim_trace import trace_dimensions
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> found = kinds(trace_dimensions(mlp))
    >>> [found.of(found.dims.params[n][0]) for n in ("0.weight", "2.weight")]
    ['inner', 'residual']
    """
    found = _Found(dims)
    products = [r for r in dims.reads if r.kind == "product" and r.inputs and r.outputs]
    into, outof = dict[int, set[int]](), dict[int, set[int]]()
    for at, r in enumerate(products):
        for a in deep(found.row(r.name, r.inputs)):
            into.setdefault(id(a), set()).add(at)
        for a in deep(found.row(r.name, r.outputs)):
            outof.setdefault(id(a), set()).add(at)
    looked = {
        id(a) for r in dims.reads if r.kind == "lookup" for a in deep(found.row(r.name, r.inputs))
    }
    every = [a for rows in dims.params.values() for row in rows for a in deep(row)]
    every += [a for row in dims.sources for a in deep(row)]
    rows = [deep(row) for rows in dims.params.values() for row in rows]
    beside = {id(a) for row in rows if any("heads" in a.seen for a in row) for a in row}
    for a in every:
        if "bound" in a.seen:
            found.kind[id(a)] = "whole"
        elif "heads" in a.seen:
            found.kind[id(a)] = "inner"
        elif "embedded" in a.seen or (
            "normed" in a.seen and min(len(into.get(id(a), ())), len(outof.get(id(a), ()))) > 1
        ):
            found.kind[id(a)] = "residual"
        elif "across" in a.seen and id(a) in beside:
            found.kind[id(a)] = "whole"
    for row in dims.sources:
        found.put(row, "residual")
    for r in dims.reads:
        if r.kind == "conv":
            if r.groups == 1:
                found.put(found.row(r.name, r.outputs), "residual")
            continue
        if r.kind != "product" or not r.inputs or not r.outputs:
            continue
        ins, outs = found.row(r.name, r.inputs), found.row(r.name, r.outputs)
        found.put(ins, "residual")
        if found.of(outs):
            continue
        atoms = deep(outs)
        if found.of(ins) == "inner":
            found.put(outs, "residual")
        elif any(id(a) in into for a in atoms):
            normed = any("normed" in a.seen for a in atoms)
            found.put(outs, "residual" if normed and length(outs) <= length(ins) else "inner")
        else:  # an output of the module: a vocabulary, or a few scores
            vocabulary = length(outs) > length(ins) or any(id(a) in looked for a in atoms)
            found.put(outs, "inner" if vocabulary else "whole")
            if vocabulary and len(atoms) == 1:
                found.vocabulary.add(id(atoms[0]))
    for r in products:
        ins, outs = found.row(r.name, r.inputs), found.row(r.name, r.outputs)
        if found.of(ins) == found.of(outs) == "inner":  # the narrower side is an intermediate step
            found.put(min(ins, outs, key=length), "residual", ("inner",))
    for r in products:
        ins, outs = found.row(r.name, r.inputs), found.row(r.name, r.outputs)
        if found.of(ins) == "inner" and found.of(outs) == "residual" and length(ins) > length(outs):
            found.mlp |= {id(a) for a in deep(ins) if "heads" not in a.seen}
    mixed = {
        id(a) for rows in dims.params.values() for row in rows if _headed(row) for a in deep(row)
    }
    found.mlp -= mixed
    return found


def _uses(dims: Dimensions) -> dict[str, ParameterUse]:
    """Map parameters to the use that decides their role: a lookup, a product, or a convolution."""
    uses: dict[str, ParameterUse] = {}
    for wanted in ("lookup", "product", "conv"):
        for r in dims.reads:
            if r.kind == wanted and r.inputs and r.outputs:
                uses.setdefault(r.name, r)
    return uses


def role_names(model: nn.Module, dims: Dimensions) -> dict[str, str]:
    """Map the parameters that a run multiplies with or looks up to the names of their roles."""
    found, tokens, out = kinds(dims), _tokens(dims, model), {}
    for name, r in _uses(dims).items():
        if r.kind == "product":
            ins, outs = (found.of(found.row(name, d)) or "whole" for d in (r.inputs, r.outputs))
            out[name] = MATRIX.get((outs, ins), "expand")
        else:
            out[name] = "patch" if r.kind == "conv" else "tokens" if name in tokens else "positions"
    return out


def widening_names(dims: Dimensions) -> list[str]:
    """List the parameters whose product reads or gives the wide dimension of an MLP."""
    found = kinds(dims)
    rows = (
        (r, found.row(r.name, [*r.inputs, *r.outputs])) for r in dims.reads if r.kind == "product"
    )
    return [r.name for r, row in rows if found.mlp & {id(a) for a in deep(row)}]


def _headed(row: Row) -> bool:
    return any("heads" in a.seen for a in deep(row))


# ---------------------------------------------------------------- positions


class _Unsaid(Exception):
    """Error for a split that no layout can express."""


def _runs(
    found: _Found, row: Iterable[Atom], kind: str
) -> tuple[int, list[tuple[int, int, Atom | None]], int]:
    """Return (positions before, adjacent atoms of a kind, positions after)."""
    atoms = leaves(row)
    has = [found.of([a]) == kind for a in atoms]
    first = has.index(True)
    last = first + 1
    if not atoms[first].parts:
        while last < len(atoms) and has[last] and not atoms[last].parts:
            last += 1
    size = length(atoms[first:last])
    cut = atoms[first] if atoms[first].parts else None
    return length(atoms[:first]), [(size, last - first, cut)], length(atoms[last:])


def _held(found: _Found, row: Iterable[Atom], kind: str, p: int) -> list[list[tuple[int, int]]]:
    """List the ranges that each rank holds of a dimension split over ``p`` in atoms of a kind."""
    row = list(row)
    if found.of(row) != kind:
        raise _Unsaid
    before, ((size, _, cut),), after = _runs(found, row, kind)
    if cut is None:
        if size % p:
            raise _Unsaid
        each = size // p
        inside = [[(r * each, (r + 1) * each)] for r in range(p)]
    else:
        inside, start = [[] for _ in range(p)], 0
        for part in cut.parts or ():
            for mine, ranges in zip(inside, _held(found, [part], kind, p), strict=True):
                mine += [(start + a, start + b) for a, b in ranges]
            start += root(part).size
    if before * max(len(r) for r in inside) > 4096:
        raise _Unsaid
    return [
        list(
            joined(
                ((i * size + a) * after, (i * size + b) * after)
                for i in range(before)
                for a, b in ranges
            )
        )
        for ranges in inside
    ]


def spell(found: _Found, row: Iterable[Atom], kind: str, axes: Sequence[str], p: int) -> str:
    """Write the token that splits a dimension's atoms of one kind over axes.

    Raises: _Unsaid.
    """
    if not axes:
        return "."
    row = list(row)
    alone = deep(row)
    if found.pad and len(alone) == 1 and id(alone[0]) in found.vocabulary and length(row) % p:
        return _token(axes)
    held = _held(found, row, kind, p)
    if p > 1:
        return str(said(axes, held, length(row)))
    # write an axis of size one where a longer one would be
    before, ((_, _, cut),), _ = _runs(found, row, kind)
    sizes = {root(a).size for a in cut.parts or ()} if cut is not None else set()
    groups = before * (len(cut.parts or ()) if cut is not None and len(sizes) == 1 else 1)
    if len(sizes) > 1:
        return str(Dim(tuple(axes), f"runs; 0:{length(row)}"))
    return str(Dim((groups, *axes) if groups > 1 else tuple(axes)))


def _token(axes: Sequence[str]) -> str:
    return f"({' '.join(axes)})" if len(axes) > 1 else axes[0] if axes else "."


# ---------------------------------------------------------------- assignment of layouts


def assign(
    model: nn.Module, dims: Dimensions, way: RoleLayouts
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Find the layout of every parameter; return also the ones left whole, and why.

    Layouts of products are included where several are valid.
    """
    found = kinds(dims)
    found.pad = way.pad
    uses = _uses(dims)
    _settle(found, uses, way)
    texts: dict[str, tuple[str, ...]] = {}
    tokens = _tokens(dims, model)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    recurrent = {
        f"{n}.{k}".lstrip(".")
        for n, m in model.named_modules()
        if isinstance(m, nn.RNNBase | nn.RNNCellBase)
        for k, _ in m.named_parameters(recurse=False)
    }
    for name, rows in dims.params.items():
        r = uses.get(name)
        if name in recurrent:
            texts[name] = ("...",)
        elif r is None or r.kind == "conv":
            texts[name] = (_by_dimension(found, name, rows, way, r),)
        elif r.kind == "lookup":
            texts[name] = (_table(found, name, way, name in tokens),)
        else:
            texts[name] = _matrix(found, r, way, shapes[name])
    untouched = {
        n
        for n, rows in dims.params.items()
        if n not in uses and all(_bare(a) for row in rows for a in row)
    }
    # a parameter that the run did not reach gets the layout of its equal in another layer
    for name in untouched:
        like = next((n for n in texts if n not in untouched and _stars(n) == _stars(name)), None)
        if like is not None and shapes[like] == shapes[name]:
            texts[name] = texts[like]
    left = {}
    for (name, d), why in found.left.items():
        left.setdefault(name, f"dimension {d} of {list(shapes[name])}: {why}")
    return texts, left


def _bare(a: Atom) -> bool:
    return a.parent is None and a.factors is None and a.parts is None and not a.seen


def _tokens(dims: Dimensions, model: nn.Module) -> set[str]:
    """List the vocabulary's tables: tied to a matrix, or the first looked up by integer inputs."""
    looked = list(dict.fromkeys(r.name for r in dims.reads if r.kind == "lookup"))
    given = list(dict.fromkeys(r.name for r in dims.reads if r.kind == "lookup" and r.given))
    tied = {r.name for r in dims.reads if r.kind == "product"}
    return {n for n in looked if n in tied} or set((given or (looked if dims.numbers else []))[:1])


def _axes(found: _Found, row: Row, way: RoleLayouts) -> tuple[str, ...]:
    """List the axes that split the inner atoms of a row."""
    if way.wide is not None and any(id(a) in found.mlp for a in deep(row)):
        return way.wide
    return way.inner


def _settle(found: _Found, uses: Mapping[str, ParameterUse], way: RoleLayouts) -> None:
    """Mark as whole what no layout can express, until nothing changes."""
    changed = True
    while changed:
        before = dict(found.kind)
        for name, rows in found.dims.params.items():
            for d, row in enumerate(rows):
                for kind in ("inner", "residual"):
                    if found.of(row) == kind or any(found.of([a]) == kind for a in deep(row)):
                        _settle_row(found, name, d, row, kind, way, uses.get(name))
        for r in found.dims.reads:
            if r.kind == "product" and r.inputs and r.outputs:
                _settle_product(found, r, way)
        changed = found.kind != before


def _settle_row(
    found: _Found,
    name: str,
    d: int,
    row: Row,
    kind: str,
    way: RoleLayouts,
    use: ParameterUse | None,
) -> None:
    axes = _axes(found, row, way) if kind == "inner" else way.residual
    p = way.ways(axes)
    if use is not None and use.kind == "product" and d not in use.inputs + use.outputs:
        return  # the expert dimension of a stack
    if use is not None and use.kind == "lookup" and d in use.inputs:
        return  # a vocabulary, whose split affects its table alone
    try:
        token = spell(found, row, kind, axes, p)
    except _Unsaid:
        if length(row) == 1:
            return
        atoms = [a for a in leaves(row) if found.of([a]) == kind]
        if (
            kind == "inner"
            and all("heads" in a.seen and not a.parts for a in atoms)
            and _shared(found, row, p)
        ):
            return  # fewer heads of keys than ranks: only keys and values stay whole
        why, mine = f"{_text(row)} has no even split over {p}", {id(a) for a in deep(row)}
        for other, rows in found.dims.params.items() if mine & found.vocabulary else ():
            for at, theirs in enumerate(rows):
                if mine & {id(a) for a in deep(theirs)}:
                    found.left.setdefault(
                        (other, at), f"{why}; sl.parallelize(..., pad=True) pads it"
                    )
        found.left.setdefault((name, d), why)
        found.put(row, "whole", (kind,))
        return
    strict = use is not None and use.kind == "product" and d in use.inputs
    if (kind == "residual" or strict) and p > 1 and token != _token(axes):
        if kind == "residual" and use is not None and d in use.outputs:
            return
        found.left.setdefault((name, d), f"{_text(row)} is cut where it is split")
        found.put(row, "whole", (kind,))


def _shared(found: _Found, row: Row, p: int) -> bool:
    """Check whether other rows contain these heads and can be split."""
    mine = {id(a) for a in leaves(row)}
    for rows in found.dims.params.values():
        for other in rows:
            if mine & {id(a) for a in leaves(other)} and found.of(other) == "inner":
                try:
                    _held(found, other, "inner", p)
                except _Unsaid:
                    continue
                return True
    return False


def _text(row: Row) -> str:
    return "(" + " ".join(map(repr, leaves(row))) + ")"


def _settle_product(found: _Found, r: ParameterUse, way: RoleLayouts) -> None:
    ins, outs = found.row(r.name, r.inputs), found.row(r.name, r.outputs)
    one, two = found.of(ins), found.of(outs)
    split = {"residual": way.ways(way.residual), "inner": way.ways(way.inner), "whole": 1, "": 1}
    crossing = {k for a in r.rows if split[k := found.of([a])] > 1}
    if crossing and (split[one] > 1 or split[two] > 1):
        # an axis would split both the rows' features and this product's own dimensions
        why = (
            f"its rows are split too, as {_text([a for a in r.rows if found.of([a]) in crossing])}"
        )
        for side, dims in ((ins, r.inputs), (outs, r.outputs)):
            found.left.setdefault((r.name, dims[0]), why)
            found.put(side, "whole", ("inner", "residual"))
    if not way.apart:
        return
    everything = [row for rows in found.dims.params.values() for row in rows]
    headed = {id(a) for row in everything if found.of(row) == "inner" for a in leaves(row)}
    if two == "inner" and one == "whole" and not _dropped(found, ins):
        found.left.setdefault((r.name, r.outputs[0]), "what it reads is whole")
        found.put(outs, "whole", ("inner",))
    elif one == "residual" and two == "whole" and headed & {id(a) for a in leaves(outs)}:
        shared = {id(a) for a in leaves(outs)}
        for name, rows in found.dims.params.items():
            for d, row in enumerate(rows):
                if found.of(row) == "inner" and shared & {id(a) for a in leaves(row)}:
                    found.left.setdefault((name, d), f"{r.name} has too few heads to split")
                    found.put(row, "whole", ("inner",))


def _dropped(found: _Found, row: Row) -> bool:
    """Check whether all products with this output contract inner features."""
    mine = {id(a) for a in deep(row)}
    products = [r for r in found.dims.reads if r.kind == "product" and r.outputs and r.inputs]
    makers = [r for r in products if mine & {id(a) for a in deep(found.row(r.name, r.outputs))}]
    return bool(makers) and all(found.of(found.row(r.name, r.inputs)) == "inner" for r in makers)


def _side(found: _Found, row: Row, way: RoleLayouts) -> str:
    """Return the kind of a dimension, "whole" if no layout can express its split."""
    kind = found.of(row) or "whole"
    axes = _axes(found, row, way) if kind == "inner" else way.residual if kind == "residual" else ()
    try:
        if kind != "whole":
            spell(found, row, kind, axes, way.ways(axes))
    except _Unsaid:
        return "whole"
    return kind


def _matrix(
    found: _Found, r: ParameterUse, way: RoleLayouts, shape: tuple[int, ...]
) -> tuple[str, ...]:
    ins, outs = found.row(r.name, r.inputs), found.row(r.name, r.outputs)
    into, out = _side(found, ins, way), _side(found, outs, way)
    if into == out == "inner":
        into = "whole"
    role = MATRIX[out, into]
    wide = way.wide is not None and role in ("expand", "contract")
    if wide and any(id(a) in found.mlp for a in deep(outs if role == "expand" else ins)):
        role = "up" if role == "expand" else "down"
    if role == "contract" and way.widest and length(ins) <= length(outs):
        role = "expand"
    if (
        role == "contract"
        and out == "residual"
        and spell(found, outs, out, way.residual, way.ways(way.residual))
        not in (_token(way.residual), ".")
    ):
        role = "plain"
    text, _, *more = way.layouts[role]
    parsed = Layout.parse(text).resolve(2).dims
    texts = ["."] * len(shape)
    (o,), (i,) = r.outputs[:1], r.inputs[:1]
    out_axes, in_axes = parsed[0].axes, parsed[1].axes
    owns = (
        (way.residual if out == "residual" else _axes(found, outs, way)) if out != "whole" else ()
    )
    if out_axes and tuple(out_axes) == tuple(owns):
        texts[o] = spell(found, outs, out, out_axes, way.ways(out_axes))
    else:
        texts[o] = _fitting(out_axes, shape[o], way)
    texts[i] = _fitting(in_axes, shape[i], way)
    return (" ".join(texts), *more)


def _fitting(axes: Sequence[str], n: int, way: RoleLayouts) -> str:
    """Return as many of the axes, from the major one on, as divide ``n``."""
    axes = list(axes)
    while axes and n % way.ways(axes):
        axes.pop()
    return _token(axes)


def _table(found: _Found, name: str, way: RoleLayouts, tokens: bool) -> str:
    vocabulary, features = found.dims.params[name]
    n, width = length(vocabulary), length(features)
    kind = _side(found, features, way)
    if kind == "inner":
        axes = _axes(found, features, way)
        return f". {spell(found, features, kind, axes, way.ways(axes))}"
    rows, cols = Layout.parse(way.layouts["tokens" if tokens else "positions"][0]).resolve(2).dims
    if kind == "whole" and way.residual:
        return ". ."
    split = _token(rows.axes) if way.pad and tokens else _fitting(rows.axes, n, way)
    if tokens and split != _token(rows.axes):
        why = (
            f"{n} rows have no even split over {way.ways(rows.axes)}; "
            "sl.parallelize(..., pad=True) pads them"
        )
        found.left.setdefault((name, 0), why)
    return f"{split} {_fitting(cols.axes, width, way)}"


def _by_dimension(
    found: _Found, name: str, rows: Sequence[Row], way: RoleLayouts, use: ParameterUse | None
) -> str:
    texts = []
    taken: set[str] = set()
    for row in rows:
        kind = _side(found, row, way)
        axes = (
            _axes(found, row, way)
            if kind == "inner"
            else way.residual
            if kind == "residual"
            else ()
        )
        if taken & set(axes) or not axes:
            texts.append(".")
            continue
        texts.append(spell(found, row, kind, axes, way.ways(axes)))
        taken |= set(axes)
    return " ".join(texts)


# ---------------------------------------------------------------- patterns


def _stars(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def patterns(
    texts: Mapping[str, tuple[str, ...]],
    ndim: Mapping[str, int],
    padded: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Suggested]:
    """Write few equivalent rules: layer numbers become ``*`` where all layouts are equal.

    ``padded``  the layouts for ``pad=True`` in ``parallelize``.

    >>> patterns({"h.0.a": ("x",), "h.1.a": ("x",), "h.0.b.0": ("x",), "h.0.b.2": (".",)}, {})
    [('h.*.a', 'x'), ('h.*.b.0', 'x'), ('h.*.b.2', '.')]
    """

    def shortened(given: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {n: (_short(text[0], ndim.get(n, 0)), *text[1:]) for n, text in given.items()}

    plain, otherwise = shortened(texts), shortened(padded or {})
    said = {n: (text, otherwise.get(n, text)) for n, text in plain.items()}
    rules: list[Suggested] = []
    compiled: dict[str, list[str]] = {}

    def matching(pattern: str) -> list[str]:
        if pattern not in compiled:
            glob = re.compile(".*".join(map(re.escape, pattern.split("*"))) + r"\Z", re.S)
            compiled[pattern] = [n for n in said if glob.match(n)]
        return compiled[pattern]

    done: set[str] = set()
    for name in said:
        if name in done:
            continue
        for pattern in _candidates(name):
            hits = matching(pattern)
            if all(said[n] == said[name] for n in hits):
                rules.append(Suggested((pattern, *plain[name]), (pattern, *said[name][1])))
                done.update(hits)
                break
    return rules


def _candidates(name: str) -> Iterable[str]:
    """List a name's forms with stars for all its numbers, then for fewer, the last kept first."""
    words = name.split(".")
    numbers = [i for i, w in enumerate(words) if w.isdigit()]
    if len(numbers) > 6:
        numbers = numbers[:6]
    for count in range(len(numbers), -1, -1):
        for chosen in itertools.combinations(numbers, count):
            yield ".".join(
                "*" if i in chosen else re.sub(r"([*?[])", r"[\1]", w) for i, w in enumerate(words)
            )


def _short(text: str, ndim: int) -> str:
    """Write ``...`` for a tensor of several dimensions that is whole."""
    return "..." if ndim > 1 and set(text.split()) == {"."} else text
