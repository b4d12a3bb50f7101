"""Bytes that a device has left: what needs more is refused before it begins."""

import re
from pathlib import Path

import torch

from shardlib.errors import ShardError
from shardlib.mesh import Mesh

__all__ = ["LARGE", "available", "refuse_beyond"]

LARGE = 1 << 28
"""Bytes: what needs less is not worth a look at the system."""


def available(device: torch.device) -> int | None:
    """Count the bytes that may still be taken of a device; None where nobody says.

    Of host memory: what the system can give, and what the process's control group leaves.
    """
    if device.type != "cpu":
        asked = getattr(torch.get_device_module(device), "mem_get_info", None)
        return None if asked is None else int(asked(device)[0])
    found = []
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for limit, used, details in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, now = (_text(f"/sys/fs/cgroup/{name}").strip() for name in (limit, used))
        # pages of files that nobody reads now count as used, and are given back when asked for
        cached = re.search(
            r"^(?:total_)?inactive_file (\d+)", _text(f"/sys/fs/cgroup/{details}"), re.M
        )
        if most.isdigit() and now.isdigit():
            found.append(max(int(most) - int(now) + (int(cached[1]) if cached else 0), 0))
    return min(found, default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def refuse_beyond(nbytes: int, mesh: Mesh, op: str) -> None:
    """Raise where blocks of so many bytes in this process do not fit in its device."""
    left = available(mesh.device) if nbytes > LARGE else None
    if left is not None and nbytes > left:
        axes = ", ".join(f"{n}={s}" for n, s in mesh.axes.items())
        raise ShardError(
            f"{nbytes / 2**30:.1f} GiB are needed in this process, and {left / 2**30:.1f} GiB are "
            f"left on {mesh.device}",
            op=op,
            mesh=mesh,
            fix=f"with sl.record({axes}): ...  # shapes alone, which take no memory",
        )
