"""A transfer is exact in every dtype, and its gradient is its adjoint."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    unwrap,
    wrap,
)
from tests.collectives.primitives import (
    ADJOINTS,
    MESHES,
    PRIMITIVES,
    all_gradients,
    gradient,
    halves,
    linear_adjoints,
)


@pytest.mark.parametrize("name", ADJOINTS)
def test_gradients_pass_gradcheck_on_simulated_ranks(name: str) -> None:
    for mesh, axis in [({"x": 2, "y": 2}, "x"), ({"x": 2, "y": 2}, ("y", "x")), ({"x": 4}, "x")]:
        with sl.simulate(**mesh) as m:
            x = torch.randn(m.size, 4, 6, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(
                lambda raw, m=m, a=axis: unwrap(PRIMITIVES[name][0](wrap(raw, m), a)), (x,)
            )


def test_gradients_are_adjoints_on_real_ranks(pool: Any) -> None:
    for mesh, axes in MESHES:
        for gaps in pool.run(linear_adjoints, axes, **mesh):
            assert max(gaps.values()) < 1e-12, max(gaps, key=gaps.get)


def test_gradients_on_real_ranks_are_those_on_simulated_ones(pool: Any) -> None:
    """Small integers, so that several ranks hold the maximum, whose gradient is shared."""
    for mesh, axes in MESHES:
        blocks = torch.randint(3, (4, 4, 6), generator=torch.Generator().manual_seed(0)).double()
        answers = pool.run(all_gradients, axes, blocks, **mesh)
        for (name, axis), _ in answers[0].items():
            with sl.simulate(**mesh) as m:
                want = unwrap(gradient(name, axis, wrap(blocks, m)))
            for rank, answer in enumerate(answers):
                said = f"{name} over {axis} on rank {rank}"
                torch.testing.assert_close(
                    answer[name, axis], want[rank], rtol=1e-12, atol=0, msg=said
                )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_round_once(pool: Any, dtype: torch.dtype) -> None:
    blocks = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    total = blocks.sum(0).to(dtype)
    for rank, (scattered, reduced) in enumerate(pool.run(halves, dtype, blocks, x=4)):
        assert torch.equal(scattered, total.chunk(4)[rank]) and torch.equal(
            reduced, total * (rank == 1)
        )
    with sl.simulate(x=4):
        scattered, reduced = halves(dtype, blocks)
    assert torch.equal(unwrap(scattered).flatten(), total) and torch.equal(
        unwrap(reduced)[1], total
    )


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_a_sum_sent_narrow_is_rounded_once_on_the_way_and_once_at_the_end(p: int) -> None:
    """1 + 2^-9 travels as 1 in bfloat16; what stays on its rank does not travel."""
    parts = torch.full((p, 5), 1 + 2**-9)
    with sl.simulate(x=p) as m:
        narrow = unwrap(sl.psum(wrap(parts, m), "x", out=torch.bfloat16, wire=torch.bfloat16))
        back = unwrap(sl.psum(wrap(parts, m), "x", out=torch.bfloat16))
        with sl.trace() as t:
            sl.psum(wrap(parts, m), "x", out=torch.bfloat16)
        alone = unwrap(sl.psum(wrap(parts[:, 0], m), "x", out=torch.bfloat16))
    assert torch.equal(alone, back[:, 0])
    once = torch.tensor(p - 1 + 1 + 2**-9).bfloat16()  # p-1 parts arrived as 1
    assert narrow.dtype == back.dtype == torch.bfloat16
    assert torch.equal(narrow, once.expand(p, 5)) and torch.equal(
        back, torch.tensor(p * (1 + 2**-9)).bfloat16().expand(p, 5)
    )
    assert float(t.bytes) == (p - 1) / p * 5 * (4 + 2) and t.messages == 2 * (p - 1)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


CALLS = {
    "psum": lambda t: sl.psum(t, "x"),
    "pmax": lambda t: sl.pmax(t, "x"),
    "all_gather": lambda t: sl.all_gather(t, "x"),
    "psum_scatter": lambda t: sl.psum_scatter(t, "x"),
    "all_to_all": lambda t: sl.all_to_all(t, "x", 0, 1),
    "shift": lambda t: sl.collectives.shift(t, "x", 1),
    "pbroadcast": lambda t: sl.collectives.pbroadcast(t, "x", 1),
    "preduce": lambda t: sl.collectives.preduce(t, "x", 1),
}


def _of_each_dtype() -> dict[Any, Any]:
    """Outcome and count of each call on blocks of each dtype, small and large."""
    out: dict[Any, Any] = {}
    for dtype in DTYPES:
        for rows in (4, 4096):
            here = (
                torch.arange(rows * 4).reshape(rows, 4) % 3
                + torch.as_tensor(sl.axis_index("x")) % 2
            )
            block = here.float().to(dtype)
            for name, call in CALLS.items():
                with sl.trace() as t:
                    try:
                        found: Any = call(block)
                    except sl.ShardError as e:
                        found = str(e).splitlines()[0]
                text = (
                    found
                    if isinstance(found, str)
                    else (found.dtype, tuple(found.shape), _digest(found))
                )
                out[dtype, rows, name] = (text, t.bytes, t.messages)
    return out


def _digest(x: torch.Tensor) -> Any:
    """The block of rank 0 as numbers, summed with weights by position."""
    first = unwrap(x)[0] if isinstance(x, sl.collectives.Stacked) else x
    flat = torch.view_as_real(first).flatten() if first.is_complex() else first.flatten()
    return float((flat.double() * torch.arange(1, flat.numel() + 1)).sum())


def test_every_dtype_moves_alike_on_every_back_end(pool: Any) -> None:
    with sl.simulate(x=4):
        want = _of_each_dtype()
    got = pool.run(_of_each_dtype, x=4)[0]
    assert {k: (got[k], want[k]) for k in want if got[k] != want[k]} == {}
    refused = {k[0] for k, v in want.items() if isinstance(v[0], str)}
    assert refused == {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
    }


def _largest_with_nan(size: int) -> list[float]:
    x = torch.arange(float(size))
    x[size // 2] = float("nan") if sl.axis_index("x") == 2 else 0
    return sl.pmax(x, "x").tolist()


@pytest.mark.parametrize("size", [1, 7, 9000])
def test_no_maximum_passes_over_a_nan(pool: Any, size: int) -> None:
    for found in pool.run(_largest_with_nan, size, x=4):
        assert [i for i, v in enumerate(found) if v != v] == [size // 2]
        assert found[-1] == size - 1 or size == 1
