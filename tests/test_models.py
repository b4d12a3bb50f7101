"""Modules of Hugging Face transformers, unmodified, under every
recipe: outputs and every gradient are dense's.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl
from benchmarks import models
from benchmarks.zoo import PACKAGES, ZOO
from tests.pipeline.grid import aux_loss_of, off

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()

MESHES = {
    "megatron1d": {"x": 2},
    "optimus2d": {"data": 2, "x": 1, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = {
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(8, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=64,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(keys: int) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=keys, **SMALL, **TEXT)
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **SMALL, **OFF)
    )


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=8, **SMALL, **OFF)
    )


# module, input, tolerance: Llama's norms and angles are computed in fp32 by transformers itself
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], float]] = {
    "gpt2": (gpt2, {"input_ids": IDS}, 1e-12),
    "llama": (lambda: llama(4), {"input_ids": IDS}, 2e-6),
    "llama, two heads of keys": (lambda: llama(2), {"input_ids": IDS}, 2e-6),
    "llama, one head of keys": (lambda: llama(1), {"input_ids": IDS}, 2e-6),
    "bert": (bert, {"input_ids": IDS}, 1e-12),
    "vit": (vit, {"pixel_values": PIXELS}, 1e-12),
}


RECIPES: dict[str, Callable[[nn.Module], Any]] = {
    **{name: getattr(sl.recipes, name) for name in MESHES},
    "sequence": lambda m: sl.recipes.megatron1d(m, sequence=True),
    "cube3d, other roles in MLPs": lambda m: sl.recipes.cube3d(m, mlp="nnn"),
    "ddp": sl.recipes.ddp,
    "fsdp": sl.recipes.fsdp,
    "ring": sl.recipes.ring,
    "striped": lambda m: sl.recipes.ring(m, schedule="striped"),
    "ring x 1d": lambda m: sl.recipes.ring(m, weights=sl.recipes.megatron1d(m)),
    "ring x 2d": lambda m: sl.recipes.ring(m, weights=sl.recipes.optimus2d(m)),
}
WIDER = {
    "sequence": {"x": 2},
    "ddp": {"data": 4},
    "fsdp": {"data": 2, "x": 2},
    "ring": {"data": 2, "s": 4},
    "striped": {"s": 2},
    "ring x 1d": {"x": 2, "s": 2},
    "ring x 2d": {"x": 2, "y": 2, "s": 2},
    "cube3d": {"x": 1, "y": 2, "z": 2},
}
SEEN = torch.ones(8, 8, dtype=torch.int64)
SEEN[1, 5:] = SEEN[3, :2] = 0


def gap(model: str, recipe: str, **more: Tensor) -> tuple[float, float]:
    """Largest relative difference of the logits (of the loss, given labels) and of any gradient."""
    make, inputs, _ = MODELS[model]
    torch.manual_seed(0)
    module = make().double().eval()
    answer = "loss" if "labels" in more else "logits"
    want = getattr(module(**inputs, **more), answer)
    cotangent = torch.randn(
        want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1)
    )
    (want * cotangent).sum().backward()
    dense = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    rules = RECIPES[recipe](module)
    places = {"input_ids": rules.tokens, "pixel_values": f"{batch_of(rules.tokens)} ..."}
    places = {n: places[n] for n in inputs} | {
        n: f"{batch_of(rules.labels)} ." for n in more if n == "labels"
    }
    apply, params = sl.parallelize(module, rules, inputs=places)

    def loss(p: Any) -> tuple[Tensor, Tensor]:
        logits = getattr(apply(p, **inputs, **more), answer)
        return (logits * sl.shard(cotangent, logits.sharding)).sum(), logits

    (_, logits), grads = sl.value_and_grad(loss, has_aux=True)(params)
    assert all(grads[n].sharding == params[n].sharding for n in params)
    assert all(torch.equal(before[n], p) for n, p in module.named_parameters()), (
        "the module changed"
    )
    assert any(p.sharding.axes for p in params.values()) or "(s)" in rules.tokens or recipe == "ddp"
    top = max(float(g.abs().max()) for g in dense.values())
    errors = [
        float((sl.unshard(grads[n]) - g).abs().max()) / max(float(g.abs().max()), 1e-3 * top)
        for n, g in dense.items()
    ]
    return float(
        (sl.unshard(logits).detach() - want.detach()).abs().max() / want.detach().abs().max()
    ), max(errors)


def batch_of(text: str) -> str:
    """The token of the batch dimension."""
    return str(sl.Layout.parse(text).dims[0])


@pytest.mark.parametrize("recipe", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_an_unmodified_module_equals_dense(model: str, recipe: str) -> None:
    with sl.simulate(**MESHES[recipe]):
        assert max(gap(model, recipe)) < MODELS[model][2]


@pytest.mark.parametrize("recipe", WIDER)
@pytest.mark.parametrize("model", ["gpt2", "llama, two heads of keys", "bert"])
def test_a_split_sequence_and_one_sized_axes_equal_dense(model: str, recipe: str) -> None:
    with sl.simulate(**WIDER[recipe]):
        assert max(gap(model, recipe)) < MODELS[model][2]


@pytest.mark.parametrize("recipe", ["optimus2d", "ring x 2d"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "bert"])
def test_attention_masks_and_causal_losses_equal_dense(model: str, recipe: str) -> None:
    """transformers casts logits to fp32 for the loss."""
    with sl.simulate(**(WIDER | MESHES)[recipe]):
        assert max(gap(model, recipe, attention_mask=SEEN)) < MODELS[model][2]
        assert max(gap(model, recipe, labels=IDS)) < 2e-6


def test_dropout_draws_the_same_under_every_recipe() -> None:
    """Of embeddings, residuals and attention probabilities."""

    def logits(recipe: str, seed: int = 5, **mesh: int) -> Tensor:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=64,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
        module = transformers.GPT2LMHeadModel(config).double().train()
        assert config.attn_pdrop > 0
        with sl.simulate(**mesh):
            rules = RECIPES[recipe](module)
            apply, params = sl.parallelize(module, rules, inputs={"input_ids": rules.tokens})
            torch.manual_seed(seed)
            return sl.unshard(apply(params, input_ids=IDS).logits).detach()

    one = logits("megatron1d", x=1)
    assert (logits("megatron1d", 6, x=1) - one).abs().max() > 1e-3
    for recipe, mesh in {**MESHES, "ring": {"s": 4}}.items():
        assert (logits(recipe, **mesh) - one).abs().max() < 1e-12


def test_every_matrix_of_a_cube_is_split_over_all_of_it() -> None:
    with sl.simulate(x=2, y=2, z=2):
        module = gpt2()
        _, params = sl.parallelize(module, sl.recipes.cube3d(module))
        for name, p in params.items():
            if p.ndim == 2 and "wpe" not in name:
                assert set(p.sharding.axes) == {"x", "y", "z"}, name


SAMPLE = [
    "llama + LoRA",
    "mixtral (batched_mm)",
    "nn.LSTM",
    "nn.TransformerEncoder",
    "ResNet (training)",
    "gemma3",
]


# peft asks transformers
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("module", SAMPLE)
def test_a_module_of_the_zoo_equals_dense(module: str) -> None:
    """A drawn part of benchmarks/models.py: each equals dense,
    some of them inside ``sl.implicit``.
    """
    if PACKAGES.get(module) == "peft":
        pytest.importorskip("peft", reason="peft is not installed")
    drawn = random.Random(module).sample(list(models.MESHES), 2)
    want = models.dense(module)
    cells = [models.cell(module, recipe, want) for recipe in drawn]
    assert all(c.state in ("equal", "implicit") for c in cells), [
        (c.recipe, c.state, c.why) for c in cells
    ]


def test_real_processes_equal_dense(pool8: Any) -> None:
    for model in ("gpt2", "llama, two heads of keys"):
        for answer in pool8.run(gap, model, "cube3d", x=2, y=2, z=2):
            assert max(answer) < MODELS[model][2]


@pytest.mark.parametrize(("name", "pipe"), [("t5", 4), ("mixtral (eager)", 2)])
def test_models_are_cut_into_stages_as_they_are(name: str, pipe: int) -> None:
    """Its encoder's output skips to all decoder blocks; a router's loss takes hooks in all blocks."""
    module, inputs = ZOO[name]()
    module.config.output_router_logits = name != "t5"
    with sl.simulate(pipe=pipe):
        whole = [("*", "...")]
        error = off(module.double(), inputs, whole, 2, aux_loss_of, parts=2, schedule="zb")
    assert error < 1e-12


def losses_in(tiers: Any, name: str, recipe: str, dtype: torch.dtype, master: Any) -> list[Tensor]:
    """Losses and parameters of three clipped steps of AdamW, in memory or in tiers."""
    make, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    net = make().to(dtype)
    rules = getattr(sl.recipes, recipe)(net)
    apply, params = sl.parallelize(net, rules, pad=True)
    tx = sl.optim.chain(sl.optim.clip_by_global_norm(0.1), sl.optim.adamw(0.01))
    tx = sl.optim.zero(tx, "data", 3, master=master, tiers=tiers)
    parts = tx.shard(params)
    state, out = tx.init(parts), []
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in inputs.items()}
    for _ in range(3):
        vg = sl.value_and_grad(lambda p: apply(p, **given).logits.float().square().mean(), into=tx)
        loss, grads = vg(parts)
        parts, state, _ = sl.optim.step(tx, parts, grads, state)
        out.append(sl.unshard(loss).detach())
    return out + [sl.unshard(x).detach() for x in sl.optim.state_dict(parts).values()]


@pytest.mark.parametrize("mesh", [{"data": 2, "x": 1}, {"data": 1, "x": 2}])
@pytest.mark.parametrize(("dtype", "master"), [(torch.float32, None), (torch.bfloat16, "bf16+rem")])
@pytest.mark.parametrize("name", ["gpt2", "llama, two heads of keys", "vit"])
def test_training_in_memory_tiers_is_training_in_memory(
    name: str, dtype: torch.dtype, master: Any, mesh: Any
) -> None:
    """Bit for bit, with the least budget that the refusal of a smaller one names."""
    with sl.simulate(**mesh):
        want = losses_in(None, name, "megatron1d", dtype, master)
        with pytest.raises(sl.ShardError, match="needs") as refused:
            losses_in(sl.optim.Tiers(device=1), name, "megatron1d", dtype, master)
        tiers = sl.optim.Tiers(device=int(refused.value.fix.split("device=")[-1].strip(" )")))
        found = losses_in(tiers, name, "megatron1d", dtype, master)
        assert len(found) == len(want) > 10
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
