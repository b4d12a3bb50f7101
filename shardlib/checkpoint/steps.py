"""Checkpoints of a run: the newest and those to keep, their contents, and their checksums."""

import contextlib
import math
import os
import re
import uuid
import warnings
from dataclasses import dataclass
from typing import Any

from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.files import Folder, code_of
from shardlib.checkpoint.folder import (
    MANIFEST,
    Directory,
    opened,
    read_manifest,
    remove,
    steps_pattern,
    strangers,
)
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import alone
from shardlib.errors import mesh_text
from shardlib.filesystem import reason


def steps(path: Directory) -> list[tuple[int, str]]:
    """Find the checkpoints of a run, (step, directory) of each valid manifest, newest first.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     for step in (10, 20):
    ...         _ = sl.save(d, {"loss": 0.5}, step=step)
    ...     [step for step, directory in steps(d)]
    [20, 10]
    """
    path, found = os.fspath(path), []
    entries = os.listdir(path) if os.path.isdir(path) else []
    for entry in (e for e in entries if re.fullmatch(steps_pattern, e)):
        step, where = int(entry[5:]), os.path.join(path, entry)
        with contextlib.suppress(OSError, ValueError), Folder(opened(where)) as folder:
            if read_manifest(folder.fd).get("step") == step:
                found.append((step, where))
    return sorted(found, reverse=True)


def latest(path: Directory, *, verify: bool = False, timeout: float | None = None) -> str | None:
    """Find the newest checkpoint that ``save(path, tree, step=...)`` wrote; None if there is none.

    Only complete ones count; leftovers of a crash are ignored.
    ``verify``   also read every byte of it; if it is damaged, warn and take the one before.  Every
                 rank calls, reads a part of the files, and returns the same answer.
    ``timeout``  seconds of silence after which a rank counts as lost; the mesh's by default.
    Raises: CheckpointError, with ``verify``, if a rank fails.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     for step in (10, 20, 30):
    ...         _ = sl.save(d, {"loss": 0.5}, step=step, keep=2)
    ...     latest(d)[-8:], latest(d, verify=True)[-8:], sorted(os.listdir(d))
    ('00000030', '00000030', ['step_00000020', 'step_00000030'])
    """
    path = os.fspath(path)
    if not verify:
        return next((folder for _, folder in steps(path)), None)
    group = Group("latest", timeout, alone([]))
    for _, folder in group.agree("steps", steps(path), decide=lambda values: values[0]):
        wrong = damage(folder, group)
        if not wrong:
            return folder
        warnings.warn(f"{folder} is passed over: {wrong[0]}", stacklevel=2)
    return None


def damage(path: str, group: Group) -> list[str]:
    """List the damage of a checkpoint; each rank of ``group`` reads some of its files.

    Raises: CheckpointError if a rank fails.
    """
    wrong: list[str] = []
    try:
        with Folder(opened(path), progress=group.progress) as folder:
            manifest = Manifest.of(folder)
            wrong = manifest.damage(range(group.rank, len(manifest.files), group.world))
    except (OSError, ValueError) as e:
        wrong = [reason(e)]
    name = os.path.basename(path)
    return group.agree(
        f"damage of {name}", wrong, decide=lambda said: sorted({w for some in said for w in some})
    )


def newest(path: str) -> str:
    """Return the directory of a checkpoint, or of the newest step in a directory of steps.

    Raises: OSError, ValueError.
    """
    try:
        with Folder(opened(path)) as folder:
            os.stat(MANIFEST, dir_fd=folder.fd)
        return path
    except NotADirectoryError:
        raise ValueError(f"{path} is no directory; sl.load_hf reads safetensors files") from None
    except FileNotFoundError:
        if not os.path.isdir(path):
            raise
        if found := steps(path):
            return found[0][1]
        raise ValueError(f"{path} holds no {MANIFEST}, and no step that does") from None


def remove_old(path: str, keep: int, step: int) -> None:
    """Keep the newest ``keep`` checkpoints up to ``step``; remove only directories of ``save``.

    Later steps, of a run that went back, are kept; so are links, and directories with foreign
    files.  Each is renamed first, so that none is found half removed.
    """
    for _, folder in [found for found in steps(path) if found[0] <= step][keep:]:
        base = os.path.basename(folder)
        away = os.path.join(path, f".{base}.gone-{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            other = ["a link"] if os.path.islink(folder) else strangers(folder)
            if other:
                warnings.warn(f"{folder} stays: {other[0]!r} is not a save's", stacklevel=2)
                continue
            os.rename(folder, away)
            remove(away)


# ---------------------------------------------------------------- contents


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint: ``dtype`` as in the files, global ``shape``, and its placement.

    ``layout``  its text; empty for a plain tensor, which every rank held.
    ``mesh``    axis -> size.

    >>> Saved("BF16", (8, 4), "x .", {"x": 2}, 64).nbytes
    64
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    mesh: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class About:
    """The contents of a checkpoint; ``print`` it for a table.

    ``path``     its directory.
    ``step``     None if it was saved without one.
    ``tensors``  name -> ``Saved``.
    ``values``   name -> number, text or None.
    ``files``    name -> bytes.

    >>> w = Saved("F32", (4, 2), "x .", {"x": 2}, 32)
    >>> print(About("run/a", 3, {"w": w}, {"epoch": 1}, {"rank_00000.safetensors": 400}))
    run/a: step 3, 1 tensors, 32 bytes in 1 files, x=2
      w      f32  [4, 2]  x .
      epoch  int  1
    """

    path: str
    step: int | None
    tensors: dict[str, Saved]
    values: dict[str, Any]
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def meshes(self) -> list[dict[str, int]]:
        """The meshes of its tensors, each once."""
        found: list[dict[str, int]] = []
        for t in self.tensors.values():
            if t.layout and t.mesh not in found:
                found.append(t.mesh)
        return found

    def __str__(self) -> str:
        meshes = ", ".join(mesh_text(m) for m in self.meshes) or "no mesh"
        head = f"{self.path}: "
        if self.step is not None:
            head += f"step {self.step}, "
        head += f"{len(self.tensors)} tensors, {_size(self.nbytes)} in {len(self.files)} files, "
        rows = self._rows()
        wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, row, wide), row[3]]).rstrip() for row in rows]
        return "\n  ".join([head + meshes, *lines])

    def _rows(self) -> list[tuple[str, ...]]:
        """List name, dtype, shape and layout; equal tensors of different layers are one row."""
        kinds: dict[tuple[str, ...], list[str]] = {}
        for n, t in self.tensors.items():
            kind = t.dtype.lower(), str(list(t.shape)), t.layout or "plain"
            kinds.setdefault((re.sub(r"\.\d+(?=\.)", ".*", n), *kind), []).append(n)
        for (alike, *_), names in kinds.items():
            if len(names) > 1:
                names[:] = [f"{len(names)} x {alike}"]
        rows = [(name, *kind) for (_, *kind), (name,) in kinds.items()]
        return rows + [(n, type(v).__name__, repr(v), "") for n, v in self.values.items()]


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.{int(unit != 'bytes')}f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def describe(path: Directory) -> About:
    """Read the manifest of a checkpoint, no tensor; of a directory of steps, the newest.

    Raises: CheckpointError.

    >>> import tempfile, torch, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d, sl.simulate(x=2):
    ...     _ = sl.save(d + "/run", {"w": sl.shard(torch.ones(4, 2), "x ."), "epoch": 1}, step=10)
    ...     about = describe(d + "/run")
    >>> about.step, about.tensors["w"], about.values
    (10, Saved(dtype='F32', shape=(4, 2), layout='x .', mesh={'x': 2}, nbytes=32), {'epoch': 1})
    """
    with Group("describe", 1.0, alone=True).phase("reading"):
        place = newest(os.fspath(path))
        with Folder(opened(place)) as folder:
            return _about(place, Manifest.of(folder))


def verify(path: Directory, *, timeout: float | None = None) -> About:
    """Read every byte of a checkpoint and compare all checksums.

    Of a directory of steps, the newest.  In a job every rank calls, and reads a part of the files.
    ``timeout``  seconds of silence after which a rank counts as lost; the mesh's by default.
    Raises: CheckpointError, the same on every rank, naming each file and tensor that is damaged.

    >>> import tempfile, torch, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     _ = sl.save(d + "/c", {"w": torch.ones(1000)})
    ...     print(verify(d + "/c").nbytes)
    ...     file = d + "/c/rank_00000.safetensors"
    ...     with open(file, "r+b") as f:
    ...         _ = f.seek(-100, 2), f.write(b"?")
    ...     try:
    ...         _ = verify(d + "/c")
    ...     except sl.ShardError as e:
    ...         print(e.message)
    4000
    rank_00000.safetensors is damaged: a checksum is wrong ('w')
    """
    group = Group("verify", timeout, alone([]))
    with group.phase("looking"):
        place = newest(os.fspath(path))
    place = group.agree("the path", place, decide=lambda places: places[0])
    wrong = damage(place, group)
    if len(wrong) > 6:
        wrong = [*wrong[:6], f"and {len(wrong) - 6} more"]
    if wrong:
        raise group.error("; ".join(wrong))
    return describe(place)


def _about(path: str, manifest: Manifest) -> About:
    tensors = {}
    for name, place in manifest.places.items():
        layout, mesh = str(place.layout), dict(place.mesh)
        if place.plain:
            layout, mesh = "", {}
        nbytes = math.prod(place.shape) * place.dtype.itemsize
        tensors[name] = Saved(code_of(place.dtype) or "", place.shape, layout, mesh, nbytes)
    files = {f["file"]: f["bytes"] for f in manifest.files}
    return About(path, manifest.step, tensors, manifest.values, files)
