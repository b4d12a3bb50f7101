"""Backward in two passes: together one backward, none of it twice, and nothing kept that W does
not read.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardlib as sl
from shardlib.grad import deferring
from shardlib.memory_tracker import Live
from shardlib.mesh import scope, within
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor, WeightGradients, leaf_block
from shardlib.tensor.weight_gradients import SplitProducts

D, ROWS = 16, 8


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=g)


HIDDEN = seeded(4, ROWS, D)


class Split(NamedTuple):
    """One backward and two passes of the same function.

    ``gap``    largest relative difference of a gradient.
    ``flops``  of I and of W, as parts of the one backward's.
    ``count``  gradients that were queued.
    ``moved``  bytes of I and of W, as parts of the one backward's.
    """

    gap: float
    flops: tuple[float, float]
    count: int
    moved: tuple[float, float]


def _finished(queue: WeightGradients) -> list[Tensor | None]:
    """Return the queued gradients of the leaves."""
    edges, grads = queue.run()
    if not edges:
        return [None] * len(queue.leaves)
    return list(torch.autograd.grad(edges, queue.leaves, grads, allow_unused=True))


def split(
    f: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    torchs: bool = True,
) -> Split:
    """Differentiate ``f`` at once, and in two passes, with respect to raw blocks.

    ``torchs``  whether the one backward is that of torch's own products.
    """
    wanted = [*inputs, *leaves]
    with within(differentiated=True):
        with within(split_backward=not torchs):
            out = f()
        dtype = torch.complex128 if out.is_complex() else torch.float64
        cotangent = seeded(*out.shape, seed=9, dtype=dtype).to(out.dtype)
        with FlopCounterMode(display=False) as one, sl.trace() as once:
            want = torch.autograd.grad([out], wanted, [cotangent], allow_unused=True)
        with within(split_backward=True):
            out = f()
    queue = WeightGradients(leaves)
    with within(later=queue), FlopCounterMode(display=False) as i, sl.trace() as in_i:
        found = torch.autograd.grad(
            [out], wanted, [cotangent], allow_unused=True, retain_graph=True
        )
    del out
    count = len(queue.queued)
    with FlopCounterMode(display=False) as w, sl.trace() as in_w:
        more = [None] * len(inputs) + _finished(queue)
    parts = (i.get_total_flops(), w.get_total_flops()), (in_i.bytes, in_w.bytes)
    wholes = one.get_total_flops(), once.bytes
    flops, moved = (
        tuple(float(n / max(whole, 1)) for n in part)
        for part, whole in zip(parts, wholes, strict=True)
    )
    pairs = [(_sum(a, b), c) for a, b, c in zip(found, more, want, strict=True)]
    return Split(max(_gap(*pair) for pair in pairs), flops, count, moved)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _gap(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6))


def leaves_of(params: dict[str, Any], pending: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parameters as leaves of a step: their gradients stay unsummed over ``pending``."""
    return {
        n: ShardedTensor(leaf_block(p.raw.detach().requires_grad_()), deferring(p, pending))
        for n, p in params.items()
    }


def of_recipe(module: nn.Module, recipe: str, remat: Sequence[tuple[str, str]] = ()) -> Any:
    """The function of a module of hidden states, its parameters, and where the states lie."""
    example: Any = {"x": torch.empty(HIDDEN.shape, dtype=next(module.parameters()).dtype)}
    found = {} if recipe in ("ddp", "ring") else {"inputs": example}
    rules = getattr(sl.recipes, recipe)(module, **found)
    lay = f"{rules.tokens} ."
    return *sl.parallelize(module, rules, inputs={"x": lay}, remat=list(remat)), lay


def of_module(
    module: nn.Module,
    recipe: str,
    pending: tuple[str, ...] = (),
    remat: Sequence[tuple[str, str]] = (),
    dtype: torch.dtype = torch.float64,
) -> Split:
    """Split the backward of a module of hidden states under a recipe, on the mesh in scope."""
    apply, params, lay = of_recipe(module.to(dtype), recipe, remat)
    held = leaves_of(params, pending)
    # an activation of the same data is unsummed over these axes too
    x = leaves_of({"x": sl.shard(HIDDEN.to(dtype), lay)}, pending)["x"]

    def f() -> Tensor:
        with sl.implicit():
            return apply(held, x=x).raw

    # torch ends a recomputation before a product of its own, and runs a Function's again
    return split(f, [x.raw], [p.raw for p in held.values()], torchs=not remat)


class MLP(nn.Module):
    """A residual layer that runs twice, so that its weights are used twice, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.head = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


class Attention(nn.Module):
    """A block of attention whose scores are products of two activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D) for _ in range(3))
        self.o_proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in self.into())
        out = (q @ k.mT).softmax(-1) @ v
        return x + self.o_proj(out.transpose(1, 2).flatten(2))

    def into(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class GPT2(nn.Module):
    """A model of transformers that begins with hidden states, as a stage does."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.GPT2Config(
            n_layer=1, n_head=4, n_embd=D, vocab_size=32, n_positions=ROWS, bos_token_id=0,
            eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        config._attn_implementation = attention
        torch.manual_seed(0)
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).logits


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP, "attention": Attention, "gpt2": GPT2, "gpt2 eager": lambda: GPT2("eager"),
}  # fmt: skip
MESHES: dict[str, dict[str, int]] = {
    "ddp": {"data": 2},
    "megatron1d": {"x": 2},
    "fsdp": {"x": 2},
    "optimus2d": {"x": 2, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
    "ring": {"s": 2},
}


@pytest.mark.parametrize("recipe", MESHES)
@pytest.mark.parametrize("name", MODULES)
def test_both_passes_are_one_backward_and_none_of_its_work_is_done_twice(
    name: str, recipe: str
) -> None:
    with sl.simulate(**MESHES[recipe]):
        made = of_module(MODULES[name](), recipe)
    assert made.gap < 1e-12
    assert sum(made.flops) <= 1.02
    assert made.count and made.flops[1] > 0.25
    # where Y's sum is scattered, dY is gathered for dX and again for dW; no weight is
    again = 0.25 if recipe == "cube3d" else 0
    assert sum(made.moved) <= 1 + again


@pytest.mark.parametrize("policy", ["full", "products"])
@pytest.mark.parametrize("recipe", ["ddp", "megatron1d", "fsdp", "optimus2d", "ring"])
def test_recomputed_regions_split_alike(recipe: str, policy: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        for name, region in (("mlp", "up"), ("mlp", "down"), ("gpt2", "model.transformer.h.*")):
            made = of_module(MODULES[name](), recipe, remat=[(region, policy)])
            assert made.gap < 1e-12 and made.count and sum(made.flops) <= 1.02, name


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "x": 2}], ids=str)
def test_gradients_left_unsummed_split_alike(mesh: dict[str, int]) -> None:
    recipe = "megatron1d" if "x" in mesh else "ddp"
    for name in MODULES:
        with sl.simulate(**mesh):
            made = of_module(MODULES[name](), recipe, tuple(mesh))
        assert made.gap < 1e-12 and made.count and sum(made.flops) <= 1.02, name


@pytest.mark.parametrize("recipe", MESHES)
def test_half_precision_splits_alike(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        made = of_module(GPT2(), recipe, dtype=torch.bfloat16)
    assert made.gap < 2e-2 and made.count and sum(made.flops) <= 1.02


def _on_ranks(recipe: str) -> list[Split]:
    more = of_module(MLP(), recipe, remat=[("up", "full")])
    return [more, *(of_module(make(), recipe) for make in MODULES.values())]


@pytest.mark.parametrize("recipe", ["ddp", "megatron1d", "fsdp", "optimus2d", "ring"])
def test_real_ranks_split_as_simulated_ones(recipe: str, pool: Any) -> None:
    mesh = {next(iter(m)): 4} if len(m := MESHES[recipe]) == 1 else m
    for found in pool.run(_on_ranks, recipe, **mesh):
        assert all(made.gap < 1e-12 and made.count for made in found)
        assert all(sum(made.flops) <= 1.02 for made in found)


# ---------------------------------------------------------------- weights


def _lora(w: Tensor, more: Tensor) -> Tensor:
    return w + more[:, :2] @ more[:2]


WEIGHTS: dict[str, Callable[[Any, Any], Any]] = {
    "a leaf": lambda w, _: w,
    "a transpose": lambda w, _: w.mT,
    "a view": lambda w, _: w.view(D // 2, 2, D).reshape(D, D),
    "a sum": lambda w, more: w + 2 * more,
    "a cast": lambda w, _: w.float().double(),
    "of two": lambda w, more: torch.cat([w[:, :4], more[:, 4:]], 1),
    "of low rank": _lora,
    "moved": lambda w, _: reshard(w, ". x"),
    "moved and turned": lambda w, _: reshard(w, ". x").mT,
    "moved twice": lambda w, _: reshard(reshard(w, ". x"), "x ."),
    "recomputed": lambda w, more: checkpoint(_lora, w, more, use_reentrant=False),
}


@pytest.mark.parametrize("rule", [None, "mm3_w", "mm3_xw"])
@pytest.mark.parametrize("rows", ["x .", ". .", ". x"])
@pytest.mark.parametrize("way", WEIGHTS)
def test_what_is_done_to_a_weight_is_undone_in_w(way: str, rows: str, rule: str | None) -> None:
    """Functions of it, used twice, in products that keep its block or the gathered one."""
    make = WEIGHTS[way]
    with sl.simulate(x=2), sl.implicit():
        x, w, more = (
            sl.shard(seeded(D, D, seed=k), lay).requires_grad_()
            for k, lay in enumerate([rows, "x .", "x ."])
        )
        leaves = [w.raw, more.raw]

        def f() -> Tensor:
            with sl.algorithm(**({"matmul": rule} if rule else {})):
                made = make(w, more)
                h = (x @ made).tanh() @ made
            return reshard(h @ w, ". .").raw

        found = split(f, [x.raw], leaves)
        assert found.gap < 1e-12 and found.count


FORMS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "linear": (lambda x, w, b: F.linear(x, w), 1),
    "a bias": (lambda x, w, b: F.linear(x, w, b), 1),
    "a named bias": (lambda x, w, b: F.linear(x, w, bias=b), 1),
    "a module": (lambda x, w, b: torch.func.functional_call(LINEAR, dict(weight=w, bias=b), x), 1),
    "matmul": (lambda x, w, b: torch.matmul(x, w), 1),
    "@ a transpose": (lambda x, w, b: x @ w.mT, 1),
    "@ a conjugate": (lambda x, w, b: x.conj() @ w.mH, 1),
    "mm": (lambda x, w, b: x.flatten(0, -2).mm(w), 1),
    "addmm": (lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w), 1),
    "addmm of rows": (lambda x, w, b: torch.addmm(x.flatten(0, -2), x.flatten(0, -2), w), 1),
    "addmm of a column": (lambda x, w, b: torch.addmm(b[:, None], x.flatten()[: D * D].view(D, D), w), 1),
    "addmm of a number": (lambda x, w, b: torch.addmm(b.sum(), x.flatten(0, -2), w), 1),
    "addmm of a constant": (lambda x, w, b: x.flatten(0, -2).detach().addmm(x.flatten(0, -2), w), 1),
    "addmm scaled": (lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w, alpha=2), 0),
    "addmm of named": (lambda x, w, b: torch.addmm(b, mat1=x.flatten(0, -2), mat2=w), 1),
    "bmm": (lambda x, w, b: torch.bmm(x.reshape(4, -1, 4), w.view(4, 4, D)), 1),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x.reshape(4, -1, 4), w.view(4, 4, D)), 1),
    "one row": (lambda x, w, b: F.linear(x.flatten()[:D], w, b), 0),
    "the weight first": (lambda x, w, b: w @ x, 0),
    "einsum": (lambda x, w, b: torch.einsum("...i, ij -> ...j", x, w), 0),
    "recomputed": (lambda x, w, b: checkpoint(F.linear, x, w, b, use_reentrant=False), 0),
    "both": (lambda x, w, b: F.linear(F.linear(x, w, b).tanh(), w), 2),
}  # fmt: skip
LINEAR = nn.Linear(D, D).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(D, D), (4, D, D)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_blocks_are_split_in_every_form(
    form: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    call, count = FORMS[form]
    x, w, b = (
        seeded(*s, seed=k, dtype=dtype).requires_grad_()
        for k, s in enumerate([shape, (D, D), (D,)])
    )

    def f() -> Tensor:
        with SplitProducts() if scope().policy.split_backward else nullcontext():
            return call(x, w, b)

    found = split(f, [x], [w, b])
    assert found.gap < 1e-12 and found.count == count
    assert sum(found.flops) <= 1.02 or form == "recomputed"


def test_a_product_of_activations_belongs_to_the_gradients_of_inputs() -> None:
    """The gradient of its right operand leads to inputs, so that nothing may wait for W."""
    with sl.simulate(x=2), sl.implicit():
        x, y = (sl.shard(seeded(D, D, seed=k), "x .").requires_grad_() for k in range(2))
        w = sl.shard(seeded(D, D, seed=2), ". .").requires_grad_()

        def f() -> Tensor:
            return ((x @ w) @ (y @ w).mT).raw

        assert split(f, [x.raw, y.raw], [w.raw])[:3:2] == (pytest.approx(0, abs=1e-12), 2)
        # also where the data has no gradient: its graph has more nodes than a weight's
        h = y.detach()

        def deep() -> Tensor:
            k = (h @ w).tanh().exp().sin()
            for _ in range(3):
                k = k.cos() * 2 + 1
            return ((x @ w) @ k.mT).raw

        assert split(deep, [x.raw], [w.raw])[:3:2] == (pytest.approx(0, abs=1e-12), 1)


def test_gradients_of_other_leaves_wait_for_nothing() -> None:
    with sl.simulate(x=2):
        x, w = (sl.shard(seeded(D, D, seed=k), ". .").requires_grad_() for k in range(2))
        found = split(lambda: (x @ w).raw, [x.raw, w.raw], [])
        assert found.gap == 0 and found.count == 0


def test_a_forward_that_is_not_to_be_split_is_right_too() -> None:
    """Torch's own products compute both gradients in I; others leave theirs for W."""
    with sl.simulate(x=2):
        x, w = (sl.shard(seeded(D, D, seed=k), ". .").requires_grad_() for k in range(2))
        v = sl.shard(seeded(D, D, seed=2), "x .").requires_grad_()

        def f() -> Tensor:
            with within(split_backward=False):
                return (v @ (x @ w).tanh() @ w).raw

        found = split(f, [x.raw, v.raw], [w.raw])
        assert found.gap < 1e-12 and found.count == 1


def test_second_derivatives_wait_for_nothing() -> None:
    with sl.simulate(x=2):
        x, w = (sl.shard(seeded(D, D, seed=k), "x .").requires_grad_() for k in range(2))
        queue = WeightGradients([w.raw])
        with within(split_backward=True):
            out = (x @ w).tanh().raw.sum()
        with within(later=queue):
            dx, dw = torch.autograd.grad(out, [x.raw, w.raw], create_graph=True)
        assert dw is not None and not queue.queued
        assert all(g is not None for g in torch.autograd.grad(dx.sum() + dw.sum(), [x.raw, w.raw]))


def test_a_node_of_a_function_is_kept_by_its_output() -> None:
    """Before torch 2.13 its Python object does not keep it, which a gradient edge then lacks."""
    w = torch.ones(2, requires_grad=True)
    queue, moved = WeightGradients([w]), Twice.apply(w)
    edge: Any = moved.grad_fn, 0
    assert not queue.put(edge, lambda: moved.detach())
    assert queue.put(edge, lambda: torch.ones_like(w), moved)
    assert queue.queued[0][0].ownership_token is not None
    (found,) = _finished(queue)
    assert found is not None and found.tolist() == [2, 2]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def test_callbacks_of_the_engine_may_be_queued_in_w() -> None:
    ran = []
    x = torch.ones(2, requires_grad=True)
    queue = WeightGradients([x])
    engine = torch.autograd.Variable._execution_engine
    (node, number) = (x * 1).grad_fn.next_functions[0]
    assert queue.put((node, number), lambda: engine.queue_callback(lambda: ran.append(1)) or x * 3)
    (found,) = _finished(queue)
    assert ran == [1] and found is not None and found.tolist() == [3, 3]
    assert queue.run() == ([], [])


# ---------------------------------------------------------------- memory


class Deep(nn.Module):
    """Layers of two products of one X, whose functions keep more than these do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gates, self.layers = (
            nn.ModuleList(nn.Linear(D, D) for _ in range(4)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = F.gelu(gate(x)).exp().sin() * layer(x).tanh()
        return x


def _settled(live: Live) -> int:
    """Return the bytes alive; a device's backward runs in a thread, which drops some after it."""
    if torch.get_default_device().type != "cpu":
        time.sleep(0.3)
    return live.now


@pytest.mark.parametrize("recipe", MESHES)
def test_after_i_only_operands_and_cotangents_of_products_are_kept(recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]), sl.implicit():
        apply, params, lay = of_recipe(Deep().double(), recipe)
        held = leaves_of(params)
        x = sl.shard(HIDDEN, lay).requires_grad_()
        leaves = [p.raw for p in held.values()]
        for _ in range(2):
            # the first call fills caches of plans and tables
            gc.collect()
            queue = WeightGradients(leaves)
            with Live() as live, within(differentiated=True, split_backward=True):
                out = apply(held, x=x).raw
                full = live.now
                with within(later=queue):
                    torch.autograd.grad(
                        out, [x.raw, *leaves], torch.ones_like(out), allow_unused=True,
                        retain_graph=True,
                    )  # fmt: skip
                del out
                kept, count = _settled(live), len(queue.queued)
                _finished(queue)
                left = _settled(live)
        assert count == 8 and left == 0
        # of each layer X, but for the input, and two dY
        assert kept <= (4 * 3 - 1) * x.raw.nbytes and kept < full
