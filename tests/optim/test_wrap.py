"""Several steps as one, injected numbers, running means: equal to what they stand for."""

from contextlib import nullcontext
from typing import Any

import optree
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import close, r
from tests.optim.cases import LAYOUTS, PARAMS, gradients, steps
from tests.optim.test_clip import pend

o = sl.optim


def fixed(i: int) -> dict[str, torch.Tensor]:
    """Gradients that do not hang on the parameters."""
    return {k: r(*p.shape, seed=10 + 3 * i + n) for n, (k, p) in enumerate(PARAMS.items())}


@pytest.mark.parametrize("inner", [o.adamw(0.05), o.chain(o.clip_by_global_norm(0.5), o.lamb(0.1))])
def test_several_steps_are_one_with_the_mean(inner: Any) -> None:
    tx = o.multi_steps(inner, 3)
    want, state = PARAMS, inner.init(PARAMS)
    for i in range(2):
        mean = {
            k: (fixed(3 * i)[k] + fixed(3 * i + 1)[k] + fixed(3 * i + 2)[k]) / 3 for k in PARAMS
        }
        updates, state = inner.update(mean, state, want)
        want = o.apply_updates(want, updates)
    for place in (None, *LAYOUTS):
        with sl.simulate(data=2, x=2, y=2):
            put = (
                (lambda t, p=place: {k: sl.shard(x, p[k]) for k, x in t.items()}) if place else dict
            )
            params = put(PARAMS)
            state, kept = tx.init(params), optree.tree_map(lambda p: p.clone(), params)
            after = tx.init(kept)
            for i in range(6):
                updates, state = tx.update(put(fixed(i)), state, params)
                params = o.apply_updates(params, updates)
                after = run_in_place(tx, put(fixed(i)), after, kept, Step())
            for k in want:
                close(sl.unshard(params[k]) if place else params[k], want[k], 1e-12)
                close(sl.unshard(kept[k]) if place else kept[k], want[k], 1e-12)


def test_a_cycle_of_pending_gradients_is_reduced_once() -> None:
    tx = o.multi_steps(o.zero(o.sgd(0.1), "data"), 4)
    with sl.simulate(data=2):
        params = {k: sl.shard(p, "...") for k, p in PARAMS.items()}
        state = tx.init(params)
        with sl.trace() as t:
            for i in range(3):
                g = {k: pend(sl.shard(x, "..."), "data") for k, x in fixed(i).items()}
                updates, state = tx.update(g, state, params)
                assert all(not u.raw.any() and not u.sharding.partial for u in updates.values())
        assert not t.events
        with sl.trace() as t:
            updates, state = tx.update(g, state, params)
        assert sum(e.kind == "psum_scatter" for e in t.events) == 1
        total = {k: sum(fixed(i)[k] for i in (0, 1, 2, 2)) / 4 for k in PARAMS}
        for k, u in updates.items():
            close(sl.unshard(u), -0.1 * total[k], 1e-12)


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_cycle_that_has_begun_is_kept_by_name(stage: int | None) -> None:
    """Kept after the third of four gradients and loaded elsewhere, it ends as if it had not been."""

    def made(axes: dict[str, int], part: int | None, layout: str) -> tuple[Any, Any, Any]:
        tx = o.multi_steps(o.chain(o.clip_by_global_norm(0.5), o.adamw(0.05)), 4)
        tx = tx if part is None else o.zero(tx, "data", part)
        params = tx.shard({"w": sl.shard(r(6, 10), layout), "b": sl.shard(r(7, seed=1), ".")})
        return tx, params, tx.init(params)

    def go(tx: Any, params: Any, state: Any, layout: str, some: range) -> tuple[Any, Any]:
        for i in some:
            g = {"w": sl.shard(r(6, 10, seed=i + 5), layout), "b": sl.shard(r(7, seed=i), ".")}

            def f(p: Any, g: Any = g) -> Any:
                with p.opened() if hasattr(p, "opened") else nullcontext(p) as p:
                    return (p["w"] * g["w"]).sum() + (p["b"] * g["b"]).sum()

            params, state, _ = o.step(tx, params, sl.value_and_grad(f)(params)[1], state)
        return params, state

    with sl.simulate(data=2, x=2):
        tx, params, state = made({"data": 2, "x": 2}, stage, "x .")
        params, state = go(tx, params, state, "x .", range(7))
        kept = {
            k: v.clone() if isinstance(v, torch.Tensor) else v
            for k, v in o.state_dict(state).items()
        }
        weights = {k: v.clone() for k, v in o.state_dict(params).items()}
        params, state = go(tx, params, state, "x .", range(7, 10))
        want = {k: sl.unshard(v) for k, v in o.state_dict(params).items()}
    for axes, part, layout in (({"data": 3}, 2, ". ."), ({"data": 1, "x": 2}, None, ". x")):
        with sl.simulate(**axes):
            tx, params, state = made(axes, part, layout)
            state = o.load_state_dict(state, kept)
            params = o.load_state_dict(params, weights)
            params, state = go(tx, params, state, layout, range(7, 10))
            for k, v in o.state_dict(params).items():
                close(sl.unshard(v), want[k], 1e-12)


@pytest.mark.parametrize("pending", [True, False])
def test_a_cycle_of_gradients_as_they_come_is_kept_when_it_ends(pending: bool) -> None:
    tx = o.zero(o.sgd(0.1, 0.9), "data", 1 if pending else 2)
    tx = o.multi_steps(tx, 2)
    with sl.simulate(data=2):
        params: Any = {k: sl.shard(p, "...") for k, p in PARAMS.items()}
        state = tx.init(params)
        step = sl.value_and_grad(lambda p: p["w"].sum() + p["b"].sum() + p["s"], into=tx)
        grads = step(params)[1]
        params, state, _ = o.step(tx, params, grads, state)
        with pytest.raises(sl.ShardError, match="1 gradients are added up as they came") as e:
            o.state_dict(state)
        names = {"sl": sl, "tx": tx, "params": params, "grads": step(params)[1], "state": state}
        exec(e.value.fix, names)
        again = o.load_state_dict(tx.init(names["params"]), o.state_dict(names["state"]))
        assert again.mini == 0


def test_half_gradients_are_added_in_fp32() -> None:
    tx = o.multi_steps(o.scale(1.0), 2)
    p = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    state = tx.init(p)
    for value in (256.0, 1.0):
        updates, state = tx.update({"w": torch.full((1,), value, dtype=torch.bfloat16)}, state, p)
    assert updates["w"].item() == 128.5


def test_by_hand_a_cycle_is_a_sum() -> None:
    """What the documentation says: pending gradients add, and nothing moves."""
    with sl.simulate(data=2), sl.trace() as t:
        g = {"w": pend(sl.shard(torch.ones(4), "..."), "data")}
        total = optree.tree_map(torch.add, g, g)
        assert total["w"].sharding.partial == ("data",) and not t.events
        close(sl.unshard(total["w"]), torch.full((4,), 2.0))


def test_injected_numbers_are_the_transforms_own() -> None:
    rates = o.linear(0.1, 0.01, 8)
    tx = o.inject_hyperparams(o.adamw)(rates, weight_decay=0.1)
    want = steps(o.adamw(rates, weight_decay=0.1), PARAMS)
    state, params = tx.init(PARAMS), PARAMS
    for i in range(10):
        updates, state = tx.update(gradients(params, i), state, params)
        params = o.apply_updates(params, updates)
        assert state.hyperparams == {"lr": rates(i), "weight_decay": 0.1}
    for k in want:
        assert torch.equal(params[k], want[k])


def test_an_injected_number_may_be_changed() -> None:
    tx = o.inject_hyperparams(o.sgd)(lr=0.1)
    p = {"w": torch.ones(2)}
    state = tx.init(p)
    state.hyperparams["lr"] = 0.5
    params = {"w": torch.ones(2)}
    state = run_in_place(tx, {"w": torch.ones(2)}, state, params, Step())
    assert torch.equal(params["w"], torch.full((2,), 0.5)) and state.hyperparams["lr"] == 0.5


def test_what_is_no_number_is_not_injected() -> None:
    tx = o.inject_hyperparams(o.sgd)(0.1, 0.9, nesterov=True)
    assert tx.init({"w": torch.ones(1)}).hyperparams == {"lr": 0.1, "momentum": 0.9}
    assert o.inject_hyperparams(o.lamb)(0.1).trait == "tensor"


def test_the_mean_of_updates_is_debiased_as_adams_is() -> None:
    tx = o.ema(0.9)
    state, mean = tx.init(PARAMS), {k: torch.zeros_like(p) for k, p in PARAMS.items()}
    for i in range(5):
        updates, state = tx.update(fixed(i), state, PARAMS)
        mean = {k: 0.9 * m + 0.1 * fixed(i)[k] for k, m in mean.items()}
        for k in mean:
            close(updates[k], mean[k] / (1 - 0.9 ** (i + 1)), 1e-12)
    raw = o.ema(0.9, debias=False)
    assert torch.allclose(raw.update(PARAMS, raw.init(PARAMS))[0]["w"], 0.1 * PARAMS["w"])


def test_the_mean_of_parameters_is_torchs() -> None:
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(module)
    tx = o.averaged(o.sgd(0.1), 0.9)
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    kept = {n: p.clone() for n, p in params.items()}
    state, after = tx.init(params), tx.init(kept)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i in range(5):
        g = {n: p * (i - 2) for n, p in params.items()}
        for n, p in module.named_parameters():
            p.grad = g[n].clone()
        optimizer.step()
        theirs.update_parameters(module)
        updates, state = tx.update(g, state, params)
        params = o.apply_updates(params, updates)
        after = run_in_place(tx, {n: p * (i - 2) for n, p in kept.items()}, after, kept, Step())
    for n, p in theirs.module.named_parameters():
        close(state.mean[n], p.detach(), 1e-12)
        close(after.mean[n], p.detach(), 1e-12)


def test_no_steps_are_refused() -> None:
    with pytest.raises(sl.ShardError, match="every=0 is not") as caught:
        o.multi_steps(o.sgd(0.1), 0)
    exec(caught.value.fix, {"sl": sl, "tx": o.sgd(0.1)})
