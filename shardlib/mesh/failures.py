"""What the ranks of a job learn of each other when one of them fails.

Every rank keeps its last operations in ``RECENT``.  A transfer that fails, because its peer is gone
or the timeout has passed, calls the roll through the job's store: each rank answers where it
stands, from a thread of its own, so also one that computes or sleeps.  From the answers, and from
those that are missing, all ranks draw one first cause (the first that is said holds), and raise
``RankFailed`` with it.  Who waits in a transfer at that time is released.

A rank that raises says so itself before its process ends, and one whose program ends says that it
left.  Nothing here costs a transfer: while operations go on, a rank only keeps their names.
"""

import atexit
import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from shardlib._compat import job_store
from shardlib.errors import RankFailed, user_line

__all__ = ["KEPT", "RECENT", "Job", "current_job", "join_job", "lost", "number", "spelled"]

KEPT = 200
"""How many operations a rank remembers."""

RECENT: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
"""(number, collective, axes, shape, dtype) of the last operations, and under check its line."""

number = itertools.count(1).__next__

_TRANSFERS = os.path.join("shardlib", "collectives", "")
"""Part of the paths of the files in which a rank waits for a transfer."""

_TICK = 0.5  # seconds between two looks of the thread that answers the roll
_GRACE = 3.0  # how long the roll waits for an answer


def spelled(entry: Sequence[Any]) -> str:
    """Write an operation in words.

    >>> import torch
    >>> spelled((12, "psum", ("x",), torch.Size([4, 2]), torch.float32))
    "psum over 'x' of float32[4, 2], operation 12"
    """
    n, name, axes, shape, dtype, *line = entry
    over = axes[0] if len(axes) == 1 else tuple(axes)
    text = (
        f"{name} over {over!r} of {str(dtype).removeprefix('torch.')}{list(shape)}, operation {n}"
    )
    return f"{text}, at {line[0]}" if line and line[0] else text


@dataclass(frozen=True)
class _Process:
    """A rank's process, as another on its host finds it."""

    host: str
    pid: int
    born: str

    @staticmethod
    def own() -> "_Process":
        return _Process(_host(), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> str:
        """Return ``gone``, ``stopped`` or ``runs``; empty where it is on another host."""
        if self.host != _host():
            return ""
        state, born = _stat(self.pid)
        if self.born and (not born or born != self.born):
            return "gone"
        if not self.born:  # no /proc on this system
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return "gone"
            except PermissionError:
                return "runs"
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "runs")


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; empty where they cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


class Job:
    """The processes that met through one store, seen from one of them."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store = dist.PrefixStore("shardlib/job", store)
        self.rank, self.world, self.pid = rank, world, os.getpid()
        self.meshes: weakref.WeakSet[Any] = weakref.WeakSet()
        self.release: Callable[[Any], None] = lambda mesh: None  # filled by the back end
        # how often each group has compared; in check mode, what was called last on sharded tensors
        self.turns: dict[str, int] = {}
        self.calls: deque[tuple[int, str, str]] = deque(maxlen=KEPT)
        self.members: dict[tuple[str, ...], tuple[int, ...]] = {}  # of each group of axes; likewise
        self.failed = self.wrote = False
        self._known: dict[int, _Process] = {}
        self._ended = threading.Event()
        self._main = threading.main_thread()
        mine = _Process.own()
        self._set(f"process/{rank}", [mine.host, mine.pid, mine.born])
        self.name = self.store.compare_set("name", "", uuid.uuid4().hex[:12]).decode()
        self._watcher = threading.Thread(target=self._watch, name="shardlib roll", daemon=True)
        self._watcher.start()

    @property
    def folder(self) -> Path:
        """Where the last operations are written when the job fails."""
        given = os.environ.get("SHARDLIB_TRACES")
        return Path(given or Path(tempfile.gettempdir()) / f"shardlib-{self.name}")

    # -------------------------------------------------------- what a rank says

    def report(self, what: str) -> str:
        """Report this rank as the first cause; return the cause that was reported first."""
        return self.report_cause(f"rank {self.rank} {what}")

    def report_cause(self, cause: str) -> str:
        """Report a cause; return the one that was reported first, which holds."""
        self._set(f"calls/{self.rank}", list(self.calls))
        self.failed = True
        try:
            held = self.store.compare_set("first", "", cause).decode()
            self.store.set("roll", "called")
        except RuntimeError:
            return f"{cause}; the store of the job is gone with rank 0"
        self.write()
        return held

    def call_roll(self) -> None:
        """Have every rank say where it stands, and what it called last."""
        self._set("roll", "called")

    def said(self, key: str) -> Any:
        """Read what a rank said; None if it has not."""
        return self._get(key)

    def raised(self, error: BaseException) -> None:
        """Report what ended this rank, unless it follows from the end of another."""
        if isinstance(error, RankFailed) or _from_transport(error) or self.failed:
            return
        line = _line_of(error.__traceback__)
        text = " ".join(str(error).split("\n")[:1])
        name = type(error).__name__
        ended = isinstance(error, SystemExit)
        what = f"left by {name}({error.code!r})" if ended else f"raised {name}: {text}"
        self.report(f"{what}, at {line}" if line else what)

    def leave(self) -> None:
        """Report that this rank's program ended, so that those waiting for it need not."""
        if os.getpid() != self.pid or self._ended.is_set():
            return
        self._ended.set()
        if threading.current_thread() is not self._watcher:
            # a thread that is in the store while the interpreter ends would abort the process
            self._watcher.join(2.0)
        last = f"after {spelled(RECENT[-1])}" if RECENT else "before any operation"
        self._set(f"left/{self.rank}", last)

    # -------------------------------------------------------- the first cause

    def lost(self, error: BaseException, doing: str, ranks: Sequence[int]) -> RankFailed:
        """Build the error for a failed transfer among ranks."""
        self.failed = True
        self._set(f"at/{self.rank}", ["waits", doing, list(ranks)])
        self._set("roll", "called")
        until = time.monotonic() + _GRACE
        while not (first := self._get("first")) and time.monotonic() < until:
            missing = [r for r in range(self.world) if not self._has(f"at/{r}")]
            if not missing or any(self._state(r) == "gone" for r in missing):
                break
            time.sleep(0.05)
        if not first:
            first = self.report_cause(self._drawn(error, ranks))
        self.write()
        return RankFailed(
            first,
            op=doing.split(" ")[0],
            operands=self._standing(doing),
            fix=f"python -m shardlib desync {self.folder}",
        )

    def _drawn(self, error: BaseException, ranks: Sequence[int]) -> str:
        """Find the first cause from what the ranks answered.

        A rank that waits in another transfer waits for the ranks of that one: they are followed
        until one is found that waits for nobody.
        """
        answers: dict[int, Any] = {}
        left = list(ranks) or list(range(self.world))
        while left:
            r = left.pop(0)
            if r in answers:
                continue
            answers[r] = self._get(f"at/{r}")
            if answers[r] and answers[r][0] == "waits":
                left += answers[r][2]
        silent = [r for r, a in answers.items() if not a]
        for r in silent:
            if gone := self._get(f"left/{r}"):
                return f"rank {r} left: its program ended {gone}"
        for word, text in (("gone", "died: its process is gone"), ("stopped", "is stopped")):
            if found := [r for r in silent if self._state(r) == word]:
                return f"rank {found[0]} {text}"
        if silent:
            return f"rank {silent[0]} does not answer"
        if away := [r for r, a in answers.items() if a[0] != "waits"]:
            return f"rank {away[0]} did not come: it is {answers[away[0]][1]}"
        doing = {r: _without_line(a[1]) for r, a in answers.items()}
        if len(set(doing.values())) < 2:
            return f"the transfer failed on every rank: {str(error).splitlines()[0]}"
        usual = max(doing.values(), key=list(doing.values()).count)
        odd = next(r for r, d in doing.items() if d != usual)
        return f"rank {odd} waits in {answers[odd][1]}, and others in {usual}"

    def _standing(self, doing: str) -> dict[str, str]:
        """Say where every rank stands, those at one place together."""
        places: dict[str, list[int]] = {}
        for r in range(self.world):
            answer = self._get(f"at/{r}") or ["", "no answer"]
            text = f"waits in {answer[1]}" if answer[0] == "waits" else answer[1]
            text = f"waits in {doing}" if r == self.rank else text
            places.setdefault(text, []).append(r)
        return {
            f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}": text for text, ranks in places.items()
        }

    def _state(self, rank: int) -> str:
        if rank not in self._known:
            found = self._get(f"process/{rank}")
            if not found:
                return ""
            self._known[rank] = _Process(*found)
        return self._known[rank].state()

    # -------------------------------------------------------- the thread that answers

    def _watch(self) -> None:
        before, answered = -1, False
        while not self._ended.wait(_TICK):
            now = RECENT[-1][0] if RECENT else 0
            moves, before = now != before, now
            if moves or not dist.is_initialized():
                continue
            try:
                if not answered and self.store.check(["roll"]):
                    answered = True
                    self._answer()
                if answered and self.store.check(["first"]):
                    self.write()
                    for mesh in list(self.meshes):
                        self.release(mesh)
                    return
            except RuntimeError:  # the store is gone, and the job with it
                return

    def _answer(self) -> None:
        self._set(f"calls/{self.rank}", list(self.calls))
        if self._has(f"at/{self.rank}"):
            return
        frame = sys._current_frames().get(self._main.ident or 0)
        line = user_line(frame) if frame is not None else ""
        if RECENT and frame is not None and _TRANSFERS in frame.f_code.co_filename:
            doing = spelled(RECENT[-1])
            doing = doing if ", at " in doing else f"{doing}, at {line}"
            answer = ["waits", doing, list(self.members.get(RECENT[-1][2], ()))]
        else:
            last = f"after {spelled(RECENT[-1])}" if RECENT else "before any operation"
            answer = ["elsewhere", f"at {line or 'its end'}, {last}"]
        self._set(f"at/{self.rank}", answer)
        self.write()

    def write(self) -> None:
        """Write the last operations of this rank, once."""
        if self.wrote:
            return
        self.wrote = True
        entries = [
            [e[0], e[1], list(e[2]), list(e[3]), str(e[4]).removeprefix("torch."), *e[5:6]]
            for e in list(RECENT)
        ]
        found = {"rank": self.rank, "world": self.world, "operations": entries}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"rank_{self.rank}.json").write_text(json.dumps(found))
        except OSError as e:  # what went wrong before is what matters
            print(f"the last operations could not be written: {e}", file=sys.stderr)

    # -------------------------------------------------------- the store

    def _set(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, json.dumps(value))
        except RuntimeError:  # its host is gone
            self.failed = True

    def _has(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except RuntimeError:
            return False

    def _get(self, key: str) -> Any:
        try:
            if not self.store.check([key]):
                return None
            text = self.store.get(key).decode()
        except RuntimeError:
            return None
        return text if key == "first" else json.loads(text)


def _without_line(doing: str) -> str:
    return doing.partition(", at ")[0]


def _ranges(ranks: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as ``0-2, 5``."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and runs[-1][-1] == r - 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _from_transport(error: BaseException) -> bool:
    """Say whether a transport says that a peer is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _OF_GLOO)


_OF_GLOO = ("gloo", "Application timeout caused pair closure", "Connection ", "Broken pipe")
"""Words of gloo's errors, which have no class of their own."""


def _line_of(trace: TracebackType | None) -> str:
    """Find the innermost line of the user's code in a traceback."""
    found = ""
    while trace is not None:
        found = user_line(trace.tb_frame, only=True, line=trace.tb_lineno) or found
        trace = trace.tb_next
    return found


# ---------------------------------------------------------------- the job of this process

_JOBS: "weakref.WeakKeyDictionary[Any, Job]" = weakref.WeakKeyDictionary()


def current_job() -> Job | None:
    """Return the job whose processes run now, once a mesh was made of them."""
    return _JOBS.get(dist.group.WORLD) if dist.is_initialized() else None


def join_job(mesh: Any) -> Job | None:
    """Join the job: answer the roll, and report when this process raises or leaves."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    job = _JOBS.get(dist.group.WORLD)
    if job is None:
        job = _JOBS[dist.group.WORLD] = Job(job_store(), dist.get_rank(), dist.get_world_size())
        _listen()
        atexit.register(job.leave)
    job.meshes.add(mesh)
    return job


def _listen() -> None:
    """Tell the others of an exception that ends this process."""
    before = sys.excepthook
    if getattr(before, "tells", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        job = current_job()
        if job is not None and job.pid == os.getpid():
            job.raised(error)
        before(kind, error, trace)

    hook.tells = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def lost(
    error: RuntimeError, entry: Sequence[Any] | None = None, ranks: Sequence[int] = ()
) -> None:
    """Raise RankFailed with the first cause if an error is the transport's.

    ``entry``  the operation, as RECENT holds it; the last one unless given.
    ``ranks``  those that take part in it.
    """
    if not _from_transport(error):
        return
    doing = spelled(entry or RECENT[-1]) if entry or RECENT else "a transfer"
    line = "" if ", at " in doing else user_line()
    doing = f"{doing}, at {line}" if line else doing
    job = current_job()
    if job is None:
        raise RankFailed(f"the transfer failed: {error}", op=doing.split(" ")[0]) from error
    raise job.lost(error, doing, ranks) from error
