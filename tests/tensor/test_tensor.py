"""A ShardedTensor goes wherever torch takes a tensor, under every layout."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl

LAYOUTS = ["x y", "y x", ". y", "x .", "(x y) .", ". .", "(2 x) y"]


@pytest.fixture(params=LAYOUTS)
def w(request: Any) -> Any:
    with sl.simulate(x=2, y=2):
        yield sl.shard(
            torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
            request.param,
        )


def test_shape_is_global_and_local_is_a_block(w: sl.ShardedTensor) -> None:
    assert (
        w.shape == w.size() == (8, 8) and w.dtype == torch.float64 and w.ndim == 2 and len(w) == 8
    )
    assert w.numel() == 64 and w.is_floating_point()
    assert tuple(w.local.shape) == w.sharding.local_shape((8, 8), w.mesh)
    assert w.local.ranks.data_ptr() == w.raw.data_ptr()


def test_parameter_detach_clone(w: sl.ShardedTensor) -> None:
    p = nn.Parameter(w)
    assert isinstance(p, nn.Parameter) and isinstance(p, sl.ShardedTensor) and p.requires_grad
    assert p.sharding == w.sharding and not w.requires_grad
    assert not p.detach().requires_grad and p.detach().raw.data_ptr() == p.raw.data_ptr()
    assert p.clone().raw.data_ptr() != p.raw.data_ptr()
    m = nn.Module()
    m.weight = p
    assert dict(m.named_parameters())["weight"] is p


def test_deepcopy_and_pickle(w: sl.ShardedTensor) -> None:
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert again.sharding == w.sharding and again.shape == w.shape
        assert torch.equal(again.raw, w.raw) and again.raw.data_ptr() != w.raw.data_ptr()
    p = copy.deepcopy(nn.Parameter(w))
    assert isinstance(p, nn.Parameter) and p.requires_grad


def test_repr_names_type_and_mesh(w: sl.ShardedTensor) -> None:
    assert sl.typeof(w) in repr(w) and "x=2 y=2" in repr(w)


@pytest.mark.parametrize(
    ("weight", "rows"),
    [("x y", "x y"), ("y x", "x y"), (". .", ". ."), ("y .", "x ."), (". y", "x y")],
)
def test_functional_call_takes_it(weight: str, rows: str) -> None:
    """An nn.Linear runs with a sharded weight in place of its own."""
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    with sl.simulate(x=2, y=2):
        out = torch.func.functional_call(
            nn.Linear(8, 8, bias=False), {"weight": sl.shard(w, weight)}, sl.shard(x, rows)
        )
        assert torch.allclose(sl.unshard(out), x @ w.T)


def _block(w: torch.Tensor) -> torch.Tensor:
    return F.gelu(w * 2 + 1).square()


@pytest.mark.parametrize("reentrant", [False])
def test_activation_checkpointing_gives_the_same_gradient(
    w: sl.ShardedTensor, reentrant: bool
) -> None:
    a, b = (w.detach().requires_grad_() for _ in range(2))
    F.dropout(_block(a), 0.0).sum().backward()
    checkpoint(_block, b, use_reentrant=reentrant).sum().backward()
    assert torch.equal(a.grad.raw, b.grad.raw)


def test_checkpointed_dropout_and_matmul_recompute_the_same() -> None:
    def f(x: Any, v: Any) -> Any:
        return F.dropout(F.gelu(x @ v), 0.5)

    grads = []
    with sl.simulate(x=2, y=2):
        for saved in (False, True):
            torch.manual_seed(3)
            x, v = (
                sl.shard(
                    torch.randn(8, 8, generator=torch.Generator().manual_seed(s)), "x y"
                ).requires_grad_()
                for s in (1, 2)
            )
            (checkpoint(f, x, v, use_reentrant=False) if saved else f(x, v)).sum().backward()
            grads.append((x.grad.raw, v.grad.raw))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_value_and_grad_equals_backward(w: sl.ShardedTensor) -> None:
    a = w.detach().requires_grad_()
    loss = _block(a).mean()
    loss.backward()
    value, grads = sl.value_and_grad(lambda p: _block(p["w"]).mean())({"w": w})
    assert value.item() == loss.item()
    assert grads["w"].sharding == w.sharding and torch.equal(grads["w"].raw, a.grad.raw)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_compile_gives_the_same_value_and_gradient(w: sl.ShardedTensor) -> None:
    torch._dynamo.reset()
    a, b = (w.detach().requires_grad_() for _ in range(2))
    _block(a).sum().backward()
    torch.compile(_block, backend="aot_eager")(b).sum().backward()
    assert torch.allclose(a.grad.raw, b.grad.raw, rtol=1e-12)


def test_in_place_changes_the_block_and_keeps_the_layout() -> None:
    with sl.simulate(x=2, y=2):
        a = sl.shard(torch.ones(4, 4), "x y")
        a += sl.shard(torch.ones(4), "y")
        a.mul_(3)
        assert sl.unshard(a).sum() == 96
        with pytest.raises(sl.ShardError, match="otherwise than the tensor"):
            sl.shard(torch.ones(4, 4), ". .").add_(a)


def test_torch_func_transforms_are_refused_aloud() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4), "x")
        with pytest.raises(sl.ShardError, match=r"torch\.func transforms"):
            torch.func.grad(lambda t: (t * t).sum())(a)


@pytest.mark.parametrize("out", ["x y", ". y", "y x"])
def test_out_takes_the_result_where_it_lies(out: str) -> None:
    a, into = torch.randn(4, 6), torch.zeros(4, 6)
    with sl.simulate(x=2, y=2), sl.implicit():
        given = sl.shard(into, out)
        assert torch.exp(sl.shard(a, "x y"), out=given) is given
        assert torch.equal(sl.unshard(given), a.exp()) and sl.layout_of(given) == sl.Layout.parse(
            out
        )
        with pytest.raises(sl.ShardError, match="plain tensor cannot take"):
            torch.exp(sl.shard(a, "x y"), out=into)
