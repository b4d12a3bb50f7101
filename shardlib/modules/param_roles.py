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

import fnmatch
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from torch import nn

from shardlib.layouts import Dim, Layout
from shardlib.layouts.dims import joined, said
from shardlib.modules.dim_factors import Atom, Row, common, leaves, length, root
from shardlib.modules.dim_trace import Dimensions, ParameterUse
from shardlib.modules.rules import Suggested, stars

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


Texts = Mapping[str, tuple[str, ...]]
"""Parameter, or role -> the text of its layout, and of its products' if that is not plain."""


@dataclass(frozen=True)
class RoleLayouts:
    """Layouts that a recipe gives to the roles of parameters.

    ``layouts``   role -> (of the matrix, stored (out, in), and, if not plain, of the products).
    ``sizes``     mesh axis -> size.
    ``residual``  axes that split the residual stream's features.
    ``inner``     axes that split heads and widths.
    ``wide``      axes that split MLPs, if different.
    ``widest``    a matrix counts as contracting only if it has more inputs than outputs.
    ``apart``     rows of activations have another layout where features are inner.
    ``pad``       split a vocabulary that does not divide, since its rows will be padded.
    """

    layouts: Texts
    residual: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    wide: tuple[str, ...] | None = None
    widest: bool = False
    apart: bool = False
    pad: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)

    def ways(self, axes: Iterable[str]) -> int:
        """Count the blocks of a split over these axes."""
        return math.prod(self.sizes[a] for a in axes)


@dataclass
class _Found:
    """Kinds of atoms, and parameters that were left whole for the layouts of ``way``."""

    dims: Dimensions
    kind: dict[int, str] = field(default_factory=dict)
    mlp: set[int] = field(default_factory=set)
    vocabulary: set[int] = field(default_factory=set)
    way: RoleLayouts = RoleLayouts({})
    # (parameter, dimension) left whole -> why
    left: dict[tuple[str, int], str] = field(default_factory=dict)

    def of(self, row: Iterable[Atom]) -> str:
        """Return the kind of a dimension: the most splittable kind among its atoms."""
        every = {self.kind.get(id(a), "") for a in deep(row)}
        return next((k for k in ("inner", "residual", "") if k in every), "whole")

    def axes(self, row: Row, kind: str) -> tuple[str, ...]:
        """Return the axes that split the atoms of a kind in a row."""
        if kind == "inner" and self.way.wide is not None and self.mlp & ids(row):
            return self.way.wide
        return {"inner": self.way.inner, "residual": self.way.residual}.get(kind, ())

    def put(self, row: Iterable[Atom], kind: str, over: tuple[str, ...] = ("",)) -> None:
        for a in deep(row):
            if self.kind.get(id(a), "") in over:
                self.kind[id(a)] = kind

    def leave(
        self, name: str, d: int, why: str, row: Row, over: tuple[str, ...] = ("inner", "residual")
    ) -> None:
        """Leave a parameter's dimension whole, and mark the atoms of a row as whole."""
        self.left.setdefault((name, d), why)
        self.put(row, "whole", over)

    def row(self, name: str, dims: Sequence[int]) -> Row:
        return [a for d in dims for a in self.dims.params[name][d]]

    def sides(self, use: ParameterUse) -> tuple[Row, Row]:
        """Return the dimensions of a parameter that a use contracts, and those that it keeps."""
        return self.row(use.name, use.inputs), self.row(use.name, use.outputs)

    @property
    def products(self) -> list[tuple[ParameterUse, Row, Row]]:
        """All products, with what each contracts and what it keeps."""
        return [(r, *self.sides(r)) for r in self.dims.products]

    @property
    def rows(self) -> list[tuple[str, int, Row]]:
        """All dimensions of parameters: (name, dimension, atoms)."""
        return [(n, d, row) for n, rows in self.dims.params.items() for d, row in enumerate(rows)]


def deep(row: Iterable[Atom]) -> list[Atom]:
    """List every atom of a row; an atom that was sliced is replaced by its parts."""
    out = []
    for a in leaves(row):
        out += deep(a.parts) if a.parts else [a]
    return out


def ids(row: Iterable[Atom]) -> set[int]:
    """Return the identities of a row's atoms."""
    return {id(a) for a in deep(row)}


def kinds(dims: Dimensions) -> _Found:
    """Classify atoms as residual or inner, independently of a mesh.

    >>> from shardlib.modules.dim_trace import trace_dimensions
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> found = kinds(trace_dimensions(mlp))
    >>> [found.of(found.dims.params[n][0]) for n in ("0.weight", "2.weight")]
    ['inner', 'residual']
    """
    found = _Found(dims)
    heads = [row for _, _, row in found.rows if any("heads" in a.seen for a in deep(row))]
    headed = ids(itertools.chain(*heads))
    _classify_marked(found, headed)
    for row in dims.sources:
        found.put(row, "residual")
    _classify_outputs(found)
    for _, ins, outs in found.products:
        if found.of(ins) == found.of(outs) == "inner":
            # the narrower side is an intermediate step
            found.put(min(ins, outs, key=length), "residual", ("inner",))
    for _, ins, outs in found.products:
        if (found.of(ins), found.of(outs)) == ("inner", "residual") and length(ins) > length(outs):
            found.mlp |= ids(ins) - headed
    return found


def _classify_marked(found: _Found, headed: set[int]) -> None:
    """Classify atoms by what operators other than products did with them."""
    into, outof = Counter[int](), Counter[int]()  # numbers of products
    for _, ins, outs in found.products:
        into.update(ids(ins))
        outof.update(ids(outs))
    for row in [*(row for _, _, row in found.rows), *found.dims.sources]:
        for a in deep(row):
            stream = min(into[id(a)], outof[id(a)]) > 1
            kind = _marked(a, stream, id(a) in headed)
            if kind:
                found.kind[id(a)] = kind


def _marked(a: Atom, stream: bool, headed: bool) -> str:
    """Return the kind that an atom's marks decide, or "".

    ``stream``  several products read it and several give it.
    ``headed``  it is in a dimension of heads.
    """
    if "bound" in a.seen:
        return "whole"
    if "heads" in a.seen:
        return "inner"
    if "embedded" in a.seen or ("normed" in a.seen and stream):
        return "residual"
    return "whole" if "across" in a.seen and headed else ""


def _classify_outputs(found: _Found) -> None:
    """Classify what products and convolutions give, in the order of the run."""
    read = _contracted(found, found.dims.products)
    looked = _contracted(found, found.dims.lookups)
    for r in found.dims.reads:
        ins, outs = found.sides(r)
        if r.kind == "conv" and r.groups == 1:
            found.put(outs, "residual")
        if not r.multiplies:
            continue
        found.put(ins, "residual")
        if not found.of(outs):
            kind = _kind_of_output(found, ins, outs, read, looked)
            found.put(outs, kind)
            if kind == "inner" and not ids(outs) & read and len(deep(outs)) == 1:
                found.vocabulary |= ids(outs)


def _contracted(found: _Found, uses: Iterable[ParameterUse]) -> set[int]:
    """Return the atoms that these uses contract or look up."""
    return {i for r in uses for i in ids(found.row(r.name, r.inputs))}


def _kind_of_output(found: _Found, ins: Row, outs: Row, read: set[int], looked: set[int]) -> str:
    """Return the kind of what a product gives, by its input and by the products that read it."""
    if found.of(ins) == "inner":
        return "residual"
    wider = length(outs) > length(ins)
    if ids(outs) & read:
        normed = any("normed" in a.seen for a in deep(outs))
        return "residual" if normed and not wider else "inner"
    # an output of the module: a vocabulary, or a few scores
    return "inner" if wider or ids(outs) & looked else "whole"


def _uses(dims: Dimensions) -> dict[str, ParameterUse]:
    """Map parameters to the use that decides their role: a lookup, a product, or a convolution."""
    uses: dict[str, ParameterUse] = {}
    for wanted in ("lookup", "product", "conv"):
        for r in dims.reads:
            if r.kind == wanted and r.inputs and r.outputs:
                uses.setdefault(r.name, r)
    return uses


def role_names(dims: Dimensions) -> dict[str, str]:
    """Map the parameters that a run multiplies with or looks up to the names of their roles."""
    found, out = kinds(dims), _tables(dims)
    for name, r in _uses(dims).items():
        if r.kind == "product":
            ins, outs = (found.of(side) or "whole" for side in found.sides(r))
            out[name] = MATRIX.get((outs, ins), "expand")
        elif r.kind == "conv":
            out[name] = "patch"
    return out


def widening_names(dims: Dimensions) -> list[str]:
    """List the parameters whose product reads or gives the wide dimension of an MLP."""
    found = kinds(dims)
    products = [r for r in dims.reads if r.kind == "product"]
    return [r.name for r in products if found.mlp & ids(itertools.chain(*found.sides(r)))]


# ---------------------------------------------------------------- positions


_PADS = "sl.parallelize(..., pad=True) pads"


class _Unsaid(Exception):
    """Error for a split that no layout can express."""


def _run_of(found: _Found, row: Iterable[Atom], kind: str) -> tuple[int, int, Row, int]:
    """Find the first adjacent atoms of a kind: (positions before, their size, parts, after).

    ``parts``  those of the atom, where it is one that was sliced.
    """
    atoms = leaves(row)
    has = [found.of([a]) == kind for a in atoms]
    first = has.index(True)
    last = first + 1
    parts = atoms[first].parts or []
    while not parts and last < len(atoms) and has[last] and not atoms[last].parts:
        last += 1
    return length(atoms[:first]), length(atoms[first:last]), parts, length(atoms[last:])


def _held(found: _Found, row: Row, kind: str, p: int) -> list[list[tuple[int, int]]]:
    """List the ranges that each rank holds of a dimension split over ``p`` in atoms of a kind."""
    if found.of(row) != kind:
        raise _Unsaid
    before, size, parts, after = _run_of(found, row, kind)
    inside: list[list[tuple[int, int]]] = [[] for _ in range(p)]
    start = 0
    for part in parts:  # each of which is split
        for mine, ranges in zip(inside, _held(found, [part], kind, p), strict=True):
            mine += [(start + a, start + b) for a, b in ranges]
        start += root(part).size
    if not parts:
        if size % p:
            raise _Unsaid
        inside = [[(r * size // p, (r + 1) * size // p)] for r in range(p)]
    if before * max(len(r) for r in inside) > 4096:
        raise _Unsaid
    starts = [i * size for i in range(before)]
    return [
        list(joined(((i + a) * after, (i + b) * after) for i in starts for a, b in ranges))
        for ranges in inside
    ]


def _split(found: _Found, row: Row, kind: str) -> Dim | None:
    """Return the token of a dimension split in its atoms of a kind; None if there is none."""
    axes = found.axes(row, kind)
    if not axes:
        return Dim()
    p = found.way.ways(axes)
    # a vocabulary is one atom
    if found.way.pad and length(row) % p and ids(row) <= found.vocabulary and len(deep(row)) == 1:
        return Dim(axes)
    try:
        held = _held(found, row, kind, p)
    except _Unsaid:
        return None
    return said(axes, held, length(row)) if p > 1 else _as_if_split(found, row, kind, axes)


def _as_if_split(found: _Found, row: Row, kind: str, axes: tuple[str, ...]) -> Dim:
    """Return the token that has axes of size one where longer ones would be."""
    before, _, parts, _ = _run_of(found, row, kind)
    if len({root(a).size for a in parts}) > 1:
        return Dim(axes, f"runs; 0:{length(row)}")
    groups = before * (len(parts) or 1)
    return Dim((groups, *axes) if groups > 1 else axes)


# ---------------------------------------------------------------- assignment of layouts


def assign(
    model: nn.Module, dims: Dimensions, way: RoleLayouts
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Find the layout of every parameter; return also the ones left whole, and why.

    Layouts of products are included where several are valid.
    """
    found = kinds(dims)
    found.way = way
    uses = _uses(dims)
    _settle(found, uses)
    tables, recurrent = _tables(dims), _recurrent(model)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    texts: dict[str, tuple[str, ...]] = {}
    for name, rows in dims.params.items():
        r = uses.get(name)
        if name in recurrent:
            texts[name] = ("...",)
        elif r is None or r.kind == "conv":
            texts[name] = (_by_dimension(found, rows),)
        elif r.kind == "lookup":
            texts[name] = (_table(found, name, tables[name]),)
        else:
            texts[name] = _matrix(found, r, shapes[name])
    texts |= {n: texts[like] for n, like in _equals(dims, uses) if shapes[like] == shapes[n]}
    left = {}
    for (name, d), why in found.left.items():
        left.setdefault(name, f"dimension {d} of {list(shapes[name])}: {why}")
    return texts, left


def _equals(dims: Dimensions, uses: Mapping[str, ParameterUse]) -> list[tuple[str, str]]:
    """List the parameters that the run did not read, each with its equal in another layer."""
    atoms = {n: [*itertools.chain(*rows)] for n, rows in dims.params.items() if n not in uses}
    unread = {n for n, row in atoms.items() if all(map(_bare, row))}
    read = {stars(n): n for n in reversed(dims.params) if n not in unread}
    return [(n, read[stars(n)]) for n in unread if stars(n) in read]


def _recurrent(model: nn.Module) -> set[str]:
    """List the parameters of recurrent modules, which stay whole."""
    return {
        f"{n}.{k}".lstrip(".")
        for n, m in model.named_modules()
        if isinstance(m, nn.RNNBase | nn.RNNCellBase)
        for k, _ in m.named_parameters(recurse=False)
    }


def _bare(a: Atom) -> bool:
    return a.parent is None and a.factors is None and a.parts is None and not a.seen


def _tables(dims: Dimensions) -> dict[str, str]:
    """Map tables to their roles: positions; tokens if tied to a matrix, else the first looked up.

    Tables that integer inputs look up come first.
    """
    lookups = [r for r in dims.lookups if r.inputs and r.outputs]
    out = dict.fromkeys((r.name for r in lookups), "positions")
    tied = out.keys() & {r.name for r in dims.reads if r.kind == "product"}
    given = [r.name for r in lookups if r.given]
    first = given or [r.name for r in lookups if dims.numbers]
    return out | dict.fromkeys(tied or first[:1], "tokens")


def _settle(found: _Found, uses: Mapping[str, ParameterUse]) -> None:
    """Mark as whole what no layout can express, until nothing changes."""
    before: dict[int, str] | None = None
    while found.kind != before:
        before = dict(found.kind)
        for name, d, row in found.rows:
            for kind in ("inner", "residual"):
                if any(found.of(some) == kind for some in (row, *([a] for a in deep(row)))):
                    _settle_row(found, name, d, row, kind, uses.get(name, _UNUSED))
        for r, ins, outs in found.products:
            _settle_crossing(found, r, ins, outs)
            if found.way.apart:
                _settle_apart(found, r, ins, outs)


_UNUSED = ParameterUse("", "", (), ())


def _settle_row(found: _Found, name: str, d: int, row: Row, kind: str, use: ParameterUse) -> None:
    """Mark a dimension as whole if it cannot be split, or not as its use needs it."""
    free = {
        # the expert dimension of a stack
        "product": d not in use.inputs + use.outputs,
        # a vocabulary, whose split affects its table alone
        "lookup": d in use.inputs,
    }
    if free.get(use.kind):
        return
    axes = found.axes(row, kind)
    token = _split(found, row, kind)
    p = found.way.ways(axes)
    if token is None:
        _settle_uneven(found, name, d, row, kind, p)
        return
    if p == 1 or token == Dim(axes):
        return
    contracted = use.kind == "product" and d in use.inputs
    if contracted or (kind == "residual" and d not in use.outputs):
        found.leave(name, d, f"{_text(row)} is cut where it is split", row, (kind,))


def _settle_uneven(found: _Found, name: str, d: int, row: Row, kind: str, p: int) -> None:
    """Mark a dimension as whole that does not divide over ``p`` ranks."""
    if length(row) == 1:
        return
    if kind == "inner" and _shared(found, row):
        # fewer heads of keys than ranks: only keys and values stay whole
        return
    why = f"{_text(row)} has no even split over {p}"
    tied = found.rows if ids(row) & found.vocabulary else []
    for other, at, theirs in tied:
        if ids(row) & ids(theirs):
            found.left.setdefault((other, at), f"{why}; {_PADS} it")
    found.leave(name, d, why, row, (kind,))


def _shared(found: _Found, row: Row) -> bool:
    """Check whether a row is of heads, which other rows contain that can be split."""
    atoms = [a for a in leaves(row) if found.of([a]) == "inner"]
    if any("heads" not in a.seen or a.parts for a in atoms):
        return False
    others = [other for _, _, other in found.rows if common(row, other)]
    return any(found.of(o) == "inner" and _split(found, o, "inner") is not None for o in others)


def _text(row: Row) -> str:
    return "(" + " ".join(map(repr, leaves(row))) + ")"


def _settle_crossing(found: _Found, r: ParameterUse, ins: Row, outs: Row) -> None:
    """Mark a product as whole where an axis would split its own dimensions and its rows' too."""
    way = found.way
    split = {"residual": way.ways(way.residual), "inner": way.ways(way.inner), "whole": 1, "": 1}
    crossing = [a for a in r.rows if split[found.of([a])] > 1]
    if crossing and any(split[found.of(side)] > 1 for side in (ins, outs)):
        why = f"its rows are split too, as {_text(crossing)}"
        found.leave(r.name, r.inputs[0], why, ins)
        found.leave(r.name, r.outputs[0], why, outs)


def _settle_apart(found: _Found, r: ParameterUse, ins: Row, outs: Row) -> None:
    """Mark a product's output as whole where rows would be split otherwise than in its input."""
    ends = found.of(ins), found.of(outs)
    if ends == ("whole", "inner") and not _dropped(found, ins):
        found.leave(r.name, r.outputs[0], "what it reads is whole", outs, ("inner",))
    elif ends == ("residual", "whole"):
        for name, d, row in found.rows:
            if found.of(row) == "inner" and common(row, outs):
                found.leave(name, d, f"{r.name} has too few heads to split", row, ("inner",))


def _dropped(found: _Found, row: Row) -> bool:
    """Check whether all products with this output contract inner features."""
    read = [ins for _, ins, outs in found.products if ids(row) & ids(outs)]
    return bool(read) and all(found.of(ins) == "inner" for ins in read)


def _side(found: _Found, row: Row) -> str:
    """Return the kind of a dimension, "whole" if no layout can express its split."""
    kind = found.of(row) or "whole"
    return "whole" if _split(found, row, kind) is None else kind


def _role(found: _Found, ins: Row, outs: Row, kinds: tuple[str, str]) -> str:
    """Return the role of a matrix whose (output, input) have these kinds, as recipes name it."""
    role = MATRIX[kinds]
    wide, own = {"expand": (outs, "up"), "contract": (ins, "down")}.get(role, ([], role))
    if found.way.wide is not None and found.mlp & ids(wide):
        return own
    if role != "contract":
        return role
    if found.way.widest and length(ins) <= length(outs):
        return "expand"
    even = (Dim(found.way.residual), Dim())
    return role if _split(found, outs, "residual") in even else "plain"


def _matrix(found: _Found, r: ParameterUse, shape: tuple[int, ...]) -> tuple[str, ...]:
    ins, outs = found.sides(r)
    into, out = _side(found, ins), _side(found, outs)
    if into == out == "inner":
        into = "whole"
    text, *more = found.way.layouts[_role(found, ins, outs, (out, into))]
    out_axes, in_axes = (d.axes for d in Layout.parse(text).resolve(2).dims)
    texts = ["."] * len(shape)
    o, i = r.outputs[0], r.inputs[0]
    if out_axes and out_axes == found.axes(outs, out):
        texts[o] = str(_split(found, outs, out))
    else:
        texts[o] = _fitting(found.way, out_axes, shape[o])
    texts[i] = _fitting(found.way, in_axes, shape[i])
    return (" ".join(texts), *more)


def _fitting(way: RoleLayouts, axes: tuple[str, ...], n: int) -> str:
    """Write as many of the axes, from the major one on, as divide ``n``."""
    while axes and n % way.ways(axes):
        axes = axes[:-1]
    return str(Dim(axes))


def _table(found: _Found, name: str, role: str) -> str:
    vocabulary, features = found.dims.params[name]
    n, width = length(vocabulary), length(features)
    kind = _side(found, features)
    if kind == "inner":
        return f". {_split(found, features, kind)}"
    (text,), tokens = found.way.layouts[role], role == "tokens"
    rows, cols = Layout.parse(text).resolve(2).dims
    if kind == "whole" and found.way.residual:
        return ". ."
    wanted = str(Dim(rows.axes))
    split = wanted if found.way.pad and tokens else _fitting(found.way, rows.axes, n)
    if tokens and split != wanted:
        why = f"{n} rows have no even split over {found.way.ways(rows.axes)}; {_PADS} them"
        found.left.setdefault((name, 0), why)
    return f"{split} {_fitting(found.way, cols.axes, width)}"


def _by_dimension(found: _Found, rows: Sequence[Row]) -> str:
    """Write the layout of a vector or of a convolution's weight, dimension by dimension."""
    texts = []
    taken: set[str] = set()
    for row in rows:
        kind = _side(found, row)
        axes = set(found.axes(row, kind))
        texts.append("." if taken & axes else str(_split(found, row, kind)))
        taken |= axes
    return " ".join(texts)


# ---------------------------------------------------------------- patterns


def patterns(texts: Texts, padded: Texts | None = None) -> list[Suggested]:
    """Write few equivalent rules: layer numbers become ``*`` where all layouts are equal.

    ``padded``  the layouts for ``pad=True`` in ``parallelize``.

    >>> patterns({"h.0.a": ("x",), "h.1.a": ("x",), "h.0.b.0": ("x",), "h.0.b.2": (". .",)})
    [('h.*.a', 'x'), ('h.*.b.0', 'x'), ('h.*.b.2', '...')]
    """
    said = {n: (_short(text), _short((padded or texts)[n])) for n, text in texts.items()}
    rules: list[Suggested] = []
    matching = cache(lambda pattern: fnmatch.filter(said, pattern))
    done: set[str] = set()
    for name, layouts in said.items():
        if name in done:
            continue
        alike = (p for p in _candidates(name) if {said[n] for n in matching(p)} == {layouts})
        pattern = next(alike)
        rules.append(Suggested(*((pattern, *text) for text in layouts)))
        done.update(matching(pattern))
    return rules


def _candidates(name: str) -> Iterable[str]:
    """List a name's forms with stars for all its numbers, then for fewer, the last kept first."""
    words = name.split(".")
    numbers = [i for i, w in enumerate(words) if w.isdigit()][:6]
    for count in range(len(numbers), -1, -1):
        for chosen in itertools.combinations(numbers, count):
            yield ".".join(
                "*" if i in chosen else re.sub(r"([*?[])", r"[\1]", w) for i, w in enumerate(words)
            )


def _short(text: tuple[str, ...]) -> tuple[str, ...]:
    """Write ``...`` for a tensor of several dimensions that is whole."""
    tokens = text[0].split()
    return ("...", *text[1:]) if len(tokens) > 1 and set(tokens) == {"."} else text
