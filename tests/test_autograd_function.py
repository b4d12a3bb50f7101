"""A user's torch.autograd.Function on sharded values is the
Function on the dense ones, gradients included.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib._compat import StorageWeakRef

F64 = torch.float64


class Gate(torch.autograd.Function):
    """Inputs and an output saved, an attribute on ctx, an
    int and None returned, a default argument.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, k: float = 2.0) -> Any:
        y = (x * w).tanh() * k
        ctx.save_for_backward(x, w, y)
        ctx.k = k
        return y, 7, None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert not any(ctx.needs_input_grad[2:])
        x, w, y = ctx.saved_tensors
        d = grads[0] * ctx.k * (1 - (y / ctx.k) ** 2)
        return d * w, (d * x).sum(0) if ctx.needs_input_grad[1] else None, None


class Affine(torch.autograd.Function):
    """setup_context, two outputs, an argument that may be None."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        y = x @ w.T
        return (y if b is None else y + b), (x * x).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, b = inputs
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        g, g2 = grads
        return g @ w + 2 * x * g2.unsqueeze(-1), g.T @ x, g.sum(0) if ctx.has_bias else None


class Chosen(torch.autograd.Function):
    """An output that is not differentiable, one that is not
    used, and no gradients made of nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        on = x > 0
        ctx.mark_non_differentiable(on)
        ctx.save_for_backward(on)
        return x * on, on, x.exp()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, of_mask, of_exp = grads
        assert of_mask is None and of_exp is None
        return g * ctx.saved_tensors[0]


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return 3 * x * x * w * grads[0], (x**3 * grads[0]).sum(0)


class Doubled(torch.autograd.Function):
    """In place, and marked so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class Straight(torch.autograd.Function):
    """The straight-through estimator, which also returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.round(), x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] + grads[1]


def gate(p: Any, x: Tensor) -> Tensor:
    y, seven, none = Gate.apply(x, p["v"], 3.0)
    assert seven == 7 and none is None
    return (Gate.apply(y, p["v"])[0] * x).sum()


def affine(p: Any, x: Tensor) -> Tensor:
    y, s = Affine.apply(x, p["w"], p["b"])
    return (y * Affine.apply(x, p["w"])[0]).sum() + (s**2).sum()


def chosen(p: Any, x: Tensor) -> Tensor:
    y, on, _ = Chosen.apply(x * p["v"])
    assert not on.requires_grad
    return (y**2).sum()


def dirty(p: Any, x: Tensor) -> Tensor:
    h = x * p["v"]
    assert Doubled.apply(h) is h
    return (h * h).sum()


def straight(p: Any, x: Tensor) -> Tensor:
    a, b = Straight.apply(x * p["v"])
    return (a * b).sum()


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gate": gate, "affine": affine, "chosen": chosen, "dirty": dirty, "straight": straight,
    "once": lambda p, x: Once.apply(x * p["v"]).sum(), "cubed": lambda p,
    x: Cubed.apply(x, p["v"]).sum(),
}  # fmt: skip
PLACES = [("x .", "...", ". ."), (". x", "x", ". x"), (". .", "...", ". .")]  # of x, v and w


def numbers() -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    p = {"v": (6,), "w": (8, 6), "b": (8,)}
    return {n: torch.randn(s, dtype=F64, generator=g) for n, s in p.items()}, torch.randn(
        4, 6, dtype=F64, generator=g
    )


def once_more(x: Tensor, v: Tensor) -> Tensor:
    """A penalty on the gradient."""
    (g,) = torch.autograd.grad(USES["cubed"]({"v": v}, x), x, create_graph=True)
    g = sl.reshard(g, str(g.sharding).split(" + ")[0]) if isinstance(g, sl.ShardedTensor) else g
    return (g * g).sum()


def differences() -> list[str]:
    """Uses whose loss or gradients are not the dense ones, on
    the mesh in scope, deferred or not.
    """
    plain, x = numbers()
    wrong = []

    def compare(what: str, got: Any, want: Any) -> None:
        error = max(float((sl.unshard(got[n]) - t).abs().max()) for n, t in want.items())
        if not error < 1e-11:
            wrong.append(f"{what}: {error:.1e}")

    for name, f in USES.items():
        leaves = {n: t.clone().requires_grad_() for n, t in (plain | {"x": x}).items()}
        f(leaves, leaves["x"]).backward()
        want = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
        for lx, lv, lw in PLACES:
            params = {"v": sl.shard(plain["v"], lv), "w": sl.shard(plain["w"], lw), "b": sl.shard(plain["b"], "..."),
                      "x": sl.shard(x, lx)}  # fmt: skip
            for pending in ((), "x", "y"):
                _, grads = sl.value_and_grad(lambda p, f=f: f(p, p["x"]), pending=pending)(params)
                compare(f"{name} {lx} {pending}", grads, want)
    leaves = {"x": x.clone().requires_grad_(), "v": plain["v"].clone().requires_grad_()}
    once_more(**leaves).backward()
    want = {n: t.grad for n, t in leaves.items()}
    for lx, lv, _ in PLACES:
        params = {"x": sl.shard(x, lx), "v": sl.shard(plain["v"], lv)}
        for pending in ((), "x", "y"):
            compare(
                f"twice {lx} {pending}",
                sl.grad(lambda p: once_more(**p), pending=pending)(params),
                want,
            )
    return wrong


@pytest.mark.parametrize("axes", [{"x": 2, "y": 2}, {"x": 2, "y": 1}])
def test_a_function_of_the_user_has_the_dense_gradients(axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        assert differences() == []


def test_a_function_of_the_user_on_processes(pool: Any) -> None:
    assert pool.run(differences, x=2, y=2) == [[]] * 4


def test_a_second_derivative_that_the_function_forbids_is_refused() -> None:
    with sl.simulate(x=2, y=2):
        for layout in ("x .", ". ."):
            x = sl.shard(numbers()[1], layout).requires_grad_()
            (g,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                (g * g).sum().backward()


def test_the_graph_node_carries_the_users_name_and_hooks_see_it() -> None:
    plain, x = numbers()
    with sl.simulate(x=2):
        y = Cubed.apply(sl.shard(x, "x .").requires_grad_(), sl.shard(plain["v"], "..."))
        assert type(y.grad_fn).__name__ == "CubedBackward"


def test_blocks_inside_shard_map_keep_their_graph() -> None:
    plain, x = numbers()
    xd, vd = x.clone().requires_grad_(), plain["v"].clone().requires_grad_()
    Cubed.apply(xd, vd).sum().backward()
    with sl.simulate(x=2, y=2):
        xs, vs = sl.shard(x, "x .").requires_grad_(), sl.shard(plain["v"], "...").requires_grad_()
        sl.shard_map(Cubed.apply, in_layouts=("x .", "."), out_layouts="x .")(
            xs, vs
        ).sum().backward()
        assert torch.allclose(sl.unshard(xs.grad), xd.grad) and torch.allclose(
            sl.unshard(vs.grad), vd.grad
        )


def test_padded_values_and_plain_operands_get_their_gradients() -> None:
    plain, _ = numbers()
    x = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(2))
    xd, vd = x.clone().requires_grad_(), plain["v"].clone().requires_grad_()
    Cubed.apply(xd, vd).sum().backward()
    with sl.simulate(x=2):
        xs, vs = (
            sl.shard(x, "x .", pad=True).requires_grad_(),
            sl.shard(plain["v"], ".").requires_grad_(),
        )
        Cubed.apply(xs, vs).sum().backward()
        assert torch.allclose(sl.unshard(xs.grad), xd.grad) and torch.allclose(
            sl.unshard(vs.grad), vd.grad
        )


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, h: Tensor, v: Tensor) -> Tensor:
        return self.second(Cubed.apply(self.first(h), v))


def in_a_module() -> float:
    plain, x = numbers()
    torch.manual_seed(0)
    module = Cut().double()
    dense, v = copy.deepcopy(module), plain["v"].clone().requires_grad_()
    (dense(x, v) ** 2).sum().backward()
    rules = [
        ("first.weight", "x ."),
        ("first.bias", "x"),
        ("second.weight", ". x"),
        ("second.bias", "."),
    ]
    apply, params = sl.parallelize(module, rules, inputs={"h": "data ."})
    ours = plain["v"].clone().requires_grad_()
    _, grads = sl.value_and_grad(lambda p: (apply(p, x, ours) ** 2).sum())(params)
    errors = [
        float((sl.unshard(grads[n]) - p.grad).abs().max() / p.grad.abs().max())
        for n, p in dense.named_parameters()
    ]
    (apply(params, x, ours) ** 2).sum().backward()
    return max(*errors, float((ours.grad - v.grad).abs().max() / v.grad.abs().max()))


def test_a_function_inside_a_module_cuts_no_graph(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert in_a_module() < 1e-12
    assert max(pool.run(in_a_module, data=2, x=2)) < 1e-12


class Hidden(torch.autograd.Function):
    """Its tensors come in a list, where torch tracks no gradient."""

    @staticmethod
    def forward(ctx: Any, xs: list[Tensor], k: Tensor) -> Any:
        return xs[0] * k

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


class Misshapen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].sum(0)


def test_what_would_lose_a_gradient_is_refused() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.ones(4, 6), ". x").requires_grad_()
        with pytest.raises(sl.ShardError, match="their gradient would be lost"):
            Hidden.apply([x.detach()], torch.ones((), requires_grad=True))
        with pytest.raises(sl.ShardError, match=r"shape \[6\] for an input of shape \[4, 6\]"):
            Misshapen.apply(x).sum().backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(torch.nn.functional.gelu(self.n(self.a(h))))


RULES = [("a.weight", "x ."), ("a.bias", "x"), ("n.*", "x"), ("b.weight", ". x"), ("b.bias", ".")]


def hooked() -> tuple[Net, list[Any]]:
    torch.manual_seed(1)
    net, log = Net().double(), []
    net.a.register_full_backward_hook(
        lambda m, gi, go: log.extend([*[g for g in gi if g is not None], *go])
    )
    net.n.register_full_backward_pre_hook(lambda m, go: (log.extend(go), (go[0] * 3,))[1])
    net.b.register_full_backward_hook(lambda m, gi, go: (log.extend([*gi, *go]), (gi[0] * 2,))[1])
    return net, log


def module_hooks() -> list[str]:
    """Gradients and what module backward hooks saw, where they differ from dense."""
    x = numbers()[1]
    net, log = hooked()
    net(x.clone().requires_grad_()).square().sum().backward()
    wrong = []
    for pending in ((), "data"):
        ours, seen = hooked()
        apply, params = sl.parallelize(ours, RULES, inputs={"h": "data ."})
        given = x.clone().requires_grad_()
        grads = sl.grad(
            lambda p, given=given, apply=apply: apply(p, given).square().sum(), pending=pending
        )(params)
        seen.clear()
        apply(params, given).square().sum().backward()
        pairs = [(grads[n], p.grad) for n, p in net.named_parameters()] + list(
            zip(seen, log, strict=True)
        )
        wrong += [
            str(i)
            for i, (a, b) in enumerate(pairs)
            if not torch.allclose(sl.unshard(a), b, atol=1e-12)
        ]
    return wrong


def test_module_backward_hooks_see_and_change_the_dense_gradients(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert module_hooks() == []
    assert pool.run(module_hooks, data=2, x=2) == [[]] * 4


def left_behind(wrap: Any) -> int:
    """Bytes that a graph keeps of tensors which its saved-tensor hooks have moved elsewhere."""
    moved = []

    def pack(x: torch.Tensor) -> Any:
        if isinstance(x, sl.ShardedTensor):
            return x.becomes(pack(x.raw))
        moved.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return x.clone()

    torch.manual_seed(0)
    blocks = [torch.nn.Linear(8, 8).double() for _ in range(3)]
    net = torch.nn.Module()
    net.h = torch.nn.ModuleList(blocks)

    def forward(x: Any) -> Any:
        for block in net.h:
            x = wrap(block, torch.tanh(x) * 1.0)
        return x

    net.forward = forward
    apply, params = sl.parallelize(net, [("*", "...")], inputs={"x": "data ."})
    given = {k: p.requires_grad_() for k, p in params.items()}
    own = {p.raw.untyped_storage()._cdata for p in given.values()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = apply(given, torch.randn(4, 8).double())
    at = out.raw.untyped_storage()._cdata
    kept = sum(n for ref, n in moved if not ref.expired() and ref.cdata not in {*own, at})
    out.square().sum().backward()
    assert moved and all(p.grad is not None for p in given.values())
    return kept


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, block: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (2.0 + 0.0 * x), None


def heard(block: Any, x: Any) -> Any:
    y = block(x)
    y.register_hook(lambda g: g * 1.0)
    return y


WRAPS = {
    "remat": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "function": lambda block, x: block(Held.apply(x, None)),
    "hook": heard,
    "plain": lambda block, x: block(x),
}


@pytest.mark.parametrize("name", WRAPS)
def test_what_a_graph_saved_stays_nowhere_else(name: str, pool: Any) -> None:
    """So hooks that move it to another memory free it: ``torch.autograd.graph.save_on_cpu``."""
    with sl.simulate(data=2):
        assert left_behind(WRAPS[name]) == 0
    if name == "remat":
        assert pool.run(behind_remat, data=4) == [0] * 4


def behind_remat() -> int:
    return left_behind(WRAPS["remat"])
