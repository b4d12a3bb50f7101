"""Dimension tracing: which dimensions of a module's parameters and activations are the same.

The unmodified module runs once, on tensors of the meta device, under a mode that intercepts every
operator.  Each dimension of a tensor is a row of *atoms*.  An operator that aligns two dimensions
unites their atoms, a view that splits a dimension splits its atom into factors, major first, and
slicing splits the atom into parts.  Since an atom is shared, uses of an activation are also known
of the weight that made it.  So a weight of query, key and value is (heads, 3, size) or (3, heads,
size) by the slicing of its output, whatever its name is.
"""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardlib._compat import DispatchMode
from shardlib.errors import Unsupported
from shardlib.layouts.dims import Apart
from shardlib.memory_tracker import tensors_in
from shardlib.modules.apply import needed
from shardlib.modules.dim_factors import (
    Atom,
    Row,
    common,
    fresh,
    join,
    leaves,
    length,
    mark,
    parted,
    piece,
    whole,
)
from shardlib.opspec import Args, Func, Kwargs, names_of

R = TypeVar("R", bound=Callable[..., None])


@dataclass
class ParameterUse:
    """Use of a parameter: in a product, a convolution or a lookup.

    ``inputs``, ``outputs``  its dimensions that are contracted and that stay.
    ``rows``                 the leading atoms of the other operand, an activation.
    ``given``                whether a lookup's ids are integer inputs of the module.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rows: Row = field(default_factory=list)
    groups: int = 1
    given: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a product that contracts some dimensions and keeps others."""
        return self.kind == "product" and bool(self.inputs and self.outputs)


@dataclass
class Dimensions:
    """Dimensions of a module's parameters, and their uses in one run on the meta device.

    ``params``   parameter name -> per dimension its row of atoms.
    ``reads``    their uses, in order.
    ``sources``  features of the module's inputs.
    ``numbers``  dimensions of the integer inputs.
    ``unknown``  operators without a rule.
    """

    params: dict[str, list[Row]]
    reads: list[ParameterUse] = field(default_factory=list)
    sources: list[Row] = field(default_factory=list)
    numbers: list[Row] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    @property
    def products(self) -> list[ParameterUse]:
        """Products with a parameter that contract some of its dimensions and keep others."""
        return [r for r in self.reads if r.multiplies]

    @property
    def lookups(self) -> list[ParameterUse]:
        """Uses of tables that are looked up."""
        return [r for r in self.reads if r.kind == "lookup"]


# aten's names, without underscores around them, as those of the table of operators are
_ALONG = {*names_of(kind="along"), "safe_softmax"}
_POINTWISE = {*names_of(kind="pointwise", ignores=""), "where", "copy"}
_MADE = ("new_", "empty", "zeros", "ones", "full", "rand")


_Origin = tuple[str, tuple[int | None, ...]]
# twice a stride is none of the others
_STRIDE = 1 << 20

_RULES: dict[str, Callable[[Any, "_OpCall", Any], None]] = {}
"""Operator -> its rule; others go by their kind in the table of operators."""


def _rule(names: str) -> Callable[[R], R]:
    """Register a method of the tracer as the rule of these operators."""

    def registered(method: R) -> R:
        _RULES.update(dict.fromkeys(names.split(), method))
        return method

    return registered


class _OpCall:
    """Call of an operator: its operands that are tensors, in order, and all by their names.

    ``x``     the first of them; ``rows``: the atoms of its dimensions.
    """

    def __init__(
        self, func: Func, args: Args, kwargs: Kwargs, of: Callable[[Tensor], list[Row]]
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.operands = tensors_in((args, kwargs))
        takes = {a.name: a.default_value for a in func._schema.arguments}
        self.named = takes | dict(zip(takes, args, strict=False)) | kwargs
        if self.operands:
            self.x = self.operands[0]
            self.rows = list(of(self.x))

    def __getitem__(self, name: str) -> Any:
        """Return an operand; None if the operator has none of this name."""
        return self.named.get(name)

    def dims(self, default: object = None) -> list[int]:
        """List the dimensions of the first operand that the call names; None stands for all."""
        ndim = self.x.ndim
        given = self.named.get("dim", self.named.get("dims", default))
        listed = [given] if isinstance(given, int) else given or range(ndim)
        return [d % ndim for d in listed] if ndim else []

    @property
    def along(self) -> int:
        """The dimension of the first operand that the call is along.

        Raises: Apart if it has no dimensions.
        """
        if not self.x.ndim:
            raise Apart
        return self["dim"] % self.x.ndim


class _DimensionTracer(DispatchMode):  # type: ignore[misc, valid-type]
    """Dispatch mode that intercepts every operator and keeps the atoms of every tensor."""

    def __init__(self, found: Dimensions) -> None:
        super().__init__()
        self.found = found
        self.rows: dict[int, list[Row]] = {}
        # id of a tensor -> its parameter, and the parameter's dimension for each of its own
        self.origin: dict[int, _Origin] = {}
        # keeps tensors alive, so that their ids stay unique
        self.alive: list[Tensor] = []

    def know(self, x: Tensor, rows: Sequence[Row], origin: _Origin | None = None) -> None:
        self.rows[id(x)] = [list(r) for r in rows]
        self.alive.append(x)
        if origin is not None:
            self.origin[id(x)] = origin

    def of(self, x: Tensor) -> list[Row]:
        if id(x) not in self.rows:
            self.know(x, [fresh(n) for n in x.shape])
        return self.rows[id(x)]

    def inputs(self, given: Sequence[Tensor]) -> None:
        """Record the features and the integers among a call's inputs."""
        for x in given:
            if x.is_floating_point() and x.ndim > 1:
                self.found.sources.append(self.of(x)[-1])
            elif not x.is_floating_point() and not x.is_complex():
                self.found.numbers += self.of(x)

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        call = _OpCall(func, args, kwargs or {}, self.of)
        try:
            self.learn(call, out)
        except Apart:
            self.opaque(call, out)
        for x in tensors_in(out):
            if [length(r) for r in self.of(x)] != list(x.shape):
                self.know(x, [fresh(n) for n in x.shape])
        return out

    def learn(self, call: _OpCall, out: object) -> None:
        """Record the dimensions of an operator's results, by its rule or its kind."""
        name = call.func.overloadpacket.__name__.strip("_")
        rule = _RULES.get(name)
        if rule is not None:
            rule(self, call, out)
        elif name in _ALONG and _keeps_shape(call, out):
            self.along(call, out)
        elif torch.Tag.pointwise in call.func.tags or name in _POINTWISE:
            self.pointwise(call, out)
        elif call.func.is_view:
            self.moved(call, out)
        elif call.operands and not name.startswith(_MADE) and self.makes(out):
            self.found.unknown.add(name)
            self.opaque(call, out)

    def makes(self, out: object) -> bool:
        """Check whether any result is a new tensor, and not one that the operator was given."""
        return any(id(y) not in self.rows for y in tensors_in(out))

    def opaque(self, call: _OpCall, out: object) -> None:
        """Give the results of an operator fresh atoms.

        Operands must be whole, except for leading dimensions that stay.
        """
        for x in call.operands:
            for row in self.of(x)[1:]:
                mark(row, "bound")
        for y in tensors_in(out):
            if id(y) not in self.rows:
                self.know(y, [fresh(n, "bound") for n in y.shape])

    def join(self, a: Row, b: Row) -> None:
        """Unite two rows; if they do not fit, mark both as whole."""
        try:
            join(a, b)
        except Apart:
            mark([*a, *b], "bound")

    def align(self, rows: list[Row], shape: Sequence[int], x: Tensor, but: int = 0) -> None:
        """Unite dimensions of ``x`` with those of ``rows`` that broadcasting pairs with them.

        ``but``  a dimension, counted from the last, that is left out.
        """
        mine = self.of(x)
        for d in range(-1, -min(x.ndim, len(shape)) - 1, -1):
            if d == but or x.shape[d] != shape[d] or x.shape[d] == 1:
                continue
            if rows[d]:
                self.join(rows[d], mine[d])
            else:
                rows[d] = list(mine[d])

    # ------------------------------------------------------------ elementwise, and reductions

    @_rule(
        "clone detach alias to_copy contiguous lift_fresh lift native_dropout triu tril flip bernoulli"
    )
    def pointwise(self, call: _OpCall, out: object) -> None:
        for y in tensors_in(out)[:1]:
            rows: list[Row] = [[] for _ in y.shape]
            for x in call.operands:
                self.align(rows, y.shape, x)
            if id(y) in self.rows:
                continue
            rows = [r or fresh(n) for r, n in zip(rows, y.shape, strict=True)]
            self.know(y, rows, self.scaled(call.operands, y))

    def scaled(self, operands: Sequence[Tensor], y: Tensor) -> _Origin | None:
        """Return the parameter that ``y`` is made of, elementwise and with numbers alone."""
        only = [x for x in operands if x.ndim]
        return self.origin.get(id(only[0])) if [x.shape for x in only] == [y.shape] else None

    # its dimensions go as a reduction's do
    @_rule("median")
    @_rule(" ".join(n.replace(".", "_") for n in names_of(kind="reduce")))
    def reduce(self, call: _OpCall, out: object, what: str = "bound") -> None:
        if call["other"] is not None:
            # elementwise maximum of two tensors
            return self.pointwise(call, out)
        rows = dict(enumerate(call.rows))
        gone = call.dims()
        for d in gone:
            mark(rows[d], what)
        kept = {d: r for d, r in rows.items() if d not in gone}
        for y in tensors_in(out):
            if y.ndim == len(rows):
                self.know(y, [kept.get(d, []) for d in rows])
            elif y.ndim == len(kept):
                self.know(y, list(kept.values()))
        return None

    @_rule("mean var var_mean std sum linalg_vector_norm norm std_mean")
    def normed(self, call: _OpCall, out: object) -> None:
        self.reduce(call, out, "normed")

    @_rule("topk")
    def along(self, call: _OpCall, out: object) -> None:
        self.mixed(call, out, call.dims(-1))

    @_rule("constant_pad_nd")
    def pad(self, call: _OpCall, out: Tensor) -> None:
        sizes = enumerate(zip(call.x.shape, out.shape, strict=True))
        self.mixed(call, out, [d for d, (n, m) in sizes if n != m])

    def mixed(self, call: _OpCall, out: object, dims: Sequence[int]) -> None:
        """Give the results the operand's dimensions; positions of ``dims`` depend on each other."""
        for d in dims:
            mark(call.rows[d], "bound")
        for y in tensors_in(out):
            sizes = zip(call.rows, call.x.shape, y.shape, strict=True)
            self.know(y, [r if n == m else fresh(m, "bound") for r, n, m in sizes])

    @_rule("native_layer_norm fused_rms_norm rms_norm")
    def layer_norm(self, call: _OpCall, out: object) -> None:
        for row in call.rows[-len(call["normalized_shape"]) :]:
            mark(row, "normed")
        for w in call.operands[1:]:
            self.align(call.rows, call.x.shape, w)
        self.know(tensors_in(out)[0], call.rows)

    @_rule(
        "native_batch_norm native_batch_norm_legit native_batch_norm_legit_no_training "
        "batch_norm_with_update batch_norm_no_update cudnn_batch_norm native_group_norm"
    )
    def channel_norm(self, call: _OpCall, out: object) -> None:
        """Unite the channels of a batch's or groups' norm with those of its vectors."""
        for w in call.operands[1:]:
            self.join(self.of(w)[0], call.rows[1])
        if call["group"] is not None:
            mark(call.rows[1], "bound")
        self.know(tensors_in(out)[0], call.rows)

    # ------------------------------------------------------------ views and pieces

    @_rule("view unsafe_view reshape reshape_alias view_copy")
    def views(self, call: _OpCall, out: Tensor) -> None:
        flat = [*itertools.chain(*call.rows)]
        rows = []
        try:
            for n in out.shape:
                taken, flat = parted(flat, n)
                rows.append(taken)
        except Apart:
            mark(itertools.chain(*call.rows), "bound")
            rows = [fresh(n, "bound") for n in out.shape]
        self.know(out, rows)
        if id(call.x) in self.origin:
            self.viewed(call.x, out)

    def viewed(self, x: Tensor, out: Tensor) -> None:
        """Record that a view which only adds or drops dimensions of size 1 is of a parameter."""
        name, dims = self.origin[id(x)]
        wide = [(n, d) for n, d in zip(x.shape, dims, strict=True) if n != 1]
        if [n for n, _ in wide] == [n for n in out.shape if n != 1]:
            left = iter(wide)
            at = tuple(None if n == 1 else next(left)[1] for n in out.shape)
            self.origin[id(out)] = (name, at)

    def moved(self, call: _OpCall, out: object) -> None:
        """Follow a view that permutes, adds and drops dimensions, by strides that all differ.

        Raises: Apart for any other view.
        """
        x = call.x
        strides = [_STRIDE + d for d in range(x.ndim)]
        frame = torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta")
        try:
            views = tensors_in(call.func(frame, *call.args[1:], **call.kwargs))
        except RuntimeError as e:
            # view_as_complex and its kin take only some strides
            raise Apart from e
        for y, view in zip(tensors_in(out), views, strict=True):
            left = {s: d for d, s in enumerate(strides)}
            # the last first
            order = [left.pop(s, None) for s in reversed(view.stride())][::-1]
            for n, s, d in zip(y.shape, view.stride(), order, strict=True):
                if n != 1 and s and (d is None or x.shape[d] != n):
                    raise Apart
            self.reorder(x, y, order)

    def reorder(self, x: Tensor, y: Tensor, order: Sequence[int | None]) -> None:
        """Record that dimension i of ``y`` is ``order[i]`` of ``x``, or a new one."""
        rows, origin = self.of(x), self.origin.get(id(x))
        for d, row in enumerate(rows):
            if d not in order:
                mark(row, "bound")
        if origin is not None:
            origin = (origin[0], tuple(None if d is None else origin[1][d] for d in order))
        new = zip(order, y.shape, strict=True)
        self.know(y, [fresh(n) if d is None else rows[d] for d, n in new], origin)

    @_rule("repeat")
    def repeat(self, call: _OpCall, out: Tensor) -> None:
        rows = [fresh(n) for n in out.shape]
        for d in range(-1, -call.x.ndim - 1, -1):
            rows[d] = fresh(out.shape[d] // max(1, call.x.shape[d])) + call.rows[d]
        self.know(out, rows)

    @_rule("slice")
    def slice(self, call: _OpCall, out: Tensor) -> None:
        dim = call.along
        length, size = call.x.shape[dim], out.shape[dim]
        start, stop, step = slice(call["start"], call["end"], call["step"]).indices(length)
        if (start, stop, step) != (0, length, 1):
            call.rows[dim] = self.taken(call.rows[dim], start, max(start, stop), step, size)
        self.know(out, call.rows, self.origin.get(id(call.x)))

    def taken(self, row: Row, start: int, stop: int, step: int, size: int) -> Row:
        try:
            if step == 1:
                return piece(row, start, stop)
        except Apart:
            pass
        mark(row, "bound")
        return fresh(size, "bound")

    @_rule("split split_with_sizes")
    def split(self, call: _OpCall, out: Sequence[Tensor]) -> None:
        dim = call.along
        rows = call.rows
        row, sizes = leaves(rows[dim]), [y.shape[dim] for y in out]
        ends = [*itertools.accumulate(sizes)]
        pieces = self.shares(row, sizes) or (
            self.taken(row, end - n, end, 1, n) for end, n in zip(ends, sizes, strict=True)
        )
        for y, mine in zip(out, pieces, strict=True):
            rows[dim] = mine
            self.know(y, rows, self.origin.get(id(call.x)))

    def shares(self, row: Row, sizes: Sequence[int]) -> list[Row]:
        """Return the atoms of each of several equal parts; none if the row has no such factor."""
        if len(set(sizes)) != 1 or len(sizes) == 1 or not row or any(a.parts for a in row):
            return []
        try:
            heads, alike = parted(row, len(sizes))
        except Apart:
            return []
        mark(heads, "bound")
        return [alike] * len(sizes)

    @_rule("cat")
    def cat(self, call: _OpCall, out: Tensor) -> None:
        xs = [x for x in call.operands if x.ndim == out.ndim and x.numel()]
        dim = call["dim"] % out.ndim
        if not xs:
            return
        rows = list(self.of(xs[0]))
        for x in xs[1:]:
            self.align(rows, out.shape, x, dim - out.ndim)
        if len(xs) > 1:
            pieces = [self.of(x)[dim] for x in xs]
            for p in pieces:
                mark(p, "bound")
            joint = Atom(out.shape[dim], [whole(p) for p in pieces])
            joint.seen.add("bound")
            rows[dim] = [joint]
        self.know(out, rows)

    @_rule("stack")
    def stack(self, call: _OpCall, out: Tensor) -> None:
        for x in call.operands[1:]:
            self.align(call.rows, call.x.shape, x)
        call.rows.insert(call["dim"] % out.ndim, fresh(len(call.operands)))
        self.know(out, call.rows)

    # ------------------------------------------------------------ products

    @_rule("mm bmm addmm baddbmm")
    def product(self, call: _OpCall, out: Tensor) -> None:
        """Record out[batch, m, n] = a[batch, m, k] b[batch, k, n], and what is added to it."""
        *bias, a, b = call.operands
        batch = a.ndim - 2
        one, two = self.of(a), self.of(b)
        for d, e in [(batch + 1, batch), *((d, d) for d in range(batch))]:
            self.join(one[d], two[e])
        rows = [*one[: batch + 1], two[batch + 1]]
        self.know(out, rows)
        if id(a) in self.origin and id(b) not in self.origin:
            beside = [*two[:batch], two[batch + 1]]
            self.read("product", a, batch + 1, batch, itertools.chain(*beside))
        elif id(b) in self.origin and id(a) not in self.origin:
            self.read("product", b, batch, batch + 1, itertools.chain(*one[:-1]))
        elif id(a) not in self.origin:
            mark(one[batch + 1], "bound")
            mark([*one[batch], *two[batch + 1]], "across")
            for d in range(batch):
                mark(one[d], "heads")
        for x in bias:
            self.align(rows, out.shape, x)

    def read(
        self,
        kind: str,
        t: Tensor,
        contracted: int,
        kept: int,
        rows: Iterable[Atom],
        groups: int = 1,
    ) -> None:
        """Record a use of the parameter that ``t`` is, by the dimensions of ``t``."""
        name, dims = self.origin[id(t)]
        ins, outs = (() if dims[d] is None else (dims[d],) for d in (contracted, kept))
        self.found.reads.append(ParameterUse(name, kind, ins, outs, list(rows), groups))  # type: ignore[arg-type]

    @_rule("mv")
    def matrix_vector(self, call: _OpCall, out: Tensor) -> None:
        a, b = map(self.of, call.operands)
        self.join(a[1], b[0])
        mark(a[1], "bound")
        self.know(out, a[:1])

    @_rule("grouped_mm")
    def grouped_product(self, call: _OpCall, out: Tensor) -> None:
        a, b = call.operands[:2]
        if (a.ndim, b.ndim) != (2, 3):
            raise Apart
        one, two = self.of(a), self.of(b)
        self.join(one[1], two[1])
        self.know(out, [one[0], two[2]])
        if id(b) in self.origin:
            self.read("product", b, 1, 2, one[0])

    @_rule("convolution")
    def convolution(self, call: _OpCall, out: Tensor) -> None:
        x, w, *bias = call.operands
        rows, mine, groups = self.of(x), self.of(w), call["groups"]
        filters, channels = (1, 0) if call["transposed"] else (0, 1)
        if groups == 1:
            self.join(rows[1], mine[channels])
            mark(rows[1], "bound")
        elif groups == x.shape[1] == out.shape[1]:
            self.join(rows[1], mine[filters])
        else:
            mark([*rows[1], *mine[filters]], "bound")
        for b in bias:
            self.join(self.of(b)[0], mine[filters])
        feature = mine[filters]
        if length(feature) != out.shape[1]:
            feature = fresh(out.shape[1], "bound")
        self.know(out, [rows[0], feature, *(fresh(n) for n in out.shape[2:])])
        if id(w) in self.origin:
            self.read("conv", w, channels, filters, [], groups)

    @_rule(
        "max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d upsample_nearest2d "
        "upsample_bilinear2d upsample_bicubic2d"
    )
    def pooled(self, call: _OpCall, out: object) -> None:
        """Keep the two leading dimensions; the others are space."""
        for row in call.rows[2:]:
            mark(row, "bound")
        for y in tensors_in(out):
            if y.shape[:2] == call.x.shape[:2]:
                self.know(y, [*call.rows[:2], *map(fresh, y.shape[2:])])

    # ------------------------------------------------------------ indexing

    @_rule("embedding")
    def embedding(self, call: _OpCall, out: Tensor) -> None:
        ids, features = call.operands[1], call.rows[1]
        mark(features, "embedded")
        self.know(out, [*self.of(ids), features])
        if id(call.x) in self.origin:
            self.read("lookup", call.x, 0, 1, [])
            mine, given = map(itertools.chain.from_iterable, (self.of(ids), self.found.numbers))
            self.found.reads[-1].given = common(mine, given)

    @_rule("index")
    def index(self, call: _OpCall, out: Tensor) -> None:
        x, rows, index = call.x, call.rows, call["indices"]
        given = {d: i for d, i in enumerate(index) if i is not None}
        for d in given:
            mark(rows[d], "bound")
        if {i.dtype for i in given.values()} & {torch.bool, torch.uint8}:
            # how many elements booleans take depends on values
            tail = rows[len(index) + sum(i.ndim - 1 for i in given.values()) :]
            self.know(out, [*map(fresh, out.shape[: out.ndim - len(tail)]), *tail])
            return
        shape = torch.broadcast_shapes(*(i.shape for i in given.values()))
        together = [*map(fresh, shape)]
        for i in given.values():
            self.align(together, shape, i)
        first, last = min(given), max(given)
        at = first if last - first + 1 == len(given) else 0
        rest: list[int | None] = [d for d in range(x.ndim) if d not in given]
        self.reorder(x, out, [*rest[:at], *[None] * len(shape), *rest[at:]])
        self.rows[id(out)][at : at + len(shape)] = together

    @_rule("index_select")
    def index_select(self, call: _OpCall, out: Tensor) -> None:
        mark(call.rows[call.along], "bound")
        call.rows[call.along] = [*itertools.chain(*self.of(call.operands[1]))]
        self.know(out, call.rows)

    @_rule("gather")
    def gather(self, call: _OpCall, out: Tensor) -> None:
        x, ids = call.operands
        dim = call.along - x.ndim
        rows = list(self.of(ids))
        mark(call.rows[dim], "bound")
        self.align(rows, ids.shape, x, dim)
        self.know(out, rows)

    @_rule("scatter scatter_add index_add index_copy scatter_reduce index_fill")
    def scatter(self, call: _OpCall, out: Tensor) -> None:
        x, rows, dim = call.x, call.rows, call.along - call.x.ndim
        mark(rows[dim], "bound")
        for other in call.operands[1:]:
            if other.ndim == x.ndim:
                self.align(rows, x.shape, other, dim)
        if id(out) not in self.rows:
            self.know(out, rows)

    @_rule("index_put")
    def index_put(self, call: _OpCall, out: Tensor) -> None:
        index = call["indices"]
        for row, i in zip(call.rows, index, strict=False):
            if i is not None:
                mark(row, "bound")
        count = len(index)
        self.align(call.rows[count:], call.x.shape[count:], call["values"])
        if id(out) not in self.rows:
            self.know(out, call.rows)


def _keeps_shape(call: _OpCall, out: object) -> bool:
    """Check whether a call has one operand, and results of its shape alone."""
    one = len(call.operands) == 1
    return one and all(y.shape == call.x.shape for y in tensors_in(out))


# ---------------------------------------------------------------- running the module


def trace_dimensions(model: nn.Module, inputs: object = None) -> Dimensions:
    """Run a module once on the meta device and find which dimensions are the same.

    ``inputs``  a dict of forward's arguments, or their tuple; by default made from the module's
                configuration or its first layer.  Modules whose branches depend on values run on
                their own values instead.
    Raises: Unsupported if no inputs are known or the module does not run.

    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    >>> found = trace_dimensions(mlp)
    >>> found.params["0.weight"], [(r.name, r.inputs, r.outputs) for r in found.reads]
    ([[16], [4]], [('0.weight', (1,), (0,)), ('2.weight', (1,), (0,))])
    """
    candidates = list(example_inputs(model)) if inputs is None else [inputs]
    failed = "no example inputs are known"
    real = not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    for given in candidates:
        args, kwargs = called_with(given)
        for device in ("meta", None) if real else ("meta",):
            try:
                return _run(model, args, kwargs, device)
            except Exception as e:
                # the module's own code may raise anything
                what = (str(e) or type(e).__name__).splitlines()[0]
                failed = f"it does not run on example inputs: {what}"
    why = f"what feeds what in {type(model).__name__} is not known: {failed}"
    fix = f"sl.recipes.megatron1d(model, inputs={_suggested(model)})"
    raise Unsupported(why, op="roles", fix=fix)


def called_with(given: object) -> tuple[Args, Kwargs]:
    """Return a call's arguments: from a mapping by name, a sequence by position, or one alone.

    >>> called_with({"x": 1}), called_with([1, 2]), called_with(3)
    (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    return tuple(given) if isinstance(given, Sequence) else (given,), {}


def _suggested(model: nn.Module) -> str:
    """Write inputs on which the module runs, found by trying the sizes of its parameters."""
    takes = inspect.signature(model.forward).parameters.items()
    names = [n for n, p in takes if p.default is p.empty]
    sizes = dict.fromkeys(n for p in model.parameters() if p.ndim > 1 for n in p.shape)
    for n in list(sizes)[:8] if len(names) == 1 else ():
        given = _zeros(model, 2, 8, n)
        try:
            _run(model, (), {names[0]: given}, "meta")
        except Exception:
            # the module's own code may raise anything
            continue
        shown = f"2, 8, {n}" + (f", dtype={given.dtype}" if given.dtype != torch.float32 else "")
        return f"{{{names[0]!r}: torch.zeros({shown})}}"
    return f"dict({', '.join(f'{n}=torch.zeros(...)' for n in names)})"


def _state(model: nn.Module, device: str | None) -> dict[str, Tensor]:
    """Make the tensors of a run: shapes on a device, or without one the module's own values."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    written = {id(b) for b in model.buffers()}

    def held(x: Tensor) -> Tensor:
        if device:
            return torch.empty_like(x.detach(), device=device)
        return x.detach().clone() if id(x) in written else x.detach()

    made = {id(x): held(x) for x in named.values()}
    return {n: made[id(x)] for n, x in named.items()}


def _run(model: nn.Module, args: Args, kwargs: Kwargs, device: str | None) -> Dimensions:
    """Trace a call on shapes, or without a device on the module's own values."""
    state = _state(model, device)
    own = next((x.device for x in state.values()), None)

    def moved_to(x: object) -> object:
        return x.detach().to(own) if own and isinstance(x, Tensor) else x

    given: Any = optree.tree_map(moved_to, (args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    watch = _DimensionTracer(Dimensions({}))
    found = watch.found
    for name, p in model.named_parameters():
        found.params[name] = [fresh(n) for n in p.shape]
        watch.know(state[name], found.params[name], (name, tuple(range(p.ndim))))
    watch.inputs(tensors_in(given))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    where = torch.device(device) if device else nullcontext()
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]), watch:
            # the user did not start this run
            warnings.simplefilter("ignore")
            with where, sdpa_kernel(SDPBackend.MATH):
                # composed of operators that have rules
                functional_call(model, state, given[0], given[1])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return found


# ---------------------------------------------------------------- example inputs


def _zeros(model: nn.Module, *size: int) -> Tensor:
    """Make an input of the dtype of the module's parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.zeros(size, dtype=dtype, device="cpu")


def example_inputs(model: nn.Module) -> Iterator[Any]:
    """List arguments that the module's forward may accept."""
    inner: Any = model
    while isinstance(inner, nn.Module) and not hasattr(inner, "main_input_name"):
        inner = getattr(inner, "model", None)
    config = getattr(inner, "config", None)
    if config is not None:
        yield from filter(None, [_from_config(inner, config)])
        return
    count = max(1, needed(model.forward))
    seen = set()
    for m in model.modules():
        x = _for_layer(m, model)
        if x is not None and (key := (tuple(x.shape), x.dtype)) not in seen:
            seen.add(key)
            yield tuple(x.clone() for _ in range(count))
        if len(seen) > 3:
            return


_WIDTHS = {
    nn.MultiheadAttention: "embed_dim",
    nn.RNNBase: "input_size",
    nn.Linear: "in_features",
    nn.LayerNorm: "normalized_shape",
    nn.RMSNorm: "normalized_shape",
}
"""Kind of layer -> its attribute with the last sizes of its input."""


def _for_layer(m: nn.Module, model: nn.Module) -> Tensor | None:
    """Return an input for a layer, or None if its kind is unknown."""
    if isinstance(m, nn.Embedding | nn.EmbeddingBag):
        tables = [e.num_embeddings for e in model.modules() if isinstance(e, nn.Embedding)]
        return torch.zeros(2, min([8, *tables]), dtype=torch.int64, device="cpu")
    if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        space = int(type(m).__name__[4])
        return _zeros(model, 2, m.in_channels, *[max(32, 2 * max(m.kernel_size))] * space)
    width = next((getattr(m, name) for kind, name in _WIDTHS.items() if isinstance(m, kind)), None)
    if width is None:
        return None
    return _zeros(model, 2, 8, *(width if isinstance(width, tuple) else (width,)))


def _from_config(model: nn.Module, config: object) -> dict[str, Tensor]:
    """Make the inputs of a Hugging Face model, by the names that its forward takes."""
    takes = inspect.signature(model.forward).parameters
    main: Any = getattr(model, "main_input_name", "input_ids")
    out: dict[str, Tensor] = {}
    if "pixel_values" in takes and (main == "pixel_values" or hasattr(config, "vision_config")):
        out["pixel_values"] = _images(model, getattr(config, "vision_config", config))
    if main == "input_features":
        # Whisper's second convolution has stride 2, hence two frames per position
        frames = 2 * getattr(config, "max_source_positions", 1500)
        out[main] = _zeros(model, 2, getattr(config, "num_mel_bins", 80), frames)
    if main == "input_values":
        # a quarter of a second at 16 kHz, more than the receptive field of wav2vec 2.0
        out[main] = _zeros(model, 2, 4000)
    if "input_ids" in takes and (main == "input_ids" or hasattr(config, "text_config")):
        out["input_ids"] = _ids(config)
    if "decoder_input_ids" in takes:
        out["decoder_input_ids"] = _ids(config)
    return out


def _images(model: nn.Module, vision: object) -> Tensor:
    """Make images of the size that a configuration names."""
    size = getattr(vision, "image_size", 32) or 32
    space = size if isinstance(size, list | tuple) else (size, size)
    return _zeros(model, 2, getattr(vision, "num_channels", 3), *space)


def _ids(config: object) -> Tensor:
    """Make token ids, at most half as many as the configuration has positions."""
    text = getattr(config, "text_config", config)
    text = config if isinstance(text, dict) else text
    names = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    limits = [n for n in (getattr(text, name, None) for name in names) if isinstance(n, int)]
    length = min([8, *(n // 2 if n > 3 else n for n in limits if n > 0)])
    return torch.full((2, length), 1, dtype=torch.int64, device="cpu")
