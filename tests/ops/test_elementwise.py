"""Elementwise functions run on blocks as they are; what a pending sum may not enter is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.ops.cases import ELEMENTWISE, close, r, run_on_meshes

X, Y = r(4, 6), r(4, 6, seed=1)


def test_pending_sums_do_not_take_a_scalar() -> None:
    """partial + 1 added one per rank."""
    with sl.simulate(x=2):
        p = sl.shard(torch.ones(4), ". + sum(x)")
        with pytest.raises(sl.ShardError, match="still pending"):
            p + 1
        with pytest.raises(sl.ShardError, match="still pending"):
            F.gelu(p)
        assert sl.unshard(p * 3 + p - (-p)).tolist() == [5.0] * 4


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: a + b,
        lambda a, b: b - a,
        lambda a, b: a * b[0],
        lambda a, b: a * torch.tensor(2.0),
        lambda a, b: torch.lerp(a, a, b),
        lambda a, b: a + a,
        lambda a, b: a.clone().add_(b),
        lambda a, b: a.clone().add_(b[0]),
        lambda a, b: a.mT.clone().copy_(b[:, :1]),
    ],
)
@pytest.mark.parametrize("other", ["x y", "x y skew b", ". ."])
def test_skewed_operands_are_combined_as_they_lie_or_refused(f: Any, other: str) -> None:
    """Blocks of a skewed and of a plain operand were combined position by position."""
    a, b = r(4, 4), r(4, 4, seed=1)
    with sl.simulate(x=2, y=2):
        ours = sl.shard(a, "x y skew a"), sl.shard(b, other)
        with sl.implicit():
            close(sl.unshard(f(*ours)), f(a, b))
        try:
            found = f(*ours)
        except sl.ShardError:
            return
        close(sl.unshard(found), f(a, b))


@pytest.mark.parametrize("late", ["x", "y", "xy"])
@pytest.mark.parametrize("layout", ["x .", ". y", "x y", "(x y) .", ". ."])
def test_a_deferred_operand_s_gradient_is_dense_s_also_where_it_is_resharded(
    late: str, layout: str
) -> None:
    """A reshard over one axis ends the deferral over all of them."""
    a, w, c = r(4, 4), r(4, 4, seed=1), r(4, 4, seed=2)
    with sl.simulate(x=2, y=2), sl.implicit():
        x, p = sl.shard(a, layout), sl.shard(w, ". .").requires_grad_()
        late_p = sl.ShardedTensor(p.raw, p.place._replace(deferred=frozenset(late)))
        for f in (torch.mul, lambda x, p: torch.addcmul(x, x, p)):
            p.grad = None
            (f(x, late_p) * sl.shard(c, ". .")).sum().backward()
            close(sl.unshard(late_p.grad), a * c)


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"x": 1, "y": 1}])
def test_a_scalar_does_not_promote(mesh: dict[str, int]) -> None:
    kinds = (torch.float16, torch.float32, torch.float64, torch.int64)
    with sl.simulate(**mesh):
        for a in kinds:
            for b in kinds:
                x, v = (X * 4).to(a), torch.tensor(2).to(b)
                ours, scalar = sl.shard(x, "x y"), sl.shard(v, "")
                for f in (
                    torch.add,
                    torch.mul,
                    torch.maximum,
                    lambda p, q: torch.where(p > 0, p, q),
                ):
                    assert f(ours, scalar).dtype == f(x, v).dtype
                    assert f(scalar, ours).dtype == f(v, x).dtype


def test_a_pending_sum_is_not_overwritten_by_parts() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(X, ". . + sum(x)")
        with pytest.raises(sl.ShardError, match="still pending"):
            x.fill_(1.0)
        assert torch.equal(sl.unshard(x.fill_(0.0)), torch.zeros(4, 6).double())
        total = sl.shard(X, ". . + sum(x)").sum()
        with pytest.raises(sl.ShardError) as caught:
            total.exp()
        whole = eval(caught.value.fix, {"sl": sl, "x": total})
        assert torch.equal(sl.unshard(whole.exp()), X.sum().exp())


def test_a_power_in_place_of_another_dtype_has_its_gradient() -> None:
    def power(x: Any, y: Any) -> Any:
        z = x * 1
        z **= y
        return z

    base = (X.abs() + 1).half()
    want = torch.autograd.grad(power(a := base.clone().requires_grad_(), Y).sum(), a)[0]
    with sl.simulate(x=2, y=2):
        x = sl.shard(base, "x y").requires_grad_()
        got = torch.autograd.grad(power(x, sl.shard(Y, "x y")).sum(), x)[0]
        assert torch.allclose(sl.unshard(got), want, rtol=1e-2)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_equal_dense(name: str) -> None:
    run_on_meshes(name)


@pytest.mark.parametrize("f", [torch.mul, torch.div])
def test_second_derivatives_of_products_with_a_pending_sum_equal_dense(f: Any) -> None:
    """What is the same on every rank is computed from values
    marked by vary, and is counted once.
    """
    x, w, g = (
        r(4, 6).requires_grad_(),
        (r(6, seed=1).abs() + 1).requires_grad_(),
        r(6, seed=2).requires_grad_(),
    )

    def twice(a: Any, b: Any, c: Any) -> Any:
        first = torch.autograd.grad(f(a.sum(0), b), (a, b), c, create_graph=True)
        return torch.autograd.grad(
            sum((t.square()).sum() for t in first), (a, b, c), allow_unused=True
        )

    want = twice(x, w, g)
    with sl.simulate(x=2, y=2):
        a = sl.shard(x.detach(), "x .").requires_grad_()
        b = sl.shard(w.detach(), ".").requires_grad_()
        c = sl.shard(g.detach(), ".").requires_grad_()
        pending = sl.shard_map(lambda t: t.sum(0), in_layouts=("x .",), out_layouts=". + sum(x)")
        first = torch.autograd.grad(f(pending(a), b), (a, b), c, create_graph=True)
        got = torch.autograd.grad(
            sum((t.square()).sum() for t in first), (a, b, c), allow_unused=True
        )
        for mine, dense in zip(got, want, strict=True):
            close(sl.unshard(mine), dense)


@pytest.mark.parametrize("name", ["eq_", "ne_", "not_equal_", "logical_and_", "logical_not_"])
def test_complex_numbers_take_an_answer_in_place_as_torch_has_them(name: str) -> None:
    t = torch.tensor([1 + 2j, 0, 3, 4j])
    others = [torch.tensor([1 + 2j, 5, 0, 4j])] * (name != "logical_not_")
    want = getattr(t.clone(), name)(*others)
    with sl.simulate(x=2, y=2), sl.implicit():
        got = getattr(sl.shard(t, "x"), name)(*[sl.shard(o, "y") for o in others])
        assert torch.equal(sl.unshard(got), want)


def test_a_power_of_doubles_is_not_written_to_floats_as_in_torch() -> None:
    t = torch.ones(4)
    with sl.simulate(x=2), sl.implicit():
        x = sl.shard(t, "x")
        with pytest.raises(sl.errors.BadArgument, match="Double"):
            x.float_power_(x)
        assert torch.equal(sl.unshard(x), t)
        y = sl.shard(t.double() * 2, "x")
        assert torch.equal(sl.unshard(y.float_power_(y)), t.double() * 4)
