"""The check of an algorithm of your own, as one call.

``check_algorithm("matmul", "mine")`` offers the algorithm every pair of layouts on a few small
simulated meshes and compares those it takes with dense: values, every gradient, second derivatives,
a bias, half precision, and its predicted bytes and messages with those counted.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import trace
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.layouts.families import split_ways
from shardlib.mesh import record, simulate
from shardlib.ops.matmul.op import product
from shardlib.ops.registry import Match, pinned, saving, why
from shardlib.placing import shard, unshard
from shardlib.tensor import ShardedTensor, typeof
from shardlib.testing.compare import alike, close, normal

__all__ = ["check_algorithm"]

_MESHES: tuple[dict[str, int], ...] = (
    {"x": 2},
    {"x": 3},
    {"x": 2, "y": 2},
    {"x": 3, "y": 2},
    {"x": 1, "y": 2},
)


def check_algorithm(op: str, name: str, meshes: Sequence[dict[str, int]] = _MESHES) -> list[str]:
    """Compare an algorithm with dense on all operands that it takes, and list those operands.

    ``meshes``  axis names and sizes; every axis is tried on every dimension.

    Raises: AssertionError naming the operands, the law and both values.  An algorithm that takes
            no operands fails.

    >>> import shardlib as sl
    >>> sl.testing.check_algorithm("matmul", "cannon", meshes=[{"x": 2, "y": 2}])[0]
    'f32[12@x, 24@y] @ f32[24@x, 36@y] on x=2 y=2'
    """
    if op != "matmul":
        text = f"there are laws for matmul, not for {op!r}"
        fix = "sl.testing.check_algorithm('matmul', 'oned')"
        raise ShardError(text, op="check_algorithm", fix=fix)
    taken = [text for mesh in meshes for text in _check_matmul(name, mesh)]
    if not taken:
        text = f"{name} takes no operands on {', '.join(map(str, meshes))}: nothing was tested"
        raise AssertionError(text)
    return taken


class _Operands(NamedTuple):
    """Shapes and layouts of X and W, and the algorithm that multiplies them."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    layouts: tuple[str, str]

    def placed(self, tensors: Iterable[Tensor]) -> list[ShardedTensor]:
        """Shard tensors of these shapes."""
        return [shard(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]

    def match(self, x: Tensor, w: Tensor) -> Match | None:
        """Return the price of the algorithm; None if it does not take these operands."""
        found = dict(why("matmul", x, w).verdicts)[self.name]
        return found if isinstance(found, Match) else None


def _check_matmul(name: str, mesh: dict[str, int]) -> Iterator[str]:
    m, k, n = 12, 24, 36
    for (rows, inner), w_tokens in itertools.product(split_ways(tuple(mesh)), repeat=2):
        w_text = " ".join(w_tokens)
        flat = _Operands(name, ((m, k), (k, n)), (f"{rows} {inner}", w_text))
        deep = _Operands(name, ((m, 3, k), (k, n)), (f"{rows} . {inner}", w_text))
        with simulate(device="cpu", **mesh) as on, saving(), pinned(matmul=name):
            x, w = flat.placed(torch.zeros(s, device="cpu") for s in flat.shapes)
            if flat.match(x, w) is None:
                continue
            text = f"{typeof(x)} @ {typeof(w)} on {on}"
            _equals_dense(f"{name}: {text}", flat)
            _equals_dense(f"{name}: [m, 3, k] {text}", deep)
        _counts_alike(f"{name}: {text}", flat, mesh)
        yield text


def _equals_dense(text: str, operands: _Operands) -> None:
    """Compare values, gradients, costs, a bias, halves and second derivatives with dense."""
    dense = [normal(*shape, seed=i) for i, shape in enumerate(operands.shapes)]
    x, w = (t.clone().requires_grad_() for t in dense)
    y = x @ w
    g = normal(*y.shape, seed=2)
    y.backward(g)
    a, b = (t.requires_grad_() for t in operands.placed(dense))
    match = operands.match(a, b)
    if match is None:
        # it may refuse the extra dimension
        return
    with trace() as forward:
        c = product(a, b)
    with trace() as backward:
        c.backward(shard(g, c.sharding))
    out = Layout.parse(str(match.out)).resolve(x.ndim)
    alike(f"{text}: the result's layout", c.sharding, out)
    close(f"{text}: Y", c, y)
    for which, mine, theirs, pair in (
        ("X's", a, x, (a, b.detach())),
        ("W's", b, w, (a.detach(), b)),
    ):
        assert mine.grad is not None and theirs.grad is not None, "both operands take part"
        close(f"{text}: {which} gradient", mine.grad, theirs.grad)
        # with the other operand frozen, it must be right too
        (alone,) = torch.autograd.grad([product(*pair)], [mine], [shard(g, c.sharding)])
        close(f"{text}: {which} gradient asked for alone", alone, theirs.grad)
    for which, t, cost in (
        ("forward", forward, match.forward),
        ("backward", backward, match.backward),
    ):
        alike(f"{text}: bytes {which}, counted and predicted", t.bytes, cost.bytes)
        alike(f"{text}: messages {which}, counted and predicted", t.messages, cost.messages)
    _with_bias(text, dense, operands, Layout(c.dims[-1:]))
    _second(text, dense, (a, b))


def _with_bias(text: str, dense: list[Tensor], operands: _Operands, over: Layout) -> None:
    """Compare a product with a bias, in fp64 and in half precision, with dense."""
    bias = normal(dense[1].shape[-1], seed=3)
    for dtype, most in ((torch.float64, 1e-12), (torch.bfloat16, 3e-2)):
        low = [t.to(dtype) for t in (*dense, bias)]
        p, q = operands.placed(low[:2])
        if operands.match(p, q) is None:
            # refused: a sum in half precision that would be rounded at every step
            continue
        got = unshard(F.linear(p, q.mT, shard(low[2], over)))
        alike(f"{text}: the dtype of {dtype} operands' result", got.dtype, dtype)
        x, w, b = (t.double() for t in low)
        close(f"{text}: with a bias, in {dtype}", got.double(), x @ w + b, most)


def _second(text: str, dense: list[Tensor], sharded: tuple[Tensor, Tensor]) -> None:
    """Check that second derivatives equal dense, or are refused."""

    def gradients(p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        (dp,) = torch.autograd.grad((p @ q).square().sum(), [p], create_graph=True)
        return torch.autograd.grad((dp * dp).sum(), [p, q])

    want = gradients(*(t.clone().requires_grad_() for t in dense))
    try:
        got = gradients(*(t.detach().requires_grad_() for t in sharded))
    except Unsupported:
        return
    for which, mine, theirs in zip(("X", "W"), got, want, strict=True):
        close(f"{text}: the second derivative by {which}", mine, theirs)


def _counts_alike(text: str, operands: _Operands, mesh: dict[str, int]) -> None:
    """Check that the recorded run on the meta device counts the same as the run on values."""
    counted = []
    for made in (simulate(device="cpu", **mesh), record(**mesh)):
        with made, saving(), pinned(matmul=operands.name), trace() as t:
            ones = [torch.ones(s, device=made.device) for s in operands.shapes]
            x, w = operands.placed(ones)
            y = product(x.requires_grad_(), w.requires_grad_())
            y.backward(torch.ones_like(y.detach()))
        counted.append((t.bytes, t.messages))
    alike(f"{text}: bytes and messages simulated and recorded", *counted)
