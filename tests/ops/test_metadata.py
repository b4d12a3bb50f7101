"""Properties, copies and gradients of a sharded tensor, read and set as torch's."""

import sys

import pytest
import torch
from torch import nn

import shardlib as sl
from tests.test_grad import C, X
from tests.workers import Pool


@pytest.mark.parametrize(
    "given", ["sl.shard(C, 'x data')", "sl.reshard(sl.shard(C, 'data x'), 'data .')", "C"]
)
def test_a_gradient_that_lies_otherwise_is_no_gradient(given: str) -> None:
    with sl.simulate(data=2, x=2):
        x = sl.shard(X, "data x").requires_grad_()
        with pytest.raises(sl.ShardError, match="a gradient lies as its tensor does") as e:
            x.grad = eval(given)
        assert x.grad is None
        exec(e.value.fix, {"sl": sl, "x": x, "gradient": eval(given)})
        assert x.grad is not None


def test_data_is_replaced_by_data_that_lies_alike() -> None:
    with sl.simulate(x=2):
        p = nn.Parameter(sl.shard(X, ". x"))
        p.data = sl.shard(C, ". x")
        assert torch.equal(sl.unshard(p.detach()), C) and p.is_leaf and p.requires_grad
        p.data.mul_(2)
        assert torch.equal(sl.unshard(p.detach()), 2 * C)
        for other in (sl.shard(X, "x ."), X):
            with pytest.raises(sl.ShardError, match="same size and layout") as e:
                p.data = other
            exec(e.value.fix, {"sl": sl, "x": p, "y": other})
            assert torch.equal(sl.unshard(p.detach()), X)
            p.data = sl.shard(C, ". x")
        p.data = p.data.float()
        (p**2).sum().backward()
        assert p.dtype == p.grad.dtype == torch.float32


@pytest.mark.parametrize("layout", ["x .", ". x", ". ."])
def test_contiguous_copies_where_torch_copies(layout: str) -> None:
    """Also where a block has one row, whose stride says nothing to torch."""
    x = torch.arange(24.0).view(2, 12)
    for view in (lambda t: t, lambda t: t[..., 4:], lambda t: t[:, :8], lambda t: t.mT):
        dense, base = x * 1, None
        view(dense).contiguous().neg_()
        with sl.simulate(x=2):
            base = sl.shard(x, layout) * 1
            try:
                view(base).contiguous().neg_()
            except sl.ShardError:
                continue
            assert torch.equal(sl.unshard(base), dense)


def test_a_complex_number_has_no_implicit_cotangent() -> None:
    t = torch.tensor([1 + 2j, 3j])
    with sl.simulate(x=2):
        x = sl.shard(t, "x").requires_grad_()
        for backward in (
            lambda: x.sum().backward(),
            lambda: torch.autograd.backward(x.sum()),
            lambda: torch.autograd.grad(x.sum(), x),
        ):
            with pytest.raises(sl.ShardError, match="complex"):
                backward()
        assert x.grad is None


def test_backward_checks_only_gradients_that_differ_from_their_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own checks of gradients import sympy, which takes longer than most first steps."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    with sl.simulate(data=2, x=2):
        x = sl.shard(X, "data x").requires_grad_()
        (x * x).sum().backward()
        (x * x).backward(sl.shard(C, "data x"), retain_graph=True)
        assert torch.equal(sl.unshard(x.grad), 2 * X + 2 * X * C)
        with pytest.raises(ImportError):
            (x * x).backward(sl.shard(C.float(), "data x"))
        monkeypatch.undo()
        x.grad = None
        (x * x).backward(sl.shard(C.float(), "data x"))
        assert x.grad.dtype == X.dtype
        with pytest.raises(RuntimeError, match="does not require grad"):
            x.detach().backward(sl.shard(C, "data x"))


ASKED = {
    "result_type": lambda x: torch.result_type(x, 2),
    "result_type of two": lambda x: torch.result_type(x, x.double()),
    "is_same_size": lambda x: (torch.is_same_size(x, x), x.is_same_size(x)),
    "get_device": lambda x: (torch.get_device(x), x.get_device()),
    "is_pinned": lambda x: x.is_pinned(),
    "is_signed": lambda x: (torch.is_signed(x), x.is_signed()),
    "ndimension": lambda x: (x.ndimension(), x.dim(), x.nbytes, x.type()),
    "numel": lambda x: (torch.numel(x), x.nelement(), x.element_size(), x.itemsize),
    "is_complex": lambda x: (torch.is_complex(x), torch.is_floating_point(x), torch.is_tensor(x)),
    "can_cast": lambda x: (torch.can_cast(x.dtype, torch.int32), x.is_sparse, x.is_mps, x.is_xla),
}


def asked() -> list[str]:
    """Facts of the type that are not dense's, or that move something."""
    wrong, plain = [], torch.arange(15.0).view(3, 5)
    for layout in ("x y", ". ."):
        x = sl.shard(plain, layout, pad=True)
        for name, f in ASKED.items():
            with sl.trace() as t:
                if f(x) != f(plain) or t.bytes:
                    wrong.append(name)
    return wrong


def test_facts_of_a_type_need_no_data(pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        assert not asked()
    assert not any(pool.run(asked, x=2, y=2))
