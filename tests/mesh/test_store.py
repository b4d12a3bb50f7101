"""Every call to the job's store ends, whoever waits there, and whoever holds it."""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardlib.errors import RankFailed
from shardlib.mesh.store import Client
from tests.faults import serve


@pytest.fixture
def host() -> Iterator[tuple[int, dist.Store]]:
    """A store that another process holds, and that process."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    assert server.pid is not None
    yield server.pid, dist.TCPStore("127.0.0.1", ours.recv(), wait_for_workers=False)
    server.kill()
    server.join()


def test_a_call_says_what_is_there(host: tuple[int, dist.Store]) -> None:
    client = Client(host[1], 10.0, lambda: "gone")
    assert not client.check("a") and client.get("a") is None
    client.set("a", "1")
    assert client.check("a") and not client.check("a", "b") and client.get("a") == b"1"
    assert client.add("n", 2) == 2 and client.add("n", 1) == 3
    assert client.compare_set("b", "", "x") == client.compare_set("b", "", "y") == "x"
    client.delete("a", "b")
    assert client.get("b") is None and not client.gone


def test_a_wait_of_torchs_own_client_locks_nobody_out(host: tuple[int, dist.Store]) -> None:
    client = Client(host[1], 10.0, lambda: "gone")

    def waits() -> None:
        with suppress(RuntimeError):
            host[1].wait(["never"], timedelta(seconds=2))

    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert not client.check("a")
    assert time.monotonic() - began < 1.0 and waiting.is_alive()
    waiting.join()


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_host_that_does_not_answer_ends_a_call_by_its_clock(
    host: tuple[int, dist.Store], how: signal.Signals
) -> None:
    client = Client(host[1], 0.5, lambda: "rank 0 is stopped")
    os.kill(host[0], how)
    os.waitid(os.P_PID, host[0], os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # all of its threads
    began = time.monotonic()
    for _ in range(3):  # the first waits, and no other does
        with pytest.raises(RankFailed, match="rank 0 is stopped"):
            client.check("a")
    assert time.monotonic() - began < 1.0
