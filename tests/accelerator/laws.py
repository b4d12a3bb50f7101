"""Laws of the pretend device itself, and of a training step on it; run by test_accelerator.py."""

import copy
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from benchmarks.waits import ROWS, Row, measured, models
from shardlib.optim.stage3 import Parts
from shardlib.optim.transform import Posted
from shardlib.testing import dense_attention
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE
from tests.checkpoint.test_huggingface import IDS, llama, meta
from tests.optim.cases import PARAMS
from tests.optim.test_groups import REFUSING


def test_operands_of_two_devices_are_refused() -> None:
    x = torch.ones(3, device=DEVICE)
    for mixed in (
        lambda: x + torch.ones(3, device="cpu"),
        lambda: torch.cat([x, torch.ones(3, device="cpu")]),
        lambda: x.gather(0, torch.zeros(3, dtype=torch.int64, device="cpu")),
        lambda: x.index_select(0, torch.zeros(1, dtype=torch.int64, device="cpu")),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()


def test_numbers_and_indices_of_the_host_are_taken() -> None:
    x = torch.arange(5.0, device=DEVICE)
    assert (x * torch.tensor(2.0, device="cpu")).tolist() == [0, 2, 4, 6, 8]
    assert x[torch.tensor([1, 3], device="cpu")].tolist() == [1, 3]


def test_numbers_of_the_host_meet_sharded_values() -> None:
    """As with plain tensors of a device: a sum may begin with one, and one may scale."""
    two = torch.tensor(2.0, device="cpu")
    with sl.simulate(x=2, device=DEVICE):
        x = sl.shard(torch.arange(4.0, device=DEVICE), "x")
        found = [
            two + x.sum(),
            x * two,
            torch.lerp(x, x + 1, two),
            x.clamp(min=two),
            x.clone().mul_(two),
        ]
        assert all(y.device == DEVICE for y in found)
        assert [sl.unshard(y).tolist() for y in found] == [
            8, [0, 2, 4, 6], [2, 3, 4, 5], [2, 2, 2, 3], [0, 2, 4, 6],
        ]  # fmt: skip


def test_convolutions_and_their_gradients_are_the_hosts() -> None:
    made = nn.Conv2d(3, 4, 3, device="cpu")
    x = torch.randn(2, 3, 8, 8, device="cpu")
    made(x).square().sum().backward()
    want = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    there = made.to(DEVICE)
    there(x.to(DEVICE)).square().sum().backward()
    for p, g in zip(there.parameters(), want, strict=True):
        assert torch.equal(p.grad.cpu(), g)


def test_autocast_computes_in_the_dtypes_that_are_said() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and (x @ x).exp().dtype == torch.float32


def test_a_generator_is_the_devices_own() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, device=DEVICE), torch.randn(3, device=DEVICE)
    torch.manual_seed(0)
    torch.randn(3, device="cpu")  # another stream
    assert torch.equal(first, torch.randn(3, device=DEVICE)) and not torch.equal(first, second)
    g = torch.Generator(device=DEVICE).manual_seed(5)
    again = torch.Generator(device=DEVICE).manual_seed(5)
    a, b = (torch.rand(4, device=DEVICE, generator=one) for one in (g, again))
    assert torch.equal(a, b)


def test_what_makes_the_host_wait_is_counted_and_what_does_not_is_not() -> None:
    x = torch.ones(4, device=DEVICE)
    pinned = torch.ones(4, device="cpu").pin_memory()
    for waits, call in (
        (1, lambda: x.sum().item()),
        (1, lambda: x.nonzero()),
        (1, lambda: x.cpu()),
        (1, lambda: torch.ones(4, device="cpu").to(DEVICE)),
        (0, lambda: pinned.to(DEVICE, non_blocking=True)),
        (0, lambda: x + 1),
        (0, lambda: x.clone().view(2, 2).mT.contiguous()),
    ):
        with pretend.counting() as counts:
            call()
        assert sum(counts.waits.values()) == waits, (waits, counts)


def test_a_trace_counts_as_the_device_does() -> None:
    x, ids = torch.ones(4, device=DEVICE), torch.tensor([1, 3], device="cpu")
    pinned = torch.ones(4, device="cpu").pin_memory()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x.sum().item(), lambda: bool((x > 0).all()), lambda: x.nonzero(), lambda: x[x > 0],
        lambda: x.cpu(), lambda: torch.ones(4, device="cpu").to(DEVICE), lambda: x.unique(),
        lambda: pinned.to(DEVICE), lambda: pinned.to(DEVICE, non_blocking=True),
        lambda: torch.tensor([1.0, 2.0], device=DEVICE), lambda: torch.equal(x, x),
        lambda: x.clone().copy_(pinned), lambda: pinned.clone().pin_memory().copy_(x, True),
        lambda: x + 1, lambda: x.masked_fill(x > 0, 2.0), lambda: x.view(2, 2).mT.contiguous(),
        lambda: x[ids], lambda: torch.full((3,), 2.0, device=DEVICE), lambda: x.where(x > 0, 0.0),
    )  # fmt: skip
    for n, call in enumerate(calls):
        with pretend.counting() as counts:
            call()
        with sl.trace(waits=True) as t:
            call()
        kinds = [w.kind for w in t.waits]
        seen = kinds.count("wait"), kinds.count("upload")
        assert seen == (sum(counts.waits.values()), sum(counts.uploads.values())), (n, counts, t)
        assert all(w.line.startswith("laws.py:") and not w.library for w in t.waits)


def stepped(make: Callable[[], Any], at_once: bool = False) -> Callable[[], Callable[[], Any]]:
    """The second step of an optimizer, or its second ``update``."""

    def ready() -> Callable[[], Any]:
        tx, x = make(), sl.shard(torch.ones(4), "x")
        params: Any = {"w": x + 0}
        state = tx.init(params)
        if at_once:
            tx.update({"w": x}, state, params)
            return lambda: tx.update({"w": x}, state, params)
        params, state, _ = sl.optim.step(tx, params, {"w": x + 0}, state)
        return lambda: sl.optim.step(tx, params, {"w": x + 0}, state)

    return ready


def sharded(f: Callable[[Any], Any]) -> Callable[[], Callable[[], Any]]:
    """A function of a sharded value."""

    def ready() -> Callable[[], Any]:
        x = sl.shard(torch.full((2, 4), 0.5), ". x")
        f(x)
        return lambda: f(x)

    return ready


SGD = sl.optim.sgd(0.1)
CLIP = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), SGD)
WAITING: dict[str, tuple[Callable[[], Callable[[], Any]], int]] = {
    "dropout": (sharded(lambda x: F.dropout(x, 0.1)), 0),
    "uniform_": (sharded(lambda x: x.uniform_(0, 2)), 0),
    "bernoulli": (sharded(torch.bernoulli), 0),
    "embedding": (sharded(lambda x: F.embedding((x[:, 0] * 2).long(), x)), 0),
    "x[:, -1]": (sharded(lambda x: x[:, -1]), 0),
    "multinomial": (sharded(lambda x: torch.multinomial(x, 2)), 2),
    "poisson": (sharded(lambda x: torch.poisson(x * 0)), 3),
    "clip": (stepped(lambda: CLIP), 0),
    "clip at once": (stepped(lambda: CLIP, at_once=True), 1),
    "skip_nonfinite": (stepped(lambda: sl.optim.skip_nonfinite(SGD)), 0),
    "skip_nonfinite at once": (stepped(lambda: sl.optim.skip_nonfinite(SGD), at_once=True), 1),
    "loss_scale": (stepped(lambda: sl.optim.loss_scale(SGD)), 0),
    "loss_scale at once": (stepped(lambda: sl.optim.loss_scale(SGD), at_once=True), 1),
}
"""Calls, and how often the host waits in them on an accelerator."""


@pytest.mark.parametrize("name", WAITING)
def test_a_trace_of_the_host_counts_as_on_the_device(name: str) -> None:
    make, waits = WAITING[name]
    for device in (DEVICE, torch.device("cpu")):
        with torch.device(device), sl.simulate(x=2, device=device):
            call = make()
            with pretend.counting() as counts, sl.trace(waits=True) as t:
                call()
        assert len(t.waits) == waits, (device, t)
        assert sum(counts.waits.values()) == waits * (device is DEVICE), (device, counts)


def late(body: Callable[[], Any]) -> Any:
    pretend.late(True)
    try:
        return body()
    finally:
        pretend.late(False)


def test_late_kernels_compute_what_eager_ones_do() -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        steps = torch.optim.AdamW(net.parameters(), 1e-2)
        for _ in range(3):
            steps.zero_grad()
            net(torch.ones(4, 8)).square().mean().backward()
            steps.step()
        return [p.detach().cpu() for p in net.parameters()]

    with torch.device(DEVICE):
        for a, b in zip(trained(), late(trained), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_between_streams_is_a_wrong_number(waits: bool) -> None:
    def ask() -> list[float]:
        side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
        x = torch.ones(64, device=DEVICE)
        torch.accelerator.synchronize()
        with side:
            y = x * 2
        if waits:
            main.wait_stream(side)
        return (y + 1).cpu().tolist()

    assert (late(ask) == [3.0] * 64) == waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_given_back_too_early_is_overwritten(recorded: bool) -> None:
    def ask() -> list[float]:
        side, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream()
        x = torch.full((64,), 7.0, device=DEVICE)
        torch.accelerator.synchronize()
        side.wait_stream(main)
        with side:
            y = x + 1
        if recorded:
            x.record_stream(side)
        del x  # the main stream may use its memory again
        z = torch.zeros(64, device=DEVICE)
        main.synchronize()
        side.synchronize()
        assert not z.any()
        return y.cpu().tolist()

    assert (late(ask) == [8.0] * 64) == recorded


LLAMA = [r for r in ROWS if not r.features or r.features == "documents"]
CASES = [("gpt2", r) for r in ROWS] + [("llama", r) for r in LLAMA]


@pytest.mark.parametrize(("name", "row"), CASES, ids=lambda x: str(getattr(x, "name", x)))
def test_a_step_waits_for_nothing_and_its_loss_is_the_hosts(name: str, row: Row) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    make = models(layers=1)[name]
    there = measured(make, row, DEVICE, pretend.counting)
    asked = 1 if row.features == "documents" else 0  # transformers looks whether rows are packed
    assert there.waits == asked, there.lines
    assert row.remat == "host" or there.uploads == 0, there.lines
    assert there.traced == (there.waits, there.uploads), there.lines
    if name == "gpt2" and (row.half or row.remat or not row.features):
        here = measured(make, row, torch.device("cpu"), pretend.counting)
        assert there.losses == pytest.approx(here.losses, rel=0.03 if row.half else 1e-5)
        assert here.traced == (asked, 0), here.lines


o = sl.optim
CHAINED = o.chain(o.clip_by_global_norm(0.5), o.adamw(lambda n: 0.1 / (1 + n)))
SKIPPED: dict[str, tuple[Any, Any, Any]] = {  # the transform, what is to be skipped of it, what is around
    "adamw": (CHAINED, o.skip_nonfinite, lambda t: t),
    "scaled": (CHAINED, lambda t: o.loss_scale(t, 8.0, interval=2), lambda t: t),
    "momentum": (o.chain(o.clip_by_global_norm(0.5), o.sgd(0.1, 0.9)), o.skip_nonfinite, lambda t: t),
    "ema": (o.chain(o.ema(0.9), o.clip_by_global_norm(0.5), o.sgd(0.1)), o.skip_nonfinite, lambda t: t),
    "lamb": (o.lamb(0.1), o.skip_nonfinite, lambda t: t),
    "zero 2": (CHAINED, o.skip_nonfinite, lambda t: o.zero(t, "x", 2)),
    "zero 1, around": (CHAINED, lambda t: o.skip_nonfinite(o.zero(t, "x", 1)), lambda t: t),
    "zero 3, scaled": (CHAINED, lambda t: o.loss_scale(t, 8.0, interval=2), lambda t: o.zero(t, "x", 3)),
    "mean": (CHAINED, o.skip_nonfinite, lambda t: o.averaged(t, 0.5)),
    "groups": (
        o.partition({"a": o.adamw(0.1), "b": o.sgd(0.1)}, [("w", "a"), ("*", "b")]),
        o.skip_nonfinite,
        lambda t: t,
    ),
    "muon": (
        o.muon(0.1, rest=o.adamw(0.1), matrices=["w"]), o.skip_nonfinite, lambda t: t,
    ),
}  # fmt: skip


def parameters(device: torch.device = DEVICE) -> dict[str, Tensor]:
    torch.manual_seed(3)
    with torch.device("cpu"):
        drawn = {"w": torch.randn(8, 6), "b": torch.randn(10)}
    return {k: sl.shard(p.to(device), "x ...") for k, p in drawn.items()}


def gradient(params: Any, i: int, scale: Any = 1.0) -> Any:
    """A gradient of this step, spoilt in every third."""
    out = {}
    for k, p in params.items():
        g = (p.raw.detach() * (0.5 + i) + 0.25 * i) * scale
        if i % 3 == 1 and k == "w":
            g = g.clone()
            g.view(-1)[-1] = float("nan") if i == 1 else float("inf")
        out[k] = p.becomes(g)
    return out


@pytest.mark.parametrize("name", SKIPPED)
def test_steps_that_the_device_skips_are_as_if_they_had_not_been(name: str) -> None:
    inner, skips, around = SKIPPED[name]
    found = []
    with sl.simulate(x=2, device=DEVICE):
        for skipping in (False, True):
            tx = around(skips(inner) if skipping else inner)
            held = tx.shard(parameters())
            state = tx.init(held)
            for i in range(9):
                if not skipping and i % 3 == 1:
                    continue
                whole = held if not isinstance(held, Parts) else None
                own = state
                while skipping and not hasattr(own, "skipped"):
                    own = own.inner
                scale = getattr(own, "scale", 1.0) if skipping else 1.0
                grads = gradient(whole if whole is not None else parameters(), i, scale)
                if whole is None:
                    grads = tx.shard(grads)
                with pretend.counting() as counts:
                    held, state, info = o.step(tx, held, grads, state)
                if i > 1:
                    assert not counts.waits and not counts.uploads, counts
                if skipping:
                    assert bool(info.skipped) == (i % 3 == 1)
            found.append((held, state))
        (want, _), (got, state) = found
        for a, b in zip(optree_leaves(want), optree_leaves(got), strict=True):
            assert torch.equal(a, b)
        while not hasattr(state, "skipped"):
            state = state.inner
        assert int(state.skipped) == 3
        if hasattr(state, "scale"):  # after each step 8, 4, 4, 8, 4, 4, 8, 4, 4
            assert float(state.scale) == 4.0


@pytest.mark.parametrize("where", ["cpu", DEVICE])
def test_a_batch_is_uploaded_once_and_nobody_waits_for_it(where: Any) -> None:
    rows = [{"ids": torch.arange(n, n + 4, device="cpu"), "labels": n} for n in range(6)]
    layouts = {"ids": "(data x) .", "labels": "data"}  # a rank reads more rows than it holds of ids
    before = torch.get_default_device()
    torch.set_default_device(where)
    try:
        with sl.simulate(data=2, x=2, device=DEVICE):
            with pretend.counting() as counts:
                found = list(sl.data(rows[:4], 4, layouts, seed=1))
            if where == "cpu":
                assert not counts.waits and sum(counts.uploads.values()) == 2, counts
            assert all(x.device == DEVICE for batch in found for x in batch.values())
            drawn = [sl.unshard(b["labels"]).tolist() for b in found]
            with pretend.counting() as counts:
                sl.shard(torch.ones(4, 4, device="cpu"), "data x")
            assert not counts.waits and sum(counts.uploads.values()) == 1, counts
    finally:
        torch.set_default_device(before)
    with sl.simulate(data=2, x=2, device="cpu"):
        assert drawn == [
            sl.unshard(b["labels"]).tolist() for b in sl.data(rows[:4], 4, layouts, seed=1)
        ]


def test_what_is_loaded_lies_on_the_meshs_device() -> None:
    with sl.simulate(x=2, device=DEVICE), tempfile.TemporaryDirectory() as folder:
        kept = {"w": parameters()["w"], "n": 3}
        sl.save(folder, kept)
        named = sl.load(folder, layouts={"w": "x .", "n": None})["w"]
        assert named.device == DEVICE and torch.equal(named.raw.cpu(), kept["w"].raw.cpu())


def test_files_of_hugging_face_are_read_to_the_meshs_device(tmp_path: Path) -> None:
    """Parameters, tied ones, and the buffers that the files do not have, whatever the default."""
    before = torch.get_default_device()
    torch.set_default_device("cpu")
    try:
        dense = llama()
        dense.save_pretrained(tmp_path, max_shard_size="20KB")
        with sl.simulate(x=2, device=DEVICE):
            model = meta(dense)
            apply, params = sl.load_hf(tmp_path, model, sl.recipes.megatron1d(model))
            for name, p in dense.named_parameters():
                assert params[name].device == DEVICE and params[name].raw.device == DEVICE
                assert torch.equal(sl.unshard(params[name]).cpu(), p), name
            with torch.no_grad():
                out = sl.unshard(apply(params, input_ids=IDS.to(DEVICE), use_cache=False).logits)
                assert out.device == DEVICE
                want = dense(input_ids=IDS.cpu(), use_cache=False).logits
        torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_default_device(before)


def test_a_device_without_events_is_read_by_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise RuntimeError("Backend doesn't support events.")

    monkeypatch.setattr(torch, "Event", lacking)
    tx = o.chain(o.clip_by_global_norm(1.0), o.adamw(0.1))
    with sl.simulate(x=2, device=DEVICE):
        params = parameters()
        grads = {k: torch.ones_like(p) for k, p in params.items()}
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
    assert all(torch.isfinite(sl.unshard(u)).all() for u in updates.values())
    assert Posted(torch.tensor(2.0, device=DEVICE)).read() == 2.0


SPOILING = o.Transform(  # a norm that only the clip behind it sees
    lambda params: 0,
    lambda g, n, params=None: ({k: v / (1.0 if n != 1 else 0.0) for k, v in g.items()}, n + 1),
    "elementwise",
)
LATE = {
    "clip": lambda: CHAINED,
    "two clips": lambda: o.chain(o.clip_by_global_norm(0.5), o.ema(0.9), CHAINED),
    "wrapped": lambda: o.averaged(o.inject_hyperparams(o.clip_by_global_norm)(max_norm=0.5), 0.5),
    "cycles": lambda: o.multi_steps(CHAINED, 1),
    **REFUSING,
}


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("stage", [None, 2])
def test_after_a_late_error_training_goes_on_as_if_the_step_had_not_been_asked_for(
    name: str, stage: int | None
) -> None:
    def trained(tx: Any, factors: list[float]) -> tuple[list[Tensor], dict[str, Any]]:
        params = {k: sl.shard(p.to(DEVICE), "...") for k, p in PARAMS.items()}
        state = tx.init(params)
        into = {} if tx.sink is None else {"into": tx}
        for by in factors:
            for asked in range(2):
                f = lambda p, by: sum((p[k] * p[k]).sum() for k in ("b", "w", "s")) * by  # noqa: E731
                _, grads = sl.value_and_grad(f, **into)(params, by)
                try:
                    params, state, _ = o.step(tx, params, grads, state)
                    break
                except sl.ShardError as e:
                    assert not asked and "in the step before, which changed nothing" in str(e)
        return optree_leaves(params), o.state_dict(state)

    with sl.simulate(x=2, device=DEVICE):
        tx = LATE[name]() if stage is None else o.zero(LATE[name](), "x", stage, bucket_mb=1e-4)
        want, kept = trained(tx, [1.0, 2.0, 1.0])
        got, found = trained(tx, [float("nan"), 1.0, float("inf"), 2.0, 1.0])
        numbers = [[x for x in s.values() if not isinstance(x, Tensor)] for s in (kept, found)]
        assert numbers[0] == numbers[1] and kept.keys() == found.keys()
        for a, b in zip([*want, *optree_leaves(kept)], [*got, *optree_leaves(found)], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_clip_is_told_of_its_own_tree_alone() -> None:
    with sl.simulate(x=2, device=DEVICE):
        trees = [(held := parameters(), CHAINED.init(held)) for _ in range(2)]
        for i in (1, 0):  # of the first tree, then of the second
            params, state = trees[1 - i]
            trees[1 - i] = o.step(CHAINED, params, gradient(params, i), state)[:2]
        params, state = trees[1]
        o.step(CHAINED, params, gradient(params, 0), state)
        with pytest.raises(sl.ShardError, match="in the step before"):
            params, state = trees[0]
            o.step(CHAINED, params, gradient(params, 0), state)


@pytest.mark.parametrize("guard", [lambda t: t, o.skip_nonfinite])
def test_what_a_clip_alone_sees_is_raised_later_and_has_changed_nothing(guard: Any) -> None:
    tx = guard(o.chain(o.clip_by_global_norm(1.0), SPOILING, CHAINED))
    with sl.simulate(x=2, device=DEVICE):
        params, state = (held := parameters()), tx.init(held)
        params, state, _ = o.step(tx, params, gradient(params, 0), state)
        want = optree_leaves(params)
        params, state, _ = o.step(tx, params, gradient(params, 0), state)
        assert all(torch.equal(a, b) for a, b in zip(want, optree_leaves(params), strict=True))
        with pytest.raises(sl.ShardError, match="in the step before"):
            o.step(tx, params, gradient(params, 0), state)


def test_what_the_device_found_is_raised_a_step_later_and_nothing_has_changed() -> None:
    for tx, words, steps in (
        (CHAINED, "in the step before, which changed nothing", 1),
        (o.skip_nonfinite(CHAINED, most=2), "in 3 steps, one after the other", 3),
        (o.loss_scale(CHAINED, start=2.0**-22), "even with a loss scaled by", 3),
    ):
        with sl.simulate(x=2, device=DEVICE):
            params, state = (held := parameters()), tx.init(held)
            want = optree_leaves(params)
            for _ in range(steps):
                params, state, _ = o.step(tx, params, gradient(params, 1), state)
            with pytest.raises(sl.ShardError, match=words):
                o.step(tx, params, gradient(params, 0), state)
            for a, b in zip(want, optree_leaves(params), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", REFUSING)
@pytest.mark.parametrize("stage", [None, 2])
def test_a_step_that_one_group_cannot_make_changes_no_group(name: str, stage: int | None) -> None:
    with sl.simulate(data=2, device=DEVICE):
        tx = REFUSING[name]() if stage is None else o.zero(REFUSING[name](), "data", stage)
        params = {k: sl.shard(p.to(DEVICE), "...") for k, p in PARAMS.items()}
        state = tx.init(params)

        def stepped(by: float) -> None:
            nonlocal params, state, info
            f = lambda p: p["w"].sum() + p["s"] + p["b"].sum() * by  # noqa: E731
            params, state, info = o.step(tx, params, sl.value_and_grad(f)(params)[1], state)

        def held() -> list[Tensor]:
            import optree

            given: Any = params, state
            return [
                x.raw.cpu() for x in optree.tree_leaves(given) if isinstance(x, sl.ShardedTensor)
            ]

        info: Any = None
        stepped(1.0)
        before = held()
        stepped(float("nan"))  # in one parameter alone
        assert bool(info.skipped)
        assert all(torch.equal(a, b) for a, b in zip(before, held(), strict=True))
        with pytest.raises(sl.ShardError, match="in the step before, which changed nothing"):
            stepped(1.0)


GUARDED = {
    "skip": lambda: o.skip_nonfinite(CHAINED),
    "scale": lambda: o.loss_scale(CHAINED, 8.0, interval=2),
    "zero": lambda: o.zero(o.loss_scale(CHAINED, 8.0, interval=2), "x", 2),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_state_goes_on_from_a_checkpoint_on_every_device(name: str, by_name: bool) -> None:
    """Saved on each of two devices, after a step that only the device knows it skips."""
    if name == "zero" and not by_name:
        pytest.skip("buckets are saved by name alone")
    tx, host = GUARDED[name](), torch.device("cpu")
    kept: Any = o.state_dict if by_name else lambda x: x
    ends: list[list[Any]] = []

    def steps(params: Any, state: Any, numbers: Any) -> tuple[Any, Any]:
        for i in numbers:
            own = getattr(state, "scale", 1.0)
            params, state, _ = o.step(tx, params, gradient(params, i, own), state)
        return params, state

    for one, other in ((DEVICE, DEVICE), (DEVICE, host), (host, DEVICE), (host, host)):
        with tempfile.TemporaryDirectory() as folder:
            with sl.simulate(x=2, device=one):
                held = parameters(device=one)
                params, state = steps(held, tx.init(held), range(5))
                sl.save(folder, {"params": params, "state": kept(state)})
            with sl.simulate(x=2, device=other):
                params = parameters(device=other)
                state = tx.init(params)
                found = sl.load(folder, {"params": params, "state": kept(state)})
                state = o.load_state_dict(state, found["state"]) if by_name else found["state"]
                params, state = steps(found["params"], state, range(5, 9))
                numbers = [x for x in o.state_dict(state).values() if not isinstance(x, Tensor)]
                assert all(type(x) in (int, float) for x in numbers)
                ends.append([numbers, *optree_leaves(params)])
    for (numbers, *leaves), (wanted, *want) in zip(ends, ends[-1:] * 4, strict=True):
        assert numbers == wanted
        for a, b in zip(leaves, want, strict=True):
            torch.testing.assert_close(a, b)


def optree_leaves(tree: Any) -> list[Tensor]:
    import optree

    return [x.raw.cpu() for x in optree.tree_leaves(tree) if isinstance(x, sl.ShardedTensor)]


def test_every_mask_and_dropout_goes_round_the_ring() -> None:
    torch.manual_seed(0)
    whole = [torch.randn(2, h, 24, 8, device="cpu") for h in (4, 2, 2)]
    masks = sl.masks
    for schedule in ("contiguous", "zigzag", "striped"):
        for kw in (
            {"dropout": 0.2},
            {"mask": masks.Bias(torch.linspace(0, 1, 4 * 24 * 24).reshape(1, 4, 24, 24))},
            {"mask": masks.Padding([20, 17])},
            {"mask": masks.ALiBi((0.5, 0.25, 0.125, 0.0625))},
            {"mask": masks.Causal() & masks.Documents((0, 9, 15, 24))},
            {"canonical": True},
        ):
            found = []
            for device in (DEVICE, torch.device("cpu")):
                with sl.simulate(s=4, device=device):
                    sl.random.seed(3)
                    ring = sl.Ring("s", dim=2, schedule=schedule)
                    q, k, v = (sl.shard(x.to(device), ring).requires_grad_() for x in whole)
                    given = {
                        n: masks.Bias(m.values.to(device)) if isinstance(m, masks.Bias) else m
                        for n, m in kw.items()
                    }
                    sl.ring_attention(q, k, v, **given).square().sum().backward()
                    found.append([sl.unshard(x.grad).cpu() for x in (q, k, v)])
                    sl.random.seed(None)
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)


def test_dense_attention_is_computed_where_its_operands_lie() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, h, 6, 4, device="cpu") for h in (4, 2))
    mask = sl.masks.Causal() & sl.masks.Documents((0, 2, 6)) & sl.masks.ALiBi((0.5, 0.25, 0.1, 0.0))
    found = [
        dense_attention(q.to(d), k.to(d), k.to(d), mask, dropout=(0.2, 3))
        for d in (DEVICE, torch.device("cpu"))
    ]
    for there, here in zip(*found, strict=True):
        assert there.device == DEVICE and torch.equal(there.cpu(), here)


def test_calls_of_every_day_stay_on_the_device() -> None:
    def calls(device: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.device("cpu"):
            a, ids, mask = torch.randn(8, 16), torch.randint(0, 16, (8, 6)), torch.randn(8, 16) > 0
        with sl.simulate(x=2, y=2, device=device):
            sl.random.seed(1)
            s = lambda t, layout: sl.shard(t.to(device), layout)  # noqa: E731
            x = s(a, "x y").requires_grad_()
            w, i = s(a.mT.contiguous(), "y ."), s(ids, "x .")
            picked = torch.tensor([1, 3], device=device)
            out = [
                x @ w, F.embedding(i, w), F.cross_entropy(x, i[:, 0]), F.dropout(x, 0.3),
                torch.randn_like(x), torch.bernoulli(x.sigmoid()), torch.multinomial(x.detach().abs(), 2),
                x.argmax(-1), x.topk(3)[0], x[picked], x.index_select(0, picked), x[3], x.norm(),
                torch.softmax(x, -1), F.layer_norm(x, (16,)), x.masked_fill(s(mask, "x y"), 0.0),
                sl.reshard(x, "zigzag(x) ."), sl.shard(a[:7, :5].to(device), "x y", pad=True).sum(),
                nn.init.trunc_normal_(s(torch.zeros(8, 16, device="cpu"), "x y")), F.one_hot(i, 16),
            ]  # fmt: skip
            sum(t.float().sum() for t in out if t.requires_grad).backward()
            out.append(x.grad)
            assert all(t.device.type == device.type for t in out)
            sl.random.seed(None)
            return [sl.unshard(t.detach()).cpu() for t in out]

    for n, (a, b) in enumerate(zip(calls(DEVICE), calls(torch.device("cpu")), strict=True)):
        torch.testing.assert_close(a, b, msg=lambda m, n=n: f"result {n}: {m}")


def test_what_is_found_by_a_run_is_found_on_the_models_device() -> None:
    class Counting(nn.Module):
        """It cannot run on meta tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            assert x.sum().item() == 0
            return self.down(self.up(x))

    found = [
        sl.recipes.megatron1d(
            Counting().to(device), inputs=[torch.zeros(2, 4, device="cpu")], mesh=m
        )
        for device in (DEVICE, torch.device("cpu"))
        for m in [sl.simulate(x=2, device=device)]
    ]
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("guarded", [False, True])
def test_a_state_is_copied_with_what_is_on_its_way_to_the_host(how: str, guarded: bool) -> None:
    """A snapshot of a state goes on as the state does, and raises what it would have raised."""
    with sl.simulate(device=DEVICE, x=2):
        tx = o.chain(o.clip_by_global_norm(0.5), o.adamw(0.1))
        tx = o.skip_nonfinite(tx) if guarded else tx
        params = {"w": sl.shard(torch.ones(4, device=DEVICE), "x")}
        grads = {"w": params["w"] * 0.1}
        params, state, _ = o.step(tx, params, grads, tx.init(params))
        again = copy.deepcopy(state) if how == "deepcopy" else pickle.loads(pickle.dumps(state))
        found = []
        for one in (again, state):
            mine = {"w": params["w"].clone()}
            new, one, _ = o.step(tx, mine, {"w": mine["w"] * 0.1}, one)
            bad = {"w": new["w"] * float("nan")}
            new, one, _ = o.step(tx, new, bad, one)
            found.append(sl.unshard(new["w"]).cpu())
            if not guarded:
                with pytest.raises(sl.ShardError, match="nan"):
                    o.step(tx, new, {"w": new["w"] * 0.1}, copy.deepcopy(one))
        assert torch.equal(*found)
