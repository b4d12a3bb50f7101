"""Whether the fix line of an error is Python, uses only what
exists, and does what it says when it is run.

``watch`` sees every error that ``pytest.raises`` catches, here and on real
          ranks, and ``run`` runs the fixes of those:
with the operands that the error printed, which the frames of its traceback hold, on the mesh where
it was raised.  The value of a line that is an operator again must be the dense value of that line.
"""

import ast
import builtins
import contextlib
import inspect
import itertools
import math
import re
import sys
import tempfile
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.utils.data import DataLoader

import shardlib as sl
from shardlib.collectives import Pending
from shardlib.errors import mesh_text
from shardlib.mesh import Mesh, scope, within
from shardlib.optim.step import GivenUp
from shardlib.optim.transform import Transform
from shardlib.planning.explanation import Explanation
from shardlib.seeing.timeline import Timeline
from shardlib.tensor import promoting

MODULES: dict[str, Any] = {
    "sl": sl,
    "torch": torch,
    "F": F,
    "math": math,
    "re": re,
    "optree": optree,
}

IMPORTED: dict[str, Any] = {
    "init_device_mesh": init_device_mesh,
    "Replicate": Replicate,
    "DataLoader": DataLoader,
}
"""What a fix may also name: torch's own, by the names under which it is imported."""

ROLES: dict[str, Callable[[Any], bool]] = {
    "tx": lambda v: isinstance(v, Transform),
    "module": lambda v: isinstance(v, torch.nn.Module),
    "model": lambda v: isinstance(v, torch.nn.Module),
    "optimizer": lambda v: isinstance(v, torch.optim.Optimizer),
    "layout": lambda v: isinstance(v, sl.Layout),
    "apply": lambda v: callable(v) and hasattr(v, "buffers") and not isinstance(v, torch.nn.Module),
    "x": lambda v: isinstance(v, sl.ShardedTensor),
    "f": inspect.isfunction,
    "mesh": lambda v: isinstance(v, Mesh),
    "plan": lambda v: isinstance(v, Explanation),
    "line": lambda v: isinstance(v, Timeline),
}
"""Names under which the documentation introduces what the caller has, and how it is known in the
caller's frames, where it may be called otherwise.
"""


def _loss(params: Any) -> Any:
    return sum(x.square().sum() for x in optree.tree_leaves(params) if isinstance(x, Tensor))


def _queries(caller: Mapping[str, Any]) -> Any:
    n = caller["bias"].shape[-1] if "bias" in caller else 8
    return sl.shard(torch.ones(1, 2, n, 4), f". . {sl.current_mesh().names[0]} .")


CALLER: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "params": lambda c: c["grads"] if "grads" in c else {"w": sl.shard(torch.ones(4, 6), "...")},
    "grads": lambda c: c["params"],
    "tx": lambda c: sl.optim.adamw(0.1),
    "state": lambda c: c["tx"].init(c["params"]),
    "loss": lambda c: _loss,
    "f": lambda c: _loss,
    "masked": lambda c: sl.optim.masked(sl.optim.sgd(0.1), True),
    "rest": lambda c: sl.optim.adamw(0.1),
    "module": lambda c: torch.nn.Linear(4, 4),
    "model": lambda c: torch.nn.Linear(4, 4),
    "rules": lambda c: [("*", "...")],
    "a": lambda c: sl.shard(torch.ones(4, 4), "..."),
    "b": lambda c: sl.shard(torch.ones(4, 4), "..."),
    "condition": lambda c: c["a"] > 0,
    "q": _queries,
    "k": _queries,
    "v": _queries,
    "layout": lambda c: sl.Layout.parse(". ."),
    "closure": lambda c: None,
    "step": lambda c: 1,
    "value": lambda c: torch.ones(()),
    "which": lambda c: [("w", "a")],
    "transforms": lambda c: {"a": sl.optim.sgd(0.1)},
    "weights": lambda c: sl.recipes.optimus2d(c["model"]),
    "inputs": lambda c: {},
    "dataset": lambda c: [torch.ones(2)] * 8,
    "pending": lambda c: Pending(lambda: torch.ones(4)),
    "recipe": lambda c: sl.recipes.megatron1d,
    "data": lambda c: [torch.ones(2)] * 8,
    "batch_size": lambda c: 4,
    "ids": lambda c: torch.zeros(2, 8, dtype=torch.int64),
    "result": lambda c: torch.ones(4),
    "line": lambda c: Timeline([], {0: "rank 0"}, 0.0),
    "fn": lambda c: torch.get_num_threads,
    "args": lambda c: (),
    "path": lambda c: str(Path(tempfile.mkdtemp()) / "saved"),
    "tree": lambda c: torch.ones(4),
}
"""What stands for a name that neither the error nor the frames hold: anything of the kind that the
documentation introduces under it, fitting what else the line names.
"""


SPENT = ("pending", "fn", "args")
"""Names of what the frames hold and the failing call has used up: a transfer that was waited for, a
function that was launched and hung.
"""


TRAINED = ("params", "grads", "state")
"""Names of what belongs together: where ``optim.step`` took one, all are made anew."""


class _Caller(dict[str, Any]):
    """Names of a fix, the missing ones made when they are asked for."""

    def __missing__(self, name: str) -> Any:
        self[name] = CALLER[name](self)
        return self[name]


ON_RANKS = ("sl.make_mesh(", "sl.dtensor.to_dtensor(x, normalize=True)")
"""Beginnings of fixes that want real processes; such a line is run in as many as it names."""

COMMANDS = ("torchrun ", "pip install ", "python -m shardlib ")
"""How the fixes begin that are commands of a shell."""


def names(fix: str) -> set[str]:
    """The names a fix line reads that are neither modules, builtins nor bound in it.
    Raises: SyntaxError.
    """
    bound = {
        a.arg
        for n in ast.walk(ast.parse(fix))
        if isinstance(n, ast.arguments)
        for a in (*n.args, *n.kwonlyargs, n.vararg, n.kwarg)
        if a is not None
    }
    read: set[str] = set()
    for line in ast.parse(fix).body:
        found = [n for n in ast.walk(line) if isinstance(n, ast.Name)]
        stored = {n.id for n in found if isinstance(n.ctx, ast.Store)}
        after = {  # an assignment reads first
            n.id
            for t in (line.targets if isinstance(line, ast.Assign) else ())
            for n in ast.walk(t)
            if isinstance(n, ast.Name)
        }
        read |= {n.id for n in found if isinstance(n.ctx, ast.Load)} - bound - (stored - after)
        bound |= stored
    return read - MODULES.keys() - set(dir(builtins))


def fault(fix: str) -> str:
    """What is wrong with a fix line on its own: not Python, not
    the whole of a line, or a function that does not exist.
    """
    if not fix or fix.startswith(COMMANDS):
        return ""
    try:
        names(fix)
    except SyntaxError as e:
        return f"not Python: {e.msg}"
    line = ast.parse(fix).body[0]
    if re.match(r"\w+=[^=]", fix) or (isinstance(line, ast.Expr) and _fixed(line.value)):
        return "a part of a line: running it says nothing"
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


def _fixed(node: ast.AST) -> bool:
    """Whether an expression is a literal, as the value of an argument is."""
    return not any(isinstance(n, ast.Name | ast.Call) for n in ast.walk(node))


# ---------------------------------------------------------------- every fix that the suite prints


@dataclass
class _Seen:
    text: str
    fix: str
    op: str
    scopes: list[dict[str, Any]]  # more than one where operands are printed alike
    missing: list[str]
    mesh: Mesh | None
    lifts: bool  # raised inside a parallelized module, where plain tensors count as whole
    on: Any  # the mesh and the layout that the error printed
    layout: str


TRIES = 24
"""How many ways to tell operands that are printed alike are tried."""

_FOUND: list[_Seen] = []
_KEYS: set[tuple[str, str]] = set()
_RAISES = type(pytest.raises(sl.ShardError))
_LEAVE = _RAISES.__exit__


def watch() -> None:
    """From now on see every error that ``pytest.raises`` catches."""

    def leave(self: Any, what: Any, error: Any, trace: Any) -> Any:
        caught(error)
        return _LEAVE(self, what, error, trace)

    _RAISES.__exit__ = leave


def watched() -> bool:
    return _RAISES.__exit__ is not _LEAVE


@contextmanager
def watching() -> Iterator[None]:
    """Watch within this context."""
    watch()
    try:
        yield
    finally:
        _RAISES.__exit__ = _LEAVE


def caught(e: BaseException | None) -> None:
    """Told of an error that a test caught otherwise than with ``pytest.raises``."""
    if watched() and isinstance(e, sl.ShardError):
        seen(e)


def seen(e: sl.ShardError) -> None:
    """Remember an error that a test caught, with what its fix
    names; one for each operation and form of fix.
    """
    key = (e.op, re.sub(r"\d+", "0", e.fix))
    if not e.fix or key in _KEYS:
        return
    _KEYS.add(key)
    if e.fix.startswith(COMMANDS):
        NOTED.setdefault("left out: a command of a shell", []).append(f"{e.op}: {e.fix}")
        return
    found: dict[str, list[Any]] = {}
    missing: list[str] = []
    stack = _frames(e)
    frames = [_locals(f) for f in stack]
    ours = [
        f
        for f, where in zip(frames, stack, strict=True)
        if "/torch/" not in where.f_code.co_filename
    ]
    lifts = scope().call.promoting or any(
        Path(f.f_code.co_filename).stem in ("parallelize", "as_module") for f in stack
    )
    if not fault(e.fix):
        taken = {n for f in ours for n, v in f.items() if n in TRAINED and _given_up(v)}
        for name in sorted(names(e.fix)):
            if taken and name in TRAINED:
                missing.append(name)
            elif name in IMPORTED:
                found[name] = [IMPORTED[name]]
            elif name not in SPENT and (got := _values(name, e, ours)):
                found[name] = (
                    got
                    if list(e.operands.values()).count(e.operands.get(name, "")) > 1
                    else got[:1]
                )
            elif name in ROLES and (role := _of_role(name, frames)):
                found[name] = role
            else:
                missing.append(name)
    drawn = itertools.islice(itertools.product(*found.values()), TRIES)
    scopes = [dict(zip(found, map(_copy, values), strict=True)) for values in drawn]
    _FOUND.append(
        _Seen(
            str(e),
            e.fix,
            e.op,
            scopes,
            missing,
            _mesh(e, found, frames),
            lifts,
            e.mesh,
            e.operands.get("layout", ""),
        )
    )


def _frames(e: BaseException) -> list[types.FrameType]:
    """Innermost first, as far out as the line of the user's code."""
    found, tb = [], e.__traceback__
    while tb is not None:
        found.append(tb.tb_frame)
        tb = tb.tb_next
    return found[::-1]


def _locals(frame: types.FrameType) -> dict[str, Any]:
    """The names of a frame; a function's frame keeps the dict that it
    gives, and would keep what is in it alive.
    """
    given = frame.f_locals
    found = dict(given)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(given) is dict:
        given.clear()
    return found


def _values(name: str, e: sl.ShardError, frames: list[dict[str, Any]]) -> list[Any]:
    """What the error may mean by a name of its fix: operands of the
    printed type, or what the frames call so.
    """
    if f"*{name}" in e.fix and (
        several := [f[name] for f in frames if isinstance(f.get(name), tuple | list | dict)]
    ):
        return several[:1]
    text = e.operands.get(name)
    if text is None and name == "x":
        text = next(
            (e.operands[k] for k in ("tensor", "input", "operand 0", "value") if k in e.operands),
            None,
        )
    for label, layout in e.operands.items():
        if label.startswith(f"{name} ["):  # as ``x [4, 4]  rows .``
            for v in (v for f in frames for v in _tensors(f)):
                if (
                    label == f"{name} {list(v.shape)}"
                    and isinstance(v, sl.ShardedTensor)
                    and str(v.sharding) == layout
                ):
                    return [v]
    if text is not None and "[" in text:
        tensors = [v for f in frames if name in f for v in [f[name]]] + [
            v for f in frames for v in _tensors(f)
        ]
        typed = {id(v): v for v in tensors if isinstance(v, Tensor) and sl.typeof(v) == text}
        if typed:  # a whole tensor prints as a plain one does
            plain = isinstance(e, sl.errors.PlainTensor)
            return sorted(typed.values(), key=lambda v: plain is isinstance(v, sl.ShardedTensor))
    if text is not None and re.fullmatch(r"\[[\d, ]*\]", text):  # a layout was asked about a shape
        whole = torch.zeros(ast.literal_eval(text))
        mesh = _mesh(e, {}, frames)
        placed = f"unshard({name})" in e.fix and mesh is not None
        return [sl.shard(whole, "...", mesh) if placed else whole]
    if name == "params":
        frames = [
            *frames,
            *({"params": f["given"][0]} for f in frames if isinstance(f.get("given"), list)),
        ]
    if name in e.operands.get("inputs", "").split(", "):  # which the caller gave by position
        return [v for f in frames for v in f.get("args", ()) if isinstance(v, Tensor)][:1]
    if name == "result":  # what the body of a shard_map returns
        return [f["block"] for f in frames if isinstance(f.get("block"), Tensor)][:1]
    if name == "mesh" and isinstance(e.mesh, Mesh):
        return [e.mesh]
    held = [f[name] for f in frames if f.get(name) is not None]
    if name in ("q", "k", "v"):  # engines call their blocks so, too
        held.sort(key=lambda v: not isinstance(v, sl.ShardedTensor))
    return [v for v in held if name != "f" or callable(v)][:1]


def _given_up(x: Any) -> bool:
    """Whether it is, or holds, what ``optim.step`` took."""
    return any(type(leaf) is GivenUp for leaf in optree.tree_leaves(x, none_is_leaf=True))


def _of_role(name: str, frames: list[dict[str, Any]]) -> list[Any]:
    """What the frames hold of the kind that a name has, the user's first;
    a function that torch transforms is func.
    """
    return [
        v
        for f in reversed(frames)
        for n, v in f.items()
        if ROLES[name](v) and (name != "f" or n == "func")
    ][:1]


def _tensors(x: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif depth and isinstance(x, dict | list | tuple):
        for v in x.values() if isinstance(x, dict) else x:
            yield from _tensors(v, depth - 1)


def _copy(x: Any) -> Any:
    """A copy, which what the test does next leaves alone, and which no trace counts."""
    with within(traces=(), watcher=None):
        return optree.tree_map(_apart, x, none_is_leaf=True)


def _apart(x: Any) -> Any:
    if (
        not isinstance(x, Tensor)
        or isinstance(x, torch.nn.Parameter)
        or not (x.is_leaf or x.requires_grad)
    ):
        return x
    try:
        with torch.no_grad():
            copy = x.detach().clone().requires_grad_(x.requires_grad)
        return copy if x.is_leaf else copy.clone()  # what is no leaf may be written to
    except RuntimeError:  # caught inside a transform of torch.func
        return x


def _mesh(e: sl.ShardError, found: dict[str, Any], frames: list[dict[str, Any]]) -> Mesh | None:
    if isinstance(e.mesh, Mesh):
        return e.mesh
    for v in _tensors(found):
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


def run_together() -> None:
    """``run`` on real ranks: the fixes that all of them
    saw, in one order, for they may communicate.
    """
    if not watched():
        return
    mine = {(s.op, s.fix): s for s in _FOUND}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(mine))
    _FOUND[:] = [mine[key] for key in everywhere[0] if all(key in keys for keys in everywhere)]
    wrong = run()
    assert not wrong, "\n".join(wrong)


def _of_the_place(e: Exception) -> bool:
    """Whether a line fails for where it is run: outside the module
    whose plain tensors count, or on a leaf.
    """
    return isinstance(e, sl.errors.PlainTensor) or "a leaf Variable that requires grad" in str(e)


def _run(s: _Seen) -> str:
    if s.fix.startswith(ON_RANKS) and not (s.mesh is not None and s.mesh.kind == "dist"):
        return _launched(s)
    if _left_open(s.fix):
        _note("with a part that the user writes", s)
        return ""
    if unknown := [n for n in s.missing if n not in CALLER]:
        return f"the fix names what neither the error nor the caller has: {', '.join(unknown)}"
    tried = []
    for meant in s.scopes:  # until one runs
        tried.append(_tried(s, meant))
        if tried[-1][1].startswith("run"):
            break
    wrong, done = min(tried, key=lambda one: (bool(one[0]), not one[1].startswith("run")))
    if not wrong:
        _note(done, s)
    return tried[0][0] if wrong else ""


def _launched(s: _Seen) -> str:
    """A line that wants processes of its own."""
    asked = {n: abs(int(size)) for n, size in re.findall(r"(\w+)=(-?\d+)", s.fix)}
    sizes = asked or {n: int(size) for n, size in re.findall(r"(\w+)=(\d+)", mesh_text(s.on))}
    try:
        sl.launch(_on_a_rank, s.fix, s.layout, **sizes)
    except sl.ShardError as again:
        return str(again)[-300:]
    _note("run on real ranks", s)
    return ""


def _on_a_rank(fix: str, layout: str) -> None:
    x = sl.shard(torch.zeros([24] * len(sl.Layout.parse(layout).dims)), layout) if layout else None
    eval(fix, {"sl": sl, "x": x})


def _left_open(fix: str) -> bool:
    """Whether an argument of a call is an Ellipsis, which stands for what the user wrote there."""
    calls = [n for n in ast.walk(ast.parse(fix)) if isinstance(n, ast.Call)]
    return any(isinstance(a, ast.Constant) and a.value is ... for call in calls for a in call.args)


def _tried(s: _Seen, scope: dict[str, Any]) -> tuple[str, str]:
    """What is wrong with a fix when its names mean these values, and what was done with it."""
    mesh = sl.simulate(x=2) if s.mesh is None and s.missing else s.mesh
    try:
        with nullcontext() if mesh is None else sl.use_mesh(mesh):
            caller = _Caller(scope)
            scope = scope | {name: caller[name] for name in s.missing}
        sharded = any(isinstance(v, sl.ShardedTensor) for v in _tensors(scope))
        # first: the line may write to its operands
        want = _dense(s, scope) if sharded and s.op in s.fix else None
        with promoting() if s.lifts else nullcontext():
            got = _answer(s.fix, MODULES | scope, mesh)
    except Exception as again:
        if isinstance(again, NotImplementedError) and _refused_whole(s, scope, again):
            return "", "of a call that torch refuses on whole tensors too"
        if _of_the_place(again):
            return "", f"failed for where it is run: {type(again).__name__}"
        return f"{type(again).__name__}: {str(again)[:300]}", ""
    whole = isinstance(want, Tensor) and not isinstance(want, sl.ShardedTensor)
    if not whole or not isinstance(got, sl.ShardedTensor):
        return "", "run" if not s.missing else "run with a stand-in"
    have = sl.unshard(got).detach()
    close = have.dtype == want.dtype and have.shape == want.shape
    if close and torch.allclose(have, want, equal_nan=True):
        return "", "run, and its value compared with dense"
    return "the value is not the dense one", ""


def _unsharded(scope: dict[str, Any]) -> dict[str, Any]:
    """The names of a line with whole tensors, and an ``sl`` that leaves them so."""

    def same(x: Any, *_: Any, **__: Any) -> Any:
        return x

    def whole(x: Any) -> Any:
        return sl.unshard(x).detach().clone() if isinstance(x, sl.ShardedTensor) else x

    plain = types.SimpleNamespace(reshard=same, unshard=same, implicit=lambda *_: nullcontext())
    return {k: optree.tree_map(whole, v, none_is_leaf=True) for k, v in scope.items()} | {
        "sl": plain
    }


def _refused_whole(s: _Seen, scope: dict[str, Any], why: Exception) -> bool:
    """Whether whole tensors get the same answer: a kernel that lacks a dtype."""
    try:
        _answer(s.fix, MODULES | _unsharded(scope), None)
    except Exception as again:
        return str(again) == str(why)
    return False


NOTED: dict[str, list[str]] = {}
"""By what was done with them, the fixes that this process met."""


def _note(what: str, s: _Seen) -> None:
    NOTED.setdefault(what, []).append(f"{s.op}: {s.fix}")


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")  # it says so
        _execute(tree, scope, mesh)
    torch.random.set_rng_state(state)
    if "sl.random." in fix:
        sl.random.seed(None)  # or the tests to come would not draw from torch's seed
    return scope.get("_answer")


def _execute(tree: ast.Module, scope: dict[str, Any], mesh: Mesh | None) -> None:
    written: Any = types.ModuleType("my_module")
    written.__getattr__ = lambda name: torch.get_num_threads
    with ExitStack() as stack, unittest.mock.patch.dict(sys.modules, my_module=written):
        # what it names may be written there
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        if mesh is not None:
            stack.enter_context(sl.use_mesh(mesh))
        exec(compile(tree, "<fix>", "exec"), scope)


def _dense(s: _Seen, scope: dict[str, Any]) -> Any:
    """What the line gives on whole tensors; None where it draws,
    or is about placing and not about values.
    """
    if "sl.shard" in s.fix or re.search(r"rand|dropout|bernoulli|multinomial", s.fix):
        return None

    try:
        return _answer(s.fix, MODULES | _unsharded(scope), None)
    # the line is about what whole tensors do not have
    except (AttributeError, RuntimeError, ValueError):
        return None
