"""A ShardedTensor goes wherever torch takes a tensor, under every layout."""

import copy
import pickle
import warnings
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.mesh import scope, within
from shardlib.ops.matmul.function import Product
from shardlib.tensor import tensor
from tests.workers import Pool

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
        with pytest.raises(sl.ShardError, match="y lies otherwise than the result"):
            sl.shard(torch.ones(4, 4), ". .").add_(a)


def test_torch_func_transforms_are_refused_aloud() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4), "x")
        with pytest.raises(sl.ShardError, match="grad does not know sharded values"):
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


# ---------------------------------------------------------------- calls that need blocks alone

CALLS: dict[str, Any] = {
    "gelu": lambda x, w: F.gelu(x, approximate="tanh"),
    "sum": lambda x, w: x + x,
    "number": lambda x, w: x * 2.5,
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "product": lambda x, w: x @ w,
    "layer_norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "views": lambda x, w: x.unflatten(-1, (2, 4)).flatten(2).mT.permute(2, 0, 1),
}


class Counted(dict[Any, Any]):
    """The table of implementations, which counts how often one is looked up."""

    looked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.looked += key in self
        return super().get(key, default)


def called_thrice(name: str, axis: str) -> list[tuple[bool, int]]:
    """Of three calls of one kind on other values: is it dense's, and how many implementations ran."""
    mesh, draw, out = sl.current_mesh(), torch.Generator().manual_seed(3), []
    table, tensor.TABLE = tensor.TABLE, Counted(tensor.TABLE)
    try:
        for _ in range(3):
            x, w = (
                torch.randn(s, dtype=torch.float64, generator=draw) for s in ((4, 6, 8), (8, 8))
            )
            w.requires_grad_()
            want = CALLS[name](x, w)
            dense = torch.autograd.grad(want.square().sum() + w.sum(), w)[0]
            placed, before = sl.shard(x, f"{axis} . ."), tensor.TABLE.looked
            made = []

            def loss(w: Any, placed: Any = placed, made: list[Any] = made) -> Any:
                made.append(CALLS[name](placed, w))
                made.append(tensor.TABLE.looked)
                return made[0].square().sum() + w.sum()

            _, g = sl.value_and_grad(loss, pending=axis)(sl.shard(w.detach(), "...", mesh=mesh))
            alike = torch.allclose(sl.unshard(made[0]), want, rtol=1e-12, atol=1e-12)
            alike = alike and torch.allclose(sl.unshard(g), dense, rtol=1e-12, atol=1e-12)
            out.append((alike, made[1] - before))
    finally:
        tensor.TABLE = table
    return out


PIECES = {"linear": 1, "layer_norm": 2}  # w[0] and w[1], which are cut anew


@pytest.mark.parametrize("name", CALLS)
def test_what_needs_its_blocks_alone_runs_at_once_from_the_second_call_on(
    name: str, pool: Any
) -> None:
    with sl.simulate(d=2):
        assert [alike for alike, _ in called_thrice(name, "d")] == [True] * 3
    for answer in pool.run(called_thrice, name, "x", x=4):
        assert [alike for alike, _ in answer] == [True] * 3
        assert [ran for _, ran in answer][1:] == [PIECES.get(name, 0)] * 2 < [answer[0][1]] * 2


SKEWED: dict[str, Any] = {
    "sum of rows": lambda x: x.sum(1),
    "mean of columns": lambda x: x.mean(0),
    "var": lambda x: x.var(1),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(),
    "softmax": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, x]),
    "expand": lambda x: x.expand(3, -1, -1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "a column": lambda x: x[:, 1],
    "cumsum": lambda x: x.cumsum(1),
    "any": lambda x: (x > 0).any(1),
    "a view": lambda x: x.reshape(2, 8),
    "transposed": lambda x: x.t(),
    "whole sum": lambda x: x.sum(),
    "whole norm": lambda x: x.norm(),
    "gelu": lambda x: F.gelu(x) * 2,
    "in place": lambda x: x.clone().mul_(2),
    "embedding": lambda x: F.embedding(x.new_tensor([3, 0], dtype=torch.long), x),
}


@pytest.mark.parametrize("skew", ["a", "b"])
@pytest.mark.parametrize("name", SKEWED)
def test_a_function_of_skewed_blocks_equals_dense_or_is_refused(name: str, skew: str) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    want = SKEWED[name](x)
    with sl.simulate(x=2, y=2):
        s = sl.shard(x, f"x y skew {skew}")
        for moved in (0, 2**20):
            try:
                with sl.implicit(moved):
                    got = SKEWED[name](s)
            except sl.ShardError as e:
                assert "skew" in str(e)
                assert moved == 0
                continue
            assert torch.allclose(sl.unshard(got).to(want.dtype), want), moved
        if name in ("whole sum", "whole norm", "gelu", "in place", "transposed"):
            assert torch.allclose(sl.unshard(SKEWED[name](s)), want)  # what Cannon's users need


PRODUCTS = {
    "2D": ("x y", "x y"),
    "its other form": ("y x", "x y"),
    "columns": (". .", ". x"),
    "rows": (". x", "x ."),
    "cube": ("(x y) .", ". ."),
}


def products_again(of_x: str, of_w: str) -> list[tuple[bool, int]]:
    """Of products on other values, each surrounded otherwise: is it dense's, and how many
    implementations ran.
    """
    mesh, draw, out = sl.current_mesh(), torch.Generator().manual_seed(4), []
    table, tensor.TABLE = tensor.TABLE, Counted(tensor.TABLE)

    def product() -> tuple[bool, int]:
        x, w = (
            torch.randn(24, 24, dtype=torch.float64, generator=draw).requires_grad_()
            for _ in "xw"  # of sizes that no other test of this pool has made a mesh remember
        )
        want = x @ w
        of_dense = torch.autograd.grad(want.square().sum(), (x, w))
        sx = sl.shard(x.detach(), of_x).requires_grad_()
        sw = sl.shard(w.detach(), of_w).requires_grad_()
        before = tensor.TABLE.looked
        y = sx @ sw
        ran = tensor.TABLE.looked - before
        y.square().sum().backward()
        pairs = zip((y, sx.grad, sw.grad), (want, *of_dense), strict=True)
        alike = all(torch.allclose(sl.unshard(a.detach()), b, rtol=1e-12) for a, b in pairs)
        return alike, ran

    try:
        for _ in range(3):
            out.append(product())
        with sl.saving():
            out.append(product())
        with torch.no_grad():
            a, b = (sl.shard(torch.eye(8, dtype=torch.float64), lay) for lay in (of_x, of_w))
            out.append((torch.equal(sl.unshard(a @ b), torch.eye(8, dtype=torch.float64)), 0))
        moved = []
        for _ in range(2):  # what is counted is the same, though one of them is remembered
            mesh.memo.forget()
            for _ in range(2):
                with sl.trace() as counted:
                    out.append(product())
                moved.append(counted.bytes)
        out.append((len(set(moved)) == 1, 0))
    finally:
        tensor.TABLE = table
    return out


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_moves_blocks_runs_at_once_from_the_second_call_on(
    name: str, pool: Any
) -> None:
    asked: list[list[int]] = []
    for answer in pool.run(products_again, *PRODUCTS[name], x=2, y=2):
        assert all(alike for alike, _ in answer)
        asked.append([ran for _, ran in answer])
    assert all(ran == asked[0] for ran in asked)
    if name == "2D":
        assert asked[0][0] > 0 == asked[0][1] == asked[0][2]  # remembered
        assert asked[0][3] > 0  # what is saved elsewhere is another call


def fails_once() -> tuple[int, str]:
    """How often a schedule ran whose transfer fails at its second call, and what was said."""
    ran = []

    def failing(*_: Any) -> Any:
        ran.append(1)
        raise RuntimeError("a transfer failed")

    x = sl.shard(torch.ones(8, 8), "x y")
    x @ x
    before, Product.forward = Product.forward, staticmethod(failing)  # type: ignore[method-assign]
    try:
        x @ x
    except RuntimeError as e:
        return len(ran), str(e)
    finally:
        Product.forward = staticmethod(before)  # type: ignore[method-assign]
    return len(ran), ""


def test_a_transfer_that_fails_is_not_run_again(pool: Any) -> None:
    assert pool.run(fails_once, x=2, y=2) == [(1, "a transfer failed")] * 4


def test_backward_is_torchs_within_modes_and_without(w: sl.ShardedTensor) -> None:
    class Heard(TorchFunctionMode):
        names: ClassVar[list[str]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    leaf = w.detach().requires_grad_()
    leaf.square().sum().backward()
    first = sl.unshard(leaf.grad).clone()  # the memory is added to
    with Heard():
        leaf.square().sum().backward(retain_graph=True)
    assert "backward" in Heard.names
    assert torch.equal(sl.unshard(leaf.grad), 2 * first)
    other = w.detach().requires_grad_()
    (leaf * other).sum().backward(None, None, False, [other])
    assert torch.equal(sl.unshard(other.grad), sl.unshard(leaf.detach()))
    assert torch.equal(sl.unshard(leaf.grad), 2 * first)
    with pytest.raises(sl.ShardError, match="no scalar needs its cotangent"):
        leaf.backward()


def test_equal_numbers_of_other_types_are_other_calls() -> None:
    with sl.simulate(x=2):
        n = sl.shard(torch.tensor([1, 2]), "x")
        for by in (2, 2.0, True, 2, 2.0, True):
            assert (n * by).dtype == (torch.tensor([1, 2]) * by).dtype


def test_a_call_that_asks_for_gradients_is_another_one() -> None:
    with sl.simulate(x=2):
        x, w = sl.shard(torch.arange(8.0).view(2, 4), "x ."), sl.shard(torch.ones(4), "...")
        for _ in range(2):
            x * w
            asked = w.detach().requires_grad_()
            (g,) = torch.autograd.grad((x * asked).sum(), asked)
            assert sl.unshard(g).tolist() == [4.0, 6.0, 8.0, 10.0]


def test_who_listens_hears_every_call() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4, 4), "x .")
        F.gelu(x), x @ sl.shard(torch.ones(4, 4), "...")
        heard = []

        class Watcher:
            def __call__(self, run: Any, func: Any, args: Any, kwargs: Any) -> Any:
                heard.append(func.__name__)
                return run(func, args, kwargs)

        for _ in range(2):
            with within(watcher=Watcher()):
                F.gelu(x)
        assert heard == ["gelu"] * 2


def test_an_algorithm_that_comes_later_is_heard() -> None:
    with sl.simulate(x=2):
        x, w = sl.shard(torch.ones(4, 4), "x ."), sl.shard(torch.ones(4, 4), "...")
        x @ w
        asked: list[Any] = []
        sl.extend.algorithm("matmul", "listens")(lambda case: asked.append(case) or "never fits")
        try:
            x @ w
        finally:
            sl.extend.remove("matmul", "listens")
        assert len(asked) == 1


FUNCTIONS: dict[str, Any] = {
    "sum": lambda x: x.sum(),
    "sin": lambda x: x.sin().sum(),
    "product": lambda x: (x @ x.mT).sum(),
    "softmax": lambda x: x.softmax(-1).square().sum(),
}
TRANSFORMS: dict[str, Any] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "grad_and_value": lambda f, x: torch.func.grad_and_value(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.func.vmap(lambda row: f(row * torch.ones(1, 1)))(x),
    "make_dual": lambda f, x: dual(f, x),
    "unshard in grad": lambda f, x: torch.func.grad(lambda t: (t * sl.unshard(x)).sum())(
        torch.ones(4, 8)
    ),
    "shard in grad": lambda f, x: torch.func.grad(
        lambda t: sl.unshard((sl.shard(t, x.sharding) * x).sum())
    )(torch.ones(4, 8)),
    "shard in vmap": lambda f, x: torch.func.vmap(lambda t: sl.unshard(f(sl.shard(t, x.sharding))))(
        torch.ones(2, 4, 8)
    ),
    "reshard in grad": lambda f, x: torch.func.grad(
        lambda t: (t * f(sl.reshard(x, "y x")).sum()).sum()
    )(torch.ones(4, 8)),
    "vectorize": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    "vectorize forward": lambda f, x: torch.autograd.functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
}
INSTEAD = {  # what the fixes say in their stead, on a function of the tensor x
    "sl.grad(f)(x)": lambda f, x: torch.func.grad(f)(x),
    "torch.autograd.functional.vjp(f, x)[1]": lambda f, x: torch.func.grad(f)(x),
    "torch.autograd.functional.jvp(f, x, x)[1]": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "torch.autograd.functional.jacobian(f, x)": lambda f, x: torch.func.jacrev(f)(x),
    "torch.autograd.functional.hessian(f, x)": lambda f, x: torch.func.hessian(f)(x),
}


def dual(f: Any, x: torch.Tensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return f(torch.autograd.forward_ad.make_dual(x, x))


def transformed(layout: str) -> list[str]:
    """What each transform of each function says besides its name and a fix."""
    said = []
    for implicit in (False, True):
        with warnings.catch_warnings(), sl.implicit() if implicit else nullcontext():
            warnings.simplefilter("ignore")  # torch scripts functions of its own at the first
            for f in FUNCTIONS.values():
                for name, transform in TRANSFORMS.items():
                    x = sl.shard(torch.arange(32.0).view(4, 8) / 7, layout)
                    try:
                        transform(f, x)
                        said.append(f"{name} gave a value")
                    except sl.ShardError as e:
                        known = "does not know sharded values" in str(e) and e.fix
                        said.append("" if known else f"{name}: {e}")
    return said


def replaced(layout: str) -> list[str]:
    """Fixes whose value is not dense's."""
    wrong, x = [], torch.arange(32.0, dtype=torch.float64).view(4, 8) / 7
    for name, f in FUNCTIONS.items():
        for line, dense in INSTEAD.items():
            with warnings.catch_warnings(), sl.implicit():
                warnings.simplefilter("ignore")
                got = eval(line, {"sl": sl, "torch": torch, "f": f, "x": sl.shard(x, layout)})
                want = dense(f, x)
            if not torch.allclose(sl.unshard(got), want):
                wrong.append(f"{name}: {line}")
    return wrong


@pytest.mark.parametrize("layout", ["x y", "x .", ". ."])
def test_a_transform_of_torch_func_is_right_or_refused_by_its_name(layout: str) -> None:
    with sl.simulate(x=2, y=2):
        assert not any(transformed(layout)) and not replaced(layout)


def test_a_transform_of_torch_func_is_refused_by_its_name_on_real_ranks(pool: Pool) -> None:
    for layout in ("x y", ". ."):
        assert not any(any(said) for said in pool.run(transformed, layout, x=2, y=2))
        assert not any(pool.run(replaced, layout, x=2, y=2))


@torch.library.custom_op("shardlib_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


REFUSED = {  # torch's own refusals: one error, inside and outside sl.implicit
    "operands": lambda x: torch.einsum("ij,jk->ik", x),
    "letters": lambda x: torch.einsum("ijk->ik", x),
    "too many": lambda x: torch.einsum("ij->j", x, x),
    "unknown letter": lambda x: torch.einsum("ij->k", x),
    "dims": lambda x: torch.tensordot(x, x, dims=3),
    "pairs": lambda x: torch.tensordot(x, x, dims=([0], [0, 1])),
    "meta": lambda x: x.to("meta"),
    "bias": lambda x: F.linear(x, torch.ones_like(x), torch.ones_like(x)[0]),
    "array, left": lambda x: np.ones((4, 8)) * x,
    "array, right": lambda x: x - np.ones((4, 8)),
    "array, product": lambda x: np.ones((2, 4)) @ x,
    "a function of numpy": lambda x: np.sin(x),
}


def refused() -> list[str]:
    wrong = []
    for layout in ("x y", ". ."):
        x = sl.shard(torch.arange(32.0).view(4, 8), layout)
        for name, f in REFUSED.items():
            for implicit in (False, True):
                with sl.implicit() if implicit else nullcontext():
                    try:
                        f(x)
                        wrong.append(f"{name} has a value")
                    except sl.ShardError:
                        pass
        for number in (np.float32(3), np.float64(3), np.int64(3)):
            assert torch.equal(sl.unshard(number - x), 3 - sl.unshard(x))
            assert torch.equal(sl.unshard(x < number), sl.unshard(x) < 3)
    x = sl.shard(torch.arange(32.0).view(4, 8), "x y")
    try:
        without_fake(x)
        wrong.append("moved unasked")
    except sl.ShardError as e:
        assert "would move" in str(e)
    with sl.implicit():
        assert torch.equal(sl.unshard(without_fake(x)), torch.arange(32.0).view(4, 8).sin())
    return wrong


def test_what_torch_refuses_is_one_error_of_ours_with_or_without_implicit(pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        assert not refused()
    assert not any(pool.run(refused, x=2, y=2))


@pytest.mark.parametrize(
    ("error", "runs"),
    [
        (torch.OutOfMemoryError("out of memory"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1),
        (RuntimeError("The size of tensor a must match"), 2),
    ],
)
def test_a_repeated_call_that_lacks_memory_is_not_run_again(error: Exception, runs: int) -> None:
    """Only what torch refuses of the operands is left to the implementation, which names it."""
    calls = []

    def fails(raw: torch.Tensor) -> torch.Tensor:
        calls.append("repeat")
        raise error

    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4), "x")
        x.neg()
        key = tensor._call_key(scope(), torch.Tensor.neg, (x,), {})
        plans = x.mesh.memo["call"]
        assert key in plans
        plans[key] = plans[key]._replace(run=fails)
        if runs == 1:
            with pytest.raises(type(error), match="memory"):
                x.neg()
        else:
            assert sl.unshard(x.neg()).tolist() == [-1.0] * 4
    assert calls == ["repeat"]
