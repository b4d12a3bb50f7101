"""Schedules: the values of torch's, and what they must be at their borders."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torchs

import shardlib as sl

o = sl.optim


def rates(make: Callable[[Any], Any], steps: int, base: float = 0.2) -> list[float]:
    """What one of torch's schedulers gives."""
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], base)
    scheduler = make(optimizer)
    out = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR passes a deprecated argument itself
        for _ in range(steps):
            out.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return out


def sequential(optimizer: Any) -> Any:
    warm = torchs.LinearLR(optimizer, 0.25, 1.0, 4)
    fall = torchs.CosineAnnealingLR(optimizer, 10, 0.01)
    return torchs.SequentialLR(optimizer, [warm, fall], [4])


TORCH = {
    "linear": (lambda opt: torchs.LinearLR(opt, 0.25, 1.0, 7), o.linear(0.05, 0.2, 7), 12),
    "cosine": (lambda opt: torchs.CosineAnnealingLR(opt, 10, 0.01), o.cosine(0.2, 0.01, 10), 11),
    "constant": (lambda opt: torchs.ConstantLR(opt, 1.0, 3), o.constant(0.2), 6),
    "warmup": (sequential, o.warmup_cosine(0.2, 4, 14, start=0.05, end=0.01), 15),
}


@pytest.mark.parametrize("name", TORCH)
def test_schedules_give_torchs_rates(name: str) -> None:
    make, ours, steps = TORCH[name]
    theirs = rates(make, steps)
    assert all(abs(ours(i) - r) < 1e-12 for i, r in enumerate(theirs)), theirs


@given(
    st.integers(0, 40),
    st.integers(0, 60),
    st.integers(0, 40),
    st.sampled_from(["linear", "cosine", "sqrt"]),
)
def test_wsd_rises_stays_and_falls(warmup: int, stable: int, decay: int, shape: Any) -> None:
    steps = warmup + stable + decay
    f = o.wsd(0.5, warmup, steps, decay, end=0.1, shape=shape)
    values = [f(i) for i in range(steps + 3)]
    assert all(v == 0.5 for v in values[warmup : warmup + stable])
    assert values[steps:] == [0.1] * 3
    rise, fall = values[:warmup], values[warmup + stable : steps + 1]
    assert rise == sorted(rise) and fall == sorted(fall, reverse=True)
    if decay > 1:
        t = 1 / decay
        left = {"linear": 1 - t, "cosine": (1 + math.cos(math.pi * t)) / 2, "sqrt": 1 - t**0.5}[
            shape
        ]
        assert abs(fall[1] - (0.1 + 0.4 * left)) < 1e-12


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_joined_parts_count_their_own_steps(lengths: list[int]) -> None:
    starts = [sum(lengths[:i]) for i in range(1, len(lengths))]
    f = o.joined([lambda step, k=k: 100.0 * k + step for k in range(len(lengths))], starts)
    want = [100.0 * k + i for k, n in enumerate(lengths) for i in range(n)]
    assert [f(i) for i in range(len(want))] == want


MISTAKES = [
    lambda: o.linear(0.0, 1.0, -3),
    lambda: o.cosine(1.0, 0.0, -1),
    lambda: o.warmup_cosine(1.0, 11, 10),
    lambda: o.wsd(1.0, 6, 10, 5),
    lambda: o.wsd(1.0, 1, 10, 5, shape="square"),  # type: ignore[arg-type]
    lambda: o.joined([o.constant(1.0)], [3]),
    lambda: o.joined([o.constant(1.0)] * 3, [5, 3]),
]


@pytest.mark.parametrize("call", MISTAKES)
def test_a_schedule_that_cannot_be_is_refused_with_one_that_can(call: Any) -> None:
    with pytest.raises(sl.ShardError) as caught:
        call()
    assert callable(eval(caught.value.fix, {"sl": sl}))
