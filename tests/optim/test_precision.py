"""Mixed precision: half parameters are the rounding of exactly what fp32 ones would be."""

import warnings
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import r
from tests.optim.cases import LAYOUTS, PARAMS

o = sl.optim
BF16 = torch.bfloat16


def start() -> dict[str, torch.Tensor]:
    """fp32 values that bfloat16 has."""
    return {k: p.to(BF16).float() for k, p in PARAMS.items()}


def grads(i: int) -> dict[str, torch.Tensor]:
    return {k: r(*p.shape, seed=20 + 3 * i + n).to(BF16) for n, (k, p) in enumerate(PARAMS.items())}


def in_fp32(tx: Any, count: int) -> dict[str, torch.Tensor]:
    params = start()
    state = tx.init(params)
    for i in range(count):
        updates, state = tx.update({k: g.float() for k, g in grads(i).items()}, state, params)
        params = o.apply_updates(params, updates)
    return params


INNER = {"adamw": o.adamw(1e-4), "clipped": o.chain(o.clip_by_global_norm(1.0), o.lion(1e-4))}


@pytest.mark.parametrize("layouts", [None, *LAYOUTS])
@pytest.mark.parametrize("master", ["fp32", "bf16+rem"])
@pytest.mark.parametrize("name", INNER)
def test_half_parameters_are_the_rounding_of_fp32_ones(
    name: str, master: Any, layouts: Any
) -> None:
    want = in_fp32(INNER[name], 12)
    tx = o.mixed(INNER[name], o.Precision(master=master))
    with sl.simulate(x=2, y=2), warnings.catch_warnings():
        warnings.simplefilter("error")  # there is a master, so nothing to warn of
        put = (lambda t: {k: sl.shard(v, layouts[k]) for k, v in t.items()}) if layouts else dict
        params = o.Precision().to_param(put(start()))
        kept = optree.tree_map(lambda p: p.clone(), params)
        state, after = tx.init(params), tx.init(kept)
        for i in range(12):
            updates, state = tx.update(put(grads(i)), state, params)
            params = o.apply_updates(params, updates)
            after = run_in_place(tx, put(grads(i)), after, kept, Step())
        for k, w in want.items():
            whole = (lambda x: sl.unshard(x)) if layouts else (lambda x: x)
            high = whole(params[k])
            assert high.dtype == BF16
            low = whole(state.master[k])
            exact = low if master == "fp32" else o.precision.joined(high, low)
            assert torch.equal(exact, w)
            near = whole(kept[k]).float()  # its kernel adds in another order
            assert ((near - w).abs() <= w.abs() / 128 + 1e-6).all()


def test_without_a_master_most_weights_would_not_move() -> None:
    """What the master is for: 12 steps of a ten thousandth."""
    want, start_ = in_fp32(INNER["adamw"], 12), start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tx = o.mixed(INNER["adamw"], o.Precision(master=None))
        params = o.Precision().to_param(start_)
        state = tx.init(params)
    for i in range(12):
        updates, state = tx.update(grads(i), state, params)
        params = o.apply_updates(params, updates)
    stuck = (params["w"].float() == start_["w"]).float().mean()
    assert stuck > 0.5 and not (want["w"] == start_["w"]).any()


@given(st.integers(-(2**31), 2**31 - 1))
def test_a_half_and_a_remainder_are_every_fp32(bits: int) -> None:
    x = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    high, low = o.precision.halves(x)
    back = o.precision.joined(high, low)
    assert back.view(torch.int32).item() == bits or bool(x.isnan())


def test_other_leaves_are_their_own_master() -> None:
    params = {
        "h": torch.ones(2, dtype=BF16),
        "f": torch.ones(2),
        "d": torch.ones(2, dtype=torch.float64),
    }
    tx = o.mixed(o.sgd(0.1))
    state = tx.init(params)
    assert state.master["f"] is None and state.master["d"] is None
    g = {k: torch.ones_like(p) for k, p in params.items()}
    updates, state = tx.update(g, state, params)
    new = o.apply_updates(params, updates)
    assert [new[k].dtype for k in params] == [p.dtype for p in params.values()]
    assert torch.equal(new["f"], torch.full((2,), 0.9)) and new["d"][0] == 0.9


def test_frozen_leaves_have_no_master() -> None:
    params = {"a": torch.ones(2, dtype=BF16).requires_grad_(), "b": torch.ones(2, dtype=BF16)}
    tx = o.mixed(o.adamw(0.1))
    state = tx.init(params)
    updates, state = tx.update({"a": torch.ones(2, dtype=BF16), "b": None}, state, params)
    new = o.apply_updates(params, updates)
    assert state.master["b"] is None and new["b"] is params["b"] and new["a"].requires_grad
    run_in_place(tx, {"a": torch.ones(2, dtype=BF16), "b": None}, state, params, Step())
    assert torch.equal(params["b"], torch.ones(2, dtype=BF16))


def test_moments_may_be_kept_in_half() -> None:
    tx = o.mixed(o.adamw(0.1), o.Precision(state=BF16))
    params = {"w": torch.ones(4, dtype=BF16)}
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update({"w": torch.full((4,), 0.3, dtype=BF16)}, state, params)
        assert state.inner.mu["w"].dtype == BF16 and state.master["w"].dtype == torch.float32
    state = run_in_place(tx, {"w": torch.ones(4, dtype=BF16)}, state, params, Step())
    assert state.inner.nu["w"].dtype == BF16 and state.inner.count == 3


def test_moments_in_half_do_not_round_updates_of_fp64_parameters() -> None:
    tx = o.mixed(o.sgd(0.5, 0.9), o.Precision(master=None, state=BF16))
    grads, params = {"w": r(4, seed=1).double() / 3}, {"w": torch.zeros(4, dtype=torch.float64)}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert torch.equal(updates["w"], grads["w"] * -0.5)
    run_in_place(tx, grads, tx.init(params), params, Step())
    assert torch.equal(params["w"], updates["w"])


def test_computing_in_half_gives_gradients_in_the_parameters_dtype() -> None:
    policy = o.Precision(param=torch.float32, compute=BF16)
    with sl.simulate(data=2, x=2):
        params = {"w": sl.shard(torch.ones(4, 4), "x ."), "step": 3}
        seen = []

        def loss(p: Any) -> Any:
            half = policy.to_compute(p)
            seen.append(half["w"].dtype)
            return (half["w"] * half["w"]).sum().float()

        g = sl.grad(lambda w: loss({"w": w, "step": 3}))(params["w"])
        assert seen == [BF16] and g.dtype == torch.float32 and policy.to_param(params)["step"] == 3


@pytest.mark.parametrize("master", ["fp32", "bf16+rem"])
def test_zero_takes_the_policy(master: Any) -> None:
    policy = o.Precision(master=master)
    tx = o.zero(o.adamw(1e-3), "data", **policy.for_zero())
    want = in_fp32(o.adamw(1e-3), 3)
    with sl.simulate(data=2):
        params = policy.to_param({k: sl.shard(p, "...") for k, p in start().items()})
        state = tx.init(params)
        for i in range(3):
            g = {k: sl.shard(v, "...") for k, v in grads(i).items()}
            params, state, _ = o.step(tx, params, g, state)
        for k, w in want.items():
            got = sl.unshard(params[k]).float()
            assert ((got - w).abs() <= w.abs() / 128 + 1e-6).all()


def test_zero_keeps_masters_itself() -> None:
    with sl.simulate(data=2), pytest.raises(sl.ShardError, match="zero keeps masters itself") as e:
        o.zero(o.mixed(o.adamw(0.1)), "data").init({"w": sl.shard(torch.ones(4), "...")})
    exec(e.value.fix, {"sl": sl})


MISTAKES = [
    lambda: o.Precision(param=torch.int8),
    lambda: o.Precision(reduce="bf16"),  # type: ignore[arg-type]
    lambda: o.Precision(master="bf16"),  # type: ignore[arg-type]
    lambda: o.Precision(param=torch.float16, master="bf16+rem"),
]


@pytest.mark.parametrize("call", MISTAKES)
def test_a_policy_that_cannot_be_is_refused(call: Any) -> None:
    with pytest.raises(sl.ShardError) as caught:
        call()
    assert isinstance(eval(caught.value.fix, {"sl": sl, "torch": torch}), o.Precision)


def on_ranks() -> bool:
    tx = o.mixed(INNER["clipped"], o.Precision(master="bf16+rem"))
    want = in_fp32(INNER["clipped"], 4)
    lay = LAYOUTS[0]
    params = o.Precision().to_param({k: sl.shard(p, lay[k]) for k, p in start().items()})
    state = tx.init(params)
    for i in range(4):
        updates, state = tx.update(
            {k: sl.shard(g, lay[k]) for k, g in grads(i).items()}, state, params
        )
        params = o.apply_updates(params, updates)
    return all(
        torch.equal(o.precision.joined(sl.unshard(params[k]), sl.unshard(state.master[k])), w)
        for k, w in want.items()
    )


def test_masters_on_real_ranks(pool: Any) -> None:
    assert all(pool.run(on_ranks, x=2, y=2))
