"""Every schedule with every recipe, and modules of the zoo, in stages: equal to one process.

    python -m tests.pipeline.grid           # schedules x recipes on 4 and 8 processes
    python -m tests.pipeline.grid --zoo     # benchmarks/zoo.py at pipe=2, 4, 8, simulated
    python -m tests.pipeline.grid --classes --tolerance 1e-6    # benchmarks/classes.py at pipe=2
    python -m tests.pipeline.grid --deep    # models of 16 blocks, schedules x pipe=2, 3, 4, 8

A case that is refused by name is counted apart, with its reason.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import shardlib as sl
from benchmarks import classes, zoo
from benchmarks.models import logits_of
from tests.workers import Pool, WorkerError

NEAR = 1e-12
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb": 1, "zbv": 2, "dualpipev": 2}
"""Name -> stages on each rank."""

RECIPES: dict[str, Any] = {
    "whole": lambda m: [("*", "...")],
    "ddp": sl.recipes.ddp,
    "fsdp": lambda m: sl.recipes.fsdp(m, axis="data"),
    "megatron1d": sl.recipes.megatron1d,
    "sequence": lambda m: sl.recipes.megatron1d(m, sequence=True),
    "ring": sl.recipes.ring,
    "optimus2d": sl.recipes.optimus2d,
    "cube3d": sl.recipes.cube3d,
    "ring x 1d": lambda m: sl.recipes.ring(m, weights=sl.recipes.megatron1d(m)),
}
MESHES: dict[int, list[tuple[str, dict[str, int]]]] = {
    4: [
        ("whole", {"pipe": 4}), ("ddp", {"pipe": 2, "data": 2}), ("fsdp", {"pipe": 2, "data": 2}),
        ("megatron1d", {"pipe": 2, "x": 2}), ("sequence", {"pipe": 2, "x": 2}),
        ("ring", {"pipe": 2, "s": 2}),
    ],
    8: [
        ("ddp", {"pipe": 4, "data": 2}), ("megatron1d", {"pipe": 2, "data": 2, "x": 2}),
        ("optimus2d", {"pipe": 2, "x": 2, "y": 2}), ("cube3d", {"pipe": 2, "x": 1, "y": 2, "z": 2}),
        ("ring x 1d", {"pipe": 2, "x": 2, "s": 2}),
    ],
}  # fmt: skip


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=8, n_embd=16, n_head=4, vocab_size=32, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double().eval()


def loss_of(out: Any) -> Tensor:
    # some modules return fp32, whose mean over micro-batches is rounded anew
    return logits_of(out).double().square().mean()


def off(
    module: nn.Module, inputs: dict[str, Any], rules: Any, micros: int,
    loss_of: Callable[..., Any] = loss_of, parts: int = 1, **how: Any,
) -> float:  # fmt: skip
    """Return the largest error of the loss and of the gradients held here, relative to the largest.

    ``parts``  parts of the batch that one process takes, where its loss is no mean over rows.
    ``how``    the arguments of ``sl.Stages``.
    """
    want = torch.zeros(())
    try:
        for part in zip(*(x.chunk(parts) for x in inputs.values()), strict=True):
            loss = loss_of(module(**dict(zip(inputs, part, strict=True)))) / parts
            loss.backward()
            want = want + loss.detach()
    except Exception as e:
        # as of a kernel without fp64
        raise sl.ShardError(f"one process raises {e}") from e
    places = {"input_ids": rules.tokens} if hasattr(rules, "tokens") else {}
    stages = sl.Stages("pipe", example=inputs, **how)
    apply, params = sl.parallelize(module, rules, inputs=places, stages=stages)
    step = sl.value_and_grad(lambda p, batch: loss_of(apply(p, **batch)), microbatches=micros)
    loss, grads = step(params, inputs)
    dense = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    top = max(float(g.abs().max()) for g in dense.values())
    errors = [abs(float(loss) / float(want) - 1)]
    for n, g in grads.items():
        if g is None:  # frozen
            continue
        right = dense.get(n, torch.zeros(()))
        errors.append(float((sl.unshard(g) - right).abs().max()) / top)
    return max(errors)


def on_rank(recipe: str, schedule: str) -> float:
    module = gpt2()
    ids = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(0))
    how = {"schedule": schedule, "per_rank": SCHEDULES[schedule]}
    return off(module, {"input_ids": ids}, RECIPES[recipe](module), 8, **how)


Judged = tuple[str, float | str]
"""A case's name, and its error or what was raised."""


def real() -> Iterator[Judged]:
    for world, rows in MESHES.items():
        pool = Pool(world)
        for recipe, mesh in rows:
            for schedule in SCHEDULES:
                name = f"{recipe} {schedule} {mesh}"
                try:
                    yield name, max(pool.run(on_rank, recipe, schedule, seconds=180.0, **mesh))
                except WorkerError as e:
                    yield name, str(e)
        pool.close()


def of_modules(made: dict[str, Callable[[], zoo.Made]], *sizes: int) -> Iterator[Judged]:
    for name, make in made.items():
        for pipe in sizes:
            try:
                module, inputs = make()
            except Exception as e:
                yield name, f"refused: it cannot be made: {type(e).__name__}"
                continue
            try:
                # a contrastive loss is no mean over rows
                whole = bool(zoo.WHOLE & inputs.keys()) or name in ("clip", "siglip")
                micros = 1 if whole else 2
                with sl.simulate(pipe=pipe):
                    yield (
                        f"{name} pipe={pipe}",
                        off(module.double(), inputs, [("*", "...")], micros),
                    )
            except sl.ShardError as e:
                yield f"{name} pipe={pipe}", f"refused: {e.message}"
            except Exception as e:
                yield f"{name} pipe={pipe}", f"{type(e).__name__}: {e}"


# ------------------------------------------------------------ deep models

BLOCKS, SIZES = 16, (2, 3, 4, 8)
HALF = BLOCKS // 2
"""Blocks of an encoder, and of a decoder."""
LLAMA = {**zoo.SMALL, **zoo.TEXT, "num_hidden_layers": BLOCKS, "num_key_value_heads": 2}
BERT = {**zoo.BERT, "num_hidden_layers": BLOCKS}
MIXTRAL = {
    **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}  # fmt: skip
T5 = {**zoo.T5, "num_layers": HALF, "num_decoder_layers": HALF}
WHISPER = {
    **zoo.BART, "encoder_layers": HALF, "decoder_layers": HALF, "num_mel_bins": 8,
    "max_source_positions": 8, "max_target_positions": 32, "attention_dropout": 0.0,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
MAMBA = {
    **zoo.TEXT, "hidden_size": zoo.D, "state_size": 4, "num_hidden_layers": BLOCKS,
    "time_step_rank": 4, "use_cache": False,
}  # fmt: skip
DEEP: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**zoo.GPT2, "n_layer": BLOCKS}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "vit": (
        "ViTForImageClassification", "ViTConfig", {**zoo.VIT, "num_hidden_layers": BLOCKS},
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
}  # fmt: skip
"""Name -> its class, that of its configuration, and the configuration."""


BY_MICRO_BATCH = {"mixtral", "mamba"}
"""Models whose router's loss is no mean over rows, or which round in fp32 by the number of rows."""


class Skips(nn.Module):
    """Blocks whose inputs skip over three stages or more, with tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.V, zoo.D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(zoo.D, zoo.D), nn.Tanh()) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(zoo.D, zoo.V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Any) -> Any:
        seen = [self.embed(input_ids)]
        for i, block in enumerate(self.blocks):
            seen.append(seen[-1] + block(seen[-1] + seen[max(0, i - 7)]))
        return self.head(seen[-1] + seen[0])


def inputs_of(name: str, rows: int) -> dict[str, Tensor]:
    """Draw the inputs of a deep model."""
    if name == "vit":
        return {"pixel_values": zoo._seeded(rows, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": zoo._seeded(rows, 8, 16), "decoder_input_ids": zoo._ids(rows)}
    ids = {"input_ids": zoo._ids(rows)}
    return {**ids, "decoder_input_ids": zoo._ids(rows, seed=1)} if name == "t5" else ids


def deep_model(name: str) -> nn.Module:
    """Make a deep model, evaluating, with weights that are the same each time."""
    torch.manual_seed(0)
    if name == "skips":
        return Skips().double()
    model, config, settings = DEEP[name]
    made = getattr(transformers, config)(**settings)
    # torch's grouped products have no fp64
    made._experts_implementation = "eager"
    return getattr(transformers, model)(made).double().eval()


def micros_of(schedule: str, size: int, drawn: random.Random) -> int:
    """Draw a number of micro-batches up to 16 that a schedule takes."""
    if schedule == "interleaved":
        return size * drawn.randint(1, 16 // size)
    return drawn.randint(2 * size if schedule == "dualpipev" else 1, 16)


def aux_loss_of(out: Any) -> Tensor:
    """Return a loss of the outputs, with what a router adds."""
    loss = loss_of(out)
    aux = getattr(out, "aux_loss", None)
    return loss if aux is None else loss + 0.1 * aux


def deep(only: Sequence[str], seed: int) -> Iterator[Judged]:
    """Run every schedule at every size of every model, each with a drawn number of micro-batches."""
    for name in only or [*DEEP, "skips"]:
        for size, schedule in product(SIZES, SCHEDULES):
            drawn = random.Random(f"{seed} {name} {size} {schedule}")
            micros = micros_of(schedule, size, drawn)
            case = f"{name} {schedule} pipe={size} microbatches={micros}"
            inputs = inputs_of(name, micros * drawn.choice([1, 1, 2]))
            how = {"schedule": schedule, "per_rank": SCHEDULES[schedule]}
            try:
                with sl.simulate(pipe=size):
                    module = deep_model(name)
                    parts = micros if name in BY_MICRO_BATCH else 1
                    yield (
                        case,
                        off(module, inputs, [("*", "...")], micros, aux_loss_of, parts, **how),
                    )
            except sl.ShardError as e:
                yield case, f"refused: {e.message}"
            except Exception as e:
                yield case, f"{type(e).__name__}: {e}"


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--zoo", action="store_true")
    p.add_argument("--classes", action="store_true")
    p.add_argument("--deep", nargs="*", metavar="MODEL", help="all models, or these")
    p.add_argument("--seed", type=int, default=0, help="of the micro-batches of --deep")
    p.add_argument("--tolerance", type=float, default=NEAR)
    a = p.parse_args()
    torch.set_num_threads(1)
    begun, found = time.monotonic(), Counter[str]()
    if a.zoo:
        cases = of_modules(zoo.ZOO, 2, 4, 8)
    elif a.classes:
        cases = of_modules(classes.made(), 2)
    else:
        cases = real() if a.deep is None else deep(a.deep, a.seed)
    for name, wrong in cases:
        kind = "right" if isinstance(wrong, float) and wrong <= a.tolerance else "wrong"
        kind = "refused" if str(wrong).startswith("refused") else kind
        found[kind] += 1
        print(f"{name}: {kind}", flush=True)
        if kind != "right":
            print(f"  -> {str(wrong)[-600:]}", flush=True)
    counts = ", ".join(f"{n} {kind}" for kind, n in found.items())
    print(f"{counts}; {time.monotonic() - begun:.0f} s")
    return bool(found["wrong"])


if __name__ == "__main__":
    sys.exit(main())
