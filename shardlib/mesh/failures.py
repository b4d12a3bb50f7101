"""Failure detection in a job: find the first cause and raise it as RankFailed on every rank.

Every rank keeps its last operations in ``RECENT``.  When a transfer fails, because its peer is gone
or the timeout has passed, the rank calls the roll through the job's store: a thread of each rank
answers with the operation and line at which its main thread is, even if that one computes or
sleeps.  From the answers, and from those that are missing, the ranks derive one first cause (the
first one written holds), and raise ``RankFailed`` with it.  Ranks that wait in a transfer at that
time are released.

A rank that raises reports this before its process ends, and a rank whose program ends reports that
it left.  Transfers cost nothing extra: during normal operation a rank only keeps their names.
"""

import atexit
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from shardlib._compat import group_timeout, job_store
from shardlib.errors import CheckpointError, RankFailed, axes_text, user_line
from shardlib.mesh.store import Client

KEPT = 200
"""Number of operations that a rank keeps."""

RECENT: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
"""(number, collective, axes, shape, dtype) of the last operations; in check mode also the line."""

number = itertools.count(1).__next__

_TRANSFERS = os.path.join("shardlib", "collectives", "")
"""Part of the paths of the files in which a rank waits for a transfer."""

# seconds between two checks of the thread that answers the roll
_TICK = 0.5
# seconds to wait for answers to the roll, and for the store once the job has failed
_GRACE = 3.0
# seconds that a process may take to end after its sockets are closed
_GOING = 0.2
# seconds between two checks for failures while waiting for a key
_LOOK = 0.1
# neighbours before and after its own rank whose processes a rank checks
_BESIDE = 4


def spelled(entry: Sequence[Any]) -> str:
    """Write an operation as text.

    >>> import torch
    >>> spelled((12, "psum", ("x",), torch.Size([4, 2]), torch.float32))
    "psum over 'x' of float32[4, 2], operation 12"
    """
    n, name, axes, shape, dtype, line = (*entry, "")[:6]
    block = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    return _located(f"{name} over {axes_text(axes)} of {block}, operation {n}", line)


def _located(text: str, line: str) -> str:
    """Add the user's line to a text that names none; without a line return the text."""
    return text if ", at " in text or not line else f"{text}, at {line}"


def operations() -> int:
    """Return the number of this rank's last operation; 0 before the first."""
    return RECENT[-1][0] if RECENT else 0


def _last() -> str:
    """Return what this rank did last."""
    return f"after {spelled(RECENT[-1])}" if RECENT else "before any operation"


def _frame_of(thread: threading.Thread) -> FrameType | None:
    return sys._current_frames().get(thread.ident or 0)


def position(thread: threading.Thread) -> str:
    """Return the user's line at which a thread is, and what this rank did last."""
    frame = _frame_of(thread)
    line = "" if frame is None else user_line(frame)
    return f"at {line or 'its end'}, {_last()}"


@dataclass(frozen=True)
class _Process:
    """Identity of a rank's process, by which another process on its host can check it."""

    host: str
    pid: int
    born: str

    @staticmethod
    def own() -> "_Process":
        return _Process(_host(), os.getpid(), _stat(os.getpid())[1])

    def aborted(self) -> bool:
        """Check whether SIGABRT ended it; False once its parent has reaped it."""
        state, born, code = _stat(self.pid)
        ours = self.host == _host() and born == self.born
        return ours and state == "Z" and code & 0x7F == signal.SIGABRT

    def state(self) -> str:
        """Return ``gone``, ``stopped`` or ``runs``; empty if it runs on another host."""
        if self.host != _host():
            return ""
        state, born, _ = _stat(self.pid)
        if self.born and born and born != self.born:
            return "gone"
        if not born:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return "gone"
            except PermissionError:
                return "runs"
        return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped"}.get(state, "runs")


def _linked(name: str, text: str) -> str:
    """Return the text that the first process on this host stored for a job without its store."""
    folder = Path(tempfile.gettempdir(), f"shardlib-{name}")
    place, mine = folder / "first", folder / f"first.tmp-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(text)
        with suppress(FileExistsError):
            os.link(mine, place)
        mine.unlink()
        return place.read_text()
    except OSError:
        # no directory that can be written to
        return text


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def _stat(pid: int) -> tuple[str, str, int]:
    """Return state letter, start time and exit code of a process; empty if unreadable."""
    try:
        # proc(5), fields 3, 22 and 52; the name in parentheses may contain spaces
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19], int(fields[49])
    except (OSError, IndexError):
        # it has ended, or too many files are open, or there is no /proc
        return "", "", 0


ABORTED = (
    "rank {} was ended by SIGABRT: gloo ends a process that is sent more than it expects, so the "
    "fault is often of another rank, whose transfer differs; check mode says which, and its line"
)
"""Cause reported for a rank that SIGABRT ended."""

CHECK_IT = "with sl.check(): ...  # or SHARDLIB_CHECK=1 in the environment"


class JobProcesses:
    """Processes connected by one store, as one of them tracks them.

    ``seconds``  timeout of a transfer, and of any other wait of this rank for another.
    """

    def __init__(self, store: Any, rank: int, world: int, seconds: float) -> None:
        self.seconds = seconds
        self.store = Client(dist.PrefixStore("shardlib/job", store), seconds, self._without_store)
        self.rank, self.world, self.pid = rank, world, os.getpid()
        self.meshes: weakref.WeakSet[Any] = weakref.WeakSet()
        # filled by the back end
        self.release: Callable[[Any], None] = lambda mesh: None
        # number of comparisons of each group; in check mode, the last calls on sharded tensors
        self.turns: dict[str, int] = {}
        self.calls: deque[tuple[int, str, str]] = deque(maxlen=20 * KEPT)
        # ranks of each group of axes
        self.members: dict[tuple[str, ...], tuple[int, ...]] = {}
        # the first cause, once this rank has read it
        self.first = ""
        self.wrote = False
        self.failed = (
            # whether a cause is known; calls to the store then have a short timeout
            False
        )
        self._known: dict[int, _Process] = {}
        # by thread
        self._waits: dict[int, tuple[str, Callable[[], Sequence[int]]]] = {}
        self._ended = threading.Event()
        self._main = threading.main_thread()
        mine = _Process.own()
        self._set(f"process/{rank}", [mine.host, mine.pid, mine.born])
        self.name = self.store.compare_set("name", "", uuid.uuid4().hex[:12])
        self._watcher = threading.Thread(target=self._watch, name="shardlib roll", daemon=True)
        self._watcher.start()

    @property
    def folder(self) -> Path:
        """Folder to which the last operations are written when the job fails."""
        given = os.environ.get("SHARDLIB_TRACES")
        return Path(given or Path(tempfile.gettempdir()) / f"shardlib-{self.name}")

    def fail(self) -> None:
        """Record that the job has failed."""
        self.failed = True
        self.allow(self.seconds)

    # -------------------------------------------------------- reports of this rank

    def report_cause(self, cause: str) -> str:
        """Report a cause; return the one that was reported first, which holds."""
        self._set(f"calls/{self.rank}", list(self.calls))
        self.fail()
        with suppress(RankFailed):
            # without the store there is a first cause, too
            self.first = self.first or self.store.compare_set("first", "", cause)
            self.store.set("roll", "called")
        self.write()
        return self.first

    def call_roll(self) -> None:
        """Request the answers of all ranks: their current operation and their last calls."""
        self._set("roll", "called")

    def raised(self, error: BaseException) -> None:
        """Report the error that ended this rank, unless another rank's end caused it."""
        if isinstance(error, RankFailed) or _from_transport(error) or self.failed:
            return
        if isinstance(error, CheckpointError):
            # raised on every rank alike, so no rank is named
            self.report_cause(error.message)
            return
        line = _line_of(error.__traceback__)
        text = str(error).partition("\n")[0]
        name = type(error).__name__
        ended = isinstance(error, SystemExit)
        what = f"left by {name}({error.code!r})" if ended else f"raised {name}: {text}"
        if line:
            what += f", at {line}"
        self.report_cause(f"rank {self.rank} {what}")

    def leave(self) -> None:
        """Report that this rank's program ended, so that ranks waiting for it can stop."""
        if os.getpid() != self.pid or self._ended.is_set():
            return
        self._ended.set()
        if threading.current_thread() is not self._watcher:
            # a thread that is in the store while the interpreter ends would abort the process
            self._watcher.join(2.0)
        with suppress(RankFailed):
            self._set(f"left/{self.rank}", _last())
            self.store.add("ends", 1)
        until = time.monotonic() + _GRACE
        while self.failed and not self.rank and not self.store.gone and time.monotonic() < until:
            # rank 0 usually hosts the store; it waits until the others have read the first cause
            if all(self._has(f"knows/{r}") or self.ended(r) for r in range(1, self.world)):
                break
            time.sleep(0.05)

    # -------------------------------------------------------- waiting for other ranks

    def first_word(self, key: str, word: str) -> tuple[int, str]:
        """Return this call's number under ``key``, and the word of the first rank to make it."""
        n = self.turns[key] = self.turns.get(key, 0) + 1
        return n, self.store.compare_set(f"{key}/{n}", "", word)

    def meet(
        self, what: str, ranks: Sequence[int], word: Any, op: str, doing: str, fix: str = ""
    ) -> list[Any]:
        """Wait until all of ``ranks`` have made the same call; return the word of each.

        It costs three requests to the store and one per poll; the last rank to arrive sets the key
        for which the others wait.
        Raises: RankFailed by the job's clock.
        """
        n = self.turns[what] = self.turns.get(what, 0) + 1
        at, before = f"{what}/{n}", f"{what}/{n - 1}"
        self.store.set(f"{at}/{self.rank}", json.dumps(word))
        if self.store.add(f"{at}/came", 1) == len(ranks):
            self.store.set(f"{at}/all", "")

        def missing() -> list[int]:
            return [r for r in ranks if not self._has(f"{at}/{r}")]

        doing = f"{op} ({doing})"
        if not self.wait(f"{at}/all", missing, doing, self.seconds, fix=fix):
            raise self.lost(None, f"{doing}, at {user_line()}", missing(), fix)
        if n > 1:
            # a rank in this call has read all words of the last one, so they can go
            self.store.delete(f"{before}/{self.rank}")
            if self.rank == ranks[0]:
                self.store.delete(f"{before}/came", f"{before}/all")
        return [json.loads(self.store.get(f"{at}/{r}") or "null") for r in ranks]

    def wait(
        self,
        key: str,
        on: Callable[[], Sequence[int]],
        doing: str,
        seconds: float,
        look: Callable[[], Any] = lambda: None,
        through: bool = False,
        fix: str = "",
    ) -> bool:
        """Wait until ``key`` is in the store; return False if it is not after ``seconds``.

        ``on``       returns the ranks that are still missing; ``doing``  names the operation.
        ``look``     is polled; when its value changes, the clock starts again.
        ``through``  keep waiting after the job has failed, for ranks that still run.
        ``fix``      helps if ranks wait in different places.
        Raises: RankFailed with the first cause where the job has failed, or one of them has ended.
        """
        mine = threading.get_ident()
        began = heard = time.monotonic()
        looked, life, ends = began, look(), None
        self._waits[mine] = f"{doing}, at {user_line()}", on
        try:
            while not self.store.check(key):
                now = time.monotonic()
                if now > looked + _LOOK:
                    looked = now
                    if (seen := look()) != life:
                        heard, life = now, seen
                    before, ends = ends, self.store.get("ends")
                    if self._first() or ends != before:
                        self._stop_if_failed(key, on, doing, through, fix)
                    if now > heard + seconds:
                        return False
                # short waits are polled often, long ones at a twentieth of their length so far
                time.sleep(min(max(0.0005, 0.05 * (now - began)), 0.01))
            return True
        finally:
            del self._waits[mine]

    def _stop_if_failed(
        self, key: str, on: Callable[[], Sequence[int]], doing: str, through: bool, fix: str
    ) -> None:
        """Raise RankFailed if the key cannot come: the job has failed, or a rank has ended."""
        ended = next((text for r in on() if (text := self.ended(r))), "")
        failed = ended or (self._first() and not through)
        if failed and not self.store.check(key):
            raise self._error(self._first() or self.report_cause(ended), doing, fix)

    def allow(self, seconds: float) -> None:
        """Set the timeout of a wait for another rank."""
        self.seconds = seconds
        self.store.seconds = min(_GRACE, seconds) if self.failed else seconds

    def ended(self, rank: int) -> str:
        """Describe how a rank ended; empty while it is not known to have ended."""
        if said := self.said(f"left/{rank}"):
            return f"rank {rank} left: its program ended {said}"
        if self._state(rank) != "gone":
            return ""
        aborted = rank in self._known and self._known[rank].aborted()
        return ABORTED.format(rank) if aborted else f"rank {rank} died: its process is gone"

    # -------------------------------------------------------- the first cause

    def lost(
        self, error: BaseException | None, doing: str, ranks: Sequence[int], fix: str = ""
    ) -> RankFailed:
        """Return the error for a failed transfer among ranks, or for a wait without answer."""
        self.fail()
        # the watching thread may answer the roll at the same time, and its answer is the same
        self._waits[threading.get_ident()] = doing, lambda: ranks
        self._set(f"at/{self.rank}", ["waits", doing, list(ranks)])
        self.call_roll()
        until = time.monotonic() + _GRACE
        while not (first := self._first()) and time.monotonic() < until and not self.store.gone:
            missing = [r for r in range(self.world) if not self._has(f"at/{r}")]
            if not missing or any(self._state(r) == "gone" for r in missing):
                break
            time.sleep(0.01)
        if not first:
            first = self.report_cause(self._drawn(error, ranks))
        self.write()
        return self._error(first, doing, fix)

    def _error(self, first: str, doing: str, fix: str = "") -> RankFailed:
        """Return the error of this rank; ``fix`` helps if ranks wait in different places."""
        if " waits in " not in first and " did not come: " not in first:
            fix = CHECK_IT if "by SIGABRT" in first else ""
        return RankFailed(
            first,
            op=doing.split(" ")[0],
            operands=self._standing(doing),
            fix=fix or f"python -m shardlib desync {self.folder}",
        )

    def _first(self) -> str:
        """Return the first cause; empty if there is none, or the store cannot be read."""
        with suppress(RankFailed):
            # then ``_without_store`` has set it
            self.first = self.first or (self.store.get("first") or b"").decode()
        if self.first:
            self.fail()
        return self.first

    def _without_store(self) -> str:
        """Return the first cause when the store fails: that of this host's first rank to meet it.

        Rank 0, which usually hosts the store, ends soon after the store does, so what a rank finds
        depends on when it looks.  A file that is linked, once, is the ranks' one answer.
        """
        if self.first:
            return self.first
        host = self._known.get(0) if self.rank else None
        until = time.monotonic() + _GOING
        while (state := host.state() if host else "") == "runs" and time.monotonic() < until:
            # sockets close before a process is gone
            time.sleep(0.01)
        cause = {
            "gone": "rank 0 died: its process is gone, and the store of the job with it",
            "stopped": "rank 0 is stopped, and the store of the job with it",
        }.get(state, "the store of the job is gone")
        # none if the store failed before the job had one
        name = getattr(self, "name", "")
        self.first = _linked(name, cause) if name else cause
        return self.first

    def _drawn(self, error: BaseException | None, ranks: Sequence[int]) -> str:
        """Derive the first cause from the answers of the ranks.

        A rank that waits in another transfer waits for the ranks of that one: follow these links
        to a rank that does not wait.
        """
        answers = self._answers(ranks)
        if silent := [r for r, a in answers.items() if not a]:
            return self._of_silent(silent)
        if away := [r for r, a in answers.items() if a[0] != "waits"]:
            return f"rank {away[0]} did not come: it is {answers[away[0]][1]}"
        doing = {r: a[1].partition(", at ")[0] for r, a in answers.items()}
        if len(set(doing.values())) < 2:
            text = str(error).splitlines()[0] if error else "it lasted too long"
            return f"the transfer failed on every rank: {text}"
        usual = max(reversed(doing.values()), key=list(doing.values()).count)
        odd = next(r for r, d in doing.items() if d != usual)
        return f"rank {odd} waits in {answers[odd][1]}, and others in {usual}"

    def _of_silent(self, silent: list[int]) -> str:
        """Return the cause that ranks without an answer are: ended, stopped, or silent."""
        if ended := [text for r in silent if (text := self.ended(r))]:
            return min(ended, key=lambda text: " left: " not in text)
        if stopped := [r for r in silent if self._state(r) == "stopped"]:
            return f"rank {stopped[0]} is stopped"
        return f"rank {silent[0]} does not answer"

    def _answers(self, ranks: Sequence[int]) -> dict[int, Any]:
        """Return the answers of these ranks, and of those for which some of them wait."""
        answers: dict[int, Any] = {}
        left = list(ranks) or list(range(self.world))
        while left:
            r = left.pop(0)
            if r not in answers:
                answers[r] = self.said(f"at/{r}")
                if answers[r] and answers[r][0] == "waits":
                    left += answers[r][2]
        # by rank, so that a tie names the same ranks whoever draws the cause
        return dict(sorted(answers.items()))

    def _standing(self, doing: str) -> dict[str, str]:
        """Describe the position of every rank; ranks at one position share an entry."""
        places: dict[str, list[int]] = {}
        answers = {r: self.said(f"at/{r}") or ["", "no answer"] for r in range(self.world)}
        for r, (state, where, *_) in (answers | {self.rank: ["waits", doing]}).items():
            text = f"waits in {where}" if state == "waits" else where
            places.setdefault(text, []).append(r)
        return {_ranges(ranks): text for text, ranks in places.items()}

    def _state(self, rank: int) -> str:
        """Return ``gone``, ``stopped`` or ``runs``; on another host, the state reported there."""
        if rank not in self._known and (found := self.said(f"process/{rank}")):
            self._known[rank] = _Process(*found)
        state = self._known[rank].state() if rank in self._known else ""
        return state or ("gone" if self._has(f"gone/{rank}") else "")

    # -------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        before, answered = -1, False
        beside = {r for r in range(self.rank - _BESIDE, self.rank + _BESIDE + 1) if r != self.rank}
        beside = (beside | {0}) & set(range(self.world)) - {self.rank}
        while not self._ended.wait(_TICK):
            try:
                beside -= self._look_beside(beside)
                now = operations()
                moves, before = now != before, now
                if moves or not dist.is_initialized():
                    continue
                if not answered and self.store.check("roll"):
                    answered = True
                    self._answer()
                if answered and self._first():
                    self._set(f"knows/{self.rank}", True)
                    self.write()
                    for mesh in list(self.meshes):
                        self.release(mesh)
                    return
            except RankFailed:
                # without the store the job has ended
                return

    def _look_beside(self, ranks: set[int]) -> set[int]:
        """Report the processes among ``ranks`` that are gone; return them."""
        gone = {r for r in ranks if self._state(r) == "gone"}
        for r in gone:
            if not self._has(f"left/{r}") and self.store.add(f"gone/{r}", 1) == 1:
                self.store.add("ends", 1)
        return gone

    def _answer(self) -> None:
        self._set(f"calls/{self.rank}", list(self.calls))
        if self._has(f"at/{self.rank}"):
            return
        frame = _frame_of(self._main)
        if waits := self._waits.get(self._main.ident or 0):
            answer = ["waits", waits[0], list(waits[1]())]
        elif RECENT and frame is not None and _TRANSFERS in frame.f_code.co_filename:
            doing = _located(spelled(RECENT[-1]), user_line(frame))
            answer = ["waits", doing, list(self.members.get(RECENT[-1][2], ()))]
        else:
            answer = ["elsewhere", position(self._main)]
        self._set(f"at/{self.rank}", answer)
        self.write()

    def write(self) -> None:
        """Write the last operations of this rank to its file, once."""
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
            place = self.folder / f"rank_{self.rank}.json"
            if place.exists() and not place.read_bytes()[:9] == b'{"rank": ':
                raise FileExistsError(f"{place} is not replaced: shardlib did not write it")
            place.write_text(json.dumps(found))
        except OSError as e:
            # printed only: the failure that is being reported matters more
            print(f"the last operations could not be written: {e}", file=sys.stderr)

    # -------------------------------------------------------- the store

    def _set(self, key: str, value: Any) -> None:
        try:
            self.store.set(key, json.dumps(value))
        except RankFailed:
            # the host of the store is gone
            self.fail()

    def _has(self, key: str) -> bool:
        with suppress(RankFailed):
            return self.store.check(key)
        return False

    def said(self, key: str) -> Any:
        """Return the value a rank stored under ``key``; None if there is none."""
        with suppress(RankFailed):
            return json.loads(self.store.get(key) or "null")
        return None


def _ranges(ranks: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as ``ranks 0-2, 5``."""
    # in a run, a rank minus its number stays the same
    runs = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    held = [[r for _, r in run] for _, run in runs]
    text = ", ".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in held)
    return f"ranks {text}" if len(ranks) > 1 else f"rank {text}"


def _from_transport(error: BaseException) -> bool:
    """Check whether an error comes from a transport, because a peer is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _OF_GLOO)


_OF_GLOO = ("gloo", "Application timeout caused pair closure", "Connection ", "Broken pipe")
"""Words of gloo's errors, which are plain RuntimeErrors."""


def _line_of(trace: TracebackType | None) -> str:
    """Find the innermost line of the user's code in a traceback."""
    lines = [user_line(frame, only=True, line=n) for frame, n in walk_tb(trace)]
    return next(filter(None, reversed(lines)), "")


# ---------------------------------------------------------------- the job of this process

_JOBS: "weakref.WeakKeyDictionary[Any, JobProcesses]" = weakref.WeakKeyDictionary()


def current_job() -> JobProcesses | None:
    """Return the job of the current process group, if a mesh was made of it."""
    return _JOBS.get(dist.group.WORLD) if dist.is_initialized() else None


def join_job(mesh: Any = None) -> JobProcesses | None:
    """Join the job: answer the roll, and report when this process raises or ends."""
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    job = _JOBS.get(dist.group.WORLD)
    if job is None:
        seconds = group_timeout(dist.group.WORLD)
        job = JobProcesses(job_store(), dist.get_rank(), dist.get_world_size(), seconds)
        _JOBS[dist.group.WORLD] = job
        _listen()
        atexit.register(job.leave)
    if mesh is not None:
        job.meshes.add(mesh)
    return job


def _listen() -> None:
    """Report an exception that ends this process to the other ranks."""
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
    """Raise RankFailed with the first cause if an error comes from the transport.

    ``entry``  the operation, as in RECENT; the last one unless given.
    ``ranks``  the ranks that take part in it.
    """
    if not _from_transport(error):
        return
    doing = spelled(entry or RECENT[-1]) if entry or RECENT else "a transfer"
    doing = _located(doing, user_line())
    job = current_job()
    if job is None:
        raise RankFailed(f"the transfer failed: {error}", op=doing.split(" ")[0]) from error
    raise job.lost(error, doing, ranks) from error
