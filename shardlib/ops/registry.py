"""Registry of algorithms per operation: matching, prices, choice, and ``sl.why``.

An algorithm's match function takes a *case* (layouts, sizes, mesh: integers and names, no tensors)
and returns a ``Match``: the result's layout, the bytes and messages it will cost, and its code; or
a sentence that states why it does not fit.  The cheapest match runs; ``sl.algorithm`` pins another,
``sl.why`` prints them all.

The choice never depends on the order of registration or of imports.  Algorithms that keep blocks in
place come before those that gather operands, then those of a lower ``order``, then by name: the
first of that list that fits fixes the result's layout; of those with this layout the cheapest runs,
and ties go to the first.
"""

import inspect
import textwrap
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from shardlib.cost import Cost
from shardlib.errors import ImplicitCommunication, NoImplementation, ShardError, similar
from shardlib.layouts import Layout
from shardlib.layouts.layout import the_one
from shardlib.mesh import Axes, Entered, Memo, Scope, scope
from shardlib.opspec import Func
from shardlib.optional import optional_text
from shardlib.tensor import call_error

Answer = TypeVar("Answer", bound="Callable[[Any], Match | str]")
"""Match function of an algorithm: from a case of its operation to a match, or a refusal."""

_FREE = Cost()


@dataclass(frozen=True)
class Match:
    """Offer of an algorithm for a case: the result's layout, the cost, and the code to run.

    ``out``       the result's layout.
    ``run``       the code: for matmul a Schedule, for attention a Plan.
    ``forward``, ``backward``  the cost of each; bytes and messages are tested against the counted
                               ones.
    ``note``      text that ``sl.why`` adds to the price.
    ``gathers``   whether it gathers operands, or scatters a sum, where others keep blocks in
                  place.
    ``over``      per operand, the mesh axes over which its gradient must be
                  summed; derived from ``out`` if not given.
    ``gathered``  bytes of operands gathered whole over an axis while it runs.
    ``shared``    of those, bytes that further products will read.
    ``saved``     bytes saved for backward beyond the operands' own blocks.
    ``adds``      may be given a bias of any dtype.
    ``local``     where no gradient is to be summed it is torch's own product of the blocks.
    ``call``      runs instead of ``run`` if operands are prepared first: moved once for several
                  products, or gathered early; matmul only.
    ``algorithm`` the name under which it was chosen.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.ones(8, 8), "x y")
    ...     found = dict(sl.why("matmul", a, a).verdicts)["summa"]
    >>> found.out, found.forward.bytes, found.note
    (Layout('x y'), Fraction(128, 1), 'form AB, Y stays')
    """

    out: Layout
    run: Any
    forward: Cost = _FREE
    backward: Cost = _FREE
    note: str = ""
    gathers: bool = False
    over: tuple[Axes, ...] = ()
    gathered: int = 0
    shared: int = 0
    saved: int = 0
    adds: bool = False
    local: bool = False
    call: Func | None = None
    algorithm: str = ""

    @property
    def cost(self) -> Cost:
        """Cost of forward and backward together."""
        return self.forward + self.backward


class DoesNotFit(Exception):
    """Raised within a match function: the text states why the algorithm does not fit the case."""


@dataclass(frozen=True)
class _Algorithm:
    """Registered algorithm; ``order`` and ``takes`` as in ``algorithm``."""

    name: str
    match: Callable[[Any], "Match | str"]
    order: int
    takes: str


# by operation, in their order
_ALGORITHMS: dict[str, list[_Algorithm]] = {}
# of cases without a mesh object
_CHOSEN = Memo()


def algorithm(
    op: str, name: str, order: int | None = None, takes: str = ""
) -> Callable[[Answer], Answer]:
    """Register an algorithm for an operation: a function from a case to a Match or a refusal.

    ``order``  of algorithms that fit, the first fixes the result's layout unless one is required,
               and is preferred among equally cheap ones.  Those that keep blocks come before those
               that gather; among each, the lower order, then the name.  Built-in ones are below
               100, the default of others.
    ``takes``  "skew" for one that takes skewed operands; others are not asked about them.

    An existing name replaces that algorithm and keeps its order.

    >>> import torch, shardlib as sl
    >>> @sl.extend.algorithm("matmul", name="never")
    ... def never(case: sl.extend.MatmulCase) -> sl.extend.Match | str:
    ...     return "it is only an example"
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.ones(4, 4), "x .")
    ...     dict(sl.why("matmul", a, a).verdicts)["never"]
    'it is only an example'
    >>> sl.extend.remove("matmul", "never")
    """

    def enter(match: Answer) -> Answer:
        named = {a.name: a for a in _ALGORITHMS.get(op, [])}
        place = order
        if place is None:
            place = named[name].order if name in named else 100
        named[name] = _Algorithm(name, match, place, takes)
        _ALGORITHMS[op] = sorted(named.values(), key=lambda a: (a.order, a.name))
        Memo.version += 1
        return match

    return enter


def remove(op: str, name: str) -> None:
    """Remove a registered algorithm.

    Raises: ShardError for a name that is not registered.

    >>> import shardlib as sl
    >>> _ = sl.extend.algorithm("matmul", name="mine")(lambda case: "it is only an example")
    >>> sl.extend.remove("matmul", "mine")
    >>> sl.extend.remove("matmul", "mine")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardlib.errors.ShardError: extend.remove: unknown algorithm 'mine'; matmul has ...
    """
    _check_known(op, name, "extend.remove")
    _ALGORITHMS[op] = [a for a in _ALGORITHMS[op] if a.name != name]
    Memo.version += 1


def _check_known(op: str, name: str, by: str) -> None:
    some = op
    names = [a.name for a in _ALGORITHMS.get(op, [])]
    if name in names:
        return
    what = f"{op} has {', '.join(names)}"
    if not names:
        what = f"operations with a choice: {', '.join(_ALGORITHMS)}"
        some, found = next(iter(_ALGORITHMS.items()))
        names = [a.name for a in found]
    (near,) = similar(name, names, 1, 0.0)
    raise ShardError(
        f"unknown algorithm {name!r}; {what}",
        op=by,
        # `without(unknown)` has no useful correction, so only `algorithm` gets the nearest name
        fix=f"sl.algorithm({some}={near!r})" if by == "algorithm" else "",
    )


class pinned(Entered):
    """Pin algorithms by name for the operations inside; ``sl.algorithm``.

    Raises: ShardError for an operation or a name that is not registered.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2), sl.algorithm(matmul="cannon"):
    ...     a = sl.shard(torch.ones(8, 8), "x y")
    ...     sl.why("matmul", a, a).chosen
    'cannon'
    """

    def __init__(self, **names: str) -> None:
        for op, name in names.items():
            _check_known(op, name, "algorithm")
        self.names = names

    def changes(self, now: Scope) -> dict[str, Any]:
        return {"pins": tuple(sorted((dict(now.policy.pins) | self.names).items()))}


class implicit(Entered):
    """Allow operands to be resharded implicitly, up to ``max_bytes`` per operand.

    The moves are counted like any other communication.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2), sl.trace() as t:
    ...     a = sl.shard(torch.randn(4, 4), ". x")
    ...     with sl.implicit(max_bytes=1024):
    ...         b = torch.linalg.inv(a)  # refused outside: it needs whole matrices
    >>> sl.typeof(b), t.bytes
    ('f32[4, 4]', 32)
    """

    def __init__(self, max_bytes: float = float("inf")) -> None:
        self.max_bytes = max_bytes

    def changes(self, now: Scope) -> dict[str, Any]:
        return {"budget": self.max_bytes}


def may_move(moved: float) -> bool:
    """Check whether so many bytes per rank may move unasked, by the budget of ``sl.implicit``."""
    budget = scope().policy.budget
    return not moved or (budget is not None and moved <= budget)


def unasked(
    why: str, moved: float, op: Func | str, fix: str, /, *tensors: Tensor, **named: object
) -> ImplicitCommunication:
    """Return the refusal of a call that would move so many bytes; other arguments as call_error."""
    why = f"{why}, and {moved:.0f} bytes per rank would move unasked"
    return call_error(ImplicitCommunication, why, op, fix, *tensors, **named)


class saving(Entered):
    """Allow a product to gather operands and save them so for backward, where that moves less.

    ``max_bytes`` per product, gathered and saved together.  Outside, products save blocks only,
    and operands are gathered only where no schedule of panels fits their layouts.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.ones(8, 8), "x y")
    ...     with sl.saving():
    ...         sl.why("matmul", a, a).chosen
    'mm3_xw'
    """

    def __init__(self, max_bytes: float = float("inf")) -> None:
        if isinstance(max_bytes, str) or not max_bytes >= 0:
            why = f"max_bytes is a number of bytes, not {max_bytes!r}"
            raise ShardError(why, op="saving", fix="sl.saving(2**30)")
        self.max_bytes = max_bytes

    def changes(self, now: Scope) -> dict[str, Any]:
        return {"saving": self.max_bytes}


def choose(op: str, key: Hashable, case: Callable[[], Any]) -> Match:
    """Choose the cheapest match, or the pinned one.

    Cached by ``key``, which must distinguish cases.
    Raises: NoImplementation listing every candidate and why it does not fit.
    """
    return _CHOSEN("choice", (op, key, scope().policy), lambda: decide(op, case()))


def fitting(op: str, case: Any) -> Match | None:
    """Choose the cheapest match for a case, if there is one; None where an algorithm is pinned."""
    best = None if op in dict(scope().policy.pins) else _best(_verdicts(op, case), case)
    return best and best[1]


def _verdicts(op: str, case: Any) -> list[tuple[str, Match | str]]:
    return [(a.name, _verdict(a, case)) for a in _ALGORITHMS[op]]


def _verdict(candidate: _Algorithm, case: Any) -> Match | str:
    if getattr(case, "is_skewed", False) and candidate.takes != "skew":
        return "an operand is skewed"
    try:
        found = candidate.match(case)
    except DoesNotFit as e:
        return str(e)
    wanted = getattr(case, "out", None)
    if wanted is None or isinstance(found, str) or found.out == wanted:
        return found
    return f"gives {found.out}, not {wanted}"


def _best(verdicts: list[tuple[str, Match | str]], case: Any) -> tuple[str, Match] | None:
    """Choose the cheapest match with the first one's layout that stays within memory.

    So the result's layout depends on the operands' layouts, never on their sizes.
    """
    found = [(n, m) for n, m in verdicts if isinstance(m, Match)]
    found.sort(key=lambda nm: nm[1].gathers)
    alike = [(n, m) for n, m in found if m.out == found[0][1].out]
    room = scope().policy.saving
    if room is None:
        alike = [(n, m) for n, m in alike if not m.saved]
        least = [(n, m) for n, m in alike if m.gathered == m.shared]
    else:
        least = [(n, m) for n, m in alike if m.gathered + m.saved <= room]
    links = dict(getattr(case, "links", ()))

    def price(offer: tuple[str, Match]) -> tuple[float, float]:
        cost = offer[1].cost
        return cost.seconds(links), cost.messages

    return min(least or alike, key=price, default=None)


def decide(op: str, case: Any) -> Match:
    """Choose the cheapest match of a case, or the pinned one.

    Raises: NoImplementation listing every candidate and why it does not fit.
    """
    asked = dict(scope().policy.pins).get(op)
    verdicts = _verdicts(op, case)
    best = _best(verdicts, case)
    name, match = best or ("", None)
    if asked is not None:
        name, match = asked, dict(verdicts)[asked]
    if isinstance(match, Match):
        return replace(match, algorithm=name, out=the_one(match.out))
    fix, error = case.fix()
    why = "\n    ".join(["no algorithm fits these layouts", *(f"{n}: {m}" for n, m in verdicts)])
    if asked is not None:
        error = NoImplementation
        why = f"{asked} does not fit: {match}"
        fix = f"sl.algorithm({op}={best[0]!r})" if best else fix
    raise error(why, op=op, operands=case.operands(), mesh=dict(case.mesh), fix=fix)


@dataclass(frozen=True)
class Why:
    """Candidates for one operation: the chosen one, each one's cost, or why it was rejected.

    ``notes``  lines that the operation's case adds.
    ``both``   whether there is a backward, whose cost is shown too.
    """

    op: str
    operands: dict[str, str]
    chosen: str
    verdicts: tuple[tuple[str, "Match | str"], ...]
    notes: tuple[str, ...] = ()
    both: bool = True

    def __str__(self) -> str:
        lines = _wrapped(f"{self.op} of " + ", ".join(self.operands.values()))
        width = max(len(n) for n, _ in self.verdicts)
        for name, m in self.verdicts:
            text = m if isinstance(m, str) else _priced(m, self.both)
            lines.append(f"{'->' if name == self.chosen else '  '} {name:<{width}}  {text}")
        return "\n".join([*lines, *(line for note in self.notes for line in _wrapped(note))])

    __repr__ = __str__


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False)


def _priced(m: Match, both: bool) -> str:
    f, b = m.forward, m.backward
    text = f"{float(f.bytes):.0f} B in {f.messages} messages"
    if both:
        text = f"forward {text}, backward {float(b.bytes):.0f} B in {b.messages}"
    text += f", temporaries {float(m.cost.memory):.0f} B"
    return text + optional_text(" ({})", m.note)


def explain_choice(op: str, case: Any) -> Why:
    """Return the verdict of every algorithm on a case."""
    verdicts = _verdicts(op, case)
    asked = dict(scope().policy.pins).get(op)
    best = _best([(n, m) for n, m in verdicts if asked in (None, n)], case)
    notes = tuple(case.notes()) if hasattr(case, "notes") else ()
    both = getattr(case, "differentiable", True)
    return Why(op, case.operands(), best[0] if best else "", tuple(verdicts), notes, both)


_CASES: dict[str, Func] = {}


def case_of(op: str) -> Callable[[Func], Func]:
    """Register the function that turns an operation's operands into a case, or a ``Why``."""

    def enter(make: Func) -> Func:
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
        why_not = f"unknown operation {op!r}; operations with a choice: {', '.join(_CASES)}"
        raise ShardError(why_not, op="why", fix=f"sl.why({next(iter(_CASES))!r}, a, b)")
    try:
        inspect.signature(_CASES[op]).bind(*operands)
    except TypeError as e:
        names = ", ".join(inspect.signature(_CASES[op]).parameters)
        raise ShardError(f"{op}({names}): {e}", op="why", fix=_why_line(op)) from None
    case = _CASES[op](*operands)
    return case if isinstance(case, Why) else explain_choice(op, case)


def _why_line(op: str) -> str:
    """Write the call with the operation's required operands."""
    needed = inspect.signature(_CASES[op]).parameters.values()
    count = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in needed)
    return f"sl.why({', '.join([repr(op), *'abcdefgh'[:count]])})"
