"""Tables of pipelines: laws over drawn sizes, and torch's own tables as the oracle."""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

import shardlib as sl
from shardlib.pipeline.schedules import (
    Action,
    PipelineSchedule,
    check,
    loop,
    placing,
    schedule,
    timeline,
    vee,
)

VS = {"1f1b": (1,), "zbv": (2,), "dualpipev": (2,)}
"""Stages per rank that a schedule takes, where it does not take any number."""

NAMES = ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]

HELD = {
    "gpipe": lambda p, m, v, i: m * v,
    "1f1b": lambda p, m, v, i: p - i,
    "interleaved": lambda p, m, v, i: 2 * (p - 1 - i) + (v - 1) * p + 1,
    "zb": lambda p, m, v, i: p * v,
    "zbv": lambda p, m, v, i: 2 * p,
    "dualpipev": lambda p, m, v, i: 2 * p + 1,
}
"""The bounds that the docstring of ``schedule`` states."""


@st.composite
def sizes(draw: Any, name: str | None = None) -> tuple[str, int, int, int]:
    """A schedule with ranks, micro-batches and stages per rank that it takes."""
    name = name or draw(st.sampled_from(NAMES))
    p, v = draw(st.integers(1, 8)), draw(st.sampled_from(VS.get(name, (1, 2, 3, 4))))
    rounds = name == "interleaved" or (name == "zb" and v > 1)
    least, step = 1, 1
    if rounds:
        least = step = p
    if name == "dualpipev":
        least = 2 * p
    return name, p, draw(st.sampled_from(range(least, 17, step))), v


made = sizes().map(lambda case: (*case, schedule(*case)))
Case = tuple[str, int, int, int, PipelineSchedule]


@given(made)
def test_every_action_occurs_once_on_the_rank_of_its_stage(case: Case) -> None:
    _, p, m, v, s = case
    assert (s.size, s.stages, s.ranks) == (p, p * v, placing(*case[:2], v))
    assert sorted(s.ranks) == sorted([*range(p)] * v)
    found = [a for row in s.tables for a in row]
    assert len(set(found)) == len(found)
    assert all(s.ranks[a.stage] == rank for rank, row in enumerate(s.tables) for a in row)
    kinds = defaultdict(str)
    for a in found:
        kinds[a.stage, a.micro] += a.kind
    assert set(kinds) == {(stage, micro) for stage in range(p * v) for micro in range(m)}
    assert {"".join(sorted(k)) for k in kinds.values()} <= {"BF", "FIW"}


@given(made, st.randoms(use_true_random=False))
def test_every_forward_comes_before_its_backward_and_i_before_w(case: Case, random: Any) -> None:
    """In time, whatever actions and transfers cost."""
    s = case[-1]
    seconds = {a: random.uniform(0.1, 3) for row in s.tables for a in row}
    line = timeline(s, seconds.__getitem__, lambda source, target: 0.5)
    for a, begin in line.begins.items():
        assert line.ends[a] == begin + seconds[a]
        for b, late in inputs(s, a):
            assert line.ends[b] + 0.5 * late <= begin
    for row in s.tables:
        assert all(line.ends[a] <= line.begins[b] for a, b in pairwise(row))


def inputs(s: PipelineSchedule, a: Action) -> Iterator[tuple[Action, bool]]:
    """The actions whose results an action takes, and whether they come from another rank."""
    here = {x for row in s.tables for x in row}
    kinds, stages = "I", [a.stage]
    if a.kind == "F":
        kinds, stages = "F", [a.stage - 1]
    elif a.kind in "BI":
        yield a._replace(kind="F"), False
        kinds, stages = "BI", [a.stage + 1]
    for b in (Action(kind, stage, a.micro) for kind in kinds for stage in stages):
        if b in here:
            yield b, s.ranks[b.stage] != s.ranks[a.stage]


@given(made)
def test_in_flight_is_at_most_the_stated_bound(case: Case) -> None:
    name, p, m, v, s = case
    for i in range(p):
        assert s.held[i] <= min(m * v, HELD[name](p, m, v, i))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 3, 4])
def test_the_stated_bound_is_reached(name: str, p: int) -> None:
    s = schedule(name, p, 4 * p)
    v = s.stages // p
    assert s.held == tuple(HELD[name](p, 4 * p, v, i) for i in range(p))


@given(made, st.randoms(use_true_random=False))
def test_ranks_that_receive_for_one_action_at_a_time_never_wait_for_ever(
    case: Case, random: Any
) -> None:
    """Each pair of stages has a queue for each way, without labels; ranks go on in any order."""
    s = case[-1]
    sent: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)
    left = [deque(row) for row in s.tables]
    while any(left):
        able = [
            r for r, row in enumerate(left) if row and all(sent[q] for q in queues(s, row[0])[0])
        ]
        assert able, f"deadlock at {[row[0] for row in left if row]}"
        a = left[random.choice(able)].popleft()
        received, sends = queues(s, a)
        assert all(sent[q].popleft() == a.micro for q in received)
        for q in sends:
            sent[q].append(a.micro)
    assert not any(sent.values())


def queues(s: PipelineSchedule, a: Action) -> list[list[tuple[str, int, int]]]:
    """The queues (way, from, to) from which an action receives, and those to which it sends."""
    way, step = ("up", 1) if a.kind == "F" else ("down", -1)
    pairs = [(a.stage - step, a.stage), (a.stage, a.stage + step)]
    return [
        [(way, u, t)]
        if a.kind != "W" and {u, t} <= {*range(s.stages)} and s.ranks[u] != s.ranks[t]
        else []
        for u, t in pairs
    ]


BUBBLES = {  # torch's zbv and dualpipev have these too
    (2, 4): (0.2, 0.2, 0.111, 0.077, 0.040, 0.040),
    (4, 8): (0.273, 0.273, 0.158, 0.111, 0.059, 0.059),
    (4, 16): (0.158, 0.158, 0.086, 0.059, 0.030, 0.030),
    (8, 16): (0.304, 0.304, 0.179, 0.127, 0.068, 0.068),
}


@pytest.mark.parametrize(("p", "m"), BUBBLES)
def test_bubbles_are_those_of_the_papers(p: int, m: int) -> None:
    two = {"interleaved": 2}
    found = [round(timeline(schedule(n, p, m, two.get(n, 1))).bubble, 3) for n in NAMES]
    assert tuple(found) == BUBBLES[p, m]


@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 4))
def test_zb_h1_is_idle_for_as_long_as_the_paper_says(p: int, more: int, v: int) -> None:
    """(p - 1) (F + I - W) of a rank's time, where 1F1B is idle for (p - 1) (F + I + W)."""
    m = p + more
    line = timeline(schedule("zb", p, m))
    assert line.seconds - 3 * m == p - 1
    whole = timeline(schedule("1f1b", p, m))
    assert whole.seconds - 3 * m == 3 * (p - 1) and 2 * line.bubble <= whole.bubble + 1e-12
    assert max(schedule("zb", p, m).held) == max(schedule("1f1b", p, m).held)
    parted = timeline(schedule("zb", p, 2 * p, v))
    assert parted.seconds - 6 * p * v == p - 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [2, 3, 8])
def test_one_rank_is_never_idle(name: str, m: int) -> None:
    assert timeline(schedule(name, 1, m)).bubble == 0


def test_a_hop_delays_what_crosses_and_needs_may_skip_stages() -> None:
    s = schedule("1f1b", 3, 1)
    slow = timeline(s, hop=lambda source, target: 10.0 * abs(source - target))
    assert slow.begins[Action("F", 2, 0)] == 22 and slow.seconds == 3 * 3 + 40
    skip = timeline(s, hop=lambda source, target: 10.0 * abs(source - target), needs={2: [0]})
    assert skip.begins[Action("F", 2, 0)] == 21 and skip.begins[Action("F", 1, 0)] == 0
    assert skip.begins[Action("B", 0, 0)] == 21 + 1 + 2 + 20
    assert timeline(schedule("zbv", 2, 1), hop=lambda *_: 10.0).begins[Action("F", 2, 0)] == 12


# ------------------------------------------------------------ torch's own tables


KINDS = {torch_schedules._ComputationType.from_str(kind): kind for kind in "FBIW"}


def torch_table(kind: str, p: int, m: int, v: int, style: str = "loop") -> list[list[str]]:
    """The actions of a schedule of torch, made from stages that only state their numbers."""
    stages = [
        SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, submod=None, stage_index=s)
        for s, rank in enumerate(vee(p) if style == "v" else loop(p, v))
        if rank == 0
    ]
    make: Any = getattr(torch_schedules, kind)
    single = issubclass(make, torch_schedules.PipelineScheduleSingle)
    order = make(stages[0] if single else stages, n_microbatches=m).pipeline_order
    rows = []
    for rank in range(p):
        flat = [b for a in order[rank] if a is not None for b in (a.sub_actions or (a,))]
        own = [(KINDS.get(a.computation_type), a) for a in flat]
        rows.append([f"{k}{a.stage_index}.{a.microbatch_index}" for k, a in own if k])
    return rows


def table(s: PipelineSchedule) -> list[list[str]]:
    return [[*map(str, row)] for row in s.tables]


ORACLES = {
    "gpipe": ("ScheduleGPipe", "loop"),
    "1f1b": ("Schedule1F1B", "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", "loop"),
    "zb": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_tables_equal_torch_s_action_by_action(name: str, data: Any) -> None:
    """GPipe's with one stage per rank; 1F1B's and ZB-H1's where torch takes the sizes."""
    _, p, m, v = data.draw(sizes(name))
    v = 1 if name == "gpipe" else v
    if name in ("1f1b", "zb"):
        m = -(-m // p) * p
    kind, style = ORACLES[name]
    theirs = torch_table(kind, p, m, v, style)
    if name == "1f1b":  # torch counts the forwards of the last rank from 1
        forward = re.compile(rf"F{p - 1}\.(\d+)")
        theirs[-1] = [forward.sub(lambda f: f"F{p - 1}.{int(f[1]) - 1}", a) for a in theirs[-1]]
    assert table(schedule(name, p, m, v)) == theirs


@given(sizes("gpipe"))
def test_gpipe_of_more_stages_has_the_bubble_and_memory_of_torch_s_breadth_first(case: Any) -> None:
    _, p, m, v = case
    mine = schedule(*case)
    rows = torch_table("ScheduleLoopedBFS", p, m, v)
    read = [[Action(t[0], *map(int, t[1:].split("."))) for t in row] for row in rows]
    theirs = PipelineSchedule("bfs", m, mine.ranks, tuple(map(tuple, read)))
    assert mine.held == theirs.held
    assert timeline(mine).seconds <= timeline(theirs).seconds


def torch_takes(s: PipelineSchedule) -> bool:
    """Whether torch's own proof takes a table: its order, and its sends and receives."""
    kinds = {kind: name for name, kind in KINDS.items()}
    rows: Any = {
        r: [torch_schedules._Action(a.stage, kinds[a.kind], a.micro) for a in row]
        for r, row in enumerate(s.tables)
    }
    try:
        ranks = torch_schedules._validate_schedule(rows, s.size, s.stages, s.micros)
        torch_schedules._add_send_recv(rows, ranks.__getitem__, s.stages)
    except AssertionError:
        return False
    return True


@given(made, st.randoms(use_true_random=False))
def test_a_table_is_refused_where_torch_refuses_it(case: Case, random: Any) -> None:
    """Two actions of a rank change places; torch takes tables whose stages differ in order too."""
    s = case[-1]
    rank = random.randrange(s.size)
    row = list(s.tables[rank])
    i = random.randrange(len(row))
    j = (i + random.randrange(1, 5)) % len(row)
    row[i], row[j] = row[j], row[i]
    tables = (*s.tables[:rank], tuple(row), *s.tables[rank + 1 :])
    other = PipelineSchedule("swapped", s.micros, s.ranks, tables)
    try:
        check(other)
    except sl.ShardError as e:
        assert not torch_takes(other) or "takes the micro-batches of" in e.message
    else:
        assert torch_takes(other)


# ------------------------------------------------------------ refusals


REFUSED = [
    (("1f2b", 2, 2), "unknown schedule '1f2b'; there are gpipe, .*; did you mean '1f1b'", "'1f1b'"),
    (("1f1b", 2, 2, 2), "1f1b of 2 ranks with 2 stages each; it takes 1 of them", "per_rank=1"),
    (("zbv", 2, 2, 3), "zbv of 2 ranks with 3 stages each; it takes 2 of them", "per_rank=2"),
    (("gpipe", 2, 2, 0), "with 0 stages each; it takes any number of them", "per_rank=1"),
    (("gpipe", 2, 0), "one micro-batch or more, not 0", "microbatches=4"),
    (("interleaved", 4, 6, 2), "6 is no multiple of 4", "microbatches=8"),
    (("interleaved", 4, 3, 2), "3 is no multiple of 4", "microbatches=4"),
    (("zb", 2, 3, 2), "2 stages per rank .* 3 is no multiple of 2", "microbatches=4"),
    (("dualpipev", 3, 5), "dualpipev takes at least 6 micro-batches", "microbatches=6"),
]


@pytest.mark.parametrize(("call", "why", "fix"), REFUSED, ids=lambda v: str(v)[:24])
def test_sizes_that_a_schedule_does_not_take_are_refused(call: Any, why: str, fix: str) -> None:
    with pytest.raises(sl.ShardError, match=why) as e:
        schedule(*call)
    assert fix in e.value.fix
    name, p, m, *v = call
    numbers = {k: int(n) for k, n in re.findall(r"(\w+)=(\d+)", e.value.fix)}
    per_rank = numbers.get("per_rank", *v or [1])
    if name in NAMES:
        schedule(name, p, max(1, numbers.get("microbatches", m)), per_rank)


def test_a_schedule_of_one_s_own_is_used_by_its_name() -> None:
    @sl.extend.schedule("backwards", stages_per_rank=2, ranks=lambda p, v: [0] * v + [1] * v)
    def backwards(p: int, m: int, v: int) -> Any:
        micros = range(m - 1, -1, -1)
        forward = [[("F", s, k) for s in own for k in micros] for own in ((0, 1), (2, 3))]
        return [
            row + [(kind, s, k) for s in own for k in micros for kind in "IW"]
            for row, own in zip(forward, ((1, 0), (3, 2)), strict=True)
        ]

    s = schedule("backwards", 2, 3)
    assert s.ranks == placing("backwards", 2) == (0, 0, 1, 1) and s.tables[1][0] == ("F", 2, 2)
    assert s.held == (6, 6)
    sl.extend.schedule("backwards")(lambda p, m, v: [[("F", 0, 0), ("B", 0, 0)]])
    assert table(schedule("backwards", 1, 1)) == [["F0.0", "B0.0"]]


def test_a_step_runs_the_schedule_that_its_name_has_then() -> None:
    """One that places stages on other ranks than when the module was cut is refused."""
    import torch
    from torch import nn

    order: list[str] = []

    def named(kinds: str, **how: Any) -> None:
        @sl.extend.schedule("mine", stages_per_rank=1, **how)
        def mine(p: int, m: int, v: int) -> Any:
            order.append(kinds)
            ranks = how.get("ranks", range)(p, 1)
            return [[(kind, ranks.index(r), 0) for kind in kinds] for r in range(p)]

    named("FB", ranks=lambda p, v: [*range(p)])
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2)])
    with sl.simulate(pipe=2):
        stages = sl.Stages("pipe", schedule="mine", example=torch.ones(1, 2))
        apply, params = sl.parallelize(model, [("*", "...")], stages=stages)
        step = sl.value_and_grad(lambda p, x: apply(p, x).mean(), microbatches=1)
        for kinds in ("FB", "FB", "FIW", "FB"):
            named(kinds, ranks=lambda p, v: [*range(p)])
            step(params, torch.ones(1, 2))
        assert order == ["FB", "FB", "FIW", "FB"]
        step(params, torch.ones(1, 2))
        assert order == ["FB", "FB", "FIW", "FB"]
        named("FB", ranks=lambda p, v: [*range(p)][::-1])
        with pytest.raises(sl.ShardError, match="registered anew, with stages on other ranks"):
            step(params, torch.ones(1, 2))


FAULTY = {
    "F0.0 B0.0 B0.0 | F1.0 B1.0": "stage 0 has for micro-batch 0 'F B B', not 'F B' or 'F I W'",
    "F0.0 | F1.0 B1.0": "stage 0 has for micro-batch 0 'F', not",
    "B0.0 F0.0 | F1.0 B1.0": "stage 0 has for micro-batch 0 'B F', not",
    "F0.0 I0.0 | F1.0 B1.0": "stage 0 has for micro-batch 0 'F I', not",
    "F0.0 W0.0 I0.0 | F1.0 B1.0": "stage 0 has for micro-batch 0 'F W I', not",
    "F0.0 B0.0 F1.0 | B1.0": r"rank 0 has F1.0, and takes F, B, I and W of the stages \[0\] and 1 micro",
    "F0.0 B0.0 F2.0 | F1.0 B1.0": "rank 0 has F2.0, and takes",
    "F0.0 B0.0 X0.0 | F1.0 B1.0": "rank 0 has X0.0, and takes",
    "F0.0 B0.0 F0.1 | F1.0 B1.0": "rank 0 has F0.1, and takes",
    "F0.0 B0.0": r"there are 1 tables, and stages on the ranks \[0, 1\]",
    "F0.0 B0.0 | F1.0 B1.0 |": "there are 3 tables",
    "F0.0 F0.1 B0.0 B0.1 | F1.1 F1.0 B1.0 B1.1": r"of F as \[0, 1\], stage 1 as \[1, 0\]",
    "F0.0 F0.1 B0.0 B0.1 | F1.0 F1.1 I1.1 B1.0 W1.1": r"of I as \[0, 1\], stage 1 as \[1, 0\]",
    "F0.0 B0.0 F0.1 B0.1 | F1.0 F1.1 B1.0 B1.1": "end: rank 0 at B0.0, rank 1 at F1.1 wait for",
}


@pytest.mark.parametrize("text", FAULTY)
def test_a_faulty_table_is_refused_with_its_fault(text: str) -> None:
    rows = [[(a[0], *map(int, a[1:].split("."))) for a in row.split()] for row in text.split("|")]
    sl.extend.schedule("mine")(lambda p, m, v: rows)
    with pytest.raises(sl.ShardError, match=f"schedule: mine.*{FAULTY[text]}"):
        schedule("mine", 2, 2 if text.count("F0.1") and "B0.1" in text else 1)


@pytest.mark.parametrize("rows", [None, [None], [["F0.0"]], [[("F", 0)]], [[("F", 0.0, 0)]]])
def test_a_table_of_other_values_is_refused(rows: Any) -> None:
    sl.extend.schedule("mine")(lambda p, m, v: rows)
    with pytest.raises(sl.ShardError, match="its tables are not"):
        schedule("mine", 1, 1)


def test_ranks_without_their_stages_are_refused() -> None:
    sl.extend.schedule("mine", ranks=lambda p, v: [0] * p * v)(lambda p, m, v: [])
    with pytest.raises(sl.ShardError, match=r"of 2 ranks each must have 1 stages, not \[0, 0\]"):
        placing("mine", 2)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("gpipe",), "'gpipe' is a built-in schedule"),
        (("",), "'' is no name"),
        ((print,), "is no name"),
        (("mine", 0), "a number of stages or None, not 0"),
        (("mine", "2"), "a number of stages or None, not '2'"),
    ],
)
def test_names_and_numbers_of_a_registration_are_checked(arguments: Any, why: str) -> None:
    with pytest.raises(sl.ShardError, match=why) as e:
        sl.extend.schedule(*arguments)
    eval(e.value.fix, {"sl": sl})(lambda p, m, v: [])
