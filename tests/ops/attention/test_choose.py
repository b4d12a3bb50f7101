"""The plan follows mask and sizes; why names every algorithm, and a pin holds."""

import torch

import shardlib as sl
from shardlib.layouts import Ring
from tests.ops.attention.test_operands import K, Q, V


def test_the_plan_follows_mask_and_sizes() -> None:
    def chosen(
        mask: sl.masks.Mask, order: str = "contiguous", s: int = 8, n: int = 65536, g: int = 8
    ) -> str:
        with sl.record(s=s):
            q = sl.shard(
                torch.empty(1, 32, n, 128, device="meta", dtype=torch.bfloat16), Ring("s", 2, order)
            )
            k = sl.shard(
                torch.empty(1, g, n, 128, device="meta", dtype=torch.bfloat16), Ring("s", 2, order)
            )
            return sl.planning.attention_plan(q, k, k, mask).algorithm

    assert chosen(sl.masks.Causal() & sl.masks.Window(512)) in ("halo", "ring_bidirectional")
    with sl.record(s=8):
        q = sl.shard(torch.empty(1, 8, 8, 64, device="meta"), Ring("s", 2))
        k = sl.shard(torch.empty(1, 8, 1 << 20, 64, device="meta"), Ring("s", 2))
        assert sl.planning.attention_plan(q, k, k).algorithm == "pass_q"  # few queries, many keys


def test_why_names_every_algorithm_and_a_pin_holds() -> None:
    with sl.simulate(s=4):
        xs = [sl.shard(x, Ring("s", 2)) for x in (Q, K, V)]
        table = sl.why("attention", *xs, sl.masks.Causal())
        assert table.chosen in str(table) and "split over two axes" in str(table)
        assert {n for n, _ in table.verdicts} >= {
            "ring",
            "halo",
            "double_ring",
            "allgather",
            "ulysses",
            "usp",
            "pass_q",
            "rsa",
        }
        with sl.algorithm(attention="rsa"), sl.trace() as t:
            sl.ring_attention(*xs)
        assert t.messages == 6  # K round, then V round
