"""Host waits for the device, and uploads to it, each with the lines of code that caused it.

An operator whose result the host needs (a number, sizes that depend on values), and a copy
between host and device, are recorded as torch dispatches them, so this is the same on every kind of
device.  On the host itself nothing is uploaded, and the recorded operators would wait on a device.
Calls that torch does not dispatch (``torch.accelerator.synchronize()``, events) are not recorded.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import DispatchMode
from shardlib.errors import package_line, user_line
from shardlib.mesh import scope
from shardlib.opspec import Args, Func, Kwargs, names_of

__all__ = ["Wait", "Waiting", "listed"]

_WAITS = frozenset(names_of(waits=True))
_INDEXED = frozenset("index index_put index_put_ _unsafe_index _unsafe_index_put".split())
# on an accelerator these read what is on the host already, or let the device check
_FREE = "optim/transform.py", "ops/id_bounds.py", "ops/random.py"
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Wait:
    """A wait for the device, or an upload to it.

    ``kind``     "wait" or "upload"; an upload that the host waits for is both, in this order.
    ``what``     torch's operator.
    ``line``     the user's line, "" where the engine of backward runs it on a thread of its own.
    ``library``  the line of shardlib that called it, "" where the user's own did.
    """

    kind: str
    what: str
    line: str
    library: str

    def __str__(self) -> str:
        places = [
            f"at {self.line or 'backward'}",
            *([f"by {self.library}"] if self.library else []),
        ]
        return f"{self.kind} for {self.what} {', '.join(places)}"


class Waiting(DispatchMode):  # type: ignore[misc, valid-type]
    """Record waits and uploads in ``found``, while open."""

    def __init__(self, found: list[Wait]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for kind in _asked(func._schema.name.partition("::")[2], args, kwargs or {}, out):
            frame = sys._getframe(1)
            by = package_line(frame)
            if not (by.startswith(_FREE) and args[0].device.type == "cpu"):
                self.found.append(Wait(kind, str(func), user_line(frame), by))
        return out


def _asked(name: str, args: Args, kwargs: Kwargs, out: Any) -> list[str]:
    """List the effects of an operator: "wait", "upload", both or none."""
    first = next((x for x in args if isinstance(x, Tensor)), None)
    if first is None or first.is_meta:
        return []
    if name == "_to_copy":
        return _crossed(first, out, kwargs.get("non_blocking", False))
    if name == "copy_":
        return _crossed(args[1], first, args[2] if len(args) > 2 else False)
    if first.device.type == "cpu" and _elsewhere():
        return []
    if name in _WAITS:
        sized = name == "repeat_interleave" and kwargs.get("output_size") is not None
        return [] if sized else ["wait"]
    if name in _INDEXED:
        return _indexed(first, *args[1:3])
    if name == "lift_fresh":  # torch.tensor(numbers, device=...)
        return ["upload", "wait"] * (first.device.type != "cpu" and first.numel() > 0)
    return []


def _indexed(x: Tensor, places: Iterable[object], values: Tensor | None = None) -> list[str]:
    """List the effects of indexing: indices are uploaded, and a mask's number of places is read."""
    given = [i for i in places if isinstance(i, Tensor)]
    if any(i.device != x.device for i in given):
        return ["upload", "wait"]
    masked = any(i.dtype in _MASKS for i in given)
    filled = values is not None and values.numel() == 1  # torch fills by the mask itself
    return ["wait"] * (masked and not filled)


def _elsewhere() -> bool:
    """Check whether the mesh in scope is on a device, so that reading the host's memory is free."""
    mesh = scope().mesh
    return mesh is not None and mesh.device.type not in ("cpu", "meta")


def _crossed(source: Tensor, to: Tensor, ahead: bool) -> list[str]:
    """List the effects of a copy, if it was between the host and a device."""
    host = [x for x in (source, to) if x.device.type == "cpu"]
    if len(host) != 1 or not to.numel() or to.is_meta:
        return []
    waits = not (ahead and host[0].is_pinned())
    return ["upload"] * (host[0] is source) + ["wait"] * waits


def listed(found: Iterable[Wait]) -> str:
    """Format one line per different wait, with its count; "" where there is none."""
    return "\n".join(f"  {n:>5} times  {w}" for w, n in Counter(found).most_common())
