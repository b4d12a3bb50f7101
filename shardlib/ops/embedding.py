"""Embedding with a split vocabulary: each rank looks up the rows it owns.

    table [V@v, H], ids not split over v      masked lookup, psum over v          (Megatron)
    table [V@v, H], ids [B@(.. v), ...]       gather ids over v, masked lookup of all of them,
                                              reduce-scatter rows back over v     (2D)
    table [V, H]                              a local lookup

H may be split over further axes in every case; minor ones that also split the ids are gathered
first, and the table's gradient is scattered over them (3D).

Source: arXiv 1909.08053, section 3; arXiv 2104.05343, section 3.2.3; arXiv 2105.14450.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local
from shardlib.collectives import all_gather, axis_index, psum, psum_scatter, unwrap, wrap
from shardlib.errors import BadArgument, ImplicitCommunication, OutOfRange, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.ops.declare import by_signature
from shardlib.ops.id_bounds import in_range
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor.gradients import real_axes, vary
from shardlib.tensor.lifting import lift, lifted, tiles_of
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    ShardedTensor,
    blockwise,
    call_error,
    has_padding,
    implements,
    local_call,
)


class _Lookup(Local):
    """Lookup in a table whose vocabulary is split over ``axes``.

    ids [B, ...], table [V/axes, H] -> [B, ..., H]; where a dimension of ids is itself split over
    ``axes`` (``at``), they are gathered and the rows scattered back.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        table: Tensor,
        ids: Tensor,
        mesh: Mesh,
        axes: tuple[str, ...],
        at: int,
        padding: int | None,
    ) -> Tensor:
        ctx.place = mesh, axes, at
        with bind(mesh):
            w, i = wrap(table, mesh), wrap(ids, mesh)
            i = all_gather(i, axes, at) if at >= 0 else i
            here = i - axis_index(axes) * w.shape[0]
            outside = (here < 0) | (here >= w.shape[0])
            here = here.masked_fill(outside, 0)
            out = F.embedding(here, w).masked_fill(outside.unsqueeze(-1), 0)
            drop = outside if padding is None else outside | (i == padding)
            ctx.save_for_backward(unwrap(here), unwrap(drop))
            ctx.vocab = w.shape[0]
            return unwrap(psum_scatter(out, axes, at) if at >= 0 else psum(out, axes))

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        mesh, axes, at = ctx.place
        with bind(mesh):
            g = wrap(grads[0] if at >= 0 else vary(grads[0], mesh, axes), mesh)
            g = all_gather(g, axes, at) if at >= 0 else g
            here, drop = (wrap(t, mesh) for t in ctx.saved_tensors)
            return unwrap(_scatter_rows(g, here, drop, ctx.vocab)), None, None, None, None, None


def _scatter_rows(g: Tensor, ids: Tensor, drop: Tensor, vocab: int) -> Tensor:
    """Sum the rows of g [..., H] by id -> [vocab, H]."""
    rows = g.masked_fill(drop.unsqueeze(-1), 0).reshape(-1, g.shape[-1])
    return torch.index_add(g.new_zeros(vocab, g.shape[-1]), 0, ids.reshape(-1), rows)


_EMBEDDING = binder(
    "embedding(input: tensor, weight: tensor, padding_idx: int = None, max_norm: number = None, "
    "norm_type=2.0, "
    "scale_grad_by_freq=False, sparse=False)"
)


def _padded_vocabulary(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Refuse padding but in the vocabulary, since no id refers to the rows beyond it."""
    given = _EMBEDDING(*args, **kwargs)
    ids, table = given["input"], given["weight"]
    uneven = has_padding((ids,))
    if not uneven and table.shape[1] == table.padded_shape[1]:
        return run(func, args, kwargs)
    mesh = getattr(table, "mesh", None)
    axis = "x" if mesh is None else mesh.names[0]
    whole = ["sl.shard(sl.unshard(ids), '...')" if uneven else "ids", "sl.unshard(table)"]
    why = "only the vocabulary of an embedding may be padded"
    fix = f"F.embedding({whole[0]}, sl.shard({whole[1]}, '{axis} .', pad=True))"
    raise call_error(Unsupported, why, "embedding", fix, ids=ids, table=table)


@implements(F.embedding, padding=_padded_vocabulary, takes="plain")
def embedding(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Look up ids, split or not, in a table whose rows and columns may be split over any axes."""
    given = _EMBEDDING(*args, **kwargs)
    ids, table = given["input"], given["weight"]
    count = table.shape[0]
    padding = _checked(ids, table, count, given)
    if tiles := tiles_of(table):
        return _by_tiles(ids, tiles, padding)
    table, ids = lifted("embedding", table, ids)
    mesh, of_ids, of_table = table.mesh, ids.place, table.place
    key = of_ids.layout, of_ids.shape, of_table.layout, of_table.shape, of_table.deferred
    plan = mesh.memo("lookup", key, lambda: _planned(ids, table))
    fits = count == of_table.shape[0]
    if plan.axes or not fits:
        # otherwise torch's own kernel checks the ids
        in_range(ids.raw, count, "embedding", "id")
    raw_table = vary(table.raw, mesh, plan.meets)
    own = plan.own and fits and raw_table is table.raw
    if own and list(map(id, args)) == [id(ids), id(table)]:
        return blockwise(func, args, kwargs, plan.place)
    if plan.gathered:
        with bind(mesh):
            raw_table = unwrap(all_gather(wrap(raw_table, mesh), plan.gathered, 1))
    if plan.axes:
        raw: Any = _Lookup.apply(raw_table, ids.raw, mesh, plan.axes, plan.at, padding)
    else:
        raw = local_call(F.embedding, mesh, ids.raw, raw_table, padding)
    return ShardedTensor(raw, plan.place)


def _by_tiles(ids: Any, tiles: Sequence[ShardedTensor], padding: int | None) -> Any:
    """Look up ids in one tile of rows after another; each id's row is in one of them."""
    mesh, count, first = tiles[0].mesh, sum(t.shape[0] for t in tiles), 0
    out: Any = None
    ids = lift(ids, mesh, "embedding")
    in_range(ids.raw, count, "embedding", "id")
    ways = mesh.axis_size(tuple(tiles[0].dims[0].axes))
    rows = count // ways
    block, inside = ids // rows, ids % rows
    for tile in tiles:
        # a tile has these rows of each block of the table
        n = tile.shape[0] // ways
        row = inside - first
        outside = (row < 0) | (row >= n)
        at = (block * n + row).masked_fill(outside, 0)
        none = None
        if padding is not None and 0 <= padding % rows - first < n:
            none = padding // rows * n + padding % rows - first
        found: Any = F.embedding(at, tile, none).masked_fill(outside.unsqueeze(-1), 0)
        out = found if out is None else out + found
        first += n
    return out


def _checked(ids: Tensor, table: Tensor, count: int, given: dict[str, Any]) -> int | None:
    """Return padding_idx; refuse what torch does not take, and options that no sharded table has."""
    if ids.dtype not in (torch.int64, torch.int32) or table.ndim != 2:
        why = "ids are int64 or int32, a table has two dimensions"
        raise call_error(
            BadArgument, why, "embedding", "F.embedding(ids.long(), table)", ids=ids, table=table
        )
    padding = given["padding_idx"]
    if padding is not None and not -count <= padding < count:
        raise OutOfRange(
            f"padding_idx {padding} must be within the table's {count} rows", op="embedding"
        )
    if given["max_norm"] is not None or given["scale_grad_by_freq"] or given["sparse"]:
        why = "max_norm, scale_grad_by_freq and sparse are not supported on a sharded table"
        raise call_error(Unsupported, why, "embedding", "F.embedding(ids, table)", table=table)
    return None if padding is None else padding % count


@by_signature(
    "embedding(weight: tensor, indices: tensor, padding_idx: int = -1, scale_grad_by_freq=False, "
    "sparse=False)",
    torch.embedding, takes="padding skew",
)  # fmt: skip
def embedding_of_rows(
    func: Func, table: Tensor, ids: Tensor, padding: int, by_frequency: bool, sparse: bool
) -> Tensor:
    """Look up ids by aten's signature, in which a padding_idx of -1 means none."""
    known = padding if padding >= 0 else None
    return F.embedding(ids, table, known, None, 2.0, by_frequency, sparse)


class _LookupPlan(NamedTuple):
    """Place of the result, and the axes of the lookup.

    ``axes``      that split the vocabulary; ``at``  the dimension of the ids that they split too,
                  or -1.
    ``gathered``  axes over which the table's columns are gathered first.
    ``meets``     axes over which the table's gradient is summed.
    ``own``       whether torch's own lookup in the blocks is all.
    """

    place: Place
    axes: tuple[str, ...]
    at: int
    gathered: tuple[str, ...]
    meets: tuple[str, ...]
    own: bool


def _planned(ids: ShardedTensor, table: ShardedTensor) -> _LookupPlan:
    mesh, tokens = table.mesh, ids.dims
    taken = {*ids.sharding.axes}
    vocab, hidden = table.sharding.resolve(2).dims
    axes = tuple(a for a in vocab.axes if mesh.axes[a] > 1)
    at = _split_by(axes, tokens)
    gathered = tuple(a for a in hidden.axes if a in taken)
    kept = hidden.parts[: len(hidden.parts) - len(gathered)]
    minor = hidden.parts == (*kept, *gathered) and hidden.is_plain
    if (gathered and not minor) or not vocab.is_plain or (at < 0 and taken & {*axes}):
        raise _misfit(ids, table, ". ." if gathered else f". {hidden}")
    out = Layout(dims=(*tokens, Dim(kept) if gathered else hidden))
    shape = torch.Size((*ids.padded_shape, table.padded_shape[1]))
    deferred = table.deferred.difference(out.axes)
    meets = {*out.axes, *deferred}.difference(table.sharding.axes, table.deferred)
    place = Place(out, shape, mesh, deferred=deferred)
    own = not (axes or gathered)
    return _LookupPlan(place, axes, at, gathered, real_axes(mesh, meets), own)


def _split_by(axes: tuple[str, ...], tokens: tuple[Dim, ...]) -> int:
    """Return the first dimension whose innermost split is over ``axes``, or -1."""
    for d, token in enumerate(tokens if axes else ()):
        if token.parts[-len(axes) :] == axes and token.order == "contiguous":
            return d
    return -1


def _misfit(ids: ShardedTensor, table: ShardedTensor, where: str) -> ImplicitCommunication:
    why = f"ids split {ids.sharding} do not fit a table split {table.sharding}"
    fix = f"F.embedding(ids, sl.reshard(table, {where!r}))"
    return call_error(ImplicitCommunication, why, "embedding", fix, ids=ids, table=table)
