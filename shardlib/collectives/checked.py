"""Check mode: before each transfer, the ranks of its axis compare what they are about to do.

A fingerprint holds the operation, its axes, shape, dtype and arguments, the line of the user's
code, and a digest of all earlier calls on sharded tensors, with their layouts, Python numbers and
plain tensors.  The first rank stores its fingerprint in the job's store; a rank whose own differs
raises, before anything is sent: one request to the store for each transfer, and no wait.  Earlier
calls count within a stage of a pipeline only, since those of other stages differ.

Under simulate one process runs all ranks, so they cannot diverge in this way; whether a block
varies along an axis is tracked there always (types.py).

Replicas are compared always, once at set-up (``verify``): each rank stores a digest of its blocks,
or compares its own with the digest of another rank that holds the same blocks, a few bytes for each
value.  The rank that finds a difference raises, and the others do at their next transfer.
"""

import json
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import backward_now
from shardlib.collectives.count import Trace
from shardlib.collectives.types import group
from shardlib.errors import MOST, RankFailed, apart, clipped, user_line
from shardlib.layouts import Layout
from shardlib.mesh import (
    POSTED,
    RECENT,
    Axes,
    Entered,
    JobProcesses,
    Mesh,
    current_job,
    enter,
    leave,
    posted,
    refuse_posted,
    scope,
    spelled,
)
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optional import optional_text


class CheckMode(Trace):
    """State of one ``with sl.check():``; called for each transfer, and for each function call."""

    def __init__(self) -> None:
        super().__init__(deque(maxlen=0))  # type: ignore[arg-type]  # it stores no events
        self.calls = 0
        self.seen = RECENT[-1][0] if RECENT else 0
        self.crc = 0
        self.made = 0
        self.texts: dict[Any, str] = {}
        # those that had a transfer since ``ended``
        self.groups: dict[str, Any] = {}

    # -------------------------------------------------------- calls

    def __call__(self, implementation: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Record a function called on sharded tensors, and run it."""
        text = [getattr(func, "__name__", str(func))]
        real = False
        for x in (*args, *kwargs.values()) if kwargs else args:
            for part in x if type(x) in (list, tuple) else (x,):
                place = getattr(part, "place", None)
                if place is not None:
                    real = real or place.mesh.device_mesh is not None
                    text.append(self._placed(part.raw.dtype, place) + _tagged(part.raw))
                elif isinstance(part, Tensor):
                    text.append(f"{part.dtype}{list(part.shape)}{digest(part)}")
                else:
                    text.append(_number(part))
        if real:
            self.note(f"{text[0]}({', '.join(text[1:])})")
        return implementation(func, args, kwargs)

    def chose(self, match: Any, product: bool = False) -> None:
        """Do nothing: an operator's choice follows from layouts, which are compared already."""

    def note(self, text: str) -> None:
        """Add a call to the fingerprint that ranks compare."""
        self.calls += 1
        self.crc = zlib.crc32(text.encode(), self.crc)
        if (job := current_job()) is not None:
            if len(text) > MOST:
                text = f"{clipped(text, MOST - 40)} of sum {zlib.crc32(text.encode()):08x}"
            job.calls.append((self.calls, text, line_of_user()))

    def tag(self, raw: Tensor) -> None:
        """Number a new value, so that the use of different values on two ranks is detected."""
        self.made += 1
        setattr(raw, _TAG, self.made)

    def _placed(self, dtype: torch.dtype, place: Any) -> str:
        key = dtype, place.layout, place.tiled
        found = self.texts.get(key)
        if found is None:
            name = str(dtype).removeprefix("torch.")
            found = self.texts[key] = f"{name}{list(place.tiled)} {place.layout}"
        return found

    # -------------------------------------------------------- transfers

    def before(self, name: str, raw: Tensor, mesh: Mesh, axes: Axes, params: tuple) -> None:
        """Compare this transfer with the one of the first rank to arrive.  Raises: RankFailed."""
        job = current_job()
        now = RECENT[-1] if RECENT else (0,)
        unseen, self.seen = max(0, now[0] - self.seen - 1), now[0]
        if job is None or mesh.device_mesh is None or name in _STAYING:
            return
        g = group(mesh, axes)
        line = line_of_user()
        RECENT[-1] = (*now[:5], line)
        doing = spelled((0, name, axes, raw.shape, raw.dtype)).removesuffix(", operation 0")
        given = "".join(f", {p!r}" for p in params if not isinstance(p, torch.dtype))
        # stages differ in what they compute and send between two meetings
        alike = not _between_stages(g)
        aside = optional_text(", with {} unchecked before it", unseen if alike else 0)
        thread = _thread()
        value = _tagged(raw) if alike else ""
        mine = f"{doing}{value}{given}{thread}{aside}, at {line or 'no line of the user'}"
        where = "-".join(map(str, g.ranks)) + "/" + ".".join(axes)
        self.groups[where] = g
        self._compare(job, where, mine)

    def ended(self) -> None:
        """Compare the calls after the last transfer of each group, as a transfer would."""
        job, line = current_job(), line_of_user()
        if job is not None and not job.failed:
            for group in self.groups:
                self._compare(job, group, f"the end of check mode, at {line or 'no user line'}")
        self.groups.clear()

    def _compare(self, job: JobProcesses, group: str, mine: str) -> None:
        """Compare what this rank is at with the first rank of a group to come here."""
        g = self.groups[group]
        state = "" if _between_stages(g) else f"{self.crc:08x}"
        n, said = job.first_word(f"check/{group}", f"{job.rank}|{state}|{mine}")
        if n > _KEEP and n % g.size == g.index:
            job.store.delete(f"check/{group}/{n - _KEEP}")
        first, their_state, theirs = said.split("|", 2)
        if (their_state, theirs) != (state, mine):
            self._refuse(job, int(first), mine, theirs, their_state != state)

    def _refuse(self, job: JobProcesses, other: int, mine: str, theirs: str, before: bool) -> None:
        mine, theirs = apart(mine, theirs)
        cause = f"rank {job.rank} is at {mine}, and rank {other} at {theirs}"
        if mine == theirs:
            cause = (
                f"ranks {job.rank} and {other} came to {mine} by different calls before the last"
            )
            cause += f" {job.calls.maxlen}"
        if before:
            cause = self._parted(job, other) or cause
        first = job.report_cause(cause)
        given = {f"rank {job.rank}": mine, f"rank {other}": theirs}
        fix = f"python -m shardlib desync {job.folder}"
        raise RankFailed(first, op="check", operands=given, fix=fix)

    def _parted(self, job: JobProcesses, other: int) -> str:
        """Find the first call in which this rank and another differ."""
        job.call_roll()
        until = time.monotonic() + 3.0
        while (theirs := job.said(f"calls/{other}")) is None and time.monotonic() < until:
            time.sleep(0.05)
        ours = {n: (text, line) for n, text, line in job.calls}
        for n, text, line in theirs or ():
            if n in ours and ours[n] != (text, line):
                own, its = apart(ours[n][0], text)
                return (
                    f"rank {job.rank} called {own} at {ours[n][1]}, and rank {other} called "
                    f"{its} at {line}"
                )
        return ""


def _between_stages(g: Any) -> bool:
    """Check whether a group has ranks of several stages of a pipeline."""
    return not g.mesh.stages.keys().isdisjoint(g.axes)


_TAG = "shardlib_made"


def _tagged(raw: Tensor) -> str:
    """Return the number of a tagged value as text; empty for others."""
    return optional_text(" (value {})", getattr(raw, _TAG, 0))


_STAYING = frozenset(["pslice", "place", "pvary"])
# entries left in the store, for ranks that are some calls behind
_KEEP = 256


def _thread() -> str:
    """Return the thread's name for a report; empty for the main thread and autograd's threads."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or backward_now() != -1:
        return ""
    return f", from thread {thread.name!r}"


def _number(x: Any) -> str:
    return repr(x) if isinstance(x, int | float | complex | str | None) else type(x).__name__


def digest(x: Tensor) -> str:
    """Summarise a tensor's values by their sum and a weighted sum of 1024 of them.

    Six digits are kept, so values that differ only by rounding usually have the same digest.
    """
    if x.is_meta or not x.numel() or x.is_sparse or x.is_quantized:
        return ""
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // 1024)]
    if x.is_complex():
        flat, whole = torch.view_as_real(flat).reshape(-1), x.detach().sum().abs()
    else:
        whole = x.detach().sum(dtype=torch.float64)
    flat = flat.to(torch.float64)
    # weights by position: a permuted tensor has another digest
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return f"{float((flat * weights.remainder(97.0)).sum()):.6g} {float(whole):.6g}"


_INSIDE: dict[str, bool] = {}
"""File name -> whether the file is the library's or torch's; looked up for every frame."""


def line_of_user() -> str:
    """Find ``user_line`` of the caller; the classification of each file is cached."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = _INSIDE.get(name)
        if inside is None:
            inside = _INSIDE[name] = not user_line(frame, only=True)
        if not inside:
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class check(Entered):
    """Compare, before each transfer, what the ranks of its axis are about to do.

    The first difference (another operation, shape, dtype, layout, number, value or line) makes the
    ranks raise RankFailed with both sides, before anything is sent.  Values that should be copies
    by their layout are compared wherever they are placed, at the end of ``shard_map`` and, with an
    optimizer's state and numbers, after each of its steps.  At its end the calls since the last
    transfer are compared, and a transfer that was posted and never waited for is refused.
    ``SHARDLIB_CHECK=1`` in the environment is the same for a whole program.  Outside, nothing is
    compared and there is no overhead.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2), sl.check():
    ...     sl.unshard(sl.shard(torch.arange(4.0), "x") * 2)
    tensor([0., 2., 4., 6.])
    """

    def __enter__(self) -> None:
        self.mode = mode = CheckMode()
        self.posted = len(POSTED)
        now = scope().listeners
        enter(self, traces=(*now.traces, mode), watcher=now.watcher or mode)

    def __exit__(self, *error: object) -> None:
        leave(self)
        if not any(error):
            refuse_posted("check", self.posted)
            self.mode.ended()


def checking() -> CheckMode | None:
    """Return the check mode in force, or None."""
    traces = scope().listeners.traces
    return next((t for t in traces if type(t) is CheckMode), None) if traces else None


_NOTHING: Mapping[str, object] = {}


def verify(
    op: str,
    mesh: Mesh,
    values: Mapping[str, tuple[Tensor, Layout]],
    fix: str,
    *,
    said: Mapping[str, object] = _NOTHING,
) -> None:
    """Compare blocks with those of the ranks to which a layout gives the same ones.

    ``values``  name -> (this rank's block, its layout).
    ``said``    name -> a number or string that must be the same on every rank.
    Runs once for each line that calls ``op``; every time in check mode.
    Raises: RankFailed with the first name that differs.
    """
    job = _job_of(mesh)
    if job is None or mesh.coord is None:
        return
    always, line = checking() is not None, line_of_user()
    for copied, names in _groups(mesh, values, said).items():
        apart = {a: mesh.coord[a] for a in mesh.names if a not in copied}
        kinds = [
            (n, str(layout), raw.shape, raw.dtype)
            for n, (raw, layout) in values.items()
            if n in names
        ]
        key = f"alike/{mesh.key}/{apart}/{op} {line} {zlib.crc32(repr(kinds).encode()):08x}"
        n = job.turns[key] = job.turns.get(key, 0) + 1
        if n > 1 and not always:
            continue
        if n > _KEEP_COPIES:
            job.store.delete(f"{key}/{n - _KEEP_COPIES}")
        mine = [digest(values[n][0]) if n in values else repr(said[n]) for n in names]
        first = job.store.compare_set(f"{key}/{n}", "", json.dumps([job.rank, mine]))
        other, theirs = json.loads(first)
        if mine != theirs:
            raise _differs(op, mesh, job, names, (mine, theirs), other, fix)


def _job_of(mesh: Mesh) -> JobProcesses | None:
    """Return the job of a mesh of several real ranks of which this process is one, or None."""
    alone = mesh.device_mesh is None or mesh.coord is None or mesh.size == 1
    return None if alone else current_job()


def _groups(
    mesh: Mesh, values: Mapping[str, tuple[Tensor, Layout]], said: Mapping[str, object]
) -> dict[Axes, list[str]]:
    """Group the names of values, and of what is said, by the axes along which they are copies."""
    groups: dict[Axes, list[str]] = {}
    if said:
        groups[alike(mesh, Layout(()))] = list(said)
    for name, (raw, layout) in values.items():
        copied = alike(mesh, layout)
        if copied and not raw.is_meta:
            groups.setdefault(copied, []).append(name)
    return groups


# entries left in the store, for ranks that are some calls behind
_KEEP_COPIES = 16


def agreed(what: str, mesh: Mesh, mine: Sequence[int]) -> tuple[int, ...] | None:
    """Return the numbers of the first rank to call, on every rank of the mesh, without waiting.

    ``what``  names them; the n-th call with one name is matched with the n-th on every rank.
    None if no store connects the ranks.
    """
    if mesh.device_mesh is None or mesh.coord is None or mesh.size == 1:
        return tuple(mine)
    job = current_job()
    if job is None:
        return None
    _, said = job.first_word(f"agreed/{mesh.key}/{what}", json.dumps(list(mine)))
    return tuple(json.loads(said))


def alike(mesh: Mesh, layout: Layout) -> Axes:
    """List the axes of more than one rank along which a layout gives every rank the same block."""
    return tuple([a for a in mesh.names if mesh.axes[a] > 1 and a not in layout.named])


def _differs(
    op: str,
    mesh: Mesh,
    job: JobProcesses,
    names: Sequence[str],
    sides: tuple[Sequence[str], Sequence[str]],
    other: int,
    fix: str,
) -> RankFailed:
    mine, theirs = sides
    wrong = [(n, a, b) for n, a, b in zip(names, mine, theirs, strict=False) if a != b]
    wrong = wrong or [(op, f"{len(mine)} values", f"{len(theirs)}")]
    name, ours, other_side = wrong[0]
    more = optional_text(" and of {} more", len(wrong) - 1)
    cause = (
        f"rank {job.rank} and rank {other} hold different values of {name}{more}, which the "
        f"layout says are the same; {op} was called at {line_of_user()}"
    )
    told = {f"rank {job.rank}": f"{name} {ours}", f"rank {other}": f"{name} {other_side}"}
    return RankFailed(job.report_cause(cause), op=op, operands=told, mesh=mesh, fix=fix)


if posted.CHECKED:
    check().__enter__()
