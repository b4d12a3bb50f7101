"""Bytes as text; free memory of a device: an operation that needs more is refused before it begins."""

import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from shardlib.errors import BadArgument, ShardError
from shardlib.mesh import Mesh, scope

LARGE = 1 << 28
"""Bytes: a smaller allocation does not justify reading the system's counters."""

_UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6,
    "KiB": 2**10, "KB": 10**3,
}  # fmt: skip


def bytes_in(given: float | str, op: str = "explain", fix: str = "memory='80GiB'") -> float:
    """Return a number of bytes: a number, or a text with a unit, which is GiB where there is none.

    Raises: BadArgument.

    >>> bytes_in(100), bytes_in("8GB"), bytes_in("1MiB") == bytes_in(2**20), bytes_in("2 KiB")
    (100, 8000000000.0, True, 2048.0)
    """
    if not isinstance(given, str):
        return given
    unit = next((u for u in _UNITS if given.endswith(u)), "")
    with suppress(ValueError):
        if 0 < (found := float(given.removesuffix(unit)) * _UNITS.get(unit, 2**30)) < math.inf:
            return found
    raise BadArgument(f"{given!r} is no number of bytes", op=op, fix=fix)


def available(device: torch.device) -> int | None:
    """Count the free bytes of a device; None where the system does not report them.

    For host memory: the smaller of what the system and the process's control group leave.
    """
    if device.type == "meta":
        return None
    if device.type != "cpu":
        found = _asked(device, "get_memory_info", "mem_get_info")
        if found is None:
            return None
        kept = [_asked(device, n, n) for n in ("memory_reserved", "memory_allocated")]
        # what the allocator keeps for reuse is taken, in the device's own count
        return int(found[0]) + (max(kept[0] - kept[1], 0) if None not in kept else 0)
    return _host_memory()


def _host_memory() -> int | None:
    found = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for limit, used, details in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, now = (_text(f"/sys/fs/cgroup/{name}").strip() for name in (limit, used))
        # the kernel frees inactive file pages on demand, but counts them as used
        text = _text(f"/sys/fs/cgroup/{details}")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", text, re.M)
        if most.isdigit() and now.isdigit():
            found.append(max(int(most) - int(now) + (int(cached[1]) if cached else 0), 0))
    return min(found, default=None)


def most_taken(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on a device; None where they are not counted (CPU).

    >>> most_taken(torch.device("cpu")) is None
    True
    """
    if device.type in ("cpu", "meta"):
        return None
    return _asked(device, "max_memory_allocated", "max_memory_allocated")


def _asked(device: torch.device, general: str, own: str) -> Any:
    """Query the device's allocator, through torch.accelerator or else the device's own module."""
    for module, name in ((torch.accelerator, general), (torch.get_device_module(device), own)):
        asked = getattr(module, name, None)
        if asked is not None:
            with suppress(RuntimeError, NotImplementedError):
                # an allocator that does not count
                return asked(device)
    return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def refuse_beyond(nbytes: int, device: torch.device, op: str, mesh: Mesh | None = None) -> None:
    """Raise where this many bytes, about to be allocated in this process, do not fit in a device.

    Other processes on the same host are counted by what they have taken, not by what they will.
    """
    left = available(device) if nbytes > LARGE else None
    if left is not None and nbytes > left:
        mesh = mesh or scope().mesh
        axes = "x=8" if mesh is None else ", ".join(f"{n}={s}" for n, s in mesh.axes.items())
        raise ShardError(
            f"{nbytes / 2**30:.1f} GiB are needed in this process, and {left / 2**30:.1f} GiB are "
            f"left on {device}",
            op=op,
            mesh=mesh,
            fix=f"with sl.record({axes}): ...  # shapes alone, which take no memory",
        )
