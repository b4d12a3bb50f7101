"""Unmodified modules under every recipe, against the same modules without shardlib.

Each cell runs a module of ``zoo`` on simulated ranks and compares its logits, its loss and every
gradient with dense ones, in fp64 at 1e-9.  A module that computes in fp32 inside, as most norms of
transformers do, has its own limit: twice what the whole module in fp32 differs by.  A cell is

    equal      as written, nothing moved that was not asked for
    implicit   equal inside ``sl.implicit(2**20)``
    refused    by an error of shardlib's even so
    WRONG      ran and differs          CRASH  another error, or no end

    python -m benchmarks.models                                    the table, the causes, the percentages
    python -m benchmarks.models --modules llama,t5 --recipes ring  a part of it: names, or beginnings of names
    python -m benchmarks.models --json out/models.json             every cell with its errors and messages
    python -m benchmarks.models --classes                          transformers' text models, made small

One process per module, so that none can stop the others.
"""

import argparse
import copy
import json
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from optree import tree_leaves
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from benchmarks import classes
from benchmarks.zoo import HIDDEN, TOKENS, WHOLE, ZOO

__all__ = ["BUDGET", "MESHES", "STATES", "Cell", "Dense", "cell", "dense", "main"]

MESHES: dict[str, dict[str, int]] = {
    "megatron1d": {"data": 2, "x": 2},
    "optimus2d": {"x": 2, "y": 2},
    "tesseract": {"d": 2, "x": 2, "y": 2},
    "cube3d": {"x": 2, "y": 2, "z": 2},
    "ring": {"s": 2},
}
STATES = ("equal", "implicit", "refused", "WRONG", "CRASH")
BUDGET = 2**20
LAST = {"optimus2d": "y", "tesseract": "y", "cube3d": "z"}
"""Where a recipe's hidden states lie in their last dimension."""


@dataclass
class Cell:
    """What came of one module under one recipe.

    ``first``  why it did not run as written, if it did not.
    """

    module: str
    recipe: str
    state: str = ""
    error: float = 0.0
    first: str = ""
    why: str = ""
    parameter: bool = False  # the refusal names a parameter
    seconds: float = 0.0


@dataclass
class Dense:
    """What a module answers without shardlib: logits, loss,
    gradients, and how far rounding moves them.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor | None]
    limit: float


def logits_of(out: Any) -> Tensor:
    """The output that a loss would read."""
    names = ("logits", "logits_per_image", "last_hidden_state")
    found = [getattr(out, n) for n in names if isinstance(getattr(out, n, None), Tensor)]
    return found[0] if found else out


def loss_of(logits: Tensor) -> Tensor:
    """Cross entropy over the last dimension of logits, mean
    squared error of anything else's width.
    """
    shape = tuple(logits.shape)
    drawn = torch.Generator().manual_seed(1)
    place = sl.layout_of(logits) if isinstance(logits, sl.ShardedTensor) else None
    if shape[-1] == 64 or len(shape) == 2:
        target = torch.randint(shape[-1], shape[:-1], generator=drawn)
        if place is not None:
            rows = " ".join(str(d) for d in place.resolve(len(shape)).dims[:-1])
            target = sl.shard(target, rows)
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())
    wanted = torch.randn(shape, dtype=logits.dtype, generator=drawn)
    if place is not None:
        wanted = sl.shard(wanted, str(place).split(" + ")[0])
    return F.mse_loss(logits, wanted)


def _run(
    module: nn.Module, inputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    module.zero_grad(set_to_none=True)
    logits = logits_of(module(**inputs))
    loss = loss_of(logits)
    loss.backward()
    grads = {
        n: None if p.grad is None else p.grad.clone()
        for n, p in module.named_parameters()
        if p.requires_grad
    }
    return logits.detach(), loss.detach(), grads


def _gap(have: Tensor, want: Tensor, floor: float = 0.0) -> float:
    top = max(float(want.abs().max()), floor) if want.numel() else 0.0
    return float((have - want).abs().max()) / (top or 1.0) if want.numel() else 0.0


def _gaps(run: Any, grads: dict[str, Any], want: Dense) -> float:
    """The largest difference, relative to each value's size; a
    gradient's at least to 1e-3 of the largest.
    """
    top = max((float(g.abs().max()) for g in want.grads.values() if g is not None), default=0.0)
    found = [_gap(run[0], want.logits), _gap(run[1], want.loss)]
    for name, g in want.grads.items():
        mine = grads.get(name)
        wanted = torch.zeros(()) if g is None else g
        found.append(_gap(torch.zeros(()) if mine is None else mine, wanted, 1e-3 * top))
    return max(float("inf") if x != x else x for x in found)


class _Rounding(TorchDispatchMode):
    """Sees whether a module in fp64 computes in fp32 inside."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found = self.found or any(
            isinstance(t, Tensor) and t.dtype == torch.float32 for t in tree_leaves(out)
        )
        return out


def dense(name: str) -> Dense:
    """The module, its answers, and its own limit."""
    torch.manual_seed(0)
    module, inputs = ZOO[name]()
    single = "grouped_mm" in name  # torch's kernel takes no fp64
    if not single:
        module = module.double()
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    with _Rounding() as rounding:
        logits, loss, grads = _run(module, inputs)
    here = Dense(module, inputs, logits, loss, grads, 1e-9)
    with torch.no_grad():
        for n, b in module.named_buffers():
            b.copy_(buffers[n])
    if single:
        here.limit = 1e-5
    elif rounding.found:
        less = {n: t.float() if t.dtype == torch.float64 else t for n, t in inputs.items()}
        rounded = _run(copy.deepcopy(module).float(), less)
        here.limit = max(1e-9, 2 * _gaps(rounded[:2], rounded[2], here))
    return here


def _places(recipe: str, rules: Any, inputs: dict[str, Tensor]) -> dict[str, str]:
    """Where inputs lie: as a recipe says of tokens and of hidden
    states, and everything else by its batch.
    """
    batch, sequence = (str(d) for d in sl.Layout.parse(rules.tokens).dims)
    places = {}
    for name in inputs:
        if name in HIDDEN:
            places[name] = f"{batch} {sequence} {LAST.get(recipe, '.')}"
        elif name in TOKENS:
            places[name] = rules.tokens
        elif name not in WHOLE:
            places[name] = f"{batch} ..."
    return places


def _attempt(name: str, recipe: str, want: Dense) -> float:
    """The largest error under a recipe.  Raises: what shardlib raises."""
    with sl.simulate(**MESHES[recipe]):
        options: dict[str, Any] = (
            {"schedule": "contiguous"} if recipe == "ring" else {"inputs": want.inputs}
        )
        rules = getattr(sl.recipes, recipe)(want.module, **options)
        apply, params = sl.parallelize(
            want.module, rules, inputs=_places(recipe, rules, want.inputs)
        )

        def loss(p: Any) -> tuple[Tensor, Tensor]:
            logits = logits_of(apply(p, **want.inputs))
            return loss_of(logits), logits

        (total, logits), grads = sl.value_and_grad(loss, has_aux=True)(params)
        frozen = {n for n, p in want.module.named_parameters() if not p.requires_grad}
        if any(
            grads.get(n) is not None and float(sl.unshard(grads[n]).abs().max()) > 0 for n in frozen
        ):
            return float("inf")
        whole = {n: None if g is None else sl.unshard(g).detach() for n, g in grads.items()}
        return _gaps((sl.unshard(logits).detach(), sl.unshard(total).detach()), whole, want)


def _line(e: BaseException) -> str:
    text = str(e).strip() or type(e).__name__
    head = text.splitlines()[0]
    return head if head.startswith(type(e).__name__) else f"{type(e).__name__}: {head}"


def cell(name: str, recipe: str, want: Dense) -> Cell:
    """Run one module under one recipe, as written and then inside ``sl.implicit``."""
    out, start = Cell(name, recipe), time.perf_counter()

    def done(state: str) -> Cell:
        out.state, out.seconds = state, time.perf_counter() - start
        return out

    for state, budget in (("equal", None), ("implicit", BUDGET)):
        torch.manual_seed(0)
        before = {
            n: t.clone() for n, t in (*want.module.named_parameters(), *want.module.named_buffers())
        }
        try:
            if budget is None:
                out.error = _attempt(name, recipe, want)
            else:
                with sl.implicit(budget):
                    out.error = _attempt(name, recipe, want)
        except sl.ShardError as e:
            out.first, out.why = out.first or str(e), str(e)
            out.parameter = any(n in str(e) for n in before if "." in n)
            continue
        except Exception as e:
            out.first, out.why = out.first or str(e), str(e)
            if state == "equal":
                out.first = _line(e)
            out.why = _line(e)
            return done("CRASH")
        after = dict((*want.module.named_parameters(), *want.module.named_buffers()))
        if any(not torch.equal(t, after[n]) for n, t in before.items()):
            out.why = "the module changed"
            return done("WRONG")
        if not out.error <= want.limit:
            out.why = f"differs by {out.error:.1e}, limit {want.limit:.1e}" + (
                f" inside {state}" if budget else ""
            )
            return done("WRONG")
        return done(state)
    return done("refused")


# ---------------------------------------------------------------- many


def _worker(name: str, recipes: list[str], queue: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        want = dense(name)
    except Exception as e:
        for recipe in recipes:
            queue.put(asdict(Cell(name, recipe, "CRASH", first=_line(e), why=f"dense: {_line(e)}")))
        return
    for recipe in recipes:
        queue.put(asdict(cell(name, recipe, want)))


def table(names: list[str], recipes: list[str], jobs: int = 2, limit: float = 90.0) -> list[Cell]:
    """Every cell, ``jobs`` modules at a time, a process each."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        __import__("peft")
    except ImportError as e:
        print(f"without {e.name}: its modules are left out")
    fork = multiprocessing.get_context("fork")
    waiting, running, found = list(names), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            queue = fork.SimpleQueue()
            process = fork.Process(target=_worker, args=(name, recipes, queue), daemon=True)
            process.start()
            running[name] = (process, queue, time.monotonic())
        for name, (process, queue, since) in list(running.items()):
            alive = process.is_alive()
            while not queue.empty():
                made = Cell(**queue.get())
                found[made.module, made.recipe] = made
                print(
                    f"{made.module:<28}{made.recipe:<12}{made.state:<10}{made.seconds:>6.1f} s",
                    flush=True,
                )
            if alive and time.monotonic() - since > limit:
                process.kill()
                alive = False
            if not alive:
                process.join()
                del running[name]
        time.sleep(0.02)
    lost = "the process ended, or ran too long"
    return [
        found.get((n, r), Cell(n, r, "CRASH", first=lost, why=lost)) for n in names for r in recipes
    ]


def _kind(text: str) -> str:
    """The first line of a reason without its numbers, so that like ones are counted together."""
    first = text.splitlines()[0][:180] if text else "no reason"
    return re.sub(r"\d+", "N", re.sub(r"'[a-z]'|(?<=split )[a-z]\b", "an axis", first))


def report(cells: list[Cell], recipes: list[str], say: Callable[[str], None] = print) -> None:
    """The table, what stands in the way of the rest, and the percentages."""
    names = list(dict.fromkeys(c.module for c in cells))
    by = {(c.module, c.recipe): c for c in cells}
    width = max(len(n) for n in names)
    say(f"{'':<{width}}  " + "  ".join(f"{r:<10}" for r in recipes))
    for n in names:
        say(f"{n:<{width}}  " + "  ".join(f"{by[n, r].state:<10}" for r in recipes))
    for state in ("WRONG", "CRASH", "refused", "implicit"):
        reasons: dict[str, list[str]] = defaultdict(list)
        for c in cells:
            if c.state == state:
                text = c.first if state == "implicit" else c.why
                reasons[_kind(text)].append(f"{c.module} x {c.recipe}")
        if reasons:
            say(f"\n{state}, by what stopped it" + (" as written" if state == "implicit" else ""))
        for text, where in sorted(reasons.items(), key=lambda kv: -len(kv[1])):
            say(f"  {len(where):3}  {text}")
            say(f"       {', '.join(where[:8])}{', ...' if len(where) > 8 else ''}")
    say("")
    for r in [*recipes, "all"]:
        mine = [c for c in cells if r in (c.recipe, "all")]
        counts = Counter(c.state for c in mine)
        within = counts["equal"] + counts["implicit"]
        strict = sum(c.error <= 1e-9 for c in mine if c.state in ("equal", "implicit"))
        say(
            f"{r:<10}  {len(mine)} cells: {100 * counts['equal'] / len(mine):.1f} % equal as "
            "written, "
            f"{100 * within / len(mine):.1f} % within implicit({BUDGET}) ({strict} cells at 1e-9); "
            f"{counts['refused']} refused "
            f"({sum(c.parameter for c in mine if c.state == 'refused')} name a parameter), "
            f"{counts['WRONG']} wrong, {counts['CRASH']} crash"
        )


def _chosen(known: list[str], wanted: str) -> list[str]:
    parts = [w.strip() for w in wanted.split(",") if w.strip()]
    exact = {w for w in parts if w in known}
    return [
        k
        for k in known
        if not parts or k in exact or any(k.startswith(w) for w in parts if w not in exact)
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--modules", default="", help="names or their beginnings, comma separated")
    parser.add_argument("--recipes", default="", help="as --modules")
    parser.add_argument("--json", type=Path, help="write every cell here")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--classes", action="store_true", help="benchmarks/classes.py, not the zoo")
    given = parser.parse_args()
    if given.classes:
        ZOO.clear()
        ZOO.update(classes.made())
    names, recipes = _chosen(list(ZOO), given.modules), _chosen(list(MESHES), given.recipes)
    start = time.monotonic()
    cells = table(names, recipes, given.jobs)
    if given.classes:
        alone = {c.module for c in cells if c.why.startswith("dense: ")}
        cells = [c for c in cells if c.module not in alone]
        print(f"{len(alone)} classes are left out: they cannot be made small, or fail on their own")
    report(cells, recipes)
    print(f"{time.monotonic() - start:.0f} s")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps([asdict(c) for c in cells], indent=1))


if __name__ == "__main__":
    main()
