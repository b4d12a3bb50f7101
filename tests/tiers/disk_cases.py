"""Rows whose bytes are known from rank, name and generation, and the system calls that write them."""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlib import filesystem
from shardlib.tiers import disk
from shardlib.tiers.disk import DiskRows

PAGE = disk._PAGE
SIZES = {
    "empty": 0,
    "byte": 1,
    "below": PAGE - 1,
    "page": PAGE,
    "above": PAGE + 1,
    "long": 9 * PAGE + 7,
}
"""Rows, the last of which is longer than the buffers of RING bytes."""
RING = 8 * PAGE

CALLS = {
    "open": os, "close": os, "pwrite": os, "preadv": os, "fdatasync": os, "fsync": os, "rename": os,
    "unlink": os, "ftruncate": os, "fstat": os, "listdir": os, "mkdir": os, "allocate": filesystem,
    "lock_within": filesystem, "try_lock": filesystem,
}  # fmt: skip
"""Every call that leaves the process, and where it is looked up."""


def content(rank: int, name: str, generation: int, nbytes: int | None = None) -> Tensor:
    """Return the bytes of a row in a generation."""
    n = SIZES[name] if nbytes is None else nbytes
    draw = random.Random(f"{rank} {name} {generation}")
    return torch.tensor(list(draw.randbytes(n)), dtype=torch.uint8)


def opened(
    path: Path | str, rank: int = 0, ranks: int = 1, resume: bool = True, **kw: Any
) -> DiskRows:
    kw = {"ring": RING, "timeout": 10.0, "run": {"mesh": "x=2"}} | kw
    return DiskRows(path, kw.pop("rows", SIZES), rank=rank, ranks=ranks, resume=resume, **kw)


def step(rows: DiskRows, generation: int, names: Iterable[str] = SIZES) -> None:
    """Write some rows of a generation, and commit it."""
    for name in names:
        rows.write(name, content(rows.rank, name, generation))
    rows.commit(generation, {"step": generation})


def read(rows: DiskRows, name: str) -> Tensor:
    out = torch.empty(SIZES[name], dtype=torch.uint8)
    rows.read(name, out).wait()
    return out


def holds(rows: DiskRows, generation: int, names: Iterable[str] = SIZES) -> bool:
    """Say whether every row is that of a generation."""
    tickets = [(n, torch.empty(SIZES[n], dtype=torch.uint8)) for n in names]
    for ticket in [rows.read(n, out) for n, out in tickets]:
        ticket.wait()
    return all(torch.equal(out, content(rows.rank, n, generation)) for n, out in tickets)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("shardlib disk")]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def intercepted(
    act: Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Have ``act(name, call, args, kwargs)`` make every system call of the rows."""
    with pytest.MonkeyPatch.context() as patch:
        for name, owner in CALLS.items():
            inner = getattr(owner, name)

            def run(*args: Any, name: str = name, inner: Any = inner, **kw: Any) -> Any:
                return act(name, inner, args, kw)

            patch.setattr(owner, name, run)
        yield


def failing(nth: int, code: int) -> Callable[..., Any]:
    """Fail the nth system call of a thread of ours or of the caller; count in ``calls``."""
    calls: list[str] = []

    def act(name: str, call: Callable[..., Any], args: Any, kw: Any) -> Any:
        calls.append(name)
        if len(calls) - 1 == nth:
            if name == "close":  # it is closed all the same
                call(*args, **kw)
            raise OSError(code, os.strerror(code))
        return call(*args, **kw)

    act.calls = calls  # type: ignore[attr-defined]
    return act


class Journal:
    """System calls that change a disk, in their order, and what a power cut after some of them leaves.

    A write is on the disk once its file was flushed, a name once its directory was; until then any
    pages of it may be there.
    """

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.before: Callable[[str], None] = lambda name: None

    def __call__(self, name: str, call: Callable[..., Any], args: Any, kw: Any) -> Any:
        self.before(name)
        if name == "rename":
            file = os.stat(args[0], dir_fd=kw["src_dir_fd"]).st_ino
            self.events.append(("name", file, args[1]))
        out = call(*args, **kw)
        if name == "pwrite":
            self.events.append(("write", os.fstat(args[0]).st_ino, args[2], bytes(args[1])))
        elif name in ("ftruncate", "allocate"):
            self.events.append(("write", os.fstat(args[0]).st_ino, args[1], b""))
        elif name in ("fsync", "fdatasync"):
            self.events.append(("flush", os.fstat(args[0]).st_ino))
        return out

    def cut(self, count: int, folder: int, into: Path, often: float, draw: random.Random) -> None:
        """Make the directory that a cut after ``count`` events leaves; ``often``: of what is not flushed."""
        files: dict[int, bytearray] = {}
        names: dict[str, int] = {}
        pending: list[tuple[Any, ...]] = []

        def last(event: tuple[Any, ...]) -> None:
            if event[0] == "name":
                names[event[2]] = event[1]
            else:
                _, file, at, data = event
                held = files.setdefault(file, bytearray())
                held.extend(bytes(max(0, at + len(data) - len(held))))
                held[at : at + len(data)] = data

        for event in self.events[:count]:
            if event[0] != "flush":
                pending.append(event)
                continue
            mine = [e for e in pending if (folder if e[0] == "name" else e[1]) == event[1]]
            pending = [e for e in pending if e not in mine]
            for e in mine:
                last(e)
        for event in pending:
            pages = range(0, len(event[3]), PAGE) if event[0] == "write" else range(1)
            for at in pages:
                if draw.random() < often:
                    last(
                        event
                        if event[0] == "name"
                        else (*event[:2], event[2] + at, event[3][at : at + PAGE])
                    )
        for name, file in names.items():
            (into / name).write_bytes(files.get(file, b""))
