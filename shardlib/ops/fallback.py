"""Fallback for functions without an implementation: they run on whole tensors.

1. A function of torch written in Python is opened: its body runs on the sharded values, and every
   operator inside it uses its own implementation.
2. If every rank holds all operands whole, the function runs on them.
3. Split or pending operands are gathered inside ``sl.implicit(max_bytes)``, counted, and the result
   is whole; outside, ImplicitCommunication gives the number of bytes and the line to write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import opened
from shardlib.autocast import casting
from shardlib.collectives import block_shape, holds_values, lead
from shardlib.errors import (
    BadArgument,
    ImplicitCommunication,
    NoImplementation,
    PlainTensor,
    ShardError,
    Unsupported,
)
from shardlib.layouts import Layout
from shardlib.memory_sharing import (
    alike,
    link,
    refuse_overlap,
    refuse_write,
    same_memory,
    writes,
    written,
)
from shardlib.mesh import Mesh, scope, within
from shardlib.ops.each_rank import FlatCall, each, run
from shardlib.ops.fix_line import fix_line
from shardlib.ops.padding import extended
from shardlib.ops.registry import may_move, unasked
from shardlib.opspec import Args, Func, Kwargs, draws, names_of
from shardlib.placing import reshard, whole_of
from shardlib.tensor.gradients import real_axes, settle, vary
from shardlib.tensor.lifting import check_met, copies, lift, one_copy, replicated
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    FALLBACK,
    ShardedTensor,
    call_error,
    no_implementation,
    torch_refuses,
    typeof,
)

_NEVER = frozenset(names_of(kind="refused"))


_RESHAPING = frozenset("t_ squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_".split())


def is_whole(x: ShardedTensor) -> bool:
    """Check whether every rank holds all elements, and nothing else."""
    return x.shape == x.padded_shape and not real_axes(x.mesh, x.sharding.named)


@dataclass
class FallbackCall:
    """Call without an implementation, and the refusal that was raised for it so far."""

    func: Any
    args: Any
    kwargs: Any
    refusal: Exception | None

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", str(self.func))

    def refused(self) -> Exception:
        """Return the error for a call that no handler can run."""
        return self.refusal or no_implementation(self.func, self.args, self.kwargs)

    def check(self) -> None:
        """Raise torch's own refusal of the call, if there is one."""
        if (refused := torch_refuses(self.func, self.args, self.kwargs)) is not None:
            raise refused

    @cached_property
    def flat(self) -> FlatCall:
        """The call with its arguments flattened."""
        return FlatCall.of(self.func, *self.args, **self.kwargs)

    @cached_property
    def ours(self) -> list[ShardedTensor]:
        """The sharded tensors among the arguments."""
        return [x for x in self.flat.tensors if isinstance(x, ShardedTensor)]

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the sharded tensors."""
        if not self.ours:
            raise self.refused()
        return self.ours[0].mesh

    @cached_property
    def values(self) -> list[ShardedTensor]:
        """The tensors among the arguments, as sharded ones of one mesh."""
        mesh, found = self.mesh, self.flat.tensors
        if self.name in ("__getitem__", "__setitem__"):
            # torch takes plain indices of any device
            found = [replicated(x, mesh) for x in found]
        return [lift(x, mesh, self.name) for x in found]

    @cached_property
    def moved(self) -> dict[int, float]:
        """Bytes per rank to gather each operand that is not whole, by its position."""
        found = zip(self.flat.at, self.values, strict=True)
        return {i: _bytes(v) for i, v in found if not is_whole(v)}

    @cached_property
    def written(self) -> list[Any]:
        """The tensors that the call writes to, running statistics among them."""
        return [*written(self.func, self.args, self.kwargs), *self.statistics]

    @cached_property
    def statistics(self) -> list[Any]:
        """The running statistics that the call writes to without changing their version."""
        at, args, given = _STATISTICS.get(self.func), self.args, self.kwargs
        if at is None:
            return []
        flag = "use_input_stats" if "instance" in self.name else "training"
        used = given.get(flag, self.func is not F.batch_norm)
        if len(args) > 5:
            used = args[5]
        if not used:
            return []
        return [*args[at : at + 2], given.get("running_mean"), given.get("running_var")]


Handler = Callable[[FallbackCall], Any]
NEXT = object()
"""Answer of a handler that does not serve a call."""


def on_whole(func: Func, args: Args, kwargs: Kwargs, refusal: Exception | None = None) -> object:
    """Run a call without an implementation: the first handler that serves it answers or refuses.

    Its Python body is tried only where there is no refusal yet.
    """
    call = FallbackCall(func, args, kwargs, refusal)
    for handler in HANDLERS:
        if (answer := handler(call)) is not NEXT:
            return answer
    return run_whole(call)


# ---------------------------------------------------------------- handlers, in their order


def refuse_no_value(call: FallbackCall) -> object:
    """Refuse functions of memory or of the autograd graph: gathering does not help them."""
    if call.refusal is not None and call.func in (torch.autograd.grad, torch.autograd.backward):
        raise call.refusal
    access = call.name in ("__get__", "__set__", "__delete__")
    read = getattr(getattr(call.func, "__self__", None), "__name__", "")
    if call.name in _NEVER or (access and read not in _VALUES):
        raise call.refused()
    return NEXT


def write_out(call: FallbackCall) -> object:
    """Run a call with ``out=``: copy the result to the target."""
    rest = dict(call.kwargs)
    out = rest.pop("out", None)
    if not isinstance(out, Tensor | tuple | list):
        return NEXT
    call.check()
    with casting(call.func):
        result = call.func(*call.args, **rest)
    pairs = [(out, result)] if isinstance(out, Tensor) else list(zip(out, result, strict=True))
    for target, value in pairs:
        _refuse_target(call, rest, target, value)
        try:
            _stored(target, value, call.name)
        except ImplicitCommunication:
            raise _moves_result(call, target, value) from None
    if isinstance(out, Tensor):
        return out
    return None if call.name in _SILENT else type(result)(out)


def write_plain(call: FallbackCall) -> object:
    """Run a call that writes to a plain tensor, with plain and whole operands only.

    A plain tensor cannot hold a split result.
    """
    if all(isinstance(t, ShardedTensor) or not isinstance(t, Tensor) for t in call.written):
        return NEXT
    if not call.ours:
        return call.func(*call.args, **call.kwargs)
    _refuse_mixed(call)
    _refuse_moves_to_plain(call)
    if not holds_values(call.mesh):
        return call.args[0] if call.args else call.written[0]
    args, kwargs = call.flat.replaced([*map(whole_of, call.flat.tensors)])
    with casting(call.func):
        return call.func(*args, **kwargs)


def open_body(call: FallbackCall) -> object:
    """Run the Python body of a torch function: the operators inside have implementations."""
    func, args, kwargs = call.func, call.args, call.kwargs
    if call.refusal is not None or call.name in _PLAINLY:
        return NEXT
    if func in scope().call.opened:
        # its body calls it again through a helper
        return NEXT
    if (body := opened(func)) is None:
        return NEXT
    # tensors that the body creates are the same on every rank; given ones need not be
    for x in call.flat.tensors if call.ours else ():
        check_met(x, call.ours[0].mesh, call.name)
    try:
        with casting(func), within(promoting=True, opened=(*scope().call.opened, func)):
            return body(*args, **kwargs)
    except (TypeError, AttributeError, NotImplementedError, ArithmeticError) as e:
        why = f"{type(e).__name__} inside it: {e}"
        call.refusal = no_implementation(func, args, kwargs, why)
        return NEXT


def refuse_draws(call: FallbackCall) -> object:
    """Refuse functions that draw random numbers, which have no whole operand to agree on."""
    if not draws(call.func, call.args, call.kwargs):
        return NEXT
    why = "this draws random numbers from each rank's own generator, so the copies would differ"
    raise call_error(Unsupported, why, call.name, "torch.rand_like(x)", tensor=call.ours[0])


def refuse_sparse_gradients(call: FallbackCall) -> object:
    """Refuse sparse gradients, with the call without them as the fix."""
    args = call.args
    flags = "sparse_grad", "sparse"
    at = _SPARSE.get(call.name, len(args))
    if not (any(map(call.kwargs.get, flags)) or any(args[at : at + 1])):
        return NEXT
    if at < len(args):
        args = (*args[:at], False, *args[at + 1 :])
    named = {k: v for k, v in call.kwargs.items() if k not in flags}
    plain = FlatCall.of(call.func, *args, **named)
    whole = {i: "..." for i in plain.at if isinstance(plain.leaves[i], ShardedTensor)}
    fix = fix_line(plain, whole)
    raise call_error(Unsupported, "sparse gradients", call.name, fix, *plain.tensors)


def refuse_new_shape(call: FallbackCall) -> object:
    """Refuse in-place functions that change the shape of their tensor."""
    if call.name not in _RESHAPING:
        return NEXT
    x, *rest = call.args
    given = ", ".join([*map(repr, rest), *(f"{k}={v!r}" for k, v in call.kwargs.items())])
    why = "a tensor's shape and layout do not change in place"
    raise call_error(Unsupported, why, call.name, f"x = x.{call.name[:-1]}({given})", tensor=x)


def compute_apart(call: FallbackCall) -> object:
    """Compute an in-place method by its out-of-place variant, which may be implemented."""
    variant = _APART.get(call.func)
    if variant is None or not any(call.moved.values()):
        return NEXT
    x = call.values[0]
    if call.name in _UNDERIVED and torch.is_grad_enabled() and x.requires_grad:
        return NEXT
    call.check()
    try:
        # a clone, since backward may read the values that are overwritten
        old = x.clone() if torch.is_grad_enabled() else x
        # without autocast: in-place methods are not cast, though their variants may be
        new = variant(old, *call.args[1:], **call.kwargs)
        _refuse_other_dtype(call, old, new)
        return _stored(x, new, call.name)
    except BadArgument:
        raise
    except ShardError:
        return NEXT


def refuse_moves(call: FallbackCall) -> object:
    """Refuse to gather operands outside ``sl.implicit``, or more bytes than it allows."""
    told = call.refusal
    final = None
    if isinstance(told, ShardError):
        fixed = told.fix not in ("", "sl.unshard(x)")
        final = told if fixed or not isinstance(told, NoImplementation) else None
    if final is not None and not may_move(1) and any(map(_has_rest, call.values)):
        # how many bytes takes long to find, and no number of them may move
        raise final
    moved = call.moved
    most = max(moved.values(), default=0)
    if may_move(most):
        return NEXT
    if final is not None:
        raise final
    call.check()
    fix = fix_line(call.flat, dict.fromkeys(moved, "..."), most)
    why = f"{call.name} needs whole operands"
    raise unasked(why, sum(moved.values()), call.name, fix, *call.values)


def run_whole(call: FallbackCall) -> object:
    """Run the function on gathered operands; simulated ranks whose gradients differ in turn."""
    mesh = call.mesh
    whole = _gather(call)
    raws = whole.raws
    # gradients that are left unsummed differ between ranks, so each runs for itself
    ranks = lead(mesh) > 0 and bool(whole.deferred)
    before = [(writes(r), r.grad_fn) for r in raws]
    out = each(call.flat, mesh, raws) if ranks else run(call.func, mesh, *call.flat.replaced(raws))
    # the result is a view: run again on the original blocks so that it shares memory
    if lead(mesh) and not ranks and _viewing(out, raws, before):
        blocks = [v.raw for v in whole.values]
        out = each(call.flat, mesh, blocks)
        return replied(out, blocks, call.values, mesh, whole.deferred, True)
    _write_back(call, whole, before, ranks)
    return replied(out, raws, call.values, mesh, whole.deferred, ranks)


HANDLERS: tuple[Handler, ...] = (
    refuse_no_value,
    write_out,
    write_plain,
    open_body,
    refuse_draws,
    refuse_sparse_gradients,
    refuse_new_shape,
    compute_apart,
    refuse_moves,
)
"""Handlers in the order in which they are tried; ``run_whole`` serves what they leave."""


# ---------------------------------------------------------------- whole operands


class _Gathered(NamedTuple):
    """Whole operands of a call, and their raw tensors as the function gets them.

    ``quiet``  whether torch would not count a write to a tensor, for each.
    """

    values: list[ShardedTensor]
    raws: list[Tensor]
    quiet: list[bool]
    deferred: frozenset[str]


def _write_back(
    call: FallbackCall, whole: _Gathered, before: Sequence[tuple[int, object]], ranks: bool
) -> None:
    """Write to the operands what the function wrote to their gathered copies.

    ``before``  writes to each copy, and its node of the graph, before the call.
    """
    rows = zip(call.values, whole.values, whole.raws, before, whole.quiet, strict=True)
    for x, moved, raw, (count, graph), quiet in rows:
        if quiet or writes(raw) != count:  # in place or as out=
            with torch.set_grad_enabled(torch.is_grad_enabled() and raw.grad_fn is not graph):
                _write(x, moved, raw, call.name, ranks)


def _gather(call: FallbackCall) -> _Gathered:
    mesh = call.mesh

    def among(i: int, tensors: list[Any]) -> bool:
        return any(call.flat.leaves[i] is t for t in tensors)

    at = call.flat.at
    moved = [_gathered(v) if i in call.moved else v for i, v in zip(at, call.values, strict=True)]
    moved = written_to(call.func, call.args, call.kwargs, moved)
    deferred = frozenset().union(*(v.deferred for v in moved))
    raws: list[Any] = []
    for i, v in zip(at, moved, strict=True):
        raw = vary(v.raw, mesh, deferred - v.deferred)
        one = raw if deferred else one_copy(raw, mesh)
        if one is raw and (i in call.moved or deferred) and among(i, call.written):
            # autograd refuses writes to a view made by an autograd function
            one = raw.clone()
        raws.append(one)
    quiet = [
        among(i, call.written if raw.is_inference() else call.statistics)
        for i, raw in zip(at, raws, strict=True)
    ]
    return _Gathered(moved, raws, quiet, deferred)


# ---------------------------------------------------------------- results that are written


def _refuse_target(call: FallbackCall, rest: Kwargs, target: Tensor, value: Tensor) -> None:
    """Refuse a target of ``out=`` with a gradient, or of a dtype to which torch may not cast."""
    plain = FlatCall.of(call.func, *call.args, **rest)
    given = [*plain.tensors, target]
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in given):
        raise BadArgument(
            "arguments given as out= have no gradient, and an operand asks for one", op=call.name
        )
    if target.dtype != value.dtype and torch.can_cast(value.dtype, target.dtype):
        why = "some functions cast what they write to out=, and some do not"
        fix = f"out.copy_({fix_line(plain)})"
        raise call_error(Unsupported, why, call.name, fix, out=target, result=value)


def _moves_result(call: FallbackCall, target: Any, value: ShardedTensor) -> ImplicitCommunication:
    """Return the refusal of a result that would move to where it is written."""
    cost = _bytes(value, target.sharding)
    why = "the result lies otherwise than where it is written"
    fix = fix_line(call.flat, most=cost)
    return unasked(why, cost, call.name, fix, out=target, result=value)


def _refuse_mixed(call: FallbackCall) -> None:
    """Refuse a call that writes to plain tensors of another mesh's process, or to sharded ones."""
    for t in call.written:
        if not isinstance(t, Tensor):
            continue
        check_met(t, call.mesh, call.name)
        if isinstance(t, ShardedTensor):
            why = "plain and sharded tensors are written to in one call"
            raise call_error(PlainTensor, why, call.name, "sl.unshard(x)", x=t)


def _refuse_moves_to_plain(call: FallbackCall) -> None:
    cost = max(map(_bytes, call.ours))
    if not may_move(cost):
        why = "a plain tensor is written to"
        fix = fix_line(call.flat, most=cost)
        raise unasked(why, cost, call.name, fix, *call.flat.tensors)


def _refuse_other_dtype(call: FallbackCall, old: Tensor, new: Tensor) -> None:
    """Refuse to write a result of another dtype, as torch's in-place methods do."""
    narrows = old.is_complex() > new.is_complex() and new.dtype is not torch.bool
    if call.kwargs.get("dtype") not in (None, old.dtype) or narrows:
        why = f"a result of dtype {new.dtype} is not written to a tensor of {old.dtype}"
        raise call_error(BadArgument, why, call.name, tensor=old)


_SILENT = frozenset("split_copy split_with_sizes_copy unbind_copy".split())
"""Functions that return None when they write to ``out=``."""


def _stored(x: object, value: object, op: str) -> Tensor:
    """Copy a call's result into ``x``.  Raises: PlainTensor, BadArgument."""
    if not isinstance(x, ShardedTensor) or not isinstance(value, ShardedTensor):
        raise PlainTensor(
            "a plain tensor cannot take a sharded value", op=op, fix="x = sl.shard(x, '...')"
        )
    if x.shape != value.shape or not torch.can_cast(value.dtype, x.dtype):
        why = "a result of this shape and dtype cannot be written to this tensor"
        raise call_error(BadArgument, why, op, tensor=x, result=value)
    return x.copy_(value)


_APART: dict[Func, Func] = {
    f: g
    for n in dir(Tensor)
    if n.endswith("_") and not n.endswith("__") and n not in _NEVER
    if callable(f := getattr(Tensor, n)) and callable(g := getattr(Tensor, n[:-1], None))
}
"""In-place method -> its out-of-place variant, which may have an
implementation though the in-place one has none.
"""


_UNDERIVED = frozenset("acosh_ asinh_ atanh_ arccosh_ arcsinh_ arctanh_".split())
"""In-place methods without a gradient in torch, though their variants have one."""


def _viewing(out: object, raws: list[Tensor], before: list[Any]) -> bool:
    found = [t for t in optree.tree_leaves(out) if isinstance(t, Tensor)]  # type: ignore[arg-type]
    views = any(t is not r and same_memory(t, r) for t in found for r in raws)
    return views and all(writes(r) == old[0] for r, old in zip(raws, before, strict=True))


# position of the flag in torch.embedding_bag and F.embedding
_SPARSE = {"embedding": 6, "embedding_bag": 5}

_STATISTICS: dict[Any, int] = {
    F.batch_norm: 1,
    F.instance_norm: 1,
    torch.batch_norm: 3,
    torch.instance_norm: 3,
    torch.native_batch_norm: 3,
    torch.batch_norm_update_stats: 1,
}
"""Position of the running statistics of functions that write
to them without changing their version.
"""


# not opened: their bodies draw plain tensors from each rank's own generator
_PLAINLY = frozenset("pca_lowrank svd_lowrank".split())


_VALUES = frozenset("real imag H mH".split())


def _whole(shape: torch.Size) -> Layout:
    """Return the layout of a tensor of these sizes that every rank holds whole."""
    return Layout.parse("...").resolve(len(shape))


def _has_rest(x: ShardedTensor) -> bool:
    """Return whether other ranks have elements of a value that a block has not."""
    return x.raw.numel() > 0 and any(x.mesh.axes[a] > 1 for a in x.sharding.axes)


def _bytes(x: ShardedTensor, to: Layout | None = None) -> float:
    """Count the bytes per rank to reshard a value, or to gather it."""
    way = x.sharding >> (to or _whole(x.padded_shape))
    return float(way.bytes(tuple(x.padded_shape), x.mesh, x.raw.element_size()))


def _gathered(x: ShardedTensor) -> ShardedTensor:
    if x.is_padded:
        whole = reshard(x.with_padding, "...")[tuple(slice(n) for n in x.shape)]
        return whole.becomes(whole.raw.contiguous())
    whole = reshard(x, "...")
    if whole is x or whole.raw.is_contiguous():
        return whole
    return whole.becomes(whole.raw.contiguous())


def _write(x: ShardedTensor, moved: ShardedTensor, raw: Tensor, name: str, ranks: bool) -> None:
    """Reshard a written copy back to the tensor's own layout.

    ``ranks``  the copy holds every rank's.
    """
    mesh = x.mesh
    what = {"tensor": typeof(x)}
    if raw is moved.raw and moved is x:
        return
    refuse_write(x.raw, name, what, mesh)
    refuse_overlap(x.raw, name, what, mesh)
    full = raw if ranks else copies(raw, mesh)
    if block_shape(full, mesh) != moved.padded_shape:
        why = "a tensor changed its shape in place"
        raise Unsupported(why, op=name, operands=what, fix="x = f(x)")
    new = moved
    if raw is not moved.raw:
        place = Place(_whole(moved.shape), moved.shape, mesh, deferred=moved.deferred)
        new = ShardedTensor(full, place)
    new = new.becomes(extended(new.raw, x), shape=x.padded_shape)
    if x.sharding.partial:
        new = reshard(new, x.sharding)
    x.raw.copy_(reshard(new, x.sharding).raw)


def written_to(func: Func, args: Args, kwargs: Kwargs, values: list[Any]) -> list[Any]:
    """End deferrals of operands that are written to tensors without that deferral.

    Such a tensor keeps its place, and so the form of its cotangent.
    """
    if all(not v.deferred for v in values) or not (targets := written(func, args, kwargs)):
        return values
    kept = frozenset().union(*(t.deferred for t in targets if isinstance(t, ShardedTensor)))
    return [v if v.deferred <= kept else settle(v) for v in values]


def replied(
    out: Any,
    raws: list[Any],
    values: list[Any],
    mesh: Mesh,
    deferred: frozenset[str],
    per_rank: bool,
) -> object:
    """Wrap whole results as sharded tensors; a returned operand is returned as that operand."""

    def back(t: object) -> object:
        if not isinstance(t, Tensor) or isinstance(t, ShardedTensor):
            return t
        for raw, v in zip(raws, values, strict=True):
            if t is raw:
                return v
        if t.layout != torch.strided:
            raise Unsupported(f"a {t.layout} result", op="torch", fix="sl.unshard(x)")
        full: Any = t if per_rank else copies(t, mesh)
        shape = block_shape(full, mesh)
        place = Place(_whole(shape), torch.Size(shape), mesh, deferred=deferred)
        new = ShardedTensor(full, place)
        for raw, v in zip(raws, values, strict=True):
            if alike(t, raw):
                link(full, v.raw)
        return new

    return optree.tree_map(back, out, none_is_leaf=True)


FALLBACK.append(on_whole)
