"""Agreement of all ranks by the job's store: all get one answer, or all raise the same error.

No collective is posted, so a rank that fails, leaves or never comes makes nobody wait for longer
than ``timeout``.  Rank 0 hears every rank, decides, and tells.  A rank that is at work says so from
time to time (``progress``); only silence counts.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from shardlib._compat import job_store
from shardlib.errors import CheckpointError

__all__ = ["Group"]


class _Calls:
    """The calls of one job, as far as this rank knows of them.

    ``seen``    rank -> its host and process, as far as it has spoken.
    ``spoken``  number of a call -> how often this rank said something in it, until forgotten.
    ``alive``   the calls that have not ended here; ``others``  the first of them on each rank.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[int, tuple[str, int]] = {}
        self.spoken: dict[int, int] = {}
        self.alive: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self.others: dict[int, int] = {}
        self.lock = threading.Lock()  # a save that nobody waits for speaks from its own thread

    def begin(self, number: int, group: "Group") -> None:
        with self.lock:
            self.count = number
            self.alive[number] = group

    @property
    def first(self) -> int:
        """The first call that has not ended here."""
        with self.lock:
            return min(self.alive.keys(), default=self.count)


_OF_JOB: "weakref.WeakKeyDictionary[Any, _Calls]" = weakref.WeakKeyDictionary()


class Group:
    """The ranks of one call of ``op``; one alone where nobody else plays ranks of the tree.

    ``fixes``  (words of a message, the line that mends it), of which the first that fits counts:
               all ranks raise one message, and so one fix.
    """

    def __init__(
        self,
        op: str,
        timeout: float,
        alone: bool = False,
        fixes: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.op = op
        self.timeout = timeout
        self.fixes = fixes
        real = not alone and dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if real else (0, 1)
        self.beats: dict[int, bytes] = {}
        self.said = time.monotonic()
        self.given_up = ""
        if self.world > 1:
            self.store = job_store()
            self.calls = _OF_JOB.setdefault(dist.group.WORLD, _Calls())
            number = self.calls.count + 1
            while self.store.check([f"{_WHERE}/{number}/gave up"]):  # a call that only some made
                number += 1
            self.number, self.where = number, f"{_WHERE}/{number}"
            self.calls.begin(number, self)
            self._forget()

    def error(self, message: str, cause: BaseException | None = None, **operands: object) -> Any:
        """Make the error that every rank raises."""
        own = getattr(cause, "fix", "")
        fix = next((line for words, line in self.fixes if words in message), own)
        return CheckpointError(message, op=self.op, operands=operands, fix=fix)

    def progress(self) -> None:
        """Say, now and then, that this rank is at work."""
        now = time.monotonic()
        if self.world > 1 and now - self.said > min(1.0, self.timeout / 4):
            self.said = now
            self.store.set(f"{self.where}/at work/{self.rank}", repr(now))

    def agree(
        self,
        phase: str,
        value: Any = None,
        error: BaseException | None = None,
        decide: Callable[[list[Any]], Any] = lambda values: None,
    ) -> Any:
        """Return what rank 0's decide makes of all ranks' values.

        Raises: CheckpointError on every rank where one came with an ``error``, or deciding failed.
        """
        if self.world == 1:
            if error is None:
                try:
                    return decide([value])
                except Exception as e:
                    error = e
            raise self.error(_text(error), error) from error
        at = self.calls.spoken[self.number] = self.calls.spoken.get(self.number, 0) + 1
        where = f"{self.where}/{at}"
        word = {"value": value, "error": _text(error), "at": [socket.gethostname(), os.getpid()]}
        word |= {"doing": [self.op, phase], "first": self.calls.first}
        if self.rank:
            self.store.set(f"{where}/{self.rank}", json.dumps(word))
            told = self._hear(f"{where}/all", 0, phase)
        else:
            words = [word, *(self._hear(f"{where}/{r}", r, phase) for r in self._rest)]
            told = {**word, "answer": None, "error": ""}
            failed = next(((r, w["error"]) for r, w in enumerate(words) if w["error"]), None)
            odd = next(
                ((r, *w["doing"]) for r, w in enumerate(words) if w["doing"] != word["doing"]), None
            )
            if odd is not None:
                told["error"] = (
                    f"rank {odd[0]} is in {odd[1]} ({odd[2]!r}), rank 0 in {self.op} ({phase!r})"
                )
            elif failed is not None:
                told["error"] = f"rank {failed[0]}: {failed[1]}"
            else:
                try:
                    told["answer"] = decide([w["value"] for w in words])
                except Exception as e:
                    told["error"], error = _text(e), e
            self.store.set(f"{where}/all", json.dumps(told))
        if told["error"]:
            raise self.error(told["error"], error) from error
        return told["answer"]

    @property
    def _rest(self) -> range:
        return range(1, self.world)

    def _hear(self, key: str, rank: int, phase: str) -> dict[str, Any]:
        """Wait for what ``rank`` says.

        Raises: CheckpointError when it has ended or stays silent.
        """
        look, began = 0.0, time.monotonic()
        heard = began
        while not self.store.check([key]):
            now = time.monotonic()
            if now > look:
                look = now + 0.1
                self.progress()
                if (beat := self._beat(rank)) != self.beats.get(rank):
                    self.beats[rank], heard = beat, now
                if self.store.check([f"{self.where}/gave up"]):
                    raise self.give_up("")
                host, pid = self.calls.seen.get(rank, ("", 0))
                if host == socket.gethostname() and not _runs(pid) and not self.store.check([key]):
                    raise self.give_up(f"rank {rank} ended during {phase!r}")
                if now - heard > self.timeout:
                    raise self.give_up(
                        f"rank {rank} said nothing during {phase!r} for {self.timeout:g} s"
                    )
            time.sleep(min(max(0.0005, 0.05 * (now - began)), 0.01))
        word = json.loads(self.store.get(key))
        self.calls.seen[rank] = (word["at"][0], word["at"][1])
        self.calls.others[rank] = word["first"]
        return word

    def _beat(self, rank: int) -> bytes:
        key = f"{self.where}/at work/{rank}"
        return self.store.get(key) if self.store.check([key]) else b""

    def give_up(self, message: str) -> CheckpointError:
        """Leave the call; whoever waits in it, or comes later, leaves with the same words."""
        if self.world == 1:
            return self.error(message)
        text = self.store.compare_set(f"{self.where}/gave up", "", message).decode()
        self.given_up = text
        return self.error(text)

    def _forget(self) -> None:
        """Drop what this rank said in calls that have ended, and nobody will ask for."""
        others = self.calls.others.values() if self.rank == 0 else ()
        until = min([self.number - 2, self.calls.first, *others])
        keys = [str(self.rank), *(["all"] if self.rank == 0 else [])]
        for number in [n for n in self.calls.spoken if n < until]:
            said = [
                f"{at + 1}/{key}" for at in range(self.calls.spoken.pop(number)) for key in keys
            ]
            for key in (*said, f"at work/{self.rank}"):
                with contextlib.suppress(RuntimeError):
                    self.store.delete_key(f"{_WHERE}/{number}/{key}")


_WHERE = "shardlib/checkpoint"


def _runs(pid: int) -> bool:
    """Say whether a process of this host is there, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return getattr(error, "message", "") or said
