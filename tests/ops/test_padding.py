import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.ops.padding import inside
from tests.ops.cases import close, r
from tests.strategies import examples


@examples(60)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
    st.sampled_from(["x y", "(x y) .", ". x", "zigzag(x) y", "(2 x) ."]),
    st.sampled_from([(2, 2), (2, 3), (4, 1)]),
)
def test_unshard_strips_what_shard_padded(shape: Any, layout: str, grid: Any) -> None:
    x = r(*shape)
    with sl.simulate(x=grid[0], y=grid[1]):
        a = sl.shard(x, layout, pad=True)
        assert a.shape == x.shape
        assert torch.equal(sl.unshard(a), x)
        close(sl.unshard(a.exp().sum()), x.exp().sum())
        close(sl.unshard((a + 1).mean(0)), (x + 1).mean(0))
        close(sl.unshard((a * a).mean(-1, keepdim=True)), (x * x).mean(-1, keepdim=True))


@examples(40)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([(2, 2), (2, 3)]))
def test_padded_products_equal_dense(sizes: Any, grid: Any) -> None:
    m, k, n = sizes
    row, col = grid
    x, w, g = r(m, k).requires_grad_(), r(k, n, seed=1).requires_grad_(), r(m, n, seed=2)
    (x.exp() @ w).backward(g)
    lcm = {(2, 2): 2, (2, 3): 6}[grid]
    with sl.simulate(x=row, y=col):
        # exp(0) = 1 in the padding: it must not leak into the contraction
        k_pad = (0, -k % lcm)
        a = (
            sl.shard(F.pad(x.detach(), k_pad), "x y", pad=True)
            if k_pad[1]
            else sl.shard(x.detach(), "x y", pad=True)
        )
        b = (
            sl.shard(F.pad(w.detach().T, k_pad).T, "x y", pad=True)
            if k_pad[1]
            else sl.shard(w.detach(), "x y", pad=True)
        )
        a.requires_grad_(), b.requires_grad_()
        c = a.exp() @ b
        close(sl.unshard(c)[:m, :n].detach(), (x.exp() @ w).detach())
        (c * sl.shard(g, "x y", pad=True)).sum().backward()
        close(sl.unshard(a.grad)[:m, :k], x.grad)
        close(sl.unshard(b.grad)[:k, :n], w.grad)


FUNCTIONS = {
    "softmax, padded dimension": lambda x: x.softmax(0),
    "log_softmax, padded dimension": lambda x: F.log_softmax(x, 0),
    "softmax of rows": lambda x: x.softmax(-1),
    "layer_norm of rows": lambda x: F.layer_norm(x, x.shape[-1:]),
    "amax": lambda x: x.amax(0),
    "amin, kept": lambda x: x.amin(0, keepdim=True),
    "max of all": lambda x: x.amax(),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: (x + 3).prod(0),
    "var": lambda x: x.var(0),
    "std of all": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "vector_norm, order 3": lambda x: torch.linalg.vector_norm(x, 3, 0),
    "cumsum of rows": lambda x: x.cumsum(-1),
    "sort of rows": lambda x: x.sort(-1).values,
    "flip of rows": lambda x: x.flip(-1),
    "permute": lambda x: x.unsqueeze(0).permute(2, 0, 1),
    "transposed product": lambda x: x.mT @ x,
    "glu of rows": lambda x: F.glu(x, -1),
    "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > -9).all(0),
    "max of rows": lambda x: x.max(-1).values,
    "max and min of all": lambda x: x.max() - x.min(),
    "argmax of rows": lambda x: x.argmax(-1),
    "topk of rows": lambda x: x.topk(2, -1).values,
    "cat of rows": lambda x: torch.cat([x, x * 2], -1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "split of rows": lambda x: x.split([2, 4], -1)[1],
    "chunk of rows": lambda x: x.chunk(2, -1)[0] * x.chunk(2, 1)[1],
    "unbind of rows": lambda x: x.unbind(1)[3],
    "narrow of rows": lambda x: x.narrow(1, 1, 3),
    "a slice of rows": lambda x: x[:, 1:4] * x[..., None, -1],
    "a column": lambda x: x[:, 2],
    "index_select of rows": lambda x: x.index_select(1, torch.tensor([3, 0])),
    "rows in two dimensions": lambda x: x.unflatten(1, (2, 3)).flatten(1) + x,
    "a view that splits rows": lambda x: x.view(5, 2, -1) * x.reshape(-1, 2, 3),
    "view_as": lambda x: x.view_as(x.detach().clone()),
    "flattened rows": lambda x: x.unflatten(1, (2, 3)).flatten(-2),
    "a number that is a tensor": lambda x: x[:, x.new_tensor(2, dtype=torch.long)],
    "positions of rows": lambda x: x[:, torch.tensor([3, 0])],
    "expand": lambda x: x.expand(3, -1, 6),
    "expand_as": lambda x: x[None].expand_as(torch.stack([x, x])),
    "mse_loss": lambda x: F.mse_loss(x, x.square()),
    "smooth_l1_loss, summed": lambda x: F.smooth_l1_loss(x, x.square(), reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype)),
    "kl_div of each": lambda x: F.kl_div(x, x.detach().square(), reduction="none"),
    "foreach": lambda x: torch._foreach_mul([x], 3.0)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", ["x .", "x y", "(y x) ."])
def test_functions_of_padded_tensors_equal_dense(name: str, layout: str) -> None:
    """What the padding holds changes no value and no gradient: it is set to what breaks most."""
    f, x = FUNCTIONS[name], r(5, 6).requires_grad_()
    want = f(x)
    with sl.simulate(x=2, y=2):
        a = sl.shard(x.detach(), layout, pad=True)
        a.raw[~inside(a).raw] = float("nan")
        try:
            got = f(a.requires_grad_())
        except sl.ShardError:
            with sl.implicit(10_000):
                got = f(a)
            assert layout == "x y"  # rows of whole dimensions are never refused
        assert got.shape == want.shape
        if not want.is_floating_point():
            assert torch.equal(sl.unshard(got), want)
            return
        close(sl.unshard(got).detach(), want.detach())
        g = r(*want.shape, seed=1)
        want.backward(g)
        lies = sl.layout_of(got)
        (got * sl.shard(g, lies, pad=True)).sum().backward()
        close(sl.unshard(a.grad), x.grad)


IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(3.0),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.square() + 1, value=-0.5),
    "copy_": lambda x, y: x.copy_(y),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "+=": lambda x, y: operator.iadd(x, y),
    "foreach": lambda x, y: torch._foreach_add_([x], [y], alpha=0.5)[0],
    "cpu": lambda x, y: x.cpu().add_(x.new_ones(())),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("layout", ["x .", ". x", "x y", "(y x) ."])
def test_padded_tensors_are_written_as_dense_ones(name: str, layout: str) -> None:
    x, y = r(5, 7), r(5, 7, seed=1)
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(t.clone(), layout, pad=True) for t in (x, y))
        for t in (a, b):
            t.raw[~inside(t).raw] = float("nan")
        out = IN_PLACE[name](a, b)
        close(sl.unshard(a), IN_PLACE[name](x, y))
        assert out is a and a.is_padded


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("kernel", ["foreach", "fused", None])
def test_torchs_optimizers_step_padded_parameters(make: Any, kernel: str | None) -> None:
    torch.manual_seed(0)
    dense = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    dense.double()
    x, y = r(4, 6), r(4, 5, seed=1)

    def trained(model: Any) -> list[float]:
        how = {"foreach": False} if kernel is None else {kernel: True}
        steps, losses = make(model.parameters(), lr=0.1, **how), []
        for _ in range(3):
            steps.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            steps.step()
        return losses

    with sl.simulate(x=2):
        rules = [("0.weight", "x ."), ("2.weight", ". x"), ("0.bias", "x"), ("*", "...")]
        parts = sl.parallelize(dense, rules, pad=True, inputs={"input": ". ."})
        model = sl.as_module(*parts)
        assert any(p.is_padded for p in model.parameters())
        held = {name: p.clone() for name, p in model.state_dict().items()}
        found = trained(model)
        model.load_state_dict(held)
        again = trained(model)
    want = trained(dense)
    assert found == pytest.approx(want, rel=1e-10) and again == pytest.approx(want, rel=1e-10)


def test_functions_that_would_read_the_padding_refuse() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(5, 4), "x .", pad=True)
        for call in (lambda: a.cumsum(0), lambda: a.view(20), lambda: torch.cat([a, a])):
            with pytest.raises(sl.ShardError, match="padd") as caught:
                call()
            assert eval(caught.value.fix, {"sl": sl, "x": a, "y": a, "torch": torch})[:5].shape == (
                5,
                4,
            )
        with pytest.raises(sl.ShardError, match="padded alike"):
            a + sl.shard(torch.ones(5, 4), ". .")
        assert "padded" in sl.typeof(a)


CONFIG = GPTConfig(vocab=37, ctx=8, layers=1, heads=4, embed=16)  # 37 divides by nothing
MESHES = {
    "megatron1d": {"x": 4},
    "optimus2d": {"data": 2, "x": 2, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 1},
    "cube3d": {"x": 2, "y": 2, "z": 2},
}


@pytest.mark.parametrize("recipe", MESHES)
@pytest.mark.parametrize("smooth", [0.0, 0.1])
def test_a_padded_vocabulary_takes_no_part(recipe: str, smooth: float) -> None:
    """Tied embedding and classifier, loss, and every
    gradient; what the padding holds is never seen.
    """
    m = GPT(CONFIG).double()
    ids = torch.randint(37, (8, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[0, :3] = -100

    def loss(logits: Any, target: Any) -> Any:
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), target.view(-1), label_smoothing=smooth
        )

    want = loss(m(ids), labels)
    want.backward()
    with sl.simulate(**MESHES[recipe]):
        rules = getattr(sl.recipes, recipe)(m)
        apply, params = sl.parallelize(m, rules, inputs={"idx": rules.tokens}, pad=True)
        assert "padded" in sl.typeof(params["wte.weight"]) and params["wte.weight"].shape == (
            37,
            16,
        )
        blocks = params["wte.weight"].raw
        inside = sl.shard(
            torch.ones(37, 16, dtype=torch.float64), sl.layout_of(params["wte.weight"]), pad=True
        ).raw
        params["wte.weight"].raw.data = torch.where(
            inside == 1, blocks, torch.full_like(blocks, 1e3)
        )
        target = sl.shard(labels, rules.labels)
        got, grads = sl.value_and_grad(lambda p: loss(apply(p, ids), target))(params)
        assert got.shape == () and abs(float(got.item() - want.item())) < 1e-12
        for name, p in m.named_parameters():
            assert p.grad is not None
            close(sl.unshard(grads[name]) / p.grad.abs().max(), p.grad / p.grad.abs().max())
        assert bool((grads["wte.weight"].raw[inside != 1] == 0).all())
        tx = sl.optim.adamw(1e-2)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert sl.optim.apply_updates(params, updates)["wte.weight"].shape == (37, 16)


def test_what_would_reach_the_padding_is_refused() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4, 5), ". x", pad=True)
        assert (
            x[1:, :].shape == (3, 5) and x[..., None, :].shape == (4, 1, 5) and x[0].shape == (5,)
        )
        assert x.view(2, 2, -1, 1).shape == (2, 2, 5, 1)
        for f in (
            lambda: x[:, 0],
            lambda: x[..., 1:],
            lambda: x.view(20),
            lambda: x.view(5, 4),
        ):
            with pytest.raises(sl.errors.Unsupported):
                f()
        with pytest.raises(sl.errors.Unsupported, match="only the vocabulary"):
            F.embedding(sl.shard(torch.zeros(2, dtype=torch.long), "."), x)


def test_what_is_written_to_a_view_of_a_padded_tensor_is_refused() -> None:
    """Its blocks were copied to be filled: the tensor would not see what is written."""
    with sl.simulate(x=5):
        x = sl.shard(torch.arange(27.0).reshape(3, 3, 3), ". . x", pad=True) * 1
        for write in (lambda v: F.relu(v, inplace=True), lambda v: v.zero_(), lambda v: v.fill_(1)):
            with pytest.raises(sl.ShardError, match="share memory"):
                write(x.diagonal())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.unsqueeze(dim=-2, input=x),
        lambda x: torch.squeeze(input=x[None], dim=0),
        lambda x: torch.transpose(dim0=0, dim1=1, input=x),
        lambda x: torch.permute(dims=(1, 0), input=x),
        lambda x: torch.movedim(destination=0, source=1, input=x),
        lambda x: torch.t(input=x),
    ],
)
def test_padded_operands_may_be_named(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = r(2, 5)
    with sl.simulate(x=2, y=2):
        assert torch.equal(sl.unshard(f(sl.shard(x, "x y", pad=True))), f(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.narrow(start=1, length=1, dim=0, input=x),
        lambda x: torch.select(index=1, input=x, dim=0),
        lambda x: torch.chunk(x, dim=0, chunks=2)[1],
        lambda x: torch.unbind(dim=0, input=x)[0],
        lambda x: torch.cat(dim=0, tensors=[x, x]),
        lambda x: torch.max(dim=0, input=x).values,
    ],
)
def test_what_is_cut_beside_the_padding_may_be_named(
    f: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = r(2, 5)
    with sl.simulate(x=2):
        assert torch.equal(sl.unshard(f(sl.shard(x, ". x", pad=True))), f(x))


@pytest.mark.parametrize(
    ("f", "shapes", "dtype"),
    [
        (F.linear, ((3,), (3,)), torch.float64),
        (F.linear, ((3, 3), (3, 3)), torch.bool),
        (torch.mm, ((2, 3, 3), (2, 3, 3)), torch.float64),
        (torch.bmm, ((3, 3), (3, 3)), torch.float64),
        (torch.matmul, ((3, 3), (3, 3)), torch.bool),
    ],
)
def test_products_of_padding_are_those_of_torch_or_refused_as_there(
    f: Callable[..., torch.Tensor], shapes: Any, dtype: torch.dtype
) -> None:
    x, w = (r(*s).to(dtype) for s in shapes)
    with sl.simulate(x=2), sl.implicit():
        given_ = [sl.shard(t, ". " * (t.ndim - 1) + "x", pad=True) for t in (x, w)]
        try:
            want = f(x, w)
        except RuntimeError:
            with pytest.raises((sl.ShardError, RuntimeError)):
                f(*given_)
        else:
            close(sl.unshard(f(*given_)), want)


@pytest.mark.parametrize("name", ["a mask", "a table of positions"])
def test_what_inference_keeps_serves_training(name: str) -> None:
    """A table that was made in inference mode may be saved for a backward later."""
    t = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(0).square().sum() if name == "a mask" else x[torch.tensor([0, 2])].prod()

    dense = t.clone().requires_grad_()
    f(dense).backward()
    with sl.simulate(x=2), sl.implicit():
        x = sl.shard(t, "x .", pad=True) if name == "a mask" else sl.shard(t, ". x")
        with torch.inference_mode():
            f(x)
        y = (x * 1).detach().requires_grad_()
        f(y).backward()
        assert torch.allclose(sl.unshard(y.grad), dense.grad)


def implicitly() -> None:
    for shape in ((3, 5), (4, 5)):
        x = r(*shape)
        with sl.implicit():
            for write in (
                lambda t: t.__setitem__((slice(None), 1), 0.0),
                lambda t: t.__setitem__((-1, slice(1, 4)), 7.0),
                lambda t: t.__setitem__(t > 0, 0.5),
            ):
                a, want = sl.shard(x, "x y", pad=True), x.clone()
                write(a), write(want)
                assert torch.equal(sl.unshard(a), want)
                close(sl.unshard(a.sum()), want.sum())
            a = sl.shard(x, "x y", pad=True)
            assert torch.equal(sl.unshard(a[a > 0]), x[x > 0])
            assert torch.equal(sl.unshard(a[:, -1]), x[:, -1])
            close(sl.unshard(F.batch_norm(a, None, None, training=True)),
                  F.batch_norm(x, None, None, training=True))  # fmt: skip


def test_what_reads_or_writes_padding_runs_on_whole_values_where_they_may_move(pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        implicitly()
    pool.run(implicitly, x=2, y=2)


def test_a_refused_index_into_padding_has_a_fix_with_that_index() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(r(4, 5), "x y", pad=True)
        for text in (":, -1", ":, 1:3", "0, ::2"):
            with pytest.raises(sl.ShardError) as e:
                eval(f"x[{text}]", {"x": x})
            assert e.value.fix == f"sl.unshard(x)[{text}]"
