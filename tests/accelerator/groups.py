"""Laws of the pretend device's process group, on four real ranks; run by test_accelerator.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from benchmarks.waits import ROWS, Found, measured, models
from tests.accelerator import pretend
from tests.accelerator.pretend import DEVICE


def all_collectives() -> dict[str, list[float]]:
    """What every collective of torch gives on this rank, by its name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4.0) + 10 * rank
    out: dict[str, Tensor] = {"all_reduce": mine.clone(), "broadcast": mine.clone()}
    dist.all_reduce(out["all_reduce"])
    dist.broadcast(out["broadcast"], 2)
    out["max"] = mine.clone()
    dist.all_reduce(out["max"], dist.ReduceOp.MAX, async_op=True).wait()
    out["all_gather"] = torch.empty(4 * world)
    dist.all_gather_into_tensor(out["all_gather"], mine)
    parts = [torch.empty(4) for _ in range(world)]
    dist.all_gather(parts, mine)
    out["all_gather_list"] = torch.cat(parts)
    out["reduce_scatter"] = torch.empty(1)
    dist.reduce_scatter_tensor(out["reduce_scatter"], mine)
    out["all_to_all_single"] = torch.empty(4)
    dist.all_to_all_single(out["all_to_all_single"], mine)
    ragged = [torch.empty(1 + rank) for _ in range(world)]
    dist.all_to_all(ragged, [torch.full((1 + i,), float(rank)) for i in range(world)])
    out["all_to_all"] = torch.cat(ragged)
    out["reduce"] = mine.clone()
    dist.reduce(out["reduce"], 1)
    out["recv"] = torch.empty(4)
    left, right = (rank - 1) % world, (rank + 1) % world
    works = [dist.isend(mine, right), dist.irecv(out["recv"], left)]
    out["batch"] = torch.empty(4)
    works += dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, out["batch"], left), dist.P2POp(dist.isend, mine, right)]
    )
    for work in works:
        work.wait()
    said: list[Any] = [None] * world
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": r} for r in range(world)]
    dist.barrier()
    assert all(t.device.type == DEVICE.type for t in out.values())
    return {name: t.tolist() for name, t in out.items()}


def test_collectives_of_torch_give_what_they_say(pool: Any) -> None:
    parts = [[i + 10.0 * r for i in range(4)] for r in range(4)]
    total, flat = [60.0 + 4 * i for i in range(4)], [v for p in parts for v in p]
    for rank, got in enumerate(pool.run(all_collectives, x=4)):
        left = parts[(rank - 1) % 4]
        assert got == {
            "all_reduce": total,
            "broadcast": parts[2],
            "max": parts[3],
            "all_gather": flat,
            "all_gather_list": flat,
            "reduce_scatter": [total[rank]],
            "all_to_all_single": [p[rank] for p in parts],
            "all_to_all": [float(r) for r in range(4) for _ in range(1 + rank)],
            "reduce": total if rank == 1 else parts[rank],
            "recv": left,
            "batch": left,
        }


def two_in_order() -> tuple[list[float], list[float]]:
    """What two receives get that are posted in order and waited for in the other, and again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first, second = torch.empty(4), torch.empty(4)
    works = [dist.irecv(t, (rank - 1) % world) for t in (first, second)]
    works += [dist.isend(torch.full((4,), v), (rank + 1) % world) for v in (1.0, 2.0)]
    for work in [*reversed(works), *works]:  # whoever waits again goes on at once
        work.wait()
    return first.tolist(), second.tolist()


def test_transfers_between_two_ranks_keep_their_order_and_may_be_waited_for_again(
    pool: Any,
) -> None:
    for got in pool.run(two_in_order, x=4):
        assert got == ([1.0] * 4, [2.0] * 4)


def refused() -> list[str]:
    said = []
    for t in (torch.ones(4, device="cpu"), torch.ones(2, 4).mT, torch.ones(4, dtype=torch.int16)):
        with pytest.raises(RuntimeError) as e:
            dist.all_reduce(t)
        said.append(str(e.value).split("\n")[0])
    return said


def test_what_nccl_refuses_is_refused(pool: Any) -> None:
    for host, gaps, short in pool.run(refused, x=4):
        assert "cpu" in host and "contiguous" in gaps and "Short" in short


def late_sum(waits: bool) -> list[float]:
    """A sum whose operand and reader run late: with ``waits`` the stream waits for the transfer."""
    pretend.late(True)
    try:
        x = torch.full((64,), 2.0) * 3
        out = torch.empty(256)
        with pretend.counting() as counts:
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            if waits:
                work.wait()
            got = out + 1
        assert not counts.waits, counts
        values = got.tolist()
        work.wait()
        return values
    finally:
        pretend.late(False)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_a_transfer_where_it_is_made_to(pool: Any, waits: bool) -> None:
    for got in pool.run(late_sum, waits, x=4):
        assert (got == [7.0] * 256) == waits


def product_and_gradients() -> list[Tensor]:
    torch.manual_seed(0)
    a, b = (torch.randn(m, n, dtype=torch.float64) for m, n in ((8, 12), (12, 4)))
    x, w = (sl.shard(t, "x y").requires_grad_() for t in (a, b))
    (x @ w).square().sum().backward()
    return [sl.unshard(t) for t in ((x @ w).detach(), x.grad, w.grad)]


def test_a_product_and_its_gradients_are_those_of_simulated_ranks(pool: Any) -> None:
    with sl.simulate(x=2, y=2, device=DEVICE):
        want = product_and_gradients()
    for got in pool.run(product_and_gradients, x=2, y=2):
        for a, b in zip(got, want, strict=True):
            assert a.device == DEVICE
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


STEPS = ("megatron1d", "ring", "fsdp", "ddp zero 3, clip", "megatron1d zero 2, clip",
         "ddp zero 2, half precision, loss_scale", "ddp zero 2, Muon")  # fmt: skip


def trained() -> list[Found]:
    rows = {r.name: r for r in ROWS}
    meshes = {n: sl.make_mesh(device="pretend", **rows[n].mesh) for n in STEPS}
    make = models(layers=1)["gpt2"]
    found = [measured(make, rows[n], DEVICE, pretend.counting, mesh=meshes[n]) for n in STEPS]
    sl.random.seed(None)  # another task draws by a seed of its own
    return found


def test_a_step_on_real_ranks_waits_for_nothing(pool: Any) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for ranks in zip(*pool.run(trained, x=4), strict=True):
        assert all(f.losses == ranks[0].losses for f in ranks)
        for f in ranks:
            assert (f.waits, f.uploads, f.traced) == (0, 0, (0, 0)), f.lines


def in_tiers(on_host: bool) -> list[float]:
    """Losses in memory tiers, and sums of what is read and loaded again, with a global norm."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
    rules = [("*.weight", "x ."), ("*.bias", "x")]
    apply, params = sl.parallelize(net, rules, inputs={"input": "data ."}, host=on_host)
    x = torch.randn(8, 64)
    inner = sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(0.01))
    tx = sl.optim.zero(inner, "data", 3, tiers=sl.optim.Tiers())
    parts = tx.shard(params)
    state, out = tx.init(parts), []
    for _ in range(3):
        loss, grads = sl.value_and_grad(lambda p: apply(p, x).square().mean(), into=tx)(parts)
        parts, state, _ = sl.optim.step(tx, parts, grads, state)
        out.append(loss.item())
    held = sl.optim.state_dict(parts)
    assert {v.device.type for v in held.values()} == {"cpu"}
    parts = sl.optim.load_state_dict(parts, held)
    return out + [sl.unshard(v).double().sum().item() for v in sl.optim.state_dict(parts).values()]


@pytest.mark.parametrize("mesh", [{"data": 4, "x": 1}, {"data": 2, "x": 2}])
def test_memory_tiers_on_real_ranks_sum_and_gather_what_is_in_host_memory(
    pool: Any, mesh: Any
) -> None:
    with sl.simulate(**mesh, device=DEVICE):
        want = in_tiers(False)
    for on_host in (True, False):
        for got in pool.run(in_tiers, on_host, **mesh):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-4)
