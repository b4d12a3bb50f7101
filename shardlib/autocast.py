"""torch.autocast for sharded values: operands are cast to the dtypes that torch casts them to.

Implementations run with autocast off: their blocks have the dtype that torch's operator would
compute in, and computation inside one (a sum in fp32, an accumulator) is not cast again.
opspec.py has the class of each operator, CPU and CUDA apart; other accelerators use CUDA's, as in
torch.  float64 is never cast.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardlib.memory_tracker import tensors_in
from shardlib.mesh import Mesh, accelerator, scope, within
from shardlib.opspec import OPERATORS, Args, Func, Kwargs, homes, names_of

COMPOSITE = {f for name in names_of(parts=True) for f in homes(name)}
"""Functions that torch composes of others, as their implementations
here do: those others are cast one by one.
"""

DECLARED: set[Any] = set()
"""Functions that torch runs on the blocks, where it casts them itself."""


@cache
def _table(device: str) -> dict[Any, str]:
    """Map each function to its class on a device; accelerators have CUDA's."""
    here = "cpu" if device == "cpu" else "accelerator"
    found: dict[Any, str] = {}
    for spec in OPERATORS:
        how, _, there = spec.cast.partition(" on ")
        if how and there in ("", here):
            found |= {f: how for name in spec.entries for f in homes(name)}
    return found


forget = _table.cache_clear
"""Drop what was made of the table of operators, which has grown."""


@contextmanager
def _switched(device: str, on: bool) -> Iterator[None]:
    torch.set_autocast_enabled(device, on)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, not on)


def casting(func: Any) -> AbstractContextManager[Any]:
    """Set autocast as the caller has it while torch, or its Python body, runs on the blocks.

    The steps before and after it (cut, gather, stack, sum) are not cast.
    """
    casts = scope().policy.casts
    return nullcontext() if casts is None or casts[1] is not func else _switched(casts[0], True)


def cast(implementation: Any, func: Func, args: Args, kwargs: Kwargs, known: bool = True) -> Any:
    """Call the implementation with operands cast as torch's autocast casts them on their device.

    ``known``  the function has an implementation here; else torch runs it, or its Python body.
    """
    device = _device((args, kwargs))
    if not torch.is_autocast_enabled(device):
        return implementation(func, args, kwargs)
    how = _table(device).get(func)
    if how is None and func in COMPOSITE:
        return implementation(func, args, kwargs)
    if how is None and (not known or func in DECLARED):
        with _switched(device, False), within(casts=(device, func)):
            return implementation(func, args, kwargs)
    dtype = None if how is None else _dtype(how, device, args, kwargs)
    with _switched(device, False):
        if dtype is not None:
            args, kwargs = _to(args, dtype), _to(kwargs, dtype)
        return implementation(func, args, kwargs)


def _dtype(how: str, device: str, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Return the dtype to which autocast's class casts the operands; None for their own."""
    if how == "lower":
        return torch.get_autocast_dtype(device)
    if how == "wide":
        return torch.float32 if kwargs.get("dtype") is None else None
    found = {x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()}
    return torch.float32 if torch.float32 in found and len(found) > 1 else None


def _device(tree: Any) -> str:
    first = next(iter(tensors_in(tree)), None)
    mesh = getattr(first, "mesh", None)
    device = "meta" if first is None else first.device.type
    if isinstance(mesh, Mesh):
        device = mesh.device_type
    if device == "meta":
        # recorded ranks: take the device whose autocast is on
        here = accelerator()
        return "cpu" if here is None or torch.is_autocast_enabled("cpu") else here.type
    return device


def _to(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        eligible = tree.is_floating_point() and tree.dtype not in (torch.float64, dtype)
        return tree.to(dtype) if eligible else tree
    if isinstance(tree, dict):
        return {k: _to(v, dtype) for k, v in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_to(v, dtype) for v in tree)
    return tree
