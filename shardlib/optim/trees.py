"""Trees of parameters, gradients and state: plain trees, or ``Buckets`` under ``zero``.

None stands for a frozen leaf.  Blocks are combined by position, so trees must have the same
structure, and their leaves the same layouts.  ``each`` maps over blocks, ``pieces`` lists them for a
kernel, ``named`` and ``by_tensor`` list tensors, ``only`` and ``merged`` choose some of them: all of
either kind of tree, so that a transform knows nothing of buckets.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.capacity import refuse_beyond
from shardlib.collectives import blocks, played, spans_processes
from shardlib.dtypes import HALF, wider
from shardlib.errors import PartialEscape, ShardError
from shardlib.grad import frozen, stage_mesh
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, Outer
from shardlib.ops.padding import filled
from shardlib.optim.buckets import ALIGN as ALIGN
from shardlib.optim.buckets import Bucket, Buckets, SlotPart, Tree, held, parts
from shardlib.optim.buckets import State as State
from shardlib.optim.buckets import pytree_node as pytree_node
from shardlib.tensor import ShardedTensor, raw_of, type_or_class, typeof


class EmptyState(NamedTuple):
    """The state of a transform without memory."""


def with_raw(x: Tensor, raw: Tensor) -> Tensor:
    """Return a value like ``x``, plain or in its layout, with another block."""
    return x.becomes(raw) if isinstance(x, ShardedTensor) else raw


def blocks_of(x: Tensor) -> Sequence[Tensor]:
    """List the blocks of the ranks in this process, of a plain tensor itself, detached."""
    raw = raw_of(x)
    # detaching takes longer than all else here
    raw = raw.detach() if raw.requires_grad else raw
    return blocks(raw, x.mesh) if isinstance(x, ShardedTensor) else [raw]


def each(f: Callable[..., Tensor], first: Tree, *others: Tree, op: str = "update") -> Tree:
    """Map a function over the leaves' blocks; results have the layout of ``first``'s leaves.

    If a leaf is None in any tree, or not a tensor, ``first``'s is returned unchanged.
    Raises: ShardError if the trees differ, or a leaf's layout in one of them differs from that in
            ``first``.
    """

    def one(x: Any, *more: Any) -> Any:
        if not isinstance(x, Tensor) or any(m is None for m in more):
            return x
        for m in more:
            _alike(x, m, op)
        out = f(*map(raw_of, (x, *more)))
        if isinstance(x, ShardedTensor):
            return ShardedTensor(out, x.place._replace(deferred=frozenset()))
        return out

    with torch.no_grad():
        _same_tree(first, others)
        return optree.tree_map(one, first, *others, none_is_leaf=True)


def names_of(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Join each path's keys by dots, so that no two paths of a tree have one name.

    If keys contain dots that would make two names equal, the keys of that level are quoted and
    their dots escaped.

    >>> names_of([("h", 0, "w"), ("h.1", "w")]), names_of([("h", "w"), ("h.w",)])
    (['h.0.w', 'h.1.w'], ["'h'.w", "'h\\\\.w'"])
    """
    plain = [".".join(map(str, path)) if path[-1:] != ("",) else _folded(path) for path in paths]
    if len(set(plain)) == len(plain):
        return plain
    below: dict[Any, list[int]] = {}
    for i, path in enumerate(paths):
        below.setdefault((type(path[0]), path[0]), []).append(i)
    rows: list[tuple[Any, str]] = [("", "")] * len(plain)
    for (_, key), some in below.items():
        for i, name in zip(some, names_of([paths[i][1:] for i in some]), strict=True):
            rows[i] = key, name
    joined = [_folded(row) for row in rows]
    if len(set(joined)) == len(joined):
        return joined
    quoted = [repr(key).replace("\\", r"\\").replace(".", r"\.") for key, _ in rows]
    return [_folded((q, name)) for q, (_, name) in zip(quoted, rows, strict=True)]


def _folded(path: tuple[Any, ...]) -> str:
    """Join keys of which the last are empty: like a bare leaf's empty path, they add nothing."""
    name = ""
    for key in reversed(path):
        name = f"{key}.{name}" if name else str(key)
    return name


def trainable(params: Tree) -> Tree:
    """Replace frozen leaves by None: those without grad in a tree where another requires it."""
    leaves, tree = optree.tree_flatten(params)
    held = frozen(leaves)
    if not any(held):
        return params
    return optree.tree_unflatten(
        tree, [None if f else x for x, f in zip(leaves, held, strict=True)]
    )


def moments(params: Tree, *names: str) -> dict[str, Tree]:
    """Make zeros for every trained leaf, a tree under each name, in fp32 for half precision.

    A moment in half precision would not change at all by less than 1/256 of itself.
    """
    tree = trainable(params)
    half = {x.dtype for x in optree.tree_leaves(tree) if isinstance(x, Tensor)} & HALF
    if half and names:
        warnings.warn(
            f"parameters in {' and '.join(sorted(str(d) for d in half))} are updated without a "
            "master copy: changes of less than 1/256 of a weight are lost (their moments are "
            'fp32); keep one: sl.optim.mixed(tx), or sl.optim.zero(tx, axis, master="fp32")',
            stacklevel=_users(),
        )
    return {name: zeros_like(tree) for name in names}


def refuse_copies(tree: Tree, dtype: Callable[[torch.dtype], torch.dtype]) -> None:
    """Refuse copies of the leaves' blocks in other dtypes where they do not fit in the device."""
    found = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    raws = [raw_of(x) for x in found]
    if raws:
        nbytes = sum(x.numel() * dtype(x.dtype).itemsize for x in raws)
        refuse_beyond(nbytes, raws[0].device, "init", getattr(found[0], "mesh", None))


def zeros_like(tree: Tree) -> Tree:
    """Make zeros in the leaves' layouts, in fp32 for half precision.

    Raises: ShardError where all of them do not fit in the device.
    """
    refuse_copies(tree, wider)
    return each(lambda x: torch.zeros_like(x, dtype=wider(x.dtype)), tree)


def settled(tree: Tree) -> Tree:
    """Drop pending sums from the layouts; valid for blocks that are then filled with zeros."""

    def one(x: Any) -> Any:
        if not isinstance(x, ShardedTensor) or not x.sharding.partial:
            return x
        return ShardedTensor(x.raw, x.place._replace(layout=x.sharding.bare, deferred=frozenset()))

    return optree.tree_map(one, tree)


def nothing(grads: Tree, params: Tree = None) -> Tree:
    """Make updates of zeros, in the parameters' layouts if they are given.

    The gradients' layouts may differ: pending, or in buckets.
    """
    like = settled(grads) if params is None else trainable(params)
    return each(torch.zeros_like, like)


def _users() -> int:
    """Count the frames from the caller to the first outside this package, for warnings."""
    frame, depth = sys._getframe(2), 2
    here = str(Path(__file__).parent)
    while frame is not None and frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(here):
            return depth
        frame, depth = frame.f_back, depth + 1
    return depth


def ready(grads: Tree, op: str, moments: Tree = None) -> None:
    """Refuse pending gradients, and gradients without a moment made by ``init``."""
    same = is_bucketed(grads) and getattr(moments, "index", None) is grads.index
    if moments is not None and not same:
        _have_moments(grads, moments, op)
    for g in grads.values() if same else optree.tree_leaves(grads):
        # each rank would step by its own summand
        if isinstance(g, ShardedTensor) and g.place.layout.partial:
            raise PartialEscape(
                f"a gradient's sum over {', '.join(g.sharding.partial)} is still pending",
                op=op,
                operands={"gradient": typeof(g)},
                mesh=g.mesh,
                fix=f"sl.optim.zero(tx, axis={g.sharding.partial[0]!r})",
            )


def _have_moments(grads: Tree, moments: Tree, op: str) -> None:
    """Refuse gradients without a moment."""
    _same_tree(grads, [moments])
    rows = (optree.tree_leaves(t, none_is_leaf=True) for t in (grads, moments))
    for g, m in zip(*rows, strict=True):
        if g is not None and m is None:
            raise ShardError(
                "a gradient came for a leaf that was frozen when the state was made",
                op=op,
                operands={"gradient": typeof(g)},
                fix="state = tx.init(params)",
            )


def given_for(tree: Tree, grads: Tree, op: str) -> list[Any]:
    """List the gradients of a tree's leaves in order; ``tree`` is the parameters' structure.

    Raises: ShardError if the gradients have another structure.
    """
    try:
        return tree.flatten_up_to(grads)
    except (ValueError, TypeError, KeyError):
        raise other_tree(op) from None


def check_gradient(p: Tensor, g: Any, op: str) -> None:
    """Refuse a gradient whose blocks are other parts of it than the parameter's are of that.

    Raises: ShardError.
    """
    if not _same_block(p, g):
        why = "a gradient lies otherwise than its parameter"
        raise ShardError(
            "a parameter has no gradient" if g is None else why,
            op=op,
            operands={"parameter": typeof(p), "gradient": type_or_class(g)},
            mesh=getattr(p, "mesh", None),
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )


def need(params: Tree, op: str) -> None:
    """Raise an error if the parameters are missing."""
    if params is None:
        raise ShardError(f"{op} needs the parameters", op=op, fix="tx.update(grads, state, params)")


def _alike(x: Tensor, y: Any, op: str) -> None:
    """Check that blocks, which are combined by position, are the same part of a tensor."""
    values: dict[str, Any] = {"x": x, "y": y}
    sharded = [name for name, t in values.items() if isinstance(t, ShardedTensor)]
    if not sharded or (len(sharded) == 2 and x.place[:4] == y.place[:4]):
        return
    if isinstance(x, ShardedTensor) and isinstance(y, ShardedTensor):
        raise _difference(x, y, op)
    (like,), (plain,) = sharded, values.keys() - sharded
    raise ShardError(
        "leaves of two trees are not both sharded",
        op=op,
        operands={name: type_or_class(t) for name, t in values.items()},
        mesh=values[like].mesh,
        fix=f"sl.shard({plain}, sl.layout_of({like}), {like}.mesh)",
    )


def _difference(x: ShardedTensor, y: ShardedTensor, op: str) -> ShardError:
    """Build the error for blocks that are different parts of a tensor."""
    why = "leaves of two trees lie differently"
    fix = "sl.reshard(y, sl.layout_of(x))"
    kind = ShardError
    if x.mesh is not y.mesh:
        why = f"leaves of two trees lie on different meshes, {x.mesh} and {y.mesh}"
        fix = "sl.shard(sl.unshard(y), sl.layout_of(x), x.mesh)"
    elif (x.shape, x.padded_shape) != (y.shape, y.padded_shape):
        why = "leaves of two trees have different sizes"
        fix = "tx.init(x)"
    elif y.sharding.partial and not x.sharding.partial:
        sums = ", ".join(y.sharding.partial)
        why = f"a leaf's sum over {sums} is still pending, and the other's is not"
        kind = PartialEscape
    return kind(why, op=op, operands={"x": typeof(x), "y": typeof(y)}, mesh=x.mesh, fix=fix)


def _same_tree(first: Tree, others: Sequence[Any]) -> None:
    tree: Any = optree.tree_structure(first, none_is_leaf=True)
    for other in others:
        theirs: Any = optree.tree_structure(other, none_is_leaf=True)
        if theirs != tree:
            raise ShardError(
                _differing(tree, theirs),
                op="update",
                fix="tx.update({k: grads.get(k) for k in params}, state, params)",
            )


def first_of(names: Sequence[str], most: int = 4) -> str:
    """List the first names.

    >>> first_of("abc", 2), first_of("abc")
    ('a, b, ...', 'a, b, c')
    """
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])


def _differing(tree: Any, other: Any) -> str:
    """Say where two structures differ."""
    names = sorted(names_of(list(set(tree.paths()) ^ set(other.paths()))))
    return f"the trees differ at {', '.join(names[:4]) or 'their root'}"


# ---------------------------------------------------------------- tensors of either kind of tree


def stages_around(tree: Tree) -> Outer | None:
    """Return the pipeline of which a tree's mesh is one stage, if processes run the others.

    The trees of these ranks differ.
    """
    mesh = stage_mesh(tree)
    outer = None if mesh is None else mesh.outer
    return outer if outer is not None and spans_processes(outer.mesh) else None


def is_bucketed(tree: Tree) -> bool:
    """Return whether a tree is ``Buckets``, of which each rank has parts."""
    return isinstance(tree, Buckets)


def bucketed_in(tree: Tree) -> list[Buckets]:
    """List the ``Buckets`` in a tree, such as a state."""
    found = optree.tree_leaves(tree, is_leaf=is_bucketed)
    return [x for x in found if isinstance(x, Buckets)]


def cuts(tree: Tree) -> list[str]:
    """Describe which elements are neighbours in each bucket; [] for a plain tree."""
    if not isinstance(tree, Buckets):
        return []
    return [str((b.axes, b.slots, b.length)) for b in tree.index]


class TensorView(NamedTuple):
    """One tensor of a tree, or of tied ones, and its elements on the ranks in this process.

    ``layout``, ``tiled``  of the whole tensor, as of a Place, and ``shape``.
    ``parts``   per rank in this process a view of its elements; None: it has none.
    ``like``    a tensor of its dtype and device.
    ``bucket``  its bucket, which cuts its blocks into runs, and ``leaf`` its number there.
    """

    layout: Layout
    tiled: tuple[int, ...]
    shape: tuple[int, ...]
    mesh: Mesh | None
    parts: Sequence[Tensor | None]
    like: Tensor
    bucket: Bucket | None = None
    leaf: int = 0

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split its elements."""
        return self.layout.axes if self.bucket is None else (*self.bucket.axes, *self.cut)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes along which blocks are cut into runs, major first."""
        return () if self.bucket is None else self.bucket.over

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Per rank along ``cut``, the elements (start, stop) of its block that it holds."""
        ways = range(self.bucket.ways) if self.bucket is not None and self.cut else ()
        found = [_slots(self.bucket, rank).get(self.leaf) for rank in ways]
        return tuple((0, 0) if p is None else (p.at, p.at + p.length) for p in found)


@lru_cache(maxsize=4096)
def _slots(bucket: Bucket, rank: int) -> dict[int, SlotPart]:
    """Map the first leaf of each slot to the part that a rank holds of it."""
    return {p.slot.leaves[0]: p for p in parts(bucket, rank, bucket.ways)}


def by_tensor(tree: Tree) -> list[TensorView | None]:
    """List the tensors of a tree, tied ones once, in the order of ``named``; None stays None."""
    if isinstance(tree, Buckets):
        return _in_buckets(tree)
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    return [_view(x) if isinstance(x, Tensor) else None for x in leaves]


def _view(x: Tensor) -> TensorView:
    shape = tuple(x.shape)
    if isinstance(x, ShardedTensor):
        return TensorView(x.sharding, tuple(x.padded_shape), shape, x.mesh, blocks_of(x), x.raw)
    return TensorView(Layout((Dim(),) * x.ndim), shape, shape, None, blocks_of(x), x)


def _in_buckets(tree: Buckets) -> list[TensorView | None]:
    out: list[TensorView | None] = []
    for bucket in tree.index:
        like = tree[bucket.name].raw
        ranks = blocks(like.detach(), tree.mesh)
        rows = held(bucket, tree.mesh, bucket.length // len(ranks[0]))
        # keyed by leaf: an empty slot has the next one's offset
        mine = {(p.slot.leaves[0], i): ranks[i][p.start : p.start + p.length] for i, p in rows}
        for slot in bucket.slots:
            leaf = slot.leaves[0]
            item = tree.index.items[leaf]
            views = [mine.get((leaf, i)) for i in range(len(played(tree.mesh)))]
            sizes = item.tiled, item.whole
            out.append(TensorView(item.layout, *sizes, tree.mesh, views, like, bucket, leaf))
    return out


def cleared(tree: Tree) -> Tree:
    """Zero the padding of all leaves, which a sum over blocks would count otherwise."""

    def one(x: Any) -> Any:
        padded = isinstance(x, ShardedTensor) and x.is_padded
        return x.becomes(filled(x, 0).raw) if padded else x

    return tree if is_bucketed(tree) else optree.tree_map(one, tree)


def named(tree: Tree, once: bool = False) -> dict[str, Any]:
    """Map each path to its leaf, None for a frozen one; for ``Buckets``, to tensors on meta.

    ``once``  tied tensors of buckets have their first path only, as in ``by_tensor``.

    >>> sorted(named({"a": {"b": 1, "c": None}, "d": [2]}))
    ['a.b', 'a.c', 'd.0']
    """
    if is_bucketed(tree):
        most = 1 if once else None
        leaves = (s.leaves[:most] for b in tree.index for s in b.slots)
        items = [tree.index.items[i] for some in leaves for i in some]
        return {item.path: torch.empty(item.whole, device="meta") for item in items}
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    return dict(zip(names_of(paths), leaves, strict=True))


def without(tree: Tree, names: Collection[str]) -> list[Tensor]:
    """List the leaves of a tree but those of ``names``, which share no bucket with others."""
    if not is_bucketed(tree):
        return [x for n, x in named(tree).items() if isinstance(x, Tensor) and n not in names]
    rows = zip(tree.index, tree.index.firsts(tree.paths), strict=True)
    return [tree[b.name] for b, first in rows if first not in names]


def only(tree: Tree, values: Mapping[str, Any], value: Any) -> Tree:
    """Replace every leaf whose path has another value than ``value`` by None.

    For ``Buckets``, return the buckets whose parameters have it; they must agree within a bucket.
    """
    if is_bucketed(tree):
        return tree.subset(tuple(n for n, v in _by_bucket(tree, values).items() if v == value))
    kept = [x if values[n] == value else None for n, x in named(tree).items()]
    return optree.tree_unflatten(optree.tree_structure(tree, none_is_leaf=True), kept)


def merged(tree: Tree, values: Mapping[str, Any], parts: Mapping[Any, Any]) -> Tree:
    """Build a tree like ``tree``, taking each leaf from the part of its path's value."""
    if is_bucketed(tree):
        return tree.like({n: parts[v][n] for n, v in _by_bucket(tree, values).items()})
    rows = {v: optree.tree_leaves(part, none_is_leaf=True) for v, part in parts.items()}
    found = enumerate(named(tree).items())
    out = [rows[values[n]][i] if values[n] in rows else x for i, (n, x) in found]
    return optree.tree_unflatten(optree.tree_structure(tree, none_is_leaf=True), out)


def _by_bucket(tree: Buckets, values: Mapping[str, Any]) -> dict[str, Any]:
    """Map each bucket's name to the value of its parameters."""
    out = {}
    for bucket in tree.index:
        found = {values[tree.index.items[i].path] for slot in bucket.slots for i in slot.leaves}
        assert len(found) == 1, "Transform.groups keeps parameters of two values apart"
        out[bucket.name] = found.pop()
    return out


# ---------------------------------------------------------------- plain tensors for kernels


def pieces(first: Tree, *others: Tree) -> list[list[Tensor]]:
    """List the plain tensors of equal trees for a kernel: one list per tree, as views.

    There is one per leaf and rank in this process; of ``Buckets`` a leaf is a bucket's part, with
    the padding between its slots, which is zero where all trees' is.  Leaves that are None in one
    of the trees, and empty ones, are left out.
    Raises: ShardError if the trees differ, or a leaf is another block in one of them.
    """
    if is_bucketed(first) and all([getattr(t, "index", None) is first.index for t in others]):
        trees = (first, *others)
        names = [n for n in first if all([t[n] is not None for t in trees])]
        return [[vector for n in names for vector in blocks_of(t[n])] for t in trees]
    out: list[list[Tensor]] = [[] for _ in range(1 + len(others))]
    for row in _rows(first, *others):
        for kept, x in zip(out, row, strict=True):
            kept += blocks_of(x)
    return out


def _rows(*trees: Tree) -> Iterator[tuple[Tensor, ...]]:
    """Yield the leaves of equal trees together, those that are tensors with elements."""
    leaves, structures = zip(
        *(optree.tree_flatten(t, none_is_leaf=True) for t in trees), strict=True
    )
    for other in structures[1:]:
        if other != structures[0]:
            raise of_others(_differing(structures[0], other))
    for row in zip(*leaves, strict=True):
        if all(isinstance(x, Tensor) for x in row):
            one_block(*row)
            if row[0].numel():
                yield row


def one_block(first: Tensor, *others: Tensor) -> None:
    """Refuse tensors that are not the same part of equal tensors: a kernel would mix elements.

    Raises: ShardError.
    """
    for x in others:
        if not _same_block(first, x):
            raise of_others("a leaf is another block", {"x": typeof(first), "y": typeof(x)})


def _same_block(x: Tensor, y: object) -> bool:
    """Return whether two values have equal sizes and blocks, also where a sum is pending."""
    if isinstance(x, ShardedTensor) and isinstance(y, ShardedTensor):
        p, q = x.place, y.place
        return p[1:4] == q[1:4] and p.layout.dims == q.layout.dims
    sharded = isinstance(x, ShardedTensor) or isinstance(y, ShardedTensor)
    return isinstance(y, Tensor) and not sharded and x.shape == y.shape


def of_others(
    how: str,
    operands: dict[str, str] | None = None,
    op: str = "optim.step",
    mesh: Mesh | None = None,
    moved: bool = False,
) -> ShardError:
    """Build the error for a state of other parameters, or of these in other places: ``moved``."""
    fix = "state = tx.init(params)"
    if moved:
        fix = "state = sl.optim.load_state_dict(tx.init(params), sl.optim.state_dict(state))"
    why = f"the state was made for other parameters: {how}"
    return ShardError(why, op=op, operands=operands or {}, mesh=mesh, fix=fix)


def other_tree(op: str) -> ShardError:
    """Build the error for gradients of another structure than the parameters'."""
    why = "the gradients are another tree than the parameters"
    return ShardError(why, op=op, fix="loss, grads = sl.value_and_grad(f)(params)")


SPAN = 1 << 16
"""Elements per chunk: the temporaries of a step have this size, and fit a core's cache."""


def spans(*rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of ``SPAN`` elements of parallel lists of tensors, as views: writes change them.

    Tensors that are not contiguous are cut into slices of their first dimension.  On the meta device,
    where equal chunks do the same, the first and the last are yielded.

    >>> [x.shape[0] for (x,) in spans([torch.ones(2, SPAN // 2), torch.ones(3)])]
    [65536, 3]
    """
    for row in zip(*rows, strict=True):
        first = row[0]
        if all(t.is_contiguous() for t in row):
            flat, n = [t.view(-1) for t in row], SPAN
        else:
            flat, n = list(row), max(SPAN * first.shape[0] // max(first.numel(), 1), 1)
        size = len(flat[0])
        if size <= n:
            yield tuple(flat)
        elif first.is_meta:
            for some in slice(n), slice((size - 1) // n * n, None):
                yield tuple(t[some] for t in flat)
        else:
            yield from zip(*(t.split(n) for t in flat), strict=True)


def lies_flat(x: Tensor) -> bool:
    """Return whether each block is contiguous, so that reshaping it to a vector is a view."""
    return all(b.is_contiguous() for b in blocks_of(x))


def writable(grads: Tree, like: Tree) -> Tree:
    """Return memory for a step's directions.

    It is the gradients' own, which the step may overwrite, if their dtype is ``like``'s; else new
    memory in that dtype.  A leaf that is None in either tree stays None.
    """

    def one(g: Any, m: Any) -> Any:
        if g is None or m is None:
            return None
        if g.dtype == m.dtype and lies_flat(g):
            return g
        how: Any = {"dtype": m.dtype, "memory_format": torch.contiguous_format}
        return with_raw(g, torch.empty_like(raw_of(g), **how))

    return optree.tree_map(one, grads, like, none_is_leaf=True)
