"""Activations in memory tiers: regions with ``remat="host"`` save in host memory, within the ledger."""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.mesh import current_mesh
from shardlib.tiers.activations import UNDER_WAY, HostActivations
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover
from tests.optim.test_tiered import MESHES, RULES, WIDE, Blocks, clipped, differing
from tests.optim.test_tiered_room import emptied

o = sl.optim
COUNT, ROWS = 5, 128

HOST = [("h.*", "host")]
RECOMPUTED = [("h.*.up", "full"), ("h.*.down", "full"), *HOST]


def model(remat: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDE)
    apply, params = sl.parallelize(Blocks(COUNT), RULES, inputs={"x": "data ."}, remat=remat)
    return (lambda p: apply(p, x)), params


def run(remat: Any, tiers: Any, steps: int = 3) -> dict[str, Any]:
    """Losses, norms, parameters and state."""
    f, params = model(remat)
    tx = o.zero(clipped(), "data", 3, tiers=tiers)
    parts = tx.shard(params)
    state, out = tx.init(parts), dict[str, Any]()
    for i in range(steps):
        loss, grads = sl.value_and_grad(f, into=tx)(parts)
        parts, state, info = o.step(tx, parts, grads, state, norm=True)
        out |= {f"loss {i}": loss, f"norm {i}": info.norm}
    for tree in (parts, state):
        out |= {n: sl.unshard(x) for n, x in o.state_dict(tree).items() if torch.is_tensor(x)}
    return out


def least(remat: Any) -> int:
    """The least bytes of the device, by the refusals of smaller ones."""
    most = 1
    while True:
        try:
            run(remat, o.Tiers(device=most), 2)
            return most
        except sl.ShardError as e:
            most = int(e.fix.split("device=")[-1].strip(" )"))


def saved(mesh: dict[str, int]) -> int:
    """Bytes of a rank that blocks save: their input, and the tanh between their products."""
    return COUNT * ROWS // mesh["data"] * (WIDE + 2 * WIDE // mesh["x"]) * 4


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("remat", [HOST, RECOMPUTED])
def test_what_blocks_save_on_the_host_changes_no_bit(mesh: Any, remat: Any) -> None:
    with sl.simulate(**mesh):
        want = run([], None)
        for device in (least(remat), None):
            tiers = o.Tiers(device=device)
            assert differing(want, run(remat, tiers)) == []
            assert tiers.ledger.peaks["host"]["activations"] == saved(mesh)
            assert 0 < tiers.ledger.peaks["device"]["activations"] < saved(mesh)
            assert emptied(tiers.ledger)


def both(remat: Any) -> list[str]:
    torch.set_num_threads(1)
    mesh = dict(current_mesh().axes)
    tiers = o.Tiers(device=least(remat))
    wrong = differing(run([], None), run(remat, tiers))
    return wrong + ["bytes"] * (tiers.ledger.peaks["host"]["activations"] != saved(mesh))


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}])
def test_on_real_ranks_too(mesh: Any, pool: Any) -> None:
    assert pool.run(both, RECOMPUTED, **mesh) == [[]] * 4


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("remat", [HOST, RECOMPUTED])
@pytest.mark.parametrize("count", [1, 2])
def test_an_explanation_says_their_bytes_on_the_host_and_on_the_links(
    mesh: Any, remat: Any, count: int
) -> None:
    with sl.simulate(**mesh):
        x = torch.randn(ROWS, WIDE)
        f, params = sl.parallelize(Blocks(COUNT), RULES, inputs={"x": "data ."}, remat=remat)
        tiers = o.Tiers()
        tx = o.zero(o.adamw(0.01), "data", 3, tiers=tiers)
        parts = tx.shard(params)
        said = sl.explain(f, parts, x, tx=tx, microbatches=count).tiers
        assert said is not None
        state, moved = tx.init(parts), (0, 0)
        for _ in range(3):
            links = parts.cache.movers[:2]
            before = [m.moved for m in links]
            _, grads = sl.value_and_grad(f, into=tx, microbatches=count)(parts, x)
            moved = tuple(m.moved - b for m, b in zip(links, before, strict=True))
            parts, state, _ = o.step(tx, parts, grads, state)
        assert moved == tuple(parts.cache.shares * n for n in (said.loaded, said.sent))
        assert said.host == dict(tiers.ledger.peaks["host"])
        assert said.host["activations"] == saved(mesh) // count


def test_a_host_too_small_is_refused_with_the_least_that_works() -> None:
    with sl.simulate(data=2, x=1):
        want, free = run(HOST, None), o.Tiers()
        run(HOST, free)
        rows = sum(free.ledger.peaks["host"][kind] for kind in ("parameters", "state"))
        for few in (rows + 1, rows + saved({"data": 2, "x": 1}) - 1):
            with pytest.raises(sl.ShardError, match="of saved activations do not fit") as refused:
                run(HOST, o.Tiers(host=few))
            told = int(refused.value.fix.split("host=")[-1].strip(" )"))
            assert told == rows + saved({"data": 2, "x": 1})
        # gradients are sent when activations are fetched: each has the other's bytes
        assert differing(want, run(HOST, o.Tiers(host=told))) == []


def test_rows_on_a_disk_leave_the_bytes_that_are_asked_for(tmp_path: Path) -> None:
    most, few, remat = 185_000, saved({"data": 2, "x": 1}), HOST
    with sl.simulate(data=2, x=1):
        want = run(remat, None)
        with pytest.raises(sl.ShardError, match="of saved activations do not fit") as refused:
            run(remat, o.Tiers(host=most, disk=tmp_path))
        fix = re.fullmatch(r"sl.optim.Tiers\(host=(\d+), disk=path, (.*)\)", refused.value.fix)
        assert fix is not None and fix[2] == f"activations={few}"
        most = int(fix[1])
        tiers = o.Tiers(host=most, activations=few, disk=tmp_path)
        assert differing(want, run(remat, tiers)) == []
        assert tiers.ledger.peak["host"] <= most and tiers.ledger.peak["disk"]
        with pytest.raises(sl.ShardError, match="activations='much' is no number of bytes"):
            o.Tiers(activations="much")


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    with sl.simulate(data=2, x=1):
        f, params = model(HOST)
        tiers = o.Tiers()
        parts = o.zero(o.sgd(0.1), "data", 3, tiers=tiers).shard(params)
        for _ in range(3):
            float(f(parts))
        assert tiers.ledger.peaks["host"]["activations"] <= 2 * saved({"data": 2, "x": 1})
        del f, params, parts
        assert emptied(tiers.ledger)


# ---------------------------------------------------------------- one by one


def kept(ledger: Ledger, rate: float | None = None) -> HostActivations:
    cpu = torch.device("cpu")
    return HostActivations(ledger, cpu, 1, Mover("down", cpu), Mover("up", cpu, rate))


def test_a_tensor_comes_back_with_its_strides_and_is_sent_once() -> None:
    ledger = Ledger(device=None, host=None)
    host = kept(ledger)
    found = []
    for i in range(6):
        x = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1) + i
        found.append((x.clone(), x.stride(), host.keep(x)))
        assert host.keep(x) is found[-1][2]
        del x
    assert host.saved == ledger.held["host"]["activations"] == 6 * 96
    for x, strides, one in found[::-1]:
        back = one.back()
        assert torch.equal(back, x) and back.stride() == strides
        del back
    # the last ones were on the device still
    assert host.fetched == (6 - UNDER_WAY) * 96
    assert ledger.peak["device"] <= 2 * 96


@pytest.mark.parametrize("end", [HostActivations.give_way, HostActivations.settle])
def test_what_is_on_its_way_gives_way_at_once_on_every_rank(end: Any) -> None:
    """Over a link of 0.1 s a tensor: bytes that are free by chance would be so on some ranks."""
    ledger = Ledger(device=None, host=None)
    host = kept(ledger, rate=4e4)
    found = [host.keep(torch.ones(1000)) for _ in range(5)]
    while len(found) > 2:
        # those of the last ones are there, the one before them is fetched ahead
        found.pop().back()
    end(host)
    assert ledger.held["device"].total() == 0
    assert torch.equal(found[1].back(), torch.ones(1000))


def test_a_tensor_that_is_written_to_after_it_was_saved_is_refused() -> None:
    host = kept(Ledger(device=None, host=None))
    for later in range(4):
        x = torch.ones(8)
        one = host.keep(x)
        for _ in range(later):
            host.keep(torch.ones(8))
        x.add_(1)
        for _ in range(3):
            host.keep(torch.ones(8))
        if later < UNDER_WAY:
            with pytest.raises(sl.ShardError, match="written to in place"):
                one.back()
        else:
            # it was sent before
            assert torch.equal(one.back(), torch.ones(8))


def test_rows_are_used_again_by_the_next_forward() -> None:
    ledger = Ledger(device=None, host=None)
    host = kept(ledger)
    for _ in range(3):
        found = [host.keep(torch.full((4,), float(i))) for i in range(5)]
        assert [float(one.back()[0]) for one in found[::-1]] == [4.0, 3.0, 2.0, 1.0, 0.0]
        del found
        host.settle()
        gc.collect()
    assert ledger.peak["host"] == 5 * 16 and ledger.held["device"].total() == 0
