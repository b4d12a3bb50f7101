"""Memory tiers on the pretend accelerator: what the ledger holds is what its allocator gave.

Run by test_accelerator.py, in a process in which the device is."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardlib as sl
from shardlib.optim import chunk_cache
from shardlib.tiers.activations import HostActivations
from shardlib.tiers.buffers import Buffers
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE

o = sl.optim
COUNT, WIDE = 6, 64
PART = 2 * WIDE * WIDE * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


def unentered(
    budget: int | None, monkeypatch: pytest.MonkeyPatch, update: Any = "host"
) -> tuple[int, int]:
    """The most bytes of the device beside the ledger's: at any use of forward, and between steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(COUNT)]).to(DEVICE)
    beside: dict[str, list[int]] = {"uses": [], "steps": []}
    with sl.simulate(data=1, device=DEVICE):
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."})
        del net
        tiers = o.Tiers(device=budget, update=update)
        tx = o.zero(o.chain(o.clip_by_global_norm(0.1), o.adamw(0.01)), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        del params
        state = tx.init(parts)
        x = torch.randn(2, WIDE, device=DEVICE)
        gc.collect()
        base = pretend.allocated() - tiers.ledger.held["device"].total()
        used = chunk_cache.ChunkCache._use

        def noted(self: Any, chunk: str) -> None:
            used(self, chunk)
            beside["uses"].append(pretend.allocated() - tiers.ledger.held["device"].total() - base)

        monkeypatch.setattr(chunk_cache.ChunkCache, "_use", noted)
        for _ in range(3):
            with torch.no_grad():
                apply(parts, x)
            at = len(beside["uses"])
            _, grads = sl.value_and_grad(lambda p: apply(p, x).square().mean(), into=tx)(parts)
            del beside["uses"][at:]
            parts, state, _ = o.step(tx, parts, grads, state)
            del grads
            held = tiers.ledger.held["device"].total()
            beside["steps"].append(pretend.allocated() - held - base)
    monkeypatch.undo()
    assert tiers.ledger.peak["device"] > 0
    return max(beside["uses"]), max(map(abs, beside["steps"]))


# activations of two rows, and scalars
SLACK = 16 * 2 * WIDE * 4 + 1024


@pytest.mark.parametrize("room", [1, 3, None])
def test_what_the_device_holds_is_in_the_ledger(
    room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SLACK < PART
    for update, more in (("host", 0), ("device", 4)):
        budget = None if room is None else (2 + more + room) * PART
        at_uses, between = unentered(budget, monkeypatch, update)
        assert at_uses <= SLACK and between <= 1024


def test_what_is_not_entered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are allocated, and kept, past the ledger."""
    kept, take = [], Buffers.take

    def past(self: Any, shape: Any, dtype: Any, spare: Any = None) -> Any:
        if self.kind == "parameters":
            kept.append(torch.empty(shape, dtype=dtype, device=self.device))
        return take(self, shape, dtype, spare)

    monkeypatch.setattr(Buffers, "take", past)
    with monkeypatch.context() as inner:
        at_uses, between = unentered(None, inner)
    assert at_uses > SLACK and between > SLACK


@pytest.mark.parametrize("begin", ["parallelize", "init", "load_hf"])
def test_a_model_larger_than_the_device_is_begun_in_host_memory(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is on the device until a block is loaded, and then what the budget says."""
    net = nn.Sequential(*[Block() for _ in range(COUNT)]).cpu()
    save_file(dict(net.state_dict()), tmp_path / "model.safetensors")
    rules, how = [("*", "...")], {"inputs": {"input": "data ."}, "host": True}
    base, budget = pretend.allocated(), 3 * PART
    with sl.simulate(data=1, device=DEVICE):
        if begin == "parallelize":
            apply, params = sl.parallelize(net, rules, **how)
        else:
            with torch.device("meta"):
                bare = nn.Sequential(*[Block() for _ in range(COUNT)])
            if begin == "init":
                apply, params = sl.init(bare, rules, 0, **how)
            else:
                apply, params = sl.load_hf(tmp_path, bare, rules, **how)
        if begin != "init":
            assert all(torch.equal(p.raw[0], net.state_dict()[n]) for n, p in params.items())
        tiers = o.Tiers(device=budget)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        state = tx.init(parts)
        assert pretend.allocated() - base <= 1024 and tiers.ledger.peak["device"] == 0
        x = torch.randn(2, WIDE, device=DEVICE)
        used = chunk_cache.ChunkCache._use
        most = []

        def noted(self: Any, chunk: str) -> None:
            used(self, chunk)
            most.append(pretend.allocated() - base)

        monkeypatch.setattr(chunk_cache.ChunkCache, "_use", noted)
        losses = []
        for _ in range(3):
            f = lambda p: apply(p, x).square().mean()  # noqa: E731
            loss, grads = sl.value_and_grad(f, into=tx)(parts)
            parts, state, _ = o.step(tx, parts, grads, state)
            losses.append(loss.item())
            del grads
        # a block's gradients until they are in their bucket
        assert max(most) <= budget + PART + SLACK and losses[2] < losses[0]


def trained(device: Any, tiers: Any, remat: Any = (), rows: int = 4) -> list[Any]:
    """Losses and parameters of four steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(COUNT)]).to(device)
    x = torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(1), device="cpu").to(device)
    with sl.simulate(data=2, device=device):
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."}, remat=remat)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        state, out = tx.init(parts), []
        for _ in range(4):
            loss, grads = sl.value_and_grad(lambda p: apply(p, x).square().mean(), into=tx)(parts)
            parts, state, _ = o.step(tx, parts, grads, state)
            out.append(loss.item())
        return out + [sl.unshard(p).cpu() for p in o.state_dict(parts).values()]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget", [None, 10 * PART])
def test_training_on_the_device_is_that_of_the_host(late: bool, budget: int | None) -> None:
    """To rounding, with kernels that run when something waits for them, on streams of their own."""
    want = trained("cpu", o.Tiers(device=budget))
    pretend.late(late)
    try:
        found = trained(DEVICE, o.Tiers(device=budget))
    finally:
        pretend.late(False)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("late", [False, True])
def test_an_update_on_the_device_is_that_in_its_memory(late: bool) -> None:
    """Bit for bit, with copies on streams of their own."""
    want = trained(DEVICE, None)
    pretend.late(late)
    try:
        for budget in (None, 16 * PART):
            found = trained(DEVICE, o.Tiers(device=budget, update="device"))
            for a, b in zip(found, want, strict=True):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    finally:
        pretend.late(False)


HOST = [("*", "host")]
RECOMPUTED = [("*.up", "full"), ("*.down", "full"), *HOST]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("remat", [HOST, RECOMPUTED])
@pytest.mark.parametrize("rows", [64, 1024])
def test_what_is_saved_on_the_host_comes_back_the_same(late: bool, remat: Any, rows: int) -> None:
    """Bit for bit that of the device, with copies on streams of their own."""
    want = trained(DEVICE, o.Tiers(), (), rows)
    tiers = o.Tiers()
    pretend.late(late)
    try:
        found = trained(DEVICE, tiers, remat, rows)
    finally:
        pretend.late(False)
    assert tiers.ledger.peaks["host"]["activations"] >= COUNT * rows // 2 * WIDE * 4
    for a, b in zip(found, want, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def beside(count: int, remat: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes of the device beside the ledger's, at any use of a step."""
    rows, found = 512, list[int]()
    net = nn.Sequential(*[Block() for _ in range(count)]).to(DEVICE)
    with sl.simulate(data=1, device=DEVICE):
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."}, remat=remat)
        tiers = o.Tiers(device=20 * PART)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        del net, params
        x = torch.randn(rows, WIDE, device=DEVICE)
        gc.collect()
        base, used = pretend.allocated(), chunk_cache.ChunkCache._use

        def noted(self: Any, chunk: str) -> None:
            used(self, chunk)
            found.append(pretend.allocated() - tiers.ledger.held["device"].total() - base)

        monkeypatch.setattr(chunk_cache.ChunkCache, "_use", noted)
        sl.value_and_grad(lambda p: apply(p, x).square().mean(), into=tx)(parts)
    monkeypatch.undo()
    return max(found)


@pytest.mark.parametrize("parts", [None, 4])
@pytest.mark.parametrize("remat", [[], [("*", "full")], HOST])
@pytest.mark.parametrize("rows", [64, 2048])
def test_the_devices_peak_is_the_one_explained(parts: int | None, remat: Any, rows: int) -> None:
    """Parameters within their budget, what is saved or copied back, and gradients on their way."""
    net = nn.Sequential(*[Block() for _ in range(COUNT)]).to(DEVICE)
    with sl.simulate(data=1, device=DEVICE):
        apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."}, remat=remat)
        # of less, what comes back pushes blocks and buffers out, and too much is told
        tiers = o.Tiers(device=6 * PART + 4 * rows * WIDE * 4)
        tx, x = o.zero(o.adamw(0.01), "data", 3, tiers=tiers), torch.ones(rows, WIDE, device=DEVICE)
        shards = tx.shard(params)
        del net, params
        loss = lambda p, x: apply(p, x).square().mean()  # noqa: E731
        said = sl.explain(loss, shards, (x,), tx=tx, microbatches=parts)
        gc.collect()
        base, state = pretend.allocated(), tx.init(shards)
        step, most = sl.value_and_grad(loss, into=tx, microbatches=parts), 0
        for _ in range(3):
            torch.accelerator.reset_peak_memory_stats(DEVICE)
            grads = step(shards, x)[1]
            most = torch.accelerator.max_memory_allocated(DEVICE) - base
            shards, state, _ = o.step(tx, shards, grads, state)
            del grads
    # of the last copies that come back one may be in a buffer that was there
    least = 0.95 if remat == HOST else 0.995
    assert least < most / said.peak < 1.005, (most, said)


@pytest.mark.parametrize("remat", [HOST, RECOMPUTED])
def test_what_blocks_save_leaves_the_device(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the blocks take no more of it; without, as much more as they save."""
    few, many = (beside(n, remat, monkeypatch) for n in (6, 12))
    block = 2 * 512 * WIDE * 4
    assert many <= few + 1024 <= 4 * block
    few, many = (beside(n, [], monkeypatch) for n in (6, 12))
    assert many - few >= 6 * block - 1024


def test_memory_of_what_is_on_its_way_to_the_host_is_given_to_nobody() -> None:
    ledger = Ledger(device=None, host=None)
    host = HostActivations(ledger, DEVICE, 1, Mover("down", DEVICE), Mover("up", DEVICE))
    pretend.late(True)
    try:
        found, others = [], []
        for i in range(8):
            x = torch.full((4096,), float(i), device=DEVICE)
            found.append(host.keep(x))
            del x
            others.append(torch.zeros(4096, device=DEVICE))
            # kernels of the default stream run now, those of the others when they are waited for
            others[-1].sum().item()
        got = [float(one.back().sum().item()) / 4096 for one in found[::-1]]
    finally:
        pretend.late(False)
    assert got == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert not any(float(x.sum()) for x in others)


@pytest.mark.parametrize("update", ["host", "device"])
def test_parameters_that_nothing_reads_are_stepped_as_the_hosts(update: Any) -> None:
    """Their gradients are zeros, which are made on the device."""
    found = []
    for device in (DEVICE, torch.device("cpu")):
        torch.manual_seed(0)
        with torch.device("cpu"):
            net, x = nn.ModuleList([Block() for _ in range(2)]), torch.randn(2, WIDE)
        with torch.device(device), sl.simulate(data=1, device=device):
            apply, params = sl.parallelize(_First(net), [("*", "...")], inputs={"x": "data ."})
            tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(update=update))
            parts = tx.shard(params)
            state = tx.init(parts)
            for _ in range(2):
                _, grads = sl.value_and_grad(apply, into=tx)(parts, x.to(device))
                parts, state, _ = o.step(tx, parts, grads, state)
            found.append({n: sl.unshard(w).cpu() for n, w in o.state_dict(parts).items()})
    there, here = found
    assert there.keys() == here.keys() and len(here) == 4
    for name, w in here.items():
        torch.testing.assert_close(there[name], w, msg=name)


class _First(nn.Module):
    """Blocks of which the first alone is read."""

    def __init__(self, h: nn.ModuleList) -> None:
        super().__init__()
        self.h = h

    def forward(self, x: Any) -> Any:
        return self.h[0](x).square().mean()
