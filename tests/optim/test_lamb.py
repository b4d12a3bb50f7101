"""LAMB: the paper's algorithm, and its tensors' norms on every layout."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, gradients, steps


def paper(
    params: Any, count: int, lr: float, b1: float, b2: float, eps: float, decay: float
) -> Any:
    """Algorithm 2 of arXiv 1904.00962, written down line by line."""
    x = {k: p.clone() for k, p in params.items()}
    m = {k: torch.zeros_like(p) for k, p in x.items()}
    v = {k: torch.zeros_like(p) for k, p in x.items()}
    for t in range(1, count + 1):
        g = gradients(x, t - 1)
        for k in x:
            m[k] = b1 * m[k] + (1 - b1) * g[k]
            v[k] = b2 * v[k] + (1 - b2) * g[k] ** 2
            r = (m[k] / (1 - b1**t)) / ((v[k] / (1 - b2**t)).sqrt() + eps) + decay * x[k]
            x[k] = x[k] - lr * x[k].norm() / r.norm() * r
    return x


def test_lamb_is_the_papers_on_every_layout() -> None:
    args = (0.05, 0.9, 0.99, 1e-6, 0.1)
    want = paper(PARAMS, 6, *args)
    for k, p in steps(sl.optim.lamb(*args), PARAMS, 6).items():
        close(p, want[k], 1e-12)
    for axes in ({"x": 2, "y": 2}, {"data": 3, "x": 1, "y": 2}):
        for layouts in LAYOUTS:
            with sl.simulate(**axes):
                placed = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
                got = steps(sl.optim.lamb(*args), placed, 6)
                for k in want:
                    close(sl.unshard(got[k]), want[k], 1e-12)


def test_all_norms_of_a_step_travel_in_one_collective() -> None:
    tx = sl.optim.lamb(0.1)
    with sl.simulate(data=2, x=2):
        placed = {k: sl.shard(p, "x ..." if p.ndim else "") for k, p in PARAMS.items()}
        state = tx.init(placed)
        with sl.expect_comm(psum=1, bytes=2 * 3 * 8 * len(PARAMS) * 2 // 4):
            tx.update(placed, state, placed)


def test_a_tensor_of_zeros_moves_as_its_direction_says() -> None:
    tx, p = sl.optim.lamb(0.1), {"w": torch.zeros(3)}
    updates, _ = tx.update({"w": torch.ones(3)}, tx.init(p), p)
    assert torch.allclose(updates["w"], torch.full((3,), -0.1))
    p = {"w": torch.ones(3)}
    updates, _ = tx.update({"w": torch.zeros(3)}, tx.init(p), p)
    assert torch.equal(updates["w"], torch.zeros(3))


def on_ranks(layouts: dict[str, str]) -> float:
    tx = sl.optim.lamb(0.05, weight_decay=0.1)
    want = steps(tx, PARAMS, 4)
    got = steps(tx, {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}, 4)
    return max(float((sl.unshard(got[k]) - want[k]).abs().max()) for k in want)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_lamb_on_real_ranks(pool: Any, layouts: dict[str, str]) -> None:
    assert max(pool.run(on_ranks, layouts, x=2, y=2)) < 1e-12
