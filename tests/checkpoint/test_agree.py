"""All ranks get one answer or raise the same, whoever is late, gone or apart."""

import os
import pickle
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from shardlib.checkpoint.agree import Group
from shardlib.errors import CheckpointError
from tests.workers import Pool


def told(f: Any) -> tuple[Any, float]:
    began = time.monotonic()
    try:
        return f(), time.monotonic() - began
    except CheckpointError as e:
        return e.message, time.monotonic() - began


def agreeing() -> list[Any]:
    rank, out = dist.get_rank(), []
    group = Group("save", 10.0)
    out.append(told(lambda: group.agree("the tree", rank, decide=sum))[0])
    fault = ValueError("odd") if rank == 2 else None
    out.append(told(lambda: group.agree("writing", rank, fault))[0])
    out.append(told(lambda: Group("save", 10.0).agree("the tree", 0, decide=lambda v: 1 / 0))[0])

    def slow() -> Any:
        """A rank at work says so, and is waited for beyond the timeout."""
        group = Group("save", 0.8)
        if rank == 1:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                group.progress()
                time.sleep(0.02)
        return group.agree("writing", rank, decide=sum)

    out.append(told(slow)[0])

    def silent() -> Any:
        group = Group("save", 0.5)
        if rank == 3:
            time.sleep(1.5)
        return group.agree("writing", rank)

    said, seconds = told(silent)
    out += [said, seconds < 3]
    return out


def test_all_get_one_answer_or_one_error(pool: Any) -> None:
    said = pool.run(agreeing, x=4)
    assert said == [said[0]] * 4
    total, fault, zero, slow, silent, soon = said[0]
    assert total == slow == 6 and soon
    assert fault == "rank 2: odd" and zero.startswith("ZeroDivisionError")
    assert silent == "rank 3 said nothing during 'writing' for 0.5 s"


def killed(who: int) -> Any:
    """The rank is killed while the others come to their first agreement."""
    if dist.get_rank() == who:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: Group("save", 50.0).agree("the tree", 0))


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_killed_before_its_first_word_is_gone_at_once(who: int) -> None:
    workers = Pool(3)
    try:
        for pipe in workers.pipes:
            pipe.send_bytes(pickle.dumps((killed, (who,), {"x": 3}, 60.0)))
        said = [pickle.loads(p.recv_bytes()) for r, p in enumerate(workers.pipes) if r != who]
    finally:
        workers.close()
    for done, (text, seconds) in said:
        assert done and text == f"rank {who} died: its process is gone" and seconds < 5
