"""Agreement of all ranks through the job's store: all get one answer, or all raise the same error.

No collective is posted, so a rank that fails, leaves or never comes delays the others by at most
``timeout``.  Every rank stores its value; rank 0 reads them, decides, and stores the answer.  A
rank that is still at work stores a sign of life from time to time (``progress``); only silence
counts.
"""

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from shardlib.checkpoint.folder import SILENT
from shardlib.errors import CheckpointError, RankFailed
from shardlib.mesh import join_job
from shardlib.optional import optional_text


def first_odd(values: Sequence[object]) -> int | None:
    """Return the first rank whose value is not rank 0's, or None.

    >>> first_odd(["a", "a", "b"])
    2
    """
    return next((r for r, v in enumerate(values) if v != values[0]), None)


def refuse_odd(values: Sequence[object], what: str, ranks: Sequence[int] = ()) -> None:
    """Refuse a rank whose value is not the first one's: ``what``  the two of them do then.

    ``ranks``  those that have the values, unless all do.
    Raises: ValueError.
    """
    odd = first_odd(values)
    if odd is not None:
        one, other = (ranks[i] if ranks else i for i in (0, odd))
        raise ValueError(f"rank {other} and rank {one} {what}")


class _Calls:
    """Bookkeeping of one job's calls, from this rank's messages and those it has received.

    ``spoken``  number of a call -> count of messages of this rank in it, until deleted.
    ``alive``   the calls that have not ended here; ``others``  the first of them on each rank.
    """

    def __init__(self) -> None:
        self.count = 0
        self.spoken: dict[int, int] = {}
        self.alive: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self.others: dict[int, int] = {}
        # a save in the background runs in its own thread
        self.lock = threading.Lock()

    @property
    def first(self) -> int:
        """The first call that has not ended here."""
        with self.lock:
            return min(self.alive.keys(), default=self.count)


_OF_JOB: "weakref.WeakKeyDictionary[Any, _Calls]" = weakref.WeakKeyDictionary()


class Phase:
    """This rank's value in a phase of a call, and after it the answer of all."""

    value: Any = None
    answer: Any = None


class Group:
    """The ranks of one call of ``op``; a single one if this process holds all ranks of the tree.

    ``timeout``  seconds of silence after which a rank counts as lost; the mesh's if None.
    ``call``  of the user, open: the fix of many messages is one more argument.
    ``fixes``  (words of a message, fix).  Of all, the first match counts: all ranks raise the same
               message, and so need the same fix.
    """

    def __init__(
        self,
        op: str,
        timeout: float | None,
        alone: bool = False,
        call: str = "",
        fixes: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.op = op
        self.fixes = [*((words, f"{call}, {more})") for words, more in _MORE if call), *fixes]
        # of the user's code, where a background thread has no frame of it
        self.line = ""
        self.said = time.monotonic()
        self.given_up = ""
        self.rank, self.world = 0, 1
        self.timeout = SILENT
        real = not alone and dist.is_available() and dist.is_initialized()
        if real and (job := join_job()) is not None:
            # None: no other process, or no way to it
            self.rank, self.world = job.rank, job.world
            self.timeout = job.seconds
            self.job, self.store = job, job.store
            self.calls = _OF_JOB.setdefault(dist.group.WORLD, _Calls())
            number = self.calls.count + 1
            while self.store.check(f"{_WHERE}/{number}/gave up"):
                # a call that not all ranks made
                number += 1
            self.number, self.where = number, f"{_WHERE}/{number}"
            with self.calls.lock:
                self.calls.count = number
                self.calls.alive[number] = self
            self._forget()
        if timeout is not None:
            self.timeout = timeout

    def error(
        self, message: str, cause: BaseException | None = None, own: str = ""
    ) -> CheckpointError:
        """Build the error that every rank raises.

        ``own``  the fix of the error that another rank passed.
        """
        own = own or getattr(cause, "fix", "")
        fix = next((line for words, line in self.fixes if words in message), own)
        return CheckpointError(message, op=self.op, fix=fix, line=self.line)

    def progress(self) -> None:
        """Store a sign of life of this rank, from time to time."""
        now = time.monotonic()
        if now - self.said > min(1.0, self.timeout / 4):
            self.said = now
            if self.world == 1:
                return
            with contextlib.suppress(RankFailed):
                self.store.set(f"{self.where}/at work/{self.rank}", repr(now))

    def agree(
        self,
        phase: str,
        value: Any = None,
        error: BaseException | None = None,
        decide: Callable[[list[Any]], Any] = lambda values: None,
    ) -> Any:
        """Return rank 0's ``decide`` of all ranks' values, on every rank.

        Raises: CheckpointError on every rank if one passed an ``error``, or ``decide`` failed.
        """
        if self.world == 1:
            if error is None:
                try:
                    return decide([value])
                except Exception as e:
                    error = e
            raise self.error(_text(error), error) from error
        try:
            return self._agree(phase, value, error, decide)
        except RankFailed as e:
            raise self.give_up(e.message) from e

    @contextlib.contextmanager
    def phase(
        self, name: str, decide: Callable[[list[Any]], Any] = lambda values: None
    ) -> Iterator["Phase"]:
        """Agree at the end of the ``with`` that no rank has raised an error in it.

        All ranks' values are then decided on, as in ``agree``.
        """
        error, phase = None, Phase()
        try:
            yield phase
        except Exception as e:
            error = e
        phase.answer = self.agree(name, phase.value, error, decide)

    def _agree(
        self,
        phase: str,
        value: Any,
        error: BaseException | None,
        decide: Callable[[list[Any]], Any],
    ) -> Any:
        at = self.calls.spoken[self.number] = self.calls.spoken.get(self.number, 0) + 1
        where = f"{self.where}/{at}"
        word = {"value": value, "error": _text(error), "fix": getattr(error, "fix", "")}
        word |= {"doing": [self.op, phase], "first": self.calls.first}
        if self.rank:
            self.store.set(f"{where}/{self.rank}", json.dumps(word))
            told = self._hear(f"{where}/all", 0, phase)
        else:
            words = [word, *(self._hear(f"{where}/{r}", r, phase) for r in range(1, self.world))]
            wrong, fix = self._failure(words, phase)
            told = {**word, "answer": None, "error": wrong, "fix": fix}
            if not wrong:
                try:
                    told["answer"] = decide([w["value"] for w in words])
                except Exception as e:
                    told["error"], error = _text(e), e
            self.store.set(f"{where}/all", json.dumps(told))
        if told["error"]:
            raise self.error(told["error"], error, told["fix"]) from error
        return told["answer"]

    def _failure(self, words: list[dict[str, Any]], phase: str) -> tuple[str, str]:
        """Return the error that the messages of all ranks make, and its fix; empty without one."""
        # ranks that are in different calls would wait for each other
        odd = first_odd([w["doing"] for w in words])
        if odd is not None:
            op, other = words[odd]["doing"]
            return f"rank {odd} is in {op} ({other!r}), rank 0 in {self.op} ({phase!r})", ""
        for rank, word in enumerate(words):
            if word["error"]:
                return f"rank {rank}: {word['error']}", word["fix"]
        return "", ""

    def _hear(self, key: str, rank: int, phase: str) -> dict[str, Any]:
        """Wait for the message of ``rank``.

        Raises: CheckpointError if it stays silent; RankFailed if it has ended.  A rank that raised
        elsewhere still writes the save that it has begun.
        """

        def look() -> bytes | None:
            self.progress()
            if self.store.check(f"{self.where}/gave up"):
                raise self.give_up("")
            return self.store.get(f"{self.where}/at work/{rank}")

        doing = f"{self.op} ({phase!r})"
        if not self.job.wait(key, lambda: [rank], doing, self.timeout, look, through=True):
            raise self.give_up(f"rank {rank} said nothing during {phase!r} for {self.timeout:g} s")
        word = json.loads(self.store.get(key) or "")
        self.calls.others[rank] = word["first"]
        return word

    def give_up(self, message: str) -> CheckpointError:
        """Leave the call; every rank that waits in it, or comes later, raises the same message."""
        if self.world == 1:
            return self.error(message)
        with contextlib.suppress(RankFailed):  # the store is gone
            # the first message wins, so that all raise the same
            message = self.store.compare_set(f"{self.where}/gave up", "", message)
        self.given_up = message
        return self.error(message)

    def _forget(self) -> None:
        """Delete this rank's messages of calls that have ended and that no rank will read."""
        until = min([self.number - 2, self.calls.first, *self.calls.others.values()])
        keys = [str(self.rank)]
        if self.rank == 0:
            keys.append("all")
        for number in [n for n in self.calls.spoken if n < until]:
            said = [
                f"{at + 1}/{key}" for at in range(self.calls.spoken.pop(number)) for key in keys
            ]
            for key in (*said, f"at work/{self.rank}"):
                self.store.delete(f"{_WHERE}/{number}/{key}")


_WHERE = "shardlib/checkpoint"

_MORE = [
    ("(missing='keep' leaves them), and", "missing='keep', extra='skip'"),
    ("(missing='init' draws them), and", "missing='init', extra='skip'"),
    ("(missing='keep'", "missing='keep'"),
    ("(missing='init'", "missing='init'"),
    ("(extra='skip'", "extra='skip'"),
    ("cast=True", "cast=True"),
    ("does not divide", "pad=True"),
    ("overwrite=False", "overwrite=True"),
    ("said nothing", "timeout=1000.0"),
    ("nothing was written for", "timeout=1000.0"),
]
"""Words of a message, and the argument that its call lacked."""


def _text(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + optional_text(": {}", error.filename)
    said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    return getattr(error, "message", "") or said
