"""Padding: positions beyond a tensor's true sizes, filled with zero before a sum.

A tensor whose sizes do not divide over its axes is padded to sizes that do; its place keeps the
true ones.  Values in the padding are never read: an operator that would mix them with elements
fills the padding first with a neutral value (zero before a sum, the lowest number before a
maximum), and results there have no gradient.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import holds_values, played, storage
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.memory_sharing import link_views, written
from shardlib.mesh import Mesh
from shardlib.ops.each_rank import FlatCall, size_of
from shardlib.opspec import Args, Func, Kwargs, records
from shardlib.tensor import Place, ShardedTensor, Unfit, call_error, has_padding, raw_of


def filled(x: Any, value: float | bool | None) -> Any:
    """Return a tensor of the padded sizes, with ``value`` in the padding and no gradient there.

    None leaves the padding as it is.
    """
    if not isinstance(x, ShardedTensor) or not x.is_padded:
        return x
    whole = x.with_padding
    if value is None or not holds_values(x.mesh):
        return whole
    if x.raw.dtype == torch.bool:
        # a number would promote the dtype
        value = bool(value)
    return whole.becomes(torch.where(inside(x).raw, x.raw, value))


def inside(x: ShardedTensor) -> ShardedTensor:
    """Return a mask of a tensor: True for elements, False for padding."""
    key = (x.sharding, x.padded_shape, x.shape, x.raw.device)
    # few: masks are as large as blocks
    raw = x.mesh.memo("mask", key, lambda: _mask(*key, x.mesh), most=64)
    return ShardedTensor(raw, Place(x.sharding, x.padded_shape, x.mesh))


def _mask(
    layout: Layout, shape: torch.Size, true: torch.Size, device: torch.device, mesh: Mesh
) -> Tensor:
    masks = []
    with torch.inference_mode(False):
        # cached, so a later backward may save it
        for c in played(mesh):
            here = torch.ones((), dtype=torch.bool, device=device)
            for d, index in enumerate(layout.indices(shape, mesh, c)):
                row = torch.tensor([i < true[d] for i in index], dtype=torch.bool, device=device)
                here = here & row.reshape(-1, *[1] * (len(shape) - 1 - d))
            masks.append(here)
        return storage(masks, mesh)


def padded_to(value: ShardedTensor, true: Sequence[int], zeros: bool = False) -> ShardedTensor:
    """Return a value whose true sizes are ``true``; positions beyond them are padding.

    ``zeros``  in the padding of a value with a gradient, which has none there.
    """
    if tuple(value.padded_shape) == tuple(true):
        return value
    out = ShardedTensor(value.raw, value.place._replace(shape=torch.Size(true)))
    if zeros and value.raw.requires_grad:
        return padded_to(filled(out, 0), true)
    return out


def extended(whole: Tensor, x: ShardedTensor) -> Tensor:
    """Return a tensor whose last dimensions have the true sizes of ``x``, with zeros as padding."""
    more = [k for n, m in reversed(sizes(x)) for k in (0, m - n)]
    return F.pad(whole, more) if any(more) else whole


def check_alike(func: Func, given: Sequence[Tensor], labels: Sequence[Sequence[Any]]) -> None:
    """Refuse operands whose blocks do not combine as they are.

    ``labels``  of each operand's dimensions; those of one label are padded alike or have size one.

    Raises: Unsupported; Unfit where a dimension without a label is padded.
    """
    found: dict[Any, set[tuple[int, int]]] = {}
    for x, mine in zip(given, labels, strict=True):
        for label, size in zip(mine, sizes(x), strict=True):
            found.setdefault(label, {(1, 1)}).add(size)
    if any(n != m for n, m in found.pop(None, ())):
        raise Unfit("the padding is read")
    if any(len(each) > 2 and any(n != m for n, m in each) for each in found.values()):
        raise _apart(func, given, labels)


def _apart(func: Func, given: Sequence[Tensor], labels: Sequence[Sequence[Any]]) -> ShardError:
    """Return the error for operands that are not padded alike."""
    i = next(i for i, x in enumerate(given) if has_padding((x,)))
    x: Any = given[i]
    others = (j for j, y in enumerate(given) if not has_padding((y,)) or y.shape != x.shape)
    j = next(others, i)
    tokens = dict(zip(zip(labels[i], x.shape, strict=True), x.dims, strict=True))
    dims = [tokens.get(size, Dim()) for size in zip(labels[j], given[j].shape, strict=True)]
    name = "sl.unshard(y)" if isinstance(given[j], ShardedTensor) else "y"
    fix = f"sl.shard({name}, {str(Layout(tuple(dims)))!r}, pad=True)"
    why = "a padded tensor combines with tensors padded alike and with numbers"
    return call_error(Unsupported, why, func, fix, x=x, y=given[j])


def by_position(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a function of each position on padded operands, as their true shapes broadcast."""
    call, changed = FlatCall.of(func, *args, **kwargs), written(func, args, kwargs)
    given = call.tensors
    if func in (torch.where, Tensor.where) and len(given) == 1:
        raise Unfit("positions, which are not in the padding")
    if any(not has_padding((x,)) for x in changed):
        raise Unfit("a tensor without padding, to which what is padded is written")
    check_alike(func, given, [range(-x.ndim, 0) for x in given])
    tracked = [x for x in given if torch.is_grad_enabled() and x.requires_grad]
    if tracked and changed:
        why = "padded blocks with a gradient are not written in place"
        raise call_error(Unsupported, why, func, "sl.shard(sl.unshard(x), '...')", tensor=args[0])
    # ones have no gradient themselves, and a finite derivative by an operand without padding
    fills = [1 if any(x is t for t in tracked) else None for x in given]
    a, k = call.replaced(map(filled, given, fills))
    out = run(func, a, k)
    if changed:
        return args[0]
    partners = any(not has_padding((x,)) for x in tracked)
    return padded_to(out, torch.broadcast_shapes(*(x.shape for x in given)), zeros=partners)


def beside(along: Callable[..., Iterable[int]], fill: float | None = None) -> Callable[..., Any]:
    """Return a handler of padding for a function that works along some dimensions and treats the
    positions of all others independently.

    ``along(*args, **kwargs)``  returns those dimensions, which may have no padding.
    ``fill``  number for which positions of padding are finite; None where nothing is computed.
    """

    return partial(_beside, along, fill)


def _beside(
    along: Callable[..., Iterable[int]], fill: float | None,
    run: Func, func: Func, args: Args, kwargs: Kwargs,
) -> object:  # fmt: skip
    given = [x for x in FlatCall.of(func, *args, **kwargs).tensors if x.ndim]
    uneven = [x for x in given if has_padding((x,))]
    chosen = {d % x.ndim for d in along(*args, **kwargs) for x in uneven}
    if any(sizes(x)[d][0] != sizes(x)[d][1] for x in uneven for d in chosen):
        raise Unfit("positions of a padded dimension")
    alike = [dict(enumerate(sizes(x))) for x in given if x.ndim == uneven[0].ndim]
    kept = {tuple(size for d, size in found.items() if d not in chosen) for found in alike}
    if len(kept) > 1 or len({x.sharding for x in uneven}) > 1:
        raise Unfit("operands that are padded otherwise")
    return of_true_sizes(run, func, args, kwargs, fill, zeros=fill is not None)


def the_dim(signature: Callable[..., dict[str, Any]]) -> Callable[..., list[int]]:
    """Return the ``along`` of ``beside`` for functions with a ``dim``, bound by their signature."""

    def along(*args: Any, **kwargs: Any) -> list[int]:
        dim = signature(*args, **kwargs).get("dim")
        if dim is None:
            raise Unfit("the flattened tensor, whose positions padding moves")
        return [dim]

    return along


def sizes(x: Tensor) -> list[tuple[int, int]]:
    """List each dimension's true size, and the one that blocks tile."""
    stored = x.padded_shape if isinstance(x, ShardedTensor) else x.shape
    return list(zip(x.shape, stored, strict=True))


def neutral(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run an operator whose record has a ``fill``: in the padding it changes no element.

    A result that is no reduction mixes its own padding in backward, so it is filled too, by zeros.
    """
    spec = records()[func]
    assert spec.fill is not None, "registered with this handler"
    x = next(v for v in (*args, *kwargs.values()) if isinstance(v, ShardedTensor))
    if math.isinf(spec.fill) and not x.dtype.is_floating_point:
        raise Unfit("integers have no infinity")
    return of_true_sizes(run, func, args, kwargs, spec.fill, zeros=spec.kind != "reduce")


def of_true_sizes(
    run: Func,
    func: Func,
    args: Args,
    kwargs: Kwargs,
    fill: float | None = None,
    zeros: bool = False,
) -> object:
    """Run an implementation on the padded sizes; results get the sizes for the true ones.

    ``fill``   the content of the operands' padding; None leaves it as it is.
    ``zeros``  results with a gradient have zeros in their padding, and no gradient there.
    """
    call = FlatCall.of(func, *args, **kwargs)
    mesh = next(x.mesh for x in call.tensors if isinstance(x, ShardedTensor))
    true = mesh.memo("true sizes", call.key, lambda: call.shapes(map(size_of, call.tensors)))
    given = [filled(x, fill) for x in call.tensors]
    a, k = call.replaced(given)
    found, shape = optree.tree_flatten(run(func, a, k), none_is_leaf=True)
    if list(map(len, true)) != [y.ndim for y in found]:
        raise Unfit("a dimension of one element, and of more with its padding")
    each = [padded_to(y, size, zeros) for y, size in zip(found, true, strict=True)]
    if fill is not None:
        moved = (found, each), (given, call.tensors)
        pairs = (zip(map(raw_of, a), map(raw_of, b), strict=True) for a, b in moved)
        link_views(*pairs)
    return optree.tree_unflatten(shape, each)


def cuts_padding(what: str, op: Func | str, x: ShardedTensor) -> ShardError:
    """Return the error for a call that would take a padded dimension apart."""
    why = f"{what} cuts through the padded dimension"
    return call_error(Unsupported, why, op, "sl.shard(sl.unshard(x), '...')", tensor=x)
