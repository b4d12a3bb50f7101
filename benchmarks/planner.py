"""Plans against every recipe, at the same prices and in the same memory.

    python -m benchmarks.planner [--models gpt2,mlp] [--clusters h100,slow] [--ranks 4] [--layers 2]

Per model and cluster every recipe is explained on every mesh of so many ranks, with and without
ZeRO over the axes of the batch, and with its layers kept or computed again.  In each of several
budgets the best of those that fit is compared with ``sl.plan``: seconds of the plan over seconds of
the recipe, both as ``sl.explain`` finds them, with the update and its gather.  A ratio above 1 is a
fault of the planner.  Nothing runs: models are of real widths, on shapes, and a few layers deep.
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardlib as sl
from shardlib.planning.explain import explain, gather_work, sink_of, state_ratio
from shardlib.planning.explanation import size
from shardlib.planning.layer_dedup import outline
from shardlib.planning.plan import loss_of
from shardlib.planning.work import update_work

__all__: list[str] = []

Link, Cluster = sl.planning.Link, sl.planning.Cluster

CLUSTERS = {
    **{name: sl.planning.cluster.CLUSTERS[name] for name in ("a100", "h100", "b200")},
    "two a node": Cluster(80e9, 495e12, 2, Link(5e-6, 1 / 225e9), Link(1e-5, 1 / 25e9), bandwidth=1.7e12),
    "slow": Cluster(8e9, 5e10, 1, between=Link(1e-4, 1 / 100e6), bandwidth=1e10),
    "far": Cluster(80e9, 156e12, 4, Link(5e-6, 1 / 150e9), Link(5e-5, 1 / 1.25e9), bandwidth=1e12),
}  # fmt: skip

ADAMW = state_ratio(sl.optim.adamw(1e-3), torch.float32)

SHARES = (1.5, 0.8, 0.6, 0.45)
"""Budgets, as shares of what the fastest recipe takes."""


# ---------------------------------------------------------------- models

Made = tuple[nn.Module, dict[str, Tensor]]

WIDE: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816}
ROWS, LENGTH = 16, 512


class Mlp(nn.Module):
    """Blocks of two products around a residual."""

    def __init__(self, layers: int, width: int = 2048) -> None:
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = x + block(x)
        return x


class DitBlock(nn.Module):
    """Attention and an MLP whose inputs are scaled and shifted by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.condition = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, gate, d, e, gates = self.condition(nn.functional.silu(c))[:, None].chunk(6, -1)
        y = self.qkv(self.norms[0](x) * (1 + a) + b)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in y.chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(y.transpose(1, 2).flatten(2))
        y = self.up(self.norms[1](x) * (1 + d) + e)
        return x + gates * self.down(nn.functional.gelu(y))


class Dit(nn.Module):
    """A stack of ``DitBlock``."""

    def __init__(self, layers: int, width: int = 1152, heads: int = 16) -> None:
        super().__init__()
        self.h = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        for block in self.h:
            x = block(x, condition)
        return x


def _hf(model: str, config: str, layers: Any = "num_hidden_layers", **settings: Any) -> Any:
    def make(count: int) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        depth = dict.fromkeys(layers.split(), count)
        return getattr(transformers, model)(getattr(transformers, config)(**settings, **depth))

    return make


def _ids(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.empty(rows, length, dtype=torch.int64)


LLAMA: dict[str, Any] = {
    **WIDE,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "pad_token_id": None,
}
MOE = {**LLAMA, "intermediate_size": 1408, "num_experts_per_tok": 2}
TWO = "encoder_layers decoder_layers"

MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "mlp": (Mlp, lambda: {"x": torch.empty(4096, 2048)}),
    "gpt2": (
        _hf("GPT2LMHeadModel", "GPT2Config", "n_layer", n_positions=LENGTH),
        lambda: {"input_ids": _ids()},
    ),
    "bert": (_hf("BertForMaskedLM", "BertConfig"), lambda: {"input_ids": _ids()}),
    "vit": (
        _hf("ViTForImageClassification", "ViTConfig", num_labels=1000),
        lambda: {"pixel_values": torch.empty(64, 3, 224, 224)},
    ),
    "llama": (_hf("LlamaForCausalLM", "LlamaConfig", **LLAMA), lambda: {"input_ids": _ids()}),
    "llama wide": (
        _hf(
            "LlamaForCausalLM", "LlamaConfig",
            **{**LLAMA, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672},
        ),
        lambda: {"input_ids": _ids(16, 2048)},
    ),
    "qwen_moe": (
        _hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **MOE, num_experts=8, moe_intermediate_size=704, head_dim=64),
        lambda: {"input_ids": _ids()},
    ),
    "mixtral": (_hf("MixtralForCausalLM", "MixtralConfig", **MOE, num_local_experts=8), lambda: {"input_ids": _ids()}),
    "t5": (
        _hf("T5ForConditionalGeneration", "T5Config", "num_layers num_decoder_layers"),
        lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(length=128)},
    ),
    "whisper": (
        _hf(
            "WhisperForConditionalGeneration", "WhisperConfig", TWO, d_model=512,
            encoder_attention_heads=8, decoder_attention_heads=8,
        ),
        lambda: {"input_features": torch.empty(ROWS, 80, 3000), "decoder_input_ids": _ids(length=128)},
    ),
    "mamba": (_hf("MambaForCausalLM", "MambaConfig"), lambda: {"input_ids": _ids(length=64)}),
    "dit": (Dit, lambda: {"x": torch.empty(32, 256, 1152), "condition": torch.empty(32, 1152)}),
}  # fmt: skip


def made(name: str, layers: int) -> Made:
    """Return a model on shapes, with its inputs by name."""
    make, inputs = MODELS[name]
    with torch.device("meta"):
        module: Any = make(layers).eval()
        module._experts_implementation = "batched_mm"
        return module, inputs()


def loss_over(names: Sequence[str]) -> Callable[..., Tensor]:
    """Return the cross entropy of logits against the last input where it may be labels, else a mean."""

    def loss(apply: Any, params: Any, *inputs: Any) -> Tensor:
        fixed = {"use_cache": False} if "use_cache" in dict(apply.arguments) else {}
        out = apply(params, **dict(zip(names, inputs, strict=True)), **fixed)
        found = loss_of(out, inputs[-1])
        if found is None:
            found = getattr(out, "logits", out).mean()
        return found

    return loss


# ---------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Priced:
    """A recipe's step: how it is told, its seconds, and the most bytes of a rank."""

    text: str
    seconds: float
    peak: int


def meshes(ranks: int) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    """Yield every recipe with each of its meshes of so many ranks, and with its options."""
    pairs = [(n, ranks // n) for n in range(1, ranks + 1) if ranks % n == 0]
    yield "ddp", {"data": ranks}, {}
    for a, b in pairs:
        if b > 1:
            yield "megatron1d", {"data": a, "x": b}, {}
            yield "megatron1d", {"data": a, "x": b}, {"sequence": True}
            yield "fsdp", {"data": a, "x": b}, {}
        if a > 1 and b > 1:
            yield "optimus2d", {"x": a, "y": b}, {}
        for c in (n for n, _ in pairs if b % n == 0):
            d, x = a, c
            if d > 1 and x > 1 and d * x * x == ranks:
                yield "tesseract", {"d": d, "x": x, "y": x}, {}
            y = b // c
            if max(a, c, y) < ranks:
                yield "cube3d", {"x": a, "y": c, "z": y}, {}


def by_recipes(
    module: nn.Module, inputs: Mapping[str, Tensor], ranks: int, cluster: sl.planning.Cluster
) -> tuple[list[Priced], int]:
    """Return every recipe's step, and how many were refused."""
    found, refused = [], 0
    stacks = [f"{path}.*" for path, _ in outline(module).stacks]
    for (name, mesh, options), zero, remat in itertools.product(
        meshes(ranks), (False, True), (False, True)
    ):
        try:
            found.append(priced(module, inputs, name, mesh, options, cluster, zero, stacks * remat))
        except sl.ShardError:
            refused += 1
    return found, refused


def priced(
    module: nn.Module, inputs: Mapping[str, Tensor], name: str, mesh: dict[str, int],
    options: Mapping[str, Any], cluster: sl.planning.Cluster, zero: bool, stacks: Sequence[str],
) -> Priced:  # fmt: skip
    """Price a step of a recipe, with ZeRO over the axes of its batch."""
    loss, tx = loss_over((*inputs,)), sl.optim.adamw(1e-3)
    with sl.record(**mesh) as m:
        rules = getattr(sl.recipes, name)(module, m, **options)
        remat = [(pattern, "full") for pattern in stacks]
        apply, params = sl.parallelize(module, rules, mesh=m, pad=True, remat=remat)
        dims = sl.Layout.parse(rules.tokens).dims
        if zero:
            axes = tuple(a for a in dims[0].axes if mesh[a] > 1)
            tx = sl.optim.zero(tx, axis=axes, stage=2)
        given = []
        for x in inputs.values():
            text = [str(dims[0]), *"." * (x.ndim - 1)]
            if x.ndim == 2 and not x.is_floating_point():
                text[1] = str(dims[1])
            given.append(sl.shard(x, " ".join(text), m))
        whole = explain(
            lambda p, *x: loss(apply, p, *x), params, tuple(given), tx=tx, cluster=cluster
        )
        whole.work.join(gather_work(sink_of(tx, params)))
        whole.work.join(update_work(whole.parameters, whole.state, ADAMW))
    rates = cluster.rates(mesh)
    text = f"{name} {' '.join(f'{a}={n}' for a, n in mesh.items())}"
    text += "".join(f" {what}" for what in (*options, *["zero"] * zero, *["remat"] * bool(stacks)))
    return Priced(text, rates.seconds(whole.work), whole.peak)


# ---------------------------------------------------------------- the table


def rows(name: str, cluster: str, ranks: int, layers: int) -> Iterator[tuple[float, str]]:
    """Yield the ratio and the line of each budget of a cell; 0 where no recipe fits."""
    module, inputs = made(name, layers)
    where = CLUSTERS[cluster]
    recipes, refused = by_recipes(module, inputs, ranks, where)
    fastest = min(recipes, key=lambda r: (r.seconds, r.peak))
    for share in SHARES:
        began, memory = time.process_time(), share * fastest.peak
        told = f"{name} | {cluster} | {size(round(memory))}"
        fitting = [r for r in recipes if r.peak <= memory]
        best = min(fitting, key=lambda r: (r.seconds, r.peak), default=None)
        ratio, text = 0.0, "none"
        if best is not None:
            text = f"{best.text}: {best.seconds:.4g} s"
        try:
            found = sl.plan(
                module, tuple(inputs.values()), ranks=ranks, memory=memory, cluster=where,
                loss=loss_over((*inputs,)),
            )  # fmt: skip
        except sl.errors.NoPlanFits as e:
            ratio = float("inf") if best else 0.0
            yield ratio, f"{told} | {text} | {e.message}"
            continue
        if best is not None:
            ratio = found.seconds / best.seconds
        own = f"{dict(found.mesh)} zero={len(found.zero)} remat={len(found.remat)}"
        own += f" microbatches={found.microbatches}: {found.seconds:.4g} s"
        took = time.process_time() - began
        yield ratio, f"{told} | {text} | {own} | {ratio:.3f} | {took:.0f} s to plan"
    yield 0.0, f"{name} | {cluster} | {len(recipes)} ways by recipes, {refused} refused"


def main(argv: list[str] | None = None) -> int:
    """Print the table; return how many plans are slower than a recipe."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--models", default=",".join(MODELS))
    asked.add_argument("--clusters", default=",".join(CLUSTERS))
    asked.add_argument("--ranks", type=int, default=4)
    asked.add_argument("--layers", type=int, default=2)
    options = asked.parse_args(argv)
    ratios = []
    for name, cluster in itertools.product(options.models.split(","), options.clusters.split(",")):
        try:
            for ratio, line in rows(name, cluster, options.ranks, options.layers):
                print(line, flush=True)
                ratios += [ratio] * bool(ratio)
        except Exception as e:
            print(f"{name} | {cluster} | {type(e).__name__}: {e}", flush=True)
            ratios.append(float("inf"))
    slower = sum(r > 1.001 for r in ratios)
    faster = sum(r <= 0.9 for r in ratios)
    print(f"{len(ratios)} budgets: slower in {slower}, faster by 10 % or more in {faster}")
    return slower


if __name__ == "__main__":
    raise SystemExit(bool(main()))
