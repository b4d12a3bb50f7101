"""Engine choice: each engine is an algorithm of "attention" that prices its plan of a case."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeVar

from shardlib.errors import NoImplementation, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Link
from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.engine import Engine
from shardlib.ops.registry import Match, choose, pinned
from shardlib.ops.registry import algorithm as enter

__all__ = ["planned", "register_engine"]

E = TypeVar("E", bound=Engine)


def register_engine(engine: E, order: int | None = None) -> E:
    """Register an engine under its name; one of the same name is replaced.

    ``order``  breaks ties: the lowest runs; the library's own are below 100.

    >>> import torch, shardlib as sl
    >>> from shardlib.ops.attention.engines.allgather import AllGather
    >>> class Eager(AllGather):
    ...     name = "eager"
    >>> _ = register_engine(Eager())
    >>> with sl.record(s=2):
    ...     q = sl.shard(torch.empty(1, 1, 8, 4, device="meta"), sl.Ring("s", 2))
    ...     price = dict(sl.why("attention", q, q, q).verdicts)["eager"]
    >>> price.forward.bytes, price.forward.messages
    (128, 1)
    >>> sl.extend.remove("attention", "eager")
    """
    enter("attention", name=engine.name, order=order)(partial(_match, engine))
    return engine


def _match(engine: Engine, case: AttentionCase) -> Match | str:
    """Price the engine's plan, with the compute time that transfers do not hide."""
    plan = engine.plan(case)
    if isinstance(plan, str):
        return plan
    forward, backward = plan.forward, plan.backward
    links = dict(case.links)
    slowest = max((links.get(a, Link()) for a in case.axes), key=lambda k: k.beta, default=Link())
    moved = replace(forward + backward, memory=0)
    hidden = engine.seconds(plan, slowest, case.rate) - moved.seconds(links)
    return Match(Layout(), plan, replace(forward, compute=hidden), backward, plan.note)


_matched = lru_cache(maxsize=256)(_match)


def planned(case: AttentionCase, algorithm: str | Engine) -> Match:
    """Plan by an engine: a value, a registered name, or with "auto" the cheapest."""
    if isinstance(algorithm, str):
        if algorithm == "auto":
            return choose("attention", case, lambda: case)
        with pinned(attention=algorithm):
            return choose("attention", case, lambda: case)
    match = _matched(_checked(algorithm), case)
    if isinstance(match, str):
        raise NoImplementation(
            f"{algorithm} does not fit: {match}",
            op="ring_attention",
            operands=case.operands(),
            mesh=dict(case.mesh),
            fix='sl.ring_attention(q, k, v, algorithm="ring")',
        )
    return replace(match, algorithm=algorithm.name)


def _checked(engine: Engine) -> Engine:
    if not callable(getattr(engine, "plan", None)):
        raise ShardError(
            f"an algorithm is a name or an engine, not {engine!r}",
            op="ring_attention",
            fix='sl.ring_attention(q, k, v, algorithm="ring")',
        )
    return engine
