"""Adam in 8 bits: close to Adam, as many bytes as it says, the same bits however zero cuts it."""

from typing import Any

import optree
import pytest
import torch

import shardlib as sl
from shardlib.optim.adaptive import _decode, _encode, numbers
from shardlib.optim.transform import at_rest
from tests.ops.cases import r

o = sl.optim
PARAMS = {"w": r(64, 48), "b": r(65, seed=1), "s": r(seed=2), "n": r(0, 3)}
LAYOUTS = [
    {"w": "x y", "b": ".", "s": "", "n": ". ."},
    {"w": "(y x) .", "b": ".", "s": "", "n": "..."},
]


def grads(i: int) -> dict[str, torch.Tensor]:
    return {
        k: r(*p.shape, seed=10 + 5 * i + n) * 10.0 ** (n - 1)
        for n, (k, p) in enumerate(PARAMS.items())
    }


def run(tx: Any, params: Any, count: int, put: Any) -> Any:
    state = tx.init(params)
    for i in range(count):
        updates, state = tx.update(put(grads(i)), state, params)
        params = o.apply_updates(params, updates)
    return params, state


def test_eight_bits_follow_adam() -> None:
    """In steps of 0.01 over ten of them, an element is off by a few of a hundred."""
    want, _ = run(o.adamw(0.01, weight_decay=0.1), PARAMS, 10, dict)
    got, _ = run(o.adam8bit(0.01, weight_decay=0.1), PARAMS, 10, dict)
    for k in ("w", "b", "s"):
        off = (got[k] - want[k]).abs() / (want[k] - PARAMS[k]).abs().mean()
        assert off.mean() < 0.05, (k, off.mean())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_numbers(signed: bool) -> None:
    table = numbers(signed)
    assert len(set(table.tolist())) == 256 and torch.equal(table, table.sort().values)
    x = r(3, 100).flatten().float() * (1 if signed else 0.5)
    x = x if signed else x.abs()
    codes, scale = _encode(x, signed)
    back = _decode(codes, scale, signed, torch.float32)
    rows = torch.nn.functional.pad(x, (0, 20)).view(-1, 64)
    most = rows.abs().amax(-1, keepdim=True)
    near = (rows / most)[..., None].sub(table.to(x.device)).abs().amin(-1) * most
    assert torch.allclose((back - x).abs(), near.reshape(-1)[:300], atol=1e-6)
    again = _encode(back, signed)[0]
    assert (again != codes).float().mean() < 0.02  # the largest of a block may itself be rounded


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_zero_changes_no_bit(layouts: Any) -> None:
    with sl.simulate(data=3, x=2, y=2):
        put = lambda t: {k: sl.shard(v, layouts[k]) for k, v in t.items()}  # noqa: E731
        want, _ = run(o.adam8bit(0.01), put(PARAMS), 4, put)
        got, _ = run(o.zero(o.adam8bit(0.01), "data", bucket_mb=1e-2), put(PARAMS), 4, put)
        for k in want:
            assert torch.equal(sl.unshard(got[k]), sl.unshard(want[k])), k


def test_the_state_has_two_bytes_and_an_eighth_per_parameter() -> None:
    params = {"w": torch.ones(64, 64)}
    tensors = [
        x for x in optree.tree_leaves(o.adam8bit(0.1).init(params)) if isinstance(x, torch.Tensor)
    ]
    assert sum(x.nbytes for x in tensors) == 64 * 64 * 2.125


def test_frozen_leaves_have_no_codes() -> None:
    p = {"a": torch.ones(2).requires_grad_(), "b": torch.ones(2)}
    tx = o.adam8bit(0.1)
    updates, state = tx.update({"a": torch.ones(2), "b": None}, tx.init(p), p)
    assert state.mu["b"] is None and o.apply_updates(p, updates)["b"] is p["b"]
    params, state, _ = o.step(tx, p, {"a": torch.ones(2), "b": None}, state)
    assert state.count == 2 and bool((params["a"] < 1).all())


def on_ranks(layouts: Any) -> list[Any]:
    put = lambda t: {k: sl.shard(v, layouts[k]) for k, v in t.items()}  # noqa: E731
    got, _ = run(o.adam8bit(0.01), put(PARAMS), 3, put)
    return [sl.unshard(p) for p in got.values()]


def test_ranks_are_as_simulated(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        want = on_ranks(LAYOUTS[0])
    for answer in pool.run(on_ranks, LAYOUTS[0], x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(answer, want, strict=True))


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_state_goes_back_to_its_layout_and_to_no_other(stage: int | None) -> None:
    def begun(layout: str) -> tuple[Any, Any, Any]:
        tx = o.chain(o.clip_by_global_norm(1.0), o.adam8bit(0.01))
        tx = tx if stage is None else o.zero(tx, "data", stage)
        params = tx.shard({"w": sl.shard(r(64, 64), layout), "b": sl.shard(r(37), ".")})
        return tx, params, tx.init(params)

    def stepped(tx: Any, params: Any, state: Any) -> tuple[Any, Any]:
        grads = {k: p.becomes(p.raw.sin()) for k, p in params.items()}
        grads = params.like(grads) if stage == 3 else grads
        return o.step(tx, params, grads, state)[:2]

    with sl.simulate(data=2, x=2):
        _, state = stepped(*begun("x ."))
        kept = o.state_dict(state)
        again = o.load_state_dict(begun("x .")[2], kept)
        both = (optree.tree_leaves(at_rest(s)) for s in (again, state))
        for one, two in zip(*both, strict=True):
            same = one == two if isinstance(one, int) else torch.equal(one.raw, two.raw)
            assert same
        with pytest.raises(sl.errors.ShardError, match="neighbours in the layout"):
            o.load_state_dict(begun(". x")[2], kept)
    with sl.simulate(data=4, x=1):
        if stage is not None:
            with pytest.raises(sl.errors.ShardError, match="neighbours in the layout"):
                o.load_state_dict(begun("x .")[2], kept)
