"""Conversion of checkpoints: to another mesh, and to and from Hugging Face directories.

One process converts, block by block.  Everything read is checked, and a result appears complete or not at all.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.boxes import Box, SavedPlace, chunk, size, whole
from shardlib.checkpoint.contents import MANIFEST
from shardlib.checkpoint.files import Folder, WrittenPart, fill
from shardlib.checkpoint.huggingface import say_dtype, tensors_of, write_hf
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.reading import Layouts, renamed, some, target_of
from shardlib.checkpoint.steps import folder_of, opened_newest
from shardlib.checkpoint.tree import Content, Leaves, said_of, spoken
from shardlib.checkpoint.writing import SaveJob
from shardlib.errors import BadArgument
from shardlib.mesh import Mesh, MeshLike, as_mesh, simulate

__all__ = ["from_hf", "reshard", "to_hf"]

Directory = str | os.PathLike[str]
Names = Mapping[str, str] | Callable[[str], str] | None


def reshard(
    path: Directory,
    target: Directory,
    mesh: Mapping[str, int] | MeshLike,
    *,
    layouts: Layouts | None = None,
    pad: bool = False,
    overwrite: bool = False,
) -> None:
    """Rewrite a checkpoint with the files that the ranks of another mesh would have written.

    ``load`` does not need this: it reads a checkpoint onto any mesh.  Here the files match the
    mesh, so that each rank reads one file from end to end.
    One process calls; it holds one block at a time.

    ``path``       a checkpoint, or a directory of steps: then the newest.
    ``mesh``       axis -> size.
    ``layouts``    one layout, or rules (pattern of the name, layout) of which the first match
                   counts; a tensor without a match keeps its layout.
    ``pad``        allow sizes that do not divide.
    ``overwrite``  replace an existing checkpoint.
    Raises: CheckpointError, and then nothing was written.

    >>> import tempfile, torch, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     with sl.simulate(x=4):
    ...         _ = sl.save(d + "/a", {"w": sl.shard(torch.arange(8.0), "x")})
    ...     reshard(d + "/a", d + "/b", {"x": 2})
    ...     print(sl.checkpoint.describe(d + "/b"))  # doctest: +ELLIPSIS
    /...b: 1 tensors, 32 bytes in 2 files, x=2
      w  f32  [8]  x
    """
    there = _mesh(mesh)
    group = Group(
        "reshard",
        100.0,
        alone=True,
        fixes=[
            ("overwrite=False", "sl.checkpoint.reshard(path, target, mesh, overwrite=True)"),
            ("does not divide", "sl.checkpoint.reshard(path, target, mesh, pad=True)"),
        ],
    )
    with _reading(group, path) as folder:
        manifest, error = _manifest(group, folder), None
        places: dict[str, SavedPlace] = {}
        try:
            for name, old in manifest.places.items():
                places[name] = _place(name, old, manifest.dtypes[name], layouts, there, pad)
        except (ValueError, RuntimeError) as e:
            error = e
        group.agree("layouts", error=error)
        tensors = {n: said_of(p, manifest.dtypes[n]) for n, p in places.items()}
        values = {n: spoken(v) for n, v in manifest.values.items()}
        content = Content(tensors, values, manifest.skeleton)

        def read(name: str, box: Box) -> Tensor:
            out = _blank(box, manifest.dtypes[name])
            manifest.read(name, box, out)
            return out

        files = _parts(places, manifest.dtypes, there.size, read)
        _write(group, os.fspath(target), manifest.step, overwrite, content, files)


def to_hf(
    path: Directory,
    directory: Directory,
    *,
    subtree: str = "",
    names: Names = None,
    config: Directory | None = None,
    max_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint's tensors as a Hugging Face directory, unsharded and split by size.

    One process calls; it holds one whole tensor at a time.

    ``path``     a checkpoint, or a directory of steps: then the newest.
    ``subtree``  the part of the tree to write: ``"params"`` if ``save`` was called with
                 ``{"params": params, ...}``.
    ``names``    a tensor's name in that part -> the name in the files.
    ``config``   a directory whose configuration and tokenizer are copied, with the dtype set to
                 that of the tensors: all its small files but weights.  If None, only weights are
                 written.
    Raises: CheckpointError, and then nothing was written.

    >>> import tempfile, torch, shardlib as sl
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     _ = sl.save(d + "/c", {"params": {"w": sl.shard(torch.arange(4), "x")}, "step": 3})
    ...     to_hf(d + "/c", d + "/hf", subtree="params")
    ...     load_file(d + "/hf/model.safetensors")
    {'w': tensor([0, 1, 2, 3])}
    """
    group = Group(
        "to_hf",
        100.0,
        alone=True,
        fixes=[("overwrite=False", "sl.checkpoint.to_hf(path, directory, overwrite=True)")],
    )
    with _reading(group, path) as folder:
        manifest, error = _manifest(group, folder), None
        tensors: list[WrittenPart] = []
        try:
            called = _called(_within(manifest.places, subtree), names)

            def read(name: str) -> Tensor:
                box = whole(manifest.places[name].shape)
                out = _blank(box, manifest.dtypes[name])
                manifest.read(name, box, out)
                return out

            for theirs, name in called.items():
                shape = manifest.places[name].shape
                get = lambda n=name: read(n)  # noqa: E731
                tensors.append(WrittenPart.of_whole(theirs, shape, manifest.dtypes[name], get))
        except (ValueError, TypeError) as e:
            error = e

        def configure(into: str) -> None:
            for file in _companions(config) if config is not None else ():
                shutil.copyfile(file, Path(into) / file.name)
            say_dtype(into, tensors)

        write_hf(
            group, directory, tensors, configure, "model.safetensors", max_bytes, overwrite, error
        )


def from_hf(
    directory: Directory,
    target: Directory,
    mesh: Mapping[str, int] | MeshLike | None = None,
    *,
    layouts: Layouts | None = None,
    pad: bool = False,
    subtree: str = "",
    names: Names = None,
    step: int | None = None,
    overwrite: bool = False,
) -> None:
    """Write the tensors of a Hugging Face directory as a checkpoint, under the files' names.

    ``load_hf`` reads such a directory into a module, whose parameters may have other names; this
    function has no module.  One process calls; it holds one block at a time.

    ``target``   the directory to write, or its parent with ``step``: ``target/step_00000100``.
    ``mesh``     axis -> size of the ranks that the files are for; None: one file.
    ``layouts``  one layout, or rules (pattern of the name, layout); tensors without a match are
                 plain.
    ``subtree``  a key of the tree to put all tensors under, as ``"params"``.
    ``names``    a name in the files -> in the checkpoint.
    Raises: CheckpointError, and then nothing was written.

    >>> import tempfile, torch, shardlib as sl
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as d:
    ...     save_file({"w": torch.arange(4.0)}, d + "/model.safetensors")
    ...     from_hf(d, d + "/c", {"x": 2}, layouts=[("w", "x")], subtree="params")
    ...     with sl.simulate(x=2):
    ...         sl.typeof(sl.load(d + "/c")["params"]["w"])
    'f32[4@x]'
    """
    there = None if mesh is None else _mesh(mesh)
    if there is None and layouts is not None:
        raise BadArgument(
            "layouts= lie on a mesh",
            op="from_hf",
            fix="sl.checkpoint.from_hf(directory, target, {'x': 2}, layouts='...')",
        )
    group = Group(
        "from_hf",
        100.0,
        alone=True,
        fixes=[
            ("overwrite=False", "sl.checkpoint.from_hf(directory, target, overwrite=True)"),
            ("does not divide", "sl.checkpoint.from_hf(directory, target, mesh, pad=True)"),
        ],
    )
    folder, error = None, None
    try:
        folder, table = tensors_of(os.fspath(directory), group.progress)
        called = _called({n: n for n in table}, names)
        world = 1 if there is None else there.size
        places = {}
        dtypes = {}
        meta = {}
        for ours, theirs in called.items():
            c = table[theirs]
            old = SavedPlace.of_plain(c.shape, world)
            places[ours] = old if there is None else _place(ours, old, c.dtype, layouts, there, pad)
            dtypes[ours] = c.dtype
            meta[ours] = torch.empty(c.shape, dtype=c.dtype, device="meta")
        leaves = Leaves.of({subtree: meta} if subtree else meta, "from_hf")
        full = dict(zip(leaves.names, sorted(meta), strict=True))
    except (OSError, ValueError, RuntimeError) as e:
        error = e
    try:
        group.agree("reading", error=error)
        assert folder is not None, "its error was raised"
        said = {n: said_of(places[m], dtypes[m]) for n, m in full.items()}

        def read(name: str, box: Box) -> Tensor:
            out = _blank(box, dtypes[full[name]])
            source = table[called[full[name]]]
            if fill(out, box, source, folder) != size(box):
                raise ValueError(f"{source.file} does not have all of {name!r}")
            return out

        content = Content(said, {}, leaves.skeleton)
        files = _parts(
            {n: places[m] for n, m in full.items()},
            {n: dtypes[m] for n, m in full.items()},
            world,
            read,
        )
        path = folder_of(os.fspath(target), step)
        _write(group, path, step, overwrite, content, files)
    finally:
        if folder is not None:
            folder.__exit__()


# ---------------------------------------------------------------- shared by all three


def _mesh(mesh: Mapping[str, int] | MeshLike) -> Mesh:
    """Make a simulated mesh of these sizes."""
    sizes = mesh if isinstance(mesh, Mapping) else as_mesh(mesh).axes
    return simulate(**sizes)


def _reading(group: Group, path: Directory) -> Folder:
    """Open a checkpoint for reading.

    Raises: CheckpointError.
    """
    try:
        return Folder(opened_newest(os.fspath(path)))
    except (OSError, ValueError) as e:
        group.agree("reading", error=e)
        raise


def _manifest(group: Group, folder: Folder) -> Manifest:
    try:
        return Manifest.of(folder)
    except (OSError, ValueError) as e:
        group.agree("reading", error=e)
        raise


def _place(
    name: str, old: SavedPlace, dtype: torch.dtype, layouts: Layouts | None, mesh: Mesh, pad: bool
) -> SavedPlace:
    """Return the place of a tensor on the new mesh.

    Raises: ShardError.
    """
    target = target_of(name, old, dtype, layouts, mesh, pad)
    if target.layout is None:
        return SavedPlace.of_plain(old.shape, mesh.size)
    axes, ranks = tuple(mesh.axes.items()), tuple(range(mesh.size))
    return SavedPlace(old.shape, target.layout, target.tiled, axes, ranks)


def _within(names: Iterable[str], subtree: str) -> dict[str, str]:
    """Map names in a part of the tree to names in the tree.

    Raises: ValueError if that part has no tensor.
    """
    start = f"{subtree}/" if subtree else ""
    found = {n.removeprefix(start): n for n in names if n.startswith(start)}
    if not found:
        tops = sorted({n.partition("/")[0] for n in names if "/" in n})
        raise ValueError(f"it has no tensor under {subtree!r}, but under {some(tops)}")
    return {n.replace("~1", "/").replace("~0", "~"): full for n, full in found.items()}


def _called(found: Mapping[str, str], names: Names) -> dict[str, str]:
    """Rename the keys of a mapping.

    Raises: ValueError if two become one.
    """
    to = renamed(list(found), names)
    return {to[n]: full for n, full in found.items()}


_COMPANIONS = (".json", ".jinja", ".model", ".txt", ".tiktoken")


def _companions(directory: Directory) -> list[Path]:
    """List the files of a Hugging Face directory that are not weights."""
    return [
        p
        for p in sorted(Path(directory).iterdir())
        if p.is_file() and p.suffix in _COMPANIONS and not p.name.endswith(".index.json")
        if p.name != MANIFEST
    ]


def _blank(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.empty([sum(run.length for run in held) for held in box], dtype=dtype, device="cpu")


def _parts(
    places: Mapping[str, SavedPlace],
    dtypes: Mapping[str, torch.dtype],
    world: int,
    read: Callable[[str, Box], Tensor],
) -> dict[int, list[WrittenPart]]:
    """List the parts that each rank would have written; a block is read when it is written."""
    out: dict[int, list[WrittenPart]] = {rank: [] for rank in range(world)}
    for name, place in sorted(places.items()):
        for rank in range(world):
            box = chunk(name, place, rank)
            if box is not None:
                get = lambda n=name, b=box: read(n, _packed(b))  # noqa: E731
                out[rank].append(WrittenPart(name, box, place.shape, dtypes[name], get))
    return out


def _packed(box: Box) -> Box:
    """Return the same positions as a block that holds nothing else."""
    out = []
    for held in box:
        runs, at = [], 0
        for run in held:
            runs.append(run._replace(at=at))
            at += run.length
        out.append(tuple(runs))
    return tuple(out)


def _write(
    group: Group,
    path: str,
    step: int | None,
    overwrite: bool,
    content: Content,
    files: Mapping[int, list[WrittenPart]],
) -> None:
    """Write the new checkpoint.

    Raises: CheckpointError.
    """
    job = SaveJob(group, path, step, overwrite)
    try:
        name = job.begin(content, {}, None)
    except BaseException as e:
        job.leave(e)
        raise
    job.write(content, name, files)
