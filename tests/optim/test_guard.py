"""Steps that are passed over: nothing changes but the count; scales as torch's GradScaler."""

import warnings
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.optim.transform import Step, begun, run_in_place
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, gradients
from tests.optim.test_clip import pend

o = sl.optim
INNER = {
    "adamw": o.adamw(0.05),
    "clipped": o.chain(o.clip_by_global_norm(0.5), o.adamw(0.05)),
    "lamb": o.lamb(0.05),
}


def spoil(grads: Any, i: int) -> Any:
    """A gradient with one element that is no number, every third step."""
    if i % 3 != 1:
        return grads
    bad = dict(grads)
    w = bad["w"].clone()
    raw = w.raw if isinstance(w, sl.ShardedTensor) else w
    raw.reshape(-1)[-1] = float("nan") if i == 1 else float("inf")
    bad["w"] = w
    return bad


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("layouts", [None, *LAYOUTS])
def test_spoilt_steps_are_as_if_they_had_not_been(name: str, layouts: Any) -> None:
    inner, tx = INNER[name], o.skip_nonfinite(INNER[name])
    with sl.simulate(x=2, y=2):
        params = {k: sl.shard(p, layouts[k]) if layouts else p for k, p in PARAMS.items()}
        want, state = params, inner.init(params)
        for i in (0, 2, 3, 5):
            updates, state = inner.update(gradients(want, i), state, want)
            want = o.apply_updates(want, updates)
        got, state = params, tx.init(params)
        kept = optree.tree_map(lambda p: p.clone(), params)
        after = tx.init(kept)
        for i in range(6):
            updates, state = tx.update(spoil(gradients(got, i), i), state, got)
            got = o.apply_updates(got, updates)
            step = Step()
            after = run_in_place(tx, spoil(gradients(kept, i), i), begun(after), kept, step)
            assert bool(step.unchanged) == (i % 3 == 1) and step.norm is not None
        assert state.skipped == after.skipped == 2 and state.running == 0
        for k in want:
            a, b, c = (sl.unshard(t[k]) if layouts else t[k] for t in (want, got, kept))
            assert torch.equal(a, b)
            close(c, a, 1e-12)


def test_one_collective_serves_the_question_and_the_clip() -> None:
    with sl.simulate(x=2):
        params = {k: sl.shard(p, "x ..." if p.ndim else "") for k, p in PARAMS.items()}
        for make in (o.skip_nonfinite, o.loss_scale):
            tx = make(INNER["clipped"])
            state = tx.init(params)
            for run in ("update", "donate"):
                with sl.expect_comm(psum=1):
                    if run == "update":
                        tx.update(params, state, params)
                    else:
                        run_in_place(tx, params, state, params, Step())


def test_a_run_of_spoilt_steps_is_an_error() -> None:
    tx, p = o.skip_nonfinite(o.sgd(0.1), most=2), {"w": torch.ones(1)}
    state, bad = tx.init(p), {"w": torch.tensor([float("nan")])}
    for _ in range(2):
        _, state = tx.update(bad, state, p)
    with pytest.raises(sl.ShardError, match="in 3 steps, one after the other"):
        tx.update(bad, state, p)


def torchs_scaler(grads: list[float], **how: Any) -> tuple[list[float], list[float]]:
    """Its scales and the weight after each step of SGD."""
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.5)
    scaler = torch.amp.GradScaler("cpu", **how)  # type: ignore[attr-defined]
    scales, weights = [], []
    for g in grads:
        scales.append(scaler.scale(torch.ones(1)).item())
        w.grad = torch.tensor([g * scales[-1]])
        scaler.step(optimizer)
        scaler.update()
        weights.append(w.item())
    return scales, weights


def test_scales_are_those_of_torchs_scaler() -> None:
    inf = float("inf")
    grads = [1.0, 2.0, inf, 1.0, inf, inf, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, inf, 1.0]
    how = {"init_scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, weights = torchs_scaler(grads, **how)
    tx = o.loss_scale(o.sgd(0.5), *how.values())
    with sl.simulate(data=2, x=2):
        params = {"w": sl.shard(torch.zeros(2), "x")}
        kept = {"w": sl.shard(torch.zeros(2), "x")}
        state, after = tx.init(params), tx.init(kept)
        for g, scale, weight in zip(grads, scales, weights, strict=True):
            assert state.scale == after.scale == scale
            grad = {"w": sl.shard(torch.full((2,), g * scale), "x")}
            updates, state = tx.update(grad, state, params)
            params = o.apply_updates(params, updates)
            after = run_in_place(tx, grad, after, kept, Step())
            assert sl.unshard(params["w"]).tolist() == [weight] * 2
            assert sl.unshard(kept["w"]).tolist() == [weight] * 2


def test_pending_half_gradients_are_scaled_back_in_fp32() -> None:
    """2**-20 is no number of fp16, times 2**16 it is."""
    tx = o.loss_scale(o.zero(o.sgd(1.0), "data"))
    with sl.simulate(data=2):
        params = {"w": sl.shard(torch.zeros(4), "...")}
        state = tx.init(params)
        small = sl.shard(torch.full((4,), 2.0**-20 * state.scale, dtype=torch.float16), "...")
        updates, _ = tx.update({"w": pend(small, "data")}, state, params)
        assert torch.equal(sl.unshard(updates["w"]), torch.full((4,), -(2.0**-20)))


def test_a_scale_that_falls_without_end_is_an_error() -> None:
    tx, p = o.loss_scale(o.sgd(0.1), start=2.0**-23), {"w": torch.ones(1)}
    bad = {"w": torch.tensor([float("nan")])}
    _, state = tx.update(bad, tx.init(p), p)
    with pytest.raises(sl.ShardError, match="even with a loss scaled by"):
        tx.update(bad, state, p)


def on_ranks() -> list[Any]:
    tx = o.skip_nonfinite(INNER["clipped"])
    params = {k: sl.shard(p, "x ..." if p.ndim else "") for k, p in PARAMS.items()}
    state, kept = tx.init(params), params
    for i in range(3):
        g = gradients(params, i)
        if i == 1 and sl.axis_index("x") == 1:  # one rank alone holds it
            g["w"].raw[0, 0] = float("nan")
        updates, state = tx.update(g, state, params)
        params = o.apply_updates(params, updates)
    return [state.skipped, *(float(sl.unshard(p).sum()) for p in params.values()), kept is params]


def test_ranks_agree_on_what_is_passed_over(pool: Any) -> None:
    answers = pool.run(on_ranks, data=2, x=2)
    assert answers[0][0] == 1 and all(a == answers[0] for a in answers)
