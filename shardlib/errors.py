"""Every error shardlib raises, and how it prints.

An error is built from fields and the text is made here alone: what failed, with which
operands, on which mesh, at which line of the user's code, and one line that fixes it.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "AxisReused",
    "BadArgument",
    "ImplicitCommunication",
    "LayoutSyntax",
    "MeshError",
    "NoMesh",
    "NoImplementation",
    "NotExpressible",
    "OutOfRange",
    "PartialEscape",
    "PlainTensor",
    "RankMismatch",
    "RuleLint",
    "ShardError",
    "UnevenSplit",
    "UnexpectedComm",
    "UnknownAxis",
    "UnknownParameter",
    "Unsupported",
    "WrongAxes",
    "lettered",
    "mesh_text",
    "user_line",
]

_HERE = str(Path(__file__).parent)
T = TypeVar("T")


class ShardError(ValueError):
    """Base of every error here.

    Fields: ``op`` the public verb that failed, ``operands`` label -> text of each operand's
    type, ``mesh`` the mesh (or its text), ``fix`` one line of code that would succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        operands: Mapping[str, object] | None = None,
        mesh: object = None,
        fix: str = "",
    ) -> None:
        self.message, self.op, self.fix = message, op, fix
        self.operands = {k: str(v) for k, v in (operands or {}).items()}
        self.mesh = mesh
        self.line = user_line()
        super().__init__(self.text())

    def text(self) -> str:
        """What failed, with which operands, on which mesh, where, and the fix."""
        head = f"{self.op}: {self.message}" if self.op else self.message
        rows = dict(self.operands)
        if self.mesh is not None:
            rows["mesh"] = mesh_text(self.mesh)
        if self.line:
            rows["at"] = self.line
        if self.fix:
            rows["fix"] = self.fix
        width = max((len(k) for k in rows), default=0)
        return "\n".join([head, *(f"  {k:<{width}}  {v}" for k, v in rows.items())])


class UnknownAxis(ShardError):
    """A layout or collective names an axis that the mesh does not have."""


class AxisReused(ShardError):
    """One mesh axis appears twice in a layout."""


class RankMismatch(ShardError):
    """A layout has another number of dimensions than the tensor."""


class UnevenSplit(ShardError):
    """A dimension does not divide over the axes that split it."""


class MeshError(ShardError):
    """The mesh does not fit the world, or two operands live on different meshes."""


class NoMesh(ShardError):
    """A mesh is needed and none is in scope."""


class LayoutSyntax(ShardError):
    """The text of a layout cannot be read."""


class NoImplementation(ShardError):
    """No registered algorithm fits the operation's layouts."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields | _stepping())


class ImplicitCommunication(NoImplementation):
    """The operation could only run by moving data that nobody asked to move."""


class PartialEscape(ShardError):
    """A pending sum was used where its value is needed."""


class PlainTensor(ShardError):
    """A plain tensor met a sharded one, and nothing says where its data sits."""


class NotExpressible(ShardError):
    """A layout that DTensor's placements cannot say."""


class RuleLint(ShardError):
    """A parallelize rule matched nothing, or a parameter matched no rule."""


class UnknownParameter(ShardError):
    """A parameter name that the module does not have."""


class Unsupported(ShardError):
    """The request is understood and is not supported; the message says what would be."""


class WrongAxes(ShardError):
    """A block varies along other mesh axes than its sum, or the layout of a result, says."""


class BadArgument(ShardError):
    """torch refuses this call on whole tensors too: a shape, a dtype or
    a value that the function does not take.
    """

    final = True  # whole operands would not mend it


class OutOfRange(BadArgument, IndexError):
    """An index, a target or a dimension that the tensor does not have."""


class UnexpectedComm(ShardError, AssertionError):
    """Another communication ran than a test expected."""


def _stepping() -> dict[str, Any]:
    """The fix of what an optimizer of torch asks for: its code is not the user's to change."""
    frame = sys._getframe(2)
    while frame is not None and "/torch/optim/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return {"fix": "with sl.implicit(): optimizer.step(closure)"} if frame is not None else {}


def lettered(values: Iterable[T]) -> dict[str, T]:
    """Operands under the names by which an error and its fix call them:
    x, y, z, u, v, w, a, ..., h, x1, x2, ...

    >>> lettered(["f32[4]", "i64[2]"])
    {'x': 'f32[4]', 'y': 'i64[2]'}
    """
    given = list(values)
    names = [*"xyzuvwabcdegh", *(f"x{i}" for i in range(1, len(given)))]
    return dict(zip(names, given, strict=False))


def mesh_text(mesh: object) -> str:
    """``x=2 y=4`` for a mapping, a DeviceMesh or a Mesh."""
    if isinstance(mesh, Mapping):
        return " ".join(f"{name}={size}" for name, size in mesh.items())
    names = getattr(mesh, "mesh_dim_names", None)
    if names:
        return " ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))  # type: ignore[attr-defined]
    return str(mesh)


def user_line() -> str:
    """``file:line`` of the innermost frame outside shardlib and torch."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = name.startswith((_HERE, "<")) or any(
            part in name for part in ("/torch/", "/optree/", "contextlib")
        )
        if not inside:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
