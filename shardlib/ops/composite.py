"""Composite operators, each a line of others: stacks, splits, copies of views, comparisons."""

from collections.abc import Sequence

import optree
import torch
from torch import Tensor

from shardlib.ops.declare import spelled
from shardlib.opspec import Args, Func, Kwargs, functions_of
from shardlib.tensor import Unfit, implements


def _row(t: Tensor) -> Tensor:
    return t.reshape(1, -1) if t.ndim < 2 else t


@spelled("hstack(tensors)")
def _hstack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = [t.reshape(1) if t.ndim == 0 else t for t in tensors]
    return torch.cat(tensors, int(tensors[0].ndim != 1))


@spelled("vstack(tensors)\n row_stack(tensors)")
def _vstack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([_row(t) for t in tensors], 0)


@spelled("dstack(tensors)")
def _dstack(tensors: Sequence[Tensor]) -> Tensor:
    tensors = [_row(t) for t in tensors]
    return torch.cat([t.unsqueeze(-1) if t.ndim == 2 else t for t in tensors], 2)


@spelled("flipud(input)")
def _flipud(input: Tensor) -> Tensor:
    if not input.ndim:
        raise Unfit("one dimension is needed")
    return input.flip(0)


@spelled("column_stack(tensors)")
def _column_stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)


spelled("ravel(input)")(lambda input: input.contiguous().reshape(-1))
spelled("fliplr(input)")(lambda input: input.flip(1))
spelled("dist(input, other, p=2)")(
    lambda input, other, p: torch.linalg.vector_norm(input - other, p)
)
spelled("fill(input, value: number)")(lambda input, value: torch.full_like(input, value))


@spelled("vdot(input, other)")
def _vdot(input: Tensor, other: Tensor) -> Tensor:
    if input.dtype == torch.bool:
        raise Unfit("products of what is true or false")
    return (input.conj() * other).sum(dtype=input.dtype)


@spelled("kron(input, other)", takes="skew sums")
def _kron(input: Tensor, other: Tensor) -> Tensor:
    """Compute the Kronecker product: reshape both to interleaved dimensions, and multiply."""
    n = max(input.ndim, other.ndim)
    a = [*[1] * (n - input.ndim), *input.shape]
    b = [*[1] * (n - other.ndim), *other.shape]
    left = input.reshape([m for size in a for m in (size, 1)])
    right = other.reshape([m for size in b for m in (1, size)])
    return (left * right).reshape([m * k for m, k in zip(a, b, strict=True)])


@spelled("cross(input, other, dim: int = None)")
def _cross(input: Tensor, other: Tensor, dim: int | None) -> Tensor:
    """Compute a cross product, along the first dimension of three elements if none is named."""
    found = next((d for d, n in enumerate(input.shape) if n == 3), -1) if dim is None else dim
    return torch.linalg.cross(input, other, dim=found)


spelled("msort(input)")(lambda input: input.sort(0).values)


def _cut(dim: int) -> Func:
    def cut(input: Tensor, indices_or_sections: int | Sequence[int]) -> object:
        if isinstance(indices_or_sections, int) and input.shape[dim] % indices_or_sections:
            raise Unfit("sections of different sizes")
        return torch.tensor_split(input, indices_or_sections, dim)

    return cut


spelled("hsplit(input, indices_or_sections)")(
    lambda input, indices_or_sections: torch.tensor_split(
        input, indices_or_sections, int(input.ndim != 1)
    )
)
spelled("vsplit(input, indices_or_sections)")(_cut(0))
spelled("dsplit(input, indices_or_sections)")(_cut(2))


def _apart(x: Tensor) -> Tensor:
    """Detach the input of unsafe_split without grad mode; otherwise pieces would require grad.

    As in torch 2.13.
    """
    return x if torch.is_grad_enabled() else x.detach()


spelled("unsafe_split(input, split_size, dim: int = 0)")(
    lambda input, split_size, dim: _apart(input).split(split_size, dim)
)
spelled("unsafe_chunk(input, chunks: int, dim: int = 0)")(
    lambda input, chunks, dim: _apart(input).chunk(chunks, dim)
)


@spelled("sum_to_size(input, *size: int)")
def _to_size(input: Tensor, size: Sequence[int]) -> Tensor:
    """Sum broadcast dimensions to a smaller size."""
    if not size:
        return input.sum()
    lead = input.ndim - len(size)
    if lead < 0:
        raise Unfit("a smaller tensor")
    gone = [
        d for d in range(input.ndim) if d < lead or (size[d - lead] == 1 and input.shape[d] != 1)
    ]
    return (input.sum(gone, keepdim=True) if gone else input).reshape(tuple(size))


@spelled("equal(input, other: tensor)")
def _equal(input: Tensor, other: Tensor) -> bool:
    return input.shape == other.shape and bool((input == other).all())


spelled("allclose(input, other: tensor, rtol=1e-05, atol=1e-08, equal_nan=False)")(
    lambda **given: bool(torch.isclose(**given).all())
)


def _copied(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run ``permute_copy`` and others: the view, then a copy of it."""
    name = func.__name__.removesuffix("_copy")
    view = _VIEWS.get(name) or getattr(torch, name, None) or getattr(Tensor, name)
    if not args:
        # a method gets its tensor by position
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    return optree.tree_map(torch.clone, view(*args, **kwargs))


_VIEWS = {
    "view": Tensor.view,
    "alias": torch.clone,
    "unfold": Tensor.unfold,
    "expand": Tensor.expand,
    "split": lambda input, split_size, dim=0: input.split(split_size, dim),
}

implements(*functions_of("copied view"))(_copied)


@implements(Tensor.H.__get__, Tensor.mH.__get__, Tensor.adjoint, torch.adjoint)
def adjoint(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the conjugate of the transpose."""
    (x,) = (*args, *kwargs.values())
    if x.ndim < 2 or (x.ndim > 2 and func == Tensor.H.__get__):
        raise Unfit("a matrix is needed")
    return x.mT.conj() if x.is_complex() else x.mT


implements(torch.zero_)(lambda func, args, kwargs: Tensor.zero_(*args, *kwargs.values()))
