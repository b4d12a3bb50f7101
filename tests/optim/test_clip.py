"""Norms and clips: each element counted once, whatever the layout."""

import math
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.norms import norms_known
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_global_norm_counts_each_element_once_in_one_collective(
    layouts: dict[str, str],
) -> None:
    want = torch.cat([p.reshape(-1) for p in PARAMS.values()]).norm()
    for axes in ({"x": 2, "y": 2}, {"data": 3, "x": 1, "y": 2}, {"x": 4, "y": 2}):
        with sl.simulate(**axes), sl.trace() as t:
            got = sl.optim.global_norm({k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        assert abs(float(got - want)) < 1e-12 * float(want) and len(t.events) == 1


def test_the_global_norm_of_many_fp32_elements_keeps_its_digits() -> None:
    x = torch.full((2_000_000,), 0.1)
    exact = float(x[0]) * math.sqrt(len(x))
    assert abs(float(sl.optim.global_norm(x)) / exact - 1) < 1e-12


def test_clipping_scales_to_the_bound_and_no_further() -> None:
    tx = sl.optim.clip_by_global_norm(1.0)
    big, _ = tx.update({"w": torch.full((4,), 3.0)}, tx.init(None))
    small, _ = tx.update({"w": torch.full((4,), 0.1)}, tx.init(None))
    assert abs(float(sl.optim.global_norm(big)) - 1) < 1e-5 and torch.equal(
        small["w"], torch.full((4,), 0.1)
    )


def clipped_by_torch(clip: Any) -> dict[str, torch.Tensor]:
    theirs = {k: torch.zeros_like(p).requires_grad_() for k, p in PARAMS.items()}
    for k, p in PARAMS.items():
        theirs[k].grad = p.clone()
    clip(theirs)
    return {k: p.grad for k, p in theirs.items() if p.grad is not None}


def each_alone(params: Any) -> None:
    for p in params.values():
        torch.nn.utils.clip_grad_norm_(p, 2.0)


TORCH = {
    **{
        f"norm {p}": (
            sl.optim.clip_by_global_norm(1.5, p),
            lambda ps, p=p: torch.nn.utils.clip_grad_norm_(ps.values(), 1.5, p),
        )
        for p in (1.0, 1.5, 2.0, 3.0, math.inf)
    },
    "value": (
        sl.optim.clip_by_value(0.4),
        lambda ps: torch.nn.utils.clip_grad_value_(ps.values(), 0.4),
    ),
    "parameter": (sl.optim.clip_by_parameter_norm(2.0), each_alone),
}


@pytest.mark.parametrize("name", TORCH)
def test_clips_are_torchs_on_every_layout(name: str) -> None:
    tx, theirs = TORCH[name]
    want = clipped_by_torch(theirs)
    for k, g in tx.update(PARAMS, tx.init(PARAMS))[0].items():
        close(g, want[k], 1e-12)
    for layouts in LAYOUTS:
        with sl.simulate(data=2, x=2, y=2):
            grads = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
            got = tx.update(grads, tx.init(grads))[0]
            assert all(g.sharding == grads[k].sharding for k, g in got.items())
            for k in want:
                close(sl.unshard(got[k]), want[k], 1e-12)


def pend(x: Any, axis: str) -> Any:
    """The same value as a sum of exact halves that is still to be done."""
    place = x.place._replace(layout=sl.Layout(x.dims, (axis,)))
    return sl.ShardedTensor(x.raw / x.mesh[axis], place)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_pending_gradients_are_asked_for_their_norm_and_clipped(layouts: dict[str, str]) -> None:
    """Sums stay pending; finding their norm moves one reduce-scatter of them."""
    tx = sl.optim.clip_by_global_norm(1.5)
    want = tx.update(PARAMS, tx.init(PARAMS))[0]
    with sl.simulate(data=2, x=2, y=2):
        grads = {k: pend(sl.shard(p, layouts[k]), "data") for k, p in PARAMS.items()}
        with sl.trace() as t:
            got = tx.update(grads, tx.init(grads))[0]
        local = sum(g.local.numel() for g in grads.values())
        scattered = t.by_kind()["psum_scatter"]
        assert local * 8 // 2 <= scattered <= local * 8 // 2 + 8 * len(grads)
        assert all(g.sharding.partial == ("data",) for g in got.values())
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-12)
        with sl.trace() as t:
            assert bool(sl.optim.is_finite(grads))
        assert t.by_kind()["psum_scatter"] == scattered


def test_a_sum_that_overflows_is_not_finite_though_its_parts_are() -> None:
    with sl.simulate(data=2):
        big = sl.shard(torch.full((4,), 3e38), ".")
        place = big.place._replace(layout=sl.Layout.parse(". + sum(data)"))
        assert bool(sl.optim.is_finite([big]))
        assert not bool(sl.optim.is_finite([sl.ShardedTensor(big.raw, place)]))


def test_a_norm_that_two_ask_for_is_found_once() -> None:
    with sl.simulate(x=2):
        grads = {"w": sl.shard(torch.ones(4), "x"), "b": sl.shard(torch.ones(2), ".")}
        tx = sl.optim.clip_by_global_norm(1.0)
        with sl.trace() as t, norms_known():
            assert bool(sl.optim.is_finite(grads))
            tx.update(grads, tx.init(grads))
            sl.optim.global_norm(grads)
        assert len(t.events) == 1
        with sl.trace() as t:
            sl.optim.global_norm(grads)
        assert len(t.events) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_is_named(bad: float) -> None:
    tx = sl.optim.clip_by_global_norm(1.0)
    with sl.simulate(x=2):
        grads = {"w": sl.shard(torch.tensor([1.0, bad]), "x"), "b": sl.shard(torch.ones(2), ".")}
        with pytest.raises(sl.ShardError, match="not a number here are w") as caught:
            tx.update(grads, tx.init(grads))
        assert "skip_nonfinite" in caught.value.fix
        loose = sl.optim.clip_by_global_norm(1.0, check=False)
        loose.update(grads, loose.init(grads))
        zero = sl.optim.zero(sl.optim.chain(tx, sl.optim.sgd(0.1)), "x")
        whole = {k: sl.reshard(g, ".") for k, g in grads.items()}
        with pytest.raises(sl.ShardError, match=r"here are w\s") as caught:
            zero.update(whole, zero.init(whole), whole)


def test_norms_on_paper_move_what_they_move() -> None:
    with sl.record(x=64), sl.trace() as t:
        grads = [sl.shard(torch.empty(128, 8, device="meta"), "x .")]
        tx = sl.optim.clip_by_global_norm(1.0)
        tx.update(grads, tx.init(grads))
    assert t.bytes * 64 == 2 * 63 * 8


MISTAKES = [
    lambda: sl.optim.global_norm([torch.ones(2)], p=0),
    lambda: sl.optim.clip_by_global_norm(0.0),
    lambda: sl.optim.clip_by_value(-1.0),
    lambda: sl.optim.clip_by_parameter_norm(float("nan")),
]


@pytest.mark.parametrize("call", MISTAKES)
def test_bounds_that_cannot_be_are_refused(call: Any) -> None:
    grads = [torch.ones(2)]
    with pytest.raises(sl.ShardError) as caught:
        call()
    eval(caught.value.fix, {"sl": sl, "grads": grads})


def on_ranks(layouts: dict[str, str]) -> float:
    tx = sl.optim.clip_by_global_norm(1.5)
    want = tx.update(PARAMS, tx.init(PARAMS))[0]
    grads = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
    error = 0.0
    for given in (grads, {k: pend(g, "data") for k, g in grads.items()}):
        got = tx.update(given, tx.init(given))[0]
        error = max([error, *(float((sl.unshard(got[k]) - want[k]).abs().max()) for k in want)])
    return error


def test_clips_on_real_ranks(pool: Any) -> None:
    assert max(pool.run(on_ranks, {"w": "x .", "b": ".", "s": ""}, data=2, x=2)) < 1e-12
