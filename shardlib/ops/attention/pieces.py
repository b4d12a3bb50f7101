"""Kernel calls for two blocks of positions under a mask.

Each pair of runs is empty (skipped), full, causal, or masked; full neighbours become one call.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardlib.layouts.orders import Run
from shardlib.ops.attention.masks import Mask

__all__ = ["ScorePiece", "narrowed", "pieces"]


class ScorePiece(NamedTuple):
    """Rows q0:q1 of queries by rows k0:k1 of keys; kind: full, causal (then square) or masked."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str

    @property
    def area(self) -> int:
        """Number of scores that a kernel computes."""
        q, k = self.q1 - self.q0, self.k1 - self.k0
        return q * (q + 1) // 2 if self.kind == "causal" else q * k


_CALL = 1024  # price of one more kernel call, in scores
_TILE = 64  # rows of a masked tile, at least


@lru_cache(maxsize=4096)
def pieces(q: tuple[Run, ...], k: tuple[Run, ...], mask: Mask) -> tuple[ScorePiece, ...]:
    """List the calls for the queries at ``q`` and the keys at ``k``, in the order of the rows.

    >>> from shardlib.ops.attention.masks import Causal
    >>> pieces((Run(4, 1, 4),), (Run(0, 1, 4),), Causal())
    (ScorePiece(q0=0, q1=4, k0=0, k1=4, kind='full'),)
    >>> pieces((Run(0, 1, 2), Run(6, 1, 2)), (Run(0, 1, 2), Run(6, 1, 2)), Causal())
    (ScorePiece(q0=0, q1=4, k0=0, k1=4, kind='causal'),)
    """
    if not q or not k:
        return ()
    if q == k and len(q) > 1 and all(a.last < b.start for a, b in itertools.pairwise(q)):
        hull = Run(q[0].start, 1, q[-1].last - q[0].start + 1)
        if mask.relation(hull, hull) == (0, math.inf, True):
            n = sum(run.length for run in q)
            return (ScorePiece(0, n, 0, n, "causal"),)
    cut_q, cut_k = mask.cuts()
    found: list[ScorePiece] = []
    for q0, q_run in _cut(q, cut_q):
        for k0, k_run in _cut(k, cut_k):
            found += [
                ScorePiece(a + q0, b + q0, c + k0, d + k0, kind)
                for a, b, c, d, kind in _cell(q_run, k_run, mask)
            ]
    found = _merged(found)
    # many small calls can cost more than one masked call over their box
    if len(found) > 8:
        box = ScorePiece(min(p.q0 for p in found), max(p.q1 for p in found), min(p.k0 for p in found),
                    max(p.k1 for p in found), "masked")  # fmt: skip
        if sum(p.area + _CALL for p in found) > 1.25 * box.area:
            return (box,)
    return tuple(found)


def narrowed(runs: Sequence[Run], lo: int, hi: int) -> tuple[Run, ...]:
    """Return the runs of rows lo:hi of a block."""
    out, at = [], 0
    for run in runs:
        a, b = max(lo - at, 0), min(hi - at, run.length)
        if a < b:
            out.append(Run(run.start + run.stride * a, run.stride, b - a))
        at += run.length
    return tuple(out)


def _cut(runs: Sequence[Run], cuts: Sequence[int]) -> list[tuple[int, Run]]:
    """Cut runs before each position in ``cuts``; return the parts, each with its first row."""
    out, at = [], 0
    for run in runs:
        marks = {0, run.length}
        for c in cuts:
            if run.start < c <= run.last:
                marks.add(-(-(c - run.start) // run.stride))
        edges = sorted(marks)
        for a, b in itertools.pairwise(edges):
            out.append((at + a, Run(run.start + run.stride * a, run.stride, b - a)))
        at += run.length
    return out


def _cell(q: Run, k: Run, mask: Mask) -> list[ScorePiece]:
    lo, hi, exact = mask.relation(q, k)
    least, most = q.start - k.last, q.last - k.start
    if lo > most or hi < least:
        return []
    nq, nk = q.length, k.length
    if lo <= least and hi >= most:
        return [ScorePiece(0, nq, 0, nk, "full" if exact else "masked")]
    same = q.stride == k.stride or nq == 1 or nk == 1
    if not same:
        return [ScorePiece(0, nq, 0, nk, "masked")]
    stride = q.stride if nq > 1 else k.stride
    shift = k.start - q.start
    if exact and hi >= most:  # row - column >= down
        down = math.ceil((lo + shift) / stride)
        if down >= 0:
            return _square(down, nq, 0, nk)
        ahead = min(nk, -down)
        return [
            ScorePiece(0, nq, 0, ahead, "full"),
            *(_square(0, nq, ahead, nk) if ahead < nk else []),
        ]
    width = (min(hi, most) - max(lo, least)) // stride + 1
    tile = max(_TILE, int(width))
    out = []
    for a in range(0, nq, tile):
        b = min(nq, a + tile)
        first = max(0, a + math.ceil((-hi - shift) / stride)) if hi < most else 0
        last = min(nk, b + math.floor((-lo - shift) / stride)) if lo > least else nk
        if first < last:
            out.append(ScorePiece(a, b, first, last, "masked"))
    return out


def _square(q0: int, q1: int, k0: int, k1: int) -> list[ScorePiece]:
    """Split a causal region from (q0, k0) on: a square, and full rows below it.

    Kernels disagree on the diagonal of a block that is not square.
    """
    n = min(q1 - q0, k1 - k0)
    below = [ScorePiece(q0 + n, q1, k0, k0 + n, "full")] if q0 + n < q1 else []
    return [ScorePiece(q0, q0 + n, k0, k0 + n, "causal"), *below]


def _merged(found: list[ScorePiece]) -> list[ScorePiece]:
    """Join adjacent full pieces to one call: first along the keys, then along the queries."""
    out: list[ScorePiece] = []
    for p in found:
        if out and p.kind == "full" == out[-1].kind and out[-1][:2] == p[:2] and out[-1].k1 == p.k0:
            out[-1] = out[-1]._replace(k1=p.k1)
        else:
            out.append(p)
    rows: list[ScorePiece] = []
    for p in out:
        above = next(
            (
                i
                for i, r in enumerate(rows)
                if r.kind == p.kind == "full" and r.q1 == p.q0 and r[2:4] == p[2:4]
            ),
            -1,
        )
        if above >= 0:
            rows[above] = rows[above]._replace(q1=p.q1)
        else:
            rows.append(p)
    return rows
