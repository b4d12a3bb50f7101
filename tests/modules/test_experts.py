"""Stacks of experts split over mesh axes: dense values and
gradients, own rows alone, what moves is foretold.
"""

import os
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardlib as sl
from benchmarks import models
from benchmarks.zoo import SMALL, TEXT
from shardlib.modules.experts import experts, stacks
from tests.tensor.test_weight_gradients import Split, leaves_of, split

D, T, E = 8, 16, 4


class Stack(nn.Module):
    """Experts as transformers writes them: a loop over those that any row is routed to."""

    seen: list[int]

    def __init__(self, count: int = E) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 6, D) / 3)
        self.bias = nn.Parameter(torch.randn(count, 6) / 3)
        self.down = nn.Parameter(torch.randn(count, D, 6) / 3)
        self.seen = []

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in index.unique():
            self.seen.append(int((index == e).sum()))
            row, slot = (index == e).nonzero(as_tuple=True)
            y = F.linear(F.silu(F.linear(hidden[row], self.up[e], self.bias[e])), self.down[e])
            out.index_add_(0, row, y * weights[row, slot, None])
        return out


class Mixture(nn.Module):
    """A residual block of routed experts; ``only``: every row goes to these."""

    def __init__(self, count: int = E, only: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.head = nn.Linear(D, count), Stack(count), nn.Linear(D, D)
        self.only = only
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1, D)
        weights, index = self.router(x).softmax(-1).topk(2)
        if self.only:
            index = torch.zeros_like(index) + torch.tensor(self.only)
        return self.head(hidden + self.experts(x, index, weights).reshape(hidden.shape))


HIDDEN = torch.randn(4, T // 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
PLACES: dict[str, tuple[dict[str, int], str, str]] = {  # mesh, the experts' axes, where hidden lies
    "rows whole": ({"x": 2}, "x", ". . ."),
    "rows over other axes": ({"data": 2, "x": 2}, "x", "data . ."),
    "rows over the same axis": ({"x": 4}, "x", "x . ."),
    "experts over more axes": ({"data": 2, "x": 2}, "(data x)", "data . ."),
    "rows over more axes": ({"data": 2, "x": 2}, "x", "(data x) . ."),
    "positions over the same axis": ({"data": 2, "x": 2}, "x", "data x ."),
    "features over the same axis": ({"x": 2, "y": 2}, "y", "x . y"),
    "features over another axis": ({"x": 2, "y": 2}, "x", ". . y"),
}


def gap(module: nn.Module, axes: str, place: str, run: Any = None) -> float:
    """Largest relative difference of the output and of any
    gradient, of parameters and of the input.
    """
    want_x = HIDDEN.clone().requires_grad_()
    module.zero_grad()
    want = module(want_x)
    cotangent = torch.randn(
        want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(2)
    )
    (want * cotangent).sum().backward()
    apply, params = sl.parallelize(module, [("experts.*", f"{axes} ..."), ("*", "...")])
    x = sl.shard(HIDDEN, place).requires_grad_()
    for p in params.values():
        p.requires_grad_()
    with sl.implicit(2**20):  # the router and the head take features that are split
        out = (run or apply)(params, x)
        (out * sl.shard(cotangent, out.sharding)).sum().backward()
    pairs = [(out, want), (x.grad, want_x.grad)] + [
        (params[n].grad, p.grad) for n, p in module.named_parameters()
    ]
    return max(
        float(
            (sl.unshard(a).detach() - b.detach()).abs().max()
            / b.detach().abs().max().clamp(min=1e-3)
        )
        for a, b in pairs
    )


@pytest.mark.parametrize("place", PLACES)
def test_split_experts_equal_dense(place: str) -> None:
    mesh, axes, hidden = PLACES[place]
    with sl.simulate(**mesh):
        assert gap(Mixture(), axes, hidden) < 1e-12


@pytest.mark.parametrize("only", [(0, 1), (3, 3)])
def test_ranks_that_no_row_is_routed_to_add_nothing(only: tuple[int, ...]) -> None:
    with sl.simulate(data=2, x=2):
        assert gap(Mixture(only=only), "x", "data . .") < 1e-12


def test_each_rank_computes_the_rows_of_its_own_experts_alone() -> None:
    module = Mixture()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("experts.*", "x ..."), ("*", "...")])
        apply(params, HIDDEN)
    assert sum(module.experts.seen) == 2 * T
    assert module.experts.num_experts == E and "forward" not in vars(module.experts)


def test_a_stack_that_is_split_may_be_a_region_of_remat() -> None:
    module = Mixture()
    rules: list[Any] = [("experts.*", "x ..."), ("*", "...")]
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, rules, remat=[("experts", "full")])
        sl.value_and_grad(lambda p: apply(p, HIDDEN).square().sum())(params)
    assert sum(module.experts.seen) == 2 * 2 * T  # each row twice in backward too


def test_recomputed_experts_equal_dense() -> None:
    class Again(Mixture):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, hidden, use_reentrant=False)

    with sl.simulate(data=2, x=2):
        assert gap(Again(), "x", "data . .") < 1e-12


def test_a_module_of_split_experts_trains_as_dense() -> None:
    module = Mixture()
    want = module(HIDDEN).square().mean()
    want.backward()
    with sl.simulate(x=2):
        apply, params = sl.parallelize(module, [("experts.*", "x ..."), ("*", "...")])
        model = sl.as_module(apply, params)
        loss = model(HIDDEN).square().mean()
        loss.backward()
        assert torch.allclose(loss, want, rtol=1e-12)
        for n, p in model.named_parameters():
            assert torch.allclose(
                sl.unshard(p.grad), module.get_parameter(n).grad, rtol=1e-10, atol=1e-12
            ), n


class Fed(nn.Module):
    """A loss of the mixture, and a layer before it, so that hidden has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture()
        self.before = nn.Linear(D, D).double()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mixture(self.before(hidden)).sum()


def moved(axes: str, place: str) -> list[Any]:
    """(bytes, messages) of a call and of its gradient, each
    foretold, then counted on the mesh in scope.
    """
    rules = [("mixture.experts.*", f"{axes} ..."), ("*", "...")]
    apply, params = sl.parallelize(Fed(), rules, inputs={"hidden": place})
    x = HIDDEN.reshape(T, D)
    plan = sl.explain(apply, params, sl.shard(x, place))
    with sl.trace() as forward:
        apply(params, x)
    with sl.trace() as step:
        sl.value_and_grad(apply)(params, x)
    back = step.bytes - forward.bytes, step.messages - forward.messages
    told = [(t.bytes, t.messages) for t in (plan.forward, forward, plan.backward)]
    return [*told, back]


def test_what_moves_is_foretold() -> None:
    rows, numbers = T * D * 8, T * 2 * 8
    with sl.simulate(x=2):
        told, counted, told_back, back = moved("x", ". .")
        assert told == counted == (rows, 2)  # an all-reduce of [T, D] over two ranks
        # and of hidden's and of the weights' gradients
        assert told_back == back == (rows + numbers, 4)
    with sl.simulate(x=4):
        told, counted, told_back, back = moved("x", "x .")
        assert told == counted
        gathered, scattered, loss = 3 * (rows + 2 * numbers) // 4, 3 * rows // 4, 12
        assert counted[0] == gathered + scattered + loss
        assert told_back == back


def on_ranks() -> list[Any]:
    out: list[Any] = [gap(Mixture(only=only), "x", "data . .") for only in ((), (0, 1), (3, 3))]
    return [*out, moved("x", "data ."), gap(Mixture(), "(data x)", "(data x) . .")]


def test_real_ranks_equal_dense_and_move_what_simulated_ones_do(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        wanted = moved("x", "data .")
    for *errors, counted, both in pool.run(on_ranks, data=2, x=2):
        assert max(*errors, both) < 1e-12
        assert counted == wanted and wanted[0] == wanted[1] and wanted[2] == wanted[3]


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_whole_experts_of_transformers_run_on_each_ranks_own_rows(implementation: str) -> None:
    """Values and gradients are dense's, and nothing moves
    but the sums of the parameters' gradients.
    """
    config("Mixtral")
    block = mixture("Mixtral", implementation).module.get_submodule("model.layers.0.mlp")
    dtype = next(block.parameters()).dtype
    x = torch.randn(4, 8, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))
    want = block(x)
    block.zero_grad()
    want.square().sum().backward()
    with sl.simulate(s=2):
        apply, params = sl.parallelize(block, [("*", "...")], inputs={"hidden_states": "s . ."})
        for p in params.values():
            p.requires_grad_()
        with sl.trace() as t:
            out = apply(params, x)
        assert not t.bytes
        out.square().sum().backward()
        limit = 1e-4 if implementation == "grouped_mm" else 1e-6  # the router's softmax is fp32
        assert models._gap(sl.unshard(out).detach(), want.detach()) < limit
        for n, p in block.named_parameters():
            assert models._gap(sl.unshard(params[n].grad), p.grad) < limit, n


def config(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sizes = {
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "num_local_experts": 4,
        "moe_intermediate_size": 16,
    }
    return getattr(transformers, f"{name}Config")(
        **{**SMALL, **TEXT, "num_key_value_heads": 2, **sizes, **more}
    )


def mixture(name: str, implementation: str) -> models.Dense:
    """A mixture of transformers, its dense answers and its limit."""
    import transformers

    made = config(name, shared_expert_intermediate_size=16) if name == "Qwen2Moe" else config(name)
    made._experts_implementation = implementation
    torch.manual_seed(0)
    module = getattr(transformers, f"{name}ForCausalLM")(made).eval()
    if implementation != "grouped_mm":  # its kernel takes no fp64
        module = module.double()
    inputs = {"input_ids": torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0))}
    return models.Dense(
        module,
        inputs,
        *models._run(module, inputs),
        1e-5 if implementation == "grouped_mm" else 2e-6,
    )


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Olmoe", "GptOss"])
def test_mixtures_under_recipes_with_split_experts_equal_dense(
    name: str, implementation: str
) -> None:
    config(name)
    want = mixture(name, implementation)
    for recipe, mesh, axes in (
        ("megatron1d", {"data": 2, "x": 2}, "x"),
        ("ddp", {"data": 4}, "data"),
    ):
        with sl.simulate(**mesh):
            rules = getattr(sl.recipes, recipe)(want.module, experts=axes)
            apply, params = sl.parallelize(want.module, rules, inputs={"input_ids": rules.tokens})
            assert sum("forward" in vars(m) for m in apply.module.modules()) == 2
            assert all(str(p.dims[0]) == axes for n, p in params.items() if ".experts." in n)

            def loss(p: Any, apply: Any = apply) -> tuple[Tensor, Tensor]:
                logits = apply(p, **want.inputs).logits
                return models.loss_of(logits), logits

            (total, logits), grads = sl.value_and_grad(loss, has_aux=True)(params)
            whole = {n: sl.unshard(g).detach() for n, g in grads.items()}
            got = sl.unshard(logits).detach(), sl.unshard(total).detach()
            assert models._gaps(got, whole, want) < want.limit


class Listed(nn.Module):
    """Experts as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden).softmax(-1)
        return hidden + sum(e(hidden) * weights[..., i, None] for i, e in enumerate(self.experts))


def test_what_no_layout_splits_is_refused_by_name() -> None:
    with sl.simulate(x=2):
        model: nn.Module = Listed()
        with pytest.raises(sl.ShardError, match=r"'experts.0.weight'.*\[E, ...\]"):
            sl.recipes.megatron1d(model, experts="x")
        model = Mixture(count=3)
        with pytest.raises(sl.ShardError, match=r"3 experts of 'experts.up' do not divide over 2"):
            sl.recipes.megatron1d(model, experts="x")
        with pytest.raises(sl.ShardError, match="unknown axis 'z'"):
            sl.recipes.megatron1d(Mixture(), experts="z")


def test_a_stack_split_in_other_dimensions_too_is_refused_with_the_rule_to_write() -> None:
    module = Mixture()
    with sl.simulate(x=2, y=2):
        rules: list[Any] = [("experts.up", "x y ."), ("*", "...")]
        with pytest.raises(sl.ShardError, match=r"'experts.up' is laid out x y") as caught:
            sl.parallelize(module, rules)
        assert "sl.parallelize(module, [('experts.*', 'x ...'), *(r for" in caught.value.fix
        eval(caught.value.fix, {"sl": sl, "module": module, "rules": rules})


def test_a_stack_is_known_by_what_it_holds_and_takes() -> None:
    assert list(stacks(Mixture())) == ["experts"]
    assert not stacks(Listed())


# ---------------------------------------------------------------- backward in two passes


def two_passes(module: nn.Module, rules: Any, hidden: Tensor, place: str, **how: Any) -> Split:
    apply, params = sl.parallelize(module, rules, **how)
    held = leaves_of(params)
    x = sl.shard(hidden, place).requires_grad_()

    def f() -> Tensor:
        with sl.implicit():
            return apply(held, x).raw

    return split(f, [x.raw], [p.raw for p in held.values()], torchs="remat" not in how)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_experts_may_wait_for_a_second_pass(place: str) -> None:
    mesh, axes, lay = PLACES[place]
    rules = [("experts.*", f"{axes} ..."), ("*", "...")]
    with sl.simulate(**mesh):
        for how in ({}, {"remat": [("experts", "full")]}):
            made = two_passes(Mixture(), rules, HIDDEN, lay, **how)
            assert made.gap < 1e-12 and sum(made.flops) <= 1.02
            # of each expert that has rows two, on each rank, and those of router and head
            assert made.count >= 2 * E + 2 and made.flops[1] > 0.25


class Alone(nn.Module):
    """A mixture's block without its router's answers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        out = self.block(hidden)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_gradients_of_mixtures_may_wait_for_a_second_pass(name: str, implementation: str) -> None:
    config(name)
    block = mixture(name, implementation).module.get_submodule("model.layers.0.mlp")
    hidden = HIDDEN.new_ones(4, 8, 32).cumsum(0).cos() + HIDDEN.repeat(1, 2, 4)
    hidden = hidden.to(next(block.parameters()).dtype)
    rules = [("block.experts.*", "x ..."), ("*", "...")]
    with sl.simulate(x=2):
        made = two_passes(Alone(block), rules, hidden, ". . .")
    assert made.gap < (1e-4 if implementation == "grouped_mm" else 1e-12)
    assert sum(made.flops) <= 1.02
    # batched_mm copies weights for each row, and its products are torch's own
    assert made.flops[1] > (0 if implementation == "batched_mm" else 0.45)


def _two_passes_on_ranks() -> Split:
    return two_passes(Mixture(), [("experts.*", "x ..."), ("*", "...")], HIDDEN, "data . .")


def test_gradients_of_experts_wait_on_real_ranks_too(pool: Any) -> None:
    for made in pool.run(_two_passes_on_ranks, data=2, x=2):
        assert made.gap < 1e-12 and made.count >= 2 and sum(made.flops) <= 1.02


def test_a_call_of_experts_that_are_not_split_alike_is_refused_as_their_rules_are() -> None:
    """A plan weighs layouts by calls: one that parallelize refuses would be planned."""
    stack = Stack().double()
    with sl.simulate(x=2):
        for texts in (("x . .", "x .", ". . ."), (". x .", ". x", ". . .")):
            mixed = [
                sl.shard(p.detach(), t) for p, t in zip(stack.parameters(), texts, strict=True)
            ]
            x, index = sl.shard(HIDDEN.reshape(-1, D), ". ."), torch.arange(2 * T).view(T, 2) % E
            given = x, sl.shard(index, ". ."), sl.shard(torch.ones_like(index).double(), ". .")
            with pytest.raises(sl.ShardError, match="split alike"):
                experts(weakref.ref(stack), ("up", "bias", "down"), *given, *mixed)
