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
from tests import fixes

LAYOUTS = ["x y", "y x", ". y", "x .", "(x y) .", ". .", "(2 x) y"]


@pytest.fixture(params=LAYOUTS)
def w(request: Any) -> Any:
    with sl.simulate(x=2, y=2):
        yield sl.shard(
            torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), request.param
        )


def test_shape_is_global_and_local_is_a_block(w: sl.ShardedTensor) -> None:
    assert w.shape == w.size() == (8, 8) and w.dtype == torch.float64 and w.ndim == 2 and len(w) == 8
    assert w.numel() == 64 and w.is_floating_point()
    assert tuple(w.local.shape) == w.sharding.local_shape((8, 8), w.mesh)
    assert w.local.ranks.data_ptr() == w.raw.data_ptr()


def test_shard_copies_only_the_block(pool: Any) -> None:
    assert pool.run(_shard_leaves_the_source_alone, x=2, y=2) == [True] * 4


def _shard_leaves_the_source_alone() -> bool:
    whole = torch.arange(16.0).reshape(4, 4)
    a = sl.shard(whole, "x y")
    with torch.no_grad():
        a.zero_()
    return a.raw.untyped_storage().nbytes() == 16 and whole.sum() == 120


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
    ("weight", "rows"), [("x y", "x y"), ("y x", "x y"), (". .", ". ."), ("y .", "x ."), (". y", "x y")]
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
def test_activation_checkpointing_gives_the_same_gradient(w: sl.ShardedTensor, reentrant: bool) -> None:
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
                sl.shard(torch.randn(8, 8, generator=torch.Generator().manual_seed(s)), "x y").requires_grad_()
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compile_gives_the_same_value_and_gradient(w: sl.ShardedTensor) -> None:
    torch._dynamo.reset()
    a, b = (w.detach().requires_grad_() for _ in range(2))
    _block(a).sum().backward()
    torch.compile(_block, backend="aot_eager")(b).sum().backward()
    assert torch.allclose(a.grad.raw, b.grad.raw, rtol=1e-12)


def test_unused_leaves_get_zeros_and_aux_comes_through() -> None:
    with sl.simulate(x=2):
        p = {"a": sl.shard(torch.ones(4), "x"), "b": sl.shard(torch.ones(2), ".")}
        (loss, aux), g = sl.value_and_grad(lambda q: (q["a"].sum(), "seen"), has_aux=True)(p)
        assert (loss.item(), aux) == (4.0, "seen") and g["b"].raw.abs().sum() == 0


def test_pending_gradients_sum_to_the_gradient() -> None:
    """Also where the loss meets the parameter without any data: a weight penalty."""
    v = torch.randn(4, 6, dtype=torch.float64)

    def loss(w: Any, x: Any) -> Any:
        return (x * w).square().mean() + 0.1 * w.square().sum()

    with sl.simulate(data=2, x=2):
        w = sl.shard(torch.randn(6, dtype=torch.float64), "x")
        x = sl.shard(v, "data x")
        _, whole = sl.value_and_grad(loss)(w, x)
        _, parts = sl.value_and_grad(loss, pending="data")(w, x)
        assert parts.sharding.partial == ("data",)
        assert torch.allclose(sl.unshard(parts), sl.unshard(whole), rtol=1e-12)


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


def test_dtensor_round_trip_is_no_copy(pool: Any) -> None:
    assert all(all(r) for r in pool.run(_dtensor_round_trips, x=2, y=2))


def _dtensor_round_trips() -> list[bool]:
    out = []
    for text in ["x y", "y x", ". y", "(x y) .", ". .", ". . + sum(x)"]:
        a = sl.shard(torch.arange(64.0).reshape(8, 8), text).requires_grad_()
        d = sl.dtensor.to_dtensor(a)
        back = sl.dtensor.from_dtensor(d)
        out += [d.to_local().data_ptr() == a.raw.data_ptr(), back.sharding == a.sharding, back.shape == a.shape]
        (sl.dtensor.from_dtensor(d) * 2).sum().backward() if not a.sharding.partial else None
        out.append(a.sharding.partial != () or bool((sl.unshard(a.grad) == 2).all()))
    leaf = torch.distributed.tensor.distribute_tensor(
        torch.ones(8, 8),
        sl.current_mesh().device_mesh,
        [torch.distributed.tensor.Shard(0), torch.distributed.tensor.Shard(1)],
    ).requires_grad_()
    (sl.dtensor.from_dtensor(leaf) * 3).sum().backward()
    out.append(leaf.grad.placements == leaf.placements and bool((leaf.grad.full_tensor() == 3).all()))
    moved = sl.reshard(leaf, ". x")
    out += [type(moved) is type(leaf), sl.typeof(moved) == "f32[8, 8@x]", bool((sl.unshard(moved) == 1).all())]
    return out


def test_an_op_without_a_rule_is_never_answered_by_dtensor(pool: Any) -> None:
    assert all(all(r) for r in pool.run(_fallbacks, x=2, y=2))


def _fallbacks() -> list[bool]:
    x = torch.rand(8, 8)
    a = sl.shard(x, "x y")
    out = [torch.allclose(sl.unshard(torch.special.i0(a)), torch.special.i0(x))]
    try:
        torch.linalg.qr(a)
        out.append(False)
    except sl.ShardError as e:
        fixes.caught(e)
        out.append("bytes per rank would move unasked" in str(e) and "sl.reshard" in e.fix)
    return out


def test_an_opened_function_refuses_plain_tensors_as_its_operators_do() -> None:
    p = torch.rand(4, 6)
    with sl.simulate(x=2):
        a = sl.shard(p, "x .")
        weights = torch.rand(18, 6), torch.rand(18), None, None, False, 0.0, torch.rand(6, 6), torch.rand(6)
        for call in (
            lambda: torch.block_diag(a, p),
            lambda: torch.nn.functional.gaussian_nll_loss(a, p, p),
            lambda: torch.nn.functional.multi_head_attention_forward(a, a, a, 6, 2, *weights),
        ):
            with pytest.raises(sl.ShardError, match="a plain tensor met a sharded one"):
                call()


def test_a_factor_of_a_pending_sum_has_the_same_gradient_on_every_rank() -> None:
    with sl.simulate(x=3):
        for f in (lambda a, b: a * b, lambda a, b: b * a, lambda a, b: a / b):
            p = sl.shard(torch.arange(4.0) + 1, ". + sum(x)")
            s = sl.shard(torch.tensor(2.0), "...").requires_grad_()
            (grad,) = torch.autograd.grad(f(p, s), s, sl.shard(torch.ones(4), "."))
            assert torch.equal(grad.raw, grad.raw[:1].expand(3))
            dense = torch.tensor(2.0, requires_grad=True)
            f(torch.arange(4.0) + 1, dense).sum().backward()
            assert torch.equal(sl.unshard(grad), dense.grad)


@pytest.mark.parametrize("out", ["x y", ". y", "y x"])
def test_out_takes_the_result_where_it_lies(out: str) -> None:
    a, into = torch.randn(4, 6), torch.zeros(4, 6)
    with sl.simulate(x=2, y=2), sl.implicit():
        given = sl.shard(into, out)
        assert torch.exp(sl.shard(a, "x y"), out=given) is given
        assert torch.equal(sl.unshard(given), a.exp()) and sl.layout_of(given) == sl.Layout.parse(out)
        with pytest.raises(sl.ShardError, match="plain tensor cannot take"):
            torch.exp(sl.shard(a, "x y"), out=into)


def test_a_write_that_torch_would_show_elsewhere_is_refused() -> None:
    a = torch.randn(4, 6)
    with sl.simulate(x=2, y=2), sl.implicit():
        x = sl.shard(a, "x y")
        row = x[1]  # gathered for it: a copy, where torch has a view
        for refused in (row, row.view(2, 3), x):
            with pytest.raises(sl.ShardError, match="share memory"):
                refused.mul_(2)
        assert torch.equal(sl.unshard(x), a)
        del row, refused
        assert torch.equal(sl.unshard(x.mul_(2)), a * 2)


def test_a_pickled_tensor_lies_where_it_lay() -> None:
    """Padding and the layout of its products are in its place, and so survive."""
    with sl.simulate(x=2):
        x = sl.shard(torch.arange(15.0).view(5, 3), "x .", pad=True)
        back, again = pickle.loads(pickle.dumps((x, x + 1)))
    assert torch.equal(sl.unshard(back), sl.unshard(x)) and sl.typeof(back) == sl.typeof(x)
    assert back.mesh is again.mesh
