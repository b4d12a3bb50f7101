"""A bias and a sink become this rank's block of the scores, however they were given."""

import pytest
import torch

import shardlib as sl
from shardlib.ops.attention.case import bias_and_sink

B, H, S, T = 2, 4, 6, 8


@pytest.mark.parametrize(
    "shape", [(S, T), (H, S, T), (B, H, S, T), (1, T), (B, 1, S, 1), (H, 1, T)]
)
@pytest.mark.parametrize("layout", [None, "..."])
def test_a_bias_is_cut_as_the_queries_are(shape: tuple[int, ...], layout: str | None) -> None:
    bias = torch.randn(shape)
    with sl.simulate(d=2, h=2, s=3):
        q = sl.shard(torch.zeros(B, H, S, 4), "d h s .")
        k = sl.shard(torch.zeros(B, H, T, 4), "d h . .")
        given = bias if layout is None else sl.shard(bias, layout)
        raw, none = bias_and_sink(q, k, given, None)
    assert raw is not None and none is None
    blocks = raw.expand(2 * 2 * 3, 1, 2, 2, T).reshape(2, 2, 3, 1, 2, 2, T)
    whole = blocks.permute(0, 3, 1, 4, 2, 5, 6).reshape(B, H, S, T)
    assert torch.equal(whole, bias.expand(B, H, S, T))


def test_a_sink_is_one_score_for_each_local_head() -> None:
    sink = torch.arange(4.0)
    with sl.simulate(h=2, s=2):
        q, k = (sl.shard(torch.zeros(1, H, 4, 4), ". h s .") for _ in "qk")
        _, raw = bias_and_sink(q, k, None, sink)
        with pytest.raises(sl.ShardError, match="one score for each of 4 heads, not"):
            bias_and_sink(q, k, None, sink[:3])
        with pytest.raises(sl.ShardError, match=r"a bias is \[.., 4, 4\]"):
            bias_and_sink(q, k, torch.zeros(3, 4), None)
    assert raw is not None
    assert raw.expand(4, 1, 2, 1).flatten(1).tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
