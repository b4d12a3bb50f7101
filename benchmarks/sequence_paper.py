"""The setting of the sequence-parallelism paper on paper: the largest batch and length that fit.

BERT base in 16 GB per device, tensor parallelism over 12 ranks (it has 12 heads) against Ring
Self-Attention over 64 (arXiv 2105.13120, abstract: 13.7 times the batch, 3.0 times the length).
Memory is counted by ``sl.explain`` running the whole training step on shapes alone; nothing here is
a formula for BERT.  Then the same count is held against what a step takes on this machine.

Assumptions: fp32, Adam (16 bytes per parameter, gradients
             among them), no recomputation, no dropout,
1 GiB of each device taken by the framework; the vocabulary split over the tensor-parallel ranks and
filled up to a multiple of them; attention's probabilities saved whole, as in 2021, in both; length
at a batch of 64, batch at a length of 512; whole parameters on each rank of the ring.

    python -m benchmarks.sequence_paper [--memory 16] [--only batch]
"""

import argparse
import gc
import math
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from examples.gpt import GPT, GPTConfig

Recipe = Callable[[Any], Any]

TOLD = {"batch": "batch of 512 tokens", "length": "length at a batch of 64"}
PUBLISHED = {"batch": 13.7, "length": 3.0}


def bert(length: int) -> Any:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30528,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.device("meta"):
        return transformers.BertForMaskedLM(config)


def needs(
    mesh: dict[str, int], recipe: Recipe, batch: int, length: int, algorithm: str = ""
) -> int:
    """Bytes of one rank in a training step: parameters, two
    moments of Adam, and the step's own peak.
    """
    model = bert(length)
    with sl.record(**mesh):
        rules = recipe(model)
        apply, params = sl.parallelize(
            model, rules, inputs={"input_ids": rules.tokens, "labels": rules.labels}
        )
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        with sl.algorithm(attention=algorithm) if algorithm else nullcontext():
            plan = sl.explain(
                lambda p, i, t: apply(p, input_ids=i, labels=t).loss, params, (ids, ids)
            )
    return 3 * plan.parameters + plan.transient


def most(need: Callable[[int], int], room: int, unit: int, first: int = 1) -> int:
    """The largest multiple of ``unit`` that needs at most ``room`` bytes; 0 if none does.

    ``first``  of the guesses, which fits unless it is 1.

    A step on paper takes a second, and memory grows almost in proportion: each guess is where a
    line through two that are known leaves no room (regula falsi; the Illinois rule halves the side
    that stays).
    """

    def spare(n: int) -> float:
        return float(room - need(n * unit))

    low, left = first, spare(first)
    if left < 0:
        return 0
    high, lack = 2 * first, -spare(2 * first)
    while lack <= 0:
        step = (left + lack) / (high - low)  # none while what hangs on no batch is the most
        more = math.ceil(-lack / step) if step > 0 else high
        low, left, high = high, -lack, high + 1 + more
        lack = -spare(high)
    while high - low > 1:
        line = low + int((high - low) * left / (left + lack))
        guess = min(max(line, low + 1), high - 1)
        found = spare(guess)
        if found >= 0:
            low, left, lack = guess, found, lack / 2
        else:
            high, lack, left = guess, -found, left / 2
    return low * unit


def ring(model: Any) -> Any:
    return sl.recipes.ring(model, schedule="contiguous")


def _growth(length: int, embed: int, layers: int) -> tuple[int, int]:
    """(on paper, here): bytes of one training step of the
    example's GPT on a ring of this mesh's ranks.
    """
    torch.set_num_threads(1)
    model = GPT(GPTConfig(ctx=length, layers=layers, heads=4, embed=embed))
    rules = sl.recipes.ring(model)
    apply, params = sl.parallelize(
        model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
    )
    ids = torch.zeros(1, length, dtype=torch.int64)
    gradient = sl.value_and_grad(lambda p: apply(p, ids, ids))
    gradient(params)  # libraries load, buffers of the network are made
    gc.collect()
    dist.barrier()
    with open("/proc/self/status") as status:
        before = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the high-water mark starts anew
    gradient(params)
    with open("/proc/self/status") as status:
        after = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return sl.explain(lambda p, i, t: apply(p, i, t), params, (ids, ids)).transient, after - before


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--memory", type=float, default=16.0, help="GB of a device")
    arguments.add_argument("--only", nargs="*", choices=[*TOLD, "here"], default=[*TOLD, "here"])
    args = arguments.parse_args()
    warnings.filterwarnings("ignore")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed tensors leave the process
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    room = int(args.memory * 2**30) - 2**30
    if sought := [what for what in TOLD if what in args.only]:
        try:
            import transformers  # noqa: F401
        except ImportError:
            print("the paper's setting needs transformers: pip install transformers")
        else:
            _paper(room, args.memory, sought)
    if "here" in args.only:
        _here()


def _here() -> None:
    """What a step takes on this machine, over what it takes on paper."""
    for length, embed, layers in ((8192, 128, 4), (16384, 64, 2)):
        ranks = sl.launch(_growth, length, embed, layers, s=4, timeout=600)
        on_paper, here = max(ranks, key=lambda r: r[1])
        print(
            f"a step of GPT ({layers} layers of {embed}, {length} tokens) on a ring of 4: "
            f"{on_paper / 1e6:.1f} MB on "
            f"paper, {here / 1e6:.1f} MB here, {here / on_paper:.2f}",
            flush=True,
        )


def _largest(mesh: dict[str, int], recipe: Recipe, algorithm: str, room: int, what: str) -> int:
    """The largest batch of 512 tokens, or the largest length at a batch of 64."""
    torch.set_num_threads(1)
    if what == "batch":
        return most(lambda b: needs(mesh, recipe, b, 512, algorithm), room, 16)
    unit = math.lcm(*mesh.values()) if "s" in mesh else 1
    return most(lambda n: needs(mesh, recipe, 64, n, algorithm), room, max(64, unit))


def _paper(room: int, memory: float, sought: list[str]) -> None:
    contestants: dict[str, tuple[dict[str, int], Recipe, str]] = {
        "tensor parallel 12": ({"x": 12}, sl.recipes.megatron1d, ""),
        "sequence parallel 64, rsa": ({"s": 64}, ring, "rsa"),
        "sequence parallel 64, ring": ({"s": 64}, ring, "ring"),
    }
    found: dict[str, dict[str, int]] = {name: {} for name in contestants}
    print(f"BERT base, {memory:g} GB per rank, two searches at a time", flush=True)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=fork) as pool:
        asked = {
            pool.submit(_largest, *case, room, what): (name, what)
            for name, case in contestants.items()
            for what in sought
        }
        for done in as_completed(asked):
            name, what = asked[done]
            found[name][what] = done.result()
            print(f"  {name:<28} {TOLD[what]:<24}{done.result():>7}", flush=True)
    base = found.pop("tensor parallel 12")
    for name, mine in found.items():
        for what in sought:
            print(f"  {name}: {mine[what] / base[what]:.1f} times the {what} "
                  f"(paper {PUBLISHED[what]})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
