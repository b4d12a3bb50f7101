"""The calculus: where a gradient is summed, and what it looks like in the global view."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.ops.attention.test_op import normal


def test_a_factor_of_a_pending_sum_has_the_same_gradient_on_every_rank() -> None:
    with sl.simulate(x=3):
        for f in (lambda a, b: a * b, lambda a, b: b * a, lambda a, b: a / b):
            p = sl.shard(torch.arange(4.0) + 1, ". + sum(x)")
            s = sl.shard(torch.tensor(2.0), "...").requires_grad_()
            (grad,) = torch.autograd.grad(f(p, s), s, sl.shard(torch.ones(4), "."))
            assert torch.equal(grad.raw, grad.raw[:1].expand(3))
            dense = torch.tensor(2.0, requires_grad=True)
            f(torch.arange(4.0) + 1, dense).sum().backward()
            assert torch.equal(sl.unshard(grad), dense.grad)


# ---------------------------------------------------------------- operands that defer beside others


def _written(write: Any) -> Any:
    def call(a: Any, *rest: Any) -> Any:
        a = a.clone()
        write(a, *rest)
        return a

    return call


def _cells(a: Any) -> Any:
    cells = torch.tensor([0, 2, 1, 3]).expand(4, 4).contiguous()
    return sl.shard(cells, "...") if isinstance(a, sl.ShardedTensor) else cells


def _rows(a: Any) -> Any:
    return _cells(a)[0]


def _loss(x: Any, w: Any) -> Any:
    if isinstance(x, sl.ShardedTensor):
        return sl.linear_cross_entropy(x, w, _rows(x))
    return F.cross_entropy(x @ w.mT, _rows(x))


_HEADS = ((4, 4, 4, 4),) * 3
BESIDE: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "attention": (F.scaled_dot_product_attention, _HEADS),
    "biased attention": (F.scaled_dot_product_attention, (*_HEADS, (1, 4, 4, 4))),
    "attention under rows": (F.scaled_dot_product_attention, (*_HEADS, (4, 4))),
    "linear": (F.linear, ((4, 4), (4, 4), (4,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), ((4, 4), (4,), (4,))),
    "loss": (F.mse_loss, ((4, 4), (4, 4))),
    "triplets": (F.triplet_margin_loss, ((4, 4),) * 3),
    "linear_cross_entropy": (_loss, ((4, 4), (4, 4))),
    "einsum": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), ((4, 4),) * 3),
    "conv": (F.conv1d, ((4, 4, 4), (4, 4, 1), (4,))),
    "index_add": (lambda a, b: a.index_add(1, _rows(a), b), ((4, 4),) * 2),
    "scatter": (lambda a, b: a.scatter(1, _cells(a), b), ((4, 4),) * 2),
    "part": (_written(lambda a, b: a.__setitem__((slice(None), slice(1, 3)), b)), ((4, 4), (4, 2))),
    "index_add_": (_written(lambda a, b: a.index_add_(1, _rows(a), b)), ((4, 4),) * 2),
    "scatter_": (_written(lambda a, b: a.scatter_(1, _cells(a), b)), ((4, 4),) * 2),
    "addmm_": (_written(lambda a, b, c: a.addmm_(b, c)), ((4, 4),) * 3),
    "mul_": (_written(lambda a, b: a.mul_(b)), ((4, 4), (4,))),
}


def deferring(name: str, count: int) -> list[str]:
    """Draw which operands defer, are split or whole; whose gradients differ from dense."""
    f, shapes = BESIDE[name]
    draw, wrong = random.Random(name), []
    for _ in range(count):
        kinds = [draw.choice(["whole", "deferred", "deferred", "split", "apart"]) for _ in shapes]
        plain = [normal(*s, seed=i) for i, s in enumerate(shapes)]
        dense = [p.clone().requires_grad_() for p in plain]
        want = f(*dense)
        weights = normal(*want.shape, seed=9)
        whole = torch.autograd.grad((want * weights).sum(), dense, allow_unused=True)
        given = []
        for p, kind in zip(plain, kinds, strict=True):
            dims = ["."] * p.ndim
            if kind == "split" and p.shape[0] > 1:
                dims[0] = "data"
            if kind == "apart" and p.shape[-1] > 1:
                dims[-1] = "x"
            x = sl.shard(p, " ".join(dims)).requires_grad_()
            late = frozenset({"data"} if kind == "deferred" else ())
            given.append(sl.ShardedTensor(x.raw, x.place._replace(deferred=late)))
        try:
            with sl.implicit():
                loss = (f(*given) * sl.shard(weights, "...")).sum()
        except sl.errors.ShardError:
            continue
        loss.backward()
        for i, (x, g) in enumerate(zip(given, whole, strict=True)):
            if g is not None and float((sl.unshard(x.grad) - g).abs().max()) > 1e-9:
                wrong.append(f"{name} {kinds}: gradient {i}")
    return wrong


@pytest.mark.parametrize("name", list(BESIDE))
def test_an_operand_that_defers_leaves_the_gradients_of_the_others_right(
    name: str, pool: Any
) -> None:
    with sl.simulate(data=2, x=2):
        assert deferring(name, 12) == []
    if name in ("biased attention", "part", "addmm_", "linear_cross_entropy"):
        assert pool.run(deferring, name, 6, data=2, x=2) == [[]] * 4
