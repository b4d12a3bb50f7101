"""Transforms around transforms: under zero, in place and on blocks the steps of one device.

Drawn compositions.  Gradients are small multiples of 1/16, so that their sums are exact in whatever
order; what takes norms or statistics is equal to rounding, everything else bit for bit.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from tests import histories
from tests.optim.test_exact import LAYOUTS, MESHES, pending, value

o = sl.optim
Spec = tuple[Any, ...]

EXACT: dict[str, Any] = {
    "sgd": lambda: o.sgd(0.03, weight_decay=0.1),
    "momentum": lambda: o.sgd(o.linear(0.03, 0.01, 3), 0.9, nesterov=True),
    "adamw": lambda: o.adamw(o.warmup_cosine(0.03, 1, 4), weight_decay=0.1),
    "adam": lambda: o.adam(0.03),
    "adagrad": lambda: o.adagrad(0.03, start=0.1, lr_decay=0.1),
    "rmsprop": lambda: o.rmsprop(0.03, momentum=0.9, centered=True, weight_decay=0.1),
    "lion": lambda: o.lion(0.03, weight_decay=0.1),
    "injected": lambda: o.inject_hyperparams(o.adamw)(o.cosine(0.03, 0.01, 4)),
    "torchs": lambda: o.from_torch(torch.optim.NAdam, lr=0.03),
    "nothing": o.set_to_zero,
}
NEAR: dict[str, Any] = {
    "lamb": lambda: o.lamb(0.03, weight_decay=0.1),
    "adafactor": lambda: o.adafactor(0.03, weight_decay=0.1),
}
BEFORE: dict[str, Any] = {
    "value": lambda: o.clip_by_value(0.5),
    "norm": lambda: o.clip_by_global_norm(0.5),
    "inf": lambda: o.clip_by_global_norm(0.5, p=float("inf")),
    "ema": lambda: o.ema(0.9),
    "scale": lambda: o.scale(0.5),
    "schedule": lambda: o.scale_by_schedule(o.wsd(1.0, 1, 4, 1)),
    "some": lambda: o.masked(o.scale(-0.5), lambda t: {k: k != "p1" for k in t}),
}
AROUND: dict[str, Any] = {
    "twice": lambda tx: o.multi_steps(tx, 2),
    "skip": o.skip_nonfinite,
    "loss": lambda tx: o.loss_scale(tx, 4.0, interval=2),
    "mean": lambda tx: o.averaged(tx, 0.9),
}


def made(spec: Spec, depth: int = 0) -> Any:
    kind, *parts = spec
    if kind == "leaf":
        return (EXACT | NEAR)[parts[0]]()
    if kind == "chain":
        return o.chain(BEFORE[parts[0]](), made(parts[1], depth))
    if kind == "around":
        return AROUND[parts[0]](made(parts[1], depth))
    one, two = (made(p, depth + 1) for p in parts)
    labels = lambda tree: {k: "ab"[int(k[1:]) >> depth & 1] for k in tree}  # noqa: E731
    return o.partition({"a": one, "b": two}, labels)


def specs(leaves: Any) -> Any:
    def around(inner: Any) -> Any:
        return st.one_of(
            st.tuples(st.just("chain"), st.sampled_from(sorted(BEFORE)), inner),
            st.tuples(st.just("around"), st.sampled_from(sorted(AROUND)), inner),
            st.tuples(st.just("groups"), inner, inner),
        )

    leaf = st.tuples(st.just("leaf"), st.sampled_from(sorted(leaves)))
    return st.one_of(around(leaf), around(around(leaf)))


@st.composite
def parameters(draw: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """At least four, so that groups of groups have some each."""
    out = {}
    for i in range(draw(st.integers(4, 7))):
        ndim = draw(st.sampled_from([0, 1, 1, 2, 2]))
        shape = tuple(draw(st.sampled_from([0, 1, 3, 7, 53, 64, 131])) for _ in range(ndim))
        out[f"p{i}"] = shape, draw(st.sampled_from(LAYOUTS[ndim]))
    return out


def run(
    spec: Spec, shapes: Any, how: str, axes: Any = (), wrap: Any = lambda tx: tx, pure: bool = True
) -> Any:
    """Parameters after three steps, by path; of a stage 3 their values."""
    dtype = torch.float64 if _is_near(spec) else torch.float32
    plain, tx = how == "plain", wrap(made(spec))

    def put(k: str, x: torch.Tensor) -> Any:
        return x if plain else sl.shard(x, shapes[k][1], pad=True)

    params = {k: put(k, value(s, i).to(dtype)) for i, (k, (s, _)) in enumerate(shapes.items())}
    like = {k: p if plain else p.clone() for k, p in params.items()}
    params = tx.shard(params) if how == "parts" else params
    state = tx.init(params)
    for t in range(4):
        grads = {}
        for i, k in enumerate(shapes):
            total = ((value(shapes[k][0], 100 * t + i) * 16).round() / 16).to(dtype)
            grads[k] = pending(like[k], total, axes) if how == "pending" else put(k, total)
        given: Any = tx.shard(grads) if how == "parts" else grads
        if pure:
            updates, state = tx.update(given, state, params)
            params = o.apply_updates(params, updates)
        else:
            params, state, _ = o.step(tx, params, given, state)
    found = o.state_dict(params) if how == "parts" else params
    return {k: sl.unshard(p) if isinstance(p, sl.ShardedTensor) else p for k, p in found.items()}


def _is_near(spec: Spec) -> bool:
    return any(p in NEAR if isinstance(p, str) else _is_near(p) for p in spec[1:])


def same(got: Any, want: Any, spec: Spec, what: str) -> None:
    for k, x in want.items():
        if _is_near(spec):
            gap = (got[k] - x).abs().max() if x.numel() else torch.zeros(())
            assert gap <= 1e-13 * max(1.0, float(x.abs().max()) if x.numel() else 1.0), (what, k)
        else:
            assert torch.equal(got[k], x), (what, k)


def holds(spec: Spec, shapes: Any, axes: Any, over: Any, inner: Any, stage: int, mb: float) -> None:
    cut = (*((over,) if isinstance(over, str) else over), *((inner,) if inner else ()))

    def wrap(tx: Any) -> Any:
        return o.zero(tx, over, stage, bucket_mb=mb, inner=inner)

    want = run(spec, shapes, "plain")
    with sl.simulate(**axes):
        same(run(spec, shapes, "reduced"), want, spec, "on blocks")
        here = run(spec, shapes, "reduced", pure=False)
        for way in ["parts"] if stage == 3 else ["reduced", "pending"]:
            same(run(spec, shapes, way, cut, wrap), want, spec, f"{way} under zero")
            same(run(spec, shapes, way, cut, wrap, False), here, spec, f"{way} in place under zero")


@settings(max_examples=10, deadline=None)
@given(
    specs(EXACT),
    parameters(),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1e-3, 25.0]),
)
def test_elementwise_ones_are_one_devices_bit_for_bit(
    spec: Spec, shapes: Any, case: Any, stage: int, mb: float
) -> None:
    holds(spec, shapes, *case, stage, mb)


@settings(max_examples=5, deadline=None)
@given(
    specs(EXACT | NEAR),
    parameters(),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1e-3, 25.0]),
)
def test_those_with_norms_and_statistics_to_rounding(
    spec: Spec, shapes: Any, case: Any, stage: int, mb: float
) -> None:
    holds(("chain", "scale", spec), shapes, *case, stage, mb)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_eight_bits_under_zero_are_those_of_the_same_layout(stage: int) -> None:
    """Blocks of 64 lie in a rank's own part, so the layout counts, and zero's cuts do not."""
    spec: Spec = ("around", "twice", ("leaf", "8 bits"))
    EXACT["8 bits"] = lambda: o.adam8bit(0.03, weight_decay=0.1)
    try:
        shapes = {"p0": ((131, 7), "x ."), "p1": ((53,), "x"), "p2": ((), ""), "p3": ((64,), ".")}
        with sl.simulate(data=3, x=2):
            for pure in (True, False):
                want = run(spec, shapes, "reduced", pure=pure)
                how = "parts" if stage == 3 else "reduced"
                wrap = lambda tx: o.zero(tx, "data", stage, bucket_mb=1e-3)  # noqa: E731
                same(run(spec, shapes, how, ("data",), wrap, pure), want, spec, "zero")
    finally:
        del EXACT["8 bits"]


@pytest.mark.parametrize("seed", [10, 73, 12, 5])
def test_what_was_done_before_a_step_changes_none_of_its_results(seed: int) -> None:
    """More are drawn by ``make histories``; the first two met a plan made without gradients."""
    case = histories.draw(seed)
    with sl.simulate(**case.mesh):
        histories.check(case)
