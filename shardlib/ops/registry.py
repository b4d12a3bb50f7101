"""Which algorithm runs an operation, what it costs, and why.

A rule looks at a *case* (layouts, sizes, mesh: integers and names, no tensors) and answers with
a ``Match``: the result's layout, the bytes and messages it will cost, and how to run it; or
with a sentence saying why it does not fit.  The cheapest match runs; ``algorithm`` pins
another, ``why`` prints them all.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from shardlib.errors import NoRule, ShardError
from shardlib.layouts import Layout

__all__ = ["Cost", "Match", "Why", "algorithm", "choose", "implicit", "implicit_budget", "rule", "why"]


@dataclass(frozen=True)
class Cost:
    """Per rank: bytes received, messages, and bytes of temporaries at the peak."""

    bytes: Fraction | int = 0
    messages: int = 0
    memory: Fraction | int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.messages + other.messages, max(self.memory, other.memory))

    def seconds(self, alpha: float = 2e-5, beta: float = 1e-9) -> float:
        """Alpha-beta time: ``alpha`` per message, ``beta`` per byte."""
        return alpha * self.messages + beta * float(self.bytes)


@dataclass(frozen=True)
class Match:
    """An algorithm that fits a case."""

    out: Layout
    run: Callable[..., Any]
    forward: Cost = Cost()
    backward: Cost = Cost()
    note: str = ""
    over: tuple[tuple[str, ...], ...] = ()  # per operand: the axes along which it meets data that it does not vary with

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


def choose(op: str, key: Hashable, case: Callable[[], Any]) -> Match:
    """The cheapest match, or the pinned one.  Remembered per ``key``, which must tell cases apart.

    Raises: NoRule listing every candidate and why it does not fit.
    """
    key = (op, key, _AMBIENT.pins)
    found = _CHOSEN.get(key)
    if found is None:
        found = _CHOSEN[key] = _decide(op, case())
    return found


def _decide(op: str, case: Any) -> Match:
    pinned = dict(_AMBIENT.pins).get(op)
    verdicts = [(r.name, r.match(case)) for r in _RULES[op]]
    fitting = [(name, m) for name, m in verdicts if isinstance(m, Match)]
    if pinned is not None:
        match = dict(verdicts)[pinned]
        if isinstance(match, str):
            other = min(fitting, key=lambda nm: nm[1].cost.seconds())[0] if fitting else None
            raise NoRule(
                f"{pinned} does not fit: {match}",
                op=op,
                operands=case.operands(),
                mesh=dict(case.mesh),
                fix=f"sl.algorithm({op}={other!r})" if other else case.fix()[0],
            )
        return match
    if not fitting:
        fix, error = case.fix()
        raise error(
            "no algorithm fits these layouts\n" + "\n".join(f"    {n}: {m}" for n, m in verdicts),
            op=op,
            operands=case.operands(),
            mesh=dict(case.mesh),
            fix=fix,
        )
    return min(fitting, key=lambda nm: nm[1].cost.seconds())[1]


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
    verdicts = tuple((r.name, r.match(case)) for r in _RULES[op])
    pinned = dict(_AMBIENT.pins).get(op)
    fitting = [(n, m) for n, m in verdicts if isinstance(m, Match) and pinned in (None, n)]
    best = min(fitting, key=lambda nm: nm[1].cost.seconds())[0] if fitting else ""
    return Why(op, case.operands(), best, verdicts)


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
