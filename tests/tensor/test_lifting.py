"""Plain tensors among sharded ones: refused, or taken as replicated, and written to rightly."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.tensor import promoting
from tests.ops.cases import r
from tests.workers import Pool

X = r(4, 6)


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "arange": lambda x: x * torch.arange(6.0, dtype=torch.float64).cos(),
    "linspace": lambda x: x + torch.linspace(0, 1, 4, dtype=torch.float64)[:, None],
    "a literal": lambda x: torch.maximum(x, torch.tensor([0.0, 1, 2, 3, 4, 5])),
    "eye": lambda x: x @ torch.eye(6, dtype=torch.float64),
    "a mask": lambda x: torch.where(torch.arange(6) > 2, x, torch.zeros(6, dtype=x.dtype)),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, 6).tril() == 0, -1.0),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(3, 6).double(), torch.zeros(3).double()),
    "an index": lambda x: x[:, torch.tensor([0, 2])],
    "in place": lambda x: x.clone().mul_(torch.arange(6.0)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, torch.ones(2, 6, dtype=x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_program_are_the_same_on_every_rank(name: str) -> None:
    f, want = CONSTANTS[name], CONSTANTS[name](X)
    for layout in ("x .", ". y", "x y", ". ."):
        with sl.simulate(x=2, y=2):
            x = sl.shard(X, layout)
            if name != "an index":
                with pytest.raises(sl.errors.PlainTensor, match=r"a plain tensor met") as e:
                    f(x)
                assert "sl.constants()" in e.value.fix
            with sl.constants(), sl.implicit():
                assert torch.allclose(sl.unshard(f(x)), want)
                assert torch.allclose(sl.unshard(sl.constants()(f)(x)), want)


def test_real_ranks_take_constants_and_give_them_their_gradients(pool: Any) -> None:
    w = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    (X * w.cos()).square().sum().backward()
    want = [(n, True) for n in CONSTANTS]
    for found, grad in pool.run(_with_constants, x=2, y=2):
        assert found == want and torch.allclose(grad, w.grad)
    with sl.simulate(x=2, y=2):
        assert torch.allclose(_with_constants()[1], w.grad)


def _with_constants() -> tuple[list[tuple[str, bool]], Tensor]:
    x = sl.shard(X, "x y")
    w = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    with sl.constants(), sl.implicit():
        found = [(n, torch.allclose(sl.unshard(f(x)), f(X))) for n, f in CONSTANTS.items()]
        (x * w.cos()).square().sum().backward()
    return found, w.grad


def test_a_constant_that_differs_by_rank_is_refused_on_real_ranks() -> None:
    """Once for each line; what is the same at first and differs later, at its use in check mode."""
    pool = Pool(4)  # its own: ranks that have parted wait in transfers that no later task may meet
    try:
        answers = pool.run(_each_its_own, x=4)
    finally:
        pool.close()
    for at_once, unseen, checked in answers:
        assert "hold different values of the plain f32[4]" in at_once and "test_lifting" in at_once
        assert not unseen and "hold different values of the plain f32[4]" in checked


def _each_its_own() -> list[str]:
    x = sl.shard(torch.ones(4), "x")

    def uses(steps: range) -> str:
        """What is said of a constant that is the rank's own number from step 1 on."""
        try:
            for step in steps:
                with sl.constants():
                    y = x * torch.full((4,), float(step > 0) * sl.process_index())
            sl.unshard(y)  # where the rank that came first learns of it
        except sl.errors.RankFailed as e:
            return str(e)
        return ""

    unseen = uses(range(2))  # one line: compared at its first use
    with sl.check():
        checked = uses(range(2))
    return [uses_at_once(x), unseen, checked]


def uses_at_once(x: Tensor) -> str:
    try:
        with sl.constants():
            y = x * torch.full((4,), float(sl.process_index()))
        sl.unshard(y)
    except sl.errors.RankFailed as e:
        return str(e)
    return ""


MEETS: list[Callable[[Any, Any], Any]] = [
    lambda x, a: a * x, lambda x, a: x * a, lambda x, a: a + x, lambda x, a: x - a,
    lambda x, a: x @ a.T, lambda x, a: a.T @ x, lambda x, a: a < x, lambda x, a: x >= a,
    lambda x, a: x == a, lambda x, a: a == x, lambda x, a: x != a, lambda x, a: x**a,
    lambda x, a: numpy.maximum(a, x), lambda x, a: numpy.add(x, a), lambda x, a: a[:1] * x,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MEETS)))
def test_an_array_that_meets_a_sharded_tensor_is_refused_by_name(number: int) -> None:
    with sl.simulate(x=2):
        x = sl.shard(X, "x .")
        with pytest.raises(sl.errors.PlainTensor, match="an array met a sharded tensor") as e:
            MEETS[number](x, X.numpy())
        assert eval(e.value.fix, {"sl": sl, "torch": torch, "array": X.numpy()}).mesh is x.mesh


def test_numbers_of_numpy_are_numbers() -> None:
    with sl.simulate(x=2):
        x = sl.shard(X, "x .")
        for f in (
            lambda x: numpy.float32(2) * x, lambda x: x * numpy.float64(2), lambda x: numpy.int64(3) - x,
            lambda x: numpy.float64(0) < x, lambda x: x**numpy.int64(2),
        ):  # fmt: skip
            assert torch.equal(sl.unshard(f(x)), f(X))
        with pytest.raises(sl.errors.PlainTensor, match="numpy computes on whole arrays"):
            numpy.sin(x)


def test_an_opened_function_refuses_plain_tensors_as_its_operators_do() -> None:
    p = torch.rand(4, 6)
    with sl.simulate(x=2):
        a = sl.shard(p, "x .")
        weights = (
            torch.rand(18, 6),
            torch.rand(18),
            None,
            None,
            False,
            0.0,
            torch.rand(6, 6),
            torch.rand(6),
        )
        for call in (
            lambda: torch.block_diag(a, p),
            lambda: torch.nn.functional.gaussian_nll_loss(a, p, p),
            lambda: torch.nn.functional.multi_head_attention_forward(a, a, a, 6, 2, *weights),
        ):
            with pytest.raises(sl.ShardError, match="a plain tensor met a sharded one"):
                call()


INTO_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda p, x: p.add_(x),
    "+=": lambda p, x: p.__iadd__(x),
    "copy_": lambda p, x: p.copy_(x),
    "setitem": lambda p, x: p.__setitem__(..., x),
    "masked_fill_": lambda p, x: p.masked_fill_(x > 0, 1.0),
    "addcmul_": lambda p, x: p.addcmul_(x, x),
    "foreach": lambda p, x: torch._foreach_add_([p], [x]),
}


@pytest.mark.parametrize("layout", ["... .", "x y"])
@pytest.mark.parametrize("write", INTO_PLAIN)
def test_a_plain_tensor_that_is_written_to_holds_the_values(write: str, layout: str) -> None:
    want = torch.ones_like(X)
    INTO_PLAIN[write](want, X)
    with sl.simulate(x=2, y=2):
        x, p = sl.shard(X, layout), torch.ones_like(X)
        if layout == "x y":
            with promoting(), pytest.raises(sl.errors.ImplicitCommunication) as caught:
                INTO_PLAIN[write](p, x)
            assert torch.equal(p, torch.ones_like(X)) and "sl.implicit" in caught.value.fix
        with pytest.raises(sl.errors.PlainTensor):  # where does it lie?
            INTO_PLAIN[write](p, x)
        with promoting(), sl.implicit():
            INTO_PLAIN[write](p, x)
        assert type(p) is Tensor and torch.equal(p, want)


def test_a_plain_sum_of_losses_is_their_sum_and_has_their_gradient() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(X, "x y").requires_grad_()
        loss = torch.zeros((), dtype=X.dtype)
        same = loss
        loss += (x * x).sum()
        loss.backward()
        assert same is loss and torch.allclose(loss, (X * X).sum())
        assert torch.allclose(sl.unshard(x.grad), 2 * X)
