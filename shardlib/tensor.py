"""ShardedTensor: a tensor with a global shape, a layout, and this rank's block inside.

It subclasses ``torch.Tensor`` only so that modules accept it.  Every torch function on it is
looked up in ``TABLE``, which the files under ``ops/`` fill; autograd is recorded on the local
block ``raw``, so nothing is dispatched again on the way back.

Gradients in the global view have their value's own layout: a split value has a split
cotangent, a replicated value a replicated one, and a pending sum (``+ sum(x)``) a replicated
one.  Where a replicated operand meets data that differs along a mesh axis, ``vary`` marks the
place, and its transpose is the psum that makes the gradient whole again.
"""

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib._compat import (
    Local,
    any_autocast,
    backward_now,
    begins_forward_ad,
    is_dtensor,
    may_swap_data,
    no_torch_function,
    under_transform,
)
from shardlib.aliases import LINKS, WRITERS, refuse_write, written
from shardlib.autocast import cast
from shardlib.collectives import Stacked, psum, unwrap, wrap
from shardlib.errors import (
    BadArgument,
    NoRule,
    OutOfRange,
    PartialEscape,
    PlainTensor,
    RankMismatch,
    ShardError,
    Unsupported,
    lettered,
)
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, bind, scope, within

__all__ = ["TABLE", "ShardedTensor", "block_strides", "implements", "is_dense", "layout_of", "promoting", "typeof"]

Rule = Callable[..., Any]

TABLE: dict[Any, Rule] = {}
"""torch function -> rule(func, args, kwargs).  Filled by ``implements`` in the files of ops/."""

PADDED: dict[Any, Rule] = {}
"""The same for padded tensors; filled by ops/padding.py."""

_ANYWHERE: set[Any] = set()
"""Functions whose rule in TABLE serves padded tensors too."""

FALLBACK: list[Rule] = []
"""At most one rule for every other function; see dtensor.py."""


_UNCAST: set[Any] = set()
"""Functions that look at a tensor and compute nothing: autocast does not concern them."""

_NONE: frozenset[str] = frozenset()


def implements(*funcs: Any) -> Callable[[Rule], Rule]:
    """Register one rule for torch functions (``torch.add``, ``Tensor.add``, ...); two for one are an error."""

    def enter(rule: Rule) -> Rule:
        for func in dict.fromkeys(funcs):
            if func in TABLE:
                raise ValueError(f"{func} has two rules: {TABLE[func]} and {rule}")
            TABLE[func] = rule
        return rule

    return enter


class ShardedTensor(torch.Tensor):
    """A global tensor of which this process holds one block (under simulate: all of them).

    ``raw``       the storage: the local block, or all blocks ``[ranks, *local]`` under simulate.
    ``local``     the local block as per-device code sees it; never a copy.
    ``sharding``  its Layout.     ``mesh``  its Mesh.
    ``deferred``  mesh axes over which a replicated value's gradient is left unsummed.
    ``yields``    the layout that a product with this weight must give, if it matters.
    ``folded``    of a matrix whose rows were several dimensions until a view: their sizes.
    ``node``      what ``grad_fn`` is where hooks on it must see values, see functions.py.
    ``moved``     what was made of the value once, for all that read it: see ``once``.
    """

    raw: Tensor
    sharding: Layout
    mesh: Mesh
    deferred: frozenset[str]
    yields: Layout | None = None
    folded: tuple[int, ...] | None = None
    node: Any = None
    moved: "_Made | None" = None

    @staticmethod
    def __new__(
        cls: type,
        raw: Tensor,
        layout: Layout,
        shape: torch.Size,
        mesh: Mesh,
        deferred: frozenset[str] = _NONE,
    ) -> "ShardedTensor":
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=raw.dtype, device=raw.device)
        self.raw, self.sharding, self.size_, self.mesh, self.deferred = raw, layout, shape, mesh, deferred
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def local(self) -> Tensor:
        """This rank's block, without a copy."""
        return wrap(self.raw, self.mesh)

    # Asked for at every turn, and a question to __torch_function__ costs 1.5 us.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.size_

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self.size_)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.raw.dtype

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.raw.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.raw.requires_grad = value

    def like(self, raw: Tensor) -> "ShardedTensor":
        """The same place and shape with another block."""
        return ShardedTensor(raw, self.sharding, self.size_, self.mesh, self.deferred)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = TABLE.get(func, _unknown)
        if LINKS:
            _check_writes(func, args, kwargs or {})
        if kwargs and kwargs.get("out") is not None:
            return FALLBACK[0](func, args, kwargs)  # which writes it
        if func in WRITERS and not _writes_ours(func, args, kwargs or {}):
            return FALLBACK[0](func, args, kwargs or {})
        if (watcher := scope().watcher) is not None:
            rule = partial(watcher, _guarded(rule))
        if any_autocast() and func not in _UNCAST:
            return cast(_guarded(rule), func, args, kwargs or {}, composite=func not in TABLE)
        try:
            return rule(func, args, kwargs or {})
        except _MENDED as e:
            return _otherwise(e, func, args, kwargs or {})
        except RuntimeError as e:
            if name := under_transform():
                raise no_transform(name) from e
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NoRule(
            f"{func} reached a ShardedTensor below its rules (torch.func transforms and C++ code do that)",
            op=str(func),
            operands={"x": next(typeof(v) for v in _leaves((args, kwargs or {})) if isinstance(v, ShardedTensor))},
            fix="sl.unshard(x)",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedTensor({typeof(self)} on {self.mesh}\n{self.local!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        if id(self) not in memo:
            memo[id(self)] = _keep_kind(self, self.like(copy.deepcopy(self.raw, memo)))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.mesh.kind == "dist":
            raise ShardError(
                "a block of a running job cannot be pickled as the whole tensor",
                op="pickle",
                operands={"tensor": typeof(self)},
                mesh=self.mesh,
                fix="sl.unshard(x)",
            )
        parts = (self.raw.detach(), str(self.sharding), tuple(self.size_), dict(self.mesh.axes), self.mesh.kind)
        return _unpickle, (*parts, self.raw.requires_grad, isinstance(self, torch.nn.Parameter))


class PaddedTensor(ShardedTensor):
    """A tensor whose sizes do not divide: blocks are padded, and the true sizes are remembered.

    ``shape`` is the true shape, ``size_`` the padded one.  What the padding holds is never
    read: reductions and contractions mask it, ``unshard`` strips it (ops/padding.py).
    """

    true: torch.Size

    @staticmethod
    def __new__(
        cls: type, raw: Tensor, layout: Layout, size: torch.Size, mesh: Mesh, true: torch.Size
    ) -> "PaddedTensor":
        self = torch.Tensor._make_wrapper_subclass(cls, true, dtype=raw.dtype, device=raw.device)
        self.raw, self.sharding, self.size_, self.mesh, self.deferred = raw, layout, size, mesh, _NONE
        self.true = true
        return self

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.true

    @property
    def inner(self) -> ShardedTensor:
        """The padded blocks as an ordinary value."""
        return ShardedTensor(self.raw, self.sharding, self.size_, self.mesh)

    def like(self, raw: Tensor) -> "PaddedTensor":
        return PaddedTensor(raw, self.sharding, self.size_, self.mesh, self.true)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = PADDED.get(func) or (TABLE[func] if func in _ANYWHERE else None)
        if LINKS:
            _check_writes(func, args, kwargs or {})
        if kwargs and kwargs.get("out") is not None:
            return FALLBACK[0](func, args, kwargs)  # which writes it
        if func in WRITERS and not _writes_ours(func, args, kwargs or {}):
            return FALLBACK[0](func, args, kwargs or {})
        if rule is not None and any_autocast() and func not in _UNCAST:
            rule = partial(cast, rule)
        x = next(a for a in _leaves((args, kwargs or {})) if isinstance(a, PaddedTensor))
        try:
            if rule is not None:
                return rule(func, args, kwargs or {})
        except _MENDED as e:
            return _otherwise(e, func, args, kwargs or {})
        if FALLBACK:
            try:
                return FALLBACK[0](func, args, kwargs or {}, None)
            except ShardError:
                pass
        raise Unsupported(
            f"{func.__name__} has no rule for padded blocks",
            op=func.__name__,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix="sl.shard(sl.unshard(x), '...')",
        )


def _writes_ours(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all that the call writes to is sharded."""
    return all(isinstance(t, ShardedTensor) for t in written(func, args, kwargs))


def _check_writes(func: Any, args: Any, kwargs: Any) -> None:
    for x in written(func, args, kwargs):
        if isinstance(x, ShardedTensor):
            refuse_write(x.raw, func.__name__, {"tensor": typeof(x)}, x.mesh)


_MENDED = (NoRule, Unsupported, PartialEscape, RankMismatch, TypeError, AttributeError, IndexError, NotImplementedError)
"""What a rule may refuse with where whole operands would do."""


def _otherwise(refusal: Exception, func: Any, args: Any, kwargs: Any) -> Any:
    """A refused call on whole operands, if they are whole or may be gathered; else the refusal."""
    of_autograd = func is Tensor.backward or getattr(func, "__module__", "") == "torch.autograd"
    if not FALLBACK or of_autograd or getattr(refusal, "final", False):
        raise refusal
    try:
        return FALLBACK[0](func, args, kwargs, refusal)
    except ShardError as e:
        told = refusal if isinstance(refusal, ShardError) else e
        bad = None if isinstance(told, BadArgument) else torch_refuses(func, args, kwargs)
        told = told if bad is None else bad
        told.final = True  # type: ignore[attr-defined]
        raise told from None


def torch_refuses(func: Any, args: Any, kwargs: Any) -> BadArgument | None:
    """The error for a call that no layout would mend: torch refuses it on tensors of these shapes and dtypes.

    It is asked on meta tensors, which hold no values: what hangs on values raises NotImplementedError there, or
    says so.  They have no graph either, so functions of autograd are not asked.
    """
    if getattr(func, "__module__", "") == "torch.autograd" or func is Tensor.backward:
        return None

    def bare(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    leaves, tree = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    a, k = optree.tree_unflatten(tree, [bare(x) for x in leaves])
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*a, **k)
    except (NotImplementedError, RecursionError):
        return None
    except (IndexError, ValueError, TypeError, RuntimeError) as e:
        text = str(e).partition("\n")[0]
        if "meta" in text.lower() or "data-dependent" in text or "data_ptr" in text:
            return None
        found = [x for x in leaves if isinstance(x, ShardedTensor)]
        kind = OutOfRange if isinstance(e, IndexError) else BadArgument
        return kind(
            f"torch refuses this call: {text}",
            op=getattr(func, "__name__", str(func)),
            operands={f"operand {i}": typeof(x) for i, x in enumerate(found)},
            mesh=found[0].mesh if found else None,
        )
    return None


def _guarded(rule: Rule) -> Rule:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return rule(func, args, kwargs)
        except _MENDED as e:
            return _otherwise(e, func, args, kwargs)

    return run


def _unpickle(
    raw: Tensor, layout: str, shape: tuple[int, ...], axes: dict[str, int], kind: str, grad: bool, param: bool
) -> ShardedTensor:
    mesh = Mesh(axes, kind=kind)  # type: ignore[arg-type]
    x = ShardedTensor(raw.requires_grad_(grad), Layout.parse(layout), torch.Size(shape), mesh)
    return torch.nn.Parameter(x, requires_grad=grad) if param else x  # type: ignore[return-value]


def _keep_kind(old: ShardedTensor, new: ShardedTensor) -> ShardedTensor:
    """A copy of an nn.Parameter is an nn.Parameter."""
    if isinstance(old, torch.nn.Parameter):
        new._is_param = True  # type: ignore[attr-defined]
    return new


# ---------------------------------------------------------------- types as text


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def typeof(x: Tensor) -> str:
    """Dtype, global sizes and the axes that split them, as ``f32[512@x, 512@y]``.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     sl.typeof(sl.shard(torch.zeros(4, 6), "x y"))
    'f32[4@x, 6@y]'
    >>> sl.typeof(torch.zeros(3))
    'f32[3]'
    """
    if is_dtensor(x):
        x = ShardedTensor(torch.empty(0, dtype=x.dtype, device="meta"), Layout.from_dtensor(x), x.shape, None)  # type: ignore[arg-type]
    if not isinstance(x, ShardedTensor):
        return f"{_SHORT.get(x.dtype, str(x.dtype))}[{', '.join(map(str, x.shape))}]"
    dims = x.sharding.resolve(len(x.size_)).dims
    shape = x.true if isinstance(x, PaddedTensor) else x.size_
    body = ", ".join(f"{n}@{d}" if d.is_split else str(n) for n, d in zip(shape, dims, strict=True))
    tail = f"{{sum:{' '.join(x.sharding.partial)}}}" if x.sharding.partial else ""
    skew = f"{{skew:{x.sharding.skew}}}" if x.sharding.skew else ""
    padded = f"{{padded:{list(x.size_)}}}" if isinstance(x, PaddedTensor) else ""
    return f"{_SHORT.get(x.raw.dtype, str(x.raw.dtype))}[{body}]{tail}{skew}{padded}"


def layout_of(x: Tensor) -> Layout:
    """The layout of a sharded tensor or DTensor.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     sl.layout_of(sl.shard(torch.zeros(4, 6), "x ."))
    Layout('x .')
    """
    if isinstance(x, ShardedTensor):
        return x.sharding
    if is_dtensor(x):
        return Layout.from_dtensor(x)
    raise PlainTensor(
        "a plain tensor has no layout", op="layout_of", operands={"tensor": typeof(x)}, fix='sl.shard(x, "...")'
    )


# ---------------------------------------------------------------- what rules are made of


def local_call(func: Any, mesh: Mesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on the local blocks: ``args`` hold raw tensors, so does the result."""
    if mesh.kind != "stacked":
        return func(*args, **kwargs)
    out = func(*[_lift(a, mesh) for a in args], **{k: _lift(v, mesh) for k, v in kwargs.items()})
    return _lower(out)


def _lift(x: Any, mesh: Mesh) -> Any:
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return wrap(x, mesh)
    return type(x)(_lift(v, mesh) for v in x) if type(x) in (tuple, list) else x


def _lower(x: Any) -> Any:
    if isinstance(x, Stacked):
        return unwrap(x)
    return type(x)(_lower(v) for v in x) if type(x) in (tuple, list) else x


class Wide:
    """The gradient of a half precision value, in fp32 until it is summed and rounded once.

    Autograd carries gradients in their value's dtype.  Products that read one value add theirs here instead and
    hand autograd none; the node that sums runs after all of them, and takes what this backward added.
    """

    __slots__ = ("sum", "task")

    def __init__(self) -> None:
        self.task, self.sum = -1, None

    def add(self, g: Tensor) -> None:
        """``g`` in fp32, not used elsewhere."""
        task = backward_now()
        if self.task == task and self.sum is not None:
            self.sum += g
        else:  # what a backward left here that did not ask for this gradient is void
            self.task, self.sum = task, g

    def take(self, g: Tensor | None) -> Tensor | None:
        """All that was added, and what came by autograd."""
        mine = self.sum if self.task == backward_now() else None
        self.task, self.sum = -1, None
        if mine is None or g is None:
            return g if mine is None else mine
        return mine.add_(g)


def is_half(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


class _Vary(Local):
    """Identity; the gradient is summed over ``axes``."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], wide: Wide | None = None) -> Tensor:
        ctx.mesh, ctx.axes, ctx.wide, ctx.dtype = mesh, axes, wide, raw.dtype
        ctx.set_materialize_grads(False)
        return raw.view_as(raw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        g = grads[0] if ctx.wide is None else ctx.wide.take(grads[0])
        if g is None:
            return None, None, None, None
        half = ctx.dtype in (torch.bfloat16, torch.float16)  # its parts travel as they are and are summed in fp32
        g = _Sum.apply(g.float() if half else g, ctx.mesh, ctx.axes, ctx.dtype if half else None)
        return g, None, None, None


class _Sum(Local):
    """psum whose result is the same on every rank, and so is its cotangent: backward is the identity."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], narrow: torch.dtype | None = None) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        with bind(mesh):
            out = unwrap(psum(wrap(raw, mesh), axes, out=narrow, wire=narrow))
        return out if out.numel() else out.clone()  # nothing was sent, and autograd lets no one write to an alias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Vary.apply(grads[0], ctx.mesh, ctx.axes), None, None, None


class _Share(Local):
    """Identity; the gradient is divided by the number of ranks that all return it."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor, count: int) -> Tensor:
        ctx.count = count
        return raw.view_as(raw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.count, None


def vary(raw: Tensor, mesh: Mesh, axes: Collection[str]) -> Tensor:
    """Mark a value that is the same along ``axes`` as meeting data that is not.

    Identity forward; backward is one psum over ``axes``.
    """
    over = real_axes(mesh, axes)
    return _Vary.apply(raw, mesh, over) if over and raw.requires_grad else raw  # type: ignore[return-value]


_SERIAL = itertools.count()


class _Made:
    """What was made of a value's blocks, and of which: an entry is void once they changed in place."""

    __slots__ = ("found", "raw", "serial", "tracked", "version")

    def __init__(self, raw: Tensor, tracked: bool) -> None:
        self.raw, self.version, self.tracked = raw, raw._version, tracked
        self.found: dict[Any, Any] = {}
        self.serial = next(_SERIAL)

    def fits(self, raw: Tensor, tracked: bool) -> bool:
        return self.raw is raw and self.version == raw._version and self.tracked == tracked


def made_of(x: ShardedTensor) -> dict[Any, Any]:
    """What was made of ``x`` as it is now, by key; empty where changes in place cannot be seen."""
    raw = x.raw
    if raw.is_inference():
        return {}
    tracked = raw.requires_grad and torch.is_grad_enabled()
    if x.moved is None or not x.moved.fits(raw, tracked):
        x.moved = _Made(raw, tracked)
    return x.moved.found


def varied(x: ShardedTensor, axes: Collection[str]) -> Tensor:
    """``vary`` of a value, made once: all that read it so add their gradients before the one psum."""
    return varied_wide(x, axes)[0]


def varied_wide(x: ShardedTensor, axes: Collection[str]) -> tuple[Tensor, Wide | None]:
    """The same, and where products of half precision add their gradients in fp32."""
    over = real_axes(x.mesh, axes)
    if not (over and x.raw.requires_grad and torch.is_grad_enabled()):
        return x.raw, None
    found = made_of(x)
    key = ("vary", over)
    if key not in found:
        wide = Wide() if is_half(x.raw) else None
        found[key] = _Vary.apply(x.raw, x.mesh, over, wide), wide
    return found[key]


def widened(raws: Sequence[Tensor | None], mesh: Mesh, overs: Sequence[Collection[str]]) -> list[Tensor | None]:
    """``vary`` of several values, and in fp32 of half precision ones, whose gradients come together.

    Those summed over the same axes travel in one psum; half precision is summed wide, and rounded as it travels
    and once.
    """
    met = [
        real_axes(mesh, over) if over and t is not None and t.requires_grad else ()
        for t, over in zip(raws, overs, strict=True)
    ]
    out = [t.float() if t is not None and not over and is_half(t) else t for t, over in zip(raws, met, strict=True)]
    left = [i for i, over in enumerate(met) if over]
    while left:
        first = raws[left[0]]
        alike = [i for i in left if met[i] == met[left[0]] and raws[i].dtype == first.dtype]  # type: ignore[union-attr]
        found = _VaryAll.apply(mesh, met[left[0]], *[raws[i] for i in alike])
        for i, t in zip(alike, found, strict=True):  # type: ignore[arg-type]
            out[i] = t
        left = [i for i in left if i not in alike]
    return out


class _VaryAll(Local):
    """apply(mesh, axes, *raws): each as it is, half precision in fp32; their gradients are summed in one psum."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, axes: tuple[str, ...], *raws: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.axes, ctx.narrow = mesh, axes, raws[0].dtype if is_half(raws[0]) else None
        ctx.set_materialize_grads(False)
        return tuple(raw.view_as(raw) if ctx.narrow is None else raw.float() for raw in raws)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        mesh, came = ctx.mesh, [g for g in grads if g is not None]
        if not came:
            return None, None, *grads
        if len(came) == 1:
            sums = [_Sum.apply(came[0], mesh, ctx.axes, ctx.narrow)]
        else:
            lead = mesh.kind == "stacked"
            flat = [g.flatten(1) if lead else g.flatten() for g in came]
            both: Any = _Sum.apply(torch.cat(flat, -1), mesh, ctx.axes, ctx.narrow)
            parts = both.split([f.shape[-1] for f in flat], -1)
            sums = [part.reshape(g.shape) for part, g in zip(parts, came, strict=True)]
        found = iter(sums)
        return None, None, *(None if g is None else next(found) for g in grads)


def total(raw: Tensor, mesh: Mesh, axes: Collection[str], narrow: torch.dtype | None = None) -> Tensor:
    """Sum over ``axes``; the result is replicated and so is its cotangent.

    ``narrow``  the dtype of what travels and of the result, where raw is wider.
    """
    over = real_axes(mesh, axes)
    if over:
        return _Sum.apply(raw, mesh, over, narrow)  # type: ignore[return-value]
    return raw if narrow is None else raw.to(narrow)


def vjp_again(
    f: Callable[..., Tensor], mesh: Mesh, inputs: Sequence[Tensor | None], overs: Sequence[Collection[str]], g: Tensor
) -> list[Tensor | None]:
    """The gradients of f(*inputs) as functions that can be differentiated again; for backward in grad mode.

    ``inputs``  saved raw inputs (their graph goes on), ``overs`` the axes over which each one's is summed.
    """
    met = [None if t is None else vary(t, mesh, over) for t, over in zip(inputs, overs, strict=True)]
    need = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(f(*met), need, g, create_graph=True, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def real_axes(mesh: Mesh, axes: Collection[str]) -> tuple[str, ...]:
    """The axes of more than one rank, in the mesh's order: every rank must name them in the same one."""
    return tuple(a for a in mesh.names if a in axes and mesh.axes[a] > 1) if axes else ()


def settle(x: ShardedTensor) -> ShardedTensor:
    """End a deferral: from here on the value's cotangent is replicated again."""
    if not x.deferred:
        return x
    count = 1
    for axis in x.deferred:
        count *= x.mesh.axes[axis]
    return ShardedTensor(_Share.apply(x.raw, count), x.sharding, x.size_, x.mesh)  # type: ignore[arg-type]


# ---------------------------------------------------------------- plain tensors among sharded ones


def promoting() -> within:
    """Within it, plain tensors that a sharded one meets count as the same on every rank."""
    return within(promoting=True)


def check_met(x: Any, mesh: Mesh, op: str) -> None:
    """Refuse an operand on another mesh, and a plain one outside ``promoting`` unless it is a scalar."""
    if isinstance(x, ShardedTensor):
        if x.mesh is not mesh:
            raise ShardError(
                "operands live on different meshes",
                op=op,
                operands={"mesh": str(mesh), "x": typeof(x), "of": f"another mesh, {x.mesh}"},
                fix="sl.shard(sl.unshard(x), '...', mesh=mesh)",
            )
    elif x.ndim > 0 and not scope().promoting:
        raise PlainTensor(
            "a plain tensor met a sharded one, and nothing says where its data sits",
            op=op,
            operands={"t": typeof(x)},
            mesh=mesh,
            fix='sl.shard(t, "...")',
        )


def lift(x: Any, mesh: Mesh, op: str) -> "ShardedTensor":
    """``x`` as a ShardedTensor on ``mesh``; plain tensors only within ``promoting``, scalars always."""
    check_met(x, mesh, op)
    return x if isinstance(x, ShardedTensor) else replicated(x, mesh)


class _Copies(Local):
    """A copy for each simulated rank; their cotangents are the same, and so is the original's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.unsqueeze(0).repeat(count, *[1] * x.ndim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _First.apply(grads[0]), None


class _First(Local):
    """One rank's copy of a value all hold; the cotangent goes to every copy."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        ctx.ranks = raw.shape[0]
        ctx.set_materialize_grads(False)
        return raw[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _Copies.apply(grads[0], ctx.ranks)


def replicated(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """A tensor that every rank holds, as it is."""
    if name := under_transform(x):
        raise no_transform(name)
    raw: Any = x
    if mesh.kind == "stacked":
        raw = _Copies.apply(x, mesh.size)
    elif mesh.kind == "record" and x.device.type != "meta":
        raw = x.to("meta")
    return ShardedTensor(raw, Layout.parse("...").resolve(x.ndim), x.shape, mesh)


_INSTEAD = {
    "vmap": "torch.vmap(f)(sl.unshard(x))",
    "grad": "sl.grad(f)(x)",
    "jvp": "torch.func.jvp(f, (sl.unshard(x),), (sl.unshard(x),))",
}


def no_transform(name: str) -> Unsupported:
    """The error for a sharded value under one of torch.func's transforms."""
    return Unsupported(
        f"torch.func's {name} does not know sharded values",
        op=f"torch.func.{name}",
        fix=_INSTEAD.get(name, "f(sl.unshard(x))"),
    )


if begins_forward_ad is not None:

    @implements(begins_forward_ad)
    def _dual(func: Any, args: Any, kwargs: Any) -> Any:
        raise no_transform("jvp")


_VALUES = frozenset("real imag H mH".split())  # properties that are functions of the values


def _unknown(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if (name == "__get__" or name == "__set__") and getattr(func.__self__, "__name__", "") not in _VALUES:
        with no_torch_function():
            return func(*args, **kwargs)
    if FALLBACK:
        return FALLBACK[0](func, args, kwargs)
    raise no_rule(func, args, kwargs)


def no_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = "") -> NoRule:
    """The error for a function that has no rule."""
    name = getattr(func, "__name__", str(func))
    found = [a for a in _leaves((args, kwargs)) if isinstance(a, ShardedTensor)]
    return NoRule(
        f"no rule for {name}" + (f": {why}" if why else ""),
        op=name,
        operands=lettered(map(typeof, found)),
        mesh=found[0].mesh if found else None,
        fix="sl.unshard(x)" if found else "",
    )


def on_shapes(func: Any, mesh: Mesh) -> Unsupported:
    """The error for an answer that hangs on values, on a recorded mesh."""
    name = getattr(func, "__name__", str(func))
    return Unsupported(
        f"what {name} answers hangs on values, and a recorded mesh has shapes alone",
        op=name,
        mesh=mesh,
        fix=f"sl.simulate({', '.join(f'{n}={s}' for n, s in mesh.axes.items())})",
    )


def partial_escape(op: str, x: ShardedTensor) -> PartialEscape:
    """The error for a pending sum used where its value is needed."""
    bare = str(x.sharding.bare) or "..."
    return PartialEscape(
        f"the sum over {', '.join(x.sharding.partial)} is still pending, and {op} needs its value",
        op=op,
        operands={"tensor": typeof(x)},
        mesh=x.mesh,
        fix=f"sl.reshard(x, {bare!r})",
    )


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, tuple | list):
        return [leaf for item in tree for leaf in _leaves(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    return [tree]


# ---------------------------------------------------------------- metadata and autograd


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answered by the wrapper itself, whose shape is the global one."""
    with no_torch_function():
        return func(*args, **kwargs)


implements(
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,
    Tensor.layout.__get__, Tensor.is_sparse.__get__, Tensor.is_quantized.__get__, Tensor.is_meta.__get__,
    Tensor.is_cuda.__get__, Tensor.is_cpu.__get__, Tensor.is_nested.__get__, Tensor.itemsize.__get__,
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
    Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel,
    Tensor.is_signed, Tensor.stride, Tensor.storage_offset, Tensor.__hash__,
)(_plain)  # fmt: skip


def block_strides(x: ShardedTensor) -> tuple[int, ...]:
    """The strides of a block, without the dimension of simulated ranks."""
    return x.raw.stride()[1:] if x.mesh.kind == "stacked" else x.raw.stride()


def is_dense(x: ShardedTensor) -> bool:
    """Whether the whole tensor would be contiguous.

    A block has its tensor's order of strides.  Along a dimension of which a block has one position its own stride
    says nothing to torch, but it still says where the dimension came in that order.
    """
    size = x.raw.shape[1:] if x.mesh.kind == "stacked" else x.raw.shape
    expected, last = 1, 0
    for n, stride, whole in zip(reversed(size), reversed(block_strides(x)), reversed(x.size_), strict=True):
        if whole == 1:
            continue
        if (n > 1 and stride != expected) or stride < max(last, expected):
            return 0 in size
        last = stride
        expected *= n
    return True


@implements(Tensor.is_contiguous)
def _is_contiguous(func: Any, args: Any, kwargs: Any) -> bool:
    x, form = _FORM(*args, **kwargs)
    return is_dense(x) if form is torch.contiguous_format else _block(x).is_contiguous(memory_format=form)


def _block(x: ShardedTensor) -> Tensor:
    """One rank's block; under simulate that of the first."""
    return x.raw[0] if x.mesh.kind == "stacked" else x.raw


@implements(Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.retains_grad.__get__)
def _from_raw(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].raw)


@implements(Tensor.grad_fn.__get__)
def _grad_fn(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].raw) if args[0].node is None else args[0].node


@implements(Tensor.requires_grad.__set__)
def _set_requires_grad(func: Any, args: Any, kwargs: Any) -> None:
    args[0].raw.requires_grad = args[1]


@implements(Tensor.requires_grad_, Tensor.retain_grad)
def _requires_grad(func: Any, args: Any, kwargs: Any) -> Any:
    func(args[0].raw, *args[1:], **kwargs)
    return args[0] if func is Tensor.requires_grad_ else None


def gradient_of(x: ShardedTensor, raw_grad: Tensor) -> ShardedTensor:
    """A gradient block as a value: in ``x``'s layout, pending over the axes that ``x`` defers."""
    if isinstance(x, PaddedTensor):
        return x.like(raw_grad)
    layout = x.sharding
    if x.deferred:
        layout = Layout(layout.dims, tuple(sorted(x.deferred)), layout.skew).resolve(len(x.size_))
    elif layout.partial:
        layout = Layout(layout.dims, (), layout.skew).resolve(len(x.size_))
    return ShardedTensor(raw_grad, layout, x.size_, x.mesh)


@implements(Tensor.grad.__get__)
def _grad(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return None if x.raw.grad is None else gradient_of(x, x.raw.grad)


@implements(Tensor.grad.__set__)
def _set_grad(func: Any, args: Any, kwargs: Any) -> None:
    x, grad = args
    if grad is not None:
        want = gradient_of(x, x.raw)
        alike = isinstance(grad, ShardedTensor) and (grad.sharding, grad.size_, grad.mesh) == (
            want.sharding, want.size_, want.mesh
        )  # fmt: skip
        if not alike:
            raise ShardError(
                "a gradient lies as its tensor does",
                op="grad",
                operands={"tensor": typeof(x), "gradient": typeof(grad)},
                mesh=x.mesh,
                fix=f"x.grad = sl.{'reshard' if isinstance(grad, ShardedTensor) else 'shard'}"
                f"(gradient, {str(want.sharding)!r})",
            )
    x.raw.grad = None if grad is None else grad.raw


@implements(Tensor.grad.__delete__)
def _del_grad(func: Any, args: Any, kwargs: Any) -> None:
    args[0].raw.grad = None


@implements(Tensor.backward)
def _backward(func: Any, args: Any, kwargs: Any) -> None:
    x, gradient = args[0], (args[1] if len(args) > 1 else kwargs.pop("gradient", None))
    inputs = kwargs.pop("inputs", None)
    if inputs is not None:
        kwargs["inputs"] = [i.raw for i in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    x = settle(x)
    x.raw.backward(_cotangent(x, gradient), *args[2:], **kwargs)


@implements(torch.autograd.backward)
def _autograd_backward(func: Any, args: Any, kwargs: Any) -> None:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = _listed(given.pop("tensors"))
    cotangents = given.pop("grad_tensors", None)
    cotangents = [None] * len(tensors) if cotangents is None else _listed(cotangents)
    tensors = [settle(x) if isinstance(x, ShardedTensor) else x for x in tensors]
    if given.get("inputs") is not None:
        given["inputs"] = [_raw(x) for x in _listed(given["inputs"])]
    torch.autograd.backward(
        [_raw(x) for x in tensors],
        [_cotangent(x, c) if isinstance(x, ShardedTensor) else c for x, c in zip(tensors, cotangents, strict=True)],
        **given,
    )


@implements(Tensor.register_hook)
def _register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    like = x.like(x.raw.detach())  # not x: its hook would keep it

    def run(raw: Tensor) -> Tensor | None:
        found = hook(gradient_of(like, raw))
        return None if found is None else _hooked(like, found)

    return x.raw.register_hook(run)


def _hooked(like: ShardedTensor, found: Any) -> Tensor:
    want = gradient_of(like, like.raw)
    if not isinstance(found, ShardedTensor) or found.sharding != want.sharding or found.size_ != want.size_:
        raise ShardError(
            "a hook's gradient lies otherwise than the one it was given",
            op="register_hook",
            operands={"given": typeof(want), "grad": typeof(found)},
            mesh=like.mesh,
            fix=f"return sl.reshard(grad, {str(want.sharding)!r})",
        )
    return found.raw


@implements(Tensor.register_post_accumulate_grad_hook)
def _register_post_hook(func: Any, args: Any, kwargs: Any) -> Any:
    x, hook = args
    held = weakref.ref(x)

    def run(raw: Tensor) -> None:
        leaf = held()
        if leaf is not None:
            hook(leaf)

    return x.raw.register_post_accumulate_grad_hook(run)


def _cotangent(x: ShardedTensor, gradient: Any) -> Tensor | None:
    if gradient is not None:
        if not isinstance(gradient, ShardedTensor):
            gradient = lift(gradient, x.mesh, "backward")
        if gradient.sharding != (x.sharding if not x.sharding.partial else gradient_of(x, x.raw).sharding):
            raise ShardError(
                "the cotangent has another layout than the value",
                op="backward",
                operands={"value": typeof(x), "cotangent": typeof(gradient)},
                mesh=x.mesh,
                fix=f"sl.reshard(gradient, {str(x.sharding)!r})",
            )
        return gradient.raw
    if x.size_.numel() != 1:
        raise ShardError(
            "backward of a tensor that is no scalar needs its cotangent",
            op="backward",
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix="x.sum().backward()",
        )
    return torch.ones_like(x.raw)


@implements(torch.autograd.grad)
def _autograd_grad(func: Any, args: Any, kwargs: Any) -> Any:
    names = ("outputs", "inputs", "grad_outputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs, inputs = (_listed(given.pop(n)) for n in names[:2])
    cotangents = given.pop("grad_outputs", None)
    cotangents = [None] * len(outputs) if cotangents is None else _listed(cotangents)
    outputs = [settle(x) if isinstance(x, ShardedTensor) else x for x in outputs]
    raw_grads = torch.autograd.grad(
        [_raw(x) for x in outputs],
        [_raw(x) for x in inputs],
        [_cotangent(x, c) if isinstance(x, ShardedTensor) else c for x, c in zip(outputs, cotangents, strict=True)],
        *args[3:],
        **given,
    )
    return tuple(
        gradient_of(x, g) if isinstance(x, ShardedTensor) and g is not None else g
        for x, g in zip(inputs, raw_grads, strict=True)
    )


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


def _raw(x: Tensor) -> Tensor:
    return x.raw if isinstance(x, ShardedTensor) else x


def _FORM(input: ShardedTensor, memory_format: Any = torch.contiguous_format) -> tuple[ShardedTensor, Any]:
    return input, memory_format


def _formatted(x: ShardedTensor, form: Any) -> ShardedTensor:
    """A copy whose blocks' strides are those of a memory format."""
    if x.mesh.kind != "stacked" or form is torch.preserve_format:
        return x.like(x.raw.clone(memory_format=form))
    if form is torch.contiguous_format:
        return x.like(x.raw.clone(memory_format=form))
    ndim = len(x.size_)
    if ndim != (4 if form is torch.channels_last else 5):
        return x.like(_block(x).clone(memory_format=form))  # torch's own refusal
    last = (0, 1, *range(3, ndim + 1), 2)  # ranks, batch, space, channels
    back = [last.index(d) for d in range(ndim + 1)]
    return x.like(x.raw.permute(last).clone(memory_format=torch.contiguous_format).permute(back))


@implements(Tensor.contiguous)
def _contiguous(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """The tensor itself where torch would give it back, else a copy."""
    x, form = _FORM(*args, **kwargs)
    same = is_dense(x) if form is torch.contiguous_format else _block(x).is_contiguous(memory_format=form)
    return x if same else _formatted(x, form)


def _CLONE(input: ShardedTensor, *, memory_format: Any = None) -> tuple[ShardedTensor, Any]:
    return input, torch.preserve_format if memory_format is None else memory_format


@implements(Tensor.clone, torch.clone)
def _clone(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    return _formatted(*_CLONE(*args, **kwargs))


def _ONE(input: ShardedTensor) -> ShardedTensor:
    return input


@implements(Tensor.detach, torch.detach, Tensor.data.__get__)
def _detached(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x = _ONE(*args, **kwargs)
    return x.like(func(x.raw))


@implements(Tensor.data.__set__)
def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """``x.data = y``: x holds y's blocks; as in torch its dtype may change, and no graph records it."""
    x, new = args
    if not isinstance(new, ShardedTensor) and scope().promoting:
        new = lift(new, x.mesh, "data")
    alike = isinstance(new, ShardedTensor) and (new.sharding, new.size_, new.shape) == (x.sharding, x.size_, x.shape)
    if not alike or new.mesh is not x.mesh:
        verb = "reshard" if isinstance(new, ShardedTensor) and new.mesh is x.mesh else "shard"
        fit = isinstance(new, Tensor) and new.shape == x.shape
        raise ShardError(
            "data is replaced by data of the same size and layout",
            op="data",
            operands={"x": typeof(x), "y": typeof(new) if isinstance(new, Tensor) else type(new).__name__},
            mesh=x.mesh,
            fix=f"x.data = sl.{verb}(y, sl.layout_of(x))" if fit else "x = y",
        )
    x.raw.data = new.raw.detach()
    with no_torch_function():  # the wrapper's own dtype and device
        func(x, x.like(x.raw.detach()))


if may_swap_data is not None:

    @implements(may_swap_data)
    def _may_swap_data(func: Any, args: Any, kwargs: Any) -> bool:
        x, new = args
        if not isinstance(x, ShardedTensor) or not isinstance(new, ShardedTensor):
            return False
        same = (new.sharding, new.size_, new.shape, new.mesh) == (x.sharding, x.size_, x.shape, x.mesh)
        return same and bool(func(x.raw, new.raw))


@implements(Tensor.detach_, Tensor.zero_)
def _in_place(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x = _ONE(*args, **kwargs)
    func(x.raw)
    return x


def _FILL(input: ShardedTensor, value: Any) -> tuple[ShardedTensor, Any]:
    return input, value


@implements(Tensor.fill_)
def _fill(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Every position the same value; of a pending sum each part its share."""
    x, value = _FILL(*args, **kwargs)
    if isinstance(value, Tensor):
        if value.ndim:
            raise BadArgument("fill_ takes a value of no dimensions", op="fill_", operands={"value": typeof(value)})
        value = settle(lift(value, x.mesh, "fill_"))
        if value.sharding.partial:
            raise partial_escape("fill_", value)
        lead = [-1, *[1] * len(x.size_)] if x.mesh.kind == "stacked" else []
        raw = vary(value.raw, x.mesh, {*x.sharding.axes, *x.deferred})
        if x.sharding.partial:
            raise partial_escape("fill_", x)
        x.raw.copy_(raw.view(lead) if lead else raw)
    elif x.sharding.partial and value != 0:
        raise partial_escape("fill_", x)
    else:
        x.raw.fill_(value)
    return x


@implements(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
            Tensor.__complex__)  # fmt: skip
def _item(func: Any, args: Any, kwargs: Any) -> Any:
    x = _ONE(*args, **kwargs)
    _whole_here(x, func, "item" if x.size_.numel() == 1 else "tolist")
    return func(_block(x))


@implements(Tensor.__format__)
def _format(func: Any, args: Any, kwargs: Any) -> str:
    """A scalar as its number, anything else as its repr, as torch does."""
    x, spec = args
    if x.size_:
        return object.__format__(x, spec)
    _whole_here(x, func, "item")
    return func(_block(x).detach(), spec)


@implements(Tensor.__array__, Tensor.numpy)
def _array(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0] if args else kwargs["self"]
    _whole_here(x, func, "numpy")
    return func(_block(x), *args[1:], **kwargs)


def _whole_here(x: ShardedTensor, func: Any, verb: str) -> None:
    if x.sharding.axes or x.sharding.partial:
        raise ShardError(
            "a Python value needs the whole tensor",
            op=func.__name__.strip("_"),
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix=f"sl.unshard(x).{verb}()",
        )
    if x.mesh.kind == "record":
        raise on_shapes(func, x.mesh)


_ANYWHERE.update(
    f
    for f, rule in TABLE.items()
    if rule in (_plain, _is_contiguous, _from_raw, _grad_fn, _set_requires_grad, _requires_grad, _grad, _set_grad,
                _del_grad, _contiguous, _clone, _detached, _set_data, _in_place, _fill, _item, _format, _array,
                _backward, _autograd_backward, _autograd_grad, _register_hook, _register_post_hook)
)  # fmt: skip

_UNCAST.update(
    f
    for f, rule in TABLE.items()
    if rule in (_plain, _is_contiguous, _from_raw, _set_requires_grad, _set_data, _item, _format, _array)
)
_UNCAST.add(Tensor.data.__get__)
