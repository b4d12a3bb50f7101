"""Adafactor: torch's own values, whatever the layout, padded, stacked, and cut by zero."""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import close, r
from tests.optim.test_clip import pend

o = sl.optim
PARAMS = {
    "w": r(8, 12),
    "t": r(24, 6, seed=1),
    "e": r(4, 8, 6, seed=2),
    "b": r(12, seed=3),
    "s": r(seed=4),
}
HOW: dict[str, Any] = {"weight_decay": 0.1, "eps1": 1e-8, "clip": 1.0}
TX = o.adafactor(0.05, **HOW)


def grads(i: int) -> dict[str, torch.Tensor]:
    return {
        k: r(*p.shape, seed=20 + 7 * i + n) * (1 + i) for n, (k, p) in enumerate(PARAMS.items())
    }


def by_torch(count: int) -> dict[str, torch.Tensor]:
    params = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = torch.optim.Adafactor(
        params.values(), 0.05, eps=(1e-8, 1e-3), d=1.0, weight_decay=0.1
    )
    for i in range(count):
        for k, g in grads(i).items():
            params[k].grad = g
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


def run(tx: Any, params: Any, count: int, put: Any) -> Any:
    state = tx.init(params)
    for i in range(count):
        updates, state = tx.update(put(grads(i)), state, params)
        params = o.apply_updates(params, updates)
    return params


LAYOUTS = [
    ({"x": 4}, {"w": "x .", "t": ". .", "e": "x . .", "b": "x", "s": ""}),
    ({"x": 2, "y": 2}, {"w": "x y", "t": "(3 y) x", "e": ". y x", "b": "y", "s": ""}),
    ({"d": 3, "x": 2, "y": 1}, {"w": ". (y x)", "t": "(x d) .", "e": "x . .", "b": ".", "s": ""}),
    ({"x": 2, "y": 2, "z": 2}, {"w": "(z x) y", "t": "(y z) x", "e": "z x y", "b": ".", "s": ""}),
]


def test_adafactor_is_torchs() -> None:
    want = by_torch(5)
    for k, p in run(TX, PARAMS, 5, dict).items():
        close(p, want[k], 1e-12)


@pytest.mark.parametrize(("mesh", "layouts"), LAYOUTS)
def test_adafactor_is_one_devices_on_every_layout(mesh: Any, layouts: Any) -> None:
    want = by_torch(3)
    with sl.simulate(**mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        got = run(TX, put(PARAMS), 3, put)
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)


def test_padding_counts_nowhere() -> None:
    whole = {"w": r(7, 11), "e": r(3, 5, 7, seed=1)}
    g = {k: r(*p.shape, seed=9) for k, p in whole.items()}
    want = TX.update(g, TX.init(whole), whole)[0]
    with sl.simulate(x=2, y=3):
        lay = {"w": "x y", "e": "x y ."}
        put = lambda t: {k: sl.shard(x, lay[k], pad=True) for k, x in t.items()}  # noqa: E731
        given = put(g)
        for x in given.values():
            x.raw[x.raw == 0] = 1e3  # what padding holds
        got = TX.update(given, TX.init(put(whole)), put(whole))[0]
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)


@pytest.mark.parametrize(("mesh", "layouts"), LAYOUTS[:2])
def test_adafactor_under_zero_is_adafactor(mesh: Any, layouts: Any) -> None:
    want = by_torch(3)
    tx = o.zero(TX, "data", bucket_mb=1e-3)
    with sl.simulate(data=3, **mesh):
        put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
        params, kept = put(PARAMS), put(PARAMS)
        state, after = tx.init(params), tx.init(kept)
        for i in range(3):
            g = {k: pend(x, "data") for k, x in put(grads(i)).items()}
            updates, state = tx.update(g, state, params)
            params = o.apply_updates(params, updates)
            kept, after, _ = o.step(tx, kept, g, after)
        for k in want:
            close(sl.unshard(params[k]), want[k], 1e-12)
            close(sl.unshard(kept[k]), want[k], 1e-12)


def test_a_step_moves_rows_and_columns_alone() -> None:
    with sl.simulate(x=4):
        params = {"w": sl.shard(r(64, 32), "x ."), "b": sl.shard(r(32), ".")}
        state = TX.init(params)
        with sl.expect_comm(psum=2):
            _, state = TX.update(params, state, params)
        assert state.rows["w"].shape == (1, 64) and state.cols["w"].shape == (1, 32)
        assert state.full["w"] is None


def on_ranks(layouts: Any) -> float:
    want = by_torch(3)
    put = lambda t: {k: sl.shard(x, layouts[k]) for k, x in t.items()}  # noqa: E731
    got = run(TX, put(PARAMS), 3, put)
    return max(float((sl.unshard(got[k]) - want[k]).abs().max()) for k in want)


@pytest.mark.parametrize(("mesh", "layouts"), LAYOUTS[:2])
def test_adafactor_on_real_ranks(pool: Any, mesh: Any, layouts: Any) -> None:
    assert max(pool.run(on_ranks, layouts, **mesh)) < 1e-12
