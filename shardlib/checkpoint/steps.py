"""The checkpoints of a run: ``step_00000100`` in one directory, the newest, and those to keep."""

import contextlib
import os
import re
import shutil
import uuid
from typing import Any

from shardlib.checkpoint.folder import opened, read_manifest

__all__ = ["folder_of", "latest", "remove_old", "steps", "steps_pattern"]

steps_pattern = r"step_\d{8,}"


def folder_of(path: str, step: int | None) -> str:
    return path if step is None else os.path.join(path, f"step_{step:08d}")


def _manifest(path: str) -> dict[str, Any] | None:
    """What a directory says of itself, if it is a checkpoint of ours."""
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


def steps(path: str) -> list[tuple[int, str]]:
    """(step, directory) of the checkpoints with a whole manifest, newest first."""
    found = []
    for entry in os.listdir(path) if os.path.isdir(path) else []:
        if re.fullmatch(steps_pattern, entry):
            folder = os.path.join(path, entry)
            manifest = _manifest(folder)
            if manifest is not None and manifest.get("step") == int(entry[5:]):
                found.append((int(entry[5:]), folder))
    return sorted(found, reverse=True)


def latest(path: str | os.PathLike[str]) -> str | None:
    """Find the newest checkpoint that ``save(path, tree, step=...)`` made; None if there is none.

    Only whole ones count; what a crash left is not seen.

    >>> import tempfile, shardlib as sl
    >>> with tempfile.TemporaryDirectory() as d:
    ...     for step in (10, 20, 30):
    ...         _ = sl.save(d, {"loss": 0.5}, step=step, keep=2)
    ...     latest(d)[-8:], sorted(os.listdir(d))
    ('00000030', ['step_00000020', 'step_00000030'])
    """
    found = steps(os.fspath(path))
    return found[0][1] if found else None


def remove_old(path: str, keep: int, step: int) -> None:
    """Keep the newest ``keep`` checkpoints up to ``step``; only what ``save`` made is removed.

    Later ones, of a run that went back, stay.  One goes by a rename first, so none is ever seen
    half removed.
    """
    for _, folder in [found for found in steps(path) if found[0] <= step][keep:]:
        base = os.path.basename(folder)
        away = os.path.join(path, f".{base}.gone-{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):
            os.rename(folder, away)
            shutil.rmtree(away, ignore_errors=True)
