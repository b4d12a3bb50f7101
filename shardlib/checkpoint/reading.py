"""load: each rank reads the tiles it needs into its own memory, onto any mesh and layout."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib._compat import is_dtensor
from shardlib.border import as_dtensor
from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.boxes import Box, Place, chunk, held, meet, size, whole
from shardlib.checkpoint.files import Chunk, Folder, code_of, dtype_of, fill, read_header
from shardlib.checkpoint.folder import MANIFEST, opened, read_manifest
from shardlib.checkpoint.steps import latest
from shardlib.checkpoint.tree import Leaves, alone, built, rank_of, read_place, unspoken, world_of
from shardlib.collectives import blocks, lead, played
from shardlib.errors import BadArgument, ShardError
from shardlib.layouts import Layout, LayoutLike, as_layout
from shardlib.mesh import Mesh, MeshLike, as_mesh, scope
from shardlib.modules.patterns import matches
from shardlib.placing import padded_size
from shardlib.tensor import Place as TensorPlace
from shardlib.tensor import ShardedTensor

__all__ = ["Target", "check", "load", "read_into", "some"]

Names = Mapping[str, str] | Callable[[str], str] | None


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    layouts: Any = None,
    mesh: MeshLike | None = None,
    pad: bool = False,
    names: Names = None,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
    timeout: float = 100.0,
) -> Any:
    """Read a checkpoint onto any mesh, layout, number of ranks and padding; every rank calls.

    ``path``     what ``save`` wrote, or a directory of steps: then the newest.
    ``like``     a tree whose leaves say which tensors to read and where they go; their values are
                 not read, so they may lie on the meta device.  None: the tree as it was saved.
    ``layouts``  without ``like``: one layout, or rules (pattern of the name, layout) of which the
                 first match counts; what matches none, and everything where there are no rules,
                 lies as it was saved.  ``mesh``  its mesh, the one in scope if there is one; without
                 a mesh tensors come back plain and whole.  ``pad``  allow sizes that do not divide.
    ``names``    a leaf's name in ``like`` -> in the checkpoint, a mapping or a function.
    ``missing``  "keep": what the checkpoint lacks stays as ``like`` has it.
    ``extra``    "skip": what ``like`` has no place for is not read.
    ``cast``     allow another dtype than was saved.

    Each rank reads the parts of its own blocks, and checks all that it reads.  All ranks fail
    alike, and then nothing was changed.
    Raises: CheckpointError naming the file and the tensor.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with sl.simulate(x=4):
    ...         w = sl.shard(torch.arange(8.0), "x")
    ...         _ = sl.save(d + "/c", {"model": {"w": w}, "step": 7})
    ...     with sl.simulate(x=2):
    ...         sl.typeof(load(d + "/c")["model"]["w"])
    ...     load(d + "/c")
    'f32[8@x]'
    {'model': {'w': tensor([0., 1., 2., 3., 4., 5., 6., 7.])}, 'step': 7}
    """
    path = os.fspath(path)
    for word, value, other in (("missing", missing, "keep"), ("extra", extra, "skip")):
        if value not in ("error", other):
            raise BadArgument(
                f"{word}= is 'error' or {other!r}, not {value!r}",
                op="load",
                fix=f"{word}={other!r}",
            )
    if like is not None and (layouts is not None or mesh is not None):
        raise BadArgument(
            "like= says where each tensor goes; layouts= and mesh= do so where there is no like=",
            op="load",
            fix="sl.load(path, layouts='...')",
        )
    wanted = None if like is None else Leaves.of(like, "load")
    here = None if wanted is not None else as_mesh(mesh) if mesh is not None else scope().mesh
    only = alone(wanted.leaves) if wanted is not None else world_of(here) == 1
    group = Group("load", timeout, only)
    found, error, identity = None, None, ""
    for again in (True, False):
        try:
            with Folder(_open(path), progress=group.progress) as folder:
                manifest = Manifest.of(folder)
                identity = manifest.id
                if wanted is None:
                    found = _as_saved(manifest, folder, layouts, here, pad)
                else:
                    found = _as_wanted(manifest, folder, wanted, names, missing, extra, cast)
                load.bytes_read = folder.bytes_read  # type: ignore[attr-defined]
            error = None
            break
        except FileNotFoundError as e:  # replaced by a newer one while it was read
            error = e
            if not again:
                break
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as e:
            error = e
            break
    group.agree("reading", identity, error, lambda ids: _one(ids, path))
    if wanted is not None:
        return _as_given(like, found)
    return found


load.bytes_read = 0  # type: ignore[attr-defined]


def _one(ids: list[str], path: str) -> None:
    odd = next((r for r, i in enumerate(ids) if i != ids[0]), None)
    if odd is not None:
        raise ValueError(f"rank {odd} and rank 0 read different checkpoints at {path}")


def _as_given(like: Any, found: Any) -> Any:
    """DTensors where DTensors were given."""
    return optree.tree_map(
        lambda a, b: as_dtensor(b) if is_dtensor(a) else b, like, found, none_is_leaf=True
    )


def _open(path: str) -> int:
    try:
        fd = opened(path)
    except NotADirectoryError:
        raise ValueError(f"{path} is no directory; sl.load_hf reads safetensors files") from None
    try:
        os.stat(MANIFEST, dir_fd=fd)
        return fd
    except FileNotFoundError:
        os.close(fd)
    newest = latest(path)
    if newest is None:
        raise ValueError(f"{path} holds no {MANIFEST}, and no step that does")
    return opened(newest)


# ---------------------------------------------------------------- what is in a checkpoint


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and where."""

    id: str
    places: dict[str, Place]
    dtypes: dict[str, torch.dtype]
    values: dict[str, Any]
    skeleton: Any
    files: list[dict[str, Any]]
    chunks: dict[str, dict[str, Chunk]]  # of the files opened so far

    @staticmethod
    def of(folder: Folder) -> "Manifest":
        """Raises: ValueError, OSError."""
        said = read_manifest(folder.fd)
        try:
            files = said["files"]
            places = {n: read_place(a, len(files)) for n, a in said["tensors"].items()}
            dtypes: dict[str, Any] = {n: dtype_of(a["dtype"]) for n, a in said["tensors"].items()}
            values = {n: unspoken(v) for n, v in said["values"].items()}
            sound = all(
                type(f["file"]) is str and type(f["bytes"]) is int and type(f["crc"]) is int
                for f in files
            )
            if not sound or None in dtypes.values() or set(places) & set(values):
                raise ValueError
            return Manifest(said["id"], places, dtypes, values, said["tree"], files, {})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            if isinstance(e, ShardError):
                raise ValueError(f"{MANIFEST}: {e.message}") from None
            raise ValueError(f"{MANIFEST} does not describe a checkpoint") from None

    @property
    def names(self) -> set[str]:
        return {*self.places, *self.values}

    def chunk_of(self, folder: Folder, name: str, rank: int, box: Box) -> Chunk:
        """What a rank wrote of a tensor; the file must say the same of it as the layout does."""
        about = self.files[rank]
        file = about["file"]
        if file not in self.chunks:
            fd = folder.file(file)
            self.chunks[file] = read_header(fd, file, about["bytes"], about["crc"])
        found = self.chunks[file].get(name)
        plain = tuple(tuple(r[:3] for r in h) for h in box)
        if found is None or found.dtype != self.dtypes[name]:
            raise ValueError(f"{file} does not hold its part of {name!r}")
        if tuple(tuple(r[:3] for r in h) for h in found.box) != plain:
            raise ValueError(f"{file} holds another part of {name!r} than its rank's")
        return found

    def read(self, folder: Folder, name: str, box: Box, out: Tensor) -> None:
        """Fill a block that holds ``box``.  Raises: ValueError, OSError."""
        place, filled = self.places[name], 0
        for rank in _holders(place, box):
            part = chunk(name, place, rank)
            if part is None:
                continue
            try:
                found = self.chunk_of(folder, name, place.ranks[rank], part)
                filled += fill(out, box, found, folder)
            except FileNotFoundError:
                raise
            except OSError as e:
                file = self.files[place.ranks[rank]]["file"]
                raise ValueError(f"{file}: {e.strerror} ({name!r})") from e
            except ValueError as e:
                raise ValueError(f"{e} ({name!r})" if repr(name) not in str(e) else str(e)) from e
        if filled != size(box):
            raise ValueError(f"{filled} of {size(box)} elements of {name!r} are in the files")


@lru_cache(maxsize=1 << 14)
def _holders(place: Place, box: Box) -> tuple[int, ...]:
    """The ranks whose blocks share something with a box."""
    ranks = range(math.prod(n for _, n in place.mesh))
    return tuple(r for r in ranks if all(meet(held(place, r), box)))


# ---------------------------------------------------------------- where it goes


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: a layout on a mesh, or (None) whole and plain.

    ``tiled``  the sizes that its blocks tile.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: Layout | None = None
    mesh: Mesh | None = None
    tiled: tuple[int, ...] = ()

    @staticmethod
    def of(x: Tensor) -> "Target":
        if not isinstance(x, ShardedTensor):
            device = torch.device("cpu") if x.is_meta else x.device
            return Target(tuple(x.shape), x.dtype, device)
        return Target(
            tuple(x.shape), x.dtype, x.mesh.device, x.sharding, x.mesh, tuple(x.padded_shape)
        )

    def empty(self) -> Tensor:
        """Storage for it, zero where there is padding."""
        if self.mesh is None or self.layout is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        block = self.layout.local_shape(self.tiled, self.mesh)
        shape = (*(self.mesh.size,) * lead(self.mesh), *block)
        new = torch.empty if self.tiled == self.shape else torch.zeros
        return new(shape, dtype=self.dtype, device=self.device)

    def blocks(self, raw: Tensor) -> list[tuple[Box, Tensor]]:
        """What each block of the storage holds, of the ranks played here."""
        if self.mesh is None or self.layout is None:
            return [(whole(self.shape), raw)]
        axes = tuple(self.mesh.axes.items())
        place = Place(self.shape, self.layout, self.tiled, axes, tuple(range(self.mesh.size)))
        return [
            (held(place, rank_of(self.mesh, c)), b)
            for c, b in zip(played(self.mesh), blocks(raw, self.mesh), strict=True)
        ]

    def tensor(self, raw: Tensor) -> Tensor:
        if self.mesh is None or self.layout is None:
            return raw
        true = None if self.tiled == self.shape else torch.Size(self.shape)
        return ShardedTensor(raw, TensorPlace(self.layout, torch.Size(self.tiled), self.mesh, true))


def read_into(raw: Tensor, target: Target, read: Callable[[Box, Tensor], None]) -> None:
    """Every block of a storage from ``read(box, block)``."""
    for box, block in target.blocks(raw):
        read(box, block)


def _as_wanted(
    manifest: Manifest, folder: Folder, wanted: Leaves, names: Names, missing: str, extra: str,
    cast: bool,
) -> Any:  # fmt: skip
    """The tree of ``like``, with what was saved."""
    theirs = renamed(wanted.names, names)
    lacking = [n for n in wanted.names if theirs[n] not in manifest.names]
    spare = sorted(manifest.names - set(theirs.values()))
    if (lacking and missing == "error") or (spare and extra == "error"):
        raise ValueError(_differing([theirs[n] for n in lacking], spare))
    out, tensors = list(wanted.leaves), []
    for i, (name, x) in enumerate(zip(wanted.names, wanted.leaves, strict=True)):
        saved = theirs[name]
        if saved not in manifest.names:
            continue
        if saved in manifest.values:
            if isinstance(x, Tensor):
                raise ValueError(
                    f"{saved!r} is a value in the checkpoint, and a tensor in the tree"
                )
            out[i] = manifest.values[saved]
            continue
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{saved!r} is a tensor in the checkpoint, and {type(x).__name__} in the tree"
            )
        check(saved, x, manifest.places[saved].shape, manifest.dtypes[saved], cast)
        tensors.append((i, x, saved))
    for i, x, saved in tensors:
        target = Target.of(x)
        raw = target.empty()
        read_into(raw, target, lambda box, b, n=saved: manifest.read(folder, n, box, b))
        raw.requires_grad_(x.requires_grad)
        out[i] = ShardedTensor(raw, x.place) if isinstance(x, ShardedTensor) else raw
    return wanted.again(out)


def renamed(names: Sequence[str], given: Names) -> dict[str, str]:
    """Ours -> theirs, where two of ours are not one of theirs.  Raises: ValueError."""
    to = given if callable(given) else lambda n: (given or {}).get(n, n)
    found = {n: str(to(n)) for n in names}
    if len(set(found.values())) < len(found):
        twice = next(t for t in found.values() if list(found.values()).count(t) > 1)
        raise ValueError(f"names= calls two tensors {twice!r}")
    if given is not None and not callable(given) and (unknown := sorted(set(given) - set(names))):
        raise ValueError(f"names= has {unknown[0]!r}, which the tree does not")
    return found


def _differing(missing: list[str], extra: list[str]) -> str:
    words = []
    if missing:
        words.append(f"it lacks {some(missing)} (missing='keep' leaves them)")
    if extra:
        words.append(f"the tree has no place for {some(extra)} (extra='skip' leaves them out)")
    return "the checkpoint is of another tree: " + ", and ".join(words)


def some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:6])) + f" and {len(names) - 6} more" * (len(names) > 6)


def check(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, cast: bool) -> None:
    """Raises: ValueError where a saved tensor does not fit one of the tree."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(
            f"{name!r} has shape {list(shape)} in the checkpoint, {list(x.shape)} in the tree"
        )
    if x.dtype != dtype and not cast:
        raise ValueError(
            f"{name!r} is {code_of(dtype)} in the checkpoint, {code_of(x.dtype)} in the tree; "
            "cast=True converts"
        )


def _as_saved(
    manifest: Manifest, folder: Folder, layouts: Any, mesh: Mesh | None, pad: bool
) -> Any:
    """The tree as it was saved, its tensors on ``mesh``."""
    found: dict[str, Any] = dict(manifest.values)
    for name, place in manifest.places.items():
        target = _target(name, place, manifest.dtypes[name], layouts, mesh, pad)
        raw = target.empty()
        read_into(raw, target, lambda box, b, n=name: manifest.read(folder, n, box, b))
        found[name] = target.tensor(raw)
    try:
        return built(manifest.skeleton, found)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{MANIFEST} does not describe a tree") from None


def _target(
    name: str, place: Place, dtype: torch.dtype, layouts: Any, mesh: Mesh | None, pad: bool
) -> Target:
    plain = Target(place.shape, dtype, torch.device("cpu"))
    if mesh is None:
        return plain
    given = _given(name, layouts, plain)
    layout = place.layout if given is None else given
    if given is None and place.mesh and place.mesh[0][0] == "ranks":
        return replace(plain, device=mesh.device)
    if isinstance(layout, Layout):
        lay = layout
    else:
        lay = as_layout(layout, "load", "sl.load(path, layouts={})", shape=place.shape, mesh=mesh)
    lay = lay.resolve(len(place.shape))
    like = torch.empty(place.shape, device="meta")
    grown = pad or (given is None and place.tiled != place.shape)
    tiled = tuple(padded_size(lay, like, mesh)) if grown else place.shape
    lay.check(tiled, mesh, op="load")
    return Target(place.shape, dtype, mesh.device, lay, mesh, tiled)


def _given(name: str, layouts: Any, plain: Target) -> Any:
    """The layout that a rule gives a tensor."""
    if layouts is None or isinstance(layouts, str | Layout) or callable(layouts):
        return layouts
    if isinstance(layouts, LayoutLike):
        return layouts
    like = torch.empty(plain.shape, dtype=plain.dtype, device="meta")
    rules = layouts.items() if isinstance(layouts, Mapping) else layouts
    return next((layout for pattern, layout, *_ in rules if matches(pattern, name, like)), None)
