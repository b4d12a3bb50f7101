"""Rows in host memory and on the disk: training is the same, bit for bit, within the host's budget."""

import errno
import gc
import multiprocessing as mp
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.tiers.rows import RowSize, RowStore, divided
from tests.optim.test_tiered import (
    MESHES,
    RULES,
    WIDE,
    Blocks,
    block_bytes,
    clipped,
    differing,
    least,
    model,
    run,
)
from tests.optim.test_tiered_step import KINDS, muon, stepped
from tests.tiers import kill_steps
from tests.tiers.disk_cases import intercepted

o = sl.optim


def in_memory() -> Any:
    """No tiers; on an accelerator those of the host, whose updates have the host's rounding."""
    return None if torch.get_default_device().type == "cpu" else o.Tiers()


def least_host(
    mesh: dict[str, int], path: Path, count: int, dtype: Any, master: Any, update: Any = "host"
) -> int:
    """The bytes that the refusal of a smaller budget names, for gradients of which few wait."""
    with sl.simulate(**mesh), pytest.raises(sl.ShardError, match="of host memory") as refused:
        tiers = o.Tiers(host=1, disk=path, update=update)
        tx = o.zero(o.adamw(0.1), "data", 3, master=master, tiers=tiers)
        tx.shard(model(count, dtype)[1])
    return int(refused.value.fix.split("host=")[1].split(",")[0])


@pytest.mark.parametrize(
    ("mesh", "dtype", "master", "rest", "update"),
    [
        *((MESHES[0], *kind, "host") for kind in KINDS),
        *((mesh, *KINDS[0], "host") for mesh in MESHES[1:3]),
        *((mesh, *kind, "device") for mesh, kind in zip(MESHES[:2], KINDS[:2], strict=True)),
    ],
)
def test_training_with_rows_on_the_disk_is_training_in_memory(
    mesh: Any, dtype: Any, master: Any, rest: int, update: Any, tmp_path: Path
) -> None:
    count = 6
    waiting = count * block_bytes(mesh, dtype)
    few = least_host(mesh, tmp_path, count, dtype, master, update)
    with sl.simulate(**mesh):
        want = run(clipped(), in_memory(), count, dtype=dtype, master=master)
        want_too = stepped(o.adamw(0.01), in_memory(), dtype, master=master)
        for i, durable in enumerate((False, True)):
            budget = few + waiting // 2 + i * waiting
            how: Any = {"durable": durable, "update": update}
            tiers = o.Tiers(host=budget, disk=tmp_path / f"a{i}", **how)
            assert differing(want, run(clipped(), tiers, count, dtype=dtype, master=master)) == []
            tiers = o.Tiers(host=few, disk=tmp_path / f"b{i}", **how)
            assert differing(want_too, stepped(o.adamw(0.01), tiers, dtype, master=master)) == []
            held = tiers.ledger.peaks
            assert held["host"]["parameters"] == held["host"]["state"] == 0
            numbers = waiting / dtype.itemsize
            assert tiers.ledger.peak["disk"] == numbers * rest * (1 + durable)


def test_a_slow_update_keeps_no_buffers_of_its_rows(tmp_path: Path) -> None:
    """The least budget has bytes for one chunk: the next update begins with none of those before."""

    def rate(count: int) -> float:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.03)
        return 0.01

    mesh, dtype = {"data": 2, "x": 1}, torch.bfloat16
    few = least_host(mesh, tmp_path, 6, dtype, "fp32")
    with sl.simulate(**mesh):
        want = stepped(o.adamw(rate), in_memory(), dtype, master="fp32")
        tiers = o.Tiers(host=few, disk=tmp_path)
        assert differing(want, stepped(o.adamw(rate), tiers, dtype, master="fp32")) == []


@pytest.mark.parametrize("update", ["host", "device"])
def test_rows_of_the_next_update_are_read_ahead(
    update: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host has buffers for two chunks; the least budget has those of one."""
    mesh, ahead = {"data": 2, "x": 1}, [0, 0]
    few, part = (
        least_host(mesh, tmp_path, 6, torch.float32, None),
        block_bytes(mesh),
    )
    fetched = RowStore.fetched

    def noted(self: Any, rows: Any, blank: Any = ()) -> Any:
        for row in rows:
            if row.memory is None:
                ahead[row.key in self.ahead] += 1
        # a busy machine may not have written what was updated, and have no buffer free
        self._landed(0)
        return fetched(self, rows, blank)

    monkeypatch.setattr(RowStore, "fetched", noted)
    with sl.simulate(**mesh):
        want = run(clipped(), in_memory(), 6)
        for budget in (few + 3 * part, few + 9 * part):
            ahead[:] = 0, 0
            tiers = o.Tiers(host=budget, disk=tmp_path / f"{budget}", update=update)
            assert differing(want, run(clipped(), tiers, 6)) == []
            assert ahead[0] and (ahead[1] > 0) == (budget > few + 3 * part)


class Uneven(torch.nn.Module):
    """Blocks of several sizes, whose rows are of several sizes too."""

    def __init__(self) -> None:
        super().__init__()
        wide = [16, 96, 32, 64, 16]
        self.h = torch.nn.ModuleList(map(torch.nn.Linear, wide, wide[1:]))

    def forward(self, x: Any) -> Any:
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(
    ("make", "update", "refusals"),
    [(muon, "device", 1), (clipped, "host", 1), (lambda: o.adamw(0.01), "host", 2)],
)
def test_the_host_that_a_refusal_names_works_at_once(
    make: Any, update: Any, refusals: int, tmp_path: Path
) -> None:
    """With ``step``, for which all gradients wait; transforms of elements may not be stepped by it."""

    def trained(host: int) -> None:
        torch.manual_seed(0)
        apply, params = sl.parallelize(Uneven().bfloat16(), [("*", "...")])
        tiers = o.Tiers(host=host, disk=tmp_path / str(host), update=update)
        tx = o.zero(make(), "data", 3, master="fp32", tiers=tiers)
        parts = tx.shard(params)
        state, x = tx.init(parts), torch.ones(4, 16, dtype=torch.bfloat16)
        for _ in range(2):
            _, grads = sl.value_and_grad(apply, into=tx)(parts, x)
            parts, state, _ = o.step(tx, parts, grads, state)
            del grads
        assert all(x.raw.numel() for x in o.state_dict(parts).values())

    with sl.simulate(data=2):
        host = 1
        for _ in range(refusals):
            with pytest.raises(sl.ShardError) as refused:
                trained(host)
            host = int(re.findall(r"host=(\d+)", refused.value.fix)[0])
        trained(host)
        # less than a part of the largest block
        with pytest.raises(sl.ShardError):
            trained(host - 96 * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_micro_batches_fit_or_are_refused_with_what_holds_them(
    dtype: Any, tmp_path: Path
) -> None:
    """Gradients are added up one by one, and those of half precision in fp32."""
    mesh, count = {"data": 2, "x": 1}, 4
    master: Any = "fp32" if dtype == torch.bfloat16 else None
    few, waiting = (
        least_host(mesh, tmp_path, count, dtype, master),
        count * block_bytes(mesh, dtype),
    )

    def trained(tiers: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        module = Blocks(count).to(dtype)
        apply, params = sl.parallelize(module, RULES, inputs={"x": "data ."})
        tx = o.zero(o.adamw(0.01), "data", 3, master=master, tiers=tiers)
        parts = tx.shard(params)
        state, x = tx.init(parts), torch.randn(8, WIDE).to(dtype)
        vg = sl.value_and_grad(apply, into=tx, microbatches=2)
        for _ in range(2):
            _, grads = vg(parts, x)
            parts, state, _ = o.step(tx, parts, grads, state)
            del grads
        return {n: sl.unshard(x) for n, x in o.state_dict(parts).items()}

    with sl.simulate(**mesh):
        want = trained(in_memory())
        if dtype == torch.float32:
            tiers = o.Tiers(host=few + waiting, disk=tmp_path)
            assert differing(want, trained(tiers)) == []
        with pytest.raises(sl.ShardError, match="of gradients do not fit") as refused:
            trained(o.Tiers(host=few, disk=tmp_path))
        fix = re.findall(r"(host|activations)=(\d+)", refused.value.fix)
        tiers = o.Tiers(**{name: int(n) for name, n in fix}, disk=tmp_path)
        assert differing(want, trained(tiers)) == []
        assert tiers.ledger.peak["host"] <= int(dict(fix)["host"]) and tiers.ledger.peak["disk"]


def test_rows_that_are_begun_on_the_disk_pass_through_one_buffer_in_the_ledger(
    tmp_path: Path,
) -> None:
    mesh = {"data": 2, "x": 1}
    few = least_host(mesh, tmp_path, 4, torch.float32, None)
    with sl.simulate(**mesh):
        tiers = o.Tiers(host=few, disk=tmp_path)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        parts = tx.shard(model(4)[1])
        store, peak = parts.cache.store, tiers.ledger.peaks["host"]
        largest = max(store.sizes[n].nbytes for n in store.away)
        assert peak["buffers"] == store.buffers + largest
        tx.init(parts)
        assert tiers.ledger.peak["host"] <= few


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("update", ["host", "device"])
def test_an_explanation_says_what_is_on_the_disk_and_moves(
    more: int, update: Any, tmp_path: Path
) -> None:
    mesh = {"data": 2, "x": 1}
    host = least_host(mesh, tmp_path, 4, torch.float32, None) + (1 + more) * block_bytes(mesh)
    with sl.simulate(**mesh):
        f, params = model(4)
        # two moments of the largest block
        device = least(mesh) + 2 * block_bytes(mesh) * (update == "device")
        how: Any = {"durable": more == 3, "update": update}
        tiers = o.Tiers(device=device, host=host, disk=tmp_path, **how)
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        params = tx.shard(params)
        said = sl.explain(f, params, tx=tx).tiers
        assert said is not None
        state, store = tx.init(params), params.cache.store
        for _ in range(3):
            before = store.bytes_read, store.bytes_written
            _, grads = sl.value_and_grad(f, into=tx)(params)
            params, state, _ = o.step(tx, params, grads, state)
            if update == "host":
                assert all(x.raw.numel() for x in o.state_dict(params).values())
            params.cache.land(0)
            params.cache.movers.updates.submit(lambda: None).wait()
            moved = store.bytes_read - before[0], store.bytes_written - before[1]
        shares = params.cache.shares
        # the values above were read too; a read of them would bring blocks to the device
        rows = (store.sizes[n] for n in store.away if update == "host")
        seen = sum(row.nbytes for row in rows if row.kind == "parameters")
        assert (said.read + seen) * shares == moved[0] and said.written * shares == moved[1]
        assert said.disk == tiers.ledger.peak["disk"]
        held = tiers.ledger.peaks["host"]
        assert all(held[kind] == said.host[kind] for kind in ("parameters", "gradients", "state"))
        assert tiers.ledger.peak["host"] <= host


def on_ranks(path: str, **mesh: int) -> list[Any]:
    torch.set_num_threads(1)
    want, found = run(clipped(), in_memory()), []
    for durable in (False, True):
        tiers = o.Tiers(host=66_000, disk=f"{path}/{durable}", durable=durable)
        found += differing(want, run(clipped(), tiers))
        assert tiers.ledger.peak["disk"]
    return found


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}])
def test_each_real_rank_has_its_part_of_the_disk(mesh: Any, pool: Any, tmp_path: Path) -> None:
    assert pool.run(on_ranks, str(tmp_path), **mesh) == [[]] * 4
    assert len(os.listdir(tmp_path / "True")) == 4


CASE = kill_steps.CASES[0]


@pytest.mark.parametrize(
    ("case", "kills"),
    [*((CASE, kills) for kills in kill_steps.KILLS), (kill_steps.CASES[-2], kill_steps.KILLS[1])],
    ids=str,
)
def test_a_killed_run_goes_on_from_its_last_step_with_the_same_bits(case: Any, kills: Any) -> None:
    wrong, seen = kill_steps.run(case, kills, kill_steps.trained(case, None))
    assert not wrong, seen


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_ends_the_run_with_its_cause_and_loses_no_step(
    code: int, tmp_path: Path
) -> None:
    want, calls = kill_steps.trained(CASE, None), [0]
    for nth in (5, 30, 60):
        path, calls[0] = str(tmp_path / str(nth)), 0

        def act(name: str, call: Any, args: Any, kw: Any, nth: int = nth) -> Any:
            calls[0] += name in ("pwrite", "fdatasync")
            if name in ("pwrite", "fdatasync") and calls[0] >= nth:
                raise OSError(code, os.strerror(code))
            return call(*args, **kw)

        def child(path: str = path, act: Any = act) -> None:
            done: list[int] = []
            with intercepted(act), pytest.raises(sl.ShardError, match=os.strerror(code)):
                kill_steps.trained(CASE, path, done.append)
            os._exit(10 + max(done, default=0))

        # the file is held as long as the error is
        process = mp.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        assert process.exitcode is not None and process.exitcode >= 10
        begun: list[int] = []
        assert kill_steps.trained(CASE, path, begun.append) == want
        assert begun[0] >= process.exitcode - 10 - 1


@pytest.mark.parametrize("verb", ["step", "value_and_step"])
def test_a_step_of_which_an_update_raised_is_no_generation(verb: str, tmp_path: Path) -> None:
    def rate(count: int) -> float:
        if count == 1 and threading.current_thread() is not threading.main_thread():
            raise OSError("no rate")
        return 0.1

    def begun(resume: bool) -> Any:
        f, params = model(3)
        tiers = o.Tiers(disk=tmp_path, durable=True, resume=resume)
        tx = o.zero(o.adamw(rate), "data", 3, tiers=tiers)
        params = tx.shard(params)
        return f, tx, params, tx.init(params)

    def two_steps() -> None:
        f, tx, params, state = begun(False)
        for _ in range(3):
            if verb == "step":
                _, grads = sl.value_and_grad(f)(params)
                params, state, _ = o.step(tx, params, grads, state)
            else:
                _, params, state, _ = o.value_and_step(f, tx)(params, state)

    def child() -> None:
        torch.set_num_threads(1)
        with sl.simulate(data=1, x=1):
            with pytest.raises(OSError, match="no rate"):
                two_steps()
            os._exit(7)

    process = mp.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 7
    with sl.simulate(data=1, x=1):
        _, _, params, state = begun(True)
        assert params.generation == state.count == 1


def test_a_run_of_others_is_refused_and_keeps_its_rows(tmp_path: Path) -> None:
    want = kill_steps.trained(CASE, str(tmp_path))
    gc.collect()
    with sl.simulate(data=1, x=1):
        tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(disk=tmp_path, durable=True))
        with pytest.raises(sl.ShardError, match="belongs to another run"):
            tx.shard(model(2)[1])
    assert kill_steps.trained(CASE, str(tmp_path)) == want


def test_a_transform_around_a_durable_run_is_refused_by_name(tmp_path: Path) -> None:
    tx = o.zero(o.adamw(0.1), "data", 3, tiers=o.Tiers(disk=tmp_path, durable=True))
    for around in (o.skip_nonfinite, o.loss_scale, lambda tx: o.averaged(tx, 0.9)):
        with pytest.raises(sl.errors.Unsupported, match="not of one around"):
            around(tx)
    o.multi_steps(tx, 2)
    with pytest.raises(sl.ShardError, match="durable run"):
        o.Tiers(resume=True)


def test_a_transform_of_all_blocks_is_refused_where_some_lie_on_the_disk(tmp_path: Path) -> None:
    with sl.simulate(data=1, x=1):
        f, params = model(6)
        tx = o.zero(o.lamb(0.1), "data", 3, tiers=o.Tiers(host=300_000, disk=tmp_path))
        parts = tx.shard(params)
        state = tx.init(parts)
        before = {n: sl.unshard(x) for n, x in o.state_dict(parts).items()}
        _, grads = sl.value_and_grad(f)(parts)
        with pytest.raises(sl.errors.Unsupported, match="all blocks at once"):
            o.step(tx, parts, grads, state)
        assert differing(before, {n: sl.unshard(x) for n, x in o.state_dict(parts).items()}) == []


def saved(path: str, **mesh: int) -> list[str]:
    """Save rows that lie on the disk, and load them in memory; what differs."""
    torch.set_num_threads(1)
    f, params = model(4)
    tiers = o.Tiers(host=200_000, disk=f"{path}/run", durable=True)
    tx = tiered = o.zero(clipped(), "data", 3, tiers=tiers)
    parts = tx.shard(params)
    state = tx.init(parts)
    for _ in range(2):
        _, grads = sl.value_and_grad(f)(parts)
        parts, state, _ = o.step(tx, parts, grads, state)
    kept = {"params": o.state_dict(parts), "state": o.state_dict(state)}
    held = parts.cache.ledger.held["host"].total()
    sl.save(f"{path}/kept", kept)
    assert parts.cache.ledger.held["host"].total() == held
    found = sl.load(f"{path}/kept")
    tx = o.zero(clipped(), "data", 3)
    wanted = tx.shard(params)
    other = o.load_state_dict(tx.init(wanted), found["state"])
    wanted = o.load_state_dict(wanted, found["params"])
    wrong = []
    for a, b in ((wanted, parts), (other, state)):
        some, more = o.state_dict(a), o.state_dict(b)
        values = {n: sl.unshard(x) if isinstance(x, torch.Tensor) else x for n, x in some.items()}
        there = {n: sl.unshard(x) if isinstance(x, torch.Tensor) else x for n, x in more.items()}
        wrong += differing(values, there)
    _, grads = sl.value_and_grad(f)(parts)
    late = o.state_dict(state)
    parts, state, _ = o.step(tiered, parts, grads, state)
    with pytest.raises(sl.ShardError, match="a step has changed them"):
        sl.unshard(late["1.mu.h.0.up.weight"])
    return wrong


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_what_is_saved_is_read_from_the_disk_value_by_value(mesh: Any, tmp_path: Path) -> None:
    with sl.simulate(**mesh):
        assert saved(str(tmp_path), **mesh) == []


@pytest.mark.parametrize("host", [None, "150KB"])
def test_values_are_replaced_in_place(host: str | None, tmp_path: Path) -> None:
    """Within the budget, and a block that is on the disk is a copy; a bad name changes nothing."""
    with sl.simulate(data=1, x=1):
        f, params = model(4)
        tiers = o.Tiers(host=host, disk=tmp_path)
        parts = o.zero(o.sgd(0.1), "data", 3, tiers=tiers).shard(params)
        twice = {n: sl.unshard(x) * 2 for n, x in o.state_dict(parts).items()}
        with torch.no_grad():
            before = float(f(parts))
            with pytest.raises(sl.ShardError, match="another kind"):
                o.load_state_dict(parts, twice | {"h.1.up.bias": torch.ones(3)})
            assert float(f(parts)) == before
            new = o.load_state_dict(parts, twice)
            assert float(f(new)) == float(f(parts)) != before
        found = {n: sl.unshard(x) for n, x in o.state_dict(new).items()}
        assert differing(twice, found) == []
        row = next(iter(new.values()))
        row.raw.zero_()
        assert bool(row.raw.any()) == (host == "150KB")


def test_real_ranks_read_what_they_save_together(pool: Any, tmp_path: Path) -> None:
    assert pool.run(saved, str(tmp_path), data=2, x=2) == [[]] * 4


def test_rows_are_held_in_their_order_after_buffers_and_gradients() -> None:
    rows = {f"{c} {i}": RowSize(c, "state", 10) for c in "abcd" for i in range(2)}
    gradients = dict.fromkeys("abcd", 10)
    for budget in range(80, 140):
        away, *buffers = divided(rows, budget, gradients, 2)
        held = sum(r.nbytes for n, r in rows.items() if n not in away)
        if away:
            assert held + sum(buffers) + 10 + 2 + 40 <= budget
            assert list(rows)[held // 10 :] == sorted(away)
        else:
            assert budget >= 122
    with pytest.raises(sl.ShardError, match="need 62 bytes"):
        divided(rows, 61, gradients, 2)


def test_a_run_that_is_dropped_leaves_no_thread_and_no_bytes(tmp_path: Path) -> None:
    with sl.simulate(data=1, x=1):
        before = set(threading.enumerate())
        tiers = o.Tiers(disk=tmp_path, durable=True)
        found = run(o.adamw(0.1), tiers, 2)
        del found
        gc.collect()
        until = time.monotonic() + 30
        # the commit of the last step may be under way, and hold what it writes
        while ours := {t.name for t in set(threading.enumerate()) - before if "disk" in t.name}:
            assert time.monotonic() < until, ours
            time.sleep(0.01)
        gc.collect()
        assert tiers.ledger.held["host"].total() == tiers.ledger.held["disk"].total() == 0
