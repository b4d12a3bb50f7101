"""Reductions over split dimensions, and what is made of them: sums, variances, softmax."""

import math

import pytest
import torch

import shardlib as sl
from tests.ops.cases import REDUCE, run_on_meshes

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("name", REDUCE)
def test_reductions_equal_dense(name: str) -> None:
    run_on_meshes(name)


def _derivatives(f, x, cotangent):  # type: ignore[no-untyped-def]
    """The value, its gradient, and the gradient of that."""
    out = f(x)
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, cotangent)
    return [out.detach(), first.detach(), second]


NUMBERS = pytest.mark.parametrize(
    "numbers",
    [[1, -2, 3, 4], [0, 0, 0, 0], [0, 0, 1, 2], [1, -2, INF, 3], [1, -2, -INF, 0], [1, NAN, 2, 3]],
    ids=str,
)


def _beside_numbers_that_are_not_finite(f, t: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """f and its derivatives are finite where torch's are, whichever block holds what is not."""
    ones = torch.ones_like(t)
    want = _derivatives(f, t.clone().requires_grad_(), ones)
    for ranks in (2, 4):
        with sl.simulate(x=ranks):
            x = sl.shard(t, "x").requires_grad_()
            got = _derivatives(f, x, sl.shard(ones, "x"))
            for a, b in zip(map(sl.unshard, got), want, strict=True):
                assert torch.equal(a.isfinite(), b.isfinite())
                assert torch.allclose(a[a.isfinite()], b[b.isfinite()])


@pytest.mark.parametrize("p", [-1, 0.5, 1.5, 2, 2.5, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@NUMBERS
def test_norms_beside_zeros_and_infinities_have_the_derivatives_of_torch(
    p: float, dtype: torch.dtype, numbers: list[float]
) -> None:
    t = torch.tensor(numbers, dtype=dtype)
    _beside_numbers_that_are_not_finite(lambda x: torch.linalg.vector_norm(x, p), t)


@NUMBERS
def test_logsumexp_beside_infinities_has_the_derivatives_of_torch(numbers: list[float]) -> None:
    t = torch.tensor(numbers, dtype=torch.float64)
    _beside_numbers_that_are_not_finite(lambda x: torch.logsumexp(x, 0), t)


@pytest.mark.parametrize("correction", [0, 1])
def test_a_deviation_of_equal_elements_has_no_gradient(correction: int) -> None:
    t = torch.full((4,), -1.0, dtype=torch.float64)
    with sl.simulate(x=2):
        x = sl.shard(t, "x").requires_grad_()
        torch.std(x, correction=correction).backward()
        assert torch.equal(sl.unshard(x.grad), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64])
def test_a_sum_of_one_number_is_another_tensor(dtype: torch.dtype) -> None:
    """Without a graph where none is recorded, and written to apart from what it was made of."""
    t = torch.tensor(3, dtype=dtype)
    with sl.simulate(x=2), torch.no_grad():
        x = sl.shard(t, "...").requires_grad_(dtype is not torch.int64)
        y = x.sum()
        assert not y.requires_grad
        y += 1
        assert torch.equal(sl.unshard(x), t)


@pytest.mark.parametrize("name", ["nansum", "nanmean"])
def test_a_pending_sum_is_summed_before_its_nans_are_left_out(name: str) -> None:
    t = torch.tensor([1.0, NAN, 3.0, 4.0])
    with sl.simulate(x=2, y=2):
        x = sl.reshard(sl.shard(t, "y"), "y + sum(x)")
        with pytest.raises(sl.errors.PartialEscape):
            getattr(x, name)()
        with sl.implicit():
            assert torch.equal(sl.unshard(getattr(x, name)()), getattr(t, name)())


@pytest.mark.parametrize("name", ["vector_norm", "matrix_norm"])
def test_a_norm_of_pending_sums_is_that_of_the_sums(name: str) -> None:
    """Refused, or summed where that is allowed; its gradient as well."""
    t = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)
    dense = t.clone().requires_grad_()
    f = getattr(torch.linalg, name)
    f(dense).backward()
    with sl.simulate(x=2, y=2):
        x = sl.shard(t, "x . + sum(y)").requires_grad_()
        with pytest.raises(sl.errors.PartialEscape):
            f(x)
        with sl.implicit():
            out = f(x)
            assert torch.allclose(sl.unshard(out), f(t))
            out.backward()
        for part in sl.unshard(x.grad), sl.unshard(sl.grad(lambda x: f(sl.reshard(x, "x .")))(x)):
            assert torch.allclose(part, dense.grad)


def _penalty(f, x):  # type: ignore[no-untyped-def]
    """The gradient of the gradient's square."""
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


@pytest.mark.parametrize("p", [math.inf, -math.inf, 1, 2, 3])
def test_a_penalty_on_the_gradient_of_a_norm_reaches_every_rank(p: float) -> None:
    t = torch.tensor([3.0, -1.0, 2.0, 0.5, -2.5, 1.5], dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (torch.linalg.vector_norm(x, p, keepdim=True) * x).square().sum()

    want = _penalty(f, t.clone().requires_grad_())
    for ranks in (2, 3):
        with sl.simulate(x=ranks):
            got = _penalty(f, sl.shard(t, "x").requires_grad_())
            assert torch.allclose(sl.unshard(got), want)
