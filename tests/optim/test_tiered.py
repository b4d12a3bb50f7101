"""Memory tiers: training with parameters in host memory is training in memory, bit for bit."""

import gc
import os
import signal
import subprocess
import sys
import time
from typing import Any

import optree
import pytest
import torch
from torch import nn

import shardlib as sl

o = sl.optim
WIDE = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Equal blocks and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block() for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for block in self.h:
            x = block(x)
        return x.square().mean()


RULES = [("h.*.up.weight", "x ."), ("h.*.up.bias", "x"), ("h.*.down.weight", ". x"), ("*", "...")]


def model(count: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    module = Blocks(count).to(dtype)
    x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1)).to(dtype)
    apply, params = sl.parallelize(module, RULES, inputs={"x": "data ."})
    return (lambda p: apply(p, x)), params


def run(
    inner: Any, tiers: Any, count: int = 4, steps: int = 3, dtype: torch.dtype = torch.float32, **how: Any
) -> dict[str, Any]:  # fmt: skip
    """Losses, norms, parameters and state of some steps, and the blocks loaded in each."""
    f, params = model(count, dtype)
    tx = o.zero(inner, "data", 3, tiers=tiers, **how)
    params = tx.shard(params)
    state = tx.init(params)
    out: dict[str, Any] = {"loads": []}
    for i in range(steps):
        before = params.cache.loads if tiers else 0
        loss, grads = sl.value_and_grad(f, into=tx)(params)
        out["loads"].append(params.cache.loads - before if tiers else 0)
        params, state, info = o.step(tx, params, grads, state, norm=True)
        out |= {f"loss {i}": loss, f"norm {i}": info.norm}
    out |= {f"param {n}": sl.unshard(x) for n, x in o.state_dict(params).items()}
    out |= {
        n: sl.unshard(x) if isinstance(x, torch.Tensor) else x
        for n, x in o.state_dict(state).items()
    }
    return out


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    assert a.keys() == b.keys()
    rows = ((n, a[n], b[n]) for n in a if n != "loads")
    return [n for n, x, y in rows if not torch.equal(torch.as_tensor(x), torch.as_tensor(y))]


def block_bytes(mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the parts of a block on a rank, all of its buckets."""
    with sl.simulate(**mesh):
        tx = o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers())
        return max(tx.shard(model(1, dtype)[1]).cache.sizes.values())


def clipped() -> Any:
    return o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01))


MESHES = [{"data": 1, "x": 1}, {"data": 2, "x": 1}, {"data": 2, "x": 2}, {"data": 1, "x": 2}]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("make", [lambda: o.adamw(0.01), clipped])
def test_training_in_tiers_is_training_in_memory(mesh: Any, make: Any) -> None:
    with sl.simulate(**mesh):
        want = run(make(), None)
        for device in (least(mesh), None):
            tiers = o.Tiers(device=device)
            assert differing(want, run(make(), tiers)) == []
            assert tiers.ledger.peak["device"] <= (device or 1 << 62)


def least(mesh: dict[str, int], dtype: torch.dtype = torch.float32) -> int:
    """The bytes that the refusal of a smaller budget names."""
    with sl.simulate(**mesh), pytest.raises(sl.ShardError, match="needs") as refused:
        o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers(device=1)).shard(model(1, dtype)[1])
    return int(str(refused.value).split("device=")[-1].strip(" )"))


# every two of mesh, room and place of the update meet
@pytest.mark.parametrize(
    ("mesh", "more", "update"),
    [
        (m, n, ("host", "device")[(i + j) % 2])
        for i, m in enumerate(MESHES)
        for j, n in enumerate((0, 1, 3))
    ],
)
def test_an_explanation_says_what_is_held_and_moved(mesh: Any, more: int, update: Any) -> None:
    with sl.simulate(**mesh):
        f, params = model(4)
        # two moments of the largest block
        some = least(mesh) + 2 * block_bytes(mesh) * (update == "device")
        tiers = o.Tiers(device=some + more * block_bytes(mesh), update=update)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        params = tx.shard(params)
        said = sl.explain(f, params, tx=tx).tiers
        state = tx.init(params)
        for _ in range(3):
            cache, links = params.cache, params.cache.movers[:2]
            before = cache.loads, *(m.moved for m in links)
            _, grads = sl.value_and_grad(f, into=tx)(params)
            params, state, _ = o.step(tx, params, grads, state)
            after = cache.loads, *(m.moved for m in links)
            moved = [b - a for a, b in zip(before, after, strict=True)]
        assert said is not None and said.blocks == 4
        shares = params.cache.shares
        assert moved == [said.loads, shares * said.loaded, shares * said.sent]
        assert said.host == dict(tiers.ledger.peaks["host"])


COUNTS = [(1, "host"), (2, "host"), (4, "host"), (2, "device")]


# every two of mesh, room and count meet
@pytest.mark.parametrize(
    ("mesh", "more", "count", "update"),
    [
        (m, (0, 2, None)[(i + j) % 3], *c)
        for i, m in enumerate(MESHES)
        for j, c in enumerate(COUNTS)
    ],
)
def test_an_explanation_of_micro_batches_says_what_their_step_moves(
    mesh: Any, more: int | None, count: int, update: Any
) -> None:
    """Before the first step, and after steps of one batch."""
    dtype = torch.bfloat16 if count == 2 else torch.float32
    budget = None
    if more is not None:
        budget = least(mesh, dtype) + more * block_bytes(mesh, dtype)
        # two moments in fp32, a master and a sum of gradients
        budget += (update == "device") * block_bytes(mesh, dtype) * (7 if count == 2 else 2)
    with sl.simulate(**mesh):
        torch.manual_seed(0)
        apply, params = sl.parallelize(Blocks(4).to(dtype), RULES, inputs={"x": "data ."})
        tiers = o.Tiers(device=budget, depth=2, update=update)
        tx = o.zero(o.adamw(0.01), "data", 3, master="fp32", tiers=tiers)
        parts = tx.shard(params)
        x = torch.randn(8, WIDE).to(dtype)
        said = sl.explain(apply, parts, x, tx=tx, microbatches=count).tiers
        state, links, moved = tx.init(parts), parts.cache.movers[:2], []
        vg = sl.value_and_grad(apply, into=tx, microbatches=count)
        for _ in range(3):
            before = parts.cache.loads, *(m.moved for m in links)
            _, grads = vg(parts, x)
            parts, state, _ = o.step(tx, parts, grads, state)
            after = parts.cache.loads, *(m.moved for m in links)
            moved = [b - a for a, b in zip(before, after, strict=True)]
            del grads
        assert said is not None and said.host == dict(tiers.ledger.peaks["host"])
        shares = parts.cache.shares
        assert moved == [said.loads, shares * said.loaded, shares * said.sent]
        again = sl.explain(apply, parts, x, tx=tx).tiers
        assert again is not None
        # what an update on the device sends is sent once
        assert again.sent * count == said.sent or update == "device"
        assert again.loads == sl.explain(apply, tx.shard(params), x, tx=tx).tiers.loads


SCHEDULES = [
    ("gpipe", "host", "device", 1, torch.float32),
    ("zb", "", "host", 2, torch.bfloat16),
    ("zbv", "full", "device", 2, torch.float32),
]


def staged(tiers: Any, schedule: str, remat: str, dtype: Any, steps: int = 2) -> dict[str, Any]:
    """Losses, norms, parameters and state of steps in stages."""
    torch.manual_seed(0)
    how = {"remat": [(f"h.{i}", remat) for i in range(5) if remat and i != 2]}
    stages = sl.Stages("pipe", schedule=schedule)
    module = Blocks(5).to(dtype)
    apply, params = sl.parallelize(module, RULES, inputs={"x": "data ."}, stages=stages, **how)
    tx = o.zero(clipped(), "data", 3, master="fp32" if dtype.itemsize == 2 else None, tiers=tiers)
    parts = tx.shard(params)
    state, out, x = tx.init(parts), dict[str, Any](), torch.randn(256, WIDE).to(dtype)
    vg = sl.value_and_grad(apply, into=tx, microbatches=4)
    for i in range(steps):
        loss, grads = vg(parts, x)
        parts, state, info = o.step(tx, parts, grads, state, norm=True)
        out |= {f"loss {i}": loss, f"norm {i}": info.norm}
        del grads
    for tree in (parts, state):
        out |= {n: sl.unshard(x) for n, x in o.state_dict(tree).items() if torch.is_tensor(x)}
    return out


@pytest.mark.parametrize(("schedule", "remat", "update", "data", "dtype"), SCHEDULES)
def test_stages_train_within_the_least_that_shard_names(
    schedule: str, remat: str, update: Any, data: int, dtype: Any
) -> None:
    """However many micro-batches are in flight, and where a backward is in two passes."""
    with sl.simulate(data=data, x=1, pipe=2):
        want = staged(None, schedule, remat, dtype)
        with pytest.raises(sl.ShardError, match="the largest block needs") as refused:
            staged(o.Tiers(device=1, update=update), schedule, remat, dtype)
        budget = int(refused.value.fix.split("device=")[1].strip(")"))
        # what is saved comes back beside it
        budget += (remat == "host") * 2 * 64 // data * 2 * WIDE * 4
        tiers = o.Tiers(device=budget, update=update)
        assert differing(want, staged(tiers, schedule, remat, dtype)) == []
        assert tiers.ledger.peak["device"] <= budget


def staged_alike(schedule: str) -> list[str]:
    torch.set_num_threads(1)
    how: Any = schedule, "host", torch.float32
    return differing(staged(None, *how), staged(o.Tiers(device="100KB"), *how))


def test_real_stages_too(pool: Any) -> None:
    assert pool.run(staged_alike, "zbv", data=2, x=1, pipe=2) == [[]] * 4


# ---------------------------------------------------------------- what it composes with


def both(**mesh: int) -> list[str]:
    """What differs between memory and tiers, with the least budget there is for this mesh."""
    torch.set_num_threads(1)
    want = run(clipped(), None)
    with pytest.raises(sl.ShardError, match="needs") as refused:
        o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers(device=1)).shard(model(1)[1])
    budget = int(str(refused.value).split("device=")[-1].strip(" )"))
    return differing(want, run(clipped(), o.Tiers(device=budget)))


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}])
def test_on_real_ranks_too(mesh: Any, pool: Any) -> None:
    assert pool.run(both, **mesh) == [[]] * 4


def test_one_device_needs_no_axis() -> None:
    with sl.simulate(data=1, x=1):
        f, params = model(2)
        tx = o.zero(o.adamw(0.1), (), 3, tiers=o.Tiers())
        parts = tx.shard(params)
        loss, grads = sl.value_and_grad(f)(parts)
        parts, _, _ = o.step(tx, parts, grads, tx.init(parts))
        assert float(f(parts)) < float(loss)


def test_frozen_blocks_are_loaded_alone_and_never_stale() -> None:
    """Of L frozen blocks and room for C, a step loads 2 (L - C), and sends no gradient of them."""
    count = 6
    with sl.simulate(data=1, x=1):
        f, params = model(count)
        for name, p in params.items():
            p.requires_grad_(name.startswith("h.5."))
        part = block_bytes({"data": 1, "x": 1})
        tiers = o.Tiers(device=2 * part + 3 * part)
        tx = o.zero(o.adamw(0.1), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        state, loads = tx.init(parts), []
        for _ in range(4):
            before = parts.cache.loads
            _, grads = sl.value_and_grad(f)(parts)
            parts, state, _ = o.step(tx, parts, grads, state)
            loads.append(parts.cache.loads - before)
        assert tiers.ledger.peaks["host"]["gradients"] == part
        # the blocks before the trained one are not read again: forward alone
        assert loads[-1] == loads[-2] <= 2 * (count - 3) + 1


def test_two_transforms_share_the_budgets_of_their_tiers() -> None:
    with sl.simulate(data=1, x=1):
        tiers = o.Tiers(host="1MiB")
        for _ in range(2):
            _, params = model(2)
            tx = o.zero(o.adamw(0.1), "data", 3, tiers=tiers)
            parts = tx.shard(params)
            held = tiers.ledger.held["host"]["parameters"]
            kept = parts
        assert held == 2 * sum(x.raw.nbytes for x in kept.values())
        del kept, parts
        gc.collect()
        assert tiers.ledger.held["host"].total() == 0


def test_a_budget_of_the_host_is_the_limit() -> None:
    with sl.simulate(data=1, x=1):
        tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(host=100_000))
        parts = tx.shard(model(3)[1])
        with pytest.raises(sl.ShardError, match="bytes of state do not fit"):
            tx.init(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_micro_batches_are_in_the_ledger(dtype: torch.dtype) -> None:
    """In fp32: 4 bytes of each number, beside a gradient that arrives and the parameters' dtype."""
    found = []
    for tiers in (None, o.Tiers()):
        with sl.simulate(data=1, x=1):
            torch.manual_seed(0)
            apply, params = sl.parallelize(Blocks(4).to(dtype), RULES, inputs={"x": "data ."})
            tx = o.zero(o.adamw(0.01), "data", 3, master="fp32", tiers=tiers)
            parts = tx.shard(params)
            state = tx.init(parts)
            x = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(1)).to(dtype)
            vg = sl.value_and_grad(apply, into=tx, microbatches=4)
            for _ in range(2):
                _, grads = vg(parts, x)
                parts, state, _ = o.step(tx, parts, grads, state)
                del grads
            found.append({n: sl.unshard(v) for n, v in o.state_dict(parts).items()})
    assert differing(*found) == []
    numbers = tiers.ledger.held["host"]["parameters"] // dtype.itemsize
    assert tiers.ledger.peaks["host"]["gradients"] >= 4 * numbers


# ---------------------------------------------------------------- files


def trained(f: Any, tx: Any, params: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        _, grads = sl.value_and_grad(f, into=tx)(params)
        params, state, _ = o.step(tx, params, grads, state)
    return params, state


@pytest.mark.parametrize("mesh", [{"data": 2, "x": 1}, {"data": 1, "x": 1}, {"data": 2, "x": 2}])
@pytest.mark.parametrize("into", [None, o.Tiers()])
def test_a_run_saved_in_tiers_goes_on_anywhere(tmp_path: Any, mesh: Any, into: Any) -> None:
    """Saved while updates are under way; loaded in memory and in tiers."""
    with sl.simulate(data=2, x=1):
        f, params = model(3, torch.float64)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=o.Tiers())
        parts = tx.shard(params)
        parts, state = trained(f, tx, parts, tx.init(parts), 2)
        sl.save(tmp_path / "a", {"params": o.state_dict(parts), "state": o.state_dict(state)})
        parts, state = trained(f, tx, parts, state, 2)
        want = {n: sl.unshard(x).clone() for n, x in o.state_dict(parts).items()}
    with sl.simulate(**mesh):
        found = sl.load(tmp_path / "a")
        f, params = model(3, torch.float64)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=into)
        parts = tx.shard(params)
        state = o.load_state_dict(tx.init(parts), found["state"])
        parts = o.load_state_dict(parts, found["params"])
        parts, state = trained(f, tx, parts, state, 2)
        got = {n: sl.unshard(x) for n, x in o.state_dict(parts).items()}
    for n, x in want.items():
        torch.testing.assert_close(got[n], x, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- refusals


def test_what_tiers_do_not_do_is_refused_by_name() -> None:
    for how in ({"stage": 2}, {"stage": 3, "keep": True}):
        with pytest.raises(sl.errors.Unsupported, match="memory tiers"):
            o.zero(o.sgd(0.1), "data", tiers=o.Tiers(), **how)
    with sl.simulate(data=1, x=1):
        f, params = model(2)
        tx = o.zero(o.sgd(0.1), "data", 3, tiers=o.Tiers())
        parts = tx.shard(params)
        with pytest.raises(sl.ShardError, match="differentiated again"):
            sl.grad(lambda p: sum(g.square().sum() for g in sl.grad(f)(p).values()))(parts)
        moved = optree.tree_map(lambda x: x * 2.0, parts)
        with pytest.raises(sl.ShardError, match="were computed from those in memory tiers"):
            f(moved)
        with pytest.raises(sl.ShardError, match="in no memory tiers"):
            tx.init(o.zero(o.sgd(0.1), "data", 3).shard(params))


# ---------------------------------------------------------------- the kernel as judge

LIMITED = """
import gc, resource, sys
import torch
from torch import nn
import shardlib as sl

torch.set_num_threads(1)
MiB = 1 << 20
in_tiers, slack = sys.argv[1] == "tiers", int(sys.argv[2])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((256, 1024), (1024, 256)))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def used():
    found = next(s for s in open("/proc/self/status") if s.startswith("VmData"))
    return int(found.split()[1]) << 10

with sl.simulate(data=1):
    net = nn.Sequential(*[Block() for _ in range(32)])
    apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."})
    tiers = sl.optim.Tiers(device=8 * MiB) if in_tiers else None
    tx = sl.optim.zero(sl.optim.adamw(1e-3), "data", 3, tiers=tiers)
    x = torch.randn(4, 256)
    parts = tx.shard(params)
    assert sum(v.raw.nbytes for v in parts.values()) == 64 * MiB
    del net, params
    gc.collect()
    resource.setrlimit(resource.RLIMIT_DATA, (used() + (8 + slack) * MiB,) * 2)
    state = tx.init(parts)
    for _ in range(2):
        _, grads = sl.value_and_grad(lambda p: apply(p, x).square().mean())(parts)
        parts, state, _ = sl.optim.step(tx, parts, grads, state)
    print("trained")
"""


def limited(where: str, slack: int) -> str:
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    args = [sys.executable, "-c", LIMITED, where, str(slack)]
    done = subprocess.run(args, capture_output=True, text=True, env=env, timeout=240)
    return done.stdout + done.stderr


def test_a_process_held_to_the_budget_trains_eight_times_the_device() -> None:
    """Private memory is limited to what is there before training, the device's 8 MiB, and 16 MiB."""
    assert limited("tiers", 16) == "trained\n"
    assert "can't allocate memory" in limited("memory", 64)


# ---------------------------------------------------------------- interrupted

INTERRUPTED = """
import gc, os, signal, sys, threading, time
import torch
import shardlib as sl
from tests.optim.test_tiered import clipped, model

# a job in the background of a shell begins with this signal ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def shared():
    return sum("/dev/zero" in line for line in open("/proc/self/maps"))

def train():
    with sl.simulate(data=1, x=1):
        f, params = model(8)
        # 17 KB a block: a load of 0.2 s
        tx = sl.optim.zero(clipped(), "data", 3, tiers=sl.optim.Tiers(rate=85e3))
        parts = tx.shard(params)
        state = tx.init(parts)
        assert shared() and threading.active_count() > 1
        while True:
            print("step", flush=True)
            _, grads = sl.value_and_grad(f, into=tx)(parts)
            parts, state, _ = sl.optim.step(tx, parts, grads, state)

before = shared()
if sys.argv[1] == "raised":
    train()
try:
    train()
except KeyboardInterrupt:
    pass
until = time.monotonic() + 30
while (shared() > before or threading.active_count() > 1) and time.monotonic() < until:
    gc.collect()
    time.sleep(0.05)
print(shared() - before, [t.name for t in threading.enumerate()][1:])
"""


@pytest.mark.parametrize("how", ["raised", "caught"])
@pytest.mark.parametrize("after", [0.1, 1.2])
def test_an_interrupted_run_leaves_nothing(how: str, after: float) -> None:
    """No thread and no shared page where the error is caught, and else an end at once."""
    args = [sys.executable, "-c", INTERRUPTED, how]
    with subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "step\n"
        time.sleep(after)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    if how == "raised":
        assert run.returncode == -signal.SIGINT and err.rstrip().endswith("KeyboardInterrupt")
    else:
        assert out.splitlines()[-1] == "0 []" and run.returncode == 0, out + err
