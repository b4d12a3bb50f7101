"""Varying axes: the mesh axes along which a simulated block varies, in a body of ``shard_map``.

A block of an operand varies over the axes that split it and over those whose sum is pending.  The
result of a torch function varies over all axes over which its operands vary; ``psum``, ``pmax``,
``all_gather`` and ``pbroadcast`` remove axes, ``axis_index``, ``pslice``, ``preduce``,
``psum_scatter`` and ``all_to_all`` add them.  So a body that returns a varying block as replicated,
or sums a replicated one, is refused by the name of the axis, whatever the values are.

Blocks created outside the body are untracked (None) and never refused.

Source: the varying manual axes of JAX's shard_map (check_vma).
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.errors import WrongAxes
from shardlib.mesh import Mesh
from shardlib.opspec import Args, Func, Kwargs, names_of, writes

__all__ = ["Varies", "after_move", "differing", "follow", "public_name", "real"]


class Varies:
    """Axes over which a block varies, shared by all views of its memory; None: untracked."""

    __slots__ = ("axes",)

    def __init__(self, axes: frozenset[str] | None) -> None:
        self.axes = axes

    def join(self, axes: frozenset[str] | None) -> None:
        """Record that a value which varies over these axes was written into the block."""
        self.axes = None if axes is None or self.axes is None else self.axes | axes


def real(mesh: Mesh, axes: Collection[str]) -> frozenset[str]:
    """Return the axes that have more than one rank."""
    return frozenset(a for a in axes if mesh.axes[a] > 1)


# ---------------------------------------------------------------- torch functions

_OTHERS_READ = frozenset(names_of(ignores="first"))
_FIRST_READ = frozenset(names_of(ignores="others"))


def follow(kind: type, func: Func, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Record the axes over which the result of a torch function, or its target, varies.

    ``kind``  the class of simulated blocks, which have ``ranks`` and ``varies``.
    """
    operands: Any = (args, kwargs)
    given = [x for x in optree.tree_leaves(operands) if type(x) is kind]
    name = func.__name__
    read = given
    if name in _FIRST_READ:
        read = given[:1]
    elif name in _OTHERS_READ:
        read = given[1:]
    axes: frozenset[str] | None = frozenset()
    for x in read:
        mine = None if x.varies is None else x.varies.axes
        axes = None if axes is None or mine is None else axes | mine
    if writes(name) and args and type(args[0]) is kind and args[0].varies is not None:
        args[0].varies.join(axes)
    held = {_memory(x.ranks): x for x in given}
    for x in optree.tree_leaves(out):
        if type(x) is not kind or any(x is y for y in given):
            continue
        source = held.get(_memory(x.ranks))
        x.varies = Varies(axes) if source is None else source.varies


def _memory(x: Tensor) -> object:
    """Return an identifier shared by all views of one memory."""
    base = x if x._base is None else x._base
    if x.is_meta:
        return id(base)
    try:
        return x.untyped_storage().data_ptr() or id(base)
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func has no data pointer
        return id(base)


# ---------------------------------------------------------------- collectives


def public_name(name: str) -> str:
    """Return a collective's public name: the common ones are in ``sl`` itself."""
    return f"sl.{name}" if name in _EVERY_DAY else f"sl.collectives.{name}"


_EVERY_DAY = frozenset(
    {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"}
)

_ENDS = frozenset(["psum", "pmax", "all_gather", "pbroadcast"])
_BEGINS = frozenset(["pslice", "place", "preduce", "psum_scatter", "all_to_all", "pvary"])
_SUMS = frozenset(["psum", "psum_scatter", "preduce"])


def after_move(op: str, x: Any, mesh: Mesh, axes: Sequence[str], params: tuple) -> Varies | None:
    """Return the axes over which the result of a collective varies; None if ``x`` is untracked.

    A tensor that a body made without a block, such as torch.ones, counts as varying over the axes
    of the collective, since its sum counts ranks.
    Raises: WrongAxes for a sum over an axis along which every rank holds the same.
    """
    if type(x) is Tensor or not hasattr(x, "varies"):
        now: frozenset[str] | None = frozenset(axes)
    else:
        now = None if x.varies is None else x.varies.axes
    if now is None:
        return None
    over = real(mesh, axes)
    if op in _SUMS and (whole := over - now):
        raise _whole(op, x, mesh, axes, sorted(whole, key=mesh.names.index), now)
    if op in _ENDS:
        return Varies(now - over)
    if op == "ppermute":  # ranks that receive nothing have zeros, so the result varies
        return Varies(
            now if len(params[0]) == math.prod(mesh.axes[a] for a in axes) else now | over
        )
    return Varies(now | over if op in _BEGINS else now)


def _whole(
    op: str,
    x: Tensor,
    mesh: Mesh,
    axes: Sequence[str],
    whole: list[str],
    now: frozenset[str],
) -> WrongAxes:
    copies = math.prod(mesh.axes[a] for a in whole)
    right = [a for a in axes if a in now] or [a for a in mesh.names if a in now]
    name = right[0] if len(right) == 1 else tuple(right)
    varies = f"varies over {', '.join(sorted(now))} only" if now else "is the same on every rank"
    return WrongAxes(
        f"the block {varies}, and a sum over {', '.join(map(repr, whole))} would add the same "
        f"value {copies} times",
        op=op,
        operands={"block": f"{x.dtype} {list(x.shape)}"},
        mesh=mesh,
        fix=f"{public_name(op)}(x, {name!r})" if right else "x",
    )


# ---------------------------------------------------------------- values


def differing(raw: Tensor, mesh: Mesh, axes: Sequence[str]) -> str | None:
    """Find the first axis along which simulated blocks differ by more than their rounding.

    A sum taken in another order on each rank may differ by its rounding.
    """
    if raw.is_meta or not raw.numel():
        return None
    blocks = raw.detach().unflatten(0, mesh.sizes)
    inexact = raw.is_floating_point() or raw.is_complex()
    slack = 64 * torch.finfo(raw.dtype).eps if inexact else 0.0
    for axis in axes:
        at = mesh.names.index(axis)
        first = blocks.narrow(at, 0, 1).expand_as(blocks)
        if not torch.allclose(blocks, first, rtol=slack, atol=slack, equal_nan=True):
            return axis
    return None
