"""The same primitives give the same values, and the same counts, on every back end."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    unwrap,
    wrap,
)
from tests import fixes
from tests.collectives.primitives import (
    all_on_rank,
    expected,
    of_nothing,
)


@pytest.mark.parametrize("make", [sl.simulate, sl.record])
def test_who_receives_nothing_gets_zeros_also_where_there_is_one_rank(make: Any) -> None:
    """A halo of one-sized axes: the edge has no neighbour, and keeps nothing of its own."""
    with make(x=1, y=2) as m:
        x = torch.ones(3, device=m.device, requires_grad=True)
        y = sl.ppermute(x, "x", [(i, i + 1) for i in range(sl.axis_size("x") - 1)])
        y.sum().backward()
        assert y.shape == (3,) and x.grad is not None
        if make is sl.simulate:
            assert not y.any() and not x.grad.any()


def test_flattened_axes_that_are_not_the_whole_mesh(pool8: Any) -> None:
    mesh, axes = {"x": 2, "y": 2, "z": 2}, [("x", "y"), ("y", "x"), ("z", "x"), "y"]
    answers = pool8.run(all_on_rank, axes, **mesh)
    for name, axis in answers[0]:
        want = expected(name, mesh, axis, torch.float64)
        for rank, answer in enumerate(answers):
            said = f"{name} over {axis} on rank {rank}"
            torch.testing.assert_close(
                answer[name, axis][0].cpu(), want[rank].cpu(), rtol=1e-12, atol=0, msg=said
            )


def test_blocks_without_elements_travel(pool: Any) -> None:
    for mesh, axis in [({"x": 2, "y": 2}, "y"), ({"x": 4}, "x")]:
        with sl.simulate(**mesh):
            want = of_nothing(axis)
        assert pool.run(of_nothing, axis, **mesh) == [want] * 4


def test_pvary_sums_its_gradient() -> None:
    with sl.simulate(x=3) as m:
        raw = torch.ones(3, 2, requires_grad=True)
        y = sl.collectives.pvary(wrap(raw, m), "x")
        unwrap(y).backward(torch.arange(6.0).reshape(3, 2))
    assert raw.grad is not None and torch.equal(raw.grad, torch.tensor([[6.0, 9.0]] * 3))


MISTAKES = [
    (lambda x: sl.psum(x, "z"), "UnknownAxis", "this mesh has x, y"),
    (lambda x: sl.psum_scatter(x, "y", 1), "UnevenSplit", "size 3 does not divide"),
    (lambda x: sl.all_gather(x, "x", 5), "RankMismatch", "dimension 5"),
    (lambda x: sl.collectives.pbroadcast(x, "x", 7), "ShardError", "root 7"),
    (
        lambda x: sl.ppermute(x, "x", [(0, 1), (1, 1)]),
        "ShardError",
        "rank 1 sends or receives twice",
    ),
    (lambda x: sl.ppermute(x, "x", [(0, 2)]), "ShardError", "rank 2 is not among 0..1"),
    (lambda x: sl.collectives.start(sl.psum, x.requires_grad_(), "x"), "ShardError", "no gradient"),
    (lambda x: sl.collectives.start(sl.pmean, x, "x"), "ShardError", "these have one: psum"),
    (
        lambda x: sl.collectives.start(sl.collectives.pbroadcast, x, "x", -1),
        "ShardError",
        "root -1 is not among 0..1",
    ),
    (
        lambda x: sl.collectives.start(sl.collectives.preduce, x, "x", 2),
        "ShardError",
        "preduce: root 2",
    ),
    (
        lambda x: sl.collectives.start(sl.ppermute, x, "x", [(0, 2)]),
        "ShardError",
        "rank 2 is not among 0..1",
    ),
    (lambda x: sl.psum(x, ("x", "y", "x")), "AxisReused", "names a mesh axis twice"),
    (
        lambda x: sl.all_gather(x, "x", 4, tiled=False),
        "RankMismatch",
        "dimension 4 of a block with 3 dimensions",
    ),
    (lambda x: bool(sl.axis_index("x") > 0), "ShardError", "different values"),
]


@pytest.mark.parametrize(("call", "error", "says"), MISTAKES)
def test_mistakes_name_the_culprit(call: Any, error: str, says: str) -> None:
    with sl.simulate(x=2, y=2) as m:
        x = wrap(torch.ones(4, 4, 3), m)
        with pytest.raises(sl.ShardError, match=says) as caught:
            call(x)
        assert type(caught.value).__name__ == error and caught.value.fix


def _mistakes() -> list[str]:
    said = []
    for call, *_ in MISTAKES:
        try:
            said.append(str(call(torch.ones(4, 3))))
        except sl.ShardError as e:
            fixes.caught(e)
            said.append(f"{type(e).__name__} {e.message} {e.fix}")
    return said


def test_real_ranks_refuse_the_same_mistakes(pool: Any) -> None:
    for said in pool.run(_mistakes, x=2, y=2):
        # the last is of simulation alone
        for line, (_, error, says) in list(zip(said, MISTAKES, strict=True))[:-1]:
            assert line.startswith(error) and says.rpartition(": ")[2] in line, (line, says)


def test_a_collective_without_a_mesh_says_so() -> None:
    with pytest.raises(sl.ShardError, match="no mesh is in scope") as caught:
        sl.psum(torch.ones(2), "x")
    assert "simulate" in caught.value.fix


@pytest.mark.parametrize("axis", [None, 0, 1.5, b"x", ("x", 0)])
@pytest.mark.parametrize("verb", [sl.psum, sl.pmax, sl.all_gather, sl.collectives.pvary])
def test_an_axis_that_is_no_name_is_refused(verb: Any, axis: Any) -> None:
    with sl.simulate(x=2), pytest.raises(sl.errors.ShardError, match="axis"):
        verb(torch.ones(2), axis)


@pytest.mark.parametrize("verb", [sl.psum, sl.pmean, sl.pmax, sl.all_gather, sl.psum_scatter])
def test_a_collective_of_what_is_no_block_is_refused(verb: Any) -> None:
    with sl.simulate(x=2):
        for x in (None, 0, 1.5, [1.0]):
            with pytest.raises(sl.errors.BadArgument, match="takes a tensor"):
                verb(x, "x")
        x = sl.shard(torch.arange(4.0), "x")
        with pytest.raises(sl.errors.BadArgument, match="this value is sharded"):
            verb(x, "x")


def test_a_table_has_one_number_for_each_rank() -> None:
    with sl.simulate(x=2):
        assert sl.collectives.pick(torch.tensor([3.0, 4.0]), "x").ranks.tolist() == [3.0, 4.0]
        for table in ([1.0], [1.0, 2.0, 3.0], ["a", "b"], torch.ones(3)):
            with pytest.raises(sl.errors.BadArgument, match="'x' has 2 ranks"):
                sl.collectives.pick(table, "x")  # type: ignore[arg-type]
