"""Which plan runs: every algorithm is a rule for "attention" that answers a case with a plan and its cost."""

import math
import re
from dataclasses import replace
from typing import Any

from shardlib.cost import Cost
from shardlib.errors import NoRule, ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Link
from shardlib.ops.attention import routes
from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.plan import Plan
from shardlib.ops.registry import Match, algorithm, choose, pinned

__all__ = ["planned"]


def _matched(case: AttentionCase, plan: Plan, note: str = "") -> Match:
    """The plan as a candidate; what hides behind computing is not priced twice."""
    forward, backward = plan.forward(case.sizes, case.axes), plan.backward(case.sizes, case.axes)
    links = dict(case.links)
    slowest = max((links.get(a, Link()) for a in case.axes), key=lambda k: k.beta, default=Link())
    moved = Cost(
        forward.bytes + backward.bytes, forward.messages + backward.messages, 0, forward.along + backward.along
    )
    hidden = plan.seconds(case.sizes, slowest, case.rate) - moved.seconds(links)
    forward = Cost(forward.bytes, forward.messages, forward.memory, forward.along, hidden)
    return Match(Layout(), plan, forward, backward, note)


@algorithm("attention", name="ring", order=0)
def _ring(case: AttentionCase) -> Match | str:
    return _matched(case, routes.ring(case.q_runs, case.k_runs, case.mask, case.rows))


@algorithm("attention", name="ring_bidirectional", order=1)
def _both_ways(case: AttentionCase) -> Match | str:
    return _matched(case, routes.both_ways(case.q_runs, case.k_runs, case.mask, case.rows))


@algorithm("attention", name="halo", order=2)
def _halo(case: AttentionCase) -> Match | str:
    try:
        return _matched(case, routes.halo(case.q_runs, case.k_runs, case.mask, case.rows))
    except Unsupported as error:
        return error.message


@algorithm("attention", name="double_ring", order=3)
def _double_ring(case: AttentionCase, inner: int | None = None) -> Match | str:
    p = len(case.q_runs)
    if inner is None:
        inner = max((i for i in range(2, math.isqrt(p) + 1) if p % i == 0), default=0)
        if not inner:
            return f"a ring of {p} has no rings within"
    return _matched(case, routes.double_ring(case.q_runs, case.k_runs, case.mask, case.rows, inner), f"of {inner}")


def _travels(case: AttentionCase) -> str:
    """Why there is nothing to gather or to swap; "" if there is."""
    return "" if case.rows or len(case.q_runs) == 1 else "the keys are whole already"


@algorithm("attention", name="allgather", order=4)
def _allgather(case: AttentionCase, heads: int | None = None) -> Match | str:
    heads = min(case.sizes.g if heads is None else heads, case.sizes.g)
    if heads < 1:
        return "at least one head is gathered at a time"
    return _travels(case) or _matched(case, routes.allgather(case.q_runs, case.k_runs, case.mask, heads))


def _swap(case: AttentionCase, inner: int) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here rows change places; ALiBi is a mask"
    z = case.sizes
    plan = routes.ulysses(case.q_runs, case.k_runs, case.mask, z.g, z.lk, inner)
    return _travels(case) or _matched(case, plan)


@algorithm("attention", name="ulysses", order=5)
def _ulysses(case: AttentionCase) -> Match | str:
    return _swap(case, len(case.q_runs))


@algorithm("attention", name="usp", order=6)
def _usp(case: AttentionCase) -> Match | str:
    sizes = [n for n in (dict(case.mesh)[a] for a in case.axes) if n > 1]
    if len(sizes) < 2:
        return "it needs a sequence split over two axes: heads over the inner, a ring over the outer"
    return _swap(case, sizes[-1])


@algorithm("attention", name="pass_q", order=7)
def _pass_q(case: AttentionCase) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here rows travel; ALiBi is a mask"
    return _travels(case) or _matched(case, routes.pass_q(case.q_runs, case.k_runs, case.mask))


@algorithm("attention", name="rsa", order=8)
def _rsa(case: AttentionCase) -> Match | str:
    return _travels(case) or _matched(case, routes.rsa(case.q_runs, case.k_runs, case.mask))


@algorithm("attention", name="canonical", order=9)
def _canonical(case: AttentionCase, tile: int = 64) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here all rows are gathered; ALiBi is a mask"
    return _travels(case) or _matched(case, routes.canonical(case.q_runs, case.k_runs, case.mask, tile))


_WITH_NUMBER: dict[str, Any] = {
    "double_ring": _double_ring,
    "allgather": _allgather,
    "canonical": _canonical,
}


def planned(case: AttentionCase, algorithm: str) -> Match:
    """The plan asked for by name ("auto": the cheapest; "double_ring(2)": with a number)."""
    found = re.fullmatch(r"(\w+)(?:\((\d+)\))?", str(algorithm))
    name, number = found.groups() if found else (algorithm, None)
    if name == "auto" and number is None:
        return choose("attention", case, lambda: case)
    if number is None:
        with pinned(attention=name):
            return choose("attention", case, lambda: case)
    if name not in _WITH_NUMBER:
        raise ShardError(
            f"{name!r} takes no number; these do: {', '.join(_WITH_NUMBER)}", op="ring_attention",
            fix='sl.ring_attention(q, k, v, algorithm="ring")',
        )  # fmt: skip
    match = _WITH_NUMBER[name](case, int(number))
    if isinstance(match, str):
        raise NoRule(f"{algorithm} does not fit: {match}", op="ring_attention", operands=case.operands(),
                     mesh=dict(case.mesh), fix='sl.ring_attention(q, k, v, algorithm="ring")')  # fmt: skip
    return replace(match, algorithm=algorithm)
