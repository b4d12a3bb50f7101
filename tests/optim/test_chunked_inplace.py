"""Spans of tensors: every element once, in place, and with the same bits wherever the cuts fall."""

from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.optim.trees import SPAN, lies_flat, spans, writable

o = sl.optim


def drawn(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


ELEMENTWISE: dict[str, Any] = {
    "sgd": lambda: o.sgd(0.03, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: o.adamw(0.03, weight_decay=0.1),
    "adagrad": lambda: o.adagrad(0.03, weight_decay=0.1),
    "rmsprop": lambda: o.rmsprop(0.03, momentum=0.9, centered=True, weight_decay=0.1),
    "lion": lambda: o.lion(0.03, weight_decay=0.1),
    "ema": lambda: o.chain(o.ema(0.9), o.scale(-0.1)),
    "averaged": lambda: o.averaged(o.sgd(0.03), 0.9),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_of_a_part_is_the_part_of_the_update(name: str) -> None:
    tx, n = ELEMENTWISE[name](), 317
    p, g = drawn(n, 2), [drawn(n, 3 + i) for i in range(3)]

    def run(at: slice) -> Any:
        params = {"w": p[at].clone()}
        state = tx.init(params)
        for x in g:
            updates, state = tx.update({"w": x[at]}, state, params)
            params = o.apply_updates(params, updates)
        return params, [x for x in optree.tree_leaves(state) if isinstance(x, torch.Tensor)]

    whole, kept = run(slice(0, n))
    for a, b in ((0, 5), (3, 100), (64, 317), (301, 317)):
        part, of_part = run(slice(a, b))
        assert torch.equal(part["w"], whole["w"][a:b])
        assert all(torch.equal(x, y[a:b]) for x, y in zip(of_part, kept, strict=True))


def test_spans_cover_every_element_once_and_writes_stay() -> None:
    flat, turned = torch.zeros(3, SPAN), torch.zeros(SPAN, 5).T
    scalar, row = torch.zeros(()), torch.zeros(7)[::2]
    for x in (flat, turned, scalar, row):
        for (part,) in spans([x]):
            assert part.numel() <= max(SPAN, x.shape[-1] if x.ndim else 1)
            part.add_(1)
        assert bool((x == 1).all())
    assert not lies_flat(turned) and lies_flat(flat)


def test_directions_are_written_to_gradients_of_their_dtype() -> None:
    half = torch.ones(4, dtype=torch.bfloat16)
    like = {"a": torch.zeros(4), "b": torch.zeros(4), "c": None, "d": torch.zeros(2, 3)}
    grads = {"a": torch.ones(4), "b": half, "c": torch.ones(1), "d": torch.ones(3, 2).T}
    found = writable(grads, like)
    assert found["a"] is grads["a"] and found["c"] is None
    assert found["b"].dtype == torch.float32 and found["b"].shape == half.shape
    assert found["d"].is_contiguous() and found["d"].shape == (2, 3)
