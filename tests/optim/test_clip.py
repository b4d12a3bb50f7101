"""Norms and clips: each element counted once, whatever the layout."""

import pytest
import torch

import shardlib as sl
from tests.optim.cases import LAYOUTS, PARAMS


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_global_norm_counts_each_element_once_in_one_collective(
    layouts: dict[str, str],
) -> None:
    want = torch.cat([p.reshape(-1) for p in PARAMS.values()]).norm()
    for axes in ({"x": 2, "y": 2}, {"data": 3, "x": 1, "y": 2}, {"x": 4, "y": 2}):
        with sl.simulate(**axes), sl.trace() as t:
            got = sl.optim.global_norm({k: sl.shard(p, layouts[k]) for k, p in PARAMS.items()})
        assert abs(float(got - want)) < 1e-12 * float(want) and len(t.events) == 1


def test_the_global_norm_of_many_fp32_elements_keeps_its_digits() -> None:
    x = torch.full((2_000_000,), 0.1)
    assert abs(float(sl.optim.global_norm(x)) / float(x.double().norm()) - 1) < 1e-12


def test_clipping_scales_to_the_bound_and_no_further() -> None:
    tx = sl.optim.clip_by_global_norm(1.0)
    big, _ = tx.update({"w": torch.full((4,), 3.0)}, tx.init(None))
    small, _ = tx.update({"w": torch.full((4,), 0.1)}, tx.init(None))
    assert abs(float(sl.optim.global_norm(big)) - 1) < 1e-5 and torch.equal(
        small["w"], torch.full((4,), 0.1)
    )
