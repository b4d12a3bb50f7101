"""Stacked: the tensor of a simulation, where one process runs every rank on one stacked tensor.

``Stacked`` has the shape of one rank's local block; ``.ranks`` is ``[P, *local]``, ranks in
row-major order of the mesh.  A torch function on it runs for all ranks at once, under the vmap of
``torch.func`` over the ranks; products, attention, pointwise functions and indexing have faster or
stricter rules here.  Its collectives are in backends/stacked.py.  Autograd is recorded on
``.ranks``.

A Python branch takes one side for all ranks, so reading the value of a Stacked whose ranks differ
raises.
"""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import (
    load_vmap,
    no_torch_function,
    vmap_begin,
    vmap_end,
    vmap_join,
    vmap_split,
)
from shardlib.errors import PlainTensor, ShardError, Unsupported
from shardlib.mesh import Mesh, coordinates
from shardlib.opspec import Args, Func, Kwargs, functions_of, names_of, writes
from shardlib.optional import unless_none

_TABLE: dict[Any, Callable[..., Any]] = {}


class Varies:
    """Axes over which a block varies, shared by all views of its memory; None: untracked."""

    __slots__ = ("axes",)

    def __init__(self, axes: frozenset[str] | None) -> None:
        self.axes = axes

    def join(self, axes: frozenset[str] | None) -> None:
        """Record that a value which varies over these axes was written into the block."""
        self.axes = None if axes is None or self.axes is None else self.axes | axes


class Stacked(torch.Tensor):
    """Tensor that holds the local blocks of all ranks and behaves as one block.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     block = sl.shard(torch.arange(4), "x").local
    ...     block.shape, block.ranks.shape, block * 10
    (torch.Size([2]), torch.Size([2, 2]), x=0: tensor([ 0, 10])
    x=1: tensor([20, 30]))
    """

    ranks: Tensor
    mesh: Mesh
    # axes along which it varies, where that is tracked
    varies: Varies | None = None

    @staticmethod
    def __new__(cls: type, ranks: Tensor, mesh: Mesh) -> "Stacked":
        self = torch.Tensor._make_wrapper_subclass(
            cls, ranks.shape[1:], dtype=ranks.dtype, device=ranks.device
        )
        self.ranks, self.mesh = ranks, mesh
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls,
        func: Func,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = _TABLE.get(func, _by_vmap)(func, args, kwargs or {})
        for x in args:
            if type(x) is Stacked:
                if x.varies is None:
                    # outside a body of shard_map
                    return out
                break
        _follow(func, args, kwargs or {}, out)
        return out

    @classmethod
    def __torch_dispatch__(
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        why = f"{func} reached simulated blocks below torch functions"
        raise ShardError(why, op=str(func), fix="x.ranks")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if self.ranks.is_meta or _agree(self.ranks):
            return repr(self.ranks[0])
        places = [" ".join(f"{n}={i}" for n, i in c.items()) for c in coordinates(self.mesh.axes)]
        return "\n".join(f"{p}: {r!r}" for p, r in zip(places, self.ranks, strict=True))


def of(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the raw ``[P, *local]`` of a Stacked, or of a plain tensor that all ranks hold."""
    if type(x) is Stacked:
        return x.ranks
    return x.unsqueeze(0).expand(mesh.size, *x.shape)


def _agree(ranks: Tensor) -> bool:
    first = ranks[:1].expand_as(ranks)
    return bool(((ranks == first) | ((ranks != ranks) & (first != first))).all())


# ---------------------------------------------------------------- varying axes

_OTHERS_READ = frozenset(names_of(ignores="first"))
_FIRST_READ = frozenset(names_of(ignores="others"))


def _follow(func: Func, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Record the axes over which the result of a torch function, or its target, varies."""
    operands: Any = (args, kwargs)
    given = [x for x in optree.tree_leaves(operands) if type(x) is Stacked]
    name = func.__name__
    axes = _axes_read(name, given)
    if writes(name) and args and type(args[0]) is Stacked and args[0].varies is not None:
        args[0].varies.join(axes)
    held = {_memory(x.ranks): x for x in given}
    for x in optree.tree_leaves(out):
        if type(x) is not Stacked or any(x is y for y in given):
            continue
        source = held.get(_memory(x.ranks))
        x.varies = Varies(axes) if source is None else source.varies


def _axes_read(name: str, given: list[Stacked]) -> frozenset[str] | None:
    """Join the axes over which the operands that a function reads vary; None: untracked."""
    if name in _FIRST_READ:
        given = given[:1]
    elif name in _OTHERS_READ:
        given = given[1:]
    axes: frozenset[str] = frozenset()
    for x in given:
        if x.varies is None or x.varies.axes is None:
            return None
        axes |= x.varies.axes
    return axes


def _memory(x: Tensor) -> object:
    """Return an identifier shared by all views of one memory."""
    base = x if x._base is None else x._base
    if x.is_meta:
        return id(base)
    try:
        return x.untyped_storage().data_ptr() or id(base)
    except (RuntimeError, NotImplementedError):
        # a wrapper of torch.func has no data pointer
        return id(base)


# ---------------------------------------------------------------- torch functions


def _enter(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def put(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for f in funcs:
            if f is not None:
                _TABLE[f] = implementation
        return implementation

    return put


def _mesh_of(tree: Any) -> Mesh:
    return next(x.mesh for x in optree.tree_leaves(tree) if isinstance(x, Stacked))


def _by_vmap(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run any function under vmap over the ranks; once per rank where vmap has no rule for it."""
    leaves, tree = _flat(args, kwargs)
    in_place = writes(getattr(func, "__name__", ""))
    if in_place and type(args[0]) is not Stacked:
        raise _plain_target(func)
    if "memory_format" in kwargs or _promotes([x for x in leaves if isinstance(x, Tensor)]):
        return _each(func, args, kwargs)
    mesh = next(x.mesh for x in leaves if type(x) is Stacked)
    load_vmap()
    level = vmap_begin(mesh.size, "same")
    try:
        a, k = tree([vmap_split(x.ranks, 0, level) if type(x) is Stacked else x for x in leaves])
        out = func(*a, **k)
        if in_place and out is a[0] and out.shape == args[0].shape:
            return args[0]
        return _joined(out, mesh, level)
    except RuntimeError as e:
        if not re.search("vmap|atching", str(e)):
            raise
    finally:
        vmap_end()
    return _each(func, args, kwargs)


def _flat(args: Args, kwargs: Kwargs) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the arguments of a call as a list, and what makes arguments of such a list."""
    given: Any = (args, kwargs)
    leaves, tree = optree.tree_flatten(given, none_is_leaf=True)
    return leaves, partial(optree.tree_unflatten, tree)


def _joined(out: Any, mesh: Mesh, level: int) -> Any:
    """Return the results of a function under vmap as simulated blocks."""
    if isinstance(out, Tensor):
        return Stacked(vmap_join(out, level, mesh.size, 0), mesh)
    if isinstance(out, tuple | list):
        parts = [_joined(o, mesh, level) for o in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    return out


def _promotes(tensors: list[Tensor]) -> bool:
    """Check for a 0-dim operand of another type, which has less weight in torch's promotion.

    A dimension of ranks would give it as much as the others.
    """
    if len(tensors) < 2:
        return False
    raws = [(x.ranks, 1) if type(x) is Stacked else (x, 0) for x in tensors]
    kinds = {(x.dtype, x.ndim > more) for x, more in raws}
    return len(kinds) > 1 and all(len(set(facts)) > 1 for facts in zip(*kinds, strict=True))


def _each(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run the function once per rank, in a loop."""
    leaves, tree = _flat(args, kwargs)
    mesh = _mesh_of((args, kwargs))
    found: list[Any] = []
    in_place = writes(func.__name__)
    # whether all results are the operands
    itself = type(args[0]) is Stacked if args else False
    for rank in range(mesh.size):
        a, k = tree([x.ranks[rank] if type(x) is Stacked else x for x in leaves])
        # Ranks share one storage and so one autograd version counter: rank 1's write would look
        # like a change of rank 0's saved tensor.  So each rank writes to a clone.
        if in_place:
            a = (a[0].clone(), *a[1:])
        found.append(func(*a, **k))
        itself = itself and found[-1] is a[0]
    if in_place:
        args[0].ranks.copy_(torch.stack(found))
    if in_place or itself:
        return args[0]
    return cast(Any, optree.tree_map(lambda *blocks: _stacked(func, blocks, mesh), *found))


def _stacked(func: Func, blocks: tuple[Any, ...], mesh: Mesh) -> Any:
    """Return the results of all ranks as one simulated block.  Raises: Unsupported."""
    if not isinstance(blocks[0], Tensor):
        if any(x != blocks[0] for x in blocks):
            raise _two_sides(func, mesh)
        return blocks[0]
    if len({x.shape for x in blocks}) > 1:
        shapes = ", ".join(str(list(x.shape)) for x in blocks)
        raise Unsupported(
            f"its result has other shapes on other ranks, {shapes}, and a simulated block has one for all",
            op=func.__name__,
            fix="torch.where(mask, block, 0.0)  # keeps the shape; ranks of sl.launch may differ",
        )
    return Stacked(torch.stack(blocks), mesh)


@_enter(
    Tensor.as_strided_,
    Tensor.as_strided_scatter,
    Tensor.resize_,
    Tensor.resize_as_,
    torch.as_strided_scatter,
)
def _by_memory(func: Func, args: Args, kwargs: Kwargs) -> Any:
    why = "the memory of a simulated block is a part of the memory of all ranks"
    fix = "block = block.reshape(shape)  # a new tensor"
    raise Unsupported(why, op=func.__name__, fix=fix)


def _functions(names: str, *owners: Any) -> list[Any]:
    return [f for n in names.split() for o in owners if (f := getattr(o, n, None)) is not None]


def _plain_target(func: Any) -> PlainTensor:
    why = "a plain tensor is one tensor for all simulated ranks, and cannot take a value from each"
    fix = "target = block.new_zeros(block.shape)  # from a local block, instead of torch.zeros"
    return PlainTensor(why, op=func.__name__, fix=fix)


def _aligned(x: Any, ndim: int) -> Any:
    """Return ``ranks`` with ones after the rank dimension, so that it broadcasts like the block."""
    if type(x) is not Stacked:
        return x
    r = x.ranks
    if r.ndim == ndim + 1:
        return r
    return r.reshape(r.shape[0], *[1] * (ndim + 1 - r.ndim), *r.shape[1:])


_SAME_SHAPE = "where to type type_as clone contiguous detach copy_ zero_ fill_ __pos__"
_POINTWISE = [
    variant
    for name in names_of(kind="pointwise")
    for variant in (name, f"__i{name[2:]}" if name.startswith("__") else f"{name}_")
]


@_enter(
    *_functions(" ".join(_POINTWISE), torch, Tensor, F), *_functions(_SAME_SHAPE, torch, Tensor)
)
def _pointwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Compute on the storages themselves, which takes half the time of vmap."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if type(args[0]) is not Stacked or "memory_format" in kwargs or _promotes(tensors):
        return _by_vmap(func, args, kwargs)
    ndim = max(x.ranks.ndim - 1 if type(x) is Stacked else x.ndim for x in tensors)
    raws = [_aligned(x, ndim) for x in args]
    out = func(*raws, **{k: _aligned(v, ndim) for k, v in kwargs.items()})
    if out is NotImplemented:
        # x == None: Python then tries the other operand, and returns False
        return out
    return args[0] if out is raws[0] else Stacked(out, args[0].mesh)


@_enter(torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_)
def _masked_fill(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Fill with a value of each rank in a loop: torch takes a value without dimensions alone."""
    given = (args[0], kwargs.get("value", args[-1]))
    per_rank = all(type(x) is Stacked for x in given)
    return _each(func, args, kwargs) if per_rank else _pointwise(func, args, kwargs)


@_enter(*_functions("matmul mm bmm __matmul__ __rmatmul__", torch, Tensor))
def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    a, b = args if func is not Tensor.__rmatmul__ else (args[1], args[0])
    strict = {"mm": 2, "bmm": 3}.get(func.__name__, 0)
    if kwargs or type(a) is not Stacked or type(b) is not Stacked or strict not in (0, a.ndim):
        return _by_vmap(func, args, kwargs)
    x, w = a.ranks, b.ranks
    if x.ndim == w.ndim > 2:
        return Stacked(torch.matmul(x, w), a.mesh)
    if x.ndim > w.ndim == 3 and not strict:
        return Stacked(torch.bmm(x.flatten(1, -2), w).unflatten(1, x.shape[1:-1]), a.mesh)
    return _by_vmap(func, args, kwargs)


@_enter(F.linear)
def _linear(func: Func, args: Args, kwargs: Any) -> Any:
    x, w, b = (*args, kwargs.get("bias"))[:3]
    out = torch.matmul(x, w.mT)
    return out if b is None else out + b


@_enter(Tensor.addmm_)
def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    c, a, b = args
    if type(c) is not Stacked:
        return _by_vmap(func, args, kwargs)
    c.ranks.baddbmm_(of(a, c.mesh), of(b, c.mesh), **kwargs)
    return c


@_enter(Tensor.__setitem__)
def _setitem(func: Func, args: Args, kwargs: Kwargs) -> None:
    x, index, value = args
    if type(x) is not Stacked:
        raise _plain_target(func)
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Tensor | list) for i in index):
        one = not isinstance(value, Tensor) or value.numel() == 1
        if one and len(index) == 1 and getattr(index[0], "dtype", None) == torch.bool:
            mask = index[0].reshape(*index[0].shape, *[1] * (x.ndim - index[0].ndim))
            x.copy_(torch.where(mask, value, x))
        else:
            _by_vmap(_put, (x, index, value), {})
        return
    x.ranks[(slice(None), *index)] = _aligned(value, x[index].ndim)


def _put(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


@_enter(F.scaled_dot_product_attention)
def _attention(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or kwargs.get("dropout_p") or args[0].ndim < 3:
        return _by_vmap(func, args, kwargs)
    mesh = _mesh_of((args, kwargs))
    # batch dimensions to be merged with the rank dimension
    lead = len(args[0].shape) - 3
    q, k, v = (of(t, mesh).flatten(0, lead) for t in args)
    mask = kwargs.get("attn_mask")
    if type(mask) is Stacked or (mask is not None and mask.ndim > 2):
        whole = of(mask, mesh)
        whole = whole.reshape(mesh.size, *[1] * (args[0].ndim - mask.ndim), *mask.shape)
        whole = whole.expand(mesh.size, *args[0].shape[:-3], *whole.shape[lead + 1 :])
        kwargs = kwargs | {"attn_mask": whole.flatten(0, lead)}
    out = func(q, k, v, **kwargs)
    return Stacked(out.unflatten(0, (mesh.size, *args[0].shape[:lead])), mesh)


@_enter(F.embedding)
def _embedding(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Look ids up in one table that joins all ranks' tables: ids are offset to their rank's rows.

    ``padding_idx`` is handled here: vmap honours it on the first rank alone (as of torch 2.13).
    """
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    given = dict(zip(names.split(), args, strict=False)) | kwargs
    ids, table, padding = given["input"], given["weight"], given.get("padding_idx")
    mesh = _mesh_of((ids, table))
    rows, width = table.shape
    if any(given.get(n) for n in ("max_norm", "scale_grad_by_freq", "sparse")):
        return _by_vmap(func, args, kwargs)
    raw = of(ids, mesh)
    offset = torch.arange(mesh.size, device=table.device) * rows
    # an index out of range must raise, not read another rank's rows: -1 is in no table
    moved = (raw + offset.reshape(-1, *[1] * ids.ndim)).where((raw >= 0) & (raw < rows), -1)
    out = F.embedding(moved, of(table, mesh).reshape(-1, width))
    if padding is not None:
        out = torch.where((raw == padding % rows).unsqueeze(-1), out.detach(), out)
    return Stacked(out, mesh)


# ---------------------------------------------------------------- metadata, values, autograd


def _plain(func: Func, args: Args, kwargs: Kwargs) -> Any:
    with no_torch_function():
        return func(*args, **kwargs)


_enter(*functions_of("metadata"))(_plain)


@_enter(
    *(getattr(Tensor, n).__get__ for n in "requires_grad is_leaf grad_fn retains_grad".split()),
    Tensor.requires_grad.__set__,
    Tensor.grad.__delete__,
    Tensor.retain_grad,
)
def _from_ranks(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return func(args[0].ranks, *args[1:])


@_enter(
    *_functions(
        "is_contiguous stride storage_offset get_device is_same_size is_pinned is_inference", Tensor
    )
)
@_enter(Tensor.nbytes.__get__, torch.result_type, torch.is_same_size)
def _from_one(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return metadata from rank 0's block; it is the same on every rank."""
    return func(*[a.ranks[0] if type(a) is Stacked else a for a in args], **kwargs)


@_enter(Tensor.data.__get__)
def _data(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return Stacked(args[0].ranks.data, args[0].mesh)


@_enter(Tensor.__deepcopy__)
def _deepcopy(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, memo = args
    return memo.setdefault(id(x), Stacked(copy.deepcopy(x.ranks, memo), x.mesh))


@_enter(Tensor.requires_grad_)
def _requires_grad(func: Func, args: Args, kwargs: Kwargs) -> Any:
    args[0].ranks.requires_grad_(*args[1:], **kwargs)
    return args[0]


@_enter(Tensor.grad.__get__)
def _grad(func: Func, args: Args, kwargs: Kwargs) -> Any:
    g = args[0].ranks.grad
    return None if g is None else Stacked(g, args[0].mesh)


@_enter(Tensor.grad.__set__)
def _set_grad(func: Func, args: Args, kwargs: Kwargs) -> None:
    x, grad = args
    if isinstance(grad, Tensor) and type(grad) is not Stacked:
        grad = Stacked(of(grad, x.mesh).clone(), x.mesh)
    x.ranks.grad = None if grad is None else grad.ranks


@_enter(Tensor.register_hook)
def _register_hook(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x, hook = args

    def on_ranks(grad: Tensor) -> Tensor | None:
        return unless_none(of, hook(Stacked(grad, x.mesh)), x.mesh)

    return x.ranks.register_hook(on_ranks)


@_enter(Tensor.backward)
def _backward(func: Func, args: Args, kwargs: Kwargs) -> None:
    x, *rest = args
    gradient = rest[0] if rest else kwargs.pop("gradient", None)
    gradient = torch.ones_like(x.ranks) if gradient is None else of(gradient, x.mesh)
    x.ranks.backward(gradient, *rest[1:], **kwargs)


@_enter(
    *_functions(
        "item tolist numpy __array__ __bool__ __float__ __int__ __index__ __complex__ __format__",
        Tensor,
    )
)
def _value(func: Func, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if not _agree(x.ranks):
        raise _two_sides(func, x.mesh)
    return func(x.ranks[0], *args[1:], **kwargs)


@_enter(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
def _verdict(func: Func, args: Args, kwargs: Kwargs) -> bool:
    mesh = _mesh_of(args)
    a, b, *rest = args
    each = {
        bool(func(x, y, *rest, **kwargs)) for x, y in zip(of(a, mesh), of(b, mesh), strict=True)
    }
    if len(each) > 1:
        raise _two_sides(func, mesh)
    return each.pop()


def _two_sides(func: Any, mesh: Mesh) -> ShardError:
    why = "the simulated ranks hold different values, and Python can take only one side of a branch"
    fix = "torch.where(condition, a, b)"
    return ShardError(why, op=func.__name__.strip("_"), mesh=mesh, fix=fix)
