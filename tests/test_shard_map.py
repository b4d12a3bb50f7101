"""Per-device code: what a body returns is what its layout says, on every back end."""

from typing import Any

import pytest
import torch

import shardlib as sl


@pytest.mark.parametrize(("where", "found"), [(".", [5.0, 6.0]), ("x", [5.0, 6.0] * 4)])
def test_a_tensor_made_inside_is_the_same_on_every_rank(
    pool: Any, where: str, found: list[float]
) -> None:
    with sl.simulate(x=4):
        mine = sl.shard_map(lambda v: torch.tensor([5.0, 6.0]), in_layouts="x", out_layouts=where)(
            sl.shard(torch.arange(4.0), "x")
        )
        assert sl.unshard(mine).tolist() == found
        here = sl.unshard(mine).tolist()
    assert pool.run(_plain_inside, where, x=4) == [here] * 4


def _plain_inside(where: str) -> list[float]:
    x = sl.shard(torch.arange(4.0), "x")
    return sl.unshard(
        sl.shard_map(lambda v: torch.tensor([5.0, 6.0]), in_layouts="x", out_layouts=where)(x)
    ).tolist()


@pytest.mark.parametrize(
    ("body", "out"),
    [
        (lambda v: v.sum(), ""),  # no psum
        (lambda v: sl.psum(v.sum(), "y"), ""),  # over the wrong axis
        (lambda v: torch.zeros(()) + sl.axis_index("x"), ""),
        (lambda v: v, "."),
    ],
)
def test_copies_that_differ_are_refused(body: Any, out: str) -> None:
    with sl.simulate(x=2, y=2):
        v = sl.shard(torch.arange(1.0, 5.0), "x")
        with pytest.raises(sl.ShardError, match="differs along axis 'x'"):
            sl.shard_map(body, in_layouts="x", out_layouts=out)(v)


def test_copies_that_differ_by_their_rounding_pass() -> None:
    with sl.simulate(x=3):
        v = sl.shard(torch.randn(3, 7), "x .")

        def body(u: torch.Tensor) -> torch.Tensor:
            return sl.all_gather(u, "x").sum(0) * (1 + 1e-7 * sl.axis_index("x"))

        assert sl.shard_map(body, in_layouts="x .", out_layouts=".")(v).shape == (7,)


@pytest.mark.parametrize("body", [lambda v: 1.0, lambda v: (v, v), lambda v: None])
def test_a_body_returns_one_tensor_for_each_layout(body: Any) -> None:
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="the body returned"):
        sl.shard_map(body, in_layouts="x", out_layouts=("x", "x", "x"))(
            sl.shard(torch.ones(4), "x")
        )
