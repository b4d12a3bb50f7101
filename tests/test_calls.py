"""A seeded sample of the fuzz: drawn calls equal dense or are
refused, alike on simulated and real ranks.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from tests import namespace
from tests.fuzz_calls import check, dense, draw, judge, ours

SAMPLE = 160
REAL = 60


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


def _met() -> dict[str, str]:
    """Calls that people met as errors of torch's own: what each gives, or how it is refused."""
    table = sl.shard(torch.arange(24.0).reshape(6, 4), ". x")
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    apply, params = sl.parallelize(module, [("*", "...")])
    copied, x = copy.deepcopy(apply), torch.ones(2, 4)
    calls: dict[str, Callable[[], Any]] = {
        "apply": lambda: torch.equal(*(sl.unshard(f(params, x)) for f in (apply, copied))),
        "masked": lambda: sl.unshard(torch.masked.mean(table, mask=table > 3)).item(),
        "sparse": lambda: F.embedding(torch.tensor([0, 1]), table, sparse=True),
        "lazy": lambda: sl.parallelize(nn.LazyLinear(4), [("*", "...")]),
        "fewer operands": lambda: torch.einsum("ij,jk->ik", table),
        "fewer letters": lambda: torch.einsum("ijk,kl->ij", table, table),
        "meta": lambda: table.to("meta"),
        "array": lambda: np.ones(4) * table,
        "bias": lambda: F.linear(table, table, torch.ones(5)),
    }
    found = {}
    with sl.implicit():
        for name, call in calls.items():
            try:
                found[name] = f"gives {call()}"
            except sl.ShardError as e:
                found[name] = e.message
    return found


MET = {
    "apply": "gives True", "masked": "gives 13.5", "sparse": "sparse are not supported",
    "lazy": "has no size before", "fewer operands": "fewer operands were provided",
    "fewer letters": "number of subscripts", "meta": "a meta tensor has no values",
    "array": "an array met a sharded tensor", "bias": "a bias of 5 does not fit",
}  # fmt: skip


def test_calls_that_ended_in_errors_of_torchs_are_right_or_refused_by_name(pool: Any) -> None:
    with sl.simulate(x=4):
        told = [_met()]
    for found in [*told, *pool.run(_met, x=4)]:
        assert [n for n, text in MET.items() if text not in found[n]] == []
