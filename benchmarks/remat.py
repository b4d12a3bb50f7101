"""What unmodified Transformers hold in a training step, on four gloo processes and on paper.

    python -m benchmarks.remat

Per model, mesh and policy: the most bytes that are alive in a step of ``value_and_grad`` on a rank,
parameters, gradients and optimizer state included, over what ``sl.explain(tx=)`` says, and whether
gradients are bit for bit those of keeping everything.
"""

import os
from typing import Any

import optree
import torch
from torch import Tensor

import shardlib as sl
from shardlib.memory_tracker import Live

__all__: list[str] = []

LENGTH = 256
MESHES: list[tuple[str, dict[str, int]]] = [("megatron1d", {"data": 2, "x": 2}), ("ring", {"s": 4})]
POLICIES = ("all", "products", "full")


def model_of(name: str) -> tuple[torch.nn.Module, str]:
    """The module, and the pattern of its blocks."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    small: dict[str, Any] = {"vocab_size": 256}
    if name == "gpt2":
        small |= {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": LENGTH}
        drop: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(**small, **drop, bos_token_id=0, eos_token_id=0)
        return transformers.GPT2LMHeadModel(config), "transformer.h.*"
    small |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": LENGTH}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), "model.layers.*"


def held(recipe: str, name: str) -> list[tuple[str, float, bool]]:
    """(policy, bytes here over those on paper, whether gradients are the same)."""
    torch.manual_seed(0)
    module, blocks = model_of(name)
    ids = torch.zeros(8, LENGTH, dtype=torch.int64)
    out, first = [], None
    for policy in POLICIES:
        rules = getattr(sl.recipes, recipe)(module)
        apply, params = sl.parallelize(
            module, rules, inputs={"input_ids": rules.tokens}, remat=[(blocks, policy)]
        )
        tx = sl.optim.adamw(1e-3)

        def loss(p: Any, i: Tensor, apply: Any = apply) -> Tensor:
            return apply(p, input_ids=i).logits.float().square().mean()

        paper, step = sl.explain(loss, params, (ids,), tx=tx), sl.value_and_grad(loss)
        _, grads = step(params, ids)
        first = first or grads
        same = all(
            torch.equal(a.raw, b.raw) for a, b in zip(grads.values(), first.values(), strict=True)
        )
        del grads
        with Live() as live:
            step(params, ids)
        tree: Any = (params, tx.init(params))
        lasting = optree.tree_leaves(tree)
        rest = sum(x.raw.nbytes for x in lasting if isinstance(x, sl.ShardedTensor))
        out.append((policy, (live.peak + rest) / paper.peak, same))
    return out


def task(names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    torch.set_num_threads(1)
    rows = []
    for recipe, mesh in MESHES:
        with sl.use_mesh(sl.make_mesh(device="cpu", **mesh)):
            rows += [(name, recipe, mesh, held(recipe, name)) for name in names]
    return rows


if __name__ == "__main__":
    for name, recipe, mesh, found in sl.launch(task, ("gpt2", "llama"), r=4, timeout=500)[0]:
        told = ", ".join(
            f"{p} {ratio:.3f} {'same' if same else 'OTHER'}" for p, ratio, same in found
        )
        print(f"{name} {recipe} {mesh}: {told}")
