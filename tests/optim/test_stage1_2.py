"""Stages 1 and 2 step whole parameters alike, in whatever form their gradients come."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import r


def params() -> dict[str, Any]:
    found = {"a": sl.shard(r(8, 4), "..."), "b": sl.shard(r(5, seed=1), "...")}
    return {k: x.requires_grad_() for k, x in found.items()}


def batch() -> Any:
    return sl.shard(r(8, 8, seed=2), "data .")


def loss(p: dict[str, Any], x: Any) -> Any:
    return ((x @ p["a"]) ** 2).sum() + (p["b"] ** 3).sum() * x.sum()


FORMS: dict[str, tuple[int, dict[str, Any]]] = {
    "a tree that is summed": (1, {}),
    "a tree with pending sums": (1, {"pending": "data"}),
    "whole buckets with pending sums": (1, {"into": True}),
    "parts": (2, {"into": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_any_form_step_as_one_device(form: str) -> None:
    stage, how = FORMS[form]
    with sl.simulate(data=2):
        tx: Any = sl.optim.zero(sl.optim.sgd(0.1, 0.9), "data", stage)
        more = {"into": tx} if "into" in how else how
        mine, x = params(), batch()
        state = tx.init(mine)
        alone: dict[str, Any] = {
            k: sl.unshard(p).detach().requires_grad_() for k, p in mine.items()
        }
        torchs = torch.optim.SGD(list(alone.values()), 0.1, 0.9)
        for _ in range(3):
            _, grads = sl.value_and_grad(loss, **more)(mine, x)
            mine, state, _ = sl.optim.step(tx, mine, grads, state)
            torchs.zero_grad()
            loss(alone, sl.unshard(x)).backward()
            torchs.step()
        for k, p in mine.items():
            assert torch.allclose(sl.unshard(p), alone[k], rtol=1e-12)


def test_parameters_that_another_transform_moved_are_found_again() -> None:
    """Two transforms of other buckets step the same parameters in turn."""
    with sl.simulate(data=2):
        mine = params()
        many = [sl.optim.zero(sl.optim.sgd(1.0), "data", 1, bucket_mb=mb) for mb in (1e-4, None)]
        states = [tx.init(mine) for tx in many]
        before = {k: sl.unshard(p).clone() for k, p in mine.items()}
        for i in (0, 1, 0, 0, 1):
            grads = {k: p.becomes(torch.ones_like(p.raw)) for k, p in mine.items()}
            mine, states[i], _ = sl.optim.step(many[i], mine, grads, states[i])
        for k, p in mine.items():
            assert torch.allclose(sl.unshard(p), before[k] - 5)
