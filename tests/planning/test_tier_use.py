"""What a step of stages in memory tiers is said to load, send and hold is what is counted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.planning.cluster import CLUSTERS
from tests.optim.test_tiered import RULES, WIDE, Blocks

o = sl.optim
ROWS = 64
COUNTS = ("loads", "loaded", "sent", "read", "written")
BF16 = torch.bfloat16


def built(
    schedule: str, dtype: torch.dtype, remat: str, micros: int, cluster: Any = "h100", **tiers: Any
) -> tuple[Any, Any, Any]:
    """The tiers, the explanation of a step, and a step, which returns what it has counted."""
    torch.manual_seed(0)
    stages = sl.Stages("pipe", schedule=schedule, per_rank=1 + (schedule == "interleaved"))
    how: dict[str, Any] = {"remat": [(f"h.{i}", remat) for i in range(5) if remat]}
    net = Blocks(5).to(dtype)
    apply, whole = sl.parallelize(net, RULES, inputs={"x": "data ."}, stages=stages, **how)
    held = o.Tiers(depth=2, **tiers)
    tx = o.zero(o.adamw(0.01), "data", 3, master="fp32" if dtype == BF16 else None, tiers=held)
    parts, x = tx.shard(whole), torch.randn(micros * ROWS, WIDE).to(dtype)
    said = sl.explain(apply, parts, x, tx=tx, microbatches=micros, cluster=cluster)
    state, cache = tx.init(parts), parts.cache
    vg = sl.value_and_grad(apply, into=tx, microbatches=micros)

    def counted() -> list[int]:
        moved = [m.moved for m in cache.movers[:2]]
        disk = cache.store.bytes_read, cache.store.bytes_written
        return [cache.loads, *(n // cache.shares for n in (*moved, *disk))]

    def step() -> dict[str, int]:
        nonlocal parts, state
        before = counted()
        _, grads = vg(parts, x)
        parts, state, _ = o.step(tx, parts, grads, state)
        # the update that the next forward would wait for
        cache.land(0)
        cache.movers.updates.submit(lambda: None).wait()
        found = [b - a for a, b in zip(before, counted(), strict=True)]
        return dict(zip(COUNTS, found, strict=True))

    return held, said, step


def least(**how: Any) -> int:
    with pytest.raises(sl.ShardError, match="the largest block needs") as refused:
        built("1f1b", how.pop("dtype"), "", 4, device=1, **how)
    return int(refused.value.fix.split("device=")[1].strip(")"))


def differing(use: Any, ledger: Any, found: dict[str, int]) -> list[Any]:
    """What a step counts, and a ledger holds, that is not as it was said."""
    wrong = [(n, getattr(use, n), m) for n, m in found.items() if getattr(use, n) != m]
    kinds = use.host.keys() - {"buffers"}
    host = [(k, use.host[k], ledger.peaks["host"][k]) for k in kinds]
    return wrong + [row for row in host if row[1] != row[2]]


CASES = [
    # schedule, dtype, remat, micro-batches, data, update, whether on the disk; room: blocks, activations
    ("gpipe", torch.float32, "host", 4, 2, "host", False, 0, 4),
    ("1f1b", BF16, "", 8, 2, "device", False, 9, 0),
    ("interleaved", torch.float32, "full", 4, 1, "device", True, 0, 0),
    ("zb", BF16, "host", 4, 1, "host", False, 2, 40),
    ("zbv", torch.float32, "", 4, 2, "host", True, 1, 0),
]


@pytest.mark.parametrize(
    ("schedule", "dtype", "remat", "micros", "data", "update", "disk", "blocks", "saved"), CASES
)
def test_a_step_in_stages_moves_and_holds_what_is_said(
    schedule: str, dtype: Any, remat: str, micros: int, data: int, update: Any, disk: bool,
    blocks: int, saved: int, tmp_path: Path,
) -> None:  # fmt: skip
    """Loads, bytes of both links and of the disk, and the peak of the host, by kind."""
    with sl.simulate(data=data, x=1, pipe=2):
        device = least(update=update, dtype=dtype)
        part = WIDE * (4 * WIDE + 3) * dtype.itemsize // data
        device += blocks * part + saved * ROWS // data * 2 * WIDE * dtype.itemsize
        how: dict[str, Any] = {"device": device, "update": update}
        if disk:
            how |= {"disk": tmp_path, "host": 300_000 // data}
        tiers, said, step = built(schedule, dtype, remat, micros, **how)
        assert said.tiers.blocks == 5 and {p.tiers.blocks for p in said.places} <= {2, 3}
        found = [step() for _ in range(2)][-1]
        assert differing(said.tiers, tiers.ledger, found) == []
        assert said.tiers.disk == tiers.ledger.peak.get("disk", 0) and (said.tiers.disk > 0) == disk
        # a stage has less to load within a budget of its own
        assert sum(p.tiers.loads for p in said.places) <= said.tiers.loads
        assert tiers.ledger.peak["device"] <= device


def on_ranks(schedule: str, dtype: torch.dtype, device: int) -> list[Any]:
    torch.set_num_threads(1)
    tiers, said, step = built(schedule, dtype, "host", 4, device=device)
    mesh = sl.current_mesh()
    mine = said.places[mesh.coord["pipe"]].tiers
    found = [step() for _ in range(2)][-1]
    other = said.places[1 - mesh.coord["pipe"]].tiers
    return [*differing(mine, tiers.ledger, found), said.tiers != mine, mine.loads == other.loads]


def test_a_place_moves_and_holds_what_is_said_on_real_ranks(pool: Any) -> None:
    found = pool.run(on_ranks, "1f1b", torch.float32, 120_000, data=2, x=1, pipe=2)
    assert found == [[False, False]] * 4


def test_a_slow_link_to_the_host_delays_the_stages() -> None:
    with sl.simulate(data=1, x=1, pipe=2):
        links = math.inf, 1e6
        fast, slow = (
            built(
                "1f1b", torch.float32, "", 4, replace(CLUSTERS["h100"], host=rate), device=60_000
            )[1]
            for rate in links
        )
    assert all(math.isclose(p.tiers.seconds, p.tiers.computing) for p in fast.places)
    assert fast.seconds > max(p.tiers.computing for p in fast.places)
    assert slow.seconds > max(p.tiers.seconds for p in slow.places) > fast.seconds
    assert all(p.tiers.seconds >= p.tiers.moving for p in slow.places)
