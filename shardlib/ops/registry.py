"""Which algorithm runs an operation, what it costs, and why.

A rule looks at a *case* (layouts, sizes, mesh: integers and names, no tensors) and answers with
a ``Match``: the result's layout, the bytes and messages it will cost, and how to run it; or
with a sentence saying why it does not fit.  The cheapest match runs; ``algorithm`` pins
another, ``why`` prints them all.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shardlib.errors import NoRule, ShardError
from shardlib.layouts import Layout
from shardlib.layouts.base import the_one
from shardlib.mesh import Link

__all__ = [
    "Cost",
    "Match",
    "Why",
    "algorithm",
    "choose",
    "fitting",
    "forget",
    "implicit",
    "implicit_budget",
    "moving",
    "rule",
    "saving",
    "why",
]


@dataclass(frozen=True)
class Cost:
    """Per rank: bytes received, messages, and bytes of temporaries at the peak.

    ``along``    (axes, bytes, messages) of each movement, for meshes whose axes differ in speed.
    ``compute``  seconds of computing, where algorithms for one operation differ in that.
    """

    bytes: Fraction | int = 0
    messages: int = 0
    memory: Fraction | int = 0
    along: tuple[tuple[tuple[str, ...], Fraction | int, int], ...] = ()
    compute: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        memory, compute = max(self.memory, other.memory), self.compute + other.compute
        return Cost(self.bytes + other.bytes, self.messages + other.messages, memory, self.along + other.along, compute)

    def seconds(self, links: Mapping[str, Link] | None = None) -> float:
        """Alpha-beta time; a movement over several axes runs at the slowest's pace."""
        usual, links = Link(), links or {}
        total = self.compute + usual.alpha * self.messages + usual.beta * float(self.bytes)
        for axes, nbytes, messages in self.along:
            met = [links.get(a, usual) for a in axes]
            total += (max((k.alpha for k in met), default=usual.alpha) - usual.alpha) * messages
            total += (max((k.beta for k in met), default=usual.beta) - usual.beta) * float(nbytes)
        return total


def moving(axes: tuple[str, ...], nbytes: Fraction | int, messages: int, memory: Fraction | int = 0) -> Cost:
    """The cost of one movement over ``axes``."""
    return Cost(nbytes, messages, memory, ((axes, nbytes, messages),) if axes else ())


@dataclass(frozen=True)
class Match:
    """An algorithm that fits a case."""

    out: Layout
    run: Any  # how to run it: a function, or for attention a plan
    forward: Cost = Cost()
    backward: Cost = Cost()
    note: str = ""
    over: tuple[tuple[str, ...], ...] = ()  # per operand: the axes along which it meets data that it does not vary with
    gathered: int = 0  # bytes of operands gathered whole over an axis while it runs
    saved: int = 0  # bytes saved for backward beyond the operands' own blocks
    shared: int = 0  # of those gathered, bytes that further products will read
    adds: bool = False  # may be given a bias of any dtype
    rule: str = ""  # the name it was chosen under

    @property
    def cost(self) -> Cost:
        return self.forward + self.backward


@dataclass(frozen=True)
class _Rule:
    op: str
    name: str
    match: Callable[[Any], "Match | str"]


_RULES: dict[str, list[_Rule]] = {}
_CHOSEN: dict[Hashable, Match] = {}


class _Ambient(threading.local):
    pins: tuple[tuple[str, str], ...] = ()
    budget: float | None = None
    room: float | None = None


_AMBIENT = _Ambient()


def rule(op: str, name: str) -> Callable[[Callable[[Any], Match | str]], Callable[[Any], Match | str]]:
    """Register an algorithm for an operation; the decorated function maps a case to a Match.

    A rule defined later under the same name replaces the earlier one.

    >>> import torch, shardlib as sl
    >>> @sl.rule("matmul", name="never")
    ... def never(case):
    ...     return "it is only an example"
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.ones(4, 4), "x .")
    ...     dict(sl.why("matmul", a, a).verdicts)["never"]
    'it is only an example'
    """

    def enter(match: Callable[[Any], Match | str]) -> Callable[[Any], Match | str]:
        kept = [r for r in _RULES.get(op, []) if r.name != name]
        _RULES[op] = [*kept, _Rule(op, name, match)]
        _CHOSEN.clear()
        return match

    return enter


@contextmanager
def algorithm(**names: str) -> Iterator[None]:
    """Pin algorithms by name for the operations inside: ``with sl.algorithm(matmul="cannon"):``.

    Raises: ShardError for an operation or a name that is not registered.
    """
    for op, name in names.items():
        known = [r.name for r in _RULES.get(op, [])]
        if name not in known:
            what = f"{op} has {', '.join(known)}" if known else f"operations with a choice: {', '.join(_RULES)}"
            raise ShardError(
                f"unknown algorithm {name!r}; {what}",
                op="algorithm",
                fix=f"sl.algorithm({op if known else next(iter(_RULES))}="
                f"{(known or [r.name for r in next(iter(_RULES.values()))])[0]!r})",
            )
    before = _AMBIENT.pins
    _AMBIENT.pins = tuple(sorted((dict(before) | names).items()))
    try:
        yield
    finally:
        _AMBIENT.pins = before


@contextmanager
def implicit(max_bytes: float = float("inf")) -> Iterator[None]:
    """Allow operands to be resharded without being asked, up to ``max_bytes`` per operand.

    The moves are counted like any other communication.
    """
    before = _AMBIENT.budget
    _AMBIENT.budget = max_bytes
    try:
        yield
    finally:
        _AMBIENT.budget = before


def implicit_budget() -> float | None:
    """Bytes that may move unasked, None outside ``implicit``."""
    return _AMBIENT.budget


@contextmanager
def saving(max_bytes: float = float("inf")) -> Iterator[None]:
    """Allow a product to gather its operands and to save them so for backward, where that moves less.

    ``max_bytes`` per product, gathered and saved together.  Outside, products save blocks only,
    and operands are gathered only where no schedule of panels fits their layouts.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.ones(8, 8), "x y")
    ...     with sl.saving():
    ...         sl.why("matmul", a, a).chosen
    'mm3_xw'
    """
    if isinstance(max_bytes, str) or not max_bytes >= 0:
        raise ShardError(f"max_bytes is a number of bytes, not {max_bytes!r}", op="saving", fix="sl.saving(2**30)")
    before = _AMBIENT.room
    _AMBIENT.room = max_bytes
    try:
        yield
    finally:
        _AMBIENT.room = before


def choose(op: str, key: Hashable, case: Callable[[], Any]) -> Match:
    """The cheapest match, or the pinned one.  Remembered per ``key``, which must tell cases apart.

    Raises: NoRule listing every candidate and why it does not fit.
    """
    key = (op, key, _AMBIENT.pins, _AMBIENT.room)
    found = _CHOSEN.get(key)
    if found is None:
        found = _CHOSEN[key] = _decide(op, case())
    return found


def fitting(op: str, case: Any) -> Match | None:
    """The cheapest match for a case, if any; nothing where an algorithm is pinned."""
    best = None if op in dict(_AMBIENT.pins) else _best(_verdicts(op, case), case)
    return best and best[1]


def forget() -> None:
    """Choose anew from here on: what the choice rests on has changed."""
    _CHOSEN.clear()


def _verdicts(op: str, case: Any) -> list[tuple[str, Match | str]]:
    verdicts = [(r.name, r.match(case)) for r in _RULES[op]]
    wanted = getattr(case, "out", None)
    if wanted is None:
        return verdicts
    return [(n, m if isinstance(m, str) or m.out == wanted else f"gives {m.out}, not {wanted}") for n, m in verdicts]


def _best(verdicts: list[tuple[str, Match | str]], case: Any) -> tuple[str, Match] | None:
    """The cheapest of those that give the first fitting rule's layout and stay within memory.

    The result's layout thus hangs on the operands' layouts, never on their sizes.
    """
    fitting = [(n, m) for n, m in verdicts if isinstance(m, Match)]
    alike = [(n, m) for n, m in fitting if m.out == fitting[0][1].out]
    room = _AMBIENT.room
    if room is None:
        alike = [(n, m) for n, m in alike if not m.saved]
        least = [(n, m) for n, m in alike if m.gathered == m.shared]
    else:
        least = [(n, m) for n, m in alike if m.gathered + m.saved <= room]
    links = dict(getattr(case, "links", ()))
    return min(least or alike, key=lambda nm: (nm[1].cost.seconds(links), nm[1].cost.messages), default=None)


def _decide(op: str, case: Any) -> Match:
    pinned = dict(_AMBIENT.pins).get(op)
    verdicts = _verdicts(op, case)
    best = _best(verdicts, case)
    if pinned is not None:
        match = dict(verdicts)[pinned]
        if isinstance(match, str):
            raise NoRule(
                f"{pinned} does not fit: {match}",
                op=op,
                operands=case.operands(),
                mesh=dict(case.mesh),
                fix=f"sl.algorithm({op}={best[0]!r})" if best else case.fix()[0],
            )
        return replace(match, rule=pinned, out=the_one(match.out))
    if best is None:
        fix, error = case.fix()
        raise error(
            "no algorithm fits these layouts\n" + "\n".join(f"    {n}: {m}" for n, m in verdicts),
            op=op,
            operands=case.operands(),
            mesh=dict(case.mesh),
            fix=fix,
        )
    return replace(best[1], rule=best[0], out=the_one(best[1].out))


@dataclass(frozen=True)
class Why:
    """Every candidate for one operation: chosen, its cost, or why it was rejected."""

    op: str
    operands: dict[str, str]
    chosen: str
    verdicts: tuple[tuple[str, "Match | str"], ...]

    def __str__(self) -> str:
        lines = [f"{self.op} of " + ", ".join(self.operands.values())]
        width = max(len(n) for n, _ in self.verdicts)
        for name, m in self.verdicts:
            text = m if isinstance(m, str) else _priced(m)
            lines.append(f"{'->' if name == self.chosen else '  '} {name:<{width}}  {text}")
        return "\n".join(lines)

    __repr__ = __str__


def _priced(m: Match) -> str:
    f, b = m.forward, m.backward
    text = f"forward {float(f.bytes):.0f} B in {f.messages} messages"
    text += f", backward {float(b.bytes):.0f} B in {b.messages}, temporaries {float(m.cost.memory):.0f} B"
    return text + (f" ({m.note})" if m.note else "")


def explain_choice(op: str, case: Any) -> Why:
    """The verdict of every rule on a case."""
    verdicts = _verdicts(op, case)
    pinned = dict(_AMBIENT.pins).get(op)
    best = _best([(n, m) for n, m in verdicts if pinned in (None, n)], case)
    return Why(op, case.operands(), best[0] if best else "", tuple(verdicts))


_CASES: dict[str, Callable[..., Any]] = {}


def case_of(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how an operation's operands become a case (for ``why``)."""

    def enter(make: Callable[..., Any]) -> Callable[..., Any]:
        _CASES[op] = make
        return make

    return enter


def why(op: str, *operands: Any) -> Why:
    """List every algorithm for an operation on these operands, with its price.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.ones(8, 8), "x y")
    ...     sl.why("matmul", a, a).chosen
    'summa'
    """
    if op not in _CASES:
        raise ShardError(
            f"unknown operation {op!r}; operations with a choice: {', '.join(_CASES)}",
            op="why",
            fix=f"sl.why({next(iter(_CASES))!r}, a, b)",
        )
    return explain_choice(op, _CASES[op](*operands))
