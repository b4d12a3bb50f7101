"""Plain tensors among sharded ones: refused, or taken as replicated, and written to rightly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.tensor import promoting
from tests.ops.cases import r

X = r(4, 6)


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
