"""Drawn training runs in memory tiers: every bit equals the run in memory, within the budget.

A run is drawn from one seed alone: depth, recipe and mesh, dtype and master, optimizer, how
gradients are accumulated, recomputation, frozen parameters, evaluations between steps, steps that
are skipped, where chunks are updated, the device's budget, from the least to all, and whether rows lie on a disk, with the host's
budget; a durable run is then taken up again, and has the same parameters and state.

    python -m tests.tiers.drawn --count 500           # on simulated ranks
    python -m tests.tiers.drawn --count 100 --real    # on four processes
    python -m tests.tiers.drawn --count 100 --stages  # in stages
    python -m tests.tiers.drawn --seed 1234           # one run, printed
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import optree
import torch
from torch import Tensor

import shardlib as sl
from examples.gpt import GPT, GPTConfig
from shardlib.collectives import spans_processes
from shardlib.mesh import current_mesh
from tests.workers import Pool

o = sl.optim
VOCAB, LENGTH, ROWS = 23, 8, 8

# recipe -> meshes of 1, 2 and 4 ranks, and its rules
RECIPES: dict[str, tuple[list[dict[str, int]], Any]] = {
    "ddp": ([{"data": 1}, {"data": 2}, {"data": 4}], sl.recipes.ddp),
    "megatron1d": (
        [{"data": 1, "x": 1}, {"data": 1, "x": 2}, {"data": 2, "x": 2}],
        sl.recipes.megatron1d,
    ),
    "optimus2d": (
        [{"data": 1, "x": 1, "y": 1}, {"data": 2, "x": 2, "y": 1}, {"data": 1, "x": 2, "y": 2}],
        sl.recipes.optimus2d,
    ),
    "ring": ([{"data": 1, "s": 2}, {"data": 2, "s": 2}], sl.recipes.ring),
    "fsdp": ([{"data": 1, "x": 2}, {"data": 2, "x": 2}], sl.recipes.fsdp),
}
OPTIMIZERS = {
    "adamw": lambda m: o.adamw(0.01),
    "sgd": lambda m: o.sgd(0.05, 0.9),
    "lion": lambda m: o.lion(0.01),
    "scheduled": lambda m: o.adamw(o.warmup_cosine(0.01, 2, 5)),
    "clip": lambda m: o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01)),
    "clip by value and norm": lambda m: o.chain(
        o.clip_by_value(1e-3), o.clip_by_global_norm(0.01), o.adamw(0.01)
    ),
    "skip": lambda m: o.skip_nonfinite(o.chain(o.clip_by_global_norm(0.05), o.adamw(0.01))),
    "lamb": lambda m: o.lamb(0.01),
    "adafactor": lambda m: o.adafactor(0.01),
    "muon": lambda m: o.muon(0.01, rest=o.adamw(0.01), matrices=sl.recipes.matrices(m)),
    "groups": lambda m: o.partition(
        {"a": o.adamw(0.01), "b": o.sgd(0.05, 0.9)}, [("*.bias", "a"), ("*", "b")]
    ),
    "averaged": lambda m: o.averaged(o.adamw(0.01), 0.9),
    "adam8bit": lambda m: o.adam8bit(0.01),
}


@dataclass(frozen=True)
class Run:
    """What is trained, and how; ``share`` of the budget between the least and all that is held."""

    seed: int
    recipe: str
    mesh: dict[str, int]
    layers: int
    dtype: str
    master: str | None
    optimizer: str
    around: str
    accumulate: str
    remat: str
    frozen: int
    between: str
    nan: int
    share: float
    depth: int
    steps: int
    disk: str
    update: str
    stages: str

    def text(self) -> str:
        """Print it in one line."""
        return " ".join(f"{k}={v!r}" for k, v in asdict(self).items())


def draw(seed: int, real: bool = False) -> Run:
    """Draw a run; on four ranks if they are real."""
    r = random.Random(seed)
    recipe = r.choice(list(RECIPES))
    meshes = RECIPES[recipe][0]
    mesh = meshes[-1] if real else r.choice(meshes)
    dtype, master = r.choice(
        [("float32", None), ("bfloat16", "fp32"), ("bfloat16", "bf16+rem"), ("bfloat16", None)]
    )
    optimizer = r.choice(list(OPTIMIZERS))
    return Run(
        seed, recipe, mesh,
        layers=r.choice([1, 2, 3, 4, 6]),
        dtype=dtype,
        master=master,
        optimizer=optimizer,
        around=r.choice(["", "", "", "skip_nonfinite", "loss_scale"]),
        accumulate=r.choice(["", "", "", "multi", "micro", "hand"]),
        remat=r.choice(["", "", "full", "products", "host"]),
        frozen=r.choice([0, 0, 0, 1, 3]),
        between=r.choice(["", "", "eval", "twice"]),
        nan=r.choice([-1, -1, -1, 1]) if optimizer == "skip" else -1,
        share=r.choice([0.0, 0.0, r.random() * 0.3, r.random(), 1.0]),
        depth=r.choice([0, 1, 2, 2, 3]),
        steps=r.choice([2, 3, 4]),
        disk=r.choice(["", "spare", "spare", "durable"]),
        update=r.choice(["host", "device"]),
        stages="",
    )  # fmt: skip


def in_stages(run: Run) -> Run:
    """Return the run in two stages, in micro-batches that a schedule has in flight."""
    r = random.Random(run.seed)
    return replace(
        run, recipe="ddp", mesh={"data": 2, "pipe": 2}, layers=max(run.layers, 4),
        accumulate="micro", between="", remat=r.choice(["", "full", "host"]),
        stages=r.choice(["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"]),
    )  # fmt: skip


def model(run: Run) -> GPT:
    """Make the module, with its frozen leaves."""
    made = GPT(GPTConfig(VOCAB, LENGTH, run.layers, 4, 16), run.seed).to(getattr(torch, run.dtype))
    some = list(made.parameters())
    for p in random.Random(run.seed).sample(some, run.frozen * len(some) // 4):
        p.requires_grad_(False)
    return made


def trained(run: Run, tiers: Any, steps: int | None = None) -> dict[str, Any]:
    """Train for the run's steps; return losses, norms, parameters and state."""
    net = model(run)
    rules = RECIPES[run.recipe][1](net)
    remat = {"remat": [("h.*", run.remat)]} if run.remat else {}
    # h.* matches submodules too, so name the blocks
    if remat:
        remat = {"remat": [(f"h.{i}", run.remat) for i in range(run.layers)]}
    how: dict[str, Any] = {"pad": True, **remat}
    if run.stages:
        per_rank = 1 + (run.stages == "interleaved")
        how = {**remat, "stages": sl.Stages("pipe", schedule=run.stages, per_rank=per_rank)}
    inputs = {"idx": rules.tokens, "targets": rules.tokens}
    apply, params = sl.parallelize(net, rules, inputs=inputs, **how)
    for k, p in net.named_parameters():
        params[k].requires_grad_(p.requires_grad)
    inner = OPTIMIZERS[run.optimizer](net)
    tx = o.zero(inner, "data", 3, master=run.master, tiers=tiers)
    if run.around:
        tx = getattr(o, run.around)(tx)
    if run.accumulate == "multi":
        tx = o.multi_steps(tx, 2)
    params = tx.shard(params)
    state = tx.init(params)
    g = torch.Generator().manual_seed(run.seed)
    out: dict[str, Any] = {}

    def loss_of(p: Any, idx: Any, targets: Any) -> Any:
        loss = apply(p, idx, targets=targets)
        if run.between == "twice":
            loss = loss + 0.5 * apply(p, targets, targets=idx)
        return loss

    micro = {"microbatches": 4 if run.stages else 2} if run.accumulate == "micro" else {}
    vg = sl.value_and_grad(loss_of, into=tx, **micro)
    for i in range(run.steps if steps is None else steps):
        before: Any = None
        for half in range(2 if run.accumulate in ("multi", "hand") else 1):
            idx, targets = (torch.randint(VOCAB, (ROWS, LENGTH), generator=g) for _ in range(2))
            loss, grads = vg(params, idx, targets)
            out[f"loss {i} {half}"] = loss
            if run.between == "eval":
                with torch.no_grad():
                    out[f"eval {i} {half}"] = apply(params, targets, targets=idx)
            if i == run.nan:
                grads = optree.tree_map(lambda g: g * float("nan"), grads)
            if run.accumulate == "hand" and not half:
                before = grads
                continue
            if before is not None:
                grads = optree.tree_map(torch.add, before, grads)
            params, state, info = o.step(tx, params, grads, state, norm=True)
            out |= {
                f"norm {i} {half}": info.norm,
                f"rate {i}": info.lr,
                f"skipped {i}": info.skipped,
            }
        del grads, before
    out |= {f"param {n}": x for n, x in o.state_dict(params).items()}
    out |= {f"state {n}": x for n, x in o.state_dict(state).items()}
    return {n: _plain(x) for n, x in out.items()}


def _plain(x: Any) -> Any:
    x = sl.unshard(x) if isinstance(x, sl.ShardedTensor) else x
    return x.detach().clone() if isinstance(x, Tensor) else x


def check(run: Run) -> None:
    """Train in memory and in tiers.  Raises: AssertionError for a bit that differs."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = trained(run, None)
        try:
            probe = o.Tiers(device=1, update=run.update)
            trained(run, probe)
            raise AssertionError("a device of one byte")
        except sl.ShardError as e:
            least = int(e.fix.split("device=")[-1].strip(" )"))
        how: dict[str, Any] = {"depth": run.depth, "update": run.update}
        free = o.Tiers(**how)
        try:
            found = trained(run, free)
        except sl.errors.Unsupported as e:
            whole = run.optimizer in ("adafactor", "clip by value and norm", "adam8bit")
            assert "the device holds one" in str(e) and whole and run.update == "device", e
            return
        wrong = differing(want, found)
        assert not wrong, f"without a budget: {wrong[:6]}"
        most = max(free.ledger.peak["device"], least)
        budget = int(least + run.share * (most - least))
        while True:
            try:
                tiers = o.Tiers(device=budget, **how)
                found = trained(run, tiers)
                break
            except sl.ShardError as e:
                # what is saved on the host comes back beside what the least is for
                assert run.remat == "host" and "do not fit: the device tier" in str(e), e
                budget = int(e.fix.split("device=")[-1].strip(" )"))
        wrong = differing(want, found)
        assert not wrong, f"with {budget} of {least} to {most} bytes: {wrong[:6]}"
        assert tiers.ledger.peak["device"] <= budget
        if run.disk:
            check_disk(run, budget, want, free.ledger)


WHOLE = ("lamb", "adafactor", "muon", "groups", "clip by value and norm", "adam8bit")
"""Those that update all blocks at once."""


def check_disk(run: Run, device: int, want: dict[str, Any], free: Any) -> None:
    """Train with rows on the disk.  Raises: AssertionError for a bit that differs."""
    durable = run.disk == "durable" and not run.around
    real = spans_processes(current_mesh())
    path = where(os.getppid() if real else os.getpid(), run)
    try:
        some = {"activations": free.peaks["host"]["activations"] or None}
        probe = o.Tiers(host=1, disk=path, durable=durable, update=run.update, **some)
        try:
            trained(run, probe)
            raise AssertionError("a host of one byte")
        except sl.errors.Unsupported as e:
            assert "lie in no bucket, and no row" in str(e) and durable, e
            return
        except sl.ShardError as e:
            least = int(e.fix.split("host=")[1].split(",")[0])
        most = free.peak["host"]
        host = least + free.peaks["host"]["gradients"] + int(run.share * max(most - least, 0))
        how: dict[str, Any] = {"device": device, "depth": run.depth, "update": run.update}
        how |= {"host": host, "disk": path} | some
        tiers = o.Tiers(**how, durable=durable)
        try:
            wrong = differing(want, trained(run, tiers))
        except sl.errors.Unsupported as e:
            assert "all blocks at once" in str(e) and run.optimizer in WHOLE, e
            return
        except sl.ShardError as e:
            # the budget is for one gradient of each parameter
            more = run.accumulate or run.between == "twice"
            assert "do not fit: the host tier" in str(e) and more, e
            if run.accumulate == "micro" and run.between != "twice":
                said = re.findall(r"(host|activations)=(\d+)", e.fix)
                tiers = o.Tiers(**how | {name: int(n) for name, n in said}, durable=durable)
                try:
                    wrong = differing(want, trained(run, tiers))
                except sl.errors.Unsupported as other:
                    assert "all blocks at once" in str(other) and run.optimizer in WHOLE, other
                    return
                assert not wrong, f"with {e.fix}: {wrong[:6]}"
            return
        assert not wrong, f"with {host} bytes of host memory of {least} to {most}: {wrong[:6]}"
        assert tiers.ledger.peak["host"] <= host and tiers.ledger.peak["device"] <= device
        if durable:
            tiers = o.Tiers(**how, durable=True, resume=True)
            again = trained(run, tiers, 0)
            wrong = differing({n: want[n] for n in again}, again)
            assert not wrong, f"taken up with {host} bytes of host memory: {wrong[:6]}"
    finally:
        if not real:
            shutil.rmtree(path, ignore_errors=True)


def where(process: int, run: Run) -> str:
    """Return a directory that the ranks of a process share."""
    return os.path.join(tempfile.gettempdir(), f"shardlib-drawn-{process}-{run.seed}")


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """List the names of what is not the same, bit for bit."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    # a digest of buckets, which have no hops over one rank in tiers
    return [n for n, x in a.items() if not (n.endswith("made_for") or _same(x, b[n]))]


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    if not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    # NaNs too are the same bits
    bits = (t.reshape(-1).view(torch.uint8) for t in (x, y))
    return torch.equal(x, y) or torch.equal(*bits)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=500)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--seed", type=int)
    p.add_argument("--real", action="store_true", help="on four processes")
    p.add_argument("--stages", action="store_true", help="in two stages of two ranks")
    a = p.parse_args(argv)
    seeds = [a.seed] if a.seed is not None else list(range(a.start, a.start + a.count))
    pool, wrong, began = Pool(4) if a.real else None, 0, time.monotonic()
    for seed in seeds:
        run = draw(seed, a.real)
        if a.stages:
            run = in_stages(run)
        if a.seed is not None:
            print(run.text())
        try:
            if pool is not None:
                try:
                    pool.run(check, run, **run.mesh)
                finally:
                    shutil.rmtree(where(os.getpid(), run), ignore_errors=True)
            else:
                with sl.simulate(**run.mesh) if pool is None else nullcontext():
                    check(run)
        except Exception as e:
            wrong += 1
            full = a.seed is not None
            text = "".join(traceback.format_exception(e)) if full else f"{type(e).__name__}: {e}"
            print(f"WRONG {run.text()}\n  {text[-6000:]}", flush=True)
    if pool is not None:
        pool.close()
    print(f"{len(seeds)} runs, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
