"""Rows whose bytes are known from rank, name and generation, and the system calls that write them."""

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
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
    "unlink": os, "ftruncate": os, "fstat": os, "listdir": os, "mkdir": os, "allocate": disk,
    "lock_within": disk, "try_lock": disk,
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


def step(rows: DiskRows, generation: int, names: Any = SIZES) -> None:
    """Write some rows of a generation, and commit it."""
    for name in names:
        rows.write(name, content(rows.rank, name, generation))
    rows.commit(generation, {"step": generation})


def read(rows: DiskRows, name: str) -> Tensor:
    out = torch.empty(SIZES[name], dtype=torch.uint8)
    rows.read(name, out).wait()
    return out


def holds(rows: DiskRows, generation: int) -> bool:
    """Say whether every row is that of a generation."""
    tickets = [(n, torch.empty(b, dtype=torch.uint8)) for n, b in SIZES.items()]
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


__all__ = ["errno", "filesystem"]
