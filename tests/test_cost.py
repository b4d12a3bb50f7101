"""Seconds of a cost follow from the links: latency per message, time per byte."""

import torch

import shardlib as sl


def test_a_slow_axis_costs_more() -> None:
    with sl.simulate(x=2, y=2) as mesh:
        a, b = sl.shard(torch.zeros(64, 64), "x y"), sl.shard(torch.zeros(64, 64), "x y")
        cost = dict(sl.why("matmul", a, b).verdicts)["summa"].cost  # type: ignore[union-attr]
        mesh.links["x"] = sl.planning.Link(alpha=1.0, beta=0.0)
        assert cost.seconds(mesh.links) >= 1.0 > cost.seconds()


def test_a_link_that_is_slow_to_start_prefers_fewer_messages() -> None:
    with sl.simulate(x=3, y=3) as mesh:
        a, b = sl.shard(torch.zeros(9, 9), "x y"), sl.shard(torch.zeros(9, 9), "x y")
        prices = {
            n: m.cost
            for n, m in sl.why("matmul", a, b).verdicts
            if isinstance(m, sl.extend.Match) and not m.gathered
        }
        for axis in mesh.names:
            mesh.links[axis] = sl.planning.Link(alpha=1.0, beta=0.0)
        mesh.memo.forget()
        fewest = min(c.messages for c in prices.values())
        assert prices[sl.why("matmul", a, b).chosen].messages == fewest
        for axis in mesh.names:
            mesh.links[axis] = sl.planning.Link(alpha=0.0, beta=1.0)
        assert prices[sl.why("matmul", a, b).chosen].bytes == min(c.bytes for c in prices.values())
