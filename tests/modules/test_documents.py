"""Packed documents of an unmodified decoder of transformers, its sequence split round a ring."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
transformers.logging.set_verbosity_error()

SMALL: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))
DOCUMENTS = (0, 3, 4, 11, 16)


def made(kind: str = "Llama") -> nn.Module:
    torch.manual_seed(0)
    own = {"head_dim": 8} if kind == "Gemma" else {}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **LAYERS, **own)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def positions(documents: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(b - a) for a, b in pairwise(documents)])[None]


def dense(model: nn.Module, documents: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients where a mask of blocks, and nothing else, parts the documents."""
    length = documents[-1]
    number = torch.bucketize(torch.arange(length), torch.tensor(documents[1:]), right=True)
    allowed = (number[:, None] == number) & torch.ones(length, length).tril().bool()
    mask = torch.zeros(2, 1, length, length).double().masked_fill(~allowed, float("-inf"))
    places = positions(documents).expand(2, -1)
    model.zero_grad()
    out = model(IDS, attention_mask=mask, position_ids=places, use_cache=False).logits
    out.square().mean().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def off(model: nn.Module, rules: Any, want: Any, inputs: Any = None, **given: Any) -> float:
    """The largest error of logits and gradients, gathered, on the mesh in scope."""
    apply, params = sl.parallelize(
        model, rules, inputs={"input_ids": rules.tokens, **(inputs or {})}
    )

    def loss(params: Any) -> tuple[Tensor, Tensor]:
        out = apply(params, input_ids=IDS, **given).logits
        return out.square().mean(), out.detach()

    (_, out), grads = sl.value_and_grad(loss, has_aux=True)(params)
    logits, right = want
    errors = [(sl.unshard(out) - logits).abs().max()]
    errors += [(sl.unshard(grads[n]) - g).abs().max() for n, g in right.items()]
    return float(max(errors))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma"])
@pytest.mark.parametrize("schedule", ["zigzag", "striped"])
def test_documents_of_a_recipe_are_blocks_of_a_mask(kind: str, schedule: str) -> None:
    model = made(kind)
    want = dense(model, DOCUMENTS)
    with sl.simulate(data=2, s=4):
        rules = sl.recipes.ring(model, schedule=schedule, documents=DOCUMENTS)
        assert off(model, rules, want) < 1e-6
    with sl.simulate(x=2, s=2):
        weights = sl.recipes.megatron1d(model)
        rules = sl.recipes.ring(model, weights=weights, documents=DOCUMENTS)
        assert off(model, rules, want) < 1e-6


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_split_like_the_tokens_part_documents_all_the_same(rows: int) -> None:
    """As everybody tries: laid out by ``inputs=``, sharded beforehand, or plain."""
    model = made()
    want, places = dense(model, DOCUMENTS), positions(DOCUMENTS).expand(rows, -1)
    with sl.simulate(s=2):
        rules = sl.recipes.ring(model)
        split = {"position_ids": rules.tokens}
        assert off(model, rules, want, split, position_ids=places, use_cache=False) < 1e-6
        laid = sl.shard(places, rules.tokens)
        assert off(model, rules, want, position_ids=laid, use_cache=False) < 1e-6
        assert off(model, rules, want, position_ids=places, use_cache=False) < 1e-6


def on_ranks() -> float:
    model = made()
    want = dense(model, DOCUMENTS)
    rules = sl.recipes.ring(model)
    split = {"position_ids": rules.tokens}
    places = positions(DOCUMENTS).expand(2, -1)
    return max(
        off(model, sl.recipes.ring(model, documents=DOCUMENTS), want),
        off(model, rules, want, split, position_ids=places, use_cache=False),
    )


def test_documents_on_real_ranks(pool: Any) -> None:
    assert max(pool.run(on_ranks, data=2, s=2)) < 1e-6


def test_what_fills_a_row_up_is_a_document_of_its_own() -> None:
    model = made()
    short = dense(model, (0, 3, 4, 11, 14, 16))
    with sl.simulate(s=2):
        rules = sl.recipes.ring(model, documents=(0, 3, 4, 11, 14))
        assert off(model, rules, short) < 1e-6


def test_a_module_of_as_module_has_the_documents_too() -> None:
    model = made()
    logits, _ = dense(model, DOCUMENTS)
    with sl.simulate(s=2):
        rules = sl.recipes.ring(model, documents=DOCUMENTS)
        apply, params = sl.parallelize(model, rules, inputs={"input_ids": rules.tokens})
        assert (sl.as_module(apply, params)(IDS).logits - logits).abs().max() < 1e-6


def test_what_would_hide_the_documents_is_refused() -> None:
    model = made()
    with sl.simulate(s=2):
        rules = sl.recipes.ring(model, documents=DOCUMENTS)
        apply, params = sl.parallelize(model, rules, inputs={"input_ids": rules.tokens})
        with pytest.raises(sl.ShardError, match="an attention_mask hides the documents"):
            apply(params, input_ids=IDS, attention_mask=torch.ones_like(IDS))
        with pytest.raises(sl.ShardError, match="rows of 8 tokens end before their documents"):
            apply(params, input_ids=IDS[:, :8])
        with pytest.raises(sl.ShardError, match="takes no position_ids"):
            sl.recipes.ring(nn.Linear(4, 4), documents=(0, 2, 4))
        with pytest.raises(sl.ShardError, match="start at 0 and rise"):
            sl.recipes.ring(model, documents=(1, 4))
