"""Manifests, and the contents of a directory compared with its manifest.

All writers follow the rule in this file: a path may be replaced, and a directory removed, if it
does not exist, or has only files that a manifest of shardlib lists.  A work directory whose
``lock`` has its own id was made by a save and may be removed as a whole.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from shardlib.checkpoint.disk import open_file, write_all
from shardlib.checkpoint.files import parsed

__all__ = [
    "FORMAT", "LOCK", "MANIFEST", "flushed", "occupied", "read_manifest", "remove", "strangers",
    "write_manifest",
]  # fmt: skip

MANIFEST, LOCK = "shardlib.json", "lock"
FORMAT = "shardlib checkpoint 4"

_LONGEST = 1 << 30
"""The most bytes of a manifest."""


def write_manifest(folder: int, manifest: dict[str, Any]) -> None:
    """Write the manifest into the work directory, and flush it."""
    body = json.dumps(manifest, sort_keys=True).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(MANIFEST, flags, 0o666, dir_fd=folder)
    try:
        write_all(fd, memoryview(body + f"\n{zlib.crc32(body):08x}\n".encode()))
        os.fsync(fd)
    finally:
        os.close(fd)


def read_manifest(folder: int, formats: Sequence[str] = (FORMAT,)) -> dict[str, Any]:
    """Read the manifest of a directory.

    Raises: ValueError, OSError.
    """
    with os.fdopen(open_file(folder, MANIFEST), "rb") as f:
        if os.fstat(f.fileno()).st_size > _LONGEST:
            raise ValueError(f"{MANIFEST} is longer than {_LONGEST} bytes")
        body, _, tail = f.read().partition(b"\n")
    if tail != f"{zlib.crc32(body):08x}\n".encode():
        raise ValueError(f"{MANIFEST} is damaged: its checksum is wrong")
    found = parsed(body, MANIFEST)
    said = found.get("format") if isinstance(found, dict) else None
    if said not in formats:
        raise ValueError(f"{MANIFEST} is of format {said!r}, not {formats[0]!r}")
    return found


def occupied(target: str) -> str:
    """Return why a path, without links in it, may not be replaced; "" if it may."""
    try:
        if not os.path.lexists(target):
            return ""
        if os.path.ismount(target):
            return "a file system is mounted there"
        if os.path.samefile(target, os.curdir):
            return "it is the working directory"
        other = strangers(target)
    except NotADirectoryError:
        return "it is no directory"
    except OSError as e:
        return e.strerror or str(e)
    if not other:
        return ""
    more = f" and {len(other) - 1} more" if len(other) > 1 else ""
    return f"it holds {other[0]!r}{more}, which no {MANIFEST} lists"


def strangers(path: str) -> list[str]:
    """List the files in a directory that no save wrote; foreign directories end in a slash.

    Raises: OSError.
    """
    found = dict(_within(path))
    ours = _listed(path, found)
    if ours is None:
        return []
    parents = {name[:i] for name in ours for i, c in enumerate(name) if c == "/"}
    return sorted(
        name + "/" * (kind == "folder")
        for name, kind in found.items()
        if (name not in parents if kind == "folder" else kind != "file" or name not in ours)
    )


def remove(path: str) -> bool:
    """Remove a directory if a save wrote all of it; return whether it is gone.

    The lock goes second to last and the manifest last, so a half removed directory is still
    recognised.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(path) or strangers(path):
            return False
        found = dict(_within(path))
        for name in sorted(found, key=lambda n: (n == MANIFEST, n == LOCK)):
            if found[name] != "folder":
                os.unlink(os.path.join(path, name))
        for name in sorted((n for n in found if found[n] == "folder"), key=len, reverse=True):
            os.rmdir(os.path.join(path, name))
        os.rmdir(path)
    return not os.path.lexists(path)


def flushed(path: str) -> list[str]:
    """Flush each file of a directory to the disk, and list them.

    Raises: OSError.
    """
    found = dict(_within(path))
    for name in found:
        fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return [name for name, kind in found.items() if kind == "file" and name != LOCK]


def _within(path: str, start: str = "") -> Iterator[tuple[str, str]]:
    """Walk a directory: yield each relative name, and "file", "folder" or "neither"."""
    with os.scandir(path) as entries:
        for e in sorted(entries, key=lambda e: e.name):
            name = start + e.name
            if e.is_dir(follow_symlinks=False):
                yield name, "folder"
                yield from _within(e.path, f"{name}/")
            else:
                yield name, "file" if e.is_file(follow_symlinks=False) else "neither"


def _listed(path: str, found: dict[str, str]) -> set[str] | None:
    """Return the names in a directory's manifest; None if it is a work directory of a save."""
    work = re.search(r"\.(?:tmp|gone|old)-([0-9a-f]{32})$", path)
    if work and _head(os.path.join(path, LOCK)) == work[1]:
        return None
    if work and not _head(os.path.join(path, LOCK)) and set(found) <= {LOCK}:
        return None  # a save was just making it
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            said = read_manifest(fd, (FORMAT, f"{FORMAT} of Hugging Face"))
        finally:
            os.close(fd)
        return {MANIFEST, LOCK, *(f["file"] for f in said["files"])}
    return set()


def _head(path: str) -> str:
    try:
        with open(path, "rb") as f:
            return f.read(64).decode()
    except (OSError, UnicodeError):
        return ""
