"""Fallback for functions without an implementation: they run on whole tensors.

1. A function of torch written in Python is opened: its body runs on the sharded values, and every
   operator inside it uses its own implementation.
2. If every rank holds all operands whole, the function runs on them.
3. Split or pending operands are gathered inside ``sl.implicit(max_bytes)``, counted, and the result
   is whole; outside, ImplicitCommunication gives the number of bytes and the line to write.
"""

import inspect
import math
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import opened
from shardlib.autocast import casting
from shardlib.collectives import holds_values, lead
from shardlib.errors import (
    BadArgument,
    ImplicitCommunication,
    NoImplementation,
    PlainTensor,
    ShardError,
    Unsupported,
    lettered,
)
from shardlib.layouts import Layout
from shardlib.memory_sharing import (
    WRITERS,
    alike,
    link,
    refuse_overlap,
    refuse_write,
    same_memory,
    writes,
    written,
)
from shardlib.mesh import Mesh, scope, within
from shardlib.ops.registry import implicit_budget
from shardlib.opspec import draws, names_of
from shardlib.placing import reshard, unshard
from shardlib.tensor import (
    FALLBACK,
    Place,
    ShardedTensor,
    _Copies,
    _First,
    check_met,
    is_half,
    lift,
    no_implementation,
    on_shapes,
    real_axes,
    replicated,
    settle,
    torch_refuses,
    typeof,
    vary,
)  # fmt: skip

__all__ = ["each", "fix_line", "flat", "is_whole", "on_whole", "replied", "run", "written_to"]

_NEVER = frozenset(names_of(kind="refused"))


_RESHAPING = frozenset("t_ squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_".split())


def flat(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    return optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type, return-value]


def is_whole(x: ShardedTensor) -> bool:
    return not (real_axes(x.mesh, x.sharding.axes) or real_axes(x.mesh, x.sharding.partial))


def run(func: Any, mesh: Mesh, args: Any, kwargs: Any) -> Any:
    """Make the call; on a recorded mesh, which has no values, refuse one that depends on them."""
    if holds_values(mesh):
        with casting(func):
            return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as e:  # also NotImplementedError, its subclass
        if "meta" not in str(e).lower():
            raise
        raise on_shapes(func, mesh) from e


def each(func: Any, mesh: Mesh, leaves: list[Any], at: list[int], tree: Any) -> Any:
    """Call the function on every rank's blocks, one rank after the other.

    leaves[i] for i in ``at`` hold raw tensors.
    """
    if not lead(mesh):
        a, k = optree.tree_unflatten(tree, leaves)
        return run(func, mesh, a, k)
    found: list[Any] = []
    shape: Any = None
    writes = func in WRITERS and isinstance(leaves[at[0]], Tensor)
    # Simulated ranks share a storage, so autograd would treat rank 0's write as a change of rank
    # 1's saved tensor; write to clones.
    copies: list[Tensor] = []
    for rank in range(mesh.size):
        mine = list(leaves)
        for i in at:
            mine[i] = leaves[i][rank]
        if writes:
            copies.append(mine[at[0]].clone())
            mine[at[0]] = copies[-1]
        a, k = optree.tree_unflatten(tree, mine)
        with casting(func):
            answer = func(*a, **k)
        out, shape = optree.tree_flatten(answer, none_is_leaf=True)
        found.append(out)
    joined = []
    if writes:
        leaves[at[0]].copy_(torch.stack(copies))
    for values in zip(*found, strict=True):
        if writes and values[0] is copies[0]:
            joined.append(leaves[at[0]])
        elif isinstance(values[0], Tensor):
            blocks = [leaves[i] for i in at]
            same = _block_view(values, blocks)
            if same is not None and same.requires_grad and not values[0].requires_grad:
                same = same.detach()  # e.g. a view as another dtype, which is not differentiable
            joined.append(torch.stack(values) if same is None else same)
            for raw in (
                blocks if same is None else ()
            ):  # it shares memory with the operand, though not as one view of all ranks
                if isinstance(raw, Tensor) and same_memory(values[0], raw):
                    link(joined[-1], raw)
        elif any(v != values[0] and v == v for v in values):
            raise ShardError(
                "the ranks' answers differ", op=func.__name__, mesh=mesh, fix="sl.unshard(x)"
            )
        else:
            joined.append(values[0])
    return optree.tree_unflatten(shape, joined)


def _block_view(found: Any, blocks: list[Any]) -> Tensor | None:
    """Return the ranks' results as one view of all blocks, if they are the same view of each."""
    first = found[0]
    for raw in blocks:
        if (
            not isinstance(raw, Tensor)
            or not same_memory(first, raw)
            or first.is_neg() != raw.is_neg()
        ):
            continue
        shared = any(not s and n > 1 for s, n in zip(raw.stride(), raw.shape, strict=True))
        if shared and raw.requires_grad and is_half(raw):
            return None  # as_strided sums gradients of a shared element in half precision
        try:
            if raw.is_complex() and not first.is_complex():
                raw = torch.view_as_real(raw)
            elif first.is_complex() and not raw.is_complex():
                raw = torch.view_as_complex(raw)
            elif first.is_conj() != raw.is_conj():
                raw = raw.conj()
            starts = [first.storage_offset() + rank * raw.stride(0) for rank in range(len(found))]
            if (
                raw.dtype != first.dtype or [t.storage_offset() for t in found] != starts
            ):  # the offset depends on data, so ranks differ
                return None
            return raw.as_strided(
                (raw.shape[0], *first.shape),
                (raw.stride(0), *first.stride()),
                first.storage_offset(),
            )
        except RuntimeError:
            return None
    return None


def on_whole(
    func: Any, args: Any, kwargs: Any, refusal: Exception | None = None, opens: bool = True
) -> Any:
    """Run a call without an implementation, on whole tensors.

    ``opens`` False: its Python body need not be tried.
    """
    name = getattr(func, "__name__", str(func))
    if refusal is not None and func in (torch.autograd.grad, torch.autograd.backward):
        raise refusal  # autograd errors are not fixed by gathering
    if name in _NEVER or (
        name in ("__get__", "__set__", "__delete__") and _property(func) not in _VALUES
    ):
        raise refusal or no_implementation(func, args, kwargs)
    if isinstance(kwargs.get("out"), Tensor | tuple | list):
        return _into(func, args, kwargs)
    if any(
        isinstance(t, Tensor) and not isinstance(t, ShardedTensor)
        for t in (*written(func, args, kwargs), *_statistics(func, args, kwargs))
    ):
        return _on_plain(func, args, kwargs)
    if (
        refusal is None
        and opens
        and func
        not in scope().call.opened  # no second time if its body calls it again via a helper
        and name not in _PLAINLY
        and (body := opened(func)) is not None
    ):
        met = [x for x in flat(args, kwargs)[0] if isinstance(x, Tensor)]
        ours = [x for x in met if isinstance(x, ShardedTensor)]
        # tensors that the body creates are the same on every rank; given ones need not be
        for x in met if ours else ():
            check_met(x, ours[0].mesh, name)
        try:
            with casting(func), within(promoting=True, opened=(*scope().call.opened, func)):
                return body(*args, **kwargs)
        except (TypeError, AttributeError, NotImplementedError, ArithmeticError) as e:
            refusal = no_implementation(func, args, kwargs, f"{type(e).__name__} inside it: {e}")
    if draws(func, args, kwargs):
        raise Unsupported(
            "this draws random numbers from each rank's own generator, and the ranks' copies would "
            "differ",
            op=name,
            operands={
                "tensor": typeof(
                    next(x for x in flat(args, kwargs)[0] if isinstance(x, ShardedTensor))
                )
            },
            fix="torch.rand_like(x)",
        )
    flag = _SPARSE.get(name, len(args))
    if kwargs.get("sparse_grad") or kwargs.get("sparse") or (flag < len(args) and args[flag]):
        named = {k: v for k, v in kwargs.items() if k not in ("sparse_grad", "sparse")}
        raise _sparse(
            func, (*args[:flag], False, *args[flag + 1 :]) if flag < len(args) else args, named
        )
    if name in _RESHAPING:
        given = ", ".join([*map(repr, args[1:]), *(f"{k}={v!r}" for k, v in kwargs.items())])
        line = f"x = x.{name[:-1]}({given})"
        raise Unsupported(
            "a sharded tensor keeps its shape",
            op=name,
            operands={"tensor": typeof(args[0])},
            fix=line,
        )
    leaves, tree = flat(args, kwargs)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    ours = [leaves[i] for i in at if isinstance(leaves[i], ShardedTensor)]
    if not ours:
        raise refusal or no_implementation(func, args, kwargs)
    mesh = ours[0].mesh
    if name in ("__getitem__", "__setitem__"):  # torch accepts plain indices of any device
        values = [
            leaves[i] if isinstance(leaves[i], ShardedTensor) else replicated(leaves[i], mesh)
            for i in at
        ]
    else:
        values = [lift(leaves[i], mesh, name) for i in at]
    wholes = [v if not v.is_padded and is_whole(v) else None for v in values]
    bytes_ = {i: _bytes(v) for i, v, w in zip(at, values, wholes, strict=True) if w is None}
    apart = _APART.get(func)
    if (
        apart is not None
        and not (name in _UNDERIVED and torch.is_grad_enabled() and values[0].requires_grad)
        and isinstance(values[0], ShardedTensor)
        and any(bytes_.values())
    ):
        if (refused := torch_refuses(func, args, kwargs)) is not None:
            raise refused
        try:
            # a clone, since backward may read the values that are overwritten
            old = values[0].clone() if torch.is_grad_enabled() else values[0]
            # without autocast: in-place methods are not cast, though ``apart`` may be
            new = apart(old, *args[1:], **kwargs)
            narrows = old.is_complex() > new.is_complex() and new.dtype is not torch.bool
            if kwargs.get("dtype") not in (None, old.dtype) or narrows:
                raise BadArgument(
                    f"a result of dtype {new.dtype} is not written to a tensor of {old.dtype}",
                    op=name,
                    operands={"tensor": typeof(old)},
                    mesh=mesh,
                )
            return _stored(values[0], new, name)
        except BadArgument:
            raise
        except ShardError:
            pass  # try whole tensors
    budget = implicit_budget()
    if any(bytes_.values()) and (budget is None or max(bytes_.values()) > budget):
        if isinstance(refusal, ShardError) and not isinstance(refusal, NoImplementation):
            raise refusal
        raise _refused(func, name, leaves, tree, values, at, bytes_, refusal)
    moved = [_gathered(v) if w is None else w for v, w in zip(values, wholes, strict=True)]
    moved = written_to(func, args, kwargs, moved)
    deferred = frozenset().union(*(v.deferred for v in moved))
    per_rank = bool(deferred) and lead(mesh) > 0
    raws: list[Any] = []
    stats = _statistics(func, args, kwargs)
    targets = [*written(func, args, kwargs), *stats]
    for i, v, w in zip(at, moved, wholes, strict=True):
        raw = vary(v.raw, mesh, deferred - v.deferred) if deferred else v.raw
        if lead(mesh) and not per_rank:
            raw = _First.apply(raw)
        elif w is None and any(leaves[i] is t for t in targets):
            raw = raw.clone()  # autograd refuses writes to a view made by an autograd function
        raws.append(raw)
    quiet = [
        any(leaves[i] is t for t in (targets if raw.is_inference() else stats))
        for i, raw in zip(at, raws, strict=True)
    ]
    given = list(leaves)
    for i, raw in zip(at, raws, strict=True):
        given[i] = raw
    if per_rank:
        return _per_rank(func, name, given, at, tree, raws, values, moved, mesh, deferred, quiet)
    before = [(writes(r), r.grad_fn) for r in raws]
    a, k = optree.tree_unflatten(tree, given)
    out = run(func, mesh, a, k)
    # the result is a view: run again on the original blocks so that it shares memory
    if lead(mesh) and _viewing(out, raws, before):
        blocks = [m.raw for m in moved]
        for i, raw in zip(at, blocks, strict=True):
            given[i] = raw
        return replied(each(func, mesh, given, at, tree), blocks, values, mesh, deferred, True)
    for v, m, raw, old, unsaid in zip(values, moved, raws, before, quiet, strict=True):
        if unsaid or writes(raw) != old[0]:  # written to, in place or as out=
            with torch.set_grad_enabled(torch.is_grad_enabled() and raw.grad_fn is not old[1]):
                _write(v, m, raw, name, not lead(mesh))
    return replied(out, raws, values, mesh, deferred, per_rank)


def _on_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call that writes to a plain tensor, with plain and whole operands only.

    A plain tensor cannot hold a split result.
    """
    name = func.__name__
    stats = [t for t in _statistics(func, args, kwargs) if isinstance(t, Tensor)]
    targets = [*written(func, args, kwargs), *stats]
    leaves, tree = flat(args, kwargs)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    ours = {i: leaves[i] for i in at if isinstance(leaves[i], ShardedTensor)}
    if not ours:
        return func(*args, **kwargs)
    mesh = next(iter(ours.values())).mesh
    for t in targets:
        check_met(t, mesh, name)
        if isinstance(t, ShardedTensor):
            raise PlainTensor(
                "plain and sharded tensors are written to in one call",
                op=name,
                operands={"x": typeof(t)},
                mesh=mesh,
                fix="sl.unshard(x)",
            )
    cost = max(map(_bytes, ours.values()))
    if cost > (implicit_budget() or 0):
        raise ImplicitCommunication(
            f"a plain tensor is written to, and {cost:.0f} bytes per rank would move unasked",
            op=name,
            operands={"xyzuvw"[k % 6]: typeof(leaves[i]) for k, i in enumerate(at)},
            mesh=mesh,
            fix=fix_line(func, leaves, tree, at, {}, math.ceil(cost)),
        )
    if not holds_values(mesh):
        return args[0] if args else targets[0]
    for i, x in ours.items():
        leaves[i] = unshard(x)
    a, k = optree.tree_unflatten(tree, leaves)
    with casting(func):
        return func(*a, **k)


def _into(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call with ``out=``: copy the result to the target."""
    out, rest = kwargs["out"], {k: v for k, v in kwargs.items() if k != "out"}
    if (refused := torch_refuses(func, args, kwargs)) is not None:
        raise refused
    with casting(func):
        result = func(*args, **rest)
    pairs = [(out, result)] if isinstance(out, Tensor) else list(zip(out, result, strict=True))
    for target, value in pairs:
        tracked = [
            t for t in (*flat(args, rest)[0], target) if isinstance(t, Tensor) and t.requires_grad
        ]
        if torch.is_grad_enabled() and tracked:
            raise BadArgument(
                "arguments given as out= have no gradient, and an operand asks for one",
                op=func.__name__,
            )
        if target.dtype != value.dtype and torch.can_cast(value.dtype, target.dtype):
            raise Unsupported(
                "some functions cast what they write to out=, and some do not",
                op=func.__name__,
                operands={"out": typeof(target), "result": typeof(value)},
                fix=f"out.copy_({_again(func, args, rest)})",
            )
        try:
            _stored(target, value, func.__name__)
        except ImplicitCommunication:
            leaves, tree = flat(args, kwargs)
            at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
            cost = (value.sharding >> target.sharding).bytes(
                tuple(value.padded_shape), value.mesh, value.raw.element_size()
            )
            raise ImplicitCommunication(
                f"the result lies otherwise than where it is written, and {float(cost):.0f} bytes "
                "per rank would move "
                "unasked",
                op=func.__name__,
                operands={"out": typeof(target), "result": typeof(value)},
                mesh=value.mesh,
                fix=fix_line(func, leaves, tree, at, {}, math.ceil(cost)),
            ) from None
    if isinstance(out, Tensor):
        return out
    return None if func.__name__ in _SILENT else type(result)(out)


_SILENT = frozenset("split_copy split_with_sizes_copy unbind_copy".split())
"""Functions that return None when they write to ``out=``."""


def _again(func: Any, args: Any, kwargs: Any) -> str:
    """Write the call as a line of code."""
    leaves, tree = flat(args, kwargs)
    return fix_line(
        func, leaves, tree, [i for i, x in enumerate(leaves) if isinstance(x, Tensor)], {}, 0
    )


def _stored(x: Any, value: Any, op: str) -> Any:
    """Copy a call's result into ``x``.  Raises: PlainTensor, BadArgument."""
    if not isinstance(x, ShardedTensor) or not isinstance(value, ShardedTensor):
        raise PlainTensor(
            "a plain tensor cannot take a sharded value", op=op, fix="x = sl.shard(x, '...')"
        )
    if x.shape != value.shape or not torch.can_cast(value.dtype, x.dtype):
        raise BadArgument(
            f"a result of shape {list(value.shape)} and dtype {value.dtype} cannot be written to "
            "this tensor",
            op=op,
            operands={"tensor": typeof(x), "result": typeof(value)},
            mesh=x.mesh,
        )
    return x.copy_(value)


_APART = {
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


def _per_rank(
    func: Any, name: str, given: list[Any], at: list[int], tree: Any, raws: list[Tensor],
    values: Any, moved: Any, mesh: Mesh, deferred: Any, quiet: list[bool],
) -> Any:  # fmt: skip
    """Run simulated ranks whose gradients differ one after the other, each on copies.

    So an in-place write of one rank does not invalidate another's saved tensors.
    """
    copies = [[r[rank].clone() for rank in range(mesh.size)] for r in raws]

    def one(*blocks: Any, **more: Any) -> Any:
        with casting(func):
            out = func(*blocks, **more)
        return optree.tree_map(
            lambda t: next(
                (_SameAsOperand(k) for k, c in enumerate(copies) if any(t is x for x in c)), t
            ),
            out,
            none_is_leaf=True,
        )

    before = [[writes(c) for c in mine] for mine in copies]
    leaves = list(given)
    for i, mine in zip(at, copies, strict=True):
        leaves[i] = mine
    out = each(one, mesh, leaves, at, tree)
    for v, m, mine, old, unsaid in zip(values, moved, copies, before, quiet, strict=True):
        if unsaid or [writes(c) for c in mine] != old:
            _write(v, m, torch.stack(mine), name, True)
    out = optree.tree_map(
        lambda t: values[t.at] if isinstance(t, _SameAsOperand) else t, out, none_is_leaf=True
    )
    return replied(out, raws, values, mesh, deferred, True)


def _viewing(out: Any, raws: list[Tensor], before: list[Any]) -> bool:
    found = [t for t in optree.tree_leaves(out) if isinstance(t, Tensor)]  # type: ignore[arg-type]
    views = any(t is not r and same_memory(t, r) for t in found for r in raws)
    return views and all(writes(r) == old[0] for r, old in zip(raws, before, strict=True))


class _SameAsOperand:
    """Marker of a result that is an operand."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameAsOperand) and other.at == self.at

    __hash__ = None  # type: ignore[assignment]


def _sparse(func: Any, args: Any, kwargs: Any) -> Unsupported:
    """Return the refusal of sparse gradients, with the call without them as the fix."""
    leaves, tree = flat(args, kwargs)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    whole = {i: "..." for i in at if isinstance(leaves[i], ShardedTensor)}
    return Unsupported(
        "sparse gradients",
        op=func.__name__,
        operands=lettered(typeof(leaves[i]) for i in at),
        fix=fix_line(func, leaves, tree, at, whole, 0),
    )


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


def _statistics(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """List the running statistics that a call writes to."""
    at = _STATISTICS.get(func)
    if at is None:
        return []
    flag = "use_input_stats" if "instance" in func.__name__ else "training"
    default = func is not F.batch_norm
    if not (args[5] if len(args) > 5 else kwargs.get(flag, default)):
        return []
    return [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]


# not opened: their bodies draw plain tensors from each rank's own generator
_PLAINLY = frozenset("pca_lowrank svd_lowrank".split())


_VALUES = frozenset("real imag H mH".split())


def _property(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _bytes(x: ShardedTensor) -> float:
    size = tuple(x.padded_shape)
    return float(
        (x.sharding >> Layout.parse("...").resolve(len(size))).bytes(
            size, x.mesh, x.raw.element_size()
        )
    )


def _gathered(x: ShardedTensor) -> ShardedTensor:
    if x.is_padded:
        whole = reshard(x.with_padding, "...")[tuple(slice(n) for n in x.shape)]
        return whole.becomes(whole.raw.contiguous())
    whole = reshard(x, "...")
    return (
        whole if whole is x or whole.raw.is_contiguous() else whole.becomes(whole.raw.contiguous())
    )


def _write(x: ShardedTensor, moved: ShardedTensor, raw: Tensor, name: str, ranks: bool) -> None:
    """Reshard a written copy back to the tensor's own layout.

    ``ranks``  the copy holds every rank's.
    """
    mesh = x.mesh
    if raw is moved.raw and moved is x:
        return
    refuse_write(x.raw, name, {"tensor": typeof(x)}, mesh)
    refuse_overlap(x.raw, name, {"tensor": typeof(x)}, mesh)
    front = lead(mesh) if ranks else 0
    if tuple(raw.shape[front:]) != tuple(moved.padded_shape):
        what = {"tensor": typeof(x)}
        raise Unsupported(
            "a tensor changed its shape in place", op=name, operands=what, fix="x = f(x)"
        )
    if raw is moved.raw:
        new = moved
    else:
        full = raw if front or not lead(mesh) else _Copies.apply(raw, mesh.size)
        new = ShardedTensor(
            full,
            Place(
                Layout.parse("...").resolve(len(x.padded_shape)),
                moved.padded_shape,
                mesh,
                deferred=moved.deferred,
            ),
        )  # type: ignore[arg-type]
    if x.is_padded:
        pairs = zip(reversed(x.padded_shape), reversed(x.shape), strict=True)
        filled = F.pad(new.raw, [k for n, m in pairs for k in (0, n - m)])
        new = new.becomes(filled, shape=x.padded_shape)
    if x.sharding.partial:
        new = reshard(new, x.sharding)
    x.raw.copy_(reshard(new, x.sharding).raw)


def written_to(func: Any, args: Any, kwargs: Any, values: list[Any]) -> list[Any]:
    """End deferrals of operands that are written to tensors without that deferral.

    Such a tensor keeps its place, and so the form of its cotangent.
    """
    if all(not v.deferred for v in values) or not (targets := written(func, args, kwargs)):
        return values
    kept = frozenset().union(*(t.deferred for t in targets if isinstance(t, ShardedTensor)))
    return [v if v.deferred <= kept else settle(v) for v in values]


def replied(
    out: Any, raws: list[Any], values: list[Any], mesh: Mesh, deferred: Any, per_rank: bool
) -> Any:
    """Wrap whole results as sharded tensors; a returned operand is returned as that operand."""

    def back(t: Any) -> Any:
        if not isinstance(t, Tensor) or isinstance(t, ShardedTensor):
            return t
        for raw, v in zip(raws, values, strict=True):
            if t is raw:
                return v
        if t.layout != torch.strided:
            raise Unsupported(f"a {t.layout} result", op="torch", fix="sl.unshard(x)")
        full: Any = t if per_rank or not lead(mesh) else _Copies.apply(t, mesh.size)
        shape = full.shape[lead(mesh) :]
        new = ShardedTensor(
            full,
            Place(
                Layout.parse("...").resolve(len(shape)), torch.Size(shape), mesh, deferred=deferred
            ),
        )
        for raw, v in zip(raws, values, strict=True):
            if alike(t, raw):
                link(full, v.raw)
        return new

    return optree.tree_map(back, out, none_is_leaf=True)


def _refused(
    func: Any, name: str, leaves: list[Any], tree: Any, values: list[Any], at: list[int],
    bytes_: dict[int, float], refusal: Any,
) -> ShardError:  # fmt: skip
    if isinstance(refusal, ShardError) and refusal.fix not in ("", "sl.unshard(x)"):
        return refusal
    whole = {i: "..." for i in bytes_}
    return ImplicitCommunication(
        f"{name} needs whole operands, and {sum(bytes_.values()):.0f} bytes per rank would move "
        "unasked",
        op=name,
        operands=lettered(map(typeof, values)),
        mesh=values[0].mesh,
        fix=fix_line(func, leaves, tree, at, whole, math.ceil(max(bytes_.values()))),
    )


def fix_line(
    func: Any, leaves: list[Any], tree: Any, at: list[int], to: dict[int, str], most: int
) -> str:
    """Return the call with its operands named x, y, z, ..., as a line that runs."""
    names = {i: name for name, i in lettered(at).items()}
    below = type(func).__name__.startswith("OpOverload")  # whose name torch gives without its home
    title = _title(func) if below else torch.overrides.resolve_name(func) or _title(func)
    writes = (
        (title.endswith("_") and not title.endswith("__")) or ".__i" in title or "setitem" in title
    )
    parts = []
    for i, x in enumerate(leaves):
        if i in names:
            parts.append(
                _Text(names[i] if writes or i not in to else f"sl.reshard({names[i]}, {to[i]!r})")
            )
        else:
            parts.append(_Text(_written(x)))
    a, k = optree.tree_unflatten(tree, parts)
    if title.rpartition(".")[2] in _SPREAD and len(a) == 1 and isinstance(a[0], tuple | list):
        a = a[0]  # torch's Python wrapper passes its tensors on as one sequence
    line = f"{title}({', '.join([*map(_text, a), *(f'{n}={_text(v)}' for n, v in k.items())])})"
    return f"with sl.implicit({most}): {line}" if writes or "out" in k else line


_SPREAD = frozenset("block_diag broadcast_tensors cartesian_prod meshgrid".split())


def _title(func: Any) -> str:
    """Return the qualified name of a function that torch.overrides does not list."""
    name = getattr(func, "__name__", "f")
    if type(func).__name__.startswith("OpOverload"):  # torch.ops.aten.f.default
        return f"torch.ops.{func!s}"
    if (
        inspect.isbuiltin(func) and getattr(torch, name, func) is not func and name not in _SPREAD
    ):  # torch's function of this name is in Python, and takes
        return f"torch.ops.aten.{name}"  # other arguments than the aten function that it calls
    module = getattr(func, "__module__", None) or "torch"
    return f"{module}.{name}" if module.startswith("torch") else f"torch.{name}"


class _Text(str):
    __slots__ = ()


def _text(x: Any) -> str:
    if isinstance(x, _Text):
        return str(x)
    if isinstance(x, list):
        return f"[{', '.join(map(_text, x))}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))}{',' if len(x) == 1 else ''})"
    return repr(x)


def _written(x: Any) -> str:
    text = repr(x)
    return (
        text
        if not text.startswith("<") and text not in ("inf", "nan", "-inf")
        else f"float({text!r})"
    )


FALLBACK.append(on_whole)
