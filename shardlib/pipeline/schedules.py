"""Schedules of a pipeline as data: for each rank of the pipe axis, its actions in order.

An *action* has a kind, a stage and a micro-batch: ``F`` forward, ``B`` backward, or in place of B
first ``I``, the gradient of the stage's inputs, and later ``W``, that of its weights.  Nothing runs
here: ``schedule`` makes the tables, ``check`` proves that they end, ``timeline`` computes when.

Sources: GPipe arXiv 1811.06965; 1F1B arXiv 1806.03377; interleaved arXiv 2104.04473, section 2.2;
zero bubble arXiv 2401.10241, sections 2 (ZB-H1) and 6 (ZB-V); DualPipeV, one half of DualPipe in
arXiv 2412.19437, as in github.com/deepseek-ai/DualPipe.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product, zip_longest
from operator import index
from typing import NamedTuple, TypeVar

from shardlib.errors import ShardError, meant, similar
from shardlib.mesh import Memo


class Action(NamedTuple):
    """Action of a rank: one kind (F, B, I or W) of work for a stage and a micro-batch.

    >>> str(Action("F", 0, 3))
    'F0.3'
    """

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Row = list[Action]
Tables = Sequence[Sequence[tuple[str, int, int]]]
"""Actions of each rank in order; an action may be a plain (kind, stage, micro-batch)."""

Made = TypeVar("Made", bound=Callable[[int, int, int], Tables])


@dataclass(frozen=True)
class PipelineSchedule:
    """Schedule of a pipeline: the rank of each stage, and the actions of each rank in order."""

    name: str
    micros: int
    ranks: tuple[int, ...]
    tables: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.tables)

    @property
    def held(self) -> tuple[int, ...]:
        """The most forwards of each rank that wait for their B or W at a time.

        >>> schedule("1f1b", 4, 8).held
        (4, 3, 2, 1)
        """
        rows = ((_HELD[a.kind] for a in row) for row in self.tables)
        return tuple(max(accumulate(row), default=0) for row in rows)


_HELD = {"F": 1, "B": -1, "I": 0, "W": -1}


class _Maker(NamedTuple):
    """Registered maker of tables; the fields as in ``register``."""

    tables: Callable[[int, int, int], Tables]
    stages_per_rank: int | None
    ranks: Callable[[int, int], Iterable[int]]


_MAKERS: dict[str, _Maker] = {}


def loop(p: int, v: int) -> Iterable[int]:
    """List the ranks of p * v stages that go round the ranks v times.

    >>> list(loop(2, 2))
    [0, 1, 0, 1]
    """
    return [*range(p)] * v


def vee(p: int, v: int = 2) -> Iterable[int]:
    """List the ranks of 2 p stages that go up the ranks and back, in the shape of a V.

    >>> list(vee(2))
    [0, 1, 1, 0]
    """
    return [*range(p), *reversed(range(p))]


def register(
    name: str,
    stages_per_rank: int | None = None,
    ranks: Callable[[int, int], Iterable[int]] = loop,
) -> Callable[[Made], Made]:
    """Register a pipeline's schedule: a function (p, m, v) that lists the actions of each rank.

    p ranks, m micro-batches, v stages per rank.  An action is (kind, stage, micro-batch), its kind
    "F" forward, "B" backward, or "I" and later "W", the gradients of inputs and of weights.
    Whenever it is used the tables are checked, see ``shardlib.pipeline.schedules.check``.  A name
    of one's own may be registered anew.

    ``stages_per_rank``  the only v that it takes; None for any.
    ``ranks``  a function (p, v) that lists the rank of each stage; by default they go round.
    Raises: ShardError for the name of a built-in schedule.

    >>> import shardlib as sl
    >>> from shardlib.pipeline.schedules import schedule
    >>> @sl.extend.schedule("one_by_one", stages_per_rank=1)
    ... def one_by_one(p, m, v):
    ...     return [[(kind, rank, k) for k in range(m) for kind in "FB"] for rank in range(p)]
    >>> schedule("one_by_one", 2, 2).held
    (1, 1)
    """
    why = ""
    if not (isinstance(name, str) and name):
        why = f"{name!r} is no name"
    elif name in _MAKERS and _MAKERS[name].tables.__module__ == __name__:
        why = f"{name!r} is a built-in schedule"
    elif stages_per_rank is not None and not _is_count(stages_per_rank):
        why = f"stages_per_rank is a number of stages or None, not {stages_per_rank!r}"
    if why:
        fix = "sl.extend.schedule('mine', stages_per_rank=1)"
        raise ShardError(why, op="extend.schedule", fix=fix)

    def enter(tables: Made) -> Made:
        _MAKERS[name] = _Maker(tables, stages_per_rank, ranks)
        Memo.version += 1
        return tables

    return enter


def schedule(name: str, p: int, m: int, v: int = 1) -> PipelineSchedule:
    """Make the tables of a schedule for p ranks, m micro-batches and v stages per rank.

    The most that rank i of p holds, in micro-batches of one stage, see ``PipelineSchedule.held``:

    ``gpipe``        m v; any v.
    ``1f1b``         p - i; one stage per rank.
    ``interleaved``  2 (p - 1 - i) + (v - 1) p + 1; m must be a multiple of p.
    ``zb``           p v, ZB-H1; with v > 1 interleaved, and m must be a multiple of p.
    ``zbv``          2 p, of two stages per rank in the shape of a V.
    ``dualpipev``    2 p + 1, likewise; at least 2 p micro-batches.

    v = 1 stands for a schedule's own number of stages per rank where it takes only one.
    Raises: ShardError for an unknown name, numbers that it does not take, or a faulty table.

    >>> print(*schedule("zb", 2, 2).tables[1])
    F1.0 I1.0 F1.1 I1.1 W1.0 W1.1
    """
    ranks = placing(name, p, v)
    if not _is_count(m):
        why = f"{name} takes one micro-batch or more, not {m!r}"
        raise _refused(why, f"sl.value_and_grad(loss, microbatches={2 * p})")
    made = _MAKERS[name].tables(p, m, len(ranks) // p)
    try:
        tables = tuple(tuple(Action(k, index(s), index(n)) for k, s, n in row) for row in made)
    except (TypeError, ValueError) as e:
        why = f"{name}: its tables are not (kind, stage, micro-batch) of each rank: {e}"
        raise _refused(why) from None
    found = PipelineSchedule(name, m, ranks, tables)
    check(found)
    return found


def offered(v: int) -> Iterator[tuple[str, int]]:
    """List every schedule, and its number of stages per rank: its own, or ``v`` where it takes any."""
    for name, maker in _MAKERS.items():
        any_number = max(v, 2) if name == "interleaved" else v
        yield name, maker.stages_per_rank or any_number


def placing(name: str, p: int, v: int = 1) -> tuple[int, ...]:
    """List the rank of each stage under a schedule of p ranks with v stages each.

    Raises: ShardError for an unknown name, or a number of stages that the schedule does not take.

    >>> placing("interleaved", 2, 2), placing("zbv", 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if name not in _MAKERS:
        near = similar(str(name), _MAKERS)
        why = f"unknown schedule {name!r}; there are {', '.join(_MAKERS)}{meant(near)}"
        raise _refused(why, f"sl.Stages('pipe', schedule={[*near, '1f1b'][0]!r})")
    maker = _MAKERS[name]
    only = maker.stages_per_rank
    if not (_is_count(p) and _is_count(v)) or (only and v not in (1, only)):
        takes = only or "any number"
        why = f"{name} of {p!r} ranks with {v!r} stages each; it takes {takes} of them"
        raise _refused(why, f"sl.Stages('pipe', per_rank={only or 1}, schedule={name!r})")
    v = only or v
    ranks = tuple(maker.ranks(p, v))
    if sorted(ranks) != sorted(loop(p, v)):
        raise _refused(f"{name}: of {p} ranks each must have {v} stages, not {list(ranks)}")
    return ranks


def _is_count(n: object) -> bool:
    return isinstance(n, int) and n >= 1


def _refused(why: str, fix: str = "sl.Stages('pipe', schedule='1f1b')") -> ShardError:
    return ShardError(why, op="schedule", fix=fix)


@register("gpipe")
def _gpipe(p: int, m: int, v: int) -> list[Row]:
    return _in_turn(p, m, v, ahead=[m] * p, each=m)


@register("1f1b", stages_per_rank=1)
def _one_f_one_b(p: int, m: int, v: int) -> list[Row]:
    return _in_turn(p, m, v, ahead=range(p)[::-1], each=p)


@register("interleaved")
def _interleaved(p: int, m: int, v: int) -> list[Row]:
    return _in_turn(p, m, v, ahead=range(0, 2 * p, 2)[::-1], each=p)


@register("zb")
def _zb_h1(p: int, m: int, v: int) -> list[Row]:
    """List 1F1B with I for B and, after as many I as ranks are before, a W after each.

    So every rank holds p micro-batches, as the first one does in 1F1B, and of its idle time
    (p - 1) (F + I + W) remains (p - 1) (F + I - W).
    """
    return _in_turn(p, m, v, ahead=range(p)[::-1], each=p, parted=True)


def _in_turn(
    p: int, m: int, v: int, ahead: Sequence[int], each: int, parted: bool = False
) -> list[Row]:
    """List for each rank forwards ahead, then a forward and a backward in turn, in rounds.

    A round, of ``each`` micro-batches, passes through the first stage of a rank, then its next one.
    ``ahead``   the number of forwards ahead, beyond those of the stages before the last.
    ``parted``  I in place of B, and as many actions later as ranks are before, its W.
    """
    if v > 1 and m % each:
        why = f"{v} stages per rank take micro-batches {p} at a time; {m} is no multiple of {p}"
        raise _refused(why, f"sl.value_and_grad(loss, microbatches={-(-m // p) * p})")
    order, rows = [n // each % v for n in range(m * v)], []
    forward = [f"F{s}" for s in order]
    backward = [f"{'I' if parted else 'B'}{v - 1 - s}" for s in order]
    for i in range(p):
        late = [*[""] * i, *["W"] * len(order)] if parted else []
        first = ahead[i] + (v - 1) * each
        rest = chain(*zip_longest(forward[first:], backward, late, fillvalue=""))
        rows.append(_numbered([*forward[:first], *rest], range(i, p * v, p)))
    return rows


@register("zbv", stages_per_rank=2, ranks=vee)
def _zb_v(p: int, m: int, v: int) -> list[Row]:
    """List ZB-V; of fewer than 2 p - 1 micro-batches, the actions that are left of so many."""
    n, rows = max(2 * p - 1, m), []
    for i in range(p):
        up = p - i
        text = (
            "F0 " * (2 * up - 1) + "F1 F0 " * i + "F1 I1 W1 " * up
            + "F0 I0 W0 F1 I1 W1 " * (n - p - up + 1) + "I0 W0 F1 I1 W1 " * (up - 1)
            + "I0 I1 " * i + "I0 W0 " * up + "W1 " * i + "W0 " * i
        )  # fmt: skip
        rows.append([a for a in _numbered(text.split(), (i, 2 * p - 1 - i)) if a.micro < m])
    return rows


@register("dualpipev", stages_per_rank=2, ranks=vee)
def _dualpipe_v(p: int, m: int, v: int) -> list[Row]:
    """List DualPipeV; a forward and the backward that it overlaps with are two actions."""
    if m < 2 * p:
        why = f"dualpipev takes at least {2 * p} micro-batches, one per stage, not {m}"
        raise _refused(why, f"sl.value_and_grad(loss, microbatches={2 * p})")
    rows = []
    for i in range(p):
        up, half = p - 1 - i, (i + 1) // 2
        text = (
            "F0 " * (2 * up) + "F0 F1 " * (i + 1) + "I1 W F1 " * up
            + "F0 B1 F1 B0 " * (m - p - up) + "B1 F1 B0 " * up
            + "B1 B0 " * half + "B1 I0 " * (1 - i % 2) + "I1 I0 " * half
            + "W I0 " * up + "W " * (i + 1)
        )  # fmt: skip
        rows.append(_numbered(text.split(), (i, 2 * p - 1 - i)))
    return rows


def _numbered(actions: Iterable[str], own: Sequence[int]) -> Row:
    """Number the micro-batches of actions that are given by kind and which of a rank's stages.

    A W without a stage is that of the oldest I; an empty text is no action.

    >>> print(*_numbered("F0 F0 I0 I0 W0 W".split(), (2, 5)))
    F2.0 F2.1 I2.0 I2.1 W2.0 W2.1
    """
    row: Row = []
    late: Row = []
    counts: Counter[tuple[bool, int]] = Counter()
    for text in filter(None, actions):
        kind, stages = text[0], [own[int(n)] for n in [text[1:]] if n] or own
        if kind == "W":
            late.remove(a := next(a for a in late if a.stage in stages))
        else:
            a = Action(kind, stages[0], counts[kind == "F", stages[0]])
            counts[kind == "F", stages[0]] += 1
        if kind == "I":
            late.append(a)
        row.append(a._replace(kind=kind))
    return row


@dataclass(frozen=True)
class PipelineTimeline:
    """Timeline of a schedule: when each action begins and ends, in the unit of the costs.

    ``busy``  per rank, the sum of its actions' costs.
    """

    begins: dict[Action, float]
    ends: dict[Action, float]
    busy: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The time at which the last action ends."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The idle part of all ranks' time, from 0 to 1."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def timeline(
    s: PipelineSchedule,
    cost: Callable[[Action], float] = lambda a: 1.0 + (a.kind == "B"),
    hop: Callable[[int, int], float] = lambda source, target: 0.0,
    needs: Mapping[int, Collection[int]] | None = None,
) -> PipelineTimeline:
    """Compute when each action of a schedule begins and ends.

    ``cost``   of an action; by default B costs 2, and F, I and W cost 1 each.
    ``hop``    the time of a transfer from a stage to another on another rank; both compute
               meanwhile, and from one rank to another one message follows the other.
    ``needs``  the stages from which each stage receives in forward; by default the one before.
    Raises: ShardError, with the action at which each rank waits, for a table that does not end.

    >>> found = timeline(schedule("zb", 4, 8))
    >>> round(found.bubble, 3), found.seconds
    (0.111, 27.0)
    """
    takes, gives = _neighbours(s.stages, needs)

    def before(a: Action) -> Row:
        kind = _result(a).kind
        received = [Action(kind, t, a.micro) for t in takes[kind].get(a.stage, ())]
        return received + [a._replace(kind=k) for k in {"F": "", "I": "F", "W": "I"}[kind]]

    begins: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    # (result, stage) -> when it is there; (rank, rank) -> until when that link carries messages
    there: dict[tuple[Action, int], float] = {}
    carries: dict[tuple[int, int], float] = {}
    free = [0.0] * s.size
    left = [deque(row) for row in s.tables]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(left):
            while row and all((x, row[0].stage) in there for x in before(row[0])):
                a, progress = row.popleft(), True
                result, stage = _result(a), a.stage
                begins[a] = max([free[rank], *(there[x, stage] for x in before(a))])
                ends[a] = free[rank] = there[result, stage] = begins[a] + cost(a)
                for user in gives[result.kind].get(stage, ()):
                    there[result, user] = ends[a]
                    if (link := (rank, s.ranks[user])) != (rank, rank):
                        there[result, user] = max(ends[a], carries.get(link, 0)) + hop(stage, user)
                        carries[link] = there[result, user]
    if any(left):
        stuck = [f"rank {r} at {row[0]}" for r, row in enumerate(left) if row]
        raise _refused(f"{s.name} does not end: {', '.join(stuck)} wait for each other")
    busy = tuple(sum(cost(a) for a in row) for row in s.tables)
    return PipelineTimeline(begins, ends, busy)


def _neighbours(
    stages: int, needs: Mapping[int, Collection[int]] | None
) -> tuple[Mapping[str, Mapping[int, Collection[int]]], ...]:
    """Return kind of result -> stage -> those that send it their results, and that get its own."""
    needs = {t: [t - 1] for t in range(1, stages)} if needs is None else needs
    users = {at: [t for t in needs if at in needs[t]] for at in range(stages)}
    return {"F": needs, "I": users, "W": {}}, {"F": users, "I": needs, "W": {}}


def _result(a: Action) -> Action:
    """Return the action under which a result is known: B gives the gradient of inputs as I does."""
    return a._replace(kind="I") if a.kind == "B" else a


def check(s: PipelineSchedule) -> None:
    """Check that the tables of a schedule can run.

    Every micro-batch has at each stage, on the rank of that stage, F and then B, or F, I and W in
    this order, each once.  All stages take the micro-batches in one order, so the n-th receive from
    a stage pairs with its n-th send to this one.  And the tables end: sends are asynchronous, and
    receives are posted for the next action at most, so a rank waits for nothing but the results
    that its action takes.

    Raises: ShardError with the first fault.
    """
    for why in _faults(s):
        raise _refused(f"{s.name}: {why}")
    timeline(s)


def _faults(s: PipelineSchedule) -> Iterator[str]:
    if set(s.ranks) != set(range(s.size)):
        yield f"there are {s.size} tables, and stages on the ranks {sorted(set(s.ranks))}"
    kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
    order: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, row in enumerate(s.tables):
        own = [stage for stage, at in enumerate(s.ranks) if at == rank]
        for a in row:
            if a.kind not in _HELD or a.stage not in own or a.micro not in range(s.micros):
                takes = f"F, B, I and W of the stages {own} and {s.micros} micro-batches"
                yield f"rank {rank} has {a}, and takes {takes}"
            kinds[a.stage, a.micro].append(a.kind)
            order[_result(a).kind, a.stage].append(a.micro)
    for stage, micro in product(range(s.stages), range(s.micros)):
        if (found := " ".join(kinds[stage, micro])) not in ("F B", "F I W"):
            yield f"stage {stage} has for micro-batch {micro} '{found}', not 'F B' or 'F I W'"
    for kind, stage in product("FI", range(s.stages)):
        first, here = order[kind, 0], order[kind, stage]
        if first != here:
            yield f"stage 0 takes the micro-batches of {kind} as {first}, stage {stage} as {here}"
