"""Seconds of a step in memory tiers, from those of its uses and of its links, before it runs.

Computation, the link to the device and the link from it work beside one another.  A load waits for
those before it; a use waits for its chunk; the next step begins when the last gradient is on the
host.  Updates are taken to hide behind the next forward.
"""

from collections.abc import Collection, Mapping, Sequence

from shardlib.tiers.schedule import Uses, repeated


def step_seconds(
    uses: Uses, sizes: Mapping[str, int], room: int, depth: int, computing: Sequence[float],
    rate: float, saved: float = 0.0, fetched: float = 0.0, last: Collection[int] = (),
    trained: Collection[str] | None = None, updates: Mapping[str, int] | None = None,
) -> float:  # fmt: skip
    """Return the seconds of a step that repeats.

    ``computing``  seconds of each use.
    ``rate``       bytes a second of each link.
    ``saved``      bytes that forward sends to the host; ``fetched``  those that backward gets back.
    ``last``       the uses that are in backward; by default the last one of each chunk.
    ``trained``    chunks with gradients; None: those that the update makes stale.
    ``updates``    bytes each way of chunks that are updated on the device, at their first use.

    >>> step_seconds(Uses("abba", "ab"), {"a": 1, "b": 1}, 2, 1, [1, 1, 2, 2], 2.0)
    7.0
    """
    plan = repeated(uses, sizes, room, depth) or []
    last = set(last) or {*{chunk: at for at, chunk in enumerate(uses.order)}.values()}
    trained, updates = uses.stale if trained is None else trained, updates or {}
    first = {chunk: at for at, chunk in reversed(list(enumerate(uses.order)))}
    now, begun, ends = 0.0, 0.0, [0.0]
    up = down = 0.0
    # when each chunk's copy is there
    ready: dict[str, float] = {}
    # two steps: the second finds the copies that the first has left
    for _ in range(2):
        for at, (chunk, made) in enumerate(zip(uses.order, plan, strict=True)):
            for kind, other in made:
                if kind == "load":
                    up = max(up, now) + sizes[other] / rate
                    ready[other] = up
            if at == first[chunk] and chunk in updates:
                # what was brought while the use before it was computed
                up = max(up, begun) + updates[chunk] / rate
                ready[chunk] = max(ready.get(chunk, 0.0), up)
            begun = now = max(now, ready.get(chunk, 0.0))
            if at == first[chunk] and chunk in updates:
                down = max(down, now) + updates[chunk] / rate
            now += computing[at]
            if at not in last:
                down = max(down, now) + saved / rate / len(last)
            elif fetched:
                # behind the loads that are posted
                up = max(up, now - computing[at]) + fetched / rate / len(last)
                now = max(now, up)
            if chunk in trained and at in last:
                down = max(down, now) + sizes[chunk] / rate
        now = max(now, down)
        ends.append(now)
    return ends[2] - ends[1]
