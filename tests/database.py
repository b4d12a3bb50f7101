"""torch's own operator database as a source of calls: an
operator, operands, and layouts drawn for them.

``judge`` makes one call on the ambient mesh and compares it with dense: value, dtype, every gradient
          and its gradient again.  Draws depend on a seed and the operator's name alone, so that every
          process draws the same.

    python -m tests.database [seed]        the whole of it; ``make operators``
"""

import random
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib._compat import opened
from shardlib.ops.declare import DECLARED
from shardlib.ops.signatures import ArgumentSlot
from shardlib.tensor import Unfit
from tests import fixes

MESHES = ({"x": 5, "y": 2}, {"x": 3, "y": 2})

NEVER = frozenset(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_
    as_strided as_strided_copy as_strided_scatter
    """.split()
)  # results that are no function of the operands: memory as it was found, or strides of memory


@cache
def entries() -> dict[str, Any]:
    """The database's entries of fp64 by name; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {
        op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op
        for op in op_db
        if torch.float64 in op.dtypes and op.name not in NEVER and "jiterator" not in op.name
    }


class _Draws(TorchDispatchMode):
    """Notes whether an operator below draws random numbers;
    attention without dropout is tagged but does not.
    """

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | (
            kwargs or {}
        )
        if torch.Tag.nondeterministic_seeded in func.tags and named.get("dropout_p") != 0.0:
            self.seen = True
        return func(*args, **(kwargs or {}))


@dataclass
class Call:
    """One call of the database: its dense operands and
    results, and the layouts drawn for its operands.
    """

    name: str
    function: Any
    leaves: list[Any]
    tree: Any
    layouts: list[str | None]
    want: list[Any]
    cotangents: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    seconds: list[torch.Tensor | None]  # the gradient of those; [] where they are constant
    mesh: dict[str, int]
    pad: bool = False  # whether the layouts may need padding

    def __str__(self) -> str:
        shown = [
            f"{list(x.shape)} {t!r}" if _is(x) else repr(x)
            for x, t in zip(self.leaves, self.layouts, strict=True)
        ]
        return f"{self.name}({', '.join(shown)}) on {self.mesh}"


@dataclass
class Outcome:
    """``equal``, ``refused`` (a ShardError), ``wrong`` or ``crash`` (another error)."""

    kind: str
    note: str = ""
    bytes: Any = 0
    error: Any = field(default=None, repr=False)


def _is(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _results(tree: Any) -> list[Any]:
    return [
        x
        for x in optree.tree_leaves(tree, none_is_leaf=True)
        if isinstance(x, torch.Tensor | int | float | complex)
    ]


def drawn_layout(shape: Any, mesh: dict[str, int], draw: random.Random) -> str:
    """A layout that fits; two dimensions of three are split where an axis divides them."""
    free, tokens = list(mesh), []
    draw.shuffle(free)
    for n in shape:
        fit = [a for a in free if n and n % mesh[a] == 0]
        tokens.append(fit[0] if fit and draw.random() < 0.65 else ".")
        if tokens[-1] != ".":
            free.remove(tokens[-1])
    return " ".join(tokens)


def pending(call: Call, seed: int) -> Call:
    """The call with operands of which some are sums that are pending over an axis."""
    draw = random.Random(f"pending {call.name} {seed}")
    layouts = list(call.layouts)
    for k, (x, layout) in enumerate(zip(call.leaves, layouts, strict=True)):
        free = [a for a in call.mesh if a not in (layout or "").split()]
        if layout is not None and x.is_floating_point() and free and draw.random() < 0.6:
            layouts[k] = f"{layout} + sum({draw.choice(free)})"
    return replace(call, layouts=layouts)


def padded(call: Call, seed: int) -> Call:
    """The call with operands whose dimensions are split, whether or not the axes divide them."""
    draw = random.Random(f"padded {call.name} {seed}")
    layouts = list(call.layouts)
    for k, (x, layout) in enumerate(zip(call.leaves, layouts, strict=True)):
        if layout is not None and x.numel():
            free = draw.sample(list(call.mesh), len(call.mesh))
            split = (free and n > 1 and draw.random() < 0.6 for n in x.shape)
            layouts[k] = " ".join(free.pop() if yes and free else "." for yes in split)
    return replace(call, layouts=layouts, pad=True)


def samples(name: str, most: int, seed: int) -> list[Any]:
    """At most so many of the operator's own samples, drawn."""
    op = entries()[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(
            op.sample_inputs(torch.get_default_device(), torch.float64, requires_grad=False)
        )
    random.Random(f"{seed} {name}").shuffle(found)
    return found[:most]


def calls(name: str, most: int, seed: int, meshes: Any = MESHES) -> Iterator[Call]:
    """Calls of an operator on each mesh; those that torch refuses, that
    draw, or that nothing splits are left out.
    """
    draw = random.Random(f"{name} {seed}")
    for sample in samples(name, most, seed):
        found = dense(name, sample)
        for mesh in meshes if found is not None else ():
            layouts = [
                drawn_layout(x.shape, mesh, draw) if _is(x) and x.ndim else None
                for x in found.leaves
            ]
            if any(t and t.strip(". ") for t in layouts):
                found.layouts, found.mesh = layouts, mesh
                yield found


def dense(name: str, sample: Any) -> Call | None:
    """The call on plain tensors, with results and gradients;
    None where torch refuses it, or it draws.
    """
    op = entries()[name]
    return plain_call(
        name, op.op, (sample.input, *sample.args), sample.kwargs, op.supports_autograd
    )


def plain_call(name: str, function: Any, args: Any, kwargs: Any, grads: bool = True) -> Call | None:
    leaves, tree = optree.tree_flatten((tuple(args), kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    first = [_leaf(x, grads) if _is(x) else x for x in leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _Draws() as draws:
                _called(function, tree, first)
            if draws.seen:
                return None
            want = _results(_called(function, tree, first))  # torch takes other ways under a mode
        except Exception:
            return None
        pairs = [w for w in want if _is(w) and w.requires_grad]
        inputs = [x for x in first if _is(x) and x.requires_grad]
        cotangents = [_drawn(w, 3) for w in pairs]
        gradients: list[Any] = []
        seconds: list[Any] = []
        if pairs and inputs:
            try:
                gradients, seconds = _derivatives(pairs, inputs, cotangents, lambda x: _drawn(x, 5))
            except (RuntimeError, NotImplementedError):  # the operator has no second gradient here
                try:
                    want = _results(_called(function, tree, first))
                    pairs = [w for w in want if _is(w) and w.requires_grad]
                    found = torch.autograd.grad(pairs, inputs, cotangents, allow_unused=True)
                    gradients = list(found)
                except (RuntimeError, NotImplementedError):  # nor a first one
                    gradients = []
    return Call(name, function, [x.detach() if _is(x) and not x.requires_grad else x for x in first], tree, [], want,
                cotangents, gradients, seconds, {})  # fmt: skip


def _drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))


def _derivatives(
    outs: list[Any], inputs: list[Any], cotangents: list[Any], again: Any
) -> tuple[list[Any], list[Any]]:
    """The gradients, and theirs for the cotangents that ``again`` gives; [] where none has one."""
    first = torch.autograd.grad(outs, inputs, cotangents, allow_unused=True, create_graph=True)
    found = [g for g in first if g is not None and g.requires_grad]
    seconds: Any = ()
    if found:
        seconds = torch.autograd.grad(found, inputs, [again(g) for g in found], allow_unused=True)
    return [None if g is None else g.detach() for g in first], list(seconds)


def _leaf(x: torch.Tensor, grads: bool) -> torch.Tensor:
    return x.detach().clone().requires_grad_(grads and x.is_floating_point())


def _called(function: Any, tree: Any, leaves: list[Any]) -> Any:
    args, kwargs = optree.tree_unflatten(tree, leaves)
    return function(*args, **kwargs)


def close(a: Any, b: Any) -> bool:
    if not _is(a) or not _is(b):
        return _is(a) == _is(b) and (a == b or (a != a and b != b))
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    a, b = (x.detach() if x.layout == torch.strided else x.detach().to_dense() for x in (a, b))
    # of integers: kernels round in other lanes
    loose = 1e-5 if a.dtype in (torch.float32, torch.complex64) else 1e-9
    a, b = (x.resolve_conj().to(torch.complex128) for x in (a, b))
    return torch.allclose(a, b, rtol=10 * loose, atol=loose, equal_nan=True)


def placed(call: Call) -> list[Any]:
    """The operands as sharded tensors on the ambient mesh; scalars stay plain."""
    out = list(call.leaves)
    for k, (x, layout) in enumerate(zip(call.leaves, call.layouts, strict=True)):
        if _is(x) and layout is not None:
            value = sl.shard(x.detach().clone(), layout, pad=call.pad)
            out[k] = value.requires_grad_(x.requires_grad)
        elif _is(x):
            out[k] = sl.shard(x.detach().clone(), "").requires_grad_(x.requires_grad)
    return out


def _whole(x: Any) -> Any:
    return sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x


def judge(call: Call) -> Outcome:
    """The call on sharded operands, on the ambient mesh, within
    ``sl.implicit`` or not as the caller chose.
    """
    try:
        with warnings.catch_warnings(), sl.trace() as t:
            warnings.simplefilter("ignore")
            ours = placed(call)
            got = _results(_called(call.function, call.tree, ours))
            values = [_whole(g) for g in got]
            if len(got) != len(call.want) or not all(map(close, call.want, values)):
                return Outcome("wrong", f"value: {call}", t.bytes)
            return Outcome(*_gradients(call, ours, got), bytes=t.bytes)
    except sl.ShardError as e:
        fixes.caught(e)
        return Outcome("refused", f"{type(e).__name__}: {str(e).splitlines()[0]} | {call}", error=e)
    except Exception as e:
        return Outcome(
            "crash",
            f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''} | {call}",
            error=e,
        )


def _gradients(call: Call, ours: list[Any], got: list[Any]) -> tuple[str, str]:
    if not call.gradients:
        return "equal", ""
    outs = [g for w, g in zip(call.want, got, strict=True) if _is(w) and w.requires_grad]
    if not all(g.requires_grad for g in outs):
        return "wrong", f"no graph: {call}"
    cotangents = [_placed_as(g, c) for g, c in zip(outs, call.cotangents, strict=True)]
    inputs = [x for x in ours if _is(x) and x.requires_grad]
    seconds: list[Any] = []
    if call.seconds:
        found, seconds = _derivatives(
            outs, inputs, cotangents, lambda g: _placed_as(g, _drawn(g, 5))
        )
        seconds = seconds or [None] * len(inputs)
    else:
        found = list(torch.autograd.grad(outs, inputs, cotangents, allow_unused=True))
    wanted = ((call.gradients, found, "gradient"), (call.seconds, seconds, "second gradient"))
    for want, ours_, kind in wanted:
        for x, d, o in zip(inputs if want else (), want, ours_, strict=True):
            if (d is None) != (o is None):
                there = _whole(o) if d is None else d
                if there.numel() and there.abs().max() != 0:
                    return "wrong", f"{kind} {'missing' if o is None else 'too many'}: {call}"
            elif d is not None:
                if isinstance(x, sl.ShardedTensor) and str(sl.layout_of(o)) != _bare(x):
                    return "wrong", f"layout of the {kind}: {call}"
                if not close(d, _whole(o)):
                    return "wrong", f"{kind}: {call}"
    return "equal", ""


def _placed_as(x: Any, value: torch.Tensor) -> Any:
    if not isinstance(x, sl.ShardedTensor):
        return value
    return sl.shard(value, _bare(x), pad=x.is_padded)


def _bare(x: Any) -> str:
    return str(sl.layout_of(x)).split(" + ")[0]


# ---------------------------------------------------------------- declarations


class _Reached(TorchFunctionMode):
    """The declared functions that a dense call reaches, and with
    what; functions written in Python are opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.declared = {f: name for name, d in DECLARED.items() for f in d.functions}
        self.calls: list[tuple[str, Any, Any, Any]] = []
        self.open: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.declared:
            self.calls.append((self.declared[func], func, args, kwargs))
            return func(*args, **kwargs)
        body = None if func in self.open else opened(func)
        if body is None:
            return func(*args, **kwargs)
        self.open.append(func)
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.open.pop()


def declared_calls(
    most: int, seed: int, names: Any = None
) -> dict[str, list[tuple[Any, Any, Any]]]:
    """For each declared name at most so many calls, (function, args,
    kwargs), that the database's samples reach.
    """
    out: dict[str, list[tuple[Any, Any, Any]]] = {}
    for name in names or entries():
        for sample in samples(name, most, seed):
            reached = _Reached()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    with reached:
                        entries()[name].op(sample.input, *sample.args, **sample.kwargs)
                except Exception:
                    continue  # torch refuses
            for found, *call in reached.calls:
                if len(out.setdefault(found, [])) < most:
                    out[found].append(tuple(call))  # type: ignore[arg-type]
    return out


def proofs(name: str, function: Any, args: Any, kwargs: Any) -> Iterator[Outcome]:
    """Each labelled dimension split alone, on an axis of two ranks,
    of three and of five where they divide it.
    """
    for call in alone(name, function, args, kwargs):
        with sl.simulate(**call.mesh):
            yield judge(call)


def alone(name: str, function: Any, args: Any, kwargs: Any) -> Iterator[Call]:
    """The calls of ``proofs``: one Call, with other layouts and another mesh at every step."""
    call = plain_call(name, function, args, kwargs)
    if call is None:
        return
    at = [i for i, x in enumerate(call.leaves) if _is(x)]
    slots = list(call.leaves)
    for k, i in enumerate(at):
        slots[i] = ArgumentSlot(k, tuple(call.leaves[i].shape))
    a, kw = optree.tree_unflatten(call.tree, slots)
    try:
        labels = DECLARED[name].labels(DECLARED[name].bind(*a, **kw))
    except Unfit:
        return  # not covered: such a call runs on whole operands
    sizes: dict[Any, set[int]] = {}
    for k, i in enumerate(at):
        for label, n in zip(labels.get(k, ()), call.leaves[i].shape, strict=False):
            if label is not None and n != 1:
                sizes.setdefault(label, set()).add(n)
    for label, found in sizes.items():
        for p in (2, 3, 5):
            if len(found) > 1 or not min(found) or min(found) % p:
                continue
            call.layouts, call.mesh = list(call.layouts) or [None] * len(call.leaves), {"x": p}
            for k, i in enumerate(at):
                mine = labels.get(k, (None,) * call.leaves[i].ndim)
                tokens = [
                    "x" if lb == label and n != 1 else "."
                    for lb, n in zip(mine, call.leaves[i].shape, strict=True)
                ]
                call.layouts[i] = " ".join(tokens) if tokens else None
            yield call


# ---------------------------------------------------------------- the whole of it

SAMPLES = 12  # of each operator, at most


@dataclass
class Tally:
    """An operator's outcomes: ``inside`` sl.implicit, ``outside`` it, and inside it ``otherwise``,
    with pending sums and with padding; one note and one refusal of each kind.
    """

    inside: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    otherwise: Counter[str] = field(default_factory=Counter)
    notes: dict[str, str] = field(default_factory=dict)


def tally(name: str, most: int, seed: int) -> Tally:
    """Every call on simulated ranks, inside ``sl.implicit`` and outside."""
    out = Tally()
    for call in calls(name, most, seed):
        for where, counted in (("inside", out.inside), ("outside", out.outside)):
            with sl.simulate(**call.mesh), sl.implicit() if where == "inside" else nullcontext():
                found = judge(call)
            counted[found.kind] += 1
            out.notes.setdefault(f"{where} {found.kind}", found.note)
        for drawn in (pending(call, seed), padded(call, seed)):
            with sl.simulate(**call.mesh), sl.implicit():
                found = judge(drawn)
            out.otherwise[found.kind] += 1
            out.notes.setdefault(f"otherwise {found.kind}", found.note)
    return out


def listed() -> dict[str, dict[str, str]]:
    """operators_refused.toml: reasons by operator, for ``inside`` and ``outside``.

    Without the operators that came to the database after this torch.
    """
    text = (Path(__file__).parent / "operators_refused.toml").read_text()
    tables: dict[str, dict[str, str]] = tomllib.loads(text)
    first = tables.pop("first")
    later = {n for n, version in first.items() if TorchVersion(torch.__version__) < version}
    return {
        table: {n: why for n, why in reasons.items() if n not in later}
        for table, reasons in tables.items()
    }


def differences(found: dict[str, Tally]) -> list[str]:
    """Wrong answers, crashes, and where the list of refusals and the outcomes differ."""
    out, refused = [], listed()
    for name, t in found.items():
        out += [t.notes[k] for k in t.notes if k.split()[1] in ("wrong", "crash")]
        if not t.inside:
            continue
        if bool(t.inside["refused"]) != (name in refused["inside"]):
            out.append(f"{name}: inside {dict(t.inside)}, listed: {name in refused['inside']}; "
                       f"{t.notes.get('inside refused', '')}")  # fmt: skip
        if (not t.outside["equal"]) != (name in refused["outside"]):
            out.append(f"{name}: outside {dict(t.outside)}, listed: {name in refused['outside']}; "
                       f"{t.notes.get('outside refused', '')}")  # fmt: skip
    return out


def main() -> None:
    """Print the figures of the whole database; fail where they differ from the list."""
    torch.set_num_threads(1)
    seed = int((sys.argv[1:] or ["7"])[0])
    found = {name: tally(name, SAMPLES, seed) for name in entries()}
    ran = {n: t for n, t in found.items() if t.inside}
    kinds = Counter(
        next((k for k in ("wrong", "crash", "refused") if t.inside[k]), "equal")
        for t in ran.values()
    )
    apart = sum(t.outside["equal"] > 0 for t in ran.values())
    count = sum(sum(t.inside.values()) for t in ran.values())
    wrong = differences(found)
    proofs_: Counter[str] = Counter()
    proven: set[str] = set()
    for name, several in declared_calls(SAMPLES, seed).items():
        for call in several:
            for outcome in proofs(name, *call):
                proofs_[outcome.kind] += 1
                proven |= {name} if outcome.kind == "equal" else set()
                wrong += [outcome.note] if outcome.kind in ("wrong", "crash") else []
    print(f"{len(proven)} declarations, each labelled dimension split alone: {dict(proofs_)}")
    print(*wrong, sep="\n")
    otherwise = sum((t.otherwise for t in ran.values()), Counter())
    print(f"operands with pending sums, and padded ones, inside sl.implicit(): {dict(otherwise)}")
    print(f"{len(ran)} operators that draw nothing, {count} calls: inside sl.implicit() {dict(kinds)}; "
          f"outside it {apart} with equal calls")  # fmt: skip
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
