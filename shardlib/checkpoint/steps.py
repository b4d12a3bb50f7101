"""Steps of a run: ``step_00000100`` in one directory, the newest, and those to keep."""

import contextlib
import os
import re
import uuid
import warnings
from typing import Any

from shardlib.checkpoint.agree import Group
from shardlib.checkpoint.contents import MANIFEST, read_manifest, remove, strangers
from shardlib.checkpoint.files import Folder
from shardlib.checkpoint.folder import opened
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import alone

__all__ = [
    "damage",
    "folder_of",
    "latest",
    "opened_newest",
    "remove_old",
    "steps",
    "steps_pattern",
]

steps_pattern = r"step_\d{8,}"


def folder_of(path: str, step: int | None) -> str:
    """Return the directory of a step, or the path itself if ``step`` is None."""
    return path if step is None or not path else os.path.join(path, f"step_{step:08d}")


def _manifest(path: str) -> dict[str, Any] | None:
    """Read the manifest of a directory; None if it is no checkpoint."""
    try:
        fd = opened(path)
    except OSError:
        return None
    try:
        return read_manifest(fd)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def steps(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Find the checkpoints of a run, (step, directory) of each valid manifest, newest first.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     for step in (10, 20):
    ...         _ = sl.save(d, {"loss": 0.5}, step=step)
    ...     [step for step, directory in steps(d)]
    [20, 10]
    """
    path, found = os.fspath(path), []
    for entry in os.listdir(path) if os.path.isdir(path) else []:
        if re.fullmatch(steps_pattern, entry):
            folder = os.path.join(path, entry)
            manifest = _manifest(folder)
            if manifest is not None and manifest.get("step") == int(entry[5:]):
                found.append((int(entry[5:]), folder))
    return sorted(found, reverse=True)


def latest(
    path: str | os.PathLike[str], *, verify: bool = False, timeout: float | None = None
) -> str | None:
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
        found = steps(path)
        return found[0][1] if found else None
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
            mine = range(group.rank, len(manifest.files), group.world)
            wrong = manifest.damage(mine)
    except (OSError, ValueError) as e:
        wrong = [getattr(e, "strerror", None) or str(e)]
    name = os.path.basename(path)
    return group.agree(
        f"damage of {name}", wrong, decide=lambda said: sorted({w for some in said for w in some})
    )


def opened_newest(path: str) -> int:
    """Open a checkpoint's directory, or the newest step's.

    Raises: OSError, ValueError.
    """
    try:
        fd = opened(path)
    except NotADirectoryError:
        raise ValueError(f"{path} is no directory; sl.load_hf reads safetensors files") from None
    try:
        os.stat(MANIFEST, dir_fd=fd)
        return fd
    except FileNotFoundError:
        os.close(fd)
    found = steps(path)
    if not found:
        raise ValueError(f"{path} holds no {MANIFEST}, and no step that does")
    return opened(found[0][1])


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
