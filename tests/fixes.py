"""Whether the fix line of an error is Python, uses only what exists, and does what it says when it is run.

``seen`` is told of every error that ``pytest.raises`` catches, and ``run`` runs the fixes of those: with the operands
that the error printed, which the frames of its traceback hold, on the mesh where it was raised.  The value of a line
that is an operator again must be the dense value of that line.
"""

import ast
import builtins
import inspect
import math
import re
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.utils.data import DataLoader

import shardlib as sl
from shardlib.mesh import Mesh

MODULES: dict[str, Any] = {"sl": sl, "torch": torch, "F": F, "math": math}

IMPORTED: dict[str, Any] = {"init_device_mesh": init_device_mesh, "Replicate": Replicate, "DataLoader": DataLoader}
"""What a fix may also name: torch's own, by the names under which it is imported."""

CALLER: dict[str, str] = {
    "params": "the tree of parameters",
    "grads": "their gradients",
    "state": "the optimizer's state",
    "tx": "the transform",
    "loss": "the loss, as a function or its value",
    "masked": "the transform that looks at single parameters",
    "rest": "the transforms beside it",
    "optimizer": "the one of torch whose step this is",
    "closure": "what it is given, or None",
    "module": "the module",
    "model": "the module",
    "rules": "its rules",
    "names": "the names that a file holds",
    "path": "where a checkpoint lies",
    "a": "an operand of the operation that is asked about",
    "b": "another",
    "q": "the queries",
    "k": "the keys",
    "v": "the values",
    "bias": "the bias that a mask was asked for",
    "ids": "the token ids of a batch",
    "layout": "the layout that was asked for",
    "fn": "the function to run on every rank",
    "f": "the function that failed",
    "grad": "what a hook or a backward returns",
    "result": "what a function inside shard_map returns",
    "value": "what the user has in mind for a buffer",
    "condition": "the condition of a branch",
    "data": "the data set",
    "batch_size": "the size of its batches",
    "recipe": "the recipe that was called",
    "pending": "a transfer under way",
    "apply": "what parallelize returned",
    "step": "how many steps were made",
    "device": "the device of a mesh",
    "shape": "its sizes",
    "inputs": "what the function is applied to",
}
"""What a fix may call by the name under which the documentation introduces it, though the error printed no such
operand.  Where the frames hold one it is bound and the fix is run; else its names and functions are checked."""

ADVICE: dict[str, str] = {
    "torch.func.": "the function that it transforms is the caller's",
    "sl.random.seed(": "it would end the following of torch's seed for the tests to come; tests/test_random.py runs it",
    "sl.random.set_state(": "it would change the key for the tests to come; tests/test_random.py runs it",
    "sl.launch(fn": "the function is the caller's; tests/mesh/test_launch.py launches",
    "sl.grad(f)": "and so is this one",
    "sl.make_mesh(": "it needs as many processes as it names; tests/mesh/test_mesh.py runs it in such worlds",
    "sl.explain(apply, ": "the function, its parameters and inputs are the caller's",
    "tx.update({k: grads.get(k)": "what differs may be the state's tree, which the caller made",
    "from my_module import": "the module is a file that the user is to write",
    "sl.to_dtensor(x, normalize=True)": "a layout was asked for its placements, with no tensor at hand",
}
"""Beginnings of fixes that cannot be run, and why."""

COMMANDS = ("torchrun ", "pip install ")
"""How the fixes begin that are commands of a shell."""


def names(fix: str) -> set[str]:
    """The names a fix line reads that are neither modules, builtins nor bound in it.  Raises: SyntaxError."""
    tree = ast.parse(fix)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in found if isinstance(n.ctx, ast.Store)} - {
        n.id for n in found if isinstance(n.ctx, ast.Load) and _before(tree, n.id)
    }
    bound |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in (*n.args, *n.kwonlyargs)}
    return {n.id for n in found if isinstance(n.ctx, ast.Load)} - bound - MODULES.keys() - set(dir(builtins))


def _before(tree: ast.Module, name: str) -> bool:
    """Whether an assignment reads the name that it binds, as ``x = x.clone()`` does."""
    return any(
        isinstance(line, ast.Assign)
        and any(isinstance(n, ast.Name) and n.id == name for n in line.targets)
        and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(line.value))
        for line in tree.body
    )


def fault(fix: str) -> str:
    """What is wrong with a fix line on its own: not Python, or a function that does not exist."""
    if not fix or fix.startswith(COMMANDS):
        return ""
    try:
        names(fix)
    except SyntaxError as e:
        return f"not Python: {e.msg}"
    for node in ast.walk(ast.parse(fix)):
        if isinstance(node, ast.Attribute):
            chain, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                chain, inner = [inner.attr, *chain], inner.value
            if isinstance(inner, ast.Name) and inner.id in MODULES:
                where = MODULES[inner.id]
                for part in chain:
                    if not hasattr(where, part):
                        return f"{inner.id}.{'.'.join(chain)} does not exist"
                    where = getattr(where, part)
    return ""


# ---------------------------------------------------------------- every fix that the suite prints


@dataclass
class _Seen:
    text: str
    fix: str
    op: str
    scope: dict[str, Any]
    missing: list[str]
    mesh: Mesh | None
    alike: bool  # two operands are printed alike, so which is which cannot be told


_FOUND: list[_Seen] = []
_KEYS: set[tuple[str, str]] = set()


def seen(e: sl.ShardError) -> None:
    """Remember an error that a test caught, with what its fix names; one for each operation and form of fix."""
    key = (e.op, re.sub(r"\d+", "0", e.fix))
    if not e.fix or key in _KEYS or e.fix.startswith(COMMANDS):
        return
    _KEYS.add(key)
    scope: dict[str, Any] = {}
    missing: list[str] = []
    frames = [_locals(f) for f in _frames(e)]
    if not fault(e.fix):
        for name in sorted(names(e.fix)):
            if name in IMPORTED:
                scope[name] = IMPORTED[name]
            elif (got := _value(name, e, frames)) is not None:
                scope[name] = optree.tree_map(_apart, got[0], none_is_leaf=True)
            else:
                missing.append(name)
    alike = len(set(e.operands.values())) < len(e.operands)
    _FOUND.append(_Seen(str(e), e.fix, e.op, scope, missing, _mesh(e, scope, frames), alike))


def _frames(e: BaseException) -> list[types.FrameType]:
    """Innermost first, as far out as the line of the user's code."""
    found, tb = [], e.__traceback__
    while tb is not None:
        found.append(tb.tb_frame)
        tb = tb.tb_next
    return found[::-1]


def _locals(frame: types.FrameType) -> dict[str, Any]:
    """The names of a frame; a function's frame keeps the dict that it gives, and would keep what is in it alive."""
    given = frame.f_locals
    found = dict(given)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(given) is dict:
        given.clear()
    return found


def _value(name: str, e: sl.ShardError, frames: list[dict[str, Any]]) -> tuple[Any] | None:
    """What the error means by a name of its fix: the operand of the printed type, or what the frames call so."""
    text = e.operands.get(name)
    if text is None and name == "x":
        text = next((e.operands[k] for k in ("tensor", "input", "operand 0", "value") if k in e.operands), None)
    for label, layout in e.operands.items():
        if label.startswith(f"{name} ["):  # as ``x [4, 4]  rows .``
            for v in (v for f in frames for v in _tensors(f)):
                if label == f"{name} {list(v.shape)}" and isinstance(v, sl.ShardedTensor) and str(v.sharding) == layout:
                    return (v,)
    tensors = [v for f in frames if name in f for v in [f[name]]] + [v for f in frames for v in _tensors(f)]
    if text is not None and "[" in text:
        for v in tensors:
            if isinstance(v, Tensor) and sl.typeof(v) == text:
                return (v,)
    if text is not None and re.fullmatch(r"\[[\d, ]*\]", text):  # a layout was asked about a shape
        return (torch.zeros(ast.literal_eval(text)),)
    for f in frames:
        if name in f and f[name] is not None:
            return (f[name],)
    return None


def _tensors(x: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif depth and isinstance(x, dict | list | tuple):
        for v in x.values() if isinstance(x, dict) else x:
            yield from _tensors(v, depth - 1)


def _apart(x: Any) -> Any:
    """A copy, which what the test does next leaves alone."""
    if not isinstance(x, Tensor) or isinstance(x, torch.nn.Parameter) or not (x.is_leaf or x.requires_grad):
        return x
    try:
        with torch.no_grad():
            return x.detach().clone().requires_grad_(x.requires_grad)
    except RuntimeError:  # caught inside a transform of torch.func
        return x


def _mesh(e: sl.ShardError, scope: dict[str, Any], frames: list[dict[str, Any]]) -> Mesh | None:
    if isinstance(e.mesh, Mesh):
        return e.mesh
    for v in _tensors(scope):
        if isinstance(v, sl.ShardedTensor):
            return v.mesh
    for f in frames:
        for v in f.values():
            if isinstance(v, Mesh):
                return v
    if isinstance(e.mesh, Mapping):
        return sl.simulate(**{str(n): int(s) for n, s in e.mesh.items()})
    try:
        return sl.current_mesh()
    except sl.ShardError:
        return None


def run() -> list[str]:
    """Run the fixes of what was seen since the last call; what is wrong with them."""
    wrong = []
    while _FOUND:
        s = _FOUND.pop()
        if why := fault(s.fix) or _run(s):
            wrong.append(f"{s.text}\n    -> {why}")
    return wrong


def _of_the_place(e: Exception) -> bool:
    """Whether a line fails for where it is run: outside the module whose plain tensors count, or on a leaf."""
    return isinstance(e, sl.errors.PlainTensor) or "a leaf Variable that requires grad" in str(e)


def _constants(fix: str) -> list[ast.Constant]:
    """An Ellipsis among them stands for what the user wrote there."""
    return [n for n in ast.walk(ast.parse(fix)) if isinstance(n, ast.Constant)]


def _run(s: _Seen) -> str:
    if s.fix.startswith(tuple(ADVICE)) or any(n.value is ... for n in _constants(s.fix)):
        return ""
    if unknown := [n for n in s.missing if n not in CALLER and n not in s.op.split(".")]:
        return f"the fix names what the error does not: {', '.join(unknown)}"
    if s.missing:
        return ""
    want = _dense(s) if s.op in s.fix else None  # first, for the line may write to its operands
    try:
        got = _answer(s.fix, MODULES | s.scope, s.mesh)
    except Exception as again:
        if s.alike or _of_the_place(again):
            return ""
        return f"{type(again).__name__}: {str(again)[:300]}"
    if not isinstance(want, Tensor) or not isinstance(got, sl.ShardedTensor):
        return ""
    have = sl.unshard(got).detach()
    close = have.dtype == want.dtype and have.shape == want.shape
    return "" if close and torch.allclose(have, want, equal_nan=True) else "the value is not the dense one"


def _answer(fix: str, scope: dict[str, Any], mesh: Mesh | None) -> Any:
    """The value of the line, or what it returns or binds last."""
    tree = ast.parse(fix)
    last: Any = tree.body[-1]
    while isinstance(last, ast.With):
        last = last.body[-1]
    inner: Any = tree
    while inner.body[-1] is not last:
        inner = inner.body[-1]
    if isinstance(last, ast.Expr | ast.Assign | ast.Return) and last.value is not None:
        name = ast.Name("_answer", ast.Store())
        inner.body[-1:] = [ast.Assign([name], last.value)]
        if isinstance(last, ast.Assign):
            inner.body.append(ast.Assign(last.targets, ast.Name("_answer", ast.Load())))
        ast.fix_missing_locations(tree)
    state = torch.random.get_rng_state()
    with ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(sl.use_mesh(mesh))
        exec(compile(tree, "<fix>", "exec"), scope)
    torch.random.set_rng_state(state)
    return scope.get("_answer")


def _dense(s: _Seen) -> Any:
    """What the line gives on whole tensors; None where it draws, or is about placing and not about values."""
    if "sl.shard" in s.fix or re.search(r"rand|dropout|bernoulli|multinomial", s.fix):
        return None

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    def whole(x: Any) -> Any:
        return sl.unshard(x).detach().clone() if isinstance(x, sl.ShardedTensor) else x

    plain = types.SimpleNamespace(reshard=same, unshard=same, implicit=lambda *_: nullcontext())
    scope = MODULES | {k: optree.tree_map(whole, v, none_is_leaf=True) for k, v in s.scope.items()} | {"sl": plain}
    try:
        return _answer(s.fix, scope, None)
    except (AttributeError, RuntimeError, ValueError):  # the line is about what whole tensors do not have
        return None
