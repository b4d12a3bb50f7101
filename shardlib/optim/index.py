"""zero's cache: for each tree structure, its bucket index and lists of views.

An index is computed again if the tree has changed; otherwise a step only compares its leaves.
"""

import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import agreed, holds_values
from shardlib.errors import PlainTensor, ShardError, Unsupported
from shardlib.grad import frozen, stage_mesh
from shardlib.mesh import Mesh
from shardlib.optim.buckets import Buckets, Hops, Index, Item, State, Tree, index, overlap
from shardlib.optim.precision import Master, ZeroState
from shardlib.optim.tiles import BETWEEN, TableTile, cut
from shardlib.optim.transform import Transform
from shardlib.optim.trees import (
    bucketed_in,
    first_of,
    given_for,
    named,
    names_of,
    need,
    of_others,
    stages_around,
)
from shardlib.tensor import ShardedTensor, typeof

MOST = 25 << 20
"""Default bytes of a bucket."""

_WORTH = 0.05
"""The least gain in ``overlap`` for which buckets are made again."""

# called for every leaf at every step
_RAW, _PLACE, _ASKS = map(operator.attrgetter, ("raw", "place", "requires_grad"))
_SHARDED = {ShardedTensor}


class ZeroSettings(NamedTuple):
    """The arguments of ``zero``, with the axes as a tuple."""

    tx: Transform
    axes: tuple[str, ...]
    stage: int
    bucket_mb: float | None
    master: Master | None
    reduce_dtype: torch.dtype | None
    gather_dtype: torch.dtype | None
    inner: str | None
    keep: bool

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes over which buckets are cut, major first."""
        return self.axes if self.inner is None else (self.inner, *self.axes)

    @property
    def hops(self) -> Hops:
        """The axes of each collective between a bucket and its parts."""
        return (self.cut,) if self.inner is None else ((self.inner,), self.axes)

    def check_update(self, params: Tree) -> None:
        """Refuse an update without parameters, or beside a master."""
        need(params, "zero")
        if self.master is not None:
            raise Unsupported(
                "an update added to half precision parameters would round the master away",
                op="zero",
                fix="params, state, info = sl.optim.step(tx, params, grads, state)",
            )

    def check_state(self, state: State) -> None:
        """Refuse a state that was made with another master."""
        if (self.master is None) == isinstance(state, ZeroState):
            kept = "one" if self.master is None else "none"
            raise ShardError(
                f"master={self.master!r}, and the state was made with {kept}",
                op="zero",
                fix="state = tx.init(params)",
            )


class Indexed(NamedTuple):
    """A tree of parameters with its index.

    ``leaves``  the trained leaves, ``held`` a frozen flag per leaf, ``tree`` the structure.
    ``raws``    the trained leaves' blocks.
    """

    leaves: list[Any]
    held: list[bool]
    tree: Any
    raws: list[Tensor]
    where: Index
    mesh: Mesh

    def given(self, grads: Tree) -> list[Any]:
        """List the gradients of the trained leaves."""
        every = given_for(self.tree, grads, "zero")
        return [g for g, f in zip(every, self.held, strict=True) if not f]

    def unflatten(self, values: Iterable[Any]) -> Tree:
        """Build a tree of the same structure, with None for frozen leaves."""
        rest = iter(values)
        return optree.tree_unflatten(self.tree, [None if f else next(rest) for f in self.held])


class IndexCache:
    """zero's cache: for each tree structure, its bucket index and lists of views.

    ``apart``     whether each group of a module block has a bucket of its own, of any size: stage 3.
    ``most_tile`` bytes of a block's tile of rows, to which tables between the module's blocks are
                  cut; None: they are whole.
    ``found``     items -> their index.
    ``last``      name -> a key, and the value made for it.
    """

    def __init__(self, how: ZeroSettings) -> None:
        self.how = how
        # without groups every parameter, also a frozen one, has an empty word
        self.groups = how.tx.groups or (lambda tree: [""] * len(named(tree)))
        self.apart = how.stage == 3
        self.most_bytes = MOST if how.bucket_mb is None else int(how.bucket_mb * 2**20)
        if self.apart:
            self.most_bytes = 1 << 62
        self.most_tile: int | None = None
        self.found: dict[tuple[Item, ...], Index] = {}
        self.last: dict[str, tuple[Any, Any]] = {}

    def find(self, params: Tree, state: State = None) -> Indexed:
        """Return a tree's trained leaves and their index: the state's own if it has one.

        Raises: ShardError if the state was made for other parameters.
        """
        every, tree = self._flat(params)
        theirs = index_of(state)
        found = self._known(every, tree, theirs)
        if found is None:
            held = frozen(every)
            leaves = [x for x, f in zip(every, held, strict=True) if not f]
            found = self.index(params, leaves, held, tree, theirs)
            if set(map(type, every)) == _SHARDED:
                places, asks = [x.place for x in every], [x.raw.requires_grad for x in every]
                # without the leaves, whose memory a step replaces
                self.last["tree"] = (places, asks), found._replace(leaves=[], raws=[])
        return found

    def _flat(self, params: Tree) -> tuple[list[Any], Any]:
        """Flatten a tree; a dict with last time's names is not flattened again."""
        names = list(params) if type(params) is dict else ()
        before, (chosen, tree) = self.last.get("names", (None, (None, None)))
        if names == before:
            every = list(chosen(params))
            if set(map(type, every)) == _SHARDED:
                # else it may have nested trees now
                return every, tree
        every, tree = optree.tree_flatten(params)  # type: ignore[arg-type]
        if len(every) == len(names) > 1:
            self.last["names"] = names, (operator.itemgetter(*tree.entries()), tree)
        return every, tree

    def _known(self, every: list[Any], tree: Any, theirs: Index | None) -> Indexed | None:
        """Return the last tree's result if this one has its structure, places and frozen leaves."""
        (places, asks), known = self.last.get("tree", (((), ()), None))
        if known is None or (theirs or known.where) is not known.where or tree != known.tree:
            return None
        if set(map(type, every)) != _SHARDED:
            return None
        raws = list(map(_RAW, every))
        if list(map(_ASKS, raws)) != asks or not all(map(operator.is_, map(_PLACE, every), places)):
            return None
        trained = list(map(operator.not_, known.held))
        leaves, raws = (list(itertools.compress(row, trained)) for row in (every, raws))
        return known._replace(leaves=leaves, raws=raws)

    def index(
        self,
        params: Tree,
        leaves: list[Any],
        held: list[bool],
        tree: Tree,
        theirs: Index | None = None,
    ) -> Indexed:
        """Return leaves with their index, which is ``theirs``, after a check, if it is given.

        If ``leaves`` are all, also frozen ones, the frozen ones get buckets of their own.
        """
        kept = [i for i, f in enumerate(held) if not f or len(held) == len(leaves)]
        paths, order, words = _named(params, self.groups, kept)
        if self.apart:
            words = list(zip(_groups(paths, order), words, strict=True))
        if (outer := stages_around(leaves[:1])) is not None and outer.tied:
            # gradients of a bucket are added up over stages, and a norm leaves copies out
            rows = zip(words, paths, strict=True)
            words = [(w, "tied", n) if n in outer.tied else w for w, n in rows]
        if any(held) and len(held) == len(leaves):
            words = [(w, "frozen") if f else w for w, f in zip(words, held, strict=True)]
        made: dict[int, list[ShardedTensor]] = {}
        rows = map(TableTile, leaves, paths, words)
        parts = [cut(leaf, self.most_tile, made) for leaf in rows]
        numbers = itertools.count()
        # leaf number -> those of its tiles
        tiles = [[next(numbers) for _ in some] for some in parts]
        order = tuple(n for i in order for n in tiles[i])
        found = list(itertools.chain(*parts))
        leaves, items = [leaf.value for leaf in found], _items(found, self.how.hops)
        # a stage may have no parameters, or train none
        mesh = leaves[0].mesh if leaves else stage_mesh(params)
        if mesh is None:
            raise ShardError(
                "there are no parameters",
                op="zero",
                fix="apply, params = sl.parallelize(module, rules); state = tx.init(params)",
            )
        where = theirs or self.found.get(items)
        if where is None:
            # until a backward has been recorded, gradients come in reverse module order
            sizes = tuple(mesh.axes.items())
            where = index(items, self.how.hops, sizes, self.most_bytes, order[::-1])
            where = replace(where, keep=self.how.keep)
        if where.items != items:
            raise changed(where.items, items, mesh)
        self.found.setdefault(items, where)
        return Indexed(leaves, held, tree, [p.raw for p in leaves], where, mesh)

    def on_arrival(self, where: Index, mesh: Mesh, at_once: bool = False) -> "Arrival | None":
        """Return a callback for the order of the first backward's gradients, or None."""
        if where.room.recorded or len(where.buckets) < 2:
            return None
        return Arrival(self, where, mesh, at_once)

    def better(self, where: Index) -> Index | None:
        """Return the re-ordered buckets, once, if there are any."""
        found, where.room.better = where.room.better, None
        return found

    def use(self, where: Index) -> None:
        """Use this index for its items from now on."""
        self.found[where.items] = where
        self.last.pop("tree", None)

    @contextmanager
    def using(self, where: Index) -> Iterator[None]:
        """Use this index for its items within the block."""
        found, last = self.found.copy(), self.last.copy()
        self.use(where)
        try:
            yield
        finally:
            self.found, self.last = found, last


class Arrival(NamedTuple):
    """A callback for the order of the first backward's gradients, that makes better buckets.

    They are used from the next step on, because gradients may still be accumulated in the old
    ones; at once with ``at_once``, if nothing is stored in them.
    """

    cache: IndexCache
    where: Index
    mesh: Mesh
    at_once: bool

    def __call__(self, order: list[int]) -> None:
        if not holds_values(self.mesh):
            # steps on paper change nothing for others
            return
        self.where.room.recorded = True
        said = agreed("arrival of gradients", self.mesh, order)
        if said is None:
            return
        made = self.better(said)
        if made is not None and self.at_once:
            self.cache.use(made)
        else:
            self.where.room.better = made

    def better(self, order: Sequence[int]) -> Index | None:
        """Return the buckets in this order of gradients; None if they are not worth it."""
        where = self.where
        # leaves without a gradient follow in their old order
        rest = (i for b in where.buckets for s in b.slots for i in s.leaves)
        every = tuple(dict.fromkeys((*order, *rest)))
        made = index(where.items, where.hops, where.sizes, self.cache.most_bytes, every)
        if overlap(made, order) < overlap(where, order) + _WORTH:
            return None
        made.room.recorded = True
        return made


def _named(
    params: Tree, groups: Any, kept: list[int]
) -> tuple[list[str], tuple[int, ...], list[Any]]:
    """Return the kept leaves' paths, their numbers in insertion order, and their groups.

    optree sorts dicts by key; their insertion order is that of the modules.
    """
    paths, every, _ = optree.tree_flatten_with_path(params, none_is_leaf=True)
    leaves, tree = optree.tree_flatten(params)
    number = {at: i for i, at in enumerate(kept)}
    numbers: Any = optree.tree_unflatten(tree, range(len(leaves)))
    with optree.dict_insertion_ordered(True, namespace="shardlib"):
        made = optree.tree_leaves(numbers, namespace="shardlib")
    rows = zip(every, names_of(paths), groups(params), strict=True)
    found = [(name, word) for x, name, word in rows if x is not None]
    order = tuple(number[at] for at in made if at in number)
    return [found[i][0] for i in kept], order, [found[i][1] for i in kept]


def index_of(state: State) -> Index | None:
    """Return the index of a state's buckets, or None."""
    found = _first(state)
    return None if found is None else found.index.all


def _first(state: State) -> Buckets | None:
    """Return the first buckets of a state, or None."""
    if isinstance(state, Buckets):
        return state
    if isinstance(state, tuple | list):
        return next((b for x in state if (b := _first(x)) is not None), None)
    if state is None or isinstance(state, int | float | Tensor):
        return None
    return next(iter(bucketed_in(state)), None)


def _groups(paths: Sequence[str], order: Sequence[int]) -> list[str]:
    """Name the group of each parameter: groups are gathered together.

    A group has the parameters of one numbered block of the module, or those between two blocks.

    ``order``  numbers of the paths in the order of the modules.

    >>> paths = ["wte.weight", "wpe.weight", "h.0.attn.weight", "h.0.mlp.bias", "ln_f.weight"]
    >>> _groups(paths, range(5))
    ['at 0', 'at 0', 'h.0', 'h.0', 'at 3']
    """
    out = [""] * len(paths)
    between = 0
    for place, i in enumerate(order):
        found = re.match(r"(.*?\.\d+|\d+)(\.|$)", paths[i])
        if found:
            out[i], between = found.group(1), place
        else:
            out[i] = f"{BETWEEN}{between}"
    return out


def _items(leaves: list[TableTile], hops: Hops) -> tuple[Item, ...]:
    items: list[Item] = []
    values: dict[int, int] = {}
    for i, (p, path, word, first) in enumerate(leaves):
        if not isinstance(p, ShardedTensor):
            raise PlainTensor(
                "zero splits sharded parameters; this one is plain",
                op="zero",
                operands={"parameter": typeof(p)},
                fix="params = sl.shard(params, '...')",
            )
        for hop in hops:
            p.mesh.axis_size(hop, "zero", "tx = sl.optim.zero(tx, axis={})")
        # an axis of one rank splits nothing, and must not make another bucket
        axes = tuple(a for a in p.mesh.names if a in p.sharding.axes and p.mesh.axes[a] > 1)
        whole, tiled = tuple(p.shape), tuple(p.padded_shape)
        shape = p.sharding.local_shape(tiled, p.mesh)
        place = f"{p.sharding} of {list(tiled)} on {p.mesh.axes}"
        value = values.setdefault(id(p.raw), i)
        layout = p.sharding.bare
        kind = p.raw.dtype, axes, value, place
        items.append(Item(path, shape, *kind, whole, word, layout, tiled, first))
    return tuple(items)


def changed(old: Sequence[Item], new: Sequence[Item], mesh: Mesh) -> ShardError:
    """Build the error for a state that was made for other parameters."""
    before, now = ({i.path: replace(i, value=0) for i in items} for items in (old, new))
    gone, come = ([p for p in one if p not in two] for one, two in ((before, now), (now, before)))
    other = [p for p in now if before.get(p, now[p]) != now[p]]
    differences = {"without": gone, "with": come, "and otherwise": other}
    told = [f"{what} {first_of(names, 3)}" for what, names in differences.items() if names]
    operands = {}
    if other:
        p = other[0]
        operands = {"when made": _lies(before[p]), "now": _lies(now[p])}
    kinds = [{p: (i.whole, i.dtype) for p, i in items.items()} for items in (before, now)]
    moved = kinds[0] == kinds[1]
    return of_others(f"they are {'; '.join(told)}", operands, "zero", mesh, moved)


def _lies(item: Item) -> str:
    return f"{item.path} {list(item.shape)} {item.dtype} {item.place}"


def same_index(theirs: Index, ours: Index, mesh: Mesh) -> None:
    """Refuse gradients in other buckets than the state's."""
    if theirs == ours:
        return
    if theirs.items != ours.items:
        raise changed(ours.items, theirs.items, mesh)
    raise ShardError(
        "the gradients lie in other buckets than the state",
        op="zero",
        mesh=mesh,
        fix="loss, grads = sl.value_and_grad(f, into=tx)(params)",
    )
