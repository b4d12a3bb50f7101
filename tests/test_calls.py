"""A seeded sample of the fuzz: drawn calls equal dense or are
refused, alike on simulated and real ranks.
"""

from typing import Any

import pytest
import torch

import shardlib as sl
from tests import namespace
from tests.fuzz_calls import check, dense, draw, judge, ours

SAMPLE = 300
REAL = 150


@pytest.mark.parametrize("part", range(4))
def test_drawn_calls_equal_dense_or_are_refused(part: int) -> None:
    found = []
    for seed in range(part, SAMPLE, 4):
        case = draw(seed)
        wrong, _ = check(case)
        if wrong:
            found.append(f"{case.text()}\n    -> {wrong}")
    assert not found, "\n".join(found)


def _answers(seeds: list[int]) -> list[tuple[str, ...]]:
    """What is wrong with each case on this rank, and how it
    came out: value or error, bytes moved.
    """
    found = []
    for seed in seeds:
        case = draw(seed, ranks=4)
        got = ours(case)
        found.append(
            (
                case.text(),
                judge(got, dense(case)),
                got.kind,
                got.error.partition(" at ")[0],
                str(got.moved),
            )
        )
    return found


@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_real_ranks_answer_as_simulated_ones_do(pool: Any, axes: dict[str, int]) -> None:
    seeds = [s for s in range(REAL) if draw(s, ranks=4).axes == axes]
    with sl.simulate(**axes):
        simulated = _answers(seeds)
    found = []
    for want, *ranks in zip(
        simulated, *pool.run(_answers, seeds, seconds=150, **axes), strict=True
    ):
        wrong = next((got for got in ranks if got[1] or got[2:] != want[2:]), None)
        if wrong is not None:
            found.append(f"{want[0]}\n    -> {wrong[1:]}\n    simulated {want[1:]}")
    assert not found, "\n".join(found)


def test_names_of_torch_give_what_dense_gives_or_are_refused_by_the_library() -> None:
    """A part of ``python -m tests.namespace``, which calls them all."""
    assert list(namespace.hunt(150, seed=0)) == []
    dense = torch.rand(4, 4, dtype=torch.float64)
    with sl.simulate(x=2, y=2):
        x = sl.shard(dense, "x y")
        assert not namespace.judge("torch", "from_dlpack", ("x",), dense, x)
        assert namespace.judge("torch", "neg", ("x",), dense, x * 2) == "gives other values"
