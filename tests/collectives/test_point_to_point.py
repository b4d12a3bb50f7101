from typing import Any

import torch

import shardlib as sl
from shardlib.collectives.point_to_point import Message, Messages


def _round(dtype: torch.dtype) -> list[bool]:
    """Send two messages to every other rank; take them in the other order."""
    mesh = sl.current_mesh()
    assert mesh.coord is not None
    me, p = mesh.coord["x"], mesh["x"]
    others = [r for r in range(p) if r != me]

    def block(source: int, k: int) -> torch.Tensor:
        return torch.full((2, 3), 2 * source + k).to(dtype)

    coming = {r: iter([Message((r, k), (2, 3), dtype) for k in range(2)]) for r in others}
    messages = Messages(mesh, "x", coming)
    for r in others:
        messages.expect((r, 0), r)
    for to in others:
        for k in range(2):
            messages.send((me, k), block(me, k), to)
    found = []
    for r in others:
        messages.expect((r, 1), r)
        found += [torch.equal(messages.take((r, k)), block(r, k)) for k in (1, 0)]
    messages.finish()
    return found


def test_messages_arrive_in_the_order_of_their_sender(pool: Any) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.int16, torch.complex128):
        assert pool.run(_round, dtype, x=4) == [[True] * 6] * 4


def test_a_message_of_simulated_ranks_is_handed_over() -> None:
    messages = Messages(sl.simulate(x=2), "x", {})
    block = torch.ones(2)
    messages.send("a", block, 1)
    assert [*messages.here] == ["a"]
    assert torch.equal(messages.take("a"), block) and not messages.here


def _answered() -> list[str]:
    """Rank 0 sends "a" and "b", and takes "c", which rank 1 sends when it has "a"; what is kept."""
    mesh = sl.current_mesh()
    assert mesh.coord is not None
    if me := mesh.coord["x"]:
        coming, take = [Message(k, (2,), torch.float32) for k in "ab"], "acb"
    else:
        coming, take = [Message("c", (2,), torch.float32, arrived=1)], "abc"
    messages = Messages(mesh, "x", {1 - me: iter(coming)})
    labels = lambda messages: "".join(label for label, *_ in messages.leaving[1 - me])  # noqa: E731
    kept = []
    for k in take:
        if (k == "c") == bool(me):
            messages.send(k, torch.ones(2), 1 - me)
        else:
            messages.expect(k, 1 - me)
            messages.take(k)
        kept.append(labels(messages))
    messages.finish()
    return [*kept, labels(messages)]


def test_a_block_is_kept_until_it_is_answered(pool: Any) -> None:
    to_1, to_0 = ["a", "ab", "b", ""], ["", "c", "c", ""]
    assert pool.run(_answered, x=2, y=2) == [to_1, to_1, to_0, to_0]
