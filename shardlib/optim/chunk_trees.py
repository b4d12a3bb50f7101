"""Trees of a step in memory tiers: parameters, gradients and state of some chunks, and their rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import storage_shape
from shardlib.optim.buckets import Buckets, Index, State, Tree
from shardlib.optim.chunk_cache import ChunkCache
from shardlib.optim.tiered import row_of
from shardlib.optim.trees import bucketed_in, is_bucketed
from shardlib.tensor import ShardedTensor
from shardlib.tiers.rows import TierRow

GROUP = 1 << 20
"""Bytes of parameters below which Python takes longer than the update itself."""


# ---------------------------------------------------------------- chunks


def by_chunk(
    cache: ChunkCache, mine: Buckets, first: Iterable[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Map chunks, those of ``first`` before all others, to the names of their buckets."""
    order = dict.fromkeys((*first, *cache.chunks))
    found = {c: tuple(b.name for b in cache.chunks[c] if b.name in mine) for c in order}
    return {c: names for c, names in found.items() if names}


def grouped(cache: ChunkCache, chunks: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join chunks to groups of GROUP bytes at least, each of which one job updates."""
    if cache.here or cache.store.sizes:
        # rows of one chunk at a time are brought
        return chunks
    found: list[tuple[str, ...]] = []
    size = GROUP
    for names in chunks:
        if size >= GROUP:
            found.append(())
            size = 0
        found[-1] += names
        size += cache.sizes[cache.chunk_of[names[0]]]
    return found


# ---------------------------------------------------------------- values


def stored(tree: Tree, names: tuple[str, ...], raw: Callable[[ShardedTensor], Tensor]) -> Any:
    """Return a tree with the buckets of these names alone, of values with other blocks."""
    return _with(tree, names, lambda x: ShardedTensor(raw(x).detach(), x.place))


def taken(names: tuple[str, ...], *trees: Tree) -> Any:
    """Return trees with the buckets of these names alone, which outlive those that are given up."""
    return tuple(_with(t, names, lambda x: x.at(x.place)) for t in trees)


def _with(tree: Tree, names: Any, value: Callable[[ShardedTensor], ShardedTensor]) -> Any:
    def some(x: Buckets) -> Buckets:
        found = {n: value(x[n]) for n in names or x if n in x}
        return Buckets(found, x.index.subset(tuple(found)), x.mesh)

    return _mapped(some, tree)


def _mapped(f: Callable[[Buckets], Any], tree: Tree) -> Any:
    """Map a function over the buckets in a tree."""
    one = lambda x: f(x) if is_bucketed(x) else x  # noqa: E731
    return optree.tree_map(one, tree, is_leaf=is_bucketed, none_is_leaf=True)


def rows_of(trees: Tree) -> list[TierRow]:
    """List the rows that values are read from."""
    return [row for x in bucketed_in(trees) for v in x.values() if (row := row_of(v)) is not None]


def opened(trees: Any, memory: Mapping[TierRow, Tensor]) -> Any:
    """Return trees whose rows are in memory."""

    def raw(x: ShardedTensor) -> Tensor:
        row = row_of(x)
        return x.raw if row is None else memory[row]

    return tuple(stored(t, (), raw) for t in trees)


def stand_in(cache: ChunkCache, x: ShardedTensor) -> Tensor:
    """Return a copy on the device; of what the host updates, by elements alone, a row of none."""
    row = x.raw
    if cache.here:
        return cache.states.take(row.shape, row.dtype).copy_(row)
    return torch.empty((*row.shape[:-1], 0), dtype=row.dtype, device="cpu")


def on_paper(cache: ChunkCache, index: Index, asks: Mapping[str, bool]) -> Buckets:
    """Return parts without memory."""
    values = {}
    for b in index:
        raw = cache.standing[b.name].to("meta").new_empty(storage_shape(cache.mesh, b.part_length))
        values[b.name] = ShardedTensor(raw.requires_grad_(asks[b.name]), b.place(cache.mesh))
    return Buckets(values, index, cache.mesh)


def joined_chunks(parts: Sequence[Buckets], mine: Buckets) -> Buckets:
    """Return the buckets of all chunks as one."""
    found = {n: x for some in parts for n, x in some.items()}
    names = tuple(n for n in mine if n in found)
    index = mine.index.subset(names) if len(names) < len(mine) else mine.index
    return Buckets({n: found[n] for n in names}, index, mine.mesh)


def plain(some: Buckets) -> Buckets:
    """Return the same values as Buckets: trees that are combined are of one type."""
    return Buckets(some, some.index, some.mesh)


# ---------------------------------------------------------------- numbers of a state


def numbers_of(state: State) -> dict[Any, Any]:
    """Map each place of a state to its number, but those of buckets."""
    rows = optree.tree_flatten_with_path(state, is_leaf=is_bucketed, none_is_leaf=True)
    return {p: x for p, x in zip(*rows[:2], strict=True) if not is_bucketed(x) and x is not ...}


def numbered(after: State, before: State) -> Any:
    """Return a state with ... in the place of each of its buckets; None if it has other memory.

    ``before``  the state whose buckets the update overwrote.
    """

    def memory(state: State) -> list[list[int]]:
        return [[v.raw.data_ptr() for v in x.values()] for x in bucketed_in(state)]

    return _mapped(lambda _: ..., after) if memory(after) == memory(before) else None


def picked(numbered: Any, state: State) -> State:
    """Return the state of which the update of one chunk was numbered."""
    every = iter(bucketed_in(state))
    return optree.tree_map(lambda x: next(every) if x is ... else x, numbered, none_is_leaf=True)


def leading(chunks: Iterable[str], splits: Mapping[str, frozenset[Any]]) -> list[str]:
    """List the first chunks of which the updates change all numbers of the state that any changes."""
    found, seen = list[str](), frozenset[Any]()
    for chunk in chunks:
        if not found or not splits[chunk] <= seen:
            found.append(chunk)
            seen |= splits[chunk]
    return found


def merged_states(after: Mapping[str, Any], splits: Mapping[str, frozenset[Any]]) -> Any:
    """Return the state of the first of these updates, with the numbers that others change."""
    found = dict[Any, Any]()
    for chunk in reversed(list(after)):
        found |= {p: x for p, x in numbers_of(after[chunk]).items() if p in splits[chunk]}
    first = after[next(iter(after))]
    paths, leaves, tree = optree.tree_flatten_with_path(first, none_is_leaf=True)
    rows = zip(paths, leaves, strict=True)
    return optree.tree_unflatten(tree, [found.get(path, x) for path, x in rows])
