"""Operators that are one line of others, mostly ways to join tensors."""

from typing import Any

import torch
from torch import Tensor

from shardlib.ops.declare import spelled


def _row(t: Tensor) -> Tensor:
    return t.reshape(1, -1) if t.ndim < 2 else t


def _hstack(tensors: Any) -> Tensor:
    tensors = [t.reshape(1) if t.ndim == 0 else t for t in tensors]
    return torch.cat(tensors, 0 if tensors[0].ndim == 1 else 1)


def _vstack(tensors: Any) -> Tensor:
    return torch.cat([_row(t) for t in tensors], 0)


def _dstack(tensors: Any) -> Tensor:
    tensors = [_row(t) for t in tensors]
    return torch.cat([t.unsqueeze(-1) if t.ndim == 2 else t for t in tensors], 2)


def _column_stack(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)


spelled("hstack(tensors)", _hstack)
spelled("vstack(tensors)\n row_stack(tensors)", _vstack)
spelled("dstack(tensors)", _dstack)
spelled("column_stack(tensors)", _column_stack)
spelled("ravel(input)", lambda input: input.reshape(-1))
spelled("fliplr(input)", lambda input: input.flip(1))
spelled("flipud(input)", lambda input: input.flip(0))
spelled("dist(input, other, p=2)", lambda input, other, p: torch.linalg.vector_norm(input - other, p))
spelled("fill(input, value: number)", lambda input, value: torch.full_like(input, value))
