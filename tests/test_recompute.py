"""What is recomputed in backward sees what its forward saw: torch.utils.checkpoint, and threads."""

import gc
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import shardlib as sl

RULES = [("*.a.weight", "x ."), ("*.a.bias", "x"), ("*.b.weight", ". x"), ("*.b.bias", ".")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, h: Tensor, scale: float = 0.5, drop: float = 0.0) -> Tensor:
        return h + self.b(F.dropout(F.gelu(self.a(h)), drop)) * scale


def _keeps(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[["Net", Tensor], Tensor]] = {}


class Net(nn.Module):
    """Four blocks, checkpointed in one of ``WAYS``."""

    def __init__(self, way: str, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.way, self.drop = nn.Sequential(*[Block() for _ in range(4)]), way, drop

    def forward(self, h: Tensor) -> Tensor:
        return WAYS[self.way](self, h)


def each(net: Net, h: Tensor, **options: Any) -> Tensor:
    for block in net.blocks:
        h = checkpoint(block, h, 0.5, net.drop, **options)
    return h


def by_name(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = checkpoint(block, h, scale=0.5, drop=net.drop, use_reentrant=False)
    return h


def none(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = block(h, 0.5, net.drop)
    return h


def nested(net: Net, h: Tensor, reentrant: bool) -> Tensor:
    def inner(i: int) -> Callable[[Tensor], Tensor]:
        return lambda u: checkpoint(net.blocks[i], u, use_reentrant=reentrant)

    h = checkpoint(lambda u: inner(1)(inner(0)(u)), h, use_reentrant=reentrant)
    return inner(3)(inner(2)(h))


WAYS |= {
    "none": none,
    "non-reentrant": partial(each, use_reentrant=False),
    "reentrant": partial(each, use_reentrant=True),
    "by name": by_name,
    "nested": partial(nested, reentrant=False),
    "nested reentrant": partial(nested, reentrant=True),
    "sequential": lambda net, h: checkpoint_sequential(net.blocks, 2, h, use_reentrant=False),
    "selective": partial(
        each, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _keeps)
    ),
}

X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def net(way: str, drop: float = 0.0) -> Net:
    torch.manual_seed(3)
    return Net(way, drop).double()


def dense(times: int = 1) -> dict[str, Tensor]:
    m = net("none")
    sum((m(X + i) ** 2).sum() for i in range(times)).backward()
    return {n: p.grad for n, p in m.named_parameters()}


def gap(got: Any, want: dict[str, Tensor]) -> float:
    return max(float((sl.unshard(got[n]) - g).abs().max() / g.abs().max()) for n, g in want.items())


def checkpointed(some: slice = slice(None)) -> list[str]:
    """Ways to checkpoint whose gradients are not the dense ones:
    deferred, interleaved, by ``.backward()``, twice.
    """
    wrong = []

    def note(what: str, error: float) -> None:
        if not error < 1e-12:
            wrong.append(f"{what}: {error:.1e}")

    want, twice = dense(), dense(2)
    for way in [*WAYS][some]:
        apply, params = sl.parallelize(net(way), RULES, inputs={"h": "data ."})

        def loss(p: Any, apply: Any = apply) -> Tensor:
            return (apply(p, X) ** 2).sum()

        def both(p: Any, apply: Any = apply) -> Tensor:  # two calls before one backward
            a, b = apply(p, X), apply(p, X + 1)
            return (a**2).sum() + (b**2).sum()

        for pending in ((), "data"):
            note(f"{way} {pending}", gap(sl.grad(loss, pending=pending)(params), want))
        note(f"{way} interleaved", gap(sl.grad(both)(params), twice))
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        out = loss(leaves)
        out.backward(retain_graph=way != "selective")
        note(f"{way} .backward()", gap({n: p.grad for n, p in leaves.items()}, want))
        if way == "selective":  # torch allows one backward
            continue
        out.backward()
        note(
            f"{way} again",
            gap({n: p.grad for n, p in leaves.items()}, {n: 2 * g for n, g in want.items()}),
        )
    return wrong


def test_checkpointed_regions_have_the_dense_gradients() -> None:
    with sl.simulate(data=2, x=2):
        assert checkpointed() == []


@pytest.mark.parametrize(
    ("axes", "some"), [({"data": 4, "x": 1}, slice(1, None, 2)), ({"data": 2, "x": 2}, slice(None))]
)
def test_checkpointed_regions_on_processes(pool: Any, axes: dict[str, int], some: slice) -> None:
    """All ways on a mesh of two axes, every other one where an axis has one rank."""
    assert pool.run(checkpointed, some, **axes) == [[]] * 4


def test_backward_may_run_outside_the_mesh_and_on_another_thread() -> None:
    apply = params = None
    for way in ("non-reentrant", "nested reentrant", "selective"):
        with sl.simulate(data=2, x=2), sl.saving():
            apply, params = sl.parallelize(net(way), RULES, inputs={"h": "data ."})
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            loss = (apply(leaves, X) ** 2).sum()
        thread = threading.Thread(target=loss.backward)  # as the threads of a GPU's autograd
        thread.start()
        thread.join()
        assert gap({n: p.grad for n, p in leaves.items()}, dense()) < 1e-12


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant", "by name"])
def test_recomputed_dropout_draws_what_the_forward_drew(way: str) -> None:
    found = []
    with sl.simulate(data=2, x=2):
        for name in ("none", way):
            apply, params = sl.parallelize(net(name, 0.3), RULES, inputs={"h": "data ."})
            torch.manual_seed(5)
            grads = sl.grad(lambda p, apply=apply: (apply(p, X) ** 2).sum())(params)
            found.append(({n: sl.unshard(g) for n, g in grads.items()}, torch.get_rng_state()))
    assert all(torch.equal(found[0][0][n], g) for n, g in found[1][0].items())
    assert torch.equal(found[0][1], found[1][1])


def test_a_region_under_autocast_recomputes_in_its_dtypes() -> None:
    found = []
    with sl.simulate(data=2, x=2):
        for way in ("none", "by name"):
            apply, params = sl.parallelize(net(way).float(), RULES, inputs={"h": "data ."})

            def loss(p: Any, apply: Any = apply) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return (apply(p, X.float()).float() ** 2).sum()

            found.append(sl.grad(loss)(params))
        assert all(torch.equal(sl.unshard(g), sl.unshard(found[1][n])) for n, g in found[0].items())


def live() -> int:
    """Bytes of all plain tensors that are alive."""
    gc.collect()
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is Tensor and not torch._C._functorch.is_batchedtensor(t)  # which has no storage
    }
    return sum(held.values())


def held_by_forward(way: str) -> int:
    apply, params = sl.parallelize(net(way), RULES, inputs={"h": "data ."})
    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
    before = live()
    out = apply(leaves, X.repeat(64, 1))
    return live() - before + 0 * out.ndim


def share() -> float:
    return held_by_forward("non-reentrant") / held_by_forward("none")


def test_checkpointing_holds_fewer_bytes_after_forward(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert share() < 0.5
    assert max(pool.run(share, data=2, x=2)) < 0.5


def models() -> list[str]:
    """transformers' gradient_checkpointing_enable: how far
    GPT-2 and Llama are from dense, both modes.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))

    def made(kind: str) -> nn.Module:
        torch.manual_seed(0)
        if kind == "gpt2":
            config = GPT2Config(
                vocab_size=64,
                n_positions=8,
                n_embd=16,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
            return GPT2LMHeadModel(config).double().train()
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=8)
        ).double().train()  # fmt: skip

    wrong = []
    for kind in ("gpt2", "llama"):
        m = made(kind)
        m(input_ids=ids, use_cache=False).logits.square().mean().backward()
        want = {n: p.grad for n, p in m.named_parameters()}
        for reentrant in (False, True):
            m = made(kind)
            with warnings.catch_warnings():
                # newer transformers have another name for it
                warnings.simplefilter("ignore", FutureWarning)
                m.gradient_checkpointing_enable({"use_reentrant": reentrant})
            rules = sl.recipes.megatron1d(m)
            apply, params = sl.parallelize(m, rules, inputs={"input_ids": "data ."})
            calls: list[int] = []
            apply.module.get_submodule(
                "transformer.h.0.mlp" if kind == "gpt2" else "model.layers.0.mlp"
            ).register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            run = partial(apply, input_ids=ids, use_cache=False)
            grads = sl.grad(lambda p, run=run: run(p).logits.square().mean())(params)
            error = gap(grads, want)
            if not error < (1e-7 if kind == "llama" else 1e-12):  # Llama's norms compute in fp32
                wrong.append(f"{kind} reentrant={reentrant}: {error:.1e}")
            if len(calls) < 2:
                wrong.append(f"{kind} reentrant={reentrant}: nothing was computed again")
    return wrong


def test_transformers_checkpointing_inside_apply(pool: Any) -> None:
    with sl.simulate(data=2, x=2):
        assert models() == []
    assert pool.run(models, data=2, x=2, seconds=120.0) == [[]] * 4


def test_what_one_thread_is_inside_of_another_is_not() -> None:
    """``apply`` lets plain tensors meet sharded ones, in its own
    thread only; meshes are each thread's own.
    """
    entered, left, said = threading.Event(), threading.Event(), []

    class Waits(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            entered.set()
            assert left.wait(30)
            return super().forward(input)

    mesh = sl.simulate(x=2)

    def other() -> None:
        with mesh:
            apply, params = sl.parallelize(Waits(4, 4), [("*", "...")])
            apply(params, torch.ones(2, 4))
            said.append(sl.current_mesh() is mesh)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30)
    with mesh:
        x = sl.shard(torch.ones(4), "x")
        with pytest.raises(sl.ShardError, match="a plain tensor met a sharded one"):
            x + torch.ones(4)
        left.set()
        thread.join()
        assert sl.current_mesh() is mesh
    with pytest.raises(sl.ShardError, match="no mesh is in scope"):
        sl.current_mesh()
    assert said == [True]
