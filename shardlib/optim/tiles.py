"""Tiles of rows: a table between the module's blocks, as an embedding or a head, in several buckets.

A tile has the same rows of each rank's block of the table, and is a parameter of its own to
transforms of elements.  A lookup reads one tile after another, and so does a product with the table.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from shardlib.tensor import Place, ShardedTensor

BETWEEN = "at "
"""The beginning of the name of a group between two blocks of the module."""


class TableTile(NamedTuple):
    """A tile of a table, or a parameter that is whole.

    ``group``  its group, a word or a tuple of groups.
    ``first``  the first row of a tile in the block of the table; None: it is whole.
    """

    value: Any
    path: str
    group: Any
    first: int | None = None


def cut(leaf: TableTile, most: int | None, made: dict[int, list[ShardedTensor]]) -> list[TableTile]:
    """Cut a large table to tiles, each a group of its own; other leaves are whole.

    ``most``  bytes of a tile's block; None: any.
    ``made``  block -> its tiles: tied leaves have the same.
    """
    x, path, group, _ = leaf
    if most is None or not str(first_word(group)).startswith(BETWEEN):
        return [leaf]
    if id(x.raw) not in made:
        made[id(x.raw)] = _tiles(x, most)
    tiles = made[id(x.raw)]
    if len(tiles) < 2:
        return [leaf]
    firsts = accumulate((t.raw.shape[-2] for t in tiles[:-1]), initial=0)
    rows = zip(tiles, firsts, strict=True)
    return [TableTile(t, path, _renamed(group, f"{path} {at}"), at) for t, at in rows]


def _tiles(x: ShardedTensor, most: int) -> list[ShardedTensor]:
    """Cut the blocks of a table to tiles of rows; a value that is no plain table is one tile."""
    block = x.sharding.local_shape(tuple(x.padded_shape), x.mesh)
    if len(block) != 2 or x.is_padded or not x.dims[0].is_plain:
        return [x]
    count, ways = -(-block[0] * block[1] * x.dtype.itemsize // most), x.shape[0] // block[0]
    found = x.raw.detach().split(-(-block[0] // count), -2)
    rows = [raw.requires_grad_(x.raw.requires_grad) for raw in found]
    return [x.becomes(raw, shape=(raw.shape[-2] * ways, x.shape[1])) for raw in rows]


def first_word(group: object) -> object:
    """Return the first word of a group, the name of its module block."""
    return first_word(group[0]) if isinstance(group, tuple) else group


def _renamed(group: Any, name: str) -> Any:
    return (_renamed(group[0], name), *group[1:]) if isinstance(group, tuple) else name


def joined(
    found: Iterable[tuple[str, int | None, ShardedTensor]],
    join: Callable[[str, Sequence[ShardedTensor]], ShardedTensor],
) -> dict[str, ShardedTensor]:
    """Map paths to values: tiles of a table are one, which ``join`` makes of its path and of them.

    ``found``  path, first row of a tile or None, and value of each.
    """
    out, tiles = dict[str, ShardedTensor](), dict[str, dict[int, ShardedTensor]]()
    for path, first, x in found:
        out[path] = x
        if first is not None:
            tiles.setdefault(path, {})[first] = x
    for path, some in tiles.items():
        out[path] = join(path, [some[first] for first in sorted(some)])
    return out


def joined_shape(tiles: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape of a table from those of its tiles.

    >>> joined_shape([(4, 8), (2, 8)])
    (6, 8)
    """
    rows = list(tiles)
    return sum(shape[0] for shape in rows), *rows[0][1:]


def joined_place(tiles: Sequence[ShardedTensor]) -> Place:
    """Return the place of a table from its tiles."""
    place = tiles[0].place
    return place.becomes(place.layout, torch.Size(joined_shape(x.place.shape for x in tiles)))


def joined_block(tiles: Sequence[ShardedTensor]) -> torch.Tensor:
    """Return the block of a table from its tiles."""
    return torch.cat([x.raw for x in tiles], -2)
