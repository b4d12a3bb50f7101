"""Conversion of checkpoints: to another mesh, and to and from Hugging Face directories.

One process converts, block by block.  Everything read is checked, and a result appears complete or not at all.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.boxes import Box, SavedPlace, chunk, length, packed, size, whole
from shardlib.checkpoint.files import Folder, WrittenPart, fill
from shardlib.checkpoint.folder import MANIFEST, Directory, folder_of, opened
from shardlib.checkpoint.huggingface import tensors_of, write_hf
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.reading import Layouts, like_saved
from shardlib.checkpoint.steps import newest
from shardlib.checkpoint.tree import Content, Leaves, Names, place_of, renamed, some
from shardlib.checkpoint.writing import SaveJob
from shardlib.errors import BadArgument
from shardlib.mesh import Mesh, MeshLike, as_mesh, simulate
from shardlib.optional import optional_text


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
    group = _group("reshard", "path, target, mesh")
    with contextlib.ExitStack() as stack:
        with group.phase("reading"):
            manifest = Manifest.of(stack.enter_context(_opened(path)))
            places = {
                name: place_of(like_saved(name, old, layouts, there, pad), there.size)
                for name, old in manifest.places.items()
            }
        job = SaveJob(group, os.fspath(target), manifest.step, overwrite)
        _write(job, Content(places, manifest.values, manifest.skeleton), manifest.read, there.size)


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
    group = _group("to_hf", "path, directory")
    with contextlib.ExitStack() as stack:
        with group.phase("reading"):
            manifest = Manifest.of(stack.enter_context(_opened(path)))
            called = renamed(list(within := _within(manifest.places, subtree)), names)
            tensors = {}
            for ours, theirs in called.items():
                name = within[ours]
                shape, dtype, *_ = manifest.places[name]
                get = partial(_block, manifest.read, name, whole(shape), dtype)
                tensors[ours] = WrittenPart.of_whole(theirs, shape, dtype, get)

        def configure(into: str) -> None:
            if config is not None:
                for file in _companions(config):
                    shutil.copyfile(file, Path(into) / file.name)

        one = "model.safetensors"
        write_hf(group, directory, lambda: tensors, configure, one, max_bytes, overwrite)


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
    call = "directory, target, mesh"
    if mesh is None:
        if layouts is not None:
            text = "layouts= lie on a mesh"
            fix = "sl.checkpoint.from_hf(directory, target, {'x': 2}, layouts='...')"
            raise BadArgument(text, op="from_hf", fix=fix)
        call, mesh = "directory, target", {"one": 1}
    there = _mesh(mesh)
    group = _group("from_hf", call)
    with contextlib.ExitStack() as stack:
        with group.phase("reading"):
            table = tensors_of(os.fspath(directory), group.progress, stack)
            chunks = {ours: table[theirs] for theirs, ours in renamed(list(table), names).items()}
            meta = {n: c.empty("meta") for n, c in chunks.items()}
            leaves = Leaves.of({subtree: meta} if subtree else meta, "from_hf")
            full = dict(zip(sorted(meta), leaves.names, strict=True))
            places = {}
            for name, c in chunks.items():
                plain = SavedPlace.of_plain(c.shape, c.dtype, 1)
                like = like_saved(name, plain, layouts, there, pad)
                places[full[name]] = place_of(like, there.size)
        sources = {full[n]: c for n, c in chunks.items()}

        def read(name: str, box: Box, out: Tensor) -> None:
            if fill(out, box, sources[name]) != size(box):
                raise ValueError(f"{sources[name].file} does not have all of {name!r}")

        job = SaveJob(group, folder_of(os.fspath(target), step), step, overwrite)
        _write(job, Content(places, {}, leaves.skeleton), read, there.size)


# ---------------------------------------------------------------- shared by all three


def _mesh(mesh: Mapping[str, int] | MeshLike) -> Mesh:
    """Make a simulated mesh of these sizes."""
    sizes = mesh if isinstance(mesh, Mapping) else as_mesh(mesh).axes
    return simulate(**sizes)


def _group(op: str, given: str) -> Group:
    """Make the group of one process."""
    return Group(op, 100.0, True, f"sl.checkpoint.{op}({given}")


def _opened(path: Directory) -> Folder:
    return Folder(opened(newest(os.fspath(path))))


Read = Callable[[str, Box, Tensor], None]
"""Function of (name, box, block) that fills the block with the tensor's values in the box."""


def _within(names: Iterable[str], subtree: str) -> dict[str, str]:
    """Map names in a part of the tree to names in the tree.

    Raises: ValueError if that part has no tensor.
    """
    start = optional_text("{}/", subtree)
    found = {n.removeprefix(start): n for n in names if n.startswith(start)}
    if not found:
        tops = sorted({n.partition("/")[0] for n in names if "/" in n})
        raise ValueError(f"it has no tensor under {subtree!r}, but under {some(tops)}")
    return {n.replace("~1", "/").replace("~0", "~"): full for n, full in found.items()}


_COMPANIONS = (".json", ".jinja", ".model", ".txt", ".tiktoken")


def _companions(directory: Directory) -> list[Path]:
    """List the files of a Hugging Face directory that are not weights."""
    return [
        p
        for p in sorted(Path(directory).iterdir())
        if p.is_file() and p.suffix in _COMPANIONS and not p.name.endswith(".index.json")
        if p.name != MANIFEST
    ]


def _block(read: Read, name: str, box: Box, dtype: torch.dtype) -> Tensor:
    """Read a box of a tensor into a block that holds nothing else."""
    out = torch.empty([length(held) for held in box], dtype=dtype, device="cpu")
    read(name, packed(box), out)
    return out


def _write(job: SaveJob, content: Content, read: Read, world: int) -> None:
    """Write the files that each rank would have written; a block is read when it is written.

    Raises: CheckpointError.
    """
    files: dict[int, list[WrittenPart]] = {rank: [] for rank in range(world)}
    for name, place in sorted(content.places.items()):
        for rank in range(world):
            box = chunk(name, place, rank)
            if box is not None:
                get = partial(_block, read, name, box, place.dtype)
                files[rank].append(WrittenPart(name, box, place.shape, place.dtype, get))
    with job.leaving():
        job.begin(content.leaves, content.skeleton)
    job.write(files)
