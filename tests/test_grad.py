"""Gradients as values: hooks, setters, inputs, frozen leaves, and
second derivatives of all that has a first.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from tests.ops.cases import close, r

X, C = r(4, 6, seed=1), r(4, 6, seed=2)
TARGETS = torch.randint(0, 6, (4,), generator=torch.Generator().manual_seed(3))
# of a matrix and of a vector of its columns
ROWS = [("data x", "x"), ("data .", "."), (". x", "x"), (". .", ".")]


def whole(x: Any) -> Tensor:
    return sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x


# ---------------------------------------------------------------- hooks and setters


def watched(x: Tensor, w: Tensor) -> tuple[Tensor, list[Any]]:
    seen: list[Any] = []
    y = x * w
    y.register_hook(lambda g: (seen.append(g), g * 2)[1])
    w.register_hook(lambda g: seen.append(g))
    return (y.tanh() * y).sum(), seen


def hooks() -> list[str]:
    """Layouts in which a tensor's hooks see, or make, other gradients than dense ones."""
    x, w = X.clone().requires_grad_(), C[0].clone().requires_grad_()
    loss, seen = watched(x, w)
    loss.backward()
    wrong = []
    for lx, lw in ROWS:
        xs, ws = sl.shard(X, lx).requires_grad_(), sl.shard(C[0], lw).requires_grad_()
        loss, found = watched(xs, ws)
        loss.backward()
        pairs = zip([xs.grad, ws.grad, *found], [x.grad, w.grad, *seen], strict=True)
        wrong += [lx for a, b in pairs if not torch.allclose(whole(a), b, atol=1e-12)]
    return wrong


def test_tensor_hooks_see_and_change_the_dense_gradient(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert hooks() == []
    assert pool.run(hooks, data=2, x=2) == [[]] * 4


def test_a_hook_that_returns_another_layout_is_refused() -> None:
    with sl.simulate(x=2):
        x = sl.shard(X, ". x").requires_grad_()
        y = x * 2
        y.register_hook(lambda g: sl.reshard(g, "..."))
        with pytest.raises(sl.ShardError, match="lies otherwise than the one it was given"):
            y.sum().backward()


def test_a_hook_after_accumulation_gets_the_tensor_itself_until_it_is_removed() -> None:
    with sl.simulate(data=2, x=2):
        w, got = sl.shard(C, "data x").requires_grad_(), []

        def step(p: Tensor) -> None:
            got.append(p is w)
            p.detach().sub_(p.grad * 0.1)
            p.grad = None

        handle = w.register_post_accumulate_grad_hook(step)
        (w**2).sum().backward()
        close(sl.unshard(w.detach()), C * 0.8)
        handle.remove()
        (w**2).sum().backward()
        assert got == [True] and w.grad is not None


def test_backward_of_several_tensors_is_their_sum() -> None:
    x = X.clone().requires_grad_()
    torch.autograd.backward([(x * 2).sum(), x**2], [None, C])
    with sl.simulate(data=2, x=2):
        xs = sl.shard(X, "data x").requires_grad_()
        torch.autograd.backward([(xs * 2).sum(), xs**2], [None, sl.shard(C, "data x")])
        close(sl.unshard(xs.grad), x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_module_of_sharded_parameters_trains_moves_and_loads(dtype: torch.dtype) -> None:
    with sl.simulate(x=2):
        m = nn.Linear(6, 4)
        m.weight, m.bias = nn.Parameter(sl.shard(C, ". x")), nn.Parameter(sl.shard(C[:, 0], "."))
        state = {n: p.clone() for n, p in m.state_dict().items()}
        first = m.weight
        m.to(dtype)
        assert m.weight.dtype == dtype and isinstance(m.weight, nn.Parameter) and m.weight is first
        m(sl.shard(X.to(dtype), ". x")).sum().backward()
        assert sl.typeof(m.weight.grad) == sl.typeof(m.weight)
        m.double().load_state_dict(state)
        assert torch.equal(sl.unshard(m.weight.detach()), C)
        with pytest.raises(RuntimeError, match="While copying the parameter"):
            m.load_state_dict({"weight": sl.shard(C, "x ."), "bias": state["bias"]})


# ---------------------------------------------------------------- values placed, frozen and asked
# for


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(self.a(h).tanh())


RULES = [("a.weight", "x ."), ("a.bias", "x"), ("b.weight", ". x"), ("b.bias", ".")]


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def upstream() -> float:
    """A plain encoder before ``apply``: how far its gradients
    are from dense, whatever ``inputs=`` says.
    """
    torch.manual_seed(2)
    encoder, worst = nn.Linear(6, 6).double(), 0.0
    net()(encoder(X)).square().sum().backward()
    want = [p.grad.clone() for p in encoder.parameters()]
    for inputs in ({"h": "data ."}, {"h": ". ."}, {}):
        encoder.zero_grad()
        apply, params = sl.parallelize(net(), RULES, inputs=inputs)
        apply(params, encoder(X)).square().sum().backward()
        worst = max(
            worst,
            *(
                float((p.grad - w).abs().max())
                for p, w in zip(encoder.parameters(), want, strict=True)
            ),
        )
    return worst


def test_inputs_that_apply_places_get_their_gradients(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert upstream() < 1e-12
    assert max(pool.run(upstream, data=2, x=2)) < 1e-12


def frozen(stage: bool) -> tuple[float, int, int]:
    """Three steps of AdamW with one matrix frozen: distance from torch's,
    bytes of a step, of one with all trained.
    """
    m, d = net(), net()
    for one in (m, d):
        one.a.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in d.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1
    )
    apply, params = sl.parallelize(m, RULES, inputs={"h": "data ."})
    tx = sl.optim.adamw(1e-2, weight_decay=0.1)
    tx = sl.optim.zero(tx, "data") if stage else tx
    state = tx.init(params)
    if stage:
        trained = (
            sum(p.raw.numel() for p in params.values() if p.requires_grad)
            // params["b.bias"].raw[..., 0].numel()
        )
        assert trained > 0
    else:
        assert state.mu["a.weight"] is None and state.nu["a.weight"] is None
    with sl.trace() as t:
        for _ in range(3):
            optimizer.zero_grad()
            d(X).square().sum().backward()
            optimizer.step()
            grads = sl.grad(lambda p: apply(p, X).square().sum(), pending="data" if stage else ())(
                params
            )
            assert grads["a.weight"] is None
            updates, state = tx.update(grads, state, params)
            assert updates["a.weight"] is None
            before, params = params, sl.optim.apply_updates(params, updates)
            assert params["a.weight"] is before["a.weight"]
    assert [p.requires_grad for p in params.values()] == [p.requires_grad for p in d.parameters()]
    free = {n: p.detach() for n, p in params.items()}
    with sl.trace() as every:
        sl.grad(lambda p: apply(p, X).square().sum(), pending="data" if stage else ())(free)
    error = max(
        float((sl.unshard(params[n].detach()) - p.detach()).abs().max())
        for n, p in d.named_parameters()
    )
    return error, int(t.bytes), int(every.bytes)


def test_frozen_leaves_have_no_gradient_no_bytes_no_moments_and_do_not_move(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        for stage in (False, True):
            error, bytes_, every = frozen(stage)
            assert error < 1e-12
            if not stage:
                assert bytes_ < 3 * every
    for stage in (False, True):
        assert all(error < 1e-12 for error, *_ in pool.run(frozen, stage, data=2, x=2))


def test_a_gradient_for_a_leaf_that_was_frozen_at_the_start_is_refused() -> None:
    p = {"w": r(3).requires_grad_(), "v": r(3)}
    g = {"w": r(3), "v": r(3)}
    for tx in (sl.optim.adamw(0.1), sl.optim.sgd(0.1, 0.9), sl.optim.lion(0.1)):
        with pytest.raises(sl.ShardError, match="frozen when the state was made"):
            tx.update(g, tx.init(p), p)


def test_several_arguments_are_differentiated_at_once() -> None:
    with sl.simulate(data=2, x=2):
        x, w = sl.shard(X, "data x"), sl.shard(C[0], "x")

        def f(x: Any, w: Any, k: float) -> Tensor:
            return (x * w["w"] * k).sum()

        gx, gw = sl.grad(f, (0, 1))(x, {"w": w}, 2.0)
        alone: Any = sl.grad(f, -2)(x, {"w": w}, 2.0)
        close(sl.unshard(gx), (2 * C[0]).expand(4, 6))
        close(sl.unshard(gw["w"]), 2 * X.sum(0))
        assert torch.equal(sl.unshard(gw["w"]), sl.unshard(alone["w"]))
        with pytest.raises(sl.ShardError, match="argnums=3"):
            sl.grad(f, 3)(x, {"w": w}, 2.0)
        with pytest.raises(sl.ShardError, match="only floating point leaves"):
            sl.grad(f, 2)(x, {"w": w}, 2.0)


# ---------------------------------------------------------------- second derivatives


def seeded(*shape: int) -> Tensor:
    return r(*shape, seed=11)


SECOND: dict[str, Callable[[Any, Any, Any, Any], Tensor]] = {
    "cross entropy": lambda x, w, b, t: F.cross_entropy(x * w, t, label_smoothing=0.1),
    "layer norm": lambda x, w, b, t: (F.layer_norm(x, (6,), w, b) ** 3).sum(),
    "layer norm, no weights": lambda x, w, b, t: (F.layer_norm(x, (6,)) ** 3 * w).sum(),
    "rms norm": lambda x, w, b, t: (F.rms_norm(x, (6,), w) ** 3).sum(),
    "softmax": lambda x, w, b, t: ((x * w).softmax(-1) ** 2).sum(),
    "log softmax": lambda x, w, b, t: ((x * w).log_softmax(-1) ** 2).sum(),
    "gelu": lambda x, w, b, t: (F.gelu(x * w) ** 2).sum(),
    "product": lambda x, w, b, t: ((x @ x.T) ** 2).sum() + (w**3).sum(),
    "mean": lambda x, w, b, t: ((x * w + b).mean(0) ** 3).sum(),
    "max": lambda x, w, b, t: ((x * w).amax(0) ** 3).sum(),
}


def penalty(f: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor, t: Tensor) -> Tensor:
    loss = f(x, w, b, t)
    grads = torch.autograd.grad(loss, (x, w), create_graph=True, allow_unused=True)
    return loss + sum((g * g).sum() for g in grads if g is not None)


def far(a: Any, b: Any) -> float:
    return float((whole(a) - b).abs().max() / b.abs().max())


def second() -> list[str]:
    """Functions whose penalised gradient is not the dense one,
    or that refuse it, on the mesh in scope.
    """
    wrong = []
    for name, f in SECOND.items():
        dense = [v.clone().requires_grad_() for v in (X, C[0], C[1])]
        penalty(f, *dense, TARGETS).backward()
        for lx, lw in ROWS:
            ours = [
                sl.shard(v, lay).requires_grad_() for v, lay in ((X, lx), (C[0], lw), (C[1], lw))
            ]
            penalty(f, *ours, sl.shard(TARGETS, lx.split()[0])).backward()
            for a, b in zip(ours, dense, strict=True):
                if b.grad is not None and not far(a.grad, b.grad) < 1e-12:
                    wrong.append(f"{name} {lx}")
    table, ids = seeded(8, 6), torch.tensor([1, 7, 1, 0])

    def looked_up(t: Tensor, ids: Tensor) -> Tensor:
        (g,) = torch.autograd.grad((F.embedding(ids, t) ** 3).sum(), t, create_graph=True)
        return (g * g).sum()

    dense_table = table.clone().requires_grad_()
    looked_up(dense_table, ids).backward()
    for lt, li in (("x .", "data"), ("x .", "."), (". x", "data")):
        t = sl.shard(table, lt).requires_grad_()
        looked_up(t, sl.shard(ids, li)).backward()
        if not far(t.grad, dense_table.grad) < 1e-12:
            wrong.append(f"embedding {lt} {li}")
    return wrong


@pytest.mark.parametrize("axes", [{"data": 2, "x": 2}, {"data": 1, "x": 2}])
def test_second_derivatives_are_dense(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert second() == []


def test_second_derivatives_on_processes(pool: Any) -> None:
    assert pool.run(second, data=2, x=2) == [[]] * 4


def narrow(dtype: torch.dtype, layout: str, weight: str, bias: str) -> tuple[float, float]:
    """A penalty through a biased product in half precision: our
    error and the dense one's, against fp64.
    """

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        loss = (F.linear(x, w, b).float() ** 2).sum()
        grads = torch.autograd.grad(loss, (x, w, b), create_graph=True)
        return sum((g.float() ** 2).sum() for g in grads)

    values = [v / 4 for v in (r(8, 6, seed=4), r(4, 6, seed=5), r(4, seed=6))]
    exact = [v.to(dtype).double().requires_grad_() for v in values]
    g64 = torch.autograd.grad((F.linear(*exact) ** 2).sum(), exact, create_graph=True)
    want = torch.autograd.grad(sum((g**2).sum() for g in g64), exact)
    dense = [v.to(dtype).requires_grad_() for v in values]
    f(*dense).backward()
    ours = [
        sl.shard(v.to(dtype), lay).requires_grad_()
        for v, lay in zip(values, (layout, weight, bias), strict=True)
    ]
    f(*ours).backward()
    scale = [float(w.abs().max()) for w in want]
    return tuple(
        max(
            float((whole(t.grad).double() - w).abs().max()) / s
            for t, w, s in zip(found, want, scale, strict=True)
        )
        for found in (ours, dense)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    "places",
    [("x .", "...", "..."), ("x .", "y .", "y"), ("x y", ". y", "..."), (". .", "x .", "x")],
)
def test_half_precision_penalties_are_as_exact_as_dense_ones(places: tuple[str, str, str]) -> None:
    with sl.simulate(x=2, y=2):
        got, dense = narrow(torch.bfloat16, *places)
        assert got < max(2 * dense, 0.02), (got, dense)


# torch's own forward mode compiles with it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_torch_func_and_forward_mode_are_refused_by_name() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.ones(4), "x")
        for name, call in (
            ("vmap", lambda: torch.vmap(lambda v: v * a)(torch.ones(3))),
            ("vmap", lambda: torch.vmap(lambda v: (a * 2).sum() * v)(torch.ones(3))),
            ("grad", lambda: torch.func.grad(lambda v: (a * v).sum())(torch.tensor(2.0))),
            ("jvp", lambda: torch.func.jvp(lambda v: v.sum(), (a,), (a,))),
            ("jacfwd", lambda: torch.func.jacfwd(lambda v: v.sum())(a)),
        ):
            with pytest.raises(sl.ShardError, match=f"torch.func's {name} does not know") as e:
                call()
            known = {"torch": torch, "sl": sl, "x": a, "f": lambda v: v.sum()}
            eval(e.value.fix, known | {"tangent": torch.ones(4)})
        for call in (lambda: torch.vmap(torch.sum)(a), lambda: torch.func.jacrev(torch.sum)(a)):
            with pytest.raises(sl.ShardError, match=r"torch\.func's \w+ does not know"):
                call()
        assert (a * 2).sum().item() == 8  # nothing of the transform is left


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


def _block(w: Any, b: Any, x: Any) -> Any:
    return F.gelu(F.layer_norm(x @ w + b, (8,))).square().mean()


def _of_gradients(grad: Any) -> Any:
    def outer(w: Any, b: Any, x: Any) -> Any:
        of_w, of_b = grad(_block, (0, 1))(w, b, x)
        return (of_w * of_w * w).sum() + of_b.pow(3).sum()

    return outer


def second_derivatives(of_x: str, of_w: str) -> float:
    """The largest error of a gradient of gradients, in this mesh."""
    draw = torch.Generator().manual_seed(6)
    w, b, x = (torch.randn(s, dtype=torch.float64, generator=draw) for s in ((8, 8), (8,), (8, 8)))
    want = torch.func.grad(_of_gradients(torch.func.grad), (0, 1, 2))(w, b, x)
    placed = sl.shard(w, of_w), sl.shard(b, "..."), sl.shard(x, of_x)
    got = sl.grad(_of_gradients(sl.grad), (0, 1, 2))(*placed)
    return max(float((sl.unshard(g) - d).abs().max()) for g, d in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("of_x", "of_w"), [("x y", "x y"), ("x .", ". y"), (". y", "y ."), ("(x y) .", ". ."), ("y x", "x y")]
)  # fmt: skip
def test_a_gradient_of_gradients_equals_dense(of_x: str, of_w: str, pool: Any) -> None:
    with sl.simulate(x=2, y=2):
        assert second_derivatives(of_x, of_w) < 1e-12
    assert max(pool.run(second_derivatives, of_x, of_w, x=2, y=2)) < 1e-12


def test_an_inner_call_sees_what_the_outer_differentiates() -> None:
    cube = lambda p: p.pow(3).sum()  # noqa: E731
    with sl.simulate(x=2):
        w = sl.shard(torch.tensor([1.0, 2.0, 3.0, 4.0]), "x")
        v = torch.ones_like(w)
        twice = sl.grad(lambda p: sl.grad(cube)(p).sum())
        thrice = sl.grad(lambda p: twice(p).sum())
        through = sl.grad(lambda p: sl.grad(lambda q: (p * q * q).sum())(v).sum())
        value = sl.grad(lambda p: sl.value_and_grad(cube)(p)[0])
        assert sl.unshard(twice(w)).tolist() == [6.0, 12.0, 18.0, 24.0]
        assert sl.unshard(thrice(w)).tolist() == [6.0] * 4
        assert sl.unshard(through(w)).tolist() == [2.0] * 4
        assert sl.unshard(value(w)).tolist() == [3.0, 12.0, 27.0, 48.0]
        assert not twice(w).requires_grad and not sl.value_and_grad(cube)(w)[0].requires_grad


def test_what_is_taken_without_a_graph_is_constant() -> None:
    def held(p: Any) -> Any:
        with torch.no_grad():
            g = sl.grad(lambda q: q.square().sum())(p)
        return (g * p).sum()

    with sl.simulate(x=2):
        w = sl.shard(torch.tensor([1.0, 2.0]), "x")
        assert sl.unshard(sl.grad(held)(w)).tolist() == [2.0, 4.0]


def test_buckets_are_refused_where_their_gradients_would_be_differentiated() -> None:
    with sl.simulate(data=2):
        params = {"w": sl.shard(torch.ones(4), "...")}
        tx = sl.optim.zero(sl.optim.adamw(1e-3), axis="data")
        tx.init(params)
        inner = sl.value_and_grad(lambda p: p["w"].sum(), into=tx)
        with pytest.raises(sl.ShardError, match="this call is differentiated"):
            sl.grad(lambda p: inner(p)[0])(params)


def _of_blocks() -> None:
    p, q = sl.shard(torch.arange(4.0), "x"), sl.shard(torch.ones(3), "...")
    wrong: list[Any] = [
        lambda p: p.raw.square().sum(),
        lambda p: (p * 2).local.square().sum(),
        lambda p: (q * p.raw.sum()).sum(),
        lambda p: sl.shard(p.raw.sum() + sl.unshard(p).sum(), "").sum(),
        lambda p: sl.psum(p.local.sum(), "x"),
    ]
    for f in wrong:
        with pytest.raises(sl.errors.PlainTensor, match="made of the block"):
            sl.grad(f)(p)
    inside = sl.shard_map(lambda v: sl.psum(v.square().sum(), "x"), in_layouts="x", out_layouts="")
    right: list[Any] = [
        inside,
        lambda p: sl.unshard(p).square().sum(),
        lambda p: (q * sl.unshard(p).square().sum() / 3).sum(),
        lambda p: sl.shard(sl.unshard(p).square(), "x").sum(),
        lambda p: p.square().sum() + p.raw.detach().sum() * 0,
        lambda p: sl.grad(lambda w: (w**3).sum() / 3)(p).sum(),
        lambda p: sl.grad(lambda t: (sl.shard(t, ".") * p**2).sum())(torch.ones(1)).sum(),
    ]
    for f in right:
        assert torch.equal(sl.unshard(sl.grad(f)(p)), 2 * torch.arange(4.0))


def test_a_loss_made_of_blocks_is_refused_and_one_of_whole_values_or_in_a_body_is_right(
    pool: Any,
) -> None:
    with sl.simulate(x=4):
        _of_blocks()
    pool.run(_of_blocks, x=4)
