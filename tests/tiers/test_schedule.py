"""A step's moves never exceed the room, and every chunk is on the device when it is used."""

from collections import OrderedDict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardlib.tiers.schedule import TRANSITIONS, Uses, loads, moves


@st.composite
def cases(draw: Any) -> Any:
    names = "abcdefgh"[: draw(st.integers(2, 8))]
    uses = draw(st.lists(st.sampled_from(names), min_size=1, max_size=24))
    sizes = {c: draw(st.integers(1, 5)) for c in names}
    room = max(sizes.values()) + draw(st.integers(0, 20))
    stale = draw(st.sets(st.sampled_from(names)))
    return Uses(uses, stale), sizes, room, draw(st.integers(0, 3))


def lru(uses: Any, room: int) -> int:
    """Chunks that least recently used loads in a step of steady state."""
    held: OrderedDict[str, None] = OrderedDict()
    loaded = 0
    for _ in range(4):
        loaded = 0
        for c in uses:
            if c not in held:
                if len(held) == room:
                    held.popitem(last=False)
                loaded += 1
            held[c] = None
            held.move_to_end(c)
    return loaded


@given(cases())
def test_every_use_is_on_the_device_and_nothing_exceeds_the_room(case: Any) -> None:
    uses, sizes, room, depth = case
    held: set[str] = set()
    for at, now in (*enumerate(uses.order), *enumerate(uses.order)):
        for kind, c in moves(uses, at, now, held, sizes, room, depth) or []:
            assert (c in held) == (kind == "drop") and (kind == "load" or c != now)
            held ^= {c}
            assert sum(sizes[c] for c in held) <= room
        assert now in held


@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2))
def test_forward_and_backward_load_as_the_formula_says(n: int, room: int, depth: int) -> None:
    names = [f"h.{i}" for i in range(n)]
    order, sizes, room = names + names[::-1], dict.fromkeys(names, 1), min(room, n)
    if depth < room:
        assert len(loads(Uses(order), sizes, room, depth) or []) == 2 * (n - room)
        assert len(loads(Uses(order, names), sizes, room, depth) or []) == 2 * n - room


@given(cases())
def test_it_loads_no_more_than_least_recently_used(case: Any) -> None:
    uses, sizes, room, _ = case
    sizes = dict.fromkeys(sizes, 1)
    found = loads(Uses(uses.order), sizes, room, 0)
    assert found is not None and len(found) <= lru(uses.order, room)


@given(cases())
def test_a_use_that_does_not_fit_has_no_moves(case: Any) -> None:
    uses, sizes, _, depth = case
    at, now = 0, uses.order[0]
    assert moves(uses, at, now, (), sizes, sizes[now] - 1, depth) is None


def test_a_copy_is_dropped_only_when_it_is_resident_and_unchanged() -> None:
    assert [s for s, event in TRANSITIONS if event == "drop"] == ["resident"]
    states = {s for s, _ in TRANSITIONS}
    reached, before = {"absent"}, set[str]()
    while reached != before:
        before = set(reached)
        reached |= {to for (s, _), to in TRANSITIONS.items() if s in reached}
    assert reached == states == set(TRANSITIONS.values())
