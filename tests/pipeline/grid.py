"""Every schedule with every recipe, and modules of the zoo, in stages: equal to one process.

    python -m tests.pipeline.grid           # schedules x recipes on 4 and 8 processes
    python -m tests.pipeline.grid --zoo     # benchmarks/zoo.py at pipe=2, 4, 8, simulated

A case that is refused by name is counted apart, with its reason.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import shardlib as sl
from benchmarks.models import logits_of
from benchmarks.zoo import WHOLE, ZOO
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
    return logits_of(out).square().mean()


def off(module: nn.Module, inputs: dict[str, Any], rules: Any, micros: int, **how: Any) -> float:
    """Return the largest error of the loss and of the gradients held here, relative to the largest.

    ``how``  the arguments of ``sl.Stages``.
    """
    try:
        want = loss_of(module(**inputs))
    except RuntimeError as e:
        # as of a kernel without fp64
        raise sl.ShardError(f"one process raises {e}") from e
    want.backward()
    places = {"input_ids": rules.tokens} if hasattr(rules, "tokens") else {}
    stages = sl.Stages("pipe", example=inputs, **how)
    apply, params = sl.parallelize(module, rules, inputs=places, stages=stages)
    step = sl.value_and_grad(lambda p, batch: loss_of(apply(p, **batch)), microbatches=micros)
    loss, grads = step(params, inputs)
    dense = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    top = max(float(g.abs().max()) for g in dense.values())
    errors = [abs(float(loss) / float(want.detach()) - 1)]
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


def zoo() -> Iterator[Judged]:
    for name, make in ZOO.items():
        for pipe in (2, 4, 8):
            try:
                module, inputs = make()
                # a contrastive loss is no mean over rows
                whole = bool(WHOLE & inputs.keys()) or name in ("clip", "siglip")
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


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--zoo", action="store_true")
    p.add_argument("--tolerance", type=float, default=NEAR)
    a = p.parse_args()
    torch.set_num_threads(1)
    begun, found = time.monotonic(), Counter[str]()
    for name, wrong in zoo() if a.zoo else real():
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
