"""Sums of the summary are the bytes that ranks hold."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))


def test_bytes_are_those_of_blocks_and_of_whole_tensors() -> None:
    with sl.simulate(data=2, x=2):
        _, params = sl.parallelize(model(), sl.recipes.megatron1d(model()))
        found = sl.seeing.summary(params)
    assert [r.name for r in found.rows] == sorted(params)
    assert found.whole == 4 * sum(p.numel() for p in model().parameters())
    assert found.bytes == sum(p.raw[0].numel() * 4 for p in params.values())
    assert found.state == 0 and "state" not in str(found)
    assert "f32[8@x, 6]" in str(found) and "data=2 x=2" in str(found)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_state_of_buckets_is_counted_to_its_parameters(stage: Any) -> None:
    with sl.simulate(data=2):
        _, params = sl.parallelize(model(), [("*", "...")])
        tx = sl.optim.zero(sl.optim.adamw(1e-3), axis="data", stage=stage)
        state = tx.init(params)
        found = sl.seeing.summary(params, state)
        plain = sl.seeing.summary(params, sl.optim.adamw(1e-3).init(params))
        held = sum(x.raw[0].numel() * 4 for tree in (state.mu, state.nu) for x in tree.values())
    assert [r.state for r in found.rows] == [r.state // 2 for r in plain.rows]
    assert found.state == held and plain.state == 2 * plain.bytes and plain.other == 0
    assert "state per rank" in str(found)


def test_a_dictionary_of_parameters_prints_a_line_each() -> None:
    with sl.simulate(x=2):
        _, params = sl.parallelize(nn.Linear(64, 64), [("*", "...")])
        assert len(str(params).splitlines()) == 1 and "f32[64, 64]" in str(params)
        assert "tensor([1., 1., 1." in repr(sl.shard(torch.ones(3), "..."))


def test_a_notebook_gets_a_table() -> None:
    with sl.simulate(x=2):
        page = sl.seeing.summary({"a<b": sl.shard(torch.ones(4), "x")})._repr_html_()
    assert page.count("<tr>") == 3 and "a&lt;b" in page
