"""The trace of gradients is a geometric sum; Lion steps by signs alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl

numbers = st.lists(st.floats(-4, 4), min_size=1, max_size=6)


def run(tx: sl.optim.Transform, grads: list[float], start: float = 0.0) -> list[float]:
    """Updates of one parameter."""
    params = {"w": torch.tensor([[start]], dtype=torch.float64)}
    state, out = tx.init(params), []
    for g in grads:
        updates, state = tx.update({"w": torch.tensor([[g]], dtype=torch.float64)}, state, params)
        out.append(float(updates["w"]))
        params = sl.optim.apply_updates(params, updates)
    return out


@settings(deadline=None)
@given(numbers, st.sampled_from([0.0, 0.5, 0.9]))
def test_an_update_is_the_geometric_sum_of_gradients(grads: list[float], m: float) -> None:
    found = run(sl.optim.sgd(0.1, m), grads)
    for t, update in enumerate(found):
        trace = sum(m ** (t - i) * g for i, g in enumerate(grads[: t + 1]))
        assert abs(update + 0.1 * trace) < 1e-12


@settings(deadline=None)
@given(numbers)
def test_nesterov_looks_one_step_ahead(grads: list[float]) -> None:
    """Its update is what momentum's next would be if the gradient came again, but for that one."""
    ahead = run(sl.optim.sgd(0.1, 0.9, nesterov=True), grads)
    plain = run(sl.optim.sgd(0.1, 0.9), grads)
    for g, a, p in zip(grads, ahead, plain, strict=True):
        assert abs(a - (0.9 * p - 0.1 * g)) < 1e-12


@settings(deadline=None)
@given(numbers)
def test_lion_moves_by_the_rate_or_not_at_all(grads: list[float]) -> None:
    for update in run(sl.optim.lion(0.1), grads):
        assert min(abs(abs(update) - 0.1), abs(update)) < 1e-12
