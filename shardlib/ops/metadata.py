"""Metadata, autograd and copies of sharded tensors: properties, hooks, backward, clone, set_."""

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import (
    backward_of,
    begins_forward_ad,
    begins_vmap,
    describes_memory,
    may_swap_data,
    no_torch_function,
    transform_called,
)
from shardlib.collectives import holds_values, lead, storage_shape
from shardlib.errors import BadArgument, ShardError
from shardlib.mesh import scope
from shardlib.ops.declare import by_signature
from shardlib.ops.registry import may_move
from shardlib.opspec import Args, Func, Kwargs, functions_of
from shardlib.placing import reshard
from shardlib.tensor import raw_of, refuse_sums
from shardlib.tensor.gradients import gradient_of, gradient_place, settle, vary
from shardlib.tensor.lifting import lift
from shardlib.tensor.tensor import (
    _UNCAST,
    TABLE,
    ShardedTensor,
    block_of,
    call_error,
    implements,
    is_dense,
    no_trace,
    no_transform,
    on_shapes,
)


@implements(begins_vmap, takes="all")
def _batched(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Refuse the older vmap, by which torch.autograd.functional vectorizes."""
    raise no_transform("vmap", args, "torch.autograd.functional.jacobian(f, x)")


@implements(begins_forward_ad, takes="all")
def _dual(func: Func, args: Args, kwargs: Kwargs) -> object:
    raise no_transform(transform_called() or "jvp", args)


def _plain(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Read from the wrapper itself, whose shape is the global one."""
    with no_torch_function():
        return func(*args, **kwargs)


implements(
    *functions_of("metadata"), torch.result_type, torch.get_device, Tensor.get_device,
    Tensor.ndimension, Tensor.dense_dim, Tensor.sparse_dim, Tensor.is_distributed,
    torch.is_distributed, Tensor.dim_order, Tensor.stride, Tensor.storage_offset, takes="all",
)(_plain)  # fmt: skip


@implements(
    Tensor.is_conj, torch.is_conj, Tensor.is_neg, torch.is_neg,
    Tensor.is_inference, torch.is_inference, Tensor.is_pinned,
    Tensor.requires_grad.__get__, Tensor.is_leaf.__get__, Tensor.retains_grad.__get__,
    Tensor.requires_grad.__set__, Tensor.grad.__delete__, Tensor.retain_grad, takes="all",
)  # fmt: skip
def _of_blocks(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, *rest = (*args, *kwargs.values())
    return func(x.raw, *rest)


@implements(torch.is_same_size, Tensor.is_same_size, takes="all")
def _is_same_size(func: Func, args: Args, kwargs: Kwargs) -> bool:
    x, other = (*args, *kwargs.values())
    return x.shape == other.shape


@implements(describes_memory, takes="all")
def _described(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Refuse the call by which torch.export and fake tensors begin to read a tensor's memory."""
    raise no_trace("torch.export")


_FORM = "contiguous(input, memory_format=None)"


@by_signature(_FORM, Tensor.is_contiguous, takes="all")
def _is_contiguous(func: Func, x: ShardedTensor, form: torch.memory_format | None) -> bool:
    if form in (None, torch.contiguous_format):
        return is_dense(x)
    return block_of(x).is_contiguous(memory_format=form)


@implements(Tensor.grad_fn.__get__, takes="all")
def _grad_fn(func: Func, args: Args, kwargs: Kwargs) -> object:
    facts = args[0].facts
    return func(args[0].raw) if facts is None or facts.node is None else facts.node


@implements(Tensor.requires_grad_, Tensor.detach_, Tensor.zero_, takes="all")
def _in_place(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    func(args[0].raw, *args[1:], **kwargs)
    return args[0]


@implements(Tensor.grad.__get__, takes="all")
def _grad(func: Func, args: Args, kwargs: Kwargs) -> object:
    x = args[0]
    return None if x.raw.grad is None else gradient_of(x, x.raw.grad)


@implements(Tensor.grad.__set__, takes="all")
def _set_grad(func: Func, args: Args, kwargs: Kwargs) -> None:
    x, grad = args
    if grad is None:
        x.raw.grad = None
        return
    want = gradient_of(x, x.raw)
    if not _lies_as(want, grad):
        why = "a gradient lies as its tensor does"
        verb = "reshard" if isinstance(grad, ShardedTensor) else "shard"
        fix = f"x.grad = sl.{verb}(gradient, {str(want.sharding)!r})"
        raise call_error(ShardError, why, "grad", fix, tensor=x, gradient=grad)
    x.raw.grad = grad.raw


def _lies_as(x: ShardedTensor, y: object) -> bool:
    """Check whether ``y`` has blocks as ``x`` has."""
    return isinstance(y, ShardedTensor) and (
        (x.sharding, x.padded_shape, x.mesh) == (y.sharding, y.padded_shape, y.mesh)
    )


@implements(Tensor.backward, takes="all")
def _backward(func: Func, args: Args, kwargs: Kwargs) -> None:
    _differentiate(*args, **kwargs)


def _differentiate(
    x: ShardedTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    if inputs is not None:
        inputs = [i.raw for i in _listed(inputs)]
    x = settle(x)
    backward_of(x.raw, _cotangent(x, gradient), retain_graph, create_graph, inputs)


@implements(torch.autograd.backward, takes="all")
def _autograd_backward(func: Func, args: Args, kwargs: Kwargs) -> None:
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = _listed(given.pop("tensors"))
    raws = _with_cotangents(tensors, given.pop("grad_tensors", None))
    if given.get("inputs") is not None:
        given["inputs"] = [raw_of(x) for x in _listed(given["inputs"])]
    torch.autograd.backward(*raws, **given)


def _with_cotangents(tensors: list[Tensor], cotangents: Any) -> tuple[list[Any], list[Any]]:
    """Return the blocks of the tensors to differentiate, and those of their cotangents."""
    given = [None] * len(tensors) if cotangents is None else _listed(cotangents)
    raws: list[Any] = list(tensors)
    found: list[Any] = list(given)
    for i, (x, cotangent) in enumerate(zip(tensors, given, strict=True)):
        if isinstance(x, ShardedTensor):
            ended = settle(x)
            raws[i] = ended.raw
            found[i] = _cotangent(ended, cotangent)
    return raws, found


@implements(Tensor.register_hook, takes="all")
def _register_hook(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, hook = args
    # not x: the hook would keep x and its memory alive
    place = gradient_place(x.place)

    def run(raw: Tensor) -> Tensor | None:
        given = ShardedTensor(raw, place)
        found = hook(given)
        return None if found is None else _hooked(given, found)

    return x.raw.register_hook(run)


def _hooked(given: ShardedTensor, found: Any) -> Tensor:
    if not _lies_as(given, found):
        why = "a hook's gradient lies otherwise than the one it was given"
        fix = f"return sl.reshard(grad, {str(given.sharding)!r})"
        raise call_error(ShardError, why, "register_hook", fix, given=given, grad=found)
    return found.raw


@implements(Tensor.register_post_accumulate_grad_hook, takes="all")
def _register_post_hook(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, hook = args
    held = weakref.ref(x)

    def run(raw: Tensor) -> None:
        leaf = held()
        if leaf is not None:
            hook(leaf)

    return x.raw.register_post_accumulate_grad_hook(run)


def _cotangent(x: ShardedTensor, gradient: Tensor | None) -> Tensor:
    """Return the blocks of a cotangent of ``x``; ones for a number that has none."""
    if gradient is None:
        return _one(x)
    if not isinstance(gradient, ShardedTensor):
        gradient = lift(gradient, x.mesh, "backward")
    if gradient.place is x.place and not x.place.layout.partial:
        return gradient.raw
    if gradient.sharding != gradient_place(x.place).layout:
        why = "the cotangent has another layout than the value"
        fix = f"sl.reshard(gradient, {str(x.sharding)!r})"
        raise call_error(ShardError, why, "backward", fix, value=x, cotangent=gradient)
    return _of_size(gradient, x)


def _of_size(gradient: ShardedTensor, x: ShardedTensor) -> Tensor:
    """Return the blocks of a cotangent with the padding of ``x``."""
    if gradient.padded_shape == x.padded_shape:
        return gradient.raw
    # for dimensions that x stores larger but does not split
    more: list[int] = []
    given, wanted = gradient.padded_shape, x.padded_shape
    for n, m, token in zip(given, wanted, x.dims, strict=True):
        if n > m or (n < m and token.is_split):
            why = f"the cotangent is padded to {list(given)}, the value to {list(wanted)}"
            raise call_error(ShardError, why, "backward", value=x, cotangent=gradient)
        more = [0, m - n, *more]
    return torch.nn.functional.pad(gradient.raw, more)


def _one(x: ShardedTensor) -> Tensor:
    """Return the cotangent of a number.  Raises: ShardError for another tensor."""
    if x.place.tiled.numel() != 1:
        why = "backward of a tensor that is no scalar needs its cotangent"
        raise call_error(ShardError, why, "backward", "x.sum().backward()", tensor=x)
    if x.raw.is_complex() and x.raw.requires_grad:
        why = "backward of a complex number needs its cotangent"
        raise call_error(ShardError, why, "backward", "x.abs().backward()", tensor=x)
    return torch.ones_like(x.raw)


@implements(torch.autograd.grad, takes="all")
def _autograd_grad(func: Func, args: Args, kwargs: Kwargs) -> object:
    names = ("outputs", "inputs", "grad_outputs")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs, inputs = (_listed(given.pop(n)) for n in names[:2])
    if given.get("is_grads_batched"):
        raise no_transform("vmap", (outputs, inputs), "torch.autograd.functional.jacobian(f, x)")
    raws, cotangents = _with_cotangents(outputs, given.pop("grad_outputs", None))
    raw_grads = torch.autograd.grad(
        raws, [raw_of(x) for x in inputs], cotangents, *args[3:], **given
    )
    return tuple(
        gradient_of(x, g) if isinstance(x, ShardedTensor) and g is not None else g
        for x, g in zip(inputs, raw_grads, strict=True)
    )


def _listed(x: Tensor | Iterable[Any]) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


def _formatted(x: ShardedTensor, form: torch.memory_format) -> ShardedTensor:
    """Copy to blocks whose strides are those of a memory format."""
    alike = form in (torch.preserve_format, torch.contiguous_format)
    if alike or not lead(x.mesh):
        return x.becomes(x.raw.clone(memory_format=form))
    ndim = len(x.padded_shape)
    if ndim != (4 if form is torch.channels_last else 5):
        # raises torch's own error
        return x.becomes(block_of(x).clone(memory_format=form))
    # ranks, batch, space, channels
    last = (0, 1, *range(3, ndim + 1), 2)
    back = [last.index(d) for d in range(ndim + 1)]
    return x.becomes(x.raw.permute(last).clone(memory_format=torch.contiguous_format).permute(back))


@by_signature(_FORM, Tensor.contiguous, takes="all")
def _contiguous(func: Func, x: ShardedTensor, form: torch.memory_format | None) -> ShardedTensor:
    """Return the tensor itself where torch would return its operand, else a copy."""
    if _is_contiguous(func, x, form):
        return x
    return _formatted(x, form or torch.contiguous_format)


@by_signature("clone(input, *, memory_format=None)", Tensor.clone, torch.clone, takes="all")
def _clone(func: Func, x: ShardedTensor, form: torch.memory_format | None) -> ShardedTensor:
    return _formatted(x, form or torch.preserve_format)


@implements(Tensor.detach, torch.detach, Tensor.data.__get__, takes="all")
def _detached(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    (x,) = (*args, *kwargs.values())
    return x.becomes(func(x.raw))


@implements(Tensor.data.__set__, takes="all")
def _set_data(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Assign ``x.data = y``: x holds y's blocks; its dtype may change, and no graph records it."""
    x = args[0]
    x.raw.data = _as_data(*args).raw.detach()
    with no_torch_function():
        # also set the wrapper's own dtype and device
        func(x, x.becomes(x.raw.detach()))


@implements(torch.ops.aten.set_.source_Tensor, takes="all")
def _set(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Run ``x.set_(y)``, with which torch's parametrizations replace a parameter."""
    func(args[0].raw, _as_data(*args).raw)
    return args[0]


def _as_data(x: ShardedTensor, new: Any) -> ShardedTensor:
    """Reshard ``new`` to ``x``'s layout, if that moves nothing or is within ``sl.implicit``."""
    if not isinstance(new, ShardedTensor) and scope().call.promoting:
        new = lift(new, x.mesh, "data")
    near = isinstance(new, ShardedTensor) and new.mesh is x.mesh
    if near and new.shape == new.padded_shape == x.padded_shape:
        way, size = new.sharding >> x.sharding, new.raw.element_size()
        if may_move(float(way.bytes(tuple(new.shape), x.mesh, size))):
            new = reshard(new.detach(), x.sharding)
    if near and new.shape == x.shape and _lies_as(x, new):
        return new
    why, fix, given = "data is replaced by data of the same size and layout", "x = y", new
    if not isinstance(new, Tensor):
        given = type(new).__name__
    elif new.shape == x.shape:
        fix = f"x.data = sl.{'reshard' if near else 'shard'}(y, sl.layout_of(x))"
    raise call_error(ShardError, why, "data", fix, x=x, y=given)


@implements(may_swap_data, takes="all")
def _may_swap_data(func: Func, args: Args, kwargs: Kwargs) -> bool:
    x, new = args
    if not isinstance(x, ShardedTensor) or not _lies_as(x, new) or new.shape != x.shape:
        return False
    return bool(func(x.raw, new.raw))


@implements(Tensor.fill_, takes="all")
def _fill(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Set every position to the same value; the parts of a sum only to zero."""
    x, value = (*args, *kwargs.values())
    if isinstance(value, Tensor):
        if value.ndim:
            raise call_error(
                BadArgument, "fill_ takes a value of no dimensions", "fill_", value=value
            )
        value = settle(lift(value, x.mesh, "fill_"))
        refuse_sums("fill_", value, x)
        raw = vary(value.raw, x.mesh, {*x.sharding.axes, *x.deferred})
        x.raw.copy_(raw.view(storage_shape(x.mesh, *[1] * len(x.padded_shape))))
        return x
    if value != 0:
        refuse_sums("fill_", x)
    x.raw.fill_(value)
    return x


@implements(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
            Tensor.__index__, Tensor.__complex__, takes="all")  # fmt: skip
def _item(func: Func, args: Args, kwargs: Kwargs) -> object:
    (x,) = (*args, *kwargs.values())
    verb = "item" if x.padded_shape.numel() == 1 else "tolist"
    if not holds_values(x.mesh) and not x.sharding.named:
        # a plan knows the values of masks and positions
        with suppress(RuntimeError):
            return func(block_of(x))
    _whole_here(x, func, verb)
    return func(block_of(x))


@implements(Tensor.__format__, takes="all")
def _format(func: Func, args: Args, kwargs: Kwargs) -> str:
    """Format a scalar as its number, anything else as its repr, as torch does."""
    x, spec = args
    if x.padded_shape:
        return object.__format__(x, spec)
    _whole_here(x, func, "item")
    return func(block_of(x).detach(), spec)


@implements(Tensor.__array__, Tensor.__dlpack__, Tensor.numpy, takes="all")
def _array(func: Func, args: Args, kwargs: Kwargs) -> object:
    x = args[0] if args else kwargs["self"]
    _whole_here(x, func, "numpy")
    return func(block_of(x), *args[1:], **kwargs)


def _whole_here(x: ShardedTensor, func: Func, verb: str) -> None:
    if x.sharding.named:
        why = "a Python value needs the whole tensor"
        raise call_error(
            ShardError, why, func.__name__.strip("_"), f"sl.unshard(x).{verb}()", tensor=x
        )
    if not holds_values(x.mesh):
        raise on_shapes(func, x.mesh)


_READERS = (_plain, _of_blocks, _set_data, _item, _format, _array)
_UNCAST.update(f for f, implementation in TABLE.items() if implementation in _READERS)
_UNCAST.update((Tensor.data.__get__, Tensor.is_contiguous))
