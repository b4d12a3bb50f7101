"""The pool fails soon, says why, and goes on."""

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from tests.workers import Pool, WorkerError


def _total() -> float:
    return sl.psum(torch.tensor(float(sl.axis_index("x"))), "x").item()


def _rank_2(act: str) -> Any:
    if sl.axis_index("x") == 2:
        if act == "raise":
            raise KeyError("the culprit")
        if act == "die":
            os._exit(1)
        if act == "odd":
            return lambda: 1
        time.sleep(600)
    return _total() if act in ("raise", "die", "hang") else None


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("raise", "rank 2:(.|\n)*in _rank_2(.|\n)*the culprit"),
        ("die", "rank 2:(.|\n)*the process died|Connection"),
        ("odd", "rank 2:(.|\n)*pickle"),
        ("hang", "rank [0-3]:(.|\n)*no answer within 3 s|rank [0-3]:(.|\n)*Connection"),
    ],
)
def test_the_pool_tells_the_first_failure_and_goes_on(pool: Any, act: str, says: str) -> None:
    before = time.monotonic()
    with pytest.raises(WorkerError, match=says):
        pool.run(_rank_2, act, x=4, seconds=3 if act == "hang" else 60)
    assert time.monotonic() - before < 30
    assert pool.run(_total, x=4) == [6.0] * 4


def test_what_is_sent_comes_back_by_rank(pool: Any) -> None:
    got = pool.run(_scaled, torch.arange(3.0), 2.0, x=2, y=2)
    assert [g.tolist() for g in got] == [
        [0.0, 2.0, 4.0],
        [1.0, 3.0, 5.0],
        [2.0, 4.0, 6.0],
        [3.0, 5.0, 7.0],
    ]


def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by + sl.axis_index(("x", "y"))


def test_what_was_forked_is_never_collected() -> None:
    """The destructor of a forked store would wait for a thread that only its parent has."""
    circle: list[Any] = [dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)]
    circle.append(circle)
    gc.disable()
    one = None
    try:
        del circle
        one = Pool(1)
        assert len(one.run(gc.collect, x=1)) == 1
    finally:
        gc.enable()
        if one is not None:
            one.close()
