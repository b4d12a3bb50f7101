"""Adam with 8-bit moments: blocks of 64 elements, each with its own scale.

An element's code is the nearest of 256 numbers between -1 and 1 (0 and 1 for the second moment),
times the largest of its block.  The numbers span seven decades, twice as many in each as in the
one below, so that small elements keep their digits next to large ones.  Buckets of ``zero`` are
cut at multiples of 64 elements, so no cut splits a block.

Source: Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import blocks, lead
from shardlib.layouts import Dim, Layout
from shardlib.optim.adaptive import average, direction
from shardlib.optim.transform import (
    Schedule,
    Step,
    Transform,
    at_step,
    divide,
    ranged,
)
from shardlib.optim.trees import ALIGN, SPAN, Tree, cuts, each, moments, need, pieces, ready
from shardlib.tensor import Place, ShardedTensor

__all__ = ["adam8bit"]


class CodedState(NamedTuple):
    """Steps taken; codes of the moments, and the largest element of each of their blocks.

    ``made_for``  a digest of layouts and buckets, which decide the elements of each block.
    """

    count: int
    mu: Tree
    nu: Tree
    mu_scale: Any
    nu_scale: Any
    made_for: int


@ranged()
def adam8bit(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Transform:
    """Update as AdamW does, with 2.125 bytes of moments per parameter in place of 8.

    Blocks consist of neighbours in a rank's own part, so rounding depends on the layout, and a
    state is valid only for the layout and world size that it was made in.  ``load_state_dict``
    refuses it elsewhere: rounding the codes again in other blocks would change the moments.

    >>> tx = adam8bit(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> updates, state = tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)
    >>> updates["w"], state.mu["w"].dtype
    (tensor([-0.5000,  0.5000]), torch.uint8)
    """

    def init(params: Tree) -> CodedState:
        zeros = moments(params)
        (mu, mu_scale), (nu, nu_scale) = _coded(zeros, True), _coded(zeros, False)
        return CodedState(0, mu, nu, mu_scale, nu_scale, _digest(zeros))

    def stepped(
        grads: Tree, state: CodedState, params: Tree, rate: float, into: Tree
    ) -> CodedState:
        """Add the updates to a tree, or write them where there are no parameters."""
        of = direction(state.count + 1, rate, b1, b2, eps, weight_decay)
        for g, p, to, mu, nu, mu_scale, nu_scale in _spans(grads, params, into, state):
            dtype = _kept(g)
            m = _decode(mu, mu_scale, 0, True, dtype)
            v = _decode(nu, nu_scale, 0, False, dtype)
            average(g, m, v, b1, b2)
            u = of(m, v, *([p] if weight_decay else []))
            if into is params:
                to.add_(u)
            else:
                to.copy_(u)
            for codes, scale, x, signed in ((mu, mu_scale, m, True), (nu, nu_scale, v, False)):
                new, largest = _encode(x, 0, signed)
                codes.copy_(new)
                scale.copy_(largest)
        return state._replace(count=state.count + 1)

    def update(grads: Tree, state: CodedState, params: Tree = None) -> tuple[Any, CodedState]:
        ready(grads, "adam8bit", state.mu)
        if weight_decay:
            need(params, "adam8bit")
            each(lambda g, p: g, grads, params)  # refuses other layouts
        out = each(lambda g: torch.zeros_like(g, dtype=_kept(g)), grads)
        rate = at_step(lr, state.count)
        with torch.no_grad():
            given = params if weight_decay else grads
            return out, stepped(grads, each(torch.clone, state), given, rate, out)

    def donate(grads: Tree, state: CodedState, params: Tree, step: Step) -> CodedState:
        ready(grads, "adam8bit", state.mu)
        divide(grads, step)
        step.lr = at_step(lr, state.count)
        return stepped(grads, state, params, step.lr, params)

    return Transform(init, update, "elementwise", donate)


def _spans(
    grads: Tree, params: Tree, into: Tree, state: CodedState
) -> Iterator[tuple[Tensor, ...]]:
    """Yield spans, whole blocks of 64, of every block's gradient, parameter, target, codes, scales.

    A tensor that is not contiguous is copied, and the target written back.
    """
    trees = (grads, params, into, state.mu, state.nu, state.mu_scale, state.nu_scale)
    pieces(*trees[:5])  # refuses other trees before anything is written
    leaves = (optree.tree_leaves(t, none_is_leaf=True) for t in trees)
    for row in zip(*leaves, strict=True):
        if not all(isinstance(x, Tensor) for x in row) or not row[0].numel():
            continue
        raws = [x.raw.detach() if isinstance(x, ShardedTensor) else x.detach() for x in row]
        mesh = row[0].mesh if isinstance(row[0], ShardedTensor) else None
        of_ranks = zip(*([r] if mesh is None else blocks(r, mesh) for r in raws), strict=True)
        for parts in of_ranks:
            flat = [t.reshape(-1) for t in parts]
            rows = [t.split(SPAN if i < 5 else SPAN // ALIGN) for i, t in enumerate(flat)]
            yield from zip(*rows, strict=True)
            for old, new in zip(parts[2:5], flat[2:5], strict=True):
                if not old.is_contiguous():
                    old.copy_(new.view(old.shape))


def _kept(like: Tensor) -> torch.dtype:
    """Return the dtype of decoded moments, for gradients such as ``like``."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=8)
def numbers(signed: bool) -> Tensor:
    """List the 256 numbers that the codes stand for, ascending.

    >>> numbers(True)[[0, 127, 255]], len(numbers(False))
    (tensor([-0.9930,  0.0000,  1.0000]), 256)
    """
    found = [0.0, 1.0]
    for decade in range(7):
        # dynamic quantization: 2^k numbers (unsigned 2^(k+1)) in the k-th decade
        cuts = torch.linspace(
            0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64, device="cpu"
        )
        middle = (cuts[1:] + cuts[:-1]) / 2 * 10.0 ** (decade - 6)
        found += middle.tolist() + ((-middle).tolist() if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


@lru_cache(maxsize=32)
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers, and the midpoints between neighbours, where rounding changes."""
    table = numbers(signed).to(device)
    return table, (table[1:] + table[:-1]) / 2


def _blocks(raw: Tensor, front: int) -> Tensor:
    """Reshape [..., n], or a storage of blocks, to [..., ceil(n / 64), 64], padded with zeros."""
    flat = raw.reshape(*raw.shape[:front], -1)
    return F.pad(flat, (0, -flat.shape[-1] % ALIGN)).unflatten(-1, (-1, ALIGN))


def _encode(raw: Tensor, front: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Compute the codes, shaped as ``raw``, and the scales of its blocks."""
    if not raw.numel():
        return raw.to(torch.uint8), raw.new_zeros(*raw.shape[:front], 0, dtype=torch.float32)
    rows = _blocks(raw, front)
    scale = rows.abs().amax(-1)
    # a block of zeros has the scale 0
    unit = (rows / scale.clamp(min=torch.finfo(scale.dtype).tiny)[..., None]).float()
    codes = torch.bucketize(unit, _table(signed, raw.device)[1]).to(torch.uint8)
    n = math.prod(raw.shape[front:])
    return codes.flatten(-2)[..., :n].reshape(raw.shape), scale.float()


def _decode(codes: Tensor, scale: Tensor, front: int, signed: bool, dtype: torch.dtype) -> Tensor:
    if not codes.numel():
        return codes.to(dtype)
    rows = _table(signed, codes.device)[0][_blocks(codes, front).long()] * scale[..., None]
    n = math.prod(codes.shape[front:])
    return rows.flatten(-2)[..., :n].reshape(codes.shape).to(dtype)


def _digest(tree: Tree) -> int:
    """Compute a digest that is equal if the elements of all tensors have the same neighbours."""
    said = cuts(tree)
    for x in optree.tree_leaves(tree):  # type: ignore[arg-type]
        where = [x.sharding, x.mesh.axes] if isinstance(x, ShardedTensor) else []
        said.append(" ".join(map(str, [list(x.shape), *where])))
    return int.from_bytes(hashlib.sha256("; ".join(said).encode()).digest()[:6], "big")


def _coded(tree: Tree, signed: bool) -> tuple[Any, Any]:
    """Make the trees of codes and of scales."""
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
    pairs = [_coded_leaf(x, signed) if isinstance(x, Tensor) else (x, x) for x in leaves]
    codes = optree.tree_unflatten(shape, [c for c, _ in pairs])
    return codes, [s for _, s in pairs]


def _coded_leaf(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        if not isinstance(x, ShardedTensor):
            return _encode(x, 0, signed)
        front = lead(x.mesh)
        codes, scale = _encode(x.raw, front, signed)
        axes = tuple(a for a in x.mesh.names if a in x.sharding.axes)
        size = scale.shape[-1] * x.mesh.axis_size(axes)
        place = Place(Layout((Dim(axes),)), torch.Size([size]), x.mesh)
        return x.becomes(codes), ShardedTensor(scale, place)
