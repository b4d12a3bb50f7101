"""Frames of an algorithm: the blocks that each rank sends, step by step, as text and pictures.

The algorithm runs once on simulated ranks with operands whose elements are all different, so each
transferred value identifies its block of A, B, ...; values that belong to no operand are partial
sums or results.
"""

import html
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import Trace, lead, played
from shardlib.errors import NoImplementation, ShardError, Unsupported, lettered
from shardlib.layouts import Layout3D, Layout25D, Ring
from shardlib.layouts.families import split_ways
from shardlib.mesh import Mesh, enter, leave, rank_along, scope, simulate
from shardlib.ops.attention import ring_attention
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.matmul import product
from shardlib.ops.registry import Match, pinned, why
from shardlib.placing import shard
from shardlib.seeing.canvas import INK, Picture, Pieces, Shown, canvas, colours
from shardlib.tensor import ShardedTensor, typeof

Spot = tuple[float, float]


class Sent(NamedTuple):
    """A block in transit: the rank that sends it, those that receive it, and its name.

    ``block``  "A2": rank 2's block of the first operand, or a part of it; "sum": a value that the
               collective adds up; "result": computed from operands, whole or a part of a sum.
    """

    sender: int
    receivers: tuple[int, ...]
    block: str


@dataclass(frozen=True)
class Frame:
    """Transfers of one step, of different operands or axes."""

    sent: tuple[Sent, ...]
    what: tuple[str, ...]
    bytes: Fraction

    @property
    def kinds(self) -> list[str]:
        """The operands transferred in this step; each has a colour."""
        return sorted({_kind(s) for s in self.sent})

    @property
    def operands(self) -> set[str]:
        """Their letters; of other values "sum" or "result"."""
        return {letter for s in self.sent for letter in _operands(s)}

    def __str__(self) -> str:
        lines = [f"{', '.join(self.what)}   {float(self.bytes):,.0f} B per rank"]
        for s in self.sent:
            lines.append(f"    {s.sender} -- {s.block} -> {' '.join(map(str, s.receivers))}")
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Frames(Shown):
    """The steps of one run; ``print`` them, ``save`` them as a picture, or let a notebook show it.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4):
    ...     q, k, v = (sl.shard(torch.zeros(1, 1, 8, 4), ". . s .") for _ in "qkv")
    ...     film = frames(sl.ring_attention, q, k, v)
    >>> len(film), [str(s.block) for s in film[0].sent], film.bytes == 3 * film[0].bytes
    (3, ['B0+C0', 'B1+C1', 'B2+C2', 'B3+C3'], True)
    """

    title: str
    mesh: Mesh
    frames: tuple[Frame, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int) -> Frame:
        return self.frames[i]

    @property
    def bytes(self) -> Fraction:
        """Bytes that one rank receives in all steps."""
        return sum((f.bytes for f in self.frames), Fraction(0))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces())

    __repr__ = __str__

    def pieces(self) -> Pieces:
        """Return the text in runs, each with its colour's number or None."""
        out: Pieces = [(f"{self.title}   on {self.mesh}", None)]
        for i, frame in enumerate(self.frames, 1):
            head, *rows = str(frame).splitlines()
            out.append((f"\n{i}. {head}", None))
            for row, sent in zip(rows, frame.sent, strict=True):
                before, block, after = row.partition(f" {sent.block} ")
                kind = frame.kinds.index(_kind(sent))
                out += [(f"\n{before}", None), (block, kind), (after, None)]
        if not self.frames:
            out.append(("\nnothing moves", None))
        return out

    def _heads(self) -> list[str]:
        return [f"{i}. {', '.join(frame.what)}" for i, frame in enumerate(self.frames, 1)]

    def _repr_html_(self) -> str:
        at = _positions(self.mesh)
        parts = []
        for head, frame in zip(self._heads(), self.frames, strict=True):
            moved = f"{head}<br>{float(frame.bytes):,.0f} B per rank"
            film = f"<small>{moved}</small><br>{_svg(frame, at)}"
            parts.append(f"<div style='margin:6px'>{film}</div>")
        title = html.escape(f"{self.title}   on {self.mesh}")
        body = "".join(parts) or "nothing moves"
        return f"<div>{title}<div style='display:flex;flex-wrap:wrap'>{body}</div></div>"

    def picture(self) -> Picture:
        """Draw a panel per step; needs matplotlib."""
        heads, shown = self._heads(), self.frames
        if not shown:
            heads, shown = ["nothing moves"], (Frame((), (), Fraction(0)),)
        at = _positions(self.mesh)
        wide = max(x for x, _ in at) + 1.4
        tall = max(1.0, -min(y for _, y in at) + 2 * _ABOVE)
        columns = max(1, min(len(shown), 4, round(11 / wide)))
        rows = -(-len(shown) // columns)
        size = (max(2.4, 1.0 * wide) * columns, (1.0 * tall + 0.3) * rows + 0.3)
        title = f"{self.title}   on {self.mesh}"
        figure, axes = canvas("frames", rows, columns, size, title)
        for panel in axes.flat:
            panel.set_axis_off()
        for head, frame, panel in zip(heads, shown, axes.flat, strict=False):
            _draw(panel, frame, at)
            panel.set_title(head, fontsize=7, color=INK)
        return Picture(figure, self.title)

    def save(self, file: str) -> None:
        """Write the picture; needs matplotlib.

        Raises: BadArgument for another suffix than .png, .svg and .pdf, or where a file is that no
                ``save`` wrote.

        >>> import tempfile, torch, shardlib as sl
        >>> with sl.simulate(x=2, y=2), tempfile.TemporaryDirectory() as folder:
        ...     a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
        ...     frames(torch.matmul, a, b).save(f"{folder}/summa.png")
        """
        self.picture().save(file)


def _placed(name: str, x: Tensor) -> str:
    """Write an operand placed on two axes of two ranks."""
    whole = f"sl.unshard({name})" if isinstance(x, ShardedTensor) else name
    layout = "x y" if x.ndim == 2 and not any(n % 2 for n in x.shape) else "..."
    return f"sl.shard({whole}, {layout!r})"


def frames(f: Callable[..., Any] | str | AttentionPlan, *operands: Any, **kwargs: Any) -> Frames:
    """Run ``f(*operands)`` on simulated ranks and list, by step, each block's sender and receivers.

    ``f``         a function; or the name of an algorithm, with the sizes of a mesh: it runs on
                  small operands in layouts that it takes ("matmul ring" where attention has the
                  name too); or an attention's plan.
    ``operands``  sharded tensors on a simulated mesh; only their layouts and sizes matter.  Their
                  values are replaced, in fp32 if they are narrower.  They are named A, B, C, ... in
                  this order.
    Raises: ShardError if no operand is sharded over simulated ranks; NoImplementation if an
            algorithm of this name takes no operands on this mesh.

    >>> import torch, shardlib as sl
    >>> print(sl.seeing.frames("cannon", x=2, y=2)[0])
    ppermute over x y, ppermute over x y   64 B per rank
        2 -- A2 -> 3
        3 -- A3 -> 2
        1 -- B1 -> 3
        3 -- B3 -> 1
    >>> with sl.simulate(x=2, y=2):
    ...     a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
    ...     print(sl.seeing.frames(torch.matmul, a, b)[0])
    pbroadcast over y, pbroadcast over x   16 B per rank
        0 -- A0 -> 1
        2 -- A2 -> 3
        0 -- B0 -> 2
        1 -- B1 -> 3
    """
    if isinstance(f, str):
        return _of_name(f, kwargs)
    if isinstance(f, AttentionPlan):
        return _of_plan(f)
    sharded = [x for x in operands if isinstance(x, ShardedTensor)]
    if not sharded or not lead(sharded[0].mesh):
        raise _not_simulated(operands)
    mesh = sharded[0].mesh
    camera = _Camera(mesh)
    given = [camera.marked(x) if isinstance(x, ShardedTensor) else x for x in operands]
    enter(camera, traces=(*scope().listeners.traces, camera))
    try:
        f(*given, **kwargs)
    finally:
        leave(camera)
    return Frames(getattr(f, "__name__", "f"), mesh, camera.developed())


def _not_simulated(operands: Sequence[Any]) -> ShardError:
    """Build the error for operands that are not on simulated ranks."""
    named = lettered(x for x in operands if isinstance(x, Tensor))
    fix = "sl.seeing.frames('summa', x=2, y=2)"
    if named:
        placed = ", ".join(_placed(n, x) for n, x in named.items())
        fix = f"with sl.simulate(x=2, y=2): print(sl.seeing.frames(f, {placed}))"
    types = {n: typeof(x) for n, x in named.items()}
    return ShardError("frames are taken of simulated ranks", op="frames", operands=types, fix=fix)


class _Camera(Trace):
    """A trace of every transfer that identifies the operands' elements."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.known: dict[float, str] = {}
        self.count = 0
        self.names = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        self.taken: list[tuple[str, list[Sent]]] = []

    def marked(self, x: ShardedTensor) -> ShardedTensor:
        """Return the operand with elements that occur nowhere else; replicas share theirs."""
        if not x.raw.is_floating_point():
            return x
        name = next(self.names)
        start = self.count
        self.count += x.raw.numel()
        # small: of large ones a softmax is one-hot, and its output a copy of an element
        numbers = torch.arange(start, self.count, dtype=torch.float64, device="cpu")
        raw = ((numbers + 1.5) * 2.0**-10).reshape(x.raw.shape)
        for rank, owner in enumerate(_holders(x)):
            raw[rank] = raw[owner]
            for value in raw[owner].flatten().tolist():
                self.known.setdefault(value, f"{name}{owner}")
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.becomes(raw.to(x.raw.device, wide))

    def before(
        self, name: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple
    ) -> None:
        if mesh is not self.mesh or math.prod(mesh.axes[a] for a in axes) == 1:
            return
        sent = []
        for group in _groups(mesh, axes):
            for i, to in _routes(name, len(group), params):
                block = self._named(raw[group[i]], name)
                sent.append(Sent(group[i], tuple(group[j] for j in to), block))
        self.taken.append((f"{name} over {' '.join(axes)}", sent))

    def _named(self, block: Tensor, transfer: str) -> str:
        own = "sum" if transfer in _ADDING else "result"
        found = {self.known.get(v, own) for v in block.flatten().tolist() if v} or {own}
        return own if own in found else "+".join(sorted(found))

    def developed(self) -> tuple[Frame, ...]:
        """Group transfers into steps; a step ends when one of its operands moves again."""
        moved = [e for e in self.events if e.messages]
        steps: list[Frame] = []
        for (what, sent), event in zip(self.taken, moved, strict=True):
            new = Frame(tuple(sent), (what,), event.bytes)
            before = steps[-1].operands if steps else _OWN
            if before & new.operands or (before | new.operands) & _OWN:
                steps.append(new)
            else:
                old = steps.pop()
                steps.append(Frame(old.sent + new.sent, old.what + new.what, old.bytes + new.bytes))
        return tuple(steps)


_ADDING = ("psum", "psum_scatter", "preduce", "pmean")
_OWN = {"sum", "result"}


def _operands(sent: Sent) -> set[str]:
    """Return the letters of the operands in a transfer, or "sum" or "result"."""
    return {part.rstrip("0123456789") for part in sent.block.split("+")}


def _holders(x: ShardedTensor) -> list[int]:
    """Map each rank to the first rank that holds the same block."""
    split = x.sharding.axes
    first: dict[tuple[int, ...], int] = {}
    places = [tuple(c[a] for a in split) for c in played(x.mesh)]
    return [first.setdefault(place, rank) for rank, place in enumerate(places)]


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """List the groups of ranks that differ only along ``axes``, ordered by their position there."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    rest = [a for a in mesh.names if a not in axes]
    for rank, c in enumerate(played(mesh)):
        place = rank_along(axes, c, mesh.axes)
        found.setdefault(tuple(c[a] for a in rest), []).append((place, rank))
    return [[rank for _, rank in sorted(group)] for group in found.values()]


def _routes(name: str, p: int, params: tuple) -> list[tuple[int, tuple[int, ...]]]:
    """List (sender, receivers) of a collective within a group of p ranks."""
    others = [(*range(i), *range(i + 1, p)) for i in range(p)]
    if name == "pbroadcast":
        return [(params[0], others[params[0]])]
    if name == "preduce":
        return [(i, (params[0],)) for i in others[params[0]]]
    if name == "ppermute":
        return _pairs(params[0])
    return list(enumerate(others))


def _pairs(given: Any) -> list[tuple[int, tuple[int, ...]]]:
    """List (sender, receiver) of a permutation, or of several together."""
    if given and not isinstance(given[0][0], int):
        given = itertools.chain.from_iterable(given)
    return [(sender, (to,)) for sender, to in given if sender != to]


def _positions(mesh: Mesh) -> list[Spot]:
    """Return a position for each rank: the last axis to the right, the one before down.

    Ranks along a single axis form a circle.  Planes of further axes stand side by side, each a bit
    lower than the one to its left, so that arrows between planes do not cross other ranks.
    """
    names = [a for a in mesh.names if mesh.axes[a] > 1] or list(mesh.names)
    if len(names) == 1 and mesh.size > 2:
        return _circle(mesh.size)
    *planes, down, right = ["", *names][-max(2, len(names)) :]
    out = []
    for c in played(mesh):
        depth = rank_along(planes, c, mesh.axes)
        step = mesh.axes[right] + 0.7
        out.append((c[right] + depth * step, -float(c.get(down, 0)) - 0.3 * depth))
    return out


def _circle(count: int) -> list[Spot]:
    radius = 0.5 / math.sin(math.pi / count)
    turns = [2 * math.pi * i / count for i in range(count)]
    return [(radius * (1 + math.sin(t)), radius * (math.cos(t) - 1)) for t in turns]


def _of_name(name: str, axes: dict[str, int]) -> Frames:
    """Return the frames of an algorithm on the first operands that it takes."""
    if not axes:
        raise ShardError(
            f"an algorithm runs on a mesh, and {name!r} was given none",
            op="frames",
            fix=f"sl.seeing.frames({name!r}, x=2, y=2)",
        )
    with simulate(**axes) as mesh:
        known: list[str] = []
        asked, _, own = name.rpartition(" ")
        for op, f, operands in _offers(mesh):
            if asked not in ("", op):
                continue
            verdicts = dict(why(op, *operands).verdicts)
            known += [n for n in verdicts if n not in known]
            if isinstance(verdicts.get(own), Match):
                with pinned(**{op: own}):
                    return replace(frames(f, *operands), title=name)
    nothing, none = f"{name!r} takes nothing that lies over", f"no algorithm {name!r} on"
    raise NoImplementation(
        f"{nothing if own in known else none} {' '.join(f'{a}={n}' for a, n in axes.items())}",
        op="frames",
        operands={"algorithms": ", ".join(known)},
        fix="sl.seeing.frames('summa', x=2, y=2)",
    )


def _offers(mesh: Mesh) -> Iterator[tuple[str, Callable[..., Any], tuple[ShardedTensor, ...]]]:
    """Yield operands on a mesh: sequences, matrices of known families, then every other split."""
    n, names = 2 * mesh.size, mesh.names
    rings: list[str | tuple[str, ...]] = [*names] if len(names) == 1 else [names, *names]
    for axes, schedule in itertools.product(rings, ("contiguous", "zigzag")):
        q: Any = shard(torch.zeros(1, mesh.size, n, 2, device="cpu"), Ring(axes, 2, schedule), mesh)
        yield "attention", ring_attention, (q, q, q)
    pairs: list[tuple[Any, Any]] = []
    if len(names) == 2:
        plane = f"{names[0]} {names[1]}"
        pairs.append((plane, plane))
    if len(names) == 3:
        depth, x, y = names
        deep = Layout25D(x, y, depth)
        pairs += [(Layout3D(*names).act, Layout3D(*names).weight)]
        pairs += [(deep.act, deep.weight), (deep.deep_act, deep.deep_weight)]
    ways = list(split_ways(names))
    pairs += [(f"{a} {b}", f"{c} {d}") for (a, b), (c, d) in itertools.product(ways, ways)]
    x = torch.zeros(n, n, device="cpu")
    for of_a, of_b in pairs:
        a: Any = shard(x, of_a, mesh)
        yield "matmul", product, (a, shard(x, of_b, mesh))  # type: ignore[misc]


def _of_plan(plan: AttentionPlan) -> Frames:
    """Return the frames of a planned attention, on the ranks of its ring alone."""
    case, axes = plan.case, dict(plan.case.mesh)
    length = sum(len(run.positions) for rank in case.q_runs for run in rank)
    if length > _LONGEST:
        raise Unsupported(
            f"a plan of {length} positions is not run to be drawn; one of fewer has the same steps",
            op="frames",
            operands={"plan": repr(plan)},
            fix=f"sl.seeing.frames({plan.algorithm!r}, s={case.p})",
        )
    with simulate(**{a: axes[a] for a in case.axes}):
        q = _on_ring(case.q_runs, case.axes, case.sizes.h)
        k, v = (_on_ring(case.k_runs, case.axes, case.sizes.g) for _ in "kv")
        film = frames(ring_attention, q, k, v, mask=case.mask, algorithm=plan.engine)
    return replace(film, title=repr(plan))


def _on_ring(runs: Any, axes: Sequence[str], heads: int) -> Tensor:
    orders = [[run.positions for run in rank] for rank in runs]
    rows = sum(len(run) for rank in orders for run in rank)
    ring = Ring(tuple(axes), 2, orders)
    return shard(torch.zeros(1, heads, rows, 2, device="cpu"), ring, pad=True)


_LONGEST = 4096


def _kind(sent: Sent) -> str:
    return "+".join(sorted(_operands(sent)))


class _Arrows(NamedTuple):
    """Arrows from one rank to the same receivers, with one label for all their blocks."""

    sender: int
    receivers: tuple[int, ...]
    label: str
    colour: str


def _arrows(frame: Frame) -> list[_Arrows]:
    """Join blocks with the same sender and receivers into one arrow."""
    ways: dict[tuple[int, tuple[int, ...]], list[Sent]] = {}
    for s in frame.sent:
        ways.setdefault((s.sender, s.receivers), []).append(s)
    kinds = {way: " ".join(dict.fromkeys(_kind(s) for s in some)) for way, some in ways.items()}
    # one colour per set of operands, the same in every arrow
    shades = dict(zip(sorted(set(kinds.values())), colours(len(ways)), strict=False))
    return [
        _Arrows(*way, ", ".join(dict.fromkeys(s.block for s in some)), shades[kinds[way]])
        for way, some in ways.items()
    ]


# curvature of an arrow; free space above and below the ranks
_BEND, _ABOVE = 0.18, 0.48


def _draw(panel: Any, frame: Frame, at: list[Spot]) -> None:
    for rank, (x, y) in enumerate(at):
        panel.text(
            x, y, str(rank), ha="center", va="center", fontsize=8, zorder=3, color="white",
            bbox={"boxstyle": "circle,pad=0.35", "fc": "#6b6b6b", "ec": INK, "lw": 0.8},
        )  # fmt: skip
    arrows, sides = _laid(frame, at)
    for (sender, receivers, label, colour), spot in arrows:
        for to in receivers:
            panel.annotate(
                "", at[to], at[sender], zorder=2,
                arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 11, "shrinkB": 11,
                            "lw": 1.1, "connectionstyle": f"arc3,rad={_BEND}"},
            )  # fmt: skip
        panel.text(
            *spot, label, fontsize=6.5, color="white", ha="center",
            va="center", zorder=4, bbox={"boxstyle": "round,pad=0.12", "fc": colour, "ec": "none"},
        )  # fmt: skip
    ys = [y for _, y in at]
    panel.set_xlim(*sides)
    panel.set_ylim(min(ys) - _ABOVE, max(ys) + _ABOVE)
    panel.set_aspect("equal")


def _laid(frame: Frame, at: list[Spot]) -> tuple[list[tuple[_Arrows, Spot]], tuple[float, float]]:
    """Place each label at the first position on its arrow that no rank or other label covers.

    Labels of short arrows, which have few such positions, are placed first.  Return each arrow with
    its label's place, and the left and right limits of a panel that cuts no label off.
    """
    arrows = _arrows(frame)
    out: dict[int, Spot] = {}
    # middle, half a width, half a height
    taken = [(x, y, 0.13, 0.13) for x, y in at]
    for i in sorted(range(len(arrows)), key=lambda i: _length(arrows[i], at)):
        arrow = arrows[i]
        half = 0.035 * len(arrow.label) + 0.03
        spots = _beside(arrow, at, half)
        free = [
            (x, y)
            for x, y in spots
            if not any(abs(x - u) < half + w and abs(y - v) < 0.08 + h for u, v, w, h in taken)
        ]
        out[i] = (free or spots)[0]
        taken.append((*out[i], half, 0.08))
    labels = taken[len(at) :]
    left = min([min(x for x, _ in at) - 0.7, *(x - 1.2 * w for x, _, w, _ in labels)])
    right = max([max(x for x, _ in at) + 0.7, *(x + 1.2 * w for x, _, w, _ in labels)])
    return [(arrow, out[i]) for i, arrow in enumerate(arrows)], (left, right)


def _length(arrow: _Arrows, at: list[Spot]) -> float:
    return round(math.dist(at[arrow.sender], at[arrow.receivers[0]]), 6)


def _beside(arrow: _Arrows, at: list[Spot], half: float) -> list[Spot]:
    """List positions for a label, the best first.

    These are on the first arrow, which bends to the right of its direction; if there are many
    receivers, next to the sending rank and away from the others.
    """
    (x0, y0), (x1, y1) = at[arrow.sender], at[arrow.receivers[0]]
    if len(arrow.receivers) > 2:
        away = x0 - sum(x for x, _ in at) / len(at), y0 - sum(y for _, y in at) / len(at)
        length = math.hypot(*away) or 1.0
        return [(x0 + max(0.42, 0.15 + half) * away[0] / length, y0 + 0.34 * away[1] / length)]
    out = []
    for t in (0.35, 0.5, 0.25, 0.65, 0.42, 0.58, 0.75):
        # a quadratic curve's distance from its chord at t
        aside = 2 * t * (1 - t) * _BEND
        out.append((x0 + t * (x1 - x0) + aside * (y1 - y0), y0 + t * (y1 - y0) - aside * (x1 - x0)))
    return out


def _svg(frame: Frame, at: list[Spot], scale: float = 84.0) -> str:
    """Draw one step as SVG for an HTML page."""
    arrows, (left, right) = _laid(frame, at)
    low = max(y for _, y in at) + _ABOVE
    width = (right - left) * scale
    height = (low - min(y for _, y in at) + _ABOVE) * scale

    def spot(p: tuple[float, float]) -> tuple[float, float]:
        return (p[0] - left) * scale, (low - p[1]) * scale

    out = [f"<svg width='{width:.0f}' height='{height:.0f}' xmlns='http://www.w3.org/2000/svg'>"]
    labels = []
    for (sender, receivers, label, colour), place in arrows:
        for to in receivers:
            (ax, ay), (bx, by) = at[sender], at[to]
            middle = ((ax + bx) / 2 + _BEND * (by - ay), (ay + by) / 2 - _BEND * (bx - ax))
            length = math.hypot(bx - ax, by - ay) or 1.0
            # the arrow ends at the circle
            cut = 0.19 / length
            tip = (bx + (middle[0] - bx) * 2 * cut, by + (middle[1] - by) * 2 * cut)
            (x0, y0), (xm, ym), (x1, y1) = spot(at[sender]), spot(middle), spot(tip)
            out.append(
                f"<path d='M{x0:.1f} {y0:.1f}Q{xm:.1f} {ym:.1f} {x1:.1f} {y1:.1f}' fill='none' "
                f"stroke='{colour}' stroke-width='1.6'/>"
            )
            turn = math.degrees(math.atan2(y1 - ym, x1 - xm))
            out.append(
                f"<path d='M0 0L-8 -3.5L-8 3.5Z' fill='{colour}' "
                f"transform='translate({x1:.1f} {y1:.1f})rotate({turn:.0f})'/>"
            )
        x, y = spot(place)
        half = 3.3 * len(label) + 3
        labels.append(
            f"<rect x='{x - half:.1f}' y='{y - 7:.1f}' width='{2 * half:.1f}' height='14' rx='3' "
            f"fill='{colour}'/><text x='{x:.1f}' y='{y + 3.5:.1f}' fill='white' font-size='10' "
            f"text-anchor='middle'>{html.escape(label)}</text>"
        )
    for rank, p in enumerate(at):
        x, y = spot(p)
        out.append(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='12' fill='#6b6b6b' stroke='{INK}'/>"
            f"<text x='{x:.1f}' y='{y + 4:.1f}' fill='white' font-size='11' "
            f"text-anchor='middle'>{rank}</text>"
        )
    return "".join([*out, *labels, "</svg>"])
