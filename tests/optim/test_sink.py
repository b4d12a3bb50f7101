"""Gradients in buckets while backward runs: the same sums, in the order that all ranks share."""

import random
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.optim.buckets import held, overlap
from tests.ops.cases import r
from tests.optim.test_gathered import sharded

SHAPES = {"a": (70, 9), "b": (131,), "c": (), "d": (64, 6), "e": (0, 4), "f": (1,)}
LAYOUTS = {"a": "x .", "d": ". x"}


def params_of(dtype: torch.dtype = torch.float32) -> dict[str, sl.ShardedTensor]:
    return {
        k: sl.shard(r(*s, seed=i).to(dtype), LAYOUTS.get(k, "..."))
        for i, (k, s) in enumerate(SHAPES.items())
    }


def whole(x: sl.ShardedTensor) -> torch.Tensor:
    return sl.unshard(sl.reshard(x, x.sharding.bare))


@pytest.mark.parametrize("mesh", [{"data": 3, "x": 2}, {"data": 2, "x": 1}, {"data": 1, "x": 2}])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_may_arrive_in_any_order(stage: int, mesh: dict[str, int]) -> None:
    """And what never arrives is zero."""
    with sl.simulate(**mesh) as m:
        params = params_of()
        tx = sl.optim.zero(sl.optim.sgd(0.1), "data", stage, bucket_mb=0.001)
        found = []
        for seed in range(4):
            order = list(range(len(params)))[:-1]  # f has none
            random.Random(seed).shuffle(order)
            sink = tx.sink(params)  # type: ignore[misc]
            for i in order:
                raw = list(params.values())[i].raw
                token = sink.take(
                    i, raw * (torch.arange(m.size).view(-1, *[1] * (raw.ndim - 1)) + 1)
                )
                assert token.shape == raw.shape and token.untyped_storage().nbytes() <= 8
            got = sink.finish()
            assert len(got) > 2
            found.append({k: x.raw.clone() for k, x in got.items()})
        for other in found[1:]:
            assert all(torch.equal(found[0][k], other[k]) for k in other)
        buckets = got.index.buckets if stage == 2 else ()
        for bucket, (i, part) in ((b, at) for b in buckets for at in held(b, m, b.ways)):
            (leaf,), c = part.slot.leaves, sl.collectives.played(m)[i]
            if leaf < len(params) - 1:
                mine = [n for n, d in enumerate(sl.collectives.played(m)) if d["x"] == c["x"]]
                at = mine.index(i) + 1
                mine = mine[at:] + mine[:at]  # round the ring, the owner last
                raw = list(params.values())[leaf].raw
                total: Any = sum(raw[n].flatten() * (n + 1.0) for n in mine)
                kept = got[bucket.name].raw[i][part.start : part.start + part.length]
                assert torch.equal(kept, total[part.at : part.at + part.length])


def f(p: Any, x: Any) -> Any:
    h = torch.tanh(x @ p["a"] + p["b"][:9])
    return (h.sum(-1) * p["c"]).mean() + (p["d"] ** 2).sum() * p["f"].sum()


def both(stage: int, bucket_mb: float) -> list[tuple[float, bool, Any, Any]]:
    """Norms, equality of every parameter after a step, and bytes, of buckets against a tree."""
    out = []
    params = params_of()
    x = sl.shard(r(12, 70).float(), "data .")
    tx = sl.optim.zero(sl.optim.adamw(0.1), "data", stage, bucket_mb=bucket_mb)
    trees = []
    for how in ({"into": tx}, {"pending": "data"}):
        state, new = tx.init(params), params
        for _ in range(2):  # the first step may find better buckets, and move the state
            with sl.trace() as t:
                loss, grads = sl.value_and_grad(f, **how)(new, x)  # type: ignore[call-overload]
                mine = {k: p.becomes(p.raw.clone()) for k, p in new.items()}
                new, state, info = sl.optim.step(tx, mine, grads, state, norm=True)
        trees.append(({k: sl.unshard(p) for k, p in new.items()}, info.norm, loss, t.bytes))
    (two, n2, l2, b2), (one, n1, l1, b1) = trees
    same = all(torch.equal(one[k], two[k]) for k in one) and torch.equal(l1, l2)
    out.append((float(n1 - n2), same, b1, b2))
    return out


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_give_what_a_tree_of_pending_gradients_gives(stage: int, pool: Any) -> None:
    for bucket_mb in (25.0, 0.001):
        with sl.simulate(data=2, x=2):
            ((gap, same, one, two),) = both(stage, bucket_mb)
        assert same and gap == 0 and one == two
        for answer in pool.run(both, stage, bucket_mb, data=2, x=2):
            assert answer == [(0.0, True, one, two)]


def test_accumulation_is_the_sum_of_gradients() -> None:
    """One reduce-scatter per cycle at stage 1; one per part at stage 2; the same parameters."""
    with sl.simulate(data=2, x=2):
        batches = [sl.shard(r(8, 70, seed=s).float(), "data .") for s in range(3)]
        ends = []
        for stage in (1, 2):
            tx = sl.optim.zero(sl.optim.adamw(0.1), "data", stage)
            params = params_of()
            state, total = tx.init(params), None
            with sl.trace() as t:
                for x in batches:
                    _, grads = sl.value_and_grad(f, into=tx)(params, x)
                    total = (
                        grads
                        if total is None
                        else total.like({k: total[k] + grads[k] for k in total})
                    )
                new, *_ = sl.optim.step(tx, params, total, state)
            kinds = [e.kind for e in t.events if e.axis == "data"]
            assert kinds.count("psum_scatter") == (2 if stage == 1 else 6)
            ends.append({k: sl.unshard(p) for k, p in new.items()})
        for k in SHAPES:
            assert torch.allclose(ends[0][k], ends[1][k], atol=1e-6)


def test_half_precision_is_summed_in_fp32() -> None:
    with sl.simulate(data=4):
        params = {"w": sl.shard(torch.ones(300, dtype=torch.bfloat16), ".")}
        x = sl.shard(torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16(), "data")
        for stage in (1, 2):
            tx = sl.optim.zero(sl.optim.sgd(0.0), "data", stage)
            _, grads = sl.value_and_grad(lambda p: (p["w"][:4] * x).sum(), into=tx)(params)
            (g,) = grads.values()
            assert g.dtype == torch.float32


def test_mistakes_are_named() -> None:
    with sl.simulate(data=2):
        p = {"w": sl.shard(torch.ones(4), ".")}
        tx = sl.optim.adamw(0.1)
        with pytest.raises(sl.ShardError, match="has no buckets for gradients"):
            sl.value_and_grad(lambda p: p["w"].sum(), into=tx)(p)
        tx = sl.optim.zero(tx, "data")
        with pytest.raises(sl.ShardError, match="into= says itself"):
            sl.value_and_grad(lambda p: p["w"].sum(), into=tx, pending="data")(p)  # type: ignore[call-overload]


def ddp() -> tuple[dict[str, float], list[int], list[Any]]:
    """Gaps to gradients summed one by one; how many sums over data, and their bytes."""
    loss, params = sharded()
    tx = sl.optim.zero(sl.optim.adamw(0.1), "data", 0)
    want: Any
    got: Any
    apart = {k: p.detach().requires_grad_() for k, p in params.items()}
    with sl.trace() as one:
        want_loss = loss(apart)
        want_loss.backward()
        want = {k: p.grad for k, p in apart.items()}
    with sl.trace() as two:
        got_loss, got = sl.value_and_grad(loss, into=tx)(params)
    gaps = {k: float((sl.unshard(got[k]) - sl.unshard(want[k])).abs().max()) for k in params}
    gaps["loss"] = float((got_loss - want_loss.detach()).abs())
    assert all(got[k].sharding == p.sharding for k, p in params.items())
    before = {k: sl.unshard(p) for k, p in params.items()}
    new, *_ = sl.optim.step(tx, params, got, tx.init(params), norm=True)
    assert any(not torch.equal(before[k], sl.unshard(p)) for k, p in new.items())
    sums = [sum(e.kind == "psum" and e.axis == "data" for e in t.events) for t in (one, two)]
    return gaps, sums, [t.by_axis()["data"] for t in (one, two)]


def test_without_zero_gradients_are_summed_in_buckets(pool: Any) -> None:
    """Two: one for what x splits, one for what it does not; and the loss."""
    with sl.simulate(data=2, x=2):
        answers = [ddp()]
    for gaps, (one, two), moved in [*answers, *pool.run(ddp, data=2, x=2)]:
        assert max(gaps.values()) < 1e-12, gaps
        assert two <= 4 and one > 20
        assert moved[0] <= moved[1] <= moved[0] + 2 * 64 * 8 * 40  # the gaps between slots


def test_half_precision_gradients_are_summed_in_fp32_in_buckets() -> None:
    with sl.simulate(data=4):
        params = {"w": sl.shard(torch.ones(300, dtype=torch.bfloat16), ".")}
        x = sl.shard(torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16(), "data")
        tx = sl.optim.zero(sl.optim.sgd(0.0), "data", 0)
        _, grads = sl.value_and_grad(lambda p: (p["w"][:4] * x).sum(), into=tx)(params)
        assert grads["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_stands_around_zero_hands_its_buckets_on(stage: int) -> None:
    """Loss scale, accumulation and a clip in front: the same step as on a tree of gradients."""
    o = sl.optim
    around = {
        "clip": lambda t: o.chain(o.clip_by_global_norm(0.01), t),
        "scaled": lambda t: o.loss_scale(t, start=8.0),
        "skip": o.skip_nonfinite,
        "steps": lambda t: o.multi_steps(t, 2),
        "mean": lambda t: o.averaged(t, 0.9),
        "numbers": lambda t: o.inject_hyperparams(lambda rate: o.chain(o.scale(rate), t))(rate=0.5),
    }
    with sl.simulate(data=2, x=2):
        for name, wrap in around.items():
            ends = []
            for how in ("tree", "buckets"):
                loss, params = sharded()
                tx = wrap(o.zero(o.adamw(0.1), "data", stage))
                state = tx.init(params)
                for _ in range(2):
                    into = {"into": tx} if how == "buckets" else {}
                    factor = getattr(state, "scale", 1.0)
                    vg = sl.value_and_grad(lambda p, c=factor, f=loss: f(p) * c, **into)  # type: ignore[call-overload]
                    params, state, _ = o.step(tx, params, vg(params)[1], state)
                ends.append({k: sl.unshard(p).detach() for k, p in params.items()})
            gap = max(float((ends[0][k] - ends[1][k]).abs().max()) for k in ends[0])
            assert gap < 1e-9, (name, gap)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_changes_nothing_lies_as_the_parameters(stage: int) -> None:
    """Also where gradients come in buckets: between the steps of a cycle, and of a step skipped."""
    o, nan = sl.optim, float("nan")
    around = {
        "steps": lambda t: o.multi_steps(t, 2),
        "skip": o.skip_nonfinite,
        "scaled": lambda t: o.loss_scale(t, start=8.0),
    }
    with sl.simulate(data=2, x=2):
        for name, wrap in around.items():
            loss, params = sharded()
            tx = wrap(o.zero(o.adamw(0.1), "data", stage))
            state, by = tx.init(params), 1.0 if name == "steps" else nan
            _, grads = sl.value_and_grad(lambda p, c=by, f=loss: f(p) * c, into=tx)(params)  # type: ignore[call-overload]
            updates, state = tx.update(grads, state, params)
            after = o.apply_updates(params, updates)
            assert all(torch.equal(after[k].raw, p.raw) for k, p in params.items()), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_groups_with_buckets_of_their_own_take_a_tree(stage: int) -> None:
    o = sl.optim
    with sl.simulate(data=2, x=2):
        for wrap in (
            lambda t: o.partition({"a": t}, [("*", "a")]),
            lambda t: o.masked(t, "*"),
        ):
            f, params = sharded()
            tx = wrap(o.zero(o.adamw(0.1), "data", stage))
            with pytest.raises(sl.ShardError, match="buckets of its own") as e:
                sl.value_and_grad(f, into=tx)(params)
            _, grads = eval(e.value.fix, {"sl": sl, "f": f, "params": params})
            o.step(tx, params, grads, tx.init(params))


ORDER = [3, 0, 5, 1, 4, 2]  # in which gradients come, whatever the tree says


def arriving(
    dtype: torch.dtype, stage: int, how: Any, steps: int = 3, parts: int = 1
) -> tuple[list[float], list[int], dict[str, torch.Tensor], Any]:
    """Shares still to come when a byte is posted, and numbers of collectives, step by step."""
    tx = sl.optim.zero(sl.optim.adamw(0.1), "data", stage, bucket_mb=0.001, **how)
    params = params_of(dtype)
    state, shares, counts = tx.init(params), [], []
    for t in range(steps):
        total: Any = None
        for part in range(parts):
            sink = tx.sink(params)  # type: ignore[misc]
            for i in ORDER:
                raw = list(params.values())[i].raw
                g = r(*raw.shape, seed=10 * t + i + part).to(dtype)
                sink.take(i, (g * 16).round() / 16)
            shares.append(overlap(sink.index, ORDER))
            grads = sink.finish()
            total = grads if total is None else total.like({k: total[k] + grads[k] for k in total})
        with sl.trace() as t_:
            params, state, _ = sl.optim.step(tx, params, total, state)
        counts.append(len(t_.events))
    return shares, counts, {k: sl.unshard(p) for k, p in params.items()}, state


@pytest.mark.parametrize("how", [{}, {"master": "fp32"}, {"master": "bf16+rem"}])
def test_buckets_are_made_in_the_order_in_which_gradients_came(how: Any, pool: Any) -> None:
    """From the second step on, on every rank alike; the state goes with them, and nothing is lost."""
    dtype = torch.bfloat16 if how else torch.float32
    with sl.simulate(data=2, x=2):
        shares, counts, got, _ = arriving(dtype, 2, how)
        _, _, want, _ = arriving(dtype, 1, how)  # its gradients are posted after backward
    assert shares[0] < shares[1] - 0.05 and shares[1] == shares[2]
    assert counts[0] > counts[1] == counts[2]  # the state moves once
    assert all(torch.equal(got[k], want[k]) for k in want)
    for answer in pool.run(arriving_there, dtype, how, data=2, x=2):
        assert answer[:2] == (shares, True)


def arriving_there(dtype: torch.dtype, how: Any) -> Any:
    shares, counts, got, _ = arriving(dtype, 2, how)
    _, _, want, _ = arriving(dtype, 1, how)
    return shares, all(torch.equal(got[k], want[k]) for k in want), counts


def test_gradients_of_one_cycle_lie_in_the_same_buckets() -> None:
    with sl.simulate(data=2, x=2):
        shares, *_ = arriving(torch.float32, 2, {}, parts=2)
    assert shares[0] == shares[1] < shares[2] == shares[3]


def test_a_state_goes_where_its_gradients_lie() -> None:
    """Two runs with one transform, of which the first heard the order; a state of other buckets."""
    with sl.simulate(data=2, x=2):
        tx, other = (
            sl.optim.zero(sl.optim.adamw(0.1), "data", 2, bucket_mb=mb) for mb in (0.001, 25.0)
        )
        ends = []
        for start in (tx, tx, other):
            params = params_of()
            state = start.init(params)
            for _ in range(2):
                sink = tx.sink(params)  # type: ignore[misc]
                for i in ORDER:
                    sink.take(i, list(params.values())[i].raw * 0.25)
                params, state, _ = sl.optim.step(tx, params, sink.finish(), state)
            ends.append({k: sl.unshard(p) for k, p in params.items()})
        for end in ends[1:]:
            assert all(torch.equal(ends[0][k], end[k]) for k in end)


def test_a_state_that_hangs_on_its_buckets_stays_in_them() -> None:
    with sl.simulate(data=2, x=2):
        tx = sl.optim.zero(sl.optim.adam8bit(0.1), "data", 2, bucket_mb=0.001)
        params = params_of()
        state, seen = tx.init(params), []
        for _ in range(3):
            sink = tx.sink(params)  # type: ignore[misc]
            for i in ORDER:
                sink.take(i, list(params.values())[i].raw * 0.25)
            seen.append(sink.index)
            params, state, _ = sl.optim.step(tx, params, sink.finish(), state)
        assert seen[0] == seen[1] == seen[2]


def test_without_zero_buckets_follow_the_order_of_arrival_too() -> None:
    with sl.simulate(data=2, x=2):
        tx = sl.optim.zero(sl.optim.adamw(0.1), "data", 0, bucket_mb=0.001)
        params, shares = params_of(), []
        for _ in range(3):
            sink = tx.sink(params)  # type: ignore[misc]
            for i in ORDER:
                sink.take(i, list(params.values())[i].raw)
            shares.append(overlap(sink.index, ORDER))
            grads = sink.finish()
            for k, p in params.items():
                assert torch.equal(sl.unshard(grads[k]), sl.unshard(p) * 2)
        assert shares[0] < shares[1] - 0.05 and shares[1] == shares[2]


def linear_losses() -> dict[str, Any]:
    """Losses whose gradients of a linear layer's weight come in one product, several, or none."""
    import torch.nn.functional as F

    def joined(p: Any, x: Any) -> Any:
        return F.linear(F.linear(x, p["v"], p["b"]).tanh(), p["w"])

    def heard(p: Any, x: Any) -> Any:
        p["w"].raw.register_hook(lambda g: 2 * g)
        return joined(p, x)

    def again(p: Any, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(joined, p, x, use_reentrant=False)

    return {
        "once": joined,
        "twice": lambda p, x: F.linear(joined(p, x), p["w"]) + F.linear(x, p["w"]),
        "and otherwise": lambda p, x: joined(p, x) * p["w"].sum() + (p["v"] ** 2).sum(),
        "otherwise alone": lambda p, x: x * p["w"].sum() + p["v"].sum(),
        "not at all": lambda p, x: F.linear(x, p["v"]),
        "no batch": lambda p, x: F.linear(x.flatten(0, 1), p["w"], p["b"]),
        "transposed": lambda p, x: F.linear(x.mT, p["w"], p["b"]),
        "heard": heard,
        "again": again,
    }


def straight(stage: int, dtype: torch.dtype) -> list[str]:
    """Losses whose gradients in buckets are others than those that come as a tree."""
    wrong = []
    params = {k: sl.shard(r(*s, seed=i).to(dtype), "...")
              for i, (k, s) in enumerate({"w": (8, 8), "v": (8, 8), "b": (8,)}.items())}  # fmt: skip
    x = sl.shard(r(8, 8, 8, seed=9).to(dtype), "data . .")
    for name, f in linear_losses().items():
        tx = sl.optim.zero(sl.optim.sgd(1.0), "data", stage)
        every = []
        for how in ({"into": tx}, {"pending": "data"}):
            kept = {k: p.detach().becomes(p.raw.detach().clone()) for k, p in params.items()}
            run = sl.value_and_grad(lambda p, x, f=f: f(p, x).square().mean(), **how)  # type: ignore[call-overload]
            for _ in range(2):  # a call like an earlier one takes a shorter way
                loss, grads = run(kept, x)
                kept, _, _ = sl.optim.step(tx, kept, grads, tx.init(kept))
            every.append((loss, kept))
        (loss, one), (same, two) = every
        if not torch.equal(loss, same) or any(not torch.equal(one[k].raw, two[k].raw) for k in two):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_take_every_gradient_of_a_linear_layer(
    stage: int, dtype: torch.dtype, pool: Any
) -> None:
    assert pool.run(straight, stage, dtype, data=4) == [[]] * 4


def test_a_cycle_that_has_begun_goes_over_to_better_buckets() -> None:
    """The order of arrival is heard in the first step, in the middle of a cycle of two."""
    ends, orders = [], []
    for mb in (0.001, 25.0):
        with sl.simulate(data=2, x=1):
            tx = sl.optim.zero(
                sl.optim.multi_steps(sl.optim.adamw(0.1), 2), "data", 2, bucket_mb=mb
            )
            params = params_of(torch.float32)
            state, seen = tx.init(params), []
            for t in range(4):
                sink = tx.sink(params)  # type: ignore[misc]
                for i in ORDER:
                    raw = list(params.values())[i].raw
                    sink.take(i, (r(*raw.shape, seed=10 * t + i).float() * 16).round() / 16)
                seen.append(sink.index)
                params, state, _ = sl.optim.step(tx, params, sink.finish(), state)
            ends.append({k: sl.unshard(p) for k, p in params.items()})
            orders.append(seen)
    assert orders[0][0] != orders[0][1] == orders[0][3]
    assert all(torch.equal(ends[0][k], p) for k, p in ends[1].items())


def test_what_a_sink_returns_is_no_free_memory() -> None:
    """Also for buckets that the axis splits already, which are their own parts."""
    with sl.simulate(x=2):
        tx = sl.optim.zero(sl.optim.sgd(0.5), "x", stage=2, bucket_mb=1e-4)
        params = {k: sl.shard(r(4, 64, seed=i), "x .") for i, k in enumerate("abc")}
        tx.init(params)
        for _ in range(2):  # the second takes the memory and the views of the first
            sink = tx.sink(params)  # type: ignore[misc]
            for i, x in enumerate(params.values()):
                sink.take(i, x.raw)
            raws = [x.raw for x in sink.finish().values()]
            free = {t.data_ptr() for some in sink.memory.free.values() for t in some}
            assert not free & {x.data_ptr() for x in raws}
            sink.memory.give(*raws)
