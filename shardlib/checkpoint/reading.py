"""Reading of checkpoints: each rank reads the tiles that it needs, for any mesh and layout."""

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from shardlib._compat import is_dtensor
from shardlib.capacity import refuse_beyond
from shardlib.checkpoint.agree import Group, refuse_odd
from shardlib.checkpoint.boxes import SavedPlace
from shardlib.checkpoint.files import Folder, code_of
from shardlib.checkpoint.folder import MANIFEST, Directory, opened, steps_pattern, world_size
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.pages import new
from shardlib.checkpoint.stages import stage_of
from shardlib.checkpoint.steps import newest
from shardlib.checkpoint.tree import (
    Leaves,
    Names,
    Value,
    alone,
    boxes,
    built,
    renamed,
    some,
    world_of,
)
from shardlib.collectives import pbroadcast, spans_processes, storage_shape
from shardlib.dtensor_convert import as_dtensor
from shardlib.errors import BadArgument, UnknownAxis
from shardlib.layouts import LayoutLike, as_layout, is_layout, taken
from shardlib.mesh import Mesh, MeshLike, as_mesh, rank_along, scope, use_mesh
from shardlib.modules.rules import Pattern, matches
from shardlib.placing import padded_size
from shardlib.tensor import Place, ShardedTensor, raw_of

Layouts: TypeAlias = (
    LayoutLike | Mapping[str, LayoutLike] | Sequence[tuple[Pattern[Tensor], LayoutLike]]
)
"""One layout for every tensor, or rules by name, of which the first match counts."""


def load(
    path: Directory,
    like: Any = None,
    *,
    layouts: Layouts | None = None,
    mesh: MeshLike | None = None,
    pad: bool = False,
    names: Names = None,
    missing: str = "error",
    extra: str = "error",
    cast: bool = False,
    timeout: float | None = None,
) -> Any:
    """Read a checkpoint onto any mesh, layout, number of ranks and padding; every rank calls.

    ``path``     written by ``save``, or a directory of steps: then the newest.
    ``like``     a tree whose leaves name the tensors to read and give their layouts; their values
                 are not used, so they may be on the meta device, but a number stands for a number.
                 None: the tree as it was saved.  Each stage of a pipeline asks for its own names.
    ``layouts``  without ``like``: one layout, or rules (pattern of the name, layout) of which the
                 first match counts; other tensors keep their saved layout.  ``mesh``  their mesh,
                 by default the one in scope; without a mesh, tensors are returned plain and whole.
                 ``pad``  allow sizes that do not divide.
    ``names``    a leaf's name in ``like`` -> in the checkpoint, a mapping or a function.
    ``missing``  "keep": leaves that the checkpoint lacks keep the value of ``like``.
    ``extra``    "skip": tensors without a leaf in ``like`` are not read.
    ``cast``     allow another dtype than was saved.

    Each rank reads the parts of its own blocks, and checks everything that it reads.  All ranks
    fail together, and then nothing was changed.
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
    known_choices("load", "path, like", missing=(missing, "keep"), extra=(extra, "skip"))
    if like is not None and (layouts is not None or mesh is not None):
        text = "like= says where each tensor goes; layouts= and mesh= do so where there is no like="
        raise BadArgument(text, op="load", fix="sl.load(path, layouts='...')")
    stage = None
    if like is None:
        here = scope().mesh if mesh is None else as_mesh(mesh)
        only, read = world_of(here) == 1, partial(_as_saved, layouts=layouts, mesh=here, pad=pad)
    else:
        wanted = Leaves.of(like, "load")
        only = alone(wanted.leaves)
        stage = None if only or world_size() == 1 else stage_of(wanted.leaves)
        how = {"names": names, "missing": missing, "extra": extra, "cast": cast}
        read = partial(_as_wanted, wanted=wanted, stage=stage, **how)

    given = {"path": path, "like": like, "layouts=layouts": layouts}
    call = f"sl.load({', '.join(n for n, x in given.items() if x is not None)}"
    group = Group("load", timeout, only, call, _fixes(path))
    with group.phase("reading", partial(_refuse_unlike, path)) as phase:
        found, readers, identity = _read(path, group, read)
        first = not stage or group.rank == stage[0]
        phase.value = [identity, readers.digests, readers.spare if first else None]
    # collectives come only after all have agreed that reading succeeded
    readers.spread()
    if like is None:
        return found
    return optree.tree_map(
        lambda a, b: as_dtensor(b) if is_dtensor(a) else b, like, found, none_is_leaf=True
    )


load.bytes_read = 0  # type: ignore[attr-defined]


def _read(
    path: str, group: Group, read: Callable[[Manifest, "_Readers"], Any]
) -> tuple[Any, "_Readers", str]:
    """Return what ``read`` makes of the newest checkpoint, and the checkpoint's id.

    Raises: OSError, ValueError.
    """
    before = None
    while True:
        identity, readers = "", _Readers()
        try:
            with Folder(opened(newest(path)), progress=group.progress) as folder:
                manifest = Manifest.of(folder)
                identity = manifest.id
                found = read(manifest, readers)
                load.bytes_read = folder.bytes_read  # type: ignore[attr-defined]
                return found, readers, identity
        except FileNotFoundError:  # replaced by a newer one meanwhile
            # the same checkpoint twice: the file is missing, not replaced
            if identity == before:
                raise
            before = identity


def _refuse_unlike(path: str, said: list[list[Any]]) -> None:
    """Refuse ranks that read other checkpoints or tensors, and tensors that no stage has.

    ``said``  of each rank: the checkpoint's id, and ``digests`` and ``spare`` of its readers.
    Raises: ValueError.
    """
    ids, digests, spare = zip(*said, strict=True)
    refuse_odd(ids, f"read different checkpoints at {path}")
    for key in {key: 0 for each in digests for key in each}:
        ranks = [r for r in json.loads(key) if r < len(said)]
        found = [digests[r].get(key) for r in ranks]
        refuse_odd(found, f"read other tensors from {path}", ranks)
    every = [set(names) for names in spare if names is not None]
    if every and (of_no_stage := set.intersection(*every)):
        raise ValueError(f"rank 0: {_differing([], sorted(of_no_stage))}")


def known_choices(op: str, given: str, **words: tuple[str, str]) -> None:
    """Refuse an argument that is neither "error" nor the other word that it may be.

    Raises: BadArgument.
    """
    for word, (value, other) in words.items():
        if value not in ("error", other):
            text = f"{word}= is 'error' or {other!r}, not {value!r}"
            fix = f"sl.{op}({given}, {word}={other!r})"
            raise BadArgument(text, op=op, fix=fix)


def _fixes(path: str) -> list[tuple[str, str]]:
    run = os.path.dirname(path) if re.fullmatch(steps_pattern, os.path.basename(path)) else path
    return [
        ("in the tree", "print(sl.checkpoint.describe(path))"),
        ("names=", "print(sl.checkpoint.describe(path))"),
        ("No such file or directory: ", f"sl.checkpoint.steps({os.path.dirname(path) or '.'!r})"),
        (MANIFEST, f"sl.checkpoint.steps({run!r})"),
        (".safetensors", f"sl.latest({run!r}, verify=True)"),
        ("different checkpoints", f"sl.latest({run!r}, verify=True)"),
    ]


# ---------------------------------------------------------------- destinations


def _device(like: Tensor) -> torch.device:
    """Return the device of the values that are read for a tensor, which may be on the meta device."""
    if not like.is_meta:
        return like.device
    return like.mesh.device if isinstance(like, ShardedTensor) else torch.device("cpu")


def storages(likes: Sequence[Tensor]) -> list[Tensor]:
    """Allocate a storage for a value like each of these, zeroed if it has padding.

    Raises: ShardError where they do not fit in their device.
    """
    raws = list(map(raw_of, likes))
    plans = [(tuple(r.shape), r.dtype, _device(x)) for r, x in zip(raws, likes, strict=True)]
    for device in {device for *_, device in plans}:
        nbytes = sum(math.prod(n) * dtype.itemsize for n, dtype, d in plans if d == device)
        refuse_beyond(nbytes, device, "load", next(filter(None, map(_mesh, likes)), None))
    out = new(plans)
    for x, raw in zip(likes, out, strict=True):
        if isinstance(x, ShardedTensor) and x.is_padded:
            raw.zero_()
    return out


def _mesh(x: Tensor) -> Mesh | None:
    return x.mesh if isinstance(x, ShardedTensor) else None


def _tensor(like: Tensor, raw: Tensor) -> Tensor:
    """Make a value like another of its storage."""
    if not isinstance(like, ShardedTensor):
        return raw
    tiled = torch.Size(like.padded_shape)
    return ShardedTensor(raw, Place(like.sharding, like.shape, like.mesh, tiled))


_MANY = 8
"""Holders of one block from which on a single one reads it and broadcasts it to the others."""

_WORTH = 1 << 16
"""Bytes of a block from which on a broadcast is worth its message."""


class _Readers:
    """A choice of the rank that reads a block with many holders; each reads about as many bytes.

    Every holder computes the same choice from the same calls in the same order, without a message.
    """

    def __init__(self) -> None:
        self.loads: dict[tuple[Mesh, tuple[str, ...]], list[int]] = {}
        self.later: list[tuple[Tensor, Mesh, tuple[str, ...], int]] = []
        # ranks of a mesh, as text -> digest of what all of them do alike
        self.digests: dict[str, int] = {}
        # the mesh whose ranks all read a plain tensor
        self.mesh = scope().mesh
        # names that the tree of a stage of a pipeline has no leaf for
        self.spare: list[str] | None = None

    def note(self, ranks: Sequence[int], what: object) -> None:
        """Add to the digest of what these ranks do alike."""
        key = json.dumps(ranks)
        self.digests[key] = zlib.crc32(repr(what).encode(), self.digests.get(key, 0))

    def is_read_here(self, name: str, raw: Tensor, like: Tensor) -> bool:
        """Return whether this rank reads the block; if not, ``spread`` fills it."""
        mesh = _mesh(like) or self.mesh
        if mesh is None or not spans_processes(mesh) or mesh.coord is None:
            return True
        if raw.device != mesh.device or (_mesh(like) is None and mesh.size != world_of(mesh)):
            return True
        split = like.sharding.axes if isinstance(like, ShardedTensor) else ()
        free = tuple(a for a, n in mesh.axes.items() if n > 1 and a not in split)
        copies = math.prod(mesh.axes[a] for a in free)
        if copies < _MANY or raw.nbytes < _WORTH:
            return True
        loads = self.loads.setdefault((mesh, free), [0] * copies)
        root = loads.index(min(loads))
        loads[root] += raw.nbytes
        self.later.append((raw, mesh, free, root))
        self.note(mesh.ranks, (name, raw.nbytes, free, root))
        return rank_along(free, mesh.coord, mesh.axes) == root

    def spread(self) -> None:
        """Broadcast blocks that one rank has read; every rank calls, once all have read."""
        for raw, mesh, free, root in self.later:
            bits = raw.detach().view(-1).view(torch.uint8)
            with use_mesh(mesh):
                bits.copy_(pbroadcast(bits, free, root))


def _read_like(
    manifest: Manifest, readers: _Readers, likes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a tensor like each of these, with the values that are read here."""
    # the same order on every rank, for _Readers
    names = sorted(likes)
    out = {}
    for name, raw in zip(names, storages([likes[n] for n in names]), strict=True):
        out[name] = _tensor(likes[name], raw.requires_grad_(likes[name].requires_grad))
        if readers.is_read_here(name, raw, likes[name]):
            for box, block in boxes(out[name]):
                manifest.read(name, box, block)
    return out


def _as_wanted(
    manifest: Manifest, readers: _Readers, wanted: Leaves, stage: list[int] | None, names: Names,
    missing: str, extra: str, cast: bool,
) -> object:  # fmt: skip
    """Return the tree of ``like`` with the saved values.

    ``stage``  of a pipeline: other ranks may have leaves for other names.  None: they have not.
    """
    if stage:
        readers.mesh = None
    if stage and isinstance(names, Mapping):
        names = {n: names[n] for n in wanted.names if n in names}
    theirs = renamed(wanted.names, names)
    lacking = [theirs[n] for n in wanted.names if theirs[n] not in manifest.names]
    spare = sorted(manifest.names - set(theirs.values()))
    if stage is not None and extra == "error":
        # another stage may have them: all ranks together find those that none has
        readers.spare = spare
        readers.note(stage, spare)
        spare = [] if stage or not lacking else spare
    _refuse_differing(lacking, spare, missing, extra)
    out, tensors = list(wanted.leaves), {}
    for i, (name, x) in enumerate(zip(wanted.names, wanted.leaves, strict=True)):
        saved = theirs[name]
        if saved in manifest.values:
            out[i] = _value(saved, manifest.values[saved], x)
        elif saved in manifest.places:
            place = manifest.places[saved]
            check(saved, x, place.shape, place.dtype, cast)
            tensors[saved] = i, x
    found = _read_like(manifest, readers, {saved: x for saved, (_, x) in tensors.items()})
    for saved, (i, _) in tensors.items():
        out[i] = found[saved]
    return optree.tree_unflatten(wanted.spec, out)


def _refuse_differing(lacking: list[str], spare: list[str], missing: str, extra: str) -> None:
    if (lacking and missing == "error") or (spare and extra == "error"):
        raise ValueError(_differing(lacking, spare))


def _value(name: str, saved: Value, x: object) -> Value:
    """Return a saved value that fits a leaf of the tree.

    Raises: ValueError.
    """
    if isinstance(x, Tensor):
        raise ValueError(f"{name!r} is a value in the checkpoint, and a tensor in the tree")
    # an int may replace a float
    alike = all(isinstance(v, int | float | complex) for v in (x, saved)) or type(x) is type(saved)
    if not alike and None not in (x, saved):
        text = f"{name!r} is {saved!r} in the checkpoint, and {type(x).__name__} in the tree"
        raise ValueError(text)
    return saved


def _differing(missing: list[str], extra: list[str]) -> str:
    words = []
    if missing:
        words.append(f"it lacks {some(missing)} (missing='keep' leaves them)")
    if extra:
        words.append(f"the tree has no place for {some(extra)} (extra='skip' leaves them out)")
    return "the checkpoint is of another tree: " + ", and ".join(words)


def check(name: str, x: object, shape: Sequence[int], dtype: torch.dtype, cast: bool) -> None:
    """Check that a saved tensor fits a leaf of the tree.

    Raises: ValueError.
    """
    if not isinstance(x, Tensor):
        text = f"{name!r} is a tensor in the checkpoint, and {type(x).__name__} in the tree"
        raise ValueError(text)
    if tuple(x.shape) != tuple(shape):
        text = f"{name!r} has shape {list(shape)} in the checkpoint, {list(x.shape)} in the tree"
        raise ValueError(text)
    if x.dtype != dtype and not cast:
        text = f"{name!r} is {code_of(dtype)} in the checkpoint, {code_of(x.dtype)} in the tree"
        raise ValueError(f"{text}; cast=True converts")


def _as_saved(
    manifest: Manifest, readers: _Readers, layouts: Any, mesh: Mesh | None,
    pad: bool,
) -> Any:  # fmt: skip
    """Return the tree as it was saved, its tensors on ``mesh``."""
    likes = {n: like_saved(n, place, layouts, mesh, pad) for n, place in manifest.places.items()}
    found = manifest.values | _read_like(manifest, readers, likes)
    try:
        return built(manifest.skeleton, found)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{MANIFEST} does not describe a tree") from None


def like_saved(name: str, place: SavedPlace, layouts: Any, mesh: Mesh | None, pad: bool) -> Tensor:
    """Return a tensor without values like that to read, which was saved at ``place``.

    Raises: ShardError.
    """
    shape, dtype = place.shape, place.dtype
    like = torch.empty(shape, dtype=dtype, device="meta")
    if mesh is None:
        return like
    given = _given(name, layouts, like)
    if given is None and place.plain:
        return torch.empty((), dtype=dtype, device=mesh.device).expand(shape)
    # a tensor that was saved with padding may have it again
    grown = pad or (given is None and place.tiled != shape)
    given = place.layout if given is None else given
    lay = as_layout(given, "load", "sl.load(path, layouts={})", shape=shape, mesh=mesh)
    lay = lay.resolve(len(shape))
    if unknown := [a for a in lay.axes if a not in mesh.axes]:
        text = f"{name!r} lies as {str(lay)!r}, and the mesh has no axis {unknown[0]!r}"
        fix = "sl.load(path, layouts='...')"
        raise UnknownAxis(text, op="load", mesh=mesh, fix=fix)
    tiled = tuple(padded_size(lay, like, mesh)) if grown else shape
    lay.check(tiled, mesh, op="load")
    block = lay.local_shape(tiled, mesh)
    raw = torch.empty(storage_shape(mesh, *block), dtype=dtype, device="meta")
    return ShardedTensor(raw, Place(lay, torch.Size(shape), mesh, torch.Size(tiled)))


def _given(name: str, layouts: Any, like: Tensor) -> Any:
    """Return the layout that the rules give a tensor, or None."""
    one = is_layout(layouts) or (isinstance(layouts, tuple) and taken(layouts) is not None)
    if layouts is None or one or callable(layouts):
        # a tuple of axes is a layout; rules are a list
        return layouts
    rules: Any = layouts.items() if isinstance(layouts, Mapping) else layouts
    return next((layout for pattern, layout, *_ in rules if matches(pattern, name, like)), None)
