"""Optimizers of one element: torch's own values, on every layout, purely and in place."""

import warnings
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, gradients, steps

o, t = sl.optim, torch.optim
TORCH = {
    "sgd": (o.sgd(0.05), lambda p: t.SGD(p, 0.05)),
    "sgd decayed": (o.sgd(0.05, weight_decay=0.1), lambda p: t.SGD(p, 0.05, weight_decay=0.1)),
    "momentum": (o.sgd(0.05, 0.9), lambda p: t.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        o.sgd(0.05, 0.9, True, 0.1),
        lambda p: t.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adam": (o.adam(0.05), lambda p: t.Adam(p, 0.05)),
    "adamw": (o.adamw(0.05, weight_decay=0.1), lambda p: t.AdamW(p, 0.05, weight_decay=0.1)),
    "adagrad": (
        o.adagrad(0.05, weight_decay=0.1, lr_decay=0.2, start=0.3),
        lambda p: t.Adagrad(p, 0.05, 0.2, 0.1, 0.3),
    ),
    "rmsprop": (o.rmsprop(0.05, 0.9), lambda p: t.RMSprop(p, 0.05, 0.9)),
    "rmsprop all": (
        o.rmsprop(0.05, 0.9, 1e-6, 0.8, True, 0.1),
        lambda p: t.RMSprop(p, 0.05, 0.9, 1e-6, 0.1, 0.8, True),
    ),
}
ELEMENTWISE = {name: tx for name, (tx, _) in TORCH.items()} | {
    "lion": o.lion(0.05, weight_decay=0.1)
}


@pytest.mark.parametrize("name", TORCH)
def test_transforms_follow_torch_optim(name: str) -> None:
    tx, make = TORCH[name]
    theirs = {k: p.clone().requires_grad_() for k, p in PARAMS.items()}
    optimizer = make(list(theirs.values()))
    for i in range(10):
        for k, g in gradients({k: p.detach() for k, p in theirs.items()}, i).items():
            theirs[k].grad = g
        optimizer.step()
    for k, p in steps(tx, PARAMS).items():
        close(p, theirs[k].detach(), 1e-12)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_sharded_updates_are_the_dense_ones_bit_for_bit(name: str, layouts: dict[str, str]) -> None:
    tx = ELEMENTWISE[name]
    want = steps(tx, PARAMS)
    with sl.simulate(x=2, y=2):
        got = steps(tx, {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        for k in want:
            assert torch.equal(sl.unshard(got[k]), want[k])


def test_padded_updates_are_the_dense_ones_bit_for_bit() -> None:
    params = {"w": PARAMS["w"][:7, :11].contiguous(), "b": PARAMS["b"][:5].contiguous()}
    for name, tx in ELEMENTWISE.items():
        want = steps(tx, params, 4)
        with sl.simulate(x=2, y=3):
            placed = {
                k: sl.shard(p, lay, pad=True)
                for (k, p), lay in zip(params.items(), ("x y", "y"), strict=True)
            }
            got = steps(tx, placed, 4)
            for k in want:
                assert torch.equal(sl.unshard(got[k]), want[k]), name


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_in_place_is_the_pure_step(name: str) -> None:
    tx = ELEMENTWISE[name]
    want = steps(tx, PARAMS, 5)
    with sl.simulate(x=2, y=2):
        for params in (
            {k: p.clone() for k, p in PARAMS.items()},
            {k: sl.shard(p, LAYOUTS[0][k]) for k, p in PARAMS.items()},
        ):
            state = tx.init(params)
            for i in range(5):
                step = Step()
                state = run_in_place(tx, gradients(params, i), state, params, step)
                assert step.lr == 0.05
            for k in want:
                now = params[k]
                close(sl.unshard(now) if isinstance(now, sl.ShardedTensor) else now, want[k], 1e-12)


def test_nothing_given_is_changed() -> None:
    for name, tx in ELEMENTWISE.items():
        p, g = {"w": torch.ones(3)}, {"w": torch.ones(3)}
        state = tx.init(p)
        before = str(state)
        tx.update(g, state, p)
        assert str(state) == before and g["w"].sum() == 3 and p["w"].sum() == 3, name


def test_a_schedule_stands_for_a_rate() -> None:
    rates = o.linear(0.2, 0.1, 4)
    for make in (o.sgd, o.adamw, o.adagrad, o.rmsprop, o.lion):
        params = {"w": torch.ones(3)}
        tx, state, seen = make(rates), None, []
        state = tx.init(params)
        for i in range(3):
            updates, after = tx.update({"w": torch.ones(3)}, state, params)
            fixed, _ = make(rates(i)).update({"w": torch.ones(3)}, state, params)
            seen.append(torch.equal(updates["w"], fixed["w"]))
            state = after
        assert all(seen), make


def test_half_parameters_get_fp32_moments_and_one_warning() -> None:
    params = {"w": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.bfloat16)}
    for make in (o.adamw, o.lion, o.adagrad, lambda lr: o.rmsprop(lr, momentum=0.9), o.lamb):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = make(1e-3).init(params)
        assert len(caught) == 1 and "without a master copy" in str(caught[0].message)
        assert caught[0].filename == __file__
        kept = [x for x in sl_leaves(state) if isinstance(x, torch.Tensor)]
        assert kept and all(x.dtype == torch.float32 for x in kept)
        tx = make(1e-3)
        g = {k: p * 0.1 for k, p in params.items()}
        updates, _ = tx.update(g, state, params)
        new = o.apply_updates(params, updates)
        assert updates["w"].dtype == torch.float32 and new["w"].dtype == torch.bfloat16
        wide = {k: p.float() for k, p in params.items()}
        exact, _ = tx.update({k: v.float() for k, v in g.items()}, state, wide)
        assert torch.equal(new["w"], (wide["w"] + exact["w"]).bfloat16())


def sl_leaves(tree: Any) -> list[Any]:
    import optree

    return optree.tree_leaves(tree)


def test_the_rate_is_reported_where_no_kernel_takes_the_dtypes() -> None:
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    for tx in (sl.optim.adamw(0.1), sl.optim.adagrad(0.1), sl.optim.sgd(0.1, 0.9)):
        with pytest.warns(UserWarning, match="without a master copy"):
            state = tx.init(params)
        mine, grads = ({"w": params["w"].clone()} for _ in "ab")
        *_, info = sl.optim.step(tx, mine, grads, state)
        assert info.lr == 0.1
