"""Optimizers by elements: Adam and its kin, Adagrad, RMSprop, SGD, Lion; and LAMB, by tensor.

In Adam with 8-bit moments blocks of 64 elements have a scale each.  An element's code is the
nearest of 256 numbers between -1 and 1 (0 and 1 for the second moment), times the largest of its
block.  The numbers span seven decades, twice as many in each as in the one below, so that small
elements keep their digits next to large ones.  Buckets of ``zero`` are cut at multiples of 64
elements, so no cut splits a block.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import storage
from shardlib.dtypes import wider
from shardlib.errors import BadArgument
from shardlib.kernels import active
from shardlib.kernels.active import Backend
from shardlib.kernels.adamw import AdamStep, adamw_, adamw_halves_, steppable
from shardlib.kernels.apex import apex
from shardlib.optim.buckets import vector
from shardlib.optim.groups import Mask, by_mask
from shardlib.optim.norms import norms, scale_in_place
from shardlib.optim.transform import (
    Schedule,
    Step,
    Transform,
    at_step,
    beginning,
    by_directions,
    divided,
    elementwise,
    one_dtype,
    ranged,
    restoring,
    under,
    widened,
    written,
)
from shardlib.optim.trees import (
    ALIGN,
    SPAN,
    Tree,
    blocks_of,
    cuts,
    each,
    is_bucketed,
    moments,
    pieces,
    ready,
    spans,
)
from shardlib.tensor import ShardedTensor, real_axes


class MomentState(NamedTuple):
    """Steps taken, first and second moments."""

    count: int
    mu: Tree
    nu: Tree


@ranged()
def adamw(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask = None,
    backend: Backend = "auto",
) -> Transform:
    """Update by Adam with decoupled weight decay, as torch.optim.AdamW.

    ``mask``     the parameters that decay, as ``masked`` takes it; None: all.
    ``backend``  the kernels of ``sl.optim.step``, as ``sl.kernels.use`` names them.
    Source: Loshchilov and Hutter, arXiv 1711.05101.

    >>> import torch
    >>> tx = adamw(0.5, weight_decay=0.0)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params), params)[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    if mask is not None:
        both = (adamw(lr, b1, b2, eps, by, backend=backend) for by in (weight_decay, 0.0))
        return by_mask(mask, *both, op="adamw")

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        return adam_rule(AdamStep(rate, b1, b2, eps, weight_decay, count))

    def own(params: Tree, lists: Any, step: Step, rate: float, count: int) -> bool:
        return _by_kernel(params, lists, step, AdamStep(rate, b1, b2, eps, weight_decay, count))

    def donate(grads: Tree, state: MomentState, params: Tree, step: Step) -> MomentState:
        if _needs_restoring(params, step):
            return restoring(whole, grads, state, params, step)
        return made.donate(grads, state, params, step)

    made: Any = elementwise(
        "adamw", MomentState, lr, rule, kept=("mu", "nu"), weights=bool(weight_decay), own=own,
        kernel="adamw", beta1=b1, beta2=b2, weight_decay=weight_decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    whole = made._replace(donate=donate, halves=True, heeds=True)
    return under(backend, whole)


def _own(params: list[Tensor]) -> bool:
    """Return whether the library's own kernels may step these parameters."""
    return bool(params) and (not params[0].is_cpu or active.cpu)


def _needs_restoring(params: Tree, step: Step) -> bool:
    """Return whether only a kernel that knows no step that is not sound can step these."""
    if step.beside is None or step.beside[0] is not params or step.sound is None or step.guarded:
        return False
    (p,) = pieces(params)
    return _own(p) and p[0].dtype == torch.bfloat16


def _by_kernel(params: Tree, lists: Sequence[list[Tensor]], step: Step, hyper: AdamStep) -> bool:
    """Step by a fused kernel, with the half-precision companions; False if no kernel applies."""
    p, g, m, v = lists
    # these kernels know no step that is not sound
    if not _own(p) or (step.sound is not None and not step.guarded):
        return False
    stepped = apex("adam", p[0]) if one_dtype(lists) == torch.float32 else None
    if stepped is not None:
        if step.scale is not None:
            divided(g, step.scale)
        stepped(g, p, m, v, hyper)
        written(lists)
        return True
    scale = None if step.scale is None else step.scale.to(p[0].device, torch.float32)
    mine = step.beside is not None and step.beside[0] is params
    out = pieces(step.beside[1])[0] if step.beside is not None and mine else []
    if mine and p[0].dtype == torch.bfloat16:
        adamw_halves_(g, p, out, m, v, scale, hyper)
    elif steppable(g, p, m, v, out):
        adamw_(g, p, m, v, out, scale, hyper)
    else:
        return False
    if mine:
        step.beside = None
    written(lists)
    return True


def adam_rule(h: AdamStep) -> Callable[..., Tensor]:
    """Return the function from a gradient, both moments and a weight that decays to the update."""
    size, root = h.lr / (1 - h.b1**h.count), (1 - h.b2**h.count) ** 0.5

    def step(g: Tensor, m: Tensor, v: Tensor, *p: Tensor) -> Tensor:
        _average(g, m, v, h.b1, h.b2)
        u = (m * -size).div_((v.sqrt() / root).add_(h.eps))
        return u.add_(p[0], alpha=-h.lr * h.decay) if p else u

    return step


def _average(g: Tensor, m: Tensor, v: Tensor, b1: float, b2: float) -> None:
    """Update both moments with a gradient, in place."""
    m.lerp_(g.to(m.dtype), 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)


def adam(lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Update by Adam: ``adamw`` without decay.

    >>> import torch
    >>> tx = adam(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """
    return adamw(lr, b1, b2, eps, weight_decay=0.0)


class SumState(NamedTuple):
    """Steps taken, and the sum of all squared gradients."""

    count: int
    total: Tree


@ranged()
def adagrad(
    lr: float | Schedule,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    start: float = 0.0,
) -> Transform:
    """Update at a rate that falls as an element's squared gradients add up: torch.optim.Adagrad.

    ``start``  initial value of the sums.
    Source: Duchi, Hazan and Singer, JMLR 12 (2011), figure 1.

    >>> import torch
    >>> tx = adagrad(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        size = rate / (1 + (count - 1) * lr_decay)

        def step(g: Tensor, t: Tensor) -> Tensor:
            return g / t.addcmul_(g, g).sqrt().add_(eps) * -size

        return step

    return elementwise(
        "adagrad", SumState, lr, rule, kept=("total",), start=start, decay=weight_decay,
        kernel="adagrad", lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=False,
    )  # fmt: skip


class RmsState(NamedTuple):
    """Steps taken, the running mean squares, the running means (``centered``), and the momentum."""

    count: int
    nu: Tree
    mean: Tree = ()
    trace: Tree = ()


@ranged()
def rmsprop(
    lr: float | Schedule,
    decay: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    weight_decay: float = 0.0,
) -> Transform:
    """Update by gradients over the root of their running mean square, as torch.optim.RMSprop.

    ``decay``     of the running means; torch calls it alpha.
    ``centered``  take the variance in place of the mean square.
    Source: Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning (2012).

    >>> import torch
    >>> tx = rmsprop(0.5, decay=0.0)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            root = v.mul_(decay).addcmul_(g, g, value=1 - decay)
            if centered:
                mean = more[0].lerp_(g.to(more[0].dtype), 1 - decay)
                root = v.addcmul(mean, mean, value=-1)
            way = g / root.sqrt().add_(eps)
            if momentum:
                way = more[-1].mul_(momentum).add_(way)
            return way * -rate

        return step

    kept = [n for n, on in (("nu", True), ("mean", centered), ("trace", momentum)) if on]
    return elementwise("rmsprop", RmsState, lr, rule, kept=kept, decay=weight_decay)


# ---------------------------------------------------------------- one running trace: SGD and Lion


class TraceState(NamedTuple):
    """Steps taken and a running trace of gradients."""

    count: int
    trace: Tree = ()


@ranged()
def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Transform:
    """Update by stochastic gradient descent, as torch.optim.SGD; decay is added to the gradient.

    >>> import torch
    >>> tx = sgd(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params))[0]
    {'w': tensor([-0.5000, -1.0000])}
    """

    if nesterov and not momentum:
        raise BadArgument(
            "nesterov looks ahead along the momentum, and there is none",
            op="sgd",
            fix="sl.optim.sgd(0.1, momentum=0.9, nesterov=True)",
        )

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, *kept: Tensor) -> Tensor:
            if not kept:
                return g * -rate
            # in the wider dtype of both: the trace of fp64 gradients may be kept in half precision
            trace = kept[0].mul_(momentum) + g
            kept[0].copy_(trace)
            return (g + trace * momentum if nesterov else trace) * -rate

        return step

    return elementwise(
        "sgd", TraceState, lr, rule, kept=("trace",) if momentum else (), decay=weight_decay,
        kernel="sgd", momentum=momentum, nesterov=nesterov, weight_decay=weight_decay,
        dampening=0.0, maximize=False, is_first_step=False,
    )  # fmt: skip


@ranged()
def lion(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Mask = None,
) -> Transform:
    """Update by the sign of an interpolated momentum.

    Source: Chen et al., arXiv 2302.06675.

    ``mask``  the parameters that decay, as ``masked`` takes it; None: all.

    >>> import torch
    >>> tx = lion(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    if mask is not None:
        both = (lion(lr, b1, b2, by) for by in (weight_decay, 0.0))
        return by_mask(mask, *both, op="lion")

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, m: Tensor, *p: Tensor) -> Tensor:
            sign = m.lerp(g.to(m.dtype), 1 - b1).sign_()
            m.lerp_(g.to(m.dtype), 1 - b2)
            return (sign.add_(p[0], alpha=weight_decay) if p else sign).mul_(-rate)

        return step

    return elementwise("lion", TraceState, lr, rule, kept=("trace",), weights=bool(weight_decay))


# ---------------------------------------------------------------- LAMB


@ranged()
def lamb(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    backend: Backend = "auto",
) -> Transform:
    """Update by Adam's direction for each tensor, scaled to the tensor's norm, times the rate.

    If a tensor or its direction is zero, the direction is not scaled.
    ``backend``  the kernels of ``sl.optim.step``, as ``sl.kernels.use`` names them; apex's takes
                 parameters that every rank holds whole.
    Moves one psum, of two scalars per tensor.
    Source: You et al., arXiv 1904.00962, algorithm 2.

    >>> tx = lamb(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def direct(
        grads: Tree, state: MomentState, params: Tree, way: Tree, rate: float
    ) -> tuple[MomentState, float]:
        count = state.count + 1
        size, root = 1 - b1**count, (1 - b2**count) ** 0.5
        for g, p, m, v, u in spans(*pieces(grads, params, state.mu, state.nu, way)):
            _average(g, m, v, b1, b2)
            u.copy_((m / size).div_((v.sqrt() / root).add_(eps)))
            if weight_decay:
                u.add_(p, alpha=weight_decay)
        rows = zip(*norms(params, way), strict=True)
        scale_in_place(way, [w if w is None else _ratio(p, w) * -rate for p, w in rows])
        return state._replace(count=count), 0.0

    def donate(grads: Tree, state: MomentState, params: Tree, step: Step) -> MomentState:
        ready(grads, "lamb", state.mu)
        lists = pieces(grads, params, state.mu, state.nu)
        stepped = None
        if _own(lists[1]) and _whole(params) and one_dtype(lists) == torch.float32:
            stepped = apex("lamb", lists[0][0])
        if stepped is None:
            return made.donate(grads, state, params, step)
        step.unscale(grads)
        step.lr = at_step(lr, state.count)
        stepped(*lists, AdamStep(step.lr, b1, b2, eps, weight_decay, state.count + 1))
        written(lists)
        return state._replace(count=state.count + 1)

    init = beginning(MomentState, "mu", "nu")
    made: Any = by_directions("lamb", "tensor", init, lr, direct, moment="mu")
    return under(backend, made._replace(donate=donate))


def _whole(params: Tree) -> bool:
    """Return whether each rank holds every tensor whole: then its norm needs no communication."""
    if is_bucketed(params):
        return False
    leaves = [x for x in optree.tree_leaves(params) if isinstance(x, ShardedTensor)]
    return not any(x.is_padded or real_axes(x.mesh, x.sharding.axes) for x in leaves)


def _ratio(tensor: Tensor | None, way: Tensor) -> Tensor:
    assert tensor is not None, "a parameter has no norm"
    both = (tensor > 0) & (way > 0)
    # the inner where avoids a division by 0
    return torch.where(both, tensor / torch.where(both, way, 1.0), 1.0)


# ---------------------------------------------------------------- Adam with 8-bit moments


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
    Source: Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2.

    >>> tx = adam8bit(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> updates, state = tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)
    >>> updates["w"], state.mu["w"].dtype
    (tensor([-0.5000,  0.5000]), torch.uint8)
    """

    def init(params: Tree) -> CodedState:
        (zeros,) = moments(params, "mu").values()
        mu, nu = _zero_codes(zeros, True), _zero_codes(zeros, False)
        return CodedState(0, mu, nu, _zero_scales(zeros), _zero_scales(zeros), _digest(zeros))

    def direct(
        grads: Tree, state: CodedState, params: Tree, into: Tree, rate: float
    ) -> tuple[CodedState, float]:
        """Write the updates to a tree, or add them to the parameters."""
        rule = adam_rule(AdamStep(rate, b1, b2, eps, weight_decay, state.count + 1))
        given = params if weight_decay else grads
        for g, p, to, mu, nu, mu_scale, nu_scale in _spans(grads, given, into, state):
            m = _decode(mu, mu_scale, True, wider(g.dtype))
            v = _decode(nu, nu_scale, False, wider(g.dtype))
            u = rule(g, m, v, *([p] if weight_decay else []))
            if into is params:
                to.add_(u)
            else:
                to.copy_(u)
            for codes, scale, x, signed in ((mu, mu_scale, m, True), (nu, nu_scale, v, False)):
                codes[:], scale[:] = _encode(x, signed)
        return state._replace(count=state.count + 1), 0.0

    def donate(grads: Tree, state: CodedState, params: Tree, step: Step) -> CodedState:
        ready(grads, "adam8bit", state.mu)
        step.unscale(grads)
        step.lr = at_step(lr, state.count)
        return direct(grads, state, params, params, step.lr)[0]

    made = by_directions(
        "adam8bit", "elementwise", init, lr, direct,
        moment="mu", like=lambda grads, state: widened(grads), weights=bool(weight_decay),
    )  # fmt: skip
    return made._replace(donate=donate)


def _spans(
    grads: Tree, params: Tree, into: Tree, state: CodedState
) -> Iterator[tuple[Tensor, ...]]:
    """Yield spans, whole blocks of 64, of every block's gradient, parameter, target, codes, scales.

    A tensor that is not contiguous is copied, and the target written back.
    """
    trees = (grads, params, into, state.mu, state.nu, state.mu_scale, state.nu_scale)
    # refuses other trees before anything is written
    pieces(*trees[:5])
    leaves = (optree.tree_leaves(t, none_is_leaf=True) for t in trees)
    for row in zip(*leaves, strict=True):
        if not all(isinstance(x, Tensor) for x in row) or not row[0].numel():
            continue
        for parts in zip(*map(blocks_of, row), strict=True):
            flat = [t.reshape(-1) for t in parts]
            spans = [t.split(SPAN) for t in flat[:5]]
            scales = [t.split(SPAN // ALIGN) for t in flat[5:]]
            yield from zip(*spans, *scales, strict=True)
            for old, new in zip(parts[2:5], flat[2:5], strict=True):
                if not old.is_contiguous():
                    old.copy_(new.view(old.shape))


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


def _blocks(flat: Tensor) -> Tensor:
    """Reshape [n] to [ceil(n / 64), 64], padded with zeros."""
    return F.pad(flat, (0, -len(flat) % ALIGN)).view(-1, ALIGN)


def _encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Compute the codes [n] of a vector [n], and the scales of its blocks."""
    rows = _blocks(x)
    scale = rows.abs().amax(-1)
    # a block of zeros has the scale 0
    unit = (rows / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).float()
    codes = torch.bucketize(unit, _table(signed, x.device)[1]).to(torch.uint8)
    return codes.view(-1)[: len(x)], scale.float()


def _decode(codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    rows = _table(signed, codes.device)[0][_blocks(codes).long()] * scale[:, None]
    return rows.view(-1)[: len(codes)].to(dtype)


def _digest(tree: Tree) -> int:
    """Compute a digest that is equal if the elements of all tensors have the same neighbours."""
    said = cuts(tree)
    for x in optree.tree_leaves(tree):  # type: ignore[arg-type]
        where = [x.sharding, x.mesh.axes] if isinstance(x, ShardedTensor) else []
        said.append(" ".join(map(str, [list(x.shape), *where])))
    return int.from_bytes(hashlib.sha256("; ".join(said).encode()).digest()[:6], "big")


def _zero_codes(tree: Tree, signed: bool) -> Tree:
    """Make the codes of zeros."""
    (code,) = _encode(torch.zeros(1, device="cpu"), signed)[0].tolist()
    how: Any = {"dtype": torch.uint8, "memory_format": torch.contiguous_format}
    return each(lambda x: torch.full_like(x, code, **how), tree)


def _zero_scales(tree: Tree) -> list[Any]:
    """Make a zero for each block of 64 elements of every leaf's blocks."""
    out = list(optree.tree_leaves(tree, none_is_leaf=True))
    for i, x in enumerate(out):
        if not isinstance(x, Tensor):
            continue
        parts = blocks_of(x)
        count = -(-parts[0].numel() // ALIGN)
        rows = [part.new_zeros(count, dtype=torch.float32) for part in parts]
        out[i] = rows[0]
        if isinstance(x, ShardedTensor):
            axes = tuple(a for a in x.mesh.names if a in x.sharding.axes)
            out[i] = ShardedTensor(storage(rows, x.mesh), vector(count, axes, x.mesh))
    return out
