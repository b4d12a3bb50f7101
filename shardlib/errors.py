"""Exceptions of shardlib, and their text.

An error is built from fields, and its text is made here only: what failed, with which
operands, on which mesh, at which line of the user's code, and one line that fixes it.
"""

import difflib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

__all__ = [
    "AxisReused", "BadArgument", "CheckpointError", "ImplicitCommunication", "LayoutSyntax",
    "MeshError", "ModelDiffers", "NoMesh", "NoImplementation", "NoPlanFits", "NotExpressible",
    "OutOfRange", "PartialEscape", "PlainTensor", "RankFailed", "RankMismatch", "RuleLint", "ShardError", "StageFailed",
    "UnevenSplit", "UnexpectedComm", "UnknownAxis", "UnknownParameter", "Unsupported", "WrongAxes",
]  # fmt: skip

_HERE = str(Path(__file__).parent)
T = TypeVar("T")


class ShardError(ValueError):
    """Base of all exceptions of shardlib.

    Fields: ``op`` the public function that failed, ``operands`` label -> text of each operand's
    type, ``mesh`` the mesh (or its text), ``fix`` one line of code that would succeed, ``line``
    of the user's code where the operation began, if that is not where the error is raised.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     w = torch.ones(5)
    ...     try:
    ...         sl.shard(w, "x")
    ...     except sl.ShardError as e:
    ...         print(e.op, "--", e.operands, "--", e.mesh, "--", e.fix)
    shard -- {'tensor': '[5]', 'layout': 'x'} -- {'x': 2} -- sl.shard(x, 'x', pad=True)
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        operands: Mapping[str, object] | None = None,
        mesh: object = None,
        fix: str = "",
        line: str = "",
    ) -> None:
        self.message, self.op, self.fix = clipped(message), op, fix
        self.operands = {k: str(v) for k, v in (operands or {}).items()}
        self.mesh = mesh
        self.line = line or user_line()
        super().__init__(self.text())

    def __str__(self) -> str:
        # a fix may be found by who catches it
        return self.text()

    def text(self) -> str:
        """Write the message, then operands, mesh, line and fix, one to a line."""
        rows = dict(self.operands)
        if self.mesh is not None:
            rows["mesh"] = mesh_text(self.mesh)
        if self.line:
            rows["at"] = self.line
        if self.fix:
            rows["fix"] = self.fix
        last = dict([*rows.items()][-_ROWS // 2 :])
        more = len(rows) - _ROWS
        if more > 0:
            rows = dict([*rows.items()][: _ROWS // 2]) | {"...": f"and {more} more"} | last
        width = min(max((len(k) for k in rows), default=0), 40)
        lines = [f"{self.op}: {self.message}" if self.op else self.message]
        for label, value in rows.items():
            value = clipped(value) if label == "fix" else clipped(value).replace("\n", r"\n")
            lines.append(f"  {clipped(label, 80):<{width}}  {value}")
        return "\n".join(
            clipped(line, most) for line, most in zip(lines, _shares(lines), strict=True)
        )


class UnknownAxis(ShardError):
    """Axis in a layout or collective that the mesh does not have.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "z")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.UnknownAxis: shard: unknown axis 'z'; this mesh has x...
    """


class AxisReused(ShardError):
    """Mesh axis that appears twice in a layout.

    >>> import shardlib as sl
    >>> sl.Layout.parse("x x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.AxisReused: layout: axis 'x' is used twice, in 'x' and in 'x'...
    """


class RankMismatch(ShardError):
    """Layout with another number of dimensions than the tensor.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x .")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.RankMismatch: layout: layout 'x .' has 2 dimensions, the tensor 1...
    """


class UnevenSplit(ShardError):
    """Dimension whose size does not divide over the axes that split it.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(5), "x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.UnevenSplit: shard: dimension 0 of size 5 does not divide over mesh axis 'x' ...
    """


class MeshError(ShardError):
    """Mesh that does not fit the world, or operands on different meshes.

    >>> import shardlib as sl
    >>> sl.simulate(x=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.MeshError: simulate: axis sizes must be positive integers, got {'x': 0}...
    """


class NoMesh(ShardError):
    """Call that needs a mesh where none is in scope.

    >>> import torch, shardlib as sl
    >>> sl.shard(torch.ones(4), "x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.NoMesh: current_mesh: no mesh is in scope...
    """


class LayoutSyntax(ShardError):
    """Layout text that cannot be parsed.

    >>> import shardlib as sl
    >>> sl.Layout.parse("x (y")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.LayoutSyntax: layout: cannot read 'x (y': '(' is no axis name...
    """


class NoImplementation(ShardError):
    """Operation without a registered algorithm for its operands' layouts.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x").data_ptr()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.NoImplementation: data_ptr: no implementation of data_ptr...
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields | _stepping())


class ImplicitCommunication(NoImplementation):
    """Operation that would run only by moving data, which the program did not request.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x").sort()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.ImplicitCommunication: sort: ... 8 bytes per rank would move unasked...
    """


class PartialEscape(ShardError):
    """Pending sum used where its value is needed.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), ". + sum(x)").exp()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.PartialEscape: exp: the sum over x is still pending, and exp needs its value...
    """


class PlainTensor(ShardError):
    """Plain tensor as an operand of a sharded one, with no layout for it.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x") + torch.ones(4)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.PlainTensor: add: a plain tensor met a sharded one, ...
    """


class NotExpressible(ShardError):
    """Layout that DTensor's placements cannot express.

    >>> import shardlib as sl
    >>> sl.Layout.parse("zigzag(x)").placements({"x": 2})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.NotExpressible: to_dtensor: DTensor cannot say zigzag(x): ...
    """


class RuleLint(ShardError):
    """Parallelize rule that matches nothing, or a parameter that no rule matches.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):  # doctest: +ELLIPSIS
    ...     sl.parallelize(torch.nn.Linear(4, 4), [("weight", "x .")])
    Traceback (most recent call last):
    shardlib.errors.RuleLint: parallelize: no rule matches parameter 'bias'...
    """


class UnknownParameter(ShardError):
    """Parameter name that the module does not have.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     apply, params = sl.parallelize(torch.nn.Linear(4, 4), [("*", "...")])
    ...     apply({"w": params["weight"]}, torch.ones(2, 4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.UnknownParameter: apply: no parameter 'w'...
    """


class Unsupported(ShardError):
    """Request that is understood but not supported; the message names what is.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4).to_sparse(), "x")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.Unsupported: shard: only dense, initialised tensors are placed...
    """


class ModelDiffers(ShardError, AssertionError):
    """Sharded model whose results differ from those of the model on one device.

    >>> import torch, shardlib as sl
    >>> loss = lambda y: (y if y.ndim and type(y) is torch.Tensor else 1.5 * y).sum()
    >>> model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    >>> sl.check_model(model, [("*", "...")], {"x": 2}, x, loss=loss)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.ModelDiffers: check_model: loss differs by 5.0e-01 relative ...
    """


class RankFailed(ShardError):
    """Failure of another rank: it died, stopped, raised, left, or called other operations.

    >>> import os, shardlib as sl
    >>> sl.launch(os._exit, 0, x=2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.RankFailed: launch: rank 0 left with exit code 0 before its function returned...
    """


class StageFailed(ShardError):
    """Exception in a stage of a pipeline: the message names the stage, its action and micro-batch.

    >>> import torch, shardlib as sl; from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> loss = lambda p, x, y: nn.functional.cross_entropy(apply(p, x), y)
    >>> with sl.simulate(pipe=2):
    ...     apply, params = sl.parallelize(model, [("*", "...")], stages=sl.Stages("pipe"))
    ...     labels = sl.shard(torch.tensor([0, 1, 2, 9]), "...")
    ...     step = sl.value_and_grad(loss, microbatches=2)
    ...     step(params, torch.ones(4, 4), labels)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.StageFailed: value_and_grad: stage 1 (1), forward of micro-batch 1: ...
    """


class WrongAxes(ShardError):
    """Block that varies along other mesh axes than its sum, or the layout of a result, states.

    >>> import torch, shardlib as sl
    >>> f = sl.shard_map(lambda v: v, in_layouts="x", out_layouts=".")
    >>> with sl.simulate(x=2): f(sl.shard(torch.ones(4), "x"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.WrongAxes: shard_map: result 0 varies along axis 'x', ...
    """


class BadArgument(ShardError):
    """Argument that torch refuses on whole tensors too: a shape, dtype or value.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x").reshape(3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.BadArgument: reshape: shape [3] is invalid for 4 elements...
    """

    # no retry on whole operands: torch refuses those as well
    final = True


class OutOfRange(BadArgument, IndexError):
    """Index, target or dimension that the tensor does not have.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2): sl.shard(torch.ones(4), "x")[4]  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.OutOfRange: getitem: index 4 is out of bounds for dimension 0 with size 4...
    """


class NoPlanFits(BadArgument):
    """Memory into which no plan of a step fits.

    ``least``  bytes of the smallest plan that was found.

    >>> import torch, shardlib as sl
    >>> sl.plan(torch.nn.Linear(8, 8), torch.ones(4, 8), ranks=1, memory=100)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.NoPlanFits: plan: nothing fits into 100 B; the least is ...
    """

    def __init__(self, message: str, least: int, **fields: Any) -> None:
        self.least = least
        super().__init__(message, **fields)


class CheckpointError(ShardError):
    """Checkpoint that was not written, or not read; nothing was changed.  Every rank raises it.

    >>> import shardlib as sl
    >>> try:
    ...     sl.load("nowhere")
    ... except sl.errors.CheckpointError as e:
    ...     print(e.message)
    No such file or directory: nowhere
    """


class UnexpectedComm(ShardError, AssertionError):
    """Communication other than a test expects.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2), sl.expect_comm(psum=1): pass  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.UnexpectedComm: expect_comm: 0 psum, not 1...
    """


def _stepping() -> dict[str, Any]:
    """Return the fix for an error inside torch's optimizer, whose code the user cannot change."""
    frame = sys._getframe(2)
    while frame is not None and "/torch/optim/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return {"fix": "with sl.implicit(): optimizer.step(closure)"} if frame is not None else {}


MOST = 2000
"""Limit on the bytes of an error's text."""

_ROWS = 12
"""Limit on the lines of an error that list operands and the like."""


def clipped(text: str, most: int = MOST) -> str:
    r"""Escape control characters for a terminal, and cut the middle of more than ``most`` bytes.

    >>> clipped("\x1b[2Jname"), clipped("0123456789" * 1000, 70)
    ('\\x1b[2Jname', '01234567890123456789 ... of 10,000 characters ... 01234567890123456789')
    """
    short = len(text) <= 2 * most
    ends = (text,) if short else (text[:most], text[-most:])
    head, *tail = (_escaped(end) for end in ends)
    raw = head.encode() + b"".join(t.encode() for t in tail)
    if short and len(raw) <= most:
        return head
    note = f" ... of {len(text):,} characters ... "
    half = max((most - len(note)) // 2, 8)
    return raw[:half].decode(errors="ignore") + note + raw[-half:].decode(errors="ignore")


def apart(a: str, b: str, most: int = 400) -> tuple[str, str]:
    """Cut two texts that are longer than ``most`` around the first place where they differ.

    >>> apart("x" * 99 + "1", "x" * 99 + "23", 20)
    ('...xxxxxxxxxx1', '...xxxxxxxxxx23')
    """
    if max(len(a), len(b)) <= most:
        return a, b
    same = sum(1 for _ in itertools.takewhile(lambda c: c[0] == c[1], zip(a, b, strict=False)))
    begin = max(0, same - most // 2)
    return window(a, begin, most), window(b, begin, most)


def window(text: str, begin: int, most: int) -> str:
    """Cut a part out of a text, with dots where something is left off."""
    part = text[begin : begin + most]
    if begin > 0:
        part = f"...{part}"
    if len(text) > begin + most:
        part += "..."
    return part


def _escaped(text: str) -> str:
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _shares(lines: list[str]) -> list[int]:
    """Return the bytes that each line may have: long lines share those that short ones leave."""
    sizes = [len(line.encode()) for line in lines]
    left, out = MOST - len(lines), [0] * len(lines)
    for n, i in enumerate(sorted(range(len(lines)), key=lambda i: sizes[i])):
        out[i] = min(max(sizes[i], 1), left // (len(lines) - n))
        left -= out[i]
    return out


def similar(word: str, options: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """List the options closest to a word, of which the first 200 characters are compared.

    >>> similar("rnig", ["ring", "zigzag"])
    ['ring']
    """
    whole = {option[:200]: option for option in options}
    found = difflib.get_close_matches(word[:200], list(whole), most, cutoff)
    return [whole[f] for f in found]


def meant(found: Iterable[str]) -> str:
    """Write the end of a message that asks whether one of these was meant; empty without any.

    >>> meant(similar("rnig", ["ring"])), meant([])
    ("; did you mean 'ring'?", '')
    """
    return "".join(f"; did you mean {one!r}?" for one in found)


def lettered(values: Iterable[T]) -> dict[str, T]:
    """Name operands as an error and its fix line do: x, y, z, u, v, w, a, ..., h, x1, x2, ...

    >>> lettered(["f32[4]", "i64[2]"])
    {'x': 'f32[4]', 'y': 'i64[2]'}
    """
    given = list(values)
    names = [*"xyzuvwabcdegh", *(f"x{i}" for i in range(1, len(given)))]
    return dict(zip(names, given, strict=False))


def axes_text(axes: Iterable[str]) -> str:
    """Write mesh axes as the argument of a call: one as its name, several as a tuple.

    >>> axes_text(["x"]), axes_text(["x", "y"])
    ("'x'", "('x', 'y')")
    """
    given = tuple(axes)
    return repr(given[0] if len(given) == 1 else given)


def mesh_text(mesh: object) -> str:
    """Format a mapping, a DeviceMesh or a Mesh as ``x=2 y=4``."""
    if isinstance(mesh, Mapping):
        return " ".join(f"{name}={size}" for name, size in mesh.items())
    names = getattr(mesh, "mesh_dim_names", None)
    if names:
        return " ".join(f"{n}={s}" for n, s in zip(names, mesh.shape, strict=True))  # type: ignore[attr-defined]
    return str(mesh)


def package_line(frame: FrameType | None) -> tuple[str, str]:
    """Find ``file:line`` and the function of the innermost frame of shardlib.

    The file is named from the package's folder on; both are "" where no frame is shardlib's.
    """
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is None:
        return "", ""
    return (
        f"{frame.f_code.co_filename[len(_HERE) + 1 :]}:{frame.f_lineno}",
        frame.f_code.co_qualname,
    )


@cache
def _is_inside(name: str) -> bool:
    """Return whether a file is of shardlib, torch, or what they call through."""
    return name.startswith((_HERE, "<")) or any(
        part in name
        for part in ("/torch/", "/optree/", "/contextlib.py", "/functools.py", "/threading.py")
    )


def user_line(frame: FrameType | None = None, *, only: bool = False, line: int = 0) -> str:
    """Find ``file:line`` of the innermost frame outside shardlib and torch.

    ``frame``  where to begin, by default the caller's caller; ``only``: no other, at ``line``.
    """
    frame = frame or sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_inside(name):
            # a notebook's cell
            file = "cell" if "ipykernel_" in name else os.path.basename(name)
            return f"{file}:{line or frame.f_lineno}"
        frame = None if only else frame.f_back
    return ""
