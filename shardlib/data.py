"""Batches as global tensors; the order of rows does not depend on the number of ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeVar, overload

import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shardlib.collectives import (
    Stacked,
    holds_values,
    played,
    spans_processes,
    storage,
)
from shardlib.errors import BadArgument, MeshError, RankMismatch, ShardError
from shardlib.layouts import Layout, LayoutTree, as_layout, is_layout, per_leaf
from shardlib.mesh import Mesh, MeshLike, as_mesh, brought, within
from shardlib.random import branch, mixed
from shardlib.tensor import Place, ShardedTensor

Key = TypeVar("Key")
Tree = TypeVar("Tree")


@overload
def from_local(
    local: Tensor | Callable[[], Tensor], layout: LayoutTree, mesh: MeshLike | None = None
) -> ShardedTensor: ...
@overload
def from_local(
    local: Mapping[Key, Tensor] | Callable[[], Mapping[Key, Tensor]],
    layout: LayoutTree,
    mesh: MeshLike | None = None,
) -> dict[Key, ShardedTensor]: ...
@overload
def from_local(
    local: Callable[[], Tree], layout: LayoutTree, mesh: MeshLike | None = None
) -> Tree: ...
@overload
def from_local(local: Tree, layout: LayoutTree, mesh: MeshLike | None = None) -> Tree: ...
def from_local(local: object, layout: LayoutTree, mesh: MeshLike | None = None) -> object:
    """Make a global tensor of the blocks on the ranks; nothing moves.

    ``local``   this rank's block, or a pytree of blocks, or a function that reads it.  The function
                is called for each rank of this process: once in a job, for every rank in turn
                under ``sl.simulate``; ``mesh.coord`` has the rank's position.
    ``layout``  the layout of the blocks, or a tree of layouts like the blocks' tree.
    Shapes: [n, ...] -> [n * size(axes), ...] along each dimension that is split.  Ranks that differ
    only in axes that the layout does not name must have the same block.
    Raises: MeshError where one process simulates several ranks and gets one block; RankMismatch
    where their blocks differ in shape or dtype.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2) as mesh:
    ...     x = from_local(lambda: torch.full((2, 3), mesh.coord["data"]), "data .")
    ...     sl.typeof(x), sl.unshard(x)[:, 0]
    ('i64[4@data, 3]', tensor([0, 0, 1, 1]))
    """
    m = as_mesh(mesh)
    if spans_processes(m) and m.coord is None:
        raise MeshError(
            "this process is not in the mesh", op="from_local", mesh=m, fix="sl.make_mesh(x=-1)"
        )
    if callable(local) and not isinstance(local, Tensor):
        parts = []
        for coord in played(m):
            with within(reading=(m, coord)):
                parts.append(local())
    else:
        parts = _one_given(local, m)
    flat = [optree.tree_flatten(part) for part in parts]
    spec = flat[0][1]
    if odd := [other for _, other in flat if other != spec]:
        text = "the ranks read trees that differ"
        given = {"of rank 0": spec, "of another": odd[0]}
        fix = "sl.from_local(lambda: {'ids': ids, 'labels': labels}, layout)  # on every rank"
        raise RankMismatch(text, op="from_local", operands=given, mesh=m, fix=fix)
    layouts = per_leaf(layout, parts[0], "from_local", "sl.from_local(local, {})")
    # of each leaf, one per rank
    blocks = zip(*(leaves for leaves, _ in flat), strict=True)
    made = [_joined(list(of), lay, m) for of, lay in zip(blocks, layouts, strict=True)]
    return optree.tree_unflatten(spec, made)


def _one_given(local: Any, m: Mesh) -> list[Any]:
    """Return one part per rank of this process from a block that was passed as a value."""
    count = len(played(m))
    leaves, spec = optree.tree_flatten(local)
    if all(isinstance(x, Stacked) for x in leaves):
        return [optree.tree_unflatten(spec, [x.ranks[r] for x in leaves]) for r in range(count)]
    if count > 1:
        text = "one block is given, and this process plays several ranks"
        fix = "sl.from_local(lambda: local, layout)  # called for each rank; mesh.coord says which"
        raise MeshError(text, op="from_local", mesh=m, fix=fix)
    return [local]


def _joined(blocks: list[Any], layout: object, m: Mesh) -> ShardedTensor:
    blocks = [b if isinstance(b, Tensor) else torch.as_tensor(b) for b in blocks]
    first = blocks[0]
    odd = next((b for b in blocks if b.shape != first.shape or b.dtype != first.dtype), None)
    if odd is not None:
        text = (
            f"the ranks read blocks that differ: {list(first.shape)} of {first.dtype} and "
            f"{list(odd.shape)} of {odd.dtype}"
        )
        fix = "sl.data(dataset, 32, ignore={'labels': -100})  # which fills the last batch up"
        raise RankMismatch(text, op="from_local", mesh=m, fix=fix)
    fix = "sl.from_local(local, {})"
    lay = as_layout(layout, "from_local", fix, shape=first.shape, mesh=m).resolve(first.ndim)
    shape = torch.Size(n * m.axis_size(d.axes) for n, d in zip(first.shape, lay.dims, strict=True))
    lay.check(tuple(shape), m, op="from_local")
    if not holds_values(m):
        raw = torch.empty(first.shape, dtype=first.dtype, device="meta")
    else:
        raw = brought(storage([b.detach() for b in blocks], m), m.device).contiguous()
    return ShardedTensor(raw, Place(lay, shape, m))


# ---------------------------------------------------------------- a dataset, batch by batch


class Rows(Protocol):
    """A dataset: rows by number, as in ``torch.utils.data.Dataset`` or a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


def data(
    dataset: Rows | Dataset[object],
    batch: int,
    layout: LayoutTree = "data ...",
    *,
    mesh: MeshLike | None = None,
    shuffle: bool = True,
    seed: int = 0,
    last: Literal["fill", "drop"] = "fill",
    ignore: Mapping[str, float] | Mapping[int, float] | None = None,
    collate: Callable[..., object] | None = None,
    workers: int = 0,
    state: Mapping[str, int] | None = None,
) -> "Batches":
    """Distribute a torch Dataset over the data ranks: iterate over the result for global batches.

    ``dataset``  has ``len`` and ``[i]``: a tensor, a number or a pytree of them.
    ``batch``    rows of a global batch.
    ``layout``   of each tensor [batch, ...], or a tree of them.
    ``shuffle``  in an order drawn from ``seed`` and the epoch, the same for any number of ranks.
    ``last``     batch of an epoch that does not divide: "fill" it with rows whose labels are
                 ignored, or "drop" it.
    ``ignore``   key of a field -> value in its filled rows, by default ``{"labels": -100}``; other
                 fields are filled with zeros.
    ``collate``  makes one pytree of tensors of a list of rows; by default each field is stacked.
    ``workers``  processes per rank that read ahead.
    ``state``    of a run that is resumed, on any number of ranks; see ``Batches.state``.
    Each rank reads its own rows only.
    Raises: UnevenSplit where a batch does not divide over the ranks; BadArgument.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2):
    ...     rows = data([{"ids": torch.tensor(i), "labels": i} for i in range(5)], 4, shuffle=False)
    ...     [sl.unshard(b["labels"]).tolist() for b in rows]
    [[0, 1, 2, 3], [4, -100, -100, -100]]
    """
    m = as_mesh(mesh)
    return Batches(dataset, batch, layout, m, shuffle, seed, last, ignore, collate, workers, state)


class Batches:
    """Batches of a dataset; each iteration is the rest of an epoch.

    ``epoch``  number of the pass, from 0.   ``row``  rows of it that were returned already.
    """

    def __init__(
        self, dataset: Rows | Dataset[object], batch: int, layout: LayoutTree, mesh: Mesh, shuffle: bool, seed: int,
        last: Literal["fill", "drop"], ignore: Mapping[Any, float] | None, collate: Callable[..., object] | None,
        workers: int, state: Mapping[str, int] | None,
    ) -> None:  # fmt: skip
        _check_numbers(batch, last, workers)
        self.length = _length(dataset)
        self.dataset, self.batch, self.layout, self.mesh = dataset, batch, layout, mesh
        self.shuffle, self.seed, self.last, self.collate = shuffle, seed, last, collate
        self.ignore = {"labels": -100} if ignore is None else dict(ignore)
        self.workers, self.epoch, self.row = workers, 0, 0
        if state is not None:
            self._resume(state)
        self._rows_of = [self._dealt(coord) for coord in played(mesh)]

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.length // self.batch if self.last == "drop" else -(-self.length // self.batch)

    def state(self) -> dict[str, int]:
        """Return the position of the next batch in plain numbers, to save with the model.

        >>> import shardlib as sl
        >>> with sl.simulate(data=2):
        ...     rows = sl.data(list(range(8)), 2)
        ...     _ = next(iter(rows))
        ...     rows.state()
        {'epoch': 0, 'row': 2, 'seed': 0, 'shuffle': 1, 'length': 8}
        """
        names = ("epoch", "row", "seed", "shuffle", "length")
        return {name: int(getattr(self, name)) for name in names}

    def _resume(self, state: Mapping[str, int]) -> None:
        if set(state) != set(self.state()):
            text = f"this is no state of batches: {dict(state)!r}"
            raise _bad(text, f"state = sl.data(dataset, {self.batch}).state()")
        if state["length"] != self.length:
            there = f"the state is of a dataset of {state['length']} rows"
            fix = f"sl.data(dataset, {self.batch}, layout, state=None)"
            raise _bad(f"{there}, this one has {self.length}", fix)
        self.epoch, self.row = int(state["epoch"]), int(state["row"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])

    def order(self) -> list[int]:
        """List the rows of this epoch in their order."""
        if not self.shuffle:
            return list(range(self.length))
        key = branch(mixed(self.seed), self.epoch) >> 1
        drawn = torch.Generator("cpu").manual_seed(key)
        return torch.randperm(self.length, generator=drawn, device="cpu").tolist()

    def _batches(self) -> list[tuple[int, list[int]]]:
        """List the batches that are left: where each ends, and its rows; -1 fills the last up."""
        order, left = self.order(), []
        for start in range(self.row, self.length, self.batch):
            rows = order[start : start + self.batch]
            missing = self.batch - len(rows)
            if not missing or self.last == "fill":
                left.append((start + self.batch, rows + [-1] * missing))
        return left

    def _reading(self, batches: list[list[int]], parts: list[tuple[int, ...]]) -> Iterator[Any]:
        """Read these parts of each batch, one after the other."""
        loader = DataLoader(
            _Rows(self.dataset, self.ignore),
            batch_sampler=[[rows[i] for i in part] for rows in batches for part in parts],  # type: ignore[arg-type]
            collate_fn=self.collate or _together,
            num_workers=self.workers,
            # DataLoader would draw from the user's
            generator=torch.Generator(),
        )
        with torch.device("cpu"):  # where that generator is
            return iter(loader)

    def __iter__(self) -> Iterator[Any]:
        batches = self._batches()
        if not batches:
            # the saved state was at the end of an epoch
            self._next_epoch()
            return
        # ranks with the same rows read them once
        parts = list(dict.fromkeys(self._rows_of))
        reading = self._reading([rows for _, rows in batches], parts)
        for stop, _ in batches:
            read = {part: next(reading) for part in parts}
            held = [read[part] for part in self._rows_of]
            # in the order of from_local's calls
            ranks = zip(held, played(self.mesh), strict=True)
            out = from_local(lambda ranks=ranks: self._cut(*next(ranks)), self.layout, self.mesh)
            self.row = stop
            if stop == batches[-1][0]:
                self._next_epoch()
            yield out

    def _next_epoch(self) -> None:
        self.epoch, self.row = self.epoch + 1, 0

    def _cut(self, read: Any, coord: Mapping[str, int]) -> object:
        """Cut a rank's part along the other dimensions from whole rows."""
        leaves, spec = optree.tree_flatten(read)
        leaves = [x if isinstance(x, Tensor) else torch.as_tensor(x) for x in leaves]
        if not all(x.ndim for x in leaves):
            text = "a batch is of tensors [batch, ...]"
            fix = f"next(iter(sl.data(dataset, {self.batch}, layout, collate=None)))"
            raise ShardError(text, op="data", mesh=self.mesh, fix=fix)
        fix = "sl.data(dataset, 32, {})"
        out = []
        for x, given in zip(leaves, per_leaf(self.layout, read, "data", fix), strict=True):
            layout = as_layout(given, "data", fix, shape=x.shape, mesh=self.mesh).resolve(x.ndim)
            out.append(self._block(x, layout, coord))
        return optree.tree_unflatten(spec, out)

    def _dealt(self, coord: Mapping[str, int]) -> tuple[int, ...]:
        """List the rows of a batch that a rank reads: those that any of its fields needs."""
        fix = "sl.data(dataset, 32, {})"
        given = [self.layout]
        if not is_layout(self.layout):
            # a tuple is one layout or a tree of them: rows decide
            row = (self.collate or _together)([self.dataset[0]])
            given = per_leaf(self.layout, row, "data", fix) or ["..."]
        held: set[int] = set()
        for one in given:
            lay = as_layout(one, "data", fix, mesh=self.mesh)
            dims = lay.dims[:1] if lay.ellipsis != 0 else ()
            rows = Layout(dims or Layout.parse(".").dims)
            rows.check((self.batch,), self.mesh, op="data")
            held |= set(rows.indices((self.batch,), self.mesh, coord)[0])
        return tuple(sorted(held))

    def _block(self, x: Tensor, layout: Layout, coord: Mapping[str, int]) -> Tensor:
        layout.check((self.batch, *x.shape[1:]), self.mesh, op="data")
        where = layout.indices((self.batch, *x.shape[1:]), self.mesh, coord)
        if len(where[0]) != len(x):
            # the rank read more rows, for fields with another layout
            at = {row: i for i, row in enumerate(self._dealt(coord))}
            x = x.index_select(0, torch.tensor([at[row] for row in where[0]], device=x.device))
        for d, held in enumerate(where[1:], 1):
            if len(held) != x.shape[d]:
                x = x.index_select(d, torch.tensor(list(held), device=x.device))
        return x


class _Rows(Dataset[Any]):
    """A dataset with a row -1, whose labels are ignored."""

    def __init__(self, dataset: Rows | Dataset[object], ignore: Mapping[Any, float]) -> None:
        self.dataset, self.ignore = dataset, ignore

    def __getitem__(self, i: int) -> object:
        if i >= 0:
            return self.dataset[i]
        like: Any = self.dataset[0]
        paths, leaves, spec = optree.tree_flatten_with_path(like)
        if not any(p and p[-1] in self.ignore for p in paths):
            raise BadArgument(
                "the last batch is to be filled up, and no field is called "
                f"{' or '.join(map(repr, self.ignore))}",
                op="data",
                operands={"fields": ", ".join("/".join(map(str, p)) or "the row" for p in paths)},
                fix="sl.data(dataset, 32, last='drop')  # or say ignore={1: -100}",
            )
        values = [self.ignore.get(p[-1], 0) if p else 0 for p in paths]
        return optree.tree_unflatten(spec, map(_filler, leaves, values))


def _check_numbers(batch: object, last: object, workers: object) -> None:
    if last not in ("fill", "drop") or not isinstance(batch, int) or batch < 1:
        text = f"batch= is a number of rows and last= 'fill' or 'drop', not {batch!r} and {last!r}"
        raise _bad(text, "sl.data(dataset, 32, last='drop')")
    if not isinstance(workers, int) or workers < 0:
        text = f"workers={workers!r} is no number of processes: 0 reads in this one"
        raise _bad(text, "sl.data(dataset, 32, workers=0)")


def _bad(why: str, fix: str) -> BadArgument:
    return BadArgument(why, op="data", fix=fix)


def _length(dataset: Any) -> int:
    with suppress(TypeError):
        if length := len(dataset):
            return length
    raise _bad("a dataset has a length and rows", "sl.data(list(dataset), 32)")


def _together(rows: list[Any]) -> object:
    """Stack the fields of all rows into one pytree of tensors, with the structure of a row."""
    flat = [optree.tree_flatten(row) for row in rows]
    fields = zip(*(leaves for leaves, _ in flat), strict=True)
    return optree.tree_unflatten(flat[0][1], [default_collate(list(f)) for f in fields])


def _filler(x: Any, value: float) -> object:
    return torch.full_like(x, value) if isinstance(x, Tensor) else type(x)(value)
