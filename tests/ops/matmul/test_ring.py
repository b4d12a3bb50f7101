"""Ring products against dense and against the collectives that they decompose."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shardlib as sl
from shardlib.modules.apply import giving
from tests.ops.matmul.test_matmul2d import relative
from tests.strategies import examples

# x, w, y: a gather of rows (batch or sequence), a scatter of rows
LAYOUTS = [
    (". tp .", ". tp", ". . tp"),
    ("tp . .", ". tp", ". . tp"),
    (". . tp", "tp .", ". tp ."),
    (". . tp", "tp .", "tp . ."),
]
DATA = [("(data) tp .", ". tp", "data . tp"), ("data . tp", "tp .", "data tp .")]


@examples(50)
@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2]),
    st.data(),
    st.integers(1, 2),
    st.integers(0, 2**31),
)
def test_ring_products_equal_dense_and_cost_what_they_say(
    p: int, data: int, draw: Any, unit: int, seed: int
) -> None:
    x_text, w_text, out = draw.draw(st.sampled_from(DATA if data > 1 else LAYOUTS))
    rule = draw.draw(st.sampled_from(["ring", "ring2"]))
    b, s, k, n = 2 * p * data * unit, 2 * p * unit, p * unit, p
    rand = torch.Generator().manual_seed(seed)
    x, w, g = (
        torch.randn(shape, dtype=torch.float64, generator=rand)
        for shape in ((b, s, k), (k, n), (b, s, n))
    )
    x.requires_grad_(), w.requires_grad_()
    (x @ w).backward(g)
    with sl.simulate(data=data, tp=p), sl.algorithm(matmul=rule):
        a, c = (
            sl.shard(x.detach(), x_text).requires_grad_(),
            sl.shard(w.detach(), w_text).requires_grad_(),
        )
        with sl.trace() as forward:
            y = sl.matmul(a, c, out=out)
        with sl.trace() as backward:
            y.backward(sl.shard(g, y.sharding))
        verdicts = dict(sl.why("matmul", a, c, out).verdicts)
        price, collective = verdicts[rule], verdicts["mm3"]
        assert isinstance(price, sl.extend.Match) and isinstance(collective, sl.extend.Match)
        assert (forward.bytes, forward.messages) == (price.forward.bytes, price.forward.messages)
        assert (backward.bytes, backward.messages) == (
            price.backward.bytes,
            price.backward.messages,
        )
        assert price.cost.bytes == collective.cost.bytes
        assert data > 1 or price.cost.messages == collective.cost.messages * (
            2 if rule == "ring2" else 1
        )
        assert relative(sl.unshard(y).detach(), (x @ w).detach()) < 1e-12
        assert (
            relative(sl.unshard(a.grad), x.grad) < 1e-12
            and relative(sl.unshard(c.grad), w.grad) < 1e-12
        )


def test_a_split_sequence_takes_the_ring_by_itself_and_half_precision_does_not() -> None:
    with sl.simulate(tp=4):
        for dtype, rule in ((torch.float32, "ring"), (torch.bfloat16, "mm3")):
            x, w = (
                sl.shard(torch.zeros(2, 8, 4, dtype=dtype), ". tp ."),
                sl.shard(torch.zeros(4, 8, dtype=dtype), ". tp"),
            )
            assert sl.why("matmul", x, w).chosen == rule


def test_second_derivatives_equal_dense() -> None:
    def second(x: Tensor, w: Tensor, grad: Any) -> tuple[Tensor, ...]:
        (dx,) = grad(F.linear(x, w).square().sum(), [x], create_graph=True)
        return grad((dx * dx).sum(), [x, w])

    x, w = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    want = second(x.clone().requires_grad_(), w.clone().requires_grad_(), torch.autograd.grad)
    with sl.simulate(tp=4), sl.algorithm(matmul="ring"):
        for x_text, w_text, out in (("tp .", "tp .", ". tp"), (". tp", ". tp", "tp .")):
            a, b = sl.shard(x, x_text).requires_grad_(), sl.shard(w, w_text).requires_grad_()
            b = giving({"b": b}, {"b": sl.Layout.parse(out)})["b"]
            for mine, dense in zip(second(a, b, torch.autograd.grad), want, strict=True):
                assert relative(sl.unshard(mine), dense) < 1e-12


def on_a_real_rank(rule: str) -> list[float]:
    errors = []
    for x_text, w_text, out in LAYOUTS:
        draw = torch.Generator().manual_seed(1)
        x, w, g = (
            torch.randn(s, dtype=torch.float64, generator=draw)
            for s in ((8, 8, 8), (8, 12), (8, 8, 12))
        )
        x.requires_grad_(), w.requires_grad_()
        (x @ w).backward(g)
        with sl.algorithm(matmul=rule), sl.trace() as t:
            a, b = (
                sl.shard(x.detach(), x_text).requires_grad_(),
                sl.shard(w.detach(), w_text).requires_grad_(),
            )
            c = sl.matmul(a, b, out=out)
            c.backward(sl.shard(g, c.sharding))
        price = dict(sl.why("matmul", a, b, out).verdicts)[rule]
        assert (
            isinstance(price, sl.extend.Match)
            and t.bytes == price.cost.bytes
            and t.messages == price.cost.messages
        )
        pairs = ((sl.unshard(c), x @ w), (sl.unshard(a.grad), x.grad), (sl.unshard(b.grad), w.grad))
        errors.append(max(relative(mine.detach(), dense.detach()) for mine, dense in pairs))
    return errors


def test_real_processes_equal_dense(pool: Any) -> None:
    for rule in ("ring", "ring2"):
        for errors in pool.run(on_a_real_rank, rule, tp=4):
            assert max(errors) < 1e-12, errors
