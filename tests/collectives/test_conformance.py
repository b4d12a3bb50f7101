"""The same primitives give the same values, and the same counts, on every back end."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import unwrap, wrap
from tests.collectives.primitives import (
    ADJOINTS,
    PRIMITIVES,
    all_on_rank,
    cost,
    expected,
    linear_adjoints,
    on_rank,
    stacked_input,
)

MESHES: list[tuple[dict[str, int], list[Any]]] = [
    ({"x": 2, "y": 2}, ["x", "y", ("x", "y"), ("y", "x")]),
    ({"x": 4}, ["x"]),
    ({"data": 2, "x": 1, "y": 2}, ["data", "y", ("y", "data")]),
]
EACH = [(m, a) for m, axes in MESHES for a in axes]


@pytest.mark.parametrize("name", PRIMITIVES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stacked_ranks_agree_with_a_loop_over_ranks(name: str, dtype: torch.dtype) -> None:
    for mesh, axis in [*EACH, ({"a": 2, "x": 3, "y": 2}, ("y", "a")), ({"x": 4, "y": 2}, "x")]:
        with sl.simulate(**mesh) as m:
            got = unwrap(PRIMITIVES[name][0](stacked_input(m, dtype), axis))
        want = torch.stack(expected(name, mesh, axis, dtype))
        torch.testing.assert_close(got, want, rtol=0 if dtype == torch.float64 else 1e-2, atol=0)


@pytest.mark.parametrize(("mesh", "axes"), MESHES)
def test_real_ranks_agree_with_stacked_ones(pool: Any, mesh: dict[str, int], axes: list[Any]) -> None:
    answers = pool.run(all_on_rank, axes, **mesh)
    for name, axis in answers[0]:
        want = expected(name, mesh, axis, torch.float64)
        with sl.simulate(**mesh) as m, sl.trace() as t:
            PRIMITIVES[name][0](stacked_input(m), axis)
        for rank, answer in enumerate(answers):
            out, nbytes, messages = answer[name, axis]
            torch.testing.assert_close(out, want[rank], rtol=1e-12, atol=0, msg=f"{name} over {axis} on rank {rank}")
            assert (nbytes, messages) == (t.bytes, t.messages), (name, axis)


@pytest.mark.parametrize("name", PRIMITIVES)
def test_recorded_ranks_have_the_shape_and_the_price(name: str) -> None:
    for mesh, axis in EACH:
        if name in ("pick", "axis_index"):
            continue
        with sl.record(**mesh):
            out, nbytes, messages = on_rank(name, axis, torch.float64)
        with sl.simulate(**mesh) as m, sl.trace() as t:
            want = PRIMITIVES[name][0](stacked_input(m), axis)
        assert out.shape == want.shape
        assert (nbytes, messages) == (t.bytes, t.messages)


@pytest.mark.parametrize("name", [n for n, (*_, kind) in PRIMITIVES.items() if kind])
def test_counts_follow_the_stated_formula(name: str) -> None:
    for p in (2, 4):
        with sl.simulate(x=p, y=2) as m, sl.trace() as t:
            PRIMITIVES[name][0](stacked_input(m), "x")
        nbytes, messages = cost(PRIMITIVES[name][2], 24 * 8, p)
        assert (float(t.bytes), t.messages) == (nbytes, messages)


NAMES_A_SECOND_RANK = {
    "pbroadcast 1",
    "pbroadcast of a view",
    "preduce 1",
    "ppermute partial",
    "ppermute swap",
    "start pbroadcast",
}


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if n not in NAMES_A_SECOND_RANK])
def test_one_sized_axes_move_nothing(name: str) -> None:
    with sl.simulate(x=1, y=2) as m, sl.trace() as t:
        PRIMITIVES[name][0](stacked_input(m), "x")
    assert t.events == []


@pytest.mark.parametrize("name", ADJOINTS)
def test_gradients_pass_gradcheck_on_simulated_ranks(name: str) -> None:
    for mesh, axis in [({"x": 2, "y": 2}, "x"), ({"x": 2, "y": 2}, ("y", "x")), ({"x": 4}, "x")]:
        with sl.simulate(**mesh) as m:
            x = torch.randn(m.size, 4, 6, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(lambda raw, m=m, a=axis: unwrap(PRIMITIVES[name][0](wrap(raw, m), a)), (x,))


def test_gradients_are_adjoints_on_real_ranks(pool: Any) -> None:
    for mesh, axes in MESHES:
        for gaps in pool.run(linear_adjoints, axes, **mesh):
            assert max(gaps.values()) < 1e-12, max(gaps, key=gaps.get)


def test_pvary_sums_its_gradient() -> None:
    with sl.simulate(x=3) as m:
        raw = torch.ones(3, 2, requires_grad=True)
        y = sl.pvary(wrap(raw, m), "x")
        unwrap(y).backward(torch.arange(6.0).reshape(3, 2))
    assert raw.grad is not None and torch.equal(raw.grad, torch.tensor([[6.0, 9.0]] * 3))


MISTAKES = [
    (lambda x: sl.psum(x, "z"), "UnknownAxis", "this mesh has x, y"),
    (lambda x: sl.psum_scatter(x, "y", 1), "UnevenSplit", "size 3 does not divide"),
    (lambda x: sl.all_gather(x, "x", 5), "RankMismatch", "dimension 5"),
    (lambda x: sl.pbroadcast(x, "x", 7), "ShardError", "root 7"),
    (lambda x: sl.ppermute(x, "x", [(0, 1), (1, 1)]), "ShardError", "rank 1 sends or receives twice"),
    (lambda x: sl.ppermute(x, "x", [(0, 2)]), "ShardError", "rank 2 is not among 0..1"),
    (lambda x: sl.start(sl.psum, x.requires_grad_(), "x"), "ShardError", "no gradient"),
    (lambda x: bool(sl.axis_index("x") > 0), "ShardError", "different values"),
]


@pytest.mark.parametrize(("call", "error", "says"), MISTAKES)
def test_mistakes_name_the_culprit(call: Any, error: str, says: str) -> None:
    with sl.simulate(x=2, y=2) as m:
        x = wrap(torch.ones(4, 4, 3), m)
        with pytest.raises(sl.ShardError, match=says) as caught:
            call(x)
        assert type(caught.value).__name__ == error and caught.value.fix


def test_a_collective_without_a_mesh_says_so() -> None:
    with pytest.raises(sl.ShardError, match="no mesh is in scope") as caught:
        sl.psum(torch.ones(2), "x")
    assert "simulate" in caught.value.fix
