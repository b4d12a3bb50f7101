"""What the host waits for, and what it uploads, in a step of training.

Each row trains a small model of transformers for three steps on simulated ranks, on a device whose
waits are counted as they happen: the pretend accelerator of tests/accelerator, for which g++ is
needed.  ``sl.trace(waits=True)`` must count the same.  The batch comes from ``sl.data``; its
uploads stand apart.

    python -m benchmarks.waits [--models gpt2,llama] [--rows clip,ring] [--lines]
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.collectives.count import listed

__all__ = ["ROWS", "Found", "Row", "main", "measured", "table"]

o = sl.optim


@dataclass(frozen=True)
class Row:
    """A way to train: a recipe with its arguments, a mesh, and what is done beside."""

    recipe: str
    mesh: Mapping[str, int]
    features: str = ""
    optimizer: Callable[[nn.Module], Any] = lambda model: o.adamw(1e-3)
    stage: int = 0
    every: int = 1
    half: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    remat: str = ""

    @property
    def name(self) -> str:
        """The recipe, and what is done beside."""
        return f"{self.recipe} {self.features}".strip()


def _clipped(model: nn.Module) -> Any:
    return o.chain(o.clip_by_global_norm(1.0), o.adamw(1e-3))


def _muon(model: nn.Module) -> Any:
    return o.muon(1e-3, rest=o.adamw(1e-3), matrices=sl.recipes.matrices(model))


_FLAT, _PLANE = {"data": 2, "x": 2}, {"data": 2, "x": 2, "y": 2}

ROWS = [
    Row("megatron1d", _FLAT),
    Row("optimus2d", _PLANE),
    Row("tesseract", {"d": 2, "x": 2, "y": 2}),
    Row("cube3d", {"x": 2, "y": 2, "z": 2}),
    Row("ring", {"data": 2, "s": 2}),
    Row("fsdp", _FLAT),
    Row("ddp", {"data": 4}),
    Row("megatron1d", _FLAT, "sequence", given={"sequence": True}),
    Row("ring", {"data": 2, "s": 2}, "documents", given={"documents": (0, 5, 11, 16)}),
    Row("ddp", {"data": 4}, "zero 1", stage=1),
    Row("ddp", {"data": 4}, "zero 2", stage=2),
    Row("ddp", {"data": 4}, "zero 3", stage=3),
    Row("megatron1d", _FLAT, "clip", _clipped),
    Row("megatron1d", _FLAT, "zero 2, clip", _clipped, stage=2),
    Row("ddp", {"data": 4}, "zero 3, clip", _clipped, stage=3),
    Row("megatron1d", _FLAT, "skip_nonfinite, clip", lambda model: o.skip_nonfinite(_clipped(model))),
    Row("megatron1d", _FLAT, "half precision, loss_scale, clip", lambda model: o.loss_scale(_clipped(model)),
        half=True),
    Row("ddp", {"data": 4}, "zero 2, half precision, loss_scale",
        lambda model: o.loss_scale(o.adamw(1e-3)), stage=2, half=True),
    Row("megatron1d", _FLAT, "accumulation", lambda model: o.multi_steps(_clipped(model), 2), every=2),
    Row("ddp", {"data": 4}, "zero 2, accumulation", lambda model: o.multi_steps(_clipped(model), 2), stage=2,
        every=2),
    Row("megatron1d", _FLAT, "Muon", _muon),
    Row("ddp", {"data": 4}, "zero 2, Muon", _muon, stage=2),
    Row("megatron1d", _FLAT, "remat", remat="full"),
    Row("optimus2d", _PLANE, "remat on the host", remat="host"),
    Row("optimus2d", _PLANE, "zero 2, clip, remat, accumulation",
        lambda model: o.multi_steps(_clipped(model), 2), stage=2, every=2, remat="full"),
]  # fmt: skip


@dataclass
class Found:
    """What a row's third step did: as the device counted, and as ``sl.trace`` did."""

    waits: int
    uploads: int
    batch: int
    traced: tuple[int, int]
    lines: str
    losses: list[float]


def models(layers: int = 2) -> dict[str, Callable[[], nn.Module]]:
    """Return what makes each model."""
    import transformers

    transformers.logging.set_verbosity_error()
    drops: dict[str, Any] = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
    small = transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=layers, n_head=4, **drops
    )
    llama = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return {
        "gpt2": lambda: transformers.GPT2LMHeadModel(small),
        "llama": lambda: transformers.LlamaForCausalLM(llama),
    }


def measured(
    make: Callable[[], nn.Module],
    row: Row,
    device: torch.device,
    counting: Callable[[], Any],
    steps: int = 3,
    mesh: Any = None,
) -> Found:
    """Train for ``steps`` steps of a row, and say what the last made the host wait for.

    ``counting``  a context manager that gives counts of waits, uploads and downloads.
    ``mesh``      of real ranks; by default they are simulated.
    """
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, rows = make(), torch.randint(0, 96, (128, 17))
    with mesh or sl.simulate(device=device, **row.mesh):
        sl.random.seed(0)
        rules = getattr(sl.recipes, row.recipe)(model, **row.given)
        layers = "*.h.*" if hasattr(model, "transformer") else "*.layers.*"
        apply, params = sl.parallelize(
            model,
            rules,
            inputs={"input_ids": rules.tokens},
            remat=[(layers, row.remat)] if row.remat else (),
        )
        tx = row.optimizer(model)
        if row.stage:
            tx = o.zero(tx, axis="data", stage=row.stage)
        params = tx.shard(params)
        state = tx.init(params)
        layouts = {"ids": rules.tokens, "labels": rules.labels}
        data = [{"ids": x[:-1], "labels": x[1:]} for x in rows]
        batches = iter(sl.data(data, 8, layouts, shuffle=False))
        into: dict[str, Any] = {"into": tx} if row.stage else {}

        def loss_of(p: Any, batch: Any, scale: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16, enabled=row.half):
                logits = apply(p, input_ids=batch["ids"]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
            return loss * scale, loss.detach()

        def cycle(watch: Callable[[], Any]) -> list[Any]:
            nonlocal params, state
            out = []
            for _ in range(row.every):
                with counting() as own:
                    batch = next(batches)
                with watch() as seen:
                    scale = _scale(state)
                    f = sl.value_and_grad(
                        lambda p, b=batch, s=scale: loss_of(p, b, s), has_aux=True, **into
                    )
                    (_, loss), grads = f(params)
                    params, state, _ = o.step(tx, params, grads, state)
                losses.append(loss)
                out.append((own, seen))
            return out

        losses: list[Any] = []
        for _ in range(steps - 1):
            cycle(nullcontext)
        counted = cycle(counting)
        traced = [w for _, t in cycle(lambda: sl.trace(waits=True)) for w in t.waits]
        lines = Counter(f"{w}" for _, c in counted for some in (c.waits, c.uploads) for w in some)
        return Found(
            sum(sum(c.waits.values()) for pair in counted for c in pair),
            sum(sum(c.uploads.values()) for _, c in counted),
            sum(sum(c.uploads.values()) for c, _ in counted),
            (sum(w.kind == "wait" for w in traced), sum(w.kind == "upload" for w in traced)),
            "\n".join([*(f"    {n} {w}" for w, n in lines.items()), listed(traced)]),
            [float(x) for x in losses],
        )


def _scale(state: Any) -> Any:
    """Find the scale of the loss in a state: 1 where there is none."""
    while state is not None and not hasattr(state, "scale"):
        state = getattr(state, "inner", None)
    return 1.0 if state is None else state.scale


def table(found: Mapping[tuple[str, str, str], Found]) -> str:
    """Write the rows as a table of markdown."""
    head = "| model | recipe | features | waits | uploads | the batch's | `sl.trace` |"
    lines = [head, "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for (model, recipe, features), f in found.items():
        traced = f"{f.traced[0]} and {f.traced[1]}"
        lines.append(
            f"| {model} | {recipe} | {features} | {f.waits} | {f.uploads} | {f.batch} | {traced} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="gpt2,llama")
    parser.add_argument(
        "--rows", default="", help="of recipes and features with one of these words"
    )
    parser.add_argument("--lines", action="store_true", help="the lines that waited or uploaded")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    from tests.accelerator.pretend import DEVICE, counting

    words = [w for w in given.rows.split(",") if w]
    found = {}
    for name in given.models.split(","):
        for row in ROWS:
            if words and not any(w in row.name for w in words):
                continue
            key = name, row.recipe, row.features
            try:
                found[key] = measured(models()[name], row, DEVICE, counting)
            except Exception as e:  # the others are printed
                print("FAILED", *key, type(e).__name__, e)
                if given.lines:
                    raise
                continue
            if given.lines and found[key].lines:
                print(*key, found[key].lines, sep="\n")
    print(table(found))


if __name__ == "__main__":
    main()
