"""Timelines of a step: when each operation and collective ran, with its source line and module.

Inside ``with timeline()`` the dispatch of sharded tensors reports each call, the collectives report
each transfer, and hooks on the autograd graph report which operation's gradient runs.  Outside, no
hooks are registered.  On an accelerator the times are measured on its streams by events: an
operation ends when the device has computed it, and leaving the timeline waits for the device, once.

Source of the format: "Trace Event Format", which chrome://tracing and ui.perfetto.dev read.
"""

import html
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardlib._compat import after_backward, backward_now
from shardlib.collectives import Moment, Trace, first_block, lead
from shardlib.errors import BadArgument, ShardError, mesh_text, user_line
from shardlib.memory_tracker import tensors_in
from shardlib.mesh import Entered, Mesh, enter, leave, scope
from shardlib.modules.paths import Paths
from shardlib.modules.rules import stars
from shardlib.ops.registry import Match
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.explain import function_name
from shardlib.planning.explanation import size
from shardlib.seeing.canvas import (
    INK,
    MARK,
    Picture,
    canvas,
    colours,
    html_table,
    replacing,
    text_table,
)
from shardlib.tensor import ShardedTensor, typeof


@dataclass(frozen=True)
class Span:
    """An operation, a collective or a named phase of one rank.

    ``kind``    "operation", "collective" or "phase".
    ``start``   seconds since the timeline began; ``seconds``: the duration.  A transfer that was
                posted ahead lasts until it is waited for; on a stream of its own, until it ends
                there.
    ``line``    the user's line; for a gradient, the line of its operation.
    ``module``  path of the module whose forward runs.
    ``type``    of the result; for a collective, of the block that is sent.
    ``axis``    of a collective.
    ``action``  of a pipeline, if the phase is one: its place, kind, stage and micro-batch; ``type``
                is then the schedule.
    ``bytes``   received per rank; for an operation, by the collectives inside it; so ``messages``.
    """

    name: str
    kind: str
    start: float = 0.0
    seconds: float = 0.0
    rank: int = 0
    backward: bool = False
    module: str = ""
    line: str = ""
    type: str = ""
    axis: str = ""
    bytes: float = 0.0
    messages: int = 0
    algorithm: str = ""
    action: list[Any] = field(default_factory=list)

    @property
    def way(self) -> str:
        """The pass that it belongs to: "forward" or "backward"."""
        return _WAYS[self.backward]

    @property
    def end(self) -> float:
        """The second at which it ended, since the timeline began."""
        return self.start + self.seconds


@dataclass
class Timeline:
    """A record of one or more steps; ``print`` it, ``save`` it, or let a notebook show it.

    ``spans``  in the order they began.
    ``ranks``  rank -> its description.
    ``began``  seconds since the epoch, to align the timelines of several ranks.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a, b = (sl.shard(torch.ones(8, 8), "x y").requires_grad_() for _ in "ab")
    ...     with sl.seeing.timeline() as line:
    ...         (a @ b).sum().backward()
    >>> [(s.name, "back" if s.backward else s.type) for s in line.operations]
    [('matmul', 'f32[8@x, 8@y]'), ('sum', 'f32[]'), ('sum', 'back'), ('matmul', 'back')]
    >>> line.bytes == sum(s.bytes for s in line.operations)
    True
    """

    spans: list[Span] = field(default_factory=list)
    ranks: dict[int, str] = field(default_factory=dict)
    began: float = 0.0

    @property
    def operations(self) -> list[Span]:
        """The spans of operations."""
        return [s for s in self.spans if s.kind == "operation"]

    @property
    def collectives(self) -> list[Span]:
        """The spans of collectives."""
        return [s for s in self.spans if s.kind == "collective"]

    @property
    def seconds(self) -> float:
        """Seconds from the first begin to the last end."""
        return max((s.end for s in self.spans), default=0.0) - self._first

    @property
    def _first(self) -> float:
        return min((s.start for s in self.spans), default=0.0)

    @property
    def bytes(self) -> float:
        """Bytes received per rank, on average over the ranks in this timeline."""
        return sum(s.bytes for s in self.collectives) / max(1, len(self.ranks))

    def rows(self, by: str = "seconds") -> list[dict[str, Any]]:
        """Sum equal spans of all layers and ranks, largest first.

        ``by``  "seconds", "bytes" or "count".   Layers' numbers in module paths are replaced by
                ``*``.
        A row has name, kind, backward, module, line, type, axis, algorithm, count, seconds and
        bytes per rank, and its ``share`` of all the seconds of its kind.
        Raises: BadArgument for another order.
        """
        if by not in ("seconds", "bytes", "count"):
            raise BadArgument(
                f"no order {by!r}", op="rows", fix="line.rows('bytes')  # or seconds, count"
            )
        ranks = max(1, len(self.ranks))
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for s in self.spans:
            about = {n: getattr(s, n) for n in _ABOUT} | {"module": stars(s.module)}
            blank = about | {"count": 0, "seconds": 0.0, "bytes": 0}
            row = found.setdefault(tuple(about.values()), blank)
            row["count"] += 1 / ranks
            row["seconds"] += s.seconds / ranks
            row["bytes"] += s.bytes / ranks
        total = {k: sum(r["seconds"] for r in found.values() if r["kind"] == k) for k in _KINDS}
        for row in found.values():
            row["share"] = row["seconds"] / (total[row["kind"]] or 1.0)
        return sorted(found.values(), key=lambda r: -r[by])

    def table(self, by: str = "seconds", most: int = 24) -> list[list[str]]:
        """Return rows of text with their heading; those beyond ``most`` are summed in one line."""
        out = [["share", "ms", "times", "bytes", "", "what", "module", "type", "line"]]
        rows = [r for r in self.rows(by) if r["kind"] != "phase"]
        for r in rows[:most]:
            what = r["name"]
            if r["axis"]:
                what += f" over {r['axis']}"
            if r["algorithm"]:
                what += f" ({r['algorithm']})"
            times = f"{r['count']:.{int(r['count'] % 1 > 0)}f}"
            way = _WAYS[r["backward"]]
            share = f"{100 * r['share']:.0f} %" if r["kind"] == "operation" else ""
            moved = size(r["bytes"]) if r["bytes"] else ""
            ms = f"{1e3 * r['seconds']:.3f}"
            out.append([share, ms, times, moved, way, what, r["module"], r["type"], r["line"]])
        if rows[most:]:
            ms = f"{1e3 * sum(r['seconds'] for r in rows[most:]):.3f}"
            out.append(["", ms, "", "", "", f"{len(rows) - most} more", "", "", ""])
        return out

    def text(self, by: str = "seconds", columns: int | None = None) -> str:
        """Format the table in lines of ``columns`` characters: the terminal's, or 100 without one.

        Longer texts are cut and end in dots; ``table`` and ``rows`` have the full texts.
        """
        limit = shutil.get_terminal_size((100, 24)).columns if columns is None else columns
        short = {"forward": "", "backward": "back", "times": "n"}
        table = [[short.get(c, c) for c in row] for row in self.table(by)]
        return "\n".join([self._head(), *text_table(_fitted(table, limit), right=range(4))])

    def __str__(self) -> str:
        return self.text()

    def _head(self) -> str:
        ranks = max(1, len(self.ranks))
        parts = [
            f"{kind}s {1e3 * sum(s.seconds for s in self.spans if s.kind == kind) / ranks:.3f} ms"
            for kind in ("operation", "collective")
        ]
        where = ", ".join(self.ranks.values()) if ranks < 4 else f"{ranks} ranks"
        return (
            f"{1e3 * self.seconds:.3f} ms on {where or 'no mesh'}\n{', '.join(parts)}, "
            f"{size(self.bytes)} received per rank"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        above = html.escape(self._head()).replace("\n", "<br>")
        table = html_table(self.table(), "text-align:left;white-space:nowrap")
        return f"<p>{above}</p>{self._svg()}{table}"

    def _svg(self, width: float = 900.0, height: int = 18) -> str:
        """Draw the spans as bars, each with its description as a tooltip."""
        lanes, shades = self._tracks(), self._shades()
        scale, left = width / (self.seconds or 1.0), 130
        out = [
            f"<svg width='{left + width + 10:.0f}' height='{height * len(lanes) + 4}' "
            "xmlns='http://www.w3.org/2000/svg' font-size='10' fill='currentColor'>"
        ]
        for row, (label, spans) in enumerate(lanes):
            out.append(f"<text x='0' y='{height * row + 13}'>{html.escape(label)}</text>")
            for s in spans:
                said = f"{_title(s)}, {1e3 * s.seconds:.3f} ms, {s.type} {s.line}"
                if s.bytes:
                    said += f", {size(s.bytes)}"
                out.append(
                    f"<rect x='{left + (s.start - self._first) * scale:.1f}' y='{height * row + 1}' "
                    f"width='{max(0.4, s.seconds * scale):.1f}' height='{height - 3}' "
                    f"fill='{shades[_shade(s)]}'><title>{html.escape(said)}</title></rect>"
                )
        return "".join([*out, "</svg>"])

    def _shades(self) -> dict[str, str]:
        """Return a colour for each kind of bar, see ``_shade``."""
        kinds = list(dict.fromkeys(s.name for s in self.collectives))
        shades = {"forward": "#4c78a8", "backward": "#e0883c", "phase": "#8a8a8a"}
        return shades | dict(zip(kinds, colours(len(kinds), first=2), strict=True))

    # ------------------------------------------------------------ files

    def chrome(self) -> dict[str, Any]:
        """Return the trace in Chrome's format: a process per rank, a track per lane."""
        events: list[dict[str, Any]] = []
        for rank, name in sorted(self.ranks.items()):
            events.append(_meta("process_name", rank, 0, name=name))
            events.append(_meta("process_sort_index", rank, 0, sort_index=rank))
        for rank, lane, title, spans in self._lanes():
            events.append(_meta("thread_name", rank, lane, name=title))
            events.append(_meta("thread_sort_index", rank, lane, sort_index=lane))
            for s in spans:
                events.append(
                    {
                        "name": _title(s), "cat": f"{s.kind},{s.way}", "ph": "X", "pid": rank,
                        "tid": lane, "ts": 1e6 * s.start, "dur": 1e6 * s.seconds,
                        "args": asdict(s),
                    }
                )  # fmt: skip
        about = {
            "program": MARK,
            "began": self.began,
            "ranks": {str(r): n for r, n in self.ranks.items()},
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _lanes(self) -> Iterator[tuple[int, int, str, list[Span]]]:
        """Yield (rank, number, title, spans) of each track, in which spans nest or are apart."""
        for rank in sorted({*self.ranks, *(s.rank for s in self.spans)}):
            kinds = ("phase", "action", "operation", "collective")
            own: dict[str, list[Span]] = {kind: [] for kind in kinds}
            for s in self.spans:
                if s.rank == rank:
                    own["action" if s.action else s.kind].append(s)
            moving = _apart(own.pop("collective"))
            lanes = [(f"{kind}s", spans) for kind, spans in own.items() if spans]
            titles = ["collectives", *(f"collectives {i + 1}" for i in range(1, len(moving)))]
            for lane, (title, spans) in enumerate([*lanes, *zip(titles, moving, strict=False)]):
                yield rank, lane, title, spans

    def _tracks(self) -> list[tuple[str, list[Span]]]:
        """Return the tracks of all ranks, with their labels."""
        named = len(self.ranks) != 1
        return [
            (f"rank {rank}: {title}" if named else title, spans)
            for rank, _, title, spans in self._lanes()
        ]

    def save(self, file: str | Path) -> None:
        """Write the timeline: ``.json`` for ui.perfetto.dev, ``.png``, ``.svg`` or ``.pdf`` else.

        Pictures need matplotlib.
        Raises: BadArgument for another suffix, or where a file is that no ``save`` wrote.

        >>> import tempfile, torch, shardlib as sl
        >>> with sl.simulate(x=2), tempfile.TemporaryDirectory() as folder:
        ...     with sl.seeing.timeline() as line:
        ...         _ = sl.unshard(sl.shard(torch.ones(4), "x") + 1)
        ...     line.save(f"{folder}/step.json")
        ...     line.save(f"{folder}/step.png")
        ...     again = sl.seeing.Timeline.read(f"{folder}/step.json")
        >>> again.spans == line.spans
        True
        """
        if Path(file).suffix == ".json":
            with replacing(file, "line.save('{}')") as f:
                f.write(json.dumps(self.chrome()).encode())
        else:
            self.picture().save(file)

    @staticmethod
    def read(file: str | Path) -> "Timeline":
        """Read a ``.json`` file of ``save``.

        Raises: ShardError for another program's file.
        """
        text = Path(file).read_text()
        try:
            found = json.loads(text)
            about = found["otherData"]
            spans = [Span(**e["args"]) for e in found["traceEvents"] if e["ph"] == "X"]
            ranks = {int(r): n for r, n in about["ranks"].items()}
            return Timeline(sorted(spans, key=_order), ranks, about["began"])
        except (ValueError, KeyError, TypeError) as e:
            raise ShardError(
                f"{Path(file).name} is no timeline of shardlib: {e}",
                op="Timeline.read",
                fix="line.save('step.json'); line = sl.seeing.Timeline.read('step.json')",
            ) from None

    def gathered(self) -> "Timeline":
        """Merge every rank's timeline on each rank of a job; on one process, return itself.

        All ranks must call it.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return self
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self)
        return merged(found)

    def picture(self) -> Picture:
        """Draw a bar per operation and collective, a track per kind and rank; needs matplotlib."""
        shown = self._tracks() or [("nothing ran", [])]
        figure, axes = canvas("timeline", 1, 1, (9.0, 1.1 + 0.42 * len(shown)), self._head())
        from matplotlib.patches import Patch

        panel = axes[0][0]
        # between bars, to separate those of one colour
        gap = 0.0015 * 1e3 * self.seconds
        shades = self._shades()
        used: dict[str, str] = {}
        for row, (_, spans) in enumerate(shown):
            for s in spans:
                key = _shade(s)
                used[key] = shades[key]
                at, width = 1e3 * (s.start - self._first), 1e3 * s.seconds
                shown_width = max(width - gap, 0.5 * width)
                panel.barh(row, shown_width, left=at, height=0.8, color=shades[key], lw=0)
                if s.seconds > 0.012 * len(s.name) * self.seconds:
                    panel.text(
                        at + width / 2, row, s.name, ha="center", va="center", fontsize=6.5,
                        color="white", clip_on=True,
                    )  # fmt: skip
        panel.set_yticks(range(len(shown)), [label for label, _ in shown], fontsize=7)
        panel.invert_yaxis()
        panel.set_xlabel("ms", fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
        panel.spines["left"].set_visible(False)
        handles = [Patch(color=colour, label=name) for name, colour in used.items()]
        panel.legend(
            handles=handles, fontsize=7, ncols=8, labelcolor=INK, frameon=False,
            loc="lower left", bbox_to_anchor=(0, 1.0),
        )  # fmt: skip
        return Picture(figure, "timeline")


_WAYS = {False: "forward", True: "backward"}
_KINDS = ("operation", "collective", "phase")
_ABOUT = ("name", "kind", "backward", "module", "line", "type", "axis", "algorithm")
"""Fields of spans that are summed."""


def _apart(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few tracks as keep them apart."""
    tracks: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: s.start):
        free = [track for track in tracks if track[-1].end <= s.start]
        if not free:
            tracks.append([])
        (free or tracks[-1:])[0].append(s)
    return tracks


def _shade(s: Span) -> str:
    kind = "operation" if s.action else s.kind
    return {"operation": s.way, "collective": s.name}.get(kind, "phase")


def _order(s: Span) -> tuple[float, int]:
    return s.start, s.rank


def _meta(what: str, rank: int, lane: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": args}


def _title(s: Span) -> str:
    """Format a span as the title in torch.profiler and Perfetto."""
    if s.kind == "collective":
        return f"{s.name} over {s.axis}"
    title = s.name
    if s.module:
        title += f" [{s.module}]"
    if s.backward:
        title += " backward"
    return title


def _once(given: Sequence[Timeline | str | Path], read: Sequence[Timeline]) -> str:
    """Return the fix: a call with one timeline per rank."""
    if any(isinstance(t, Timeline) for t in given):
        return "sl.seeing.merged({tuple(t.ranks): t for t in timelines}.values())"
    kept: dict[int, str] = {}
    for file, t in zip(given, read, strict=True):
        if not kept.keys() & t.ranks.keys():
            kept |= dict.fromkeys(t.ranks, str(file))
    return f"sl.seeing.merged({list(dict.fromkeys(kept.values()))})"


def merged(timelines: Iterable[Timeline | str | Path]) -> Timeline:
    """Merge timelines of several ranks, or their saved files, aligned by clock.

    ``timelines``  of one job, each of different ranks.  The clocks of several machines differ by
                   the error of their time service.
    Raises: ShardError if two contain the same rank.

    >>> from shardlib.seeing.timeline import Span, Timeline
    >>> one = Timeline([Span("psum", "collective", 0.0, 1.0)], {0: "rank 0"}, began=100.0)
    >>> two = Timeline([Span("psum", "collective", 0.0, 1.0, rank=1)], {1: "rank 1"}, began=100.5)
    >>> both = merged([one, two])
    >>> [(s.rank, s.start) for s in both.spans], both.ranks
    ([(0, 0.0), (1, 0.5)], {0: 'rank 0', 1: 'rank 1'})
    """
    given = list(timelines)
    all_of_them = [t if isinstance(t, Timeline) else Timeline.read(t) for t in given]
    began = min((t.began for t in all_of_them), default=0.0)
    ranks: dict[int, str] = {}
    spans: list[Span] = []
    for t in all_of_them:
        if twice := ranks.keys() & t.ranks.keys():
            raise ShardError(
                f"two timelines hold rank {min(twice)}",
                op="merged",
                fix=_once(given, all_of_them),
            )
        ranks |= t.ranks
        late = t.began - began
        spans += [replace(s, start=s.start + late) for s in t.spans]
    return Timeline(sorted(spans, key=_order), dict(sorted(ranks.items())), began)


class timeline(Entered):
    """A context manager that records forward, backward and recomputation in backward.

    While ``torch.profiler`` runs, operations and collectives have their names there too.
    ``phase(name)``, a method of the yielded timeline, names a part of the step.

    >>> import torch, shardlib as sl; from torch import nn
    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> with sl.simulate(x=2):
    ...     apply, params = sl.parallelize(net, sl.recipes.megatron1d(net))
    ...     step = sl.value_and_grad(lambda p: apply(p, torch.ones(2, 8)).sum())
    ...     with sl.seeing.timeline() as line:
    ...         with line.phase("gradients"):
    ...             loss, grads = step(params)
    >>> [s.module for s in line.operations if s.name == "linear"]
    ['0', '2', '2', '0']
    >>> line.collectives[0].name, line.collectives[0].module, line.spans[0].name
    ('psum', '2', 'gradients')
    """

    def __enter__(self) -> "Recording":
        now = scope().listeners
        self.line = line = Recording(now.watcher)
        line.paths.__enter__()
        enter(self, traces=(*now.traces, line), watcher=line)
        return line

    def __exit__(self, *error: object) -> None:
        leave(self)
        self.line.paths.__exit__(*error)
        self.line.close()


@dataclass
class _Open:
    """A span that has begun.

    ``event``   the index of its first transfer.
    ``named``   its range in torch.profiler.
    ``moment``  on an accelerator, the moment at which the device begins it.
    """

    span: Span
    event: int
    named: record_function | None
    started: float = 0.0
    moment: Moment | None = None


class Recording(Timeline, Trace):
    """A timeline while it is recorded: a watcher of every function and of every transfer."""

    def __init__(self, outer: Any) -> None:
        Timeline.__init__(self, began=time.time())
        Trace.__init__(self)
        self.outer = outer
        self.paths = Paths()
        self.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.zero = time.perf_counter()
        self.inside: _Open | None = None  # the operation that runs
        # the one whose gradient runs
        self.back: _Open | None = None
        # id of the last backward pass
        self.passes = -1
        self.heard = True
        # the accelerator whose streams are timed
        self.device: torch.device | None = None
        # one moment on both clocks
        self.origin: tuple[float, Moment] | None = None
        # begin and end of each span, on the device
        self.moments: list[tuple[Moment, Moment] | None] = []

    def __reduce__(self) -> Any:
        return Timeline, (self.spans, self.ranks, self.began)

    @contextmanager
    def phase(self, name: str, **about: Any) -> Iterator[None]:
        """Name a part of the step, with other fields of its span: ``with line.phase("update"): ...``."""
        now = self.begin(Span(name, "phase", line=user_line(), **about))
        try:
            yield
        finally:
            self.end(now)

    # -------------------------------------------------------- spans

    def begin(self, span: Span) -> _Open:
        now = _Open(span, len(self.events), record_function(_title(span)))
        self.name_rank(scope().mesh)
        now.named.__enter__()
        now.started = time.perf_counter()
        if self.device is not None:
            now.moment = Moment(self.device)
            self.origin = self.origin or (now.started, now.moment)
        return now

    def end(self, now: _Open | None, keep: bool = True) -> None:
        """Record a span, once."""
        if now is None or now.named is None:
            return
        seconds = time.perf_counter() - now.started
        now.named.__exit__(None, None, None)
        now.named = None
        moved = self.events[now.event :]
        if now.span.kind != "operation":
            # a phase counts no transfers, a collective its own
            moved = moved[: now.span.kind == "collective"]
        if keep or moved:
            self.spans.append(replace(
                now.span, start=now.started - self.zero, seconds=seconds, rank=self.rank,
                bytes=float(sum(e.bytes for e in moved)), messages=sum(e.messages for e in moved),
            ))  # fmt: skip
            moments = None
            if self.device is not None and now.moment is not None:
                moments = now.moment, Moment(self.device)
            self.moments.append(moments)

    def close(self) -> None:
        """End open spans; anything that runs on the graph later is not recorded."""
        self.heard = False
        self.end(self.back)
        if self.origin is not None:
            torch.accelerator.synchronize(self.device)
        found = sorted(zip(self.spans, self.moments, strict=True), key=lambda one: one[0].start)
        self.spans[:] = [self._on_device(*one) for one in found]
        self.ranks = self.ranks or {self.rank: f"rank {self.rank}"}

    def _on_device(self, span: Span, moments: tuple[Moment, Moment] | None) -> Span:
        """Replace the host's times, at which work was posted, by the device's times."""
        if moments is None or self.origin is None:
            return span
        (host, first), (begin, end) = self.origin, moments
        start = host - self.zero + begin.seconds_since(first)
        return replace(span, start=start, seconds=end.seconds_since(begin))

    def name_rank(self, mesh: Mesh | None) -> None:
        if mesh is None or self.rank in self.ranks:
            return
        if mesh.device.type not in ("cpu", "meta"):
            self.device = mesh.device
        name = f"one rank of {mesh}"
        if lead(mesh):
            name = f"{mesh.size} simulated ranks ({mesh})"
        elif mesh.coord is not None:
            name = f"rank {self.rank} ({mesh_text(mesh.coord)})"
        self.ranks[self.rank] = name

    # -------------------------------------------------------- operations

    def chose(self, match: Match, product: bool = False) -> None:
        """Record the chosen algorithm."""
        if self.inside is not None:
            self.inside.span = replace(self.inside.span, algorithm=match.algorithm)
        if hasattr(self.outer, "chose"):
            self.outer.chose(match, product)

    def __call__(self, *call: Any) -> object:
        return self._heard(self.outer, *call)

    def verb(self, *call: Any) -> object:
        """Record a verb of the library."""
        return self._heard(getattr(self.outer, "verb", None), *call)

    def _heard(
        self, outer: Any, implementation: Callable[..., Any], func: Func, args: Args, kwargs: Kwargs
    ) -> object:
        run = partial(outer, implementation) if outer is not None else implementation
        if self.inside is not None or not self.heard or _runs_backward(func):
            return run(func, args, kwargs)
        backward = backward_now() != -1
        if backward:
            # recomputation: the gradient before it has ended
            self.end(self.back)
        module = self.paths.now()
        line = user_line()
        span = Span(function_name(func), "operation", 0.0, 0.0, 0, backward, module, line)
        self.inside = now = self.begin(span)
        out: object = None
        try:
            out = run(func, args, kwargs)
        finally:
            self.inside = None
            result = next((x for x in tensors_in(out) if isinstance(x, ShardedTensor)), None)
            if result is not None:
                self.name_rank(result.mesh)
                now.span = replace(now.span, type=typeof(result))
                self._hook(result, now.span)
            self.end(now, keep=result is not None)
        return out

    def _hook(self, result: ShardedTensor, span: Span) -> None:
        """Register a hook that begins a span when the gradient of an operation runs."""
        node: Any = result.raw.grad_fn if result.is_stored else None
        if node is not None and node.metadata.get(_KEY) is not self:
            node.metadata[_KEY] = self
            node.register_prehook(lambda *_: self._turn(replace(span, backward=True)))

    def _turn(self, span: Span) -> None:
        if not self.heard:
            return
        self.end(self.back)
        if (now := backward_now()) != self.passes:
            self.passes = now
            after_backward(self._through, self._through)
        self.back = self.begin(span)

    def _through(self) -> None:
        """Record the end of the backward pass."""
        self.end(self.back)
        self.back, self.passes = None, -1

    # -------------------------------------------------------- collectives

    def before(
        self, name: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple
    ) -> Callable[[], None] | None:
        if name in _STAYING or not self.heard:
            return None
        self.name_rank(mesh)
        backward = backward_now() != -1
        of = self.inside or (self.back if backward else None)
        line, module = (of.span.line, of.span.module) if of else (user_line(), self.paths.now())
        about = module, line, typeof(first_block(raw, mesh)), " ".join(axes)
        span = Span(name, "collective", 0.0, 0.0, 0, backward, *about)
        return partial(self.end, self.begin(span))


_LEAST = {5: 16, 6: 10, 7: 14, 8: 12}
"""Columns of the table that may be cut, with their least widths: what, module, type, line."""


def _fitted(table: list[list[str]], columns: int) -> list[list[str]]:
    """Fit a table into lines of ``columns``: the widest columns are cut, modules at the front.

    >>> row = ["8 %", "1.0", "1", "", "forward", "linear", "h.0.mlp.c_proj", "f32[4@(data x), 16]"]
    >>> _fitted([[*row, ""]], 50)[0][5:]
    ['linear', '..p.c_proj', 'f32[4@(data ..', '']
    """
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    over = sum(widths) + 2 * (len(widths) - 1) - columns
    for _ in range(over):
        at = max(_LEAST, key=lambda i: widths[i] - _LEAST[i])
        if widths[at] <= _LEAST[at]:
            break
        widths[at] -= 1

    def cut(text: str, i: int) -> str:
        if len(text) <= widths[i]:
            return text
        kept = widths[i] - 2
        return f"..{text[-kept:]}" if i in (6, 8) else f"{text[:kept]}.."

    return [[cut(text, i) for i, text in enumerate(row)] for row in table]


_KEY = "shardlib.timeline"
_STAYING = frozenset(["pslice", "place", "pvary"])  # nothing moves


def _runs_backward(func: Func) -> bool:
    """Return whether a function runs backward, whose operations have spans of their own."""
    return func is Tensor.backward or getattr(func, "__module__", "") == "torch.autograd"
