"""Laws of streams beside the one that computes; run by test_accelerator.py."""

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.capacity import available, most_taken
from shardlib.collectives import Moment, all_gather, start, unwrap, wrap
from tests.accelerator import pretend, steps
from tests.accelerator.pretend import DEVICE
from tests.accelerator.steps import PLANTED, apart, draw, without


@pytest.mark.parametrize("seed", range(8))
def test_steps_with_transfers_beside_them_equal_the_eager_order(seed: int) -> None:
    assert not apart(draw(seed)), draw(seed)


@pytest.mark.parametrize("seed", range(3))
def test_they_do_on_real_ranks(pool: Any, seed: int) -> None:
    case = draw(seed, 4)
    assert not any(pool.run(apart, case, True, **case.mesh)), case


@pytest.fixture(scope="module")
def telling() -> Any:
    """A case that needs every wait, and is right with all of them."""
    case = draw(steps.TELLING)
    assert not apart(case)
    return case


@pytest.mark.parametrize("wait", PLANTED)
def test_a_wait_that_is_missing_gives_other_numbers(wait: str, telling: Any) -> None:
    with without(wait):
        assert apart(telling), telling


@pytest.mark.parametrize("recorded", [True, False])
def test_what_a_transfer_reads_is_given_to_nobody_before_it_is_through(recorded: bool) -> None:
    def gathered() -> list[float]:
        with sl.simulate(x=2, device=DEVICE) as mesh:
            x = torch.full((2, 64), 7.0, device=DEVICE)
            later = start(all_gather, wrap(x, mesh), "x")
            del x
            other = torch.zeros(2, 64, device=DEVICE)  # of the size that was let go
            torch.accelerator.current_stream().synchronize()
            found = unwrap(later.wait())[0].cpu().tolist()
            assert not other.any()
            return found

    pretend.late(True)
    try:
        with nullcontext() if recorded else without("_use:beside"):
            assert (gathered() == [7.0] * 128) == recorded
    finally:
        pretend.late(False)


def test_what_lies_on_the_host_meanwhile_makes_nobody_wait() -> None:
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).to(DEVICE)
    with sl.simulate(x=2, device=DEVICE):
        apply, params = sl.parallelize(net, [("*", "...")], remat=[("*", "host")])
        x = torch.ones(64, 32, device=DEVICE)
        step = sl.value_and_grad(lambda p: apply(p, x).square().sum())
        step(params)
        with pretend.counting() as counts:
            step(params)
    assert not counts.waits and counts.uploads and counts.downloads, counts


@pytest.mark.parametrize("parts", [None, 4])
def test_a_step_whose_saved_tensors_are_on_the_host_takes_the_bytes_explained(
    parts: int | None,
) -> None:
    up, down = partial(nn.Linear, 64, 256, bias=False), partial(nn.Linear, 256, 64, bias=False)
    net = nn.Sequential(*(nn.Sequential(up(), down()) for _ in range(5))).to(DEVICE)
    with sl.simulate(data=1, device=DEVICE):
        apply, params = sl.parallelize(
            net, [("*", "...")], inputs={"input": "data ."}, remat=[("*", "host")]
        )
        x = torch.ones(4096, 64, device=DEVICE)
        loss = lambda p, x: apply(p, x).square().mean()  # noqa: E731
        said = sl.explain(loss, params, (x,), microbatches=parts)
        gc.collect()
        base = pretend.allocated()
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        sl.value_and_grad(loss, microbatches=parts)(params, x)
        most = most_taken(DEVICE)
    assert most is not None and abs((most - base) / said.transient - 1) < 0.001, (most, said)
    # the inputs of both products
    assert said.work.away == 5 * 4096 * (64 + 256) * 4


def test_a_timeline_is_of_the_devices_clock_and_waits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Moment, "seconds_since", lambda *_: 7.0)
    with sl.simulate(x=2, device=DEVICE):
        a = sl.shard(torch.ones(8, 8, device=DEVICE), "x .").requires_grad_()
        (a @ a.mT.detach()).sum().backward()
        with pretend.counting() as counts, sl.seeing.timeline() as line:
            (a @ a.mT.detach()).sum().backward()
    assert sum(counts.waits.values()) == 1, counts
    assert line.collectives and {s.seconds for s in line.spans} == {7.0}


def test_memory_is_what_the_devices_allocator_says() -> None:
    before, left = most_taken(DEVICE), available(DEVICE)
    assert before is not None and left is not None
    taken = torch.empty(1 << 24, device=DEVICE)
    assert most_taken(DEVICE) >= before and available(DEVICE) <= left - taken.nbytes
    assert most_taken(DEVICE) >= taken.nbytes
