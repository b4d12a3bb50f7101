"""A mover runs jobs in order; what a job raises reaches whoever waits for it, with its line."""

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardlib.tiers.mover import Mover

CPU = torch.device("cpu")


def test_jobs_run_in_order_and_after_those_of_other_movers() -> None:
    one, two, out = Mover("one", CPU), Mover("two", CPU), list[int]()
    gate = threading.Event()
    first = one.submit(gate.wait)
    later = [two.submit(lambda i=i: out.append(i), after=[first]) for i in range(20)]
    assert not out
    gate.set()
    later[-1].wait()
    assert out == list(range(20))


def test_an_error_reaches_who_waits_with_the_line_of_the_submitter() -> None:
    mover = Mover("one", CPU)

    def fails() -> None:
        raise ValueError("no link")

    ticket = mover.submit(fails)
    with pytest.raises(ValueError, match="no link") as raised:
        ticket.wait()
    assert any("test_mover.py" in note for note in raised.value.__notes__)
    # those that depend on it fail with its cause, and the next job runs
    with pytest.raises(ValueError, match="no link"):
        mover.submit(lambda: 1, after=[ticket]).wait()
    assert mover.submit(lambda: 2).wait() == 2


def test_a_thread_is_held_to_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock: Any = SimpleNamespace(
        perf_counter=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
    )
    monkeypatch.setattr("shardlib.tiers.mover.time", clock)
    mover = Mover("one", CPU, rate=1e6)
    for _ in range(4):
        ticket = mover.submit(lambda: None, nbytes=10_000)
    ticket.wait()
    assert now[0] == pytest.approx(0.04)
    assert mover.moved == 40_000


def test_what_a_job_refers_to_is_free_when_it_ends() -> None:
    mover = Mover("one", CPU)
    x: Any = torch.ones(3)
    seen = weakref.ref(x)

    def job(x: Any = x) -> None:
        x.add_(1)

    ticket = mover.submit(job)
    del x, job
    ticket.wait()
    assert seen() is None


def test_the_thread_ends_with_its_mover() -> None:
    mover = Mover("ends", CPU)
    mover.submit(lambda: None).wait()
    assert any(t.name == "shardlib ends" for t in threading.enumerate())
    del mover
    assert not any(t.name == "shardlib ends" for t in threading.enumerate())


def test_a_small_copy_passes_no_job_that_is_under_way() -> None:
    """It runs at once where nothing is before it, else in order."""
    mover, other = Mover("copies", CPU, small=8), Mover("updates", CPU)
    go, order = threading.Event(), list[str]()
    assert mover.submit(lambda: order.append("alone"), 8).finished.is_set()
    mover.submit(go.wait)
    second = mover.submit(lambda: order.append("second"), 8)
    update = other.submit(lambda: (go.wait(), order.append("update")))
    third = mover.submit(lambda: order.append("third"), 8, [update])
    assert order == ["alone"]
    go.set()
    second.wait(), third.wait()
    assert order.index("update") < order.index("third") > order.index("second") > 0
    mover.close(), other.close()
