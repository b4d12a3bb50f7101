"""Atoms: factors and parts of a dimension, shared by all dimensions that are tied together.

A dimension of a tensor is a row of atoms, major first.  If an operator aligns two dimensions, their
rows are joined, atom by atom; where one is finer than the other, the coarser atom is split into
factors.  Slicing splits an atom into parts.  Atoms are shared, so a change applies to every row
that holds them.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardlib.layouts.dims import Apart, leading


@dataclass(eq=False, repr=False, slots=True)
class Atom:
    """Factor of a dimension, which is elementary or made of other atoms.

    ``factors``: the atom is their product, major first; ``parts``: it is their concatenation.

    ``seen``  uses of it: "normed"; "embedded"; "heads", a batch dimension of a product
              of activations; "across", kept in one; "bound", contracted in one, sorted or
              joined: it must be whole.
    """

    size: int
    parts: "list[Atom] | None" = None
    seen: set[str] = field(default_factory=set)
    factors: "list[Atom] | None" = None
    parent: "Atom | None" = None

    def __repr__(self) -> str:
        if not self.parts:
            return str(self.size)
        return f"[{'+'.join(map(repr, self.parts))}]"


Row = list[Atom]


def root(atom: Atom) -> Atom:
    """Return the representative of all atoms that were united with this one."""
    while atom.parent is not None:
        atom = atom.parent
    return atom


def leaves(row: Iterable[Atom]) -> Row:
    """Return a row with every atom replaced by its factors; parts stay inside their atom."""
    out: Row = []
    for atom in map(root, row):
        if atom.factors is not None:
            out += leaves(atom.factors)
        elif atom.size != 1:
            out.append(atom)
    return out


def length(row: Iterable[Atom]) -> int:
    """Count the positions of a row of atoms."""
    return math.prod(root(a).size for a in row)


def common(row: Iterable[Atom], other: Iterable[Atom]) -> bool:
    """Check whether two rows share a factor."""
    return not {id(a) for a in leaves(row)}.isdisjoint(id(a) for a in leaves(other))


def fresh(size: int, *seen: str) -> Row:
    """Return the row of a dimension of which only the size is known."""
    if size == 1:
        return []
    return [Atom(size, seen=set(seen))]


def mark(row: Iterable[Atom], what: str) -> None:
    """Add ``what`` to every atom of a row, and to its parts."""
    for atom in leaves(row):
        atom.seen.add(what)
        for part in atom.parts or ():
            mark([part], what)


def _factor(atom: Atom, major: int) -> None:
    """Split an atom into two factors: ``major`` times the rest."""
    minor, rest = divmod(atom.size, major)
    if rest:
        raise Apart
    low = Atom(minor)
    if atom.parts is None:
        high = Atom(major)
    else:
        pieces = []
        for part in atom.parts:
            count, rest = divmod(length([part]), minor)
            if rest:
                raise Apart
            heads, tail = parted([part], count)
            join(tail, [low])
            pieces.append(whole(heads))
        high = Atom(major, pieces)
    for factor in (high, low):
        factor.seen |= atom.seen
    atom.factors = [high, low]


def whole(row: Row) -> Atom:
    """Return one atom that is the product of a row."""
    if len(row) == 1:
        return row[0]
    atom = Atom(length(row))
    if row:
        atom.factors = list(row)
    return atom


def parted(row: Row, major: int) -> tuple[Row, Row]:
    """Split a row in two: its leading atoms, of ``major`` positions together, and the others."""
    left = leaves(row)
    return leading(left, major, lambda atom: atom.size, _split), left


def _split(atom: Atom, major: int) -> Row:
    """Return the factors of an atom, the first of ``major`` positions."""
    _factor(atom, major)
    return leaves([atom])


def join(a: Row, b: Row) -> None:
    """Unite two rows of atoms that describe the same positions."""
    one, two = leaves(a), leaves(b)
    while one and two:
        p, q = one.pop(0), two.pop(0)
        if p is q:
            continue
        if p.size == q.size:
            _unite(p, q)
            continue
        if p.size < q.size:
            p, q, one, two = q, p, two, one
        if not q.size or p.size % q.size:
            raise Apart
        _factor(p, q.size)
        one[:0] = leaves([p])
        two.insert(0, q)
    if one or two:
        raise Apart


def _unite(p: Atom, q: Atom) -> None:
    if p.parts is not None and q.parts is not None:
        borders = sorted({*_borders(p), *_borders(q)})
        _cut(p, borders)
        _cut(q, borders)
        for a, b in zip(p.parts, q.parts, strict=True):
            if root(a) is not root(b):
                join([a], [b])
    elif q.parts is not None:
        p, q = q, p
    p, q = root(p), root(q)
    if p is not q:
        p.seen |= q.seen
        q.parent = p


def _borders(atom: Atom) -> list[int]:
    sizes = (root(part).size for part in atom.parts or [atom])
    return [*itertools.accumulate(sizes, initial=0)]


def _cut(atom: Atom, borders: Sequence[int]) -> None:
    """Split an atom into parts, at these positions and where it was split before."""
    have = _borders(atom)
    if set(borders) <= set(have):
        return
    pieces: Row = []
    for part, start in zip(atom.parts or [Atom(atom.size)], have, strict=False):
        size = root(part).size
        inner = [b - start for b in borders if start < b < start + size]
        if not inner:
            pieces.append(part)
        elif root(part).factors is None:
            for a, b in itertools.pairwise([0, *inner, size]):
                pieces += fresh(b - a, *atom.seen) or [Atom(1)]
        else:
            row = leaves([part])
            minor = length(row[1:])
            if any(b % minor for b in inner):
                raise Apart
            _cut(row[0], [b // minor for b in inner])
            pieces += [whole([p, *row[1:]]) for p in row[0].parts or ()]
    atom.parts = pieces


def piece(row: Row, start: int, stop: int) -> Row:
    """Return the atoms of positions ``start`` to ``stop`` of a dimension, split where needed."""
    row = leaves(row)
    if (start, stop) == (0, length(row)):
        return row
    if not row or start == stop:
        return fresh(stop - start)
    minor = length(row[1:])
    first, begin = divmod(start, minor)
    last, rest = divmod(stop, minor)
    apart = bool(begin or rest)
    if (stop - 1) // minor == first and (apart or row[0].parts is None):
        # one index of the leading atom leaves the others
        mark(row[:1], "bound")
        return piece(row[1:], begin, begin + stop - start)
    if apart:
        raise Apart
    _cut(row[0], [first, last])
    at = _borders(row[0])
    taken = [p for p, a in zip(row[0].parts or (), at, strict=False) if first <= a < last]
    return leaves([taken[0] if len(taken) == 1 else Atom(last - first, taken)]) + row[1:]
