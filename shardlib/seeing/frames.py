"""An algorithm step by step: who sends which block to whom, as text and as a picture.

The algorithm runs once on simulated ranks.  What each transfer carries is told from its values:
the operands' elements are all different, so a block of A is known wherever it turns up; what is no
part of an operand is a sum on its way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import Trace, lead, played
from shardlib.errors import ShardError
from shardlib.mesh import Mesh, enter, leave, rank_along, scope
from shardlib.seeing.blocks import pyplot
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["Frame", "Frames", "Sent", "frames"]


class Sent(NamedTuple):
    """One block on its way: the rank that sends it, those that receive it, and what it is.

    ``block``  "A2": rank 2's block of the first operand, or a part of it; "sum": a partial sum.
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

    def __str__(self) -> str:
        lines = [f"{', '.join(self.what)}   {float(self.bytes):,.0f} B per rank"]
        for s in self.sent:
            lines.append(f"    {s.sender} -- {s.block} -> {' '.join(map(str, s.receivers))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Frames:
    """The steps of one run; ``print`` them, or ``save`` them as a picture.

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
        return sum((f.bytes for f in self.frames), Fraction(0))

    def __str__(self) -> str:
        steps = [f"{i}. {f}" for i, f in enumerate(self.frames, 1)]
        return "\n".join([f"{self.title}   on {self.mesh}", *(steps or ["nothing moves"])])

    def save(self, file: str) -> None:
        """Write a picture, one panel per step; needs matplotlib.

        >>> import tempfile, torch, shardlib as sl
        >>> with sl.simulate(x=2, y=2), tempfile.TemporaryDirectory() as folder:
        ...     a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
        ...     frames(torch.matmul, a, b).save(f"{folder}/summa.png")
        """
        plt = pyplot("frames")
        shown = self.frames or (Frame((), ("nothing moves",), Fraction(0)),)
        columns = min(4, len(shown))
        rows = -(-len(shown) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.6 * columns, 3.8 * rows), squeeze=False
        )
        at = _positions(self.mesh)
        for panel in axes.flat:
            panel.set_axis_off()
        for i, (frame, panel) in enumerate(zip(shown, axes.flat, strict=False), 1):
            _draw(panel, frame, at)
            panel.set_title(f"{i}. {', '.join(frame.what)}", fontsize=8)
        figure.suptitle(f"{self.title}   on {self.mesh}", fontsize=10)
        figure.tight_layout()
        figure.savefig(file, dpi=150, facecolor="white")
        plt.close(figure)


def frames(f: Callable[..., Any], *operands: Any, **kwargs: Any) -> Frames:
    """Run ``f(*operands)`` on simulated ranks and say, step by step, who sends which block to whom.

    ``operands``  sharded tensors on a simulated mesh; only their layouts and sizes matter, their
                  values are replaced, in fp32 where theirs are narrower.  They are called A, B,
                  C, ... in this order.
    Raises: ShardError where no operand is sharded over simulated ranks.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
    ...     print(sl.seeing.frames(torch.matmul, a, b)[0])
    pbroadcast over y, pbroadcast over x   16 B per rank
        0 -- A0 -> 1
        2 -- A2 -> 3
        0 -- B0 -> 2
        1 -- B1 -> 3
    """
    sharded = [x for x in operands if isinstance(x, ShardedTensor)]
    if not sharded or not lead(sharded[0].mesh):
        raise ShardError(
            "frames are taken of simulated ranks",
            op="frames",
            operands={"operands": ", ".join(typeof(x) for x in operands if isinstance(x, Tensor))},
            fix="with sl.simulate(x=2, y=2): print(sl.seeing.frames(f, sl.shard(x, 'x y')))",
        )
    mesh = sharded[0].mesh
    camera = _Camera(mesh)
    given = [camera.marked(x) if isinstance(x, ShardedTensor) else x for x in operands]
    enter(camera, traces=(*scope().traces, camera))
    try:
        f(*given, **kwargs)
    finally:
        leave(camera)
    return Frames(getattr(f, "__name__", "f"), mesh, camera.developed())


class _Camera(Trace):
    """Hears of every transfer, and knows the operands' elements."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.known: dict[float, str] = {}
        self.names = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        self.taken: list[tuple[str, list[Sent]]] = []

    def marked(self, x: ShardedTensor) -> ShardedTensor:
        """The operand with elements that occur nowhere else; replicas are one block."""
        if not x.raw.is_floating_point():
            return x
        name, first = next(self.names), len(self.known) + 1
        count = x.raw.numel()
        # small, so that a softmax of them is no copy of one
        values = torch.arange(first, first + count, dtype=torch.float64).add(0.5).mul(2.0**-10)
        raw = values.reshape(x.raw.shape).clone()
        holders = _holders(x)
        for rank, owner in enumerate(holders):
            raw[rank] = raw[owner]
            for value in raw[owner].flatten().tolist():
                self.known.setdefault(value, f"{name}{owner}")
        for value in values.tolist():
            self.known.setdefault(value, name)
        wide = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        return x.becomes(raw.to(x.raw.device, wide))

    def before(
        self, name: str, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], params: tuple
    ) -> None:
        if mesh is not self.mesh or math.prod(mesh.axes[a] for a in axes) == 1:
            return
        sent = []
        for group in _groups(mesh, axes):
            for i, to in _routes(name, len(group), params):
                block = self._named(raw[group[i]])
                sent.append(Sent(group[i], tuple(group[j] for j in to), block))
        self.taken.append((f"{name} over {' '.join(axes)}", sent))

    def _named(self, block: Tensor) -> str:
        found = {self.known.get(v, "sum") for v in block.flatten().tolist() if v} or {"sum"}
        return (
            found.pop() if len(found) == 1 else "sum" if "sum" in found else "+".join(sorted(found))
        )

    def developed(self) -> tuple[Frame, ...]:
        """Blocks of different operands travel in one step, until one of them moves again."""
        moved = [e for e in self.events if e.messages]
        steps: list[tuple[set[str], list[str], list[Sent], Fraction]] = []
        for (what, sent), event in zip(self.taken, moved, strict=True):
            operands = {letter for s in sent for letter in _operands(s)}
            if (
                not steps
                or operands & steps[-1][0]
                or ("sum" in operands) != ("sum" in steps[-1][0])
            ):
                steps.append((set(), [], [], Fraction(0)))
            seen, whats, blocks, total = steps.pop()
            steps.append((seen | operands, [*whats, what], [*blocks, *sent], total + event.bytes))
        return tuple(Frame(tuple(s), tuple(w), n) for _, w, s, n in steps)


def _operands(sent: Sent) -> set[str]:
    """The letters of the operands that a transfer carries, or "sum"."""
    return {part.rstrip("0123456789") for part in sent.block.split("+")}


def _holders(x: ShardedTensor) -> list[int]:
    """Rank -> the first rank that holds the same block."""
    split = x.sharding.axes
    first: dict[tuple[int, ...], int] = {}
    return [
        first.setdefault(tuple(c[a] for a in split), rank) for rank, c in enumerate(played(x.mesh))
    ]


def _groups(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Ranks that differ along ``axes`` alone, in their order there."""
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    rest = [a for a in mesh.names if a not in axes]
    for rank, c in enumerate(played(mesh)):
        place = rank_along(axes, c, mesh.axes)
        found.setdefault(tuple(c[a] for a in rest), []).append((place, rank))
    return [[rank for _, rank in sorted(group)] for group in found.values()]


def _routes(name: str, p: int, params: tuple) -> list[tuple[int, tuple[int, ...]]]:
    """(sender, receivers) within a group of p."""
    others = [tuple(j for j in range(p) if j != i) for i in range(p)]
    if name == "pbroadcast":
        return [(params[0], others[params[0]])]
    if name == "preduce":
        return [(i, (params[0],)) for i in others[params[0]]]
    if name == "ppermute":
        pairs = params[0]
        pairs = (
            pairs if pairs and isinstance(pairs[0][0], int) else [q for some in pairs for q in some]
        )
        return [(s, (d,)) for s, d in pairs if s != d]
    return [(i, others[i]) for i in range(p)]


def _positions(mesh: Mesh) -> list[tuple[float, float]]:
    """Where each rank stands: the last axis to the right, the one before down, others offset."""
    names = list(mesh.names)
    right, down = names[-1], names[-2] if len(names) > 1 else None
    out = []
    for c in played(mesh):
        depth, k = 0, 1
        for a in reversed(names[:-2]):
            depth += c[a] * k
            k *= mesh.axes[a]
        step = mesh.axes[right] + 0.7
        out.append((c[right] + depth * step, -float(c[down]) if down else 0.0))
    return out


def _draw(panel: Any, frame: Frame, at: list[tuple[float, float]]) -> None:
    kinds = sorted({"+".join(sorted(_operands(s))) for s in frame.sent})
    colours = {k: f"C{i}" for i, k in enumerate(kinds)}
    for rank, (x, y) in enumerate(at):
        panel.text(
            x, y, str(rank), ha="center", va="center", fontsize=9, zorder=3,
            bbox={"boxstyle": "round,pad=0.4", "fc": "white", "ec": "0.4"},
        )  # fmt: skip
    for s in frame.sent:
        colour = colours["+".join(sorted(_operands(s)))]
        (x0, y0), bend = at[s.sender], 0.18
        for k, to in enumerate(s.receivers):
            x1, y1 = at[to]
            panel.annotate(
                "", (x1, y1), (x0, y0), zorder=2,
                arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 12, "shrinkB": 12,
                            "connectionstyle": f"arc3,rad={bend}"},
            )  # fmt: skip
            if k == 0:  # on the arrow, which bends to the right of its way
                along, aside = 0.35, 2 * 0.35 * 0.65 * bend
                panel.text(
                    x0 + along * (x1 - x0) + aside * (y1 - y0),
                    y0 + along * (y1 - y0) - aside * (x1 - x0),
                    s.block, fontsize=7, color=colour, ha="center", va="center", zorder=4,
                    bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none"},
                )  # fmt: skip
    xs, ys = [x for x, _ in at], [y for _, y in at]
    panel.set_xlim(min(xs) - 0.6, max(xs) + 0.6)
    panel.set_ylim(min(ys) - 0.6, max(ys) + 0.6)
