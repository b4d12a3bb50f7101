"""Groups of parameters: each as if its transform were alone, what is held stays, clips in front."""

from contextlib import nullcontext
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.optim.transform import Step, run_in_place
from tests.ops.cases import close
from tests.optim.cases import LAYOUTS, PARAMS, gradients, steps
from tests.optim.test_clip import pend

o = sl.optim
GROUPS = {
    "slow": o.adamw(0.01, weight_decay=0.0),
    "fast": o.sgd(0.05, 0.9),
    "hold": o.set_to_zero(),
}
WHICH = [("w", "slow"), ("b", "fast"), ("s", "hold")]


def alone() -> dict[str, torch.Tensor]:
    """Each parameter under its own transform."""
    out = {}
    for k, label in WHICH:
        out |= steps(GROUPS[label], {k: PARAMS[k]})
    return out


@pytest.mark.parametrize("layouts", [None, *LAYOUTS])
def test_a_group_is_updated_as_if_it_were_alone(layouts: Any) -> None:
    tx, want = o.partition(GROUPS, WHICH), alone()
    with sl.simulate(x=2, y=2):
        params = {k: sl.shard(p, layouts[k]) if layouts else p for k, p in PARAMS.items()}
        got = steps(tx, params)
        state, memory = tx.init(params), optree.tree_map(lambda p: p.clone(), params)
        for i in range(10):
            state = run_in_place(tx, gradients(memory, i), state, memory, Step())
        for k in want:
            whole = sl.unshard(got[k]) if layouts else got[k]
            assert torch.equal(whole, want[k])
            close(sl.unshard(memory[k]) if layouts else memory[k], want[k], 1e-12)


def test_a_group_with_no_gradient_is_left_alone() -> None:
    tx = o.partition(
        {"a": o.adamw(0.1), "b": o.zero(o.adamw(0.1), "data")}, [("w", "a"), ("*", "b")]
    )
    with sl.simulate(data=2):
        params = {
            "w": sl.shard(torch.ones(4), "...").requires_grad_(),
            "v": sl.shard(torch.ones(4), "..."),
        }
        state = tx.init(params)
        _, g = sl.value_and_grad(lambda p: (p["w"] * p["v"]).sum())(params)
        assert g["v"] is None
        updates, state = tx.update(g, state, params)
        new = o.apply_updates(params, updates)
        assert new["v"] is params["v"] and not torch.equal(sl.unshard(new["w"]), torch.ones(4))


@pytest.mark.parametrize("layouts", [LAYOUTS[0], LAYOUTS[2]])
def test_a_clip_in_front_of_groups_takes_pending_gradients(layouts: dict[str, str]) -> None:
    """Groups that zero splits reduce their own part; the norm in front is that of all."""

    def tx(zero: Any) -> Any:
        groups = {"a": zero(o.adamw(0.05)), "b": zero(o.sgd(0.05, 0.9))}
        return o.chain(o.clip_by_global_norm(0.7), o.partition(groups, [("w", "a"), ("*", "b")]))

    want = steps(tx(lambda t: t), PARAMS, 4)
    with sl.simulate(data=2, x=2, y=2):
        params = {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()}
        ours = tx(lambda t: o.zero(t, "data"))
        kept = {k: p.clone() for k, p in params.items()}
        state, after = ours.init(params), ours.init(kept)
        for i in range(4):
            g = {k: pend(v, "data") for k, v in gradients(params, i).items()}
            updates, state = ours.update(g, state, params)
            params = o.apply_updates(params, updates)
            g = {k: pend(v, "data") for k, v in gradients(kept, i).items()}
            kept, after, info = o.step(ours, kept, g, after)
            assert info.norm is not None and info.lr == 0.05
        for k in want:
            close(sl.unshard(params[k]), want[k], 1e-12)
            close(sl.unshard(kept[k]), want[k], 1e-12)


UNDER_ZERO = {
    "lamb": o.lamb(0.05, weight_decay=0.1),
    "per parameter": o.chain(o.clip_by_parameter_norm(0.3), o.lion(0.05)),
    "averaged": o.averaged(o.adamw(0.05), 0.9),
    "cycles": o.multi_steps(o.adamw(0.05), 2),
    "injected": o.inject_hyperparams(o.adamw)(lr=0.05),
    "skipping": o.skip_nonfinite(o.chain(o.clip_by_global_norm(1.0), o.adamw(0.05))),
    "scaled": o.loss_scale(o.sgd(0.05), start=2.0),
    "groups": o.partition({"a": o.adamw(0.05), "b": o.ema(0.9)}, [("w", "a"), ("*", "b")]),
}


@pytest.mark.parametrize("name", UNDER_ZERO)
def test_zero_around_any_of_them_is_the_transform_itself(name: str) -> None:
    tx = UNDER_ZERO[name]
    want, zero = steps(tx, PARAMS, 3), o.zero(tx, "data")
    with sl.simulate(data=2, x=2, y=2):
        params = {k: sl.shard(p, LAYOUTS[0][k]) for k, p in PARAMS.items()}
        kept = {k: p.clone() for k, p in params.items()}
        got, state = steps(zero, params, 3), zero.init(kept)
        for i in range(3):
            g = {k: pend(v, "data") for k, v in gradients(kept, i).items()}
            kept, state, _ = o.step(zero, kept, g, state)
        for k in want:
            close(sl.unshard(got[k]), want[k], 1e-15 if zero.trait == "elementwise" else 1e-12)
            close(sl.unshard(kept[k]), want[k], 1e-12)


REFUSING = {
    "groups": lambda: o.partition(
        {"a": o.adamw(0.1), "b": o.chain(o.clip_by_global_norm(1.0), o.adamw(0.1))},
        [("w", "a"), ("*", "b")],
    ),
    "wrapped": lambda: o.partition(
        {
            "a": o.averaged(o.sgd(0.1, 0.9)),
            "b": o.averaged(
                o.chain(
                    o.clip_by_global_norm(1.0),
                    o.inject_hyperparams(
                        lambda by: o.chain(o.clip_by_global_norm(by), o.lion(0.1))
                    )(by=1.0),
                )
            ),
        },
        [("w", "a"), ("*", "b")],
    ),
    "mean in front": lambda: o.chain(o.ema(0.9), o.clip_by_global_norm(1.0), o.adamw(0.1)),
    "mean in front of groups": lambda: o.chain(o.ema(0.9), REFUSING["groups"]()),
}


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_gradient_that_is_refused_in_one_group_changes_no_other(
    name: str, stage: int | None
) -> None:
    """What follows is as if the refused step had not been asked for."""
    ends = []
    for spoilt in (False, True):
        with sl.simulate(data=2):
            tx = REFUSING[name]()
            tx = tx if stage is None else o.zero(tx, "data", stage)
            params = tx.shard({k: sl.shard(p, "...") for k, p in PARAMS.items()})
            state = tx.init(params)
            for i, bad in enumerate((1.0, float("nan"), 1.0)):
                if bad != bad and not spoilt:
                    continue
                by = sl.shard(torch.tensor(bad, dtype=torch.float64), "")

                def f(p: Any, by: Any = by, i: int = i) -> Any:
                    with p.opened() if stage == 3 else nullcontext(p) as p:
                        return (p["w"].sum() + p["s"] + p["b"].sum() * by) * (1.0 + i % 2)

                _, grads = sl.value_and_grad(f)(params)
                if bad == bad:
                    params, state, _ = o.step(tx, params, grads, state)
                    continue
                with pytest.raises(sl.ShardError, match="norm of the gradients is nan"):
                    o.step(tx, params, grads, state)
            kept = o.state_dict((params, state))
            ends.append(
                {
                    k: v.raw if isinstance(v, sl.ShardedTensor) else torch.tensor(v)
                    for k, v in kept.items()
                }
            )
    assert all(torch.equal(ends[0][k], v) for k, v in ends[1].items())


def test_groups_that_are_asked_first_cost_no_transfer_more() -> None:
    with sl.simulate(data=2, x=2):
        params = {k: sl.shard(p, LAYOUTS[0][k].replace("y", ".")) for k, p in PARAMS.items()}
        tx = REFUSING["groups"]()
        with sl.trace() as t:
            o.step(tx, params, gradients(params, 0), tx.init(params))
        assert [e.kind for e in t.events] == ["psum"]


def test_set_to_zero_holds_what_a_mask_passes_on() -> None:
    mask, rest = {"a": True, "b": False}, {"a": False, "b": True}
    tx = o.chain(o.masked(o.sgd(0.5), mask), o.masked(o.set_to_zero(), rest))
    p = {"a": torch.ones(2), "b": torch.ones(2)}
    updates, _ = tx.update(p, tx.init(p), p)
    new = o.apply_updates(p, updates)
    assert torch.equal(new["a"], torch.full((2,), 0.5)) and torch.equal(new["b"], p["b"])


def test_masks_and_clipping_pass_over_frozen_leaves() -> None:
    p = {"a": torch.ones(2).requires_grad_(), "b": torch.ones(2)}
    g = {"a": torch.full((2,), 3.0), "b": None}
    for inner in (
        o.masked(o.adamw(0.1), {"a": True, "b": True}),
        o.partition({"x": o.adamw(0.1)}, lambda t: {"a": "x", "b": "x"}),
    ):
        tx = o.chain(o.clip_by_global_norm(1.0), inner)
        updates, _ = tx.update(g, tx.init(p), p)
        new = o.apply_updates(p, updates)
        assert updates["b"] is None and new["b"] is p["b"]
        assert new["a"].requires_grad and not new["b"].requires_grad


@pytest.mark.parametrize("mask", ["w", lambda tree: {k: v.ndim > 1 for k, v in tree.items()}])
@pytest.mark.parametrize("make", [o.adamw, o.lion])
def test_a_decay_mask_says_what_decays(make: Any, mask: Any) -> None:
    """Also where zero shows flat vectors, which have one dimension each."""
    tx = make(0.05, weight_decay=0.2, mask=mask)
    want = {}
    for k in PARAMS:
        want |= steps(make(0.05, weight_decay=0.2 if k == "w" else 0.0), {k: PARAMS[k]}, 3)
    for k, p in steps(tx, PARAMS, 3).items():
        assert torch.equal(p, want[k])
    with sl.simulate(data=2, x=2, y=2):
        params = {k: sl.shard(p, LAYOUTS[0][k]) for k, p in PARAMS.items()}
        for k, p in steps(o.zero(tx, "data"), params, 3).items():
            assert torch.equal(sl.unshard(p), want[k])


MISTAKES = [
    (lambda p: o.partition({"a": o.sgd(1.0)}, [("w", "a"), ("*", "c")]).init(p), "'c' is no label"),
    (
        lambda p: o.partition(GROUPS, [("*", "slow")]).init(p),
        "no parameter is labelled 'fast', 'hold'",
    ),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES)
def test_labels_without_transforms_and_transforms_without_parameters(call: Any, says: str) -> None:
    with pytest.raises(sl.ShardError, match=says) as caught:
        call(PARAMS)
    exec(caught.value.fix, {"transforms": GROUPS})


def on_ranks(layouts: dict[str, str]) -> list[bool]:
    want = alone()
    got = steps(o.partition(GROUPS, WHICH), {k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
    return [torch.equal(sl.unshard(got[k]), want[k]) for k in want]


def test_groups_on_real_ranks(pool: Any) -> None:
    for answer in pool.run(on_ranks, LAYOUTS[0], x=2, y=2):
        assert all(answer)
