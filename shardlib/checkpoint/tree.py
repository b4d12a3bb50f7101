"""Pytrees as named tensors and values, and their description in a manifest.

A leaf's name is its path, with ``/`` between keys (``~1`` for a slash in a key, ``~0`` for a
tilde).  Ranks write in the order of names, so the order of a dictionary does not matter.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from shardlib._compat import is_dtensor
from shardlib.checkpoint.boxes import Box, SavedPlace, held, outline
from shardlib.checkpoint.files import code_of, dtype_of, is_shape
from shardlib.checkpoint.folder import world_size
from shardlib.collectives import blocks as blocks_of
from shardlib.collectives import holds_values, played, spans_processes
from shardlib.dtensor_convert import from_dtensor
from shardlib.errors import MeshError, PartialEscape, ShardError, Unsupported
from shardlib.filesystem import memory
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, rank_along, scope
from shardlib.optim.matrix_owners import ByParameter
from shardlib.optim.transform import at_rest
from shardlib.optional import optional_text
from shardlib.tensor import ShardedTensor, typeof

Value = bool | int | float | complex | str | None
Names = Mapping[str, str] | Callable[[str], str] | None
T = TypeVar("T")


@dataclass(frozen=True)
class Leaves:
    """The names, leaves and structure of a tree, all in the tree's order."""

    names: list[str]
    leaves: list[Any]
    spec: optree.PyTreeSpec
    skeleton: object

    @staticmethod
    def of(tree: Any, op: str) -> "Leaves":
        """List the leaves of a tree.

        Raises: ShardError for two leaves of one name, and for leaves that cannot be saved.
        """
        paths, leaves, spec = optree.tree_flatten_with_accessor(
            at_rest(tree), is_leaf=lambda x: isinstance(x, ByParameter), none_is_leaf=True
        )
        names = ["/".join(map(_part, path)) for path in paths]
        if len(set(names)) < len(names):
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            text = f"two leaves are named {twice!r}"
            raise ShardError(text, op=op, fix="tree = {'items': list(tree.values())}")
        leaves = list(map(sharded, leaves))
        for name, x in zip(names, leaves, strict=True):
            _check(name, x, op)
        return Leaves(names, leaves, spec, _skeleton(spec, iter(names)))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor, by name."""
        return {n: x for n, x in self._by_name if isinstance(x, Tensor)}

    @cached_property
    def values(self) -> dict[str, Value]:
        """The leaves that are not tensors, by name."""
        return {n: x for n, x in self._by_name if not isinstance(x, Tensor)}

    @property
    def _by_name(self) -> list[tuple[str, Any]]:
        return sorted(zip(self.names, self.leaves, strict=True), key=lambda i: i[0])


def sharded(x: Any) -> Any:
    """Return a DTensor as a sharded tensor, and another leaf as it is."""
    if isinstance(x, ShardedTensor) or not is_dtensor(x):
        return x
    return from_dtensor(x)


def _part(entry: optree.PyTreeEntry) -> str:
    """Return a key, an index, or the name of a field, as a part of a leaf's name."""
    key = entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry
    return str(key).replace("~", "~0").replace("/", "~1")


def _check(name: str, x: object, op: str) -> None:
    try:
        name.encode()
    except UnicodeError:
        raise ShardError(f"{name!r} is no text that a file can hold", op=op, fix="") from None
    why = ""
    if isinstance(x, ByParameter):
        why = f"{name!r} lies in flat vectors, whose order of elements is that of one mesh"
        fix = "tree = {'params': sl.optim.state_dict(params), 'state': sl.optim.state_dict(state)}"
    elif not isinstance(x, Tensor | Value):
        kind = type(x).__name__
        why = f"{name!r} is a {kind}: only tensors, numbers, text and None are saved"
        fix = "tree = {'params': params, 'step': step}"
    elif isinstance(x, Tensor) and code_of(x.dtype) is None:
        why, fix = f"{name!r} is of {x.dtype}, which no file holds", "x.float()"
    elif not isinstance(x, ShardedTensor | Value) and x.layout is not torch.strided:
        why, leaf = f"{name!r} is not dense", "isinstance(x, torch.Tensor)"
        fix = f"tree = optree.tree_map(lambda x: x.to_dense() if {leaf} else x, tree)"
    if why:
        raise Unsupported(why, op=op, fix=fix)
    if isinstance(x, ShardedTensor):
        _check_sharded(name, x, op)


def _check_sharded(name: str, x: ShardedTensor, op: str) -> None:
    if x.sharding.partial:
        text = f"{name!r} is a sum that is still pending"
        fix = f"sl.reshard(x, {str(x.sharding.bare)!r})"
        raise PartialEscape(text, op=op, operands={"tensor": typeof(x)}, mesh=x.mesh, fix=fix)
    if not holds_values(x.mesh):
        text = f"{name!r} has a shape and no values: nobody plays the ranks of its mesh"
        fix = "sl.simulate(x=2, y=2)"
        raise MeshError(text, op=op, mesh=x.mesh, fix=fix)


def renaming(names: Mapping[str, T] | Callable[[str], T] | None) -> Callable[[str], T | None]:
    """Return a function from our name to what ``names`` gives in its place, or None."""
    if names is None:
        return lambda name: None
    return names.get if isinstance(names, Mapping) else names


def renamed(names: Sequence[str], given: Names) -> dict[str, str]:
    """Map our names to those of the checkpoint, one to one.

    Raises: ValueError.
    """
    to = renaming(given)
    found = {n: n for n in names} | {n: str(t) for n in names if (t := to(n)) is not None}
    if len(set(found.values())) < len(found):
        twice = next(t for t in found.values() if list(found.values()).count(t) > 1)
        raise ValueError(f"names= calls two tensors {twice!r}")
    if isinstance(given, Mapping) and (unknown := sorted(set(given) - set(names))):
        raise ValueError(f"names= has {unknown[0]!r}, which the tree does not")
    return found


def some(names: list[str]) -> str:
    """Format the first six names and the number of others."""
    text = ", ".join(map(repr, names[:6]))
    return text + optional_text(" and {} more", len(names[6:]))


# ---------------------------------------------------------------- ranks and blocks


def alone(leaves: list[Any]) -> bool:
    """Return whether this process holds all ranks of a tree: those of a simulation."""
    meshes = [x.mesh for x in leaves if isinstance(x, ShardedTensor)]
    if not meshes and scope().mesh is not None:
        meshes = [scope().mesh]
    return bool(meshes) and all(not spans_processes(m) for m in meshes)


def place_of(x: Tensor, world: int) -> SavedPlace:
    """Return the place of a tensor; a plain tensor is the same on every rank."""
    if not isinstance(x, ShardedTensor):
        return SavedPlace.of_plain(tuple(x.shape), x.dtype, world)
    axes, tiled = tuple(x.mesh.axes.items()), tuple(x.padded_shape)
    return SavedPlace(tuple(x.shape), x.dtype, x.sharding, tiled, axes, x.mesh.ranks)


def ranks_of(x: Tensor, rank: int) -> list[int]:
    """List the ranks of this process in the mesh of a tensor."""
    if not isinstance(x, ShardedTensor):
        return [rank]
    if spans_processes(x.mesh) and x.mesh.coord is None:
        return []
    return [rank_along(x.mesh.names, coord, x.mesh.axes) for coord in played(x.mesh)]


def blocks(x: Tensor, rank: int) -> list[tuple[int, Tensor]]:
    """List (rank in its mesh, block) of a tensor for each rank in this process; no copies."""
    if not isinstance(x, ShardedTensor):
        return [(rank, x.detach())]
    ranks = ranks_of(x, rank)
    if not ranks:
        return []
    return list(zip(ranks, blocks_of(x.raw.detach(), x.mesh), strict=True))


class LateValues:
    """Tensors that are fetched when they are written: by all ranks together, in the order of names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        some = ((n, x) for n, x in tensors.items() if isinstance(x, ShardedTensor))
        self.tensors = {n: x for n, x in some if not x.is_stored}
        self.coming = list(self.tensors)
        self.name, self.found = "", list[Tensor]()

    def block(self, name: str, i: int) -> Tensor:
        """Return block number ``i`` of this process; fetch all values up to it."""
        if name != self.name and name not in self.coming:
            # the file of another simulated rank
            self.coming = list(self.tensors)
        while name != self.name:
            self._fetch()
        return self.found[i]

    def rest(self) -> None:
        """Fetch the others, which other ranks write."""
        while self.coming:
            self._fetch()
        self.name, self.found = "", []

    def _fetch(self) -> None:
        self.found = []
        self.name = self.coming.pop(0)
        self.found = [block for _, block in blocks(self.tensors[self.name], 0)]


def boxes(x: Tensor) -> list[tuple[Box, Tensor]]:
    """List (box, block) of a tensor for each rank in this process; no copies."""
    place = place_of(x, 1)
    return [(held(place, rank), block) for rank, block in blocks(x, 0)]


# ---------------------------------------------------------------- the manifest's form


@lru_cache(maxsize=1 << 14)
def said_of(place: SavedPlace) -> Mapping[str, Any]:
    """Convert a place to the manifest's form.

    >>> said_of(SavedPlace((3,), torch.int8, Layout.parse("x"), (4,), (("x", 2),), (0, 1)))
    {'dtype': 'I8', 'shape': [3], 'layout': 'x', 'mesh': [['x', 2]], 'tiled': [4]}
    """
    out: dict[str, object] = {
        "dtype": code_of(place.dtype),
        "shape": list(place.shape),
        "layout": str(place.layout),
        "mesh": [list(axis) for axis in place.mesh],
    }
    if place.tiled != place.shape:
        out["tiled"] = list(place.tiled)
    if place.ranks != tuple(range(len(place.ranks))):
        out["ranks"] = list(place.ranks)
    return out


@dataclass(frozen=True)
class Content:
    """A tree to write: each tensor's place, the values, the containers."""

    places: Mapping[str, SavedPlace]
    plain: Mapping[str, Value]
    skeleton: object

    @cached_property
    def tensors(self) -> dict[str, Mapping[str, Any]]:
        """The places, as a manifest has them."""
        return {n: said_of(place) for n, place in self.places.items()}

    @property
    def leaves(self) -> dict[str, Any]:
        """The places and the values, as a manifest has them."""
        return {**self.tensors, **{n: spoken(v) for n, v in self.plain.items()}}


def read_place(about: Any, files: int) -> SavedPlace:
    """Parse a place that ``said_of`` wrote.

    Raises: ValueError, TypeError, KeyError, ShardError.
    """
    shape, mesh = about["shape"], about["mesh"]
    tiled = about.get("tiled", shape)
    sizes, dtype = [n for _, n in mesh], dtype_of(about["dtype"])
    if dtype is None:
        raise ValueError("a tensor has a dtype")
    if set(map(type, (*shape, *tiled, *sizes))) - {int} or len(tiled) != len(shape):
        raise ValueError("sizes are numbers")
    if not all(map(is_shape, (shape, tiled, sizes))) or 0 in sizes:
        raise ValueError("sizes are those of tensors")
    if not all(type(a) is str for a, _ in mesh):
        raise ValueError("axes have names")
    count = math.prod(sizes)
    ranks = about.get("ranks", range(count))
    if len(ranks) != count or not all(0 <= r < files for r in ranks):
        raise ValueError("a mesh has ranks")
    layout = Layout.parse(about["layout"]).resolve(len(shape))
    layout.check(tiled, dict(map(tuple, mesh)), op="load")
    axes = tuple(map(tuple, mesh))
    return SavedPlace(tuple(shape), dtype, layout, tuple(tiled), axes, tuple(ranks))


def fingerprint(x: Tensor) -> int:
    """Compute a checksum of a replica, on its device, to compare with that of other ranks."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.device.type == "cpu":
        return outline(memory(x.contiguous()))
    words = x.contiguous().view(-1).view(torch.uint8)
    whole = words[: words.numel() // 4 * 4].view(torch.int32)
    return int(whole.sum()) ^ int(words[whole.numel() * 4 :].sum()) << 1


def spoken(x: Value) -> object:
    """Convert a value to JSON without rounding."""
    if isinstance(x, complex):
        return ["complex", x.real.hex(), x.imag.hex()]
    # hex is exact, also of NaN and inf, which JSON lacks
    return ["float", x.hex()] if isinstance(x, float) else x


def unspoken(x: object) -> Value:
    """Parse a value that ``spoken`` wrote.

    Raises: ValueError, TypeError.
    """
    if isinstance(x, list):
        kind, *parts = x
        made = {("float", 1): float, ("complex", 2): complex}.get((kind, len(parts)))
        if made is None:
            raise ValueError("a list is a float or a complex number")
        return made(*map(float.fromhex, parts))
    if not isinstance(x, Value):
        raise ValueError("a value is a number, text or none")
    return x


def _skeleton(spec: optree.PyTreeSpec, names: Iterator[str]) -> object:
    """Convert the tree's containers to JSON: lists, tuples and mappings, with the leaves' names.

    Empty containers are kept, and each item has its own key: JSON objects have no order.
    """
    if optree.treespec_is_leaf(spec, strict=False) and spec.num_leaves:
        return {"name": next(names)}
    fields = getattr(spec.type, "_fields", None)
    kind = "map"
    if fields is None and spec.type is not None and issubclass(spec.type, list | tuple | deque):
        kind = "tuple" if issubclass(spec.type, tuple) else "list"
    keys = [json.dumps(key, default=str) for key in fields or spec.entries()]
    children = [_skeleton(child, names) for child in spec.children()]
    return {"kind": kind, "items": dict(zip(keys, children, strict=True))}


def built(skeleton: Any, found: Mapping[str, Any]) -> Any:
    """Build the containers of a skeleton around the leaves found."""
    if isinstance(skeleton, str):
        # the form of older checkpoints for a tree of one leaf
        return found[skeleton]
    if "name" in skeleton:
        return found[skeleton["name"]]
    items = {_hashed(json.loads(k)): built(v, found) for k, v in skeleton.get("items", {}).items()}
    kind = skeleton.get("kind", "map")
    if kind == "map":
        return items
    return (tuple if kind == "tuple" else list)(items[i] for i in range(len(items)))


def _hashed(key: object) -> object:
    """Return a hashable key: JSON turns tuples into lists."""
    return tuple(map(_hashed, key)) if isinstance(key, list) else key


def world_of(mesh: Mesh | None) -> int:
    """Return the number of processes of a job."""
    if mesh is not None and not spans_processes(mesh):
        return 1
    return world_size()
