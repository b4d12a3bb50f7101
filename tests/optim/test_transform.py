"""A transform in place does what it does purely, on memory that its caller gives up."""

import re
from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.memory_tracker import Live
from shardlib.optim.transform import Step, Transform, at_rest, begun, run_in_place
from shardlib.optim.trees import pieces
from tests.ops.cases import close, r

PARAMS = {"w": r(8, 12), "b": r(8, seed=1), "s": r(seed=2)}
LAYOUTS = {"w": "x y", "b": "x", "s": ""}


def grads_of(params: Any, i: int) -> Any:
    return {k: (p * 0.3 + (i % 3 - 1)) * (1 + i) for k, p in params.items()}


TX = {
    "adamw": sl.optim.adamw(0.05, weight_decay=0.1),
    "clipped": sl.optim.chain(sl.optim.clip_by_global_norm(0.5), sl.optim.adamw(0.05)),
    "scaled after": sl.optim.chain(sl.optim.adamw(0.05), sl.optim.scale(0.5)),
    "lion": sl.optim.lion(0.05, weight_decay=0.1),  # has no way of its own
    "momentum": sl.optim.sgd(0.05, 0.9),
}


def purely(tx: Transform, params: Any, count: int) -> Any:
    state = tx.init(params)
    for i in range(count):
        updates, state = tx.update(grads_of(params, i), state, params)
        params = sl.optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", TX)
def test_in_place_is_the_pure_step(name: str) -> None:
    """To rounding: the fused kernel adds in another order."""
    tx = TX[name]
    want, after = purely(tx, PARAMS, 5)
    with sl.simulate(x=2, y=2):
        for params in (
            {k: p.clone() for k, p in PARAMS.items()},
            {k: sl.shard(p, LAYOUTS[k]) for k, p in PARAMS.items()},
        ):
            state = tx.init(params)
            memory = [x.raw if hasattr(x, "raw") else x for x in params.values()]
            for i in range(5):
                state = run_in_place(tx, grads_of(params, i), begun(state), params, Step())
            for k in want:
                now = params[k]
                close(sl.unshard(now) if hasattr(now, "raw") else now, want[k], 1e-12)
            for x, m in zip(params.values(), memory, strict=True):
                assert (x.raw if hasattr(x, "raw") else x) is m
            state = at_rest(state)
            same = zip(optree.tree_leaves(state), optree.tree_leaves(after), strict=True)
            for one, two in same:
                if isinstance(one, int):
                    assert one == two


def test_a_step_tells_norm_and_rate() -> None:
    params = {k: p.clone() for k, p in PARAMS.items()}
    tx, step = TX["clipped"], Step()
    g = grads_of(params, 1)
    want = sl.optim.global_norm(g)
    run_in_place(tx, g, tx.init(params), params, step)
    assert step.norm is not None and torch.equal(step.norm, want) and step.lr == 0.05


def test_a_graph_made_before_the_step_does_not_run_on_the_new_weights() -> None:
    w = torch.ones(64, requires_grad=True)
    loss = (w * w).sum()
    tx = sl.optim.adamw(0.1)
    params = {"w": w}
    run_in_place(tx, {"w": torch.ones(64)}, tx.init(params), params, Step())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pieces_leave_out_the_frozen_and_the_empty() -> None:
    params = {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(0)}
    grads = {"a": torch.ones(3), "b": None, "c": torch.ones(0)}
    assert [[len(t) for t in row] for row in pieces(params, grads)] == [[3], [3]]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sl.optim.adamw(-1.0), "lr=-1.0"),
        (lambda: sl.optim.adamw("1e-3"), "lr='1e-3'"),  # type: ignore[arg-type]
        (lambda: sl.optim.adamw(1e-3, b1=1.0), "b1=1.0"),
        (lambda: sl.optim.adam(1e-3, b2=-0.1), "b2=-0.1"),
        (lambda: sl.optim.sgd(0.1, 1.5), "momentum=1.5"),
        (lambda: sl.optim.lion(0.1, weight_decay=-1), "weight_decay=-1"),
        (lambda: sl.optim.lamb(0.1, eps=float("nan")), "eps=nan"),
        (lambda: sl.optim.adagrad(True), "lr=True"),
        (lambda: sl.optim.rmsprop(0.1, decay=1), "decay=1"),
        (lambda: sl.optim.muon(0.1, momentum=None), "momentum=None"),  # type: ignore[arg-type]
        (lambda: sl.optim.zero(torch.optim.AdamW, "data"), "not AdamW"),  # type: ignore[arg-type]
        (lambda: sl.optim.zero(sl.optim.adamw(1e-3), ()), "no axis"),
        (lambda: sl.optim.chain(sl.optim.adamw), "not adamw"),  # type: ignore[arg-type]
        (lambda: sl.optim.step({}, sl.optim.adamw(1e-3), {}, ()), "not dict"),  # type: ignore[arg-type]
        (lambda: sl.optim.load_state_dict({"a": 1}, (1, 2)), "not tuple"),  # type: ignore[arg-type]
    ],
)
def test_what_is_out_of_range_is_refused_by_its_name(make: Any, said: str) -> None:
    with pytest.raises(sl.ShardError, match="(?s)" + re.escape(said)) as caught:
        make()
    assert caught.value.fix


IN_PLACE: dict[str, Any] = {
    "lamb": lambda: sl.optim.lamb(0.05, weight_decay=0.1),
    "muon": lambda: sl.optim.muon(0.05, rest=sl.optim.lion(0.05), matrices=lambda t: _flat(t)),
    "soap": lambda: sl.optim.soap(
        0.05, every=2, rest=sl.optim.lion(0.05), matrices=lambda t: _flat(t)
    ),
    "adafactor": lambda: sl.optim.adafactor(0.05, weight_decay=0.1),
    "adam8bit": lambda: sl.optim.adam8bit(0.05, weight_decay=0.1),
    "rmsprop": lambda: sl.optim.rmsprop(0.05, momentum=0.9, centered=True, weight_decay=0.1),
    "lion": lambda: sl.optim.lion(0.05, weight_decay=0.1),
}
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "w": ((13, 20), "x y"),
    "t": ((300, 310), "y x"),
    "b": ((97,), "x"),
    "s": ((), ""),
    "n": ((0, 3), ". ."),
}


def _flat(tree: Any) -> Any:
    return {k: k in "wt" for k in tree}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(name: str, dtype: torch.dtype, put: Any) -> None:
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(3.0), IN_PLACE[name]())
    given = {k: put(k, drawn(s, i, dtype)) for i, (k, (s, _)) in enumerate(SHAPES.items())}
    mine = {k: p.clone() for k, p in given.items()}
    state, now = tx.init(given), tx.init(mine)
    memory = [_raw(x).data_ptr() for x in optree.tree_leaves((mine, now)) if hasattr(x, "shape")]
    for i in range(3):
        grads = {
            k: put(k, drawn(s, 50 + 10 * i + n, dtype))
            for n, (k, (s, _)) in enumerate(SHAPES.items())
        }
        updates, state = tx.update(grads, state, given)
        given = sl.optim.apply_updates(given, updates)
        mine, now, _ = sl.optim.step(tx, mine, {k: g.clone() for k, g in grads.items()}, now)
        for k, p in given.items():
            assert torch.equal(_raw(p), _raw(mine[k])), (name, k, i)
        both = (optree.tree_leaves(at_rest(x)) for x in (state, now))
        for a, b in zip(*both, strict=True):
            assert torch.equal(_raw(a), _raw(b)) if hasattr(a, "shape") else a == b
    same = [_raw(x).data_ptr() for x in optree.tree_leaves((mine, now)) if hasattr(x, "shape")]
    assert memory == same


def _raw(x: Any) -> torch.Tensor:
    return x.raw if isinstance(x, sl.ShardedTensor) else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_step_in_place_is_the_pure_one_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """In the memory that was given up, on whole tensors and on blocks, padded ones too."""
    both_ways(name, dtype, lambda k, x: x)
    with sl.simulate(x=2, y=2):
        both_ways(name, dtype, lambda k, x: sl.shard(x, SHAPES[k][1], pad=True))


@pytest.mark.parametrize("name", IN_PLACE)
def test_transposed_gradients_count_as_any_others(name: str) -> None:
    tx = IN_PLACE[name]()
    tx = tx if name not in ("muon", "soap") else getattr(sl.optim, name)(0.05)
    p, g = {"w": r(12, 8)}, {"w": r(8, 12, seed=1).T}
    assert not g["w"].is_contiguous()
    want, got = {"w": p["w"].clone()}, {"w": p["w"].clone()}
    state, now = tx.init(want), tx.init(got)
    for _ in range(2):
        updates, state = tx.update({"w": g["w"].contiguous()}, state, want)
        want = sl.optim.apply_updates(want, updates)
        updates, now = tx.update(g, now, got)
        got = sl.optim.apply_updates(got, updates)
    mine, after = {"w": p["w"].clone()}, tx.init(p)
    for _ in range(2):
        mine, after, _ = sl.optim.step(tx, mine, {"w": g["w"].clone()}, after)
    assert not torch.equal(want["w"], p["w"])
    close(got["w"], want["w"], 1e-12)
    close(mine["w"], want["w"], 1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_of_transposed_gradients_one_is_copied_at_a_time(name: str) -> None:
    """Every product of a grid gives such ones; in their own order they need no copy."""
    tx = getattr(sl.optim, name)(0.05)
    peaks = []
    for turned in (False, True):
        p = {f"w{i}": r(64, 64) for i in range(8)}
        g = {n: r(64, 64, seed=1) for n in p}
        if turned:
            g = {n: x.T for n, x in g.items()}
        state = tx.init(p)
        with Live() as live:
            run_in_place(tx, g, state, p, Step())
        peaks.append(live.peak)
    # a parameter, its gradient, and two moments at the most
    assert peaks[1] <= peaks[0] + 4 * 64 * 64 * 8
