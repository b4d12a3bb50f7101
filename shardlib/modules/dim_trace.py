"""Dimension tracing: which dimensions of a module's parameters and activations are the same.

The unmodified module runs once, on tensors of the meta device, under a mode that intercepts every
operator.  Each dimension of a tensor is a row of *atoms*.  An operator that aligns two dimensions
unites their atoms, a view that splits a dimension splits its atom into factors, major first, and
slicing splits the atom into parts.  Since an atom is shared, uses of an activation are also known
of the weight that made it.  So a weight of query, key and value is (heads, 3, size) or (3, heads,
size) by the slicing of its output, whatever its name is.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardlib._compat import DispatchMode
from shardlib.errors import Unsupported
from shardlib.modules.dim_factors import (
    Apart,
    Atom,
    Row,
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

__all__ = ["Dimensions", "ParameterUse", "trace_dimensions"]


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


_SAME = frozenset(
    """
    clone detach alias _to_copy contiguous lift_fresh lift native_dropout triu tril flip bernoulli
    """.split()
)
# aten's names of the table's operators; the dimensions of a median go as a reduction's do
_REDUCE = {n.replace(".", "_") for n in names_of(kind="reduce")} | {"median"}
_NORMS = {"mean", "var", "var_mean", "std", "sum", "linalg_vector_norm", "norm", "std_mean"}
_ALONG = {*names_of(kind="along"), "safe_softmax"}
_POINTWISE = {*names_of(kind="pointwise", ignores=""), "where", "copy"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"}


class _DimensionTracer(DispatchMode):  # type: ignore[misc, valid-type]
    """Dispatch mode that intercepts every operator and keeps the atoms of every tensor."""

    def __init__(self, found: Dimensions) -> None:
        super().__init__()
        self.found = found
        self.rows: dict[int, list[Row]] = {}
        # id of a tensor -> its parameter, and the parameter's dimension for each of its own
        self.origin: dict[int, tuple[str, tuple[int | None, ...]]] = {}
        self.alive: list[Tensor] = []  # keeps tensors alive, so that their ids stay unique

    def know(self, x: Tensor, rows: Sequence[Row], origin: Any = None) -> None:
        self.rows[id(x)] = [list(r) for r in rows]
        self.alive.append(x)
        if origin is not None:
            self.origin[id(x)] = origin

    def of(self, x: Tensor) -> list[Row]:
        if id(x) not in self.rows:
            self.know(x, [fresh(n) for n in x.shape])
        return self.rows[id(x)]

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        try:
            self.learn(name, func, args, kwargs or {}, out)
        except Apart:
            self.opaque(args, kwargs or {}, out)
        for x in _tensors(out):
            rows = self.of(x)
            if len(rows) != x.ndim or any(
                length(r) != n for r, n in zip(rows, x.shape, strict=True)
            ):
                self.know(x, [fresh(n) for n in x.shape])
        return out

    def opaque(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Handle an operator without a rule: its results have fresh atoms.

        Operands must be whole, except for leading dimensions that stay.
        """
        given = _tensors((args, kwargs))
        for x in given:
            for row in self.of(x)[1:]:
                mark(row, "bound")
        for y in _tensors(out):
            if id(y) not in self.rows:
                self.know(y, [fresh(n, "bound") for n in y.shape])

    def learn(self, name: str, func: Func, args: Args, kwargs: Kwargs, out: Any) -> None:
        rule = getattr(self, f"_{name.strip('_')}", None)
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if name in _VIEWS:
            self._views(args, kwargs, out)
        elif base in _SAME:
            rows = self.of(args[0])
            for y in _tensors(out):
                if y.shape == args[0].shape:
                    self.know(y, rows, self.origin.get(id(args[0])))
        elif base in _REDUCE:
            self._reduce(base, args, kwargs, out)
        elif base.strip("_") in _ALONG and _keeps_shape(args, kwargs, out):
            self._along(args, kwargs, out)
        elif rule is not None or (rule := getattr(self, f"_{base.strip('_')}", None)) is not None:
            rule(args, kwargs, out)
        elif torch.Tag.pointwise in func.tags or base in _POINTWISE:
            self._pointwise(args, kwargs, out)
        elif _tensors((args, kwargs)) and not base.startswith(
            ("new_", "empty", "zeros", "ones", "full", "rand")
        ):
            if all(id(y) in self.rows for y in _tensors(out)):
                return
            self.found.unknown.add(name)
            self.opaque(args, kwargs or {}, out)

    # ------------------------------------------------------------ rules

    def _pointwise(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        for y in _tensors(out)[:1]:
            rows: list[Row] = [[] for _ in y.shape]
            known = self.rows.get(id(y))
            for x in _tensors((args, kwargs)):
                mine = self.of(x)
                for d in range(1, min(x.ndim, y.ndim) + 1):
                    if x.shape[-d] != y.shape[-d] or x.shape[-d] == 1:
                        continue
                    if rows[-d]:
                        self.join(rows[-d], mine[-d])
                    else:
                        rows[-d] = list(mine[-d])
            rows = [r or fresh(n) for r, n in zip(rows, y.shape, strict=True)]
            if known is None:
                self.know(y, rows)
                only = [x for x in _tensors((args, kwargs)) if x.ndim]
                if len(only) == 1 and id(only[0]) in self.origin and only[0].shape == y.shape:
                    self.origin[id(y)] = self.origin[id(only[0])]

    def join(self, a: Row, b: Row) -> None:
        """Unite two rows; if they do not fit, mark both as whole."""
        try:
            join(a, b)
        except Apart:
            mark(a, "bound")
            mark(b, "bound")

    def _views(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x = args[0]
        flat = [a for row in self.of(x) for a in row]
        rows = []
        try:
            for n in out.shape:
                taken, flat = parted(flat, n)
                rows.append(taken)
        except Apart:
            mark([a for row in self.of(x) for a in row], "bound")
            rows = [fresh(n, "bound") for n in out.shape]
        self.know(out, rows)
        origin = self.origin.get(id(x))
        if origin is not None:
            wide = [(n, d) for n, d in zip(x.shape, origin[1], strict=True) if n != 1]
            if [n for n, _ in wide] == [n for n in out.shape if n != 1]:
                left = iter(wide)
                self.origin[id(out)] = (
                    origin[0],
                    tuple(None if n == 1 else next(left)[1] for n in out.shape),
                )

    def _moved(self, x: Tensor, out: Tensor, order: Sequence[int]) -> None:
        rows, origin = self.of(x), self.origin.get(id(x))
        self.know(
            out,
            [rows[d] if d >= 0 else [] for d in order],
            origin and (origin[0], tuple(origin[1][d] if d >= 0 else None for d in order)),
        )

    def _t(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self._moved(args[0], out, list(range(args[0].ndim))[::-1])

    def _transpose(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, i, j = args
        order = list(range(x.ndim))
        order[i], order[j] = order[j], order[i]
        self._moved(x, out, order)

    def _permute(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self._moved(args[0], out, [d % args[0].ndim for d in args[1]])

    def _unsqueeze(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        at = args[1] % out.ndim
        order = list(range(args[0].ndim))
        self._moved(args[0], out, [*order[:at], -1, *order[at:]])

    def _squeeze(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x = args[0]
        dims = (
            range(x.ndim)
            if len(args) < 2
            else args[1]
            if isinstance(args[1], list | tuple)
            else [args[1]]
        )
        gone = {d % x.ndim for d in dims if x.shape[d] == 1}
        self._moved(x, out, [d for d in range(x.ndim) if d not in gone])

    def _expand(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, rows = args[0], self.of(args[0])
        lead = out.ndim - x.ndim
        self.know(
            out,
            [
                fresh(n) if d < lead or x.shape[d - lead] != n else rows[d - lead]
                for d, n in enumerate(out.shape)
            ],
        )
        origin = self.origin.get(id(x))
        if origin is not None:
            self.origin[id(out)] = (origin[0], (*[None] * lead, *origin[1]))

    def _repeat(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, rows = args[0], self.of(args[0])
        lead = out.ndim - x.ndim
        self.know(
            out,
            [
                fresh(n) if d < lead else [*fresh(n // max(1, x.shape[d - lead])), *rows[d - lead]]
                for d, n in enumerate(out.shape)
            ],
        )

    def _select(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, dim, _ = args
        mark(self.of(x)[dim], "bound")
        self._moved(x, out, [d for d in range(x.ndim) if d != dim % x.ndim])

    def _slice(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x: Tensor = args[0]
        options: Any = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        dim, start, stop, step = options
        dim, rows = dim % x.ndim, list(self.of(x))
        start, stop, step = slice(start, stop, step).indices(x.shape[dim])
        self.know(out, rows, self.origin.get(id(x)))
        if (start, stop, step) != (0, x.shape[dim], 1):
            self.rows[id(out)][dim] = self.taken(
                rows[dim], start, max(start, stop), step, out.shape[dim]
            )

    def taken(self, row: Row, start: int, stop: int, step: int, size: int) -> Row:
        try:
            if step == 1:
                return piece(row, start, stop)
        except Apart:
            pass
        mark(row, "bound")
        return fresh(size, "bound")

    def _split(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % x.ndim
        sizes = [y.shape[dim] for y in out]
        rows, origin = self.of(x), self.origin.get(id(x))
        row = leaves(rows[dim])
        alike: Row | None = None
        if len(set(sizes)) == 1 and len(sizes) > 1 and row and all(a.parts is None for a in row):
            try:
                heads, alike = parted(row, len(sizes))
                mark(heads, "bound")
            except Apart:
                alike = None
        start = 0
        for y in out:
            n = y.shape[dim]
            mine = alike if alike is not None else self.taken(row, start, start + n, 1, n)
            self.know(y, [mine if d == dim else r for d, r in enumerate(rows)], origin)
            start += n

    _split_with_sizes = _split

    def _unbind(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        dim = (args[1] if len(args) > 1 else 0) % x.ndim
        mark(self.of(x)[dim], "bound")
        for y in out:
            self._moved(x, y, [d for d in range(x.ndim) if d != dim])

    def _cat(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        xs = [x for x in args[0] if x.ndim == out.ndim and x.numel()]
        dim = (args[1] if len(args) > 1 else 0) % out.ndim
        if not xs:
            return
        rows = [list(r) for r in self.of(xs[0])]
        for x in xs[1:]:
            for d in range(out.ndim):
                if d != dim:
                    self.join(rows[d], self.of(x)[d])
        if len(xs) > 1:
            pieces = [self.of(x)[dim] for x in xs]
            for p in pieces:
                mark(p, "bound")
            joint = Atom(out.shape[dim], [whole(p) for p in pieces])
            joint.seen.add("bound")
            rows[dim] = [joint]
        self.know(out, rows)

    def _stack(self, args: Any, kwargs: Kwargs, out: Tensor) -> None:
        dim = (args[1] if len(args) > 1 else 0) % out.ndim
        rows = [list(r) for r in self.of(args[0][0])]
        for x in args[0][1:]:
            for a, b in zip(rows, self.of(x), strict=True):
                self.join(a, b)
        rows.insert(dim, fresh(len(args[0])))
        self.know(out, rows)

    def _reduce(self, name: str, args: Args, kwargs: Kwargs, out: Any) -> None:
        x = args[0]
        dims = kwargs.get(
            "dim", args[1] if len(args) > 1 and name not in ("linalg_vector_norm", "norm") else None
        )
        if name in ("linalg_vector_norm", "norm"):
            dims = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if isinstance(dims, Tensor):  # elementwise maximum of two tensors
            return self._pointwise(args, kwargs, out)
        if not isinstance(dims, int | list | tuple) or dims == []:
            dims = range(x.ndim)
        chosen = {d % max(1, x.ndim) for d in ([dims] if isinstance(dims, int) else dims)}
        rows = self.of(x)
        for d in chosen if x.ndim else ():
            mark(rows[d], "normed" if name in _NORMS else "bound")
        for y in _tensors(out):
            if y.ndim == x.ndim:
                self.know(y, [[] if d in chosen else r for d, r in enumerate(rows)])
            elif y.ndim == x.ndim - len(chosen):
                self.know(y, [r for d, r in enumerate(rows) if d not in chosen])
        return None

    def _along(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        x, rows = args[0], self.of(args[0])
        dim = next(
            (
                a
                for a in (*args[1:], *kwargs.values())
                if isinstance(a, int) and not isinstance(a, bool)
            ),
            -1,
        )
        if x.ndim:
            mark(rows[dim], "bound")
        for y in _tensors(out):
            self.know(y, rows)

    def _topk(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        x, k, dim = args[0], args[1], args[2] if len(args) > 2 else -1
        rows = [list(r) for r in self.of(x)]
        mark(rows[dim], "bound")
        rows[dim] = fresh(k, "bound")
        for y in out:
            self.know(y, rows)

    def _roll(self, args: Any, kwargs: Kwargs, out: Tensor) -> None:
        rows = self.of(args[0])
        for d in args[2] if len(args) > 2 else range(args[0].ndim):
            mark(rows[d], "bound")
        self.know(out, rows)

    def _constant_pad_nd(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        rows = []
        for row, before, n in zip(self.of(args[0]), args[0].shape, out.shape, strict=True):
            if before != n:
                mark(row, "bound")
            rows.append(row if before == n else fresh(n, "bound"))
        self.know(out, rows)

    def _native_layer_norm(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        x, shape, *affine = args
        rows = self.of(x)
        for row in rows[x.ndim - len(shape) :]:
            mark(row, "normed")
        for w in (w for w in affine if isinstance(w, Tensor)):
            for a, b in zip(self.of(w), rows[x.ndim - len(shape) :], strict=True):
                self.join(a, b)
        y = out[0] if isinstance(out, tuple | list) else out
        self.know(y, rows)

    _fused_rms_norm = _rms_norm = _native_layer_norm

    def _native_batch_norm(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        rows = self.of(args[0])
        for w in (w for w in args[1:5] if isinstance(w, Tensor)):
            self.join(self.of(w)[0], rows[1])
        self.know(out[0], rows)

    _native_batch_norm_legit = _native_batch_norm_legit_no_training = _native_batch_norm
    _batch_norm_with_update = _batch_norm_no_update = cudnn_batch_norm = _native_batch_norm

    def _native_group_norm(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        rows = self.of(args[0])
        for w in (w for w in args[1:3] if isinstance(w, Tensor)):
            self.join(self.of(w)[0], rows[1])
        mark(rows[1], "bound")
        self.know(out[0], rows)

    # ------------------------------------------------------------ products

    def _meet(self, a: Tensor, b: Tensor, out: Tensor, batch: int) -> None:
        """Record out[batch, m, n] = a[batch, m, k] b[batch, k, n]."""
        one, two = self.of(a), self.of(b)
        self.join(one[batch + 1], two[batch])
        for d in range(batch):
            self.join(one[d], two[d])
        self.know(out, [*one[:batch], one[batch], two[batch + 1]])
        weights = [
            (t, k, n, other)
            for t, k, n, other in ((a, batch + 1, batch, one), (b, batch, batch + 1, two))
        ]
        held = [w for w in weights if id(w[0]) in self.origin]
        if not held:
            mark(one[batch + 1], "bound")
            mark([*one[batch], *two[batch + 1]], "across")
            for d in range(batch):
                mark(one[d], "heads")
        elif len(held) == 1:
            t, k, n, _ = held[0]
            other = one if t is b else two
            rows = [
                atom
                for d, r in enumerate(other)
                if d != (batch + 1 if t is b else batch)
                for atom in r
            ]
            self.read("product", t, (k,), (n,), rows)

    def read(
        self,
        kind: str,
        t: Tensor,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        rows: Row,
        groups: int = 1,
    ) -> None:
        name, dims = self.origin[id(t)]
        ins, outs = (
            tuple(p for d in side if (p := dims[d]) is not None) for side in (inputs, outputs)
        )
        self.found.reads.append(ParameterUse(name, kind, ins, outs, list(rows), groups))

    def _mm(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self._meet(args[0], args[1], out, 0)

    def _bmm(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self._meet(args[0], args[1], out, 1)

    def _addmm(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self._meet(args[1], args[2], out, args[1].ndim - 2)
        bias, rows = self.of(args[0]), self.rows[id(out)]
        for d in range(1, args[0].ndim + 1):
            if args[0].shape[-d] == out.shape[-d] != 1:
                self.join(bias[-d], rows[-d])

    _baddbmm = _addmm

    def _mv(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        self.join(self.of(args[0])[1], self.of(args[1])[0])
        mark(self.of(args[0])[1], "bound")
        self.know(out, self.of(args[0])[:1])

    def _grouped_mm(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        a, b = args[:2]
        if a.ndim == 2 and b.ndim == 3:
            self.join(self.of(a)[1], self.of(b)[1])
            self.know(out, [self.of(a)[0], self.of(b)[2]])
            if id(b) in self.origin:
                self.read("product", b, (1,), (2,), self.of(a)[0])
        else:
            raise Apart

    def _scaled_dot_product_flash_attention_for_cpu(
        self, args: Args, kwargs: Kwargs, out: Any
    ) -> None:
        q, k, v = (self.of(x) for x in args[:3])
        for d in (0, 1):
            for other in (k, v):
                if length(q[d]) == length(other[d]):
                    self.join(q[d], other[d])
                elif d == 1:
                    self.shared(q[1], other[1])
            mark(q[d], "heads")
        self.join(q[3], k[3])
        for row in (q[3], q[2], k[2]):
            mark(row, "bound")
        mark(v[3], "across")
        self.join(k[2], v[2])
        self.know(out[0], [q[0], q[1], q[2], v[3]])

    def shared(self, heads: Row, fewer: Row) -> None:
        """Unite fewer heads of keys with the leading factor of the heads of queries."""
        try:
            first, _ = parted(leaves(heads), length(fewer))
        except Apart:
            mark([*heads, *fewer], "bound")
            return
        self.join(first, fewer)
        mark(fewer, "heads")

    def _convolution(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, w, bias, *_, groups = args
        transposed = args[6]
        rows, mine = self.of(x), self.of(w)
        filters, channels = (1, 0) if transposed else (0, 1)
        if groups == 1:
            self.join(rows[1], mine[channels])
            mark(rows[1], "bound")
        elif groups == x.shape[1] == out.shape[1]:
            self.join(rows[1], mine[filters])
        else:
            mark(rows[1], "bound")
            mark(mine[filters], "bound")
        if bias is not None:
            self.join(self.of(bias)[0], mine[filters])
        feature = (
            mine[filters] if length(mine[filters]) == out.shape[1] else fresh(out.shape[1], "bound")
        )
        self.know(out, [rows[0], feature, *(fresh(n) for n in out.shape[2:])])
        if id(w) in self.origin:
            self.read("conv", w, (channels,), (filters,), [], groups)

    def _pooled(self, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Keep the two leading dimensions; the others are space."""
        x, rows = args[0], self.of(args[0])
        for row in rows[2:]:
            mark(row, "bound")
        for y in _tensors(out):
            self.know(
                y,
                [*rows[:2], *(fresh(n) for n in y.shape[2:])] if y.shape[:2] == x.shape[:2] else [],
            )

    _max_pool2d_with_indices = _avg_pool2d = _adaptive_avg_pool2d = _pooled
    _upsample_nearest2d = _upsample_bilinear2d = _upsample_bicubic2d = _pooled

    # ------------------------------------------------------------ indexing

    def _embedding(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        table, ids = args[:2]
        rows = self.of(table)
        mark(rows[1], "embedded")
        self.know(out, [*self.of(ids), rows[1]])
        if id(table) in self.origin:
            self.read("lookup", table, (0,), (1,), [])
            mine = {id(a) for row in self.of(ids) for a in leaves(row)}
            self.found.reads[-1].given = any(
                id(a) in mine for row in self.found.numbers for a in leaves(row)
            )

    def _index(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, index = args[0], list(args[1])
        rows = self.of(x)
        picked = [d for d, i in enumerate(index) if i is not None]
        if any(index[d].dtype in (torch.bool, torch.uint8) for d in picked):
            return self._index_by_mask(rows, index, out)
        for d in picked:
            mark(rows[d], "bound")
        together = self._broadcast([index[d] for d in picked])
        rest = [r for d, r in enumerate(rows) if d not in picked]
        adjacent = picked == list(range(picked[0], picked[-1] + 1))
        at = picked[0] if adjacent else 0
        self.know(out, [*rest[:at], *together, *rest[at:]])
        origin = self.origin.get(id(x))
        if origin is not None:
            left = [p for d, p in enumerate(origin[1]) if d not in picked]
            self.origin[id(out)] = (origin[0], (*left[:at], *[None] * len(together), *left[at:]))

    def _index_by_mask(self, rows: list[Row], index: list[Any], out: Tensor) -> None:
        """Handle an index of booleans: how many elements it takes depends on values."""
        for row in rows[: len(index)]:
            mark(row, "bound")
        tail = rows[sum(i.ndim if i is not None else 1 for i in index) :]
        self.know(out, [*(fresh(n) for n in out.shape[: out.ndim - len(tail)]), *tail])

    def _broadcast(self, indices: Sequence[Tensor]) -> list[Row]:
        """Return the rows of indices that broadcast against each other, theirs united."""
        shape = torch.broadcast_shapes(*(i.shape for i in indices))
        together = [fresh(n) for n in shape]
        for i in indices:
            for k in range(1, i.ndim + 1):
                if i.shape[-k] == shape[-k] != 1:
                    self.join(together[-k], self.of(i)[-k])
        return together

    def _index_select(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, dim, ids = args
        rows = list(self.of(x))
        mark(rows[dim], "bound")
        rows[dim] = self.of(ids)[0] if ids.ndim else []
        self.know(out, rows)

    def _gather(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, dim, ids = args[:3]
        mark(self.of(x)[dim], "bound")
        rows = self.of(ids)
        for d in range(x.ndim):
            if d != dim % x.ndim and x.shape[d] == ids.shape[d]:
                self.join(self.of(x)[d], rows[d])
        self.know(out, rows)

    def _scatter(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, dim = args[:2]
        rows = self.of(x)
        mark(rows[dim], "bound")
        for other in _tensors(args[2:]):
            if other.ndim == x.ndim:
                for d in range(x.ndim):
                    if d != dim % x.ndim and other.shape[d] == x.shape[d]:
                        self.join(rows[d], self.of(other)[d])
        if id(out) not in self.rows:
            self.know(out, rows)

    _scatter_add = _index_add = _index_copy = _scatter_reduce = _index_fill = _scatter

    def _index_put(self, args: Args, kwargs: Kwargs, out: Tensor) -> None:
        x, index, values = args[:3]
        rows = self.of(x)
        for d, i in enumerate(index):
            if i is not None:
                mark(rows[d], "bound")
        tail = rows[len(index) :]
        mine = self.of(values)
        for d in range(1, min(len(tail), values.ndim) + 1):
            if values.shape[-d] == x.shape[-d] != 1:
                self.join(tail[-d], mine[-d])
        if id(out) not in self.rows:
            self.know(out, rows)


def _keeps_shape(args: Args, kwargs: Kwargs, out: Any) -> bool:
    """Check whether a call has one operand, and results of its shape alone."""
    operands = _tensors((args, kwargs))
    return len(operands) == 1 and all(y.shape == operands[0].shape for y in _tensors(out))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if isinstance(x, Tensor)]  # type: ignore[arg-type]


# ---------------------------------------------------------------- running the module


def trace_dimensions(model: nn.Module, inputs: Any = None) -> Dimensions:
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
    candidates = list(_examples(model)) if inputs is None else [inputs]
    failed = "no example inputs are known"
    real = not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    for given in candidates:
        args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (_as_tuple(given), {})
        for device in ("meta", None) if real else ("meta",):
            try:
                return _run(model, args, kwargs, device)
            except Exception as e:  # the module's own code may raise anything
                what = str(e).splitlines()[0] if str(e) else type(e).__name__
                failed = f"it does not run on example inputs: {what}"
    raise Unsupported(
        f"what feeds what in {type(model).__name__} is not known: {failed}",
        op="roles",
        fix=f"sl.recipes.megatron1d(model, inputs={_suggested(model)})",
    )


def _suggested(model: nn.Module) -> str:
    """Write inputs on which the module runs, found by trying the sizes of its parameters."""
    names = [
        n for n, p in inspect.signature(model.forward).parameters.items() if p.default is p.empty
    ]
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    sizes = dict.fromkeys(n for p in model.parameters() if p.ndim > 1 for n in p.shape)
    for n in list(sizes)[:8] if len(names) == 1 else ():
        try:
            _run(model, (), {names[0]: torch.zeros(2, 8, n, dtype=dtype, device="cpu")}, "meta")
        except Exception:  # the module's own code may raise anything
            continue
        shown = f"2, 8, {n}" + (f", dtype={dtype}" if dtype != torch.float32 else "")
        return f"{{{names[0]!r}: torch.zeros({shown})}}"
    return f"dict({', '.join(f'{n}=torch.zeros(...)' for n in names)})"


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def _run(model: nn.Module, args: Args, kwargs: Kwargs, device: str | None) -> Dimensions:
    held: dict[int, Tensor] = {}

    def bare(x: Tensor) -> Tensor:
        if id(x) not in held:
            y = x.detach()
            held[id(x)] = (
                torch.empty_like(y, device="meta") if device else y.clone() if x in buffers else y
            )
        return held[id(x)]

    buffers = _IdentityMap(b for b in model.buffers() if b is not None)
    params = dict(model.named_parameters(remove_duplicate=False))
    state = {n: bare(p) for n, p in params.items()} | {
        n: bare(b) for n, b in model.named_buffers() if b is not None
    }

    own = next((x.device for x in state.values()), None)

    def moved_to(x: Any) -> Any:
        return x.detach().to(own) if own and isinstance(x, Tensor) else x

    given: Any = optree.tree_map(moved_to, (args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    found = Dimensions({})
    watch = _DimensionTracer(found)
    for name, p in model.named_parameters():
        rows = [fresh(n) for n in p.shape]
        found.params[name] = rows
        watch.know(state[name], rows, (name, tuple(range(p.ndim))))
    for x in _tensors(given):
        if x.is_floating_point() and x.ndim > 1:
            found.sources.append(watch.of(x)[-1])
        elif not x.is_floating_point() and not x.is_complex():
            found.numbers += watch.of(x)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]), watch:
            warnings.simplefilter("ignore")  # the user did not start this run
            if device:
                with torch.device(device):
                    functional_call(model, state, given[0], given[1])
            else:
                functional_call(model, state, given[0], given[1])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return found


class _IdentityMap:
    """Set of tensors, compared by identity."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.ids = {id(t) for t in tensors}

    def __contains__(self, x: Tensor) -> bool:
        return id(x) in self.ids


# ---------------------------------------------------------------- example inputs


def _examples(model: nn.Module) -> Iterator[Any]:
    """List arguments that the module's forward may accept."""
    inner = model
    while not hasattr(inner, "main_input_name") and isinstance(
        below := getattr(inner, "model", None), nn.Module
    ):
        inner = below
    config = getattr(inner, "config", None)
    if config is not None and hasattr(inner, "main_input_name"):
        given = _from_config(inner, config)
        if given is not None:
            yield given
        return
    takes = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = sum(p.kind in positional and p.default is inspect.Parameter.empty for p in takes)
    seen = set()
    for m in model.modules():
        x = _for_layer(m, model)
        if x is not None and (key := (tuple(x.shape), x.dtype)) not in seen:
            seen.add(key)
            yield tuple(x.clone() for _ in range(max(1, needed)))
        if len(seen) > 3:
            return


def _for_layer(m: nn.Module, model: nn.Module) -> Tensor | None:
    """Return an input for a layer, or None if its kind is unknown."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(m, nn.Embedding | nn.EmbeddingBag):
        length = min(
            [8, *(e.num_embeddings for e in model.modules() if isinstance(e, nn.Embedding))]
        )
        return torch.zeros(2, length, dtype=torch.int64, device="cpu")
    if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        space = int(type(m).__name__[4])
        return torch.zeros(
            2, m.in_channels, *[max(32, 2 * max(m.kernel_size))] * space, dtype=dtype, device="cpu"
        )
    if isinstance(m, nn.MultiheadAttention):
        return torch.zeros(2, 8, m.embed_dim, dtype=dtype, device="cpu")
    if isinstance(m, nn.RNNBase):
        return torch.zeros(2, 8, m.input_size, dtype=dtype, device="cpu")
    if isinstance(m, nn.Linear):
        return torch.zeros(2, 8, m.in_features, dtype=dtype, device="cpu")
    if isinstance(m, nn.LayerNorm | nn.RMSNorm):
        return torch.zeros(2, 8, *m.normalized_shape, dtype=dtype, device="cpu")
    return None


def _from_config(model: nn.Module, config: Any) -> dict[str, Tensor] | None:
    """Make the inputs of a Hugging Face model, by the names that its forward takes."""
    takes = inspect.signature(model.forward).parameters
    main: Any = getattr(model, "main_input_name", "input_ids")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    sizes: dict[str, tuple[int, ...]] = {}
    if "pixel_values" in takes and (main == "pixel_values" or hasattr(config, "vision_config")):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32) or 32
        space = tuple(size) if isinstance(size, list | tuple) else (size, size)
        sizes["pixel_values"] = (getattr(vision, "num_channels", 3), *space)
    if main == "input_features":
        # Whisper's second convolution has stride 2, hence two frames per position
        frames = 2 * getattr(config, "max_source_positions", 1500)
        sizes["input_features"] = (getattr(config, "num_mel_bins", 80), frames)
    if main == "input_values":
        # a quarter of a second at 16 kHz, more than the receptive field of wav2vec 2.0
        sizes["input_values"] = (4000,)
    out = {n: torch.zeros(2, *size, dtype=dtype, device="cpu") for n, size in sizes.items()}
    if "input_ids" in takes and (main == "input_ids" or hasattr(config, "text_config")):
        out["input_ids"] = _ids(config)
    if "decoder_input_ids" in takes:
        out["decoder_input_ids"] = _ids(config)
    return out or None


def _ids(config: Any) -> Tensor:
    """Make token ids, at most half as many as the configuration has positions."""
    text = getattr(config, "text_config", config)
    text = config if isinstance(text, dict) else text
    names = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
    limits = [n for n in (getattr(text, name, None) for name in names) if isinstance(n, int)]
    length = min([8, *(n // 2 if n > 3 else n for n in limits if n > 0)])
    return torch.full((2, length), 1, dtype=torch.int64, device="cpu")
